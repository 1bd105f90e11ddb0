"""GmmExperts: Megatron-core's experts (GroupedMLP, TEGroupedMLP, SequentialMLP) on gmm. In a model's script:

    from gmm_experts import use_gmm_experts
    spec = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=True)   # or another spec with experts
    use_gmm_experts(spec)

Read beside megatron-core 0.16. The row counts of the experts stay on the GPU; checkpoints have the keys and shapes of
SequentialMLP and TEGroupedMLP.
"""
import contextlib
from collections import deque
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

import gmm_torch

ops = gmm_torch.ops
ACTIVATIONS = {(F.silu, True): "swiglu", (F.silu, False): "silu", (F.gelu, True): "geglu_erf",
               (F.gelu, False): "gelu_erf", (squared_relu, False): "relu2", (F.relu, False): "relu"}
RECIPES = {"tensorwise": "fp8_current", "blockwise": "fp8_block", "mxfp8": "mxfp8"}


def use_gmm_experts(spec):
    """Puts GmmExperts into every MoE layer of a module spec, and returns the number of layers."""
    if isinstance(spec, ModuleSpec):
        spec = spec.submodules
    if isinstance(spec, MoESubmodules):
        spec.experts = ModuleSpec(module=GmmExperts)
        return 1
    parts = spec if isinstance(spec, (list, tuple)) else vars(spec).values() if hasattr(spec, "__dict__") else ()
    return sum(use_gmm_experts(p) for p in parts if isinstance(p, (ModuleSpec, list, tuple)))


def placeholder(w):
    """What stands for a gradient that is in main_grad already, so that the hooks of data parallelism fire."""
    return (torch.zeros_like if getattr(w, "zero_out_wgrad", False) else torch.empty_like)(w)


def _ignore_extra_states(module, incompatible):
    """Lets load_state_dict pass the extra states that sharded_state_dict names for SequentialMLP's sake."""
    incompatible.unexpected_keys[:] = [k for k in incompatible.unexpected_keys if not k.endswith("._extra_state")]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, w2, splits, probs, owner):
        x = x.contiguous()
        y, saved = ops.mlp_fwd(x, w1, w2, splits, probs, None, None, *owner.settings)
        ctx.save_for_backward(ops.kept_x(x, owner.settings[2]), w1, w2, splits, saved, probs)
        ctx.owner = owner
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, w1, w2, splits, saved, probs = ctx.saved_tensors
        owner, main = ctx.owner, ctx.owner.main_grads()
        need_dx, *trained = ctx.needs_input_grad[:3]
        dy = dy.contiguous()
        operands = (dy, x, w1, w2, splits, saved, probs, None, None, None, *owner.settings, need_dx)
        dw, over = [None, None], saved if ops.may_overwrite(saved) else None
        if owner.config.delay_wgrad_compute and any(trained):
            grads = main or tuple(torch.empty_like(w) if t else None for w, t in zip((w1, w2), trained))
            dx, dprobs, _, _, deferred, entry = ops.mlp_bwd_delayed(*grads, *operands, bool(main))
            owner.queue.append((grads, bool(main), entry, deferred, (x, dy, saved)))  # they live until backward_dw
        elif main:
            dx, dprobs, _, _ = ops.mlp_bwd_add(*main, *operands, over)
            dw = owner.added()
        else:
            dx, *dw, dprobs, _, _ = ops.mlp_bwd(*operands, *trained, over)
        dx, *dw = (g if need else None for g, need in zip((dx, *dw), ctx.needs_input_grad))
        return dx, *dw, None, dprobs if probs is not None else None, None


class GmmExperts(MegatronModule):
    """Two grouped linear layers with an activation between, for this rank's experts: weight1 [experts, 2 ffn or ffn,
    hidden], the gate's rows first, and weight2 [experts, hidden, ffn], ffn divided by expert tensor parallelism."""

    def __init__(self, num_local_experts, config, submodules=None, pg_collection=None):
        super().__init__(config=config)
        if pg_collection is None:
            raise ValueError("GmmExperts needs pg_collection, the process groups ep, expt_tp and expt_dp: "
                             "ProcessGroupCollection.use_mpu_process_groups() has those of parallel_state")
        self.num_local_experts, self.gated = num_local_experts, config.gated_linear_unit
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        self.settings = self._settings(config)
        self.queue, self.hooks = deque(), []
        hidden = config.hidden_size if getattr(config, "moe_latent_size", None) is None else config.moe_latent_size
        ffn, rest = divmod(config.moe_ffn_hidden_size, self.tp_group.size())
        if rest:
            raise ValueError(f"GmmExperts: moe_ffn_hidden_size {config.moe_ffn_hidden_size} is no multiple of the "
                             f"{self.tp_group.size()} ranks of expert tensor parallelism")
        like = {"dtype": config.params_dtype,
                "device": "cpu" if config.use_cpu_initialization else torch.cuda.current_device()}
        self.weight1 = torch.nn.Parameter(torch.empty(num_local_experts, (1 + self.gated) * ffn, hidden, **like))
        self.weight2 = torch.nn.Parameter(torch.empty(num_local_experts, hidden, ffn, **like))
        # Gradients are reduced over the ranks that have the same part of the same experts. These are the ranks of data
        # parallelism only where experts are divided as other weights are.
        tp = pg_collection.tp.size() if hasattr(pg_collection, "tp") else config.tensor_model_parallel_size
        for w, axis, parts in ((self.weight1, 1, 1 + self.gated), (self.weight2, 2, 1)):
            set_tensor_model_parallel_attributes(w, True, axis, parts)
            w.allreduce = self.ep_group.size() == 1 and self.tp_group.size() == tp
            w.skip_backward_post_hook = config.delay_wgrad_compute
        if config.perform_initialization:
            self._initialize(config)
        self.register_load_state_dict_post_hook(_ignore_extra_states)

    def _settings(self, config):
        """act, recipe and save of gmm, or why there are none."""
        refused = [name for name, wrong in (
            ("add_bias_linear", config.add_bias_linear),
            ("activation_func_clamp_value", getattr(config, "activation_func_clamp_value", None) is not None),
            ("glu_linear_offset", getattr(config, "glu_linear_offset", 0.0) != 0.0),
            ("use_te_activation_func", getattr(config, "use_te_activation_func", False)),
            ("fp4", getattr(config, "fp4", None)),
            (f"fp8_recipe={config.fp8_recipe}", config.fp8 and config.fp8_recipe not in RECIPES),
            ("first_last_layers_bf16 with fp8", config.fp8 and config.first_last_layers_bf16),
            (f"activation_func={config.activation_func}", (config.activation_func, self.gated) not in ACTIVATIONS),
        ) if wrong]
        if refused:
            raise ValueError("GmmExperts does not serve " + ", ".join(refused))
        recipe, save = (RECIPES[config.fp8_recipe], "quantized") if config.fp8 else ("none", "preact")
        return ACTIVATIONS[config.activation_func, self.gated], recipe, save

    @torch.no_grad()
    def _initialize(self, config):
        """Draws the weights that SequentialMLP draws from the same random state: expert by expert; on the CPU whole
        matrices, of which this rank takes its part."""
        on_cpu, size, rank = config.use_cpu_initialization, self.tp_group.size(), self.tp_group.rank()
        inits = config.init_method, config.output_layer_init_method
        state = contextlib.nullcontext() if on_cpu else get_cuda_rng_tracker().fork(
            get_expert_parallel_rng_tracker_name())
        with state:
            for matrices in zip(self.weight1, self.weight2):
                for matrix, axis, parts, init in zip(matrices, (0, 1), (1 + self.gated, 1), inits):
                    if not on_cpu:
                        init(matrix)
                        continue
                    whole = torch.empty([n * size if i == axis else n for i, n in enumerate(matrix.shape)])
                    init(whole)
                    matrix.copy_(torch.cat([p.chunk(size, axis)[rank] for p in whole.chunk(parts, axis)], axis))

    def main_grads(self):
        """Where gradients of trained weights are added (gradient_accumulation_fusion), or None."""
        weights = (self.weight1, self.weight2)
        trained = [w for w in weights if w.requires_grad]
        if not self.config.gradient_accumulation_fusion or not all(hasattr(w, "main_grad") for w in trained):
            return None
        return tuple(w.main_grad if w.requires_grad else None for w in weights)

    def added(self):
        """Marks the gradients of trained weights as added to main_grad; returns the placeholders."""
        weights = (self.weight1, self.weight2)
        for w in weights:
            w.grad_added_to_main_grad = w.requires_grad
        return [placeholder(w) if w.requires_grad else None for w in weights]

    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs):
        x, probs = permuted_local_hidden_states, permuted_probs.float()
        if self.config.moe_apply_probs_on_input:
            x, probs = (x * probs.unsqueeze(-1)).to(x.dtype), None
        splits = tokens_per_expert.to(device=x.device, dtype=torch.int64, non_blocking=True)
        if not torch.is_grad_enabled():  # inference, or the first pass of a layer that is recomputed: nothing is saved
            act, recipe, save = self.settings
            return gmm_torch.mlp(x, self.weight1, self.weight2, splits, probs, act=act, recipe=recipe, save=save), None
        return _Experts.apply(x, self.weight1, self.weight2, splits, probs, self), None

    def backward_dw(self):
        """The weight gradients that backward has left (delay_wgrad_compute), and then the hooks of data parallelism."""
        if not self.config.delay_wgrad_compute:
            return
        if self.weight1.requires_grad or self.weight2.requires_grad:  # else backward has left nothing
            grads, main, entry, deferred, _ = self.queue.popleft()
            ops.mlp_wgrad(*grads, entry, deferred)
            for w, grad in zip((self.weight1, self.weight2), self.added() if main else grads):
                if grad is not None:
                    w.grad = grad if main or w.grad is None else w.grad + grad
        for hook in self.hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook):
        self.hooks.append(hook)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Keys and global shapes of SequentialMLP's checkpoints: tensors [experts, out, in], or with
        singleton_local_shards a tensor [out, in] for each expert and each half of a gated FC1."""
        singleton, axes = (metadata or {}).get("singleton_local_shards", False), len(sharded_offsets)
        ep, rank, size = (axes, self.ep_group.rank(), self.ep_group.size()), self.tp_group.rank(), self.tp_group.size()
        first, count = ep[1] * self.num_local_experts, ep[2] * self.num_local_experts

        def shards(key, t, axis, part, parts, replica_id):
            """What this rank has of key: part `part` of `parts` along the axis `axis` of t [experts, out, in]."""
            options = {"replica_id": replica_id, "prepend_axis_num": axes}
            if not singleton:
                return [ShardedTensor.from_rank_offsets(key, t.contiguous(), *sharded_offsets, ep,
                                                        (axes + axis, part, parts), **options)]
            stem, fc = key.rsplit("linear_fc", 1)
            return [ShardedTensor.from_rank_offsets(f"{stem}{first + i}.linear_fc{fc}", w.contiguous(),
                                                    *sharded_offsets, (axes + axis - 1, part, parts), **options)
                    for i, w in enumerate(t)]

        @torch.no_grad()
        def build(key, t, replica_id, flattened_range=None, axis=2, gated=False):
            if flattened_range is not None:
                raise ValueError("GmmExperts does not serve flattened optimizer states")
            if not gated:
                return shards(key, t, axis, rank, size, replica_id)
            (gate, up), n = t.chunk(2, dim=1), size if singleton else 2 * size
            suffixes, second = ("_w", "_v") if singleton else ("", ""), rank if singleton else size + rank
            return [*shards(key + suffixes[0], gate, 1, rank, n, replica_id),
                    *shards(key + suffixes[1], up, 1, second, n, replica_id)]

        @torch.no_grad()
        def merge(loaded, halves=1):
            n = len(loaded) // halves
            return torch.cat([torch.stack(loaded[i * n:][:n]) if singleton else loaded[i] for i in range(halves)], 1)

        state = {}
        for name, fc, axis, gated in (("weight1", "linear_fc1", 1, self.gated), ("weight2", "linear_fc2", 2, False)):
            state[prefix + name] = ShardedTensorFactory(
                f"{prefix}experts.{fc}.weight", getattr(self, name), partial(build, axis=axis, gated=gated),
                partial(merge, halves=1 + gated), (0, 0, self.dp_group.rank()))
            for e in range(first, first + self.num_local_experts):  # SequentialMLP's linear layers have an extra state
                expert, offsets = (f"{e}.", ()) if singleton else ("", ((axes, e, count),))
                state[f"{prefix}expert{e}.{fc}._extra_state"] = make_sharded_object_for_checkpoint(
                    None, f"{prefix}experts.{expert}{fc}._extra_state", (*sharded_offsets, *offsets),
                    (0, rank, self.dp_group.rank()))
        return state
