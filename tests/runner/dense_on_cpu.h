/* The kernel behind a product, on the CPU. dtype: 0 F32, 1 BF16, 2 F16; f: sth_nonlinearity. */
#ifndef TESTS_RUNNER_DENSE_ON_CPU_H
#define TESTS_RUNNER_DENSE_ON_CPU_H
#ifdef __cplusplus
extern "C" {
#endif
void finish_on_cpu(int dtype, unsigned grid, unsigned block, unsigned long long count, unsigned cols, void *y,
                   const void *bias, float scale, const void *residual, int f);
#ifdef __cplusplus
}
#endif
#endif
