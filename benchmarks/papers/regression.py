"""Linear regression in context: which memory predicts best what it was not shown.

A memory that is read by solving a linear system learns a linear rule from its context better than one that is
written by steps ([2506.05233](https://arxiv.org/abs/2506.05233)). MesaNet has the lowest error in all four
settings.

**Claim.** (von Oswald et al., https://arxiv.org/abs/2506.05233.) A memory that is read by solving a linear system fits
all that was read best at every token, and so learns a linear rule from its context better than memories that are
written by a step at each token, such as those of linear attention and DeltaNet.

**Setting.** The memories alone, without training a model. A memory reads 256 pairs of a key with 16 channels and its
value, which is the product of the key and a random matrix, and predicts each value before it reads it. Keys have unit
length, with equal or with unequal channels (the last is a tenth as large as the first before the length is set), and
values have no noise or noise of half their size. Linear attention divides by the number of pairs and is scaled by the
best of seven factors, DeltaNet has the best of seven write strengths, and MesaNet the best of seven regularisers. There
are three seeds with 64 rules each. The error is a fraction of the squared length of the values without noise.

**Expected.** In all four settings MesaNet has the lowest error, both of the pairs 17 to 32 and of the last 128. Without
noise its error of the last 128 is below 0.001, while that of linear attention is not.
"""

from statistics import mean

import torch
from torch import Tensor
from torch.nn import functional as F

from claim import Claim, Rows
from hf_memory.ops import delta_rule, linear_attention, ridge_regression
from pictures import curve, label_ends, plain_ticks

D = 16
PAIRS = 256
ROWS = 64
SEEDS = 3
EDGES = (0, 8, 16, 32, 64, 128, 256)
SETTINGS = [(keys, noise) for keys in ("equal", "unequal") for noise in (0.0, 0.5)]
CHOICES = {  # factors, write strengths, regularisers
    "linear attention": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
    "DeltaNet": (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0),
    "MesaNet": (1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0),
}


def pairs(keys: str, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values as they are read, and without noise, [1, T, rows, D] each; each row has a rule of its own."""
    x = torch.randn(1, PAIRS, ROWS, D, generator=generator)
    x = F.normalize(x * (torch.ones(D) if keys == "equal" else torch.logspace(0, -1, D)), dim=-1)
    y = torch.einsum("btrd,rde->btre", x, torch.randn(ROWS, D, D, generator=generator))
    size = y.square().mean().sqrt()
    return x, y + noise * size * torch.randn(y.shape, generator=generator), y


def predicted(memory: str, choice: float, x: Tensor, y: Tensor) -> Tensor:
    """The value of each key from the pairs before it, [1, T - 1, rows, D]."""
    q = x[:, 1:]
    k = x[:, :-1]
    v = y[:, :-1]
    one = torch.ones(k.shape[:3])
    if memory == "linear attention":
        return (
            choice * linear_attention(q, k, v, scale=1.0)[0] / torch.arange(1, PAIRS)[:, None, None]
        )
    if memory == "DeltaNet":
        return delta_rule(q, k, v, choice * one, scale=1.0)[0]
    return ridge_regression(q, k, v, one, 0 * one, ridge=torch.full((ROWS, D), choice))[0]


def plan(rows: Rows):
    """Every memory in every setting."""
    return (
        {"keys": keys, "noise": noise, "memory": memory, "seed": seed}
        for seed in range(SEEDS)
        for keys, noise in SETTINGS
        for memory in CHOICES
    )


@torch.no_grad()
def measure(*, keys: str, noise: float, memory: str, seed: int) -> dict:
    """With the choice that is best in the end."""
    x, y, clean = pairs(keys, noise, torch.Generator().manual_seed(seed))
    found = {}
    for choice in CHOICES[memory]:
        error = (predicted(memory, choice, x, y) - clean[:, 1:]).square().sum((0, 2, 3))
        whole = clean[:, 1:].square().sum((0, 2, 3))
        found[choice] = [
            (error[a:b].sum() / whole[a:b].sum()).item() for a, b in zip(EDGES, EDGES[1:])
        ]
    best = min(found, key=lambda choice: found[choice][-1])
    return {"choice": best, "errors": found[best], "last": found[best][-1]}


def runs_of(rows: Rows, keys: str, noise: float, memory: str) -> Rows:
    """All seeds of one."""
    return [
        row for row in rows if (row["keys"], row["noise"], row["memory"]) == (keys, noise, memory)
    ]


def error(runs: Rows, i: int) -> float:
    """Mean over seeds, between two EDGES."""
    return mean(row["errors"][i] for row in runs)


def table(rows: Rows) -> Rows:
    """The error of few pairs, by memory and setting."""
    return [
        {
            "error, pairs 17 to 32": memory,
            **{
                f"{keys} channels, {'noise' if noise else 'no noise'}": f"{error(runs, 2):.3f}"
                for keys, noise in SETTINGS
                if (runs := runs_of(rows, keys, noise, memory))
            },
        }
        for memory in CHOICES
    ]


def draw(rows: Rows, figure) -> None:
    """The error over what was read."""
    figure.set_size_inches(9, 6)
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, (keys, noise) in zip(panels.flat, SETTINGS):
        for memory in CHOICES:
            if runs := runs_of(rows, keys, noise, memory):
                curve(axes, EDGES[1:], [row["errors"] for row in runs], label=memory)
        plain_ticks(axes, EDGES[1:])
        axes.set(title=f"{keys} channels, noise {noise:g}", yscale="log")
        label_ends(axes)
    figure.supxlabel("pairs read, up to")
    figure.supylabel("error, 1 if nothing is known")


def verdict(rows: Rows) -> tuple[str, str]:
    """Who is best where, and whether the rule is found without noise."""
    found = {(s, m): runs_of(rows, *s, m) for s in SETTINGS for m in CHOICES}
    errors = {
        i: {s: {m: error(found[s, m], i) for m in CHOICES} for s in SETTINGS} for i in (2, -1)
    }
    best = [
        min(of, key=of.get) == "MesaNet" for settings in errors.values() for of in settings.values()
    ]
    clean = [of for (_, noise), of in errors[-1].items() if not noise]
    solved = [of["MesaNet"] < 1e-3 < of["linear attention"] for of in clean]
    figures = "error of the last 128 pairs: " + "; ".join(
        f"{keys} channels and noise {noise:g}: "
        + ", ".join(f"{m} {error(found[(keys, noise), m], -1):.4f}" for m in CHOICES)
        for keys, noise in SETTINGS
    )
    return (
        "reproduced"
        if all(best + solved)
        else "partly reproduced"
        if any(best)
        else "not reproduced"
    ), figures


CLAIM = Claim(
    "regression", "Linear regression in context", __doc__, 1, plan, measure, table, draw, verdict
)
