/* mlp_case.h - a small expert MLP under a recipe or none, and what an MLP consists of as separate calls; for
   test_mlp*.c and test_moe.c. */
#ifndef GMM_TESTS_MLP_CASE_H
#define GMM_TESTS_MLP_CASE_H

#include "test.h"

/* ---------------------------------------------------------------------------------------------- The small MLP --- */

enum { MLP_GROUPS = 4, MLP_HIDDEN = 64, MLP_FFN = 96, MLP_LIVE = 103, MLP_ROWS = 110 };
extern const int64_t mlp_sizes[MLP_GROUPS]; /* one group is empty; their sum is MLP_LIVE */

/* BF16, SwiGLU, probabilities, no biases; fp32 gradients that are stored. */
typedef struct mlp_case {
    gmm_recipe recipe;
    gmm_groups groups;
    gmm_mlp_config config;
    gmm_mlp_quant quant;
    gmm_mlp d;
    t_mat x, dy, w1, w2, y, dx, dw1, dw2;
    gmm_grad gw1, gw2;
    float *prob, *dprob;
    float *scale, *amax; /* of quant, with `random`: NULL unless a test sets them */
    uint64_t *random;
} mlp_case;

/* recipe: see ref_recipe_of; negative: none. d has what forward takes; results are poison. */
void mlp_build(mlp_case *c, int recipe, gmm_save save, t_form w1, t_form w2);
/* d takes dy and gives every gradient. */
void mlp_want_gradients(mlp_case *c);

/* Bits of y, dx, dw1, dw2, dprob, of rows within the groups. */
typedef struct mlp_results { const void *bits[5]; } mlp_results;
mlp_results mlp_results_of(const mlp_case *c);
#define mlp_same_results(...) T_CALL(mlp_same_results, __VA_ARGS__)
void (mlp_same_results)(const mlp_results *a, const mlp_results *b);

/* ------------------------------------------------------------------------------------------------- Any MLP --- */

/* An operation with a workspace of exactly the queried size. */
gmm_status mlp_call(gmm_op op, const gmm_mlp *d);
/* Forward into new memory for what it saves. */
#define mlp_forward(...) T_CALL(mlp_forward, __VA_ARGS__)
void (mlp_forward)(gmm_mlp *d);

/* The part of d->saved with this name; its name is NULL if there is none. */
gmm_saved_part mlp_saved_part(const gmm_mlp *d, const char *name);
int mlp_saves_copies(gmm_save save); /* quantized ones of x and of the activation */
int mlp_saves_e4m3(gmm_save save);   /* the pre-activation is rounded */

/* A context like T.ctx that adds to *lines what it traces: one line for every operation. */
gmm_context *mlp_traced(int *lines);

/* The steps of an MLP. Extents, biases, activation and probabilities are those of d, operands and results are given. */

/* A product of FC1 (fc GMM_PARAM_W1) or FC2 (GMM_PARAM_W2). NULL: what `op` does not read. */
#define mlp_linear(...) T_CALL(mlp_linear, __VA_ARGS__)
void (mlp_linear)(const gmm_mlp *d, gmm_param fc, gmm_op op, const gmm_mat *x, const gmm_mat *w, const gmm_mat *dy,
                  const gmm_mat *result);
#define mlp_act_fwd(...) T_CALL(mlp_act_fwd, __VA_ARGS__)
void (mlp_act_fwd)(const gmm_mlp *d, const gmm_mat *z, const gmm_mat *h);
#define mlp_act_bwd(...) T_CALL(mlp_act_bwd, __VA_ARGS__)
void (mlp_act_bwd)(const gmm_mlp *d, const gmm_mat *z, const gmm_mat *dh, const gmm_mat *dz, float *dprob);
/* Casts an operand in both directions as the recipe says: copy[1] is columnwise, and copy[0].columnwise points at it.
   Returns what a product takes: copy, or src where the recipe leaves the operand as it is. slot: GMM_SLOT_X to _DZ. */
const gmm_mat *mlp_cast(const gmm_mlp *d, int slot, const gmm_mat *src, gmm_mat copy[2]);

#endif
