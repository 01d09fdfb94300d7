"""Trained at 256 bytes, read at 8,192.

**Claim.** A recurrent memory without positions works beyond the length at which it was trained. Attention with rotary
positions does not (Press et al., https://arxiv.org/abs/2108.12409), and attention without positions does for a somewhat
longer text (Kazemnejad et al., https://arxiv.org/abs/2305.19466).

**Setting.** Two layers of width 64, 200 steps of 4 rows of 256 bytes of Python's language reference, learning rate
0.005, three seeds, one for models below the first five. Then the loss on 4 held-out passages of 8,192 bytes, by
position. After such short training, models use little more than the last words, so this shows which of them fail at
long texts, not which of them make use of a long text.

**Expected.** For memories the loss beyond 256 stays at or below that of the last trained positions; for attention with
rotary positions it rises; without it rises less.
"""

from functools import partial
from statistics import mean

import torch
from torch.nn import functional as F

from claim import Claim, Rows
from learning import learn, make
from pictures import curve, plain_ticks
from text import SIZES, passages

LENGTH, FAR, PASSAGES, SEEDS, STEPS = 256, 8192, 4, 3, 200
EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192)
NOPE = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 0]}
MODELS = {
    "attention, RoPE": ("softmax attention", {}),
    "attention, no positions": ("linear attention", NOPE),
    "linear attention": ("linear attention", {}),
    "DeltaNet": ("DeltaNet", {}),
    "Gated DeltaNet": ("Gated DeltaNet", {}),
    "Titans": ("Titans", {}),
    "DeltaFormer, RoPE": ("DeltaFormer", {}),
    "linear attention, RoPE": ("linear attention", {"memory_rope": True}),
    "KDA": ("KDA", {}),
    "GLA": ("GLA", {}),
    "retention": ("retention", {}),
    "Mamba-2": ("Mamba-2", {}),
    "transformers' Mamba-2": ("transformers' Mamba-2", {}),
}
DECISIVE = tuple(MODELS)[:5]


def plan(rows: Rows):
    """Every model once before any has a second seed."""
    models = [MODELS, *[DECISIVE] * (SEEDS - 1)]
    return ({"model": model, "seed": seed, "steps": STEPS} for seed in range(SEEDS) for model in models[seed])


def measure(*, model: str, seed: int, steps: int) -> dict:
    """Train one; nats a byte between the EDGES."""
    torch.manual_seed(seed)
    name, options = MODELS[model]
    learner = make(name, {**SIZES, "max_position_embeddings": FAR}, **options)
    found = learn(learner, partial(passages, LENGTH), lr=5e-3, steps=steps, rows=4, seed=seed, solved=2)
    return found | {"nats": nats(learner)}


@torch.no_grad()
def nats(model) -> list[float]:
    """By position, of the same held-out passages for every model."""
    model.eval()
    tokens, targets = passages(FAR, PASSAGES, torch.Generator().manual_seed(10_000), held_out=True)
    logits = (model(row[None], use_cache=False).logits[0] for row in tokens)
    losses = torch.stack([F.cross_entropy(x, y, reduction="none") for x, y in zip(logits, targets)]).mean(0)
    return [losses[low:high].mean().item() for low, high in zip(EDGES, EDGES[1:])]


def runs_of(rows: Rows) -> dict[str, Rows]:
    """By model, where there are any."""
    found = {model: [row for row in rows if row["model"] == model] for model in MODELS}
    return {model: runs for model, runs in found.items() if runs}


def means(runs: Rows) -> list[float]:
    """Of seeds, between the EDGES."""
    return [mean(values) for values in zip(*(row["nats"] for row in runs))]


def rises(runs: Rows) -> float:
    """Nats a byte that the farthest positions cost more than the last trained ones."""
    return means(runs)[-1] - means(runs)[1]


def table(rows: Rows) -> Rows:
    """Nats a byte by position."""
    columns = [f"{low} to {high}" for low, high in zip(EDGES, EDGES[1:])]
    return [
        {"model": model, **{c: f"{x:.3f}" for c, x in zip(columns, means(runs))}, "seeds": len(runs)}
        for model, runs in runs_of(rows).items()
    ]


def draw(rows: Rows, figure) -> None:
    """Loss over the position."""
    figure.set_size_inches(9, 4)
    axes = figure.subplots()
    for model, runs in runs_of(rows).items():
        style = "--" if "attention," in model and "linear" not in model else "-"
        curve(axes, EDGES[1:], [row["nats"] for row in runs], linestyle=style, label=model)
    axes.axvline(LENGTH, color="gray", linestyle=":")
    plain_ticks(axes, EDGES[1:])
    axes.set(xlabel=f"position up to, bytes; dotted: {LENGTH}, the trained length")
    axes.set(ylabel="held-out nats a byte", ylim=(0, None))
    figure.legend(loc="outside right center")


def verdict(rows: Rows) -> tuple[str, str]:
    """Memories go on, rotary attention does not."""
    change = {model: rises(runs) for model, runs in runs_of(rows).items()}
    attention = [change["attention, RoPE"], change["attention, no positions"]]
    worse = {m: x for m, x in change.items() if x > 0.05 and "RoPE" not in m and not m.startswith("attention")}
    summary = f"rotary attention loses {attention[0]:.2f} nats a byte, without positions {attention[1]:.2f}"
    if worse or not 0.05 < attention[0] > attention[1]:
        return "differently", summary + "".join(f", {m} {x:.2f}" for m, x in worse.items())
    most = max(x for m, x in change.items() if "RoPE" not in m and not m.startswith("attention"))
    return "reproduced", f"{summary}, memories without positions at most {most:.2f}"


CLAIM = Claim("length", "Beyond the trained length", __doc__, 15, plan, measure, table, draw, verdict, DECISIVE)
