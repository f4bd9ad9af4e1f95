/* The kernels that expand packed bytes, as CUDA C++ that HIP's compiler takes, too. Whoever includes this says what
 * STHI_KERNELS does with the text: gpu/compile.c makes a string of it for the run-time compiler, a test compiles it
 * for the CPU with a shim of what cards have. STHI_KERNELS_HALF gets a text that goes before it where the card's own
 * conversion to float16 is not called by name. No directives and no // comments in them: they are macros' arguments.
 *
 * The bits are those of src/quant/segment.c and four_bits.c: each operation rounded by itself, never contracted; then
 * to the dtype, to nearest, ties to even.
 *
 * By rows: a thread expands 8 codes at once, so that loads and stores of a warp are whole lines: 8 (or 4) bytes in, 16
 * (or 32) bytes out. Rows that are no multiple of 8 go one element at a time. Weights too small to matter are those.
 *
 * 4 bits of files (src/quant/four_bits.c): 256 threads make a tile of 4096 elements, `wide` columns (256, or the size
 * of H) by 4096 / wide rows. Whole blocks of H lie in it one behind the other. Of H a thread does four stages at a time
 * on 16 elements in registers; between these they lie in shared memory, with a gap for each 16 so that no two threads
 * of a half-warp meet in a bank. Then a thread takes ROWS rows by 16 / ROWS columns, four next to each other, for which
 * it reads each factor once. H of 8192 is two tiles next to each other and a last stage between them. What is rare or
 * large is a function of its own: inlined everywhere, this kernel took 25 s to compile; now it is less than one.
 *
 * LOSSLESS (docs/lossless.md): 32 threads make a tile of 1024 elements, 4 next to each other each at a time. They share
 * no memory and exchange nothing, so that it is the same whether a warp has 32 threads or 64: a thread reads the words
 * of its chunk, which are the same for all, and counts the escapes before its own in them. What a tile reads depends on
 * its number alone, but for escapes: one that lies outside is 0. */
STHI_KERNELS_HALF(
    /* base/half.h says how. */
    static __device__ unsigned sthi_f16(float x) {
        unsigned b = __float_as_uint(x); unsigned sign = (b >> 16) & 0x8000u; unsigned rest = b & 0x7fffffffu;
        if (rest > 0x7f800000u) return sign | 0x7e00u | ((rest >> 13) & 0x3ffu);
        if (rest >= 0x477ff000u) return sign | 0x7c00u;
        if (rest >= 0x38800000u) return sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13);
        if (rest < 0x33000000u) return sign;
        unsigned shift = 126u - (rest >> 23); unsigned bits = (rest & 0x7fffffu) | 0x800000u;
        unsigned whole = bits >> shift; unsigned cut = bits & ((1u << shift) - 1u);
        unsigned middle = 1u << (shift - 1u);
        return sign | (whole + (cut > middle || (cut == middle && (whole & 1u)) ? 1u : 0u));
    }
)
STHI_KERNELS(
    typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;

    enum { INT8 = 1, FP8 = 2, INT4 = 3, F32 = 0, BF16 = 1, F16 = 2 };

    template <int D> __device__ u32 half_bits(float x) {
        if (D == F16) return sthi_f16(x);
        u32 b = __float_as_uint(x);
        if ((b & 0x7fffffffu) > 0x7f800000u) return (b >> 16) | 0x40u;
        return (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    }

    __device__ float of_bf16(u32 bits) { return __uint_as_float(bits << 16); }

    /* ---- by rows */

    template <int E> struct row_scales {
        float scale; float zero;
        __device__ row_scales(const sthi_launch &l, u64 row, u32 group, u32 groups) : scale(0), zero(0) {
            if (E == INT4) {
                scale = of_bf16(((const u16 *)l.scales)[row * groups + group]);
            } else {
                scale = ((const float *)l.scales)[row];
                if (E == INT8 && l.zeros) zero = ((const float *)l.zeros)[row];
            }
        }
    };

    /* code: 8 bits, of INT4 the low 4. */
    template <int E> __device__ float value_of(u32 code, const row_scales<E> &s) {
        if (E == INT8) return __fmul_rn(__fsub_rn((float)(int)(signed char)code, s.zero), s.scale);
        if (E == INT4) return __fmul_rn((float)((int)((code & 15u) ^ 8u) - 8), s.scale);
        float magnitude = __fmul_rn(__uint_as_float((code & 0x7fu) << 20), __uint_as_float(0x7B800000u));
        return __fmul_rn(code & 0x80u ? -magnitude : magnitude, s.scale);
    }

    template <int E, int D>
    __device__ void expand_eight(u64 codes, const row_scales<E> &s, u8 *out) {
        enum { BITS = E == INT4 ? 4 : 8 };
        uint4 low; uint4 high;
        float v[8];
        for (int k = 0; k < 8; k++) v[k] = value_of<E>((u32)(codes >> (k * BITS)) & 255u, s);
        if (D == F32) {
            low.x = __float_as_uint(v[0]); low.y = __float_as_uint(v[1]);
            low.z = __float_as_uint(v[2]); low.w = __float_as_uint(v[3]);
            high.x = __float_as_uint(v[4]); high.y = __float_as_uint(v[5]);
            high.z = __float_as_uint(v[6]); high.w = __float_as_uint(v[7]);
            ((uint4 *)out)[0] = low;
            ((uint4 *)out)[1] = high;
            return;
        }
        low.x = half_bits<D>(v[0]) | half_bits<D>(v[1]) << 16;
        low.y = half_bits<D>(v[2]) | half_bits<D>(v[3]) << 16;
        low.z = half_bits<D>(v[4]) | half_bits<D>(v[5]) << 16;
        low.w = half_bits<D>(v[6]) | half_bits<D>(v[7]) << 16;
        ((uint4 *)out)[0] = low;
    }

    template <int E, int D>
    __device__ void expand_one(const u8 *row, u32 k, const row_scales<E> &s, u8 *out) {
        u32 code = E == INT4 ? (u32)(row[k / 2] >> (k % 2 * 4)) : row[k];
        float x = value_of<E>(code, s);
        if (D == F32) *(float *)out = x;
        else *(u16 *)out = (u16)half_bits<D>(x);
    }

    template <int E, int D> __device__ void expand_rows(const sthi_launch &l) {
        const u32 each = D == F32 ? 4 : 2;
        const u32 groups = (l.cols + 63) / 64;
        for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < l.count; i += gridDim.x * blockDim.x) {
            u32 row = i / l.across;
            u32 k = (i - row * l.across) * (l.by_eight ? 8 : 1);
            const u8 *from = (const u8 *)l.codes + row * l.stride;
            u8 *out = (u8 *)l.place + ((u64)row * l.cols + k) * each;
            row_scales<E> s(l, row, k / 64, groups);
            if (!l.by_eight) expand_one<E, D>(from, k, s, out);
            else if (E == INT4) expand_eight<E, D>(*(const u32 *)(from + k / 2), s, out);
            else expand_eight<E, D>(*(const u64 *)(from + k), s, out);
        }
    }

    template <int E> __device__ void expand_as(const sthi_launch &l) {
        if (l.dtype == F32) expand_rows<E, F32>(l);
        else if (l.dtype == BF16) expand_rows<E, BF16>(l);
        else expand_rows<E, F16>(l);
    }

    extern "C" __global__ void __launch_bounds__(256) sthi_expand_int8(sthi_launch l) { expand_as<INT8>(l); }
    extern "C" __global__ void __launch_bounds__(256) sthi_expand_fp8(sthi_launch l) { expand_as<FP8>(l); }
    extern "C" __global__ void __launch_bounds__(256) sthi_expand_int4(sthi_launch l) { expand_as<INT4>(l); }

    /* ---- lossless */

    enum { LANES = 32, CHUNK = 128, CHUNKS = 8 };

    template <int D> __device__ u32 joined(u32 exponent, u32 raw, const u32 *bytes, u32 j) {
        u32 low = (bytes[0] >> (8 * j)) & 255u;
        if (D == BF16) return (low & 128u) << 8 | exponent << 7 | (low & 127u);
        if (D == F16) return (raw & 4u) << 13 | (exponent & 31u) << 10 | (raw & 3u) << 8 | low;
        u32 middle = (bytes[D == F32 ? 1 : 0] >> (8 * j)) & 255u;
        u32 high = (bytes[D == F32 ? 2 : 0] >> (8 * j)) & 255u;
        return (high & 128u) << 24 | exponent << 23 | (high & 127u) << 16 | middle << 8 | low;
    }

    /* Elements [at, at + 4). */
    template <int D> __device__ void store_joined(const sthi_launch &l, u64 at, const u32 *v) {
        if (at + 4 <= l.cols) {
            if (D == F32) {
                uint4 all; all.x = v[0]; all.y = v[1]; all.z = v[2]; all.w = v[3];
                *(uint4 *)(l.place + at * 4) = all;
            } else {
                uint2 halves; halves.x = v[0] | v[1] << 16; halves.y = v[2] | v[3] << 16;
                *(uint2 *)(l.place + at * 2) = halves;
            }
            return;
        }
        for (u32 j = 0; j < 4; j++) {
            if (at + j >= l.cols) break;
            if (D == F32) *(u32 *)(l.place + (at + j) * 4) = v[j];
            else *(u16 *)(l.place + (at + j) * 2) = (u16)v[j];
        }
    }

    template <int D> __device__ void expand_lossless(const sthi_launch &l) {
        enum { BYTES = D == F32 ? 3 : 1, PLANES = D == F16 ? 6 : 3, WORDS = 4 * PLANES,
               RECORD = CHUNKS * (CHUNK * BYTES + 4 * WORDS) };
        const u64 table_at = l.codes + (u64)l.count * RECORD;
        const u64 table = *(const u64 *)table_at;
        const u32 *starts = (const u32 *)(table_at + 16);
        const u8 *escapes = (const u8 *)(table_at + 16 + ((u64)l.count * 4 + 15) / 16 * 16);
        const u32 lane = threadIdx.x % LANES;
        const u32 before = (1u << lane) - 1u;
        const u32 step = gridDim.x * (blockDim.x / LANES);
        for (u32 t = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES; t < l.count; t += step) {
            const u64 record = l.codes + (u64)t * RECORD;
            u32 escape = starts[t];
            for (u32 c = 0; c < CHUNKS; c++) {
                u32 bytes[BYTES]; u32 w[WORDS]; u32 v[4];
                for (u32 b = 0; b < BYTES; b++)
                    bytes[b] = ((const u32 *)record)[(c * BYTES + b) * LANES + lane];
                for (u32 k = 0; k < PLANES; k++) {
                    uint4 four = ((const uint4 *)(record + CHUNKS * CHUNK * BYTES))[c * PLANES + k];
                    w[4 * k] = four.x; w[4 * k + 1] = four.y; w[4 * k + 2] = four.z; w[4 * k + 3] = four.w;
                }
                for (u32 j = 0; j < 4; j++) {
                    const u32 *of = w + j * PLANES;
                    u32 code = ((of[0] >> lane) & 1u) | ((of[1] >> lane) & 1u) << 1 | ((of[2] >> lane) & 1u) << 2;
                    u32 raw = 0;
                    if (D == F16)
                        raw = ((of[PLANES - 3] >> lane) & 1u) | ((of[PLANES - 2] >> lane) & 1u) << 1 |
                              ((of[PLANES - 1] >> lane) & 1u) << 2;
                    u32 exponent = (u32)(table >> (8 * code)) & 255u;
                    u32 escaped = of[0] & of[1] & of[2];
                    if (escaped) {
                        u32 at = escape + (u32)__popc(escaped & before);
                        if (code == 7u) exponent = at < l.escapes ? escapes[at] : 0u;
                        escape += (u32)__popc(escaped);
                    }
                    v[j] = joined<D>(exponent, raw, bytes, j);
                }
                store_joined<D>(l, (u64)t * (CHUNKS * CHUNK) + c * CHUNK + lane * 4, v);
            }
        }
    }

    extern "C" __global__ void __launch_bounds__(256) sthi_expand_lossless(sthi_launch l) {
        if (l.dtype == F32) expand_lossless<F32>(l);
        else if (l.dtype == BF16) expand_lossless<BF16>(l);
        else expand_lossless<F16>(l);
    }

    /* ---- 4 bits of files */

    enum { THREADS = 256, TILE = 4096, MOST_STAGES = 12, PADDED_TILE = TILE + TILE / 16 };

    __device__ u32 padded(u32 i) { return i + i / 16; }

    struct sthi_tile { u32 row; u32 col; u32 wide; };

    __device__ float scale_of(const sthi_launch &l, u64 row, u32 col) {
        if (!l.nvfp4) return of_bf16(*(const u16 *)(l.scales + col / l.group * l.pitch + 2 * row));
        u64 tiles = (l.cols + 63) / 64;
        u64 at = (row / 128 * tiles + col / 64) * 512 + row % 32 * 16 + row / 32 % 4 * 4 + col / 16 % 4;
        u32 code = ((const u8 *)l.scales)[at];
        return code ? __uint_as_float(((code >> 3) + 120u) << 23 | (code & 7u) << 20) : 0.0f;
    }

    /* Twice the magnitudes of e2m1 are 0, 1, 2, 3, 4, 6, 8, 12. */
    __device__ float four_bits(const sthi_launch &l, u32 code, float scale) {
        if (!l.nvfp4) return __fmul_rn((float)((int)(code ^ 8u) - 8), scale);
        float magnitude = __fmul_rn((float)(0xC8643210u >> (code & 7u) * 4 & 15u), 0.5f);
        return __fmul_rn(__fmul_rn(code & 8u ? -magnitude : magnitude, scale), l.factor);
    }

    /* Elements [16 i, 16 i + 16) of the tile. */
    __device__ void read_codes(const sthi_launch &l, const sthi_tile &t, u32 i, double *x) {
        u64 row = t.row + i * 16 / t.wide;
        u32 col = t.col + i * 16 % t.wide;
        bool there = row < l.rows && col < l.cols;
        u64 codes = there ? *(const u64 *)(l.codes + row * l.stride + col / 2) : 0;
        float scale = there ? scale_of(l, row, col) : 0.0f;
        for (int k = 0; k < 16; k++) x[k] = four_bits(l, (u32)(codes >> (k * 4)) & 15u, scale);
    }

    __device__ void butterflies(double *x, u32 stages) {
        for (u32 s = 0; s < 4; s++) {
            if (s >= stages) break;
            for (u32 i = 0; i < 16; i++) {
                u32 half = 1u << s;
                if (i & half) continue;
                double a = x[i]; double b = x[i | half];
                x[i] = __dadd_rn(a, b);
                x[i | half] = __dsub_rn(a, b);
            }
        }
    }

    /* The tile's values times H, not divided, into shared memory. */
    static __device__ __noinline__ void rotate(const sthi_launch &l, const sthi_tile &t, double *shared) {
        u32 stages = l.stages < MOST_STAGES ? l.stages : (u32)MOST_STAGES;
        u32 i = threadIdx.x;
        double x[16];
        read_codes(l, t, i, x);
        butterflies(x, stages);
        for (u32 k = 0; k < 16; k++) shared[padded(16 * i + k)] = x[k];
        __syncthreads();
        for (u32 done = 4; done < stages; done += 4) {
            u32 first = i >> done << (done + 4) | (i & ((1u << done) - 1u));
            for (u32 k = 0; k < 16; k++) x[k] = shared[padded(first + (k << done))];
            butterflies(x, stages - done);
            for (u32 k = 0; k < 16; k++) shared[padded(first + (k << done))] = x[k];
            __syncthreads();
        }
    }

    /* Which elements of the tile a thread ends with: ROWS rows from `row` on, in each 4 from every col + j * step. */
    template <int ROWS> struct sthi_share {
        u32 row; u32 col; u32 step;
        __device__ sthi_share(const sthi_tile &t) {
            u32 beside = t.wide * ROWS / 16;
            row = threadIdx.x / beside * ROWS;
            col = threadIdx.x % beside * 4;
            step = beside * 4;
        }
    };

    template <int ROWS> __device__ void take(const double *shared, const sthi_tile &t, double *x) {
        sthi_share<ROWS> s(t);
        for (int i = 0; i < 16; i++) {
            u32 at = (s.row + i / (16 / ROWS)) * t.wide + s.col + i % (16 / ROWS) / 4 * s.step + i % 4;
            x[i] = shared[padded(at)];
        }
    }

    /* Ranks r and r + 1 of a factor's row, 0 behind the last: that adds nothing to a sum, not even a sign. */
    static __device__ __noinline__ u32 two_factors(const u16 *row, u32 r, u32 rank) {
        return (r < rank ? row[r] : 0u) | (r + 1 < rank ? (u32)row[r + 1] << 16 : 0u);
    }

    /* Ranks [r, r + 8). */
    __device__ void read_factors(const u16 *row, u32 r, u32 rank, float *out) {
        uint4 bits;
        if (rank % 8 == 0) {
            bits = *(const uint4 *)(row + r);
        } else {
            bits.x = two_factors(row, r, rank); bits.y = two_factors(row, r + 2, rank);
            bits.z = two_factors(row, r + 4, rank); bits.w = two_factors(row, r + 6, rank);
        }
        out[0] = of_bf16(bits.x & 0xffffu); out[1] = of_bf16(bits.x >> 16);
        out[2] = of_bf16(bits.y & 0xffffu); out[3] = of_bf16(bits.y >> 16);
        out[4] = of_bf16(bits.z & 0xffffu); out[5] = of_bf16(bits.z >> 16);
        out[6] = of_bf16(bits.w & 0xffffu); out[7] = of_bf16(bits.w >> 16);
    }

    /* sums[]: in the order of take(). Rows and columns beyond the last are read as the last ones. */
    template <int ROWS>
    __device__ void low_rank(const sthi_launch &l, const sthi_tile &t, const sthi_share<ROWS> &s, float *sums) {
        const u32 last_row = (u32)l.rows - 1;
        for (int i = 0; i < 16; i++) sums[i] = 0.0f;
        for (u32 r = 0; r < l.rank; r += 8) {
            float up[ROWS][8];
            for (int b = 0; b < ROWS; b++) {
                u32 row = t.row + s.row + b;
                read_factors((const u16 *)l.up + (u64)(row < last_row ? row : last_row) * l.rank, r, l.rank, up[b]);
            }
            for (int j = 0; j < 16 / ROWS; j++) {
                u32 col = t.col + s.col + j / 4 * s.step + j % 4;
                float down[8];
                read_factors((const u16 *)l.down + (u64)(col < l.cols ? col : l.cols - 1) * l.rank, r, l.rank, down);
                for (int b = 0; b < ROWS; b++)
                    for (int k = 0; k < 8; k++)
                        sums[b * (16 / ROWS) + j] = __fadd_rn(sums[b * (16 / ROWS) + j], __fmul_rn(up[b][k], down[k]));
            }
        }
    }

    __device__ u32 bits_of(u32 dtype, float x) {
        if (dtype == F32) return x != x ? 0x7fc00000u : __float_as_uint(x);
        if (dtype == BF16) return x != x ? 0x7fc0u : half_bits<BF16>(x);
        return x != x ? 0x7e00u : half_bits<F16>(x);
    }

    static __device__ __noinline__ void store_four(u32 dtype, u64 place, u64 element, float v0, float v1, float v2,
                                                   float v3) {
        uint4 all; uint2 halves;
        all.x = bits_of(dtype, v0); all.y = bits_of(dtype, v1); all.z = bits_of(dtype, v2); all.w = bits_of(dtype, v3);
        halves.x = all.x | all.y << 16; halves.y = all.z | all.w << 16;
        if (dtype == F32) *(uint4 *)(place + element * 4) = all;
        else *(uint2 *)(place + element * 2) = halves;
    }

    static __device__ __noinline__ double divided(double x, double root) { return __ddiv_rn(x, root); }

    static __device__ __noinline__ float smoothed(float x, u64 smooth, u32 col) {
        return __fdiv_rn(x, of_bf16(((const u16 *)smooth)[col]));
    }

    /* From what the rotation left to the place. */
    template <int ROWS> __device__ void finish(const sthi_launch &l, const sthi_tile &t, const double *x) {
        const double inverse = 1.0 / l.root;
        sthi_share<ROWS> s(t);
        float v[16];
        low_rank<ROWS>(l, t, s, v);
        for (int i = 0; i < 16; i++) {
            float w = (float)(l.exact ? __dmul_rn(x[i], inverse) : divided(x[i], l.root));
            v[i] = l.rank ? __fadd_rn(w, v[i]) : w;
        }
        for (int i = 0; i < 16; i += 4) {
            u64 row = t.row + s.row + i / (16 / ROWS);
            u32 col = t.col + s.col + i % (16 / ROWS) / 4 * s.step;
            if (row >= l.rows || col >= l.cols) continue;
            for (int k = 0; k < 4 && l.smooth; k++) v[i + k] = smoothed(v[i + k], l.smooth, col + k);
            store_four(l.dtype, l.place, row * l.cols + col, v[i], v[i + 1], v[i + 2], v[i + 3]);
        }
    }

    /* One tile; of 8192, two. */
    template <int ROWS> __device__ void expand_tile(const sthi_launch &l, sthi_tile t, double *shared) {
        const bool two = l.stages > MOST_STAGES;
        double x[16]; double y[16];
        rotate(l, t, shared);
        take<ROWS>(shared, t, x);
        __syncthreads();
        if (two) {
            sthi_tile next = t;
            next.col += t.wide;
            rotate(l, next, shared);
            take<ROWS>(shared, next, y);
            __syncthreads();
            for (int i = 0; i < 16; i++) {
                double a = x[i]; double b = y[i];
                x[i] = __dadd_rn(a, b);
                y[i] = __dsub_rn(a, b);
            }
        }
        for (u32 half = 0; half < (two ? 2 : 1); half++) {
            finish<ROWS>(l, t, x);
            t.col += t.wide;
            for (int i = 0; i < 16; i++) x[i] = y[i];
        }
    }

    extern "C" __global__ void __launch_bounds__(256, 2) sthi_expand_four_bits(sthi_launch l) {
        __shared__ double shared[PADDED_TILE];
        u32 stages = l.stages < MOST_STAGES ? l.stages : (u32)MOST_STAGES;
        u32 wide = stages > 8 ? 1u << stages : 256;
        u32 step = l.stages > MOST_STAGES ? 2 * wide : wide;
        for (u32 i = blockIdx.x; i < l.count; i += gridDim.x) {
            sthi_tile t;
            t.wide = wide;
            t.row = i / l.across * (TILE / wide);
            t.col = i % l.across * step;
            if (wide <= TILE / 4) expand_tile<4>(l, t, shared);
            else expand_tile<1>(l, t, shared);
        }
    }
)
