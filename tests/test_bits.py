"""Rows of numbers in 8 or 4 bits."""

import pytest
import torch
from torch import nn

from comparing import assert_close
from hf_memory.ops.bits import BITS, GROUP, hadamard, pack, packed_bytes, rounded, unpack

every_number_of_bits = pytest.mark.parametrize("bits", BITS)
CHANNELS = [2, 6, 8, 33, 64, 80, 128]  # also with groups that are not full, and an odd number


def rows(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def through(x, bits):
    return unpack(pack(x, bits), x.shape[-1], bits, x.dtype)


@every_number_of_bits
@pytest.mark.parametrize("D", CHANNELS)
def test_a_number_is_off_by_half_a_step_of_what_shares_its_scale(D, bits):
    x = 3 + rows(50, D)
    error = hadamard(through(x, bits) - x)
    x = hadamard(x)
    size = D if bits == 8 else GROUP
    for group, of_group in zip(x.split(size, -1), error.split(size, -1)):
        step = group.abs().amax(-1) / 127
        of_16_bits = 2**-7 * step
        if bits == 4:
            step = (group.amax(-1) - group.amin(-1)) / 15
            of_16_bits = group.abs().amax(-1) * 2**-8  # of the least number, and of the scale
        assert (of_group.abs().amax(-1) <= 0.5 * step + 2 * of_16_bits).all()


@every_number_of_bits
def test_a_row_of_one_number_stays_what_it_is(bits):
    for number in (0.0, 1.0, -2.5, 0.125):
        x = torch.full((3, 64), number)
        error = (through(x, bits) - x).norm()
        assert error <= 0.015 * x.norm()  # a rotation makes one large number of it


@every_number_of_bits
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_come_back_in_their_dtype(dtype, bits):
    x = rows(4, 64).to(dtype)
    y = through(x, bits)
    assert y.dtype == dtype
    assert (y - x).norm() < 0.1 * x.norm()


def test_scales_cost_two_bytes_a_row_or_one_bit_a_number():
    for channels in (32, 64, 128):
        assert packed_bytes(channels, 8) == channels + 2
        assert 8 * packed_bytes(channels, 4) == 5 * channels


@every_number_of_bits
def test_large_and_small_numbers_lose_as_much_as_others(bits):
    x = rows(20, 64, dtype=torch.float32)
    for factor in (2.0**-40, 2.0**40):
        assert torch.equal(through(factor * x, bits), factor * through(x, bits))


@every_number_of_bits
def test_a_row_with_a_number_that_is_not_finite_has_none_that_is(bits):
    for number in (torch.inf, -torch.inf, torch.nan):
        x = rows(2, 64)
        x[0, 5] = number
        is_finite = through(x, bits).isfinite()
        assert not is_finite[0].any()
        assert is_finite[1].all()


@every_number_of_bits
@pytest.mark.parametrize("D", CHANNELS)
def test_a_packed_row_has_an_even_number_of_bytes_as_declared(D, bits):
    packed = pack(rows(2, 3, D), bits)
    assert packed.shape == (2, 3, packed_bytes(D, bits))
    assert packed.dtype == torch.uint8
    assert packed.shape[-1] % 2 == 0


@every_number_of_bits
def test_what_a_row_is_packed_to_does_not_depend_on_other_rows(bits):
    x = rows(3, 40, 5, 64, dtype=torch.float32)
    packed = pack(x, bits)
    assert torch.equal(torch.cat([pack(part, bits) for part in x.split(1, 1)], 1), packed)
    assert torch.equal(pack(x[1, 7, 2], bits), packed[1, 7, 2])
    assert torch.equal(pack(x.transpose(1, 2), bits), packed.transpose(1, 2))


@every_number_of_bits
def test_rows_that_move_are_unpacked_where_they_are(bits):
    x = rows(2, 10, 3, 64)
    packed = pack(x, bits)
    expected = through(x, bits)
    for move in (lambda x: x[:, 1::2], lambda x: x[:, :, 1:], lambda x: x.transpose(1, 2)):
        assert_close(unpack(move(packed), 64, bits, torch.float64), move(expected))


@every_number_of_bits
def test_bytes_of_zero_are_numbers_of_zero(bits):
    zeros = torch.zeros(2, packed_bytes(64, bits), dtype=torch.uint8)
    assert not unpack(zeros, 64, bits, torch.float32).any()


@every_number_of_bits
def test_numbers_too_large_for_16_bits_stay_finite(bits):
    x = rows(4, 64) * 1e6
    assert through(x, bits).isfinite().all()
    assert through(-x.abs(), bits).isfinite().all()


def test_a_rotation_spreads_a_large_number():
    x = rows(100, 64)
    x[:, 5] *= 50
    others = [c for c in range(64) if c != 5]
    plain = x[:, :32]
    steps = (plain.amax(-1) - plain.amin(-1)) / 15
    error = (through(x, 4) - x)[:, others].square().mean()
    assert error < 0.5 * (steps / 2).square().mean() / 3


@pytest.mark.parametrize("D", CHANNELS)
def test_the_rotation_is_orthonormal_and_its_own_inverse(D):
    x = rows(5, D)
    assert_close(hadamard(hadamard(x)), x)
    assert_close(hadamard(x).norm(dim=-1), x.norm(dim=-1))


@every_number_of_bits
def test_gradients_pass_rounding(bits):
    x = rows(3, 64).requires_grad_()
    y = rounded(x, pack(x, bits), bits)
    assert torch.equal(y.detach(), through(x.detach(), bits))
    weights = rows(3, 64)
    (y * weights).sum().backward()
    assert torch.equal(x.grad, weights)


class PackedAndUnpacked(nn.Module):
    def __init__(self, bits):
        super().__init__()
        self.bits = bits

    def forward(self, x):
        packed = pack(x, self.bits)
        return packed, unpack(packed, x.shape[-1], self.bits, x.dtype)


@every_number_of_bits
def test_an_exported_graph_computes_the_same_bytes(bits):
    """Without views of numbers as bytes, which other runtimes lack; but for the sign of zero."""
    model = PackedAndUnpacked(bits)
    x = rows(37, 40) * 2.0 ** torch.arange(-20, 17)[:, None]
    exported = torch.export.export(model, (x,))
    for found, expected in zip(exported.module()(x), model(x)):
        assert torch.equal(found, expected)
    used = {str(node.target) for node in exported.run_decompositions().graph.nodes}
    assert "aten.view.dtype" not in used


@every_number_of_bits
def test_an_exported_graph_keeps_what_is_no_number(bits):
    model = PackedAndUnpacked(bits)
    x = rows(2, 40)
    x[1, 3] = torch.nan
    numbers = torch.export.export(model, (x,)).module()(x)[1]
    assert torch.equal(numbers.isnan(), model(x)[1].isnan())
