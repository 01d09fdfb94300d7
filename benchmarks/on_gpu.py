"""All that waits for a GPU, in ten minutes of a fresh machine: `python benchmarks/on_gpu.py`.

Parts come in the order of what they are worth, each with an end to its time. All up to `steps` fit into ten minutes
even if each takes all of its own, and what they leave is for the others. Each row is written to
benchmarks/results/on_gpu.json as soon as it is there: what is cut off is worth least.

    right      is each op right, forward and backward, in two dtypes and head sizes, against the reference in float64?
               Those whose kernels failed on a GPU, or have not run on one since they changed, are first
    prepare    compiles what is timed next, on all cores
    ops        nine ops at two shapes beside PyTorch's forms of them, and their floors
    tune       flash-linear-attention, where it is installed, compiles and tunes itself, on all cores; as its ops tune
               themselves side by side on one GPU, what they choose may not be the best
    fla        the nine ops beside those of flash-linear-attention
    students   the default student, the same with equal numbers of kept tokens, which kernels support, and their
               teacher, eight rows: a token in a CUDA graph, in which students decide after every token what stays, a
               token without a graph, and a prompt
    steps      a training step of each of them
    kernels    kernels beside others that serve the same call, or beside PyTorch's form
    models     models of 350 million parameters beside a Llama: a training step, a prompt, a token
    second GPU kernels on a GPU that is not the current one, where there are two
    shares     where the time of each of the nine ops goes

Each job is a process of its own: one that fails or takes too long is a row with its message, and the others go on.

    python benchmarks/on_gpu.py --only right              # one part; a regular expression of names of jobs
    python benchmarks/on_gpu.py --dry-run                 # before a GPU is taken

A dry run runs the code of each job here, on a CPU with small shapes and interpreted kernels, and measures nothing. It
says what failed, writes no result, and its exit status is 1 then. It takes minutes and leaves out what asks for
flash-linear-attention or a second GPU.
"""

import argparse
import fcntl
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, Timer
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, StaticCache

import decode
import hf_memory  # noqa: F401  (registers the families)
import ops
from hf_memory.cache_argument import CACHE, cache_of
from hf_memory.check import (
    CALLS,
    TOLERANCE,
    Size,
    convolution,
    convolution_inputs,
    difference,
    milliseconds,
    packed_inputs,
    rwkv7_inputs,
)
from hf_memory.conversion import Recipe, make_student, resolve
from hf_memory.conversion.students.kept_tokens import levels_of, near_heads, numbers_of
from hf_memory.evaluation import cache_bytes
from hf_memory.ops import delta_rule
from hf_memory.ops.attention_in_bits import attention_in_bits
from hf_memory.ops.dispatch import NO_KERNEL
from hf_memory.ops.rwkv7_gates import rwkv7_gates

TURN = Path(tempfile.gettempdir()) / "hf_memory_on_gpu.lock"
RESULT = Path(__file__).parent / "results" / "on_gpu.json"
SECONDS = 570
SIZES = ((128, "bfloat16"), (64, "float32"))  # channels of a head, and a dtype
LENGTHS = ({"B": 2, "T": 200}, {"B": 1, "T": 1100})  # the second is cut into segments
SHAPES = ((4, 2048, 16, 128), (1, 8192, 96, 128))
SMALL = (1, 32, 2, 16)  # in a dry run
# parts of names of calls that failed on a GPU, and of those that have not run on one since they changed
FIRST = ("neural_memory", "kept tokens", "attention in bits", "one token", "gates of RWKV-7")
NINE = (
    "linear attention",
    "delta rule, scalar decay",
    "delta rule",
    "linear attention, scalar decay",
    "delta rule, vector decay",
    "linear attention, vector decay",
    "RWKV-7",
    "DeltaFormer",
    "neural memory, depth 2",
)
ROWS = 8
REPLAYS = 20  # of a token in a CUDA graph
ROOM = 32  # for these tokens in a cache of fixed size
CONTEXTS = (8192, 1024, 32768)
WIDTH = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "vocab_size": 32000,
}
MODELS: dict[str, tuple[str, dict]] = {
    "Llama": ("llama", {"max_position_embeddings": 16384}),
    "Gated DeltaNet": ("hf_memory_deltanet", {"gate": "scalar"}),
    "GLA": ("hf_memory_gated", {"gate": "vector"}),
    "KDA": ("hf_memory_deltanet", {"gate": "vector"}),
    "RWKV-7": ("hf_memory_rwkv7", {}),
    "Titans": ("hf_memory_titans", {}),
}


class Part(NamedTuple):
    """Jobs of one kind."""

    rows: Callable[..., Iterator[dict]]  # rows(device, *given), in a process of its own
    jobs: list[tuple]  # what is given to each
    seconds: float  # that they may take together
    each: float = 60  # that one may take once its turn has come
    at_once: bool = False  # they compile most of the time, and none is timed


class Job(NamedTuple):
    """Rows that a process of its own makes."""

    part: str
    given: tuple

    @property
    def name(self) -> str:
        """As it is printed."""
        return " ".join(str(x) for x in (self.part, *self.given))


def right(device: str, number: int, channels: int, dtype: str) -> Iterator[dict]:
    """The largest difference of an op from the reference, on the scale of the largest number of each tensor.

    Where there is no kernel for a call, that of PyTorch's form.
    """
    call = CALLS[number]
    for length in LENGTHS if device != "cpu" else ({"B": 1, "T": 20},):
        size = Size(**length, H=2, HV=4, channels=channels, dtype=dtype)
        row = {"op": call.name, **call.variant, **length, "K": channels, "dtype": dtype}
        try:
            found = difference(call, size, device, "triton")
        except ValueError as error:
            if NO_KERNEL not in str(error):
                raise
            row["no_kernel"] = str(error)
            found = difference(call, size, device, "chunk")
        yield {**row, "error": found, "right": found < TOLERANCE[dtype]}


def calls_with_kernels(sizes: tuple[tuple[int, str], ...]) -> list[tuple]:
    """What is given to `right`, at each size, in the order of `FIRST` and then of `CALLS`."""

    def place(given: tuple) -> int:
        name = CALLS[given[0]].name
        return next((n for n, part in enumerate(FIRST) if part in name), len(FIRST))

    calls = [(n, call) for n, call in enumerate(CALLS) if "triton" in call.forms]
    given = [(n, *size) for size in sizes for n, call in calls if size[1] in call.dtypes]
    return sorted(given, key=place)


def second_gpu(device: str) -> Iterator[dict]:
    """Kernels on a GPU that is not the current one."""
    if torch.cuda.device_count() < 2:
        raise RuntimeError("there is one GPU at most")
    for row in right("cuda:1", 0, 64, "float32"):
        yield {**row, "device": "cuda:1"}


def beside(device: str, name: str, whose: str) -> Iterator[dict]:
    """An op beside its floor, and beside PyTorch's or flash-linear-attention's forms of it, at each shape."""
    form = form_of(name, whose)
    for shape in shapes_on(device):
        rows = ops.measure(form, shape, "triton", device, dtype_of(device), 0)
        yield from attempt({"form": name}, rows)


def form_of(name: str, whose: str) -> ops.Form:
    """A form of ops.py beside flash-linear-attention's of it, or beside all others."""
    (form,) = [x for x in ops.FORMS if x.name == name]
    of_pytorch = {"PyTorch": lambda x: form.run(x, "chunk")}
    peers = {
        label: run for label, run in form.peers.items() if ("fla" in label) == (whose == "fla")
    }
    return form._replace(peers=peers if whose == "fla" else of_pytorch | peers)


def prepare(device: str, name: str, whose: str) -> Iterator[dict]:
    """Run an op, or flash-linear-attention's, forward and backward once: kernels are compiled and tuned, and kept."""
    form = form_of(name, whose)
    runs = [*form.peers.values()] if whose == "fla" else [lambda x: form.run(x, "triton")]
    for shape in shapes_on(device):
        x = ops.make_arguments(form, shape, device, dtype_of(device))
        for run in runs:
            with suppress(Exception):  # the same call fails when it is timed, and then it is a row
                ops.directions(run, x)["forward+backward"]()
    yield from ()


def shapes_on(device: str) -> tuple[tuple[int, int, int, int], ...]:
    """B, T, H and D of the ops that are timed."""
    return SHAPES if device != "cpu" else (SMALL,)


def dtype_of(device: str) -> torch.dtype:
    """The dtype in which ops are timed."""
    return torch.bfloat16 if device != "cpu" else torch.float32


def attempt(row: dict, rows: Iterator[dict]) -> Iterator[dict]:
    """Rows, and if there is an error, a row with its message."""
    try:
        yield from rows
    except Exception as error:  # whatever fails on the way, the next one goes on
        yield {**row, "failed": f"{type(error).__name__}: {error}"[:300]}


def students(device: str, tokens: int) -> Iterator[dict]:
    """Students and their teacher after so many tokens of each row."""
    for name, model in students_and_teacher(device).items():
        row = {"model": name, "tokens": tokens, "rows": ROWS}
        yield from attempt(row, ({**row, **x} for x in costs(model, tokens, device)))


def students_and_teacher(device: str) -> dict[str, Any]:
    """A Transformer of SmolLM2's shape with random weights, and the student that `convert` makes of it by default.

    As many heads keep everything as by default, spread over the layers. What takes longest is last.
    """
    sizes = decode.SHAPE if device != "cpu" else decode.SHAPE | {"num_hidden_layers": 2}
    teacher = decode.make("Llama", sizes)
    options = resolve(Recipe(), teacher.config).recipe.options
    options["full_attention_heads"] = decode.HEADS["full_attention_heads"][
        : len(teacher.model.layers)
    ]
    equal = make_student(teacher, **options)
    options["num_kept_tokens"] = kept_of_random_heads(equal.config, teacher.config)
    student = make_student(teacher, **options)
    return {"student, equal numbers": equal, "teacher": teacher, "student": student}


def kept_of_random_heads(student: Any, teacher: Any) -> list[list[int]]:
    """How many tokens each head keeps, as `convert` decides it, with random numbers in place of errors of a text."""
    mean = student.num_kept_tokens
    heads = near_heads(student)
    errors = torch.rand(len(heads), generator=torch.Generator().manual_seed(0))
    by_level = {number: errors / number for number in levels_of(mean, student, teacher)}
    kept = student.kept_tokens
    for (layer, head), number in zip(heads, numbers_of(by_level, mean * len(heads))):
        kept[layer][head] = number
    return kept


@torch.no_grad()
def costs(model: Any, tokens: int, device: str) -> Iterator[dict]:
    """A token in a CUDA graph, after a prompt into a cache of fixed size; one without; and the prompt."""
    prompt = torch.randint(1000, (ROWS, tokens), device=device)
    token = prompt[:, :1]
    read = partial(model, use_cache=True, logits_to_keep=1)
    fixed = StaticCache(config=model.config, max_cache_len=tokens + ROOM)
    read(prompt, **{CACHE: fixed})
    of_cache = {"cache_bytes": ROWS * cache_bytes(model.config, tokens)}
    in_a_graph = {"what": "token in a graph", **of_cache}
    yield from attempt(in_a_graph, in_graph(in_a_graph, model, token, fixed))
    del fixed
    growing = cache_of(read(prompt))
    one = lambda: read(token, **{CACHE: growing})  # noqa: E731
    yield {"what": "token", **of_cache, "ms": milliseconds(one, device)}
    yield {"what": "prompt", "ms": median(lambda: read(prompt), device, 3)}


def median(call: Callable, device: str, times: int) -> float:
    """The median milliseconds of so many calls, where each of them takes long or changes what it reads."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken)


def in_graph(row: dict, model: Any, token: Tensor, cache: Any) -> Iterator[dict]:
    """A row with the milliseconds of the kernels of a token, which are captured; on a CPU of the token.

    Each time is the token after the last one, so there are no more of them than a cache of fixed size has room for.
    """
    step = partial(model, token, **{CACHE: cache}, use_cache=True)
    step()
    if token.device.type == "cpu":
        without_waiting(model, token, StaticCache if isinstance(cache, StaticCache) else None)
        yield {**row, "ms": median(step, "cpu", REPLAYS)}
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    yield {**row, "ms": median(graph.replay, "cuda", REPLAYS)}


def without_waiting(model: Any, token: Tensor, of_fixed_size: Any) -> None:
    """Raise where a token would wait for numbers of a GPU, which no CUDA graph can hold.

    On the meta device there are no numbers to wait for. Ops are computed in PyTorch's forms there.
    """
    model = deepcopy(model).to("meta")
    token = token.to("meta")
    cache = of_fixed_size(config=model.config, max_cache_len=64) if of_fixed_size else None
    with patch("torch.is_autocast_enabled", return_value=False):  # which knows no such device
        for _ in range(2):
            cache = cache_of(model(token, **{CACHE: cache}, use_cache=True))


def steps(device: str, tokens: int) -> Iterator[dict]:
    """A training step of students and of their teacher."""
    for name, model in students_and_teacher(device).items():
        row = {"model": name, "tokens": tokens, "what": "training step"}
        row["ms"] = training_step(model, torch.randint(1000, (1, tokens), device=device), device)
        yield row


def training_step(model: Any, tokens: Tensor, device: str) -> float:
    """Milliseconds of the loss of a language model and its gradients."""

    def train() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()

    return milliseconds(train, device)


def models(device: str, name: str) -> Iterator[dict]:
    """A training step of 8,192 tokens, a prompt of 8,192, and a token after it, in a CUDA graph and without one."""
    model = model_of(name, device)
    length = 2048 if device != "cpu" else 16
    tokens = torch.randint(1000, (4, length), device=device)
    row = {"model": name, "parameters": sum(x.numel() for x in model.parameters())}
    yield {**row, "what": "training step", "ms": training_step(model, tokens, device)}
    with torch.no_grad():
        prompt = tokens.view(1, -1)
        read = partial(model, use_cache=True, logits_to_keep=1)
        yield {**row, "what": "prompt", "ms": milliseconds(lambda: read(prompt), device)}
        cache = cache_of(read(prompt))
        step = lambda: model(prompt[:, :1], **{CACHE: cache}, use_cache=True).logits  # noqa: E731
        yield {**row, "what": "token", "ms": milliseconds(step, device)}
        if name != "Llama":  # whose cache grows
            yield from in_graph({**row, "what": "token in a graph"}, model, prompt[:, :1], cache)


def model_of(name: str, device: str) -> Any:
    """A model of random weights."""
    small = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}
    sizes = WIDTH if device != "cpu" else WIDTH | small
    model_type, options = MODELS[name]
    if model_type == "llama":
        config: Any = LlamaConfig(**sizes, **options)
    else:
        config = AutoConfig.for_model(model_type, **sizes, **options)
    return AutoModelForCausalLM.from_config(config, dtype=dtype_of(device)).to(device)


def kernels(device: str, name: str) -> Iterator[dict]:
    """A kernel beside another that serves the same call, or beside PyTorch, forward."""
    first, second = PAIRS[name](device)
    with torch.no_grad():
        row = {"kernel": name, "ms": milliseconds(first, device)}
        other = milliseconds(second, device)
    yield {**row, "other_ms": other, "ours_of_other": row["ms"] / other}


def one_token(form: str, device: str) -> tuple[Callable, Callable]:
    """The kernel for one token, and the kernels for chunks, which take one token where there may be gradients."""
    run, x = detached(form, (8, 1, 16, 128) if device != "cpu" else (1, 1, 2, 16), device)
    return lambda: run(x, "triton"), torch.enable_grad()(lambda: run(x, "triton"))


def segments(form: str, device: str) -> tuple[Callable, Callable]:
    """A sequence of few heads, cut into segments or not."""
    run, x = detached(form, (1, 8192, 8, 128) if device != "cpu" else SMALL, device)
    whole = patch("hf_memory.ops.triton.segments.PROGRAMS", 0)
    return lambda: run(x, "triton"), whole(lambda: run(x, "triton"))


def detached(form: str, shape: tuple, device: str) -> tuple[Callable, dict[str, Tensor]]:
    """An op of ops.py and arguments of which none asks for gradients."""
    op = form_of(form, "")
    x = ops.make_arguments(op, shape, device, dtype_of(device))
    return op.run, {name: y.detach() for name, y in x.items()}


def rank_one(device: str) -> tuple[Callable, Callable]:
    """The delta rule with decays by channel, and the same as what RWKV-7 computes."""
    _, x = detached("delta rule, vector decay", shapes_on(device)[0], device)
    a = (-x["g"].exp() * x["k"]).to(x["k"].dtype)
    b = (x["beta"][..., None] * x["k"]).to(x["k"].dtype)
    run = partial(delta_rule, **x, backend="triton")
    return run, partial(run, a=a, b=b)


def in_bits(bits: int, device: str) -> tuple[Callable, Callable]:
    """One token that reads packed rows, and the same with rows that are unpacked in PyTorch."""
    tokens = 8192 if device != "cpu" else 40
    sizes = {"B": 8, "T": tokens, "H": 3, "HV": 9, "K": 64, "bits": bits}
    x = on_device(packed_inputs(**sizes), device)
    run = partial(attention_in_bits, **x)
    return partial(run, backend="triton"), partial(run, backend="reference")


def small_op(run: Callable, inputs: Callable, device: str) -> tuple[Callable, Callable]:
    """An op of one token, and PyTorch's form of it."""
    x = on_device(inputs(B=8, T=1, H=16, HV=16, K=64), device)
    return partial(run, **x, backend="triton"), partial(run, **x, backend="chunk")


def on_device(inputs: dict, device: str) -> dict:
    """Inputs of which those with fractions are in the dtype in which ops are timed."""

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(device, dtype_of(device) if x.is_floating_point() else None)

    return {name: moved(x) for name, x in inputs.items()}


PAIRS: dict[str, Callable[[str], tuple[Callable, Callable]]] = {
    "one token of linear attention / kernels for chunks": partial(one_token, "linear attention"),
    "one token of the delta rule / kernels for chunks": partial(one_token, "delta rule"),
    "linear attention in segments / whole": partial(segments, "linear attention"),
    "delta rule in segments / whole": partial(segments, "delta rule"),
    "delta rule / with a and b": rank_one,
    "attention in 8 bits / unpacked": partial(in_bits, 8),
    "attention in 4 bits / unpacked": partial(in_bits, 4),
    "gates of RWKV-7 / PyTorch": partial(small_op, partial(rwkv7_gates, erasure=2.0), rwkv7_inputs),
    "short convolution / PyTorch": partial(small_op, convolution, convolution_inputs),
}


def shares(device: str, name: str) -> Iterator[dict]:
    """Where the time of an op goes, by kernel, at the first shape."""
    form = form_of(name, "")
    x = ops.make_arguments(form, shapes_on(device)[0], device, dtype_of(device))
    both = ops.directions(lambda x: form.run(x, "triton"), x)["forward+backward"]
    both()
    yield {"form": name, "shares": ops.shares_of(both, device)}


def parts(device: str) -> dict[str, Part]:
    """All parts, in the order of what they are worth."""
    sizes = SIZES if device != "cpu" else ((16, "float32"),)
    contexts = CONTEXTS if device != "cpu" else (300,)
    peers = [(name, "fla") for name in NINE] if find_spec("fla") and device != "cpu" else []
    ours = [(name, "PyTorch") for name in NINE]
    others = [()] if torch.cuda.device_count() > 1 else []
    return {
        "right": Part(right, calls_with_kernels(sizes), 150, 120, at_once=True),
        "prepare": Part(prepare, ours, 60, at_once=True),
        "ops": Part(beside, ours, 80),
        "tune": Part(prepare, peers, 90, 90, at_once=True),
        "fla": Part(beside, peers, 50),
        "students": Part(students, [(n,) for n in contexts], 100, 60),
        "steps": Part(steps, [contexts[:1]], 40),
        "kernels": Part(kernels, [(name,) for name in PAIRS], 60),
        "models": Part(models, [(name,) for name in MODELS], 120),
        "second GPU": Part(second_gpu, others, 60),
        "shares": Part(shares, [(name,) for name in NINE], 60),
    }


def rows_of(job: Job, device: str) -> Iterator[dict]:
    """The rows of a job in this process."""
    yield from parts(device)[job.part].rows(device, *job.given)


def run(job: Job, device: str, left: float) -> Iterator[dict]:
    """The rows of a job in a process of its own, as they come; and a row if it fails or has no time."""
    if left < 1:
        yield {"failed": f"no time was left for {job.name}"}
        return
    environment = os.environ | {
        "TRITON_INTERPRET": "1" if device == "cpu" else "0",
        "OMP_NUM_THREADS": "1",
    }
    given = "--device", device, "--job", json.dumps(job)
    command = [sys.executable, "-W", "ignore", __file__, *given]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        end = Timer(left, process.kill)
        end.start()
        for line in process.stdout or ():
            if line.startswith("{"):
                yield json.loads(line)
        status = process.wait()
        end.cancel()
        errors.seek(0)
        said = errors.read().strip().splitlines() or [f"exit status {status}"]
    if status == -signal.SIGKILL:
        yield {"failed": f"no time was left for the rest of {job.name}"}
    elif status == -signal.SIGALRM:
        seconds = parts(device)[job.part].each
        yield {"failed": f"{job.name} was stopped after {seconds:.3g} s"}
    elif status:
        yield {"failed": f"{job.name}: {said[-1][:300]}"}


class Table:
    """Rows that are printed and written as they come."""

    def __init__(self, device: str, file: Path) -> None:
        self.device = device
        self.file = file
        self.start = time.perf_counter()
        self.made: dict = {**ops.hardware(device), "rows": []}
        self.rows: list[dict] = self.made["rows"]
        self.lock = Lock()  # jobs of several threads add rows

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self.start

    def add(self, job: Job, row: dict) -> None:
        """Print a row and write the whole table."""
        row = {"part": job.part, **row}
        shown = (
            f"{name} {x:.3g}" if isinstance(x, float) else f"{name} {x}" for name, x in row.items()
        )
        with self.lock:
            self.rows.append(row)
            print(f"{self.seconds:5.0f} s  {', '.join(shown)}", flush=True)
            partial = self.file.with_suffix(".partial")
            partial.write_text(json.dumps(self.made, indent=1) + "\n")
            partial.rename(self.file)

    def run(self, job: Job, end: float) -> None:
        """Add the rows of a job, which ends so many seconds after the beginning at the latest."""
        for row in run(job, self.device, end - self.seconds):
            self.add(job, row)

    def run_here(self, job: Job) -> None:
        """Add the rows of a job that runs in this process, and what it raises."""
        for row in attempt({"job": job.name}, rows_of(job, self.device)):
            self.add(job, row)

    @property
    def wrong(self) -> list[dict]:
        """Rows of what failed or is not right."""
        return [row for row in self.rows if "failed" in row or row.get("right") is False]


@contextmanager
def turn(part: Part) -> Iterator[None]:
    """Wait until no other job is timed, if this one is; from then on its time counts."""
    with open(TURN, "w") as file:
        if not part.at_once:
            fcntl.flock(file, fcntl.LOCK_EX)
        signal.setitimer(signal.ITIMER_REAL, part.each)  # then SIGALRM ends the process
        yield


def measure(table: Table, jobs: list[Job]) -> None:
    """Jobs part by part: side by side if they compile, else one is timed while the next one imports."""
    for name, part in parts(table.device).items():
        some = [job for job in jobs if job.part == name]
        end = min(table.seconds + part.seconds, SECONDS)
        workers = os.cpu_count() or 1 if part.at_once else 2
        if some:
            print(f"{len(some)} jobs of {name}, until {end:.0f} s at the latest", flush=True)
        with ThreadPoolExecutor(workers) as pool:
            for done in [pool.submit(table.run, job, end) for job in some]:
                done.result()


def main() -> None:
    """Measure everything, try all jobs here, or run one job for a process that measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument(
        "--only", default="", help="a regular expression of jobs, such as 'ops delta'"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run each job's code here, on a CPU with small shapes",
    )
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=f"the file of rows, {RESULT.name} by default")
    given = parser.parse_args()
    if (
        given.dry_run and os.environ.get("TRITON_INTERPRET") != "1"
    ):  # read when kernels are imported
        interpreted = os.environ | {"TRITON_INTERPRET": "1"}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=interpreted).returncode)
    device = "cpu" if given.dry_run else given.device
    if given.job:
        job = Job(*json.loads(given.job))
        with turn(parts(device)[job.part]):
            for row in rows_of(job, device):
                print(json.dumps(row), flush=True)
        return
    if device != "cpu" and not torch.cuda.is_available():
        sys.exit("on_gpu.py needs a CUDA device, got none; --dry-run tries every job without one")
    every = [Job(name, x) for name, part in parts(device).items() for x in part.jobs]
    jobs = [job for job in every if re.search(given.only, job.name)]
    if given.dry_run:
        with tempfile.TemporaryDirectory() as folder:
            table = Table(device, given.output or Path(folder, "on_gpu.json"))
            for job in jobs:
                table.run_here(job)
    else:
        table = Table(device, given.output or RESULT)
        measure(table, jobs)
    print(f"{len(table.rows)} rows, {len(table.wrong)} of them wrong or failed")
    sys.exit(given.dry_run and len(table.wrong) > 0)


if __name__ == "__main__":
    main()
