"""Tracking a permutation: which of the symbols is in which seat after many swaps of two seats.

DeltaFormer tracks swaps of symbols if the kernel of its write can tell keys apart, and a Transformer cannot
([2505.19488](https://arxiv.org/abs/2505.19488)). The linear write does so, untrained and trained; the softmax write
was expected to and does not, as the paper's remark on its normalizer suggests.

**Claim.** (DeltaFormer, https://arxiv.org/abs/2505.19488.) DeltaFormer can track swaps of n elements if the kernel of
its write can tell keys apart, while a Transformer of constant depth cannot track them at arbitrary length. Which kernel
writes is decisive: with rounding, DeltaFormer tracks more symbols than a key has channels, and the paper says that the
normalizer of softmax is in the way.

**Setting.** The first part is without training. Keys have 128 channels; they are the unit vectors and those of a
Hadamard matrix. The symbols are written, then 256 swaps follow, each by the key k_a - k_b and a value of zero; in the
end all seats are read by the rounding kernel. In the second part, models of two layers of width 128 with four heads are
trained for 600 steps of 64 rows of 32 swaps of five symbols, with learning rate 0.002. A token says which seats are
swapped, and after each token the model predicts which symbol is in each seat. Accuracy is measured at the last eighth
of new rows. In the third part, models without positions, and with an unbounded write strength, are trained by a
curriculum: 800 steps of 128 rows of 2, 4, 8 and finally 16 swaps. Accuracy is measured at the last eighth of 16 swaps
and of 64 swaps, which is 4 times the trained length.

**Expected.** Untrained, the linear and the rounding write are exact for up to 128 symbols, and only the rounding write
is exact for 256. Trained, DeltaFormer tracks the swaps with a linear or a softmax write, and a Transformer is at
chance, 0.2.

**How the results differ.** With four times as many steps (one run), the softmax write is right at 0.48 of the last
places of 16 swaps instead of 0.31 to 0.35, and is still at chance for 64 swaps: it tracks the first swaps but has not
learned a rule for any number of them. The linear write, trained with the same curriculum, is right at all of the last
places of 16 swaps and at 0.59 to 0.83 of those of 64. This agrees with the paper's remark that the normalizer of
softmax is in the way. The softmax write still tracks further than a Transformer, which is at chance.
"""

import itertools
from functools import partial
from statistics import mean

import torch
from torch.nn import functional as F

from claim import Claim, Rows, spread
from hf_memory.ops import deltaformer
from learning import IGNORED, accuracy, in_turn, learn, make
from pictures import COLORS, label_ends

D = 128
SWAPS = 256
SEEDS = 3
KERNELS = ("linear", "round", "relu", "softmax")
SYMBOLS = (64, 128, 256)
PAIRS = torch.tensor(list(itertools.combinations(range(5), 2)))  # token i swaps the seats PAIRS[i]
SIZES = {
    "vocab_size": 25,  # seats times symbols, of which the input uses as many as there are pairs
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SOFTMAX = "DeltaFormer, softmax write"
STAGES = ((2, 60), (4, 150), (8, 250), (16, 340))  # swaps, steps
LONGER = 4  # times these steps, one run
FREE = {"no_rope_layers": [0, 0]}
MODELS = {
    "DeltaFormer, linear write": (
        "DeltaFormer",
        {"use_qk_norm": False, "write_kernel": "linear", "beta_activation": "identity"},
    ),
    SOFTMAX: ("DeltaFormer", {}),
    "Transformer": ("linear attention", {"layer_types": ["full_attention"] * 2}),
}


def plan(rows: Rows):
    """Kernels without training, then models."""
    for seed in range(SEEDS):
        yield from (
            {"kernel": kernel, "symbols": n, "seed": seed} for n in SYMBOLS for kernel in KERNELS
        )
    yield from (
        {"model": model, "seed": seed, "length": 32, "steps": 600}
        for model in MODELS
        for seed in range(SEEDS)
    )
    yield from (
        {"model": model, "seed": seed, "stages": len(STAGES)}
        for model in MODELS
        for seed in range(SEEDS)
    )
    yield {"model": SOFTMAX, "seed": 0, "stages": len(STAGES), "times": LONGER}


def measure(*, seed: int, **setting) -> dict:
    """One kernel without training, or one model."""
    torch.manual_seed(seed)
    if "kernel" in setting:
        return by_kernel(**setting)
    return by_curriculum(seed, **setting) if "stages" in setting else trained(seed, **setting)


def by_kernel(kernel: str, symbols: int) -> dict:
    """Seats whose symbol is right after all swaps."""
    keys = torch.cat([torch.eye(D), hadamard(D) / D**0.5])[:symbols]
    values = F.normalize(torch.randn(symbols, D), dim=-1)
    seats = torch.arange(symbols)
    swapped = torch.stack([torch.randperm(symbols)[:2] for _ in range(SWAPS)])
    for a, b in swapped:
        seats[a], seats[b] = seats[b].clone(), seats[a].clone()
    a, b = swapped.T
    k = torch.cat([keys, keys[a] - keys[b], keys])
    v = torch.cat([values, torch.zeros(SWAPS + symbols, D)])
    erase = torch.cat([torch.zeros(symbols), torch.ones(SWAPS), torch.zeros(symbols)])
    scales = {"scale": 1.0, "write_scale": D**0.5 if kernel == "softmax" else 1.0}
    k = k[None, :, None]
    v = v[None, :, None]
    erase = erase[None, :, None]
    o, _ = deltaformer(k, k, v, erase, write_kernel=kernel, read_kernel="round", **scales)
    answers = o[0, -symbols:, 0]
    return {"accuracy": ((answers @ values.mT).argmax(-1) == seats).double().mean().item()}


def hadamard(size: int) -> torch.Tensor:
    """A matrix of 1 and -1 with orthogonal rows; the size is a power of two."""
    H = torch.ones(1, 1)
    while len(H) < size:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H


def trained(seed: int, model: str, length: int, steps: int) -> dict:
    """Train one; accuracy at the last eighth."""
    name, options = MODELS[model]
    learner = make(name, SIZES, **options)
    found = learn(
        learner, partial(swaps, length), lr=2e-3, steps=steps, rows=64, seed=seed, solved=2
    )
    return found | {"accuracy": accuracy(learner, partial(swaps, length, last=length // 8))}


def by_curriculum(seed: int, model: str, stages: int, times: int = 1) -> dict:
    """Train one on more and more swaps; accuracy at the last eighth, and at that of four times as many."""
    name, options = MODELS[model]
    options = {
        **options,
        **FREE,
        **({"beta_activation": "identity"} if name == "DeltaFormer" else {}),
    }
    learner = make(name, SIZES, **options)
    tasks = [
        partial(swaps, length) for length, steps in STAGES[:stages] for _ in range(times * steps)
    ]
    found = learn(learner, in_turn(tasks), lr=2e-3, steps=len(tasks), rows=128, seed=seed, solved=2)
    length = STAGES[stages - 1][0]
    ends = (accuracy(learner, partial(swaps, n, last=n // 8)) for n in (length, 4 * length))
    return found | dict(zip(("accuracy", "longer"), ends))


def swaps(length: int, rows: int, generator: torch.Generator, *, last: int | None = None):
    """Swaps [B, T], and the symbols in the seats after each [B, T, 5]."""
    tokens = torch.randint(len(PAIRS), (rows, length), generator=generator)
    seats = torch.arange(5).repeat(rows, 1)
    answers = []
    each = torch.arange(rows)
    for t in range(length):
        a, b = PAIRS[tokens[:, t]].T
        seats[each, a], seats[each, b] = seats[each, b], seats[each, a].clone()
        answers.append(seats.clone())
    targets = torch.stack(answers, 1)
    if last is not None:
        targets[:, :-last] = IGNORED
    return tokens, targets


def untrained(rows: Rows, kernel: str, symbols: int) -> float:
    """Mean over seeds."""
    return mean(
        row["accuracy"] for row in rows if row.get("kernel") == kernel and row["symbols"] == symbols
    )


def runs_of(rows: Rows, model: str, stages: int | None = None, times: int | None = None) -> Rows:
    """The runs of one model, trained at once or by a curriculum, with so many times the steps."""
    setting = {"model": model, "stages": stages, "times": times}
    return [row for row in rows if all(row.get(name) == value for name, value in setting.items())]


def table(rows: Rows) -> Rows:
    """Kernels by the number of symbols, then models."""
    shown = SYMBOLS[1:]  # all that fit a screen
    symbols = [f"{n} symbols" for n in shown]
    trained = ["32 swaps", "16 swaps, curriculum", "64 swaps, curriculum"]
    table = []
    for kernel in KERNELS:
        figures = (f"{untrained(rows, kernel, n):.3f}" for n in shown)
        table.append(
            {
                "kernel or model": f"{kernel}, untrained",
                **dict(zip(symbols, figures)),
                **dict.fromkeys(trained, ""),
            }
        )
    for model in MODELS:
        direct = runs_of(rows, model)
        staged = runs_of(rows, model, len(STAGES))
        measured = ((direct, "accuracy"), (staged, "accuracy"), (staged, "longer"))
        table.append(
            {
                "kernel or model": model,
                **{name: spread(*x) for name, x in zip(trained, measured) if x[0]},
            }
        )
    return table


def draw(rows: Rows, figure) -> None:
    """Accuracy over the steps, a line a seed."""
    figure.set_size_inches(11, 3.6)
    titles = "trained on 32 swaps", "trained on 2, 4, 8, then 16 swaps"
    for axes, stages, title in zip(figure.subplots(1, 2), (None, len(STAGES)), titles):
        for color, model in zip(COLORS[:1] + COLORS[3:], MODELS):
            for i, row in enumerate(runs_of(rows, model, stages)):
                points = zip(*((x["step"], x["accuracy"]) for x in row["curve"]))
                axes.plot(*points, color=color, marker="", label=None if i else model)
        axes.axhline(0.2, color="gray", linestyle=":", label="chance")
        axes.set(title=title, xlabel="training step", ylabel="accuracy", ylim=(0, 1.02))
    for axes in figure.axes:
        label_ends(axes)


def verdict(rows: Rows) -> tuple[str, str]:
    """Untrained as the theorem says; trained, both writes follow and a Transformer does not."""
    exact = all(
        untrained(rows, kernel, n) == 1 for kernel in ("linear", "round") for n in SYMBOLS[:2]
    )
    beyond = {kernel: untrained(rows, kernel, 256) for kernel in KERNELS}
    linear, softmax, plain = ([row["accuracy"] for row in runs_of(rows, model)] for model in MODELS)
    staged = {model: runs for model in MODELS if (runs := runs_of(rows, model, len(STAGES)))}
    summary = "accuracy with 256 symbols, untrained: " + ", ".join(
        f"{k} {x:.2f}" for k, x in beyond.items()
    )
    summary += "; trained on 32 swaps: "
    summary += f"linear write {min(linear):.2f}, softmax write {max(softmax):.2f}, Transformer {max(plain):.2f}; "
    summary += "trained by a curriculum, worst seed with 16 swaps and with 64: " + "; ".join(
        f"{model} {min(row['accuracy'] for row in runs):.2f} and {min(row['longer'] for row in runs):.2f}"
        for model, runs in staged.items()
    )
    holds = exact and beyond["round"] == 1 and max(beyond["linear"], beyond["relu"]) < 0.5
    holds = (
        holds
        and min(*linear, *(row["accuracy"] for row in staged[SOFTMAX])) > 0.99
        and max(plain) < 0.3
    )
    return ("reproduced" if holds else "partly reproduced"), summary


CLAIM = Claim(
    "swaps", "Tracking swaps", __doc__, 45, plan, measure, table, draw, verdict, (SOFTMAX,)
)
