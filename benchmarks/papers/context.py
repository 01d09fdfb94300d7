"""Whether a longer context helps a memory that must infer a rule while it reads.

A memory that learns by gradient steps predicts better the more it has read, where linear attention levels off
([2407.04620](https://arxiv.org/abs/2407.04620)). This holds where a rule must be inferred from 2,048 pairs; it does
not show that language models benefit.

**Claim.** (Sun et al., https://arxiv.org/abs/2407.04620.) A memory that learns by gradient steps keeps predicting
better the more it has read, where linear attention levels off. Linear attention takes one gradient step on all that was
read, TTT-Linear takes a step every 16 tokens, and TTT-MLP takes such steps with a network, which can express more.

**Setting.** The memories alone, without training a model. A memory reads 2,048 pairs of keys and values of 16 channels
and predicts the value of each pair before it reads it. The keys are correlated, and the value of a key x is x +
LN(g(x)), where g is a random matrix or a random network with one hidden layer of 32 channels. TTT's memories start from
small random weights and have the layer norm and the residual connection of the paper, and its hidden layer of four
times the width. Linear attention is the same memory with all gradients taken at its initial weights. Each memory has
the best of seven inner learning rates for each kind of rule; there are three seeds with 32 rules each. The error is a
fraction of the error of predicting the key itself.

**Expected.** From the 512th to the 2,048th pair, the error of TTT falls more than that of linear attention. Where the
rule is a network, TTT-MLP has the lowest error.

**What this does not show.** It does not show that language models benefit. A model of two layers of width 64 with
linear attention, trained on Python's language reference for 300 steps, makes no use of more than the last 64 bytes
(2.376 nats per byte without context, 2.371 to 2.411 after up to 1,984 bytes, one seed). Within minutes on one core,
language does not distinguish these memories.
"""

from statistics import mean

import torch
from torch import Tensor
from torch.nn import functional as F

from claim import Claim, Rows, spread
from hf_memory.ops import neural_memory
from pictures import curve, label_ends, plain_ticks

D = 16
PAIRS = 2048
ROWS = 32
SEEDS = 3
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
EDGES = (0, 32, 64, 128, 256, 512, 1024, 2048)
MEMORIES = {
    "linear attention": (1, PAIRS),
    "TTT-Linear": (1, 16),
    "TTT-MLP": (2, 16),
}  # matrices, tokens of a step
RULES = ("matrix", "network")


def pairs(rule: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys and values [1, T, rows, D]; each row has a rule and a correlation of its own."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = torch.einsum("trd,rde->tre", random(PAIRS, ROWS, D), random(ROWS, D, D) * D**-0.5)
    x = F.layer_norm(x, (D,))
    if rule == "matrix":
        hidden_output = torch.einsum("trd,rde->tre", x, random(ROWS, D, D))
    else:
        hidden = F.gelu(torch.einsum("trd,rde->tre", x, random(ROWS, D, 2 * D)))
        hidden_output = torch.einsum("trd,rde->tre", hidden, random(ROWS, 2 * D, D))
    return x[None], (x + F.layer_norm(hidden_output, (D,)))[None]


def start(depth: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Weights and biases that have read nothing."""
    sizes = (D, *[4 * D] * (depth - 1), D)
    weights = [
        torch.randn(ROWS, n + 1, m, generator=generator) * n**-0.5 for n, m in zip(sizes, sizes[1:])
    ]
    return (*weights[:-1], 0.1 * weights[-1])


def errors(
    depth: int, step: int, keys: Tensor, values: Tensor, rate: float, generator
) -> list[float]:
    """Between the EDGES."""
    norm = torch.ones(ROWS, D), torch.zeros(ROWS, D)
    asked = torch.cat([keys[:, 1:], keys[:, :1]], 1)  # a token asks what comes next
    recalled, _ = neural_memory(
        asked,
        keys,
        values,
        torch.full(keys.shape[:3], rate / D / min(step, 16)),
        None,
        None,
        start(depth, generator),
        chunk_size=step,
        residual=True,
        norm=norm,
        activation="gelu_tanh",
    )
    error = (
        (recalled - torch.cat([values[:, 1:], values[:, :1]], 1))[:, :-1].square().sum((0, 2, 3))
    )
    most = (values - keys)[:, 1:].square().sum((0, 2, 3))
    return [
        (error[low:high].sum() / most[low:high].sum()).item() for low, high in zip(EDGES, EDGES[1:])
    ]


def plan(rows: Rows):
    """Every memory and rule."""
    return (
        {"rule": rule, "memory": memory, "seed": seed}
        for seed in range(SEEDS)
        for rule in RULES
        for memory in MEMORIES
    )


@torch.no_grad()
def measure(*, rule: str, memory: str, seed: int) -> dict:
    """At the rate that is best in the end."""
    keys, values = pairs(rule, torch.Generator().manual_seed(seed))
    found = {
        rate: errors(*MEMORIES[memory], keys, values, rate, torch.Generator().manual_seed(seed))
        for rate in RATES
    }
    best = min(found, key=lambda rate: found[rate][-1])
    return {"rate": best, "errors": found[best], "last": found[best][-1]}


def runs_of(rows: Rows, rule: str, memory: str) -> Rows:
    """All seeds of one."""
    return [row for row in rows if (row["rule"], row["memory"]) == (rule, memory)]


def table(rows: Rows) -> Rows:
    """The error by position."""
    columns = [f"error, pairs {low:,} to {high:,}" for low, high in zip(EDGES[-4:], EDGES[-3:])]
    return [
        {
            "rule": rule,
            "memory": memory,
            **{
                c: f"{mean(x):.3f}"
                for c, x in zip(columns[:-1], list(zip(*(row["errors"] for row in runs)))[-3:])
            },
            columns[-1]: spread(runs, "last"),
            "best inner learning rates": ", ".join(sorted({f"{row['rate']:g}" for row in runs})),
        }
        for rule in RULES
        for memory in MEMORIES
        if (runs := runs_of(rows, rule, memory))
    ]


def draw(rows: Rows, figure) -> None:
    """The error over what was read."""
    figure.set_size_inches(9, 3.8)
    for axes, rule in zip(figure.subplots(1, 2, sharey=True), RULES):
        for memory in MEMORIES:
            if runs := runs_of(rows, rule, memory):
                curve(axes, EDGES[1:], [row["errors"] for row in runs], label=memory)
        plain_ticks(axes, EDGES[1:])
        axes.set(title=f"the rule is a {rule}", xlabel="pairs read, up to", ylim=(0, None))
    figure.axes[0].set_ylabel("error, 1 if nothing is known")
    label_ends(figure.axes[1])


def verdict(rows: Rows) -> tuple[str, str]:
    """Who gains by the last pairs."""
    found = {(r, m): runs_of(rows, r, m) for r in RULES for m in MEMORIES}
    last = {x: mean(row["errors"][-1] for row in runs) for x, runs in found.items()}
    gain = {
        x: mean(row["errors"][-3] - row["errors"][-1] for row in runs) for x, runs in found.items()
    }
    figures = f"error of the last {PAIRS - EDGES[-2]:,} of {PAIRS:,} pairs: " + "; ".join(
        f"where the rule is a {r}, " + ", ".join(f"{m} {last[r, m]:.3f}" for m in MEMORIES)
        for r in RULES
    )
    linear, one, two = MEMORIES
    more = [
        gain[r, m] > gain[r, linear] and last[r, m] < last[r, linear]
        for r in RULES
        for m in (one, two)
    ]
    holds = [all(more), last["network", two] < last["network", one]]
    return (
        "reproduced" if all(holds) else "partly reproduced" if any(more) else "not reproduced"
    ), figures


CLAIM = Claim("context", "Use of longer contexts", __doc__, 2, plan, measure, table, draw, verdict)
