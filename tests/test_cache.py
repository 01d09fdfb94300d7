"""What a MemoryLayer does inside transformers' caches."""

import copy

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)
from transformers.cache_utils import Cache, LinearAttentionLayer

from cases import (
    CASE,
    CASES,
    CASES_OF_CACHES,
    SIZES,
    every_case,
    every_kind_of_cache,
    every_kind_of_layer,
    every_recurrent_family,
    go_on,
    make_config,
    make_model,
    random_tokens,
    read,
    without_plain_attention,
)
from comparing import assert_close
from hf_memory.cache import MemoryLayer, memory_layer, state_bytes
from hf_memory.evaluation import cache_bytes

CONVOLVING = [case for case in CASES if hasattr(make_config(case), "linear_conv_kernel_dim")]


def addresses(cache):
    """The addresses of the states that do not grow."""
    layers = [layer for layer in cache.layers if isinstance(layer, MemoryLayer)]
    return [
        x.data_ptr()
        for m in layers
        for name, x in m.states.items()
        if m.spec[name].growth == "fixed"
    ]


@every_recurrent_family
def test_states_keep_their_address(case):
    model = make_model(case)
    tokens = random_tokens(2, 6)
    cache = read(model, tokens[:, :3])
    before = addresses(cache)
    assert before
    for t in range(3, 6):
        go_on(model, cache, tokens[:, t : t + 1])
    cache.reset()
    assert cache.get_seq_length() == 0
    go_on(model, cache, tokens)
    assert addresses(cache) == before


@every_case
@torch.no_grad()
def test_a_cache_that_was_made_in_inference_mode_goes_on_outside_it(case):
    model = make_model(case).double()
    tokens = random_tokens(2, 9)
    with torch.inference_mode():
        cache = read(model, tokens[:, :5])
    parts = [go_on(model, cache, part) for part in tokens[:, 5:].split([1, 3], 1)]
    assert_close(torch.cat(parts, 1), model(tokens).logits[:, 5:])


@every_recurrent_family
@torch.no_grad()
def test_a_static_or_recording_cache_of_inference_mode_goes_on_too(case):
    model = make_model(case).double()
    tokens = random_tokens(2, 9)
    with torch.inference_mode():
        static = StaticCache(config=model.config, max_cache_len=9)
        go_on(model, static, tokens[:, :5])
        recording = read(model, tokens[:, :3])
        recording.activate_past_recording()
        go_on(model, recording, random_tokens(2, 4, seed=1))
    recording.crop(-4)
    expected = model(tokens).logits[:, 5:]
    assert_close(go_on(model, recording, tokens[:, 3:])[:, 2:], expected)
    assert_close(
        torch.cat([go_on(model, static, part) for part in tokens[:, 5:].split([1, 3], 1)], 1),
        expected,
    )
    with torch.inference_mode():
        empty, full = (StaticCache(config=model.config, max_cache_len=9) for _ in range(2))
        go_on(model, full, tokens[:, :5])
    full.reset()
    for static in (empty, full):
        assert_close(go_on(model, static, tokens)[:, 5:], expected)


@every_case
def test_reset_forgets_everything(case):
    model = make_model(case, **without_plain_attention(case)).double()
    tokens = random_tokens(1, 6)
    cache = read(model, random_tokens(1, 9, seed=1))
    cache.reset()
    assert_close(go_on(model, cache, tokens), model(tokens).logits)


@every_kind_of_layer
def test_a_reset_leaves_what_gradients_need(case):
    model = make_model(case, **without_plain_attention(case)).eval()
    tokens = random_tokens(1, 7)
    gradients = []
    for is_reset in (False, True):
        cache = DynamicCache(config=model.config)
        logits = [model(x, past_key_values=cache).logits for x in tokens.split(4, 1)]
        if is_reset:
            cache.reset()
        loss = torch.cat(logits, 1).square().sum()
        gradients.append(torch.autograd.grad(loss, model.get_input_embeddings().weight)[0])
    assert torch.equal(*gradients)


@every_case
@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_select_indices([2, 0]), [2, 0]),
        (lambda cache: cache.batch_select_indices((1, 2)), [1, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ],
    ids=[
        "reorder",
        "select",
        "select by a list",
        "select by a tuple",
        "select by a mask",
        "repeat",
    ],
)
def test_rows_move_with_their_past(case, change, rows):
    model = make_model(case).double()
    tokens = random_tokens(3, 6)
    word = random_tokens(1, 1, seed=1)
    cache = read(model, tokens)
    change(cache)
    moved = go_on(model, cache, word.expand(len(rows), 1))
    expected = go_on(model, read(model, tokens[rows]), word.expand(len(rows), 1))
    assert_close(moved, expected)
    assert cache.layers[0].get_seq_length() == 7


@every_case
def test_a_copied_cache_leads_its_own_life(case):
    model = make_model(case).double()
    tokens = random_tokens(1, 6)
    word = random_tokens(1, 1, seed=1)
    cache = read(model, tokens)
    other = copy.deepcopy(cache)
    expected = go_on(model, cache, word)
    go_on(model, cache, word)
    assert_close(go_on(model, other, word), expected)


@every_recurrent_family
def test_offloaded_states_come_back(case):
    model = make_model(case).double()
    tokens = random_tokens(1, 6)
    word = random_tokens(1, 1, seed=1)
    cache = read(model, tokens)
    expected = go_on(model, read(model, tokens), word)
    for layer in cache.layers:
        layer.offload()
        assert all(state.device.type == "cpu" for state in layer.states.values())
        layer.prefetch()
    assert_close(go_on(model, cache, word), expected)


@every_recurrent_family
def test_size_does_not_grow_with_the_past(case):
    model = make_model(case, layer_types=["memory"] * 2)
    assert state_bytes(read(model, random_tokens(1, 5))) == state_bytes(
        read(model, random_tokens(1, 50))
    )


def recorded(model, tokens, lengths):
    """A cache that has read the tokens in pieces, recording after the first."""
    first, *more = tokens.split(lengths, dim=1)
    cache = read(model, first)
    cache.activate_past_recording()
    for part in more:
        go_on(model, cache, part)
    return cache


@every_case
def test_cropped_tokens_were_never_read(case):
    """The last pieces, and a part of a piece."""
    check_crop(case, [4, 1, 3, 5], 7)


@every_kind_of_cache
@pytest.mark.parametrize(
    ("lengths", "n"),
    [([4, 9], 3), ([4, 9], 9), ([4, 1, 3, 5], 0), ([4, 1, 3, 5], 3), ([4] + 9 * [1], 9)],
    ids=["a part", "all", "nothing", "a part of a piece", "all tokens one by one"],
)
def test_any_number_of_recorded_tokens_can_be_cropped(case, lengths, n):
    check_crop(case, lengths, n)


def check_crop(case, lengths, n):
    model = make_model(case).double()
    tokens = random_tokens(2, 13)
    word = random_tokens(2, 3, seed=1)
    cache = recorded(model, tokens, lengths)
    before = addresses(cache)
    cache.crop(-n)
    assert addresses(cache) == before
    assert cache.get_seq_length() == 13 - n
    expected = go_on(model, read(model, tokens[:, : 13 - n]), word)
    assert_close(go_on(model, cache, word), expected)
    cache.crop(-2)
    expected = go_on(model, read(model, torch.cat([tokens[:, : 13 - n], word[:, :1]], 1)), word)
    assert_close(go_on(model, cache, word), expected)


@every_case
def test_padded_tokens_are_cropped_too(case):
    model = make_model(case).double()
    tokens = random_tokens(2, 9)
    word = random_tokens(2, 1, seed=1)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        for cache, length in zip(caches, (9, 6)):
            cache.activate_past_recording()
            model(tokens[:, :3], attention_mask=mask[:, :3], past_key_values=cache)
            model(tokens[:, 3:length], attention_mask=mask[:, :length], past_key_values=cache)
        caches[0].crop(-3)
        results = [
            model(word, attention_mask=mask[:, :7], past_key_values=cache).logits
            for cache in caches
        ]
    assert_close(*results)


@every_recurrent_family
def test_a_token_of_padding_is_not_read(case):
    model = make_model(case, layer_types=["memory"] * 2)
    cache = read(model, random_tokens(2, 5))
    before = [x.clone() for layer in cache.layers for x in layer.states.values()]
    with torch.no_grad():
        model(
            random_tokens(2, 1),
            attention_mask=torch.tensor(2 * [5 * [1] + [0]]),
            past_key_values=cache,
        )
    assert all(
        torch.equal(x, y)
        for x, y in zip(before, (x for m in cache.layers for x in m.states.values()))
    )


@pytest.mark.parametrize("case", CONVOLVING, ids=[case.name for case in CONVOLVING])
@pytest.mark.parametrize("kernel_dim", [0, 3])
def test_a_right_padded_cache_goes_on_as_the_row_alone(case, kernel_dim):
    """What stands at padding is no token, with a convolution that keeps it away and without one."""
    model = make_model(
        case, **without_plain_attention(case), linear_conv_kernel_dim=kernel_dim
    ).double()
    tokens = random_tokens(2, 6)
    words = random_tokens(2, 2, seed=1)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 3:6] = 0
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens, attention_mask=mask[:, :6], past_key_values=cache)
        together = model(words, attention_mask=mask, past_key_values=cache).logits
    assert_close(together[1:], go_on(model, read(model, tokens[1:, :3]), words[1:]))


def test_a_reset_ends_the_recording():
    model = make_model(CASES[0])
    tokens = random_tokens(1, 9)
    cache = recorded(model, tokens, [4, 5])
    cache.reset()
    go_on(model, cache, tokens)
    with pytest.raises(RuntimeError, match="cannot undo 1 tokens: 0 were recorded"):
        cache.crop(-1)


def test_more_than_was_recorded_cannot_be_cropped():
    model = make_model(CASES[0])
    tokens = random_tokens(1, 9)
    cache = read(model, tokens)
    with pytest.raises(RuntimeError, match="cannot undo 1 tokens: 0 were recorded"):
        cache.crop(-1)
    cache = recorded(model, tokens, [4, 2, 3])
    with pytest.raises(RuntimeError, match="cannot undo 6 tokens: 5 were recorded"):
        cache.crop(-6)
    with pytest.raises(ValueError, match="must be negative"):
        cache.crop(2)
    cache.crop(-2)
    with pytest.raises(RuntimeError, match="cannot undo 4 tokens: 3 were recorded"):
        cache.crop(-4)


@every_kind_of_cache
@pytest.mark.parametrize("copied", ["recording", "cropped"])
def test_a_copied_recording_needs_no_model(case, copied):
    """Its rows move with it; whichever model comes next reads again what stays."""
    model = make_model(case).double()
    tokens = random_tokens(2, 9)
    word = random_tokens(2, 1, seed=1)
    cache = recorded(model, tokens, [4, 2, 3])
    if copied == "cropped":
        cache.crop(-4)
    other = copy.deepcopy(cache)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    other.reorder_cache(torch.tensor([1, 0, 0]))
    if copied == "recording":
        other.crop(-4)
    model = make_model(case).double()
    rows = [1, 0, 0]
    expected = go_on(model, read(model, tokens[rows, :5]), word[rows])
    assert_close(go_on(model, other, word[rows]), expected)


@every_recurrent_family
def test_everything_can_be_undone(case):
    model = make_model(case).double()
    tokens = random_tokens(1, 5)
    word = random_tokens(1, 2, seed=1)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    go_on(model, cache, tokens)
    cache.crop(-5)
    assert_close(go_on(model, cache, word), model(word).logits)


@every_recurrent_family
def test_the_recording_does_not_grow_beyond_its_window(case, monkeypatch):
    monkeypatch.setattr(MemoryLayer, "undoable_tokens", 4)
    model = make_model(case, layer_types=["memory"] * 2).double()
    tokens = random_tokens(1, 20)
    word = random_tokens(1, 1, seed=1)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    go_on(model, cache, tokens[:, :10])  # a prefill, of which the last four can be undone
    for x in cache.layers[0].recorded[0].inputs[0].values():
        assert x.untyped_storage().nbytes() == 4 * x[:, :1].nbytes
    for t in range(10, 20):
        go_on(model, cache, tokens[:, t : t + 1])
        assert 4 <= sum(stretch.length for stretch in cache.layers[0].recorded) < 8
    with pytest.raises(RuntimeError, match="6 were recorded"):
        copy.deepcopy(cache).crop(-7)
    cache.crop(-4)
    expected = go_on(model, read(model, tokens[:, :16]), word)
    assert_close(go_on(model, cache, word), expected)


@pytest.mark.parametrize("case", CASES_OF_CACHES, ids=lambda case: case.name)
def test_a_cache_of_another_kind_of_model_is_refused_before_it_changes(case):
    model = make_model(case)
    token = random_tokens(1, 1, seed=1)
    for other in CASES_OF_CACHES:
        if other is case:
            continue
        owner = make_model(other)
        cache = read(owner, random_tokens(1, 6))
        expected = go_on(owner, copy.deepcopy(cache), token)
        with pytest.raises(ValueError, match=r"cache must .* got .*"):
            go_on(model, cache, token)
        assert cache.get_seq_length() == 6
        assert torch.equal(go_on(owner, cache, token), expected)


def test_states_of_the_same_names_and_sizes_that_another_mixer_has_filled_are_refused():
    mine, other = (
        make_model(CASE[name], gate="vector", linear_conv_kernel_dim=3)
        for name in ("gla", "deltanet")
    )
    cache = read(other, random_tokens(1, 6))
    assert {*mine.config.state_specs[0]} == {*cache.layers[0].states}
    with pytest.raises(ValueError, match=r"of GatedLinearAttentionMixer .* of DeltaNetMixer"):
        go_on(mine, cache, random_tokens(1, 1))


@pytest.mark.parametrize(
    "options",
    [{"head_dim": 16}, {"num_attention_heads": 2}, {"num_hidden_layers": 3}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["memory", "full_attention"])
def test_a_cache_of_a_model_of_another_size_is_refused(kind, options):
    sizes = {"layer_types": [kind] * options.get("num_hidden_layers", 2)}
    owner = make_model(CASE["transformer"], **sizes, **options, num_key_value_heads=1)
    model = make_model(CASE["transformer"], layer_types=[kind] * 2)
    with pytest.raises(ValueError, match=r"cache must .* got .*"):
        go_on(model, read(owner, random_tokens(1, 6)), random_tokens(1, 1))


class OfAnotherLibrary(Cache):
    """A cache without transformers' layers."""

    def __init__(self):
        self.states = []


def of_other_layers():
    class Layer:
        is_initialized = True
        is_sliding = False

    return Cache(layers=[Layer(), Layer()])


@pytest.mark.parametrize(
    "make",
    [
        OfAnotherLibrary,
        of_other_layers,
        lambda: Cache(layers=[LinearAttentionLayer(), LinearAttentionLayer()]),
        lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()),
        lambda: Cache(layers=[]),
        lambda: "a cache",
        lambda: ((torch.zeros(1, 2, 3, 4),) * 2,) * 2,
    ],
    ids=["without layers", "other layers", "linear", "encoder-decoder", "none", "text", "tuples"],
)
@pytest.mark.parametrize("name", ["deltanet", "linear-full", "attention-sinks"])
def test_a_cache_of_another_library_is_refused(name, make):
    with pytest.raises(ValueError, match=r"cache must .* got "):
        go_on(make_model(CASE[name]), make(), random_tokens(1, 1))


def test_attention_of_transformers_refuses_a_memory():
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=8)).eval()
    cache = read(make_model(CASE["deltanet"]), random_tokens(1, 6))
    with pytest.raises(ValueError, match=r"cache must hold keys and values .* with a memory"):
        go_on(llama, cache, random_tokens(1, 1))


def test_a_layer_without_memory_is_refused():
    with pytest.raises(ValueError, match="cache must hold a memory at layer 0"):
        memory_layer(DynamicCache(), 0)


def test_caches_count_tokens_and_rows():
    cache = read(make_model(CASES[0]), random_tokens(3, 5))
    assert cache.get_seq_length() == 5
    assert cache.batch_size == 3
    assert cache.get_max_length() == -1
    assert cache.get_mask_sizes(2, 0) == (7, 0)
    assert cache.has_previous_state(0)


@every_case
def test_states_are_what_the_mixers_declare(case):
    model = make_model(case)
    cache = read(model, random_tokens(2, 9))
    for layer, spec in zip(cache.layers, model.config.state_specs):
        if isinstance(layer, MemoryLayer):
            shapes = {
                name: (2, *state.grown_shape(9), *state.shape) for name, state in spec.items()
            }
            assert {name: tuple(x.shape) for name, x in layer.states.items()} == shapes
            dtypes = {name: state.dtype or torch.float32 for name, state in spec.items()}
            assert {name: x.dtype for name, x in layer.states.items()} == dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.long], ids=str)
def test_a_state_that_a_mixer_does_not_declare_is_refused(dtype, monkeypatch):
    model = make_model(CASE["deltanet"])
    mixer = type(model.model.layers[0].mixer)
    usual = mixer.mix

    def mix(self, hidden_states, context):
        output, states = usual(self, hidden_states, context)
        return output, states | {"extra": torch.zeros(len(output), dtype=dtype)}

    monkeypatch.setattr(mixer, "mix", mix)
    with pytest.raises(ValueError, match=r"declared by state_spec \(.*memory.*\), got extra"):
        model(random_tokens(1, 3))


@every_case
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16, None], ids=str)
def test_states_have_the_dtypes_that_are_declared_whatever_computes_them(case, autocast):
    """Under autocast, and in a model of low precision."""
    model = make_model(case) if autocast else make_model(case).to(torch.bfloat16)
    cache = DynamicCache(config=model.config)
    tokens = random_tokens(2, 11)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        for part in tokens.split([7, 1, 2, 1], 1):
            go_on(model, cache, part)
    for layer, spec in zip(cache.layers, model.config.state_specs):
        if isinstance(layer, MemoryLayer):
            dtypes = {name: state.dtype or model.dtype for name, state in spec.items()}
            assert {name: x.dtype for name, x in layer.states.items()} == dtypes


@pytest.mark.parametrize(
    "case", [CASE["deltanet-window"], CASE["mamba3"]], ids=lambda case: case.name
)
@torch.no_grad()
def test_autocast_costs_no_more_after_many_tokens(case):
    """Sums over tokens would stop growing in bfloat16."""
    model = make_model(case, num_hidden_layers=1, **_of_first_layer(case))
    tokens = random_tokens(1, 1400)
    found = []
    for on in (False, True):
        cache = DynamicCache(config=model.config)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            parts = [go_on(model, cache, part) for part in tokens.split([100, 1200, *[1] * 100], 1)]
        found.append(torch.cat(parts, 1).float())
    lost = (found[1] - found[0]).norm(dim=-1) / found[0].norm(dim=-1)
    assert lost[:, -100:].mean() < 2 * lost[:, :100].mean()


def _of_first_layer(case):
    return {name: x[:1] for name, x in case.options.items() if isinstance(x, list)}


@every_case
def test_a_cache_holds_the_memory_that_its_states_declare(case):
    """After a prefill, and after a token; nothing holds the whole prefill."""
    model = make_model(case)
    cache = read(model, random_tokens(1, 20))
    assert state_bytes(cache) == cache_bytes(model.config, 20)
    go_on(model, cache, random_tokens(1, 1, seed=1))
    assert state_bytes(cache) == cache_bytes(model.config, 21)


@pytest.mark.parametrize(
    ("name", "most"), [("attention-kept", 9), ("deltaformer", 9), ("log-linear-gated-deltanet", 16)]
)
def test_a_static_cache_without_room_for_a_token_is_refused(name, most):
    model = make_model(CASE[name], max_position_embeddings=64)
    tokens = random_tokens(1, 24)
    cache = StaticCache(config=model.config, max_cache_len=8)
    for token in tokens[:, : most - 1].split(1, 1):
        model(token, past_key_values=cache)
    with pytest.raises(ValueError, match=f"cache must have room for all .*max_cache_len={most}.*8"):
        model(tokens[:, most - 1 : most], past_key_values=cache)
