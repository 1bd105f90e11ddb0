"""A MoELayer with GmmExperts beside the same layer with SequentialMLP, and beside one rank that has all experts and the
tokens of all ranks, on two and on four ranks:

    python3 examples/megatron/test_parallel.py /path/to/Megatron-LM

The path is a checkout's; without one, and by pytest, the installed megatron-core is used. Each rank is a process: on
its own GPU with NCCL where there are as many GPUs as ranks, otherwise on the CPU with gloo. Where one rank fails, or
all take longer than LIMIT seconds, the test fails and the other ranks are ended.
"""
import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
from collections import namedtuple
from datetime import timedelta
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent)] + [p for p in sys.argv[1:2] if os.path.isdir(p)]
import psutil  # noqa: E402,F401 - megatron-core needs it to save a checkpoint, and waits forever without it
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.activations import squared_relu  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from gmm_experts import RECIPES, GmmExperts, use_gmm_experts  # noqa: E402
from megatron_here import prepare  # noqa: E402

DEVICE = prepare()
LIMIT = 600
EXPERTS, HIDDEN, FFN, LENGTH, BATCH = 4, 16, 24, 6, 2
Layout = namedtuple("Layout", "tp ep etp")  # sizes of tensor, expert and expert tensor parallelism
LAYOUTS = {
    2: [Layout(1, 1, 1), Layout(1, 2, 1), Layout(1, 1, 2), Layout(2, 1, 2), Layout(2, 2, 1), Layout(2, 1, 1)],
    4: [Layout(1, 2, 2), Layout(2, 2, 2), Layout(2, 2, 1), Layout(1, 4, 1)],
}


@contextlib.contextmanager
def model_parallel(layout, rank, ranks, rendezvous):
    """The process groups of a layout. All are destroyed again, since megatron-core itself keeps them, and each has
    threads."""
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", rank=rank, world_size=ranks,
                            init_method=f"file://{rendezvous}", timeout=timedelta(seconds=60))
    parallel_state.initialize_model_parallel(
        layout.tp, expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=1)
    if DEVICE == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    yield
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def make(gmm, layout, dispatcher="allgather", gated=True, hidden=HIDDEN, ffn=FFN, on_cpu=True, groups=None, **settings):
    """A layer with GmmExperts or with SequentialMLP."""
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=2, num_moe_experts=EXPERTS, moe_router_topk=2,
        moe_ffn_hidden_size=ffn, ffn_hidden_size=ffn, add_bias_linear=False, gated_linear_unit=gated,
        activation_func=F.silu if gated else squared_relu, bias_activation_fusion=False, params_dtype=torch.float32,
        tensor_model_parallel_size=layout.tp, expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp, sequence_parallel=layout.tp > 1, moe_token_dispatcher_type=dispatcher,
        use_cpu_initialization=on_cpu)
    # Set afterwards, since the configuration allows them only with more that this test does not need.
    for name, value in settings.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    if gmm:
        use_gmm_experts(spec)
    torch.manual_seed(7)
    return MoELayer(config, spec.submodules.mlp.submodules, pg_collection=groups).to(DEVICE)


def weights_of(layer, what=lambda w: w.detach()):
    """Both weights of this rank's experts, [experts, out, in], or what belongs to them."""
    experts = layer.experts
    if isinstance(experts, GmmExperts):
        return [what(experts.weight1), what(experts.weight2)]
    return [torch.stack([what(getattr(e, fc).weight) for e in experts.local_experts])
            for fc in ("linear_fc1", "linear_fc2")]


def drawn(config, twins=False):
    """Both weights of all experts, which every rank draws alike. Of twins the second half of the ffn equals the first:
    it has the same largest values."""
    random, halves, ffn = torch.Generator().manual_seed(3), 1 + config.gated_linear_unit, config.moe_ffn_hidden_size
    w1, w2 = (torch.randn(EXPERTS, *shape, generator=random).to(DEVICE) / shape[1] ** 0.5
              for shape in ((halves * ffn, config.hidden_size), (config.hidden_size, ffn)))
    if twins:
        w1 = torch.cat([half[:, :ffn // 2].repeat(1, 2, 1) for half in w1.chunk(halves, 1)], 1)
        w2 = w2[:, :, :ffn // 2].repeat(1, 1, 2)
    return w1, w2


def part_of_rank(weights, layer):
    """What the experts of the layer have of weights of all experts."""
    (w1, w2), ep, etp = weights, layer.experts.ep_group, layer.experts.tp_group
    w1, w2 = (w.chunk(ep.size())[ep.rank()] for w in (w1, w2))
    w1 = torch.cat([half.chunk(etp.size(), 1)[etp.rank()] for half in w1.chunk(1 + layer.config.gated_linear_unit, 1)],
                   1)
    return [w1, w2.chunk(etp.size(), 2)[etp.rank()]]


@torch.no_grad()
def set_weights(layer, twins=False):
    parts = part_of_rank(drawn(layer.config, twins), layer)
    if isinstance(layer.experts, GmmExperts):
        layer.experts.weight1.copy_(parts[0])
        layer.experts.weight2.copy_(parts[1])
    else:
        for i, expert in enumerate(layer.experts.local_experts):
            expert.linear_fc1.weight.copy_(parts[0][i])
            expert.linear_fc2.weight.copy_(parts[1][i])


def close(a, b, bound=1e-5):
    apart, of = float((a - b).norm()), float(b.norm())
    assert a.shape == b.shape and apart <= bound * of, f"{apart} apart, of {of}"


def rows_of(rank, seed, length=LENGTH, hidden=HIDDEN):
    """Tokens of a rank and the gradient of its output."""
    random = torch.Generator().manual_seed(100 * seed + rank)
    return [torch.randn(length, BATCH, hidden, generator=random).to(DEVICE) for _ in range(2)]


def run(module, x, dy):
    """Output and input gradient."""
    x.requires_grad_(True)
    y, bias = module(x)
    assert bias is None
    y.backward(dy)
    return y.detach(), x.grad


def check_layer(layout, folder):
    """Output, input gradient and weight gradients, for the token dispatchers."""
    # With both parallelisms "alltoall" gathers different numbers of rows, which gloo does not.
    one = DEVICE == "cpu" and layout.ep > 1 and layout.etp > 1
    for dispatcher, gated in itertools.product(("allgather",) if one else ("allgather", "alltoall"), (True, False)):
        results = []
        for gmm in (True, False):
            layer = make(gmm, layout, dispatcher, gated)
            set_weights(layer)
            results.append([*run(layer, *rows_of(dist.get_rank(), 1)), layer.router.weight.grad,
                            *weights_of(layer, lambda w: w.grad)])
        for a, b in zip(*results):
            close(a, b)


def under_ddp(layer, micro_batches, overlap=False):
    """The results of run() for micro-batches of its arguments, and main_grad of the layer's parameters after them."""
    delay = layer.config.delay_wgrad_compute
    ddp = DistributedDataParallel(layer.config, DistributedDataParallelConfig(
        overlap_grad_reduce=overlap, delay_wgrad_compute=delay, grad_reduce_in_fp32=True), layer)
    ddp.zero_grad_buffer()
    results = []
    for i, micro_batch in enumerate(micro_batches):
        with ddp.no_sync() if i + 1 < len(micro_batches) else contextlib.nullcontext():
            results.append(run(ddp, *micro_batch))
            if delay:
                assert len(layer.experts.queue) == 1
                layer.backward_dw()
    ddp.finish_grad_sync()
    return results, [layer.router.weight.main_grad, *weights_of(layer, lambda w: w.main_grad)]


def check_main_grad(layout, folder):
    """main_grad of all parameters under DistributedDataParallel, after two micro-batches."""

    def main_grads(gmm, fused=False, delay=False, overlap=False):
        layer = make(gmm, layout, gradient_accumulation_fusion=fused, delay_wgrad_compute=delay)
        set_weights(layer)
        if not gmm:
            # Without expert parallelism megatron-core 0.16.1 reduces weights of experts over the ranks that have the
            # same dense weights, although not all of them have the same part of an expert (NVIDIA/Megatron-LM#5916).
            for w in layer.experts.parameters():
                w.allreduce = layout.ep == 1 and layout.etp == layout.tp
        return under_ddp(layer, [rows_of(dist.get_rank(), micro_batch) for micro_batch in range(2)], overlap)[1]

    reference = main_grads(False)
    for options in itertools.product((False, True), repeat=3):
        for a, b in zip(main_grads(True, *options), reference):
            close(a, b)


LONG, WIDE = 64, {"hidden": 128, "ffn": 256}  # each part of an expert has whole blocks of 128
# A value in E4M3 is off by 2.7% (rms of a step of 1/8 of a power of two), one in E5M2 by 5.3%. FC1 multiplies two
# operands, the gated activation two of its outputs, FC2 two operands: 6.6% of its output. Gradients have one product
# more, or with "tensorwise" an operand in E5M2.
FP8_ERROR = 0.04, 0.12
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2 ** -6}  # of sums of partial sums, beside sums in one go


def one_rank():
    """Process groups of this rank alone."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    names = "tp", "cp", "ep", "expt_tp", "expt_dp", "tp_ep", "tp_cp", "tp_dp_cp"
    return ProcessGroupCollection(**{name: groups[dist.get_rank()] for name in names})


def check_one_rank(layout, folder):
    """Without a recipe and by each FP8 recipe all ranks compute what one rank computes for the tokens of all. Bits are
    the same but where ranks add partial sums; where a scale is that of other elements, FP8 rounds otherwise."""
    ranks, rank, alone = dist.get_world_size(), dist.get_rank(), one_rank()

    def on_one_rank(batches, twins, **settings):
        layer = make(True, Layout(1, 1, 1), groups=alone, gradient_accumulation_fusion=True, **WIDE, **settings)
        set_weights(layer, twins)
        for w in layer.experts.parameters():
            w.main_grad = torch.zeros_like(w, dtype=torch.float32)
        y, dx = run(layer, *(torch.cat(tensors) for tensors in zip(*batches)))
        return y, dx, *weights_of(layer, lambda w: w.main_grad)

    def check(reference, batch, twins, dispatcher, settings):
        dtype, recipe = settings["params_dtype"], settings.get("fp8_recipe")
        copies = ranks // (layout.ep * layout.etp)  # of each part of an expert
        # "tensorwise" has one scale for a tensor: on one rank for the parts and rows of all ranks.
        scales = recipe != "tensorwise" or copies == 1 and (layout.etp == 1 or twins)
        # Weight gradients are sums over rows. Copies of an expert divide these; with both parallelisms "alltoall" has
        # them in another order, so that blocks of rows have other scales.
        rows = copies == 1 and (dispatcher == "allgather" or 1 in (layout.ep, layout.etp))
        bound = 2 * FP8_ERROR[1] if not scales else ROUNDING[dtype] if layout.etp > 1 else 0
        dw_bound = 0 if scales and rows else 2 * FP8_ERROR[1] if recipe else ROUNDING[dtype]
        y, dx, *dw = reference
        y, dx = (t.chunk(ranks)[rank] for t in (y, dx))
        for fused in (False, True):
            layer = make(True, layout, dispatcher, gradient_accumulation_fusion=fused, delay_wgrad_compute=fused,
                         **WIDE, **settings)
            set_weights(layer, twins)
            results, main_grads = under_ddp(layer, [[t.clone() for t in batch]])
            with torch.no_grad():
                results[0] += layer(batch[0])[:1]
            for a, b in zip(results[0], (y, dx, y), strict=True):
                close(a, b, bound)
            for a, b in zip(main_grads[1:], part_of_rank(dw, layer)):
                # DistributedDataParallel divides by the ranks of data parallelism.
                close(a * (ranks // layout.tp), b if fused else b.to(dtype).float(), dw_bound)

    # With both parallelisms "alltoall" gathers different numbers of rows, which gloo does not.
    dispatchers = ("allgather",) if DEVICE == "cpu" and 1 not in (layout.ep, layout.etp) else ("allgather", "alltoall")
    recipes = [(None, False), *((name, False) for name in RECIPES), ("tensorwise", True)]
    for dtype, (recipe, twins) in itertools.product(ROUNDING if DEVICE == "cpu" else [torch.bfloat16], recipes):
        batches = [[t.to(dtype) for t in rows_of(r, 1, LONG, WIDE["hidden"])] for r in range(ranks)]
        exact = on_one_rank(batches, twins, params_dtype=dtype)
        settings = {"params_dtype": dtype, **({"fp8": "hybrid", "fp8_recipe": recipe} if recipe else {})}
        reference = on_one_rank(batches, twins, **settings)
        for a, b in zip(reference, exact):
            least, most = FP8_ERROR if recipe else (0, 0)
            assert least <= float((a - b).norm() / b.norm()) <= most
        for dispatcher in dispatchers:
            check(reference, batches[rank], twins, dispatcher, settings)


def check_initialization(layout, folder):
    """From the same seed the experts have the weights of SequentialMLP, drawn on the CPU or on the GPU."""
    for on_cpu in (True, False) if DEVICE == "cuda" else (True,):
        results = []
        for gmm in (True, False):
            if DEVICE == "cuda":
                tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
            results.append(weights_of(make(gmm, layout, on_cpu=on_cpu)))
        for a, b in zip(*results):
            assert torch.equal(a, b)


KINDS = list(itertools.product((True, False), repeat=3))  # gmm or not, gated or not, singleton_local_shards or not


def checkpoint(folder, layout, gmm, gated, singleton):
    return Path(folder, f"{layout}-{gmm}-{gated}-{singleton}")


def save_checkpoints(layout, folder):
    for gmm, gated, singleton in KINDS:
        layer = make(gmm, layout, gated=gated)
        set_weights(layer)
        at = checkpoint(folder, layout, gmm, gated, singleton)
        at.mkdir(exist_ok=True)
        state = layer.sharded_state_dict(prefix="mlp.", metadata={"singleton_local_shards": singleton})
        dist_checkpointing.save(state, str(at))


def load_checkpoints(layout, folder):
    """What a layer has saved in one layout, either kind of layer loads in every layout."""
    for saved_in, by_gmm, (gmm, gated, singleton) in itertools.product(saving(dist.get_world_size()), (True, False),
                                                                       KINDS):
        if gmm or by_gmm:  # otherwise this is megatron-core alone
            layer = make(gmm, layout, gated=gated)
            state = layer.sharded_state_dict(prefix="mlp.", metadata={"singleton_local_shards": singleton})
            state = dist_checkpointing.load(state, str(checkpoint(folder, saved_in, by_gmm, gated, singleton)))
            layer.load_state_dict({k.removeprefix("mlp."): v for k, v in state.items()}, strict=True)
            for a, b in zip(weights_of(layer), part_of_rank(drawn(layer.config), layer)):
                assert torch.equal(a, b)


def saving(ranks):
    """The layouts that save checkpoints: each way to divide experts is among them."""
    return LAYOUTS[ranks][:3]


def run_checks(rank, ranks, folder, runs):
    """What each rank does: for each layout of runs, in its process groups, the checks beside it."""
    os.setpgid(0, 0)  # so that a rank is ended with the processes that it has started
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    for i, (layout, checks) in enumerate(runs):
        with model_parallel(layout, rank, ranks, f"{folder}/rendezvous{i}"):
            for check in checks:
                start = time.monotonic()
                check(layout, folder)
                if rank == 0:
                    print(f"ok    {DEVICE}, {ranks} ranks, {layout}: {check.__name__}, "
                          f"{time.monotonic() - start:.1f} s", flush=True)


def rank_main(rank, ranks, folder):
    runs = [(layout, (check_initialization, check_layer, check_main_grad, check_one_rank)) for layout in LAYOUTS[ranks]]
    runs += [(layout, (checks,)) for checks in (save_checkpoints, load_checkpoints) for layout in saving(ranks)]
    run_checks(rank, ranks, folder, runs)


def launch(ranks, main=rank_main):
    """Runs main(rank, ranks, folder) in a process for each rank. The folder is empty, and shared by the ranks."""
    # NVLink multicast is off, since GPUs of a shared host may not have it.
    variables = {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if torch.cuda.device_count() < ranks:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, variables):
        started = torch.multiprocessing.start_processes(main, (ranks, folder), ranks, join=False)
        deadline = time.monotonic() + LIMIT
        try:
            while not started.join(timeout=1):
                assert time.monotonic() < deadline, f"{ranks} ranks were not done after {LIMIT} s"
        finally:
            for pid in started.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)


def test_two_ranks():
    launch(2)


def test_four_ranks():
    launch(4)


if __name__ == "__main__":
    test_two_ranks()
    test_four_ranks()
