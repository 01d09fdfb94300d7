"""What matrices of recurrent memories lose in bfloat16 and in 8 bits over 8,192 tokens; random models of each family.

    python benchmarks/recurrent_bits.py        # ten minutes of one core; goes on where it was stopped

Each model reads random tokens in calls of 256, which is as a conversation, and one by one. A cache rounds at the end of
each call. Logits are compared with those of float32 in the last 1,024 tokens: the relative error, and KL in nats a
token for logits that vary by about 3. Memories decay as a random model of the family does, or by half in 8,192 tokens.
Writes benchmarks/results/recurrent_bits.json.
"""

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import hf_memory
from hf_memory.mixers.gates import SigmoidDecay, SoftplusDecay, StepDecay

RESULT = Path(__file__).parent / "results" / "recurrent_bits.json"
TOKENS = 8192
LAST = 1024
CALLS = {"calls of 256": 256, "one by one": 1}
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 128**-0.5,
}
HEADS = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "Linear Transformer": (hf_memory.LinearTransformerConfig, {}),
    "GLA": (hf_memory.GatedLinearAttentionConfig, {"gate": "vector"}),
    "Mamba-2": (hf_memory.GatedLinearAttentionConfig, {"gate": "mamba2", **HEADS}),
    "Mamba-3": (hf_memory.GatedLinearAttentionConfig, {"gate": "mamba3", **HEADS}),
    "DeltaNet": (hf_memory.DeltaNetConfig, {}),
    "Gated DeltaNet": (hf_memory.DeltaNetConfig, {"gate": "scalar"}),
    "RWKV-7": (hf_memory.Rwkv7Config, {}),
    "Titans": (hf_memory.TitansConfig, {"variant": "lmm", "memory_depth": 1}),
}


def model_of(name: str, decays_slowly: bool, bits: int | None) -> PreTrainedModel:
    """A random model, the same for all bits."""
    torch.manual_seed(0)
    config, options = MODELS[name]
    cache_bits = None if bits is None else {"recurrent_states": bits}
    model = AutoModelForCausalLM.from_config(config(**SIZES, **options, cache_bits=cache_bits))
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
        for module in decays(model) if decays_slowly else ():
            module.start_open(TOKENS)
    return model.eval()


def decays(model: PreTrainedModel) -> list[Any]:
    """The modules of a model that say how slowly its memory decays."""
    return [x for x in model.modules() if isinstance(x, (SigmoidDecay, SoftplusDecay, StepDecay))]


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: Tensor, length: int) -> Tensor:
    """Those of the last tokens [LAST, vocabulary], read in calls of some length."""
    cache = DynamicCache(config=model.config)
    rows = [model(x, past_key_values=cache).logits[0] for x in tokens.split(length, 1)]
    return torch.cat(rows)[-LAST:]


def compared(found: Tensor, exact: Tensor) -> dict[str, float]:
    """The relative error of logits, and their KL in nats a token."""
    p = exact.log_softmax(-1)
    q = found.log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1).mean()
    return {"error": float((found - exact).norm() / exact.norm()), "KL": float(divergence)}


def main() -> None:
    """Measure each, and write the table after each row."""
    tokens = torch.randint(512, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    known = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
    for name in MODELS:
        for decays_slowly in (False, True) if decays(model_of(name, False, None)) else (False,):
            row = f"{name}, slow decay" if decays_slowly else name
            if row in known:
                continue
            exact = logits(model_of(name, decays_slowly, None), tokens, 256)
            found = {}
            for bits, (called, length) in product((16, 8), CALLS.items()):
                model = model_of(name, decays_slowly, bits)
                found[f"{bits} bits, {called}"] = compared(logits(model, tokens, length), exact)
            known[row] = found
            print(json.dumps({row: found}), flush=True)
            RESULT.write_text(json.dumps({"tokens": TOKENS, "rows": known}, indent=1) + "\n")


if __name__ == "__main__":
    main()
