"""Tests of gmm_torch on the CPU, and on a GPU where there is one: python3 -m pytest examples/torch/tests, or without
pytest python3 examples/torch/tests/test_gmm_torch.py. References are composed torch in float64."""
import contextlib
import functools
import itertools
import sys
import threading
import traceback
import unittest

import torch
import torch.nn.functional as F

import gmm_torch
from gmm_torch import ops

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SIZES = [5, 0, 17, 1]
ROWS = 26  # three more than the sizes have: they must not count, and are zero in results


def each(**lists):
    """Runs a test with every combination of the lists; a plain runner needs no pytest."""
    def wrap(test):
        def run():
            for values in itertools.product(*lists.values()):
                try:
                    test(**dict(zip(lists, values)))
                except Exception as e:
                    raise AssertionError(f"{dict(zip(lists, values))}: {e}") from e
        run.__name__ = test.__name__
        return run
    return wrap


@contextlib.contextmanager
def raises(*words):
    try:
        yield
    except RuntimeError as e:
        assert all(w in str(e) for w in words), f"{words} not in: {e}"
    else:
        raise AssertionError(f"no exception with {words}")


def draw(*shape, device="cpu", dtype=torch.float32, scale=1.0, grad=True):
    t = (scale * torch.randn(*shape)).to(device=device, dtype=dtype)
    return t.requires_grad_(grad)


def doubles(*tensors):
    return [t if t is None else t.detach().double().cpu().requires_grad_() for t in tensors]


def close(got, want, bound):
    """The norm of the difference against the norm of the reference."""
    got, want = got.detach().double().cpu(), want.detach().double()
    error = float((got - want).norm() / want.norm().clamp(min=1e-30))
    assert got.shape == want.shape and error <= bound, f"difference {error:.2e} above {bound:.0e}"


def by_expert(function, rows, sizes):
    parts, at = [], 0
    for g, n in enumerate(sizes):
        parts.append(function(rows[at:at + n], g, slice(at, at + n)))
        at += n
    parts.append(parts[0].new_zeros(rows.shape[0] - at, parts[0].shape[1]))
    return torch.cat(parts)


def linear_reference(x, w, sizes, bias=None):
    return by_expert(lambda r, g, _: r @ w[g].T + (0 if bias is None else bias[g]), x, sizes)


def mlp_reference(x, w1, w2, sizes, probs=None, b1=None, b2=None, act="swiglu"):
    def expert(r, g, at):
        z = r @ w1[g].T + (0 if b1 is None else b1[g])
        p = 1 if probs is None else probs[at, None]
        if act == "swiglu":
            gate, up = z.chunk(2, dim=1)
            h = F.silu(gate) * up
        else:
            h = torch.relu(z) ** 2
        return (h * p) @ w2[g].T + (0 if b2 is None else b2[g] * p)
    return by_expert(expert, x, sizes)


def splits_of(device, dtype=torch.int32, sizes=SIZES):
    return torch.tensor(sizes, device=device, dtype=dtype)


def backward(y, dy):
    y.backward(dy.to(device=y.device, dtype=y.dtype))


@each(device=DEVICES, dtype=DTYPES, index=[torch.int32, torch.int64], bias=[False, True])
def test_linear(device, dtype, index, bias):
    torch.manual_seed(1)
    x, w = draw(ROWS, 24, device=device, dtype=dtype), draw(4, 40, 24, device=device, dtype=dtype)
    b = draw(4, 40, device=device, dtype=dtype) if bias else None
    rx, rw, rb = doubles(x, w, b)
    y, ry = gmm_torch.linear(x, w, splits_of(device, index), b), linear_reference(rx, rw, SIZES, rb)
    close(y, ry, DTYPES[dtype])
    assert not y[sum(SIZES):].any()
    dy = torch.randn(ROWS, 40).to(dtype).double()
    backward(y, dy), backward(ry, dy)
    for t, r in ((x, rx), (w, rw), (b, rb)):
        if t is not None:
            close(t.grad, r.grad, 2 * DTYPES[dtype])


@each(device=DEVICES, dtype=[torch.float32, torch.bfloat16], act=["swiglu", "relu2"], probs=[False, True],
      bias=[False, True], save=["preact", "preact_and_act", "nothing"])
def test_mlp(device, dtype, act, probs, bias, save):
    torch.manual_seed(2)
    like = {"device": device, "dtype": dtype}
    x, w1 = draw(ROWS, 24, **like), draw(4, 64 if act == "swiglu" else 32, 24, scale=0.2, **like)
    w2 = draw(4, 16, 32, scale=0.2, **like)
    p = torch.rand(ROWS).to(device).requires_grad_() if probs else None
    b1, b2 = (draw(4, w1.shape[1], **like), draw(4, 16, **like)) if bias else (None, None)
    inputs = (x, w1, w2, p, b1, b2)
    refs = doubles(*inputs)
    y = gmm_torch.mlp(x, w1, w2, splits_of(device), p, b1, b2, act=act, save=save)
    ry = mlp_reference(refs[0], refs[1], refs[2], SIZES, *refs[3:], act=act)
    bound = 2 * DTYPES[dtype]
    close(y, ry, bound)
    dy = torch.randn(ROWS, 16).to(dtype).double()
    backward(y, dy), backward(ry, dy)
    for t, r in zip(inputs, refs):
        if t is not None:
            close(t.grad, r.grad, 2 * bound)
    with torch.no_grad():  # inference saves nothing and computes the same
        assert torch.equal(y, gmm_torch.mlp(x, w1, w2, splits_of(device), p, b1, b2, act=act, save=save))


BOUNDS = {"fp8_current": 0.15, "fp8_block": 0.1, "mxfp8": 0.1, "nvfp4": 0.5}


@each(device=DEVICES, recipe=BOUNDS, save=["preact", "quantized"])
def test_recipes(device, recipe, save):
    torch.manual_seed(3)
    like = {"device": device, "dtype": torch.bfloat16}
    sizes = [40, 0, 80, 8]
    x, w1, w2 = draw(128, 64, **like), draw(4, 128, 64, scale=0.2, **like), draw(4, 64, 64, scale=0.2, **like)
    random = torch.tensor([7, 0, 8, 0], device=device)
    refs = doubles(x, w1, w2)
    y = gmm_torch.mlp(x, w1, w2, splits_of(device, sizes=sizes), recipe=recipe, save=save, random=random)
    ry = mlp_reference(*refs, sizes)
    close(y, ry, BOUNDS[recipe])
    dy = torch.randn(128, 64).bfloat16().double()
    backward(y, dy), backward(ry, dy)
    for t, r in zip((x, w1, w2), refs):
        close(t.grad, r.grad, 2 * BOUNDS[recipe])
        assert float((t.grad.double().cpu() - r.grad).norm() / r.grad.norm()) > 1e-3  # it did quantize


@each(device=DEVICES, score=["softmax", "sigmoid"], normalize=[False, True], coefficients=[(0.0, 0.0), (0.3, 0.2)])
def test_topk(device, score, normalize, coefficients):
    torch.manual_seed(4)
    logits = draw(19, 8, device=device)
    ref = doubles(logits)[0]
    probs, indices, counts, losses = gmm_torch.topk(logits, 3, score, normalize, 2.0, None, *coefficients)
    s = ref.softmax(1) if score == "softmax" else ref.sigmoid()
    rp, ri = s.topk(3, dim=1)
    q = s if score == "softmax" else s / s.sum(1, keepdim=True)
    rc = torch.bincount(ri.flatten(), minlength=8)
    aux = coefficients[0] * 8 / (3 * 19 ** 2) * (rc * q.sum(0)).sum()
    z = coefficients[1] / 19 * (ref.logsumexp(1) ** 2).sum()
    rp = 2.0 * (rp / rp.sum(1, keepdim=True) if normalize else rp)
    assert torch.equal(indices.long().cpu(), ri) and torch.equal(counts.long().cpu(), rc)
    close(probs, rp, 1e-5)
    close(losses, torch.stack([aux, z]), 1e-5)
    weight = torch.randn(19, 3)
    ((probs * weight.to(device)).sum() + losses.sum()).backward()
    ((rp * weight).sum() + aux + z).backward()
    close(logits.grad, ref.grad, 1e-4)


@each(device=DEVICES, weighted=["permute", "unpermute", "none"], dropped=[False, True])
def test_permute(device, weighted, dropped):
    torch.manual_seed(5)
    x, p = draw(11, 12, device=device), torch.rand(11, 2).to(device).requires_grad_()
    indices = torch.stack([torch.randperm(5)[:2] for _ in range(11)]).int()
    if dropped:
        indices[3, 1] = indices[7, 0] = -1
    rows, row_probs, row_of, slot_of, sizes = gmm_torch.permute(x, indices.to(device), 5,
                                                                p if weighted == "permute" else None)
    scaled = rows * row_probs[:, None] if weighted == "permute" else rows
    outputs, kept = scaled * 3, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = gmm_torch.unpermute(outputs, row_of, slot_of, sizes, p if weighted == "unpermute" else None)
    # only the gradient of probabilities reads rows
    assert any(t.untyped_storage().nbytes() >= rows.nbytes for t in kept) == (weighted == "unpermute")
    rx, rp = doubles(x, p)
    live = (indices >= 0).double()
    ref = 3 * rx * (live * (rp if weighted != "none" else 1)).sum(1, keepdim=True)
    close(out, ref, 1e-5)
    assert torch.equal(sizes.cpu(), torch.bincount(indices[indices >= 0].flatten(), minlength=5).int())
    dy = torch.randn(11, 12).double()
    backward(out, dy), backward(ref, dy)
    close(x.grad, rx.grad, 1e-5)
    if weighted != "none":
        close(p.grad, rp.grad, 1e-5)


@each(device=DEVICES, dtype=[torch.float32, torch.bfloat16])
def test_main_grad(device, dtype):
    torch.manual_seed(6)
    layer = gmm_torch.GroupedLinear(4, 16, 24, device=device, dtype=dtype)
    layer.weight.main_grad = torch.full((4, 24, 16), 0.5, device=device)
    batches = [draw(ROWS, 16, device=device, dtype=dtype) for _ in range(2)]
    ys = [layer(x, splits_of(device)) for x in batches]  # both forwards before both backwards
    want = torch.full((4, 24, 16), 0.5).double()
    for x, y in zip(batches, ys):
        dy = torch.randn(ROWS, 24).to(dtype).double()
        backward(y, dy)
        rx, rw = doubles(x, layer.weight)
        backward(linear_reference(rx, rw, SIZES), dy)
        want += rw.grad
    assert layer.weight.grad is None
    close(layer.weight.main_grad, want, 2e-6 if dtype == torch.float32 else 1e-5)


def moe(device, **options):
    torch.manual_seed(7)
    options = {"dtype": torch.float32, **options}
    return gmm_torch.MoE(32, 32, 8, 2, aux_coeff=0.1, z_coeff=0.01, device=device, **options)


@each(device=DEVICES, recipe=["none", "fp8_block"], save=["preact", "quantized", "preact_and_rows"],
      delay=[False, True], weighted=[False, True], dropped=[False, True])
def test_moe(device, recipe, save, delay, weighted, dropped):
    """The layer's bits are those of permute, mlp and unpermute, and its graph keeps no permuted rows, or no x."""
    if recipe == "none" and save == "quantized":
        return
    torch.manual_seed(13)
    like = {"device": device, "dtype": torch.bfloat16}
    operands = [draw(37, 64, **like), draw(5, 256, 64, scale=0.1, **like), draw(5, 48, 128, scale=0.1, **like),
                torch.rand(37, 2).to(device).requires_grad_() if weighted else None,
                draw(5, 256, **like), draw(5, 48, **like)]
    indices = torch.stack([torch.randperm(5)[:2] for _ in range(37)]).int()
    if dropped:
        indices[3, 1] = indices[7, 0] = indices[8] = -1
    indices, dy = indices.to(device), torch.randn(37, 48).to(**like)
    results, kept = [], []
    for whole in (True, False):
        x, w1, w2, p, b1, b2 = inputs = [t if t is None else t.detach().requires_grad_() for t in operands]
        options = {"recipe": recipe, "save": save, "queue": gmm_torch.WgradQueue() if delay else None}
        pack = (lambda t: kept.append(t) or t) if whole else (lambda t: t)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            if whole:
                y = gmm_torch.moe(x, w1, w2, indices, p, b1, b2, **options)
            else:
                rows, row_probs, row_of, slot_of, sizes = gmm_torch.permute(x, indices, 5, p)
                options["save"] = save.replace("_and_rows", "")
                y = gmm_torch.mlp(rows, w1, w2, sizes, row_probs if weighted else None, b1, b2, **options)
                y = gmm_torch.unpermute(y, row_of, slot_of, sizes)
        y.backward(dy)
        if delay:
            options["queue"].run()
        results.append([y] + [t.grad for t in inputs if t is not None])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert not any(t.shape and t.shape[0] == indices.numel() for t in kept)
    rows_bytes = indices.numel() * 64 * 2
    saved = max(t.numel() for t in kept if t.dtype == torch.uint8)
    if save == "preact_and_rows":
        no_x = not any(t.numel() == 37 * 64 and t.is_contiguous() for t in kept)
        assert no_x and saved > rows_bytes + 37 * 2 * 256 * 2
    with torch.no_grad():
        assert torch.equal(y, gmm_torch.moe(*inputs[:3], indices, *inputs[3:], recipe=recipe, save=save))


@each(device=DEVICES, main=[False, True], recipe=["none", "fp8_block"], save=["preact", "quantized"])
def test_delayed_wgrad(device, main, recipe, save):
    if recipe == "none" and save == "quantized":
        return
    results = []
    for delay in (False, True):
        layer = moe(device, delay_wgrad=delay, recipe=recipe, save=save, dtype=torch.bfloat16)
        for w in (layer.w1, layer.w2):
            if main:
                w.main_grad = torch.ones(w.shape, device=device)
        x = draw(40, 32, device=device, dtype=torch.bfloat16)
        for micro_batch in range(2):
            layer(x)[0].sum().backward()
        assert not delay or (len(layer.queue) == 2 and layer.w1.grad is None)
        for micro_batch in range(2):
            layer.backward_dw()
        assert layer.queue is None or not layer.queue
        results.append([(w.main_grad if main else w.grad).clone() for w in (layer.w1, layer.w2)] + [x.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def moved(t):
    """A copy of what forward saves at an odd multiple of 64 bytes, as after a move to another memory and back."""
    if t.dtype != torch.uint8:
        return t
    buffer = torch.empty(t.numel() + 512, dtype=torch.uint8, device=t.device)
    start = -buffer.data_ptr() % 256 + 64
    return buffer[start:start + t.numel()].copy_(t)


@each(device=DEVICES, recipe=["none", "fp8_block"], save=["preact", "quantized"])
def test_saved_tensors_elsewhere(device, recipe, save):
    if recipe == "none" and save == "quantized":
        return
    results = []
    for delay, unpack in ((False, lambda t: t), (False, moved), (True, moved)):
        layer = moe(device, delay_wgrad=delay, recipe=recipe, save=save, dtype=torch.bfloat16)
        x = draw(40, 32, device=device, dtype=torch.bfloat16)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = layer(x)[0]
        y.sum().backward()
        # memory that backward has freed is overwritten before the weight gradients are computed
        junk = [torch.full((n,), 255, dtype=torch.uint8, device=device) for n in range(128, 1 << 15, 32)]
        layer.backward_dw()
        results.append((layer.w1.grad, layer.w2.grad, x.grad))
        del junk
    for got in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], got))


@each(device=DEVICES, delay=[False, True], main=["none", "trained", "both"], trained=[(), (0,), (1,), (0, 1)])
def test_frozen_weights(device, delay, main, trained):
    """A frozen weight has no gradient, and its main_grad is left alone."""
    torch.manual_seed(9)
    splits, x0 = splits_of(device), draw(ROWS, 16, device=device)
    weights = [draw(4, 48, 16, device=device), draw(4, 16, 24, device=device)]
    dy = torch.randn(ROWS, 16).double()
    backward(gmm_torch.mlp(x0, *weights, splits), dy)
    want = [w.grad for w in weights]
    x, queue = x0.detach().requires_grad_(), gmm_torch.WgradQueue() if delay else None
    weights = [w.detach().requires_grad_(i in trained) for i, w in enumerate(weights)]
    mains = [torch.ones_like(w) if main == "both" or (main == "trained" and i in trained) else None
             for i, w in enumerate(weights)]
    backward(gmm_torch.mlp(x, *weights, splits, main_grads=mains, queue=queue), dy)
    if delay:
        assert len(queue) == 1 and all(w.grad is None for w in weights)
        queue.run()
    assert torch.equal(x.grad, x0.grad)
    for i, (w, m) in enumerate(zip(weights, mains)):
        if i not in trained:
            assert w.grad is None and (m is None or bool((m == 1).all()))
        elif m is None:
            assert torch.equal(w.grad, want[i])
        else:
            assert w.grad is None
            close(m, (want[i].double() + 1).cpu(), 2e-6)


@each(device=DEVICES, delay=[False, True])
def test_one_main_grad(device, delay):
    w1, w2 = draw(4, 48, 16, device=device), draw(4, 16, 24, device=device)
    with raises("main_grad1 and main_grad2 go together"):
        gmm_torch.mlp(draw(ROWS, 16, device=device), w1, w2, splits_of(device),
                      main_grads=(torch.ones_like(w1), None), queue=gmm_torch.WgradQueue() if delay else None)


@each(device=DEVICES, main=[False, True])
def test_overwritten(device, main):
    """Backward overwrites what forward saved, unless the graph is kept."""
    torch.manual_seed(11)
    x, w1, w2 = draw(ROWS, 16, device=device), draw(4, 48, 16, device=device), draw(4, 16, 24, device=device)
    dy, splits, kept, results = draw(ROWS, 16, device=device, grad=False), splits_of(device), [], []
    main_grads = tuple(torch.zeros_like(w) for w in (w1, w2)) if main else (None, None)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = gmm_torch.mlp(x, w1, w2, splits, main_grads=main_grads)
    saved, = (t for t in kept if t.dtype == torch.uint8)
    before = saved.clone()
    for keep in (True, False):
        assert torch.equal(saved, before)
        y.backward(dy, retain_graph=keep)
        grads = [x.grad, *(main_grads if main else (w1.grad, w2.grad))]
        results.append([g.clone() for g in grads])
        [g.zero_() for g in grads]
    assert not torch.equal(saved, before)
    assert all(torch.equal(a, b) for a, b in zip(*results))
    with raises("overwritten must be saved"):
        ops.mlp_bwd(dy, x.detach(), w1.detach(), w2.detach(), splits, saved, overwritten=before)


class GroupedProduct(torch.autograd.Function):
    """torch._grouped_mm of groups of equal size, with no memory beside its results, which torch's takes on the CPU."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return GroupedProduct.products(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx, dw = GroupedProduct.products(dy, w.transpose(1, 2)), torch.empty_like(w)
        for x, dy, dw_of_group in zip(x.chunk(len(w)), dy.chunk(len(w)), dw):
            torch.mm(x.T, dy, out=dw_of_group)
        return dx, dw

    @staticmethod
    def products(x, w):
        y = x.new_empty(x.shape[0], w.shape[2])
        for x, weight, rows in zip(x.chunk(len(w)), w, y.chunk(len(w))):
            torch.mm(x, weight, out=rows)
        return y


def composed_mlp(x, w1, w2, probs=None):
    gate, up = GroupedProduct.apply(x, w1.transpose(1, 2)).chunk(2, dim=1)
    h = F.silu(gate) * up
    return GroupedProduct.apply(h if probs is None else h * probs[:, None].to(h.dtype), w2.transpose(1, 2))


def composed_layer(x, w1, w2, indices, probs):
    order = indices.flatten().argsort(stable=True)
    token = order // indices.shape[1]
    return torch.zeros_like(x).index_add(0, token, composed_mlp(x[token], w1, w2, probs.flatten()[order]))


def peak_bytes(step, device):
    """The most bytes that a step, which frees nothing older, has allocated at one time."""
    step()  # contexts are there then
    if device == "cuda":
        torch.cuda.synchronize(), torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(changes))


@each(device=DEVICES, ours=["mlp", "moe", "moe, rows"])
def test_peak_memory(device, ours):
    """A training step needs at most the memory of composed torch, and the workspace of a product."""
    torch.manual_seed(15)
    like, rows = {"device": device, "dtype": torch.bfloat16}, 2048 if ours == "mlp" else 1024
    leaves = [draw(*shape, scale=0.1, **like) for shape in ((rows, 256), (16, 2048, 256), (16, 256, 1024))]
    dy = torch.randn_like(leaves[0])
    if ours == "mlp":
        ways = functools.partial(gmm_torch.mlp, splits=splits_of(device, sizes=[128] * 16)), composed_mlp
    else:
        route = {"indices": (torch.arange(2048).view(rows, 2) % 16).int().to(device),
                 "probs": torch.rand(rows, 2).to(device)}
        save = "preact" if ours == "moe" else "preact_and_rows"
        ways = functools.partial(gmm_torch.moe, save=save, **route), functools.partial(composed_layer, **route)

    def step(way):
        way(*leaves).backward(dy)
        for t in leaves:
            t.grad = None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the CPU engine's workspace grows with the threads: one takes 0.8 MiB here
    peak, composed = (peak_bytes(functools.partial(step, way), device) / 2 ** 20 for way in ways)
    torch.set_num_threads(threads)
    assert peak < composed + 1, f"peak {peak:.2f} MiB, that of composed torch {composed:.2f}"


@each(device=DEVICES, layer=["no", "preact", "preact_and_rows"], act=["swiglu", "relu2", "gpt_oss"],
      weighted=[False, True], bias=[False, True], overwrite=[False, True])
def test_steps(device, layer, act, weighted, bias, overwrite):
    """Backward in steps has the bits of the one call of gmm that serves where weight gradients are delayed."""
    torch.manual_seed(14)
    like, rows = {"device": device, "dtype": torch.bfloat16, "grad": False}, (ROWS, 2) if layer != "no" else (ROWS,)
    x, dy = draw(ROWS, 24, **like), draw(ROWS, 16, **like)
    w1, w2 = draw(4, 32 if act == "relu2" else 64, 24, scale=0.2, **like), draw(4, 16, 32, scale=0.2, **like)
    routing = splits_of(device) if layer == "no" else torch.randint(-1, 4, (ROWS, 2)).int().to(device)
    operands = (x, w1, w2, routing)
    options = {"probs": torch.rand(*rows).to(device) if weighted else None, "act": act,
               "save": "preact" if layer == "no" else layer}
    if bias:
        options.update(b1=draw(4, w1.shape[1], **like), b2=draw(4, 16, **like))
    saved = ops.mlp_fwd(*operands, **options)[1]
    dws = torch.empty_like(w1), torch.empty_like(w2)
    dx, dprobs, db1, db2, deferred, entry = ops.mlp_bwd_delayed(*dws, dy, *operands, saved, **options, add=False)
    ops.mlp_wgrad(*dws, entry, deferred)
    kept = saved.clone()
    steps = ops.mlp_bwd(dy, *operands, kept, **options, overwritten=kept if overwrite else None)
    assert all(torch.equal(a, b) for a, b in zip(steps, (dx, *dws, dprobs, db1, db2)))
    assert torch.equal(kept, saved) != overwrite
    mains = [torch.zeros_like(w, dtype=torch.float32) for w in (w1, w2)]
    added = ops.mlp_bwd_add(*mains, dy, *operands, saved, **options)
    assert all(torch.equal(a, b) for a, b in zip(added, (dx, dprobs, db1, db2)))
    assert all(torch.equal(m.bfloat16(), dw) for m, dw in zip(mains, dws))
    for wanted in itertools.product((False, True), repeat=3):
        some = ops.mlp_bwd(dy, *operands, saved, **options, **dict(zip(("need_dx", "need_dw1", "need_dw2"), wanted)))
        for want, got, need in zip((dx, *dws, dprobs, db1, db2), some, (*wanted, True, True, True)):
            assert torch.equal(got, want) if need else not got.numel()


@each(device=DEVICES, save=["preact", "quantized", "quantized_e4m3"], delay=[False, True])
def test_kept(device, save, delay):
    """Where forward saves what backward needs of x, the graph keeps no memory of x."""
    torch.manual_seed(12)
    like = {"device": device, "dtype": torch.bfloat16}
    splits = splits_of(device, sizes=[64, 0, 128])
    x, w1, w2 = (draw(*shape, **like) for shape in ((192, 64), (3, 256, 64), (3, 64, 128)))
    queue, kept, results = gmm_torch.WgradQueue() if delay else None, [], []
    for hooks in (True, False):
        x.grad = w1.grad = w2.grad = None
        pack = (lambda t: kept.append(t) or t) if hooks else (lambda t: t)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = gmm_torch.mlp(x, w1, w2, splits, recipe="fp8_block", save=save if hooks else "preact", queue=queue)
        y.sum().backward()
        if delay:
            queue.run()
        results.append((x.grad, w1.grad, w2.grad))
    assert any(t.data_ptr() == x.data_ptr() for t in kept) == (save == "preact")
    rows = [t for t in kept if t.shape == x.shape]
    assert len(rows) == 1 and (rows[0].untyped_storage().nbytes() < 100) == (save != "preact")
    if save != "quantized_e4m3":  # whose gradients differ
        assert all(torch.equal(a, b) for a, b in zip(*results))


@each(device=DEVICES)
def test_delayed_random(device):
    """The entry refers to the random words: it keeps a dense copy of others, and the operator refuses these."""
    torch.manual_seed(10)
    splits, strided = splits_of(device, sizes=[64, 64]), torch.arange(8, device=device)[::2]
    operands = [draw(*shape, device=device, dtype=torch.bfloat16) for shape in ((128, 64), (2, 128, 64), (2, 64, 64))]
    results = []
    for queue in (None, gmm_torch.WgradQueue()):
        x, w1, w2 = (t.detach().requires_grad_() for t in operands)
        gmm_torch.mlp(x, w1, w2, splits, recipe="nvfp4", random=strided, queue=queue).sum().backward()
        if queue is not None:
            assert queue.entries[0][-1][-1].is_contiguous()
            queue.run()
        results.append((x.grad, w1.grad, w2.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    x, w1, w2 = (t.detach() for t in operands)
    y, saved = ops.mlp_fwd(x, w1, w2, splits, recipe="nvfp4")
    with raises("random of delayed weight gradients must be contiguous"):
        ops.mlp_bwd_delayed(torch.empty_like(w1), torch.empty_like(w2), torch.ones_like(y), x, w1, w2, splits, saved,
                            random=strided, recipe="nvfp4")


@each(device=DEVICES)
def test_threads(device):
    """Contexts serve one thread at a time: threads must get contexts of their own."""
    x, w = draw(ROWS, 64, device=device, grad=False), draw(4, 64, 64, device=device, grad=False)
    want, got = gmm_torch.linear(x, w, splits_of(device)), {}

    def work(i):
        got[i] = [gmm_torch.linear(x, w, splits_of(device)) for _ in range(50)]
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert len(got) == 4 and all(torch.equal(want, y) for ys in got.values() for y in ys)


@each(device=DEVICES)
def test_strides_and_alignment(device):
    """Views with a row pitch are read where they are, at any address; others are copied."""
    buffer = draw(ROWS, 60, device=device, grad=False)
    w = draw(4, 24, 40, device=device, grad=False)
    for x in (buffer[:, 1:25], buffer[:, ::2][:, :24], buffer.T[:24].T[:, :24], buffer[1:, :24]):
        want = gmm_torch.linear(x.contiguous(), w.transpose(1, 2).contiguous(), splits_of(device))
        close(gmm_torch.linear(x, w.transpose(1, 2), splits_of(device)), want.cpu().double(), 1e-6)
    # strides of single rows and experts may be anything
    for rows, weight in ((draw(24, 1, device=device, grad=False).t(), w.transpose(1, 2)[:1].contiguous()),
                         (buffer[:, :24], torch.as_strided(w, (1, 40, 24), (1, 24, 1)))):
        splits = splits_of(device, sizes=rows.shape[:1])
        want = gmm_torch.linear(rows.clone(memory_format=torch.contiguous_format), weight.clone(), splits)
        assert torch.equal(gmm_torch.linear(rows, weight, splits), want)
    x = buffer[:, :24].clone().requires_grad_()
    gmm_torch.linear(x, w.transpose(1, 2), splits_of(device)).sum().backward()  # dy has strides of 0
    assert x.grad.abs().sum() > 0


@each(device=DEVICES)
def test_no_rows(device):
    layer, x = moe(device), draw(0, 32, device=device)
    y, losses = layer(x)
    y.sum().backward()
    assert y.shape == (0, 32) and not layer.w1.grad.any() and x.grad.shape == (0, 32)


@each(device=DEVICES)
def test_errors(device):
    x, w, splits = draw(ROWS, 24, device=device), draw(4, 40, 24, device=device), splits_of(device)
    with raises("w", "does not fit rows of 23"):
        gmm_torch.linear(x[:, :23], w, splits)
    with raises("4 experts, splits 3"):
        gmm_torch.linear(x, w, splits[:3])
    with raises("splits has dtype Float"):
        gmm_torch.linear(x, w, splits.float())
    with raises("gmm_linear_query", "dtype"):  # gmm's own words
        gmm_torch.linear(x, w.bfloat16(), splits)
    with raises("Double", "float32"):
        gmm_torch.linear(x.double(), w.double(), splits)
    with raises("recipe 'fp9' must be one of", "fp8_block"):
        gmm_torch.mlp(x, w, draw(4, 24, 20, device=device), splits, recipe="fp9")
    with raises("save 'preact_and_rows' keeps the rows that moe permutes"):
        gmm_torch.mlp(x, w, draw(4, 24, 20, device=device), splits, save="preact_and_rows")
    with raises("fp8_delayed", "fp8_current"):
        gmm_torch.mlp(x, w, draw(4, 24, 20, device=device), splits, recipe="fp8_delayed")
    experts = (x, w, draw(4, 24, 20, device=device))
    indices = torch.zeros(ROWS, 2, dtype=torch.int32, device=device)
    with raises("indices has dtype Long", "Int"):
        gmm_torch.moe(*experts, indices.long())
    with raises("indices [25, 2] must be [rows of x, topk], x has 26 rows"):
        gmm_torch.moe(*experts, indices[1:])
    with raises("indices [26, 0] must be"):
        gmm_torch.moe(*experts, indices[:, :0])
    with raises("probs has [26] values, indices 52"):
        gmm_torch.moe(*experts, indices, torch.rand(ROWS, device=device))
    # shapes that gmm cannot see, since it gets addresses
    like, w2 = {"device": device}, draw(4, 24, 20, device=device)
    with raises("bias has shape [1, 40], not [4, 40]"):
        gmm_torch.linear(x, w, splits, torch.zeros(1, 40, **like))
    with raises("b2 has shape [4, 40], not [4, 24]"):
        gmm_torch.mlp(x, w, w2, splits, b2=torch.zeros(4, 40, **like))
    saved = ops.mlp_fwd(x, w, w2, splits)[1]
    with raises("main_grad1 has shape [1, 40, 24], not [4, 40, 24]"):
        ops.mlp_bwd_add(torch.zeros(1, 40, 24, **like), torch.zeros_like(w2), x, x, w, w2, splits, saved)
    with raises("dy has shape [25, 24], not [26, 24]"):
        ops.mlp_bwd(x[1:], x, w, w2, splits, saved)
    with raises("expert_bias has shape [7], not [8]"):
        gmm_torch.topk(draw(9, 8, **like), 2, expert_bias=torch.zeros(7, **like))
    with raises("probs has shape [26], not [26, 2]"):
        gmm_torch.permute(x, indices, 4, torch.rand(ROWS, **like))
    rows, _, row_of, slot_of, sizes = gmm_torch.permute(x, indices, 4)
    with raises("rows has shape [51, 24], not [52, 24]"):
        gmm_torch.unpermute(rows[1:], row_of, slot_of, sizes)
    with raises("row_of has dtype Long"):
        gmm_torch.unpermute(rows, row_of.long(), slot_of, sizes)
    with raises("slot_of has shape [51], not [52]"):
        ops.unpermute_bwd(x, rows, row_of, slot_of[1:], sizes)
    with raises("the queue is empty"):
        gmm_torch.WgradQueue().run()
    y, saved = ops.mlp_fwd(x, w, w2, splits)
    dw, dy = (torch.zeros_like(w), torch.zeros_like(w2)), torch.ones_like(y)
    *_, deferred, entry = ops.mlp_bwd_delayed(*dw, dy, x, w, w2, splits, saved)
    with raises("dw1 and dw2 are not those that mlp_bwd_delayed got"):
        ops.mlp_wgrad(torch.zeros_like(w), dw[1], entry, deferred)
    ops.mlp_wgrad(*dw, entry, deferred)
    wrong = splits_of(device, sizes=[20, 20, 20, 20])
    if device == "cpu":
        with raises("capacity"):
            gmm_torch.linear(x, w, wrong)
    else:
        gmm_torch.check_faults()
        gmm_torch.linear(x, w, wrong)
        with raises("more rows than there are"):
            gmm_torch.check_faults()
        gmm_torch.check_faults()
        with raises("other operands on cuda"):
            gmm_torch.linear(x, w.cpu(), splits)


@each(device=DEVICES)
def test_opcheck(device):
    check = torch.library.opcheck
    torch.manual_seed(8)
    splits, like = splits_of(device), {"device": device}
    x, w, b = draw(ROWS, 16, **like), draw(4, 32, 16, **like), draw(4, 32, **like)
    w2, p = draw(4, 16, 16, **like), torch.rand(ROWS, **like).requires_grad_()
    dy, dz = draw(ROWS, 32, grad=False, **like), draw(ROWS, 16, grad=False, **like)
    check(ops.linear.default, (x, w, splits, b))
    check(ops.mlp.default, (x, w, w2, splits, p))
    check(ops.mlp.default, (x, w, w2, splits), {"recipe": "fp8_block", "save": "quantized"})
    check(ops.topk.default, (draw(9, 8, **like), 2))
    indices = torch.stack([torch.randperm(4)[:2] for _ in range(ROWS)]).int().to(device)
    check(ops.mlp.default, (x, w, w2, indices, torch.rand(ROWS, 2, **like).requires_grad_()))
    check(ops.mlp.default, (x, w, w2, indices), {"recipe": "fp8_block", "save": "quantized"})
    check(ops.permute.default, (x, indices, 5, torch.rand(ROWS, 2, **like).requires_grad_()))
    x, w, w2 = x.detach(), w.detach(), w2.detach()
    rows, _, row_of, slot_of, sizes = gmm_torch.permute(x, indices, 5)
    check(ops.unpermute.default, (rows.requires_grad_(), row_of, slot_of, sizes))
    rows = rows.detach()
    check(ops.linear_dgrad.default, (dy, w, splits))
    check(ops.linear_wgrad.default, (dy, x, splits))
    check(ops.linear_wgrad_add.default, (torch.ones_like(w), dy, x, splits))
    check(ops.linear_bgrad.default, (dy, splits))
    check(ops.mlp_bwd.default, (dz, x, w, w2, indices, ops.mlp_fwd(x, w, w2, indices)[1]))
    saved = ops.mlp_fwd(x, w, w2, splits)[1]
    check(ops.mlp_bwd.default, (dz, x, w, w2, splits, saved))
    check(ops.mlp_bwd.default, (dz, x, w, w2, splits, saved), {"need_dw1": False})
    check(ops.mlp_bwd_add.default, (torch.ones_like(w), torch.ones_like(w2), dz, x, w, w2, splits, saved))
    check(ops.mlp_bwd_add.default, (None, torch.ones_like(w2), dz, x, w, w2, splits, saved))
    check(ops.permute_bwd.default, (rows, None, row_of))
    check(ops.unpermute_bwd.default, (x, rows, row_of, slot_of, sizes))


@each(device=DEVICES, recipe=["none", "fp8_block"], save=["preact", "preact_and_rows"], dynamic=[False, True])
def test_compile(device, recipe, save, dynamic):
    if recipe != "none" and save != "preact":
        return
    torch._dynamo.reset()
    layer = moe(device, dtype=torch.bfloat16, recipe=recipe, save=save)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic,
                             backend="inductor" if device == "cuda" else "aot_eager")
    for tokens in (24, 40):
        x = draw(tokens, 32, device=device, dtype=torch.bfloat16)
        grads = []
        for run in (layer, compiled):
            layer.zero_grad(), setattr(x, "grad", None)
            y, losses = run(x)
            (y.float().pow(2).sum() + losses.sum()).backward()
            grads.append([y, x.grad, layer.w1.grad, layer.w2.grad, layer.router.weight.grad])
        for got, want in zip(*grads):
            close(got, want.cpu().double(), 2e-2)


def test_cuda_graph():
    """A captured training step of a layer, replayed with other tokens: other row counts."""
    if "cuda" not in DEVICES:
        raise unittest.SkipTest("no GPU")
    layer = moe("cuda", dtype=torch.bfloat16)
    x = draw(64, 32, device="cuda", dtype=torch.bfloat16)

    def step():
        y, losses = layer(x)
        (y.float().pow(2).sum() + losses.sum()).backward()
        return y
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    layer.zero_grad(set_to_none=True), setattr(x, "grad", None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn(64, 32))
        for t in (x, layer.w1, layer.w2, layer.router.weight):
            t.grad.zero_()
        graph.replay()
        got = [t.clone() for t in (y, x.grad, layer.w1.grad, layer.w2.grad)]
        for t in (x, layer.w1, layer.w2, layer.router.weight):
            t.grad.zero_()
        want = [step(), x.grad, layer.w1.grad, layer.w2.grad]
        assert all(torch.equal(a, b) for a, b in zip(got, want))
    gmm_torch.check_faults()


def test_hopper_engine():
    """On a Hopper GPU the WGMMA engine serves bf16."""
    if "cuda" not in DEVICES or torch.cuda.get_device_capability() != (9, 0):
        raise unittest.SkipTest("no Hopper GPU")
    like = {"device": "cuda", "dtype": torch.bfloat16}
    x, w = torch.randn(256, 128, **like), torch.randn(4, 256, 128, **like)
    assert ops.linear_engine(x, w, splits_of("cuda", sizes=[64] * 4)).startswith("wgmma")


def main():
    failed = 0
    tests = [(n, f) for n, f in globals().items() if n.startswith("test_")]
    for name, test in tests:
        if len(sys.argv) > 1 and not any(a in name for a in sys.argv[1:]):
            continue
        try:
            test()
            print(f"ok    {name}", flush=True)
        except unittest.SkipTest as e:
            print(f"skip  {name}: {e}", flush=True)
        except Exception:
            failed += 1
            print(f"FAIL  {name}\n{traceback.format_exc()}", flush=True)
    print(f"{failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
