/* The kernel behind a product, as CUDA C++: bias, nonlinearity, residual, each rounded as stagehand/executor.h says.
 * Whoever includes this says what STHI_KERNELS does with the text: dense.c makes a string of it for the run-time
 * compiler, a test compiles it for the CPU with a shim of what CUDA has. No directives and no // comments in it, for it
 * is a macro's argument. f: sth_nonlinearity. */
STHI_KERNELS(
    typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;

    enum { F32 = 0, BF16 = 1, F16 = 2 };
    enum { NONE = 0, RELU = 1, GELU = 2, SILU = 3 };

    template <int D> __device__ float load(const u8 *p, u64 i) {
        if (D == F32) return ((const float *)p)[i];
        if (D == BF16) return __uint_as_float((u32)((const u16 *)p)[i] << 16);
        return sthi_of_f16(((const u16 *)p)[i]);
    }

    template <int D> __device__ void store(u8 *p, u64 i, float x) {
        if (D == F32) { ((float *)p)[i] = x; return; }
        if (D == F16) { ((u16 *)p)[i] = (u16)sthi_f16(x); return; }
        u32 b = __float_as_uint(x);
        bool nan = (b & 0x7fffffffu) > 0x7f800000u;
        ((u16 *)p)[i] = (u16)(nan ? (b >> 16) | 0x40u : (b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
    }

    static __device__ float apply(int f, float x) {
        if (f == RELU) return x > 0.0f || x != x ? x : 0.0f;
        if (f == GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
        if (f == SILU) return x / (1.0f + expf(-x));
        return x;
    }

    template <int D>
    __device__ void finish(u64 count, u32 cols, u8 *y, const u8 *bias, float bias_scale, const u8 *residual, int f) {
        u64 step = (u64)gridDim.x * blockDim.x;
        for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
            float v = load<D>(y, i);
            if (bias) v += bias_scale * load<D>(bias, i % cols);
            store<D>(y, i, apply(f, v));
            if (residual) store<D>(y, i, load<D>(residual, i) + load<D>(y, i));
        }
    }

    extern "C" __global__ void __launch_bounds__(256)
    sthi_finish_f32(u64 n, u32 c, u8 *y, const u8 *b, float s, const u8 *r, int f) {
        finish<F32>(n, c, y, b, s, r, f);
    }
    extern "C" __global__ void __launch_bounds__(256)
    sthi_finish_bf16(u64 n, u32 c, u8 *y, const u8 *b, float s, const u8 *r, int f) {
        finish<BF16>(n, c, y, b, s, r, f);
    }
    extern "C" __global__ void __launch_bounds__(256)
    sthi_finish_f16(u64 n, u32 c, u8 *y, const u8 *b, float s, const u8 *r, int f) {
        finish<F16>(n, c, y, b, s, r, f);
    }
)
