"""Peak memory of DeltaFormer's forward and backward by length: `python benchmarks/deltaformer_memory.py`.

On the CPU: the peak of the process above what it held before, each length in a process of its own. On CUDA: what the
allocator reports. Writes benchmarks/results/deltaformer_memory.json.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait sleep: before torch is imported

import torch

from hf_memory.ops import deltaformer

RESULTS = Path(__file__).parent / "results"
LENGTHS = (2048, 4096, 8192)
SHAPE = {"B": 1, "H": 4, "D": 64}


def peak_megabytes(T: int) -> float:
    """The memory that one forward and backward take."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (SHAPE["B"], T, SHAPE["H"], SHAPE["D"])
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
    beta = torch.rand(shape[:3], device=device, requires_grad=True)
    before = _peak()
    deltaformer(q, k, v, beta)[0].sum().backward()
    return (_peak() - before) / 1e6


def _peak() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Print and write the table, or measure one length for it."""
    if len(sys.argv) > 1:
        print(peak_megabytes(int(sys.argv[1])))
        return
    rows = []
    for T in LENGTHS:
        printed = subprocess.run([sys.executable, __file__, str(T)], capture_output=True, text=True, check=True).stdout
        rows.append(
            {"T": T, "peak_megabytes": float(printed), "scores_of_all_tokens_megabytes": SHAPE["H"] * T * T * 4e-6}
        )
        print(f"T {T:6}  peak {rows[-1]['peak_megabytes']:8.1f} MB  T^2 scores {4e-6 * SHAPE['H'] * T * T:8.1f} MB")
    results = {
        **SHAPE,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "deltaformer_memory.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
