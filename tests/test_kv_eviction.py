"""Kept tokens, by all eviction policies, against their definition: one head and one token at a time."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache

from cases import SIZES, largest_values
from comparing import assert_close
from hf_memory import MemoryTransformerConfig, MemoryTransformerForCausalLM
from hf_memory.mixers.attention_blocks import Scores
from hf_memory.mixers.base import Context
from hf_memory.mixers.pasts.kept import Kept
from hf_memory.mixers.pasts.policy import POLICIES
from hf_memory.mixers.pasts.rows import New
from hf_memory.modeling import register_eviction
from hf_memory.ops.bits import rotated
from hf_memory.ops.gate_channels import GateChannels
from hf_memory.ops.kv_eviction import (
    MOST_ENTRIES,
    Block,
    Rule,
    change_of_output,
    chunk,
    kernel_refuses,
    random_choice,
    received_attention,
    retained_attention,
)

MEMORY = Kept(window=5, first=2, kept=4, block=3)


every_policy = pytest.mark.parametrize("policy", POLICIES)


def make(T: int, B: int = 2, D: int = 6):
    generator = torch.Generator().manual_seed(T)
    heads = (torch.randn(B, T, n, D, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    return [x.requires_grad_() for x in heads]


def definition(q, k, v, memory=MEMORY, scale=0.3, softcap=None, other=None):
    """The outputs and the mass of queries [T, groups, D] with one head of keys and values [T, D], [T, groups, D + 1],
    and the tokens that are held. With the mass `other` [T, groups] of a sink, this receives a share as well."""
    held = []
    worth = torch.zeros(len(q), dtype=q.dtype)
    outputs = []
    weights = []
    for t in range(len(q)):
        held = [*held, t]
        scores = scale * q[t] @ k[held].mT
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        p = scores.softmax(-1)
        outputs.append(torch.cat([p @ v[held], scores.logsumexp(-1, keepdim=True)], -1))
        if other is not None:
            p = p * torch.sigmoid(scores.logsumexp(-1) - other[t])[:, None]
        weights.append(
            q.new_zeros(q.shape[1], len(q)).index_copy(1, torch.tensor(held), p.detach())
        )
        if t % memory.block == memory.block - 1:
            of_block = slice(t + 1 - memory.block, t + 1)
            received = torch.stack(weights[of_block], 1)[..., held]
            found = torch.stack(outputs[of_block], 1)[..., :-1]
            seen = k[held], v[held], torch.tensor(held) + 1, worth[held]
            block = Block(
                *(x[None, None] for x in (q[of_block].transpose(0, 1), *seen, received, found))
            )
            worth[held] = POLICIES[memory.policy](block)[0, 0].detach().to(worth.dtype)
            always = [j for j in held if j < memory.first or j > t - memory.window]
            others = sorted({*held} - {*always}, key=lambda j: (-worth[j], j))
            held = sorted(always + others[: memory.stay - len(always)])
    return torch.stack(outputs), held


def expected(q, k, v, memory=MEMORY, softcap=None):
    rows = []
    for of_row in zip(q.unflatten(2, (2, 2)), k, v):
        of_heads = [[x[:, h] for x in of_row] for h in range(2)]
        heads = [definition(*of_head, memory, softcap=softcap)[0] for of_head in of_heads]
        rows.append(torch.stack(heads, 1).flatten(1, 2))
    return torch.stack(rows)


def attend(q, k, v, states=None, memory=MEMORY, softcap=None, mask=None, gates=None, **more):
    context = Context(None, mask, more.pop("cu_seqlens", None), states or {}, **more)
    tokens, tokens_read = context.tokens_and_count(q)
    new = New.of(k, v, memory.kind, context)
    scores = Scores(0.3, softcap, gates=gates)
    if context.is_step(q):
        of_groups = q.unflatten(2, (k.shape[2], -1))
        o, mass = memory.attend_one_with_mass(of_groups, new, context, scores)
        after = context.states
    else:
        (o, mass), after = memory.attend_with_mass(q, new, tokens, context, scores)
    return torch.cat([o, mass[..., None]], -1), after | {"tokens_read": tokens_read}


def test_what_entries_receive_is_a_moving_average_over_blocks():
    weights = torch.tensor([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]], [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    block = Block(*[None] * 4, torch.tensor([[[1.0, 0.5, 0.0]]]), weights[None, None], None)
    expected = torch.tensor([[[0.8 + 0.7, 0.4 + 1.8, 1.5]]])
    torch.testing.assert_close(received_attention(block), expected)


def test_the_change_of_an_output_is_that_to_the_attention_without_the_entry():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 1, *shape, 4, generator=generator, dtype=torch.float64)
        for shape in ((2, 3), (7,), (7,))
    )
    scores = q @ k[:, :, None].mT
    scores[..., 1] = -torch.inf  # an entry that they do not see
    p = scores.softmax(-1)
    o = p @ v[:, :, None]
    before = torch.rand(1, 1, 7, generator=generator, dtype=torch.float64)
    found = change_of_output(Block(q, k, v, None, before, p, o))
    moved = []
    for j in range(7):
        others = [i for i in range(7) if i != j]
        without = scores[..., others].softmax(-1) @ v[:, :, None, others]
        moved.append((o - without).square().sum((2, 3, 4)))
    assert_close(found, 0.8 * before + torch.stack(moved, -1))


def test_what_a_query_sees_alone_is_worth_what_it_is_in_any_precision():
    torch.manual_seed(0)
    v = torch.randn(1, 1, 12, 64, dtype=torch.float64)
    peaks = torch.tensor([3.0, 6.0, 9.0, 12.0, 20.0, 200.0], dtype=torch.float64)
    for peak in peaks:
        scores = torch.randn(1, 1, 2, 4, 12, dtype=torch.float64)
        scores[..., 5] += peak
        found = []
        for dtype in (torch.float64, torch.float32):
            p = scores.to(dtype).softmax(-1)
            values = v.to(dtype)
            o = p @ values[:, :, None]
            found.append(change_of_output(Block(p, p, values, p, p.new_zeros(1, 1, 12), p, o)))
        torch.testing.assert_close(found[1].double(), found[0], rtol=2e-3, atol=1e-5)


@torch.no_grad()
def test_a_random_choice_depends_on_places_in_the_text_alone():
    memory = MEMORY._replace(policy="random")
    held = []
    for seed in (30, 31):
        q, k, v = (x[:, :30] for x in make(seed))
        held.append(attend(q, k, v, memory=memory)[1]["number"])
    assert torch.equal(*held)
    assert (held[0] == held[0][:1, :1]).all()
    others = held[0][0, 0, MEMORY.first : MEMORY.first + MEMORY.kept]
    assert set(others.tolist()) != {*range(22, 26)}  # not the last ones before the window


@pytest.mark.parametrize("scores", [chunk.SCORES, 1], ids=["at once", "in groups"])
@pytest.mark.parametrize("T", [1, 3, 17, 31])
@pytest.mark.parametrize("softcap", [None, 0.5])
@every_policy
def test_equals_its_definition(policy, T, scores, softcap, monkeypatch):
    monkeypatch.setattr(chunk, "SCORES", scores)
    memory = MEMORY._replace(policy=policy)
    inputs = make(T)
    o = attend(*inputs, memory=memory, softcap=softcap)[0]
    reference = expected(*inputs, memory, softcap)
    assert_close(o, reference)
    do = torch.randn_like(o)
    assert_close(*(torch.autograd.grad((x * do).sum(), inputs) for x in (o, reference)))


@pytest.mark.parametrize("sizes", [{}, {"window": 2, "kept": 7, "block": 16, "first": 0}], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@every_policy
def test_kernel_decides_as_its_definition(policy, sizes, softcap):
    """Also in a piece that begins within a block, with rows of different lengths and tiles that are not full."""
    memory = MEMORY._replace(policy=policy, **sizes)
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[1, 40:] = False

    def read(backend, dtype):
        inputs = [x.detach().to(dtype).requires_grad_() for x in make(50, D=40)]
        outputs = []
        states = {}
        for part in (slice(19), slice(19, 50)):
            of_part = [x[:, part] for x in inputs]
            how = {"softcap": softcap, "mask": mask[:, part], "backend": backend}
            o, states = attend(*of_part, states, memory, **how)
            outputs.append(o)
        o = torch.where(mask[..., None, None], torch.cat(outputs, 1), 0)
        return o, states, torch.autograd.grad(o.square().sum(), inputs)

    assert_close(
        read("triton", torch.float32), read("chunk", torch.float64), read("chunk", torch.float32)
    )


@every_policy
def test_kernel_of_forget_gates_decides_as_its_definition(policy):
    gates = GateChannels(6, 0.3)

    def read(backend, dtype):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(2, 50, 4, generator=generator).to(dtype).requires_grad_()
        inputs = [x.detach().to(dtype).requires_grad_() for x in make(50)]
        extended = gates.extend(*inputs, F.logsigmoid(logits).cumsum(1), 16)
        how = {"gates": gates, "backend": backend}
        o, states = attend(*extended, memory=MEMORY._replace(policy=policy), **how)
        o = o[..., :6]  # the kernel's mass is without the sums
        return o, states, torch.autograd.grad(o.square().sum(), [*inputs, logits])

    assert_close(
        read("triton", torch.float32), read("chunk", torch.float64), read("chunk", torch.float32)
    )


def with_many_entries(
    backend, dtype, policy=random_choice, stay=100, D=64, softcap=0.0, gates=None, groups=3
):
    """Two blocks after entries that are held, in one row fewer: results, and gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    T, H = 32, 2
    inputs = [normal(2, T, H * groups, D), *(normal(2, stay + T, H, D) for _ in range(2))]
    number = torch.arange(1, stay + T + 1, dtype=torch.int32).repeat(2, H, 1)
    number[1] = (number[1] - stay // 2).clamp(min=0)  # no tokens in many places, and in the end
    number[1, :, -9:] = 0
    score = torch.rand(2, H, stay, generator=generator).to(
        torch.promote_types(dtype, torch.float32)
    )
    q, k, v = inputs
    if gates is not None:
        inputs.append(normal(2, stay + T, H * groups))
        q, k, v = gates.extend(
            F.pad(q, (0, 0, 0, 0, stay, 0)), k, v, F.logsigmoid(inputs[-1]).cumsum(1), 2 * D
        )
    rule = Rule(16, 4, 30, policy, 0.3, softcap, gates, True)
    rows = q[:, -T:], k.transpose(1, 2), v.transpose(1, 2)
    o, mass, places, score = retained_attention(*rows, number, score, rule, backend=backend)
    if gates is not None:
        mass = torch.zeros_like(mass)  # the kernel's is without the sums
    gradients = torch.autograd.grad(o.square().sum() + mass.square().sum(), inputs)
    return o, mass, places.long(), score, gradients


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0}, {"gates": GateChannels(64, 0.3)}], ids=str
)
@pytest.mark.parametrize("policy", [received_attention, change_of_output])
def test_kernels_read_more_entries_and_queries_than_a_tile(policy, options):
    options = options | {"policy": policy}
    assert_close(
        with_many_entries("triton", torch.float32, **options),
        with_many_entries("chunk", torch.float64, **options),
        with_many_entries("chunk", torch.float32, **options),
    )


def test_kernels_refuse_a_soft_cap_beside_forget_gates():
    """Their gates are channels of products, which they cap; the decay is added after the cap."""
    with pytest.raises(ValueError, match="decays of forget gates are added after a soft cap"):
        with_many_entries("triton", torch.float32, softcap=2.0, gates=GateChannels(64, 0.3))


@pytest.mark.parametrize("D", [64, 128])
def test_kernels_in_16_bits_read_more_entries_than_a_tile(D):
    """float16, as the interpreter multiplies the bit patterns of bfloat16; what stays does not depend on rounding."""
    assert_close(
        with_many_entries("triton", torch.float16, D=D),
        with_many_entries("chunk", torch.float64, D=D),
        with_many_entries("chunk", torch.float16, D=D),
    )


def test_keys_that_lie_in_memory_in_another_order_have_the_same_gradients():
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 6, 4, 8), (1, 2, 11, 8), (1, 2, 11, 8)
    q, *rows = (torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes)
    number = torch.arange(1, 12, dtype=torch.int32).expand(1, 2, -1)
    rule = Rule(3, 1, 2, received_attention, 0.3, 0.0, None, False)

    def gradients(*inputs):
        inputs = [x.requires_grad_() for x in inputs]
        o, *_ = retained_attention(*inputs, number, q.new_zeros(1, 2, 5), rule)
        return torch.autograd.grad(o.square().sum(), inputs)

    by_token = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in rows)
    assert_close(gradients(q, *by_token), gradients(q, *rows))


def test_kernels_refuse_more_entries_than_they_hold():
    k = torch.empty(1, 1, 1, 256, dtype=torch.bfloat16)
    rule = Rule(16, 4, 30, received_attention, 0.3, 2.0, None, True)
    assert kernel_refuses(k, MOST_ENTRIES, rule) is None
    assert kernel_refuses(k, MOST_ENTRIES + 1, rule) == "a query sees 4097 entries, more than 4096"
    assert kernel_refuses(k.float(), 20, rule) == "a key has 1024 bytes, more than 512"


@every_policy
def test_a_policy_depends_on_products_alone(policy):
    """Rows that are packed are rotated: queries like keys, and outputs like values."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"queries": (1, 2, 2, 3, 8), "keys": (1, 2, 9, 8), "values": (1, 2, 9, 8)}
    shapes |= {"outputs": shapes["queries"], "weights": (1, 2, 2, 3, 9), "score": (1, 2, 9)}
    rows = {
        name: torch.rand(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    number = torch.arange(1, 10).int().expand(1, 2, 9)
    turned = {name: rotated(rows[name]) for name in ("queries", "keys", "values", "outputs")}
    worth = POLICIES[policy](Block(number=number, **rows))
    assert_close(POLICIES[policy](Block(number=number, **rows | turned)), worth)


@every_policy
@torch.no_grad()
def test_holds_what_is_worth_most(policy):
    memory = MEMORY._replace(policy=policy)
    q, k, v = make(30)
    states = attend(q, k, v, memory=memory)[1]
    _, held = definition(q[1, :, 2:], k[1, :, 1], v[1, :, 1], memory)
    assert states["number"][1, 1].tolist() == [j + 1 for j in held] + MEMORY.block * [0]
    assert held != [*range(2), *range(21, 30)]  # not the last tokens


@pytest.mark.parametrize("parts", [[30], [13, 17], [25, *[1] * 5]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
@torch.no_grad()
def test_a_policy_may_answer_in_any_dtype(dtype, parts, monkeypatch):
    """Here with whole numbers, which each of them holds."""
    inputs = [x.float() for x in make(30)]

    def read(answer):
        monkeypatch.setitem(POLICIES, "mine", lambda block: (7 * block.number % 11).to(answer))
        states = None
        outputs = []
        for piece in zip(*(x.split(parts, 1) for x in inputs)):
            o, states = attend(*piece, states, memory=MEMORY._replace(policy="mine"))
            outputs.append(o)
        return torch.cat(outputs, 1), states["number"], states["score"]

    found = read(dtype)
    assert found[2].dtype == torch.float32
    assert all(map(torch.equal, found, read(torch.float32)))


@pytest.mark.parametrize("parts", [[1] * 23, [3, 20], [7, 1, 15], [22, 1]])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.5])
@every_policy
@torch.no_grad()
def test_pieces_equal_the_whole(policy, parts, is_known, softcap):
    how = {"memory": MEMORY._replace(policy=policy), "softcap": softcap}
    inputs = make(23)
    states = None
    outputs = []
    for piece in zip(*(x.split(parts, 1) for x in inputs)):
        read = sum(x.shape[1] for x in outputs)
        o, states = attend(*piece, states, uniform_length=read if is_known else None, **how)
        outputs.append(o)
    whole, final = attend(*inputs, **how)
    assert_close(torch.cat(outputs, 1), whole)
    numbers = states.pop("number"), final.pop("number")
    assert torch.equal(*numbers)
    held = (numbers[0] > 0)[..., None]
    of_block = held[:, :1, MEMORY.stay :]
    assert_close(
        *(
            (x["keys"] * held, x["values"] * held, x["score"], x["queries"] * of_block)
            for x in (states, final)
        )
    )


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
    memory = MEMORY._replace(first=first)
    states = attend(*(x.float() for x in (q, k, v)), memory=memory, backend=backend)[1]
    held = states["number"].flatten(0, 1).tolist()
    assert [[n for n in row if 0 < n <= 4] for row in held] == 4 * [[*range(1, first + 1)]]


KINDS = {"layer_types": ["sliding_heads"] * 2}
OPTIONS = {
    "sliding_window": 3,
    "num_sink_tokens": 2,
    "num_kept_tokens": [5, 4],
    "kept_block_size": 2,
}
BESIDE = {
    "alone": {},
    "sinks": {"attention_sinks": True},
    "capped scores": {"attn_logit_softcapping": 0.5},
    "by head": {"num_kept_tokens": [[5, 5], [7, 2]]},
    "by head, with sinks": {"num_kept_tokens": [[5, 5], [2, 7]], "attention_sinks": True},
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("pieces", [[60], [1] * 60], ids=["whole", "token by token"])
@torch.no_grad()
def test_a_layer_keeps_the_tokens_that_its_config_says(beside, pieces):
    """A sink takes its share of the output, and not of what tokens have received."""
    options = OPTIONS | BESIDE[beside]
    memories = [
        Kept(window=3, first=2, kept=kept, block=2)
        for kept in MemoryTransformerConfig(**SIZES, **KINDS, **options).kept_tokens[1]
    ]
    model = _model(options)
    mixer = model.model.layers[1].mixer
    x = torch.randn(1, 60, 32, dtype=torch.float64)
    q, k, v = (y[0] for y in mixer.project_heads(x, None))
    softcap = options.get("attn_logit_softcapping")
    heads = []
    differences = []
    for h, mine in enumerate(q.unflatten(1, (2, 2)).unbind(1)):
        given = mine, k[:, h], v[:, h]
        memory = memories[h]
        how = {"scale": 8**-0.5, "softcap": softcap}
        found = definition(*given, memory, **how)[0]
        o = found[..., :-1]
        mass = found[..., -1]
        others = [definition(*given, memory._replace(first=1), **how)[0]]
        if mixer.sinks is not None:
            logits = mixer.sinks.logits[2 * h : 2 * h + 2].expand(len(mine), 2)
            others.append(definition(*given, memory, **how, other=logits)[0])
            share = torch.sigmoid(logits - mass)[..., None]
            o = o + share * (mixer.sinks.values[h] - o)
        differences.append([(found - other).abs().max() for other in others])
        heads.append(o)
    assert all(max(of_heads) > 0.01 for of_heads in zip(*differences))  # or nothing would show
    cache = DynamicCache(config=model.config)
    read = [mixer(piece, past_key_values=cache)[0] for piece in x.split(pieces, 1)]
    assert_close(torch.cat(read, 1), mixer.o_proj(torch.stack(heads, 1).flatten(1))[None])


def _model(options):
    torch.manual_seed(2)
    model = MemoryTransformerForCausalLM(
        MemoryTransformerConfig(**SIZES, **KINDS, **options, position="none")
    )
    for name, x in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(x, std=3.0)
    return model.double().eval()


def test_only_windows_without_another_memory_keep_tokens():
    with pytest.raises(ValueError, match="num_kept_tokens"):
        MemoryTransformerConfig(**SIZES, num_kept_tokens=3)


@pytest.mark.parametrize("kept", [[3], [[3, 2]], [[3, 2], [1]], [[3, 2, 1], [1, 1]], [3, -1]])
def test_numbers_of_kept_tokens_that_fit_no_heads_are_refused(kept):
    with pytest.raises(ValueError, match="num_kept_tokens must be"):
        MemoryTransformerConfig(**SIZES, **KINDS, sliding_window=3, num_kept_tokens=kept)


@every_policy
@torch.no_grad()
def test_a_model_keeps_tokens_by_the_policy_of_its_config(policy, tmp_path):
    """Also one that was saved and loaded, and whatever calls its tokens came in."""
    model = _model(OPTIONS | {"eviction": policy})
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.eviction == policy
    tokens = torch.randint(3, 64, (2, 31))
    whole = model(tokens).logits
    for pieces in ([31], [9, 1, 1, 20], [1] * 31):
        cache = DynamicCache(config=loaded.config)
        read = [loaded(x, past_key_values=cache).logits for x in tokens.split(pieces, 1)]
        assert_close(torch.cat(read, 1), whole)
    others = [
        _model(OPTIONS | {"eviction": name})(tokens).logits for name in {*POLICIES} - {policy}
    ]
    assert others
    assert all((other - whole).abs().max() > 0.01 for other in others)


def test_a_policy_that_is_not_registered_is_refused(tmp_path):
    unknown = r"eviction must be one of \('received_attention', .*register_eviction, got 'oldest'"
    with pytest.raises(ValueError, match=unknown):
        MemoryTransformerConfig(**SIZES, eviction="oldest")
    model = _model(OPTIONS | {"eviction": "largest_values"})
    model.config.to_json_file(tmp_path / "config.json", use_diff=False)
    saved = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(saved.replace("largest_values", "oldest"))
    with pytest.raises(ValueError, match=unknown):
        MemoryTransformerConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("returns", "given"),
    [
        (lambda worth: None, "got NoneType"),
        (lambda worth: worth.detach().numpy(), "got ndarray"),
        (lambda worth: 1.0, "got float"),
        (lambda worth: worth.mean(), r"got shape \(\)"),
        (lambda worth: worth[:, 0], r"got shape \(2, 12\)"),
    ],
    ids=["none", "array", "number", "scalar", "heads"],
)
def test_a_policy_that_returns_no_number_for_each_entry_is_refused(returns, given, monkeypatch):
    def broken(block):
        return returns(largest_values(block))

    monkeypatch.setitem(POLICIES, "largest_values", broken)
    model = _model(OPTIONS | {"eviction": "largest_values"})
    expected = rf"policy .*broken must return a tensor \[B, H, n\], .*{given}"
    with pytest.raises(ValueError, match=expected):
        model(torch.randint(3, 64, (2, 31)))


def test_a_name_has_one_policy():
    register_eviction("largest_values", largest_values)  # as when its file is imported again
    with pytest.raises(
        ValueError, match="name must be one that no eviction policy has, got 'largest_values'"
    ):
        register_eviction("largest_values", received_attention)
    with pytest.raises(ValueError, match="policy must be a function of a Block, got 'oldest'"):
        register_eviction("oldest", "oldest")
    assert "oldest" not in POLICIES
