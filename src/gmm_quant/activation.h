/* ---------------------------------------------------------------------------------- 10 Activation arithmetic --- */

/* condition ? yes : no without a branch, so that compilers that preserve floating-point traps vectorise it. */
GMM__HD float gmm__fselect(int condition, float yes, float no) {
#ifdef __CUDA_ARCH__
    return condition ? yes : no;
#else
    uint32_t mask = 0u - (uint32_t)(condition != 0);
    return gmm_f32_from_bits((gmm_f32_bits(yes) & mask) | (gmm_f32_bits(no) & ~mask));
#endif
}
/* A NaN stays a NaN; of zeros of both signs it may be either. */
GMM__HD float gmm__min(float x, float limit) {
#ifdef __CUDA_ARCH__
    return gmm__ptx_min_nan_f32(x, limit);
#else
    return gmm__fselect(x > limit, limit, x);
#endif
}
GMM__HD float gmm__max(float x, float limit) {
#ifdef __CUDA_ARCH__
    return gmm__ptx_max_nan_f32(x, limit);
#else
    return gmm__fselect(x < limit, limit, x);
#endif
}

/* exp, sigmoid and tanh in fp32. On the host they are polynomials of our own (no libm call, so that loops over them
   vectorise): exp within 3 ulp, sigmoid 4 (its subnormals aside), tanh 5; on the device exp is expf. NaN
   propagates; exp(-inf) = 0, exp(+inf) = +inf. */
GMM__HD float gmm_exp(float x) {
#ifdef __CUDA_ARCH__
    return expf(x);
#else
    float c = gmm__max(gmm__min(x, 89.0f), -104.0f);
    float t = gmm__fselect(c == c, c, 0.0f) * 1.44269504f;
    int32_t n = (int32_t)(t + gmm__fselect(t < 0.0f, -0.5f, 0.5f)), half = n / 2;
    float r = (c - (float)n * 0.693359375f) + (float)n * 2.12194440e-4f;
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    /* 2^n in two factors, so that results in the subnormal range round once and large ones reach infinity */
    return p * gmm_f32_from_bits((uint32_t)(half + 127) << 23) * gmm_f32_from_bits((uint32_t)(n - half + 127) << 23);
#endif
}
/* exp(x) for x <= 0, and 1 / x for x from 1 to 20: on the device one instruction of the special-function unit each,
   within 1e-5 of the value (results below 2^-126 become 0). */
GMM__HD float gmm__exp_nonpositive(float x) {
#ifdef __CUDA_ARCH__
    return gmm__ptx_ex2_approx_ftz_f32(x * 1.44269504f);
#else
    return gmm_exp(x);
#endif
}
GMM__HD float gmm__reciprocal(float x) {
#ifdef __CUDA_ARCH__
    return gmm__ptx_rcp_approx_ftz_f32(x);
#else
    return 1.0f / x;
#endif
}
/* -|x|; on the device it is part of the instruction that reads it. */
GMM__HD float gmm__negative_abs(float x) {
#ifdef __CUDA_ARCH__
    return -fabsf(x);
#else
    return gmm__fselect(x < 0.0f, x, -x);
#endif
}
/* The sigmoid s(x), and 1 - s(x) in *rest: neither loses digits in its tail. */
GMM__HD float gmm_sigmoid_rest(float x, float *rest) {
    float e = gmm__exp_nonpositive(gmm__negative_abs(x)), r = gmm__reciprocal(1.0f + e), q = e * r;
    *rest = gmm__fselect(x < 0.0f, r, q);
    return gmm__fselect(x < 0.0f, q, r);
}
GMM__HD float gmm_sigmoid(float x) {
    float rest;
    return gmm_sigmoid_rest(x, &rest);
}
/* tanh(x), and its derivative 1 - tanh(x)^2 in *slope. Near 0 the series, elsewhere (1 - e) / (1 + e), e = exp(-2a). */
GMM__HD float gmm_tanh_slope(float x, float *slope) {
    float a = gmm__fselect(x < 0.0f, -x, x), s = x * x;
    float e = gmm__exp_nonpositive(-2.0f * a), q = gmm__reciprocal(1.0f + e), quotient = (1.0f - e) * q;
    float series = x * (1.0f + s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f))));
    *slope = 4.0f * e * q * q;
    return gmm__fselect(a < 0.25f, series, gmm__fselect(x < 0.0f, -quotient, quotient));
}
GMM__HD float gmm_tanh(float x) {
    float slope;
    return gmm_tanh_slope(x, &slope);
}

/* a * b + c: rounded once on the device; on the host the compiler may round the product as well. */
GMM__HD float gmm__fma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
    return gmm__ptx_fma_rn_f32(a, b, c);
#else
    return a * b + c;
#endif
}
/* The standard normal distribution Phi(x) = (1 + erf(x / sqrt(2))) / 2, and its density in *density. Host and device
   are each within 1.5e-5 of the value (results below 2^-126 aside), the host for |x| up to 3 within 16 ulp; NaN
   propagates. The tail 1 - Phi(t), t = |x|, is exp(-t^2 / 2) / (t + 3) times a polynomial in q = (t - 3) / (t + 3),
   which was fitted to 6e-8 of the value for t up to 14.5. Beyond, the tail is 0 in fp32. */
GMM__HD float gmm_normal_cdf(float x, float *density) {
    float t = gmm__min(gmm__fselect(x < 0.0f, -x, x), 14.5f);
    float e = gmm__exp_nonpositive(-0.5f * t * t), r = gmm__reciprocal(t + 3.0f), q = gmm__fma(-6.0f, r, 1.0f), tail;
    float p = -2.62989740e-4f;
    p = gmm__fma(p, q, -8.97754817e-4f);
    p = gmm__fma(p, q, 1.07473230e-3f);
    p = gmm__fma(p, q, 6.92000711e-3f);
    p = gmm__fma(p, q, -1.04800932e-2f);
    p = gmm__fma(p, q, -4.72552853e-2f);
    p = gmm__fma(p, q, 2.30019399e-1f);
    p = gmm__fma(p, q, -5.09332328e-1f);
    p = gmm__fma(p, q, 7.29083668e-1f);
    tail = p * r * e;
    *density = 0.39894228f * e;
    return gmm__fselect(x < 0.0f, tail, 1.0f - tail);
}

/* The functions F of the gates. */
typedef enum gmm_gate {
    GMM_GATE_RELU,    /* max(a, 0) */
    GMM_GATE_RELU2,   /* max(a, 0)^2 */
    GMM_GATE_GELU,    /* a Phi(u), Phi by its tanh form, u = alpha a */
    GMM_GATE_QGELU,   /* a s(1.702 alpha a), s the sigmoid */
    GMM_GATE_SILU,    /* a s(alpha a) */
    GMM_GATE_SIGMOID, /* s(alpha a) */
    GMM_GATE_SITU,    /* beta1 tanh(a / beta1) s(alpha a) */
    GMM_GATE_GELU_ERF, /* a Phi(alpha a), Phi by erf: the default GELU of PyTorch and Megatron */
    GMM_GATE_MAX = 0x7fffffff
} gmm_gate;

/* X(name, value, lower-case name, gate, gated, alpha, betas). The last three are 1 where the activation is gated, takes
   gmm_act.alpha, and takes beta1 and beta2. A gated activation reads two values a (gate) and b (linear) per output:
       y = F(a') (U(b') + offset),  a' = min(a, limit),  b' = clamp(b, -limit, limit)
   and an ungated one y = F(a'). F of GMM_ACT_NONE is the identity; so is U, but for SiTU-GLU, where it is
   beta2 tanh(b' / beta2). A new activation is a row here and, if its F is new, a gate with its formula in
   gmm__act_point. */
#define GMM_ACT_LIST(X) \
    X(GMM_ACT_NONE, 0, none, GMM_GATE_MAX, 0, 0, 0) \
    X(GMM_ACT_RELU, 1, relu, GMM_GATE_RELU, 0, 0, 0) \
    X(GMM_ACT_RELU2, 2, relu2, GMM_GATE_RELU2, 0, 0, 0) \
    X(GMM_ACT_GELU, 3, gelu, GMM_GATE_GELU, 0, 1, 0) \
    X(GMM_ACT_QGELU, 4, qgelu, GMM_GATE_QGELU, 0, 1, 0) \
    X(GMM_ACT_SILU, 5, silu, GMM_GATE_SILU, 0, 1, 0) \
    X(GMM_ACT_GLU, 6, glu, GMM_GATE_SIGMOID, 1, 1, 0) \
    X(GMM_ACT_REGLU, 7, reglu, GMM_GATE_RELU, 1, 0, 0) \
    X(GMM_ACT_RELU2_GLU, 8, relu2_glu, GMM_GATE_RELU2, 1, 0, 0) \
    X(GMM_ACT_GEGLU, 9, geglu, GMM_GATE_GELU, 1, 1, 0) \
    X(GMM_ACT_QGEGLU, 10, qgeglu, GMM_GATE_QGELU, 1, 1, 0) \
    X(GMM_ACT_SWIGLU, 11, swiglu, GMM_GATE_SILU, 1, 1, 0) \
    X(GMM_ACT_SITUGLU, 12, situglu, GMM_GATE_SITU, 1, 1, 1) \
    X(GMM_ACT_GELU_ERF, 13, gelu_erf, GMM_GATE_GELU_ERF, 0, 1, 0) \
    X(GMM_ACT_GEGLU_ERF, 14, geglu_erf, GMM_GATE_GELU_ERF, 1, 1, 0)

typedef enum gmm_act_kind {
#define GMM__X(name, value, text, gate, gated, alpha, betas) name = value,
    GMM_ACT_LIST(GMM__X)
#undef GMM__X
    GMM_ACT_KIND_MAX = 0x7fffffff
} gmm_act_kind;

/* An activation's settings. The clamped SwiGLU of gpt-oss is SWIGLU with limit 7, alpha 1.702, offset 1. */
typedef struct gmm_act {
    uint32_t struct_size;
    gmm_act_kind kind;
    int32_t interleave; /* gated: pre-activation columns are [a:B | b:B | a:B ...]; 0 = halves [a | b]. Divides ffn */
    float limit;        /* 0 = no clamp; else finite > 0. A NaN stays a NaN. Its gradient is 1 at the limit, 0 beyond */
    float alpha;        /* finite slope inside the sigmoid or Phi; 0 = 1. Only gates that have one take another value */
    float offset;       /* finite, added to the linear part; gated only */
    float beta1, beta2; /* SiTU: 0 = 4 and 25; else finite > 0 */
    uint32_t reserved[8]; /* 0; later settings go here, so that structures may hold a gmm_act by value */
} gmm_act;

/* gmm_act with its defaults filled in, as the arithmetic wants it. */
typedef struct gmm_act_coef { float limit, alpha, offset, beta1, beta2; } gmm_act_coef;

GMM__HD gmm_act_coef gmm_act_coefficients(const gmm_act *act) {
    gmm_act_coef c;
    c.limit = act->limit == 0.0f ? gmm_f32_from_bits(0x7F800000u) : act->limit;
    c.alpha = act->alpha == 0.0f ? 1.0f : act->alpha;
    c.offset = act->offset;
    c.beta1 = act->beta1 == 0.0f ? 4.0f : act->beta1;
    c.beta2 = act->beta2 == 0.0f ? 25.0f : act->beta2;
    return c;
}

/* gmm_act_point; `limited` may be 0 where c.limit is infinite, which takes fewer instructions for the same bits.
   Source of the formulas: the derivatives of F and U above; GELU's tanh form is a s(2 u'), u' = 0.79788456 u
   (1 + 0.044715 u^2), which needs no tanh. */
GMM__HD float gmm__act_point(gmm_gate gate, int gated, int limited, gmm_act_coef c, float a, float b, float *da,
                             float *db) {
    float clamp_da = limited ? gmm__fselect(a > c.limit, 0.0f, 1.0f) : 1.0f, ga = limited ? gmm__min(a, c.limit) : a;
    float f, fa, s, r, t, u, v;
    switch ((int)gate) {
    case GMM_GATE_RELU: f = gmm__max(ga, 0.0f); fa = gmm__fselect(ga <= 0.0f, 0.0f, 1.0f); break;
    case GMM_GATE_RELU2: u = gmm__max(ga, 0.0f); f = u * u; fa = 2.0f * u; break;
    case GMM_GATE_GELU:
        u = c.alpha * ga;
        v = gmm__max(gmm__min(u, 16.0f), -16.0f); /* beyond, s is 0 or 1 in fp32, and the square could overflow */
        s = gmm_sigmoid_rest(2.0f * v * (0.79788456f + 0.03567741f * v * v), &r);
        f = ga * s;
        fa = s + 2.0f * v * (0.79788456f + 0.10703222f * v * v) * s * r;
        break;
    case GMM_GATE_GELU_ERF:
        u = c.alpha * ga;
        v = gmm__max(gmm__min(u, 16.0f), -16.0f); /* beyond, the density is 0, by which an infinity would give NaN */
        s = gmm_normal_cdf(v, &r);
        f = ga * s;
        fa = s + v * r;
        break;
    case GMM_GATE_QGELU:
        u = 1.702f * c.alpha;
        s = gmm_sigmoid_rest(u * ga, &r);
        f = ga * s;
        fa = s + u * (f * r); /* u * f could overflow where r is 0 */
        break;
    case GMM_GATE_SILU:
        s = gmm_sigmoid_rest(c.alpha * ga, &r);
        f = ga * s;
        fa = s + c.alpha * (f * r);
        break;
    case GMM_GATE_SIGMOID:
        f = gmm_sigmoid_rest(c.alpha * ga, &r);
        fa = c.alpha * f * r;
        break;
    case GMM_GATE_SITU:
        s = gmm_sigmoid_rest(c.alpha * ga, &r);
        t = c.beta1 * gmm_tanh_slope(ga / c.beta1, &u);
        f = t * s;
        fa = u * s + c.alpha * f * r;
        break;
    default: f = ga; fa = 1.0f; break; /* GMM_ACT_NONE: the identity */
    }
    if (!gated) {
        *da = clamp_da * fa;
        *db = 0.0f;
        return f;
    }
    {
        float lb = limited ? gmm__max(gmm__min(b, c.limit), -c.limit) : b, ub = 1.0f;
        float clamp_db = limited ? gmm__fselect((b > c.limit) | (b < -c.limit), 0.0f, 1.0f) : 1.0f;
        if (gate == GMM_GATE_SITU) lb = c.beta2 * gmm_tanh_slope(lb / c.beta2, &ub);
        lb += c.offset;
        *da = clamp_da * fa * lb;
        *db = clamp_db * ub * f;
        return f * lb;
    }
}

/* One output and its derivatives dy/da, dy/db (fp32). With gated = 0, b is ignored and *db is 0. */
GMM__HD float gmm_act_point(gmm_gate gate, int gated, gmm_act_coef c, float a, float b, float *da, float *db) {
    return gmm__act_point(gate, gated, 1, c, a, b, da, db);
}

/* Columns of the pre-activation that output column j reads: the gate's, and (gated) the linear part's. */
GMM__HD int64_t gmm_glu_gate_column(int64_t j, int64_t interleave) {
    return interleave ? (j / interleave) * 2 * interleave + j % interleave : j;
}
GMM__HD int64_t gmm_glu_linear_column(int64_t j, int64_t ffn, int64_t interleave) {
    return gmm_glu_gate_column(j, interleave) + (interleave ? interleave : ffn);
}

