"""States of megatron-core's optimizers between layouts and kinds of experts, on two and on four ranks:

    python3 examples/megatron/test_optimizer.py /path/to/Megatron-LM

A small GPT trains five steps, with GmmExperts or SequentialMLP, and saves a checkpoint after three. Every other layout
and kind of experts loads the checkpoint and trains the last two. What is loaded equals what was saved, bit for bit; the
losses and states of the last steps equal those of the run that was not interrupted. Ranks are as in test_parallel.py.
"""
import contextlib
import functools
import gc
import itertools
import os
import sys
from collections import namedtuple
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)] + [p for p in sys.argv[1:2] if os.path.isdir(p)]
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from gmm_experts import GmmExperts, use_gmm_experts  # noqa: E402
from megatron_here import OnCpu  # noqa: E402
from test_parallel import DEVICE, Layout, launch, run_checks  # noqa: E402

EXPERTS, HIDDEN, FFN, LENGTH, BATCH, VOCABULARY = 4, 32, 48, 16, 4, 64
FIRST, LAST = 3, 2  # steps before the checkpoint and after it
LAYOUTS = {
    2: [Layout(1, 1, 1), Layout(1, 2, 1), Layout(1, 1, 2)],
    4: [Layout(1, 2, 1), Layout(1, 2, 2), Layout(1, 4, 1)],
}
# distributed: DistributedOptimizer, whose states are saved in the form `sharding`; else the optimizer of the dtype.
Variant = namedtuple("Variant", "dtype distributed sharding singleton")
VARIANTS = [
    Variant(torch.float32, True, "fully_reshardable", False),
    Variant(torch.bfloat16, True, "fully_reshardable", True),
    Variant(torch.bfloat16, True, "dp_reshardable", False),  # loaded in the layout that has saved it
    Variant(torch.float32, False, None, False),
    Variant(torch.bfloat16, False, None, True),
]
# Gradients of two layouts differ by the order of their sums, in fp32 by some 2^-24 of the terms. Adam divides by
# sqrt(v) + EPSILON, and EPSILON is above the gradients, so that a step differs by no more of its size than twice what
# gradients differ of theirs. In bf16 terms differ by 2^-8, and those of the router's gradient cancel to a small part.
EPSILON = 1e-2
BOUND = {torch.float32: 1e-5, torch.bfloat16: 0.3}


class Training:
    """A GPT under DistributedDataParallel, and its optimizer."""

    def __init__(self, gmm, layout, variant, seed):
        bf16 = variant.dtype == torch.bfloat16
        config = TransformerConfig(
            num_layers=2, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS, moe_router_topk=2,
            moe_ffn_hidden_size=FFN, ffn_hidden_size=FFN, add_bias_linear=False, gated_linear_unit=True,
            activation_func=F.silu, bias_activation_fusion=False, attention_dropout=0.0, hidden_dropout=0.0,
            params_dtype=variant.dtype, bf16=bf16, expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp, moe_token_dispatcher_type="allgather", use_cpu_initialization=True)
        spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
        if gmm:
            use_gmm_experts(spec)
        torch.manual_seed(seed)
        self.model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH).to(DEVICE)
        assert any(isinstance(m, GmmExperts) for m in self.model.modules()) == gmm
        self.ddp = DistributedDataParallel(config, DistributedDataParallelConfig(
            use_distributed_optimizer=variant.distributed, grad_reduce_in_fp32=True),
            Float16Module(config, self.model) if bf16 else self.model)
        self.optimizer = get_megatron_optimizer(OptimizerConfig(
            optimizer="adam", lr=1e-2, adam_eps=EPSILON, clip_grad=0.5, bf16=bf16, params_dtype=variant.dtype,
            use_distributed_optimizer=variant.distributed), [self.ddp])
        self.metadata = {"distrib_optim_sharding_type": variant.sharding, "chained_optim_avoid_prefix": True,
                         "singleton_local_shards": variant.singleton,
                         "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        if not variant.distributed:
            del self.metadata["distrib_optim_sharding_type"]

    def step(self, number):
        """Trains on this rank's text of that step; returns the loss and the norm of all gradients."""
        random = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=random).to(DEVICE)
        positions = torch.arange(LENGTH, device=DEVICE).expand(BATCH, LENGTH)
        mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=DEVICE), 1)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.ddp(text[:, :-1], positions, mask, labels=text[:, 1:]).float().mean()
        loss.backward()
        self.ddp.finish_grad_sync()
        done, norm, _ = self.optimizer.step()
        assert done
        return float(loss.detach()), float(norm)

    def state(self, is_loading):
        model = self.model.sharded_state_dict(metadata=self.metadata)
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=self.metadata)}

    def save(self, folder):
        Path(folder).mkdir(exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(self.state(False), str(folder))

    def load(self, folder, regroup=False):
        # DistributedOptimizer asks torch's Adam for its states, which exist after a step. The step is then overwritten.
        self.step(FIRST + LAST)
        state = dist_checkpointing.load(self.state(True), str(folder))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(self.regrouped(state["optimizer"]) if regroup else state["optimizer"])

    def regrouped(self, state):
        """Megatron-core has one optimizer for the experts where they are divided otherwise than other weights, and one
        for the others, or one for all; of the two forms of a checkpoint it loads its own alone. What the forms have of
        each parameter agrees. What belongs to groups of parameters is here put into the form of this run."""
        parts = self.optimizer.chained_optimizers
        saved = [state] if len(parts) > 1 else [state[0], state[1]]
        keys = "wd_mult", "lr_mult", "is_decoupled_lr"
        groups = {tuple(g[k] for k in keys): g for s in saved for g in s["optimizer"]["param_groups"]}
        result = {}
        for i, part in enumerate(parts):
            own = part.state_dict()
            for group in own["optimizer"]["param_groups"]:
                group.update({k: v for k, v in groups[tuple(group[k] for k in keys)].items()
                              if k not in ("params", "is_expert_parallel")})
            own["param_state"] = (state[i] if len(parts) > 1 else state)["param_state"]
            result[i] = {**own, "param_state_sharding_type": saved[0]["param_state_sharding_type"]}
        return result if len(parts) > 1 else result[0]


def kinds(ranks):
    """Layouts, and whether with GmmExperts."""
    return [(layout, True) for layout in LAYOUTS[ranks]] + [(LAYOUTS[ranks][0], False)]


def variants(ranks):
    """On four ranks all layouts have the same optimizers."""
    return VARIANTS if ranks == 2 else VARIANTS[:2]


def divided(layout):
    """Whether experts have an optimizer of their own."""
    return layout.ep > 1 or layout.etp != layout.tp


def loads(variant, same, layout, saved_at):
    """Whether what a layout has saved is loaded in another."""
    if variant.sharding == "dp_reshardable":
        return same
    return variant.distributed or divided(layout) == divided(saved_at)


def folder_of(folder, layout, gmm, variant, step):
    return Path(folder, f"{layout}-{gmm}-{VARIANTS.index(variant)}-{step}")


def cuda_calls():
    return OnCpu() if DEVICE == "cpu" else contextlib.nullcontext()


@functools.cache
def tensors(folder):
    """Whole tensors of a checkpoint by name, without those of "dp_reshardable": not all their elements are written."""
    return {k: v for k, v in dist_checkpointing.load_plain_tensors(str(folder)).items()
            if torch.is_tensor(v) and v.is_floating_point() and "optimizer.distributed." not in k}


def compare(wanted, got, bound=None, before=None):
    """States in two checkpoints: equal, or apart by at most `bound` of what has changed since a third, and rounding."""
    wanted, got = tensors(wanted), tensors(got)
    assert wanted.keys() == got.keys() and len(wanted) >= 10, wanted.keys() ^ got.keys()
    before = bound and tensors(before)
    for key, a in wanted.items():
        if not bound:
            assert torch.equal(got[key], a), key
            continue
        apart, changed = ((t.float() - a.float()).norm() for t in (got[key], before[key]))
        allowed = bound * changed + torch.finfo(a.dtype).eps * a.float().norm()
        assert apart <= allowed, f"{key}: {apart} apart after a change of {changed}, allowed {allowed}"


def check_uninterrupted(layout, folder):
    for variant in variants(dist.get_world_size()):
        for gmm in [gmm for at, gmm in kinds(dist.get_world_size()) if at == layout]:
            with cuda_calls():
                training = Training(gmm, layout, variant, seed=7)
                for step in range(FIRST):
                    training.step(step)
                training.save(folder_of(folder, layout, gmm, variant, FIRST))
                results = [training.step(FIRST + step) for step in range(LAST)]
                last = folder_of(folder, layout, gmm, variant, FIRST + LAST)
                training.save(last)
                torch.save(results, f"{last}/results-{dist.get_rank()}")


def check_continued(layout, folder):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for variant in variants(ranks):
        all_kinds = kinds(ranks)
        for (at, gmm), (saved_at, saved_by_gmm) in itertools.product(all_kinds, all_kinds):
            same = (layout, gmm) == (saved_at, saved_by_gmm)
            if at != layout or not loads(variant, same, layout, saved_at) or not (gmm or saved_by_gmm):
                continue
            first, last = (folder_of(folder, saved_at, saved_by_gmm, variant, step) for step in (FIRST, FIRST + LAST))
            with cuda_calls():
                training = Training(gmm, layout, variant, seed=8)
                training.load(first, regroup=divided(layout) != divided(saved_at))
                training.save(f"{first}-loaded-{layout}-{gmm}")
                results = [training.step(FIRST + step) for step in range(LAST)]
                training.save(f"{first}-continued-{layout}-{gmm}")
            compare(first, f"{first}-loaded-{layout}-{gmm}")
            compare(last, f"{first}-continued-{layout}-{gmm}", None if same else BOUND[variant.dtype], first)
            wanted = torch.load(f"{last}/results-{rank}")
            if same:
                assert results == wanted
            torch.testing.assert_close(results, wanted, rtol=1e-5 if variant.dtype == torch.float32 else 1e-2, atol=0)
            dist.barrier()


def rank_main(rank, ranks, folder):
    gc.freeze()  # each saving and loading collects garbage, among what has been imported too: most of the test's time
    run_checks(rank, ranks, folder, [(layout, (check,)) for check in (check_uninterrupted, check_continued)
                                     for layout in LAYOUTS[ranks]])


def test_two_ranks():
    launch(2, rank_main)


def test_four_ranks():
    launch(4, rank_main)


if __name__ == "__main__":
    test_two_ranks()
    test_four_ranks()
