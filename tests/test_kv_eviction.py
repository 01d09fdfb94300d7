"""A memory of tokens that received attention, against its definition: one head and one token at a time."""

import pytest
import torch
from transformers import DynamicCache

from cases import SIZES
from comparing import assert_close
from hf_memory import MemoryTransformerConfig, MemoryTransformerForCausalLM
from hf_memory.mixers.attention_blocks import Scores
from hf_memory.mixers.base import Context
from hf_memory.mixers.kv_eviction import DECAY, KVEviction
from hf_memory.ops.kv_eviction import chunk

MEMORY = KVEviction(size=5, first=2, kept=4, block=3, needs_mass=True)


def make(T: int, B: int = 2):
    generator = torch.Generator().manual_seed(T)
    heads = (torch.randn(B, T, n, 6, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    return [x.requires_grad_() for x in heads]


def definition(q, k, v, memory=MEMORY, scale=0.3, softcap=None, other=None):
    """The outputs and the mass of queries [T, groups, D] with one head of keys and values [T, D], [T, groups, D + 1],
    and the tokens that are held. With the mass `other` [T, groups] of a sink, this receives a share as well."""
    held = []
    received = torch.zeros(len(q), dtype=q.dtype)
    outputs = []
    for t in range(len(q)):
        if t % memory.block == 0:
            received = DECAY * received
        held = [*held, t]
        scores = scale * q[t] @ k[held].mT
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        p = scores.softmax(-1)
        outputs.append(torch.cat([p @ v[held], scores.logsumexp(-1, keepdim=True)], -1))
        if other is not None:
            p = p * torch.sigmoid(scores.logsumexp(-1) - other[t])[:, None]
        received = received.index_add(0, torch.tensor(held), p.detach().sum(0))
        if t % memory.block == memory.block - 1:
            always = [j for j in held if j < memory.first or j > t - memory.size]
            others = sorted({*held} - {*always}, key=lambda j: (-received[j], j))
            held = sorted(always + others[: memory.stay - len(always)])
    return torch.stack(outputs), held


def expected(q, k, v, softcap=None):
    rows = []
    for of_row in zip(q.unflatten(2, (2, 2)), k, v):
        heads = [definition(*(x[:, h] for x in of_row), softcap=softcap)[0] for h in range(2)]
        rows.append(torch.stack(heads, 1).flatten(1, 2))
    return torch.stack(rows)


def attend(q, k, v, states=None, mask=None, cu_seqlens=None, uniform_length=None, softcap=None):
    context = Context(None, mask, cu_seqlens, states or {}, uniform_length=uniform_length)
    is_one = bool(states) and q.shape[1] == 1 and not torch.is_grad_enabled()
    read = MEMORY.read_one if is_one else MEMORY.read_many
    (o, mass), new = read(q, k, v, Scores(0.3, softcap), context)
    new = context.states | new
    return torch.cat([o, mass[..., None]], -1), new | {
        "tokens_read": context.tokens_and_count(q)[1]
    }


@pytest.mark.parametrize("scores", [chunk.SCORES, 1], ids=["at once", "in groups"])
@pytest.mark.parametrize("T", [1, 3, 17, 31])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_equals_its_definition(T, scores, softcap, monkeypatch):
    monkeypatch.setattr(chunk, "SCORES", scores)
    inputs = make(T)
    o = attend(*inputs, softcap=softcap)[0]
    reference = expected(*inputs, softcap)
    assert_close(o, reference)
    do = torch.randn_like(o)
    assert_close(*(torch.autograd.grad((x * do).sum(), inputs) for x in (o, reference)))


@pytest.mark.parametrize("sizes", [{}, {"size": 2, "kept": 7, "block": 16, "first": 0}], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_kernel_decides_as_its_definition(sizes, softcap):
    """Also in a piece that begins within a block, and with rows of different lengths."""
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[1, 40:] = False

    def read(backend, dtype):
        inputs = [x.detach().to(dtype).requires_grad_() for x in make(50)]
        outputs = []
        states = {}
        for part in (slice(19), slice(19, 50)):
            context = Context(None, mask[:, part], None, states)
            of_part = [x[:, part] for x in inputs]
            memory = MEMORY._replace(backend=backend, **sizes)
            (o, mass), states = memory.read_many(*of_part, Scores(0.3, softcap), context)
            outputs.append(torch.cat([o, mass[..., None]], -1))
            states = states | {"tokens_read": context.tokens_and_count(of_part[0])[1]}
        o = torch.where(mask[..., None, None], torch.cat(outputs, 1), 0)
        return o, states, torch.autograd.grad(o.square().sum(), inputs)

    assert_close(
        read("triton", torch.float32), read("chunk", torch.float64), read("chunk", torch.float32)
    )


@torch.no_grad()
def test_holds_what_received_most():
    q, k, v = make(30)
    states = attend(q, k, v)[1]
    _, held = definition(q[1, :, 2:], k[1, :, 1], v[1, :, 1])
    assert states["number"][1, 1].tolist() == [j + 1 for j in held] + MEMORY.block * [0]
    assert held != [*range(2), *range(21, 30)]  # not the last tokens


@pytest.mark.parametrize("parts", [[1] * 23, [3, 20], [7, 1, 15], [22, 1]])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.5])
@torch.no_grad()
def test_pieces_equal_the_whole(parts, is_known, softcap):
    inputs = make(23)
    states = None
    outputs = []
    for piece in zip(*(x.split(parts, 1) for x in inputs)):
        read = sum(x.shape[1] for x in outputs)
        o, states = attend(
            *piece, states, uniform_length=read if is_known else None, softcap=softcap
        )
        outputs.append(o)
    whole, final = attend(*inputs, softcap=softcap)
    assert_close(torch.cat(outputs, 1), whole)
    numbers = states.pop("number"), final.pop("number")
    assert torch.equal(*numbers)
    held = (numbers[0] > 0)[..., None]
    assert_close(*((x["keys"] * held, x["values"] * held, x["received"]) for x in (states, final)))


@pytest.mark.parametrize("length", [22, 9, 1])
@torch.no_grad()
def test_padding_is_no_token(length):
    inputs = make(23)
    o, states = attend(*inputs, mask=torch.arange(23) < torch.tensor([[23], [length]]))
    row = [x[1:, :length] for x in inputs]
    assert_close((o[:1], o[1:, :length]), (expected(*(x[:1] for x in inputs)), expected(*row)))
    more = make(5)
    together, _ = attend(*more, states)
    alone, _ = attend(*(x[1:] for x in more), attend(*row)[1])
    assert_close(together[1:], alone)


@torch.no_grad()
def test_packed_sequences_are_separate():
    inputs = make(30, B=1)
    bounds = [0, 11, 12, 30]
    o, states = attend(*inputs, cu_seqlens=torch.tensor(bounds))
    assert_close(
        o,
        torch.cat([expected(*(x[:, a:b] for x in inputs)) for a, b in zip(bounds, bounds[1:])], 1),
    )
    assert states.keys() == {"tokens_read"}


@pytest.mark.parametrize("backend", ["chunk", "triton"])
@pytest.mark.parametrize("first", [1, 2, 3])
@torch.no_grad()
def test_first_tokens_stay_although_no_query_attends_to_them(backend, first):
    q, k, v = make(31)
    q[..., 0] = 3
    k[:, :4, :, 0] = -9
    memory = MEMORY._replace(first=first, backend=backend)
    context = Context(None, None, None, {})
    _, states = memory.read_many(*(x.float() for x in (q, k, v)), Scores(0.3), context)
    held = states["number"].flatten(0, 1).tolist()
    assert [[n for n in row if 0 < n <= 4] for row in held] == 4 * [[*range(1, first + 1)]]


OPTIONS = {
    "sliding_window": 3,
    "num_sink_tokens": 2,
    "num_kept_tokens": [5, 4],
    "kept_block_size": 2,
}
BESIDE = {
    "alone": {},
    "sinks": {"attention_sinks": True},
    "virtual token": {"virtual_token": True, "num_sink_tokens": 0},
    "capped scores": {"attn_logit_softcapping": 0.5},
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("pieces", [[60], [1] * 60], ids=["whole", "token by token"])
@torch.no_grad()
def test_a_layer_keeps_the_tokens_that_its_config_says(beside, pieces):
    """A sink takes its share of the output, and not of what tokens have received."""
    options = OPTIONS | BESIDE[beside]
    first = options["num_sink_tokens"]
    memory = KVEviction(size=3, first=first, kept=4, block=2)
    model = _model(options)
    mixer = model.model.layers[1].mixer
    x = torch.randn(1, 60, 32, dtype=torch.float64)
    q, k, v = (y[0] for y in mixer.project_heads(x, None))
    softcap = options.get("attn_logit_softcapping")
    heads = []
    differences = []
    for h, mine in enumerate(q.unflatten(1, (2, 2)).unbind(1)):
        given = mine, k[:, h], v[:, h]
        how = {"scale": 8**-0.5, "softcap": softcap}
        found = definition(*given, memory, **how)[0]
        o = found[..., :-1]
        mass = found[..., -1]
        others = []
        if first:
            others.append(definition(*given, memory._replace(first=first - 1), **how)[0])
        if beside in ("sinks", "virtual token"):
            values, logits = _stands_beside(mixer, beside, mine, h)
            others.append(definition(*given, memory, **how, other=logits)[0])
            share = torch.sigmoid(logits - mass)[..., None]
            o = o + share * (values - o)
        differences.append([(found - other).abs().max() for other in others])
        heads.append(o)
    assert all(max(of_heads) > 0.01 for of_heads in zip(*differences))  # or nothing would show
    cache = DynamicCache(config=model.config)
    read = [mixer(piece, past_key_values=cache)[0] for piece in x.split(pieces, 1)]
    assert_close(torch.cat(read, 1), mixer.o_proj(torch.stack(heads, 1).flatten(1))[None])


def _stands_beside(mixer, beside, q, head):
    """The values [D] of a sink or a virtual token, and its logits [T, groups] for the queries of a head."""
    if beside == "sinks":
        logits = mixer.sinks.logits[2 * head : 2 * head + 2]
        return mixer.sinks.values[head], logits.expand(len(q), 2)
    return mixer.virtual_token.values[head], 8**-0.5 * q @ mixer.virtual_token.keys[head]


def _model(options):
    torch.manual_seed(2)
    kinds = {"layer_types": ["sliding_heads"] * 2}
    model = MemoryTransformerForCausalLM(
        MemoryTransformerConfig(**SIZES, **kinds, **options, position="none")
    )
    for name, x in model.named_parameters():
        if "sinks" in name or "virtual" in name:
            torch.nn.init.normal_(x, std=3.0)
    return model.double().eval()


def test_only_windows_without_another_memory_keep_tokens():
    with pytest.raises(Exception, match="num_kept_tokens"):
        MemoryTransformerConfig(**SIZES, num_kept_tokens=3)
