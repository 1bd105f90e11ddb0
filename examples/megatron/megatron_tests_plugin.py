"""pytest plugin of run_megatron_tests.py: where a test of Megatron-LM asks for experts, it gets GmmExperts."""
import importlib
import json
import math
import os
import re
import sys
import types
from datetime import timedelta

import pytest
import torch
from megatron.core import optimizer, parallel_state, tensor_parallel, utils
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
from megatron.core.optimizer import distrib_optimizer
from packaging.version import Version

from megatron_here import OnCpu, prepare
from run_megatron_tests import COMPARE, EXCLUDED, EXCLUDED_ON_CPU, EXCLUDED_WITHOUT_TE

DEVICE = prepare()
TESTS = "tests.unit_tests."
HAVE_TE = importlib.util.find_spec("transformer_engine") is not None
current = {"file": ""}  # of the test that runs


def without_gpu():
    OnCpu().__enter__()
    torch.cuda.set_device = torch.cuda.empty_cache = lambda *unused: None
    torch.cuda.default_stream = torch.cuda.current_stream
    torch.cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    torch.cuda.get_device_capability = lambda *unused: (9, 0)
    for module in (tensor_parallel, tensor_parallel.random):
        module.model_parallel_cuda_manual_seed = lambda *unused, **more: None
    tensor_parallel.random._get_cuda_rng_state = tensor_parallel.random._set_cuda_rng_state = lambda *unused, **more: 0
    torch.cuda.get_device_properties = lambda *unused: types.SimpleNamespace(major=9, minor=0)
    # Checkpoints have states of the GPU's random numbers.
    torch.cuda.get_rng_state, torch.cuda.set_rng_state = torch.get_rng_state, lambda *unused: None
    tracker = tensor_parallel.random.CudaRNGStatesTracker
    tracker.get_states, tracker.set_states = lambda self: {"cpu": torch.get_rng_state()}, lambda self, states: None
    torch.cuda.is_available = lambda: True  # while tests are collected, so that they are not skipped


class FusedAdam(torch.optim.Adam):
    """For tests of checkpoints, which never step: as Transformer Engine's it takes no learning rate for an answer, and
    has no step of each parameter."""

    def __init__(self, params, lr=None, adam_w_mode=True, **options):
        super().__init__(params, lr=lr or 0.0, **options)

    def __setstate__(self, state):
        torch.optim.Optimizer.__setstate__(self, state)


def without_transformer_engine():
    """Tests ask for its version, and take its optimizer and its spec of a layer, for which others stand in."""
    utils._te_version = Version("0")

    def spec_of_layer(*args, use_te_activation_func=False, **options):
        return gpt_layer_specs.get_gpt_layer_local_spec(*args, **options)

    gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec = spec_of_layer
    gpt_layer_specs.TENorm, gpt_layer_specs.TESpecProvider = gpt_layer_specs.LNImpl, gpt_layer_specs.LocalSpecProvider
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    from megatron.training import arguments
    config_from_args = arguments.core_transformer_config_from_args

    def config_without_fusions(args, *more, **options):
        args.no_persist_layer_norm = True
        args.apply_rope_fusion = args.masked_softmax_fusion = args.gradient_accumulation_fusion = False
        return config_from_args(args, *more, **options)

    arguments.core_transformer_config_from_args = config_without_fusions


def substitute():
    """GmmExperts instead of GroupedMLP, and instead of SequentialMLP but in tests that compare the two."""
    from gmm_experts import GmmExperts, use_gmm_experts
    from megatron.core.models.gpt import moe_module_specs
    from megatron.core.transformer.moe import experts
    original = moe_module_specs.get_moe_module_spec_for_backend

    def spec_with_gmm(*args, **options):
        spec = original(*args, **options)
        if options.get("moe_grouped_gemm") or current["file"] not in COMPARE:
            use_gmm_experts(spec)
        return spec

    class GroupedMLP(GmmExperts):
        def __init__(self, num_local_experts, config, pg_collection=None):
            super().__init__(num_local_experts, config, None, pg_collection)

    for module in (gpt_layer_specs, moe_module_specs):
        module.get_moe_module_spec_for_backend = spec_with_gmm
    experts.GroupedMLP = GroupedMLP


def import_with_stub():
    """test_moe_experts.py asks Transformer Engine whether FP8 is there. The stub that says no is taken away again."""
    importlib.import_module(TESTS + "dist_checkpointing")
    importlib.import_module(TESTS + "test_utilities")
    importlib.import_module("megatron.core.dist_checkpointing.strategies.fully_parallel")
    names = ["transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.fp8"]
    sys.modules.update({name: types.ModuleType(name) for name in names})
    sys.modules[names[2]].check_fp8_support = lambda: (False, "no Transformer Engine")
    sys.modules[names[2]].fp8_autocast = None
    importlib.import_module(TESTS + "dist_checkpointing.models.test_moe_experts")
    for name in names:
        del sys.modules[name]


def end_groups():
    """Megatron-core forgets its process groups, and each has threads: after a file of tests there are thousands."""
    forget = parallel_state.destroy_model_parallel

    def destroy_model_parallel():
        forget()
        if torch.distributed.is_initialized():
            for group in list(torch.distributed.distributed_c10d._world.pg_map):
                if group is not torch.distributed.group.WORLD:
                    torch.distributed.destroy_process_group(group)

    parallel_state.destroy_model_parallel = destroy_model_parallel


def limit_ranks():
    """A test that needs more ranks than there are is skipped. What a rank waits for takes a minute at most."""
    initialize, init_process_group = parallel_state.initialize_model_parallel, torch.distributed.init_process_group

    def initialize_or_skip(tp=1, pp=1, *args, **options):
        tp, pp = options.get("tensor_model_parallel_size", tp), options.get("pipeline_model_parallel_size", pp)
        ep, etp = options.get("expert_model_parallel_size", 1), options.get("expert_tensor_parallel_size")
        copies = pp * options.get("num_distributed_optimizer_instances", 1)
        need = copies * math.lcm(tp * options.get("context_parallel_size", 1), ep * (etp or tp))
        if torch.distributed.get_world_size() % need:
            torch.distributed.barrier()  # the first to leave the test deletes its folders
            pytest.skip(f"needs {need} ranks")
        options = {k: v for k, v in options.items()
                   if k not in ("tensor_model_parallel_size", "pipeline_model_parallel_size")}
        initialize(tp, pp, *args, **options)
        if DEVICE == "cuda":  # tests of TE layers, which draw weights otherwise, may not do so
            tensor_parallel.model_parallel_cuda_manual_seed(1)

    def init(backend=None, **options):
        backend = "gloo" if DEVICE == "cpu" else backend
        return init_process_group(backend, **{**options, "timeout": timedelta(seconds=60)})

    parallel_state.initialize_model_parallel, torch.distributed.init_process_group = initialize_or_skip, init


def set_up():
    # conftest.py downloads data, which these tests do not read.
    download = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    download.download_and_extract_asset = lambda **unused: None
    sys.modules[download.__name__] = download
    if not HAVE_TE:
        without_transformer_engine()
    substitute()
    limit_ranks()
    end_groups()
    if DEVICE == "cpu":
        without_gpu()
    if not HAVE_TE:
        import_with_stub()


set_up()  # pytest imports this file before any conftest.py


def reason_to_exclude(nodeid):
    excluded = EXCLUDED + (EXCLUDED_ON_CPU if DEVICE == "cpu" else []) + ([] if HAVE_TE else EXCLUDED_WITHOUT_TE)
    for pattern, reason in excluded:
        if re.search(pattern, nodeid):
            return reason
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if "multi_token" in item.nodeid and not HAVE_TE:  # what is not excluded runs with what stands in for it
            item.own_markers = [mark for mark in item.own_markers if mark.name != "skipif"]
        reason = reason_to_exclude(item.nodeid)
        if reason:
            item.add_marker(pytest.mark.skip("excluded: " + reason))


def pytest_collection_finish(session):
    container = getattr(sys.modules.get(TESTS + "transformer.moe.test_token_dispatcher"), "MoEModelTestContainer", None)
    if container:  # That of a skipped test is deleted later, and would destroy the process groups of another test.
        container.__del__ = lambda self: None
    if DEVICE == "cpu":
        torch.cuda.is_available = lambda: False


def pytest_runtest_setup(item):
    """A test that is skipped midway leaves a calculator, and its ranks one after another."""
    unset_num_microbatches_calculator()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def pytest_runtest_logstart(nodeid, location):
    current["file"] = nodeid.split("::")[0].rsplit("/", 1)[-1]


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")[-300:]
        with open(os.environ["GMM_TESTS_REPORT"], "a") as f:
            f.write(json.dumps([report.nodeid, report.outcome, reason]) + "\n")
