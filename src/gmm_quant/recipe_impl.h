GMMDEF gmm_recipe gmm_recipe_of(gmm_recipe_kind kind) {
    gmm_recipe r = GMM_ZERO;
    gmm_scaling scaling = GMM_SCALING_TENSOR;
    switch (kind) {
    case GMM_RECIPE_FP8_DELAYED:
    case GMM_RECIPE_FP8_CURRENT: break;
    case GMM_RECIPE_FP8_BLOCK: scaling = GMM_SCALING_1X128; break;
    case GMM_RECIPE_MXFP8: scaling = GMM_SCALING_MX32; break;
    case GMM_RECIPE_NVFP4: scaling = GMM_SCALING_NV16; break;
    default: return r;
    }
    r.kind = kind;
    r.input.dtype = kind == GMM_RECIPE_NVFP4 ? GMM_E2M1 : GMM_E4M3;
    r.input.scaling = scaling;
    r.input.delayed = kind == GMM_RECIPE_FP8_DELAYED;
    r.input.pow2 = kind == GMM_RECIPE_FP8_BLOCK;
    r.weight = r.grad = r.input;
    if (scaling == GMM_SCALING_TENSOR) r.grad.dtype = GMM_E5M2;
    if (kind == GMM_RECIPE_FP8_BLOCK) r.weight.scaling = GMM_SCALING_128X128;
    if (kind == GMM_RECIPE_NVFP4) {
        r.weight.square = 1;
        r.input.hadamard = r.grad.hadamard = GMM_HADAMARD | GMM_HADAMARD_SIGNS;
        r.grad.stochastic = 1;
    }
    return r;
}

/* Checks a format; `role` ("weight." or "") opens the name of the field. */
static gmm_status gmm__check_format(const gmm_format *format, const char *role, gmm_error *error) {
    gmm_format f;
    gmm_layout l;
    gmm_error unused = GMM_ZERO;
    gmm_status s;
    char rule[96];
    int nv, mx, fp8;
    uint32_t i;
    if ((s = gmm__read_sized(&f, sizeof f, format, rule)) != GMM_OK) return gmm__fail(error, s, "%s%s", role, rule);
    if (f.dtype == GMM_NONE) { /* an operand that is not quantized has no other setting */
        f.struct_size = 0;
        for (i = 0; i < sizeof f; i++)
            if (((const unsigned char *)&f)[i])
                return gmm__fail(error, GMM_E_CONFIG, "%sdtype: none, but other fields are set", role);
        return GMM_OK;
    }
    if (f.scaling == GMM_SCALING_NONE || gmm_layout_of(f.dtype, f.scaling, f.order, GMM_ROWWISE, 0, 0, &l, &unused))
        return gmm__fail(error, GMM_E_DTYPE, "%s%s: dtype %s (%d), scaling %s (%d) and order %d do not go together",
                         role, f.order != GMM_SCALES_COMPACT && f.scaling != GMM_SCALING_NONE ? "order" : "scaling",
                         gmm_dtype_name(f.dtype), (int)f.dtype, gmm_scaling_name(f.scaling), (int)f.scaling,
                         (int)f.order);
    nv = f.scaling == GMM_SCALING_NV16;
    mx = f.scaling == GMM_SCALING_MX32;
    fp8 = !nv && !mx;
    {
        const struct { const char *field; double value; int wrong; const char *rule; } rules[] = {
            { "delayed", (double)f.delayed, f.delayed & ~1 || (f.delayed && f.scaling != GMM_SCALING_TENSOR),
              "must be 0, or 1 with scaling tensor" },
            { "pow2", (double)f.pow2, f.pow2 & ~1 || (f.pow2 && (!fp8 || f.delayed)),
              "must be 0, or 1 with fp32 scales that are not delayed" },
            { "square", (double)f.square, f.square & ~1 || (f.square && fp8), "must be 0, or 1 with mx32 or nv16" },
            { "hadamard", (double)f.hadamard,
              f.hadamard && (!nv || (f.hadamard & ~0xFFFF) != GMM_HADAMARD || f.square || f.row_amax),
              "must be 0, or GMM_HADAMARD and 16 sign bits with nv16 without square and row_amax" },
            { "stochastic", (double)f.stochastic,
              f.stochastic & ~1 || (f.stochastic && (!nv || f.square || f.four_over_six)),
              "must be 0, or 1 with nv16 without square and four_over_six" },
            { "four_over_six", (double)f.four_over_six,
              f.four_over_six < 0 || f.four_over_six > 2 || (f.four_over_six && (!nv || f.hadamard || f.row_amax)),
              "must be 0, or 1 or 2 with nv16 without hadamard and row_amax" },
            { "e4m3_256", (double)f.e4m3_256, f.e4m3_256 & ~1 || (f.e4m3_256 && !f.four_over_six),
              "must be 0, or 1 with four_over_six" },
            { "row_amax", (double)f.row_amax, f.row_amax & ~1 || (f.row_amax && (!nv || f.square || f.stochastic)),
              "must be 0, or 1 with nv16 without square and stochastic" },
            { "eps", (double)f.eps,
              gmm_f32_bits(f.eps) >= 0x7F800000u || (gmm_f32_bits(f.eps) && (!fp8 || f.delayed)),
              "must be 0, or finite and above 0 with fp32 scales that are not delayed" },
            { "reserved", (double)(f.reserved[0] | f.reserved[1] | f.reserved[2] | f.reserved[3]),
              (f.reserved[0] | f.reserved[1] | f.reserved[2] | f.reserved[3]) != 0, "must be 0" } };
        for (i = 0; i < sizeof rules / sizeof rules[0]; i++)
            if (rules[i].wrong)
                return gmm__fail(error, GMM_E_CONFIG, "%s%s: %.10g %s (dtype %s, scaling %s)", role, rules[i].field,
                                 rules[i].value, rules[i].rule, gmm_dtype_name(f.dtype), gmm_scaling_name(f.scaling));
    }
    return GMM_OK;
}

GMMDEF gmm_status gmm_format_validate(const gmm_format *format, gmm_error *error) {
    return format ? gmm__check_format(format, "", error) : gmm__fail(error, GMM_E_NULL, "format: is NULL");
}

/* Whether an operand of a recipe may have this scaling. */
static int gmm__recipe_takes(gmm_recipe_kind kind, int weight, const gmm_format *f) {
    switch (kind) {
    case GMM_RECIPE_FP8_DELAYED: return f->scaling == GMM_SCALING_TENSOR && f->delayed;
    case GMM_RECIPE_FP8_CURRENT:
        return (f->scaling == GMM_SCALING_TENSOR || f->scaling == GMM_SCALING_ROW) && !f->delayed;
    case GMM_RECIPE_FP8_BLOCK:
        return f->scaling == GMM_SCALING_1X128 || (weight && f->scaling == GMM_SCALING_128X128);
    case GMM_RECIPE_MXFP8: return f->scaling == GMM_SCALING_MX32;
    case GMM_RECIPE_NVFP4: return f->scaling == GMM_SCALING_NV16;
    default: return 0;
    }
}

GMMDEF gmm_status gmm_recipe_validate(const gmm_recipe *recipe, gmm_error *error) {
    static const char *const roles[3] = { "input.", "weight.", "grad." };
    gmm_recipe r;
    const gmm_format *f[3];
    gmm_status s;
    char rule[96];
    int i;
    if (!recipe) return gmm__fail(error, GMM_E_NULL, "recipe: is NULL");
    if ((s = gmm__read_sized(&r, sizeof r, recipe, rule)) != GMM_OK) return gmm__fail(error, s, "%s", rule);
    gmm__complete_recipe(&r);
    f[0] = &r.input;
    f[1] = &r.weight;
    f[2] = &r.grad;
    if (r.kind < GMM_RECIPE_NONE || r.kind > GMM_RECIPE_NVFP4)
        return gmm__fail(error, GMM_E_CONFIG, "kind: %d is no recipe", (int)r.kind);
    for (i = 0; i < 3; i++) {
        const gmm_status s = gmm__check_format(f[i], roles[i], error);
        if (s != GMM_OK) return s;
        if (f[i]->dtype != GMM_NONE && !gmm__recipe_takes(r.kind, i == 1, f[i]))
            return gmm__fail(error, GMM_E_CONFIG, "%sscaling: %s%s does not belong to recipe %s", roles[i],
                             f[i]->delayed ? "delayed " : "", gmm_scaling_name(f[i]->scaling), gmm_recipe_name(r.kind));
    }
    if ((r.input.dtype == GMM_NONE) != (r.grad.dtype == GMM_NONE))
        return gmm__fail(error, GMM_E_CONFIG, "grad.dtype: %s and input.dtype %s: both are quantized or none, for the "
                         "weight gradient multiplies them", gmm_dtype_name(r.grad.dtype),
                         gmm_dtype_name(r.input.dtype));
    if (r.input.hadamard != r.grad.hadamard)
        return gmm__fail(error, GMM_E_CONFIG, "grad.hadamard: 0x%x must be that of input, 0x%x: their product is that "
                         "of the operands only if both are transformed alike", (unsigned)r.grad.hadamard,
                         (unsigned)r.input.hadamard);
    if (r.weight.hadamard)
        return gmm__fail(error, GMM_E_CONFIG, "weight.hadamard: 0x%x must be 0: its products are with operands that "
                         "are not transformed", (unsigned)r.weight.hadamard);
    if (r.grad.four_over_six)
        return gmm__fail(error, GMM_E_CONFIG, "grad.four_over_six: %d must be 0: it is for input and weight",
                         r.grad.four_over_six);
    if (r.input.stochastic || r.weight.stochastic)
        return gmm__fail(error, GMM_E_CONFIG, "%s.stochastic: 1 must be 0: only grad is rounded stochastically",
                         r.input.stochastic ? "input" : "weight");
    if (r.weight.row_amax || r.grad.row_amax)
        return gmm__fail(error, GMM_E_CONFIG, "%s.row_amax: only input takes one amax per row",
                         r.weight.row_amax ? "weight" : "grad");
    if (r.margin < 0 || r.margin > 63 || (r.margin && r.kind != GMM_RECIPE_FP8_DELAYED))
        return gmm__fail(error, GMM_E_CONFIG, "margin: %d must be 0, or up to 63 with delayed scaling", r.margin);
    if (r.history_length < 0 || (r.history_length && r.kind != GMM_RECIPE_FP8_DELAYED))
        return gmm__fail(error, GMM_E_CONFIG, "history_length: %d must be 0, or at least 1 with delayed scaling",
                         r.history_length);
    if (r.most_recent & ~1 || (r.most_recent && r.kind != GMM_RECIPE_FP8_DELAYED))
        return gmm__fail(error, GMM_E_CONFIG, "most_recent: %d must be 0, or 1 with delayed scaling",
                         r.most_recent);
    if (r.reserved) return gmm__fail(error, GMM_E_CONFIG, "reserved: %d must be 0", r.reserved);
    return GMM_OK;
}

