"""Time of a training step of a memory layer by the number of slots: `python benchmarks/memory_layers.py`.

CPU time of one thread for forward, backward and step, the least of five, each table in a process of its own. Values
learn by SparseAdam on sparse gradients, or by AdamW on dense ones, whose time and memory grow with the table. Writes
benchmarks/results/memory_layers.json.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from hf_memory import LinearTransformerConfig, parameter_groups
from hf_memory.feed_forward import MemoryValues, ProductKeyMemory
from ops import hardware

RESULTS = Path(__file__).parent / "results" / "memory_layers.json"
HALF_KEYS = (128, 256, 512, 1024)
TOKENS, WIDTH, REPEATS = 512, 64, 5
SHAPE = {"hidden_size": WIDTH, "product_key_heads": 4, "product_key_dim": 128, "product_key_top_k": 32}


def measure(half_keys: int, sparse: bool) -> dict:
    """One table."""
    torch.manual_seed(0)
    config = LinearTransformerConfig(**SHAPE, num_product_keys=half_keys, sparse_memory_gradients=sparse)
    model = torch.nn.ModuleDict({"memory": ProductKeyMemory(config), "table": MemoryValues(config)})
    model["memory"].init_own_parameters()
    others, values = parameter_groups(model)
    optimizers = [torch.optim.AdamW([others]), (torch.optim.SparseAdam if sparse else torch.optim.AdamW)([values])]
    spent = [step(model, optimizers) for _ in range(REPEATS + 1)][1:]  # the first makes the moments
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"slots": half_keys**2, "sparse": sparse, "step_ms": 1e3 * min(spent), "process_MB": peak / 1024}


def step(model: torch.nn.ModuleDict, optimizers: list[torch.optim.Optimizer]) -> float:
    """CPU seconds of a step on new tokens."""
    x, target = torch.randn(2, 1, TOKENS, WIDTH)
    start = time.process_time()
    (model["memory"](x, model["table"]) - target).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return time.process_time() - start


def main() -> None:
    """Print and write the table, or measure one row for it."""
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        print(json.dumps(measure(int(sys.argv[1]), sys.argv[2] == "sparse")))
        return
    rows = []
    for kind in ("sparse", "dense"):
        for half_keys in HALF_KEYS:
            command = [sys.executable, __file__, str(half_keys), kind]
            rows.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
            print(f"{kind:6} {half_keys**2:8} slots  {rows[-1]['step_ms']:8.1f} ms  {rows[-1]['process_MB']:6.0f} MB")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({**SHAPE, "tokens": TOKENS, **hardware("cpu"), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
