/* gmm_quant.h - v0.1.0 - formats of mixture-of-experts compute: dtypes, operands, groups, codecs, layouts - MIT
 * SPDX-License-Identifier: MIT
 *
 * Quick start: this header is the ground floor of gmm.h, which includes it. It is useful alone for its codecs and
 * layout queries:
 *
 *     #define GMM_IMPLEMENTATION          // in exactly one .c or .cu file of the program
 *     #include "gmm_quant.h"
 *
 *     uint16_t bits = gmm_f32_to_bf16(1.5f);
 *     gmm_layout lay = GMM_ZERO;          // bytes that a 2880 x 2880 MXFP8 weight takes, scales in 128x4 tiles
 *     gmm_layout_of(GMM_E4M3, GMM_SCALING_MX32, GMM_SCALES_SWIZZLED, GMM_ROWWISE, 2880, 2880, &lay, NULL);
 *
 * CONTENTS
 *     1  Linkage            4  Operands and groups     7  Activation arithmetic
 *     2  Version            5  Codecs                  8  Implementation
 *     3  Status, dtypes     6  Layout queries          9  Licence
 *
 * CONFIGURATION (define before the first gmm include of a translation unit)
 *     GMM_IMPLEMENTATION   once per program: this unit holds the functions. Never undefine it.
 *     GMM_STATIC           functions become static to this unit, which must define GMM_IMPLEMENTATION too.
 *     GMMDEF               linkage of every function; default: extern with hidden visibility on ELF. Every unit of a
 *                          program must see the same value. Hidden means that another shared object cannot link
 *                          against these functions, and that two copies in one process never mix.
 *
 * Thread safety: every function here is pure or writes only through its arguments.
 *
 * REVISIONS (full list: CHANGELOG.md)
 *     0.1.0  first version
 */
#ifndef GMM_MOE_QUANT_H_INCLUDED
#define GMM_MOE_QUANT_H_INCLUDED

#include <stddef.h>
#include <stdint.h>

/* ------------------------------------------------------------------------------------------------- 1 Linkage --- */

#if defined(GMM_STATIC) && !defined(GMM_IMPLEMENTATION)
#error "gmm: GMM_STATIC needs GMM_IMPLEMENTATION before the first gmm include of the same file"
#endif

#if defined(__GNUC__) || defined(__clang__)
#define GMM__UNUSED __attribute__((unused))
#define GMM__HIDDEN __attribute__((visibility("hidden")))
#define GMM__FORCE_INLINE __inline__ __attribute__((always_inline))
#else
#define GMM__UNUSED
#define GMM__HIDDEN
#define GMM__FORCE_INLINE inline
#endif

#ifndef GMMDEF
#ifdef GMM_STATIC
#define GMMDEF static GMM__UNUSED
#else
#define GMMDEF extern GMM__HIDDEN
#endif
#endif

/* Element arithmetic compiles for the host and, under nvcc, for the device. */
#ifdef __CUDACC__
#define GMM__HD static __host__ __device__ __forceinline__
#else
#define GMM__HD static GMM__FORCE_INLINE GMM__UNUSED
#endif

/* Zero initialiser of a descriptor that is clean in C11 and C++17: gmm_mat m = GMM_ZERO; */
#ifdef __cplusplus
#define GMM_ZERO {}
extern "C" {
#else
#define GMM_ZERO {0}
#endif

/* ------------------------------------------------------------------------------------------------- 2 Version --- */

#define GMM_VERSION_MAJOR 0 /* breaking interface changes */
#define GMM_VERSION_MINOR 1 /* new interfaces */
#define GMM_VERSION_PATCH 0 /* corrections */
#define GMM_VERSION_NUMBER (GMM_VERSION_MAJOR * 10000 + GMM_VERSION_MINOR * 100 + GMM_VERSION_PATCH)
#define GMM_VERSION_STRING "0.1.0"

/* ------------------------------------------------------------------------------------------ 3 Status, dtypes --- */

/* X(name, value, text) */
#define GMM_STATUS_LIST(X) \
    X(GMM_OK, 0, "success") \
    X(GMM_E_ARG, 1, "an argument breaks its rule") \
    X(GMM_E_NULL, 2, "a required pointer is NULL") \
    X(GMM_E_DTYPE, 3, "a dtype or scaling mode is not accepted here") \
    X(GMM_E_STRIDE, 4, "a leading dimension or stride is too small") \
    X(GMM_E_ALIGN, 5, "an address is misaligned") \
    X(GMM_E_OVERFLOW, 6, "an extent does not fit 64 bits") \
    X(GMM_E_SPLIT, 7, "the group sizes are negative, not monotonic or exceed the capacity") \
    X(GMM_E_WORKSPACE, 8, "a buffer is smaller than its size query asks") \
    X(GMM_E_VERSION, 9, "a struct_size is larger than this version knows, or header versions are mixed") \
    X(GMM_E_CONFIG, 10, "a field of a configuration contradicts another") \
    X(GMM_E_UNSUPPORTED, 11, "no engine of this context serves the call") \
    X(GMM_E_BUILD, 12, "this build lacks what the call needs") \
    X(GMM_E_DEVICE, 13, "the device lacks what the call needs") \
    X(GMM_E_CAPTURE, 14, "not allowed while the stream is capturing") \
    X(GMM_E_STATE, 15, "the object is in the wrong state for the call") \
    X(GMM_E_MEMORY, 16, "an allocation failed") \
    X(GMM_E_CUDA, 17, "a CUDA call failed") \
    X(GMM_E_COMM, 18, "a communicator failed") \
    X(GMM_E_KEY, 19, "a checkpoint's keys or shapes do not fit") \
    X(GMM_E_IO, 20, "an io callback failed")

typedef enum gmm_status {
#define GMM__X(name, value, text) name = value,
    GMM_STATUS_LIST(GMM__X)
#undef GMM__X
    GMM_STATUS_MAX = 0x7fffffff
} gmm_status;

/* What a function without a context fills when it fails; the pointer may always be NULL. */
typedef struct gmm_error {
    gmm_status status;
    char text[508]; /* function, argument, value, rule, shapes; NUL-terminated */
} gmm_error;

/* X(name, value, lower-case name, bits of an element) */
#define GMM_DTYPE_LIST(X) \
    X(GMM_NONE, 0, none, 0) \
    X(GMM_F32, 1, f32, 32) \
    X(GMM_F16, 2, f16, 16) \
    X(GMM_BF16, 3, bf16, 16) \
    X(GMM_E4M3, 4, e4m3, 8) \
    X(GMM_E5M2, 5, e5m2, 8) \
    X(GMM_E2M1, 6, e2m1, 4) \
    X(GMM_E8M0, 7, e8m0, 8) \
    X(GMM_U8, 8, u8, 8) \
    X(GMM_I32, 9, i32, 32) \
    X(GMM_I64, 10, i64, 64)

typedef enum gmm_dtype {
#define GMM__X(name, value, text, bits) name = value,
    GMM_DTYPE_LIST(GMM__X)
#undef GMM__X
    GMM_DTYPE_MAX = 0x7fffffff
} gmm_dtype;

/* How an operand is scaled. X(name, value, lower-case name, scale dtype, block rows, block columns); a block of 0 spans
   the whole extent. MX32 with E2M1 elements is MXFP4. */
#define GMM_SCALING_LIST(X) \
    X(GMM_SCALING_NONE, 0, none, GMM_NONE, 0, 0) \
    X(GMM_SCALING_TENSOR, 1, tensor, GMM_F32, 0, 0) \
    X(GMM_SCALING_ROW, 2, row, GMM_F32, 1, 0) \
    X(GMM_SCALING_1X128, 3, 1x128, GMM_F32, 1, 128) \
    X(GMM_SCALING_128X128, 4, 128x128, GMM_F32, 128, 128) \
    X(GMM_SCALING_MX32, 5, mx32, GMM_E8M0, 1, 32) \
    X(GMM_SCALING_NV16, 6, nv16, GMM_E4M3, 1, 16)

typedef enum gmm_scaling {
#define GMM__X(name, value, text, dtype, rows, cols) name = value,
    GMM_SCALING_LIST(GMM__X)
#undef GMM__X
    GMM_SCALING_MAX = 0x7fffffff
} gmm_scaling;

/* Order of the scales in memory. COMPACT is what the recipe's quantizer writes: fp32 scales of 1x128 blocks are
   K-block-major (the form GEMMs read), all others row-major. SWIZZLED is the tile of 128 rows by 4 scales that
   block-scaled tensor cores read (MX32 and NV16 only). */
typedef enum gmm_scale_order {
    GMM_SCALES_COMPACT = 0,
    GMM_SCALES_SWIZZLED = 1,
    GMM_SCALE_ORDER_MAX = 0x7fffffff
} gmm_scale_order;

/* Which way the blocks of an operand run: along the columns of a row (the contraction of fwd), or along the rows of a
   column (the contraction of wgrad). */
typedef enum gmm_direction { GMM_ROWWISE = 0, GMM_COLUMNWISE = 1, GMM_DIRECTION_MAX = 0x7fffffff } gmm_direction;

/* Families of recipes, in the order of their precision. What each role gets is decided where the recipe is used. */
typedef enum gmm_recipe_kind {
    GMM_RECIPE_NONE = 0, /* operands keep their 16- or 32-bit dtype */
    GMM_RECIPE_FP8_DELAYED,
    GMM_RECIPE_FP8_CURRENT,
    GMM_RECIPE_FP8_BLOCK,
    GMM_RECIPE_MXFP8,
    GMM_RECIPE_NVFP4,
    GMM_RECIPE_KIND_MAX = 0x7fffffff
} gmm_recipe_kind;

/* -------------------------------------------------------------------------------------- 4 Operands and groups --- */

/* Every descriptor opens with struct_size: 0 means the size this header declares; a smaller value is the size of an
   older version, whose missing fields read as 0; a larger one is GMM_E_VERSION. Zeroed fields mean the default. */

enum {
    GMM_MAT_TABLE_ON_HOST = 1u, /* table and scale_table are host arrays; a captured graph freezes their contents */
    GMM_MAT_ROW_AMAX = 2u       /* amax holds one value per row instead of one per group (row-scaled NVFP4) */
};

/* One operand: a matrix, or one matrix per group. Row-major; ld counts elements.
   Activations (one row per token) stand in one buffer of capacity rows: data is set. Weights, biases and their
   gradients are packed (data, group after group at group_stride) or one pointer per group (table); exactly one of the
   two is set. A bias is a matrix of one row. Size queries read no address, so they can come before allocation; but
   whether an optional output's pointer is NULL tells them whether it is wanted. */
typedef struct gmm_mat {
    uint32_t struct_size;
    gmm_dtype dtype;             /* of the elements */
    gmm_scaling scaling;         /* GMM_SCALING_NONE for F32, F16, BF16 */
    gmm_scale_order scale_order; /* of scale */
    uint32_t flags;              /* GMM_MAT_* */
    int32_t reserved;            /* 0 */
    int64_t ld;                  /* elements from row to row; 0 = columns */
    int64_t group_stride;        /* packed, per group: elements from group to group; 0 = rows * ld */
    void *data;                  /* packed elements */
    void *const *table;          /* [groups] addresses of elements */
    void *scale;                 /* packed dequantization scales, groups as gmm_layout_of places them */
    void *const *scale_table;    /* [groups] addresses of scales, with table */
    float *amax;                 /* [groups] or [rows]: global amax of NV16, current-scaling amax; may be NULL */
    const struct gmm_mat *columnwise; /* copy of the same matrix quantized GMM_COLUMNWISE; may be NULL */
} gmm_mat;

/* Packed operand over existing memory. */
GMM__HD gmm_mat gmm_mat_packed(gmm_dtype dtype, const void *data) {
    gmm_mat m = GMM_ZERO;
    m.dtype = dtype;
    m.data = (void *)(uintptr_t)data;
    return m;
}

/* Operand given by one address per group. The array is device memory in a GPU context unless `flags` has
   GMM_MAT_TABLE_ON_HOST. */
GMM__HD gmm_mat gmm_mat_table(gmm_dtype dtype, void *const *table, uint32_t flags) {
    gmm_mat m = GMM_ZERO;
    m.dtype = dtype;
    m.table = table;
    m.flags = flags;
    return m;
}

/* Rows at and past the sum of the sizes: kept as they are, or written as zeros. They are never read. */
typedef enum gmm_tail { GMM_TAIL_KEEP = 0, GMM_TAIL_ZERO = 1, GMM_TAIL_MAX = 0x7fffffff } gmm_tail;

/* How rows are split over groups. */
typedef enum gmm_split_form {
    GMM_SPLIT_SIZES = 0,   /* [groups] rows of each group */
    GMM_SPLIT_OFFSETS = 1, /* [groups + 1] exclusive prefix sums, the first one 0 */
    GMM_SPLIT_FORM_MAX = 0x7fffffff
} gmm_split_form;

/* Bits that faulty values in device memory set in gmm_groups.fault. The call stays in bounds: a negative size counts as
   0, offsets are made monotonic, and rows past the capacity are cut off. */
enum {
    GMM_FAULT_NEGATIVE = 1u,  /* a size below 0 */
    GMM_FAULT_CAPACITY = 2u,  /* more rows than the capacity */
    GMM_FAULT_MONOTONIC = 4u, /* offsets that fall, or do not start at 0 */
    GMM_FAULT_ALIGN = 8u,     /* a size breaks the row_align promise; results are right nevertheless */
    GMM_FAULT_INDEX = 16u,    /* an expert index outside [-1, experts) */
    GMM_FAULT_ADDRESS = 32u   /* a table in device memory holds an address that is no multiple of 16 bytes, which the
                                 engine WGMMA needs of weights: that group's rows of the output are wrong */
};

typedef struct gmm_groups {
    uint32_t struct_size;
    int32_t count;       /* groups, >= 1 */
    int64_t capacity;    /* rows of every activation buffer, >= 0 */
    const void *splits;  /* sizes or offsets, see form */
    gmm_dtype dtype;     /* of splits: GMM_I32 or GMM_I64 */
    gmm_split_form form;
    int32_t on_host;     /* 1: splits is host memory, read during the call (an error while capturing); a faulty split or
                            a broken row_align promise is then a status, not a fault bit, in CPU contexts too */
    int32_t row_align;   /* promise: every size is a multiple of this; 0 = no promise. Never changes results */
    int64_t rows_hint;   /* rows expected, 0 = capacity. Speed only, never results */
    gmm_tail tail;
    int32_t reserved;    /* 0 */
    uint32_t *fault;     /* word in the context's memory, OR-ed with GMM_FAULT_*; may be NULL */
} gmm_groups;

/* One step of reading a split: the end offset of the group that starts at `begin`, given `value` (its size, or the
   offset behind it), clamped into [begin, capacity]; faults are OR-ed into *fault. CPU and GPU share this rule. */
GMM__HD int64_t gmm_split_end(int64_t begin, int64_t value, gmm_split_form form, int64_t capacity, int32_t row_align,
                              uint32_t *fault) {
    int64_t size = form == GMM_SPLIT_OFFSETS ? (value < begin ? -1 : value - begin) : value;
    if (size < 0) {
        *fault |= form == GMM_SPLIT_OFFSETS ? (uint32_t)GMM_FAULT_MONOTONIC : (uint32_t)GMM_FAULT_NEGATIVE;
        size = 0;
    }
    if (row_align > 1 && size % row_align != 0) *fault |= (uint32_t)GMM_FAULT_ALIGN;
    if (size > capacity - begin) {
        *fault |= (uint32_t)GMM_FAULT_CAPACITY;
        size = capacity - begin;
    }
    return begin + size;
}

/* -------------------------------------------------------------------------------------------------- 5 Codecs --- */

/* Bits of floats. All codecs below are integer arithmetic: equal on every host, device and set of compiler flags. */
GMM__HD uint32_t gmm_f32_bits(float x) {
    union { float f; uint32_t u; } v;
    v.f = x;
    return v.u;
}
GMM__HD float gmm_f32_from_bits(uint32_t u) {
    union { uint32_t u; float f; } v;
    v.u = u;
    return v.f;
}

/* BF16: round to nearest even; every NaN becomes 0x7FFF. */
GMM__HD uint16_t gmm_f32_to_bf16(float x) {
    uint32_t u = gmm_f32_bits(x);
    uint32_t r = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : r);
}
GMM__HD float gmm_bf16_to_f32(uint16_t b) { return gmm_f32_from_bits((uint32_t)b << 16); }

/* FP16: round to nearest even with gradual underflow; overflow gives infinity; every NaN becomes 0x7FFF. */
GMM__HD uint16_t gmm_f32_to_f16(float x) {
    uint32_t u = gmm_f32_bits(x), a = u & 0x7FFFFFFFu, sign = (u >> 16) & 0x8000u;
    uint32_t exponent = a >> 23;
    uint32_t normal = a - 0x38000000u; /* rebias by 112 */
    uint32_t shift = exponent < 113u ? 113u - exponent : 0u;
    uint32_t significand = (a & 0x7FFFFFu) | (exponent ? 0x800000u : 0u);
    uint32_t drop = 13u + (shift > 12u ? 12u : shift);
    uint32_t small_q = significand >> drop, rem = significand & ((1u << drop) - 1u), half = 1u << (drop - 1u);
    uint32_t small_r = shift > 12u ? 0u : small_q + (uint32_t)(rem > half || (rem == half && (small_q & 1u)));
    uint32_t big_r = (normal + 0xFFFu + ((normal >> 13) & 1u)) >> 13;
    uint32_t q = shift ? small_r : (big_r > 0x7C00u ? 0x7C00u : big_r);
    return (uint16_t)(a > 0x7F800000u ? 0x7FFFu : sign | q);
}
GMM__HD float gmm_f16_to_f32(uint16_t h) {
    uint32_t sign = ((uint32_t)h & 0x8000u) << 16, a = (uint32_t)h & 0x7FFFu;
    /* masks instead of branches, so that loops vectorise */
    uint32_t special = 0u - (uint32_t)(a >= 0x7C00u), subnormal = 0u - (uint32_t)(a < 0x0400u);
    uint32_t nonzero = 0u - (uint32_t)(a != 0u);
    uint32_t wide = (a << 13) + 0x38000000u + (special & 0x38000000u);
    /* a subnormal half is a * 2^-24: exact in fp32, and built from an integer so that no flag flushes it */
    uint32_t scaled = gmm_f32_bits((float)(int32_t)a) - (24u << 23);
    return gmm_f32_from_bits(sign | (wide & ~subnormal) | (scaled & subnormal & nonzero));
}

/* Any of F32, F16, BF16 at element index i. */
GMM__HD float gmm_load(gmm_dtype dtype, const void *base, int64_t i) {
    if (dtype == GMM_BF16) return gmm_bf16_to_f32(((const uint16_t *)base)[i]);
    if (dtype == GMM_F16) return gmm_f16_to_f32(((const uint16_t *)base)[i]);
    return ((const float *)base)[i];
}
GMM__HD void gmm_store(gmm_dtype dtype, void *base, int64_t i, float v) {
    if (dtype == GMM_BF16) ((uint16_t *)base)[i] = gmm_f32_to_bf16(v);
    else if (dtype == GMM_F16) ((uint16_t *)base)[i] = gmm_f32_to_f16(v);
    else ((float *)base)[i] = v;
}

/* ------------------------------------------------------------------------------------------ 6 Layout queries --- */

/* Storage of one quantized matrix. Groups follow one another at these sizes. */
typedef struct gmm_layout {
    int64_t data_rows, data_cols;   /* elements as stored; a transposed copy swaps the matrix's rows and columns */
    int64_t data_bytes;
    int64_t scale_rows, scale_cols; /* as stored, padding included; 0 without scales */
    int64_t scale_bytes;
    gmm_dtype scale_dtype;
    int32_t transposed;             /* 1: data holds the transposed matrix */
} gmm_layout;

/* Size of a dtype's element in bits, 0 if unknown; names of dtypes, scaling modes and status codes, "?" if unknown. */
GMMDEF int32_t gmm_dtype_bits(gmm_dtype dtype);
GMMDEF const char *gmm_dtype_name(gmm_dtype dtype);
GMMDEF const char *gmm_scaling_name(gmm_scaling scaling);
GMMDEF const char *gmm_status_name(gmm_status status);   /* "GMM_E_ARG" */
GMMDEF const char *gmm_status_string(gmm_status status); /* a sentence */

/* Storage of a rows x cols matrix in a format.
   Shapes: as Transformer Engine and cuBLASLt lay them out. FP8 copies for the other direction are transposed
       (TENSOR, 1X128, 128X128, NV16) or keep the row-major order (MX32). Padded scale extents: 1X128 rounds the
       un-blocked extent to 4; 128X128 rounds the blocked columns to 4; MX32 and NV16 round to tiles of 128 x 4.
   Errors: GMM_E_NULL (out), GMM_E_ARG (negative extent), GMM_E_DTYPE (dtype and scaling do not go together, or an
       order that the scaling lacks), GMM_E_OVERFLOW. */
GMMDEF gmm_status gmm_layout_of(gmm_dtype dtype, gmm_scaling scaling, gmm_scale_order order, gmm_direction direction,
                                int64_t rows, int64_t cols, gmm_layout *out, gmm_error *error);

/* Byte of the scale of row i and scale column j in a SWIZZLED buffer of `scale_cols` columns (a multiple of 4). */
GMM__HD int64_t gmm_swizzle_offset(int64_t i, int64_t j, int64_t scale_cols) {
    return ((i / 128) * (scale_cols / 4) + j / 4) * 512 + (i % 32) * 16 + ((i % 128) / 32) * 4 + j % 4;
}

/* ----------------------------------------------------------------------------------- 7 Activation arithmetic --- */

/* condition ? yes : no without a branch: compilers that keep floating-point traps would not vectorise one. */
GMM__HD float gmm__pick(int condition, float yes, float no) {
#ifdef __CUDA_ARCH__
    return condition ? yes : no;
#else
    uint32_t mask = 0u - (uint32_t)(condition != 0);
    return gmm_f32_from_bits((gmm_f32_bits(yes) & mask) | (gmm_f32_bits(no) & ~mask));
#endif
}
/* A NaN stays a NaN; of zeros of both signs it may be either. */
GMM__HD float gmm__min(float x, float limit) {
#ifdef __CUDA_ARCH__
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(limit));
    return r;
#else
    return gmm__pick(x > limit, limit, x);
#endif
}
GMM__HD float gmm__max(float x, float limit) {
#ifdef __CUDA_ARCH__
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(limit));
    return r;
#else
    return gmm__pick(x < limit, limit, x);
#endif
}

/* exp, sigmoid and tanh in fp32. On the host they are polynomials of our own (no libm call, so that loops over them
   vectorise): exp within 3 ulp, sigmoid 4 (its subnormals aside), tanh 5; on the device exp is expf. NaN
   propagates; exp(-inf) = 0, exp(+inf) = +inf. */
GMM__HD float gmm_exp(float x) {
#ifdef __CUDA_ARCH__
    return expf(x);
#else
    float c = gmm__max(gmm__min(x, 89.0f), -104.0f);
    float t = gmm__pick(c == c, c, 0.0f) * 1.44269504f;
    int32_t n = (int32_t)(t + gmm__pick(t < 0.0f, -0.5f, 0.5f)), half = n / 2;
    float r = (c - (float)n * 0.693359375f) + (float)n * 2.12194440e-4f;
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    /* 2^n in two factors, so that results in the subnormal range round once and large ones reach infinity */
    return p * gmm_f32_from_bits((uint32_t)(half + 127) << 23) * gmm_f32_from_bits((uint32_t)(n - half + 127) << 23);
#endif
}
/* exp(x) for x <= 0, and 1 / x for x from 1 to 2: on the device one instruction of the special-function unit each,
   within 1e-5 of the value (results below 2^-126 become 0). */
GMM__HD float gmm__exp_down(float x) {
#ifdef __CUDA_ARCH__
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x * 1.44269504f));
    return r;
#else
    return gmm_exp(x);
#endif
}
GMM__HD float gmm__invert(float x) {
#ifdef __CUDA_ARCH__
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
#else
    return 1.0f / x;
#endif
}
/* The sigmoid s(x), and 1 - s(x) in *rest: neither loses digits in its tail. */
GMM__HD float gmm_sigmoid_rest(float x, float *rest) {
    float e = gmm__exp_down(gmm__pick(x < 0.0f, x, -x)), r = gmm__invert(1.0f + e), q = e * r;
    *rest = gmm__pick(x < 0.0f, r, q);
    return gmm__pick(x < 0.0f, q, r);
}
GMM__HD float gmm_sigmoid(float x) {
    float rest;
    return gmm_sigmoid_rest(x, &rest);
}
/* tanh(x), and its derivative 1 - tanh(x)^2 in *slope. Near 0 the series, elsewhere (1 - e) / (1 + e), e = exp(-2a). */
GMM__HD float gmm_tanh_slope(float x, float *slope) {
    float a = gmm__pick(x < 0.0f, -x, x), s = x * x;
    float e = gmm__exp_down(-2.0f * a), q = gmm__invert(1.0f + e), away = (1.0f - e) * q;
    float close = x * (1.0f + s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f))));
    *slope = 4.0f * e * q * q;
    return gmm__pick(a < 0.25f, close, gmm__pick(x < 0.0f, -away, away));
}
GMM__HD float gmm_tanh(float x) {
    float slope;
    return gmm_tanh_slope(x, &slope);
}

/* The functions that gates are made of. */
typedef enum gmm_gate {
    GMM_GATE_RELU,    /* max(a, 0) */
    GMM_GATE_SRELU,   /* max(a, 0)^2 */
    GMM_GATE_GELU,    /* a Phi(u), Phi by its tanh form, u = alpha a */
    GMM_GATE_QGELU,   /* a s(1.702 alpha a), s the sigmoid */
    GMM_GATE_SILU,    /* a s(alpha a) */
    GMM_GATE_SIGMOID, /* s(alpha a) */
    GMM_GATE_SITU,    /* beta1 tanh(a / beta1) s(alpha a) */
    GMM_GATE_MAX = 0x7fffffff
} gmm_gate;

/* X(name, value, lower-case name, gate, gated). A gated activation reads two values a (gate) and b (linear) per output:
       y = F(a') (U(b') + offset),  a' = min(a, limit),  b' = clamp(b, -limit, limit)
   and an ungated one y = F(a'). U is the identity but for SiTU-GLU, where it is beta2 tanh(b' / beta2). */
#define GMM_ACT_LIST(X) \
    X(GMM_ACT_NONE, 0, none, GMM_GATE_MAX, 0) \
    X(GMM_ACT_RELU, 1, relu, GMM_GATE_RELU, 0) \
    X(GMM_ACT_SRELU, 2, srelu, GMM_GATE_SRELU, 0) \
    X(GMM_ACT_GELU, 3, gelu, GMM_GATE_GELU, 0) \
    X(GMM_ACT_QGELU, 4, qgelu, GMM_GATE_QGELU, 0) \
    X(GMM_ACT_SILU, 5, silu, GMM_GATE_SILU, 0) \
    X(GMM_ACT_GLU, 6, glu, GMM_GATE_SIGMOID, 1) \
    X(GMM_ACT_REGLU, 7, reglu, GMM_GATE_RELU, 1) \
    X(GMM_ACT_SREGLU, 8, sreglu, GMM_GATE_SRELU, 1) \
    X(GMM_ACT_GEGLU, 9, geglu, GMM_GATE_GELU, 1) \
    X(GMM_ACT_QGEGLU, 10, qgeglu, GMM_GATE_QGELU, 1) \
    X(GMM_ACT_SWIGLU, 11, swiglu, GMM_GATE_SILU, 1) \
    X(GMM_ACT_SITUGLU, 12, situglu, GMM_GATE_SITU, 1)

typedef enum gmm_act_kind {
#define GMM__X(name, value, text, gate, gated) name = value,
    GMM_ACT_LIST(GMM__X)
#undef GMM__X
    GMM_ACT_KIND_MAX = 0x7fffffff
} gmm_act_kind;

/* An activation's settings. The clamped SwiGLU of gpt-oss is SWIGLU with limit 7, alpha 1.702, offset 1. */
typedef struct gmm_act {
    uint32_t struct_size;
    gmm_act_kind kind;
    int32_t interleave; /* gated: pre-activation columns are [a:B | b:B | a:B ...]; 0 = halves [a | b]. Divides ffn */
    float limit;        /* 0 = no clamp; else finite > 0. A NaN stays a NaN. Its gradient is 1 at the limit, 0 beyond */
    float alpha;        /* slope inside the sigmoid; 0 = 1. Only gates that have a sigmoid take another value */
    float offset;       /* added to the linear part; gated only */
    float beta1, beta2; /* SiTU: 0 = 4 and 25; else finite > 0 */
    uint32_t reserved[8]; /* 0; later settings go here, so that structures may hold a gmm_act by value */
} gmm_act;

/* gmm_act with its defaults filled in, as the arithmetic wants it. */
typedef struct gmm_act_coef { float limit, alpha, offset, beta1, beta2; } gmm_act_coef;

GMM__HD gmm_act_coef gmm_act_coefficients(const gmm_act *act) {
    gmm_act_coef c;
    c.limit = act->limit == 0.0f ? gmm_f32_from_bits(0x7F800000u) : act->limit;
    c.alpha = act->alpha == 0.0f ? 1.0f : act->alpha;
    c.offset = act->offset;
    c.beta1 = act->beta1 == 0.0f ? 4.0f : act->beta1;
    c.beta2 = act->beta2 == 0.0f ? 25.0f : act->beta2;
    return c;
}

/* One output and its derivatives dy/da, dy/db (fp32). With gated = 0, b is ignored and *db is 0.
   Source of the formulas: the derivatives of F and U above; GELU's tanh form is a s(2 u'), u' = 0.79788456 u
   (1 + 0.044715 u^2), which needs no tanh. */
GMM__HD float gmm_act_point(gmm_gate gate, int gated, gmm_act_coef c, float a, float b, float *da, float *db) {
    float pass_a = gmm__pick(a > c.limit, 0.0f, 1.0f), ga = gmm__min(a, c.limit), f, fa, s, r, t, u, v;
    switch (gate) {
    case GMM_GATE_RELU: f = gmm__max(ga, 0.0f); fa = gmm__pick(ga <= 0.0f, 0.0f, 1.0f); break;
    case GMM_GATE_SRELU: u = gmm__max(ga, 0.0f); f = u * u; fa = 2.0f * u; break;
    case GMM_GATE_GELU:
        u = c.alpha * ga;
        v = gmm__max(gmm__min(u, 16.0f), -16.0f); /* beyond, s is 0 or 1 in fp32, and the square could overflow */
        s = gmm_sigmoid_rest(2.0f * v * (0.79788456f + 0.03567741f * v * v), &r);
        f = ga * s;
        fa = s + 2.0f * v * (0.79788456f + 0.10703222f * v * v) * s * r;
        break;
    case GMM_GATE_QGELU:
        u = 1.702f * c.alpha;
        s = gmm_sigmoid_rest(u * ga, &r);
        f = ga * s;
        fa = s + u * f * r;
        break;
    case GMM_GATE_SILU:
        s = gmm_sigmoid_rest(c.alpha * ga, &r);
        f = ga * s;
        fa = s + c.alpha * f * r;
        break;
    case GMM_GATE_SIGMOID:
        f = gmm_sigmoid_rest(c.alpha * ga, &r);
        fa = c.alpha * f * r;
        break;
    case GMM_GATE_SITU:
        s = gmm_sigmoid_rest(c.alpha * ga, &r);
        t = c.beta1 * gmm_tanh_slope(ga / c.beta1, &u);
        f = t * s;
        fa = u * s + c.alpha * f * r;
        break;
    default: f = ga; fa = 1.0f; break; /* GMM_ACT_NONE: the identity */
    }
    if (!gated) {
        *da = pass_a * fa;
        *db = 0.0f;
        return f;
    }
    {
        float lb = gmm__max(gmm__min(b, c.limit), -c.limit), ub = 1.0f;
        float pass_b = gmm__pick((b > c.limit) | (b < -c.limit), 0.0f, 1.0f);
        if (gate == GMM_GATE_SITU) lb = c.beta2 * gmm_tanh_slope(lb / c.beta2, &ub);
        lb += c.offset;
        *da = pass_a * fa * lb;
        *db = pass_b * ub * f;
        return f * lb;
    }
}

/* Columns of the pre-activation that output column j reads: the gate's, and (gated) the linear part's. */
GMM__HD int64_t gmm_glu_gate_column(int64_t j, int64_t interleave) {
    return interleave ? (j / interleave) * 2 * interleave + j % interleave : j;
}
GMM__HD int64_t gmm_glu_linear_column(int64_t j, int64_t ffn, int64_t interleave) {
    return gmm_glu_gate_column(j, interleave) + (interleave ? interleave : ffn);
}

#ifdef __cplusplus
}
#endif
#endif /* GMM_MOE_QUANT_H_INCLUDED */

/* ------------------------------------------------------------------------------------------ 8 Implementation --- */

#if defined(GMM_IMPLEMENTATION) && !defined(GMM__QUANT_IMPLEMENTATION_DONE)
#define GMM__QUANT_IMPLEMENTATION_DONE

#include <stdarg.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

GMMDEF int32_t gmm_dtype_bits(gmm_dtype dtype) {
    switch (dtype) {
#define GMM__X(name, value, text, bits) case name: return bits;
        GMM_DTYPE_LIST(GMM__X)
#undef GMM__X
    default: return 0;
    }
}

GMMDEF const char *gmm_dtype_name(gmm_dtype dtype) {
    switch (dtype) {
#define GMM__X(name, value, text, bits) case name: return #text;
        GMM_DTYPE_LIST(GMM__X)
#undef GMM__X
    default: return "?";
    }
}

GMMDEF const char *gmm_scaling_name(gmm_scaling scaling) {
    switch (scaling) {
#define GMM__X(name, value, text, dtype, rows, cols) case name: return #text;
        GMM_SCALING_LIST(GMM__X)
#undef GMM__X
    default: return "?";
    }
}

GMMDEF const char *gmm_status_name(gmm_status status) {
    switch (status) {
#define GMM__X(name, value, text) case name: return #name;
        GMM_STATUS_LIST(GMM__X)
#undef GMM__X
    default: return "?";
    }
}

GMMDEF const char *gmm_status_string(gmm_status status) {
    switch (status) {
#define GMM__X(name, value, text) case name: return text;
        GMM_STATUS_LIST(GMM__X)
#undef GMM__X
    default: return "unknown status";
    }
}

/* Records a failure where the caller can read it, and hands the status on. */
static GMM__UNUSED gmm_status gmm__fail(gmm_error *error, gmm_status status, const char *format, ...) {
    if (error) {
        va_list list;
        va_start(list, format);
        error->status = status;
        (void)vsnprintf(error->text, sizeof error->text, format, list);
        va_end(list);
    }
    return status;
}

/* a * b for extents that are >= 0; returns 0 and leaves *out alone where the product does not fit. */
static GMM__UNUSED int gmm__mul(int64_t a, int64_t b, int64_t *out) {
    if (a < 0 || b < 0 || (b != 0 && a > INT64_MAX / b)) return 0;
    *out = a * b;
    return 1;
}

static GMM__UNUSED int64_t gmm__min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t gmm__ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static int64_t gmm__round_up(int64_t a, int64_t b) { return gmm__ceil_div(a, b) * b; }

GMMDEF gmm_status gmm_layout_of(gmm_dtype dtype, gmm_scaling scaling, gmm_scale_order order, gmm_direction direction,
                                int64_t rows, int64_t cols, gmm_layout *out, gmm_error *error) {
    const int32_t bits = gmm_dtype_bits(dtype);
    const int fp8 = dtype == GMM_E4M3 || dtype == GMM_E5M2;
    const int columnwise = direction == GMM_COLUMNWISE;
    gmm_layout l = GMM_ZERO;
    int64_t elements, scale_elements = 0;
    int fits = 0;

    if (!out) return gmm__fail(error, GMM_E_NULL, "gmm_layout_of: out is NULL");
    if (rows < 0 || cols < 0)
        return gmm__fail(error, GMM_E_ARG, "gmm_layout_of: %lld x %lld: extents must be >= 0", (long long)rows,
                         (long long)cols);
    if (rows > INT64_MAX / 2 || cols > INT64_MAX / 2)
        return gmm__fail(error, GMM_E_OVERFLOW, "gmm_layout_of: %lld x %lld does not fit 64 bits", (long long)rows,
                         (long long)cols);
    switch (scaling) {
    case GMM_SCALING_NONE: fits = dtype == GMM_F32 || dtype == GMM_F16 || dtype == GMM_BF16; break;
    case GMM_SCALING_TENSOR:
    case GMM_SCALING_ROW:
    case GMM_SCALING_1X128:
    case GMM_SCALING_128X128: fits = fp8; break;
    case GMM_SCALING_MX32: fits = fp8 || dtype == GMM_E2M1; break;
    case GMM_SCALING_NV16: fits = dtype == GMM_E2M1; break;
    default: break;
    }
    if (!fits)
        return gmm__fail(error, GMM_E_DTYPE, "gmm_layout_of: dtype %s does not go with scaling %s",
                         gmm_dtype_name(dtype), gmm_scaling_name(scaling));
    if (order != GMM_SCALES_COMPACT &&
        (order != GMM_SCALES_SWIZZLED || (scaling != GMM_SCALING_MX32 && scaling != GMM_SCALING_NV16)))
        return gmm__fail(error, GMM_E_DTYPE, "gmm_layout_of: scaling %s has no scale order %d; SWIZZLED is for mx32 "
                         "and nv16", gmm_scaling_name(scaling), (int)order);

    l.transposed = columnwise && scaling != GMM_SCALING_NONE && scaling != GMM_SCALING_MX32;
    l.data_rows = l.transposed ? cols : rows;
    l.data_cols = l.transposed ? rows : cols;
    /* blocks run along `along`, one scale row or column per index of `across` */
    {
        const int64_t along = columnwise ? rows : cols, across = columnwise ? cols : rows;
        switch (scaling) {
        case GMM_SCALING_TENSOR: l.scale_dtype = GMM_F32; l.scale_rows = 1; l.scale_cols = 1; break;
        case GMM_SCALING_ROW: l.scale_dtype = GMM_F32; l.scale_rows = across; l.scale_cols = 1; break;
        case GMM_SCALING_1X128:
            l.scale_dtype = GMM_F32;
            l.scale_rows = gmm__ceil_div(along, 128);
            l.scale_cols = gmm__round_up(across, 4);
            break;
        case GMM_SCALING_128X128:
            l.scale_dtype = GMM_F32;
            l.scale_rows = gmm__ceil_div(across, 128);
            l.scale_cols = gmm__round_up(gmm__ceil_div(along, 128), 4);
            break;
        case GMM_SCALING_MX32:
            l.scale_dtype = GMM_E8M0;
            l.scale_rows = gmm__round_up(across, 128);
            l.scale_cols = gmm__round_up(gmm__ceil_div(along, 32), 4);
            if (columnwise && order == GMM_SCALES_COMPACT) { /* stored like the data: blocks of rows by columns */
                const int64_t swap = l.scale_rows;
                l.scale_rows = l.scale_cols;
                l.scale_cols = swap;
            }
            break;
        case GMM_SCALING_NV16:
            l.scale_dtype = GMM_E4M3;
            l.scale_rows = gmm__round_up(across, 128);
            l.scale_cols = gmm__round_up(gmm__ceil_div(along, 16), 4);
            break;
        default: break;
        }
    }
    if (bits == 4 && l.data_cols % 2 != 0)
        return gmm__fail(error, GMM_E_ARG, "gmm_layout_of: %lld x %lld %s: rows of %lld 4-bit elements do not fill "
                         "bytes", (long long)rows, (long long)cols, gmm_dtype_name(dtype), (long long)l.data_cols);
    if (!gmm__mul(rows, cols, &elements) || !gmm__mul(elements, bits, &l.data_bytes) ||
        !gmm__mul(l.scale_rows, l.scale_cols, &scale_elements) ||
        !gmm__mul(scale_elements, gmm_dtype_bits(l.scale_dtype) / 8, &l.scale_bytes))
        return gmm__fail(error, GMM_E_OVERFLOW, "gmm_layout_of: %lld x %lld %s does not fit 64 bits", (long long)rows,
                         (long long)cols, gmm_dtype_name(dtype));
    l.data_bytes /= 8;
    *out = l;
    return GMM_OK;
}

#ifdef __cplusplus
}
#endif
#endif /* GMM_IMPLEMENTATION */

/* ------------------------------------------------------------------------------------------------- 9 Licence ---
 * MIT License, text in the file LICENSE of the repository and below.
 *
 * Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
 * documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
 * rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to
 * permit persons to whom the Software is furnished to do so, subject to the following conditions: The above copyright
 * notice and this permission notice shall be included in all copies or substantial portions of the Software.
 *
 * THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
 * WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS
 * OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
 * OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
 */
