"""Memory caching is its equation, with gradients, and what it must be for one segment, and where nothing is asked."""

import pytest
import torch

from cases import CASE, make_model
from comparing import assert_close
from hf_memory.mixers.base import Context
from hf_memory.mixers.segments import read_segments
from hf_memory.ops import delta_rule, linear_attention
from hf_memory.ops.delta_rule.reference import example

T, C, K = 11, 4, 6
NOTHING = Context(None, None, None, {})


def inputs():
    """u, and arguments of the delta rule with a decay for each head."""
    x = example(B=2, T=T, H=1, HV=2, K=K, V=5, decay="scalar", dtype=torch.float64)
    u = torch.randn(2, T, 2, K, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [y.requires_grad_() for y in (u, x["q"], x["k"], x["v"], x["beta"], x["g"])]


def equation(u, q, k, v, beta, g):
    """A list of memories, one token at a time."""
    q, k = (y.repeat_interleave(2, 2) for y in (q, k))
    memories, sums, counts, outputs = [], [], [], []
    for t in range(T):
        if t % C == 0:
            memories.append(torch.zeros(2, 2, K, 5, dtype=torch.float64))
            sums.append(torch.zeros(2, 2, K, dtype=torch.float64))
            counts.append(0)
        S = g[:, t].exp()[..., None, None] * memories[-1]
        error = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        memories[-1], sums[-1], counts[-1] = (
            S + k[:, t, :, :, None] * error[..., None, :],
            sums[-1] + k[:, t],
            counts[-1] + 1,
        )
        weights = torch.stack([(u[:, t] * s).sum(-1) / n for s, n in zip(sums, counts)]).softmax(0)
        reads = torch.stack([torch.einsum("bhkv,bhk->bhv", S, q[:, t]) for S in memories])
        outputs.append((weights[..., None] * reads).sum(0) / K**0.5)
    return torch.stack(outputs, 1)


def test_segments_are_their_equation_with_gradients():
    given = inputs()
    found = read_segments(delta_rule, given[0], tuple(given[1:]), NOTHING, C)[0]
    expected, weights = equation(*given), torch.randn(2, T, 2, 5, generator=torch.Generator().manual_seed(2)).double()
    assert_close(found, expected)
    assert_close(*(torch.autograd.grad((y * weights).sum(), given) for y in (found, expected)))


@torch.no_grad()
def test_one_segment_is_no_segment():
    u, *given = inputs()
    found = read_segments(delta_rule, u, tuple(given), NOTHING, T)[0]
    assert_close(found, delta_rule(*given)[0])


@torch.no_grad()
def test_who_asks_for_nothing_reads_the_mean_of_all_segments():
    """Without a decay their sum is linear attention."""
    u, q, k, v, *_ = inputs()
    found = read_segments(linear_attention, 0 * u, (q, k, v, None), NOTHING, C)[0]
    segments = 1 + torch.arange(T)[:, None, None] // C
    assert_close(segments * found, linear_attention(q, k, v)[0])


@pytest.mark.parametrize("read", [0, 3, 4, 8])
@torch.no_grad()
def test_a_cache_has_a_memory_for_each_segment(read):
    model = make_model(CASE["segmented-gated-deltanet"])
    spec = model.config.state_specs[0]
    assert spec["memory"].places(read) == (-(-read // 4),)
    assert spec["memory"].nbytes(read, torch.float32) == 4 * -(-read // 4) * 4 * 8 * 16
