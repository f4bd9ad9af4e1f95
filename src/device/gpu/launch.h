/* What an expansion kernel is given: one text for the host, which fills it, and for the card, whose compiler gets it
 * before the kernels. Whoever includes this says what STHI_LAUNCH does with it. */
STHI_LAUNCH(
    typedef struct sthi_launch {
        unsigned long long codes; unsigned long long scales; /* addresses; 0: there are none */
        unsigned long long zeros;
        unsigned long long up; unsigned long long down; unsigned long long smooth;
        unsigned long long place;
        unsigned long long escapes; /* bytes of them, of LOSSLESS */
        unsigned long long stride; unsigned long long pitch; unsigned long long rows;
        double root;         /* of the size of H */
        unsigned dtype;      /* 0 float32, 1 bfloat16, 2 float16 */
        unsigned cols;
        unsigned count;      /* of steps, or of tiles */
        unsigned across;     /* of them in a row */
        unsigned by_eight;   /* a step is 8 elements, else 1 */
        unsigned rank; unsigned group;
        unsigned stages;     /* the logarithm of the size of H; 0: there is none */
        unsigned exact;      /* the root is a power of two */
        unsigned nvfp4;
        float factor;
    } sthi_launch;
)
