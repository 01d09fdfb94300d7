"""What a token costs, and reading a prompt: students of a Transformer against it, all in turn in one process.

    python benchmarks/decode.py                     # about ten minutes on one core
    python benchmarks/decode.py --label before      # another version of the code: kept beside what is there
    python benchmarks/decode.py --label windows     # students with windows, also after 8,192 tokens

Random weights in the shape of SmolLM2-135M; students as `make_student` makes them. On the CPU one thread and its own
time, which other work on the machine disturbs least; on CUDA bfloat16 and the clock. A turn is three tokens, of which
the first, which finds another model's weights in the caches, does not count. Ratios to the Transformer are taken within
a round of turns; the table has their medians. Contexts are not read but set: a memory gets a count of tokens, attention
random keys and values of that length. What a token costs does not depend on the numbers. Beside each ratio stands that
of the bytes that a token must move, which bounds it as far as they come from memory and not from caches.

Writes benchmarks/results/decode.{json,png}, on CUDA decode_cuda.{json,png}, with the share of time of each operation of
PyTorch.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_memory
from hf_memory.cache import MemoryLayer, state_bytes
from hf_memory.cache_argument import CACHE
from hf_memory.conversion import make_student
from ops import shares_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RESULTS = (
    Path(__file__).parent / "results" / ("decode" if DEVICE.type == "cpu" else "decode_cuda")
)  # and a suffix
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
CONTEXTS = (16, 1024)
BATCHES = (1, 8)
PROMPT = 1024
LONG = (1024, 4096, 16384, 32768)
NAMED = {
    "linear": "Linear Transformer",
    "hybrid": "attention in every fourth layer",
    "window, heads": "windows, 1/10 of heads full",
}
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 65536,
}
STUDENTS = {
    "linear": {"to": "linear"},
    "GLA": {"to": "gated"},
    "DeltaNet": {"to": "deltanet"},
    "Gated DeltaNet": {"to": "deltanet", "gate": "scalar"},
    "hybrid": {
        "to": "deltanet",
        "gate": "scalar",
        "keep": tuple(range(3, SHAPE["num_hidden_layers"], 4)),
    },
    "window, heads": {  # as convert --keep heads:1/10 makes it
        "to": "deltanet",
        "sliding_window": 64,
        "num_sink_tokens": 4,
        "full_attention_heads": [
            [0] if i % 10 < 3 else [] for i in range(SHAPE["num_hidden_layers"])
        ],
    },
}
HEADS = {  # as convert --keep heads:1/11 makes it
    "sliding_window": 192,
    "num_sink_tokens": 4,
    "full_attention_heads": [
        [i % 3] if i % 4 == 1 else [] for i in range(SHAPE["num_hidden_layers"])
    ],
}
SERVED = {"sliding_window": 128, "num_sink_tokens": 0, "attention_sinks": True}
WINDOWS = {
    "1/11 of heads": HEADS,
    "slots": {"to": "deltanet", **HEADS},
    "kept": {
        **HEADS,
        "sliding_window": 64,
        "num_kept_tokens": 158,
    },  # as many bytes as a window of 259
    "1/11 of heads, virtual token": {**HEADS, "num_sink_tokens": 0, "virtual_token": True},
    "1/4 of layers, sinks": {**SERVED, "keep": tuple(range(1, 28, 4))},
}
MODELS = {  # of other benchmarks
    "linear (elu)": hf_memory.LinearTransformerConfig,
    "GLA": hf_memory.GatedLinearAttentionConfig,
    "DeltaNet": hf_memory.DeltaNetConfig,
    "Gated DeltaNet": partial(hf_memory.DeltaNetConfig, gate="scalar"),
    "DeltaFormer": hf_memory.DeltaFormerConfig,
    "Titans LMM": partial(hf_memory.TitansConfig, variant="lmm"),
    "Titans MAG": partial(hf_memory.TitansConfig, variant="mag", sliding_window=512),
}


def make(name: str, sizes: dict) -> PreTrainedModel:
    """A random model of that name in MODELS, or a Llama."""
    torch.manual_seed(0)
    if name == "Llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval().to(DEVICE, DTYPE)
    config = MODELS[name](**sizes)
    causal_lm = next(f.causal_lm for f in hf_memory.FAMILIES if f.config is type(config))
    return causal_lm(config).eval().to(DEVICE, DTYPE)


def make_all(students: dict[str, dict]) -> dict[str, PreTrainedModel]:
    """The Transformer and its students."""
    teacher = make("Llama", SHAPE)
    return {"Llama": teacher} | {
        name: make_student(teacher, **options) for name, options in students.items()
    }


def filled_cache(model: PreTrainedModel, tokens: int, batch: int) -> DynamicCache:
    """As if the model had read so many tokens."""
    cache = DynamicCache(config=model.config)
    model(torch.ones(batch, 2, dtype=torch.long, device=DEVICE), **{CACHE: cache})
    for layer in cache.layers:
        if isinstance(layer, MemoryLayer):
            growing = {
                name: x for name, x in layer.states.items() if layer.spec[name].growth == "token"
            }
            states = layer.states | {
                n: x[:, :1].repeat_interleave(tokens, 1) for n, x in growing.items()
            }
            counts = {
                name: torch.full_like(x, tokens)
                for name, x in states.items()
                if name.endswith("tokens_read")
            }
            layer.fill(states | counts, tokens)
        else:
            B, H, _, D = layer.keys.shape
            layer.keys, layer.values = torch.randn(2, B, H, tokens, D, device=DEVICE, dtype=DTYPE)
    return cache


def bytes_moved(model: PreTrainedModel, cache: DynamicCache) -> int:
    """What a token cannot do without: weights and the past are read, and memories written."""
    memories = sum(
        x.nbytes
        for layer in cache.layers
        if isinstance(layer, MemoryLayer)
        for x in layer.states.values()
    )
    return sum(p.nbytes for p in model.parameters()) + state_bytes(cache) + memories


def seconds(call: Callable) -> float:
    """The seconds of this thread alone on the CPU; by the clock, until all is done, on CUDA."""
    clock = time.thread_time if DEVICE.type == "cpu" else time.perf_counter
    start = clock()
    call()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def in_turn(calls: dict[str, Callable], rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a call, and its ratio to that of the Llama: medians over rounds, the first left out."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            taken[name].append(
                statistics.median([seconds(call) for _ in range(tokens)][tokens > 1 :])
            )
    return {
        name: {
            "ms": 1e3 * statistics.median(mine[1:]),
            "ratio": statistics.median(x / y for x, y in zip(mine[1:], taken["Llama"][1:])),
        }
        for name, mine in taken.items()
    }


def read(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """A prompt, into an empty cache."""
    model(tokens, **{CACHE: DynamicCache(config=model.config)}, logits_to_keep=1)


def table(
    models: dict[str, PreTrainedModel],
    rounds: int,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    prompts: Sequence[int] = (PROMPT,),
) -> dict[str, dict]:
    """What a token costs by batch and context, and prompts."""
    found = {}
    for batch in batches:
        for context in contexts:
            token = torch.ones(batch, 1, dtype=torch.long, device=DEVICE)
            caches = {name: filled_cache(model, context, batch) for name, model in models.items()}
            moved = {name: bytes_moved(model, caches[name]) for name, model in models.items()}
            steps = {
                name: partial(model, token, **{CACHE: caches[name]})
                for name, model in models.items()
            }
            row = in_turn(steps, rounds, 3)
            for name, of_model in row.items():
                of_model["bytes_ratio"] = moved[name] / moved["Llama"]
            found[f"token, batch {batch}, context {context}"] = row
            show(*list(found.items())[-1])
    for length in prompts:
        prompt = torch.randint(SHAPE["vocab_size"], (1, length), device=DEVICE)
        found[f"prompt of {length}"] = in_turn(
            {n: partial(read, m, prompt) for n, m in models.items()}, rounds // 3, 1
        )
        show(*list(found.items())[-1])
    return found


def show(what: str, row: dict[str, dict[str, float]]) -> None:
    """A line of the table."""
    least = {
        name: f", bytes {x['bytes_ratio']:.2f}" if "bytes_ratio" in x else ""
        for name, x in row.items()
    }
    line = "".join(f"  {n} {x['ms']:.1f} ms ({x['ratio']:.2f}{least[n]})" for n, x in row.items())
    print(f"{what:30}{line}", flush=True)


@torch.no_grad()
def by_context(
    models: dict[str, PreTrainedModel], rounds: int, contexts: Sequence[int] = LONG
) -> dict[int, dict]:
    """What a token costs and what the cache holds at long contexts."""
    token = torch.ones(1, 1, dtype=torch.long, device=DEVICE)
    found = {}
    for context in contexts:
        caches = {name: filled_cache(model, context, 1) for name, model in models.items()}
        steps = {n: partial(m, token, **{CACHE: caches[n]}) for n, m in models.items()}
        found[context] = in_turn(steps, rounds, 3)
        for name, cache in caches.items():
            found[context][name]["cache_bytes"] = state_bytes(cache)
        show(f"context {context}", found[context])
    return found


def shares(model: PreTrainedModel) -> dict[str, float]:
    """Where the time of a token goes: the part of each PyTorch operation. Products are reading of weights."""
    token = torch.ones(1, 1, dtype=torch.long, device=DEVICE)
    step = partial(model, token, **{CACHE: filled_cache(model, 16, 1)})
    step()
    return shares_of(lambda: [step() for _ in range(5)], DEVICE.type, largest=10)


def draw(rows: dict[int, dict], file: Path) -> None:
    """Milliseconds a token and bytes of the cache over the context."""
    plt.style.use("tableau-colorblind10")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name in next(iter(rows.values())):
        style = {"marker": "o", "label": NAMED.get(name, name)}
        style |= {"linestyle": "--", "color": "black"} if name == "Llama" else {}
        axes[0].plot(LONG, [rows[n][name]["ms"] for n in LONG], **style)
        axes[1].plot(LONG, [rows[n][name]["cache_bytes"] / 1e6 for n in LONG], **style)
    axes[0].set(
        title="time for the next token", ylabel="milliseconds, one CPU core", ylim=(0, None)
    )
    axes[1].set(title="size of the cache", yscale="log")
    axes[1].set_yticks([5, 50, 500], ["5 MB", "50 MB", "500 MB"])
    for axis in axes:
        axis.set(xscale="log", xlabel="tokens read before")
        axis.set_xticks(LONG, [f"{n:,}" for n in LONG])
        axis.minorticks_off()
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(file, dpi=120)


@torch.no_grad()
def main() -> None:
    """Measure, print, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--label", default="after", help="of this table in decode.json; others there are kept"
    )
    arguments = parser.parse_args()
    if DEVICE.type == "cpu":
        torch.set_num_threads(1)
    file = RESULTS.with_suffix(".json")
    results = json.loads(file.read_text()) if file.exists() else {}
    results |= {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(DTYPE).removeprefix("torch."),
        "shape": SHAPE,
    }
    if arguments.label == "windows":
        found = table(make_all(WINDOWS), arguments.rounds, (1,), (16, 1024, 8192), (1024, 8192))
        file.write_text(json.dumps(results | {"windows": {"table": found}}, indent=1))
        return
    models = make_all(STUDENTS)
    results[arguments.label] = {"table": table(models, arguments.rounds)}
    if arguments.label == "after":
        results[arguments.label]["by_context"] = by_context(models, max(2, arguments.rounds // 3))
        results["profile"] = {name: shares(model) for name, model in models.items()}
        draw(results[arguments.label]["by_context"], RESULTS.with_suffix(".png"))
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
