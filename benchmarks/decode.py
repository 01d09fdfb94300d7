"""What a token costs: by length of the context, and eager, compiled, with a static cache, and with prompt lookup.

    python benchmarks/decode.py            # about six minutes on two cores

Every model has the same width, depth and vocabulary. Contexts are not read but set: a memory gets a count of tokens,
attention random keys and values of that length. What a token costs does not depend on the numbers.
Medians of single tokens; on CUDA in bfloat16. Writes benchmarks/results/decode.{json,png}.
"""

import argparse
import json
import os
import platform
import statistics
import time
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import hf_memory
from hf_memory.cache import MemoryLayer, state_bytes
from ops import shares_of

RESULTS = Path(__file__).parent / "results"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
TOKEN = torch.ones(1, 1, dtype=torch.long, device=DEVICE)
CONTEXTS = (1024, 4096, 16384, 32768)
MEMORIES = {
    "linear (elu)": hf_memory.LinearTransformerConfig,
    "GLA": hf_memory.GatedLinearAttentionConfig,
    "DeltaNet": hf_memory.DeltaNetConfig,
    "Gated DeltaNet": partial(hf_memory.DeltaNetConfig, gate="scalar"),
}
MODELS = {
    **MEMORIES,
    "DeltaFormer": hf_memory.DeltaFormerConfig,
    "Titans LMM": partial(hf_memory.TitansConfig, variant="lmm"),
    "Titans MAG": partial(hf_memory.TitansConfig, variant="mag", sliding_window=512),
}


def make(name: str, sizes: dict):
    """A random model of that name in MODELS, or a Llama."""
    torch.manual_seed(0)
    if name == "Llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval().to(DEVICE, DTYPE)
    config = MODELS[name](**sizes)
    causal_lm = next(f.causal_lm for f in hf_memory.FAMILIES if f.config is type(config))
    return causal_lm(config).eval().to(DEVICE, DTYPE)


def filled_cache(model, tokens: int) -> DynamicCache:
    """As if the model had read so many tokens."""
    cache = DynamicCache(config=model.config)
    model(TOKEN.expand(1, 2), past_key_values=cache)
    for layer in cache.layers:
        if isinstance(layer, MemoryLayer):
            layer.seen_tokens = tokens
        else:
            B, H, _, D = layer.keys.shape
            layer.keys, layer.values = torch.randn(2, B, H, tokens, D, device=DEVICE, dtype=DTYPE)
    return cache


def milliseconds_a_token(step, repeats: int = 24) -> float:
    """Median, after four to warm up."""
    taken = []
    for _ in range(repeats + 4):
        start = time.perf_counter()
        step()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken[4:])


def by_context(names, sizes) -> list[dict]:
    """What a token costs, and the bytes of the cache, for each model and length of the context."""
    rows = []
    for name in names:
        model = make(name, sizes)
        for context in CONTEXTS:
            cache = filled_cache(model, context)
            taken = milliseconds_a_token(partial(model, TOKEN, past_key_values=cache))
            rows.append({"model": name, "context": context, "ms": taken, "cache_bytes": state_bytes(cache)})
            megabytes = rows[-1]["cache_bytes"] / 1e6
            print(f"{name:16} context {context:6}  {taken:7.2f} ms/token  {megabytes:9.2f} MB", flush=True)
    return rows


def by_way(name: str, sizes: dict) -> list[dict]:
    """Tokens a second in each way of decoding that a model has."""
    model = make(name, sizes)

    def static():
        cache = StaticCache(config=model.config, max_cache_len=256)
        model(TOKEN.expand(1, 2), past_key_values=cache)
        return cache

    compiled = torch.compile(model.forward, fullgraph=True, mode="reduce-overhead")
    ways = {"eager, dynamic cache": (model, filled_cache(model, 2)), "eager, static cache": (model, static())}
    ways["compiled, static cache"] = (compiled, static())
    rows = []
    for way, (step, cache) in ways.items():
        taken = milliseconds_a_token(partial(step, TOKEN, past_key_values=cache))
        rows.append({"model": name, "way": way, "tokens_per_second": 1e3 / taken})
    for way, options in {"greedy": {}, "prompt lookup": {"prompt_lookup_num_tokens": 8}}.items():
        rows.append({"model": name, "way": f"generate, {way}", "tokens_per_second": generated(model, options)})
    for row in rows:
        print(f"{row['model']:16} {row['way']:24} {row['tokens_per_second']:8.1f} tokens/s", flush=True)
    return rows


def generated(model, options: dict, new: int = 64) -> float:
    """On text that repeats itself: an untrained model ends in a circle, which is read to it first."""
    options = {"do_sample": False, "pad_token_id": 0, **options}
    text = model.generate(TOKEN.expand(1, 4), max_new_tokens=new, do_sample=False, pad_token_id=0)
    start = time.perf_counter()
    model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=new, **options)
    return new / (time.perf_counter() - start)


def shares(name: str, sizes: dict) -> dict[str, float]:
    """Where the time of an eager token goes: the part of each PyTorch operation. Products are reading of weights."""
    model = make(name, sizes)
    step = partial(model, TOKEN, past_key_values=filled_cache(model, 2))
    step()
    found = shares_of(lambda: [step() for _ in range(10)], DEVICE.type, largest=6)
    print(f"{name:16} {found}", flush=True)
    return found


def draw(rows: list[dict], file: Path) -> None:
    """Milliseconds a token and bytes of the cache over the context."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        style = {"marker": "o", "label": name, "linestyle": "--" if name == "Llama" else "-"}
        axes[0].plot([r["context"] for r in mine], [r["ms"] for r in mine], **style)
        axes[1].plot([r["context"] for r in mine], [r["cache_bytes"] / 1e6 for r in mine], **style)
    for axis, label in zip(axes, ("milliseconds a token", "cache, MB")):
        axis.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel=label)
        axis.set_xticks(CONTEXTS, CONTEXTS)
    axes[0].legend()
    figure.savefig(file, dpi=120)


@torch.no_grad()
def main() -> None:
    """Measure, print, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    arguments = parser.parse_args()
    sizes = {
        "vocab_size": 8192,
        "hidden_size": arguments.width,
        "intermediate_size": 2816 * arguments.width // 1024,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.width // 64,
        "max_position_embeddings": 65536,
    }
    contexts = by_context(("Llama", *MEMORIES), sizes)
    ways = [row for name in ("linear (elu)", "Gated DeltaNet") for row in by_way(name, sizes)]
    profiles = {name: shares(name, sizes) for name in ("linear (elu)", "Gated DeltaNet")}
    machine = {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(DTYPE).removeprefix("torch."),
        "batch": 1,
    }
    RESULTS.mkdir(exist_ok=True)
    results = {**machine, **sizes, "by_context": contexts, "by_way": ways, "profile": profiles}
    (RESULTS / "decode.json").write_text(json.dumps(results, indent=1))
    draw(contexts, RESULTS / "decode.png")


if __name__ == "__main__":
    main()
