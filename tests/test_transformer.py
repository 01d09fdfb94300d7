"""The Transformer's positions are the published equations, and no token sees later ones."""

import math

import pytest
import torch

from cases import CASE, make_model, random_tokens
from hf_memory.mixers.relations import POSITIONS, alibi_slopes
from hf_memory.modeling.transformer import MemoryTransformerConfig

T, H, D = 13, 4, 8


def make(options):
    """A model in float64 whose parameters are all of size one: none starts at zero."""
    model = make_model(CASE["transformer"], **options).double()
    for x in model.parameters():
        x.data += 0.2 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(x.numel()))
    return model


def turned(x):
    """Rotary positions of [T, heads, D], in float64."""
    angles = torch.arange(T, dtype=x.dtype)[:, None] * 10000.0 ** (-torch.arange(0, D, 2, dtype=x.dtype) / D)
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def score(position, relation, h, q, k, d):
    """Of one query and one key at the distance d, before the softmax."""
    s = q @ k / math.sqrt(D)
    if position == "relative":
        return q @ (k + relation.keys.weight[min(d, 4)]) / math.sqrt(D)
    if position == "xl":
        angles = d * 10000.0 ** (-torch.arange(0, 32, 2, dtype=q.dtype) / 32)
        r = relation.distance_proj[h] @ torch.cat([angles.sin(), angles.cos()])
        return ((q + relation.content_bias[h]) @ k + (q + relation.distance_bias[h]) @ r) / math.sqrt(D)
    if position == "alibi":
        return s - 2.0 ** (-8 * (h + 1) / H) * d
    if position == "distance_aware":
        b, R = relation.bound[h], relation.rate[h] * d
        return s.relu() * (1 + b.exp()) / (1 + (b - R).exp())
    return s


def dense(mixer, x, position):
    """Attention of one row [T, hidden_size], a pair at a time."""
    q, k, v = (proj(x).unflatten(-1, (-1, D)) for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    if position == "rope":
        q, k = turned(q), turned(k)
    outputs = torch.zeros(T, H, D, dtype=x.dtype)
    for h in range(H):
        for i in range(T):
            scores = [score(position, mixer.relation, h, q[i, h], k[j, h // 2], i - j) for j in range(i + 1)]
            for j, weight in enumerate(torch.stack(scores).softmax(0)):
                value = v[j, h // 2]
                if position == "relative":
                    value = value + mixer.relation.values.weight[min(i - j, 4)]
                outputs[i, h] += weight * value
    return mixer.o_proj(outputs.flatten(1))


@pytest.mark.parametrize("position", POSITIONS)
@torch.no_grad()
def test_attention_is_its_equation(position):
    model = make({"position": position, "max_relative_distance": 4, "max_position_embeddings": T})
    mixer, x = model.model.layers[0].mixer, torch.randn(1, T, 32, dtype=torch.float64)
    tokens = torch.arange(T)[None]
    angles = model.model.rotary_emb(x, tokens)
    rounding = 1e-5 if position == "rope" else 1e-10  # angles are made in float32
    torch.testing.assert_close(mixer(x, angles)[0][0], dense(mixer, x[0], position), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("word", ["sinusoidal", "learned"])
@torch.no_grad()
def test_embedded_positions_are_their_equation(word):
    positions = torch.tensor([[0, 1, 7]])
    embed = make({"position": word, "max_position_embeddings": T}).model.embed_positions
    if word == "learned":
        expected = embed.weight[positions]
    else:
        expected = torch.zeros(1, 3, 32)
        for n, i in enumerate((0, 1, 7)):
            for c in range(16):
                angle = i / 10000 ** (2 * c / 32)
                expected[0, n, 2 * c], expected[0, n, 2 * c + 1] = math.sin(angle), math.cos(angle)
    torch.testing.assert_close(embed(positions), expected)


@pytest.mark.parametrize("position", POSITIONS)
@torch.no_grad()
def test_no_token_sees_later_ones(position):
    model, tokens = make({"position": position, "max_position_embeddings": T}), random_tokens(1, T)
    expected = model(tokens).logits[:, :-1]
    for t in range(1, T):
        changed = tokens.clone()
        changed[:, t:] = random_tokens(1, T - t, seed=t)
        torch.testing.assert_close(model(changed).logits[:, :t], expected[:, :t], rtol=0, atol=1e-10)


def test_alibi_slopes_are_the_published_ones():
    def published(n):
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        less = 2 ** math.floor(math.log2(n))
        return published(less) + published(2 * less)[0::2][: n - less]

    for heads in (1, 4, 6, 12):
        assert alibi_slopes(heads, torch.zeros(1, dtype=torch.float64)).tolist() == pytest.approx(published(heads))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"position": "absolute"}, "position"),
        ({"position": "relative", "max_relative_distance": 0}, "max_relative_distance"),
        ({"attention_window": 4}, "attention_window"),
        ({"position": "xl", "layer_types": ["memory", "full_attention"], "num_hidden_layers": 2}, "layer_types"),
    ],
)
def test_bad_options_are_refused_by_name(options, name):
    with pytest.raises(Exception, match=f"{name} must"):
        MemoryTransformerConfig(**options)
