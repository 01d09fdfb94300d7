"""Attention of one token to packed keys and values, by the kernel and in PyTorch, against the definition."""

from copy import deepcopy

import pytest
import torch
from transformers import DynamicCache

from cases import CASE, make_model, random_tokens
from comparing import assert_close, in_float64
from hf_memory.ops.attention_in_bits import attention_in_bits, kernels
from hf_memory.ops.bits import BITS, hadamard, pack, rotated

WITH_BITS = [
    f"{name}-bits"
    for name in ("linear-window", "attention-kept", "attention-sinks", "attention-virtual")
]
every_number_of_bits = pytest.mark.parametrize("bits", BITS)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def make(bits, B=2, H=2, G=3, S=40, D=64, layout="heads"):
    """Queries, and packed keys and values as kept tokens have them, or as full heads do, whose entries come first."""
    generator = torch.Generator().manual_seed(S)
    q = torch.randn(B, H, G, D, generator=generator)
    shape = (B, H, S, D) if layout == "heads" else (B, S, H, D)
    keys, values = (pack(1 + torch.randn(shape, generator=generator), bits) for _ in range(2))
    if layout != "heads":
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    return q, keys, values


def assert_kernel_is_right(q, keys, values, visible=None, **how):
    how = {"scale": 0.3, "needs_weights": True} | how
    exact = attention_in_bits(q.double(), keys, values, visible, backend="reference", **how)
    rounded = attention_in_bits(q, keys, values, visible, backend="reference", **how)
    found = attention_in_bits(q, keys, values, visible, backend="triton", **how)
    assert_close(found, in_float64(exact), rounded)
    return found


@every_number_of_bits
@pytest.mark.parametrize("D", [32, 96, 80])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_products_of_codes_are_those_of_numbers(softcap, D, bits):
    q, keys, values = make(bits, D=D, layout="entries")
    visible = torch.ones(2, 1, 40, dtype=torch.bool)
    visible[0, 0, :9] = visible[1] = False
    how = {"bits": bits, "scale": 0.3, "softcap": softcap, "needs_weights": True}
    expected = attention_in_bits(q.double(), keys, values, visible, backend="reference", **how)
    found = attention_in_bits(q.double(), keys, values, visible, backend="chunk", **how)
    assert_close(found, expected)
    assert not found[0][1].any()


@every_number_of_bits
@pytest.mark.parametrize("backend", ["chunk", "reference", "triton"])
def test_rows_anywhere_in_memory_are_read_as_one_tensor(backend, bits):
    q, keys, values = make(bits, B=3)
    visible = torch.arange(40) < torch.tensor([40, 7, 23])[:, None, None]
    how = {"bits": bits, "scale": 0.3, "needs_weights": True, "backend": backend}
    expected = attention_in_bits(q, keys, values, visible, **how)
    rows = ([row.clone() for row in x] for x in (keys, values))
    found = attention_in_bits(q, *rows, visible, **how)
    exact = attention_in_bits(q.double(), keys, values, visible, **how | {"backend": "reference"})
    assert_close(found, in_float64(exact), expected)


@every_number_of_bits
@pytest.mark.parametrize("D", [6, 33, 64, 80, 130])
@pytest.mark.parametrize("layout", ["heads", "entries"])
def test_kernel_reads_what_was_packed(layout, D, bits):
    assert_kernel_is_right(*make(bits, D=D, layout=layout), bits=bits)


@every_number_of_bits
@pytest.mark.parametrize("G", [1, 5, 17])
def test_kernel_reads_the_queries_of_a_group(G, bits):
    assert_kernel_is_right(*make(bits, G=G), bits=bits, softcap=2.0)


@pytest.mark.parametrize("S", [1, 255, 256, 1300])
def test_kernels_share_entries_whatever_their_number(S):
    found = assert_kernel_is_right(*make(8, S=S, D=32), bits=8)
    assert found[2].sum() == pytest.approx(2 * 2 * 3, rel=1e-5)


@pytest.mark.parametrize("S", [40, 1300])
@pytest.mark.parametrize("rows", ["each row", "each head"])
def test_kernel_sees_what_is_visible(rows, S):
    """Also a row that sees nothing, and one that sees nothing in all of a program's tiles but the last."""
    q, keys, values = make(4, S=S, D=32)
    visible = torch.ones(2, 1 if rows == "each row" else 2, S, dtype=torch.bool)
    visible[0, 0, : S - 3] = False
    visible[1, -1] = False
    o, mass, weights = assert_kernel_is_right(q, keys, values, visible, bits=4)
    assert not o[1, -1].any()
    assert not weights[1, -1].any()
    assert (mass[1, -1] == -torch.inf).all()


@every_number_of_bits
def test_kernel_takes_parts_of_larger_tensors(bits):
    q, keys, values = make(bits, B=3, H=4, S=50)
    some = [x[1:, 1::2, 3:44] for x in (keys, values)]
    assert_kernel_is_right(q[1:, 1::2], *some, bits=bits)
    assert_kernel_is_right(
        q[1:, 1::2], *(torch.cat([x, x], -1)[..., : x.shape[-1]] for x in some), bits=bits
    )


@every_number_of_bits
def test_kernel_in_16_bits_loses_what_rounding_loses(bits):
    q, keys, values = make(bits, S=300)
    how = {"bits": bits, "scale": 0.1}
    exact = attention_in_bits(q.half().double(), keys, values, backend="reference", **how)[0]
    found = attention_in_bits(q.half(), keys, values, backend="triton", **how)[0]
    plain = attention_in_bits(q.half(), keys, values, backend="reference", **how)[0]
    assert found.dtype == torch.float16
    assert (found - exact).norm() < 2 * (plain - exact).norm()


@pytest.mark.parametrize("D", [6, 64, 80])
def test_a_rotation_as_one_product_is_that_of_steps(D):
    x = torch.randn(3, D, dtype=torch.float64)
    assert_close(rotated(x), hadamard(x))


@every_number_of_bits
def test_wrong_rows_are_refused(bits):
    q, keys, values = make(bits)
    how = {"bits": bits, "scale": 1.0}
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
        kernels, "attention_in_bits", lambda *given: (2 * kernel(*given)[0], *kernel(*given)[1:])
    )
    assert (last_logits("triton") - plain).norm() > 0.01 * plain.norm()
