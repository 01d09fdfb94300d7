"""Time of log-linear attention by length, beside ops without levels and attention: `python benchmarks/log_linear.py`.

Seconds of one CPU thread in float32, forward and forward with backward, the lesser of two turns in which all are called
one after the other. If a form needs T log2 T, its microseconds for each token and each of log2 T levels do not grow; if
it needs T, nor do those for each token. Writes benchmarks/results/log_linear.json.
"""

import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from hf_memory.ops import OPS, delta_rule, linear_attention, log_linear_attention

RESULTS = Path(__file__).parent / "results"
LENGTHS = (1024, 2048, 4096, 8192, 16384)
SHAPE = {"B": 1, "H": 4, "K": 64, "V": 64}
TURNS = 2


def calls(T: int) -> dict[str, tuple[Callable, dict]]:
    """What is timed, and its arguments."""
    example = next(op.example for op in OPS if op.op is log_linear_attention)
    found: dict[str, tuple[Callable, dict]] = {}
    for name, op in (("scalar gate", linear_attention), ("Gated DeltaNet", delta_rule)):
        arguments = example(T=T, decay="scalar", delta=op is delta_rule, levels=(T - 1).bit_length(), **SHAPE)
        del arguments["initial_state"]
        found[f"log-linear, {name}"] = log_linear_attention, arguments
        found[name] = op, {n: x for n, x in arguments.items() if n != "level_weights"}
    found["attention (SDPA)"] = attention, {n: arguments[n] for n in "qkv"}
    return found


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor]:
    """Causal softmax attention of [B, T, H, D]."""
    return (F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True),)


def seconds(op: Callable, arguments: dict, backward: bool) -> float:
    """The seconds that one call takes."""
    arguments = {n: x.detach().requires_grad_(backward) for n, x in arguments.items()}
    start = time.thread_time()
    with torch.set_grad_enabled(backward):
        o = op(**arguments)[0]
    if backward:
        o.sum().backward()
    return time.thread_time() - start


def main() -> None:
    """Print and write the table."""
    torch.set_num_threads(1)
    rows = []
    for T in LENGTHS:
        of_length = calls(T)
        for backward in (False, True):
            turns = [[seconds(*call, backward) for call in of_length.values()] for _ in range(TURNS)]
            for name, least in zip(of_length, map(min, zip(*turns))):
                a_token = 1e6 * least / T
                a_level = a_token / math.log2(T)
                rows.append({"T": T, "form": name, "backward": backward, "us_a_token": a_token, "and_level": a_level})
                how = "with backward" if backward else "forward"
                print(f"T {T:6}  {name:28} {how:14} {a_token:8.1f} us a token, {a_level:6.2f} a token and level")
    results = {**SHAPE, "cpu": platform.processor() or platform.machine(), "torch": torch.__version__, "rows": rows}
    (RESULTS / "log_linear.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
