/* stagehand top: the list of top.h as text, and a terminal that shows it again and again. */
#ifndef CLI_TOP_H
#define CLI_TOP_H
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/top.h"

typedef struct top_look {
    unsigned columns, rows; /* that the text may take; 0: any */
    bool color;
    bool live;              /* it says which key ends it */
} top_look;

/* top_text.c: lines that end with a newline, for free(). Pure. */
char *top_text(const sth_top_list *list, const top_look *look);

/* top_json.c: prints it. */
void top_json(const sth_top_list *list);

/* top_live.c: until q, a signal, or the terminal's end. Returns an exit code. */
int top_live(int32_t pid, double interval_s, bool color);
/* The size of the terminal behind stdout; 80 columns and 24 rows where it does not say. */
void top_live_size(top_look *look);
#endif
