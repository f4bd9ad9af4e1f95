/* Fuzz target for texts from outside that have a grammar of their own. Input: a byte that says which, then the text:
 *   0 a size, 1 the name of a device, 2 three names to be put in order, 3 text that may be UTF-8, 4 a name in an index,
 *   5 a dtype
 *
 * Property: what is taken obeys its grammar, checked another way here; what is refused leaves the result as it was. */
#include <string.h>

#include <jansson.h>

#include "base/arith.h"
#include "base/natural.h"
#include "device/device.h"
#include "fuzz/files.h"
#include "stagehand/checkpoint.h"
#include "stagehand/util.h"
#include "store/path.h"
#include "store/utf8.h"

/* What a size is worth is said again by its number alone, and about the same by its formatted text. */
static void check_size(const char *text) {
    uint64_t bytes = 12345, again = 0;
    char plain[32], rounded[32];
    if (sth_parse_size(text, &bytes) != STH_OK) {
        CHECK(bytes == 12345 && *sth_last_error()->message);
        return;
    }
    CHECK(bytes <= INT64_MAX && strpbrk(text, "0123456789") && !strchr(text, '-'));
    snprintf(plain, sizeof plain, " %llu ", (unsigned long long)bytes);
    CHECK(sthi_parse_size(plain, &again) && again == bytes);
    sthi_format_size(bytes, rounded, sizeof rounded);
    if (strstr(rounded, " B")) return;
    CHECK(sthi_parse_size(rounded, &again) || bytes > INT64_MAX / 2);
    CHECK((double)again > (double)bytes * 0.99 - 1 && (double)again < (double)bytes * 1.01 + 1);
}

static void check_device(const char *name) {
    const sth_backend_ops *ops = NULL;
    int index = -1;
    if (sthi_backend_find(name, &ops, &index) != STH_OK) {
        CHECK(!ops && index == -1 && *sth_last_error()->message);
        return;
    }
    const char *decorated = strrchr(name, '+'); /* by what is looked at when it is opened */
    if (decorated) name = decorated + 1;
    size_t length = strcspn(name, ":");
    CHECK(ops && index >= 0 && (length == strlen(ops->backend) || !strncmp(name, "cpu", 3)));
    CHECK(index == (name[length] ? atoi(name + length + 1) : 0));
}

static int sign(int n) { return (n > 0) - (n < 0); }

static void check_order(const char *a, const char *b, const char *c) {
    int ab = sign(sthi_compare_natural(a, b)), bc = sign(sthi_compare_natural(b, c)),
        ac = sign(sthi_compare_natural(a, c));
    CHECK(sthi_compare_natural(a, a) == 0 && sign(sthi_compare_natural(b, a)) == -ab);
    CHECK((ab == 0) == (strcmp(a, b) == 0));
    if (ab <= 0 && bc <= 0) CHECK(ac <= 0 && (ac < 0 || (!ab && !bc)));
    if (ab >= 0 && bc >= 0) CHECK(ac >= 0 && (ac > 0 || (!ab && !bc)));
}

static void check_utf8(const char *text, size_t size) {
    json_t *taken = json_stringn(text, size);
    CHECK(sthi_utf8_is_text(text, size) == (taken && !memchr(text, 0, size)));
    json_decref(taken);
}

static void check_path(const char *name) {
    bool plain = *name != 0;
    for (const char *part = name; plain; part = strchr(part, '/') + 1) {
        size_t n = strcspn(part, "/");
        plain = n && !(n == 1 && part[0] == '.') && !(n == 2 && part[0] == '.' && part[1] == '.');
        if (!part[n]) break;
    }
    CHECK(sthi_path_is_plain(name) == plain);
}

static void check_dtype(const char *name) {
    int same = 0;
    for (int d = 0; d < STH_DTYPE_COUNT; d++) same += strcmp(sth_dtype_name((sth_dtype)d), name) == 0;
    CHECK(same <= 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size) return 0;
    char *text = malloc(size + 3); /* three ends, for three names */
    CHECK(text);
    memcpy(text, data + 1, size - 1);
    memset(text + size - 1, 0, 4);
    switch (data[0] % 6) {
    case 0:
        check_size(text);
        break;
    case 1:
        check_device(text);
        break;
    case 2: {
        const char *b = text + strlen(text) + 1, *c = b < text + size ? b + strlen(b) + 1 : "";
        check_order(text, b, c < text + size + 2 ? c : "");
        break;
    }
    case 3:
        check_utf8(text, size - 1);
        break;
    case 4:
        check_path(text);
        break;
    default:
        check_dtype(text);
    }
    free(text);
    return 0;
}
