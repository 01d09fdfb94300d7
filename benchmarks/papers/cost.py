"""How the time and memory that a model needs depend on the length of its context.

Attention reads T tokens in a time that grows with T^2 and a recurrent memory with T, whose state does not grow
([2006.16236](https://arxiv.org/abs/2006.16236)). The exponents are slopes of measured time and bytes from 4,096 to
16,384 tokens.

**Claim.** Softmax attention and DeltaFormer take time in T^2 to read T tokens. A recurrent memory takes time in T; the
size of its state and the time for a further token do not depend on T (Katharopoulos et al.,
https://arxiv.org/abs/2006.16236; the paper of every family says so of its own model). Log-linear attention takes time
in T log T and keeps a state for each power of two below T (https://arxiv.org/abs/2506.04761).

**Setting.** Models of one layer of width 64 with one head process one sequence of 2,048 to 16,384 tokens. Measured are
the CPU time for reading it and for writing its last 16 tokens one by one, each the best of three runs, and the bytes of
the cache. An exponent is the slope of the logarithm of a figure over the logarithm of the length, from 4,096 tokens on.

**Expected.** Exponents of time are 1 for memories and approach 2 for attention and DeltaFormer, whose projections and
feed-forward layers are linear in T. Exponents of bytes are 0 for memories and 1 for attention and DeltaFormer. At these
lengths, T log T has a slope of about 1.1, and log T has one of about 0.1.
"""

import math
import time
from statistics import linear_regression

import torch
from matplotlib.ticker import LogLocator, NullFormatter

from claim import Claim, Rows
from hf_memory.evaluation.efficiency import reading_and_writing
from learning import MODELS, make
from pictures import label_ends, plain_ticks

LENGTHS = (2048, 4096, 8192, 16384)
NEW = 16
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 32768,
}
LOG_LINEAR = "log-linear Gated DeltaNet"
OPTIONS = {LOG_LINEAR: ("Gated DeltaNet", {"levels": "log"})}
COMPARED = [*MODELS, "RWKV-7", LOG_LINEAR]
OTHER = "transformers' Mamba-2"  # in PyTorch, without its kernels: what it multiplies grows with the square of chunks
GROWING = ("softmax attention", "DeltaFormer")
SHOWN = (*GROWING, "linear attention", "Gated DeltaNet", "Titans", LOG_LINEAR)  # on the page


def plan(rows: Rows):
    """A model a length, short ones first."""
    return ({"model": model, "tokens": tokens} for tokens in LENGTHS for model in COMPARED)


def measure(*, model: str, tokens: int) -> dict:
    """Seconds of CPU time and bytes of one sequence."""
    torch.manual_seed(0)
    name, options = OPTIONS.get(model, (model, {}))
    reader = make(name, SIZES, **options).eval()
    runs = (reading_and_writing(reader, tokens, NEW, clock=time.process_time) for _ in range(3))
    size, reading, writing = map(max, zip(*runs))  # tokens a second
    return {"read": (tokens - NEW) / reading, "write": 1 / writing, "bytes": size}


def exponent(rows: Rows, model: str, key: str) -> float:
    """The slope of the logarithm over that of the length, by least squares."""
    mine = [row for row in rows if row["model"] == model and row["tokens"] >= 4096]
    return linear_regression(
        *([math.log(row[name]) for row in mine] for name in ("tokens", key))
    ).slope


def table(rows: Rows) -> Rows:
    """Exponents, and what the longest context costs."""
    longest = {row["model"]: row for row in rows if row["tokens"] == LENGTHS[-1]}
    return [
        {
            "model": model,
            "exponent of reading time": f"{exponent(rows, model, 'read'):.2f}",
            "exponent of cache bytes": f"{exponent(rows, model, 'bytes'):.2f}",
            f"seconds to read {LENGTHS[-1]:,} tokens": f"{row['read']:.2f}",
        }
        for model, row in longest.items()
        if model in SHOWN
    ]


def draw(rows: Rows, figure) -> None:
    """Reading and bytes over the length."""
    figure.set_size_inches(10, 3.8)
    labels = {"read": (1, "seconds to read"), "bytes": (1e-3, "kB of cache")}
    for axes, (key, (unit, label)) in zip(figure.subplots(1, 2), labels.items()):
        for model in SHOWN:
            mine = [row for row in rows if row["model"] == model]
            values = [unit * row[key] for row in mine]
            axes.plot([row["tokens"] for row in mine], values, label=model)
        plain_ticks(axes, LENGTHS)
        axes.set(yscale="log", xlabel="tokens read", ylabel=label)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        label_ends(axes)


def verdict(rows: Rows) -> tuple[str, str]:
    """Exponents of reading and of bytes."""
    reading, size = (
        {model: exponent(rows, model, key) for model in COMPARED} for key in ("read", "bytes")
    )
    reference = reading.pop(OTHER)
    fits = {m: 1.4 < x < 2.2 if m in GROWING else 0.75 < x < 1.25 for m, x in reading.items()}
    off = [
        f"the exponent of reading time is {reading[m]:.2f} for {m}"
        for m, fit in fits.items()
        if not fit
    ]
    expected = {model: float(model in GROWING) for model in COMPARED} | {LOG_LINEAR: 0.1}
    off += [
        f"the exponent of bytes is {x:.2f} for {m}"
        for m, x in size.items()
        if abs(x - expected[m]) > 0.03
    ]
    summary = (
        ", ".join(f"{m} {reading[m]:.2f}" for m in GROWING)
        + f", transformers' Mamba-2 in PyTorch {reference:.2f}"
    )
    memories = [x for m, x in reading.items() if m not in GROWING]
    return (
        ("partly reproduced", "; ".join(off))
        if off
        else (
            "reproduced",
            f"exponents of reading time: {summary}, memories {min(memories):.2f} to {max(memories):.2f}; "
            f"exponents of bytes: 1 for attention and DeltaFormer, 0 for memories, {size[LOG_LINEAR]:.2f} with levels",
        )
    )


CLAIM = Claim(
    "cost", "Time and memory by context length", __doc__, 4, plan, measure, table, draw, verdict
)
