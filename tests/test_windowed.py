"""A memory beside attention over a window: each part against its equation, token by token, in float64."""

import math

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

import hf_memory
from cases import SIZES
from comparing import assert_close, in_float64
from hf_memory.mixers import attention_blocks
from hf_memory.mixers.attention_blocks import (
    Columns,
    Scores,
    attended_rows,
    full_attention,
    near_blocks,
    rows_of,
)
from hf_memory.mixers.base import Context
from hf_memory.mixers.far_memory import Leaving, SlotMemory, centroids
from hf_memory.mixers.positions import Positions
from hf_memory.mixers.transformer.relations import RELATIONS
from hf_memory.mixers.windowed import WindowedMixer
from hf_memory.ops.masks import Tokens, all_tokens, causal, count, older, packed, sinks, window

WINDOWS = {
    "layer_types": ["sliding_memory"] * 2,
    "sliding_window": 5,
    "num_sink_tokens": 2,
    "num_memory_slots": 6,
}
SINKS = {"layer_types": ["sliding_heads"] * 2, "attention_sinks": True, "num_sink_tokens": 0}


def heads(T: int, HQ: int = 4, H: int = 2, D: int = 8):
    generator = torch.Generator().manual_seed(T)
    return (torch.randn(2, T, n, D, generator=generator, dtype=torch.float64) for n in (HQ, H, H))


def softmax_of(q, k, v, visible, scaling):
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = (scaling * torch.einsum("bthd,bshd->bhts", q, k)).masked_fill(~visible, -torch.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v), scores.logsumexp(-1).transpose(
        1, 2
    )


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("num_near", "num_sinks"), [(16, 4), (1, 3), (5, 0), (200, 2)])
def test_near_attention_is_softmax_over_window_and_sinks(num_near, num_sinks, groups, monkeypatch):
    T = 150
    if groups > 1:
        monkeypatch.setattr(attention_blocks, "SCORES", 1)
    q, k, v = (x.requires_grad_() for x in heads(T))
    i = torch.arange(T)[:, None]
    j = torch.arange(T)
    visible = (j <= i) & ((i - j < num_near) | (j < num_sinks))
    tokens = all_tokens(T, q)
    sees = sinks(num_sinks) & older(num_near)
    first = Columns(tokens.of(slice(num_sinks)), k[:, :num_sinks], v[:, :num_sinks], sees)
    keys, values = (F.pad(x, (0, 0, 0, 0, num_near, 0)) for x in (k, v))
    before = Tokens(F.pad(tokens.position, (num_near, 0), value=-1))
    near = Columns(before, keys, values, causal & window(num_near))
    blocks = near_blocks(q, tokens, near, first)
    assert len(blocks) == groups
    o, mass = attended_rows(map(Scores(0.3).attend_with_mass, blocks), q)
    expected = softmax_of(q, k, v, visible, 0.3)
    assert_close((o, mass), expected)
    do = torch.randn_like(o)
    dmass = torch.randn_like(mass)
    results = ((x * do).sum() + (y * dmass).sum() for x, y in ((o, mass), expected))
    assert_close(*(torch.autograd.grad(x, (q, k, v)) for x in results))


def test_groups_of_near_blocks_keep_sequences_and_distances_apart(monkeypatch):
    T = 150
    boundaries = torch.tensor([0, 20, 90, 150])
    q, k, v = (x[:1] for x in heads(T))
    tokens = packed(boundaries, T)
    padded = tokens.map(lambda x: F.pad(x, (15, 0), value=-1))
    keys, values = (F.pad(x, (0, 0, 0, 0, 15, 0)) for x in (k, v))
    near = Columns(padded, keys, values, causal & window(16))
    alibi = RELATIONS["alibi"](hf_memory.MemoryTransformerConfig(**SIZES))

    def attended() -> torch.Tensor:
        return rows_of(
            map(Scores(0.3, relation=alibi).attend, near_blocks(q, tokens, near, None)), q
        )

    expected = attended()
    monkeypatch.setattr(attention_blocks, "SCORES", 1)
    assert_close(attended(), expected)


@pytest.mark.parametrize("longest", [None, 70, 300])
def test_heads_that_keep_more_are_causal_attention(longest):
    T = 350
    q, k, v = heads(T)
    mask = torch.ones(2, T).bool()
    mask[1, :30] = False
    tokens = Tokens(count(mask))
    sees = causal if longest is None else causal & window(longest)
    o = full_attention(q, tokens, Columns(tokens, k, v, sees), Scores(0.3), window=longest)
    visible = torch.ones(T, T).tril().triu(1 - (longest or T)).bool() & mask[:, None, None]
    expected, _ = softmax_of(q, k, v, visible, 0.3)
    assert_close(o[mask], expected[mask])
    assert o.isfinite().all()


def make_config(**options):
    return hf_memory.LinearTransformerConfig(**{**SIZES, **WINDOWS, **options})


@pytest.mark.parametrize(
    "heads", [{"full_attention_heads": [[1], []]}, {"num_kept_tokens": [[2, 0], [1, 1]]}], ids=str
)
def test_heads_that_see_different_tokens_are_refused_with_tensor_parallelism(heads):
    config = make_config(layer_types=["sliding_heads"] * 2, **heads)
    mixer = WindowedMixer(config, 0)
    for name in ("q_proj", "k_proj", "v_proj"):  # half of the heads
        setattr(mixer, name, torch.nn.Linear(32, mixer.get_submodule(name).out_features // 2))
    with pytest.raises(
        ValueError, match="full_attention_heads must be None, and num_kept_tokens one number, with"
    ):
        mixer(torch.randn(2, 3, 32))


def test_a_slot_for_each_key_is_attention():
    """Sharp slots at the keys themselves: window and memory together are softmax over everything."""
    config = make_config(num_memory_slots=20, head_dim=8, sliding_window=3, num_sink_tokens=1)
    mixer = config.mixer_class(0)(config, 0).double()
    hidden = torch.randn(1, 20, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v = mixer.project_heads(hidden, None)
    with torch.no_grad():
        for h in range(2):
            rows = slice(20 * h, 20 * h + 20)
            mixer.far.k_slots.weight[rows] = 1e4 * k[0, :, h]
            mixer.far.k_slots.bias[rows] = -5e3 * k[0, :, h].square().sum(-1)
            queries = mixer.far.q_slots.weight[40 * h : 40 * h + 40]
            queries.copy_((mixer.scaling * k[0, :, h]).repeat(2, 1))
        mixer.far.q_slots.bias.zero_()
    output, _ = mixer(hidden)
    expected, _ = softmax_of(q, k, v, torch.ones(20, 20).tril().bool(), mixer.scaling)
    assert_close(output, mixer.o_proj(expected.flatten(2)))


def test_keys_are_turned_back_whatever_turned_them():
    """A memory is of keys before rotation; those of the window are kept after it, with their angles."""
    angles = torch.randn(2, 5, 3, dtype=torch.float64)
    positions = Positions.of_halves(
        1.3 * torch.cat([angles.cos(), angles.sin()], -1)
    )  # YaRN also lengthens
    keys = torch.randn(2, 5, 4, 8, dtype=torch.float64)
    back = Positions.of_halves(positions.inverse().halves())
    assert_close(back.turn(positions.turn(keys)), keys)


@pytest.mark.parametrize("partial", [1.0, 0.5])
@torch.no_grad()
def test_keys_enter_the_memory_as_they_were_before_rotation(partial):
    """A token leaves the window when the one that is `sliding_window` later is read, in this or in a later call."""
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": partial}
    config = make_config(num_sink_tokens=1, rope_parameters=rope)
    model = hf_memory.LinearTransformerModel(config)
    mixer = model.layers[0].mixer
    written = []
    mixer.far.register_forward_pre_hook(lambda _, arguments: written.append(arguments[1].keys))
    hidden = torch.randn(2, 19, 32, generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=config)
    for part in (slice(7), slice(7, 8), slice(8, 10), slice(10, 19)):
        angles = model.rotary_emb(hidden, torch.arange(19)[None, part])
        mixer(hidden[:, part], angles, past_key_values=cache)
    (_, rounded, _), (_, keys, _) = (
        mixer.project_heads(hidden, None),
        in_float64(mixer).project_heads(hidden.double(), None),
    )
    assert_close(torch.cat(written, 1)[:, 5:], keys[:, :-5], rounded[:, :-5])


def test_without_its_memory_a_layer_is_attention_over_the_window():
    config = make_config(layer_types=["sliding_heads"] * 2, num_sink_tokens=0)
    mixer = config.mixer_class(0)(config, 0)
    hidden = torch.randn(1, 12, 32)
    changed = hidden.clone()
    changed[:, 4] += 1
    difference = (mixer(hidden)[0] - mixer(changed)[0]).abs().amax(-1)[0]
    assert difference[4:9].all()
    assert not difference[9:].any()


@pytest.mark.parametrize("heads", [[[], []], [[0], []]])
def test_a_sink_is_a_token_with_a_learned_score_and_value(heads):
    config = make_config(**SINKS, full_attention_heads=heads)
    mixer = config.mixer_class(0)(config, 0).double()
    for x in mixer.sinks.parameters():
        x.data.normal_()
    hidden = torch.randn(2, 12, 32, dtype=torch.float64)
    q, k, v = mixer.project_heads(hidden, None)
    near = mixer.near_heads
    place = torch.arange(12)
    is_near = torch.tensor([h in near for h in range(2)]).repeat_interleave(2)[None, :, None, None]
    distance = place[:, None] - place
    visible = (distance >= 0) & ((distance < 5) | ~is_near)
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = (mixer.scaling * torch.einsum("bthd,bshd->bhts", q, k)).masked_fill(
        ~visible, -torch.inf
    )
    logits = torch.full((4,), -torch.inf).double()
    values = torch.zeros(4, 8).double()
    logits[is_near.flatten()] = mixer.sinks.logits
    values[is_near.flatten()] = mixer.sinks.values.repeat_interleave(2, 0)
    weights = torch.cat([logits[None, :, None, None].expand(2, -1, 12, 1), scores], -1).softmax(-1)
    values = torch.cat([values.expand(2, 1, 4, 8), v], 1)
    expected = mixer.o_proj(torch.einsum("bhts,bshd->bthd", weights, values).flatten(2))
    output, _ = mixer(hidden)
    assert_close(output, expected)
    parameters = list(mixer.parameters())
    do = torch.randn_like(output)
    assert_close(*(torch.autograd.grad((x * do).sum(), parameters) for x in (output, expected)))


def test_the_value_of_a_sink_is_two_biases():
    """-u for the values, and W_o u for the output: see `Sinks`."""
    config = make_config(**SINKS, attention_bias=True, attention_output_bias=True)
    mixer = config.mixer_class(0)(config, 0).double()
    for x in mixer.sinks.parameters():
        x.data.normal_()
    hidden = torch.randn(2, 12, 32, dtype=torch.float64)
    expected, _ = mixer(hidden)
    u = mixer.sinks.values.detach()
    with torch.no_grad():
        mixer.v_proj.bias -= u.flatten()
        mixer.o_proj.bias += mixer.o_proj.weight @ u.repeat_interleave(2, 0).flatten()
        mixer.sinks.values.zero_()
    assert_close(mixer(hidden)[0], expected)


@torch.no_grad()
def test_sinks_start_as_what_late_queries_see_in_first_tokens():
    """First tokens with one key, of a score that all queries give alike, are one sink of their mass and mean value."""
    config = make_config(**SINKS, head_dim=8)
    mixer = config.mixer_class(0)(config, 0).double()
    q, k, v = (x[:1] for x in heads(40))
    q[..., 0] = 1.0
    k[..., 0] = 0.0
    k[:, :2] = 0.0
    k[:, :2, :, 0] = 3.0
    mixer.project_heads = lambda *_: (q, k, v)
    mixer.start_sinks(q, None, first=2)
    assert_close(
        mixer.sinks.logits, torch.full((4,), 3 * mixer.scaling + math.log(2), dtype=torch.float64)
    )
    assert_close(mixer.sinks.values, v[0, :2].mean(0))


def test_centroids_are_those_of_clusters():
    centers = 10 * torch.eye(4)
    points = centers.repeat(50, 1) + 0.01 * torch.randn(200, 4)
    found, members = centroids(points, 12)
    assert torch.equal(torch.cdist(points, found).argmin(-1), members)
    assert torch.cdist(centers, found).amin(1).max() < 0.02


def test_a_start_from_keys_is_nearer_to_attention_than_a_window():
    """Where keys have centroids: values of what left the window come back with nearly their weights."""
    generator = torch.Generator().manual_seed(0)
    memory = SlotMemory(make_config(num_memory_slots=12), heads=2)
    keys = 2 * torch.randn(6, 2, 8, generator=generator).repeat(40, 1, 1)
    keys = keys + 0.1 * torch.randn(keys.shape, generator=generator)
    q, _, v = (x.float()[:1] for x in heads(240))
    k = keys[None]
    memory.start_near(q[0], keys, torch.eye(8))
    leaving = Leaving(k, v, memory.gates(q), torch.ones(1, 240, dtype=torch.bool))
    answer, mass, _ = memory(q, leaving, Context(None, None, None, {}))
    expected, logsumexp = softmax_of(q, k, v, torch.ones(240, 240).tril().bool(), memory.scaling)
    assert (mass - logsumexp).abs().max() < 0.3
    assert (answer - expected).square().mean() < 0.1 * expected.square().mean()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sliding_window": 1}, "sliding_window"),
        ({"sliding_window": None}, "sliding_window"),
        ({"layer_types": ["memory", "sliding_attention"]}, "num_sink_tokens"),
        ({"full_attention_heads": [[2], []]}, "full_attention_heads"),
        ({"full_attention_heads": [[0]]}, "full_attention_heads"),
        ({"full_attention_heads": [[0], []], "full_attention_window": 2}, "full_attention_window"),
        ({"attention_sinks": True, "full_attention_window": 6}, "full_attention_window"),
    ],
)
def test_windows_that_cannot_be_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        make_config(**options)


@pytest.mark.parametrize(
    ("config_class", "options"),
    [
        (hf_memory.LinearTransformerConfig, {}),
        (hf_memory.DeltaFormerConfig, {"beta_activation": "tanh"}),
        (
            hf_memory.TitansConfig,
            {"variant": "mag", "memory_gate": "add", "num_persistent_tokens": 0},
        ),
        (hf_memory.MemoryTransformerConfig, {}),
    ],
)
def test_heads_with_a_window_equal_attention_up_to_its_length_in_each_family(config_class, options):
    layers = {"layer_types": ["sliding_heads"] * 2, "sliding_window": 5, "num_sink_tokens": 2}
    config = config_class(**SIZES, **layers, **options)
    assert config.exact_up_to(0, 7) == 7
    assert config.exact_up_to(0, 8) is None
