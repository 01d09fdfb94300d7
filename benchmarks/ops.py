"""All ops in all forms, beside what their arithmetic needs and beside peers that compute the same.

    python benchmarks/ops.py                             # some five minutes on two cores; on CUDA where there is one
    python benchmarks/ops.py --only "delta rule" --lengths 4096

In float32 on the CPU, and at the largest length in bfloat16 too where a form multiplies in it; in bfloat16 on CUDA.
Ours, the peers, a matrix product and a copy are called in turn, so that a busy machine shows in all; a ratio is the
median over turns. On CUDA each is timed alone, by triton.testing.do_bench. A peer that does not compute the same is not
timed, but for the neighbours of DeltaFormer.

The floor is the larger of operations / rate of the matrix product and bytes / bandwidth of the copy. Operations, for a
token and head with K = V = D and chunks of C tokens, each multiplication and addition one:

    linear attention   4 C D + 4 D^2                (scores and their product with values; read and write of the state)
    delta rule         8 C D + 6 D^2                (the scores and the solve of the correction besides; one more read)
    Gated DeltaNet-2   16 C D + 8 D^2               (and Comba, RWKV-7: two more products of scores; one more write)
    DeltaProduct       16 C D + 12 D^2              (the delta rule for each of two steps)
    ridge regression   248 C D + 66 D^2             (30 steps of conjugate gradients; two states)
    DeltaFormer        4 T D                        (two triangles of T / 2 pairs, each two products)
    neural memory      2 (6 W - W_1) + sum over layers of 2 C (d_in + d_out)
                       (W weights, W_1 in the first layer: recall and gradient at the key, but of the key itself;
                       read from and write to weights and momentum; the pairs inside a chunk)

Forward with backward is three times that. Bytes: inputs and output once forward; backward, both and the gradients.
Writes benchmarks/results/ops_{cpu,cuda}.{json,png}, with the share of time of each PyTorch operation at the last shape.
"""

import argparse
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # threads that wait sleep: before torch is imported

import matplotlib.pyplot as plt
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import profile
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from hf_memory.ops import delta_rule, deltaformer, linear_attention, neural_memory, ridge_regression
from hf_memory.ops.delta_rule.chunk import CHUNK as DELTA_CHUNK
from hf_memory.ops.linear_attention.chunk import CHUNK as LINEAR_CHUNK
from hf_memory.ops.variants.ridge_regression.chunk import CHUNK as RIDGE_CHUNK

RESULTS = Path(__file__).parent / "results"
CUDA_SHAPES = (
    (4, 2048, 16, 128),
    (1, 8192, 96, 128),
    (2, 16384, 16, 128),
    (1, 65536, 8, 128),
    (8, 1024, 8, 64),
    (8, 2048, 32, 256),
    (4, 4096, 64, 128),
)
MEMORY_CHUNK = 16
EXPANSION = 2
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}  # of the norm
NEIGHBOURS = (
    "attention (SDPA)",
    "fla DeltaFormer",
)  # they compute something else, and are timed all the same
KIMI_TOKENS = 1024  # its form needs T C K numbers a head several times

Arguments = dict[str, Tensor]
Call = Callable[[], Tensor]


class Form(NamedTuple):
    """A row of the table."""

    name: str
    run: Callable  # (arguments, backend) -> o
    arguments: tuple[str, ...]
    operations: Callable  # (T, D) -> operations of a token and head, forward
    peers: dict[str, Callable] = {}  # arguments -> o


def linear_operations(T: int, D: int) -> float:
    """See above."""
    return 4 * LINEAR_CHUNK * D + 4 * D**2


def delta_operations(T: int, D: int) -> float:
    """See above."""
    return 8 * DELTA_CHUNK * D + 6 * D**2


def rank_one_operations(T: int, D: int) -> float:
    """See above."""
    return 16 * DELTA_CHUNK * D + 8 * D**2


def ridge_operations(T: int, D: int) -> float:
    """See above."""
    return 248 * RIDGE_CHUNK * D + 66 * D**2


def memory_operations(layers: list[tuple[int, int]]) -> float:
    """See above."""
    W = sum(a * b for a, b in layers)
    first = layers[0][0] * layers[0][1]
    return 2 * (6 * W - first) + sum(2 * MEMORY_CHUNK * (a + b) for a, b in layers)


def linear(normalize: bool = False) -> Callable:
    """Linear attention with whatever decay there is."""
    return lambda x, backend: linear_attention(**x, normalize=normalize, backend=backend)[0]


def delta(x: Arguments, backend: str) -> Tensor:
    """The delta rule with whatever decay there is."""
    return delta_rule(**x, backend=backend)[0]


def gated_deltanet_2(x: Arguments, backend: str) -> Tensor:
    """Gated DeltaNet-2 as the delta rule with vectors of its own."""
    q, k, v, g, b, w = (x[name] for name in ("q", "k", "v", "g", "b", "w"))
    one = torch.ones(v.shape[:3], device=v.device)
    return delta_rule(q, k, w * v, one, g, -(g.exp() * b * k).to(k.dtype), k, backend=backend)[0]


def comba(x: Arguments, backend: str) -> Tensor:
    """Comba, which asks with p before the decay."""
    b = (x["beta"][..., None] * x["k"]).to(x["k"].dtype)
    return delta_rule(x["q"], x["k"], x["v"], x["beta"], x["g"], -x["p"], b, backend=backend)[0]


def rwkv7(x: Arguments, backend: str) -> Tensor:
    """RWKV-7 without its gates: the memory is read along -p and erased along b p."""
    q, k, v, g, p = (x[name] for name in ("q", "k", "v", "g", "p"))
    one = torch.ones(v.shape[:3], device=v.device)
    return delta_rule(q, k, v, one, g, -p, x["b"] * p, backend=backend)[0]


def fla_rwkv7(x: Arguments) -> Tensor:
    """The same in flash-linear-attention."""
    q, k, v, g, p = (x[name] for name in ("q", "k", "v", "g", "p"))
    run = import_module("fla.ops.rwkv7").chunk_rwkv7
    return run(q, g, k, v, -p, x["b"] * p, scale=q.shape[-1] ** -0.5)[0]


def delta_product(x: Arguments, backend: str) -> Tensor:
    """Two steps for each token: a token of the delta rule each, of which the second reads."""
    q, g = (
        F.pad(y[:, :, None], (0, 0) * (y.ndim - 2) + pad).flatten(1, 2)
        for y, pad in ((x["q"], (1, 0)), (x["g"], (0, 1)))
    )
    return delta_rule(q, x["k"], x["v"], x["beta"], g, backend=backend)[0][:, 1::2]


def mesa(x: Arguments, backend: str) -> Tensor:
    """MesaNet's read with a regulariser of one."""
    ridge = torch.ones(*x["v"].shape[2:3], x["k"].shape[3], device=x["k"].device)
    return ridge_regression(**x, ridge=ridge, backend="auto" if backend == "triton" else backend)[0]


def fla_mesa(x: Arguments) -> Tensor:
    """The same in flash-linear-attention."""
    lamb = torch.ones(*x["v"].shape[2:3], x["k"].shape[3], device=x["k"].device)
    return import_module("fla.ops.mesa_net").chunk_mesa_net(**x, lamb=lamb)[0]


def memory(depth: int) -> Form:
    """The neural memory."""

    def run(x: Arguments, backend: str) -> Tensor:
        weights = tuple(x[f"weight_{i}"] for i in range(depth))
        rows = {name: x[name] for name in ("q", "k", "v", "lr", "momentum", "decay")}
        has_kernels = depth == 2
        chosen = "auto" if backend == "triton" and not has_kernels else backend
        return neural_memory(**rows, weights=weights, chunk_size=MEMORY_CHUNK, backend=chosen)[0]

    names = ("q", "k", "v", "lr", "momentum", "decay", *(f"weight_{i}" for i in range(depth)))
    return Form(
        f"neural memory, depth {depth}", run, names, lambda T, D: memory_operations(sizes(depth, D))
    )


def sizes(depth: int, D: int) -> list[tuple[int, int]]:
    """The sizes of the layers of a memory."""
    widths = [D, *[EXPANSION * D] * (depth - 1), D]
    return list(zip(widths, widths[1:]))


def mamba2(x: Arguments) -> Tensor:
    """Its steps are our decays, with A = -1; values are divided by the step that it multiplies them with."""
    q, k, v, g = (x[name] for name in ("q", "k", "v", "g"))
    A = g.new_full(g.shape[2:], -1.0)
    return mamba2_chunk_scan(v / -g[..., None], -g, A, k, q * q.shape[-1] ** -0.5, chunk_size=256)


def kimi(x: Arguments) -> Tensor:
    """Kimi Linear's form in PyTorch."""
    if x["q"].shape[1] > KIMI_TOKENS:
        raise MemoryError(f"more than {KIMI_TOKENS} tokens")
    return chunk_kimi_delta_attention(x["q"], x["k"], x["v"], x["g"], x["beta"])[0]


def qwen3_next(x: Arguments) -> Tensor:
    """Qwen3-Next's form in PyTorch."""
    return torch_chunk_gated_delta_rule(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"])[0]


def attention(x: Arguments) -> Tensor:
    """Softmax attention over the same heads."""
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def fla(module: str, name: str, called: str = "fla", **options) -> dict[str, Callable]:
    """An op of flash-linear-attention, where that is installed and a GPU to run it."""
    if not torch.cuda.is_available() or find_spec("fla") is None:
        return {}

    def run(x: Arguments) -> Tensor:
        o = getattr(import_module(f"fla.ops.{module}"), name)(**x, **options)
        return o[0] if isinstance(o, tuple) else o

    return {called: run}


QKV = ("q", "k", "v")
FORMS = (
    Form(
        "linear attention",
        linear(),
        QKV,
        linear_operations,
        fla("linear_attn", "chunk_linear_attn", normalize=False),
    ),
    Form("linear attention, normalised", linear(True), ("phi_q", "phi_k", "v"), linear_operations),
    Form(
        "linear attention, scalar decay",
        linear(),
        (*QKV, "g"),
        linear_operations,
        {"Mamba-2 (transformers)": mamba2, **fla("simple_gla", "chunk_simple_gla")},
    ),
    Form(
        "linear attention, scalar decay, normalised",
        linear(True),
        ("phi_q", "phi_k", "v", "g"),
        linear_operations,
    ),
    Form(
        "linear attention, vector decay",
        linear(),
        (*QKV, "vector_g"),
        linear_operations,
        fla("gla", "chunk_gla"),
    ),
    Form(
        "linear attention, vector decay, normalised",
        linear(True),
        ("phi_q", "phi_k", "v", "vector_g"),
        linear_operations,
    ),
    Form(
        "delta rule",
        delta,
        (*QKV, "beta"),
        delta_operations,
        fla("delta_rule", "chunk_delta_rule"),
    ),
    Form(
        "delta rule, scalar decay",
        delta,
        (*QKV, "beta", "g"),
        delta_operations,
        {
            "Qwen3-Next (transformers)": qwen3_next,
            **fla("gated_delta_rule", "chunk_gated_delta_rule"),
        },
    ),
    Form(
        "delta rule, vector decay",
        delta,
        (*QKV, "beta", "vector_g"),
        delta_operations,
        {"Kimi Linear (transformers)": kimi, **fla("kda", "chunk_kda")},
    ),
    Form(
        "RWKV-7",
        rwkv7,
        (*QKV, "vector_g", "p", "b"),
        rank_one_operations,
        {"fla": fla_rwkv7} if fla("rwkv7", "chunk_rwkv7") else {},
    ),
    Form(
        "Gated DeltaNet-2",
        gated_deltanet_2,
        (*QKV, "vector_g", "b", "w"),
        rank_one_operations,
        fla("gdn2", "chunk_gdn2"),
    ),
    Form(
        "Comba", comba, (*QKV, "p", "beta", "g"), rank_one_operations, fla("comba", "chunk_comba")
    ),
    Form(
        "DeltaProduct, two steps",
        delta_product,
        ("q", "keys_2", "values_2", "beta_2", "g"),
        lambda T, D: 2 * delta_operations(T, D),
        fla("gated_delta_product", "chunk_gated_delta_product", num_householder=2),
    ),
    Form(
        "ridge regression (MesaNet)",
        mesa,
        ("unit_q", "k", "v", "beta", "g"),
        ridge_operations,
        {"fla": fla_mesa} if fla("mesa_net", "chunk_mesa_net") else {},
    ),
    Form(
        "DeltaFormer",
        lambda x, backend: deltaformer(**x, backend=backend)[0],
        (*QKV, "beta"),
        lambda T, D: 4 * T * D,
        {
            "attention (SDPA)": attention,
            **fla("deltaformer", "deltaformer_attn", called="fla DeltaFormer"),
        },
    ),
    memory(1),
    memory(2),
)
NAMES = {
    "phi_q": "q",
    "phi_k": "k",
    "unit_q": "q",
    "vector_g": "g",
    "keys_2": "k",
    "values_2": "v",
    "beta_2": "beta",
}  # what the ops call them


def make_arguments(
    form: Form, shape: tuple[int, ...], device: str, dtype: torch.dtype
) -> Arguments:
    """Random tensors that ask for gradients; gates, strengths and weights in float32."""
    B, T, H, D = shape
    torch.manual_seed(0)

    def random(*sizes: int, like: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*sizes, device=device).to(like)

    rows = (B, T, H, D)
    gates = (B, T, H)
    make = {
        "q": lambda: random(*rows, like=dtype),
        "k": lambda: F.normalize(random(*rows), dim=-1).to(dtype),
        "v": lambda: random(*rows, like=dtype),
        "phi_q": lambda: F.softplus(random(*rows)).to(dtype),
        "phi_k": lambda: F.softplus(random(*rows)).to(dtype),
        "beta": lambda: random(*gates).sigmoid(),
        "g": lambda: F.logsigmoid(random(*gates) + 2),
        "vector_g": lambda: F.logsigmoid(random(*rows) + 2),
        "unit_q": lambda: F.normalize(random(*rows), dim=-1).to(dtype),
        "p": lambda: F.normalize(random(*rows), dim=-1).to(dtype),
        "b": lambda: random(*rows).sigmoid().to(dtype),
        "w": lambda: random(*rows).sigmoid().to(dtype),
        "keys_2": lambda: F.normalize(random(B, 2 * T, H, D), dim=-1).to(dtype),
        "values_2": lambda: random(B, 2 * T, H, D, like=dtype),
        "beta_2": lambda: random(B, 2 * T, H).sigmoid(),
        "lr": lambda: random(*gates).sigmoid() * 0.1 / MEMORY_CHUNK,
        "momentum": lambda: F.logsigmoid(random(*gates)),
        "decay": lambda: F.logsigmoid(random(*gates) + 3),
    }
    for i, layer in enumerate(sizes(sum(name.startswith("weight") for name in form.arguments), D)):
        make[f"weight_{i}"] = partial(lambda layer: random(H, *layer) * layer[0] ** -0.5, layer)
    return {NAMES.get(name, name): make[name]().requires_grad_() for name in form.arguments}


def directions(run: Callable, x: Arguments) -> dict[str, Call]:
    """Forward without gradients; forward and the gradients of all arguments."""
    inputs = list(x.values())

    def both() -> Tensor:
        o = run(x)
        return torch.autograd.grad(o, inputs, torch.ones_like(o), allow_unused=True)[0]

    return {"forward": torch.no_grad()(lambda: run(x)), "forward+backward": both}


def yardsticks(device: str, dtype: torch.dtype) -> tuple[dict[str, Call], float, float]:
    """A matrix product and a copy larger than caches, the operations of the one and the bytes of the other."""
    n, m = (1024, 2**22) if device == "cpu" else (8192, 2**28)
    a, b, c = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
    source = torch.zeros(m, device=device)
    target = torch.ones(m, device=device)
    calls = {"product": lambda: torch.mm(a, b, out=c), "copy": lambda: target.copy_(source)}
    return (
        {name: torch.no_grad()(call) for name, call in calls.items()},
        2.0 * n**3,
        2.0 * source.nbytes,
    )


def in_turn(calls: dict[str, Call], device: str, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each, after one call of each: three turns or as many as fit, at most 25."""
    if device != "cpu":
        from triton.testing import do_bench

        return {name: [do_bench(call, return_mode="median")] for name, call in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for turn in range(26):
        if turn > 3 and time.perf_counter() > end:
            break
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                taken[name].append(1e3 * (time.perf_counter() - start))
    return taken


def peers_of(
    form: Form, x: Arguments, expected: Tensor
) -> tuple[dict[str, Callable], dict[str, str]]:
    """Those that compute the same, or are only neighbours; and why the others are not timed."""
    timed = {}
    refused = {}
    for name, run in form.peers.items():
        try:
            with torch.no_grad():
                o = run(x)
        except Exception as error:  # a peer may fail in any way; the table says how
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        difference = ((o - expected).float().norm() / expected.float().norm()).item()
        if name in NEIGHBOURS or difference < TOLERANCE[expected.dtype]:
            timed[name] = run
        else:
            refused[name] = f"its result differs by {difference:.1e} of the norm"
    return timed, refused


def floors(
    form: Form, shape: tuple[int, ...], x: Arguments, o: Tensor, direction: str
) -> tuple[float, float]:
    """Operations and bytes that no form can do without."""
    B, T, H, D = shape
    read = sum(a.nbytes for a in x.values())
    written = o.nbytes
    backward = direction != "forward"
    operations = B * T * H * form.operations(T, D) * (3 if backward else 1)
    return operations, read + written + (2 * read + written if backward else 0)


def ratio(times: list[float], others: list[float]) -> float:
    """Median over turns."""
    return statistics.median(a / b for a, b in zip(times, others))


def measure(
    form: Form,
    shape: tuple[int, ...],
    backend: str,
    device: str,
    dtype: torch.dtype,
    seconds: float,
):
    """A row for each direction."""
    x = make_arguments(form, shape, device, dtype)
    with torch.no_grad():
        o = form.run(x, backend)
    peers, refused = peers_of(form, x, o)
    ours = directions(lambda x: form.run(x, backend), x)
    theirs = {name: directions(run, x) for name, run in peers.items()}
    sticks, stick_operations, stick_bytes = yardsticks(device, dtype)
    for direction in ours:
        calls = {
            "ours": ours[direction],
            **{name: call[direction] for name, call in theirs.items()},
            **sticks,
        }
        taken = in_turn(calls, device, seconds)
        operations, moved = floors(form, shape, x, o, direction)
        by = {"operations": operations / stick_operations, "bytes": moved / stick_bytes}
        units = {"operations": taken["product"], "bytes": taken["copy"]}
        floor = [max(by[b] * units[b][i] for b in by) for i in range(len(taken["ours"]))]
        median = {name: statistics.median(times) for name, times in taken.items()}
        yield {
            "form": form.name,
            "shape": dict(zip("BTHD", shape)),
            "backend": backend,
            "dtype": name_of(dtype),
            "direction": direction,
            "ms": median["ours"],
            "tokens_per_second": shape[0] * shape[1] / median["ours"] * 1e3,
            "floor_ms": statistics.median(floor),
            "bound": max(
                by, key=lambda b: by[b] * median["product" if b == "operations" else "copy"]
            ),
            "of_floor": ratio(taken["ours"], floor),
            "operations_per_second": stick_operations / median["product"] * 1e3,
            "copy_bytes_per_second": stick_bytes / median["copy"] * 1e3,
            "peers": {
                n: {"ms": median[n], "ours_of_theirs": ratio(taken["ours"], taken[n])}
                for n in peers
            },
            "peers_not_timed": refused,
            "turns": len(taken["ours"]),
        }


def shares(
    form: Form, shape: tuple[int, ...], backend: str, device: str, dtype: torch.dtype
) -> dict[str, float]:
    """Where the time of a forward goes."""
    call = directions(lambda x: form.run(x, backend), make_arguments(form, shape, device, dtype))[
        "forward"
    ]
    call()
    return shares_of(call, device)


def shares_of(call: Callable, device: str, largest: int = 8) -> dict[str, float]:
    """The part of each PyTorch operation or kernel in the time of a call, the largest first."""
    with profile() as profiled:
        call()
    key = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
    taken = {event.key: getattr(event, key) for event in profiled.key_averages()}
    first = sorted(taken, key=taken.__getitem__, reverse=True)[:largest]
    return {name: round(taken[name] / max(sum(taken.values()), 1e-9), 3) for name in first}


def show(row: dict) -> None:
    """A line of the table."""
    peers = "".join(f"   {x['ours_of_theirs']:.2f} of {name}" for name, x in row["peers"].items())
    size = "x".join(str(n) for n in row["shape"].values())
    print(
        f"{row['form']:42} {row['backend']:6} {row['dtype']:8} {size:16} {row['direction']:17} {row['ms']:9.2f} ms "
        f"{row['tokens_per_second']:11.0f} tokens/s  floor {row['floor_ms']:8.2f} ms ({row['bound']}) "
        f"x {row['of_floor']:5.2f}{peers}",
        flush=True,
    )


def kind_of(row: dict) -> str:
    """A curve of the figure."""
    return f"{row['form']} ({row['backend']}, {row['dtype']})"


def draw(rows: list[dict], file: Path) -> None:
    """How far each form is from its floor, over the shapes."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained", sharey=True)
    labels = list(dict.fromkeys("x".join(str(n) for n in row["shape"].values()) for row in rows))
    for axis, direction in zip(axes, ("forward", "forward+backward")):
        for number, kind in enumerate(dict.fromkeys(map(kind_of, rows))):
            mine = [r for r in rows if kind_of(r) == kind and r["direction"] == direction]
            at = [labels.index("x".join(str(n) for n in r["shape"].values())) for r in mine]
            style = {
                "marker": "s" if "bfloat16" in kind else "o",
                "linestyle": "--" if number >= 10 else "-",
            }
            axis.plot(at, [r["of_floor"] for r in mine], **style, label=kind)
        axis.set(title=direction, xlabel="B x T x H x D", yscale="log")
        axis.set_xticks(range(len(labels)), labels, rotation=20)
    axes[0].set_ylabel("time, of the floor")
    axes[1].legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file, dpi=120)
    plt.close(figure)


def hardware(device: str) -> dict:
    """What was measured on, and with what."""
    packages = ("triton", "fla")
    return {
        "hardware": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{
            name: getattr(import_module(name), "__version__", "?")
            for name in packages
            if find_spec(name)
        },
    }


def cpu_name() -> str:
    """As the system calls it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def name_of(dtype: torch.dtype) -> str:
    """Without the module."""
    return str(dtype).removeprefix("torch.")


def work(device: str, lengths: list[int], forms: list[Form]) -> list[tuple]:
    """(form, shape, backend, dtype), the shapes that matter most first."""
    if device == "cpu":
        wide = [
            (form, (1, T, 8, 128), "chunk", torch.float32)
            for T in sorted(lengths)
            for form in forms
        ]
        narrow = [
            form for form in forms if form.operations in (linear_operations, delta_operations)
        ]
        return wide + [
            (form, (1, max(lengths), 8, 128), "chunk", torch.bfloat16) for form in narrow
        ]
    shapes = [shape for shape in CUDA_SHAPES if not lengths or shape[1] in lengths]
    kernels = [(form, shape, "triton", torch.bfloat16) for shape in shapes for form in forms]
    return kernels + [
        (form, shape, "chunk", torch.bfloat16) for shape in shapes[:2] for form in forms
    ]


def main() -> None:
    """Measure, print, and unless only a part was asked for, write and draw after each row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[])
    parser.add_argument("--only", default="", help="a regular expression of names of forms")
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="for the turns of a row on the CPU"
    )
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # of the profiler, which else speaks of every start
    device = given.device
    forms = [form for form in FORMS if re.search(given.only, form.name)]
    lengths = given.lengths or ([1024, 4096] if device == "cpu" else [])
    table = {**hardware(device), "rows": [], "shares": {}}
    print(
        *(f"{name} {value}" for name, value in table.items() if name not in ("rows", "shares")),
        sep=", ",
    )
    whole = not (given.only or given.lengths)
    RESULTS.mkdir(exist_ok=True)
    for form, shape, backend, dtype in work(device, lengths, forms):
        try:
            for row in measure(form, shape, backend, device, dtype, given.seconds):
                show(row)
                table["rows"].append(row)
        except (ValueError, RuntimeError) as error:  # no kernel for it, or no room
            size = "x".join(map(str, shape))
            print(
                f"{form.name:42} {backend:6} {name_of(dtype):8} {size:16} {type(error).__name__}: {error}"[
                    :160
                ]
            )
            continue
        if shape[1] == max(lengths or [shape[1]]):
            table["shares"][f"{form.name}, {backend}, {name_of(dtype)}"] = shares(
                form, shape, backend, device, dtype
            )
        if whole:
            (RESULTS / f"ops_{device}.json").write_text(json.dumps(table, indent=1) + "\n")
            draw(table["rows"], RESULTS / f"ops_{device}.png")
    for name, parts in table["shares"].items():
        print(
            f"{name}: " + ", ".join(f"{part} {100 * share:.0f} %" for part, share in parts.items())
        )


if __name__ == "__main__":
    main()
