"""Attention over a window, with a state of fixed size."""

import pytest
import torch
from torch.nn import functional as F

from comparing import assert_close
from hf_memory.mixers.attention_blocks import Columns, Scores
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts.ring import Window, window_attention
from hf_memory.mixers.pasts.rows import New
from hf_memory.ops import masks

SCALING = 0.5


def make(T=23, B=2, seed=0):
    torch.manual_seed(seed)
    q = torch.randn(B, T, 4, 6)
    k = torch.randn(B, T, 2, 6)
    v = torch.randn(B, T, 2, 6)
    return [x.double() for x in (q, k, v)]


def attend(q, k, v, states=None, window=5, softcap=None, mask=None, cu_seqlens=None, **options):
    seen = Window.of_last(window)
    context = Context(None, mask, cu_seqlens, states or {})
    new = New.of(k, v, seen.kind, context)
    return window_attention(q, new, context, seen, Scores(SCALING, softcap), **options)


def expected(q, k, v, window=5):
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    mask = (distance >= 0) & (distance < window)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(
        *heads_first, attn_mask=mask, scale=SCALING, enable_gqa=True
    ).transpose(1, 2)


@pytest.mark.parametrize("T", [1, 4, 5, 6, 23])
@pytest.mark.parametrize("window", [2, 5, 40])
def test_equals_its_definition(T, window):
    inputs = make(T)
    assert_close(attend(*inputs, window=window)[0], expected(*inputs, window))


@pytest.mark.parametrize("parts", [[1] * 23, [3, 20], [7, 1, 15], [22, 1]])
def test_parts_with_a_state_equal_the_whole(parts):
    inputs = make()
    states = None
    outputs = []
    for part in zip(*(x.split(parts, 1) for x in inputs)):
        o, states = attend(*part, states)
        outputs.append(o)
    assert_close(torch.cat(outputs, 1), expected(*inputs))
    last = torch.arange(18, 23)
    assert states["keys"].shape == (2, 5, 2, 6)
    assert_close(states["keys"][:, last % 5], inputs[1][:, last])


@pytest.mark.parametrize("length", [22, 4, 1])
def test_padding_is_no_token(length):
    inputs = make()
    o, states = attend(*inputs, mask=torch.arange(23) < torch.tensor([[23], [length]]))
    row = [x[1:, :length] for x in inputs]
    assert_close(o[1:, :length], expected(*row))
    assert_close(o[:1], expected(*(x[:1] for x in inputs)))
    more = make(3, seed=1)
    together, _ = attend(*more, states)
    alone, _ = attend(*(x[1:] for x in more), attend(*row)[1])
    assert_close(together[1:], alone)


def test_scores_are_capped():
    q, k, v = make()
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(2, 2)) * SCALING
    distance = torch.arange(23)[:, None] - torch.arange(23)
    hidden = (distance < 0) | (distance >= 5)
    p = (0.7 * torch.tanh(scores / 0.7)).masked_fill(hidden, -torch.inf).softmax(-1)
    capped = torch.einsum("bhts,bshd->bthd", p, v.repeat_interleave(2, 2))
    assert_close(attend(q, k, v, softcap=0.7)[0], capped)


def test_packed_sequences_do_not_see_each_other():
    inputs = make(B=1)
    bounds = [0, 7, 8, 23]
    o, _ = attend(*inputs, cu_seqlens=torch.tensor(bounds))
    apart = [expected(*(x[:, a:b] for x in inputs)) for a, b in zip(bounds, bounds[1:])]
    assert_close(o, torch.cat(apart, 1))


def test_what_is_always_visible_is_seen_from_everywhere():
    q, k, v = make(12)
    always = Columns(masks.all_tokens(3, q), *torch.randn(2, 1, 3, 2, 6).double(), masks.everything)
    o, _ = attend(q, k, v, always=always, window=40)
    k_all, v_all = (torch.cat([x.expand(2, -1, -1, -1), y], 1) for x, y in zip(always[1:3], (k, v)))
    scores = torch.einsum("bthd,bshd->bhts", q, k_all.repeat_interleave(2, 2)) * SCALING
    mask = torch.ones(12, 15, dtype=torch.bool).tril(3)
    p = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    assert_close(o, torch.einsum("bhts,bshd->bthd", p, v_all.repeat_interleave(2, 2)))
    short, _ = attend(q, k, v, always=always, window=2)
    changed, _ = attend(q, k, v, always=always._replace(values=always.values + 1), window=2)
    assert ((short - changed).abs().amax((0, 2, 3)) > 1e-3).all()
