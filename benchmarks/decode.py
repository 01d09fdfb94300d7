"""What a token costs, and reading a prompt: students of a Transformer against it, all in turn in one process.

    python benchmarks/decode.py                     # about ten minutes on one core
    python benchmarks/decode.py --label before      # another version of the code: kept beside what is there
    python benchmarks/decode.py --label windows     # students with windows, also after 8,192 tokens
    python benchmarks/decode.py --label default     # the student that `convert` makes, in 16 and 8 bits: ten minutes

Random weights in the shape of SmolLM2-135M; students as `make_student` makes them. On the CPU one thread and its own
time, which other work on the machine disturbs least; on CUDA bfloat16 and the clock. A turn is three tokens, of which
the first, which finds another model's weights in the caches, does not count. Ratios to the Transformer are taken within
a round of turns; the table has their medians. Contexts are not read but set: a memory gets a count of tokens, attention
random keys and values of that length. What a token costs does not depend on the numbers. Beside each ratio stands that
of the bytes that a token must move, which bounds it as far as they come from memory and not from caches.

The default student is measured in both dtypes. A turn is 16 tokens, in which one block of its kept tokens ends. For a
token it is also counted how many operations of PyTorch a layer takes and how many functions of Python are called. Its
prompts are read at once and in pieces, and with `--compile` its step with a static cache is compiled, which needs a
compiler.

Writes benchmarks/results/decode.{json,png}, on CUDA decode_cuda.{json,png}, with the share of time of each operation of
PyTorch.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import matplotlib.pyplot as plt
import torch
import transformers
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
)

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
    "1/4 of layers, sinks": {**SERVED, "keep": tuple(range(1, 28, 4))},
}
BLOCK = 16  # tokens after which the default student decides what it keeps
FULL = 1200  # tokens after which each of its heads has as many as it keeps
PIECES = (2048, 512, 128)  # of a prompt of as many tokens as the first
COMPILED = slice(21, 25)  # layers, of which one has a full head; more take many minutes to compile
MODELS = {  # of other benchmarks
    "linear (elu)": hf_memory.LinearTransformerConfig,
    "GLA": hf_memory.GatedLinearAttentionConfig,
    "DeltaNet": hf_memory.DeltaNetConfig,
    "Gated DeltaNet": partial(hf_memory.DeltaNetConfig, gate="scalar"),
    "DeltaFormer": hf_memory.DeltaFormerConfig,
    "Titans LMM": partial(hf_memory.TitansConfig, variant="lmm"),
    "Titans MAG": partial(hf_memory.TitansConfig, variant="mag", sliding_window=512),
}


def make(name: str, sizes: dict, dtype: torch.dtype = DTYPE) -> PreTrainedModel:
    """A random model of that name in MODELS, or a Llama."""
    torch.manual_seed(0)
    if name == "Llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval().to(DEVICE, dtype)
    config = MODELS[name](**sizes)
    causal_lm = next(f.causal_lm for f in hf_memory.FAMILIES if f.config is type(config))
    return causal_lm(config).eval().to(DEVICE, dtype)


def make_all(students: dict[str, dict], dtype: torch.dtype = DTYPE) -> dict[str, PreTrainedModel]:
    """The Transformer and its students."""
    teacher = make("Llama", SHAPE, dtype)
    return {"Llama": teacher} | {
        name: make_student(teacher, **options) for name, options in students.items()
    }


def filled_cache(model: PreTrainedModel, tokens: int, batch: int, read: int = 2) -> DynamicCache:
    """As if the model had read so many tokens, of which it reads some."""
    cache = DynamicCache(config=model.config)
    given = torch.randint(SHAPE["vocab_size"], (batch, min(read, tokens)), device=DEVICE)
    model(given, **{CACHE: cache}, logits_to_keep=1)
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
            layer.keys, layer.values = torch.randn(
                2, B, H, tokens, D, device=DEVICE, dtype=model.dtype
            )
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


def default_students() -> dict[str, dict]:
    """Options of the student that `convert` makes of SmolLM2, and of others beside it."""
    recipe = Path(__file__).parents[1] / "recipes" / "smollm2-small.yaml"
    chosen = yaml.safe_load(recipe.read_text())["option"]
    # chosen for 360 tokens in the mean, where the default is 371
    kept = [[round(x * 371 / 360) for x in layer] for layer in chosen["num_kept_tokens"]]
    alike = {
        "sliding_window": 64,
        "num_sink_tokens": 4,
        "kept_block_size": BLOCK,
        "eviction": "change_of_output",
        "full_attention_heads": chosen["full_attention_heads"],
    }
    return {
        "8 bits": {**alike, "num_kept_tokens": kept, "cache_bits": 8},
        "16 bits": {**alike, "num_kept_tokens": kept},
        "8 bits, equal numbers": {**alike, "num_kept_tokens": 371, "cache_bits": 8},
    }


def block_of(step: Callable) -> Callable:
    """As many steps as a block has."""
    return lambda: [step() for _ in range(BLOCK)]


class Operations(TorchDispatchMode):
    """Counts the operations of PyTorch within it."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Count one, and compute it."""
        self.number += 1
        return function(*args, **(kwargs or {}))


def counted(step: Callable, layers: int) -> dict[str, float]:
    """What one token calls, compiled code included, which would leave to PyTorch what a mode looks at."""
    unnoticed = mock.patch.object(torch._C, "_len_torch_dispatch_stack", return_value=0)
    with Operations() as operations, unnoticed:
        step()
    calls = 0

    def count(frame, event, argument) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    step()
    sys.setprofile(None)
    return {
        "operations of PyTorch a layer": operations.number / layers,
        "Python calls": float(calls),
    }


def default_table(dtype: torch.dtype, rounds: int, is_compiled: bool) -> dict[str, dict]:
    """What the default student costs beside its teacher."""
    models = make_all(default_students(), dtype)
    token = torch.ones(1, 1, dtype=torch.long, device=DEVICE)
    found: dict[str, dict] = {}
    for context in (16, 1024, 8192):
        caches = {name: filled_cache(model, context, 1, FULL) for name, model in models.items()}
        steps = {n: partial(m, token, **{CACHE: caches[n]}) for n, m in models.items()}
        row = in_turn({n: block_of(step) for n, step in steps.items()}, rounds, 1)
        for of_model in row.values():
            of_model["ms"] /= BLOCK
        found[f"token after {context}"] = row
        show(*list(found.items())[-1])
        if context == 1024:
            layers = SHAPE["num_hidden_layers"]
            found["calls"] = {name: counted(step, layers) for name, step in steps.items()}
            print("calls", found["calls"], flush=True)
    prompt = torch.randint(SHAPE["vocab_size"], (1, PIECES[0]), device=DEVICE)
    for name in ("Llama", "8 bits", "16 bits"):
        model = models[name]
        calls = {
            "Llama" if size == PIECES[0] else f"pieces of {size}": partial(
                read_in_pieces, model, prompt, size
            )
            for size in PIECES
        }
        found[f"prompt, {name}"] = in_turn(calls, max(2, rounds // 3), 1)
        show(*list(found.items())[-1])
    if is_compiled:
        # four layers take a tenth of the time of all of them
        found["static cache"] = compiled_and_eager(dtype, 10 * rounds)
        show(*list(found.items())[-1])
    return found


def read_in_pieces(model: PreTrainedModel, prompt: torch.Tensor, size: int) -> None:
    """A prompt in pieces, into an empty cache."""
    cache = DynamicCache(config=model.config)
    for piece in prompt.split(size, 1):
        model(piece, **{CACHE: cache}, logits_to_keep=1)


def compiled_and_eager(dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """A step of the default student with a static cache, compiled and eager; the latter stands first.

    Of some layers, and as large a part of the vocabulary, whose product no graph makes faster.
    """
    options = default_students()["8 bits"]
    for name in ("num_kept_tokens", "full_attention_heads"):
        options[name] = options[name][COMPILED]
    layers = len(options["num_kept_tokens"])
    words = SHAPE["vocab_size"] * layers // SHAPE["num_hidden_layers"]
    sizes = {**SHAPE, "num_hidden_layers": layers, "vocab_size": words}
    model = make_student(make("Llama", sizes, dtype), **options)
    tokens = torch.randint(words, (1, 1024), device=DEVICE)
    steps = {}
    for name, run in (("Llama", model), ("compiled", torch.compile(model))):
        cache = StaticCache(config=model.config, max_cache_len=2048)
        model(tokens, **{CACHE: cache}, logits_to_keep=1)
        step = partial(run, tokens[:, :1], **{CACHE: cache})
        for _ in range(2 * BLOCK):
            step()  # compiles, and again where a block ends
        steps[name] = block_of(step)
    return in_turn(steps, rounds, 1)


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
    parser.add_argument("--compile", action="store_true", help="with --label default")
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
    if arguments.label == "default":
        results["default"] = {}
        for dtype in (torch.bfloat16, torch.float32):
            print(dtype, flush=True)
            name = str(dtype).removeprefix("torch.")
            results["default"][name] = default_table(dtype, arguments.rounds, arguments.compile)
        file.write_text(json.dumps(results, indent=1))
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
