"""Time and memory of each pattern of attention by length: `python benchmarks/attention_patterns.py`.

One layer of the Memory Transformer reads a text and learns from it, forward and backward, on one CPU thread in float32.
Sizes grow with the text as in the papers: strides and blocks of patterns with far tokens are sqrt(T) long, routing has
sqrt(T) buckets, and reformer one for every 32 tokens. Seconds are the least of four turns; bytes are the most that
tensors took at once beyond what was there before. Writes benchmarks/results/attention_patterns.json.
"""

import json
import math
import platform
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hf_memory import MemoryTransformerConfig, MemoryTransformerForCausalLM
from hf_memory.modeling.transformer import PATTERNS

RESULTS = Path(__file__).parent / "results"
LENGTHS = (1024, 2048, 4096, 8192, 16384)
SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 256, "pattern_size": 64}
TURNS = 4


WINDOWS: dict[str, dict] = {"sliding": {}, "longformer": {"num_sink_tokens": 16}}
LONGEST_SPANS = "adaptive_span, longest"


def mixer_of(pattern: str, T: int) -> torch.nn.Module:
    """A layer's mixer for a text of T tokens."""
    root = math.isqrt(T)
    words = ("strided", "strided_by_head", "fixed", "fixed_by_head", "linformer")
    growing = {name: {"pattern_size": root} for name in words} | {"reformer": {"num_buckets": T // 32}}
    growing |= {name: {"num_buckets": root // 2 * 2} for name in ("routing", "routing_by_head")}
    word = pattern.partition(",")[0]
    options = {**SIZES, "position": "none", "pattern": word, **growing.get(word, {})}
    if word in WINDOWS:
        options |= {"pattern": "full", "layer_types": ["sliding_heads"], "sliding_window": 64, **WINDOWS[word]}
    mixer = MemoryTransformerForCausalLM(MemoryTransformerConfig(**options)).model.layers[0].mixer
    if pattern == LONGEST_SPANS:
        torch.nn.init.ones_(mixer.relation.span)
    return mixer


def seconds(mixer: torch.nn.Module, x: torch.Tensor) -> float:
    """The seconds that one forward and backward take."""
    start = time.thread_time()
    mixer(x)[0].sum().backward()
    return time.thread_time() - start


def most_bytes(mixer: torch.nn.Module, x: torch.Tensor) -> int:
    """The most bytes that tensors take at once during one forward and backward."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        mixer(x)[0].sum().backward()
    held = most = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def main() -> None:
    """Print and write the table."""
    torch.set_num_threads(1)
    rows = []
    for T in LENGTHS:
        x = torch.randn(1, T, SIZES["hidden_size"])
        mixers = {name: mixer_of(name, T) for name in (*PATTERNS, *WINDOWS, LONGEST_SPANS)}
        turns = [{name: seconds(mixer, x) for name, mixer in mixers.items()} for _ in range(TURNS)]
        for name, mixer in mixers.items():
            row = {"T": T, "pattern": name, "seconds": min(turn[name] for turn in turns), "bytes": most_bytes(mixer, x)}
            rows.append(row)
            print(f"{T:6} {name:22} {row['seconds']:8.3f} s {row['bytes'] / 2**20:8.0f} MiB", flush=True)
    machine = {"processor": platform.machine(), "torch": torch.__version__, **SIZES}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "attention_patterns.json").write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
