"""All that waits for a GPU, in one call of at most ten minutes: `python benchmarks/on_gpu.py`.

Correctness comes first: every kernel against the reference in float64, outputs, states and gradients, in both dtypes
and at two head sizes; what is wrong is not timed. Then the tables of ops.py, training.py and decode.py, each
for its part of the time. Results are in benchmarks/results/; `--check` stops after the first part.
"""

import argparse
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.utils._pytree import tree_flatten, tree_map

from hf_memory.ops import OPS

TABLES = {"ops.py": 330, "training.py": 110, "decode.py": 150}  # seconds
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}  # of the largest number; products of float32 are in tf32x3
SIZES = ((64, torch.float32), (128, torch.bfloat16))  # channels of a head, and a dtype
SHAPES = ({"B": 2, "T": 200}, {"B": 1, "T": 1100})  # the second is cut into segments


def results_of(op, arguments: dict, backend: str) -> list[torch.Tensor]:
    """Output, final state, and the gradients of all inputs."""
    o, state = op(**arguments, output_final_state=True, backend=backend)
    outputs = [x for x in tree_flatten((o, state))[0] if x is not None and x.is_floating_point()]
    inputs = [x for x in tree_flatten(arguments)[0] if isinstance(x, torch.Tensor) and x.requires_grad]
    generator = torch.Generator(o.device).manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator, device=x.device)).sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(loss, inputs, allow_unused=True)]


def error(op, example: dict, dtype: torch.dtype, device: str = "cuda") -> float:
    """The largest difference of a kernel from the reference, on the scale of the largest number of each tensor."""

    def to(x, dtype):
        is_number = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.detach().to(device, dtype).requires_grad_() if is_number else x

    rounded = tree_map(lambda x: to(x, dtype), example)
    exact = tree_map(lambda x: to(x, torch.float64), rounded)
    both = zip(results_of(op, rounded, "triton"), results_of(op, exact, "reference"))
    pairs = [(a, b) for a, b in both if a is not None and b is not None]
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() for a, b in pairs)


def check() -> bool:
    """Print a line for each form, size and dtype; whether all are right. Eight processes compile at the same time."""
    cases = [
        (number, {**shape, "H": 2, "HV": 4, "K": D, "V": D, **variant}, dtype)
        for number, op in enumerate(OPS)
        if op.kernels
        for variant in op.variants
        for D, dtype in SIZES
        for shape in SHAPES
    ]
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as processes:
        return all(list(processes.map(_check_one, *zip(*cases))))


def _check_one(number: int, sizes: dict, dtype: torch.dtype) -> bool:
    op = OPS[number]
    about, example = f"{op.name} {sizes} {dtype}", op.example(**sizes)
    if op.growth == "token":  # its kernels begin with nothing read
        example |= {"initial_state": None, "mask": None}
    try:
        found = error(op.op, example, dtype)
    except ValueError as refused:  # a form without kernels says so
        print(f"none   {about}: {refused}")
        return True
    fine = found < TOLERANCE[dtype]
    print(f"{'right' if fine else 'WRONG'} {found:.1e} {about}", flush=True)
    return fine


def main() -> None:
    """Check, then measure for as long as each table may take."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="stop after correctness")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("on_gpu.py needs a CUDA device, got none")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", import_module("triton").__version__)
    start, right = time.perf_counter(), check()
    print(f"correctness took {time.perf_counter() - start:.0f} s: {'all right' if right else 'some WRONG'}")
    if not right:
        sys.exit(1)
    for script, seconds in () if arguments.check else TABLES.items():
        print(f"\n{script}, at most {seconds} s", flush=True)
        try:
            subprocess.run([sys.executable, Path(__file__).with_name(script)], timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            print(f"{script} was stopped after {seconds} s")


if __name__ == "__main__":
    main()
