"""How early tokens can leave a model, for three confidences, with a promise about what that costs.

**Claim.** (Schuster et al., https://arxiv.org/abs/2207.07061.) Tokens leave a model after the first layer where its
prediction is sure. A threshold that is calibrated on other texts keeps a promise about how many predictions change,
and up to three times fewer layers are computed; the softmax is the best confidence by quality, a classifier the best by
speed.

**Setting.** A Llama of 8 layers of width 64, trained for 200 steps of 8 passages of 128 bytes with the loss of its
exits after 2, 4 and 6 layers. Of four thresholds each, the lowest is calibrated on 100 passages of 12 bytes with which
at most 0.25 of the predictions change, with a probability of 0.95; 60 others are then read with it. Half of a passage
is a prompt, and the rest is read byte by byte. Three seeds.

**Expected.** At most 0.25 of the predictions change, with each confidence and seed; with the best of them a byte takes
8 / 3 layers or fewer.

**What it does not show.** How long a byte takes: for so small a model, Python's time for a layer and for a confidence
are alike; `benchmarks/early_exit.py` has the time of larger ones.
"""

from statistics import mean

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from claim import Claim, Rows, spread
from hf_memory.decoding import EarlyExit, calibrate, exit_loss, fit_classifier
from pictures import COLORS
from text import SIZES, passages

LAYERS, SEEDS, STEPS, ROWS, LENGTH, ASKED, TOLERANCE = 8, 3, 200, 8, 128, 12, 0.25
THRESHOLDS = {  # 1: the whole model
    "softmax": (0.3, 0.1, 0.04, 0.02),
    "cosine": (1.0, 0.95, 0.9, 0.8),
    "classifier": (1.0, 0.85, 0.7, 0.5),
}


def plan(rows: Rows):
    """A model a seed."""
    return ({"seed": seed, "steps": STEPS} for seed in range(SEEDS))


def measure(*, seed: int, steps: int, calibrated: int = 100, asked: int = 60) -> dict:
    """Train one; then calibrate and ask each confidence, on other passages."""
    model = train(seed, steps)
    generator = torch.Generator().manual_seed(10_000)
    on, others = (passages(ASKED, n, generator, held_out=True)[0] for n in (calibrated, asked))
    learned, whole = passages(LENGTH, 30, torch.Generator().manual_seed(seed))[0], read(model, others)
    found: dict = {"whole": nats(whole, others)}
    for name, thresholds in THRESHOLDS.items():
        how: dict = {"confidence": fit_classifier(model, learned) if name == "classifier" else name}
        threshold = calibrate(model, on, tolerance=TOLERANCE, thresholds=thresholds, **how)
        with EarlyExit(model, threshold=threshold, **how) as early:
            logits = read(model, others)
        changed = (logits.argmax(-1) != whole.argmax(-1)).double().mean().item()
        costs = nats(logits, others) - found["whole"]
        found[name] = {"threshold": threshold, "layers": early.mean_depth(), "changed": changed, "nats": costs}
    return found


def train(seed: int, steps: int) -> PreTrainedModel:
    """A model that predicts at its exits too."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": LAYERS}, tie_word_embeddings=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = passages(LENGTH, ROWS, generator)[0]
        loss = exit_loss(model, model(batch, use_cache=False, output_hidden_states=True), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def read(model: PreTrainedModel, texts: Tensor) -> Tensor:
    """Logits [n, T / 2 - 1, V] of the bytes after the first of the second halves, read byte by byte."""
    half, logits = texts.shape[1] // 2, []
    for row in texts.split(1):
        cache = model(row[:, :half], use_cache=True).past_key_values
        for x in row[:, half:-1].split(1, 1):
            logits.append(model(x, past_key_values=cache, use_cache=True).logits[0])
    return torch.cat(logits).unflatten(0, (len(texts), -1))


def nats(logits: Tensor, texts: Tensor) -> float:
    """Of a byte."""
    return F.cross_entropy(logits.flatten(0, 1), texts[:, -logits.shape[1] :].flatten()).item()


def figures(rows: Rows, name: str, figure: str) -> list[float]:
    """Of all seeds."""
    return [row[name][figure] for row in rows]


def table(rows: Rows) -> Rows:
    """What each confidence saves and costs."""
    return [
        {
            "confidence": name,
            "thresholds": ", ".join(f"{x:g}" for x in figures(rows, name, "threshold")),
            f"layers of {LAYERS}": spread([row[name] for row in rows], "layers"),
            f"changed, at most {TOLERANCE}": spread([row[name] for row in rows], "changed"),
            "nats a byte more": f"{mean(figures(rows, name, 'nats')):+.3f}",
        }
        for name in THRESHOLDS
    ]


def draw(rows: Rows, figure) -> None:
    """Changed predictions over layers."""
    figure.set_size_inches(6, 4)
    axes = figure.subplots()
    for name, color, marker in zip(THRESHOLDS, COLORS, "os^"):
        found = (figures(rows, name, key) for key in ("layers", "changed"))
        axes.plot(*found, marker, color=color, label=name)
    axes.axhline(TOLERANCE, color="gray", linestyle=":")
    axes.set(xlabel=f"layers of {LAYERS}", ylabel="predictions that change; dotted: the promise")
    axes.set(xlim=(0, LAYERS + 0.2), ylim=(0, None))
    axes.legend()


def verdict(rows: Rows) -> tuple[str, str]:
    """The promise, then what it saves."""
    layers = {name: mean(figures(rows, name, "layers")) for name in THRESHOLDS}
    changed = max(max(figures(rows, name, "changed")) for name in THRESHOLDS)
    said = f"layers of {LAYERS}: " + ", ".join(f"{name} {x:.1f}" for name, x in layers.items())
    said += f"; at most {changed:.2f} of the predictions change, {TOLERANCE} are promised"
    if changed > TOLERANCE:
        return "not reproduced", said
    return ("reproduced" if min(layers.values()) <= LAYERS / 3 else "differently"), said


CLAIM = Claim("early_exit", "Early exit", __doc__, 5, plan, measure, table, draw, verdict)
