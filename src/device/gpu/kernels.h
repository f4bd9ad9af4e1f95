/* The kernels that expand packed bytes, as CUDA C++ that HIP's compiler takes, too. Whoever includes this says what
 * STHI_KERNELS does with the text: gpu/compile.c makes a string of it for the run-time compiler, a test compiles it
 * for the CPU with a shim of what cards have. STHI_KERNELS_HALF gets a text that goes before it where the card's own
 * conversion to float16 is not called by name. No directives and no // comments in them: they are macros' arguments.
 *
 * The bits are those of src/quant/segment.c: each operation rounded to float32 by itself, never contracted; then to the
 * dtype, to nearest, ties to even.
 *
 * A thread expands 8 codes of a row at once, so that loads and stores of a warp are whole lines: 8 (or 4) bytes in,
 * 16 (or 32) bytes out. Rows that are no multiple of 8 go one element at a time. Weights too small to matter are those. */
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

    template <int E> struct row_scales {
        float scale; float zero;
        __device__ row_scales(const u8 *scales, const u8 *zeros, u64 row, u32 group, u32 groups) : scale(0), zero(0) {
            if (E == INT4) {
                scale = __uint_as_float((u32)((const u16 *)scales)[row * groups + group] << 16);
            } else {
                scale = ((const float *)scales)[row];
                if (E == INT8 && zeros) zero = ((const float *)zeros)[row];
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

    template <int D> __device__ u32 half_bits(float x) {
        if (D == F16) return sthi_f16(x);
        u32 b = __float_as_uint(x);
        if ((b & 0x7fffffffu) > 0x7f800000u) return (b >> 16) | 0x40u;
        return (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
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

    /* count: of steps, rows x steps in a row. by_eight: a step is 8 elements, else 1. */
    template <int E, int D>
    __device__ void expand(u32 count, u32 row_steps, u32 by_eight, u32 cols, u64 stride, const u8 *codes, const u8 *scales,
                           const u8 *zeros, u8 *place) {
        const u32 each = D == F32 ? 4 : 2;
        const u32 groups = (cols + 63) / 64;
        for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
            u32 row = i / row_steps;
            u32 k = (i - row * row_steps) * (by_eight ? 8 : 1);
            const u8 *from = codes + row * stride;
            u8 *out = place + ((u64)row * cols + k) * each;
            row_scales<E> s(scales, zeros, row, k / 64, groups);
            if (!by_eight) expand_one<E, D>(from, k, s, out);
            else if (E == INT4) expand_eight<E, D>(*(const u32 *)(from + k / 2), s, out);
            else expand_eight<E, D>(*(const u64 *)(from + k), s, out);
        }
    }

    extern "C" __global__ void __launch_bounds__(256)
    sthi_expand_int8_f32(u32 n, u32 r, u32 w, u32 c, u64 t, const u8 *q, const u8 *s, const u8 *z, u8 *p) {
        expand<INT8, F32>(n, r, w, c, t, q, s, z, p);
    }
    extern "C" __global__ void __launch_bounds__(256)
    sthi_expand_int8_bf16(u32 n, u32 r, u32 w, u32 c, u64 t, const u8 *q, const u8 *s, const u8 *z, u8 *p) {
        expand<INT8, BF16>(n, r, w, c, t, q, s, z, p);
    }
    extern "C" __global__ void __launch_bounds__(256)
    sthi_expand_int8_f16(u32 n, u32 r, u32 w, u32 c, u64 t, const u8 *q, const u8 *s, const u8 *z, u8 *p) {
        expand<INT8, F16>(n, r, w, c, t, q, s, z, p);
    }
    extern "C" __global__ void __launch_bounds__(256)
    sthi_expand_fp8_f32(u32 n, u32 r, u32 w, u32 c, u64 t, const u8 *q, const u8 *s, const u8 *z, u8 *p) {
        expand<FP8, F32>(n, r, w, c, t, q, s, z, p);
    }
    extern "C" __global__ void __launch_bounds__(256)
    sthi_expand_fp8_bf16(u32 n, u32 r, u32 w, u32 c, u64 t, const u8 *q, const u8 *s, const u8 *z, u8 *p) {
        expand<FP8, BF16>(n, r, w, c, t, q, s, z, p);
    }
    extern "C" __global__ void __launch_bounds__(256)
    sthi_expand_fp8_f16(u32 n, u32 r, u32 w, u32 c, u64 t, const u8 *q, const u8 *s, const u8 *z, u8 *p) {
        expand<FP8, F16>(n, r, w, c, t, q, s, z, p);
    }
    extern "C" __global__ void __launch_bounds__(256)
    sthi_expand_int4_f32(u32 n, u32 r, u32 w, u32 c, u64 t, const u8 *q, const u8 *s, const u8 *z, u8 *p) {
        expand<INT4, F32>(n, r, w, c, t, q, s, z, p);
    }
    extern "C" __global__ void __launch_bounds__(256)
    sthi_expand_int4_bf16(u32 n, u32 r, u32 w, u32 c, u64 t, const u8 *q, const u8 *s, const u8 *z, u8 *p) {
        expand<INT4, BF16>(n, r, w, c, t, q, s, z, p);
    }
    extern "C" __global__ void __launch_bounds__(256)
    sthi_expand_int4_f16(u32 n, u32 r, u32 w, u32 c, u64 t, const u8 *q, const u8 *s, const u8 *z, u8 *p) {
        expand<INT4, F16>(n, r, w, c, t, q, s, z, p);
    }
)
