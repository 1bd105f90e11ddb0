/* ------------------------------------------------------------------------------------------- 11 Quantization --- */

/* Formats, recipes, storage and the order of scales: gmm_quant.h, sections 6 to 8.
   Every operation here takes either activations, split over groups (`groups` set; count and rows 0), or `count`
   matrices of fixed extents, such as weights (groups NULL). Groups may have any number of rows: the columnwise copy of
   activations has padding inside its buffer, whose size is that of gmm_layout_of_groups; the copies of matrices have
   the size of gmm_layout_of. The bits of a group depend on its own rows alone, except where the caller reduces its
   amax. */

/* A quantized matrix over existing memory, in `format`. amax: NV16, and TENSOR where it is wanted. */
static inline gmm_mat gmm_mat_quantized(const gmm_format *format, gmm_direction direction, void *data, void *scale,
                                        float *amax) {
    gmm_mat m = GMM_ZERO;
    m.dtype = format->dtype;
    m.scaling = format->scaling;
    m.scale_order = format->order;
    if (format->row_amax) m.flags |= (uint32_t)GMM_MAT_ROW_AMAX;
    if (format->e4m3_256) m.flags |= (uint32_t)GMM_MAT_E4M3_256;
    m.hadamard = direction == GMM_COLUMNWISE ? format->hadamard : 0;
    m.data = data;
    m.scale = scale;
    m.amax = amax;
    return m;
}

/* Shapes: src [T, cols] or count x [rows, cols]; copies as laid out by gmm_quant.h section 6; scale [G] or [count];
       db [G][cols]; skip one value.
   Gathered rows: with src_index, src is [index_rows, cols], and its row src_index[r] / index_div (rounded down) stands
       for row r, as gmm_linear.x_index says. db is that of the gathered rows. Needs groups; not for gmm_requantize.
   dtypes: src F32, F16 or BF16 (Hadamard: BF16), for gmm_requantize any quantized ROWWISE copy; copies as `format`.
   Values are multiplied by fp32 scales and rounded once; the arithmetic is gmm_quant.h's. amax ignores NaN.
   Aliasing: rowwise.amax and columnwise.amax may be one array, except in formats with a transform; else none. */
typedef struct gmm_quantization {
    uint32_t struct_size;
    int32_t count;            /* matrices, >= 1; 0 with groups */
    int64_t rows;             /* of each matrix, >= 1; 0 with groups */
    int64_t cols;             /* >= 1 */
    const gmm_groups *groups; /* NULL: fixed extents. tail applies to the elements of copies that are not padded */
    const gmm_options *options;
    const gmm_format *format;
    gmm_quant_phase phase;
    int32_t first_group;      /* stochastic: the number of group 0 in gmm_draw_block, so that one group can be redone */
    const gmm_mat *src;
    const gmm_mat *rowwise;   /* NULL = not wanted. amax: TENSOR [G], only raised if delayed; NV16 [G] or [T] */
    const gmm_mat *columnwise;
    const gmm_grad *db;       /* column sums of src with the bits of gmm_linear_bgrad; with groups, without skip */
    const int32_t *skip;      /* context memory, read when the work runs: nonzero writes nothing. NULL = 0 */
    const float *scale;       /* delayed: quantization scales, fp32, context memory; NULL = ones */
    const uint64_t *random;   /* stochastic: {seed, offset}, context memory; the caller advances the offset */
    const int32_t *src_index; /* [T], context memory: rows of src are gathered; NULL = they are not */
    int64_t index_rows;       /* with src_index: rows of src, 0 to 2^31 - 1 */
    int32_t index_div;        /* divisor of the entries of src_index, >= 1; 0 = 1 */
    int32_t reserved;         /* 0 */
} gmm_quantization;

/* Engine and workspace of GMM_OP_QUANTIZE or GMM_OP_REQUANTIZE.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_quantize_query(gmm_context *ctx, gmm_op op, const gmm_quantization *quantization, gmm_info *info);

/* The rowwise and columnwise copies of src that are wanted, both from its own values. Padding of data and scales is
   zeroed, except in the last 16 rows of a group that a Hadamard transform mixes (gmm_quant.h section 6). Transformed
   matrices of fixed extents have a multiple of 16 rows. An empty group has amax 0 and, in TENSOR and columnwise ROW,
   the scale of that amax, 1 without eps (delayed: its scale as any other).
   Stream, graph: enqueued; capturable, and a replay may have other group sizes, skip, scale and random.
   Errors: as gmm_linear_fwd, GMM_E_CONFIG (format, phase). */
GMMDEF gmm_status gmm_quantize(gmm_context *ctx, const gmm_quantization *quantization, void *workspace,
                               size_t workspace_bytes, gmm_stream stream);

/* Quantizes the values of a quantized ROWWISE matrix: a second, lossy rounding of code times scale in fp32.
   Stream, graph, errors: as gmm_quantize. */
GMMDEF gmm_status gmm_requantize(gmm_context *ctx, const gmm_quantization *quantization, void *workspace,
                                 size_t workspace_bytes, gmm_stream stream);

/* The columnwise copy of matrices from the rowwise one, without rounding: transposes the elements and the scales of
   their blocks, and copies the amaxes of NV16. For TENSOR, 128X128 and NV16 with square blocks, whose blocks are the
   same in both directions, so that only one copy need be stored and communicated. The result is bit for bit the
   columnwise copy that gmm_quantize makes; with four_over_six it has the rowwise copy's choice of each scale, which
   gmm_quantize makes for each direction by sums of errors in other order.
   Blocks of NV16 may be cut short by the last rows and columns, of which E2M1 has even numbers. src and dst may have
   different scale orders.
   Shapes: src, dst count x [rows, cols]. Elements of dst between `rows` and its ld are not written; padding of scales
       is zeroed.  Aliasing: of NV16, src.amax and dst.amax may be one array; else none. */
typedef struct gmm_transposition {
    uint32_t struct_size;
    int32_t count;            /* >= 1 */
    int64_t rows, cols;       /* >= 1 */
    const gmm_options *options;
    const gmm_mat *src;       /* ROWWISE */
    const gmm_mat *dst;       /* COLUMNWISE, of the same dtype and scaling */
    const gmm_format *format; /* by which src was quantized; NV16 needs it, others may leave it NULL */
} gmm_transposition;

/* Engine and workspace of GMM_OP_TRANSPOSE; none for one matrix.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_transpose_query(gmm_context *ctx, const gmm_transposition *transposition, gmm_info *info);

/* Transposes. Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_transpose(gmm_context *ctx, const gmm_transposition *transposition, void *workspace,
                                size_t workspace_bytes, gmm_stream stream);

/* dst = the values of a quantized matrix, never transposed: code times scale in fp32, one rounding at the store. A copy
   of Hadamard-transformed values gives the transformed values.
   Shapes: dst [T, cols] or count x [rows, cols].  dtypes: dst F32, F16 or BF16.  Aliasing: none. */
typedef struct gmm_dequantization {
    uint32_t struct_size;
    int32_t count;            /* count, rows, cols and groups as in gmm_quantization */
    int64_t rows, cols;
    const gmm_groups *groups; /* NULL: fixed extents. tail applies to dst */
    const gmm_options *options;
    gmm_direction direction;  /* of src */
    int32_t reserved;         /* 0 */
    const gmm_mat *src;
    const gmm_mat *dst;
} gmm_dequantization;

/* Engine and workspace of GMM_OP_DEQUANTIZE.  Stream, graph: none. Errors: as the operation. */
GMMDEF gmm_status gmm_dequantize_query(gmm_context *ctx, const gmm_dequantization *dequantization, gmm_info *info);

/* Dequantizes. Stream, graph: enqueued; capturable. Errors: as gmm_linear_fwd. */
GMMDEF gmm_status gmm_dequantize(gmm_context *ctx, const gmm_dequantization *dequantization, void *workspace,
                                 size_t workspace_bytes, gmm_stream stream);

/* Updates the scales of delayed scaling, once per step and direction, for `slots` tensors (experts and operands) of one
   dtype, by gmm_delayed_scale. gmm_quantize has recorded the amaxes in history[0]. Both arrays together are the state
   of delayed scaling between steps: training resumed from a checkpoint of them is bitwise the same.
   Shapes: history [length] rows of slots, `stride` apart; scale [slots]; fp32, context memory, initially zeros and
       ones. */
typedef struct gmm_scale_update {
    uint32_t struct_size;
    int32_t slots;            /* >= 0 */
    int32_t history_length;   /* >= 1 */
    int32_t margin, most_recent; /* as in gmm_recipe */
    gmm_dtype dtype;          /* E4M3 or E5M2 */
    int64_t stride;           /* floats from row to row of the history; 0 = slots */
    const gmm_options *options;
    float *history;
    float *scale;
    void *user;
    /* Called first, on the calling thread: enqueues the reduction of history[0] to its maximum over ranks, in place.
       NULL = none. Ranks must hold the same experts in the same slots. */
    gmm_status (*reduce)(void *user, float *amax, int32_t slots, gmm_stream stream);
} gmm_scale_update;

/* Updates history and scale. No workspace.  Stream, graph: enqueued; capturable if the callback is.
   Errors: GMM_E_NULL, GMM_E_ARG, GMM_E_DTYPE, GMM_E_STRIDE, GMM_E_OVERFLOW, GMM_E_ALIGN, GMM_E_VERSION,
       GMM_E_UNSUPPORTED, GMM_E_BUILD, GMM_E_CUDA; the callback's. */
GMMDEF gmm_status gmm_update_scales(gmm_context *ctx, const gmm_scale_update *update, gmm_stream stream);

/* Quantizes weights whose fp32 masters are sharded over ranks: this rank has elements [start, start + length) of
   `count` concatenated matrices (gmm_ckpt_shard_members gives its part of each). Every rank calls, with or without a
   shard:
       phase AMAX   writes the amaxes of the rank's elements, and zeros for blocks without any: gmm_shard_amaxes floats
                    in the same order on all ranks. The caller then reduces them to their maximum over ranks, in place
       phase CAST   writes all scales (and amaxes) of the copies, and the codes of the rank's own elements; other codes
                    keep their bits, also the other half of a byte of E2M1
   Delayed scaling needs no phase AMAX before CAST, which multiplies by `scale`; AMAX gives the amaxes for the history.
   The codes of all ranks together are the copies that gmm_quantize makes of the whole matrices, bit for bit. In a
   transposed columnwise copy the codes of a shard are not contiguous; where blocks are the same in both directions,
   gmm_transpose makes that copy of the gathered rowwise codes instead.
   Shapes: master [length], which may start and end within blocks and bytes; copies count x [rows, cols].
   dtypes: copies as `format`: TENSOR, 1X128, 128X128, MX32, NV16 without transform, stochastic rounding, choice of
       scales and amaxes per row. cols even.  Aliasing: rowwise.amax and columnwise.amax may be one array; else none. */
typedef struct gmm_sharding {
    uint32_t struct_size;
    int32_t count;            /* matrices, >= 1 */
    int64_t rows, cols;       /* of each, >= 1 */
    int64_t start, length;    /* of the shard; -1 and 0: none */
    const gmm_options *options;
    const gmm_format *format;
    gmm_dtype model;          /* dtype to which masters are rounded first: BF16 or F16; F32 = no rounding */
    gmm_quant_phase phase;    /* AMAX or CAST */
    const float *master;      /* NULL without a shard */
    float *amax;              /* delayed: phase CAST does not read it */
    const gmm_mat *rowwise;   /* NULL = not wanted. Phase AMAX reads which copies are wanted, and writes neither */
    const gmm_mat *columnwise;
    const float *scale;       /* delayed: [count]; NULL = ones */
} gmm_sharding;

/* Floats of gmm_sharding.amax; 0 where the format is not one of these, which gmm_shard_cast refuses. `columnwise`: with
   a columnwise copy. Pure. */
GMMDEF int64_t gmm_shard_amaxes(const gmm_format *format, int32_t count, int64_t rows, int64_t cols, int columnwise);

/* Runs one phase. No workspace.  Stream, graph: enqueued; capturable.
   Errors: as gmm_quantize; GMM_E_ARG (start, length), GMM_E_CONFIG (format, phase), GMM_E_NULL (master, amax). */
GMMDEF gmm_status gmm_shard_cast(gmm_context *ctx, const gmm_sharding *shard, gmm_stream stream);

