/* Tensors of other libraries without a copy: a DLPack tensor (PyTorch, JAX, CuPy and others export it) becomes an
   operand of gmm, with its dtype, row pitch and memory space; what gmm cannot read is refused with the reason. */
#include "gmm.h"

#include <math.h>
#include <stdio.h>

/* The part of DLPack's interface that is needed; with dlpack/dlpack.h at hand, include that. */
typedef struct DLDevice { int32_t device_type, device_id; } DLDevice; /* type 1: CPU; 2: CUDA */
typedef struct DLDataType { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct DLTensor {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape, *strides; /* strides in elements; NULL: row-major and dense */
    uint64_t byte_offset;
} DLTensor;

/* The operand of a tensor of [rows, columns] or, one matrix per expert, [experts, rows, columns]. Returns NULL, or why
   there is none. */
static const char *operand(const DLTensor *t, gmm_mat *m) {
    static const struct { DLDataType type; gmm_dtype dtype; } types[] = { /* DLPack's codes: 2 float, 4 bfloat, 0 int */
        {{2, 32, 1}, GMM_F32}, {{2, 16, 1}, GMM_F16}, {{4, 16, 1}, GMM_BF16}};
    const int d = t->ndim;
    int64_t end; /* elements from the first of a matrix to the end of its last row */
    gmm_dtype dtype = GMM_NONE;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].type.code == t->dtype.code && types[i].type.bits == t->dtype.bits && t->dtype.lanes == 1)
            dtype = types[i].dtype;
    if (dtype == GMM_NONE) return "the dtype is none of gmm's";
    if (d != 2 && d != 3) return "a matrix has 2 dimensions, or 3 with experts";
    if (t->device.device_type != 1 && t->device.device_type != 2) return "the memory is neither the CPU's nor CUDA's";
    *m = gmm_mat_packed(dtype, (const char *)t->data + t->byte_offset);
    if (!t->strides) return NULL;
    if (t->strides[d - 1] != 1 && t->shape[d - 1] > 1) return "the elements of a row are not adjacent";
    end = t->shape[d - 1];
    if (t->shape[d - 2] > 1) { /* the stride of a single row may be anything; ld = 0 then means packed */
        m->ld = t->strides[d - 2];
        if (m->ld < end || m->ld == 0) return "rows overlap, as those of an expanded tensor do";
        end += (t->shape[d - 2] - 1) * m->ld;
    }
    if (d == 2 || t->shape[0] <= 1) return NULL;
    m->group_stride = t->strides[0];
    return m->group_stride < end || m->group_stride == 0 ? "matrices of experts overlap" : NULL;
}

static DLTensor tensor(float *data, int32_t ndim, int64_t *shape, int64_t *strides, uint64_t byte_offset) {
    const DLTensor t = {data, {1, 0}, ndim, {2, 32, 1}, shape, strides, byte_offset};
    return t;
}

int main(void) {
    /* x: columns 1 to 3 of a matrix of 5 rows and 8 columns. w: two experts of 2 x 3, each followed by 2 others. */
    static float xs[5 * 8], ws[2 * 8], y[5 * 2];
    int64_t x_shape[] = {5, 3}, x_strides[] = {8, 1}, w_shape[] = {2, 2, 3}, w_strides[] = {8, 3, 1};
    int64_t t_shape[] = {3, 5}, t_strides[] = {1, 8}, e_strides[] = {0, 1}, s_strides[] = {0, 3, 1}, o_shape[] = {1, 3};
    const int32_t sizes[2] = {2, 3};
    DLTensor x = tensor(xs, 2, x_shape, x_strides, sizeof(float)), w = tensor(ws, 3, w_shape, w_strides, 0);
    DLTensor transposed = tensor(xs, 2, t_shape, t_strides, 0), one = tensor(xs, 2, o_shape, e_strides, 0);
    DLTensor expanded = tensor(xs, 2, x_shape, e_strides, 0), tied = tensor(ws, 3, w_shape, s_strides, 0), integers = x;
    static _Alignas(256) char workspace[1 << 16];
    gmm_mat mx, mw, my = gmm_mat_packed(GMM_F32, y), none;
    gmm_groups groups = GMM_ZERO;
    gmm_linear lin = GMM_ZERO;
    gmm_config config = GMM_ZERO;
    gmm_context *ctx;
    int wrong = 0;
    for (int i = 0; i < 5 * 8; i++) xs[i] = (float)i;
    for (int i = 0; i < 2 * 8; i++) ws[i] = (float)(i % 5) - 2.0f;
    integers.dtype.code = 0;
    const char *reasons[] = {operand(&x, &mx), operand(&w, &mw), operand(&transposed, &none),
                             operand(&integers, &none), operand(&expanded, &none), operand(&tied, &none),
                             operand(&one, &none)};
    if (reasons[0] || reasons[1] || !reasons[2] || !reasons[3] || !reasons[4] || !reasons[5] || reasons[6]) return 1;
    printf("a transposed tensor: %s\nintegers: %s\n", reasons[2], reasons[3]);
    printf("one row for all: %s\none matrix for all experts: %s\n", reasons[4], reasons[5]);

    config.space = x.device.device_type == 1 ? GMM_SPACE_CPU : GMM_SPACE_CUDA;
    config.device = x.device.device_id;
    config.threads = 1;
    if (gmm_create(&ctx, &config, NULL) != GMM_OK) return 1;
    groups.count = (int32_t)w.shape[0], groups.capacity = x.shape[0], groups.splits = sizes, groups.dtype = GMM_I32;
    lin.groups = &groups, lin.in_features = w.shape[2], lin.out_features = w.shape[1];
    lin.x = &mx, lin.w = &mw, lin.y = &my;
    if (gmm_linear_fwd(ctx, &lin, workspace, sizeof workspace, NULL) != GMM_OK) {
        fprintf(stderr, "%s\n", gmm_last_error(ctx));
        return 1;
    }
    for (int r = 0; r < 5; r++)
        for (int n = 0; n < 2; n++) {
            double sum = 0.0;
            for (int k = 0; k < 3; k++) sum += (double)xs[r * 8 + 1 + k] * (double)ws[(r >= sizes[0]) * 8 + n * 3 + k];
            wrong += fabs(sum - (double)y[r * 2 + n]) > 1e-5;
        }
    printf("y of rows 1 and 2: %g %g, %g %g\n", (double)y[2], (double)y[3], (double)y[4], (double)y[5]);
    gmm_destroy(ctx);
    return wrong != 0;
}
