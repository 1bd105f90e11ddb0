#if GMM__HOLDS(0) /* the operations stand in one unit */

/* The structures that the implementation passes from checks to engines: checked calls, plans, engine rows. */

/* Operands of a call by role. Families of operations use the same roles for corresponding operands. GMM__X_ ends in an
   underscore, since GMM__X is the macro by which lists such as GMM_ACT_LIST are expanded. */
enum gmm__role {
    GMM__X_, GMM__W, GMM__BIAS, GMM__Y, GMM__DY, GMM__DX, GMM__DW, GMM__DB, /* linear, activation, the MLP's FC1 */
    GMM__W2, GMM__BIAS2, GMM__DW2, GMM__DB2,                                /* the MLP's FC2 */
    GMM__ROLES,
    GMM__OUT = GMM__W, GMM__DOUT = GMM__W2, GMM__ROWS = GMM__Y, GMM__DROWS = GMM__DY,     /* permutation */
    GMM__SOURCE = GMM__DY, GMM__ROWWISE_COPY = GMM__Y, GMM__COLUMNWISE_COPY = GMM__DX     /* quantization */
};

/* A set of bytes in up to two nested loops: a run of `width` bytes, repeated count[0] times at a distance of step[0]
   bytes (the rows of a matrix), and all that count[1] times at a distance of step[1] bytes (the matrices). `loops` is
   the number of loops in use, 0 to 2. */
typedef struct gmm__box {
    uint64_t address;
    int64_t width, count[2], step[2];
    int32_t loops;
} gmm__box;

/* Memory that a call reads or writes, for gmm__check_overlap: `count` boxes of one form, `stride` bytes apart or at the
   addresses of a table that the host can read. Each has `size` bytes, gaps included; all lie in [low, high). */
typedef struct gmm__span {
    char name[32];
    const char *part; /* of the operand: "" = its elements, ".scale" */
    int32_t writes;
    int64_t count, stride;
    void *const *table;
    gmm__box box;
    uint64_t size, low, high;
} gmm__span;

/* Tiles of which an MLP's steps need the prefix sums: strips of casts and bias gradients, and blocks of 16 rows of
   transposed dequantizations. */
enum gmm__tile_kind { GMM__TILES_128, GMM__TILES_16, GMM__TILE_KINDS };

enum { GMM__SPANS = 96 }; /* more than any operation records */

/* The text that gmm_describe writes: `used` of `bytes`, without the terminating NUL. Lines are indented by `depth`, the
   number of operations that the described one is a step of. */
typedef struct gmm__text {
    char *data;
    size_t bytes, used;
    int depth;
} gmm__text;

/* Partial sums of the columns of dy or dz: within an MLP the quantization that reads the matrix writes them, and the
   bias gradient behind it reads them instead of the matrix. */
typedef struct gmm__column_sums {
    int wanted;         /* 0: there are none */
    float *partials;    /* [gmm__group_strips][columns]; NULL in a plan */
    const float *scale; /* [rows]: factors of the rows; NULL = ones */
} gmm__column_sums;

/* What the operation of an MLP's step does besides its own work, or in place of another operation. Zeros: nothing, as
   in every call outside of an MLP. */
typedef struct gmm__fusion {
    const gmm_activation *act_source; /* quantization: its source is y of this activation, which the cast computes, or
                              with act_source->dy its dx, beside which it computes dprob. mat[GMM__SOURCE] holds the
                              gate columns of the activation's x, or x */
    float *act_amax;       /* activation: [G], gets the amaxes of y (forward) or dx (backward) */
    gmm__column_sums sums; /* a quantization writes them, and a bias gradient reads them */
    const gmm_activation *product_act; /* FC1's product: mat[GMM__Y] is x of this activation, whose y the product
                              computes and writes too. FC2's dgrad: mat[GMM__DX] is dy of this activation, whose dx, y
                              and dprob the product computes and writes */
    const gmm_format *product_cast; /* with product_act: y is a rowwise copy of h in this format, and h itself is not
                              written. NULL: y has the dtype of its x */
    int drops_d;           /* with product_act: the product's own result need not be written */
} gmm__fusion;

/* A checked call: descriptors are copied, defaults are filled in, and absent operands have dtype GMM_NONE. Engines read
   this structure alone, never the caller's descriptors. The call of a query has the same shapes, dtypes and operands,
   but its addresses may be NULL. */
typedef struct gmm__call {
    gmm_context *ctx;
    gmm_op op;
    int query;            /* 1: the call asks for a plan alone, and is not launched */
    const char *function; /* for messages */
    const char *path;     /* for messages: the descriptor's parameter name; NULL = the call has no descriptor */
    char shapes[112];     /* for messages: "G=8 T=4096 K=1024 N=2048 bf16" */
    gmm_options options;
    gmm_groups groups;
    gmm_mat mat[GMM__ROLES];
    gmm_direction direction[GMM__ROLES]; /* of quantized operands */
    int32_t in_align, out_align;         /* alignment of in and out; 0 = 1 */
    gmm_grad grad[GMM__ROLES]; /* of GMM__DW, GMM__DB, GMM__DW2, GMM__DB2; beta resolved by gmm__grad_beta */
    int64_t rows, in, out;     /* capacity, K, N; MLP: hidden and hidden_out */
    gmm_mlp_quant quant;       /* MLP with a recipe */
    gmm_recipe recipe;         /* of that MLP; kind NONE = no recipe */
    int64_t units;             /* quantization: number of matrices of fixed extents; 0 = the groups of the split */
    gmm_format format;
    union {
        gmm_linear linear;
        gmm_activation act;
        gmm_mlp mlp;
        gmm_moe moe;
        gmm_route route;
        gmm_dense_route dense;
        gmm_expert_bias bias;
        gmm_permute permute;
        gmm_padding pad;
        gmm_glu glu;
        gmm_accumulation sum;
        gmm_conversion convert;
        gmm_quantization quant;
        gmm_dequantization dequant;
        gmm_scale_update update;
        gmm_transposition transposition;
        gmm_sharding shard;
    } d;                    /* the descriptor of the operation */
    gmm_act act;            /* activation, MLP, and operations that compute an activation besides (fused) */
    gmm__fusion fused;
    gmm_mlp_config config;  /* MLP, layer */
    gmm_saved_layout mlp_saved; /* layer: what its MLP saves */
    int layer_gathers;      /* layer on a GPU: products of forward gather rows of x themselves */
    int32_t *split_tiles;   /* [GMM__TILE_KINDS][G + 1] prefix sums of the groups' tiles. GMM_OP_OFFSETS writes them
                               too; other operations read them, and in groups.splits the offsets that an earlier
                               operation on the stream has written with them. NULL = none */
    int32_t tile_kinds;     /* GMM_OP_OFFSETS: bits of gmm__tile_kind, the sums that are wanted */
    void *output;           /* GMM_OP_OFFSETS: [G + 1] int64. GMM_OP_MLP_WGRAD: a gmm__wgrad_record; NULL in queries */
    int engine_by_context;  /* 1: options.engine is that of gmm_config, since the caller names none */
    int in_place;           /* 1: an output may be one of the inputs (gmm__may_replace) */
    gmm__text *describes;   /* gmm_describe: gets a line for each step of this call. NULL = not wanted */
    int32_t spans;
    gmm__span span[GMM__SPANS];
} gmm__call;

/* How an engine serves a call: the result of its plan function, which is pure, and the input of its launch function. */
enum { GMM__REGIONS = 12 }; /* the most that an operation of an engine has */
typedef struct gmm__plan {
    const gmm__call *call;
    gmm_engine engine;
    int32_t kernel;              /* row of the engine's kernel table */
    const char *kernel_name;     /* of a product; NULL = not known before the launch */
    int32_t assumes_aligned;     /* 1: a query left open an address that must be a multiple of 16 bytes */
    int32_t grid[2];             /* CTAs of the product, and of the kernel before it that gathers or dequantizes */
    int32_t copies_rows;         /* 1: gathered rows are copied to the workspace before a product reads them */
    size_t workspace_bytes;
    size_t region[GMM__REGIONS]; /* offsets of the workspace's regions (gmm__reserve) */
    size_t saved_bytes, deferred_bytes, weight_cache_bytes;
    void *workspace;             /* set by gmm__serve_plan before the launch */
    char note[192];              /* how the engine serves the call, or why it declines */
} gmm__plan;

/* An operation of an engine; NULL functions: the engine does not have it. */
typedef struct gmm__engine_op {
    int (*plan)(const gmm__call *call, gmm__plan *plan); /* 1 = yes; 0 = no, with a note */
    gmm_status (*launch)(const gmm__plan *plan, gmm_stream stream);
} gmm__engine_op;

/* A row of the engine table (core/engines.h). */
typedef struct gmm__engine_row {
    gmm_engine engine;
    gmm_space space;
    int automatic;    /* AUTO may choose it */
    const unsigned char *honours; /* by gmm__field: 1 = it honours the optional field */
    gmm__engine_op ops[GMM_OP_COUNT];
} gmm__engine_row;

/* Whether a name is that of a field of the call's descriptor, rather than of an argument of the function. */
static GMM__UNUSED int gmm__is_field(const gmm__call *call, const char *name) {
    static const char *const arguments[] = { "op", "info", "layout", "text", "workspace", "workspace_bytes", "stream",
                                             "gmm_config.engine" };
    int field = call->path && strcmp(name, call->path);
    size_t i;
    for (i = 0; i < sizeof arguments / sizeof arguments[0]; i++) field = field && strcmp(name, arguments[i]);
    return field;
}

