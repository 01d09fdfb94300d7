"""The gated delta rule on the CPU against transformers' own PyTorch form: `python benchmarks/delta_rule_cpu.py`.

Times alternate, and the ratio is the median of ratios of neighbours, so that a busy machine shows in both.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from torch.nn import functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from hf_memory.ops import delta_rule


def make_inputs(B: int, T: int, H: int, D: int) -> list[torch.Tensor]:
    """q, k, v [B, T, H, D], beta and g [B, T, H]."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, D) for _ in range(3))
    beta, g = torch.rand(B, T, H), F.logsigmoid(torch.randn(B, T, H))
    return [x.requires_grad_() for x in (q, F.normalize(k, dim=-1), v, beta, g)]


def seconds(call) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(ours, theirs, runs: int) -> dict[str, float]:
    """Median seconds of both, called in turn, and the median of their ratios."""
    ours(), theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(runs)]
    return {
        "ours": statistics.median(a for a, _ in pairs),
        "transformers": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
    }


def measure(shape: dict[str, int], runs: int) -> dict[str, dict[str, float]]:
    """Forward, and forward with backward, after a check that both compute the same."""
    inputs = make_inputs(**shape)
    q, k, v, beta, g = inputs

    def ours():
        return delta_rule(q, k, v, beta, g)[0]

    def theirs():
        return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0]

    torch.testing.assert_close(ours(), theirs(), rtol=1e-4, atol=1e-5)
    calls = {
        "forward": lambda form: torch.no_grad()(form),
        "forward+backward": lambda form: lambda: torch.autograd.grad(form().sum(), inputs),
    }
    return {name: compare(call(ours), call(theirs), runs) for name, call in calls.items()}


def main() -> None:
    """Print the table and, where asked, write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("B", 1), ("T", 4096), ("H", 8), ("D", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape = {name: getattr(arguments, name) for name in "BTHD"}
    table = {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, {arguments.threads} threads",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "shape": f"{shape}, float32",
        "seconds": measure(shape, arguments.runs),
    }
    print(*(table[name] for name in ("machine", "versions", "shape")), sep="\n")
    for name, row in table["seconds"].items():
        print(f"{name:18} ours {row['ours']:.3f} s  transformers {row['transformers']:.3f} s  ratio {row['ratio']:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
