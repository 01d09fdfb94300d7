"""Attention of one token to packed keys and values, by the kernel and in PyTorch, against the definition."""

from copy import deepcopy
from itertools import product

import pytest
import torch
from transformers import DynamicCache

from cases import CASE, make_model, random_tokens
from comparing import assert_close, in_float64
from hf_memory.ops.attention_in_bits import attention_in_bits, kernels
from hf_memory.ops.bits import BITS, hadamard, rotated
from hf_memory.ops.rows import Rows

WITH_BITS = [f"{name}-bits" for name in ("linear-window", "attention-kept", "attention-sinks")]
ROWS = [Rows(*bits) for bits in product(BITS, BITS)]
every_kind_of_rows = pytest.mark.parametrize("rows", ROWS, ids=str)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def make(rows, B=2, H=2, G=3, S=40, D=64, layout="heads"):
    """Queries, and packed keys and values as kept tokens have them, or as full heads do, whose entries come first."""
    generator = torch.Generator().manual_seed(S)
    q = torch.randn(B, H, G, D, generator=generator)
    shape = (B, H, S, D) if layout == "heads" else (B, S, H, D)
    keys, values = rows.stored(*(1 + torch.randn(2, *shape, generator=generator)))
    if layout != "heads":
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    return q, keys, values


def assert_kernel_is_right(q, keys, values, visible=None, **how):
    how = {"scale": 0.3} | how
    exact = attention_in_bits(q.double(), keys, values, visible, backend="reference", **how)
    rounded = attention_in_bits(q, keys, values, visible, backend="reference", **how)
    found = attention_in_bits(q, keys, values, visible, backend="triton", **how)
    assert_close(found, in_float64(exact), rounded)
    return found


@every_kind_of_rows
@pytest.mark.parametrize("D", [32, 96, 80])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_products_of_codes_are_those_of_numbers(softcap, D, rows):
    q, keys, values = make(rows, D=D, layout="entries")
    visible = torch.ones(2, 1, 40, dtype=torch.bool)
    visible[0, 0, :9] = visible[1] = False
    how = {"rows": rows, "scale": 0.3, "softcap": softcap}
    expected = attention_in_bits(q.double(), keys, values, visible, backend="reference", **how)
    found = attention_in_bits(q.double(), keys, values, visible, backend="chunk", **how)
    assert_close(found, expected)
    assert not found[0][1].any()


@every_kind_of_rows
@pytest.mark.parametrize("backend", ["chunk", "reference", "triton"])
def test_rows_anywhere_in_memory_are_read_as_one_tensor(backend, rows):
    q, keys, values = make(rows, B=3)
    visible = torch.arange(40) < torch.tensor([40, 7, 23])[:, None, None]
    how = {"rows": rows, "scale": 0.3, "backend": backend}
    expected = attention_in_bits(q, keys, values, visible, **how)
    apart = ([row.clone() for row in x] for x in (keys, values))
    found = attention_in_bits(q, *apart, visible, **how)
    exact = attention_in_bits(q.double(), keys, values, visible, **how | {"backend": "reference"})
    assert_close(found, in_float64(exact), expected)


@every_kind_of_rows
@pytest.mark.parametrize("D", [6, 33, 64, 80, 130])
@pytest.mark.parametrize("layout", ["heads", "entries"])
def test_kernel_reads_what_was_packed(layout, D, rows):
    assert_kernel_is_right(*make(rows, D=D, layout=layout), rows=rows)


@every_kind_of_rows
@pytest.mark.parametrize("G", [1, 5, 17])
def test_kernel_reads_the_queries_of_a_group(G, rows):
    assert_kernel_is_right(*make(rows, G=G), rows=rows, softcap=2.0)


@pytest.mark.parametrize("S", [1, 255, 256, 1300])
def test_kernels_share_entries_whatever_their_number(S):
    assert_kernel_is_right(*make(Rows(8, 8), S=S, D=32), rows=Rows(8, 8))


@pytest.mark.parametrize("S", [40, 1300])
@pytest.mark.parametrize("alike", ["each row", "each head"])
def test_kernel_sees_what_is_visible(alike, S):
    """Also a row that sees nothing, and one that sees nothing in all of a program's tiles but the last."""
    q, keys, values = make(Rows(4, 4), S=S, D=32)
    visible = torch.ones(2, 1 if alike == "each row" else 2, S, dtype=torch.bool)
    visible[0, 0, : S - 3] = False
    visible[1, -1] = False
    o, mass = assert_kernel_is_right(q, keys, values, visible, rows=Rows(4, 4))
    assert not o[1, -1].any()
    assert (mass[1, -1] == -torch.inf).all()


@every_kind_of_rows
def test_kernel_takes_parts_of_larger_tensors(rows):
    q, keys, values = make(rows, B=3, H=4, S=50)
    some = [x[1:, 1::2, 3:44] for x in (keys, values)]
    assert_kernel_is_right(q[1:, 1::2], *some, rows=rows)
    assert_kernel_is_right(
        q[1:, 1::2], *(torch.cat([x, x], -1)[..., : x.shape[-1]] for x in some), rows=rows
    )


@every_kind_of_rows
def test_kernel_in_16_bits_loses_what_rounding_loses(rows):
    q, keys, values = make(rows, S=300)
    how = {"rows": rows, "scale": 0.1}
    exact = attention_in_bits(q.half().double(), keys, values, backend="reference", **how)[0]
    found = attention_in_bits(q.half(), keys, values, backend="triton", **how)[0]
    plain = attention_in_bits(q.half(), keys, values, backend="reference", **how)[0]
    assert found.dtype == torch.float16
    assert (found - exact).norm() < 2 * (plain - exact).norm()


@pytest.mark.parametrize("D", [6, 64, 80])
def test_a_rotation_as_one_product_is_that_of_steps(D):
    x = torch.randn(3, D, dtype=torch.float64)
    assert_close(rotated(x), hadamard(x))


@every_kind_of_rows
def test_wrong_rows_are_refused(rows):
    q, keys, values = make(rows)
    how = {"rows": rows, "scale": 1.0}
    with pytest.raises(ValueError, match="keys must have"):
        attention_in_bits(q, keys[..., 1:], values, **how)
    with pytest.raises(ValueError, match=r"values must have dtype torch.uint8, got torch.int32"):
        attention_in_bits(q, keys, values.int(), **how)
    with pytest.raises(ValueError, match="values must be 2 tensors, one for each row of q, got 1"):
        attention_in_bits(q, keys, [values[0]], **how)
    with pytest.raises(ValueError, match="float64"):
        attention_in_bits(q.double(), keys, values, backend="triton", **how)


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("case", WITH_BITS)
def test_a_model_reads_a_token_with_the_kernel_as_without(case, padding, monkeypatch):
    """A kernel that makes its outputs larger shows that it was called. Both go on from one cache: a number that is
    almost in the middle of two codes may get the other one if it was computed in another way."""
    model = make_model(CASE[case]).eval()
    tokens = random_tokens(2, 30)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :padding] = 0
    cache = DynamicCache(config=model.config)
    model(tokens[:, :29], attention_mask=mask[:, :29], past_key_values=cache)

    def last_logits(backend):
        model.config.mixer_backend = backend
        before = deepcopy(cache)
        return model(tokens[:, 29:], attention_mask=mask, past_key_values=before).logits

    plain = last_logits("chunk")
    assert_close(last_logits("triton"), plain.double(), plain)
    kernel = kernels.attention_in_bits
    monkeypatch.setattr(
        kernels, "attention_in_bits", lambda *given: (2 * kernel(*given)[0], kernel(*given)[1])
    )
    assert (last_logits("triton") - plain).norm() > 0.01 * plain.norm()
