"""Facts learned in training: a memory layer with a table of slots compared with an MLP of equal cost.

A memory layer that finds its slots by product keys stores more facts than an MLP that takes as many operations a
token ([2412.09764](https://arxiv.org/abs/2412.09764)). It does after 400 steps, though a slot learns slowly at
first; an MLP of four times the cost knows more.

**Claim.** (Berges et al., https://arxiv.org/abs/2412.09764.) Memory layers, which find their slots by product keys,
store more facts than dense layers that take as many operations per token.

**Setting.** A fact is a key of two random tokens out of 256 and a random token as its value; there are 16,384 facts. A
model reads a key and predicts its value. It has one layer of width 64 with softmax attention, followed by an MLP or by
a memory layer of 16,384 slots with two heads, each of which reads four slots. The memory layer takes 21 thousand
multiplications per token, as does the MLP of 109 channels; an MLP of four times as many channels is shown beside them.
Training takes 400 steps of 1,024 facts with learning rate 0.005. There are three seeds, but one for the larger MLP.
Accuracy is measured over all facts.

**Expected.** The memory layer knows more facts than the MLP of equal cost.

**How long it takes.** A slot learns only from the facts that read it, so a memory layer learns slowly at first. In a
trial of 800 steps with one seed, which is not among the stored results, it knew all facts, and the MLP of equal cost
knew 0.63 of them.
"""

from functools import partial
from statistics import mean

import torch
from torch import Tensor

from claim import Claim, Rows, runs_by, spread
from learning import IGNORED, accuracy, learn, make
from pictures import curve, label_ends

VOCABULARY = 256
FACTS = 16_384
STEPS = 400
ROWS = 1024
SEEDS = 3
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "layer_types": ["full_attention"],
}
SLOTS = {
    "mlp_types": ["memory"],
    "product_key_heads": 2,
    "product_key_dim": 32,
    "product_key_top_k": 4,
}
DECISIVE = ("MLP of equal cost", "16,384 slots")
MODELS = {
    "MLP of equal cost": {"intermediate_size": 109},
    "MLP of four times the cost": {"intermediate_size": 436},
    "16,384 slots": {**SLOTS, "num_product_keys": 128},
}


def table_of_facts(facts: int, seed: int) -> Tensor:
    """Keys without repetition, and values [facts, 3]."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randperm(VOCABULARY**2, generator=generator)[:facts]
    values = torch.randint(VOCABULARY, (facts,), generator=generator)
    return torch.stack([keys // VOCABULARY, keys % VOCABULARY, values], 1)


def asked(facts: Tensor) -> tuple[Tensor, Tensor]:
    """The value is the target of the key's second token."""
    targets = torch.full_like(facts[:, :2], IGNORED)
    targets[:, 1] = facts[:, 2]
    return facts[:, :2], targets


def some(known: Tensor, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Facts of a table."""
    return asked(known[torch.randint(len(known), (rows,), generator=generator)])


def plan(rows: Rows):
    """Every model once before any has a second seed."""
    return (
        {"model": model, "seed": seed, "facts": FACTS, "steps": STEPS}
        for seed in range(SEEDS)
        for model in MODELS
        if model in DECISIVE or not seed
    )


def measure(*, model: str, seed: int, facts: int, steps: int) -> dict:
    """Train one on a table, and ask for all of it."""
    torch.manual_seed(seed)
    known = table_of_facts(facts, seed)
    learner = make("linear attention", SIZES, **MODELS[model])
    found = learn(
        learner, partial(some, known), lr=5e-3, steps=steps, rows=ROWS, seed=seed, solved=2
    )
    return found | {"accuracy": accuracy(learner, lambda *_: asked(known))}


def table(rows: Rows) -> Rows:
    """Accuracy by model."""
    return [
        {"model": model, "fraction of facts known": spread(runs, "accuracy"), "seeds": len(runs)}
        for model, runs in runs_by(rows, "model", MODELS).items()
    ]


def draw(rows: Rows, figure) -> None:
    """How much is known by step."""
    figure.set_size_inches(7, 4)
    axes = figure.subplots()
    for model, runs in runs_by(rows, "model", MODELS).items():
        curves = [[point["accuracy"] for point in row["curve"]] for row in runs]
        curve(axes, [point["step"] for point in runs[0]["curve"]], curves, label=model)
    axes.set(xlabel="step", ylabel="fraction of a step's facts known", ylim=(0, 1.02))
    label_ends(axes)


def verdict(rows: Rows) -> tuple[str, str]:
    """Whether slots know more than what costs as much."""
    known = {
        model: [row["accuracy"] for row in runs]
        for model, runs in runs_by(rows, "model", MODELS).items()
    }
    dense, slots = (known[model] for model in DECISIVE)
    figures = f"fraction of {FACTS:,} facts that is known: " + "; ".join(
        f"{model} {mean(x):.2f}" for model, x in known.items()
    )
    return ("reproduced" if min(slots) > max(dense) else "not reproduced"), figures


CLAIM = Claim(
    "facts", "Facts in memory layers", __doc__, 3, plan, measure, table, draw, verdict, DECISIVE
)
