"""How early tokens can leave a model, for three kinds of confidence, with a guaranteed limit on changed predictions.

Tokens may leave a model where its prediction is confident, with a guaranteed limit on how many predictions change
([2207.07061](https://arxiv.org/abs/2207.07061)). The limit holds with each confidence and seed, and a byte takes
less than 3 of 8 layers; how long it takes was not measured here.

**Claim.** (Schuster et al., https://arxiv.org/abs/2207.07061.) Tokens leave a model after the first layer at which its
prediction is confident. A threshold that is calibrated on other texts guarantees a limit on how many predictions
change, and up to three times fewer layers are computed. The confidence with the best quality is the softmax, and the
one with the best speed is a classifier.

**Setting.** A Llama model of 8 layers of width 64 is trained for 200 steps of 8 passages of 128 bytes, with a loss that
includes its exits after 2, 4 and 6 layers. Each kind of confidence has four thresholds. On 100 passages of 12 bytes,
calibration chooses the lowest one with which at most 0.25 of the predictions change, with a probability of 0.95. Then
60 other passages are read with it. Half of a passage is a prompt, and the rest is read byte by byte. There are three
seeds.

**Expected.** At most 0.25 of the predictions change, with each confidence and each seed. With the best confidence, a
byte takes 8 / 3 layers or fewer.

**What this does not show.** It does not show how long a byte takes: in so small a model, Python takes about as long for
a layer as for a confidence. The time of larger models was measured once.
"""

from statistics import mean

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from claim import Claim, Rows, spread
from hf_memory.cache_argument import CACHE, cache_of
from hf_memory.decoding import EarlyExit, calibrate, exit_loss, fit_classifier
from pictures import COLORS
from text import SIZES, passages

LAYERS = 8
SEEDS = 3
STEPS = 200
ROWS = 8
LENGTH = 128
ASKED = 12
TOLERANCE = 0.25
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
    learned = passages(LENGTH, 30, torch.Generator().manual_seed(seed))[0]
    whole = read(model, others)
    found: dict = {"whole": nats(whole, others)}
    for name, thresholds in THRESHOLDS.items():
        how: dict = {"confidence": fit_classifier(model, learned) if name == "classifier" else name}
        threshold = calibrate(model, on, tolerance=TOLERANCE, thresholds=thresholds, **how)
        with EarlyExit(model, threshold=threshold, **how) as early:
            logits = read(model, others)
        changed = (logits.argmax(-1) != whole.argmax(-1)).double().mean().item()
        costs = nats(logits, others) - found["whole"]
        found[name] = {
            "threshold": threshold,
            "layers": early.mean_depth(),
            "changed": changed,
            "nats": costs,
        }
    return found


def train(seed: int, steps: int) -> PreTrainedModel:
    """A model that predicts at its exits too."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(**{**SIZES, "num_hidden_layers": LAYERS}, tie_word_embeddings=True)
    )
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
    half = texts.shape[1] // 2
    logits = []
    for row in texts.split(1):
        cache = cache_of(model(row[:, :half], use_cache=True))
        for x in row[:, half:-1].split(1, 1):
            logits.append(model(x, **{CACHE: cache}, use_cache=True).logits[0])
    return torch.cat(logits).unflatten(0, (len(texts), -1))


def nats(logits: Tensor, texts: Tensor) -> float:
    """The mean nats of a byte."""
    return F.cross_entropy(logits.flatten(0, 1), texts[:, -logits.shape[1] :].flatten()).item()


def figures(rows: Rows, name: str, figure: str) -> list[float]:
    """One figure of all seeds."""
    return [row[name][figure] for row in rows]


def table(rows: Rows) -> Rows:
    """What each confidence saves and costs."""
    return [
        {
            "confidence": name,
            "thresholds": ", ".join(f"{x:g}" for x in figures(rows, name, "threshold")),
            f"mean layers of {LAYERS}": spread([row[name] for row in rows], "layers"),
            f"changed predictions (limit {TOLERANCE})": spread(
                [row[name] for row in rows], "changed"
            ),
            "increase of the loss, nats per byte": f"{mean(figures(rows, name, 'nats')):+.3f}",
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
    axes.set(xlabel=f"mean layers of {LAYERS}", ylabel="changed predictions; dotted: the limit")
    axes.set(xlim=(0, LAYERS + 0.2), ylim=(0, None))
    axes.legend()


def verdict(rows: Rows) -> tuple[str, str]:
    """The promise, then what it saves."""
    layers = {name: mean(figures(rows, name, "layers")) for name in THRESHOLDS}
    changed = max(max(figures(rows, name, "changed")) for name in THRESHOLDS)
    said = f"mean layers of {LAYERS}: " + ", ".join(f"{name} {x:.1f}" for name, x in layers.items())
    said += f"; at most {changed:.2f} of the predictions change, and the guaranteed limit is {TOLERANCE}"
    if changed > TOLERANCE:
        return "not reproduced", said
    return ("reproduced" if min(layers.values()) <= LAYERS / 3 else "partly reproduced"), said


CLAIM = Claim("early_exit", "Early exit", __doc__, 5, plan, measure, table, draw, verdict)
