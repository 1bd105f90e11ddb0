"""A MoELayer with GmmExperts beside the same layer with SequentialMLP, on two and on four ranks:

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
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from gmm_experts import GmmExperts, use_gmm_experts  # noqa: E402
from megatron_here import prepare  # noqa: E402

DEVICE = prepare()
LIMIT = 300
EXPERTS, HIDDEN, FFN, LENGTH, BATCH = 4, 16, 24, 6, 2
Layout = namedtuple("Layout", "tp ep etp")  # sizes of tensor, expert and expert tensor parallelism
LAYOUTS = {
    2: [Layout(1, 1, 1), Layout(1, 2, 1), Layout(1, 1, 2), Layout(2, 1, 2), Layout(2, 2, 1)],
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


def make(gmm, layout, dispatcher="allgather", gated=True, fused=False, delay=False, on_cpu=True):
    """A layer with GmmExperts or with SequentialMLP."""
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS, moe_router_topk=2,
        moe_ffn_hidden_size=FFN, ffn_hidden_size=FFN, add_bias_linear=False, gated_linear_unit=gated,
        activation_func=F.silu if gated else squared_relu, bias_activation_fusion=False, params_dtype=torch.float32,
        tensor_model_parallel_size=layout.tp, expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp, sequence_parallel=layout.tp > 1, moe_token_dispatcher_type=dispatcher,
        use_cpu_initialization=on_cpu)
    # Set afterwards, since the configuration allows them only with more that this test does not need.
    config.gradient_accumulation_fusion, config.delay_wgrad_compute = fused, delay
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    if gmm:
        use_gmm_experts(spec)
    torch.manual_seed(7)
    return MoELayer(config, spec.submodules.mlp.submodules).to(DEVICE)


def weights_of(layer, what=lambda w: w.detach()):
    """Both weights of this rank's experts, [experts, out, in], or what belongs to them."""
    experts = layer.experts
    if isinstance(experts, GmmExperts):
        return [what(experts.weight1), what(experts.weight2)]
    return [torch.stack([what(getattr(e, fc).weight) for e in experts.local_experts])
            for fc in ("linear_fc1", "linear_fc2")]


def part_of_rank(gated):
    """This rank's part of weights that every rank draws alike."""
    random = torch.Generator().manual_seed(3)
    w1, w2 = (torch.randn(EXPERTS, *shape, generator=random).to(DEVICE) / 4
              for shape in (((1 + gated) * FFN, HIDDEN), (HIDDEN, FFN)))
    ep, etp = parallel_state.get_expert_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
    w1, w2 = (w.chunk(ep.size())[ep.rank()] for w in (w1, w2))
    w1 = torch.cat([half.chunk(etp.size(), 1)[etp.rank()] for half in w1.chunk(1 + gated, 1)], 1)
    return [w1, w2.chunk(etp.size(), 2)[etp.rank()]]


@torch.no_grad()
def set_weights(layer, gated=True):
    parts = part_of_rank(gated)
    if isinstance(layer.experts, GmmExperts):
        layer.experts.weight1.copy_(parts[0])
        layer.experts.weight2.copy_(parts[1])
    else:
        for i, expert in enumerate(layer.experts.local_experts):
            expert.linear_fc1.weight.copy_(parts[0][i])
            expert.linear_fc2.weight.copy_(parts[1][i])


def close(a, b):
    apart, of = float((a - b).norm()), float(b.norm())
    assert a.shape == b.shape and apart <= 1e-5 * of, f"{apart} apart, of {of}"


def run(module, seed):
    """Output and input gradient for rows that differ from rank to rank."""
    random = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    x, dy = (torch.randn(LENGTH, BATCH, HIDDEN, generator=random).to(DEVICE) for _ in range(2))
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
            set_weights(layer, gated)
            results.append([*run(layer, 1), layer.router.weight.grad, *weights_of(layer, lambda w: w.grad)])
        for a, b in zip(*results):
            close(a, b)


def check_main_grad(layout, folder):
    """main_grad of all parameters under DistributedDataParallel, after two micro-batches."""

    def main_grads(gmm, fused, delay, overlap):
        layer = make(gmm, layout, fused=fused, delay=delay)
        set_weights(layer)
        ddp = DistributedDataParallel(layer.config, DistributedDataParallelConfig(
            overlap_grad_reduce=overlap, delay_wgrad_compute=delay, grad_reduce_in_fp32=True), layer)
        ddp.zero_grad_buffer()
        for micro_batch in range(2):
            with ddp.no_sync() if micro_batch == 0 else contextlib.nullcontext():
                run(ddp, micro_batch)
                if delay:
                    assert len(layer.experts.queue) == 1
                    layer.backward_dw()
        ddp.finish_grad_sync()
        return [layer.router.weight.main_grad, *weights_of(layer, lambda w: w.main_grad)]

    reference = main_grads(False, False, False, False)
    for fused, delay, overlap in itertools.product((False, True), repeat=3):
        for a, b in zip(main_grads(True, fused, delay, overlap), reference):
            close(a, b)


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
        set_weights(layer, gated)
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
            for a, b in zip(weights_of(layer), part_of_rank(gated)):
                assert torch.equal(a, b)


def saving(ranks):
    """The layouts that save checkpoints: each way to divide experts is among them."""
    return LAYOUTS[ranks][:3]


def rank_main(rank, ranks, folder):
    os.setpgid(0, 0)  # so that a rank is ended with the processes that it has started
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    runs = [(layout, (check_initialization, check_layer, check_main_grad)) for layout in LAYOUTS[ranks]]
    runs += [(layout, (checks,)) for checks in (save_checkpoints, load_checkpoints) for layout in saving(ranks)]
    for i, (layout, checks) in enumerate(runs):
        with model_parallel(layout, rank, ranks, f"{folder}/rendezvous{i}"):
            for check in checks:
                start = time.monotonic()
                check(layout, folder)
                if rank == 0:
                    print(f"ok    {DEVICE}, {ranks} ranks, {layout}: {check.__name__}, "
                          f"{time.monotonic() - start:.1f} s", flush=True)


def launch(ranks):
    # NVLink multicast is off, since GPUs of a shared host may not have it.
    variables = {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if torch.cuda.device_count() < ranks:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, variables):
        started = torch.multiprocessing.start_processes(rank_main, (ranks, folder), ranks, join=False)
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
