/* JSON that the commands print. Out of memory ends the tool. */
#ifndef CLI_JSON_OUT_H
#define CLI_JSON_OUT_H
#include <jansson.h>
#include <stdint.h>

#include "stagehand/plan.h"

/* Both take `value` over. */
void json_out_set(json_t *object, const char *key, json_t *value);
void json_out_push(json_t *array, json_t *value);

json_t *json_out_count(uint64_t value);
json_t *json_out_number(double value);   /* null where it is not finite */
json_t *json_out_text(const char *text); /* NULL is null; bytes that are not UTF-8 become '?' */
json_t *json_out_prediction(const sth_prediction *p);
/* Prints and lets go of `object`. */
void json_out_print(json_t *object);
#endif
