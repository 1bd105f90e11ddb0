"""Runs Megatron-LM's own tests of experts with GmmExperts in place of the experts that they build:

    python3 examples/megatron/run_megatron_tests.py /path/to/Megatron-LM [--ranks N] [--limit SECONDS] [FILE...]

The checkout is of the tag core_v0.16.1. Each rank has a GPU; on a machine without one, ranks run on the CPU with gloo.
A FILE is one of FILES. Prints a table of results, and one of the tests that were skipped or excluded, with the reasons.
Fails where a test fails or gives no result.
"""
import argparse
import collections
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = "tests/unit_tests/"
FILES = ["transformer/moe/test_moe_layer.py", "transformer/moe/test_token_dispatcher.py",
         "transformer/moe/test_a2a_token_dispatcher.py", "transformer/moe/test_grouped_mlp.py",
         "transformer/moe/test_sequential_mlp.py", "transformer/moe/test_shared_experts.py",
         "transformer/moe/test_moe_layer_discrepancy.py", "transformer/moe/test_routers.py",
         "dist_checkpointing/models/test_moe_experts.py", "dist_checkpointing/test_optimizer.py",
         "distributed/test_grad_sync_with_expert_parallel.py", "pipeline_parallel/test_pipeline_layout.py",
         "transformer/test_multi_token_prediction.py", "test_utils.py"]
COMPARE = ("test_grouped_mlp.py", "test_moe_experts.py")  # there SequentialMLP stays, for GmmExperts to equal
# A pattern in a test's name, and why the test is not run. TE is Transformer Engine.
EXCLUDED = [
    ("TestParallelGroupedMLP::test_constructor", "asserts the shape of GroupedMLP's weights"),
    ("TestParallelGroupedMLP::test_gpu_forward_with_no_tokens_allocated", "calls the package grouped_gemm itself"),
    ("TestTEParallelSequentialMLP", "compares SequentialMLP with SequentialMLP on TE"),
    (r"test_grad_sync\[\d-2-1-", "expects gradients that NVIDIA/Megatron-LM#5916 mends: see test_parallel.py"),
    (r"/test_optimizer.py::(?!.*(test_chained_optimizer|True-False-True))", "builds no experts"),
    (r"/test_utils.py::(?!test_param_norm_moe)", "builds no experts"),
    (r"test_multi_token_prediction.py::.*(::test_constructor|LossLoggingHelper|::test_roll)", "builds no experts"),
]
EXCLUDED_WITHOUT_TE = [
    (r"test_moe_layer_dispatcher_discrepancy\[[248]-|(ag|a2a)_dispatcher_discrepancy\[(2-2|2-4|4-2)|"
     r"test_chained_optimizer_resharding\[src_tp_pp_exp[013]",
     "sequence parallelism of a whole layer: the LayerNorm that stands in for TE's refuses it"),
    (r"TestMultiTokenPrediction::(test_fp8_support|test_packed|.*\[(?!1-1))",
     "FP8 models, packed sequences, context and sequence parallelism need TE"),
]
EXCLUDED_ON_CPU = [
    ("test_moe_layer_discrepancy", "4096 rows of 4096 features are too much for a CPU"),
    ("test_sequential_mlp.py::TestParallelSequentialMLP::test_gpu_forward", "asserts that the output is on a GPU"),
    ("test_shared_experts.py", "asserts streams and outputs of a GPU"),
]
EXCLUDED_FILES = {
    "a2a_overlap/test_schedule_layer_1f1b.py, test_schedule_chunk_1f1b.py":
        "4 ranks, streams of a GPU, and TE's attention for MLA",
    "a2a_overlap/test_cuda_graphed_schedule_chunk_1f1b.py, transformer/test_cuda_graphs.py": "CUDA graphs of TE layers",
    "dist_checkpointing/models/test_mamba.py, models/test_mamba_moe_model.py": "need the package mamba_ssm",
    "dist_checkpointing/test_layer_wise_optimizer.py": "needs the package emerging_optimizers",
    "dist_checkpointing/test_pipeline_parallel_layout.py": "experts have biases, which GmmExperts refuses",
    "distributed/megatron_fsdp/test_mcore_fully_sharded_data_parallel.py": "TE's router, and names of TE's experts",
    "inference/engines/test_dynamic_engine.py, test_static_engine.py": "need TE and the package flash_attn",
    "models/test_gpt_model.py": "experts have TE's activation functions, which GmmExperts refuses",
    "models/test_gpt_model_quantization.py": "recipes of TE modules by name",
    "pipeline_parallel/test_fine_grained_activation_offloading.py": "offloads what TEGroupedMLP saves",
    "post_training/test_modelopt_module_spec.py": "ModelOpt's spec has experts of its own",
    "resharding/test_model_swap.py": "resharding knows the parameters of TEGroupedMLP alone",
    "transformer/moe/test_aux_loss.py, test_router_replay.py": "run routers alone",
    "transformer/moe/test_multihot_indices_converter.py": "runs a kernel for indices alone",
    "transformer/moe/test_upcycling.py": "upcycling knows SequentialMLP and TEGroupedMLP alone",
    "transformer/test_submodule_callables.py": "8 ranks, and TE's attention for MLA",
    "test_checkpointing.py": "builds no experts",
}


def environment(checkout, rank, ranks, port, report):
    paths = [str(HERE), str(checkout), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "GMM_TESTS_REPORT": report,
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port), "NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONWARNINGS": "ignore"}


def run_file(checkout, name, ranks, limit, folder):
    """Runs one file's tests on all ranks; returns {test: (outcome, reason)}."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    stem = Path(name).stem
    reports = [f"{folder}/{stem}-{rank}.jsonl" for rank in range(ranks)]
    command = [sys.executable, "-m", "pytest", "-p", "megatron_tests_plugin", "-p", "no:cacheprovider", "-o",
               "addopts=", "-q", "--tb=short", FOLDER + name]
    started = []
    for rank in range(ranks):
        with open(f"{folder}/{stem}-{rank}.log", "w") as log:
            started.append(subprocess.Popen(
                command, cwd=checkout, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**environment(checkout, rank, ranks, port, reports[rank]), "TMPDIR": str(folder)}))
    deadline = time.monotonic() + limit
    while any(p.poll() is None for p in started) and time.monotonic() < deadline:
        time.sleep(0.2)
        if any(p.poll() not in (None, 0, 1) for p in started):
            deadline = min(deadline, time.monotonic() + 10)  # a rank has died: the others wait for it in vain
    for p in started:
        if p.poll() is None:
            os.killpg(p.pid, signal.SIGKILL)
            p.wait()
    results = {}
    for report in reports:
        for line in open(report) if os.path.exists(report) else ():
            test, outcome, reason = json.loads(line)
            if results.get(test, ("passed",))[0] == "passed" or outcome == "failed":
                results[test] = outcome, reason
    if not results or any(p.returncode not in (0, 1) for p in started):
        results[f"{name} as a whole"] = "failed", f"exit statuses {[p.returncode for p in started]}"
    if any(outcome == "failed" for outcome, _ in results.values()):
        print("".join(f"--- rank {r}\n" + Path(f"{folder}/{stem}-{r}.log").read_text()[-6000:] for r in range(ranks)))
    return results


def print_tables(results, ranks):
    print(f"| tests, {ranks} ranks | passed | failed | skipped |\n|---|---|---|---|")
    for name, tests in results.items():
        n = collections.Counter(outcome for outcome, _ in tests.values())
        print(f"| {name} | {n['passed']} | {n['failed']} | {n['skipped']} |")
    print("\n| not run | tests | reason |\n|---|---|---|")
    skipped = collections.Counter()
    for name, tests in results.items():
        for test, (outcome, reason) in tests.items():
            if outcome == "skipped":
                function = re.sub(r"\[.*", "", test.split("::", 1)[1])
                skipped[f"{Path(name).name}::{function}", reason.removeprefix("Skipped: ")] += 1
    for (test, reason), n in skipped.items():
        print(f"| {test} | {n} | {reason} |")
    for name, reason in EXCLUDED_FILES.items():
        print(f"| {name} | all | {reason} |")
    for tests in results.values():
        for test, (outcome, reason) in tests.items():
            if outcome == "failed":
                print(f"FAILED {test}: {reason.strip().splitlines()[-1] if reason.strip() else ''}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one file")
    options = parser.parse_intermixed_args()
    chosen = [f for f in FILES if not options.files or any(f.endswith(name) for name in options.files)]
    results = {}
    for name in chosen:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            results[name] = run_file(options.checkout.resolve(), name, options.ranks, options.limit, folder)
        n = collections.Counter(outcome for outcome, _ in results[name].values())
        print(f"{name}: {dict(n)}, {time.monotonic() - start:.0f} s", flush=True)
    print_tables(results, options.ranks)
    return any(outcome == "failed" for tests in results.values() for outcome, _ in tests.values())


if __name__ == "__main__":
    sys.exit(main())
