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

