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

