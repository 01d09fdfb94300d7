"""Are the forms that ops take on this machine right? `hf-memory check` prints it, benchmarks/on_gpu.py goes further.

`CALLS` is a table of ops with the inputs on which their kernels, or their chunks in PyTorch, are compared with the
reference: outputs, states and gradients. On a GPU, calls run in processes of their own: one that does not compile,
crashes or hangs is reported, and the calls after it run in a new process, since an error of CUDA spoils the old one.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from hf_memory.mixers.attention_blocks import Scores
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts.kept import Kept
from hf_memory.mixers.pasts.rows import New
from hf_memory.ops import OPS, Op
from hf_memory.ops.attention_in_bits import attention_in_bits
from hf_memory.ops.bits import BITS, pack
from hf_memory.ops.dispatch import NO_KERNEL, Backend, no_kernels_on
from hf_memory.ops.rows import Rows
from hf_memory.ops.rwkv7_gates import rwkv7_gates
from hf_memory.ops.sample import Sample
from hf_memory.ops.short_convolution import convolution_step

TOLERANCE = {
    "float32": 1e-3,
    "bfloat16": 3e-2,
}  # of the largest number; float32 multiplies in tf32x3
ROWS = 5  # times this of the largest number of a row, as that of a token
FLOOR = 0.03  # of the largest number of a tensor, which is added to that of a row
SECONDS = 120  # that one call may take, with its compilation
PROCESSES = 8  # that compile at once, at most

Results = list[Tensor | None]


class Call(NamedTuple):
    """An op and the inputs on which its forms are compared."""

    name: str
    run: Callable[..., Any]  # run(**inputs, backend=...) -> tensors, or trees of them
    inputs: Callable[..., dict]  # inputs(B=, T=, H=, HV=, K=, V=) -> float32 arguments of `run`
    variant: dict = {}  # further arguments of `inputs`
    forms: tuple[str, ...] = ("triton", "chunk")  # that differ from the reference
    has_gradients: bool = True
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    longest: int = 200  # tokens; autograd keeps a state for each token of the reference

    @property
    def title(self) -> str:
        """The name, and what chooses the inputs."""
        return ", ".join([self.name, *(f"{name} {value}" for name, value in self.variant.items())])


class Size(NamedTuple):
    """Of the inputs of a call: rows, tokens, heads of keys and of values, channels of a head."""

    B: int
    T: int
    H: int
    HV: int
    channels: int
    dtype: str

    def inputs(self, call: Call) -> dict:
        """Arguments of a call in float32."""
        sizes = {"B": self.B, "T": self.T, "H": self.H, "HV": self.HV}
        return call.inputs(**sizes, K=self.channels, V=self.channels, **call.variant)


TIMED = Size(2, 1100, 4, 8, 128, "bfloat16")
SIZES = {  # the first is long enough to be cut into segments
    "cuda": (Size(2, 600, 1, 2, 128, "bfloat16"), Size(2, 200, 2, 4, 64, "float32")),
    "cpu": (Size(1, 100, 1, 2, 32, "float32"),),
}


class Task(NamedTuple):
    """A call at a size on a device."""

    call: Call
    size: Size
    device: str
    is_timed: bool = False  # then it is right already

    @property
    def row(self) -> dict:
        """What is known before it runs: the call, the dtype, and the form that "auto" takes."""
        has_kernel = "triton" in self.call.forms and no_kernels_on(self.device) is None
        form = "triton" if has_kernel else "chunk"
        return {"call": self.call.title, "dtype": self.size.dtype, "form": form}


def op_call(op: Op, variant: dict) -> Call:
    """A variant of an op, over many tokens."""
    forms = ("triton", "chunk") if op.has_kernels else ("chunk",)
    run = partial(op.op, output_final_state=True)
    longest = 600 if op.is_linear else 200 if op.growth == "token" else 48
    return Call(op.name, run, partial(example, op.name), variant, forms, longest=longest)


def example(name: str, **given: Any) -> dict:
    """The example of an op; kernels of states that grow with each token begin with nothing read."""
    (op,) = [op for op in OPS if op.name == name]
    nothing = {"initial_state": None, "mask": None} if op.growth == "token" else {}
    return op.example(**given) | nothing


def one_token(name: str, **given: Any) -> dict:
    """The example of an op for one token of each row, as in decoding."""
    return example(name, **given | {"T": 1})


def convolution(state: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """A step of a short convolution, whose kernel overwrites the state."""
    return convolution_step(**given, state=state.clone(), silu=True, in_place=True)


def convolution_inputs(*, B: int, H: int, K: int, **sizes: int) -> dict:
    """x [B, 1, channels], state [B, 3, channels], weight [channels, 4] and bias [channels]."""
    normal = Sample().normal
    shapes = {"x": (B, 1, H * K), "state": (B, 3, H * K), "weight": (H * K, 4), "bias": (H * K,)}
    return {name: normal(*shape).float() for name, shape in shapes.items()}


def rwkv7_inputs(*, B: int, T: int, HV: int, K: int, **sizes: int) -> dict:
    """k, a and w [B, T, HV, K], k_k and k_a [HV, K]."""
    normal = Sample().normal
    shapes = dict.fromkeys(("k", "a", "w"), (B, T, HV, K)) | dict.fromkeys(("k_k", "k_a"), (HV, K))
    return {name: normal(*shape).float() for name, shape in shapes.items()}


def kept_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kept: int,
    policy: str = "received_attention",
    backend: Backend,
) -> Any:
    """Attention to a window and `kept` other tokens."""
    past = Kept(32 if kept < 100 else 64, 4, kept, 16, policy)
    context = Context(None, None, None, {}, backend=backend)
    new = New.of(k, v, past.kind, context)
    tokens, _ = context.tokens_and_count(q)
    return past.attend_with_mass(q, new, tokens, context, Scores(q.shape[-1] ** -0.5))[0]


def kept_inputs(*, B: int, T: int, K: int, kept: int, policy: str = "", **sizes: int) -> dict:
    """q [B, 200, 4, K], k and v [B, 200, 2, K], or fewer tokens; 32 channels at most where few are kept.

    Then the kernel holds them in float32. Where many are kept, there is room for all 200.
    """
    K = min(K, 32) if kept < 100 else K
    normal = Sample().normal
    heads = {"q": 4, "k": 2, "v": 2}
    rows = {name: normal(B, min(T, 200), n, K).float() for name, n in heads.items()}
    return rows | {"kept": kept} | ({"policy": policy} if policy else {})


def packed_inputs(*, B: int, T: int, H: int, HV: int, K: int, bits: int, **sizes: int) -> dict:
    """q [B, H, HV / H, K], and packed rows of keys and values of T tokens."""
    normal = Sample().normal
    keys, values = (pack(normal(B, H, T, K).float(), bits) for _ in range(2))
    q = normal(B, H, HV // H, K).float()
    return {"q": q, "keys": keys, "values": values, "rows": Rows(bits, bits), "scale": K**-0.5}


def decoding_calls() -> Iterator[Call]:
    """Calls of kernels that read one token, and have no gradients."""
    for op in OPS:
        run = partial(op.op, output_final_state=True)
        inputs = partial(one_token, op.name)
        for variant in op.variants if op.is_linear else ():
            if not variant.get("normalize") and variant.get("beta") != "extreme":
                yield Call(f"{op.name}, one token", run, inputs, variant, has_gradients=False)


CALLS = (
    *(op_call(op, variant) for op in OPS for variant in op.variants),
    *decoding_calls(),
    Call("kept tokens", kept_tokens, kept_inputs, {"kept": 172}),
    # what is kept depends on rounding where some tokens are not
    *(
        Call("kept tokens", kept_tokens, kept_inputs, {"kept": 76} | policy, dtypes=("float32",))
        for policy in ({}, {"policy": "change_of_output"})
    ),
    *(
        Call(
            "attention in bits",
            attention_in_bits,
            packed_inputs,
            {"bits": bits},
            has_gradients=False,
        )
        for bits in BITS
    ),
    *(  # of which PyTorch's form is the reference
        Call(name, run, inputs, forms=("triton",), has_gradients=False)
        for name, run, inputs in (
            ("gates of RWKV-7", partial(rwkv7_gates, erasure=2.0), rwkv7_inputs),
            ("short convolution, one token", convolution, convolution_inputs),
        )
    ),
)


def device_here() -> str:
    """The device of this machine: "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def tasks_of(device: str) -> list[Task]:
    """Every call that has a form of its own on a device, in each dtype."""
    has_kernels = no_kernels_on(device) is None
    return [
        Task(call, size._replace(T=min(size.T, call.longest)), device)
        for size in SIZES[torch.device(device).type]
        for call in CALLS
        if size.dtype in call.dtypes and (has_kernels or "chunk" in call.forms)
    ]


def answer(task: Task) -> dict:
    """A row about a task: the form that runs, and its error or its time; or with a message why it failed."""
    try:
        return times(task) if task.is_timed else compared(task)
    except Exception as error:  # whatever a compiler or a driver raises, the user should read it
        return failure(task, f"{type(error).__name__}: {error}")


def failure(task: Task, message: str) -> dict:
    """The row of a call that gave no result."""
    return task.row | {"failed": " ".join(message.split())[:300], "right": False}


def compared(task: Task) -> dict:
    """The form that "auto" takes, and its largest error."""
    call, size, device, _ = task
    row = task.row
    try:
        error = difference(call, size, device, row["form"])
    except ValueError as refusal:
        if NO_KERNEL not in str(refusal):
            raise
        row["form"] = "chunk"
        error = difference(call, size, device, "chunk")
    return row | {"error": error, "right": error < TOLERANCE[size.dtype]}


def difference(call: Call, size: Size, device: str, form: str) -> float:
    """The largest difference of a form from the reference, on the scale of the largest number of each tensor.

    On that of its row a difference may be ROWS times as large, so that what is wrong in small numbers is not hidden by
    large ones elsewhere.

    The reference computes in float64 with the rounded inputs. What is missing counts as zeros; a number that is none
    makes the difference infinite.
    """
    rounded = converted(size.inputs(call), getattr(torch, size.dtype), device)
    exact = converted(rounded, torch.float64, device)
    both = zip(results_of(call, rounded, form), results_of(call, exact, "reference"), strict=True)
    errors = [relative_error(found, expected) for found, expected in both]
    return max(errors)


def converted(inputs: dict, dtype: torch.dtype, device: str) -> dict:
    """The inputs on a device, those with fractions in a dtype and with gradients."""

    def convert(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.detach().to(device)
        return x.to(dtype).requires_grad_() if x.is_floating_point() else x

    return tree_map(convert, inputs)


def relative_error(found: Tensor | None, expected: Tensor | None) -> float:
    """The difference of a result, see `difference`."""
    if expected is None or not expected.numel():
        return 0.0
    found = torch.zeros_like(expected) if found is None else found
    if found.shape != expected.shape:
        raise RuntimeError(f"a result has shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    error = (found - expected).abs()
    sizes = expected.abs()
    largest = sizes.max().clamp(min=1e-6)
    of_rows = sizes.amax(-1, keepdim=True) + FLOOR * largest
    relative = torch.maximum(error / largest, error / (ROWS * of_rows)).max()
    return relative.nan_to_num(nan=torch.inf).item()


def results_of(call: Call, inputs: dict, form: str) -> Results:
    """Outputs, final state, and the gradients of all inputs if the kernel has them."""
    with torch.set_grad_enabled(call.has_gradients):
        tree = call.run(**inputs, backend=form)
    outputs = [x for x in tree_flatten(tree)[0] if x is not None and x.is_floating_point()]
    return [*outputs, *gradients(outputs, inputs)] if call.has_gradients else outputs


def gradients(outputs: list[Tensor], inputs: dict) -> Results:
    """Those of the outputs with random weights, for each input."""
    wanted = [x for x in tree_flatten(inputs)[0] if isinstance(x, Tensor) and x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x.device) for x in outputs]
    loss = sum((x * weight).sum() for x, weight in zip(outputs, weights))
    return list(torch.autograd.grad(loss, wanted, allow_unused=True))  # type: ignore[arg-type]


def times(task: Task) -> dict:
    """Milliseconds of the kernel and of PyTorch's form, with gradients if the call has them."""
    call, size, device, _ = task
    inputs = converted(size.inputs(call), getattr(torch, size.dtype), device)
    calls = {form: partial(results_of, call, inputs, form) for form in ("triton", "chunk")}
    taken = {form: milliseconds(run, device) for form, run in calls.items()}
    return task.row | {"ms": taken["triton"], "pytorch_ms": taken["chunk"]}


def milliseconds(call: Callable[[], Any], device: str) -> float:
    """The median; on the CPU, of one call."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    from triton.testing import do_bench

    return do_bench(call, return_mode="median")


def check(tasks: Iterable[Task]) -> Iterator[dict]:
    """A row for each task, in their order.

    On a GPU, rows follow with the times of the kernels that are right in the dtype of `TIMED`.
    """
    tasks = list(tasks)
    if all(task.device == "cpu" for task in tasks):
        yield from map(answer, tasks)
        return
    rows = []
    for row in in_processes(answer, tasks, min(PROCESSES, os.cpu_count() or 1)):
        rows.append(row)
        yield row
    timed = [
        task._replace(size=TIMED, is_timed=True)
        for task, row in zip(tasks, rows)
        if row["right"] and row["form"] == "triton" and task.size.dtype == TIMED.dtype
    ]
    yield from in_processes(answer, timed, 1)


class Worker:
    """A process that answers one question after another, and is replaced when an answer has failed."""

    def __init__(self, function: Callable[[Any], dict], seconds: float = SECONDS):
        self.function = function
        self.seconds = seconds
        self.process: Any = None
        self.pipe: Any = None

    def ask(self, task: Any) -> dict:
        """The answer, or a row that says what became of the process."""
        if self.process is None:
            context = get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=serve, args=(theirs, self.function), daemon=True)
            self.process.start()
            theirs.close()
        row = self._row(task)
        if "failed" in row:
            self.stop()
        return row

    def _row(self, task: Any) -> dict:
        try:
            self.pipe.send(task)
            if not self.pipe.poll(self.seconds):
                return failure(task, f"it was stopped after {self.seconds:.3g} s")
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return failure(task, f"its process ended with exit code {self.process.exitcode}")

    def stop(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None


def serve(pipe: Any, function: Callable[[Any], dict]) -> None:
    """What a worker's process does until its parent ends."""
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(function(task))


def in_processes(
    function: Callable[[Any], dict], tasks: list, processes: int, seconds: float = SECONDS
) -> Iterator[dict]:
    """`function(task)` for each task, in their order, each in a process that may fail."""
    workers = [Worker(function, seconds) for _ in range(min(processes, len(tasks)))]
    idle = list(workers)

    def ask(task: Any) -> dict:
        worker = idle.pop()
        row = worker.ask(task)
        idle.append(worker)
        return row

    try:
        with ThreadPoolExecutor(max(1, len(workers))) as pool:
            yield from pool.map(ask, tasks)
    finally:
        for worker in workers:
            worker.stop()
