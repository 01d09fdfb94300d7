"""The short convolution: one implementation for all mixers."""

import pytest
import torch

from comparing import assert_close
from hf_memory.layers import GroupRMSNorm, RMSNorm, ShortConvolution
from hf_memory.ops.short_convolution import convolution_step


def make(kernel_size=4, bias=True):
    torch.manual_seed(0)
    convolution = ShortConvolution(6, kernel_size, bias).double()
    for parameter in convolution.parameters():
        torch.nn.init.normal_(parameter)
    return convolution, torch.randn(2, 20, 6, dtype=torch.float64)


@pytest.mark.parametrize("kernel_size", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_convolution_equals_its_definition(kernel_size, bias):
    convolution, x = make(kernel_size, bias)
    y, state = convolution(x)
    for t in range(20):
        past = [convolution.weight[:, -1 - w] * x[:, t - w] for w in range(min(kernel_size, t + 1))]
        expected = sum(past) + (convolution.bias if bias else 0)
        assert_close(y[:, t], expected)
    assert_close(state, x[:, 20 - kernel_size + 1 :])


@pytest.mark.parametrize("parts", [[1] * 20, [2, 1, 17], [19, 1], [3, 17]])
def test_parts_with_a_state_equal_the_whole(parts):
    convolution, x = make()
    whole, last = convolution(x)
    outputs = []
    state = None
    for part in x.split(parts, dim=1):
        y, state = convolution(part, state)
        outputs.append(y)
    assert_close(torch.cat(outputs, 1), whole)
    assert_close(state, last)


@pytest.mark.parametrize("bounds", [[0, 20], [0, 1, 2, 20], [0, 7, 7, 9, 20]])
def test_packed_sequences_do_not_see_each_other(bounds):
    convolution, x = make()
    packed, _ = convolution(x[:1], cu_seqlens=torch.tensor(bounds))
    apart = [
        convolution(x[:1, start:end])[0] for start, end in zip(bounds, bounds[1:]) if end > start
    ]
    assert_close(packed, torch.cat(apart, 1))
    for start, end in zip(bounds, bounds[1:]):  # not even what is no number
        foreign = torch.ones(20, dtype=torch.bool)
        foreign[start:end] = False
        y, _ = convolution(
            x[:1].masked_fill(foreign[:, None], torch.nan), cu_seqlens=torch.tensor(bounds)
        )
        assert torch.equal(y[:, start:end], packed[:, start:end])


@pytest.mark.parametrize("real", [slice(5, 20), slice(0, 18), slice(3, 4)])
def test_padding_on_either_side_is_no_token(real):
    convolution, x = make()
    mask = torch.zeros(2, 20, dtype=torch.long)
    mask[:, real] = 1
    before = torch.randn(2, 3, 6, dtype=torch.float64)
    y, state = convolution(x, before, mask)
    expected, last = convolution(x[:, real], before)
    assert_close(y[:, real], expected)
    assert_close(state, last)
    assert not y[mask == 0].any()


def test_groups_are_normed_apart():
    x = torch.randn(3, 8).double()
    norm = GroupRMSNorm(8, 2, eps=1e-6).double()
    torch.nn.init.normal_(norm.weight)
    single = RMSNorm(4, eps=1e-6).double()
    expected = torch.cat([single(part) for part in x.chunk(2, -1)], -1) * norm.weight
    assert_close(norm(x), expected)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("W", [2, 4])
def test_a_step_of_a_convolution_in_a_kernel_equals_pytorch_and_updates_the_state(W, silu):
    generator = torch.Generator().manual_seed(0)
    x, state, weight, bias = (
        torch.randn(shape, generator=generator)
        for shape in ((2, 1, 300), (2, W - 1, 300), (300, W), (300,))
    )
    arguments = {"silu": silu, "in_place": True}
    exact = convolution_step(
        *map(torch.Tensor.double, (x, state, weight, bias)), **arguments, backend="chunk"
    )
    rounded = convolution_step(x, state, weight, bias, **arguments, backend="chunk")
    with torch.no_grad():
        y, after = convolution_step(x, state, weight, bias, **arguments, backend="triton")
    assert after is state
    assert_close((y, after), exact, rounded)
