/* .............................................................................................. 14.6 Expert MLP ... */

/* Decisions about a weight gradient (gmm_wgrad_decide), and the consistency of an MLP's configuration. */

GMMDEF gmm_status gmm_wgrad_decide(const gmm_wgrad_in *in, gmm_wgrad_out *out, gmm_error *error) {
    gmm_wgrad_out o;
    if (!in || !out) return gmm__fail(error, GMM_E_NULL, "gmm_wgrad_decide: %s is NULL", in ? "out" : "in");
    if ((in->want | in->main_grad | in->overwrite | in->delay | in->ddp_flag | in->zero_dummy) > 1)
        return gmm__fail(error, GMM_E_ARG, "gmm_wgrad_decide: in: want %d, main_grad %d, overwrite %d, delay %d, "
                         "ddp_flag %d, zero_dummy %d must all be 0 or 1", in->want, in->main_grad, in->overwrite,
                         in->delay, in->ddp_flag, in->zero_dummy);
    memset(&o, 0, sizeof o);
    if (in->want) {
        o.enqueue = in->delay;
        o.run_now = (uint8_t)!in->delay;
        o.hooks_after = in->delay;
        if (!in->main_grad) {
            o.row = (uint8_t)(1 + in->delay);
            o.return_real = (uint8_t)!in->delay;
        } else {
            o.beta_one = (uint8_t)!in->overwrite;
            o.return_dummy = o.set_flag = in->ddp_flag;
            o.dummy_zero = (uint8_t)(in->ddp_flag & in->zero_dummy);
            o.row = (uint8_t)(3 + 6 * in->delay + 3 * in->overwrite + in->ddp_flag + o.dummy_zero);
        }
    }
    *out = o;
    return GMM_OK;
}

/* Whether backward queues the weight gradients instead of computing them. */
static int gmm__delays(const gmm_mlp_config *c) { return c->delay_wgrad || c->overlap_dispatch_wgrad; }
/* Whether forward saves x and h quantized, and whether it saves FC1's output as E4M3. */
static int gmm__saves_copies(const gmm_mlp_config *c) {
    return c->save == GMM_SAVE_QUANTIZED || c->save == GMM_SAVE_QUANTIZED_E4M3;
}
static int gmm__saves_e4m3(const gmm_mlp_config *c) {
    return c->save == GMM_SAVE_PREACT_E4M3 || c->save == GMM_SAVE_QUANTIZED_E4M3;
}

GMMDEF gmm_status gmm_mlp_validate(const gmm_mlp_config *config, gmm_error *error) {
    gmm_mlp_config c;
    gmm_act act;
    gmm_status s;
    char act_rule[160], size_rule[96];
    int i, delayed, keeps_copies;
    if (!config) return gmm__fail(error, GMM_E_NULL, "config: is NULL");
    if ((s = gmm__read_sized(&c, sizeof c, config, size_rule)) != GMM_OK) return gmm__fail(error, s, "%s", size_rule);
    if (c.hidden < 1) return gmm__fail(error, GMM_E_CONFIG, "hidden: %lld must be >= 1", (long long)c.hidden);
    if (c.ffn < 1) return gmm__fail(error, GMM_E_CONFIG, "ffn: %lld must be >= 1", (long long)c.ffn);
    if (c.ffn > INT64_MAX / 2)
        return gmm__fail(error, GMM_E_CONFIG, "ffn: 2 x %lld does not fit 64 bits", (long long)c.ffn);
    if (c.hidden_out < 0)
        return gmm__fail(error, GMM_E_CONFIG, "hidden_out: %lld must be >= 0", (long long)c.hidden_out);
    {
        const struct { const char *name; int32_t value; } switches[] = {
            { "bias1", c.bias1 }, { "bias2", c.bias2 }, { "prob", c.prob }, { "prob_on_bias2", c.prob_on_bias2 },
            { "delay_wgrad", c.delay_wgrad }, { "overlap_dispatch_wgrad", c.overlap_dispatch_wgrad },
            { "ddp_expects_delay", c.ddp_expects_delay }, { "ddp", c.ddp }, { "prob_on_input", c.prob_on_input },
            { "router_padding", c.router_padding }, { "act_input_fp8", c.act_input_fp8 },
            { "act_recompute", c.act_recompute }, { "overwrite_saved", c.overwrite_saved }
        };
        for (i = 0; i < (int)(sizeof switches / sizeof switches[0]); i++)
            if (switches[i].value & ~1)
                return gmm__fail(error, GMM_E_CONFIG, "%s: %d must be 0 or 1", switches[i].name,
                                 (int)switches[i].value);
    }
    {
        const struct { const char *name; int32_t value, count; } ranges[] = {
            { "save", (int32_t)c.save, GMM_SAVE_QUANTIZED_E4M3 + 1 },
            { "dispatcher", (int32_t)c.dispatcher, 5 },
            { "recipe", (int32_t)c.recipe, 6 }
        };
        for (i = 0; i < (int)(sizeof ranges / sizeof ranges[0]); i++)
            if (ranges[i].value < 0 || ranges[i].value >= ranges[i].count)
                return gmm__fail(error, GMM_E_CONFIG, "%s: %d must be 0 to %d", ranges[i].name, (int)ranges[i].value,
                                 (int)ranges[i].count - 1);
    }
    if ((s = gmm__read_sized(&act, sizeof act, &c.act, size_rule)) != GMM_OK)
        return gmm__fail(error, s, "act.%s", size_rule);
    if (gmm__check_act(&act, c.ffn, "act.", act_rule, sizeof act_rule) != GMM_OK)
        return gmm__fail(error, GMM_E_CONFIG, "%s", act_rule);
    if (act.kind == GMM_ACT_NONE)
        return gmm__fail(error, GMM_E_CONFIG, "act.kind: 0 is no activation, and an MLP needs one");
    if (c.source_interleave < 0)
        return gmm__fail(error, GMM_E_CONFIG, "source_interleave: %d must be >= 0", c.source_interleave);
    if (c.source_interleave && (c.source_interleave > c.ffn || c.ffn % c.source_interleave))
        return gmm__fail(error, GMM_E_CONFIG, "source_interleave: %d must be 0 or a divisor of ffn %lld",
                         c.source_interleave, (long long)c.ffn);
    if (c.source_interleave && gmm_act_gated(act.kind) && c.source_interleave % c.ffn != act.interleave % c.ffn)
        return gmm__fail(error, GMM_E_CONFIG, "source_interleave: weights come with blocks of %d, the MLP reads them "
                         "with interleave %d: convert them with gmm_glu_interleave", c.source_interleave,
                         act.interleave);
    if (c.topk < 0) return gmm__fail(error, GMM_E_CONFIG, "topk: %d must be >= 0", c.topk);
    if (c.etp_size < 0) return gmm__fail(error, GMM_E_CONFIG, "etp_size: %d must be >= 0", c.etp_size);
    delayed = gmm__delays(&c);
    if (c.delay_wgrad && c.overlap_dispatch_wgrad)
        return gmm__fail(error, GMM_E_CONFIG, "overlap_dispatch_wgrad: 1 excludes delay_wgrad 1");
    if (c.ddp && delayed && !c.ddp_expects_delay)
        return gmm__fail(error, GMM_E_CONFIG, "ddp_expects_delay: 0 with delayed weight gradients: hooks would fire "
                         "before the gradient is there");
    if (c.ddp_expects_delay && !delayed)
        return gmm__fail(error, GMM_E_CONFIG, "ddp_expects_delay: 1 without delay_wgrad or overlap_dispatch_wgrad: "
                         "hooks would never fire");
    if (c.prob_on_bias2 && (!c.prob || !c.bias2))
        return gmm__fail(error, GMM_E_CONFIG, "prob_on_bias2: 1 needs prob 1 (is %d) and bias2 1 (is %d)", c.prob,
                         c.bias2);
    if (c.prob_on_input && c.topk != 1)
        return gmm__fail(error, GMM_E_CONFIG, "prob_on_input: 1 needs topk 1, not %d", c.topk);
    if (c.prob_on_input && c.prob)
        return gmm__fail(error, GMM_E_CONFIG, "prob_on_input: 1 excludes prob 1: rows would be weighted twice");
    if (c.bias2 && c.prob && c.topk > 1 && !c.prob_on_bias2)
        return gmm__fail(error, GMM_E_CONFIG, "prob_on_bias2: 0 with topk %d: unweighted biases would add up",
                         c.topk);
    if ((c.bias1 || c.bias2) && c.etp_size > 1)
        return gmm__fail(error, GMM_E_CONFIG, "etp_size: %d excludes biases: every rank would add them",
                         c.etp_size);
    if (c.router_padding && (c.recipe == GMM_RECIPE_NONE || c.dispatcher == GMM_DISPATCH_ALLGATHER))
        return gmm__fail(error, GMM_E_CONFIG, "router_padding: 1 needs a quantized recipe (is %d) and a dispatcher "
                         "other than all-gather (is %d)", (int)c.recipe, (int)c.dispatcher);
    keeps_copies = gmm__saves_copies(&c);
    if (keeps_copies && c.recipe == GMM_RECIPE_NONE)
        return gmm__fail(error, GMM_E_CONFIG, "save: %d keeps quantized operands and needs a recipe, which is none",
                         (int)c.save);
    if (c.act_input_fp8 && !gmm__saves_e4m3(&c))
        return gmm__fail(error, GMM_E_CONFIG, "act_input_fp8: 1 needs save %d or %d, which keep the activation's input "
                         "as E4M3, not %d", (int)GMM_SAVE_PREACT_E4M3, (int)GMM_SAVE_QUANTIZED_E4M3, (int)c.save);
    if (c.act_recompute && (c.save == GMM_SAVE_PREACT_AND_ACT || keeps_copies))
        return gmm__fail(error, GMM_E_CONFIG, "act_recompute: 1 excludes save %d, which keeps the activation",
                         (int)c.save);
    return GMM_OK;
}

