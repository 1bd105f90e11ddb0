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

