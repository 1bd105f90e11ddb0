/* ----------------------------------------------------------------------------------------------- 13 Checkpoints --- */

/* Converts the tensors of a checkpoint to those of a model: names, layouts, shards, dtypes. Host only; no context.

       gmm_ckpt_table    named tensors over storages (memory, or files behind callbacks)
       gmm_ckpt_scheme   how a family of checkpoints names and lays out its tensors
       gmm_ckpt_plan     strided moves from the source's tensors to the targets'

   The logical weight of a grouped linear is [experts][out][in], before expert parallelism (EP) and expert tensor
   parallelism (ETP) shard it; the `out` rows of a gated FC1 are its gate rows and then as many up rows. Each stored
   tensor is a box (a range of experts, rows and columns) of the logical weight, in the layout of its scheme. A plan
   intersects the boxes of the source with those of the target.
   Pure        Building a plan reads names, shapes and dtypes, never data. It reports every error that these can cause,
               with its reason and key, and changes nothing. Afterwards only input and output can fail.
   Exact       Every byte of a target is written once: gmm_ckpt_verify proves it from the moves. Every key of the source
               is used, kept, dropped by a rule, or named in an error.
   Memory      Tables and plans allocate from the allocator with which they were made (NULL: GMM_MALLOC); applying
               allocates nothing and uses the caller's scratch. Tables must outlive plans that read them.
   Threads     Tables and plans are not changed once they are complete: threads may share them, and apply disjoint
               ranges of moves at the same time. Hosts are little-endian.
   In functions below, `report` and `error` may be NULL. */

/* Why a checkpoint was refused. X(name, value, lower-case name, status) */
#define GMM_CKPT_REASON_LIST(X) \
    X(GMM_CKPT_FINE, 0, fine, GMM_OK) \
    X(GMM_CKPT_ARGUMENT, 1, argument, GMM_E_ARG) \
    X(GMM_CKPT_DUPLICATE_KEY, 2, duplicate_key, GMM_E_KEY) \
    X(GMM_CKPT_MISSING_INDEX, 3, missing_index, GMM_E_KEY) \
    X(GMM_CKPT_EXTRA_INDEX, 4, extra_index, GMM_E_KEY) \
    X(GMM_CKPT_EXTRA_KEY, 5, extra_key, GMM_E_KEY) \
    X(GMM_CKPT_AMBIGUOUS, 6, ambiguous, GMM_E_KEY) \
    X(GMM_CKPT_BOTH_LAYOUTS, 7, both_layouts, GMM_E_KEY) \
    X(GMM_CKPT_SHAPE, 8, shape, GMM_E_KEY) \
    X(GMM_CKPT_DTYPE, 9, dtype, GMM_E_DTYPE) \
    X(GMM_CKPT_NOT_DIVISIBLE, 10, not_divisible, GMM_E_CONFIG) \
    X(GMM_CKPT_GROUP_COUNT, 11, group_count, GMM_E_KEY) \
    X(GMM_CKPT_GLU_UNKNOWN, 12, glu_unknown, GMM_E_CONFIG) \
    X(GMM_CKPT_GLU_CONFLICT, 13, glu_conflict, GMM_E_CONFIG) \
    X(GMM_CKPT_SCALE_MISSING, 14, scale_missing, GMM_E_KEY) \
    X(GMM_CKPT_OVERFLOW, 15, overflow, GMM_E_OVERFLOW) \
    X(GMM_CKPT_NO_MEMORY, 16, no_memory, GMM_E_MEMORY)

typedef enum gmm_ckpt_reason {
#define GMM__X(name, value, text, status) name = value,
    GMM_CKPT_REASON_LIST(GMM__X)
#undef GMM__X
    GMM_CKPT_REASON_MAX = 0x7fffffff
} gmm_ckpt_reason;

/* Lower-case name of a reason, "?" if unknown. Pure. */
GMMDEF const char *gmm_ckpt_reason_name(gmm_ckpt_reason reason);

/* The result of a call that takes a report; filled on success and on failure. A call that takes a gmm_error writes only
   the `error` of a report. */
typedef struct gmm_ckpt_report {
    gmm_error error;        /* status and sentence */
    gmm_ckpt_reason reason;
    char key[252];          /* the key concerned, truncated to fit; "" if none */
    int64_t matched;        /* source tensors that a linear used */
    int64_t kept, dropped;  /* other source tensors */
    int64_t merged;         /* and those that are kept from an earlier part already: after a success, matched, kept,
                               dropped and merged are all tensors of all parts */
    int64_t missing;        /* tensors and whole layers that the source lacks; error.text lists them, as far as they
                               fit, as names with sets: "model.layers.{3,5-7}.mlp.experts.{0-3}.up_proj.weight" */
} gmm_ckpt_report;

enum { GMM_CKPT_RANK = 8, GMM_CKPT_LOOPS = 7 };

/* One named tensor, row-major and dense. In tables, arrays of these have no struct_size. */
typedef struct gmm_ckpt_tensor {
    const char *name;             /* NUL-terminated; tables hold copies */
    gmm_dtype dtype;              /* GMM_NONE: a type unknown here, whose bytes can be kept or dropped only */
    int32_t rank;                 /* 0 to GMM_CKPT_RANK */
    int64_t shape[GMM_CKPT_RANK]; /* >= 0; with E2M1, elements */
    int32_t storage;              /* of the table */
    int32_t reserved;             /* 0 */
    int64_t offset, bytes;        /* in the storage; bytes is shape times dtype size, and any number for GMM_NONE */
    int64_t tag;                  /* the caller's; copied to the target of a kept tensor */
} gmm_ckpt_tensor;

typedef struct gmm_ckpt_table gmm_ckpt_table;

/* An empty table. *out is NULL after a failure.  Errors: GMM_E_NULL, GMM_E_ARG (half an allocator), GMM_E_MEMORY. */
GMMDEF gmm_status gmm_ckpt_table_create(gmm_ckpt_table **out, const gmm_allocator *allocator, gmm_error *error);

/* Frees a table; NULL is allowed. */
GMMDEF void gmm_ckpt_table_destroy(gmm_ckpt_table *table);

/* Adds a storage of `bytes`: host memory at `base`, which must outlive the table, or with NULL one that
   gmm_ckpt_io.read reads.
   Errors: GMM_E_NULL, GMM_E_ARG (bytes < 0), GMM_E_MEMORY. */
GMMDEF gmm_status gmm_ckpt_table_add_storage(gmm_ckpt_table *table, const void *base, int64_t bytes, int32_t *storage,
                                             gmm_error *error);

/* Adds a tensor; tensors may share bytes. A failure leaves the table unchanged.  Errors (reason): GMM_E_NULL, GMM_E_ARG
   (argument: no name, rank, storage, a negative extent, bytes that contradict shape and dtype or leave the storage),
   GMM_E_DTYPE (dtype), GMM_E_KEY (duplicate_key), GMM_E_OVERFLOW, GMM_E_MEMORY. */
GMMDEF gmm_status gmm_ckpt_table_add(gmm_ckpt_table *table, const gmm_ckpt_tensor *tensor, gmm_ckpt_report *report);

/* gmm_ckpt_table_tensors gives the tensors in the order in which they were added, valid until another is added, and in
   *count (or NULL) their number. gmm_ckpt_table_find gives the index of the tensor of a name, -1 if there is none. A
   NULL table has no tensors. */
GMMDEF const gmm_ckpt_tensor *gmm_ckpt_table_tensors(const gmm_ckpt_table *table, int64_t *count);
GMMDEF int64_t gmm_ckpt_table_find(const gmm_ckpt_table *table, const char *name);

/* ---- Schemes: how checkpoints name and lay out the tensors of a layer. */

/* Linears of a layer. X(name, value, lower-case name, grouped over experts, rows cut by ETP, columns cut by ETP) */
#define GMM_CKPT_SLOT_LIST(X) \
    X(GMM_CKPT_FC1, 0, fc1, 1, 1, 0) \
    X(GMM_CKPT_FC2, 1, fc2, 1, 0, 1) \
    X(GMM_CKPT_ROUTER, 2, router, 0, 0, 0) \
    X(GMM_CKPT_ROUTER_CORRECTION, 3, router_correction, 0, 0, 0) \
    X(GMM_CKPT_SHARED_FC1, 4, shared_fc1, 0, 0, 0) \
    X(GMM_CKPT_SHARED_FC2, 5, shared_fc2, 0, 0, 0) \
    X(GMM_CKPT_SHARED_GATE, 6, shared_gate, 0, 0, 0)

typedef enum gmm_ckpt_slot {
#define GMM__X(name, value, text, grouped, rows, cols) name = value,
    GMM_CKPT_SLOT_LIST(GMM__X)
#undef GMM__X
    GMM_CKPT_SLOT_COUNT,
    GMM_CKPT_SLOT_ANY = 0x7ffffffe, /* in a row: any slot, of linears that have a path */
    GMM_CKPT_SLOT_MAX = 0x7fffffff
} gmm_ckpt_slot;

typedef enum gmm_ckpt_kind {
    GMM_CKPT_WEIGHT = 0,
    GMM_CKPT_BIAS = 1,
    GMM_CKPT_SCALE = 2,        /* of the weight's blocks */
    GMM_CKPT_TENSOR_SCALE = 3, /* one value that multiplies all scales of a matrix */
    GMM_CKPT_AMAX = 4,         /* one value: the largest absolute value of a matrix */
    GMM_CKPT_KIND_COUNT = 5,
    GMM_CKPT_KIND_MAX = 0x7fffffff
} gmm_ckpt_kind;

typedef enum gmm_ckpt_half {
    GMM_CKPT_BOTH = 0, /* gate and up rows in one tensor, or an ungated linear */
    GMM_CKPT_GATE = 1,
    GMM_CKPT_UP = 2,
    GMM_CKPT_HALF_MAX = 0x7fffffff
} gmm_ckpt_half;

/* How a tensor stores matrices of r x c: out x in, or in x out in a transposed row. */
typedef enum gmm_ckpt_form {
    GMM_CKPT_EACH = 0,    /* one expert: [r, c], a vector [r] */
    GMM_CKPT_STACKED = 1, /* all experts: [E, r, c] or [E r, c], vectors [E, r] or [E r] */
    GMM_CKPT_WIDE = 2,    /* all experts: the shape is [r, E c], the bytes are those of [E, r, c] */
    GMM_CKPT_TALL = 3,    /* all experts, as STACKED, but targets have the shape [E r, c] */
    GMM_CKPT_FORM_MAX = 0x7fffffff
} gmm_ckpt_form;

/* One kind of tensor in a scheme. Patterns consist of dotted segments; {p} at the front is the linear's path, {L} its
   layer and {e} the expert, both integers without leading zeros. Rows that break this, or have a value that is none of
   its type, are an argument error of plans and scans. */
typedef struct gmm_ckpt_row {
    const char *pattern;
    gmm_ckpt_slot slot;
    gmm_ckpt_kind kind;
    gmm_ckpt_half half;
    gmm_ckpt_form form;
    int32_t transposed;
    gmm_scaling scaling; /* 128X128: of weights that may be quantized in any format below, and of their scales, tensor
                            scales and amaxes. MX32: of gpt-oss's U8 blocks [..., r, c / 32, 16] and their scales. NONE:
                            of weights in 16 or 32 bits, which are quantized only if the linear has rows of scales */
} gmm_ckpt_row;

typedef struct gmm_ckpt_scheme {
    const char *name;
    const gmm_ckpt_row *rows;
    int32_t count;
    int32_t glu_known;    /* 1: BOTH rows have gate and up in blocks of glu_block (0 = halves); 0: the caller states
                             it */
    int32_t glu_block;
    int32_t global_index; /* 1: {e} counts the experts of all EP ranks; 0: those of the rank */
} gmm_ckpt_scheme;

/* A scheme of this library; NULL for an unknown name. gmm_ckpt_scheme_at enumerates them: NULL past the last. Pure.
       module       {p}.weight0.. or {p}.weight, and biases likewise, of linears that have a path
       megatron     Megatron's grouped linears, indexed or grouped, with router and shared experts
       sequential   Megatron's SequentialMLP
       legacy       Megatron's old GroupedMLP: weight1 [H, E 2F] (E F ungated), weight2 [E F, H]; reads [E, F, H] too
       mixtral, qwen2-moe, qwen3-moe (also OLMoE), deepseek-v3
       fused, fused-transposed   Hugging Face's stacked gate_up_proj [E, 2F, H] or [E, H, 2F]
       gpt-oss      interleaved by 1, biases, MXFP4 blocks or 16-bit [E, H, 2F]
   All but legacy, fused and fused-transposed have names of scales: see below. */
GMMDEF const gmm_ckpt_scheme *gmm_ckpt_scheme_of(const char *name);
GMMDEF const gmm_ckpt_scheme *gmm_ckpt_scheme_at(int32_t index);

/* ---- Quantized weights

   A plan finds the format of a linear's weights by the dtypes and shapes of weights and scales. R x C is the matrix of
   one expert, out x in.
       format     weight                            scales
       128X128    E4M3, E5M2 [R, C]                 F32, BF16 [R/128, C/128]
       ROW        E4M3, E5M2 [R, C]                 F32, BF16 [R] or [R, 1]
       TENSOR     E4M3, E5M2 [R, C]                 F32, BF16 [], [1] or [1, 1]; an F32 amax may stand beside it
       MX32       E4M3, E5M2 [R, C] (MXFP8); U8 [R, C/2], E2M1 [R, C], gpt-oss's blocks (MXFP4)
                                                    E8M0, U8 [R, C/32]
       NV16       U8 [R, C/2], E2M1 [R, C]          E4M3 [R, C/16]; beside them an F32 tensor scale, an F32 amax, or
                                                    both, of shapes [], [1] or [1, 1] (NVFP4)
   Quotients are rounded up, except C/2. A byte has two 4-bit codes, the one of the even column in its low half; E2M1
   counts codes. Tensors of all experts have an extent of E in front, or E times the first extent where the shape has
   one. Several formats may fit small matrices: the first of the order above is taken, of those that are stacked as
   their weights first. A [1, 1] of at most 128 x 128 is 128X128.
   Bytes      Files hold what frameworks store: plain row-major scales of the rowwise copy, without the padding, the
              order and the swizzle of gmm_layout_of, which a caller makes after loading. Columnwise copies and the
              scales of activations are none of the weights' tensors: they are extra keys.
   Names      module, megatron and sequential put _scale_inv or _scale, _tensor_scale and _amax behind "weight", in
              front of an expert's index: weight_scale_inv3. mixtral, qwen2-moe, qwen3-moe and deepseek-v3 have
              weight_scale_inv or weight_scale, and weight_scale_2 for the tensor scale; no amax. Scales keep their
              name where the target's scheme has it. All multiply: a reciprocal, as compressed-tensors'
              weight_global_scale, is an extra key.
   Moves      With target.dtype NONE, codes and scales are copied: scales are stacked, split, cut, joined and
              interleaved as the rows and columns of their blocks. Scales of one value, of a row or of a matrix, go to
              every target that has a part of their block. Dequantizing is for all formats but NV16 (dtype); to
              dequantize several experts, weights and scales must both be EACH or both not EACH (shape). Codes that are
              stored in x out are dequantized by TENSOR scales alone, and do not lie two in a byte (shape). Vectors (in
              0) are dequantized by 128X128 and TENSOR scales alone, and not where a tensor has several experts (shape).
   Dropped    The amax beside a TENSOR scale where codes are dequantized, and where equal_scales joins scales: amaxes
              may differ though the scales are equal. Joined amaxes of NV16 are equal where its scales are: the first is
              read.
   Refused    not_divisible, with the weight's key, the block and the row or column: a boundary of an ETP rank, of gate
              and up rows or of their blocks inside a block; a boundary of GTP at no multiple of its unit for the format
              (128 rows for 128X128, 32 for MX32, 16 for NV16, any for ROW and TENSOR); scales of one value that would
              have to be joined, of ETP ranks or of gate and up, unless equal_scales says that they are equal. GTP ranks
              share the scale of a matrix, and the first one's is read.
              scale_missing: scales of any expert or half, or an NV16 weight without tensor scale and amax.
              dtype, shape: scales that no format has, also where experts differ.
              both_layouts: scales under two names, or for all experts together and for each.
              extra_index, extra_key: scales of experts that are not declared, of weights that are not quantized, and
              kinds that the format lacks. */

/* ---- Plans */

/* One linear before sharding. Arrays of these have no struct_size. */
typedef struct gmm_ckpt_linear {
    gmm_ckpt_slot slot;
    int32_t gated;         /* FC1: out is 2F, gate rows and then up rows */
    const char *path;      /* {p}, "decoder.layers.3.mlp.experts.linear_fc1"; NULL = by layer */
    int64_t layer;         /* {L} */
    int64_t experts;       /* of all EP ranks; slots that are not grouped: 1 (0 means 1) */
    int64_t out, in;       /* in 0: the weight is a vector */
    int32_t bias;          /* 1: it has a bias; 0: keys of a bias are extra */
    int32_t grouped_weight, grouped_bias; /* targets, where the scheme has both forms: 1 STACKED, 0 EACH */
    int32_t spare;         /* ROUTER, ROUTER_CORRECTION: rows of `out` behind those of the layer's experts */
    gmm_scaling scaling;   /* set by gmm_ckpt_scan: the format of quantized weights. Plans ignore it */
} gmm_ckpt_linear;

/* The rows that a rank of generalized tensor parallelism (GTP) has of the local matrix of its EP and ETP rank: row0,
   valid_rows and shard_rows of gmm_gtp_plan. Rows outside of the matrix are an argument error; a boundary inside GTP's
   unit of a quantized weight, and gate and up rows in separate tensors, are not_divisible. */
typedef struct gmm_ckpt_cut {
    int64_t row0, rows;
    int64_t stored_rows; /* rows of the tensor; those past `rows` are written as zeros */
} gmm_ckpt_cut;

/* Coordinates of the rank whose shards a table contains or a target is. Sizes of 0 mean 1. */
typedef struct gmm_ckpt_rank {
    int32_t ep_rank, ep_size;
    int32_t etp_rank, etp_size;
    int32_t gtp_rank, gtp_size; /* sources: the weight's rows are those of the ranks in this order. Targets: see cuts */
} gmm_ckpt_rank;

/* A whole checkpoint, or the file of one rank. Arrays of these have no struct_size. */
typedef struct gmm_ckpt_part {
    const gmm_ckpt_table *table;
    gmm_ckpt_rank rank;
} gmm_ckpt_part;

/* The layout of gate and up rows in one tensor, if known: the block B in [gate:B | up:B | gate:B ...]. To gmm_ckpt_scan
   it also says that an FC1 of GTP ranks has them, where its rows could be padding. */
typedef struct gmm_ckpt_glu {
    int32_t known;
    int32_t block; /* 0 = halves */
} gmm_ckpt_glu;

/* What to do with extra keys, which no linear uses; scales of weights that are not quantized are extra too. */
typedef enum gmm_ckpt_extra {
    GMM_CKPT_EXTRA_REFUSE = 0,
    GMM_CKPT_EXTRA_KEEP = 1, /* they become targets of the same name, shape and bytes, among them shared experts that
                                the source's scheme does not have. Two of one part that drop_wrappers gives one name
                                are duplicate_key. Parts that have one of the same name must have it in one shape
                                (shape), and the first is read, as of tensors that all ranks have; but in the modules
                                of FC1 and FC2, unless its name counts the experts of all ranks, it is ambiguous where
                                ranks of EP or ETP differ, since each has its own */
    GMM_CKPT_EXTRA_DROP = 2,
    GMM_CKPT_EXTRA_MAX = 0x7fffffff
} gmm_ckpt_extra;

/* How to read the source. Nothing is inferred beyond these rules.
   Keys       A key is matched segment by segment, without its wrapper segments: a state's prefix, the model's prefix, a
              row's pattern. Where linears have paths, a key belongs to the longest path with which its module ends.
   Prefix     All keys have the same model prefix: the stated one, which is empty or ends with a dot, and whose wrapper
              segments keys must have; else the empty one if any key has it; else the only one found (of several, keys
              are ambiguous). Keys with other prefixes are extra.
   Linears    The linears of a layer must agree: FC1 and FC2 in experts and features, a router's rows (less
              gmm_ckpt_linear.spare) with the experts. Every part has all experts of its rank, and every state that has
              any key has all linears.
   GLU        The GLU layout is that of the scheme, the stated one, or the one recorded in the file's metadata; where
              several are known they must agree. It may be unknown only where gate and up rows stay together and in
              place, and the target's scheme defines no layout. */
typedef struct gmm_ckpt_source {
    uint32_t struct_size;
    int32_t part_count;            /* >= 1; bytes that several parts contain are read from the first */
    const gmm_ckpt_part *parts;
    const gmm_ckpt_scheme *scheme;
    const char *prefix;            /* "model." or ""; NULL = found by the rule above */
    const char *const *wrappers;   /* [wrapper_count] segments ignored in keys and paths, such as "module" */
    const char *const *states;     /* [state_count] prefixes of equal trees, such as "" and "optimizer.exp_avg."; NULL =
                                      "" alone. "" is the model, whose keys are missing if there are none; any other
                                      state without a key is absent, unless all are */
    int32_t wrapper_count, state_count;
    gmm_ckpt_glu stated, recorded;
    gmm_ckpt_extra extra;
    int32_t skip_missing;          /* 1: layers, linears and EACH experts that the source lacks are no targets, and a
                                      stack needs all of its experts; 0: they are errors */
    int32_t prefer_target;         /* 1: where EACH and STACKED are both present, the form of the target is read and the
                                      other dropped */
    int32_t drop_extra_state;      /* 1: keys with a segment `_extra_state` or, numbered, `_extra_state3` are dropped;
                                      0: they are extra. Their data is never read */
    int32_t equal_scales;          /* 1: where ETP's ranks, or gate and up, have a scale each of a block that the target
                                      has one scale for, these scales are equal, and the first is read; 0: an error */
} gmm_ckpt_source;

/* The tensors that the model needs. */
typedef struct gmm_ckpt_target {
    uint32_t struct_size;
    int32_t state_count;           /* 0: the source's states */
    const gmm_ckpt_scheme *scheme; /* NULL = the source's */
    const char *prefix;            /* NULL = the source's */
    const char *const *states;     /* one name for each of the source's */
    gmm_ckpt_rank rank;            /* gtp_rank and gtp_size are not read */
    const gmm_ckpt_cut *cuts;      /* [linears] GTP, of grouped weights; NULL = whole */
    int32_t glu_block;             /* of BOTH rows of FC1; 0 = the scheme's, or halves. Shared experts have halves in
                                      source and target, whatever is stated or recorded */
    gmm_dtype dtype, bias_dtype;   /* F32, F16, BF16: of experts, converted or dequantized. NONE: as in the source.
                                      States but "", routers and kept tensors keep the dtype of the source */
    int32_t views;                 /* 1: a target whose bytes are contiguous in the source becomes a view of it */
    int32_t drop_wrappers;         /* 0: a wrapper segment keeps its place where the target's name begins with the
                                      segments in front of it; keys of one linear with different wrappers are
                                      ambiguous. 1: names have no wrappers, also those of kept tensors */
    int32_t reserved;              /* 0 */
} gmm_ckpt_target;

typedef struct gmm_ckpt_plan gmm_ckpt_plan;

/* Finds the linears of a source whose patterns have layers, and their extents, for gmm_ckpt_plan_create.
   Experts     `experts` is their number in every layer; further rows of a router are then spare. 0: the number follows
               from names and shapes of FC1 and FC2 (two-dimensional tensors of all experts do not give it), and the
               router must have as many rows.
   Gated       Whether a BOTH row of FC1 is gated follows from FC2's in.
   GTP         The rows of GTP ranks are added up, and their padding with them. FC1 and FC2 that have padding contradict
               each other (shape). Where FC1 of at most 128 rows per rank may be gate and up or as many rows of padding,
               it is gated if the layout of gate and up is known, and refused if not (glu_unknown). Nothing shows the
               padding of FC1 or FC2 where the layer lacks the other one.
   Complete    Unless skip_missing is 1, layers are numbered from 0 without a gap (a layer is present if any key names
               it), and all layers of experts have the same linears: FC1, FC2, router, shared experts, biases.
   Parts       All parts that are given are read. Only gmm_ckpt_plan_create detects that a rank's part is missing
               (missing_index).
   *linears [*count] is allocated from the allocator, and freed by gmm_ckpt_linears_release. Linears are in the order of
   layers, then of slots. If there is no linear, and after a failure, *linears is NULL and *count 0; if source, linears
   or count is NULL, nothing is written. The patterns of the scheme `module` have no layers, so that none of its linears
   are found.
   Errors (reason): as gmm_ckpt_plan_create. */
GMMDEF gmm_status gmm_ckpt_scan(const gmm_ckpt_source *source, int64_t experts, gmm_ckpt_linear **linears,
                                int64_t *count, const gmm_allocator *allocator, gmm_ckpt_report *report);
/* Frees what gmm_ckpt_scan allocated, with the same allocator. */
GMMDEF void gmm_ckpt_linears_release(gmm_ckpt_linear *linears, const gmm_allocator *allocator);

/* Plans a conversion. *out is NULL after a failure.
   Errors (reason): GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG (argument), GMM_E_KEY, GMM_E_CONFIG (not_divisible,
       glu_unknown, glu_conflict), GMM_E_DTYPE, GMM_E_OVERFLOW, GMM_E_MEMORY: see GMM_CKPT_REASON_LIST. */
GMMDEF gmm_status gmm_ckpt_plan_create(gmm_ckpt_plan **out, const gmm_ckpt_source *source,
                                       const gmm_ckpt_target *target, const gmm_ckpt_linear *linears, int64_t count,
                                       const gmm_allocator *allocator, gmm_ckpt_report *report);

/* How gmm_ckpt_normalize_* treat keys that are inconsistent or ambiguous. */
typedef enum gmm_ckpt_parity {
    GMM_CKPT_SAFE = 0,     /* as errors */
    GMM_CKPT_UPSTREAM = 1, /* as Megatron-LM does: keys that do not fit are copied unchanged, keys match by their last
                              characters, shapes are not checked against the declared ones, and a later module sees the
                              keys that an earlier one made. Errors here but not in Megatron-LM: two tensors of one name
                              (duplicate_key), and a stack of several dtypes (dtype) or shapes (shape) */
    GMM_CKPT_PARITY_MAX = 0x7fffffff
} gmm_ckpt_parity;

/* gmm_ckpt_normalize_hook is Megatron-LM's load hook of one module: it converts the module's parameters between indexed
   and grouped keys, as linear->grouped_weight and grouped_bias say. Keys are prefix, and then weight, weight0, bias...;
   linear->path is not read. SAFE requires a prefix that is empty or ends with a dot; UPSTREAM takes any.
   gmm_ckpt_normalize_map is its map for reloading fp32 masters: the same conversion for many modules by their paths,
   under one common prefix. The prefix is not an argument: where keys of two prefixes match, the caller must give longer
   paths. SAFE ignores the segments `module` and `_orig_mod` in matching, and keeps them in names; a key belongs to the
   longest path with which its module ends.
   The plan's targets are the whole new table, including unchanged tensors. Plans consist of views and copies.
   Scales     SAFE requires the scales of E4M3, E5M2 and E2M1 weights, also where the weights are only copied, and
              converts them into the form of the weights. UPSTREAM converts them together with weights that it stacks or
              splits, and leaves them where it leaves the weights: Megatron-LM holds a quantized stack as one object,
              whose members have their scales. They are then required, in the form and with the prefix of their weights,
              with dtypes and shapes of a format (scale_missing, both_layouts, ambiguous, dtype, shape,
              not_divisible). U8 weights are codes in SAFE where they have in / 2 columns, in UPSTREAM where they have
              scales.
   Errors (reason): as gmm_ckpt_plan_create. */
GMMDEF gmm_status gmm_ckpt_normalize_hook(gmm_ckpt_plan **out, const gmm_ckpt_table *table, const char *prefix,
                                          const gmm_ckpt_linear *linear, gmm_ckpt_parity parity,
                                          const gmm_allocator *allocator, gmm_ckpt_report *report);
GMMDEF gmm_status gmm_ckpt_normalize_map(gmm_ckpt_plan **out, const gmm_ckpt_table *table,
                                         const gmm_ckpt_linear *linears, int64_t count, gmm_ckpt_parity parity,
                                         const gmm_allocator *allocator, gmm_ckpt_report *report);

/* Frees a plan; NULL is allowed. */
GMMDEF void gmm_ckpt_plan_destroy(gmm_ckpt_plan *plan);

/* The targets. All have a place in storage 0, one after another at 64-byte boundaries; the bytes of views there are not
   written. Valid as long as the plan. */
GMMDEF const gmm_ckpt_table *gmm_ckpt_plan_targets(const gmm_ckpt_plan *plan);

typedef enum gmm_ckpt_move_kind {
    GMM_CKPT_VIEW = 0,    /* the whole target is the source from element src_at on: nothing is copied */
    GMM_CKPT_COPY = 1,
    GMM_CKPT_CONVERT = 2, /* between F32, F16 and BF16, rounded once */
    GMM_CKPT_DEQUANT = 3, /* element times the scale of its block in fp32, rounded once: 128X128, ROW, TENSOR, MX32 */
    GMM_CKPT_ZERO = 4,
    GMM_CKPT_MOVE_KIND_MAX = 0x7fffffff
} gmm_ckpt_move_kind;

/* One strided copy: for all 0 <= i_l < count[l]:
       dst[dst_at + sum i_l dst_step[l]] = src[src_at + sum i_l src_step[l]], in elements. dst_step decreases from loop
   to loop. */
typedef struct gmm_ckpt_move {
    gmm_ckpt_move_kind kind;
    gmm_scaling scaling;  /* DEQUANT */
    int32_t part, loops;  /* loops >= 1 */
    int32_t src, dst;     /* tensors of the part's table and of the targets; ZERO has no src (-1) */
    int32_t scale;        /* DEQUANT: tensor of the part's table, else -1 */
    int32_t reserved;
    int64_t src_at, dst_at;
    int64_t count[GMM_CKPT_LOOPS], src_step[GMM_CKPT_LOOPS], dst_step[GMM_CKPT_LOOPS];
} gmm_ckpt_move;

/* The moves, in the order of part, storage and offset of the bytes that they read. Valid as long as the plan. */
GMMDEF const gmm_ckpt_move *gmm_ckpt_plan_moves(const gmm_ckpt_plan *plan, int64_t *count);

/* Proves that `count` moves (NULL: the plan's own) read and write within bounds and write every byte of every target
   exactly once (of a partial plan: at most once), where views count as written.
   Errors: GMM_E_NULL, GMM_E_STATE (the moves do not; the message names the target), GMM_E_MEMORY. */
GMMDEF gmm_status gmm_ckpt_verify(const gmm_ckpt_plan *plan, const gmm_ckpt_move *moves, int64_t count,
                                  gmm_error *error);

/* A plan of the caller's own moves, which gmm_gtp_export and gmm_gtp_import use. Name, dtype, rank and shape of targets
   are read; their storage and offsets are those that any plan gives. Moves are copied, their loops merged where they
   are contiguous, and sorted. They may be COPY, CONVERT, DEQUANT and ZERO, and are checked as gmm_ckpt_verify does.
   partial 1: other processes may write some bytes of the targets, and gmm_ckpt_verify only checks that none is written
   twice. Of parts, only tables are read.
   Errors (reason): GMM_E_NULL, GMM_E_ARG (argument), GMM_E_KEY (duplicate_key), GMM_E_DTYPE, GMM_E_OVERFLOW,
       GMM_E_MEMORY; GMM_E_STATE (argument: what gmm_ckpt_verify finds). */
GMMDEF gmm_status gmm_ckpt_plan_of_moves(gmm_ckpt_plan **out, const gmm_ckpt_part *parts, int32_t part_count,
                                         const gmm_ckpt_tensor *targets, int64_t target_count,
                                         const gmm_ckpt_move *moves, int64_t count, int32_t partial,
                                         const gmm_allocator *allocator, gmm_ckpt_report *report);

typedef struct gmm_ckpt_cost {
    uint32_t struct_size;
    int32_t reserved;
    int64_t bytes_read, bytes_written; /* by all moves */
    int64_t target_bytes;  /* of storage 0 of the targets */
    int64_t scratch_min;   /* gmm_ckpt_run.scratch_bytes; more is faster */
    int64_t moves[5];      /* by kind */
} gmm_ckpt_cost;

enum { GMM_CKPT_SCRATCH = 64 << 20 }; /* recommended gmm_ckpt_run.scratch_bytes */

/* The cost of applying all moves. Pure.  Errors: GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG (struct_size). */
GMMDEF gmm_status gmm_ckpt_cost_of(const gmm_ckpt_plan *plan, gmm_ckpt_cost *cost, gmm_error *error);

/* Callbacks return 0, or anything else to fail the call with GMM_E_IO. Offsets are bytes, those of `write` within the
   target. `read` is for storages that are not memory, `write` for targets without gmm_ckpt_run.memory; each may be NULL
   where it is not needed. `done` follows the last move of a target, where moves run in order; it may be NULL. */
typedef struct gmm_ckpt_io {
    void *user;
    int (*read)(void *user, int32_t part, int32_t storage, int64_t offset, void *to, int64_t bytes);
    int (*write)(void *user, int64_t target, int64_t offset, const void *from, int64_t bytes);
    void (*done)(void *user, int64_t target);
} gmm_ckpt_io;

typedef struct gmm_ckpt_run {
    uint32_t struct_size;
    int32_t reserved;
    gmm_ckpt_io io;
    void *memory;          /* host memory of target_bytes for storage 0; NULL = io.write */
    void *scratch;         /* host memory, used during the call only; may be NULL where targets have `memory` and all
                              storages that are read are memory too */
    size_t scratch_bytes;
    int64_t end;           /* the move to stop before; 0 = all */
} gmm_ckpt_run;

/* Applies the moves from *cursor on. *cursor is advanced to the next move that is not done, also by a call that fails,
   so that a later call can continue; applying a move twice gives the same bytes. Targets must not overlap the source's
   memory.
   Errors: GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG (cursor or end out of range, overlap), GMM_E_WORKSPACE (scratch below
       scratch_min, where it is needed), GMM_E_IO. */
GMMDEF gmm_status gmm_ckpt_apply(const gmm_ckpt_plan *plan, const gmm_ckpt_run *run, int64_t *cursor, gmm_error *error);

/* ---- Small rules of Megatron-LM's checkpoints, as pure functions. */

/* Splits one tensor into those of E experts: a first extent of E is removed, and one that is a multiple of E is divided
   into equal chunks. `members` is the number of tensors in a quantized group, which must be E; 0 = a plain tensor.
   parts [E] get shape, offset and bytes, and the tensor's name.
   Errors (reason): GMM_E_NULL, GMM_E_ARG, GMM_E_KEY (group_count), GMM_E_CONFIG (not_divisible). */
GMMDEF gmm_status gmm_ckpt_split(const gmm_ckpt_tensor *tensor, int32_t members, int32_t experts,
                                 gmm_ckpt_tensor *parts, gmm_ckpt_report *report);

typedef struct gmm_ckpt_interval {
    int64_t shard_at;  /* where the intersection lies in the shard; -1 = there is none */
    int64_t member_at; /* and in the member; -1 = there is none */
    int64_t length;
} gmm_ckpt_interval;

/* Intersects a flat shard [start, start + length) with each of the consecutive members. Every member gets an entry, so
   that all ranks have equally many. start -1 with length 0: no shard.
   Errors: GMM_E_NULL, GMM_E_ARG (negative or missing start, shard past the end), GMM_E_OVERFLOW. */
GMMDEF gmm_status gmm_ckpt_shard_members(const int64_t *numel, int32_t members, int64_t start, int64_t length,
                                         gmm_ckpt_interval *out, gmm_error *error);

/* One expert's parameter in Megatron's sharded checkpoints. */
typedef struct gmm_ckpt_stored {
    uint32_t struct_size;
    int32_t singleton;      /* 1: a key per expert, 0: one key for all with an expert axis */
    const char *prefix;     /* "decoder.layers.0.mlp." */
    gmm_ckpt_slot slot;     /* FC1 or FC2 */
    gmm_ckpt_kind kind;     /* WEIGHT or BIAS */
    int32_t gated;
    gmm_ckpt_half half;     /* of a gated FC1: GATE or UP */
    int64_t experts_local, index; /* experts of the rank; the expert's index among them */
    int32_t ep_rank, ep_size, etp_rank, etp_size; /* sizes of 0 mean 1 */
} gmm_ckpt_stored;

typedef struct gmm_ckpt_place {
    int64_t expert, experts;  /* offset on the expert axis and its extent (singleton: the key has the expert instead) */
    int32_t axis;             /* axis of the matrix that is divided into fragments; -1 = none */
    int32_t fragment, fragments;
} gmm_ckpt_place;

/* Writes the key (NUL-terminated, into `key_bytes` bytes) and the place.
   Errors: GMM_E_NULL, GMM_E_VERSION, GMM_E_ARG (a field out of range), GMM_E_WORKSPACE (key_bytes). */
GMMDEF gmm_status gmm_ckpt_stored_key(const gmm_ckpt_stored *stored, char *key, size_t key_bytes, gmm_ckpt_place *place,
                                      gmm_error *error);

#ifdef __cplusplus
}
#endif
GMM_QUIET_END
#endif /* GMM_MOE_GMM_H_INCLUDED */

