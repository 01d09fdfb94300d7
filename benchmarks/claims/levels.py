"""A memory for each of log T blocks of the past, against one for all of it.

**Claim.** (Guo et al., https://arxiv.org/abs/2506.04761.) Log-linear attention recalls more than its base, as its state
grows with the logarithm of the length: the paper's Mamba-2 and Gated DeltaNet, on associative recall.

**Setting.** As [associative recall](#associative-recall), smaller: one layer of width 64 with one head of 16 channels,
vocabulary 128, a convolution over two tokens before it. Every step has 2,048 tokens of one kind of rows, (tokens,
pairs) = (32, 4) or (64, 8) in the first two fifths, then also (128, 16) and (128, 32). 400 steps, learning rate 0.01;
three seeds. Trained models are asked for 4 to 48 pairs in 128 tokens, so for up to three
times as many as a key has channels.

**Expected.** With levels, more is recalled at every number of pairs from 16 on.

**How it can help.** Pairs that came first are one block of 64 tokens by the time most of them are asked for, so a level
holds no fewer of them than the base does; what levels can do here is to leave out what was read since.

**Where it falls short.** Within these steps at this rate Mamba-2 learns to recall with some seeds and not with others,
with levels and without. With the weights of levels fixed at one it is the same function as without, and so are its
gradients. No other rate was tried.
"""

from functools import partial
from random import Random

import torch

from claim import Claim, Rows, best_runs
from learning import accuracy, in_turn, learn, make
from pictures import COLORS, curve, plain_ticks
from recall import MEMORY, SIZES, WithTheTokenBefore, by_pairs, questions, table

DECISIVE = 32  # pairs whose accuracy is that of a run
KEY_SIZE, VOCABULARY, RATE, SEEDS, STEPS, TOKENS, LENGTH = 16, 128, 1e-2, 3, 400, 2048, 128
SHORT, LONG, ASKED = ((32, 4), (64, 8)), ((128, 16), (128, 32)), (4, 8, 16, 32, 48)
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
    return ({"model": model, "lr": RATE, "seed": seed, "steps": STEPS} for seed in range(SEEDS) for model in MODELS)


def measure(*, model: str, lr: float, seed: int, steps: int) -> dict:
    """Train one, then ask for few pairs and for many."""
    torch.manual_seed(seed)
    base = model.removesuffix(WITH)
    sizes = {**SIZES, "vocab_size": VOCABULARY, "head_dim": KEY_SIZE, "max_position_embeddings": LENGTH}
    options = {**MEMORY, "linear_key_head_dim": KEY_SIZE, **BASES[base], "levels": "log" if model != base else "one"}
    learner = make(base, sizes, **options)
    learner.set_input_embeddings(WithTheTokenBefore(learner.get_input_embeddings()))
    found = learn(learner, in_turn(kinds(steps, seed)), lr=lr, steps=steps, rows=TOKENS, seed=seed, solved=2)
    ask = partial(questions, LENGTH, vocabulary=VOCABULARY)
    asked = [accuracy(learner, partial(ask, pairs), rows=64 * LENGTH) for pairs in ASKED]
    return found | {"asked": asked, "accuracy": asked[ASKED.index(DECISIVE)]}


def draw(rows: Rows, figure) -> None:
    """Accuracy over pairs."""
    figure.set_size_inches(7, 4)
    axes = figure.subplots()
    for model, runs in best_runs(rows).items():
        style = {"color": COLORS[list(BASES).index(model.removesuffix(WITH))], "label": model}
        curve(axes, ASKED, [row["asked"] for row in runs], linestyle="-" if model.endswith(WITH) else "--", **style)
    plain_ticks(axes, ASKED)
    axes.set(xlabel=f"pairs in {LENGTH} tokens, with {KEY_SIZE} key channels", ylabel="accuracy", ylim=(0, 1.02))
    axes.legend()


def verdict(rows: Rows) -> tuple[str, str]:
    """Which base gains by levels."""
    found = {model: by_pairs(runs, ASKED) for model, runs in best_runs(rows).items()}
    gains = {base: {n: found[base + WITH][n] - found[base][n] for n in ASKED if n >= 16} for base in BASES}
    figures = "gain by levels: " + "; ".join(
        f"{base} " + ", ".join(f"{x:+.2f} of {n} pairs" for n, x in gain.items()) for base, gain in gains.items()
    )
    better = [min(gain.values()) > 0 for gain in gains.values()]
    return ("reproduced" if all(better) else "differently" if any(better) else "not reproduced"), figures


CLAIM = Claim(
    "levels", "Levels", __doc__, 4, plan, measure, partial(table, asked=ASKED, decisive=DECISIVE), draw, verdict
)
