"""All that waits for a GPU, in one call of at most ten minutes: `python benchmarks/on_gpu.py`.

Every row comes from a process of its own, with an end to its time: what fails there is a row with its message, and the
others go on. In this order: is each kernel right (against the reference in float64: outputs, states and gradients, in
two dtypes and head sizes, by the table of hf_memory.check; all cores compile at once, the first rows come after a
minute); is it right on a second GPU; a decode step in a CUDA graph; students of a Transformer beside it; how fast is
each op beside its floor, at two shapes, and for one token; whole models of 350 million parameters (a training step, a
prompt, a token) beside a Llama; where the time of the slowest op goes. Last, where flash-linear-attention is installed,
its ops beside ours at the first shape and its models: they tune themselves for minutes.
Writes benchmarks/results/on_gpu.json after every row.

    python benchmarks/on_gpu.py --only right              # one part
    python benchmarks/on_gpu.py --device cpu              # all parts, tiny and with interpreted kernels: no measurement
"""

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StaticCache

import decode
import ops
from hf_memory.cache_argument import CACHE, cache_of
from hf_memory.check import CALLS, TOLERANCE, Size, difference, milliseconds
from hf_memory.conversion import make_student
from hf_memory.evaluation import cache_bytes
from hf_memory.ops.dispatch import NO_KERNEL

TURN = Path(tempfile.gettempdir()) / "hf_memory_on_gpu.lock"
RESULT = Path(__file__).parent / "results" / "on_gpu.json"
SECONDS = 570
SIZES = ((128, "bfloat16"), (64, "float32"))  # channels of a head, and a dtype
LENGTHS = ({"B": 2, "T": 200}, {"B": 1, "T": 1100})  # the second is cut into segments
SHAPES = ((4, 2048, 16, 128), (1, 8192, 96, 128))
SMALL = (1, 32, 2, 16)  # in front of a fake device
WIDTH = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "vocab_size": 32000,
}
MODELS = {  # options of our configs, and the name of flash-linear-attention's
    "Llama": ("", {}, ""),
    "GLA": ("hf_memory_gated", {"gate": "vector"}, "GLAConfig"),
    "Gated DeltaNet": ("hf_memory_deltanet", {"gate": "scalar"}, "GatedDeltaNetConfig"),
    "KDA": ("hf_memory_deltanet", {"gate": "vector"}, "KDAConfig"),
    "RWKV-7": ("hf_memory_rwkv7", {}, "RWKV7Config"),
    "Titans": ("hf_memory_titans", {}, ""),
}
STUDENTS: dict[str, dict] = {  # of one model, as decode.py times them on a CPU
    "teacher": {},
    "windows and heads": decode.WINDOWS["1/11 of heads"],
    "kept tokens and heads": decode.WINDOWS["kept"],
}


class Job(NamedTuple):
    """Rows that a process of its own makes: `PARTS[part](device, *given)`."""

    part: str
    given: tuple
    seconds: float  # that it may take once its turn has come

    @property
    def name(self) -> str:
        """As it is printed."""
        return " ".join(str(x) for x in (self.part, *self.given))

    @property
    def order(self) -> int:
        """Jobs that compile most of the time are first, and those of flash-linear-attention last."""
        if self.part in AT_ONCE:
            return 0
        return 2 if self.part == "peers" or "fla" in self.given else 1


def right(device: str, number: int, channels: int, dtype: str) -> Iterator[dict]:
    """The largest difference of a kernel from the reference, on the scale of the largest number of each tensor."""
    call = CALLS[number]
    for length in LENGTHS if device != "cpu" else ({"B": 1, "T": 20},):
        size = Size(**length, H=2, HV=4, channels=channels, dtype=dtype)
        row = {"op": call.name, **call.variant, **length, "K": channels, "dtype": dtype}
        try:
            found = difference(call, size, device, "triton")
        except ValueError as error:
            if NO_KERNEL not in str(error):
                raise
            yield {**row, "no_kernel": str(error)}
        else:
            yield {**row, "error": found, "right": found < TOLERANCE[dtype]}


def second_gpu(device: str) -> Iterator[dict]:
    """Kernels on a GPU that is not the current one."""
    if torch.cuda.device_count() < 2:
        raise RuntimeError("there is one GPU at most")
    for row in right("cuda:1", 0, 64, "float32"):
        yield {**row, "device": "cuda:1"}


def graph(device: str) -> Iterator[dict]:
    """A decode step of a model, captured and replayed, beside the same step without a graph."""
    model = model_of("Gated DeltaNet", "", device)
    tokens = torch.ones(1, 1, dtype=torch.long, device=device)
    with torch.no_grad():
        cache = cache_of(model(tokens, use_cache=True))
        step = lambda: model(tokens, **{CACHE: cache}, use_cache=True).logits  # noqa: E731
        step()
        replay = captured(step).replay
        yield {"ms": milliseconds(step, device), "ms_in_a_graph": milliseconds(replay, device)}


def fast(device: str, name: str) -> Iterator[dict]:
    """An op beside its floor and transformers' form of it at each shape, as in ops.py, and for one token."""
    form = form_of(name)
    for shape in SHAPES if device != "cpu" else (SMALL,):
        rows = ops.measure(form, shape, "triton", device, dtype_of(device), 0)
        yield from attempt(name, rows)
    x = ops.make_arguments(form, (8, 1, 16, 128), device, dtype_of(device))
    with torch.no_grad():
        yield {"form": name, "tokens": 1, "ms": milliseconds(lambda: form.run(x, "auto"), device)}


def form_of(name: str, peers: str = "transformers") -> ops.Form:
    """A form of ops.py with those of its peers whose name has a word."""
    (form,) = [x for x in ops.FORMS if x.name == name]
    return form._replace(peers={label: run for label, run in form.peers.items() if peers in label})


def peers(device: str, name: str) -> Iterator[dict]:
    """An op beside flash-linear-attention's at the first shape."""
    form = form_of(name, "fla")
    shape = SHAPES[0] if device != "cpu" else SMALL
    if form.peers:
        yield from ops.measure(form, shape, "triton", device, dtype_of(device), 0)


def compile_only(device: str, name: str) -> Iterator[dict]:
    """Run an op forward and backward once, so that its kernels are in Triton's cache."""
    form = form_of(name)
    for shape in SHAPES if device != "cpu" else (SMALL,):
        x = ops.make_arguments(form, shape, device, dtype_of(device))
        both = ops.directions(lambda x: form.run(x, "triton"), x)["forward+backward"]
        with suppress(Exception):  # the same call fails when it is timed, and then it is a row
            both()
    yield from ()


def dtype_of(device: str) -> torch.dtype:
    """The dtype in which ops are timed."""
    return torch.bfloat16 if device != "cpu" else torch.float32


def attempt(name: str, rows: Iterator[dict]) -> Iterator[dict]:
    """The rows of a form, and if there is an error, a row with its message."""
    try:
        yield from rows
    except Exception as error:  # whatever fails on the way, the next shape goes on
        yield {"form": name, "failed": f"{type(error).__name__}: {error}"[:300]}


def model(device: str, name: str, whose: str) -> Iterator[dict]:
    """A training step of 8,192 tokens, a prompt of 8,192 and a token after it."""
    made = model_of(name, whose, device)
    length = 2048 if device != "cpu" else 16
    tokens = torch.randint(1000, (4, length), device=device)

    row = {
        "model": name,
        "whose": whose or "ours",
        "parameters": sum(x.numel() for x in made.parameters()),
    }
    yield {**row, "what": "training step", "ms": training_step(made, tokens, device)}
    with torch.no_grad():
        prompt = tokens.view(1, -1)
        read = partial(made, use_cache=True, logits_to_keep=1)
        yield {**row, "what": "prompt", "ms": milliseconds(lambda: read(prompt), device)}
        cache = cache_of(read(prompt))
        step = lambda: made(prompt[:, :1], **{CACHE: cache}, use_cache=True)  # noqa: E731
        yield {**row, "what": "token", "ms": milliseconds(step, device)}


def model_of(name: str, whose: str, device: str) -> Any:
    """A model of random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    import hf_memory  # noqa: F401  (registers the families)

    model_type, options, theirs = MODELS[name]
    sizes = (
        WIDTH
        if device != "cpu"
        else {**WIDTH, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}
    )
    if whose == "fla":
        import fla.models

        heads = {"num_heads": sizes["num_attention_heads"]}
        config = getattr(fla.models, theirs)(
            **{k: x for k, x in sizes.items() if "attention" not in k}, **heads
        )
    elif model_type:
        from transformers import AutoConfig

        config = AutoConfig.for_model(model_type, **sizes, **options)
    else:
        config = LlamaConfig(**sizes, max_position_embeddings=16384)
    return AutoModelForCausalLM.from_config(config, dtype=dtype_of(device)).to(device)


def student(device: str, name: str) -> Iterator[dict]:
    """A training step, a prompt and a token after it, of a student as `convert` makes it, or of its teacher."""
    sizes = decode.SHAPE if device != "cpu" else decode.SHAPE | {"num_hidden_layers": 2}
    made = decode.make("Llama", sizes)
    options = STUDENTS[name]
    if options:
        heads = options["full_attention_heads"][: sizes["num_hidden_layers"]]
        made = make_student(made, **options | {"full_attention_heads": heads})
    length = 8192 if device != "cpu" else 300
    tokens = torch.randint(1000, (1, length), device=device)

    row = {"model": name, "tokens": length}
    yield {**row, "what": "training step", "ms": training_step(made, tokens, device)}
    with torch.no_grad():
        read = partial(made, use_cache=True, logits_to_keep=1)
        yield {**row, "what": "prompt", "ms": milliseconds(lambda: read(tokens), device)}
        for rows in (1, 16):
            yield {**row, "rows": rows, **token_after(read, tokens.expand(rows, -1), device)}


def token_after(read: Callable, prompt: Tensor, device: str) -> dict:
    """A token after a prompt: with the cache that generate uses, and in a CUDA graph with one of fixed size."""
    token = prompt[:, :1]
    growing = cache_of(read(prompt))
    row = {
        "what": "token",
        "ms": milliseconds(lambda: read(token, **{CACHE: growing}), device),
        "cache_bytes": len(prompt) * cache_bytes(read.func.config, prompt.shape[1]),
    }
    fixed = StaticCache(config=read.func.config, max_cache_len=prompt.shape[1] + 64)
    read(prompt, **{CACHE: fixed})
    step = lambda: read(token, **{CACHE: fixed})  # noqa: E731
    step()
    if device == "cpu":
        return row
    try:
        return {**row, "ms_in_a_graph": milliseconds(captured(step).replay, device)}
    except Exception as error:  # the row is of use without the graph
        return {**row, "graph_failed": f"{type(error).__name__}: {error}"[:300]}


def training_step(model: Any, tokens: Tensor, device: str) -> float:
    """Milliseconds of the loss of a language model and its gradients."""

    def train() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()

    return milliseconds(train, device)


def captured(step: Callable) -> torch.cuda.CUDAGraph:
    """The kernels of a call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def shares(device: str, name: str, *shape: int) -> Iterator[dict]:
    """Where the time of an op goes, by kernel."""
    form = form_of(name)
    x = ops.make_arguments(form, shape, device, dtype_of(device))
    both = ops.directions(lambda x: form.run(x, "triton"), x)["forward+backward"]
    both()
    yield {"form": name, "shares": ops.shares_of(both, device)}


PARTS: dict[str, Callable[..., Iterator[dict]]] = {
    "right": right,
    "second GPU": second_gpu,
    "graph": graph,
    "compile": compile_only,
    "student": student,
    "fast": fast,
    "model": model,
    "shares": shares,
    "peers": peers,
}
AT_ONCE = ("right", "compile")  # jobs that compile most of the time


def jobs_of(device: str) -> list[Job]:
    """All jobs but `shares`, in their order."""
    sizes = SIZES if device != "cpu" else ((16, "float32"),)
    theirs = [name for name, (*_, config) in MODELS.items() if config and find_spec("fla")]
    return [
        *(
            Job("right", (number, channels, dtype), 120)
            for channels, dtype in sizes
            for number, call in enumerate(CALLS)
            if "triton" in call.forms and dtype in call.dtypes
        ),
        *(Job("compile", (form.name,), 120) for form in ops.FORMS if device != "cpu"),
        Job("second GPU", (), 60),
        Job("graph", (), 60),
        *(Job("student", (name,), 60) for name in STUDENTS),
        *(Job("fast", (form.name,), 60) for form in ops.FORMS),
        *(Job("model", (name, ""), 60) for name in MODELS),
        *(Job("peers", (form.name,), 120) for form in ops.FORMS if device != "cpu"),
        *(Job("model", (name, "fla"), 120) for name in theirs if device != "cpu"),
    ]


def run(job: Job, device: str, left: float) -> list[dict]:
    """The rows of a job, or one with the reason why there are none."""
    if left < 1:
        return [{"part": job.part, "failed": f"no time was left for {job.name}"}]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1" if device == "cpu" else "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        *(sys.executable, "-W", "ignore", __file__),
        *("--device", device, "--job", json.dumps(job)),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=left, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return [{"part": job.part, "failed": f"no time was left for the rest of {job.name}"}]
    rows = [
        {"part": job.part, **json.loads(line)}
        for line in done.stdout.splitlines()
        if line.startswith("{")
    ]
    if done.returncode == -signal.SIGALRM:
        rows.append(
            {"part": job.part, "failed": f"{job.name} was stopped after {job.seconds:.3g} s"}
        )
    elif done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        rows.append({"part": job.part, "failed": f"{job.name}: {said[-1][:300]}"})
    return rows


class Table:
    """Rows that are printed and written as they come."""

    def __init__(self, device: str, file: Path) -> None:
        self.device = device
        self.file = file
        self.start = time.perf_counter()
        self.made: dict = {**ops.hardware(device), "rows": []}
        self.rows: list[dict] = self.made["rows"]

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self.start

    def run(self, job: Job) -> list[dict]:
        """The rows of a job in the time that is left."""
        return run(job, self.device, SECONDS - self.seconds)

    def add(self, rows: list[dict]) -> None:
        """Print rows and write the whole table."""
        for row in rows:
            self.rows.append(row)
            shown = (
                f"{name} {x:.3g}" if isinstance(x, float) else f"{name} {x}"
                for name, x in row.items()
            )
            print(f"{self.seconds:5.0f} s  {', '.join(shown)}", flush=True)
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.made, indent=1) + "\n")
        partial.rename(self.file)


@contextmanager
def turn(job: Job) -> Iterator[None]:
    """Wait until no other job is timed, if this one is; from then on its time counts."""
    with open(TURN, "w") as file:
        if job.part not in AT_ONCE:
            fcntl.flock(file, fcntl.LOCK_EX)
        signal.setitimer(signal.ITIMER_REAL, job.seconds)  # then SIGALRM ends the process
        yield


def measure(table: Table, jobs: list[Job]) -> None:
    """Jobs by their order: side by side if they compile, else one is timed while the next one imports."""
    for order, workers in ((0, os.cpu_count() or 1), (1, 2), (2, 2)):
        some = [job for job in jobs if job.order == order]
        most = sum(job.seconds for job in some) / (workers if order == 0 else 1)
        print(f"{len(some)} jobs of at most {most:.0f} s together", flush=True)
        with ThreadPoolExecutor(workers) as pool:
            for done in as_completed([pool.submit(table.run, job) for job in some]):
                table.add(done.result())
        timed = [row for row in table.rows if "of_floor" in row]
        if timed and order == 1:
            slowest = max(timed, key=lambda row: row["of_floor"])
            table.add(table.run(Job("shares", (slowest["form"], *slowest["shape"].values()), 60)))


def main() -> None:
    """Measure everything, or run one job for a process that does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--only", default="", help="a regular expression of jobs, such as 'fast delta'"
    )
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    if given.job:
        job = Job(*json.loads(given.job))
        with turn(job):
            for row in PARTS[job.part](given.device, *job.given):
                print(json.dumps(row), flush=True)
        return
    if given.device != "cpu" and not torch.cuda.is_available():
        sys.exit(
            "on_gpu.py needs a CUDA device, got none; --device cpu tries every part without one"
        )
    table = Table(given.device, given.output)
    measure(table, [job for job in jobs_of(given.device) if re.search(given.only, job.name)])
    wrong = [row for row in table.rows if "failed" in row or row.get("right") is False]
    print(f"{len(table.rows)} rows, {len(wrong)} of them wrong or failed")


if __name__ == "__main__":
    main()
