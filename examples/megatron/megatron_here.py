"""Lets megatron-core 0.16.1 run where it cannot by itself: without Transformer Engine, and on a machine without a GPU.
For tests and examples. prepare() is called before layers are built, and returns the device, "cuda" or "cpu".
"""
import contextlib
from unittest import mock

import torch
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """A context on a machine without a GPU: tensors that code puts on a GPU stay on the CPU, and answer to type() that
    they are on a GPU. Megatron-core's optimizers ask that of parameters."""

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def with_newer_torch():
    """Reading a checkpoint's metadata, megatron-core passes torch.empty what newer versions of torch record there."""
    class Torch:
        def __getattr__(self, name):
            return getattr(torch, name)

        def empty(self, *args, strides=None, **options):
            return torch.empty(*args, **options)

    torch_strategy.torch = Torch()


def with_torch_adam():
    """DistributedOptimizer with torch's Adam, which has a step of each parameter. Loading a checkpoint, it gives all
    parameters one step, which each of them would then increment; and where it copies the states of a parameter it asks
    for the step again, which is none of them, or is the one before loading."""
    copy, load = DistributedOptimizer._set_main_param_and_optimizer_states, DistributedOptimizer.load_state_dict

    def copy_others(self, parameter, states):
        own = self._get_main_param_and_optimizer_states(parameter)
        return copy(self, parameter, {**states, **({"step": own["step"]} if "step" in own else {})})

    def load_apart(self, state):
        load(self, state)
        for own in self.optimizer.state.values():
            if torch.is_tensor(own.get("step")):
                own["step"] = own["step"].clone()

    DistributedOptimizer._set_main_param_and_optimizer_states = copy_others
    DistributedOptimizer.load_state_dict = load_apart


def prepare():
    # The router reads this name, which exists only where Transformer Engine is installed.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if distrib_optimizer.Adam is torch.optim.Adam:  # likewise
        with_torch_adam()
    with_newer_torch()
    if torch.cuda.is_available():
        return "cuda"
    # Megatron-core asks for the current GPU where it allocates, and waits for the GPU when it saves a checkpoint.
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *unused: None
    # The dispatcher "alltoall" copies row counts on a stream of its own, and makes numpy arrays of those of a GPU only.
    token_dispatcher.maybe_move_tensor_to_cpu = (
        lambda t, as_numpy=False, record_stream=False: t.numpy() if as_numpy and torch.is_tensor(t) else t)
    torch.cuda.Stream = torch.cuda.current_stream = mock.MagicMock
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    # Dropout and initialization take random states of the GPU.
    CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    return "cpu"
