"""The Transformer's positions and patterns are the published equations, and no token sees later ones."""

import math

import pytest
import torch
from torch.nn import functional as F

from cases import CASE, CASES, make_config, make_model, random_tokens
from comparing import assert_close
from hf_memory.mixers.attention_blocks import joined_softmax
from hf_memory.mixers.base import Context
from hf_memory.mixers.transformer.bucket_attention import attention_in_buckets
from hf_memory.mixers.transformer.relations import POSITIONS, RELATIONS, alibi_slopes
from hf_memory.mixers.transformer.slots import COMPRESSIONS
from hf_memory.mixers.transformer.store import JOINS
from hf_memory.modeling.depth import DEPTHS
from hf_memory.modeling.transformer import (
    BUCKETS,
    PASTS,
    PATTERNS,
    MemoryTransformerConfig,
    MemoryTransformerForCausalLM,
)
from hf_memory.ops.masks import random_block

H = 4
D = 8
FARTHEST = 9  # distances that are told apart


def make(options):
    """A model in float64 whose parameters are all of size one: none starts at zero."""
    model = make_model(CASE["transformer"], **options).double()
    for x in model.parameters():
        x.data += 0.2 * torch.randn(
            x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(x.numel())
        )
    return model


def rotations(positions):
    """Cosines and sines [1, T, D] of rotary positions [T], in float64, where models make them in float32."""
    angles = positions.double()[:, None] * 10000.0 ** (-torch.arange(0, D, 2).double() / D)
    return tuple(torch.cat([x, x], -1)[None] for x in (angles.cos(), angles.sin()))


def turned(x, most=1000):
    """Keys or queries [T, heads, D], rotated; no position is larger than `most`."""
    cos, sin = (y[0, :, None, : D // 2] for y in rotations(torch.arange(len(x)).clamp(max=most)))
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def unit(x):
    """Vectors of unit length, but for a constant that keeps zero at zero."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def score(position, relation, h, q, k, d):
    """The score of one query and one key at the distance d, before the softmax."""
    s = q @ k / math.sqrt(D)
    if position == "relative":
        return q @ (k + relation.keys.weight[min(d, FARTHEST)]) / math.sqrt(D)
    if position == "xl":
        angles = d * 10000.0 ** (-torch.arange(0, 32, 2, dtype=q.dtype) / 32)
        r = relation.distance_proj.unflatten(0, (H, D))[h] @ torch.cat([angles.sin(), angles.cos()])
        return (
            (q + relation.content_bias[h]) @ k + (q + relation.distance_bias[h]) @ r
        ) / math.sqrt(D)
    if position == "alibi":
        return s - 2.0 ** (-8 * (h + 1) / H) * d
    if position == "distance_aware":
        b = relation.bound[h]
        R = relation.rate[h] * d
        return s.relu() * (1 + b.exp()) / (1 + (b - R).exp())
    return s


def sees(pattern, h, i, j):
    """Whether token i sees token j, with blocks, windows and strides of 4."""
    d = i - j
    ask = i // 4
    asked = j // 4
    return {
        "full": True,
        "sliding_heads": d < 5 or j < 2,
        "block_local": ask - asked <= 1,
        "strided": d <= 4 or d % 4 == 0,
        "strided_by_head": (d <= 4, d % 4 == 0)[h % 2],
        "fixed": ask == asked or j % 4 >= 2,
        "fixed_by_head": (ask == asked, i == j or j % 4 >= 2)[h % 2],
        "dilated": d < 12 and d % 3 == 0,
        "longformer_by_head": (d < 4, d < 12 and d % 3 == 0)[h % 2] or j < 2,
        "bigbird": ask - asked <= 1 or asked == 0 or asked in drawn(ask),
        "blockwise": asked == max(ask - h % 3, 0),
        "linformer": ask == asked,
        "xl": j >= 4 * ask - 5,
        "compressive": j >= 4 * ask - 6,
        "infinite": d < 5 or j < 2,
        "memorizing": d < 5,
    }[pattern]


def drawn(block):
    blocks = [random_block(torch.tensor(block), n, 5).item() for n in range(2)]
    assert all(1 <= x <= block - 2 for x in blocks) or blocks == [-1, -1]
    return blocks


def best_pairs(position, mixer, h, i, q, k, v):
    """Keys, values and distances of the two tokens of the store with the highest scores."""
    store = [(k[j], v[j], i - j) for j in range(i + 1) if 5 <= i - j < 11]
    return sorted(
        store, key=lambda pair: score(position, mixer.relation, h, q[i], pair[0], pair[2])
    )[-2:]


def remembered(mixer, h, i, q, k, v):
    """Scores and values for one of the queries [T, D], from the store of keys and values [T, D]."""
    cosines = {j: unit(q[i]) @ unit(k[j]) for j in range(i + 1) if 5 <= i - j < 11}
    best = sorted(cosines, key=cosines.get)[-2:]
    return mixer.memory_scale[h] * torch.stack([cosines[j] for j in best]), v[best]


def joined(mixer, h, scores, values, more, found):
    """The window and the store, in one softmax or by a gate."""
    if mixer.config.memory_join == "softmax":
        return torch.cat([scores, more]).softmax(0) @ torch.cat([values, found])
    gate = mixer.memory_gate[h]
    return (1 - gate) * (scores.softmax(0) @ values) + gate * (more.softmax(0) @ found)


def slot(mixer, position, h, start, used, plain, k, v):
    """Key and value of one head of the slot of two tokens."""
    block = slice(start, start + 2)
    if used is not None:
        j = start + used[block, h].argmax()
        return k[j, h], v[j, h]
    key = compressed(mixer.compress_keys, plain[block, h])
    value = compressed(mixer.compress_values, v[block, h])
    return (
        turned(F.pad(key[None, None], (0, 0, 0, 0, start + 1, 0)))[-1, 0]
        if position == "rope"
        else key
    ), value


def attention_got(q, k):
    """By each token and key-value head, [T, 2], from the segments of 4 that see it and 6 tokens before them."""
    visible = torch.tensor(
        [[j <= i and sees("compressive", 0, i, j) for j in range(len(k))] for i in range(len(q))]
    )
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, 1)) / math.sqrt(D)
    return scores.masked_fill(~visible, -torch.inf).softmax(-1).sum(1).unflatten(0, (2, 2)).sum(1).T


def compressed(compression, block):
    """One slot of two keys or values [2, D]."""
    if compression.kind == "convolution":
        return block[0] @ compression.weight[0] + block[1] @ compression.weight[1]
    return block.mean(0) if compression.kind == "mean" else block.amax(0)


def bucket_attention(mixer, x):
    """As `dense`, with queries as keys and itself where there is nothing else; without buckets, a window of 4."""
    q, v = (proj(x).unflatten(-1, (-1, D)) for proj in (mixer.q_proj, mixer.v_proj))
    units = unit(q)
    outputs = torch.zeros(len(x), H, D, dtype=x.dtype)
    has_buckets = [2, 3] if hasattr(mixer, "k_proj") else range(H)
    buckets = mixer.buckets(units[None, :, has_buckets])[0]
    q = turned(q)
    k = turned(units)
    assert len(buckets.unique()) > 2
    for h in range(H):
        for i in range(len(x)):
            if h in has_buckets:
                mine = buckets[:, has_buckets.index(h)]
                seen = [j for j in range(i) if (mine[i] == mine[j]).any()] or [i]
                keys = k[:, h]
            else:
                seen = range(max(0, i - 3), i + 1)
                keys = turned(mixer.k_proj(x)[:, None])[:, 0]
            outputs[i, h] = (keys[seen] @ q[i, h] / math.sqrt(D)).softmax(0) @ v[seen, h // 2]
    return mixer.o_proj(outputs.flatten(1))


def dense(
    mixer, x, position="rope", pattern="full", past="cache", layer_types=("memory",), **options
):
    """Attention of one row [T, hidden_size], a pair at a time."""
    pattern = pattern if layer_types[0] == "memory" else layer_types[0]
    T = len(x)
    q, k, v = (
        proj(x).unflatten(-1, (-1, D)) for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    plain, (q, far, k) = (
        (q, k),
        (turned(q), turned(q, 6), turned(k)) if position == "rope" else (q, q, k),
    )
    outputs = torch.zeros(T, H, D, dtype=x.dtype)
    used = attention_got(q, k) if options.get("compression") == "most_used" else None
    for h in range(H):
        for i in range(T):
            pairs = [
                (k[j, h // 2], v[j, h // 2], i - j)
                for j in range(i + 1)
                if sees(past if pattern == "full" and past != "cache" else pattern, h, i, j)
            ]
            if pattern == "linformer":
                blocks = [slice(4 * b, 4 * b + 4) for b in range(i // 4)]
                sums = [
                    (mixer.compress @ k[x, h // 2], mixer.compress @ v[x, h // 2], x.stop)
                    for x in blocks
                ]
                pairs += [
                    (keys[n], values[n], i + 1 - end)
                    for keys, values, end in sums
                    for n in range(2)
                ]
            if options.get("memory_join") == "attention":
                pairs += best_pairs(position, mixer, h, i, q[:, h], k[:, h // 2], v[:, h // 2])
            distances = [d for _, _, d in pairs]
            queries = [far[i, h] if past == "infinite" and d >= 5 else q[i, h] for _, _, d in pairs]
            if past == "infinite":
                pairs = [
                    (key, value, min(d, 6 - i + d) if d >= 5 else d) for key, value, d in pairs
                ]
            if past == "compressive":
                seen = i // 4 * 4 - 6
                for start in range(max(0, seen - 6), seen, 2):
                    pairs.append(
                        (*slot(mixer, position, h // 2, start, used, plain[1], k, v), i - start - 1)
                    )
                queries = [q[i, h]] * len(pairs)
            relation = getattr(mixer, "relation", None)
            scores = [
                score(position, relation, h, a, key, d) for a, (key, _, d) in zip(queries, pairs)
            ]
            values = [
                value + mixer.relation.values.weight[min(d, FARTHEST)]
                if position == "relative"
                else value
                for _, value, d in pairs
            ]
            scores = torch.stack(scores)
            values = torch.stack(values)
            if position == "forget":
                forgotten = F.logsigmoid(mixer.forget.proj(x))[:, h]
                scores = scores + torch.stack(
                    [forgotten[i - d + 1 : i + 1].sum() for d in distances]
                )
            if past == "memorizing" and options.get("memory_join") != "attention" and i >= 5:
                found = remembered(mixer, h, i, plain[0][:, h], plain[1][:, h // 2], v[:, h // 2])
                outputs[i, h] = joined(mixer, h, scores, values, *found)
            else:
                outputs[i, h] = scores.softmax(0) @ values
    return mixer.o_proj(outputs.flatten(1))


SIZES = {
    "pattern_size": 4,
    "num_sink_tokens": 2,
    "num_summary_tokens": 2,
    "dilation": 3,
    "num_block_shifts": 3,
}
SIZES |= {
    "past_window": 5,
    "sliding_window": 5,
    "segment_length": 4,
    "memory_size": 6,
    "memory_top_k": 2,
}
SIZES |= {"compression_rate": 2, "compressed_length": 3, "num_buckets": 4, "num_hashes": 2}
SIZES |= {"max_relative_distance": FARTHEST, "max_position_embeddings": 40, "pattern_seed": 5}
WORDS = [{"position": word} for word in POSITIONS]
WORDS += [{"pattern": word} for word in PATTERNS if word != "adaptive_span"]  # see test_depth.py
WORDS += [{"position": "relative", "pattern": word} for word in ("strided", "bigbird")]
WORDS += [{"position": word, "layer_types": ["sliding_heads"] * 2} for word in POSITIONS]
WORDS += [{"position": "forget", "pattern": word} for word in ("strided", "blockwise")]
WORDS += [{"position": "forget", "past": word} for word in ("xl", "infinite")]
WORDS += [{"past": word} for word in PASTS if word != "compressive"] + [
    {"position": "relative", "past": "infinite"}
]
WORDS += [{"past": "memorizing", "memory_join": word} for word in ("softmax", "attention")]
WORDS += [
    {"past": "memorizing", "memory_join": "attention", "position": word}
    for word in ("relative", "distance_aware")
]
WORDS += [{"past": "memorizing", "position": "relative"}]
WORDS += [{"past": "compressive", "compression": word} for word in COMPRESSIONS]
WORDS += [{"past": "compressive", "compression": "mean", "position": word} for word in RELATIONS]
every_word = pytest.mark.parametrize(
    "words", WORDS, ids=[str([*words.values()]) for words in WORDS]
)


@every_word
@torch.no_grad()
def test_attention_is_its_equation(words):
    model = make(SIZES | words | ({"past_window": 6} if "compression" in words else {}))
    mixer = model.model.layers[0].mixer
    x = torch.randn(1, 19, 32, dtype=torch.float64)
    in_buckets = words.get("pattern") in BUCKETS
    expected = bucket_attention(mixer, x[0]) if in_buckets else dense(mixer, x[0], **words)
    assert_close(mixer(x, rotations(torch.arange(19)))[0][0], expected)


@pytest.mark.parametrize("kind", ["memory", "sliding_heads"])
@torch.no_grad()
def test_attention_whose_gates_forget_nothing_is_softmax_attention(kind):
    model, plain = (
        make(SIZES | {"position": word, "layer_types": [kind] * 2}) for word in ("forget", "none")
    )
    mixer = model.model.layers[0].mixer
    x = torch.randn(1, 19, 32, dtype=torch.float64)
    plain.model.layers[0].mixer.load_state_dict(mixer.state_dict(), strict=False)
    mixer.forget.proj.bias.fill_(1000)
    assert_close(mixer(x)[0], plain.model.layers[0].mixer(x)[0])


@torch.no_grad()
def test_heads_with_forget_gates_see_a_window_or_everything():
    """Of four query heads the last two share the key head that sees everything."""
    window = {"position": "forget", "layer_types": ["sliding_heads"] * 2, "sliding_window": 4}
    kinds = ({"position": "forget"}, window, window | {"full_attention_heads": [[1], []]})
    mixers = [make(SIZES | options).model.layers[0].mixer for options in kinds]
    x = torch.randn(1, 19, 32, dtype=torch.float64)
    for mixer in mixers:
        mixer.load_state_dict(mixers[0].state_dict())
        mixer.o_proj.weight.copy_(torch.eye(32))
    everything, near, both = (mixer(x)[0] for mixer in mixers)
    assert (everything - near).abs().max() > 0.01
    assert_close(both, torch.cat([near[..., :16], everything[..., 16:]], -1))


@torch.no_grad()
def test_forget_gates_lose_nothing_in_16_bits():
    """After 4,000 tokens the sums of the gates' logarithms are in the thousands."""
    mixer = make({"position": "forget"}).model.layers[0].mixer
    x = torch.randn(
        1, 4000, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).bfloat16()
    mixer.bfloat16()
    found = mixer(x)[0][:, -50:].double()
    mixer.double()
    expected = mixer(x.double())[0]
    assert mixer.forget.sums(x.double(), Context(None, None, None, {})).min() < -2000
    assert (found - expected[:, -50:]).norm() < 0.02 * expected[:, -50:].norm()


def test_sorted_tokens_see_all_of_their_bucket():
    """Several blocks, tokens before the queries, padding: what two rounds see together is seen once."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, 3, generator=generator, dtype=torch.float64) for n in (150, 200, 200)
    )
    buckets = torch.randint(-1, 4, (2, 200, 2), generator=generator)
    buckets[buckets.amin(-1) < 0] = -1
    given = [x.requires_grad_() for x in (q, k, v)]
    rounds = (attention_in_buckets(*given, buckets[..., :n]) for n in (1, 2))
    o, mass = joined_softmax(*rounds)
    same = ((buckets[:, 50:, None] == buckets[:, None]) & (buckets[:, None] >= 0)).any(-1)
    scores = (q @ k.mT).masked_fill(~same.tril(49), -torch.inf)
    is_token = buckets[:, 50:, 0] >= 0
    expected = scores[is_token].softmax(-1)[:, None] @ v[:, None].expand(-1, 150, -1, -1)[is_token]
    assert_close(mass[is_token], scores.logsumexp(-1)[is_token])
    assert_close(o[is_token], expected[:, 0])
    gradients = (torch.autograd.grad(x.square().sum(), given) for x in (o[is_token], expected))
    assert_close(*gradients)


@pytest.mark.parametrize("word", ["sinusoidal", "learned"])
@torch.no_grad()
def test_embedded_positions_are_their_equation(word):
    positions = torch.tensor([[0, 1, 7]])
    embed = make({**SIZES, "position": word}).model.embed_positions
    if word == "learned":
        expected = embed.weight[positions]
    else:
        expected = torch.zeros(1, 3, 32, dtype=torch.float64)
        for n, i in enumerate((0, 1, 7)):
            for c in range(16):
                angle = i / 10000 ** (2 * c / 32)
                expected[0, n, 2 * c] = math.sin(angle)
                expected[0, n, 2 * c + 1] = math.cos(angle)
    found = embed(positions)
    assert_close(found, expected.double(), expected.to(found.dtype))


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 1),
        ({"position": "learned"}, 1),
        ({"position": "sinusoidal"}, 32**0.5),
        ({"position": "sinusoidal", "tie_word_embeddings": True}, 32**0.5),
        ({"position": "sinusoidal", "embedding_multiplier": 1.0}, 1),
        ({"depth": "universal"}, 32**0.5),
    ],
)
@torch.no_grad()
def test_embeddings_are_scaled_where_sinusoids_are_added(options, factor, tmp_path):
    made = make_model(CASE["transformer"], **options).double()
    tokens = random_tokens(1, 5)
    inputs = []
    made.save_pretrained(tmp_path)
    model = MemoryTransformerForCausalLM.from_pretrained(tmp_path)
    model.model.layers[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    embedded = model.get_input_embeddings()(tokens)
    expected = model(tokens).logits
    assert_close(model(inputs_embeds=embedded).logits, expected)
    assert_close(expected, made(tokens).logits)
    if model.model.embed_positions is not None:
        inputs[0] = inputs[0] - model.model.embed_positions(torch.arange(5)[None])
    elif model.config.depth == "universal":
        inputs[0] = inputs[0] - model.model.recurrence.steps(torch.tensor([[0]]))
    assert_close(inputs[0], factor * embedded)


@every_word
@torch.no_grad()
def test_no_token_sees_later_ones_wherever_blocks_begin(words):
    sizes = (
        SIZES
        | {"max_position_embeddings": 150}
        | ({"past_window": 6} if "compression" in words else {})
    )
    model = make(sizes | words)
    tokens = random_tokens(1, 150)
    expected = model(tokens).logits
    for t in (5, 23, 66, 149):
        changed = tokens.clone()
        changed[:, t:] = random_tokens(1, 150 - t, seed=t)
        assert_close(model(changed).logits[:, :t], expected[:, :t])
    before = model(tokens[:, :33])
    after = model(tokens[:, 33:], past_key_values=before.past_key_values).logits
    assert_close(torch.cat([before.logits, after], 1), expected)


@pytest.mark.parametrize("join", JOINS)
@torch.no_grad()
def test_a_query_of_zeros_reads_the_same_tokens_with_and_without_a_cache(join):
    model = make(SIZES | {"past": "memorizing", "memory_join": join})
    tokens = random_tokens(1, 40)
    model.model.embed_tokens.weight[0] = 0
    tokens[:, 12::7] = 0  # all of its scores are zero
    expected = model(tokens).logits
    before = model(tokens[:, :19])
    after = model(tokens[:, 19:], past_key_values=before.past_key_values).logits
    assert_close(torch.cat([before.logits, after], 1), expected)


@pytest.mark.parametrize("pattern", ["longformer_by_head", "dilated"])
@torch.no_grad()
def test_a_token_that_sees_itself_alone_needs_no_past(pattern):
    model = make(SIZES | {"pattern": pattern, "pattern_size": 1, "dilation": 1})
    tokens = random_tokens(1, 6)
    before = model(tokens[:, :4])
    after = model(tokens[:, 4:], past_key_values=before.past_key_values).logits
    assert_close(torch.cat([before.logits, after], 1), model(tokens).logits)


def test_more_tokens_than_learned_positions_are_refused():
    model = make(SIZES | {"position": "learned"})
    model(random_tokens(1, 40))
    with pytest.raises(ValueError, match=r"max_position_embeddings must be at least 41 .* got 40"):
        model(random_tokens(1, 41))


def test_alibi_slopes_are_the_published_ones():
    def published(n):
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        less = 2 ** math.floor(math.log2(n))
        return published(less) + published(2 * less)[0::2][: n - less]

    for heads in (1, 4, 6, 12):
        assert alibi_slopes(heads, torch.zeros(1, dtype=torch.float64)).tolist() == pytest.approx(
            published(heads)
        )


def test_only_the_maps_learn_from_what_compression_loses():
    model = make(SIZES | {"past": "compressive", "past_window": 4}).train()
    mixer = model.model.layers[0].mixer
    for compress in (mixer.compress_keys, mixer.compress_values):
        compress.init_own_parameters()
    x = torch.randn(1, 10, 32, dtype=torch.float64).repeat_interleave(
        2, 1
    )  # pairs that are alike lose nothing
    angles = [model.model.rotary_emb(x, torch.arange(T)[None]) for T in (20, 19)]
    *_, nothing = mixer(x, angles[0], with_own_loss=True)
    *_, something = mixer(x[:, 1:], angles[1], with_own_loss=True)
    assert nothing.mean() < 1e-20 < 1e-4 < something.mean()
    something.mean().backward()
    assert {name for name, p in mixer.named_parameters() if p.grad is not None} == {
        "compress_keys.weight",
        "compress_values.weight",
    }


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"position": "absolute"}, "position"),
        ({"position": "relative", "max_relative_distance": 0}, "max_relative_distance"),
        ({"pattern": "sparse"}, "pattern"),
        ({"pattern": ["full"]}, "pattern"),
        ({"past": "forever"}, "past"),
        ({"past": "xl", "pattern": "dilated"}, "pattern"),
        ({"memory_top_k": 0}, "memory_top_k"),
        ({"memory_join": "sum"}, "memory_join"),
        ({"compression": "sum"}, "compression"),
        ({"past": "compressive", "compression_rate": 3}, "compression_rate"),
        ({"pattern": "reformer", "num_buckets": 3}, "num_buckets"),
        ({"pattern": "routing", "position": "alibi"}, "position"),
        ({"pattern": "routing", "use_qk_norm": True}, "use_qk_norm"),
        ({"pattern": "routing_by_head", "num_key_value_heads": 1}, "num_key_value_heads"),
        ({"pattern": "routing_by_head", "depth": "reversible"}, "pattern"),
        ({"pattern_size": 0}, "pattern_size"),
        ({"pattern": "fixed", "num_summary_tokens": 9, "pattern_size": 8}, "num_summary_tokens"),
        ({"layer_types": ["sliding_memory"], "num_hidden_layers": 1}, "layer_types"),
        ({"layer_types": ["sliding_heads"], "num_hidden_layers": 1}, "sliding_window"),
        (
            {"position": "xl", "layer_types": ["memory", "full_attention"], "num_hidden_layers": 2},
            "layer_types",
        ),
    ],
)
def test_bad_options_are_refused_by_name(options, name):
    with pytest.raises(Exception, match=f"{name} must"):
        MemoryTransformerConfig(**options)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("position", POSITIONS),
        ("patterns", PATTERNS),
        ("pasts", PASTS),
        ("depth", DEPTHS),
        ("compression", COMPRESSIONS),
        ("memory_join", JOINS),
    ],
)
def test_contracts_of_models_include_every_word(name, words):
    found = set()
    needed = {"compression": "compressive", "memory_join": "memorizing"}
    for case in CASES:
        config = make_config(case)
        if (
            isinstance(config, MemoryTransformerConfig)
            and needed.get(name, config.pasts[0]) in config.pasts
        ):
            given = getattr(config, name)
            found |= {given} if isinstance(given, str) else {*given}
    assert found == {*words}
