/* test_layout.c - gmm_layout_of: sizes of data and scales, where the scales of a group begin, the swizzled order */
#include "test.h"

#include <string.h>

static int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
static int64_t blocks(int64_t a, int64_t b) { return (a + b - 1) / b; }

static gmm_layout layout(gmm_dtype dtype, gmm_scaling scaling, gmm_scale_order order, gmm_direction direction,
                         int64_t rows, int64_t cols) {
    gmm_layout l = GMM_ZERO;
    gmm_error error = GMM_ZERO;
    T_CHECK(gmm_layout_of(dtype, scaling, order, direction, rows, cols, &l, &error) == GMM_OK, "%s", error.text);
    return l;
}

static void swizzle_vectors(int arg) {
    const int64_t cols = 92;
    (void)arg;
    T_CHECK(gmm_swizzle_offset(0, 0, cols) == 0 && gmm_swizzle_offset(0, 1, cols) == 1, "first row");
    T_CHECK(gmm_swizzle_offset(1, 0, cols) == 16 && gmm_swizzle_offset(32, 0, cols) == 4, "first column");
    T_CHECK(gmm_swizzle_offset(127, 3, cols) == 511 && gmm_swizzle_offset(0, 4, cols) == 512, "tile end");
    T_CHECK(gmm_swizzle_offset(128, 0, cols) == 512 * (cols / 4), "second row of tiles");
}

static void swizzle_bijection(int arg) {
    (void)arg;
    for (int i = 0; i < 50; i++) {
        const int64_t rows = up(t_int(1, 700), 128), cols = up(t_int(1, 60), 4), tiles = cols / 4;
        unsigned char *seen = (unsigned char *)t_host((size_t)(rows * cols));
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++) {
                const int64_t o = gmm_swizzle_offset(r, c, cols), t = o / 512, in = o % 512;
                T_CHECK(o >= 0 && o < rows * cols && !seen[o],
                        "(%lld, %lld) of %lld x %lld lands on %lld", (long long)r, (long long)c,
                        (long long)rows, (long long)cols, (long long)o);
                seen[o] = 1;
                /* and the inverse formula */
                T_CHECK(t / tiles * 128 + in % 16 / 4 * 32 + in / 16 == r && t % tiles * 4 + in % 4 == c, "inverse");
            }
    }
}

static void shapes_2880(int arg) {
    gmm_layout l;
    (void)arg;
    l = layout(GMM_E4M3, GMM_SCALING_MX32, GMM_SCALES_COMPACT, GMM_ROWWISE, 2880, 2880);
    T_CHECK(l.scale_rows == 2944 && l.scale_cols == 92 && l.scale_bytes == 2944 * 92 && l.scale_dtype == GMM_E8M0,
            "MXFP8");
    l = layout(GMM_E4M3, GMM_SCALING_MX32, GMM_SCALES_SWIZZLED, GMM_ROWWISE, 2880, 2880);
    T_CHECK(l.scale_rows == 2944 && l.scale_cols == 92 && l.data_bytes == 2880 * 2880, "MXFP8 swizzled");
    l = layout(GMM_E2M1, GMM_SCALING_NV16, GMM_SCALES_COMPACT, GMM_ROWWISE, 2880, 2880);
    T_CHECK(l.scale_rows == 2944 && l.scale_cols == 180 && l.scale_dtype == GMM_E4M3 && l.data_bytes == 2880 * 1440,
            "NVFP4");
    l = layout(GMM_E4M3, GMM_SCALING_1X128, GMM_SCALES_COMPACT, GMM_ROWWISE, 2880, 2880);
    T_CHECK(l.scale_rows == 23 && l.scale_cols == 2880 && l.scale_bytes == 4 * 23 * 2880 && l.scale_dtype == GMM_F32,
            "1x128");
    l = layout(GMM_E4M3, GMM_SCALING_128X128, GMM_SCALES_COMPACT, GMM_ROWWISE, 2880, 2880);
    T_CHECK(l.scale_rows == 23 && l.scale_cols == 24 && l.scale_bytes == 4 * 23 * 24, "128x128");
    l = layout(GMM_BF16, GMM_SCALING_NONE, GMM_SCALES_COMPACT, GMM_ROWWISE, 2880, 2880);
    T_CHECK(l.scale_bytes == 0 && l.data_bytes == 2 * 2880 * 2880 && l.scale_dtype == GMM_NONE && !l.transposed,
            "bf16");
}

/* Scale offsets of consecutive groups. */
static void group_offsets(int arg) {
    static const int64_t rows[] = {0, 128, 256, 0, 384};
    static const int64_t mx[] = {0, 0, 1024, 3072, 3072, 6144}, fp8[] = {0, 0, 256, 768, 768, 1536};
    static const int64_t nv[] = {0, 0, 2048, 6144, 6144, 12288};
    int64_t at[3] = {0, 0, 0};
    (void)arg;
    for (int g = 0; g <= 5; g++) {
        T_CHECK(at[0] == mx[g] && at[1] == 4 * fp8[g] && at[2] == nv[g],
                "group %d: %lld %lld %lld", g, (long long)at[0], (long long)at[1], (long long)at[2]);
        if (g == 5) break;
        at[0] += layout(GMM_E4M3, GMM_SCALING_MX32, GMM_SCALES_COMPACT, GMM_ROWWISE, rows[g], 256).scale_bytes;
        at[1] += layout(GMM_E4M3, GMM_SCALING_1X128, GMM_SCALES_COMPACT, GMM_ROWWISE, rows[g], 256).scale_bytes;
        at[2] += layout(GMM_E2M1, GMM_SCALING_NV16, GMM_SCALES_COMPACT, GMM_ROWWISE, rows[g], 256).scale_bytes;
    }
}

/* Every format and direction at random shapes, against the table of the layouts. */
static void random_shapes(int arg) {
    (void)arg;
    for (int i = 0; i < 4000; i++) {
        const int64_t M = 2 * t_int(0, 700), K = 2 * t_int(0, 700);
        const gmm_direction direction = i % 2 ? GMM_COLUMNWISE : GMM_ROWWISE;
        const int64_t a = direction ? K : M, b = direction ? M : K; /* extents across and along the scale blocks */
        gmm_layout l;
        switch (i / 2 % 7) {
        case 0:
            l = layout(GMM_E5M2, GMM_SCALING_TENSOR, GMM_SCALES_COMPACT, direction, M, K);
            T_CHECK(l.scale_rows * l.scale_cols == 1 && l.scale_bytes == 4 && l.transposed == (int)direction, "tensor");
            break;
        case 1:
            l = layout(GMM_E4M3, GMM_SCALING_ROW, GMM_SCALES_COMPACT, direction, M, K);
            T_CHECK(l.scale_rows * l.scale_cols == a && l.scale_bytes == 4 * a, "row");
            break;
        case 2:
            l = layout(GMM_E4M3, GMM_SCALING_1X128, GMM_SCALES_COMPACT, direction, M, K);
            T_CHECK(l.scale_rows == blocks(b, 128) && l.scale_cols == up(a, 4) && l.transposed == (int)direction,
                    "1x128");
            break;
        case 3:
            l = layout(GMM_E5M2, GMM_SCALING_128X128, GMM_SCALES_COMPACT, direction, M, K);
            T_CHECK(l.scale_rows == blocks(a, 128) && l.scale_cols == up(blocks(b, 128), 4), "128x128");
            T_CHECK(l.transposed == (int)direction, "128x128");
            break;
        case 4:
            l = layout(GMM_E4M3, GMM_SCALING_MX32, GMM_SCALES_COMPACT, direction, M, K);
            T_CHECK(!l.transposed, "mx32 keeps the row-major order");
            if (direction)
                T_CHECK(l.scale_rows == up(blocks(M, 32), 4) && l.scale_cols == up(K, 128), "mx32 columnwise");
            else T_CHECK(l.scale_rows == up(M, 128) && l.scale_cols == up(blocks(K, 32), 4), "mx32 rowwise");
            break;
        case 5:
            l = layout(i % 4 ? GMM_E5M2 : GMM_E2M1, GMM_SCALING_MX32, GMM_SCALES_SWIZZLED, direction, M, K);
            T_CHECK(l.scale_rows == up(a, 128) && l.scale_cols == up(blocks(b, 32), 4) && !l.transposed,
                    "mx32 swizzled");
            T_CHECK(l.scale_rows % 128 == 0 && l.scale_cols % 4 == 0, "whole tiles");
            break;
        default:
            l = layout(GMM_E2M1, GMM_SCALING_NV16, i % 3 ? GMM_SCALES_COMPACT : GMM_SCALES_SWIZZLED, direction, M, K);
            T_CHECK(l.scale_rows == up(a, 128) && l.scale_cols == up(blocks(b, 16), 4), "nv16");
            T_CHECK(l.transposed == (int)direction, "nv16");
            break;
        }
        T_CHECK(l.data_rows == (l.transposed ? K : M) && l.data_cols == (l.transposed ? M : K), "data extents");
        T_CHECK(l.data_bytes * 2 == M * K * (i / 2 % 7 == 6 || (i / 2 % 7 == 5 && i % 4 == 0) ? 1 : 2), "data bytes");
    }
}

/* Quantized activations at full capacity, against the same table. */
static void random_groups(int arg) {
    static const struct { gmm_dtype dtype; gmm_scaling scaling; } formats[] = {
        { GMM_BF16, GMM_SCALING_NONE }, { GMM_E5M2, GMM_SCALING_TENSOR }, { GMM_E4M3, GMM_SCALING_ROW },
        { GMM_E4M3, GMM_SCALING_1X128 }, { GMM_E4M3, GMM_SCALING_MX32 }, { GMM_E2M1, GMM_SCALING_MX32 },
        { GMM_E2M1, GMM_SCALING_NV16 } };
    (void)arg;
    for (int i = 0; i < 7000; i++) {
        const gmm_dtype dtype = formats[i % 7].dtype;
        const gmm_scaling scaling = formats[i % 7].scaling;
        const int columnwise = i / 7 % 2, small = dtype == GMM_E2M1;
        const int turned = columnwise && scaling != GMM_SCALING_MX32 && scaling != GMM_SCALING_NONE;
        const int32_t groups = (int32_t)t_int(1, 9);
        const int64_t rows = t_int(0, 300), cols = small ? 2 * t_int(1, 150) : t_int(1, 300);
        const int64_t P = gmm_padded_capacity(groups, rows), lines = columnwise ? cols : P, b = columnwise ? P : cols;
        const int64_t bits = (turned ? P : rows) * cols * gmm_dtype_bits(dtype);
        int64_t scales = 0;
        gmm_layout l = GMM_ZERO;
        gmm_error error = GMM_ZERO;
        T_CHECK(gmm_layout_of_groups(dtype, scaling, GMM_SCALES_COMPACT, (gmm_direction)columnwise, groups, rows, cols,
                                     &l, &error) == GMM_OK, "%s", error.text);
        if (scaling == GMM_SCALING_TENSOR) scales = 4 * groups;
        if (scaling == GMM_SCALING_ROW) scales = columnwise ? 4 * groups * cols : 4 * rows;
        if (scaling == GMM_SCALING_1X128) scales = 4 * blocks(b, 128) * up(lines, 4);
        if (scaling == GMM_SCALING_MX32) scales = up(lines, 128) * up(blocks(b, 32), 4);
        if (scaling == GMM_SCALING_NV16) scales = up(lines, 128) * up(blocks(b, 16), 4);
        T_CHECK(bits % 8 == 0 && l.data_bytes == bits / 8 && l.scale_bytes == scales, "%s %s, %d groups, %lld x %lld: "
                "%lld and %lld bytes", gmm_dtype_name(dtype), gmm_scaling_name(scaling), (int)groups, (long long)rows,
                (long long)cols, (long long)l.data_bytes, (long long)l.scale_bytes);
        T_CHECK(l.transposed == turned && l.data_cols == (turned ? P : cols) && l.data_rows == (turned ? cols : rows),
                "extents");
    }
}

static void layout_errors(int arg) {
    static const struct {
        gmm_dtype dtype;
        gmm_scaling scaling;
        int order;
        int64_t rows, cols;
        gmm_status want;
        const char *needle, *needle2;
    } bad[] = {
        {GMM_E4M3, GMM_SCALING_MX32, 0, -1, 4, GMM_E_ARG, "-1 x 4", NULL},
        {GMM_E4M3, GMM_SCALING_MX32, 0, 4, -9, GMM_E_ARG, "4 x -9", NULL},
        {GMM_BF16, GMM_SCALING_MX32, 0, 4, 4, GMM_E_DTYPE, "bf16", "mx32"},
        {GMM_E4M3, GMM_SCALING_NONE, 0, 4, 4, GMM_E_DTYPE, "e4m3", "none"},
        {GMM_E4M3, GMM_SCALING_NV16, 0, 4, 4, GMM_E_DTYPE, "e4m3", "nv16"},
        {GMM_E2M1, GMM_SCALING_TENSOR, 0, 4, 4, GMM_E_DTYPE, "e2m1", "tensor"},
        {GMM_E2M1, GMM_SCALING_1X128, 0, 4, 4, GMM_E_DTYPE, "e2m1", "1x128"},
        {GMM_F32, GMM_SCALING_128X128, 0, 4, 4, GMM_E_DTYPE, "f32", "128x128"},
        {GMM_E8M0, GMM_SCALING_ROW, 0, 4, 4, GMM_E_DTYPE, "e8m0", "row"},
        {(gmm_dtype)55, GMM_SCALING_NONE, 0, 4, 4, GMM_E_DTYPE, "gmm_layout_of", NULL},
        {GMM_E4M3, (gmm_scaling)31, 0, 4, 4, GMM_E_DTYPE, "e4m3", NULL},
        {GMM_E4M3, GMM_SCALING_1X128, 1, 4, 4, GMM_E_DTYPE, "1x128", "1"},
        {GMM_BF16, GMM_SCALING_NONE, 1, 4, 4, GMM_E_DTYPE, "none", "1"},
        {GMM_E4M3, GMM_SCALING_MX32, 2, 4, 4, GMM_E_DTYPE, "mx32", "2"},
        {GMM_E2M1, GMM_SCALING_NV16, 0, 4, 7, GMM_E_ARG, "4 x 7", "7"},
        {GMM_F32, GMM_SCALING_NONE, 0, INT64_MAX, 2, GMM_E_OVERFLOW, "9223372036854775807 x 2", NULL},
        {GMM_F32, GMM_SCALING_NONE, 0, (int64_t)1 << 32, (int64_t)1 << 32, GMM_E_OVERFLOW, "4294967296 x 4294967296",
         NULL},
        {GMM_F32, GMM_SCALING_NONE, 0, (int64_t)1 << 30, (int64_t)1 << 31, GMM_E_OVERFLOW, "2147483648", NULL},
        {GMM_E4M3, GMM_SCALING_MX32, 0, (int64_t)1 << 61, 8, GMM_E_OVERFLOW, "2305843009213693952 x 8", NULL},
        {GMM_E4M3, GMM_SCALING_MX32, 0, INT64_MAX / 2, 1, GMM_E_OVERFLOW, "4611686018427387903 x 1", NULL},
    };
    (void)arg;
    for (int i = 0; i < T_COUNT(bad); i++) {
        gmm_layout l, copy;
        gmm_error error = GMM_ZERO;
        gmm_status got;
        memset(&l, 0xA5, sizeof l);
        copy = l;
        got = gmm_layout_of(bad[i].dtype, bad[i].scaling, (gmm_scale_order)bad[i].order, GMM_ROWWISE, bad[i].rows,
                            bad[i].cols, &l, &error);
        T_CHECK(got == bad[i].want && error.status == got, "entry %d: %s (%s) instead of %s", i, gmm_status_name(got),
                error.text, gmm_status_name(bad[i].want));
        T_CHECK(strstr(error.text, "gmm_layout_of") && strstr(error.text, bad[i].needle) &&
                    (!bad[i].needle2 || strstr(error.text, bad[i].needle2)), "entry %d: \"%s\"", i, error.text);
        T_CHECK(!memcmp(&l, &copy, sizeof l), "entry %d was written", i);
        T_CHECK(gmm_layout_of(bad[i].dtype, bad[i].scaling, (gmm_scale_order)bad[i].order, GMM_ROWWISE, bad[i].rows,
                              bad[i].cols, &l, NULL) == got, "without gmm_error");
    }
    {
        gmm_error error = GMM_ZERO;
        gmm_layout l = GMM_ZERO;
        const gmm_scale_order compact = GMM_SCALES_COMPACT;
        T_CHECK(gmm_layout_of(GMM_E4M3, GMM_SCALING_MX32, compact, (gmm_direction)2, 4, 4, &l, &error) == GMM_E_ARG &&
                strstr(error.text, "direction 2") && l.data_bytes == 0, "direction: \"%s\"", error.text);
        T_CHECK(gmm_layout_of((gmm_dtype)55, (gmm_scaling)31, compact, GMM_ROWWISE, 4, 4, &l, &error) == GMM_E_DTYPE &&
                strstr(error.text, "55") && strstr(error.text, "31"), "unknown: \"%s\"", error.text);
#define GROUPS(want, dtype, scaling, groups, capacity, cols, to, needle) \
    T_CHECK(gmm_layout_of_groups(dtype, scaling, compact, GMM_ROWWISE, groups, capacity, cols, to, &error) == want && \
            error.status == want && !strncmp(error.text, "gmm_layout_of_groups: ", 22) && \
            strstr(error.text, needle), "\"%s\"", error.text)
        GROUPS(GMM_E_NULL, GMM_E4M3, GMM_SCALING_MX32, 1, 4, 32, NULL, "out");
        GROUPS(GMM_E_ARG, GMM_E4M3, GMM_SCALING_MX32, 0, 4, 32, &l, "groups 0");
        GROUPS(GMM_E_ARG, GMM_E4M3, GMM_SCALING_MX32, 1, -4, 32, &l, "capacity -4");
        GROUPS(GMM_E_ARG, GMM_E4M3, GMM_SCALING_MX32, 1, 4, -32, &l, "-32");
        GROUPS(GMM_E_OVERFLOW, GMM_E4M3, GMM_SCALING_MX32, 1, INT64_MAX / 2, 32, &l, "capacity 4611686018427387903");
        GROUPS(GMM_E_OVERFLOW, GMM_E4M3, GMM_SCALING_MX32, 1, (int64_t)1 << 54, 1024, &l, "1024");
        GROUPS(GMM_E_DTYPE, GMM_E4M3, GMM_SCALING_128X128, 1, 4, 128, &l, "128x128");
        GROUPS(GMM_E_DTYPE, GMM_BF16, GMM_SCALING_MX32, 1, 4, 128, &l, "bf16");
        GROUPS(GMM_E_ARG, GMM_E2M1, GMM_SCALING_NV16, 1, 4, 33, &l, "33");
#undef GROUPS
        T_CHECK(gmm_layout_of(GMM_F32, GMM_SCALING_NONE, GMM_SCALES_COMPACT, GMM_ROWWISE, 4, 4, NULL, &error)
                    == GMM_E_NULL, "out NULL");
        T_CHECK(strstr(error.text, "out"), "\"%s\"", error.text);
    }
}

void tests_layout(void) {
    t_add_host(swizzle_vectors, 0, "layout swizzle offsets");
    t_add_host(swizzle_bijection, 0, "layout swizzle is a bijection");
    t_add_host(shapes_2880, 0, "layout scale shapes of 2880 x 2880");
    t_add_host(group_offsets, 0, "layout scale offsets of groups");
    t_add_host(random_shapes, 0, "layout every format, 4000 shapes");
    t_add_host(random_groups, 0, "layout of groups, 7000 shapes");
    t_add_host(layout_errors, 0, "layout errors");
}
