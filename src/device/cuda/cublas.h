/* What we use of cuBLAS, declared here so that no vendor header is needed to build. Names, prototypes and numbers
 * follow NVIDIA's documentation of cuBLAS from CUDA 11 on. */
#ifndef STHI_CUDA_CUBLAS_H
#define STHI_CUDA_CUBLAS_H
#include "device/gpu/driver.h"

typedef struct cublas_opaque *cublas_handle;

enum {
    CUBLAS_OK = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_OP_N = 0,
    CUBLAS_OP_T = 1,
    CUBLAS_COMPUTE_32F = 68,
    CUBLAS_GEMM_DEFAULT = -1,
    CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16, /* sums of 16-bit products stay in float32 */
    CUDA_R_32F = 0,
    CUDA_R_16F = 2,
    CUDA_R_16BF = 14
};

/* X(member, symbol, parameters) */
#define CUBLAS_SYMBOLS(X)                                                                                          \
    X(create, cublasCreate_v2, (cublas_handle *))                                                                  \
    X(destroy, cublasDestroy_v2, (cublas_handle))                                                                  \
    X(set_stream, cublasSetStream_v2, (cublas_handle, gpu_stream))                                                  \
    X(set_math_mode, cublasSetMathMode, (cublas_handle, int mode))                                                 \
    X(gemm, cublasGemmEx,                                                                                          \
      (cublas_handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a, int type_a,       \
       int lda, const void *b, int type_b, int ldb, const void *beta, void *c, int type_c, int ldc, int compute,   \
       int algorithm))

typedef struct cublas_functions {
#define CUBLAS_MEMBER(member, symbol, parameters) int(*member) parameters;
    CUBLAS_SYMBOLS(CUBLAS_MEMBER)
#undef CUBLAS_MEMBER
} cublas_functions;
#endif
