/* gmm_quant.h - v0.1.0 - formats of mixture-of-experts compute: dtypes, operands, groups, codecs, layouts - MIT
 * SPDX-License-Identifier: MIT
 *
 * Quick start: gmm.h includes this header. Alone it serves for its codecs and layout queries:
 *
 *     #define GMM_IMPLEMENTATION          // in exactly one .c or .cu file of the program
 *     #include "gmm_quant.h"
 *
 *     uint16_t bits = gmm_f32_to_bf16(1.5f);
 *     gmm_layout lay = GMM_ZERO;          // bytes that a 2880 x 2880 MXFP8 weight takes, scales in 128x4 tiles
 *     gmm_layout_of(GMM_E4M3, GMM_SCALING_MX32, GMM_SCALES_SWIZZLED, GMM_ROWWISE, 2880, 2880, &lay, NULL);
 *
 * CONTENTS
 *     1  Linkage               5  Codecs                       9  Host quantizer
 *     2  Version               6  Layout queries              10  Activation arithmetic
 *     3  Status, dtypes        7  Quantization arithmetic     11  Implementation
 *     4  Operands and groups   8  Recipes                     12  Licence
 *
 * CONFIGURATION (define before the first gmm include of a translation unit)
 *     GMM_IMPLEMENTATION   once per program: this unit holds the functions. Never undefine it.
 *     GMM_STATIC           functions become static to this unit, which must define GMM_IMPLEMENTATION too.
 *     GMM_PARTS, GMM_PART  split the implementation over several units that compile side by side. Each of them defines
 *                          GMM_IMPLEMENTATION, the same GMM_PARTS (1 to 8), the same other macros, and its own GMM_PART
 *                          from 0 to GMM_PARTS - 1; all are linked. Results are those of one unit, to the bit.
 *     GMM_NO_QUANT         leaves out FP8, MX and NV formats: calls that compute with such operands or recipes, or save
 *                          E4M3, are refused with GMM_E_BUILD. Codecs, layouts and recipes remain.
 *     GMM_NO_F16           leaves out GPU kernels for F16: such operands are refused with GMM_E_BUILD in GPU contexts.
 *     GMMDEF               linkage of every function; default: extern with hidden visibility on ELF. Every unit of a
 *                          program must see the same value. Hidden means that another shared object cannot link
 *                          against these functions, and that two copies in one process never mix. For a shared object
 *                          that bindings load (dlsym, ctypes) export them:
 *                              #define GMMDEF extern __attribute__((visibility("default")))
 *                          gmm_create and other static inline functions are in the headers alone: gmm_create calls
 *                          gmm__create with GMM_VERSION_NUMBER.
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

/* The declarations are both C and C++, so they cast as C does, and private names hold two underscores, which C++
   reserves. Between these two macros, C++ compilers warn of neither. */
#if defined(__cplusplus) && defined(__clang__)
#define GMM_QUIET_BEGIN \
    _Pragma("clang diagnostic push") _Pragma("clang diagnostic ignored \"-Wunknown-warning-option\"") \
    _Pragma("clang diagnostic ignored \"-Wold-style-cast\"") \
    _Pragma("clang diagnostic ignored \"-Wreserved-identifier\"")
#define GMM_QUIET_END _Pragma("clang diagnostic pop")
#elif defined(__cplusplus) && defined(__GNUC__)
#define GMM_QUIET_BEGIN _Pragma("GCC diagnostic push") _Pragma("GCC diagnostic ignored \"-Wold-style-cast\"")
#define GMM_QUIET_END _Pragma("GCC diagnostic pop")
#else
#define GMM_QUIET_BEGIN
#define GMM_QUIET_END
#endif

GMM_QUIET_BEGIN

/* ------------------------------------------------------------------------------------------------- 1 Linkage --- */

#if defined(GMM_STATIC) && !defined(GMM_IMPLEMENTATION)
#error "gmm: GMM_STATIC needs GMM_IMPLEMENTATION before the first gmm include of the same file"
#endif

/* GMM__HOLDS(slice): whether this unit of a split implementation holds slice number `slice` of it. */
#if defined(GMM_PARTS) != defined(GMM_PART)
#error "gmm: GMM_PARTS and GMM_PART go together: define both, or none"
#elif !defined(GMM_PARTS)
#define GMM__HOLDS(slice) 1
#elif GMM_PARTS < 1 || GMM_PARTS > 8 || GMM_PART < 0 || GMM_PART >= GMM_PARTS
#error "gmm: GMM_PARTS must be 1 to 8, and GMM_PART 0 to GMM_PARTS - 1"
#elif defined(GMM_STATIC)
#error "gmm: GMM_STATIC needs the whole implementation in one unit; it does not go with GMM_PARTS"
#else
#define GMM__HOLDS(slice) ((slice) % GMM_PARTS == GMM_PART)
#endif

#if defined(__GNUC__) || defined(__clang__)
#define GMM__UNUSED __attribute__((unused))
#define GMM__HIDDEN __attribute__((visibility("hidden")))
#define GMM__FORCE_INLINE __inline__ __attribute__((always_inline))
/* For functions with many callers, whose copies would take seconds to compile. */
#define GMM__NOINLINE __attribute__((noinline)) GMM__UNUSED
#else
#define GMM__UNUSED
#define GMM__HIDDEN
#define GMM__FORCE_INLINE inline
#define GMM__NOINLINE
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
    X(GMM_I64, 10, i64, 64) \
    X(GMM_F64, 11, f64, 64)

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

/* Families of recipes, in the order of their precision; with NONE operands keep their 16- or 32-bit dtype. What each
   role gets is decided where the recipe is used. X(name, value, lower-case name) */
#define GMM_RECIPE_LIST(X) \
    X(GMM_RECIPE_NONE, 0, "none") \
    X(GMM_RECIPE_FP8_DELAYED, 1, "fp8-delayed") \
    X(GMM_RECIPE_FP8_CURRENT, 2, "fp8-current") \
    X(GMM_RECIPE_FP8_BLOCK, 3, "fp8-block") \
    X(GMM_RECIPE_MXFP8, 4, "mxfp8") \
    X(GMM_RECIPE_NVFP4, 5, "nvfp4")

typedef enum gmm_recipe_kind {
#define GMM__X(name, value, text) name = value,
    GMM_RECIPE_LIST(GMM__X)
#undef GMM__X
    GMM_RECIPE_KIND_MAX = 0x7fffffff
} gmm_recipe_kind;

/* -------------------------------------------------------------------------------------- 4 Operands and groups --- */

/* Every descriptor that a call takes alone opens with struct_size: 0 means the size this header declares; a smaller
   value is the size of an older version (none has less than 8 bytes), whose missing fields read as 0; a larger one is
   GMM_E_VERSION. Those in arrays have none, so that the arrays' elements have one size. Zeroed fields mean the
   default. */

enum {
    GMM_MAT_TABLE_ON_HOST = 1u, /* table and scale_table are host arrays; a captured graph freezes their contents */
    GMM_MAT_ROW_AMAX = 2u,      /* amax holds one value per row instead of one per group (row-scaled NVFP4) */
    GMM_MAT_E4M3_256 = 4u       /* NV16: scales were made with 256 as the largest (gmm_format.e4m3_256) */
};

/* One operand: a matrix, or one matrix per group. Row-major; ld counts elements.
   Activations (one row per token) stand in one buffer of capacity rows: data is set. Weights, biases and their
   gradients are packed (data, group after group at group_stride) or one pointer per group (table); exactly one of the
   two is set. A bias is a matrix of one row. Elements, fp32 scales and amax are aligned to their size, tables to that
   of pointers; an engine may want more, and says so. Size queries need no address, so they can come before allocation
   (gmm_info.engine says what they assume); but whether an optional output's pointer is NULL tells them whether it is
   wanted. */
typedef struct gmm_mat {
    uint32_t struct_size;
    gmm_dtype dtype;             /* of the elements */
    gmm_scaling scaling;         /* GMM_SCALING_NONE for F32, F16, BF16 */
    gmm_scale_order scale_order; /* of scale */
    uint32_t flags;              /* GMM_MAT_* */
    int32_t hadamard;            /* columnwise NV16: 0 = as it is, else transformed: gmm_format.hadamard */
    int64_t ld;                  /* elements from row to row; 0 = columns. Rows and columns of a quantized copy are
                                    those that it stores (gmm_layout): a transposed copy of groups has
                                    gmm_padded_capacity columns */
    int64_t group_stride;        /* packed, per group: elements from group to group; 0 = rows * ld */
    void *data;                  /* packed elements */
    void *const *table;          /* [groups] addresses of elements */
    void *scale;                 /* packed dequantization scales, groups as gmm_layout_of places them */
    void *const *scale_table;    /* [groups] addresses of scales, with table */
    float *amax;                 /* [groups] or [rows]: global amax of NV16, amax of TENSOR (there it may be NULL) */
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

/* Bits that faulty values in device memory, and in a CPU context that is given the word, set in gmm_groups.fault. The
   call stays in bounds: a negative size counts as 0, offsets are made monotonic, and rows past the capacity are cut
   off. */
enum {
    GMM_FAULT_NEGATIVE = 1u,  /* a size below 0 */
    GMM_FAULT_CAPACITY = 2u,  /* more rows than the capacity */
    GMM_FAULT_MONOTONIC = 4u, /* offsets that fall, or do not start at 0 */
    GMM_FAULT_ALIGN = 8u,     /* a size breaks the row_align promise; results are right nevertheless */
    GMM_FAULT_INDEX = 16u,    /* an expert index outside [-1, experts); an entry of a map or of an index of gathered
                                 rows past its matrix */
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
    uint32_t *fault;     /* word in the context's memory, OR-ed with GMM_FAULT_*; to be looked at after the call. NULL:
                            a CPU context refuses a faulty split before anything is written, GMM_E_SPLIT (but for a
                            broken row_align promise); a GPU context reports nothing */
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

/* The small formats: E4M3 and E5M2 as bytes, E2M1 as a nibble (0 to 15), E8M0 as a byte. fp32 is rounded to nearest
   even and saturates at the largest finite value; a NaN becomes 0x7F (E2M1, which has none: +6) and loses its sign.
   The _nosat forms give NaN (E4M3) or infinity (E5M2) where the others saturate.
   E8M0 holds powers of two from 2^-127 to 2^127: the smallest one >= |x|. What exceeds 2^127 saturates to it, or with
   _nosat becomes NaN, 0xFF, as a NaN does. */
GMM__HD uint32_t gmm__encode_small(float x, uint32_t mantissa, uint32_t min_exponent, uint32_t sign_bit,
                                   uint32_t largest, uint32_t overflow, uint32_t nan) {
    const uint32_t u = gmm_f32_bits(x), a = u & 0x7FFFFFFFu;
    const uint32_t e = a >> 23; /* min_exponent: that of the smallest normal value */
    const uint32_t denormal_shift = e < min_exponent ? min_exponent - e : 0u;
    const uint32_t exponent = e < min_exponent ? 0u : e - min_exponent;
    const uint32_t shift = 23u - mantissa + denormal_shift, drop = shift > 25u ? 25u : shift;
    const uint32_t significand = (a & 0x7FFFFFu) | (e ? 0x800000u : 0u);
    const uint32_t rem = significand & ((1u << drop) - 1u), half = 1u << (drop - 1u);
    uint32_t q = significand >> drop;
    q += (uint32_t)(rem > half || (rem == half && (q & 1u)));
    q += exponent << mantissa; /* a carry out of the mantissa has raised the exponent */
    q = q > largest ? overflow : q;
    return a > 0x7F800000u ? nan : (u >> 31) * sign_bit | q;
}
GMM__HD uint8_t gmm_f32_to_e4m3(float x) {
    return (uint8_t)gmm__encode_small(x, 3u, 121u, 0x80u, 0x7Eu, 0x7Eu, 0x7Fu);
}
GMM__HD uint8_t gmm_f32_to_e4m3_nosat(float x) {
    return (uint8_t)gmm__encode_small(x, 3u, 121u, 0x80u, 0x7Eu, 0x7Fu, 0x7Fu);
}
GMM__HD uint8_t gmm_f32_to_e5m2(float x) {
    return (uint8_t)gmm__encode_small(x, 2u, 113u, 0x80u, 0x7Bu, 0x7Bu, 0x7Fu);
}
GMM__HD uint8_t gmm_f32_to_e5m2_nosat(float x) {
    return (uint8_t)gmm__encode_small(x, 2u, 113u, 0x80u, 0x7Bu, 0x7Cu, 0x7Fu);
}
GMM__HD uint8_t gmm_f32_to_e2m1(float x) { return (uint8_t)gmm__encode_small(x, 1u, 127u, 8u, 7u, 7u, 7u); }

GMM__HD float gmm_e4m3_to_f32(uint8_t code) {
    const uint32_t a = code & 0x7Fu, sign = (code & 0x80u) << 24;
    /* a subnormal is a * 2^-9: exact, and built from an integer so that no flag flushes it */
    const uint32_t tiny = a ? gmm_f32_bits((float)(int32_t)a) - (9u << 23) : 0u;
    return gmm_f32_from_bits(sign | (a == 0x7Fu ? 0x7FFFFFFFu : a < 8u ? tiny : (a << 20) + (120u << 23)));
}
GMM__HD float gmm_e5m2_to_f32(uint8_t code) { return gmm_f16_to_f32((uint16_t)(code << 8)); }
GMM__HD float gmm_e2m1_to_f32(uint8_t code) {
    const uint32_t a = code & 7u, sign = (code & 8u) << 28;
    return gmm_f32_from_bits(sign | (a == 0u ? 0u : a == 1u ? 0x3F000000u : (a << 22) + (126u << 23)));
}
/* Element of E4M3, E5M2 or E2M1 from its code, and back. */
GMM__HD float gmm_decode_small(gmm_dtype dtype, uint8_t code) {
    return dtype == GMM_E4M3 ? gmm_e4m3_to_f32(code) : dtype == GMM_E5M2 ? gmm_e5m2_to_f32(code)
                                                                         : gmm_e2m1_to_f32(code);
}
GMM__HD uint8_t gmm_encode_small(gmm_dtype dtype, float x) {
    return dtype == GMM_E4M3 ? gmm_f32_to_e4m3(x) : dtype == GMM_E5M2 ? gmm_f32_to_e5m2(x) : gmm_f32_to_e2m1(x);
}

GMM__HD uint8_t gmm_f32_to_e8m0(float x) {
    const uint32_t a = gmm_f32_bits(x) & 0x7FFFFFFFu, e = a >> 23, m = a & 0x7FFFFFu;
    if (a > 0x7F800000u) return 0xFFu;
    if (e == 255u) return 0xFEu;
    return (uint8_t)(e + (uint32_t)(m != 0u && e != 254u && !(e == 0u && m <= 0x400000u)));
}
GMM__HD uint8_t gmm_f32_to_e8m0_nosat(float x) {
    return (gmm_f32_bits(x) & 0x7FFFFFFFu) > 0x7F000000u ? (uint8_t)0xFFu : gmm_f32_to_e8m0(x);
}
GMM__HD float gmm_e8m0_to_f32(uint8_t k) {
    return gmm_f32_from_bits(k == 255u ? 0x7FFFFFFFu : k == 0u ? 0x00400000u : (uint32_t)k << 23);
}
/* 2^(127 - k): the encode scale of scale byte k, by which elements are multiplied when they are quantized. */
GMM__HD float gmm_e8m0_reciprocal(uint8_t k) {
    return gmm_f32_from_bits(k == 255u ? 0x7FFFFFFFu : k == 254u ? 0x00400000u : (254u - k) << 23);
}

/* Element i of packed E2M1: the low nibble holds the even one. */
GMM__HD uint8_t gmm_nibble(const void *base, int64_t i) {
    return (uint8_t)(((const uint8_t *)base)[i / 2] >> (i & 1) * 4 & 15);
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
GMMDEF const char *gmm_recipe_name(gmm_recipe_kind kind); /* "fp8-block" */
GMMDEF const char *gmm_status_name(gmm_status status);   /* "GMM_E_ARG" */
GMMDEF const char *gmm_status_string(gmm_status status); /* a sentence */

/* Storage of a rows x cols matrix in a format.
   Shapes: as Transformer Engine and cuBLASLt lay them out. FP8 copies for the other direction are transposed
       (TENSOR, 1X128, 128X128, NV16) or keep the row-major order (MX32). Padded scale extents: 1X128 rounds the
       un-blocked extent to 4; 128X128 rounds the blocked columns to 4; MX32 and NV16 round to tiles of 128 x 4.
   Errors: GMM_E_NULL (out), GMM_E_ARG (negative extent, unknown direction, rows of an odd number of 4-bit elements),
       GMM_E_DTYPE (dtype and scaling do not go together, or an order that the scaling lacks), GMM_E_OVERFLOW. */
GMMDEF gmm_status gmm_layout_of(gmm_dtype dtype, gmm_scaling scaling, gmm_scale_order order, gmm_direction direction,
                                int64_t rows, int64_t cols, gmm_layout *out, gmm_error *error);

/* Byte of the scale of row i and scale column j in a SWIZZLED buffer of `scale_cols` columns (a multiple of 4). */
GMM__HD int64_t gmm_swizzle_offset(int64_t i, int64_t j, int64_t scale_cols) {
    return ((i / 128) * (scale_cols / 4) + j / 4) * 512 + (i % 32) * 16 + ((i % 128) / 32) * 4 + j % 4;
}

/* Word of four power-of-two fp32 scales of consecutive blocks, as DeepGEMM reads them on sm_100: their exponent bytes,
   the first in the lowest. 2^-127 becomes 0, as in E8M0. */
GMM__HD uint32_t gmm_scale_exponents(const float scale[4]) {
    return (gmm_f32_bits(scale[0]) >> 23 & 255u) | (gmm_f32_bits(scale[1]) >> 23 & 255u) << 8 |
           (gmm_f32_bits(scale[2]) >> 23 & 255u) << 16 | (gmm_f32_bits(scale[3]) >> 23 & 255u) << 24;
}

/* Order of a block's scales in memory, and where grouped copies of activations place theirs.
   A copy is seen as lines: the rows of the matrix (ROWWISE) or its columns (COLUMNWISE); blocks run along a line.
   Groups of device-resident sizes start at multiples of GMM_GROUP_ROWS in every place that has blocks of rows: group g
   begins at start(g), the sum of gmm_group_rows(size) over the groups before it. Its scales are those of
   gmm_layout_of for gmm_group_rows(size) rows, and follow those of the groups before it. Its elements stand
       ROWWISE, and COLUMNWISE of MX32   in the rows of the source, not padded
       COLUMNWISE of the others          transposed: element (row r, column c) in row c, column start(g) + r of one
                                         matrix for all groups; the columns between the group's rows and start(g + 1)
                                         are zeros. With a Hadamard transform those of the last block of 16 rows hold
                                         the transform of its rows and of zeros behind them, which products need
   TENSOR has one scale per group, ROW one per row (ROWWISE, as in the source) or [groups][columns] (COLUMNWISE).
   128X128 is for matrices of fixed extents alone. */
enum { GMM_GROUP_ROWS = 128 };

GMM__HD int64_t gmm__ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
GMM__HD int64_t gmm__round_up(int64_t a, int64_t b) { return gmm__ceil_div(a, b) * b; }
GMM__HD int64_t gmm_group_rows(int64_t rows) { return gmm__round_up(rows, GMM_GROUP_ROWS); }
/* The largest start(groups) that `capacity` rows can have. */
GMM__HD int64_t gmm_padded_capacity(int32_t groups, int64_t capacity) {
    const int64_t partial = groups < capacity ? groups : capacity;
    return (capacity + partial * (GMM_GROUP_ROWS - 1)) / GMM_GROUP_ROWS * GMM_GROUP_ROWS;
}

/* Elements along a line that share a scale; 0 = the whole line. */
GMM__HD int32_t gmm_block_along(gmm_scaling scaling) {
    return scaling == GMM_SCALING_1X128 || scaling == GMM_SCALING_128X128 ? 128
           : scaling == GMM_SCALING_MX32 ? 32 : scaling == GMM_SCALING_NV16 ? 16 : 0;
}
/* Index of the scale of line l and block j in a copy of `lines` x `along` elements, counted in scales. */
GMM__HD int64_t gmm_scale_index(gmm_scaling scaling, gmm_scale_order order, gmm_direction direction, int64_t lines,
                                int64_t along, int64_t l, int64_t j) {
    int64_t line_scales;
    switch ((int)scaling) {
    case GMM_SCALING_ROW: return l;
    case GMM_SCALING_1X128: return j * gmm__round_up(lines, 4) + l;
    case GMM_SCALING_128X128: return l / 128 * gmm__round_up(gmm__ceil_div(along, 128), 4) + j;
    case GMM_SCALING_MX32:
    case GMM_SCALING_NV16:
        line_scales = gmm__round_up(gmm__ceil_div(along, gmm_block_along(scaling)), 4);
        if (order == GMM_SCALES_SWIZZLED) return gmm_swizzle_offset(l, j, line_scales);
        return scaling == GMM_SCALING_MX32 && direction == GMM_COLUMNWISE ? j * gmm__round_up(lines, 128) + l
                                                                          : l * line_scales + j;
    default: return 0;
    }
}
/* Index of the first scale of group g, which starts at row `row` of the source and at `start` among padded rows. */
GMM__HD int64_t gmm_scale_base(gmm_scaling scaling, gmm_direction direction, int64_t cols, int64_t g, int64_t row,
                               int64_t start) {
    const int rowwise = direction == GMM_ROWWISE;
    const int32_t along = gmm_block_along(scaling);
    switch ((int)scaling) {
    case GMM_SCALING_TENSOR: return g;
    case GMM_SCALING_ROW: return rowwise ? row : g * cols;
    case GMM_SCALING_1X128: return rowwise ? gmm__ceil_div(cols, 128) * start : start / 128 * gmm__round_up(cols, 4);
    case GMM_SCALING_MX32:
    case GMM_SCALING_NV16:
        return rowwise ? start * gmm__round_up(gmm__ceil_div(cols, along), 4)
                       : start / along * gmm__round_up(cols, 128);
    default: return 0;
    }
}

/* Storage of a copy of activations: `capacity` rows of `cols` columns, split over `groups` groups, at its largest.
   data_cols is the least leading dimension of the elements; scale_rows and scale_cols are 0.
   Errors: as gmm_layout_of, which takes the same arguments; GMM_E_DTYPE (128X128), GMM_E_ARG (groups below 1). */
GMMDEF gmm_status gmm_layout_of_groups(gmm_dtype dtype, gmm_scaling scaling, gmm_scale_order order,
                                       gmm_direction direction, int32_t groups, int64_t capacity, int64_t cols,
                                       gmm_layout *out, gmm_error *error);

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
/* -------------------------------------------------------------------------------- 7 Quantization arithmetic --- */

/* Single fp32 operations, rounded to nearest even and never contracted, so that CPU and GPU agree to the bit whatever
   flags the CUDA compiler gets. The host must be compiled without -ffast-math and run without FTZ and DAZ. Values are
   compared by their bits, which no flag flushes. */
GMM__HD float gmm__fmul(float a, float b) {
#ifdef __CUDA_ARCH__
    return gmm__ptx_mul_rn_f32(a, b);
#else
    return a * b;
#endif
}
GMM__HD float gmm__fadd(float a, float b) {
#ifdef __CUDA_ARCH__
    return gmm__ptx_add_rn_f32(a, b);
#else
    return a + b;
#endif
}
GMM__HD float gmm__fdiv(float a, float b) {
#ifdef __CUDA_ARCH__
    return gmm__ptx_div_rn_f32(a, b);
#else
    return a / b;
#endif
}
/* The smaller of a non-negative value and the largest finite one. */
GMM__HD float gmm__finite_cap(float x) { return gmm_f32_bits(x) > 0x7F7FFFFFu ? gmm_f32_from_bits(0x7F7FFFFFu) : x; }

/* max(amax, |x|) on the bits of non-negative values. A NaN in x is ignored. */
GMM__HD uint32_t gmm_amax_bits(uint32_t amax, float x) {
    const uint32_t a = gmm_f32_bits(x) & 0x7FFFFFFFu;
    return a > 0x7F800000u || a < amax ? amax : a;
}

/* Largest finite value of a dtype; 0 if it has none. */
GMM__HD float gmm_dtype_largest(gmm_dtype dtype) {
    switch ((int)dtype) {
    case GMM_F32: return gmm_f32_from_bits(0x7F7FFFFFu);
    case GMM_BF16: return gmm_f32_from_bits(0x7F7F0000u);
    case GMM_F16: return 65504.0f;
    case GMM_E4M3: return 448.0f;
    case GMM_E5M2: return 57344.0f;
    case GMM_E2M1: return 6.0f;
    default: return 0.0f;
    }
}

/* Quantization scale of TENSOR, ROW, 1X128 and 128X128: elements are multiplied by it; what dequantizes is 1 / scale.
   qmax / max(amax, eps); 1 where amax is 0, Inf or NaN; `largest` (of fp32, or of the source dtype for blocks) where
   the quotient is infinite; floored to a power of two if pow2. */
GMM__HD float gmm_scale_from_amax(float amax, float qmax, float largest, float eps, int pow2) {
    float s;
    if (gmm_f32_bits(amax) < gmm_f32_bits(eps)) amax = eps;
    if (gmm_f32_bits(amax) == 0u || gmm_f32_bits(amax) >= 0x7F800000u) return 1.0f;
    s = gmm__fdiv(qmax, amax);
    if (gmm_f32_bits(s) >= 0x7F800000u) s = largest;
    return pow2 ? gmm_f32_from_bits(gmm_f32_bits(s) & 0xFF800000u) : s;
}
GMM__HD float gmm_scale_inverse(float scale) { return gmm__fdiv(1.0f, scale); }

/* E8M0 scale of an MX32 block: the least power of two by which amax still fits the dtype. Formats of 8 bits as in
   MXFP8; for E2M1 (MXFP4) the same rule with 6. One fp32 value of each dtype, next above its largest times 2^-127, gets
   2^-127 as well: it saturates by an ulp of fp32. An element next to the largest fp32 rounds to a code that means 2^128
   and dequantizes to Inf: |x| from 248 * 2^120 (E4M3), 240 * 2^120 (E5M2) or 224 * 2^120 (E2M1) on. */
GMM__HD uint8_t gmm_mx_scale(float amax, gmm_dtype dtype) {
    const uint32_t inverse = dtype == GMM_E4M3 ? 0x3B124925u : dtype == GMM_E5M2 ? 0x37924925u : 0x3E2AAAABu;
    return gmm_f32_to_e8m0(gmm__fmul(amax, gmm_f32_from_bits(inverse)));
}

/* NV16: what the global amax gives. `e4m3_max` is the largest scale byte, 448, or 256 with gmm_format.e4m3_256. */
typedef struct gmm_nv_global {
    float amax, e4m3_max;
    float scale;   /* S, the global encode scale: 6 e4m3_max / amax */
    float inverse; /* 1 / S */
    float mult;    /* S / 6 */
} gmm_nv_global;

GMM__HD gmm_nv_global gmm_nv_global_of(float amax, float e4m3_max) {
    gmm_nv_global n;
    n.amax = amax;
    n.e4m3_max = e4m3_max;
    n.scale = gmm__finite_cap(gmm__fdiv(6.0f * e4m3_max, amax));
    if (gmm_f32_bits(amax) == 0u || gmm_f32_bits(n.scale) == 0u) n.scale = 1.0f;
    n.inverse = gmm__fdiv(1.0f, n.scale);
    n.mult = gmm__fmul(n.scale, gmm_f32_from_bits(0x3E2AAAABu));
    return n;
}
/* Scale byte of a block, E4M3 without a sign; and its encode scale, by which its elements are multiplied.
   With gmm_format.four_over_six a block has two candidates instead. Each operation is rounded to fp32. With base =
   (amax / 6) S they are the scale bytes E4M3(base), by which amax becomes 6, and E4M3(1.5 base), by which it becomes 4,
   saturating at 448. Elements are coded by gmm_nv_encode of each byte and decoded as ((code scale) A) / (6 e4m3_max),
   A the global amax. The error of a candidate is the sum of |decoded - x|, or of its square, over the elements in their
   order; in a square tile each line has such a sum, and the sums of lines l and l + 8 are added, then those 4, 2 and 1
   apart. The second candidate is taken if its error is less; if errors are equal or one is NaN, the first. */
GMM__HD uint8_t gmm_nv_scale(const gmm_nv_global *n, float amax) {
    return gmm_f32_to_e4m3(gmm__finite_cap(gmm__fmul(amax, n->mult)));
}
GMM__HD float gmm_nv_encode(const gmm_nv_global *n, uint8_t scale) {
    return gmm__finite_cap(gmm__fdiv(1.0f, gmm__fmul(gmm_e4m3_to_f32(scale), n->inverse)));
}
/* What an element of a block is multiplied by when it is dequantized. The scale byte times an amax from 2^100 on could
   overflow, so that 2^16 of such an amax is applied last. */
GMM__HD float gmm_nv_decode(uint8_t scale, float amax, float e4m3_max) {
    const uint32_t inverse = e4m3_max == 256.0f ? 0x3A2AAAABu : 0x39C30C31u; /* 1 / 1536 and 1 / 2688 */
    const uint32_t bits = gmm_f32_bits(amax) & 0x7FFFFFFFu;
    const int large = bits >= (127u + 100u) << 23 && bits < 0x7F800000u;
    const float f = gmm__fmul(gmm_e4m3_to_f32(scale), large ? gmm__fmul(amax, 1.52587890625e-5f) : amax);
    return gmm__fmul(gmm__fmul(f, gmm_f32_from_bits(inverse)), large ? 65536.0f : 1.0f);
}

/* Philox4x32-10: four random words of a counter and a key. */
GMM__HD void gmm_philox(const uint32_t counter[4], uint64_t key, uint32_t out[4]) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32), c[4];
    int round;
    c[0] = counter[0]; c[1] = counter[1]; c[2] = counter[2]; c[3] = counter[3];
    for (round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const uint64_t p = (uint64_t)0xD2511F53u * c[0], q = (uint64_t)0xCD9E8D57u * c[2];
        c[0] = (uint32_t)(q >> 32) ^ c[1] ^ k0;
        c[2] = (uint32_t)(p >> 32) ^ c[3] ^ k1;
        c[1] = (uint32_t)q;
        c[3] = (uint32_t)p;
    }
    out[0] = c[0]; out[1] = c[1]; out[2] = c[2]; out[3] = c[3];
}
/* Random bytes of one block of 16: element i uses byte i % 4 (from the lowest) of word i / 4. They depend on seed and
   offset (the caller's state), the group (below 2^24), the block's index within the group (below 2^40) and the
   direction, so a group's bits depend on nothing else. Block j of line l has the index l B + j, B the blocks of a line.
   ROWWISE: l is the row counted from the group's first, B = ceil(columns / 16). COLUMNWISE: l is the column, B =
   ceil(rows / 16) of the group's own rows, without padding; so these bits change with the number of rows. */
GMM__HD void gmm_draw_block(uint64_t seed, uint64_t offset, int64_t group, int64_t block, gmm_direction direction,
                            uint32_t out[4]) {
    uint32_t counter[4];
    counter[0] = (uint32_t)block;
    counter[1] = (uint32_t)group ^ (uint32_t)((uint64_t)block >> 32) << 24;
    counter[2] = (uint32_t)offset;
    counter[3] = (uint32_t)(offset >> 32) ^ (uint32_t)direction << 31;
    gmm_philox(counter, seed, out);
}
/* E2M1 by stochastic rounding: up with the probability of the distance to the lower neighbour, in steps of 1/256.
   Beyond 6 it saturates; a NaN becomes +6. `byte` is 0 to 255. */
GMM__HD uint8_t gmm_f32_to_e2m1_random(float x, uint32_t byte) {
    const uint32_t u = gmm_f32_bits(x), a = u & 0x7FFFFFFFu, sign = u >> 28 & 8u;
    const float v = gmm_f32_from_bits(a), fraction = (float)(int32_t)byte * 0.00390625f;
    float t;
    uint32_t code;
    if (a > 0x7F800000u) return 7u;
    if (a >= 0x40C00000u) return (uint8_t)(sign | 7u); /* 6 and above */
    /* the fraction times a power of two is exact: one rounding */
    t = gmm__fadd(v, gmm__fmul(fraction, a < 0x40000000u ? 0.5f : a < 0x40800000u ? 1.0f : 2.0f));
    code = t < 2.0f ? (uint32_t)(int32_t)(t * 2.0f) : t < 4.0f ? 2u + (uint32_t)(int32_t)t
                                                              : 4u + (uint32_t)(int32_t)(t * 0.5f);
    return (uint8_t)(sign | (code > 7u ? 7u : code));
}

/* Random Hadamard transform of 16 values in place: y = 0.25 H16 (x .* s), each rounded to BF16; bit i of `signs` makes
   s_i = -1. Stages of strides 1, 2, 4, 8 in fp32. It is orthogonal: products of two transformed operands are those of
   the operands. */
enum { GMM_HADAMARD = 0x10000, GMM_HADAMARD_SIGNS = 0xD7E8 };
GMM__HD void gmm_hadamard16(float x[16], uint32_t signs) {
    int i, stride;
    for (i = 0; i < 16; i++) x[i] = gmm_f32_from_bits(gmm_f32_bits(x[i]) ^ (signs >> i & 1u) << 31);
    for (stride = 1; stride < 16; stride *= 2)
        for (i = 0; i < 16; i++)
            if (!(i & stride)) {
                const float a = x[i], b = x[i + stride];
                x[i] = gmm__fadd(a, b);
                x[i + stride] = gmm__fadd(a, gmm_f32_from_bits(gmm_f32_bits(b) ^ 0x80000000u));
            }
    for (i = 0; i < 16; i++) x[i] = gmm_bf16_to_f32(gmm_f32_to_bf16(gmm__fmul(x[i], 0.25f)));
}

/* One update of delayed scaling for one tensor: reads history[0], the amax since the last update (instead of it
   `reduced`, the maximum over ranks, if that is above 0), rolls history[0..length), whose entries are `stride` floats
   apart, and returns the next scale, from the largest entry or, if most_recent, from the last amax. An amax of 0
   changes nothing; one of Inf or NaN keeps the scale. */
GMM__HD float gmm_delayed_scale(float *history, int64_t stride, int32_t length, float qmax, int32_t margin,
                                int most_recent, float reduced, float scale) {
    const float last = gmm_f32_bits(reduced) == 0u ? history[0] : reduced;
    uint32_t amax = gmm_amax_bits(0u, last);
    int32_t i;
    float s;
    if ((gmm_f32_bits(last) & 0x7FFFFFFFu) == 0u) return scale;
    if (gmm_f32_bits(last) > 0x7F800000u) amax = 0x7F800000u; /* a NaN keeps the scale, as an infinity does */
    for (i = 1; i < length && !most_recent; i++) amax = gmm_amax_bits(amax, history[i * stride]);
    for (i = 1; i + 1 < length; i++) history[i * stride] = history[(i + 1) * stride];
    if (length > 1) history[(length - 1) * stride] = last;
    history[0] = 0.0f;
    if (amax == 0u || amax >= 0x7F800000u) return scale;
    s = gmm__fdiv(gmm_f32_from_bits(gmm_f32_bits(qmax) - ((uint32_t)margin << 23)), gmm_f32_from_bits(amax));
    return gmm__finite_cap(s);
}

/* ------------------------------------------------------------------------------------------------- 8 Recipes --- */

/* What a call that quantizes does. The amax of a tensor that ranks share is reduced (MAX) by the caller between AMAX
   and CAST. */
typedef enum gmm_quant_phase {
    GMM_QUANT_ALL = 0,
    GMM_QUANT_AMAX = 1, /* TENSOR (not delayed) and NV16 by group: writes the amax of the copies, nothing else */
    GMM_QUANT_CAST = 2, /* reads it */
    GMM_QUANT_PHASE_MAX = 0x7fffffff
} gmm_quant_phase;

/* How operands of one role are quantized. */
typedef struct gmm_format {
    uint32_t struct_size;
    gmm_dtype dtype;       /* E4M3, E5M2, E2M1; GMM_NONE: the operand is not quantized, and all else is 0 */
    gmm_scaling scaling;
    gmm_scale_order order; /* of the scales in memory */
    int32_t delayed;       /* TENSOR: 1 = by the scale of the last update, 0 = by the amax of the operand itself */
    int32_t pow2;          /* TENSOR (not delayed), ROW, 1X128, 128X128: scales are powers of two */
    int32_t square;        /* MX32, NV16: one scale per 32 x 32 or 16 x 16 tile; both copies then hold the same codes */
    int32_t hadamard;      /* NV16: the columnwise copy is transformed: 0 no, else GMM_HADAMARD | signs. BF16 sources */
    int32_t stochastic;    /* NV16: stochastic rounding */
    int32_t four_over_six; /* NV16: a block takes the better of two scales (section 7, gmm_nv_scale): 0 no, 1 by
                              absolute, 2 by squared error */
    int32_t e4m3_256;      /* NV16 with four_over_six: the largest scale is 256 instead of 448, so that the second
                              candidate, 1.5 times the first, does not saturate */
    int32_t row_amax;      /* NV16: a global amax per row instead of per group; rowwise copies only */
    float eps;             /* amax below it counts as eps; not delayed, not MX32 and NV16. 0 = none */
    uint32_t reserved[4];  /* 0; later settings go here, so that structures may hold a gmm_format by value */
} gmm_format;

/* What each role of a linear layer's operands gets. */
typedef struct gmm_recipe {
    uint32_t struct_size;
    gmm_recipe_kind kind;
    gmm_format input, weight, grad;
    int32_t margin;         /* delayed: scales leave this many powers of two of headroom, 0 to 63 */
    int32_t history_length; /* delayed: updates whose amax counts; 0 = 1024 */
    int32_t most_recent;    /* delayed: only the last update's amax counts */
    int32_t reserved;       /* 0 */
} gmm_recipe;

/* The recipe of a kind with its usual settings:
       FP8_DELAYED  E4M3, gradients E5M2, one scale per tensor from a history of 1024 amaxes
       FP8_CURRENT  E4M3, gradients E5M2, one scale per tensor from its own amax
       FP8_BLOCK    E4M3, power-of-two scales: 1x128, weights 128x128
       MXFP8        E4M3 in blocks of 32
       NVFP4        E2M1 in blocks of 16; weights in 16 x 16 tiles; input and gradient transformed for the weight
                    gradient; gradient rounded stochastically
   MXFP4 weights: set weight.dtype of MXFP8 to E2M1. Pure. Unknown kinds and NONE give zeros. */
GMMDEF gmm_recipe gmm_recipe_of(gmm_recipe_kind kind);

/* Checks a format, or a recipe with all its roles; pure.
   Errors: GMM_E_CONFIG, GMM_E_DTYPE, GMM_E_NULL, GMM_E_VERSION; error->text opens with the field's name. The rules:
       dtype and scaling go together as in gmm_layout_of; order as there; switches 0 or 1, what else as stated above
       stochastic excludes square and four_over_six; hadamard excludes square, four_over_six and row_amax; row_amax
           excludes square, stochastic and four_over_six
       kind and roles agree: FP8_DELAYED all TENSOR and delayed; FP8_CURRENT TENSOR or ROW; FP8_BLOCK 1X128, and for
           weights 128X128; MXFP8 MX32; NVFP4 NV16. A role may also stay unquantized, but not input or grad alone
       input and grad have the same hadamard, since their product is not transformed otherwise; weight has none
       four_over_six not for grad; stochastic for grad alone; row_amax for input alone */
GMMDEF gmm_status gmm_format_validate(const gmm_format *format, gmm_error *error);
GMMDEF gmm_status gmm_recipe_validate(const gmm_recipe *recipe, gmm_error *error);

/* What in and out features must be multiples of where an operand has this scaling: 16 elements for fp32 scales, 32 for
   MX32 and NV16, 1 for none. Pure. */
GMMDEF int32_t gmm_feature_align(gmm_scaling scaling);

/* ------------------------------------------------------------------------------------------ 9 Host quantizer --- */

/* 128 lines of 128 values: whole blocks of every scaling. */
enum { GMM_TILE = 128, GMM_TILE_BLOCKS = 8 };

typedef struct gmm_tile {
    const gmm_format *format; /* one that gmm_format_validate takes, whole; not checked again */
    gmm_dtype source;     /* dtype that the values came from */
    int32_t lines, along; /* of values, 1 to 128 each */
    const float *x;       /* [lines][GMM_TILE]; a line runs along the blocks. Hadamard: already transformed */
    const float *amax;    /* TENSOR (not delayed), ROW, NV16: amax of the group, or of each line if amax_per_line */
    int32_t amax_per_line;
    float scale;          /* delayed: the quantization scale */
    gmm_direction direction;
    uint64_t seed, offset; /* stochastic: gmm_draw_block of group and first_block + line * blocks_per_line + block */
    int64_t group, first_block, blocks_per_line;
} gmm_tile;

/* Quantizes a tile on the host: code[lines][GMM_TILE] gets a code per byte, scale[lines][GMM_TILE_BLOCKS] the stored
   scale of each block (bits of an fp32, or a scale byte): what dequantizes. Blocks that span lines (128X128, TENSOR)
   give every line its scale. `along` may be any; a block that is cut short counts the values it has. Pure. */
GMMDEF void gmm_quantize_tile(const gmm_tile *tile, uint8_t *code, uint32_t *scale);

/* ---------------------------------------------------------------------------------- 10 Activation arithmetic --- */

/* condition ? yes : no without a branch, so that compilers that preserve floating-point traps vectorise it. */
GMM__HD float gmm__fselect(int condition, float yes, float no) {
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
    return gmm__ptx_min_nan_f32(x, limit);
#else
    return gmm__fselect(x > limit, limit, x);
#endif
}
GMM__HD float gmm__max(float x, float limit) {
#ifdef __CUDA_ARCH__
    return gmm__ptx_max_nan_f32(x, limit);
#else
    return gmm__fselect(x < limit, limit, x);
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
    float t = gmm__fselect(c == c, c, 0.0f) * 1.44269504f;
    int32_t n = (int32_t)(t + gmm__fselect(t < 0.0f, -0.5f, 0.5f)), half = n / 2;
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
/* exp(x) for x <= 0, and 1 / x for x from 1 to 20: on the device one instruction of the special-function unit each,
   within 1e-5 of the value (results below 2^-126 become 0). */
GMM__HD float gmm__exp_nonpositive(float x) {
#ifdef __CUDA_ARCH__
    return gmm__ptx_ex2_approx_ftz_f32(x * 1.44269504f);
#else
    return gmm_exp(x);
#endif
}
GMM__HD float gmm__reciprocal(float x) {
#ifdef __CUDA_ARCH__
    return gmm__ptx_rcp_approx_ftz_f32(x);
#else
    return 1.0f / x;
#endif
}
/* -|x|; on the device it is part of the instruction that reads it. */
GMM__HD float gmm__negative_abs(float x) {
#ifdef __CUDA_ARCH__
    return -fabsf(x);
#else
    return gmm__fselect(x < 0.0f, x, -x);
#endif
}
/* The sigmoid s(x), and 1 - s(x) in *rest: neither loses digits in its tail. */
GMM__HD float gmm_sigmoid_rest(float x, float *rest) {
    float e = gmm__exp_nonpositive(gmm__negative_abs(x)), r = gmm__reciprocal(1.0f + e), q = e * r;
    *rest = gmm__fselect(x < 0.0f, r, q);
    return gmm__fselect(x < 0.0f, q, r);
}
GMM__HD float gmm_sigmoid(float x) {
    float rest;
    return gmm_sigmoid_rest(x, &rest);
}
/* tanh(x), and its derivative 1 - tanh(x)^2 in *slope. Near 0 the series, elsewhere (1 - e) / (1 + e), e = exp(-2a). */
GMM__HD float gmm_tanh_slope(float x, float *slope) {
    float a = gmm__fselect(x < 0.0f, -x, x), s = x * x;
    float e = gmm__exp_nonpositive(-2.0f * a), q = gmm__reciprocal(1.0f + e), quotient = (1.0f - e) * q;
    float series = x * (1.0f + s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f))));
    *slope = 4.0f * e * q * q;
    return gmm__fselect(a < 0.25f, series, gmm__fselect(x < 0.0f, -quotient, quotient));
}
GMM__HD float gmm_tanh(float x) {
    float slope;
    return gmm_tanh_slope(x, &slope);
}

/* a * b + c: rounded once on the device; on the host the compiler may round the product as well. */
GMM__HD float gmm__fma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
    return gmm__ptx_fma_rn_f32(a, b, c);
#else
    return a * b + c;
#endif
}
/* The standard normal distribution Phi(x) = (1 + erf(x / sqrt(2))) / 2, and its density in *density. Host and device
   are each within 1.5e-5 of the value (results below 2^-126 aside), the host for |x| up to 3 within 16 ulp; NaN
   propagates. The tail 1 - Phi(t), t = |x|, is exp(-t^2 / 2) / (t + 3) times a polynomial in q = (t - 3) / (t + 3),
   which was fitted to 6e-8 of the value for t up to 14.5. Beyond, the tail is 0 in fp32. */
GMM__HD float gmm_normal_cdf(float x, float *density) {
    float t = gmm__min(gmm__fselect(x < 0.0f, -x, x), 14.5f);
    float e = gmm__exp_nonpositive(-0.5f * t * t), r = gmm__reciprocal(t + 3.0f), q = gmm__fma(-6.0f, r, 1.0f), tail;
    float p = -2.62989740e-4f;
    p = gmm__fma(p, q, -8.97754817e-4f);
    p = gmm__fma(p, q, 1.07473230e-3f);
    p = gmm__fma(p, q, 6.92000711e-3f);
    p = gmm__fma(p, q, -1.04800932e-2f);
    p = gmm__fma(p, q, -4.72552853e-2f);
    p = gmm__fma(p, q, 2.30019399e-1f);
    p = gmm__fma(p, q, -5.09332328e-1f);
    p = gmm__fma(p, q, 7.29083668e-1f);
    tail = p * r * e;
    *density = 0.39894228f * e;
    return gmm__fselect(x < 0.0f, tail, 1.0f - tail);
}

/* The functions F of the gates. */
typedef enum gmm_gate {
    GMM_GATE_RELU,    /* max(a, 0) */
    GMM_GATE_RELU2,   /* max(a, 0)^2 */
    GMM_GATE_GELU,    /* a Phi(u), Phi by its tanh form, u = alpha a */
    GMM_GATE_QGELU,   /* a s(1.702 alpha a), s the sigmoid */
    GMM_GATE_SILU,    /* a s(alpha a) */
    GMM_GATE_SIGMOID, /* s(alpha a) */
    GMM_GATE_SITU,    /* beta1 tanh(a / beta1) s(alpha a) */
    GMM_GATE_GELU_ERF, /* a Phi(alpha a), Phi by erf: the default GELU of PyTorch and Megatron */
    GMM_GATE_MAX = 0x7fffffff
} gmm_gate;

/* X(name, value, lower-case name, gate, gated, alpha, betas). The last three are 1 where the activation is gated, takes
   gmm_act.alpha, and takes beta1 and beta2. A gated activation reads two values a (gate) and b (linear) per output:
       y = F(a') (U(b') + offset),  a' = min(a, limit),  b' = clamp(b, -limit, limit)
   and an ungated one y = F(a'). F of GMM_ACT_NONE is the identity; so is U, but for SiTU-GLU, where it is
   beta2 tanh(b' / beta2). A new activation is a row here and, if its F is new, a gate with its formula in
   gmm__act_point. */
#define GMM_ACT_LIST(X) \
    X(GMM_ACT_NONE, 0, none, GMM_GATE_MAX, 0, 0, 0) \
    X(GMM_ACT_RELU, 1, relu, GMM_GATE_RELU, 0, 0, 0) \
    X(GMM_ACT_RELU2, 2, relu2, GMM_GATE_RELU2, 0, 0, 0) \
    X(GMM_ACT_GELU, 3, gelu, GMM_GATE_GELU, 0, 1, 0) \
    X(GMM_ACT_QGELU, 4, qgelu, GMM_GATE_QGELU, 0, 1, 0) \
    X(GMM_ACT_SILU, 5, silu, GMM_GATE_SILU, 0, 1, 0) \
    X(GMM_ACT_GLU, 6, glu, GMM_GATE_SIGMOID, 1, 1, 0) \
    X(GMM_ACT_REGLU, 7, reglu, GMM_GATE_RELU, 1, 0, 0) \
    X(GMM_ACT_RELU2_GLU, 8, relu2_glu, GMM_GATE_RELU2, 1, 0, 0) \
    X(GMM_ACT_GEGLU, 9, geglu, GMM_GATE_GELU, 1, 1, 0) \
    X(GMM_ACT_QGEGLU, 10, qgeglu, GMM_GATE_QGELU, 1, 1, 0) \
    X(GMM_ACT_SWIGLU, 11, swiglu, GMM_GATE_SILU, 1, 1, 0) \
    X(GMM_ACT_SITUGLU, 12, situglu, GMM_GATE_SITU, 1, 1, 1) \
    X(GMM_ACT_GELU_ERF, 13, gelu_erf, GMM_GATE_GELU_ERF, 0, 1, 0) \
    X(GMM_ACT_GEGLU_ERF, 14, geglu_erf, GMM_GATE_GELU_ERF, 1, 1, 0)

typedef enum gmm_act_kind {
#define GMM__X(name, value, text, gate, gated, alpha, betas) name = value,
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
    float alpha;        /* finite slope inside the sigmoid or Phi; 0 = 1. Only gates that have one take another value */
    float offset;       /* finite, added to the linear part; gated only */
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

/* gmm_act_point; `limited` may be 0 where c.limit is infinite, which takes fewer instructions for the same bits.
   Source of the formulas: the derivatives of F and U above; GELU's tanh form is a s(2 u'), u' = 0.79788456 u
   (1 + 0.044715 u^2), which needs no tanh. */
GMM__HD float gmm__act_point(gmm_gate gate, int gated, int limited, gmm_act_coef c, float a, float b, float *da,
                             float *db) {
    float clamp_da = limited ? gmm__fselect(a > c.limit, 0.0f, 1.0f) : 1.0f, ga = limited ? gmm__min(a, c.limit) : a;
    float f, fa, s, r, t, u, v;
    switch ((int)gate) {
    case GMM_GATE_RELU: f = gmm__max(ga, 0.0f); fa = gmm__fselect(ga <= 0.0f, 0.0f, 1.0f); break;
    case GMM_GATE_RELU2: u = gmm__max(ga, 0.0f); f = u * u; fa = 2.0f * u; break;
    case GMM_GATE_GELU:
        u = c.alpha * ga;
        v = gmm__max(gmm__min(u, 16.0f), -16.0f); /* beyond, s is 0 or 1 in fp32, and the square could overflow */
        s = gmm_sigmoid_rest(2.0f * v * (0.79788456f + 0.03567741f * v * v), &r);
        f = ga * s;
        fa = s + 2.0f * v * (0.79788456f + 0.10703222f * v * v) * s * r;
        break;
    case GMM_GATE_GELU_ERF:
        u = c.alpha * ga;
        v = gmm__max(gmm__min(u, 16.0f), -16.0f); /* beyond, the density is 0, by which an infinity would give NaN */
        s = gmm_normal_cdf(v, &r);
        f = ga * s;
        fa = s + v * r;
        break;
    case GMM_GATE_QGELU:
        u = 1.702f * c.alpha;
        s = gmm_sigmoid_rest(u * ga, &r);
        f = ga * s;
        fa = s + u * (f * r); /* u * f could overflow where r is 0 */
        break;
    case GMM_GATE_SILU:
        s = gmm_sigmoid_rest(c.alpha * ga, &r);
        f = ga * s;
        fa = s + c.alpha * (f * r);
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
        *da = clamp_da * fa;
        *db = 0.0f;
        return f;
    }
    {
        float lb = limited ? gmm__max(gmm__min(b, c.limit), -c.limit) : b, ub = 1.0f;
        float clamp_db = limited ? gmm__fselect((b > c.limit) | (b < -c.limit), 0.0f, 1.0f) : 1.0f;
        if (gate == GMM_GATE_SITU) lb = c.beta2 * gmm_tanh_slope(lb / c.beta2, &ub);
        lb += c.offset;
        *da = clamp_da * fa * lb;
        *db = clamp_db * ub * f;
        return f * lb;
    }
}

/* One output and its derivatives dy/da, dy/db (fp32). With gated = 0, b is ignored and *db is 0. */
GMM__HD float gmm_act_point(gmm_gate gate, int gated, gmm_act_coef c, float a, float b, float *da, float *db) {
    return gmm__act_point(gate, gated, 1, c, a, b, da, db);
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
GMM_QUIET_END
#endif /* GMM_MOE_QUANT_H_INCLUDED */

/* ----------------------------------------------------------------------------------------- 11 Implementation --- */

#if defined(GMM_IMPLEMENTATION) && !defined(GMM__QUANT_IMPLEMENTATION_DONE)
#define GMM__QUANT_IMPLEMENTATION_DONE

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Stores the failure in *error, unless that is NULL, and returns the status. */
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

/* Checks the struct_size of a caller's struct, of which this version has `size` bytes, and writes the rule that it
   breaks: GMM_E_ARG if it is too small for any version, GMM_E_VERSION if the caller's is newer. */
static GMM__UNUSED gmm_status gmm__check_size(uint32_t struct_size, size_t size, char rule[96]) {
    if (struct_size && struct_size < 2 * sizeof struct_size) {
        (void)snprintf(rule, 96, "struct_size %u is too small for any version; write = GMM_ZERO", struct_size);
        return GMM_E_ARG;
    }
    if (struct_size <= size) return GMM_OK;
    (void)snprintf(rule, 96, "struct_size %u is larger than the %u bytes of version %s; write = GMM_ZERO", struct_size,
                   (unsigned)size, GMM_VERSION_STRING);
    return GMM_E_VERSION;
}
/* Copies a descriptor that opens with struct_size; fields that an older caller lacks become 0. */
static GMM__UNUSED gmm_status gmm__read_sized(void *dst, size_t size, const void *src, char rule[96]) {
    uint32_t struct_size;
    gmm_status s;
    memcpy(&struct_size, src, sizeof struct_size);
    if ((s = gmm__check_size(struct_size, size, rule)) != GMM_OK) return s;
    memset(dst, 0, size);
    memcpy(dst, src, struct_size ? struct_size : size);
    return GMM_OK;
}
/* The same, or nothing where a check will refuse the descriptor: returns whether it was copied. */
static GMM__UNUSED int gmm__copy_sized(void *dst, size_t size, const void *src) {
    char rule[96];
    return gmm__read_sized(dst, size, src, rule) == GMM_OK;
}
/* Members behind the struct_size of a format that a recipe holds become 0, as where the format stands alone. */
static GMM__UNUSED void gmm__complete_recipe(gmm_recipe *recipe) {
    gmm_format *const f[3] = { &recipe->input, &recipe->weight, &recipe->grad };
    int i;
    for (i = 0; i < 3; i++) {
        const gmm_format given = *f[i];
        (void)gmm__copy_sized(f[i], sizeof *f[i], &given);
    }
}

/* --- views of quantized operands, on the host and on the device --- */

/* Scales of one matrix of `lines` x `along` elements. */
GMM__HD int64_t gmm__scale_count(gmm_scaling scaling, int64_t lines, int64_t along) {
    switch (scaling) {
    case GMM_SCALING_TENSOR: return 1;
    case GMM_SCALING_ROW: return lines;
    case GMM_SCALING_1X128: return gmm__ceil_div(along, 128) * gmm__round_up(lines, 4);
    case GMM_SCALING_128X128: return gmm__ceil_div(lines, 128) * gmm__round_up(gmm__ceil_div(along, 128), 4);
    case GMM_SCALING_MX32:
    case GMM_SCALING_NV16:
        return gmm__round_up(lines, 128) * gmm__round_up(gmm__ceil_div(along, gmm_block_along(scaling)), 4);
    default: return 0;
    }
}

/* A copy of one group or matrix, as lines: its rows (ROWWISE) or columns (COLUMNWISE), along which blocks run. */
typedef struct gmm__qview {
    gmm_dtype dtype;
    gmm_scaling scaling;
    gmm_scale_order order;
    gmm_direction direction;
    int32_t mn_major;     /* place of element a of line l: 1: a * ld + l, as in the source (columnwise MX32);
                             0: l * ld + a */
    int32_t per_line;     /* amax has one value per line */
    int64_t ld;
    int64_t lines, along; /* lines and elements of a line, as the layout of the scales counts them (padded) */
    uint8_t *data;
    uint8_t *scale;
    float *amax;          /* NULL = none */
    float e4m3_max;
} gmm__qview;

/* Group or matrix g of a copy. Activations (grouped): the group's rows begin at row `row` of the source and at row
   `start` where groups are padded; matrices: row and start are 0. */
GMM__HD gmm__qview gmm__qview_of(const gmm_mat *m, gmm_direction direction, int grouped, int64_t g, int64_t row,
                                 int64_t start, int64_t rows, int64_t cols) {
    const int rowwise = direction == GMM_ROWWISE;
    const int64_t padded_rows = grouped ? gmm_group_rows(rows) : rows;
    const int64_t scale_bytes = m->scaling == GMM_SCALING_MX32 || m->scaling == GMM_SCALING_NV16 ? 1 : 4;
    int64_t element, scale;
    gmm__qview v;
    v.dtype = m->dtype;
    v.scaling = m->scaling;
    v.order = m->scale_order;
    v.direction = direction;
    v.mn_major = !rowwise && m->scaling == GMM_SCALING_MX32;
    v.per_line = (m->flags & (uint32_t)GMM_MAT_ROW_AMAX) != 0;
    v.ld = m->ld;
    v.lines = rowwise ? padded_rows : cols;
    v.along = rowwise ? cols : padded_rows;
    v.e4m3_max = m->flags & (uint32_t)GMM_MAT_E4M3_256 ? 256.0f : 448.0f;
    element = !grouped ? (m->table ? 0 : g * m->group_stride) : rowwise || v.mn_major ? row * m->ld : start;
    scale = grouped ? gmm_scale_base(m->scaling, direction, cols, g, row, start)
                    : m->scale_table ? 0 : g * gmm__scale_count(m->scaling, v.lines, v.along);
    v.data = (uint8_t *)(m->table ? m->table[g] : m->data);
    v.scale = (uint8_t *)(m->scale_table ? m->scale_table[g] : m->scale);
    if (v.data) v.data += m->dtype == GMM_E2M1 ? element / 2 : element;
    if (v.scale) v.scale += scale * scale_bytes;
    v.amax = m->amax ? m->amax + (v.per_line ? grouped ? row : g * rows : g) : NULL;
    return v;
}
GMM__HD int64_t gmm__qview_scale(const gmm__qview *v, int64_t l, int64_t j) {
    return gmm_scale_index(v->scaling, v->order, v->direction, v->lines, v->along, l, j);
}
GMM__HD uint8_t gmm__qview_code(const gmm__qview *v, int64_t l, int64_t a) {
    const int64_t i = v->mn_major ? a * v->ld + l : l * v->ld + a;
    return v->dtype == GMM_E2M1 ? gmm_nibble(v->data, i) : v->data[i];
}
/* Decode scale of block j of line l, by which its codes are multiplied. `whole` 0: only the part of it that differs by
   block, which is the scale byte of MX32 and NV16 and 1 for the others. */
GMM__HD float gmm__qview_factor(const gmm__qview *v, int64_t l, int64_t j, int whole) {
    const int64_t i = gmm__qview_scale(v, l, j);
    if (v->scaling == GMM_SCALING_MX32) return gmm_e8m0_to_f32(v->scale[i]);
    if (v->scaling == GMM_SCALING_NV16)
        return whole ? gmm_nv_decode(v->scale[i], v->amax[v->per_line ? l : 0], v->e4m3_max)
                     : gmm_e4m3_to_f32(v->scale[i]);
    return whole ? ((const float *)v->scale)[i] : 1.0f;
}
/* Copies the scales of tile (i, j) of 128 x 128 from a rowwise copy to the columnwise one, whose blocks are the same.
   The last tile of a column also writes the padding of these lines of scales. TENSOR and 128X128: one scale. */
GMM__HD void gmm__qview_transpose_scale(const gmm__qview *from, const gmm__qview *to, int64_t i, int64_t j) {
    const int tensor = to->scaling == GMM_SCALING_TENSOR;
    int64_t k;
    if (tensor && (i || j)) return;
    ((float *)(void *)to->scale)[tensor ? 0 : gmm__qview_scale(to, j * 128, i)] =
        ((const float *)(const void *)from->scale)[tensor ? 0 : gmm__qview_scale(from, i * 128, j)];
    if (tensor || i + 1 < gmm__ceil_div(to->along, 128)) return;
    for (k = i + 1; k % 4; k++) ((float *)(void *)to->scale)[gmm__qview_scale(to, j * 128, k)] = 0.0f;
}
/* NV16 of square blocks: 8 x 8 scales, and with the first tile the amax. Called by threads `first`, first + step, ...
   of a sequence. */
GMM__HD void gmm__qview_transpose_nv16_scales(const gmm__qview *from, const gmm__qview *to, int64_t i, int64_t j,
                                              int32_t first, int32_t step) {
    const int64_t used = gmm__ceil_div(to->along, 16), end = gmm__round_up(used, 4);
    int64_t k;
    for (k = first; k < 128 * 8; k += step) {
        const int64_t line = j * 128 + k / 8, block = i * 8 + k % 8;
        if (block < end)
            to->scale[gmm__qview_scale(to, line, block)] =
                line < to->lines && block < used ? from->scale[gmm__qview_scale(from, block * 16, line / 16)]
                                                 : (uint8_t)0;
    }
    if (first == 0 && i == 0 && j == 0) *to->amax = *from->amax;
}
/* One dequantized element; every NaN is 0x7FFFFFFF, so that CPU and GPU agree. */
GMM__HD float gmm__qview_value(float code, float decode_scale) {
    const float v = gmm__fmul(code, decode_scale);
    return (gmm_f32_bits(v) & 0x7FFFFFFFu) > 0x7F800000u ? gmm_f32_from_bits(0x7FFFFFFFu) : v;
}

/* --- products of scales --- */

/* A product of fp32 scales: value * 2^exponent, where 1 <= |value| < 2, or value is 0, Inf or NaN. Where the plain fp32
   product is normal, it is rounded like that; it neither overflows nor becomes subnormal in between. */
typedef struct gmm__scale {
    float value;
    int32_t exponent;
} gmm__scale;

GMM__HD float gmm__power_of_two(int32_t exponent) { return gmm_f32_from_bits((uint32_t)(exponent + 127) << 23); }
GMM__HD gmm__scale gmm__scale_of(float x) {
    const uint32_t a = gmm_f32_bits(x) & 0x7FFFFFFFu;
    gmm__scale s;
    s.value = x;
    s.exponent = 0;
    if (a == 0u || a >= 0x7F800000u) return s;
    if (a < 0x00800000u) { /* subnormal: the product is exact */
        s.value = gmm__fmul(x, gmm__power_of_two(24));
        s.exponent = -24;
    }
    s.exponent += (int32_t)(gmm_f32_bits(s.value) >> 23 & 255u) - 127;
    s.value = gmm_f32_from_bits((gmm_f32_bits(s.value) & 0x807FFFFFu) | 0x3F800000u);
    return s;
}
GMM__HD gmm__scale gmm__scale_times(gmm__scale s, float x) {
    const gmm__scale f = gmm__scale_of(x);
    gmm__scale p = gmm__scale_of(gmm__fmul(s.value, f.value));
    p.exponent += s.exponent + f.exponent;
    return p;
}
/* Splits a product of scales into two, by which a sum is multiplied one after the other: the product and 1 if it is
   normal; else a part with which sums of quantized elements stay normal, and a power of two. */
GMM__HD float gmm__scale_split(gmm__scale s, float *second) {
    const int32_t rest = s.exponent < -126 ? s.exponent + 94 : s.exponent > 127 ? s.exponent - 64 : 0;
    *second = gmm__power_of_two(rest < -126 ? -126 : rest > 127 ? 127 : rest);
    return gmm__fmul(s.value, gmm__power_of_two(rest < 0 ? -94 : rest > 0 ? 64 : s.exponent));
}
/* sum * (((alpha * a) * b) * inverse). `inverse`: 1, or of NV16 the reciprocal of 6 e4m3_max of each operand. */
GMM__HD float gmm__scale_sum(float sum, float alpha, float a, float b, float inverse) {
    float second;
    const float first = gmm__scale_split(
        gmm__scale_times(gmm__scale_times(gmm__scale_times(gmm__scale_of(alpha), a), b), inverse), &second);
    return gmm__fmul(gmm__fmul(sum, first), second);
}
GMM__HD int gmm__scale_normal(float x) { return (gmm_f32_bits(x) >> 23 & 255u) - 1u < 254u; }
/* Whether x is 0 or within 2^-32 and 2^32: the plain product of three such scales, also times
   the `inverse` of gmm__scale_sum, is normal or 0. */
GMM__HD int gmm__scale_moderate(float x) {
    const uint32_t a = gmm_f32_bits(x) & 0x7FFFFFFFu;
    return a == 0u || (a >> 23) - 95u < 64u;
}
/* The power of two by which the scale of a row's block is divided and that of a column's block is multiplied, so that
   the sum of 128 products of FP8 codes (0, or 2^-32 to 2^39) times the row's scale is a normal number. It is 1 but for
   extreme scales, and the second product loses nothing where the result is normal. */
GMM__HD float gmm__scale_lift(float row) {
    const uint32_t a = gmm_f32_bits(row) & 0x7FFFFFFFu;
    return gmm__power_of_two(a >= (85u + 127u) << 23 ? 40 : a != 0u && a < (127u - 94u) << 23 ? -55 : 0);
}

/* --- quantization of master weights that are sharded over ranks --- */

/* Arguments of gmm_shard_cast, with tables in the memory of the engine. The masters are `count` matrices of `rows` x
   `cols`, one after another; the shard is their elements [start, start + length). */
typedef struct gmm__shard_args {
    gmm_format format;
    gmm_dtype model;             /* dtype to which masters are rounded first */
    int64_t count, rows, cols, start, length;
    const float *master, *scale; /* [length] of the shard; [count] delayed: quantization scales */
    float *amax;                 /* in the order of gmm__shard_amax_at */
    gmm_mat copy[2]; /* by direction; dtype GMM_NONE = absent */
} gmm__shard_args;

/* Whether blocks of columnwise copies differ from those of rowwise copies, so that they have amaxes of their own. */
GMM__HD int gmm__shard_separate(const gmm_format *f) {
    return !f->square && (f->scaling == GMM_SCALING_1X128 || f->scaling == GMM_SCALING_MX32 ||
                          f->scaling == GMM_SCALING_NV16);
}
/* Rows and columns of the blocks that share a scale. */
GMM__HD void gmm__shard_extents(const gmm_format *f, int64_t rows, int64_t cols, int columnwise, int64_t extent[2]) {
    const int64_t along = gmm_block_along(f->scaling);
    const int separate = gmm__shard_separate(f);
    extent[0] = f->scaling == GMM_SCALING_TENSOR ? rows : separate && !columnwise ? 1 : along;
    extent[1] = f->scaling == GMM_SCALING_TENSOR ? cols : separate && columnwise ? 1 : along;
}
/* Number of blocks of all matrices. gmm__shard_amax_at is the index of a block's amax: those of NV16's matrices come
   first, then those of rowwise blocks, then those of columnwise blocks if they are separate. */
GMM__HD int64_t gmm__shard_blocks(const gmm_format *f, int64_t count, int64_t rows, int64_t cols, int columnwise) {
    int64_t extent[2];
    gmm__shard_extents(f, rows, cols, columnwise, extent);
    return count * gmm__ceil_div(rows, extent[0]) * gmm__ceil_div(cols, extent[1]);
}
GMM__HD int64_t gmm__shard_amax_at(const gmm__shard_args *s, int columnwise, int64_t member, int64_t row, int64_t col) {
    const gmm_format *f = &s->format;
    const int64_t first = (f->scaling == GMM_SCALING_NV16 ? s->count : 0) +
                          (columnwise && gmm__shard_separate(f)
                               ? gmm__shard_blocks(f, s->count, s->rows, s->cols, 0) : 0);
    int64_t extent[2];
    gmm__shard_extents(f, s->rows, s->cols, columnwise, extent);
    return first + (member * gmm__ceil_div(s->rows, extent[0]) + row / extent[0]) * gmm__ceil_div(s->cols, extent[1]) +
           col / extent[1];
}
/* Element i of the shard, rounded to the model's dtype. */
GMM__HD float gmm__shard_value(const gmm__shard_args *s, int64_t i) {
    const float v = s->master[i];
    return s->model == GMM_BF16 ? gmm_bf16_to_f32(gmm_f32_to_bf16(v))
           : s->model == GMM_F16 ? gmm_f16_to_f32(gmm_f32_to_f16(v)) : v;
}
/* The encode scale of an element's block, from amaxes that ranks have reduced. *stored: the scale as copies hold
   it. */
GMM__HD float gmm__shard_encode_scale(const gmm__shard_args *s, int columnwise, int64_t member, int64_t row,
                                      int64_t col, uint32_t *stored) {
    const gmm_format *f = &s->format;
    const float amax = f->delayed ? 0.0f : s->amax[gmm__shard_amax_at(s, columnwise, member, row, col)];
    float encode_scale;
    if (f->scaling == GMM_SCALING_NV16) {
        const gmm_nv_global n = gmm_nv_global_of(s->amax[member], 448.0f);
        *stored = gmm_nv_scale(&n, amax);
        return gmm_nv_encode(&n, (uint8_t)*stored);
    }
    if (f->scaling == GMM_SCALING_MX32) {
        *stored = gmm_mx_scale(amax, f->dtype);
        return gmm_e8m0_reciprocal((uint8_t)*stored);
    }
    encode_scale = f->delayed ? s->scale ? s->scale[member] : 1.0f
                              : gmm_scale_from_amax(
                                    amax, gmm_dtype_largest(f->dtype),
                                    gmm_dtype_largest(f->scaling == GMM_SCALING_TENSOR ? GMM_F32 : s->model),
                                    f->eps, f->pow2);
    *stored = gmm_f32_bits(gmm_scale_inverse(encode_scale));
    return encode_scale;
}
/* Extents of a matrix's scales with padding: *lines lines (128X128: blocks of lines) of *blocks scales. */
GMM__HD void gmm__shard_scales(const gmm__shard_args *s, int columnwise, int64_t *lines, int64_t *blocks) {
    const gmm_scaling scaling = s->format.scaling;
    const int64_t l = columnwise ? s->cols : s->rows, along = columnwise ? s->rows : s->cols;
    const int64_t width = gmm_block_along(scaling), b = width ? gmm__ceil_div(along, width) : 1;
    *lines = scaling == GMM_SCALING_TENSOR ? 1 : scaling == GMM_SCALING_128X128 ? gmm__ceil_div(l, 128)
             : scaling == GMM_SCALING_1X128 ? gmm__round_up(l, 4) : gmm__round_up(l, 128);
    *blocks = scaling == GMM_SCALING_TENSOR || scaling == GMM_SCALING_1X128 ? b : gmm__round_up(b, 4);
}
/* Stores scale i of all scales of a copy, padding included. */
GMM__HD void gmm__shard_store_scale(const gmm__shard_args *s, int columnwise, int64_t i) {
    const gmm_scaling scaling = s->format.scaling;
    const int64_t height = scaling == GMM_SCALING_128X128 ? 128 : 1, width = gmm_block_along(scaling);
    int64_t lines, blocks, member, line, block, index, line0, along0;
    uint32_t stored = 0;
    gmm__qview v;
    gmm__shard_scales(s, columnwise, &lines, &blocks);
    member = i / (lines * blocks);
    line = i / blocks % lines;
    block = i % blocks;
    v = gmm__qview_of(&s->copy[columnwise], columnwise ? GMM_COLUMNWISE : GMM_ROWWISE, 0, member, 0, 0, s->rows,
                      s->cols);
    line0 = line * height;
    along0 = block * width;
    index = gmm__qview_scale(&v, line0, block);
    if (line0 < v.lines && along0 < v.along)
        (void)gmm__shard_encode_scale(s, columnwise, member, columnwise ? along0 : line0, columnwise ? line0 : along0,
                                      &stored);
    if (scaling == GMM_SCALING_MX32 || scaling == GMM_SCALING_NV16) v.scale[index] = (uint8_t)stored;
    else ((uint32_t *)(void *)v.scale)[index] = stored;
    if (line == 0 && block == 0 && v.amax && s->amax && !s->format.delayed &&
        (scaling == GMM_SCALING_NV16 || scaling == GMM_SCALING_TENSOR))
        *v.amax = s->amax[member];
}
/* Whether a copy is transposed: the elements of a column are contiguous. */
GMM__HD int gmm__shard_transposed(const gmm__shard_args *s, int columnwise) {
    return columnwise && s->format.scaling != GMM_SCALING_MX32;
}
/* Stores the codes of elements 2 i and 2 i + 1 of all matrices, if they are in the shard. Two codes of E2M1 share a
   byte; a matrix has an even number of elements. */
GMM__HD void gmm__shard_store_pair(const gmm__shard_args *s, int columnwise, int64_t i) {
    const int64_t size = s->rows * s->cols, member = 2 * i / size;
    const gmm__qview v = gmm__qview_of(&s->copy[columnwise], columnwise ? GMM_COLUMNWISE : GMM_ROWWISE, 0, member, 0, 0,
                                       s->rows, s->cols);
    int64_t e;
    for (e = 2 * i; e < 2 * i + 2; e++) {
        const int64_t row = e % size / s->cols, col = e % s->cols, index = row * v.ld + col;
        uint32_t stored;
        uint8_t code;
        if (e < s->start || e >= s->start + s->length) continue;
        code = gmm_encode_small(v.dtype, gmm__fmul(gmm__shard_value(s, e - s->start),
                                                   gmm__shard_encode_scale(s, columnwise, member, row, col, &stored)));
        if (v.dtype != GMM_E2M1) v.data[index] = code;
        else
            v.data[index / 2] = (uint8_t)((v.data[index / 2] & (index & 1 ? 0x0F : 0xF0)) |
                                          code << (index & 1 ? 4 : 0));
    }
}
/* Rows of a strip. They have one scale in each column, and their codes fill bytes. */
enum { GMM__SHARD_STRIP = 8 };
GMM__HD int64_t gmm__shard_strips(const gmm__shard_args *s) { return gmm__ceil_div(s->rows, GMM__SHARD_STRIP); }
/* Stores the codes of one column of a strip in the transposed copy, as far as they are in the shard. The strips of all
   matrices follow one another: i = strip * cols + column. */
GMM__HD void gmm__shard_store_column(const gmm__shard_args *s, int64_t i) {
    const int64_t strip = i / s->cols, col = i % s->cols, member = strip / gmm__shard_strips(s);
    const int64_t row = strip % gmm__shard_strips(s) * GMM__SHARD_STRIP;
    const int64_t rows = s->rows - row < GMM__SHARD_STRIP ? s->rows - row : (int64_t)GMM__SHARD_STRIP;
    const int64_t first = (member * s->rows + row) * s->cols + col - s->start; /* element of the strip's first row */
    const gmm__qview v = gmm__qview_of(&s->copy[1], GMM_COLUMNWISE, 0, member, 0, 0, s->rows, s->cols);
    const int32_t bits = v.dtype == GMM_E2M1 ? 4 : 8;
    uint8_t *dst = v.data + (col * v.ld + row) * bits / 8;
    uint32_t stored, mine = 0; /* bit r: the element of row r is in the shard */
    const float encode_scale = gmm__shard_encode_scale(s, 1, member, row, col, &stored);
    uint64_t codes = 0;
    int32_t r;
    for (r = 0; r < rows; r++) {
        const int64_t e = first + r * s->cols;
        if (e < 0 || e >= s->length) continue;
        mine |= 1u << r;
        codes |= (uint64_t)gmm_encode_small(v.dtype, gmm__fmul(gmm__shard_value(s, e), encode_scale)) << r * bits;
    }
    if (mine == (1u << GMM__SHARD_STRIP) - 1 && !((uintptr_t)dst & (uintptr_t)(bits - 1))) {
        if (bits == 8) *(uint64_t *)(void *)dst = codes;
        else *(uint32_t *)(void *)dst = (uint32_t)codes;
        return;
    }
    for (r = 0; r < rows; r++) {
        const uint8_t code = (uint8_t)(codes >> r * bits);
        if (!(mine >> r & 1)) continue;
        if (bits == 8) dst[r] = code;
        else dst[r / 2] = (uint8_t)((dst[r / 2] & (r & 1 ? 0x0F : 0xF0)) | (code & 15) << (r & 1 ? 4 : 0));
    }
}
/* The codes of a copy are stored in parts [*begin, *end). */
GMM__HD void gmm__shard_parts(const gmm__shard_args *s, int columnwise, int64_t *begin, int64_t *end) {
    const int64_t last = s->start + s->length - 1, size = s->rows * s->cols;
    *begin = *end = 0;
    if (s->length == 0) return;
    if (gmm__shard_transposed(s, columnwise)) {
        const int64_t strips = gmm__shard_strips(s);
        *begin = (s->start / size * strips + s->start % size / s->cols / GMM__SHARD_STRIP) * s->cols;
        *end = (last / size * strips + last % size / s->cols / GMM__SHARD_STRIP + 1) * s->cols;
    } else {
        *begin = s->start / 2;
        *end = last / 2 + 1;
    }
}
GMM__HD void gmm__shard_store_part(const gmm__shard_args *s, int columnwise, int64_t i) {
    if (gmm__shard_transposed(s, columnwise)) gmm__shard_store_column(s, i);
    else gmm__shard_store_pair(s, columnwise, i);
}

/* The functions of this header stand in one unit; what precedes stands in every unit of the implementation. */
#if GMM__HOLDS(0)

GMMDEF int32_t gmm_dtype_bits(gmm_dtype dtype) {
    switch (dtype) {
#define GMM__X(name, value, text, bits) case name: return bits;
        GMM_DTYPE_LIST(GMM__X)
#undef GMM__X
    default: return 0;
    }
}

GMMDEF GMM__NOINLINE const char *gmm_dtype_name(gmm_dtype dtype) {
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

GMMDEF const char *gmm_recipe_name(gmm_recipe_kind kind) {
    switch (kind) {
#define GMM__X(name, value, text) case name: return text;
        GMM_RECIPE_LIST(GMM__X)
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

/* A matrix and its format, whose storage is asked for. */
typedef struct gmm__layout_query {
    gmm_dtype dtype;
    gmm_scaling scaling;
    gmm_scale_order order;
    gmm_direction direction;
    int64_t rows, cols;
} gmm__layout_query;

/* gmm_layout_of; error messages name `function`. */
static gmm_status gmm__layout(const char *function, const gmm__layout_query *q, gmm_layout *out, gmm_error *error) {
    const gmm_dtype dtype = q->dtype;
    const gmm_scaling scaling = q->scaling;
    const gmm_scale_order order = q->order;
    const gmm_direction direction = q->direction;
    const int64_t rows = q->rows, cols = q->cols;
    const int32_t bits = gmm_dtype_bits(dtype);
    const int fp8 = dtype == GMM_E4M3 || dtype == GMM_E5M2;
    const int columnwise = direction == GMM_COLUMNWISE;
    gmm_layout l = GMM_ZERO;
    int64_t elements, scale_elements = 0;
    int fits = 0;

    if (!out) return gmm__fail(error, GMM_E_NULL, "%s: out is NULL", function);
    if (rows < 0 || cols < 0)
        return gmm__fail(error, GMM_E_ARG, "%s: %lld x %lld: extents must be >= 0", function,
                         (long long)rows, (long long)cols);
    if (direction != GMM_ROWWISE && direction != GMM_COLUMNWISE)
        return gmm__fail(error, GMM_E_ARG, "%s: direction %d is neither rowwise (0) nor columnwise (1)",
                         function, (int)direction);
    if (rows > INT64_MAX / 2 || cols > INT64_MAX / 2)
        return gmm__fail(error, GMM_E_OVERFLOW, "%s: %lld x %lld does not fit 64 bits", function,
                         (long long)rows, (long long)cols);
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
        return gmm__fail(error, GMM_E_DTYPE, "%s: dtype %s (%d) does not go with scaling %s (%d)", function,
                         gmm_dtype_name(dtype), (int)dtype, gmm_scaling_name(scaling), (int)scaling);
    if (order != GMM_SCALES_COMPACT &&
        (order != GMM_SCALES_SWIZZLED || (scaling != GMM_SCALING_MX32 && scaling != GMM_SCALING_NV16)))
        return gmm__fail(error, GMM_E_DTYPE, "%s: scaling %s has no scale order %d; SWIZZLED is for mx32 and nv16",
                         function, gmm_scaling_name(scaling), (int)order);

    l.transposed = columnwise && scaling != GMM_SCALING_NONE && scaling != GMM_SCALING_MX32;
    l.data_rows = l.transposed ? cols : rows;
    l.data_cols = l.transposed ? rows : cols;
    /* blocks run along the `lines` lines of `along` elements */
    {
        const int64_t along = columnwise ? rows : cols, lines = columnwise ? cols : rows;
        switch (scaling) {
        case GMM_SCALING_TENSOR: l.scale_dtype = GMM_F32; l.scale_rows = 1; l.scale_cols = 1; break;
        case GMM_SCALING_ROW: l.scale_dtype = GMM_F32; l.scale_rows = lines; l.scale_cols = 1; break;
        case GMM_SCALING_1X128:
            l.scale_dtype = GMM_F32;
            l.scale_rows = gmm__ceil_div(along, 128);
            l.scale_cols = gmm__round_up(lines, 4);
            break;
        case GMM_SCALING_128X128:
            l.scale_dtype = GMM_F32;
            l.scale_rows = gmm__ceil_div(lines, 128);
            l.scale_cols = gmm__round_up(gmm__ceil_div(along, 128), 4);
            break;
        case GMM_SCALING_MX32:
            l.scale_dtype = GMM_E8M0;
            l.scale_rows = gmm__round_up(lines, 128);
            l.scale_cols = gmm__round_up(gmm__ceil_div(along, 32), 4);
            if (columnwise && order == GMM_SCALES_COMPACT) { /* stored like the data: blocks of rows by columns */
                const int64_t swap = l.scale_rows;
                l.scale_rows = l.scale_cols;
                l.scale_cols = swap;
            }
            break;
        case GMM_SCALING_NV16:
            l.scale_dtype = GMM_E4M3;
            l.scale_rows = gmm__round_up(lines, 128);
            l.scale_cols = gmm__round_up(gmm__ceil_div(along, 16), 4);
            break;
        default: break;
        }
    }
    if (bits == 4 && l.data_cols % 2 != 0)
        return gmm__fail(error, GMM_E_ARG, "%s: %lld x %lld %s: rows of %lld 4-bit elements do not fill bytes",
                         function, (long long)rows, (long long)cols, gmm_dtype_name(dtype), (long long)l.data_cols);
    if (!gmm__mul(rows, cols, &elements) || !gmm__mul(elements, bits, &l.data_bytes) ||
        !gmm__mul(l.scale_rows, l.scale_cols, &scale_elements) ||
        !gmm__mul(scale_elements, gmm_dtype_bits(l.scale_dtype) / 8, &l.scale_bytes))
        return gmm__fail(error, GMM_E_OVERFLOW, "%s: %lld x %lld %s does not fit 64 bits", function,
                         (long long)rows, (long long)cols, gmm_dtype_name(dtype));
    l.data_bytes /= 8;
    *out = l;
    return GMM_OK;
}

GMMDEF gmm_status gmm_layout_of(gmm_dtype dtype, gmm_scaling scaling, gmm_scale_order order, gmm_direction direction,
                                int64_t rows, int64_t cols, gmm_layout *out, gmm_error *error) {
    gmm__layout_query q;
    q.dtype = dtype;
    q.scaling = scaling;
    q.order = order;
    q.direction = direction;
    q.rows = rows;
    q.cols = cols;
    return gmm__layout("gmm_layout_of", &q, out, error);
}

GMMDEF gmm_status gmm_layout_of_groups(gmm_dtype dtype, gmm_scaling scaling, gmm_scale_order order,
                                       gmm_direction direction, int32_t groups, int64_t capacity, int64_t cols,
                                       gmm_layout *out, gmm_error *error) {
    const int rowwise = direction == GMM_ROWWISE;
    gmm__layout_query q;
    gmm_layout l = GMM_ZERO;
    gmm_status s;
    int64_t scales, elements;
    int fits;
    if (!out) return gmm__fail(error, GMM_E_NULL, "gmm_layout_of_groups: out is NULL");
    if (groups < 1) return gmm__fail(error, GMM_E_ARG, "gmm_layout_of_groups: groups %d must be >= 1", groups);
    if (scaling == GMM_SCALING_128X128)
        return gmm__fail(error, GMM_E_DTYPE, "gmm_layout_of_groups: scaling 128x128 is for matrices of fixed extents");
    if (capacity < 0 || capacity > INT64_MAX / 256)
        return gmm__fail(error, capacity < 0 ? GMM_E_ARG : GMM_E_OVERFLOW, "gmm_layout_of_groups: capacity %lld must "
                         "be >= 0 and fit 64 bits when padded", (long long)capacity);
    q.dtype = dtype;
    q.scaling = scaling;
    q.order = order;
    q.direction = direction;
    q.rows = gmm_padded_capacity(groups, capacity);
    q.cols = cols;
    s = gmm__layout("gmm_layout_of_groups", &q, &l, error);
    if (s != GMM_OK) return s;
    if (scaling == GMM_SCALING_TENSOR) fits = gmm__mul(groups, 4, &l.scale_bytes);
    else if (scaling == GMM_SCALING_ROW)
        fits = gmm__mul(rowwise ? capacity : groups, rowwise ? 4 : cols, &scales) &&
               gmm__mul(scales, rowwise ? 1 : 4, &l.scale_bytes);
    else fits = 1;
    if (!fits)
        return gmm__fail(error, GMM_E_OVERFLOW, "gmm_layout_of_groups: scales of %lld x %lld do not fit 64 bits",
                         (long long)capacity, (long long)cols);
    if (!l.transposed) {
        l.data_rows = capacity;
        elements = capacity * cols; /* fits, since the padded rows did */
        l.data_bytes = elements / 8 * gmm_dtype_bits(dtype) + elements % 8 * gmm_dtype_bits(dtype) / 8;
    }
    l.scale_rows = l.scale_cols = 0;
    *out = l;
    return GMM_OK;
}

GMMDEF int32_t gmm_feature_align(gmm_scaling scaling) {
    switch (scaling) {
    case GMM_SCALING_NONE: return 1;
    case GMM_SCALING_MX32:
    case GMM_SCALING_NV16: return 32;
    default: return 16;
    }
}

GMMDEF gmm_recipe gmm_recipe_of(gmm_recipe_kind kind) {
    gmm_recipe r = GMM_ZERO;
    gmm_scaling scaling = GMM_SCALING_TENSOR;
    switch (kind) {
    case GMM_RECIPE_FP8_DELAYED:
    case GMM_RECIPE_FP8_CURRENT: break;
    case GMM_RECIPE_FP8_BLOCK: scaling = GMM_SCALING_1X128; break;
    case GMM_RECIPE_MXFP8: scaling = GMM_SCALING_MX32; break;
    case GMM_RECIPE_NVFP4: scaling = GMM_SCALING_NV16; break;
    default: return r;
    }
    r.kind = kind;
    r.input.dtype = kind == GMM_RECIPE_NVFP4 ? GMM_E2M1 : GMM_E4M3;
    r.input.scaling = scaling;
    r.input.delayed = kind == GMM_RECIPE_FP8_DELAYED;
    r.input.pow2 = kind == GMM_RECIPE_FP8_BLOCK;
    r.weight = r.grad = r.input;
    if (scaling == GMM_SCALING_TENSOR) r.grad.dtype = GMM_E5M2;
    if (kind == GMM_RECIPE_FP8_BLOCK) r.weight.scaling = GMM_SCALING_128X128;
    if (kind == GMM_RECIPE_NVFP4) {
        r.weight.square = 1;
        r.input.hadamard = r.grad.hadamard = GMM_HADAMARD | GMM_HADAMARD_SIGNS;
        r.grad.stochastic = 1;
    }
    return r;
}

/* Checks a format; `role` ("weight." or "") opens the name of the field. */
static gmm_status gmm__check_format(const gmm_format *format, const char *role, gmm_error *error) {
    gmm_format f;
    gmm_layout l;
    gmm_error unused = GMM_ZERO;
    gmm_status s;
    char rule[96];
    int nv, mx, fp8;
    uint32_t i;
    if ((s = gmm__read_sized(&f, sizeof f, format, rule)) != GMM_OK) return gmm__fail(error, s, "%s%s", role, rule);
    if (f.dtype == GMM_NONE) { /* an operand that is not quantized has no other setting */
        f.struct_size = 0;
        for (i = 0; i < sizeof f; i++)
            if (((const unsigned char *)&f)[i])
                return gmm__fail(error, GMM_E_CONFIG, "%sdtype: none, but other fields are set", role);
        return GMM_OK;
    }
    if (f.scaling == GMM_SCALING_NONE || gmm_layout_of(f.dtype, f.scaling, f.order, GMM_ROWWISE, 0, 0, &l, &unused))
        return gmm__fail(error, GMM_E_DTYPE, "%s%s: dtype %s (%d), scaling %s (%d) and order %d do not go together",
                         role, f.order != GMM_SCALES_COMPACT && f.scaling != GMM_SCALING_NONE ? "order" : "scaling",
                         gmm_dtype_name(f.dtype), (int)f.dtype, gmm_scaling_name(f.scaling), (int)f.scaling,
                         (int)f.order);
    nv = f.scaling == GMM_SCALING_NV16;
    mx = f.scaling == GMM_SCALING_MX32;
    fp8 = !nv && !mx;
    {
        const struct { const char *field; double value; int wrong; const char *rule; } rules[] = {
            { "delayed", (double)f.delayed, f.delayed & ~1 || (f.delayed && f.scaling != GMM_SCALING_TENSOR),
              "must be 0, or 1 with scaling tensor" },
            { "pow2", (double)f.pow2, f.pow2 & ~1 || (f.pow2 && (!fp8 || f.delayed)),
              "must be 0, or 1 with fp32 scales that are not delayed" },
            { "square", (double)f.square, f.square & ~1 || (f.square && fp8), "must be 0, or 1 with mx32 or nv16" },
            { "hadamard", (double)f.hadamard,
              f.hadamard && (!nv || (f.hadamard & ~0xFFFF) != GMM_HADAMARD || f.square || f.row_amax),
              "must be 0, or GMM_HADAMARD and 16 sign bits with nv16 without square and row_amax" },
            { "stochastic", (double)f.stochastic,
              f.stochastic & ~1 || (f.stochastic && (!nv || f.square || f.four_over_six)),
              "must be 0, or 1 with nv16 without square and four_over_six" },
            { "four_over_six", (double)f.four_over_six,
              f.four_over_six < 0 || f.four_over_six > 2 || (f.four_over_six && (!nv || f.hadamard || f.row_amax)),
              "must be 0, or 1 or 2 with nv16 without hadamard and row_amax" },
            { "e4m3_256", (double)f.e4m3_256, f.e4m3_256 & ~1 || (f.e4m3_256 && !f.four_over_six),
              "must be 0, or 1 with four_over_six" },
            { "row_amax", (double)f.row_amax, f.row_amax & ~1 || (f.row_amax && (!nv || f.square || f.stochastic)),
              "must be 0, or 1 with nv16 without square and stochastic" },
            { "eps", (double)f.eps,
              gmm_f32_bits(f.eps) >= 0x7F800000u || (gmm_f32_bits(f.eps) && (!fp8 || f.delayed)),
              "must be 0, or finite and above 0 with fp32 scales that are not delayed" },
            { "reserved", (double)(f.reserved[0] | f.reserved[1] | f.reserved[2] | f.reserved[3]),
              (f.reserved[0] | f.reserved[1] | f.reserved[2] | f.reserved[3]) != 0, "must be 0" } };
        for (i = 0; i < sizeof rules / sizeof rules[0]; i++)
            if (rules[i].wrong)
                return gmm__fail(error, GMM_E_CONFIG, "%s%s: %.10g %s (dtype %s, scaling %s)", role, rules[i].field,
                                 rules[i].value, rules[i].rule, gmm_dtype_name(f.dtype), gmm_scaling_name(f.scaling));
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_format_validate(const gmm_format *format, gmm_error *error) {
    return format ? gmm__check_format(format, "", error) : gmm__fail(error, GMM_E_NULL, "format: is NULL");
}

/* Whether an operand of a recipe may have this scaling. */
static int gmm__recipe_takes(gmm_recipe_kind kind, int weight, const gmm_format *f) {
    switch (kind) {
    case GMM_RECIPE_FP8_DELAYED: return f->scaling == GMM_SCALING_TENSOR && f->delayed;
    case GMM_RECIPE_FP8_CURRENT:
        return (f->scaling == GMM_SCALING_TENSOR || f->scaling == GMM_SCALING_ROW) && !f->delayed;
    case GMM_RECIPE_FP8_BLOCK:
        return f->scaling == GMM_SCALING_1X128 || (weight && f->scaling == GMM_SCALING_128X128);
    case GMM_RECIPE_MXFP8: return f->scaling == GMM_SCALING_MX32;
    case GMM_RECIPE_NVFP4: return f->scaling == GMM_SCALING_NV16;
    default: return 0;
    }
}

GMMDEF gmm_status gmm_recipe_validate(const gmm_recipe *recipe, gmm_error *error) {
    static const char *const roles[3] = { "input.", "weight.", "grad." };
    gmm_recipe r;
    const gmm_format *f[3];
    gmm_status s;
    char rule[96];
    int i;
    if (!recipe) return gmm__fail(error, GMM_E_NULL, "recipe: is NULL");
    if ((s = gmm__read_sized(&r, sizeof r, recipe, rule)) != GMM_OK) return gmm__fail(error, s, "%s", rule);
    gmm__complete_recipe(&r);
    f[0] = &r.input;
    f[1] = &r.weight;
    f[2] = &r.grad;
    if (r.kind < GMM_RECIPE_NONE || r.kind > GMM_RECIPE_NVFP4)
        return gmm__fail(error, GMM_E_CONFIG, "kind: %d is no recipe", (int)r.kind);
    for (i = 0; i < 3; i++) {
        const gmm_status s = gmm__check_format(f[i], roles[i], error);
        if (s != GMM_OK) return s;
        if (f[i]->dtype != GMM_NONE && !gmm__recipe_takes(r.kind, i == 1, f[i]))
            return gmm__fail(error, GMM_E_CONFIG, "%sscaling: %s%s does not belong to recipe %s", roles[i],
                             f[i]->delayed ? "delayed " : "", gmm_scaling_name(f[i]->scaling), gmm_recipe_name(r.kind));
    }
    if ((r.input.dtype == GMM_NONE) != (r.grad.dtype == GMM_NONE))
        return gmm__fail(error, GMM_E_CONFIG, "grad.dtype: %s and input.dtype %s: both are quantized or none, for the "
                         "weight gradient multiplies them", gmm_dtype_name(r.grad.dtype),
                         gmm_dtype_name(r.input.dtype));
    if (r.input.hadamard != r.grad.hadamard)
        return gmm__fail(error, GMM_E_CONFIG, "grad.hadamard: 0x%x must be that of input, 0x%x: their product is that "
                         "of the operands only if both are transformed alike", (unsigned)r.grad.hadamard,
                         (unsigned)r.input.hadamard);
    if (r.weight.hadamard)
        return gmm__fail(error, GMM_E_CONFIG, "weight.hadamard: 0x%x must be 0: its products are with operands that "
                         "are not transformed", (unsigned)r.weight.hadamard);
    if (r.grad.four_over_six)
        return gmm__fail(error, GMM_E_CONFIG, "grad.four_over_six: %d must be 0: it is for input and weight",
                         r.grad.four_over_six);
    if (r.input.stochastic || r.weight.stochastic)
        return gmm__fail(error, GMM_E_CONFIG, "%s.stochastic: 1 must be 0: only grad is rounded stochastically",
                         r.input.stochastic ? "input" : "weight");
    if (r.weight.row_amax || r.grad.row_amax)
        return gmm__fail(error, GMM_E_CONFIG, "%s.row_amax: only input takes one amax per row",
                         r.weight.row_amax ? "weight" : "grad");
    if (r.margin < 0 || r.margin > 63 || (r.margin && r.kind != GMM_RECIPE_FP8_DELAYED))
        return gmm__fail(error, GMM_E_CONFIG, "margin: %d must be 0, or up to 63 with delayed scaling", r.margin);
    if (r.history_length < 0 || (r.history_length && r.kind != GMM_RECIPE_FP8_DELAYED))
        return gmm__fail(error, GMM_E_CONFIG, "history_length: %d must be 0, or at least 1 with delayed scaling",
                         r.history_length);
    if (r.most_recent & ~1 || (r.most_recent && r.kind != GMM_RECIPE_FP8_DELAYED))
        return gmm__fail(error, GMM_E_CONFIG, "most_recent: %d must be 0, or 1 with delayed scaling",
                         r.most_recent);
    if (r.reserved) return gmm__fail(error, GMM_E_CONFIG, "reserved: %d must be 0", r.reserved);
    return GMM_OK;
}

/* --- the host quantizer --- */

/* Codes of n values times the encode scale of their block: one loop per dtype, which compilers vectorise. */
static void gmm__encode_values(gmm_dtype dtype, const float *x, float encode_scale, int n, uint8_t *code) {
    int i;
    if (dtype == GMM_E4M3)
        for (i = 0; i < n; i++) code[i] = gmm_f32_to_e4m3(gmm__fmul(x[i], encode_scale));
    else if (dtype == GMM_E5M2)
        for (i = 0; i < n; i++) code[i] = gmm_f32_to_e5m2(gmm__fmul(x[i], encode_scale));
    else
        for (i = 0; i < n; i++) code[i] = gmm_f32_to_e2m1(gmm__fmul(x[i], encode_scale));
}

/* NV16 with four_over_six: the scale of a block by the rule above gmm_nv_scale. */
static uint8_t gmm__four_over_six(const gmm_tile *t, const gmm_nv_global *n, const float *x, int lines, int along,
                                  float amax) {
    const float base = gmm__fmul(gmm__fdiv(amax, 6.0f), n->scale);
    uint8_t scale[2];
    float error[2];
    int choice, i, j;
    scale[0] = gmm_f32_to_e4m3(base);
    scale[1] = gmm_f32_to_e4m3(gmm__fmul(base, 1.5f));
    for (choice = 0; choice < 2; choice++) {
        const float encode_scale = gmm_nv_encode(n, scale[choice]), block_scale = gmm_e4m3_to_f32(scale[choice]);
        float line_error[16] = { 0 };
        for (i = 0; i < lines; i++)
            for (j = 0; j < along; j++) {
                const float v = x[i * GMM_TILE + j];
                const float code = gmm_e2m1_to_f32(gmm_f32_to_e2m1(gmm__fmul(v, encode_scale)));
                /* volatile: neither the difference nor the sum may be contracted with a product */
                volatile float decoded = gmm__fdiv(gmm__fmul(gmm__fmul(code, block_scale), n->amax),
                                                   6.0f * n->e4m3_max);
                volatile float difference = decoded - v, square = difference * difference;
                line_error[i] += t->format->four_over_six == 2
                                     ? square : gmm_f32_from_bits(gmm_f32_bits(difference) & 0x7FFFFFFFu);
            }
        for (i = 8; i > 0; i /= 2)
            for (j = 0; j < i; j++) line_error[j] += line_error[j + i];
        error[choice] = line_error[0];
    }
    return error[1] < error[0] ? scale[1] : scale[0];
}

GMMDEF void gmm_quantize_tile(const gmm_tile *t, uint8_t *code, uint32_t *scale) {
    const gmm_format *f = t->format;
    const int nv = f->scaling == GMM_SCALING_NV16, mx = f->scaling == GMM_SCALING_MX32;
    const int width = nv ? 16 : mx ? 32 : GMM_TILE;
    const int height = f->scaling == GMM_SCALING_TENSOR || f->scaling == GMM_SCALING_128X128 ? GMM_TILE
                       : f->square ? width : 1;
    const float qmax = gmm_dtype_largest(f->dtype);
    int l0, b, i, j;
    for (l0 = 0; l0 < t->lines; l0 += height) {
        const int lines = t->lines - l0 < height ? t->lines - l0 : height;
        const float line_amax = t->amax ? t->amax[t->amax_per_line ? l0 : 0] : 0.0f;
        gmm_nv_global global = GMM_ZERO;
        if (nv) global = gmm_nv_global_of(line_amax, f->e4m3_256 ? 256.0f : 448.0f);
        for (b = 0; b * width < t->along; b++) {
            const float *x = t->x + l0 * GMM_TILE + b * width;
            uint8_t *dst = code + l0 * GMM_TILE + b * width;
            const int along = t->along - b * width < width ? t->along - b * width : width;
            uint32_t stored, random[4], bits = 0;
            float encode_scale, amax = line_amax;
            if (gmm_block_along(f->scaling)) {
                for (i = 0; i < lines; i++)
                    for (j = 0; j < along; j++) bits = gmm_amax_bits(bits, x[i * GMM_TILE + j]);
                amax = gmm_f32_from_bits(bits);
            }
            if (nv) {
                stored = f->four_over_six ? gmm__four_over_six(t, &global, x, lines, along, amax)
                                          : gmm_nv_scale(&global, amax);
                encode_scale = gmm_nv_encode(&global, (uint8_t)stored);
            } else if (mx) {
                stored = gmm_mx_scale(amax, f->dtype);
                encode_scale = gmm_e8m0_reciprocal((uint8_t)stored);
            } else {
                const int blocks = gmm_block_along(f->scaling) != 0;
                encode_scale = f->delayed ? t->scale
                                          : gmm_scale_from_amax(amax, qmax,
                                                                gmm_dtype_largest(blocks ? t->source : GMM_F32),
                                                                f->eps, f->pow2);
                stored = gmm_f32_bits(gmm_scale_inverse(encode_scale));
            }
            for (i = 0; i < lines; i++) {
                scale[(l0 + i) * GMM_TILE_BLOCKS + b] = stored;
                if (!f->stochastic) {
                    gmm__encode_values(f->dtype, x + i * GMM_TILE, encode_scale, along, dst + i * GMM_TILE);
                    continue;
                }
                gmm_draw_block(t->seed, t->offset, t->group, t->first_block + (l0 + i) * t->blocks_per_line + b,
                               t->direction, random);
                for (j = 0; j < along; j++)
                    dst[i * GMM_TILE + j] = gmm_f32_to_e2m1_random(gmm__fmul(x[i * GMM_TILE + j], encode_scale),
                                                                   random[j / 4] >> j % 4 * 8 & 0xFFu);
            }
        }
    }
}

#endif /* GMM__HOLDS(0) */

#ifdef __cplusplus
}
#endif
#endif /* GMM_IMPLEMENTATION */

/* ------------------------------------------------------------------------------------------------ 12 Licence ---
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
