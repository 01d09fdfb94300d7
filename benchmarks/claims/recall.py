"""Associative recall (MQAR): pairs of keys and values, then keys whose value is asked.

**Claim.** (Arora et al., https://arxiv.org/abs/2312.04927.) Attention recalls all pairs; linear attention fails where
pairs exceed its key size; the delta rule keeps them (https://arxiv.org/abs/2406.06484), gated (https://arxiv.org/abs/2412.06464,
https://arxiv.org/abs/2510.26692) or not; DeltaFormer is as attention (https://arxiv.org/abs/2505.19488); Titans with a
deep memory are better than with a linear one of the same heads (https://arxiv.org/abs/2501.00663).

**Setting.** Width 64, two heads of 32 channels, vocabulary 256. The first layer is attention over two tokens, so that a
value can see its key (Zoology has short convolutions for this); the second is what the name says. Transformers' Llama
and Mamba-2 have two layers of their own. After the pairs keys follow, each with a filler after it, and the loss of
their values is taken there alone. A run is a curriculum: (tokens, pairs) = (64, 4), (128, 8), (256, 16), each until
99.5 % are right or for at most 3,000 steps of 4,096 tokens. Learning rates 0.003 and 0.01, three seeds at the better
one. Trained models are then asked for 4 to 64 pairs in 256 tokens.

**Expected.** At (256, 16) 0.99 for attention, DeltaFormer, DeltaNet, Gated DeltaNet and KDA; linear attention below 0.5
where pairs exceed its key size.
"""

from functools import partial
from statistics import mean

import torch

from claim import Claim, Rows, best_runs, spread, sweep
from learning import IGNORED, accuracy, learn, make

KEY_SIZE, VOCABULARY, RATES, SEEDS = 32, 256, (1e-2, 3e-3), 3
STAGES, TOKENS, STEPS = ((64, 4), (128, 8), (256, 16)), 4096, 3000
ASKED = (4, 8, 16, 32, 64)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": KEY_SIZE,
    "initializer_range": 64**-0.5,
    "tie_word_embeddings": True,
}
HYBRID = {"layer_types": ["sliding_attention", "memory"], "sliding_window": 2}
MODELS = {
    "DeltaNet": HYBRID,
    "linear attention": HYBRID,
    "attention": {**HYBRID, "layer_types": ["sliding_attention", "full_attention"]},
    "Gated DeltaNet": HYBRID,
    "KDA": HYBRID,
    "DeltaFormer": HYBRID,
    "GLA": HYBRID,
    "Mamba-2": HYBRID,
    "retention": HYBRID,
    "Titans": HYBRID,
    "Titans, linear": HYBRID,
    "softmax attention": {},
    "transformers' Mamba-2": {},
}
NAMED = ("DeltaNet", "attention", "Gated DeltaNet", "KDA", "DeltaFormer")
DECISIVE = (*NAMED, "linear attention")


def questions(length: int, pairs: int, rows: int, generator: torch.Generator):
    """Pairs, then keys with a filler after each; the value of a key is its target."""
    half, rest = VOCABULARY // 2, length - 2 * pairs
    keys = 1 + torch.rand(rows, half - 1, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(half, VOCABULARY, (rows, pairs), generator=generator)
    asked = torch.randint(pairs, (rows, rest), generator=generator)
    asks = (torch.arange(rest) % 2 == 0).expand(rows, -1)
    tokens = torch.cat([torch.stack([keys, values], 2).flatten(1), keys.gather(1, asked) * asks], 1)
    targets = torch.full_like(tokens, IGNORED)
    targets[:, 2 * pairs :] = values.gather(1, asked).where(asks, torch.tensor(IGNORED))
    return tokens, targets


def plan(rows: Rows):
    """Every model with every rate, then three seeds with the best."""
    return sweep(MODELS, RATES, SEEDS, rows, steps=STEPS)


def measure(*, model: str, lr: float, seed: int, steps: int) -> dict:
    """Train one through the curriculum, then ask for more pairs."""
    torch.manual_seed(seed)
    learner = make("linear attention" if model == "attention" else model, SIZES, **MODELS[model])
    found = {"seconds": 0.0, "stages": []}
    for length, pairs in STAGES:
        task = partial(questions, length, pairs)
        learner.train()
        stage = learn(learner, task, lr=lr, steps=steps, rows=TOKENS // length, seed=seed, solved=0.995)
        found["seconds"] += stage["seconds"]
        found["stages"].append([length, pairs, stage["steps"], accuracy(learner, task, rows=64)])
    found["asked"] = [accuracy(learner, partial(questions, 256, pairs), rows=64) for pairs in ASKED]
    return found | {"accuracy": found["stages"][-1][-1]}


def by_pairs(runs: Rows) -> list[float]:
    """Means over seeds."""
    return [mean(values) for values in zip(*(row["asked"] for row in runs))]


def table(rows: Rows) -> Rows:
    """Accuracy by model."""
    return [
        {
            "model": model,
            **{
                f"({t}, {n})": f"{mean(row['stages'][i][-1] for row in runs):.3f}"
                for i, (t, n) in enumerate(STAGES[:-1])
            },
            "(256, 16)": spread(runs, "accuracy"),
            **{f"{n} pairs": f"{x:.2f}" for n, x in zip(ASKED[3:], by_pairs(runs)[3:])},
            "rate": runs[0]["lr"],
            "seeds": len(runs),
        }
        for model, runs in best_runs(rows).items()
    ]


def draw(rows: Rows, figure) -> None:
    """Accuracy over pairs / key size."""
    figure.set_size_inches(6.5, 4)
    axes = figure.subplots()
    for model, runs in best_runs(rows).items():
        axes.plot([n / KEY_SIZE for n in ASKED], by_pairs(runs), marker="o", label=f"{model} ({len(runs)})")
    axes.axvline(1, color="gray", linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="pairs / key size, in 256 tokens", ylabel="accuracy (seeds)", ylim=(0, 1.02))
    axes.legend(fontsize=7)


def verdict(rows: Rows) -> tuple[str, str]:
    """Those that should recall do, and linear attention does not."""
    found = best_runs(rows)
    low = {m: min(row["accuracy"] for row in found[m]) for m in NAMED}
    beyond = by_pairs(found["linear attention"])[-1]
    said = ", ".join(f"{m} {x:.3f}" for m, x in low.items()) + f"; linear attention at 64 pairs {beyond:.2f}"
    if min(low.values()) < 0.99 or beyond > 0.5:
        return "differently", f"worst of three seeds: {said}"
    return "reproduced", f"worst of three seeds: {said}"


CLAIM = Claim("recall", "Associative recall", __doc__, 500, plan, measure, table, draw, verdict, DECISIVE)
