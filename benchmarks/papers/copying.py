"""How long a string each memory can copy after a gap.

Attention copies strings of any length, and a state of fixed size copies only what it can hold
([2402.01032](https://arxiv.org/abs/2402.01032)). The models that learn to copy behave so; GLA, Mamba-2, RetNet and
Titans had not begun to copy after 600 steps, which says nothing about what their states hold.

**Claim.** (Jelassi et al., https://arxiv.org/abs/2402.01032.) A Transformer copies strings of any length. A model whose
state has a fixed size copies only as much as that state holds, however it is trained.

**Setting.** A text has N different tokens out of 256, a gap of 32 filler tokens, and then the first token again, from
which on the string is to be copied. Models and sizes are those of [associative recall](#associative-recall): one layer
with one head of 32 channels, whose state has 32 x 32 numbers, behind a convolution over two tokens. Training takes 600
steps of 2,048 tokens with learning rate 0.01; strings have 4 to 16 tokens and no gap in the first two fifths of the
steps, and 8 to 64 tokens afterwards. There are three seeds for softmax attention, linear attention and DeltaNet, and
one for the others. Trained models copy strings of 8 to 96 tokens, where the model reads the correct token before each
one that it predicts.

**Expected.** Softmax attention and DeltaFormer copy 96 tokens with an accuracy above 0.95. No other model does, since
it has fewer channels than that.

**How the results differ.** The models that learn to copy behave as claimed: linear attention, DeltaNet and Gated
DeltaNet copy nearly all of 8 tokens, and less and less of longer strings. GLA, Mamba-2, retention and Titans have not
begun to copy within 600 steps, so this says nothing about what their states hold. With a third of these steps, Gated
DeltaNet had not begun either.
"""

from functools import partial
from random import Random
from statistics import mean

import torch

from claim import Claim, Rows, runs_by
from learning import IGNORED, accuracy, in_turn, learn, make
from pictures import MOST, curves
from recall import HALF_LIFE, KEY_SIZE, OPEN, SIZES, VOCABULARY, WithTheTokenBefore
from recall import MODELS as OPTIONS

GAP = 32
TOKENS = 2048
SEEDS = 3
STEPS = 600
RATE = 1e-2
COPIED = 0.95
SHORT = (4, 8, 16)
LONG = (8, 16, 32, 64)
ASKED = (8, 16, 32, 64, 96)
KEEPS = ("softmax attention", "DeltaFormer")
DECISIVE = ("softmax attention", "linear attention", "DeltaNet")
MODELS = (*DECISIVE, "DeltaFormer", "Gated DeltaNet", "GLA", "Mamba-2", "retention", "Titans")


def strings(length: int, tokens: int, generator: torch.Generator, gap: int = GAP):
    """A string, a gap of zeros, the string again; rows of so many tokens in all."""
    rows = tokens // (2 * length + gap)
    string = 1 + torch.rand(rows, VOCABULARY - 1, generator=generator).argsort(1)[:, :length]
    row = torch.cat([string, string.new_zeros(rows, gap), string], 1)
    targets = torch.full_like(row, IGNORED)
    targets[:, length + gap : -1] = string[:, 1:]
    return row, targets


def kinds(steps: int, seed: int):
    """Strings of every step: short ones without a gap in the first two fifths."""
    choose = Random(seed).choice
    short = 2 * steps // 5
    yield from (partial(strings, choose(SHORT), gap=0) for _ in range(short))
    yield from (partial(strings, choose(LONG)) for _ in range(steps - short))


def plan(rows: Rows):
    """Every model once before any has a second seed."""
    models = [MODELS, *[DECISIVE] * (SEEDS - 1)]
    return (
        {"model": model, "seed": seed, "steps": STEPS}
        for seed in range(SEEDS)
        for model in models[seed]
    )


def measure(*, model: str, seed: int, steps: int) -> dict:
    """Train one, then let it copy."""
    torch.manual_seed(seed)
    learner = make(model, SIZES, **OPTIONS[model])
    if model in OPEN:
        with torch.no_grad():
            learner.model.layers[0].mixer.decay.start_open(HALF_LIFE)
    learner.set_input_embeddings(WithTheTokenBefore(learner.get_input_embeddings()))
    found = learn(
        learner, in_turn(kinds(steps, seed)), lr=RATE, steps=steps, rows=TOKENS, seed=seed, solved=2
    )
    asked = [accuracy(learner, partial(strings, n), rows=32 * (2 * n + GAP)) for n in ASKED]
    return found | {"asked": asked, "accuracy": asked[-1]}


def by_length(runs: Rows) -> list[float]:
    """Means over seeds."""
    return [mean(values) for values in zip(*(row["asked"] for row in runs))]


def longest(runs: Rows) -> int:
    """String that is copied, and all shorter ones; 0 if there is none."""
    copied = 0
    for n, x in zip(ASKED, by_length(runs)):
        if x < COPIED:
            break
        copied = n
    return copied


def table(rows: Rows) -> Rows:
    """Accuracy by length."""
    return [
        {
            "model": model,
            **{f"{n} tokens": f"{x:.2f}" for n, x in zip(ASKED, by_length(runs))},
            "seeds": len(runs),
        }
        for model, runs in runs_by(rows, "model", MODELS).items()
    ]


def draw(rows: Rows, figure) -> None:
    """Accuracy over the length."""
    found = {
        model: [row["asked"] for row in runs]
        for model, runs in runs_by(rows, "model", MODELS[:MOST]).items()
    }
    labels = {
        "xlabel": f"tokens of the string; dotted: {KEY_SIZE}, the key size",
        "ylabel": "accuracy",
    }
    curves(figure, ASKED, found, KEY_SIZE, found.keys() - KEEPS, **labels, ylim=(-0.02, 1.02))


def verdict(rows: Rows) -> tuple[str, str]:
    """Who copies all."""
    copied = {model: longest(runs) for model, runs in runs_by(rows, "model", MODELS).items()}
    ends = {model: by_length(runs) for model, runs in runs_by(rows, "model", MODELS).items()}
    said = f"accuracy on strings of {ASKED[0]} and of {ASKED[-1]} tokens: " + ", ".join(
        f"{model} {x[0]:.2f} and {x[-1]:.2f}" for model, x in ends.items()
    )
    if copied["softmax attention"] < ASKED[-1] or copied["linear attention"] == ASKED[-1]:
        return "not reproduced", said
    learned = all(
        copied.values()
    )  # what copies no string at all says nothing about how much its state holds
    as_expected = all((n == ASKED[-1]) == (model in KEEPS) for model, n in copied.items())
    return ("reproduced" if learned and as_expected else "partly reproduced"), said


CLAIM = Claim("copying", "Copying", __doc__, 5, plan, measure, table, draw, verdict, DECISIVE)
