"""Hybrids of transformers with `use_memory_ops` beside transformers' own PyTorch code, in turn in one process.

    python benchmarks/native.py                     # about three minutes on one core
    python benchmarks/native.py --tokens 4096

Random models in float32, three layers of linear attention to one of attention, one thread. The time is that of the
process, which other work on the machine disturbs least; a figure is the median over rounds, and a ratio the median of
the ratios within rounds. Reading is without gradients; a step of training is a forward and a backward pass; a token
follows the prompt. Both models have the same weights, and the last column is the largest difference of their logits.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

import hf_memory
from hf_memory.cache_argument import CACHE
from ops import cpu_name

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64}
MODELS = {
    "Qwen3-Next": ("Qwen3Next", "Qwen3NextConfig", {**HEADS, "num_experts": 0}),
    "Qwen3.5": ("Qwen3_5", "Qwen3_5TextConfig", HEADS),
    "OLMo-Hybrid": ("OlmoHybrid", "OlmoHybridConfig", {**HEADS, "num_key_value_heads": 8}),
    "Kimi Linear": (
        "KimiLinear",
        "KimiLinearConfig",
        {
            **LATENT,
            "num_key_value_heads": 8,
            "linear_num_heads": 8,
            "linear_head_dim": 64,
            "mlp_layer_types": ["dense"] * 4,
        },
    ),
}


def make(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A random model as transformers has it, and the same with our ops."""
    family, config, options = MODELS[name]
    torch.manual_seed(0)
    chosen = getattr(transformers, config)(**{**SIZES, **options})
    theirs = getattr(transformers, f"{family}ForCausalLM")(chosen).eval()
    return theirs, hf_memory.use_memory_ops(copy.deepcopy(theirs))


def calls_of(model: PreTrainedModel, tokens: torch.Tensor) -> dict[str, Callable[[], None]]:
    """What is timed, by name, for tokens [1, T]."""
    cache = DynamicCache(config=model.config)

    def read() -> None:
        with torch.no_grad():
            model(tokens, use_cache=False, logits_to_keep=1)

    def train() -> None:
        model(tokens, use_cache=False).logits.square().mean().backward()

    def one_token() -> None:
        with torch.no_grad():
            for _ in range(8):
                model(tokens[:, :1], **{CACHE: cache}, use_cache=True)

    with torch.no_grad():
        model(tokens, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    return {"reading": read, "training": train, "8 tokens": one_token}


def seconds(call: Callable[[], None]) -> float:
    """Processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(name: str, length: int, rounds: int) -> None:
    """Print a row of the table for each call."""
    tokens = torch.randint(3, SIZES["vocab_size"], (1, length))
    models = make(name)
    theirs, ours = (calls_of(model, tokens) for model in models)
    with torch.no_grad():
        expected, found = (model(tokens, use_cache=False).logits for model in models)
    error = (found - expected).abs().max() / expected.abs().max()
    for call in theirs:
        pairs = [(seconds(theirs[call]), seconds(ours[call])) for _ in range(rounds + 1)][1:]
        before, after = (statistics.median(times) for times in zip(*pairs))
        ratio = statistics.median(b / a for a, b in pairs)
        print(
            f"| {name} | {call} | {before:.3f} | {after:.3f} | {ratio:.2f} | {error:.0e} |",
            flush=True,
        )


def main() -> None:
    """Measure all models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{cpu_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{args.tokens} tokens, {args.rounds} rounds, {SIZES} {HEADS}\n")
    print("| model | | transformers, s | ours, s | ratio | difference |\n|---|---|---|---|---|---|")
    for name in MODELS:
        measure(name, args.tokens, args.rounds)


if __name__ == "__main__":
    main()
