/* fp8_probe - the precision of sums in Hopper's tensor cores: wgmma on E4M3 and on BF16, and mma.sync on E4M3.
   Build: nvcc -gencode arch=compute_90a,code=sm_90a -I. -o build/fp8_probe tests/bench/fp8_probe.cu
   Model: in one instruction the addends (products and the accumulator) are truncated to F fraction bits relative to the
   exponent of the largest one, added, and the result is truncated to the output's precision. Results:
   src/gmm_kernels/KERNELS.md. */
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GMM_IMPLEMENTATION
#include "gmm_quant.h"

enum { M = 64, N = 16, STEPS = 4, LINE = 32 }; /* a step (instruction) reads 32 bytes of every line */
enum { WGMMA_E4M3, WGMMA_BF16, MMA_E4M3, KINDS };
static const char *const NAMES[KINDS] = { "wgmma e4m3", "wgmma bf16", "mma.sync e4m3" };

/* Writes operands in the layout without swizzle: core matrices of 8 lines by 16 bytes. */
static __device__ void stage(const uint8_t *from, uint8_t *to, int lines) {
    for (int i = threadIdx.x; i < lines * LINE; i += blockDim.x) {
        const int line = i / LINE, byte = i % LINE;
        to[(line / 8 * 2 + byte / 16) * 128 + line % 8 * 16 + byte % 16] = from[i];
    }
}
/* leading byte offset 128 along K, stride byte offset 256 across lines */
static __device__ uint64_t describe(const void *at) {
    const uint32_t from = (uint32_t)__cvta_generic_to_shared(at) & 0x3FFFF;
    return (uint64_t)(256 >> 4) << 32 | (uint64_t)(128 >> 4) << 16 | from >> 4;
}
#define WGMMA(types, end) \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %10, 0;\n wgmma.fence.sync.aligned;\n" \
                 "wgmma.mma_async.sync.aligned.m64n16" types " {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1" end \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) \
                 : "l"(describe(a)), "l"(describe(b)), "r"((int)(s > 0)))

/* D = the sum over `steps` steps of A B^T; tiles: A [STEPS][M][LINE], B [STEPS][N][LINE], D [M][N]. */
__global__ void multiply(int kind, int steps, const uint8_t *A, const uint8_t *B, float *D) {
    __shared__ __align__(1024) uint8_t a[M * LINE], b[N * LINE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = 16 * warp + lane / 4;
    float d[8] = { 0 };
    A += (size_t)blockIdx.x * STEPS * M * LINE;
    B += (size_t)blockIdx.x * STEPS * N * LINE;
    D += (size_t)blockIdx.x * M * N;
    for (int s = 0; s < steps; s++, A += M * LINE, B += N * LINE) {
        if (kind == MMA_E4M3) {
            uint32_t x[4];
            for (int i = 0; i < 4; i++)
                x[i] = *(const uint32_t *)(A + (row + i % 2 * 8) * LINE + lane % 4 * 4 + i / 2 * 16);
            for (int h = 0; h < 2; h++) {
                const uint8_t *from = B + (8 * h + lane / 4) * LINE + lane % 4 * 4;
                float *const o = d + 4 * h;
                asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                             "{%8,%9}, {%0,%1,%2,%3};" : "+f"(o[0]), "+f"(o[1]), "+f"(o[2]), "+f"(o[3])
                             : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(*(const uint32_t *)from),
                             "r"(*(const uint32_t *)(from + 16)));
            }
            continue;
        }
        __syncthreads();
        stage(A, a, M);
        stage(B, b, N);
        asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
        __syncthreads();
        if (kind == WGMMA_E4M3) WGMMA("k32.f32.e4m3.e4m3", ";\n}");
        else WGMMA("k16.f32.bf16.bf16", ", 0, 0;\n}");
        asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" : : : "memory");
    }
    for (int i = 0; i < 8; i++) D[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}

static uint8_t *dev_a, *dev_b;
static float *dev_d;
static void run(int kind, int steps, int tiles, const uint8_t *A, const uint8_t *B, float *D) {
    cudaMemcpy(dev_a, A, (size_t)tiles * STEPS * M * LINE, cudaMemcpyHostToDevice);
    cudaMemcpy(dev_b, B, (size_t)tiles * STEPS * N * LINE, cudaMemcpyHostToDevice);
    multiply<<<tiles, 128>>>(kind, steps, dev_a, dev_b, dev_d);
    if (cudaMemcpy(D, dev_d, (size_t)tiles * M * N * 4, cudaMemcpyDeviceToHost) != cudaSuccess) {
        printf("CUDA: %s\n", cudaGetErrorString(cudaGetLastError()));
        exit(1);
    }
}

/* Puts v as element k of a line. */
static void put(int kind, uint8_t *line, int k, float v) {
    if (kind == WGMMA_BF16) ((uint16_t *)(void *)line)[k] = gmm_f32_to_bf16(v);
    else line[k] = gmm_f32_to_e4m3(v);
}

static uint8_t A[STEPS * M * LINE], B[STEPS * N * LINE];
static float D[M * N];

/* Adds 2^top (in step 0) and sign 2^(top - r - n) (in step `at`): returns the largest r + n that still changes D[r][n];
   bits: D is below 2^top. */
static int kept(int kind, int at, float sign, int *below) {
    const int top = 16, rows = kind == WGMMA_BF16 ? 40 : 17;
    int most = -1;
    memset(A, 0, sizeof A);
    memset(B, 0, sizeof B);
    for (int r = 0; r < rows; r++) put(kind, A + r * LINE, 0, ldexpf(1.0f, top / 2)),
        put(kind, A + at * M * LINE + r * LINE, 1, sign * ldexpf(1.0f, top / 2 - r));
    for (int n = 0; n < N; n++) put(kind, B + n * LINE, 0, ldexpf(1.0f, top / 2)),
        put(kind, B + at * N * LINE + n * LINE, 1, ldexpf(1.0f, top / 2 - n));
    run(kind, at + 1, 1, A, B, D);
    *below = 0;
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < N; n++) {
            const double got = D[r * N + n] - ldexp(1.0, top), exact = sign * ldexp(1.0, top - r - n);
            if (got != 0.0 && r + n > most) most = r + n;
            if (got != 0.0 && got != exact) *below += 1;
        }
    return most;
}

/* Adds 2 products of 2^16 and three of 2^(17 - bits - 1), together 1.5 units of the last of `bits` fraction bits;
   returns what the sum keeps of them. */
static double rounded(int kind, int bits) {
    memset(A, 0, sizeof A);
    memset(B, 0, sizeof B);
    for (int k = 0; k < 5; k++) {
        put(kind, A, k, ldexpf(1.0f, k < 2 ? 8 : 9 - bits));
        put(kind, B, k, ldexpf(1.0f, k < 2 ? 8 : 7));
    }
    run(kind, 1, 1, A, B, D);
    return (D[0] - ldexp(1.0, 17)) / ldexp(1.0, 17 - bits);
}

/* The model: addends truncated to `F` bits relative to the largest exponent, the sum truncated to `bits` bits of
   mantissa. */
static double model(double c, const double *p, const int *exponents, int count, int F, int bits) {
    double sum = 0.0;
    int E = c != 0.0 ? ilogb(c) : INT32_MIN;
    for (int i = 0; i < count; i++)
        if (p[i] != 0.0 && exponents[i] > E) E = exponents[i];
    if (E == INT32_MIN) return 0.0;
    for (int i = 0; i < count; i++) sum += trunc(ldexp(p[i], F - E));
    sum = ldexp(sum + trunc(ldexp(c, F - E)), E - F);
    return sum == 0.0 ? 0.0 : ldexp(trunc(ldexp(sum, bits - ilogb(sum))), ilogb(sum) - bits);
}
static int exponent_of(uint8_t code) { return (code >> 3 & 15) ? (code >> 3 & 15) - 7 : -6; }

static void compare(int kind, int F, int bits) {
    enum { TILES = 24 };
    uint8_t *a = (uint8_t *)malloc(TILES * sizeof A), *b = (uint8_t *)malloc(TILES * sizeof B);
    float *d = (float *)malloc(TILES * sizeof D);
    uint32_t seed = 1;
    long wrong = 0;
    for (size_t i = 0; i < TILES * sizeof A; i++) a[i] = (uint8_t)((seed = seed * 1664525u + 1013904223u) >> 24);
    for (size_t i = 0; i < TILES * sizeof B; i++) b[i] = (uint8_t)((seed = seed * 1664525u + 1013904223u) >> 24);
    for (size_t i = 0; i < TILES * sizeof A; i++) if ((a[i] & 127) == 127) a[i] = 0;
    for (size_t i = 0; i < TILES * sizeof B; i++) if ((b[i] & 127) == 127) b[i] = 0;
    run(kind, STEPS, TILES, a, b, d);
    for (int t = 0; t < TILES; t++)
        for (int r = 0; r < M; r++)
            for (int n = 0; n < N; n++) {
                double c = 0.0, p[LINE];
                int e[LINE];
                for (int s = 0; s < STEPS; s++) {
                    const uint8_t *x = a + ((size_t)(t * STEPS + s) * M + r) * LINE;
                    const uint8_t *y = b + ((size_t)(t * STEPS + s) * N + n) * LINE;
                    for (int k = 0; k < LINE; k++) {
                        p[k] = (double)gmm_e4m3_to_f32(x[k]) * gmm_e4m3_to_f32(y[k]);
                        e[k] = exponent_of(x[k]) + exponent_of(y[k]);
                    }
                    c = model(c, p, e, LINE, F, bits);
                }
                wrong += c != (double)d[(t * M + r) * N + n];
            }
    printf("%-14s model F %d, %d bits of mantissa: %ld of %d outputs of %d steps differ\n", NAMES[kind], F, bits, wrong,
           TILES * M * N, (int)STEPS);
    free(a);
    free(b);
    free(d);
}

int main(void) {
    cudaMalloc((void **)&dev_a, 64 * sizeof A);
    cudaMalloc((void **)&dev_b, 64 * sizeof B);
    cudaMalloc((void **)&dev_d, 64 * sizeof D);
    for (int kind = 0; kind < KINDS; kind++) {
        int odd[4];
        const int same = kept(kind, 0, 1.0f, &odd[0]), minus = kept(kind, 0, -1.0f, &odd[1]);
        const int later = kept(kind, 1, 1.0f, &odd[2]), later_minus = kept(kind, 1, -1.0f, &odd[3]);
        printf("%-14s 1 + 2^-j shows up to j = %d in one step, %d a step later; 1 - 2^-j up to %d, %d; inexact: "
               "%d %d %d %d\n", NAMES[kind], same, later, minus, later_minus, odd[0], odd[2], odd[1], odd[3]);
        if (kind != WGMMA_BF16)
            printf("%-14s 1.5 units of the last place become: 12 bits %.2f, 13 bits %.2f, 14 bits %.2f\n", NAMES[kind],
                   rounded(kind, 12), rounded(kind, 13), rounded(kind, 14));
    }
    compare(WGMMA_E4M3, 13, 13);
    compare(MMA_E4M3, 13, 13);
    compare(MMA_E4M3, 25, 23);
    return 0;
}
