"""How much each part of Titans contributes to its quality.

Each part of Titans lowers its loss: decay, momentum, convolutions, depth, persistent tokens, and attention beside
the memory ([2501.00663](https://arxiv.org/abs/2501.00663)). With texts of 256 bytes only convolutions count; decay,
momentum and depth make no difference, and attention raises the loss.

**Claim.** (Behrouz et al., https://arxiv.org/abs/2501.00663, table 5.) The perplexity of the memory alone, 27.01,
becomes 29.04 without decay, 28.98 without momentum, 28.73 without convolutions, 28.49 with one matrix and 27.63 without
persistent tokens. With attention it becomes 25.70 if the memory is a gate (MAG), 25.91 if it is a layer (MAL) and 26.67
if it is context (MAC). Deeper memories are better (figure 7).

**Setting.** Models of one layer of width 64 with two heads are trained for 150 steps of 4 rows of 256 bytes of Python's
language reference, with learning rate 0.005 and three seeds. Measured is the loss on held-out text in nats per byte. In
MAG and MAL attention sees 64 bytes, and MAC's segments have 64 bytes. To remove momentum or decay, its gate is held
closed and is not trained. With three matrices, and in MAL, the gradient of each token inside the memory is clipped to a
norm of 5.7, the square root of the channels of a head; with three matrices this is the default. Without clipping, three
of these six runs diverged, since the memory's own steps grew within a text until they overflowed. For one seed, all
variants are trained on the same texts, so differences are taken seed by seed.

**Expected.** Every part helps: the loss is higher without it, and it is lower with attention and with a deeper memory.

**How the results differ.** Convolutions contribute a lot. The other parts make no difference that can be seen with such
short texts and so little training, and adding attention beside the memory raises the loss instead of lowering it.
"""

from functools import partial
from math import isfinite
from statistics import mean

import torch

from claim import Claim, Rows, spread
from learning import learn, loss_and_accuracy, make
from pictures import dots
from text import SIZES, passages

SEEDS = 3
LENGTH = 256
STEPS = 150
CLOSED = -30.0  # before a sigmoid
WINDOW = {"sliding_window": 64}
VARIANTS = {
    "all": {},
    "without decay": {},
    "without momentum": {},
    "without convolutions": {"linear_conv_kernel_dim": 0},
    "one matrix": {"memory_depth": 1, "memory_chunk_size": 16},
    "without persistent tokens": {"num_persistent_tokens": 0},
    "three matrices": {"memory_depth": 3},
    "MAC": {"variant": "mac", "segment_length": 64},
    "MAG": {"variant": "mag", **WINDOW},
    "MAL": {"variant": "mal", "memory_max_grad_norm": 32**0.5, **WINDOW},
    "chunks of 4": {"memory_chunk_size": 4},
    "chunks of 64": {"memory_chunk_size": 64},
}
GATES = {"without decay": "decay_proj", "without momentum": "momentum_proj"}
WORSE = (
    "without decay",
    "without momentum",
    "without convolutions",
    "one matrix",
    "without persistent tokens",
)
BETTER = ("three matrices", "MAC", "MAG", "MAL")


def plan(rows: Rows):
    """Every variant once before any has a second seed."""
    return (
        {"variant": variant, "seed": seed, "steps": STEPS}
        for seed in range(SEEDS)
        for variant in VARIANTS
    )


def measure(*, variant: str, seed: int, steps: int) -> dict:
    """Train one; nats a byte of held-out passages."""
    torch.manual_seed(seed)
    model = make("Titans", {**SIZES, "num_hidden_layers": 1}, **VARIANTS[variant])
    if variant in GATES:
        close(model, GATES[variant])
    found = learn(
        model, partial(passages, LENGTH), lr=5e-3, steps=steps, rows=4, seed=seed, solved=2
    )
    model.eval()
    with torch.no_grad():
        held_out = passages(LENGTH, 64, torch.Generator().manual_seed(10_000), held_out=True)
        return found | {"nats": loss_and_accuracy(model, *held_out)[0].item()}


def close(model, gate: str) -> None:
    """Let a gate of every layer be zero for all tokens, and stay so."""
    for name, parameter in model.named_parameters():
        if f".{gate}." in name:
            parameter.requires_grad_(False).fill_(CLOSED if name.endswith("bias") else 0.0)


def runs_of(rows: Rows, variant: str) -> Rows:
    """All seeds of one that did not diverge."""
    return [row for row in rows if row["variant"] == variant and isfinite(row["nats"])]


def table(rows: Rows) -> Rows:
    """Nats a byte, whole and without each part."""
    return [
        {
            "variant": variant,
            "loss, nats per byte": spread(runs, "nats"),
            "seeds": len(runs),
        }
        for variant in VARIANTS
        if variant in ("all", *WORSE) and (runs := runs_of(rows, variant))
    ]


def draw(rows: Rows, figure) -> None:
    """Differences to all parts, seed by seed."""
    figure.set_size_inches(7, 4)
    axes = figure.subplots()
    whole = {row["seed"]: row["nats"] for row in runs_of(rows, "all")}
    more = {
        x: [row["nats"] - whole[row["seed"]] for row in runs_of(rows, x)] for x in WORSE + BETTER
    }
    dots(axes, {variant: values for variant, values in more.items() if values})
    axes.axvline(0, color="gray", linestyle=":")
    axes.locator_params(axis="x", nbins=5)
    axes.set(xlabel="increase of the held-out loss, nats per byte, a dot per seed")


def verdict(rows: Rows) -> tuple[str, str]:
    """Signs of the differences, as means over seeds."""
    nats = {variant: mean(row["nats"] for row in runs_of(rows, variant)) for variant in VARIANTS}
    change = {variant: nats[variant] - nats["all"] for variant in WORSE + BETTER}
    wrong = [v for v in change if (change[v] > 0) != (v in WORSE)]
    summary = ", ".join(f"{v} {change[v]:+.3f}" for v in sorted(change, key=lambda v: -change[v]))
    diverged = sum(not isfinite(row["nats"]) for row in rows)
    summary += f"; {diverged} of {len(rows)} runs diverged" * (diverged > 0)
    return (
        "partly reproduced" if wrong else "reproduced"
    ), f"increase of the loss over that of the variant with all parts, in nats per byte: {summary}"


CLAIM = Claim("ablation", "Parts of Titans", __doc__, 20, plan, measure, table, draw, verdict)
