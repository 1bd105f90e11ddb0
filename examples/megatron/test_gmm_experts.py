"""GmmExperts beside megatron-core's SequentialMLP, on the CPU or a GPU, in one process:

    python3 examples/megatron/test_gmm_experts.py /path/to/Megatron-LM

The path is a checkout's; without one, and by pytest, the installed megatron-core is used. gmm_torch is installed
(../torch).
"""
import itertools
import os
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)] + [p for p in sys.argv[1:2] if os.path.isdir(p)]
import psutil  # noqa: E402,F401 - megatron-core needs it to save a checkpoint, and waits forever without it
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.activations import squared_relu  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.mlp import MLPSubmodules  # noqa: E402
from megatron.core.transformer.moe.experts import SequentialMLP  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import gmm_torch  # noqa: E402
from gmm_experts import GmmExperts, use_gmm_experts  # noqa: E402
from megatron_here import prepare  # noqa: E402

DEVICE = prepare()
EXPERTS, HIDDEN, FFN, SIZES = 4, 16, 24, [5, 0, 9, 3]


def config(activation=F.silu, gated=True, **more):
    return TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS, moe_ffn_hidden_size=FFN,
        ffn_hidden_size=FFN, add_bias_linear=False, gated_linear_unit=gated, activation_func=activation,
        use_cpu_initialization=True, params_dtype=torch.float32, bias_activation_fusion=False, **more)


def groups():
    return ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "expt_dp"])


def experts(**options):
    return GmmExperts(EXPERTS, config(**options), None, groups()).to(DEVICE)


def sequential(**options):
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return SequentialMLP(EXPERTS, config(**options), linears, groups()).to(DEVICE)


def packed(module, fc, what=lambda w: w):
    return torch.stack([what(getattr(e, fc).weight).detach() for e in module.local_experts])


def close(a, b):
    assert a.shape == b.shape and float((a - b).norm()) <= 1e-5 * float(b.norm()), float((a - b).norm() / b.norm())


def run(module, dy=None):
    torch.manual_seed(5)
    x = torch.randn(sum(SIZES), HIDDEN, device=DEVICE, requires_grad=True)
    probs = torch.rand(sum(SIZES), device=DEVICE, requires_grad=True)
    y, bias = module(x, torch.tensor(SIZES), probs)
    assert bias is None
    y.backward(torch.randn(y.shape).to(DEVICE))
    return y.detach(), x.grad, probs.grad


def test_equals_sequential():
    for activation, gated in ((F.silu, True), (F.gelu, True), (F.gelu, False), (squared_relu, False)):
        reference, module = (make(activation=activation, gated=gated) for make in (sequential, experts))
        module.weight1.data.copy_(packed(reference, "linear_fc1"))
        module.weight2.data.copy_(packed(reference, "linear_fc2"))
        for a, b in zip(run(module), run(reference)):
            close(a, b)
        with torch.no_grad():
            x, probs = torch.randn(sum(SIZES), HIDDEN, device=DEVICE), torch.rand(sum(SIZES), device=DEVICE)
            close(*(m(x, torch.tensor(SIZES), probs)[0] for m in (module, reference)))
        close(module.weight1.grad, packed(reference, "linear_fc1", lambda w: w.grad))
        close(module.weight2.grad, packed(reference, "linear_fc2", lambda w: w.grad))


def test_main_grad_and_delay():
    module = experts()
    run(module)
    want = [w.grad.clone() for w in (module.weight1, module.weight2)]
    for fused in (False, True):
        for delay in (False, True):
            module.config.gradient_accumulation_fusion, module.config.delay_wgrad_compute = fused, delay
            called = []
            module.hooks = [lambda: called.append(1)]
            for w in (module.weight1, module.weight2):
                w.grad, w.grad_added_to_main_grad, w.main_grad = None, False, torch.ones_like(w)
            for micro_batch in range(2):
                run(module)
                assert not delay or len(module.queue) == 1
                module.backward_dw()
                assert len(called) == (micro_batch + 1 if delay else 0)
            for w, grad in zip((module.weight1, module.weight2), want):
                assert w.grad_added_to_main_grad == fused
                close(w.main_grad if fused else w.grad, 2 * grad + fused)


def test_frozen_weights():
    module = experts()
    x_grad = run(module)[1]
    weights = (module.weight1, module.weight2)
    want = [w.grad.clone() for w in weights]
    for fused, delay, trained in itertools.product((False, True), (False, True), ((), (0,), (1,))):
        module.config.gradient_accumulation_fusion, module.config.delay_wgrad_compute = fused, delay
        for i, w in enumerate(weights):
            w.requires_grad_(i in trained)
            w.grad, w.grad_added_to_main_grad, w.main_grad = None, False, torch.ones_like(w)
        assert torch.equal(run(module)[1], x_grad)
        module.backward_dw()
        assert not module.queue
        for i, w in enumerate(weights):
            if i not in trained:
                assert w.grad is None and not w.grad_added_to_main_grad and bool((w.main_grad == 1).all())
            else:
                close(w.main_grad if fused else w.grad, want[i] + fused)


def test_recipes():
    """Each FP8 recipe of the configuration gives the bits of gmm_torch's, and other outputs than the others."""
    results, splits, (hidden, ffn) = [], torch.tensor(SIZES, device=DEVICE), (128, 64)
    # Rows and blocks of 32 features differ in magnitude, so that scales of a tensor, a row and a block round otherwise.
    spread = 2.0 ** (-torch.arange(sum(SIZES)).view(-1, 1) - 3 * (torch.arange(hidden) // 32))
    for name, recipe in (("tensorwise", "fp8_current"), ("blockwise", "fp8_block"), ("mxfp8", "mxfp8")):
        settings = config()
        settings.hidden_size, settings.moe_ffn_hidden_size = hidden, ffn
        settings.fp8, settings.fp8_recipe = "hybrid", name
        module = GmmExperts(EXPERTS, settings, None, groups()).to(DEVICE)
        torch.manual_seed(5)
        x, dy = ((torch.randn(sum(SIZES), hidden) * s).to(DEVICE).requires_grad_() for s in (spread, 1))
        probs = torch.rand(sum(SIZES), device=DEVICE, requires_grad=True)
        operands = x, module.weight1, module.weight2, probs
        want = gmm_torch.mlp(*operands[:3], splits, probs, recipe=recipe)
        want = [want, *torch.autograd.grad(want, operands, dy)]
        for fused, delay in itertools.product((False, True), repeat=2):
            settings.gradient_accumulation_fusion, settings.delay_wgrad_compute = fused, delay
            for t in operands:
                t.grad, t.main_grad = None, torch.ones_like(t)
            y, _ = module(x, splits, probs)
            y.backward(dy)
            module.backward_dw()
            dw = [w.main_grad if fused else 1 + w.grad for w in operands[1:3]]
            expected = *want[:2], 1 + want[2], 1 + want[3], want[4]
            assert all(torch.equal(a, b) for a, b in zip((y, x.grad, *dw, probs.grad), expected, strict=True))
        with torch.no_grad():
            assert torch.equal(module(x, splits, probs)[0], y)
        results.append(want)
    for a, b in itertools.combinations(results, 2):
        assert not torch.equal(a[0], b[0])


def test_no_rows():
    module = experts()
    x = torch.zeros(0, HIDDEN, device=DEVICE, requires_grad=True)
    y, _ = module(x, torch.zeros(EXPERTS, dtype=torch.int64), torch.zeros(0, device=DEVICE))
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, HIDDEN)
    assert all(bool((w.grad == 0).all()) for w in (module.weight1, module.weight2))


def test_checkpoints_of_sequential():
    for gated in (True, False):
        options = {"gated": gated, "activation": F.silu if gated else squared_relu}
        for make_saved, make_loaded in ((sequential, experts), (experts, sequential)):
            saved, loaded = make_saved(**options), make_loaded(**options)
            with tempfile.TemporaryDirectory() as folder:
                dist_checkpointing.save(saved.sharded_state_dict(prefix="mlp.experts."), folder)
                state = dist_checkpointing.load(loaded.sharded_state_dict(prefix="mlp.experts."), folder)
            loaded.load_state_dict({k.removeprefix("mlp.experts."): v for k, v in state.items()}, strict=True)
            a, b = (saved, loaded) if make_saved is experts else (loaded, saved)
            assert torch.equal(a.weight1, packed(b, "linear_fc1")) and torch.equal(a.weight2, packed(b, "linear_fc2"))


def test_spec():
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    assert use_gmm_experts(spec) == 1 and spec.submodules.mlp.submodules.experts.module is GmmExperts


def test_refusals():
    fp8 = {"fp8": "hybrid", "fp8_recipe": "blockwise"}
    for told, settings in (("add_bias_linear", {"add_bias_linear": True}),
                           ("activation_func", {"activation_func": torch.tanh}),
                           ("fp4", {"fp4": "e2m1"}),
                           ("fp8_recipe=delayed", {**fp8, "fp8_recipe": "delayed"}),
                           ("fp8_recipe=custom", {**fp8, "fp8_recipe": "custom"}),
                           ("first_last_layers_bf16 with fp8", {**fp8, "first_last_layers_bf16": True})):
        refused = config()
        for name, value in settings.items():
            setattr(refused, name, value)
        try:
            GmmExperts(EXPERTS, refused, None, groups())
        except ValueError as e:
            assert told in str(e)
        else:
            raise AssertionError(f"{told} was not refused")
    try:
        GmmExperts(EXPERTS, config())
    except ValueError as e:
        assert "needs pg_collection" in str(e)
    else:
        raise AssertionError("no pg_collection was not refused")


def setup_module():
    """pytest calls this before the tests: the process groups of one rank."""
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", rank=0, world_size=1,
                                init_method=f"file://{store.name}.rendezvous")
    parallel_state.initialize_model_parallel()


def teardown_module():
    dist.destroy_process_group()


if __name__ == "__main__":
    setup_module()
    for name, test in [(n, f) for n, f in globals().items() if n.startswith("test_")]:
        test()
        print("ok   ", name, flush=True)
    teardown_module()
