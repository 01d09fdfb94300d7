"""The Transformer's positions and patterns are the published equations, and no token sees later ones."""

import math
from typing import NamedTuple

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
    model = make_model(CASE["transformer"], **used(options)).double()
    for x in model.parameters():
        x.data += 0.2 * torch.randn(
            x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(x.numel())
        )
    return model


def used(options):
    """Options without those of patterns and pasts that no layer has."""
    kinds = PATTERNS | PASTS
    chosen = (options.get("pattern", "full"), options.get("past", "cache"))
    names = {name for x in chosen for name in ([x] if isinstance(x, str) else x)}
    read = {option for name in names for option in kinds[name].options}
    if "sliding_heads" in options.get("layer_types", ()):
        read |= {"sliding_window", "num_sink_tokens"}
    if options.get("position") == "relative":
        read.add("max_relative_distance")
    known = {"max_relative_distance"} | {x for kind in kinds.values() for x in kind.options}
    return {name: x for name, x in options.items() if name in read or name not in known}


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


class Heads(NamedTuple):
    """Queries, keys and values [T, heads, D] of one row; queries and keys also as they are before a rotation."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    plain_q: torch.Tensor
    plain_k: torch.Tensor


class Entry(NamedTuple):
    """What a query sees: the query, a key and a value [D], their distance in positions, and the tokens read since."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d: int
    age: int = 0


def heads_of(mixer, x, position):
    q, k, v = (
        proj(x).unflatten(-1, (-1, D)) for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    rotated = (turned(q), turned(k)) if position == "rope" else (q, k)
    return Heads(*rotated, v, q, k)


def attention(mixer, position, x, entries):
    """Softmax attention of one row [T, hidden_size] to the entries that `entries(heads, h, i)` gives, one at a time."""
    heads = heads_of(mixer, x, position)
    outputs = torch.zeros(len(x), H, D, dtype=x.dtype)
    for h in range(H):
        for i in range(len(x)):
            scores, values = scores_and_values(mixer, position, x, h, i, entries(heads, h, i))
            outputs[i, h] = scores.softmax(0) @ values
    return mixer.o_proj(outputs.flatten(1))


def scores_and_values(mixer, position, x, h, i, entries):
    """Those of entries [n] and [n, D], as the positions change them."""
    relation = getattr(mixer, "relation", None)
    scores = torch.stack([score(position, relation, h, e.q, e.k, e.d) for e in entries])
    values = torch.stack([e.v for e in entries])
    if position == "relative":
        values = values + torch.stack([relation.values.weight[min(e.d, FARTHEST)] for e in entries])
    if position == "forget":
        kept = F.logsigmoid(mixer.forget.proj(x))[:, h]
        scores = scores + torch.stack([kept[i - e.age + 1 : i + 1].sum() for e in entries])
    return scores, values


def seen_tokens(pattern):
    """Entries: the tokens that a pattern or a kind of past lets a token see."""

    def entries(heads, h, i):
        return [
            Entry(heads.q[i, h], heads.k[j, h // 2], heads.v[j, h // 2], i - j, i - j)
            for j in range(i + 1)
            if sees(pattern, h, i, j)
        ]

    return entries


def with_summaries(mixer):
    """Entries: the own block of 4 tokens, and two learned sums of each block before it."""

    def entries(heads, h, i):
        found = seen_tokens("linformer")(heads, h, i)
        for end in range(4, i // 4 * 4 + 1, 4):
            block = slice(end - 4, end)
            keys = mixer.compress @ heads.k[block, h // 2]
            values = mixer.compress @ heads.v[block, h // 2]
            found += [Entry(heads.q[i, h], *pair, i + 1 - end) for pair in zip(keys, values)]
        return found

    return entries


def first_and_last(position):
    """Entries: a window of 5 and two first tokens, at positions that are counted within these."""

    def entries(heads, h, i):
        far = turned(heads.plain_q, 6) if position == "rope" else heads.q
        found = seen_tokens("infinite")(heads, h, i)
        return [e if e.d < 5 else e._replace(q=far[i, h], d=min(e.d, 6 - (i - e.d))) for e in found]

    return entries


def with_slots(mixer, position):
    """Entries: a segment of 4 tokens, the 6 before it, and three slots of two tokens each that are older."""

    def entries(heads, h, i):
        is_most_used = mixer.config.compression == "most_used"
        used = attention_got(heads.q, heads.k) if is_most_used else None
        found = seen_tokens("compressive")(heads, h, i)
        last = i // 4 * 4 - 6
        for start in range(max(0, last - 6), last, 2):
            pair = slot(mixer, position, h // 2, start, used, heads.plain_k, heads.k, heads.v)
            found.append(Entry(heads.q[i, h], *pair, i - start - 1))
        return found

    return entries


def with_best_of_store(mixer, position):
    """Entries: a window of 5 tokens, and the two of the 6 tokens before it that have the highest scores."""

    def entries(heads, h, i):
        store = [
            Entry(heads.q[i, h], heads.k[j, h // 2], heads.v[j, h // 2], i - j)
            for j in range(max(0, i - 10), i - 4)
        ]
        store.sort(key=lambda e: score(position, mixer.relation, h, *e[:2], e.d))
        return seen_tokens("memorizing")(heads, h, i) + store[-2:]

    return entries


def with_store_beside(mixer, position, x):
    """A window of 5 tokens, joined with the two of the 6 tokens before it that have the largest cosines."""
    heads = heads_of(mixer, x, position)
    outputs = torch.zeros(len(x), H, D, dtype=x.dtype)
    for h in range(H):
        for i in range(len(x)):
            near = seen_tokens("memorizing")(heads, h, i)
            scores, values = scores_and_values(mixer, position, x, h, i, near)
            outputs[i, h] = scores.softmax(0) @ values
            if i >= 5:
                q, k, v = heads.plain_q[:, h], heads.plain_k[:, h // 2], heads.v[:, h // 2]
                outputs[i, h] = joined(mixer, h, scores, values, *remembered(mixer, h, i, q, k, v))
    return mixer.o_proj(outputs.flatten(1))


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
    """One row, with queries as keys and itself where there is nothing else; without buckets, a window of 4."""
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


def words_where(holds):
    """Those of WORDS for which something holds, given the position, the pattern and the past."""
    chosen = [
        words for words in WORDS if holds(words.get("pattern", "full"), words.get("past", "cache"))
    ]
    names = [str([*words.values()]) for words in chosen]
    return pytest.mark.parametrize("words", chosen, ids=names)


def mixer_and_row(words):
    """A mixer, and hidden states [1, 19, 32]."""
    mixer = make(SIZES | words).model.layers[0].mixer
    return mixer, torch.randn(1, 19, 32, dtype=torch.float64)


def assert_is(mixer, x, expected):
    assert_close(mixer(x, rotations(torch.arange(19)))[0][0], expected)


@words_where(
    lambda pattern, past: pattern not in (*BUCKETS, "linformer") and past in ("cache", "xl")
)
@torch.no_grad()
def test_attention_to_tokens_that_a_pattern_shows_is_its_equation(words):
    mixer, x = mixer_and_row(words)
    position = words.get("position", "rope")
    shown = "xl" if words.get("past") == "xl" else words.get("pattern", "full")
    if "layer_types" in words:
        shown = "sliding_heads"
    assert_is(mixer, x, attention(mixer, position, x[0], seen_tokens(shown)))


@words_where(lambda pattern, past: pattern == "linformer")
@torch.no_grad()
def test_summaries_of_blocks_are_learned_sums(words):
    mixer, x = mixer_and_row(words)
    assert_is(mixer, x, attention(mixer, "rope", x[0], with_summaries(mixer)))


@words_where(lambda pattern, past: pattern in BUCKETS)
@torch.no_grad()
def test_attention_in_buckets_is_attention_to_tokens_of_the_same_bucket(words):
    mixer, x = mixer_and_row(words)
    assert_is(mixer, x, bucket_attention(mixer, x[0]))


@words_where(lambda pattern, past: past == "infinite")
@torch.no_grad()
def test_positions_of_an_infinite_past_are_counted_within_what_is_seen(words):
    mixer, x = mixer_and_row(words)
    position = words.get("position", "rope")
    assert_is(mixer, x, attention(mixer, position, x[0], first_and_last(position)))


@words_where(lambda pattern, past: past == "compressive")
@torch.no_grad()
def test_slots_are_attended_to_as_tokens_are(words):
    mixer, x = mixer_and_row(words | {"past_window": 6})
    position = words.get("position", "rope")
    assert_is(mixer, x, attention(mixer, position, x[0], with_slots(mixer, position)))


@words_where(lambda pattern, past: past == "memorizing")
@torch.no_grad()
def test_tokens_of_a_store_are_attended_to_or_joined(words):
    mixer, x = mixer_and_row(words)
    position = words.get("position", "rope")
    if words.get("memory_join") == "attention":
        expected = attention(mixer, position, x[0], with_best_of_store(mixer, position))
    else:
        expected = with_store_beside(mixer, position, x[0])
    assert_is(mixer, x, expected)


def test_each_word_has_an_equation():
    pasts = {"cache", "xl", "infinite", "compressive", "memorizing"}
    assert {words.get("past", "cache") for words in WORDS} == pasts == {*PASTS}


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
    gates = mixer.forget(x.double())
    assert mixer.forget.sums(gates, Context(None, None, None, {})).min() < -2000
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
    made = make_model(CASE["transformer"], **used(options)).double()
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
