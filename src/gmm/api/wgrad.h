/* -------------------------------------------------------------------------------- 6 Weight-gradient decisions --- */

/* How the gradient of one weight is to be handled by a data-parallel trainer. All fields are 0 or 1. */
typedef struct gmm_wgrad_in {
    uint8_t want;         /* the weight requires a gradient */
    uint8_t main_grad;    /* its target is main_grad rather than a gradient of its own */
    uint8_t overwrite;    /* overwrite_main_grad, or the first micro-batch; read when the work is enqueued */
    uint8_t delay;        /* delayed, or dispatch overlapped with wgrad */
    uint8_t ddp_flag;     /* the parameter carries grad_added_to_main_grad */
    uint8_t zero_dummy;   /* zero_out_wgrad: the placeholder must be zero */
} gmm_wgrad_in;

typedef struct gmm_wgrad_out {
    uint8_t row;          /* 0 to 14: row of the decision table */
    uint8_t run_now;      /* compute in the main backward */
    uint8_t enqueue;      /* record for the delayed pass */
    uint8_t beta_one;     /* add to the destination instead of storing */
    uint8_t return_real;  /* the main backward returns the gradient */
    uint8_t return_dummy; /* it returns a placeholder of the parameter's shape and dtype */
    uint8_t dummy_zero;   /* the placeholder is zero-filled */
    uint8_t set_flag;     /* grad_added_to_main_grad becomes true: owned, not necessarily ready */
    uint8_t hooks_after;  /* hooks fire after the delayed pass instead of after the main backward */
} gmm_wgrad_out;

/* The decision table; pure, total over the 64 inputs, and obeyed by the operations above.
   Errors: GMM_E_NULL, GMM_E_ARG (a field above 1). */
GMMDEF gmm_status gmm_wgrad_decide(const gmm_wgrad_in *in, gmm_wgrad_out *out, gmm_error *error);

