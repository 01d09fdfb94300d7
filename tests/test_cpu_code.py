"""Compiled code for rows in few bits on a CPU computes what PyTorch computes."""

import subprocess
import warnings
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.cache_utils import DynamicCache, StaticCache

from cases import CASE, make_model, random_tokens
from comparing import assert_close, in_float64
from hf_memory.cache_bits import CacheBits, read_bits
from hf_memory.layers import RMSNorm
from hf_memory.mixers.attention_blocks import Scores
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts.kept import Kept, empty_states
from hf_memory.mixers.pasts.kept_by_head import KeptByHead
from hf_memory.mixers.pasts.rows import New
from hf_memory.mixers.positions import Positions
from hf_memory.ops import cpu
from hf_memory.ops.attention_in_bits import attention_in_bits
from hf_memory.ops.bits import pack, unpack
from hf_memory.ops.kv_eviction import (
    Rule,
    change_of_output,
    received_attention,
    retained_attention,
)
from hf_memory.ops.rows import Rows

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="there is no C++ compiler")
IN_BYTES = Rows(8, 8)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
channels_and_bits = pytest.mark.parametrize(
    ("D", "bits"),
    [
        (6, (8, 8)),
        (64, (8, 8)),
        (64, (8, 4)),
        (64, (4, 8)),
        (80, (8, 8)),
        (96, (4, 4)),
        (128, (8, 4)),
    ],
    ids=str,
)
key_and_value_bits = pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 4)], ids=str)
EQUAL = Kept(window=6, first=2, kept=7, block=5, groups=3)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def in_pytorch(monkeypatch):
    """A function that computes a call without compiled code."""

    def run(call):
        with monkeypatch.context() as patched:
            patched.setattr(cpu, "library", lambda: None)
            return call()

    return run


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("D", "bits"), [(6, 8), (64, 8), (80, 8), (64, 4), (96, 4), (128, 4)])
@both_dtypes
def test_rows_are_packed_in_the_same_bytes(dtype, D, bits, in_pytorch):
    x = randn(4, 40, D).to(dtype)
    x[0] *= 1e-30
    x[1] = 0
    assert (pack(x, bits) == in_pytorch(lambda: pack(x, bits))).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_a_row_with_a_number_that_is_not_finite_has_none_that_is(number, bits):
    x = randn(3, 64)
    x[1, 3] = number
    found = unpack(pack(x, bits), 64, bits, torch.float32).isfinite()
    assert found.any(1).tolist() == [True, False, True]


@both_dtypes
@pytest.mark.parametrize("shape", [(1, 1, 96), (3, 1, 2, 7)], ids=str)
def test_the_norm_of_one_token_is_that_of_pytorch(shape, dtype, in_pytorch):
    norm = RMSNorm(shape[-1], eps=1e-5).to(dtype)
    norm.weight.copy_(randn(shape[-1]))
    x = randn(*shape, seed=1).to(dtype)
    exact = norm.double()(x.double())
    norm.to(dtype)
    assert_close(norm(x), in_float64(exact), in_pytorch(lambda: norm(x)))


@both_dtypes
@pytest.mark.parametrize("rows", [1, 3], ids=["the same angles", "of each row"])
@pytest.mark.parametrize("channels", [6, 8], ids=["some channels", "all"])
def test_one_token_is_rotated_as_by_pytorch(rows, channels, dtype, in_pytorch):
    angles = randn(rows, 4, channels // 2).repeat(1, 1, 2)[:, 2:3]
    positions = Positions(angles.cos().to(dtype), angles.sin().to(dtype))
    q, k = randn(3, 1, 5, 8, seed=1).to(dtype).split((3, 2), 2)
    found = positions.rotate(q, k)
    expected = in_pytorch(lambda: positions.rotate(q, k))
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y)


@channels_and_bits
@both_dtypes
@pytest.mark.parametrize("sizes", [None, (3, 29, 8)], ids=["alike", "in turn"])
def test_attention_is_that_of_the_definition(sizes, dtype, D, bits):
    H, G = (1, 15) if sizes else (3, 5)
    q = randn(2, H, G, D).to(dtype)
    rows = Rows(*bits)
    keys, values = rows.stored(*randn(2, 2, H, 40, D, seed=1))
    visible = randn(2, H, 40, seed=2) < 0.5
    visible[1, 0, :3] = False
    how = {"rows": rows, "scale": 0.3, "softcap": 2.0, "sizes": sizes}
    definition = how | {"backend": "reference"}
    exact = attention_in_bits(q.double(), keys, values, visible, **definition)
    rounded = attention_in_bits(q, keys, values, visible, **definition)
    found = attention_in_bits(q, keys, values, visible, **how)
    assert_close(found, in_float64(exact), rounded)
    apart = attention_in_bits(q, [*keys], [*values], visible, **how)
    assert all((x == y).all() for x, y in zip(apart, found))
    if sizes:
        assert not found[0][1, 0, :5].any()


def test_keys_and_values_may_lie_in_memory_in_any_way():
    q = randn(2, 3, 2, 8)
    keys, values = IN_BYTES.stored(*randn(2, 2, 3, 5, 8, seed=1))
    by_token = values.transpose(1, 2).contiguous().transpose(1, 2)
    how = {"rows": IN_BYTES, "scale": 0.3}
    expected, _ = attention_in_bits(q, keys, values, **how)
    assert torch.equal(attention_in_bits(q, keys, by_token, **how)[0], expected)
    some = torch.tensor([True, False, True, True, False]).expand(2, 3, 5)
    expected_of_some, _ = attention_in_bits(q, keys, values, some, **how)
    every_other = some.repeat_interleave(2, -1)[..., ::2]
    assert torch.equal(attention_in_bits(q, keys, values, every_other, **how)[0], expected_of_some)
    apart = [keys[0], by_token.new_zeros(5, 3, 10).transpose(0, 1).copy_(keys[1])]
    assert torch.equal(attention_in_bits(q, apart, [*values], **how)[0], expected)


@both_dtypes
def test_large_values_are_averaged_and_their_sum_may_be_none(dtype):
    values = torch.zeros(1, 1, 40, 64)
    values[..., 0] = 1e38
    q = torch.zeros(1, 1, 5, 64, dtype=dtype)
    keys, values = IN_BYTES.stored(torch.zeros(1, 1, 40, 64), values)
    o, _ = attention_in_bits(q, keys, values, rows=IN_BYTES, scale=0.3)
    torch.testing.assert_close(o[..., 0].float(), torch.full((1, 1, 5), 1e38), rtol=1e-2, atol=0)


def of_bits(bits):
    """Those of keys and values of a window."""
    return read_bits({"window": dict(zip(("keys", "values"), bits))})


def empty(past, rows, D, dtype, bits=(8, 8)):
    """The states before the first token."""
    return empty_states(past.spec(3, D, D), torch.empty(rows, 0, dtype=dtype), of_bits(bits))


def read(past, lengths, D, dtype, bits, scores, is_apart):
    """Outputs of tokens after others, and the states at last, of rows that have read so many before."""
    states = empty(past, len(lengths), D, dtype, bits)
    outputs = []
    for step in range(23):
        q = randn(len(lengths), 1, 3, 3, D, seed=step).to(dtype)
        k, v = randn(2, len(lengths), 1, 3, D, seed=100 + step).to(dtype)
        before = [length + step for length in lengths]
        given = {name: [*x.split(1)] if is_apart else x for name, x in states.items()}
        context = Context(
            None,
            None,
            None,
            given,
            uniform_length=before if is_apart else before[0],
            bits=of_bits(bits),
        )
        reader = past.reader(q, context, scores, slice(0, 3, 1))
        if reader is not None:
            o = torch.empty_like(q)
            reader(q, k, v, tuple(before), o)
            outputs.append(o)
        else:
            new = New.of(k, v, "window", context)
            outputs.append(past.attend_one(q, new, context, scores))
    return torch.cat(outputs, 1), states


@both_dtypes
@key_and_value_bits
@pytest.mark.parametrize("policy", cpu.POLICIES)
@pytest.mark.parametrize("softcap", [None, 0.2])
@pytest.mark.parametrize("numbers", [None, (7, 3, 3)], ids=["equal", "by head"])
@pytest.mark.parametrize("lengths", [[0], [0, 0], [0, 3, 7]], ids=str)
def test_one_token_is_read_as_by_operations(
    lengths, numbers, softcap, policy, bits, dtype, in_pytorch
):
    """Blocks of five tokens end; what stays after them is the same."""
    past: Any = EQUAL._replace(policy=policy)
    if numbers is not None:
        past = KeptByHead.of(past, numbers)
    given = past, lengths, 64, dtype, bits, Scores(0.03, softcap), len({*lengths}) > 1
    o, states = read(*given)
    expected, others = in_pytorch(lambda: read(*given))
    for name in ("keys", "values", "number", "queries"):
        assert (states[name] == others[name]).all(), name
    torch.testing.assert_close(states["score"], others["score"], rtol=1e-3, atol=1e-4)
    exact = dtype == torch.float32
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5 if exact else 2e-2)


def pieces_of(count, piece):
    """How many tokens each call reads."""
    return [min(piece, count - start) for start in range(0, count, piece)]


@both_dtypes
@key_and_value_bits
@pytest.mark.parametrize("policy", cpu.POLICIES)
@pytest.mark.parametrize("piece", [2, 5, 8, 23])
@pytest.mark.parametrize("threads", [1, 3])
def test_several_tokens_are_read_as_one_after_the_other(
    threads, piece, policy, bits, dtype, monkeypatch
):
    """Also where rows have read different numbers of tokens, and where the last tokens of a row are padding."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    past: Any = KeptByHead.of(EQUAL._replace(policy=policy), (7, 3, 3))
    before, counts, T = [0, 3, 7], [23, 17, 20], 23
    q = randn(3, T, 3, 3, 64).to(dtype)
    k, v = randn(2, 3, T, 3, 64, seed=1).to(dtype)
    found = []
    for sizes in ([1] * T, pieces_of(T, piece)):
        states = empty(past, 3, 64, dtype, bits)
        context = Context(None, None, None, states, bits=of_bits(bits))
        reader = past.reader(q, context, Scores(0.03), slice(0, 3, 1))
        o = torch.zeros_like(q)
        reader(*(x[:, :7] for x in (q, k, v)), (0, 0, 0), o[:, :7].clone(), tuple(before))
        for start, size in zip(accumulate([0, *sizes]), sizes):
            there = tuple(max(0, min(size, count - start)) for count in counts)
            read = tuple(x + min(start, count) for x, count in zip(before, counts))
            of_piece = o[:, start : start + size].clone()
            reader(*(x[:, start : start + size] for x in (q, k, v)), read, of_piece, there)
            o[:, start : start + size] = of_piece
        found.append((o, states))
    (expected, others), (o, states) = found
    for name in ("keys", "values", "number", "queries"):
        assert (states[name] == others[name]).all(), name
    torch.testing.assert_close(states["score"], others["score"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(o, expected)
    assert not o[1, 17:].any()


@pytest.mark.parametrize("policy", [received_attention, change_of_output])
@pytest.mark.parametrize("softcap", [0.0, 0.2])
@pytest.mark.parametrize("is_padded", [False, True])
def test_tokens_to_learn_from_are_read_as_by_operations(
    policy, softcap, is_padded, monkeypatch, in_pytorch
):
    stay, block, T = 15, 5, 40
    rule = Rule(block, 2, 6, policy, 0.5, softcap, None, False)
    counts = [T, 23] if is_padded else [T, T]
    number = torch.zeros(2, 2, stay + T, dtype=torch.int32)
    for row, count in zip(number, counts):
        row[:, stay : stay + count] = torch.arange(1, count + 1)
    is_token = number[:, 0, stay:] > 0
    q, k, v, do = randn(2, T, 6, 8), *randn(2, 2, 2, stay + T, 8), randn(2, T, 6, 8)
    do[~is_token] = 0
    calls = []
    call = cpu.TokenReader.__call__
    monkeypatch.setattr(
        cpu.TokenReader, "__call__", lambda self, *x: calls.append(x) or call(self, *x)
    )

    @torch.enable_grad()
    def run(*rows):
        learnt = [x.clone().requires_grad_() for x in rows]
        score = rows[0].new_zeros(2, 2, stay)
        o, _, held, score = retained_attention(*learnt, number, score, rule)
        gradients = torch.autograd.grad(o, learnt, do.to(o.dtype))
        return o[is_token], number.gather(2, held), score, *gradients

    found = run(q, k, v)
    assert len(calls) == T // block
    expected = run(*(x.double() for x in (q, k, v)))
    assert_close(found, expected, in_pytorch(lambda: run(q, k, v)))
    assert len(calls) == T // block


def test_tokens_after_others_are_learnt_from_by_operations(monkeypatch):
    monkeypatch.setattr(cpu, "TokenReader", None)
    rule = Rule(5, 2, 6, received_attention, 0.5, 0.0, None, False)
    number = torch.arange(1, 26, dtype=torch.int32).expand(1, 2, -1)
    q, k, v = (x.requires_grad_() for x in (randn(1, 10, 2, 8), *randn(2, 1, 2, 25, 8)))
    with torch.enable_grad():
        o, *_ = retained_attention(q, k, v, number, torch.ones(1, 2, 15), rule)
    assert o.requires_grad


@pytest.mark.parametrize("kind", ["static", "padded"])
def test_caches_whose_rows_differ_are_read_as_by_operations(kind, in_pytorch, monkeypatch):
    """A cache of static size counts in a tensor; rows with padding have read different numbers of tokens."""
    options = {"num_kept_tokens": 3, "full_attention_heads": [[1], []], "cache_bits": 8}
    model = make_model(CASE["attention-kept"], **options, layer_types=["sliding_heads"] * 2)
    tokens = random_tokens(2, 30)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0 if kind == "padded" else 1

    def read():
        cache = DynamicCache(config=model.config)
        if kind == "static":
            cache = StaticCache(config=model.config, max_cache_len=30)
        ends = [8, *range(9, 31)]
        return torch.cat(
            [
                model(tokens[:, start:end], mask[:, :end], past_key_values=cache).logits[:, -1:]
                for start, end in zip([0, *ends], ends)
            ],
            1,
        )

    expected = in_pytorch(read)
    calls = []
    run = cpu.TokenReader.__call__
    monkeypatch.setattr(cpu.TokenReader, "__call__", lambda *args: calls.append(run(*args)))
    torch.testing.assert_close(read(), expected, rtol=1e-3, atol=1e-4)
    assert len(calls) == 2 * 23


def test_other_arguments_are_read_by_operations():
    states = empty(EQUAL, 1, 64, torch.float32)
    q = randn(1, 1, 3, 3, 64)
    numbers = torch.zeros(1, 3, EQUAL.size, 64)
    in_numbers = states | {"keys": numbers, "values": numbers}
    context = Context(None, None, None, states, uniform_length=4, bits=CacheBits(of_all_rows=8))
    given = q, context, Scores(0.3), slice(0, 3, 1)
    assert EQUAL.reader(*given)
    assert not EQUAL._replace(policy="random").reader(*given)
    assert not EQUAL.reader(q.double(), *given[1:])
    assert not EQUAL.reader(q.bfloat16(), *given[1:])  # states have another dtype
    for other in ({"states": in_numbers}, {"backend": "chunk"}):
        assert not EQUAL.reader(q, context._replace(**other), *given[2:])
    with torch.enable_grad():
        assert not EQUAL.reader(*given)


# vmap clamps rows one by one
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_transforms_or_records_operations_sees_operations():
    def rounded(x):
        return unpack(pack(x, 8), 8, 8, torch.float32)

    x, y = randn(2, 3, 8)
    expected = rounded(x)
    assert torch.equal(torch.vmap(rounded)(x), expected)
    assert torch.equal(make_fx(rounded)(y)(x), expected)


@pytest.mark.parametrize("bits", [8, None], ids=["in bits", "plain"])
@pytest.mark.parametrize(
    "heads",
    [
        {"num_kept_tokens": 3, "full_attention_heads": [[1]]},
        {"num_kept_tokens": [[3, 1]], "full_attention_heads": None},
    ],
    ids=["beside a full head", "by head"],
)
def test_a_compiled_step_calls_compiled_code(heads, bits, in_pytorch):
    options = {"cache_bits": bits, "num_hidden_layers": 1, "layer_types": ["sliding_heads"]}
    model = make_model(CASE["attention-kept"], **options, **heads)
    tokens = random_tokens(2, 20)
    called = set()

    def note(graph, _):
        called.update(str(node.target) for node in graph.graph.nodes)
        return graph

    def run(forward):
        cache = StaticCache(config=model.config, max_cache_len=32)
        model(tokens[:, :8], past_key_values=cache)
        steps = [forward(tokens[:, t : t + 1], past_key_values=cache).logits for t in range(8, 20)]
        return torch.cat(steps, 1)

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(torch.compile(model.forward, backend=note, fullgraph=True))
    expected = {"hf_memory.read_token.default"}
    if bits and heads["full_attention_heads"]:
        expected |= {"hf_memory.attention_in_bits_on_cpu.default"}
    assert {name for name in called if name.startswith("hf_memory.")} == expected
    torch.testing.assert_close(found, in_pytorch(lambda: run(model)), rtol=1e-4, atol=1e-4)


@pytest.fixture
def new_library(monkeypatch, tmp_path):
    """`library` as in a new process, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu.library.cache_clear()
    yield cpu.library
    cpu.library.cache_clear()


def test_without_a_compiler_pytorch_computes(new_library, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert new_library() is None
    assert pack(randn(2, 64), 8).shape == (2, 66)


def test_a_compiler_that_fails_is_named(new_library, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.warns(UserWarning, match="false cannot compile cpu.cpp, so PyTorch runs"):
        assert new_library() is None


@pytest.mark.parametrize("compiler", ["c++ -DNOTHING", "env c++"])
def test_a_compiler_may_be_named_with_arguments(new_library, monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    assert new_library() is not None


@pytest.mark.parametrize("compiler", ["", " ", "none -O3"])
def test_no_compiler_is_named(new_library, monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    assert new_library() is None


def test_a_user_without_a_home_is_told(new_library, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.Path.home", no_home)
    with pytest.warns(UserWarning, match=r"so PyTorch runs: Could not determine home"):
        assert new_library() is None


def test_what_is_compiled_is_found_again(new_library, monkeypatch):
    assert new_library() is not None
    new_library.cache_clear()
    monkeypatch.setattr(subprocess, "run", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert new_library() is not None


def test_tangents_of_a_token_are_kept():
    model = make_model(CASE["deltanet"])
    embedded = randn(1, 1, model.config.hidden_size)
    with torch.no_grad(), forward_ad.dual_level():
        given = forward_ad.make_dual(embedded, torch.ones_like(embedded))
        found = forward_ad.unpack_dual(model(inputs_embeds=given).logits).tangent
    expected = torch.func.jvp(
        lambda x: model(inputs_embeds=x).logits, (embedded,), (torch.ones_like(embedded),)
    )[1]
    torch.testing.assert_close(found, expected)
