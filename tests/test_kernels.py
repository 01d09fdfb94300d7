"""Kernels equal the reference, in Triton's interpreter, and compile for GPUs that this machine does not have."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map

from comparing import assert_close, in_float64
from forms import FORMS, is_real, reference, run, widened, with_strong_gates
from hf_memory import ops
from hf_memory.ops import OPS, dispatch
from hf_memory.ops.dispatch import choose_backend
from hf_memory.ops.rwkv7_gates import rwkv7_gates
from hf_memory.ops.triton.arguments import Meta
from hf_memory.ops.triton.launch import compiled, launcher

KERNEL_REPORT = Path(__file__).parents[1] / "benchmarks" / "kernel_report.py"
LINEAR = [form for form in FORMS if form.values[0].is_linear]
every_form = pytest.mark.parametrize(("op", "variant"), LINEAR)
every_kernel = pytest.mark.parametrize(  # extreme values run through the same kernels
    ("op", "variant"), [form for form in LINEAR if "extreme" not in form.values[1].values()]
)


def make(op, variant, dtype=torch.float32, **sizes):
    arguments = op.example(
        **{"B": 1, "T": 70, "H": 1, "HV": 2, "K": 20, "V": 18, **sizes}, **variant
    )
    return tree_map(
        lambda x: x.to(dtype).requires_grad_() if isinstance(x, torch.Tensor) else x,
        arguments,
    )


def kernel_report(*arguments):
    """The lines of the report, in a process whose Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", KERNEL_REPORT, *arguments]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout
    header, *lines = (line.split() for line in printed.splitlines())
    return [
        {**dict(zip(reversed(header), reversed(line))), "kernel": line[0]} for line in lines
    ]  # its name has spaces


@every_form
@pytest.mark.parametrize("T", [1, 16, 65])
def test_kernel_equals_reference(op, variant, T):
    arguments = make(op, variant, T=T)
    assert_close(run(op, arguments, "triton"), *reference(op, arguments))


@every_form
@pytest.mark.parametrize("query_heads", [1, 4])
def test_one_token_in_a_kernel_equals_reference_and_may_overwrite_the_state(
    op, variant, query_heads
):
    """With two value heads, which one key head or two read."""
    arguments = make(op, variant, T=1, B=2, H=min(query_heads, 2))
    arguments["q"] = make(op, variant, T=1, B=2, H=query_heads, HV=4, seed=3)["q"]
    with torch.no_grad():
        exact, rounded = (
            op.op(**x, backend="reference", output_final_state=True)
            for x in (widened(arguments), arguments)
        )
        given = arguments["initial_state"]
        before = tree_map(torch.clone, given)
        found = op.op(**arguments, backend="triton", output_final_state=True)
        assert_close(found, exact, rounded)
        assert_close(in_float64(given), in_float64(before))
        o, state = op.op(**arguments, backend="triton", output_final_state=True, in_place=True)
        assert_close((o, state), exact, rounded)
        assert query_heads > 2 or isinstance(given, tuple) or state is given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_of_rwkv7_in_a_kernel_equal_pytorch(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = *3 * [(2, 3, 3, 20)], *2 * [(3, 20)]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    inputs[0][0, 0, 0] = 0  # a key without a direction
    exact = rwkv7_gates(*in_float64(inputs), erasure=2.0, backend="chunk")
    rounded = rwkv7_gates(*inputs, erasure=2.0, backend="chunk")
    with torch.no_grad():
        assert_close(rwkv7_gates(*inputs, erasure=2.0, backend="triton"), exact, rounded)
    with pytest.raises(ValueError, match="gradients"):
        rwkv7_gates(*inputs, erasure=2.0, backend="triton")


@every_kernel
def test_packed_kernel_equals_reference_with_strong_gates(op, variant):
    arguments = with_strong_gates(op, make(op, variant, T=40, HV=1))
    arguments["initial_state"] = make(op, variant, B=4, T=1, HV=1, seed=5)["initial_state"]
    cu_seqlens = torch.tensor([0, 20, 20, 21, 40], dtype=torch.int32)
    expected = reference(op, arguments, cu_seqlens=cu_seqlens)
    assert_close(run(op, arguments, "triton", cu_seqlens=cu_seqlens), *expected)


@every_kernel
def test_wide_heads_run_in_tiles(op, variant):
    arguments = make(op, variant, T=17, HV=1, K=130, V=66)
    assert_close(run(op, arguments, "triton"), *reference(op, arguments))


@every_form
def test_kernel_in_16_bits_loses_what_rounding_loses(op, variant):
    """Beside a loop in float32 with the same rounded inputs; float16, since the interpreter multiplies the bit patterns
    of bfloat16. States and gradients of gates are wider, and lose what products of 16 bits lose."""
    example = op.example(B=1, T=70, H=1, K=32, V=32, dtype=torch.float16, **variant)
    arguments = tree_map(lambda x: x.detach().requires_grad_() if is_real(x) else x, example)
    results = run(op, arguments, "triton"), run(op, widened(arguments), "reference")
    assert results[0][0][0].dtype == torch.float16
    for factor, found, exact in zip((3, 5), *results):  # of outputs, of gradients
        narrow = [
            (x.double(), y)
            for x, y in zip(found, exact)
            if x is not None and x.dtype == torch.float16
        ]
        assert all((x - y).norm() <= factor * (y.half().double() - y).norm() for x, y in narrow)


@every_kernel
@pytest.mark.parametrize("kind", ["equal", "unequal", "packed"])
def test_segments_walked_at_once_equal_reference(op, variant, kind, monkeypatch):
    """With B = 2, or packed sequences of two heads, one empty and one of one token among them."""
    form = "diagonal_plus_rank_one" if "erase" in variant else op.name
    T, length = (128, 64) if kind == "equal" else (40, 32)
    monkeypatch.setattr(kernels_of(form), "segment_length", lambda *sizes: length)
    arguments = make(op, variant, T=T, B=2, HV=1)
    packed = {}
    if kind == "packed":
        packed = {"cu_seqlens": torch.tensor([0, 4, 4, 5, 40], dtype=torch.int32)}
        states = make(op, variant, B=4, T=1, seed=5)["initial_state"]
        arguments = {**make(op, variant, T=40), "initial_state": states}
    assert_close(run(op, arguments, "triton", **packed), *reference(op, arguments, **packed))


@pytest.mark.parametrize(
    ("rows", "programs", "length"),
    [
        ((1, 8192), 96, 2048),
        ((8, 4096), 4, 512),
        ((1, 8200), 96, 3008),
        ((8, 512), 4, 0),
        ((8, 4096), 32, 0),
    ],
    ids=["one long row", "few heads", "no equal parts", "short rows", "programs enough"],
)
def test_rows_are_cut_into_equal_segments_where_there_are_any(rows, programs, length):
    q = torch.empty(*rows, 1, 128, device="meta")
    assert kernels_of("linear_attention").segment_length(q, rows[0], programs) == length


def kernels_of(name):
    """The module that launches the kernels of an op, or of the delta rule's form with a and b."""
    if name == "diagonal_plus_rank_one":
        return import_module("hf_memory.ops.delta_rule.kernels.rank_one_launch")
    kernels = import_module(f"hf_memory.ops.{name}.kernels")
    return getattr(kernels, "launch", kernels)


with_custom_ops = pytest.mark.parametrize(
    "name",
    [
        *(op.name for op in OPS if op.has_kernels and hasattr(kernels_of(op.name), "_forward")),
        "diagonal_plus_rank_one",
    ],
)


def entry(name):
    """The kernels of an op, what calls them, and arguments of it that ask for gradients."""
    generator = torch.Generator().manual_seed(0)
    kernels = kernels_of(name)
    q, k, v, beta, state = (
        torch.rand(shape, generator=generator).requires_grad_()
        for shape in ((1, 17, 1, 4), (1, 17, 1, 4), (1, 17, 1, 4), (1, 17, 1), (1, 1, 4, 4))
    )
    g = -beta.detach().requires_grad_()
    if name == "linear_attention":
        return kernels, kernels.linear_attention, (q, k, v, g, state, 0.5, None)
    if name == "delta_rule":
        return kernels, kernels.delta_rule, (q, k, v, beta, g, state, 0.5, None)
    if name == "diagonal_plus_rank_one":
        g, a, b = (x.detach().requires_grad_() for x in (-v, -q, k))
        return kernels, kernels.diagonal_plus_rank_one, (q, k, v, beta, g, a, b, state, 0.5, None)
    return kernels, kernels.corrected_values, (k, v, beta, beta, 0.5)


def outputs_and_gradients(call, arguments):
    outputs = tree_flatten(call(*arguments))[0]
    inputs = {id(x): x for x in arguments if isinstance(x, torch.Tensor)}.values()
    return outputs, torch.autograd.grad(sum(x.sum() for x in outputs), tuple(inputs))


@with_custom_ops
def test_compiled_kernels_are_one_graph(name):
    _, call, arguments = entry(name)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = (tree_flatten(outputs_and_gradients(x, arguments))[0] for x in (compiled, call))
    assert all(map(torch.equal, *results))


@with_custom_ops
@pytest.mark.parametrize("segment", [0, 16])
def test_kernels_keep_what_custom_ops_promise(name, segment, monkeypatch):
    """Schema, fake tensors and gradients, of the custom op that a call runs."""
    kernels, call, arguments = entry(name)
    forward = kernels._forward
    calls = []
    monkeypatch.setattr(kernels, "segment_length", lambda *sizes: segment, raising=False)
    monkeypatch.setattr(kernels, "_forward", lambda *args: calls.append(args) or forward(*args))
    call(*arguments)
    torch.library.opcheck(forward, calls[0])


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch):
    """Triton launches on the current device, so nothing else may launch a kernel."""
    entered = []
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: entered.append(device) or nullcontext()
    )
    kernel = {(3,): lambda *args, **options: entered.append((*args, options))}
    with FakeTensorMode():
        x = torch.empty(2, device="cuda:1")
    launcher(kernel, (3,))(None, x, meta=Meta(K=2), num_warps=1)
    assert entered == [
        torch.device("cuda:1"),
        (None, x, compiled(Meta(K=2)), {"num_warps": 1, "maxnreg": 255}),
    ]
    sources = {path: path.read_text() for path in Path(ops.__file__).parent.rglob("*.py")}
    assert [path.name for path, source in sources.items() if re.search(r"kernel\[", source)] == [
        "launch.py"
    ]


def test_auto_takes_no_kernel_in_a_graph_for_any_number_of_tokens(monkeypatch):
    with FakeTensorMode():
        q = torch.empty(1, 2, 1, 4, device="cuda")
    monkeypatch.setattr(dispatch, "varies", lambda tokens: tokens == q.shape[1])
    assert choose_backend("auto", q, None) == "chunk"
    assert choose_backend("triton", q, None) == "triton"


def test_auto_takes_no_kernel_on_amd_gpus_and_says_so_once(monkeypatch):
    with FakeTensorMode():
        q = torch.empty(1, 2, 1, 4, device="cuda")
    assert choose_backend("auto", q, None) == "triton"
    dispatch._is_amd.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.warns(UserWarning, match="AMD") as warned:
        assert [choose_backend("auto", q, None) for _ in range(2)] == ["chunk", "chunk"]
    assert len(warned) == 1
    dispatch._is_amd.cache_clear()


def test_kernels_compile_ahead_of_time_without_spills():
    """All at a usual size for one architecture; `python benchmarks/kernel_report.py` compiles all sizes for all.

    It refuses sums that Triton before 3.7 does not compile.
    """
    usual = (
        "linear_attention scalar 64 bf",
        "delta_rule vector random 64 bf",
        "delta_rule vector own 64 bf",
        "deltaformer softmax softmax erase 64 bf",
        "neural_memory 2 16 64 bf",
        "kv_eviction change_of_output 64 bf",
        "attention_in_bits 4 64 bf",
        "short_convolution 512 bf",
        "rwkv7_gates 64 bf",
    )
    lines = kernel_report("--only", *usual, "--arch", "sm_90", "--processes", "1")
    source = "".join(path.read_text() for path in Path(ops.__file__).parent.rglob("*.py"))
    assert {line["kernel"] for line in lines} == set(
        re.findall(r"@triton.jit\ndef (\w+_kernel)\(", source)
    )
    assert {line["sm"] for line in lines} == {"sm_90"}
    assert {line["spilled"] for line in lines} == {"0"}
    assert all(int(line["blocks"]) > 0 for line in lines)


def test_the_report_of_kernels_calls_every_variant(monkeypatch):
    monkeypatch.syspath_prepend(KERNEL_REPORT.parent)
    names = {name for name, _ in import_module("kernel_report").calls()}
    for op in OPS:
        for variant in op.variants if op.has_kernels else ():
            words = [str(x) for x in variant.values() if not isinstance(x, bool)]
            assert any(name.split()[: 1 + len(words)] == [op.name, *words] for name in names)


def test_the_end_of_narrow_products_is_that_of_sixteen_rows(monkeypatch):
    """Rows of 128 bytes begin at byte 2048 for the first four warps, and at 3072 for the others."""
    monkeypatch.syspath_prepend(KERNEL_REPORT.parent)
    end = import_module("descriptors").end_of_narrow_products
    descriptor = """
        mov.u32 %r1, %tid.x;
        shr.u32 %r2, %r1, 7;
        shl.b32 %r3, %r2, 6;
        add.s32 %r4, %r3, 128;
        cvt.u64.u32 %rd1, %r4;
        or.b64 %rd2, %rd1, 4611686018427387904;
        wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%r5,%r6}, {%r7,%r8}, %rd2, 0, 1, 1;
    """
    assert [end(descriptor, warps) for warps in (4, 8)] == [4096, 5120]
    assert end(descriptor.replace("n8", "n16"), 8) == 0
