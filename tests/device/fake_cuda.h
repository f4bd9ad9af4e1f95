/* How tests steer the stand-in for the CUDA driver (fake_cuda.c). Found with dlsym in the loaded library. */
#ifndef TESTS_FAKE_CUDA_H
#define TESTS_FAKE_CUDA_H

long fake_cuda_live(void);               /* objects not yet freed, retained contexts included */
void fake_cuda_fail(long nth, int with); /* the nth driver call from now returns `with`; 0: none does */
long fake_cuda_calls(void);              /* driver calls since fake_cuda_fail */
void fake_cuda_shut_down(int yes);       /* every call reports that the driver has been shut down */
void fake_cuda_switch_context(void);     /* another library makes its own context current on this thread */
void fake_cuda_reset(void);              /* forgets what was left behind by a driver that was shut down */
#endif
