"""Models that were trained on texts of 256 bytes read texts of 8,192 bytes.

Memories without positions work beyond the length at which they were trained, and attention with rotary positions
does not ([2108.12409](https://arxiv.org/abs/2108.12409), [2305.19466](https://arxiv.org/abs/2305.19466)). Memories
that decay do; those that do not, as linear attention and DeltaNet, slowly leave the range that they had in
training.

**Claim.** A recurrent memory without positions works beyond the length at which it was trained. Attention with rotary
positions does not (Press et al., https://arxiv.org/abs/2108.12409), and attention without positions does for somewhat
longer texts (Kazemnejad et al., https://arxiv.org/abs/2305.19466).

**Setting.** Models of two layers of width 64 are trained for 200 steps of 4 rows of 256 bytes of Python's language
reference, with learning rate 0.005. The first five models of the table have three seeds, the others one. Then the loss
on 4 held-out passages of 8,192 bytes is measured by position, in nats per byte. The increase is this loss minus the
loss on the same bytes where they are in the second half of a text of 256 bytes, since the loss differs more from place
to place of a text than from model to model. After such short training, models use little more than the last few words.
So this shows which of them fail on long texts, not which of them make use of a long text.

**Expected.** With memories, the loss far from the start of a text is no higher than after 128 bytes. With attention and
rotary positions it is higher, and without positions a little higher.

**How the results differ.** The loss of memories without decay rises as that of attention without positions does: their
states accumulate more and more content and leave the range that they had in training. With decay, the loss does not
rise with distance.
"""

from collections.abc import Collection
from functools import partial
from statistics import mean

import torch
from torch import Tensor
from torch.nn import functional as F

from claim import Claim, Rows, runs_by
from learning import learn, make
from pictures import curves
from text import SIZES, passages

LENGTH = 256
FAR = 8192
PASSAGES = 4
SEEDS = 3
STEPS = 200
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
    return (
        {"model": model, "seed": seed, "steps": STEPS}
        for seed in range(SEEDS)
        for model in models[seed]
    )


def measure(*, model: str, seed: int, steps: int) -> dict:
    """Train one; nats a byte between the EDGES."""
    torch.manual_seed(seed)
    name, options = MODELS[model]
    learner = make(name, {**SIZES, "max_position_embeddings": FAR}, **options)
    found = learn(
        learner, partial(passages, LENGTH), lr=5e-3, steps=steps, rows=4, seed=seed, solved=2
    )
    far, near = (losses.mean(0) for losses in far_and_near(learner.eval()))
    return found | {name: between(EDGES, x) for name, x in (("nats", far), ("afresh", near))}


def far_and_near(model, far: int = FAR) -> tuple[Tensor, Tensor]:
    """Nats of each byte of held-out passages [PASSAGES, far], read through, and after LENGTH / 2 bytes or more."""
    tokens, targets = passages(far, PASSAGES, torch.Generator().manual_seed(10_000), held_out=True)
    through = torch.cat([losses(model, x[None], y[None]) for x, y in zip(tokens, targets)])
    half = LENGTH // 2
    near = [
        losses(model, *(z.unfold(0, LENGTH, half) for z in pair))[:, half:]
        for pair in zip(tokens, targets)
    ]
    return through, torch.cat([through[:, :half], torch.stack(near).flatten(1)], 1)


@torch.no_grad()
def losses(model, tokens: Tensor, targets: Tensor) -> Tensor:
    """Nats of each target [B, T]."""
    return F.cross_entropy(model(tokens, use_cache=False).logits.mT, targets, reduction="none")


def between(edges: tuple[int, ...], losses: Tensor) -> list[float]:
    """Means of [T] from each edge to the next."""
    return [losses[low:high].mean().item() for low, high in zip(edges, edges[1:])]


def costs(row: dict) -> list[float]:
    """Nats a byte that distance costs, between the EDGES."""
    return [far - near for far, near in zip(row["nats"], row["afresh"])]


def means(runs: Rows) -> list[float]:
    """The means over seeds of what distance costs."""
    return [mean(values) for values in zip(*map(costs, runs))]


def table(rows: Rows) -> Rows:
    """Nats a byte that distance costs, by position; and of bytes near the start."""
    columns = [f"increase, {low:,} to {high:,}" for low, high in zip(EDGES[1:], EDGES[2:])]
    return [
        {
            "model": model,
            "loss, 128 to 256": f"{mean(row['nats'][1] for row in runs):.3f}",
            **{c: f"{x:+.3f}" for c, x in zip(columns[-4:], means(runs)[-4:])},
            "seeds": len(runs),
        }
        for model, runs in runs_by(rows, "model", MODELS).items()
    ]


def draw(rows: Rows, figure) -> None:
    """What distance costs, over the position."""
    found = runs_by(rows, "model", DECISIVE)
    dashed = [model for model in found if "attention," in model and "linear" not in model]
    draw_costs(figure, found, EDGES, dashed)


def draw_costs(
    figure, found: dict[str, Rows], edges: tuple[int, ...], dashed: Collection[str] = ()
) -> None:
    """A curve for each name of what distance costs, up to the edges."""
    curves(
        figure,
        edges[1:],
        {name: [costs(row) for row in runs] for name, runs in found.items()},
        LENGTH,
        dashed,
        xlabel=f"position up to, bytes; dotted: {LENGTH}, the trained length",
        ylabel="increase of the loss, nats per byte",
    )


def verdict(rows: Rows) -> tuple[str, str]:
    """Memories go on, rotary attention does not."""
    change = {model: means(runs)[-1] for model, runs in runs_by(rows, "model", MODELS).items()}
    attention = [change["attention, RoPE"], change["attention, no positions"]]
    worse = {
        m: x
        for m, x in change.items()
        if x > 0.05 and "RoPE" not in m and not m.startswith("attention")
    }
    summary = f"increase of the loss in nats per byte from {EDGES[-2]:,} to {FAR:,} bytes: "
    summary += (
        f"rotary attention {attention[0]:.2f}, attention without positions {attention[1]:.2f}"
    )
    if worse or not 0.05 < attention[0] > attention[1]:
        return "partly reproduced", summary + "".join(f", {m} {x:.2f}" for m, x in worse.items())
    most = max(x for m, x in change.items() if "RoPE" not in m and not m.startswith("attention"))
    return "reproduced", f"{summary}, memories without positions at most {most:.2f}"


CLAIM = Claim(
    "length",
    "Beyond the trained length",
    __doc__,
    15,
    plan,
    measure,
    table,
    draw,
    verdict,
    DECISIVE,
)
