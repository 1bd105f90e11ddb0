/* ----------------------------------------------------------------------------------------------- 11 Checkpoints --- */

/* Export and import of shards by logical rows, as plans of strided moves (gmm.h, Checkpoints). Plans are built from
   shapes alone, report every error before a byte is copied, are verified, run through memory or callbacks, and can
   resume.

       gmm_gtp_export    the shards of ranks -> the logical weights, of which every rank writes its own rows
       gmm_gtp_import    logical weights, or the shards of other TP and GTP sizes -> the shards of one rank

   Logical     The logical weight [rows, cols] is the shard of TP size 1 and GTP size 1: its sections one after another,
               without padding. A shard's rows are those of its extents. Padding is never exported, and imported as
               zeros.
   Arrays      Any array in the layout of a shard: the weight, its fp32 main weight, optimizer moments. The fp32 arrays
               of a quantized weight are described by its shard with dtype F32, scaling NONE and the weight's unit. No
               runtime is needed, and main_grad is not read; after an import the caller publishes the weights.
   Quantized   Within one format and direction, elements and scales are copied unchanged, so that no value is quantized
               twice; every boundary must then fall between blocks. 128X128 blocks may also be dequantized, at any
               boundary: shards whose boundaries cut blocks are imported into 16 bits and quantized again.
   Tables      Elements of a shard are [rows, cols] as gmm_layout_of stores them, transposed copies as [cols, rows].
               Scales are COMPACT, with its padding or without it (as export writes them); TENSOR has one value, which
               rank 0 of TP and GTP exports. The caller saves and restores the global amax of NV16. */

/* A shard of a weight in a table. Arrays of these have no struct_size. */
typedef struct gmm_gtp_stored {
    const gmm_shard *shard; /* which rows and columns, and their format */
    int32_t part;           /* the table */
    int32_t data, scale;    /* its tensors; scale -1 = none */
    int32_t reserved;       /* 0 */
} gmm_gtp_stored;

/* One weight, or one copy of a quantized one. Arrays of these have no struct_size. */
typedef struct gmm_gtp_item {
    const char *name;             /* of the target's elements, */
    const char *scale_name;       /* and of its scales; NULL where the format has none */
    const gmm_shard *shard;       /* import: the target. export: the weight and its stored format, of any rank */
    gmm_direction direction;      /* of quantized arrays, in source and target */
    int32_t stored_count;
    const gmm_gtp_stored *stored; /* import: shards that together contain the target. export: the shards that this
                                     process writes. All have the same sections; rows that several contain are read
                                     from the first */
} gmm_gtp_item;

/* Plans the items: targets are their elements and scales, in the order of items. Parts (only their tables are read),
   shards and names are read during the call; tables must outlive the plan, which gmm_ckpt_plan_destroy frees. Export
   plans are partial (gmm_ckpt_plan_of_moves): one process may export the shards of all ranks, or each process its own.
   *out is NULL after a failure.
   Errors (reason): GMM_E_NULL; GMM_E_ARG (argument; also of gmm_gtp_plan); GMM_E_VERSION; GMM_E_KEY (shape: a weight or
       tensor of other extents; missing_index: rows that no stored shard contains; duplicate_key), GMM_E_DTYPE (dtype),
       GMM_E_CONFIG (not_divisible: a boundary that cuts a block), GMM_E_OVERFLOW, GMM_E_MEMORY. */
GMMDEF gmm_status gmm_gtp_export(gmm_ckpt_plan **out, const gmm_ckpt_part *parts, int32_t part_count,
                                 const gmm_gtp_item *items, int64_t count, const gmm_allocator *allocator,
                                 gmm_ckpt_report *report);
GMMDEF gmm_status gmm_gtp_import(gmm_ckpt_plan **out, const gmm_ckpt_part *parts, int32_t part_count,
                                 const gmm_gtp_item *items, int64_t count, const gmm_allocator *allocator,
                                 gmm_ckpt_report *report);

#ifdef __cplusplus
}
#endif
GMM_QUIET_END
#endif /* GMM_MOE_GTP_H_INCLUDED */

