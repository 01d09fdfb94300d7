"""What one step of distillation costs: CPU seconds and peak memory, float32 and bfloat16, by what the loss is made of.

    python benchmarks/distillation_step.py            # about six minutes on one core
    python benchmarks/distillation_step.py --dtype bfloat16 --loss teacher --profile

Teacher and student have the sizes of SmolLM2-135M and random weights; the student is a Gated DeltaNet that keeps every
fourth layer of attention. A step reads 2 windows of 512 tokens on one thread: teacher, student, loss, gradients, the
check that they are finite, clipping and AdamW. A row has a process of its own, since a peak is of a process; its time
is the median of steps after a first one, as CPU seconds, which other work on the machine disturbs least. Peak memory is
above what the models take. Writes benchmarks/results/distillation_step.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from decode import SHAPE
from hf_memory.conversion import Run, Schedule, carry_over, distill, make_student
from training import peak_bytes

RESULTS = Path(__file__).parent / "results" / "distillation_step.json"
SIZES = {**SHAPE, "max_position_embeddings": 8192}
STEPS = 4
SCHEDULE = Schedule(steps=STEPS, learning_rate=1e-5, batch_size=2, length=512)
LOSSES: dict[str, dict] = {
    "teacher": {},
    "teacher at temperature 2": {"temperature": 2.0},
    "teacher and text": {"cross_entropy": 0.5},
}
DTYPES = ("float32", "bfloat16")


class Clock(TrainerCallback):
    """CPU seconds of each step, and of its operators where `operators` is entered."""

    def __init__(self):
        self.times: list[float] = []
        self.operators = Operators()

    def on_step_begin(self, args, state, control, **kwargs):
        """Start."""
        self.operators.seconds.clear()
        self.start = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        """Stop."""
        self.times.append(time.process_time() - self.start)


class Operators(TorchDispatchMode):
    """CPU seconds by operator; unlike a profiler's, they do not grow while other work has the core."""

    def __init__(self):
        super().__init__()
        self.seconds: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run and time one."""
        start = time.process_time()
        result = func(*args, **(kwargs or {}))
        self.seconds[str(func)] += time.process_time() - start
        return result


def measure(loss: str, dtype: str, profile: bool) -> dict:
    """One row."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    teacher = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    student = make_student(teacher, "deltanet", keep="1/4", gate="scalar")
    carry_over(student, teacher)
    tokens, clock = torch.randint(SIZES["vocab_size"], (4096,)), Clock()
    how = {"run": Run(callbacks=(clock,), training={"bf16": dtype == "bfloat16"}), **LOSSES[loss]}
    with clock.operators if profile else nullcontext():
        before = peak_bytes()
        distill(student, teacher, tokens, SCHEDULE, **how)
    for name, seconds in clock.operators.seconds.most_common(30):
        print(f"{seconds:6.2f} s  {name}")
    seconds = statistics.median(clock.times[1:])
    return {"loss": loss, "dtype": dtype, "cpu_seconds": seconds, "peak_megabytes": (peak_bytes() - before) / 1e6}


def main() -> None:
    """Print and write the table; with a loss and a dtype, that row alone as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loss", choices=LOSSES)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.loss:
        print(json.dumps(measure(arguments.loss, arguments.dtype, arguments.profile)))
        return
    rows = []
    for loss in LOSSES:
        for dtype in DTYPES:
            command = [sys.executable, __file__, "--loss", loss, "--dtype", dtype]
            rows.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
            print("{loss:25} {dtype:9} {cpu_seconds:5.1f} s {peak_megabytes:6.0f} MB".format(**rows[-1]), flush=True)
    about = {"batch_size": SCHEDULE.batch_size, "length": SCHEDULE.length, "torch": torch.__version__, **SIZES}
    RESULTS.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
