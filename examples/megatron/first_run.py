"""Trains a small GPT of megatron-core twice, in one process, on the CPU or a GPU: with SequentialMLP, and from the same
weights with GmmExperts.

    python3 examples/megatron/first_run.py [STEPS]

The text is this file. Fails unless the losses of both runs agree and fall: in the first steps to rounding, later to 1%,
since a token near a tie between two experts may then be routed otherwise.
"""
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from gmm_experts import GmmExperts, use_gmm_experts  # noqa: E402
from megatron_here import prepare  # noqa: E402

DEVICE = prepare()
LENGTH, EXPERTS, FIRST = 64, 8, 5


def model(gmm):
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_moe_experts=EXPERTS, moe_router_topk=2,
        moe_ffn_hidden_size=64, ffn_hidden_size=64, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, bias_activation_fusion=False, moe_token_dispatcher_type="allgather",
        attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=DEVICE == "cpu", params_dtype=torch.float32)
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)  # False: SequentialMLP
    if gmm:
        assert use_gmm_experts(spec) == 1  # the spec of a layer, of which the model has two
    return GPTModel(config, spec, vocab_size=256, max_sequence_length=LENGTH).to(DEVICE)


@torch.no_grad()
def copy_weights(to, sequential):
    for name, module in to.named_modules():
        if isinstance(module, GmmExperts):
            experts = sequential.get_submodule(name).local_experts
            module.weight1.copy_(torch.stack([e.linear_fc1.weight for e in experts]))
            module.weight2.copy_(torch.stack([e.linear_fc2.weight for e in experts]))
    others = {name: p for name, p in sequential.named_parameters() if ".experts." not in name}
    for name, p in to.named_parameters():
        if ".experts." not in name:
            p.copy_(others.pop(name))
    assert not others


def train(gpt, steps):
    torch.manual_seed(1)
    text = torch.tensor(list(Path(__file__).read_bytes()), device=DEVICE)
    optimizer = torch.optim.Adam(gpt.parameters(), lr=1e-2)
    positions = torch.arange(LENGTH, device=DEVICE).expand(16, LENGTH)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=DEVICE), 1)
    losses = []
    for step in range(steps):
        at = torch.randint(0, len(text) - LENGTH - 1, (16, 1)).to(DEVICE) + positions
        loss = gpt(text[at], positions, mask, labels=text[at + 1]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", rank=0, world_size=1,
                                init_method=f"file://{store.name}.rendezvous")
        parallel_state.initialize_model_parallel()
        if DEVICE == "cuda":
            tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        models = [model(gmm=False), model(gmm=True)]
        copy_weights(models[1], models[0])
        count = int(sys.argv[1]) if len(sys.argv) > 1 else 30
        sequential, gmm = (train(m, count) for m in models)
        for i in range(0, count, 10):
            print(f"step {i:3d}  SequentialMLP {sequential[i]:.4f}  GmmExperts {gmm[i]:.4f}", flush=True)
        dist.destroy_process_group()
    apart = [abs(a / b - 1) for a, b in zip(gmm, sequential)]
    print(f"largest relative difference of a loss: {max(apart[:FIRST]):.1e} in {FIRST} steps, {max(apart):.1e} in all")
    agree = max(apart[:FIRST]) < 1e-4 and max(apart) < 1e-2
    sys.exit(0 if agree and gmm[-1] < 0.7 * gmm[0] else "the losses differ, or do not fall")
