"""Trained at 256 bytes, read at 2,048, with each kind of positions.

**Claim.** ALiBi reads on beyond the length at which it was trained, sinusoidal and rotary positions do not, and T5's
relative ones are between (Press et al., https://arxiv.org/abs/2108.12409); learned positions were never seen there;
clipped and relative distances go on (Shaw et al., https://arxiv.org/abs/1803.02155; Dai et al.,
https://arxiv.org/abs/1901.02860), and so does attention that scales its scores by distance (Wu et al.,
https://arxiv.org/abs/2010.06925); no positions are better than rotary ones (Kazemnejad et al.,
https://arxiv.org/abs/2305.19466).

**Setting.** A `MemoryTransformer` of two layers of width 64 with full attention, trained and asked as in [Beyond the
trained length](#beyond-the-trained-length), up to 2,048 bytes: what a byte costs more than the same byte near a start.
Three seeds. Where positions are added to embeddings, both start with a standard deviation of one, which sinusoids have
nearly; with 0.02, as elsewhere, sinusoids drowned the bytes (3.15 nats a byte near a start), and learned positions were
not used (2.74, and 2.67 without any).

**Expected.** From 1,024 to 2,048 bytes ALiBi costs less than 0.05 nats a byte more; rotary, sinusoidal and learned
positions more than that, and more than any of the others.

**Where it falls short.** The order is the claim's, and only rotary positions cost as much as expected. With positions
that are added to embeddings, a model that has learned for 200 steps predicts a byte near a start hardly better than
without any, so it loses little where they fail.
"""

from functools import partial
from statistics import mean

import torch
from torch import nn

from claim import Claim, Rows
from hf_memory import MemoryTransformerConfig, MemoryTransformerForCausalLM
from learning import learn
from length import LENGTH, between, costs, far_and_near, means
from pictures import curve, plain_ticks
from text import SIZES, passages

FAR, SEEDS, STEPS, EDGES = 2048, 3, 200, (0, 128, 256, 512, 1024, 2048)
FAILING = ("rope", "sinusoidal", "learned")
ADDED = ("sinusoidal", "learned")  # to embeddings
POSITIONS = ("alibi", "relative", "xl", "distance_aware", "none", *FAILING)


def plan(rows: Rows):
    """Every kind once before any has a second seed."""
    return ({"position": x, "seed": seed, "steps": STEPS} for seed in range(SEEDS) for x in POSITIONS)


def measure(*, position: str, seed: int, steps: int) -> dict:
    """Train one; nats a byte between the EDGES."""
    torch.manual_seed(seed)
    config = MemoryTransformerConfig(**SIZES, max_position_embeddings=FAR, position=position)
    learner = MemoryTransformerForCausalLM(config)
    if position in ADDED:
        for x in (x for x in learner.modules() if isinstance(x, nn.Embedding)):
            nn.init.normal_(x.weight)
    found = learn(learner, partial(passages, LENGTH), lr=5e-3, steps=steps, rows=4, seed=seed, solved=2)
    far, near = (losses.mean(0) for losses in far_and_near(learner.eval(), FAR))
    return found | {name: between(EDGES, x) for name, x in (("nats", far), ("afresh", near))}


def runs_of(rows: Rows) -> dict[str, Rows]:
    """By position, where there are any."""
    found = {position: [row for row in rows if row["position"] == position] for position in POSITIONS}
    return {position: runs for position, runs in found.items() if runs}


def table(rows: Rows) -> Rows:
    """Nats a byte that distance costs, by position; and of bytes near the start."""
    columns = [f"{low} to {high}" for low, high in zip(EDGES, EDGES[1:])]
    return [
        {
            "option": f"`position={position}`",
            "128 to 256, nats": f"{mean(row['nats'][1] for row in runs):.3f}",
            **{c: f"{x:+.3f}" for c, x in list(zip(columns, means(runs)))[2:]},
            "worst seed": f"{max(costs(row)[-1] for row in runs):+.3f}",
        }
        for position, runs in runs_of(rows).items()
    ]


def draw(rows: Rows, figure) -> None:
    """What distance costs, over the position."""
    figure.set_size_inches(9, 4)
    axes = figure.subplots()
    for position, runs in runs_of(rows).items():
        curve(axes, EDGES[1:], [costs(row) for row in runs], label=position)
    axes.axvline(LENGTH, color="gray", linestyle=":")
    plain_ticks(axes, EDGES[1:])
    axes.set(xlabel=f"position up to, bytes; dotted: {LENGTH}, the trained length")
    axes.set(ylabel="nats a byte more than near a start")
    figure.legend(loc="outside right center")


def verdict(rows: Rows) -> tuple[str, str]:
    """Who goes on beyond the trained length."""
    change = {position: means(runs)[-1] for position, runs in runs_of(rows).items()}
    said = f"nats a byte lost from {EDGES[-2]:,} to {FAR:,} bytes: " + ", ".join(
        f"{position} {x:+.2f}" for position, x in sorted(change.items(), key=lambda item: item[1])
    )
    fails = min(change[position] for position in FAILING)
    goes_on = max(x for position, x in change.items() if position not in FAILING)
    if change["alibi"] < 0.05 < fails and goes_on < fails:
        return "reproduced", said
    return ("differently" if change["alibi"] < 0.05 else "not reproduced"), said


CLAIM = Claim("positions", "Positions beyond the trained length", __doc__, 5, plan, measure, table, draw, verdict)
