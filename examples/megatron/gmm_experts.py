"""GmmExperts: Megatron-core's experts (GroupedMLP, TEGroupedMLP, SequentialMLP) on gmm. In a model's script:

    from gmm_experts import use_gmm_experts
    spec = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=True)   # or another spec with experts
    use_gmm_experts(spec)

Read beside megatron-core 0.16. The row counts of the experts stay on the GPU; checkpoints have the keys and shapes of
SequentialMLP and TEGroupedMLP.
"""
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
        inits = config.init_method, config.output_layer_init_method
        for w, axis, init in zip((self.weight1, self.weight2), (1, 2), inits):
            set_tensor_model_parallel_attributes(w, True, axis, 1)
            w.allreduce = self.ep_group.size() == 1
            w.skip_backward_post_hook = config.delay_wgrad_compute
            if config.perform_initialization:
                self._initialize(w, init)

    def _settings(self, config):
        """act, recipe and save of gmm, or why there are none."""
        refused = [name for name, wrong in (
            ("add_bias_linear", config.add_bias_linear),
            ("activation_func_clamp_value", getattr(config, "activation_func_clamp_value", None) is not None),
            ("glu_linear_offset", getattr(config, "glu_linear_offset", 0.0) != 0.0),
            ("use_te_activation_func", getattr(config, "use_te_activation_func", False)),
            ("fp4", getattr(config, "fp4", None)),
            (f"fp8_recipe={config.fp8_recipe}", config.fp8 and config.fp8_recipe not in RECIPES),
            (f"activation_func={config.activation_func}", (config.activation_func, self.gated) not in ACTIVATIONS),
        ) if wrong]
        if refused:
            raise ValueError("GmmExperts does not serve " + ", ".join(refused))
        recipe, save = (RECIPES[config.fp8_recipe], "quantized") if config.fp8 else ("none", "preact")
        return ACTIVATIONS[config.activation_func, self.gated], recipe, save

    def _initialize(self, w, init):
        if self.config.use_cpu_initialization:
            for matrix in w.data:
                init(matrix)
            return
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            for matrix in w.data:
                init(matrix)

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
        """Keys and global shapes of SequentialMLP's checkpoints: [experts, out, in]."""
        if (metadata or {}).get("singleton_local_shards", False):
            raise ValueError("GmmExperts does not serve checkpoints with singleton_local_shards")
        axes = len(sharded_offsets)
        ep = (axes, self.ep_group.rank(), self.ep_group.size())
        rank, size = self.tp_group.rank(), self.tp_group.size()
        replica = (0, 0, self.dp_group.rank())

        def shard(key, t, offset, replica_id):
            return ShardedTensor.from_rank_offsets(key, t, *sharded_offsets, ep, offset, replica_id=replica_id,
                                                   prepend_axis_num=axes)

        @torch.no_grad()
        def build(key, t, replica_id, flattened_range=None):
            if flattened_range is not None:
                raise ValueError("GmmExperts does not serve flattened optimizer states")
            gate, up = t.chunk(2, dim=1)
            return [shard(key, gate.contiguous(), (axes + 1, rank, 2 * size), replica_id),
                    shard(key, up.contiguous(), (axes + 1, size + rank, 2 * size), replica_id)]

        keys = [f"{prefix}experts.linear_fc{i}.weight" for i in (1, 2)]
        state = {f"{prefix}weight2": shard(keys[1], self.weight2, (axes + 2, rank, size), replica)}
        state[f"{prefix}weight1"] = (
            ShardedTensorFactory(keys[0], self.weight1, build, partial(torch.cat, dim=1), replica) if self.gated
            else shard(keys[0], self.weight1, (axes + 1, rank, size), replica))
        first, count = ep[1] * self.num_local_experts, ep[2] * self.num_local_experts
        for e in range(first, first + self.num_local_experts):  # SequentialMLP's linear layers have an extra state
            for fc in ("linear_fc1", "linear_fc2"):
                state[f"{prefix}expert{e}.{fc}._extra_state"] = make_sharded_object_for_checkpoint(
                    None, f"{prefix}experts.{fc}._extra_state", (*sharded_offsets, (axes, e, count)),
                    (0, rank, self.dp_group.rank()))
        return state
