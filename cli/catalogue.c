/* One table of cards, one of models. Public figures of makers and public configurations of
 * models; nothing here was measured but the shares, and those on one kind of card. */
#include "catalogue.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"

#define GIB 1073741824.0
#define T 1e12
#define G 1e9

/* X(name, title, VRAM in GiB, PCIe generation, lanes, bf16 TFLOP/s, memory GB/s) NVIDIA's data
 * sheets and architecture papers. For GeForce cards bf16 is that of products summed in float32,
 * which is half of what is often quoted, and dense. */
#define CARD_LIST(X)                                                   \
    X("rtx3060", "GeForce RTX 3060 12 GB", 12, 4, 16, 25.5, 360)       \
    X("rtx3080", "GeForce RTX 3080 10 GB", 10, 4, 16, 59.5, 760)       \
    X("rtx3090", "GeForce RTX 3090", 24, 4, 16, 71.2, 936)             \
    X("rtx4060", "GeForce RTX 4060", 8, 4, 8, 30.2, 272)               \
    X("rtx4060ti", "GeForce RTX 4060 Ti 16 GB", 16, 4, 8, 44.1, 288)   \
    X("rtx4070", "GeForce RTX 4070", 12, 4, 16, 58.3, 504)             \
    X("rtx4070tisuper", "GeForce RTX 4070 Ti SUPER", 16, 4, 16, 88.2, 672) \
    X("rtx4080", "GeForce RTX 4080", 16, 4, 16, 97.5, 717)             \
    X("rtx4090", "GeForce RTX 4090", 24, 4, 16, 165.2, 1008)           \
    X("rtx5070", "GeForce RTX 5070", 12, 5, 16, 61.7, 672)             \
    X("rtx5080", "GeForce RTX 5080", 16, 5, 16, 112.6, 960)            \
    X("rtx5090", "GeForce RTX 5090", 32, 5, 16, 209.5, 1792)           \
    X("a100", "A100 80 GB PCIe", 80, 4, 16, 312, 1935)                 \
    X("h100", "H100 80 GB SXM", 80, 5, 16, 989, 3350)                  \
    X("h200", "H200 141 GB SXM", 131, 5, 16, 989, 4800)

static const card cards[] = {
#define CARD(name, title, vram, pcie, lanes, tflops, memory) \
    {name, title, (vram) * GIB, pcie, lanes, (tflops) * T, (memory) * G},
    CARD_LIST(CARD)
#undef CARD
};

/* Shares of those figures that a step is predicted with.
 *
 * Link: bytes of a lane after its line code, times this. Headers take some 24 bytes of each
 * packet of 256, and acknowledgements, flow control and the host's memory the rest. Servers
 * with an H200 reach 55.4 of 63.0 GB/s (0.88, docs/figures.md); desktop boards are taken lower.
 *
 * Compute: an H200 reaches 0.64 of its 989 TFLOP/s in plain blocks of 4,096 tokens (72.8 ms for
 * 46.2 TFLOP, README) and 0.44 in the transformer of Flux (171 ms for 74.4 TFLOP,
 * docs/figures.md), where norms, modulation and rotations take time and count no FLOP. Between
 * the two.
 *
 * Memory: for uses of few tokens, which read weights and compute little. Refresh, and rows that
 * are opened and closed.
 *
 * Budget: what is left is for activations, PyTorch, CUDA's context and a desktop. */
const double card_link_share = 0.82, card_flops_share = 0.5;
static const double MEMORY_SHARE = 0.8, BUDGET_SHARE = 0.75;

static double bytes_of_a_lane(int generation) {
    if (generation >= 5) return 3.938 * G;
    return generation == 4 ? 1.969 * G : 0.985 * G;
}

double card_link(const card *c) { return bytes_of_a_lane(c->pcie) * c->lanes * card_link_share; }
double card_flops(const card *c) { return c->flops * card_flops_share; }
double card_memory(const card *c) { return c->memory * MEMORY_SHARE; }
double card_budget(const card *c) { return c->vram * BUDGET_SHARE; }

/* ---- models */

/* Weights that are used together, in elements; the tokens that go through them in a pass; and
 * FLOPs of an attention beside them. */
typedef struct part {
    const char *name;
    double weights, tokens, attention;
} part;

typedef struct block {
    const char *name;
    int count;
    const part *parts; /* ends with a name NULL */
} block;

struct named_model {
    const char *name, *source, *pass;
    const block *blocks; /* ends with a name NULL; in the order of use */
};

#define SQUARE(n) ((double)(n) * (n))
/* Products of queries with keys and of weights with values; `width` is that of all heads
 * together. */
#define ATTEND(queries, keys, width) (4.0 * (queries) * (keys) * (width))
#define END {NULL, 0, 0, 0}
#define BLOCKS_END {NULL, 0, NULL}

/* FluxTransformer2DModel: 19 blocks of two streams, 38 of one; 24 heads of 128. 4,096 tokens of
 * a picture, 512 of text. */
#define F SQUARE(3072)
#define FLUX_ALL 4608.0
/* A block whose streams, of a picture and of so many tokens of text, meet in one attention. */
#define TWO_STREAMS(text)                                                       \
    {"modulation", 12 * F, 1, 0},                                               \
    {"image.attention", 4 * F, 4096, ATTEND(4096.0 + (text), 4096.0 + (text), 3072)}, \
    {"text.attention", 4 * F, text, 0},                                         \
    {"image.mlp", 8 * F, 4096, 0},                                              \
    {"text.mlp", 8 * F, text, 0},                                               \
    END
static const part flux_double[] = {TWO_STREAMS(512)};
static const part flux_single[] = {
    {"modulation", 3 * F, 1, 0},
    {"first", 7 * F, FLUX_ALL, ATTEND(FLUX_ALL, FLUX_ALL, 3072)},
    {"second", 5 * F, FLUX_ALL, 0},
    END};
static const block flux[] = {{"double", 19, flux_double}, {"single", 38, flux_single}, BLOCKS_END};

/* WanTransformer3DModel: 40 blocks, 40 heads of 128, MLP 13824. 33 frames of 480 x 480: 9 * 30
 * * 30 tokens; 512 of text. */
#define W 5120.0
#define WAN_TOKENS 8100.0
static const part wan_block[] = {
    {"attn1", 4 * SQUARE(W), WAN_TOKENS, ATTEND(WAN_TOKENS, WAN_TOKENS, W)},
    {"attn2.query", 2 * SQUARE(W), WAN_TOKENS, ATTEND(WAN_TOKENS, 512, W)},
    {"attn2.key", 2 * SQUARE(W), 512, 0},
    {"ffn", 2 * W * 13824, WAN_TOKENS, 0},
    END};
static const block wan[] = {{"blocks", 40, wan_block}, BLOCKS_END};

/* QwenImageTransformer2DModel: 60 blocks of two streams, 24 heads of 128. 4,096 tokens of a
 * picture, 256 of text. */
static const part qwen_block[] = {TWO_STREAMS(256)};
static const block qwen_image[] = {{"blocks", 60, qwen_block}, BLOCKS_END};

/* LTXVideoTransformer3DModel: 28 blocks, 32 heads of 64. 97 frames of 768 x 512: 13 * 16 * 24
 * tokens; 128 of text. */
#define LTX_TOKENS 4992.0
static const part ltx_block[] = {
    {"attn1", 4 * SQUARE(2048), LTX_TOKENS, ATTEND(LTX_TOKENS, LTX_TOKENS, 2048)},
    {"attn2.query", 2 * SQUARE(2048), LTX_TOKENS, ATTEND(LTX_TOKENS, 128, 2048)},
    {"attn2.key", 2 * SQUARE(2048), 128, 0},
    {"ff", 8 * SQUARE(2048), LTX_TOKENS, 0},
    END};
static const part ltx_before[] = {
    {"time_embed", 7 * SQUARE(2048), 1, 0}, {"caption_projection", 3 * SQUARE(2048), 128, 0}, END};
static const block ltx[] = {{"before", 1, ltx_before}, {"blocks", 28, ltx_block}, BLOCKS_END};

/* UNet2DConditionModel of SDXL: widths 320, 640, 1280; 1, 2 and 10 transformer layers; text 77
 * wide 2048. Two pictures at once (with and without the prompt), 128 x 128 latents. A
 * convolution's weights are used once at each place. */
#define CONV(in, out) (9.0 * (in) * (out) + 9.0 * (out) * (out) + ((in) == (out) ? 0.0 : (double)(in) * (out)))
#define PLACES(side) (2.0 * (side) * (side))
#define SELF(width, side) ATTEND(PLACES(side) / 2, PLACES(side) / 2, width) * 2 + ATTEND(PLACES(side), 77, width)
static const part sdxl_640[] = {
    {"attention", 6 * SQUARE(640), PLACES(64), SELF(640, 64)},
    {"text", 2.0 * 2048 * 640, 154, 0},
    {"ff", 12 * SQUARE(640), PLACES(64), 0},
    END};
static const part sdxl_1280[] = {
    {"attention", 6 * SQUARE(1280), PLACES(32), SELF(1280, 32)},
    {"text", 2.0 * 2048 * 1280, 154, 0},
    {"ff", 12 * SQUARE(1280), PLACES(32), 0},
    END};
static const part sdxl_down_0[] = {{"resnets", 2 * CONV(320, 320) + 9 * SQUARE(320), PLACES(128), 0}, END};
static const part sdxl_down_1[] = {{"resnets", CONV(320, 640) + CONV(640, 640) + 9 * SQUARE(640), PLACES(64), 0}, END};
static const part sdxl_down_2[] = {{"resnets", CONV(640, 1280) + CONV(1280, 1280), PLACES(32), 0}, END};
static const part sdxl_mid[] = {{"resnets", 2 * CONV(1280, 1280), PLACES(32), 0}, END};
static const part sdxl_up_0[] = {
    {"resnets", 2 * CONV(2560, 1280) + CONV(1920, 1280), PLACES(32), 0},
    {"upsample", 9 * SQUARE(1280), PLACES(64), 0},
    END};
static const part sdxl_up_1[] = {
    {"resnets", CONV(1920, 640) + CONV(1280, 640) + CONV(960, 640), PLACES(64), 0},
    {"upsample", 9 * SQUARE(640), PLACES(128), 0},
    END};
static const part sdxl_up_2[] = {{"resnets", CONV(960, 320) + 2 * CONV(640, 320), PLACES(128), 0}, END};
static const block sdxl[] = {
    {"down0", 1, sdxl_down_0},    {"down1", 1, sdxl_down_1},       {"down1.attentions", 4, sdxl_640},
    {"down2", 1, sdxl_down_2},    {"down2.attentions", 20, sdxl_1280}, {"mid", 1, sdxl_mid},
    {"mid.attentions", 10, sdxl_1280}, {"up0", 1, sdxl_up_0},      {"up0.attentions", 30, sdxl_1280},
    {"up1", 1, sdxl_up_1},        {"up1.attentions", 6, sdxl_640}, {"up2", 1, sdxl_up_2},
    BLOCKS_END};

/* LlamaForCausalLM, 8 B: 32 layers of width 4096, 8 heads of 128 for keys, MLP 14336, 128,256
 * words. One token behind 512 others. The embedding stays on the host, where its rows are read. */
static const part llama_layer[] = {
    {"attention", 2 * SQUARE(4096) + 2.0 * 4096 * 1024, 1, ATTEND(1, 512, 4096)},
    {"mlp", 3.0 * 4096 * 14336, 1, 0},
    END};
static const part llama_head[] = {{"weight", 4096.0 * 128256, 1, 0}, END};
static const block llama[] = {{"layers", 32, llama_layer}, {"lm_head", 1, llama_head}, BLOCKS_END};

/* Qwen3MoeForCausalLM, 30 B: 48 layers of width 2048, 32 heads of 128, 4 for keys, 128 experts
 * of width 768, of which 8 are used. A prompt of 512 tokens uses all experts, 32 tokens each. */
static const part moe_layer[] = {
    {"attention", 2.0 * 2048 * 4096 + 2.0 * 2048 * 512, 512, ATTEND(512, 512, 4096)},
    {"experts", 128.0 * 3 * 2048 * 768, 32, 0},
    END};
static const part moe_head[] = {{"weight", 2048.0 * 151936, 1, 0}, END};
static const block moe[] = {{"layers", 48, moe_layer}, {"lm_head", 1, moe_head}, BLOCKS_END};

static const named_model models[] = {
    {"flux", "FLUX.1-dev, the transformer", "a step of a picture of 1024 x 1024", flux},
    {"wan14b", "Wan 2.1 14B, the transformer", "a pass over 33 frames of 480 x 480", wan},
    {"qwen-image", "Qwen-Image, the transformer", "a pass over a picture of 1024 x 1024", qwen_image},
    {"ltx", "LTX-Video 2B, the transformer", "a pass over 97 frames of 768 x 512", ltx},
    {"sdxl", "SDXL, the UNet", "a step of a picture of 1024 x 1024, with guidance", sdxl},
    {"llama8b", "Llama 3.1 8B", "a token behind 512 others", llama},
    {"qwen3-moe", "Qwen3-30B-A3B", "a prompt of 512 tokens, which uses all experts", moe},
};

/* ---- looking up */

enum { CARDS = sizeof cards / sizeof *cards, MODELS = sizeof models / sizeof *models, NAME = 64 };

const card *card_at(int i) { return i < CARDS ? &cards[i] : NULL; }
const named_model *model_at(int i) { return i < MODELS ? &models[i] : NULL; }

/* Letters and digits, small. */
static void plain(const char *name, char out[NAME]) {
    size_t n = 0;
    for (; *name && n < NAME - 1; name++)
        if (isalnum((unsigned char)*name)) out[n++] = (char)tolower((unsigned char)*name);
    out[n] = '\0';
}

static bool same(const char *typed, const char *name) {
    char a[NAME], b[NAME];
    plain(typed, a);
    plain(name, b);
    const char *x = strncmp(a, "rtx", 3) ? a : a + 3, *y = strncmp(b, "rtx", 3) ? b : b + 3;
    return *x && strcmp(x, y) == 0;
}

const card *card_find(const char *name) {
    for (int i = 0; i < CARDS; i++)
        if (same(name, cards[i].name)) return &cards[i];
    return NULL;
}

const named_model *model_find(const char *name) {
    for (int i = 0; i < MODELS; i++)
        if (same(name, models[i].name)) return &models[i];
    return NULL;
}

const char *model_name(const named_model *m) { return m->name; }
const char *model_source(const named_model *m) { return m->source; }
const char *model_pass(const named_model *m) { return m->pass; }

/* ---- units */

static double seconds_of(const part *p, const card *c) {
    double flops = 2 * p->weights * p->tokens + p->attention, bytes = 2 * p->weights;
    double computing = flops / card_flops(c), reading = bytes / card_memory(c);
    return computing > reading ? computing : reading;
}

static uint32_t count_parts(const block *b) {
    uint32_t n = 0;
    while (b->parts[n].name) n++;
    return n;
}

void model_units(const named_model *m, const card *c, units *u, int64_t **out_compute_ns) {
    char name[160];
    *u = (units){.count = 0};
    for (const block *b = m->blocks; b->name; b++) {
        u->count += count_parts(b) * (uint32_t)b->count;
        u->block_count += (uint32_t)b->count;
    }
    u->unit = cli_alloc(u->count, sizeof *u->unit);
    u->blocks = cli_alloc(u->block_count, sizeof *u->blocks);
    *out_compute_ns = cli_alloc(u->count, sizeof **out_compute_ns);
    uint32_t n = 0, blocks = 0;
    for (const block *b = m->blocks; b->name; b++)
        for (int i = 0; i < b->count; i++) {
            snprintf(name, sizeof name, "%s.%d", b->name, i);
            char *of = u->blocks[blocks++] = cli_copy(name, strlen(name));
            for (const part *p = b->parts; p->name; p++, n++) {
                snprintf(name, sizeof name, "%s.%s", of, p->name);
                uint64_t bytes = ((uint64_t)(2 * p->weights) + 511) / 512 * 512;
                u->unit[n] = (unit){.name = cli_copy(name, strlen(name)), .block = of, .bytes = bytes};
                u->unit[n].packed = units_packed_bytes(STH_DTYPE_BF16, bytes);
                u->bytes += bytes;
                u->largest = bytes > u->largest ? bytes : u->largest;
                (*out_compute_ns)[n] = (int64_t)(1e9 * seconds_of(p, c));
            }
        }
}
