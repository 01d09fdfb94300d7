"""Training and prefill of whole models: tokens a second and peak memory, by family and length.

    python benchmarks/training.py            # about four minutes on two cores

Every model has the same width, depth and vocabulary, and a process of its own, since a peak is of a process. On CUDA
models are larger and in bfloat16. Training is forward, backward and a step of AdamW; medians of steps after a first
one. Peak memory is above what the process held before. Writes benchmarks/results/training.{json,png}.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait sleep: before torch is imported

import matplotlib.pyplot as plt
import torch

from decode import DEVICE, DTYPE, MODELS, make

RESULTS = Path(__file__).parent / "results"
ON_GPU = DEVICE.type == "cuda"
LENGTHS = (2048, 8192, 32768) if ON_GPU else (512, 2048)
REPEATS = 5 if ON_GPU else 3
WIDTH, LAYERS = (1024, 24) if ON_GPU else (256, 4)
SIZES = {
    "vocab_size": 8192,
    "hidden_size": WIDTH,
    "intermediate_size": 11 * WIDTH // 4,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": WIDTH // 64,
    "max_position_embeddings": 32768,
}


def measure(name: str, length: int) -> dict:
    """One model at one length."""
    before = peak_bytes()
    model = make(name, SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(SIZES["vocab_size"], (1, length), device=model.device)

    def prefill():
        with torch.no_grad():
            model(tokens, use_cache=True, logits_to_keep=1)

    def train():
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    row = {"model": name, "length": length, "prefill": length / median_seconds(prefill)}
    return row | {"training": length / median_seconds(train), "peak_megabytes": (peak_bytes() - before) / 1e6}


def median_seconds(step) -> float:
    """The median seconds of a step, after a first one."""
    taken = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        step()
        if ON_GPU:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def peak_bytes() -> int:
    """That this process has held at once."""
    return torch.cuda.max_memory_allocated() if ON_GPU else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def draw(rows: list[dict]) -> None:
    """Training, prefill and memory over the length."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    columns = {"training": "tokens/s trained", "prefill": "tokens/s read", "peak_megabytes": "peak of training, MB"}
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        for axis, column in zip(axes, columns):
            style = {"marker": "o", "label": name, "linestyle": "--" if name == "Llama" else "-"}
            axis.plot([row["length"] for row in mine], [row[column] for row in mine], **style)
    for axis, label in zip(axes, columns.values()):
        axis.set(xscale="log", yscale="log", xlabel="length, tokens", ylabel=label)
    axes[0].legend(fontsize=7)
    figure.savefig(RESULTS / "training.png", dpi=120)


def main() -> None:
    """Print, draw and write the table; with a model and a length, that row alone as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("Llama", *MODELS))
    parser.add_argument("--length", type=int)
    arguments = parser.parse_args()
    if arguments.model:
        print(json.dumps(measure(arguments.model, arguments.length)))
        return
    rows = []
    for name in ("Llama", *MODELS):
        for length in LENGTHS:
            command = [sys.executable, __file__, "--model", name, "--length", str(length)]
            rows.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
            row = {key: value if isinstance(value, str) else round(value) for key, value in rows[-1].items()}
            print("{model:16} {length:6} tokens: training {training:8} tokens/s".format(**row), end="")
            print("  prefill {prefill:8} tokens/s  peak {peak_megabytes:6} MB".format(**row), flush=True)
    machine = {
        "device": torch.cuda.get_device_name() if ON_GPU else f"cpu, {torch.get_num_threads()} threads",
        "dtype": str(DTYPE).removeprefix("torch."),
        "torch": torch.__version__,
    }
    (RESULTS / "training.json").write_text(json.dumps({**machine, **SIZES, "rows": rows}, indent=1))
    draw(rows)


if __name__ == "__main__":
    main()
