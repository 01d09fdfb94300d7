"""A separate memory for each of log T blocks of the past, compared with one memory for the whole past.

Log-linear attention, with a memory for each of log T blocks of the past, is said to recall more than the memory
that it is based on ([2506.04761](https://arxiv.org/abs/2506.04761)). With 16 channels and 400 steps it does not:
DeltaNet hardly changes, and Mamba-2 learns to recall with some seeds only, with levels and without.

**Claim.** (Guo et al., https://arxiv.org/abs/2506.04761.) Log-linear attention recalls more than the memory on which it
is based, since its state grows with the logarithm of the length. The paper shows this for Mamba-2 and Gated DeltaNet on
associative recall.

**Setting.** As in [associative recall](#associative-recall), but smaller: one layer of width 64 with one head of 16
channels, a vocabulary of 128, and a convolution over two tokens in front of the layer. Every step has 2,048 tokens in
rows of one kind: (tokens, pairs) = (32, 4) or (64, 8) in the first two fifths of the steps, then also (128, 16) and
(128, 32). There are 400 steps, the learning rate is 0.01, and there are three seeds. Trained models are asked for 4 to
48 pairs in 128 tokens, so for up to three times as many pairs as a key has channels.

**Expected.** With levels, accuracy is higher at every number of pairs from 16 on.

**How levels could help.** When most of the pairs are asked for, those that came first are in one block of 64 tokens, so
one level holds as many of them as the memory without levels does. The benefit of levels here can only be that they
separate these pairs from what was read since.

**How the results differ.** Within these steps and at this learning rate, Mamba-2 learns to recall with some seeds and
not with others, both with levels and without. If the weights of all levels are fixed at one, the model computes the
same function as without levels, with the same gradients. No other learning rate was tried.
"""

from functools import partial
from random import Random

import torch

from claim import Claim, Rows, best_runs
from learning import accuracy, in_turn, learn, make
from pictures import COLORS, curve, label_ends, plain_ticks
from recall import MEMORY, SIZES, WithTheTokenBefore, by_pairs, questions, table

DECISIVE = 32  # pairs whose accuracy is that of a run
KEY_SIZE = 16
VOCABULARY = 128
RATE = 1e-2
SEEDS = 3
STEPS = 400
TOKENS = 2048
LENGTH = 128
SHORT = ((32, 4), (64, 8))
LONG = ((128, 16), (128, 32))
ASKED = (4, 8, 16, 32, 48)
BASES = {"DeltaNet": {}, "Mamba-2": {"linear_value_head_dim": 16}}
WITH = ", log-linear"
MODELS = tuple(base + levels for base in BASES for levels in ("", WITH))


def kinds(steps: int, seed: int):
    """Rows of every step: short ones alone in the first two fifths."""
    choose = Random(seed).choice
    chosen = (choose(SHORT if 5 * i < 2 * steps else SHORT + LONG) for i in range(steps))
    return (partial(questions, *kind, vocabulary=VOCABULARY) for kind in chosen)


def plan(rows: Rows):
    """Three seeds of each."""
    return (
        {"model": model, "lr": RATE, "seed": seed, "steps": STEPS}
        for seed in range(SEEDS)
        for model in MODELS
    )


def measure(*, model: str, lr: float, seed: int, steps: int) -> dict:
    """Train one, then ask for few pairs and for many."""
    torch.manual_seed(seed)
    base = model.removesuffix(WITH)
    sizes = {
        **SIZES,
        "vocab_size": VOCABULARY,
        "head_dim": KEY_SIZE,
        "max_position_embeddings": LENGTH,
    }
    options = {
        **MEMORY,
        "linear_key_head_dim": KEY_SIZE,
        **BASES[base],
        "levels": "log" if model != base else "one",
    }
    learner = make(base, sizes, **options)
    learner.set_input_embeddings(WithTheTokenBefore(learner.get_input_embeddings()))
    found = learn(
        learner, in_turn(kinds(steps, seed)), lr=lr, steps=steps, rows=TOKENS, seed=seed, solved=2
    )
    ask = partial(questions, LENGTH, vocabulary=VOCABULARY)
    asked = [accuracy(learner, partial(ask, pairs), rows=64 * LENGTH) for pairs in ASKED]
    return found | {"asked": asked, "accuracy": asked[ASKED.index(DECISIVE)]}


def draw(rows: Rows, figure) -> None:
    """Accuracy over pairs."""
    figure.set_size_inches(7, 4)
    axes = figure.subplots()
    for model, runs in best_runs(rows).items():
        style = {"color": COLORS[list(BASES).index(model.removesuffix(WITH))], "label": model}
        curve(
            axes,
            ASKED,
            [row["asked"] for row in runs],
            linestyle="-" if model.endswith(WITH) else "--",
            **style,
        )
    plain_ticks(axes, ASKED)
    axes.set(
        xlabel=f"pairs in {LENGTH} tokens, with {KEY_SIZE} key channels",
        ylabel="accuracy",
        ylim=(0, 1.02),
    )
    label_ends(axes)


def verdict(rows: Rows) -> tuple[str, str]:
    """Which base gains by levels."""
    found = {model: by_pairs(runs, ASKED) for model, runs in best_runs(rows).items()}
    gains = {
        base: {n: found[base + WITH][n] - found[base][n] for n in ASKED if n >= 16}
        for base in BASES
    }
    figures = "change in accuracy by levels: " + "; ".join(
        f"{base} " + ", ".join(f"{x:+.2f} with {n} pairs" for n, x in gain.items())
        for base, gain in gains.items()
    )
    better = [min(gain.values()) > 0 for gain in gains.values()]
    return (
        "reproduced" if all(better) else "partly reproduced" if any(better) else "not reproduced"
    ), figures


CLAIM = Claim(
    "levels",
    "Log-linear attention",
    __doc__,
    4,
    plan,
    measure,
    partial(table, asked=ASKED, decisive=DECISIVE),
    draw,
    verdict,
)
