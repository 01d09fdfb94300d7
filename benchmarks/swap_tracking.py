"""Who sits where: a two-layer DeltaFormer and the same softmax Transformer learn to follow swaps of five symbols.

    python benchmarks/swap_tracking.py        # about twelve minutes on two cores

A token says which two of five seats swap their symbols; after each, the model says which symbol is in which seat. All
models have the same block, width and rate; three seeds each. Writes benchmarks/results/swap_tracking.{json,png}.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

import hf_memory

RESULTS = Path(__file__).parent / "results"
PAIRS = torch.tensor(list(itertools.combinations(range(5), 2)))  # token i swaps the seats PAIRS[i]
SIZES = {
    "vocab_size": 25,  # seats times symbols, of which the input uses as many as there are pairs
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
DELTAFORMERS = {
    "DeltaFormer, linear write": {"write_kernel": "linear", "beta_activation": "identity"},
    "DeltaFormer, softmax write": {"use_qk_norm": True},
}


def make(name: str, seed: int):
    """A two-layer model that differs in its attention alone."""
    torch.manual_seed(seed)
    if name == "Transformer":
        config = hf_memory.LinearTransformerConfig(**SIZES, layer_types=["full_attention"] * 2)
        return hf_memory.LinearTransformerForCausalLM(config)
    return hf_memory.DeltaFormerForCausalLM(hf_memory.DeltaFormerConfig(**SIZES, **DELTAFORMERS[name]))


def batch(rows: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Swaps [B, T], and the symbols in the seats after each [B, T, 5]."""
    swaps = torch.randint(len(PAIRS), (rows, length), generator=generator)
    seats, answers, each = torch.arange(5).repeat(rows, 1), [], torch.arange(rows)
    for t in range(length):
        a, b = PAIRS[swaps[:, t]].T
        seats[each, a], seats[each, b] = seats[each, b], seats[each, a].clone()
        answers.append(seats.clone())
    return swaps, torch.stack(answers, 1)


def said(model, swaps: torch.Tensor) -> torch.Tensor:
    """Logits of each symbol for each seat [B, T, 5, 5]."""
    return model(swaps, use_cache=False).logits.unflatten(-1, (5, 5))


def learn(name: str, seed: int, steps: int, length: int) -> list[dict]:
    """Train with one schedule; accuracy at the last eighth of fresh sequences, every fiftieth step."""
    model, generator = make(name, seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    fresh, right = batch(256, length, torch.Generator().manual_seed(10_000))
    curve = []
    for step in range(1, steps + 1):
        swaps, answers = batch(64, length, generator)
        loss = F.cross_entropy(said(model, swaps).flatten(0, 2), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            with torch.no_grad():
                correct = said(model, fresh).argmax(-1) == right
            accuracy = correct[:, -length // 8 :].double().mean().item()
            curve.append({"step": step, "loss": loss.item(), "accuracy": accuracy})
    print(f"{name:26} seed {seed}: accuracy after {length} swaps {curve[-1]['accuracy']:.3f}", flush=True)
    return curve


def draw(curves: dict[str, list], file: Path) -> None:
    """Accuracy over the steps, a line a seed."""
    figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for color, (name, runs) in zip(("C0", "C2", "C1"), curves.items()):
        for i, curve in enumerate(runs):
            label = name if i == 0 else None
            axis.plot([x["step"] for x in curve], [x["accuracy"] for x in curve], color=color, label=label)
    axis.axhline(0.2, color="gray", linestyle=":", label="chance")
    axis.set(xlabel="step", ylabel="accuracy at the last swaps", ylim=(0, 1.02))
    axis.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    """Train both, print, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    curves = {
        name: [learn(name, seed, options.steps, options.length) for seed in range(options.seeds)]
        for name in (*DELTAFORMERS, "Transformer")
    }
    medians = {name: statistics.median(curve[-1]["accuracy"] for curve in runs) for name, runs in curves.items()}
    RESULTS.mkdir(exist_ok=True)
    results = {**vars(options), "torch": torch.__version__, "median_accuracy": medians, "curves": curves}
    (RESULTS / "swap_tracking.json").write_text(json.dumps(results, indent=1))
    draw(curves, RESULTS / "swap_tracking.png")


if __name__ == "__main__":
    main()
