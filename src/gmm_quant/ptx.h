/* ................................................................................................ PTX ... */

#ifdef __CUDACC__
/* One wrapper for each inline PTX instruction that device code outside gmm_kernels.cuh uses, named as in the PTX
   manual. The fp32 ones are not contracted, and keep their rounding whatever flags the CUDA compiler gets. */
#define GMM__PTX_F32_1(name, instruction) \
    static __device__ __forceinline__ float name(float a) { \
        float r; \
        asm(instruction " %0, %1;" : "=f"(r) : "f"(a)); \
        return r; \
    }
#define GMM__PTX_F32_2(name, instruction) \
    static __device__ __forceinline__ float name(float a, float b) { \
        float r; \
        asm(instruction " %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); \
        return r; \
    }
GMM__PTX_F32_2(gmm__ptx_add_rn_f32, "add.rn.f32")
GMM__PTX_F32_2(gmm__ptx_mul_rn_f32, "mul.rn.f32")
GMM__PTX_F32_2(gmm__ptx_div_rn_f32, "div.rn.f32")
GMM__PTX_F32_2(gmm__ptx_min_nan_f32, "min.NaN.f32")
GMM__PTX_F32_2(gmm__ptx_max_nan_f32, "max.NaN.f32")
GMM__PTX_F32_1(gmm__ptx_ex2_approx_ftz_f32, "ex2.approx.ftz.f32")
GMM__PTX_F32_1(gmm__ptx_rcp_approx_ftz_f32, "rcp.approx.ftz.f32")
#undef GMM__PTX_F32_1
#undef GMM__PTX_F32_2
static __device__ __forceinline__ float gmm__ptx_fma_rn_f32(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}
/* Nanoseconds of a clock that all multiprocessors of a GPU share. */
static __device__ __forceinline__ unsigned long long gmm__ptx_globaltimer(void) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
#endif
