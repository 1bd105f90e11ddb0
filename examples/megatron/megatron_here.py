"""Lets megatron-core 0.16.1 run where it cannot by itself: without Transformer Engine, and on a machine without a GPU.
For tests and examples. prepare() is called before layers are built, and returns the device, "cuda" or "cpu".
"""
import contextlib
from unittest import mock

import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.moe import moe_utils, token_dispatcher


def prepare():
    # The router reads this name, which exists only where Transformer Engine is installed.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
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
