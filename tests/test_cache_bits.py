"""Keys and values of a cache in few bits. Contracts of caches run over the cases with bits among all others."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

from cases import CASE, CASES, SIZES, go_on, make_config, make_model, random_tokens, read
from comparing import assert_close
from hf_memory import load_memory, save_memory
from hf_memory.cache import state_bytes
from hf_memory.cache_argument import cache_of
from hf_memory.conversion import Recipe, convert
from hf_memory.conversion.recipe import Schedule
from hf_memory.evaluation import cache_bytes

NAMES = [name for name in CASE if name.endswith("-bits")]
every_case_with_bits = pytest.mark.parametrize("name", NAMES)
STORES = {  # other mixers that hold keys and values in bits, and bits of other parts, with options of a case
    "attention-kept": {},
    "titans-mag": {},
    "titans-mac": {},
    "mosaic-full": {},
    "transformer-memorizing": {"past": ["memorizing", "xl"]},
}
every_store = pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in NAMES), *((n, {**x, "cache_bits": 8}) for n, x in STORES.items())],
    ids=[*NAMES, *STORES],
)


@every_store
@torch.no_grad()
def test_a_text_is_the_same_however_it_is_divided(name, options):
    """Queries see the numbers that the cache holds, also without a cache, and in the call that reads a token."""
    model = make_model(CASE[name], **options).double()
    tokens = random_tokens(2, 14)
    expected = model(tokens).logits
    for lengths in ([14], [5, 4, 5], [1] * 14):
        cache = DynamicCache(config=model.config)
        assert_close(
            torch.cat([go_on(model, cache, x) for x in tokens.split(lengths, 1)], 1), expected
        )


@every_store
@torch.no_grad()
def test_few_bits_change_logits_a_little(name, options):
    tokens = random_tokens(2, 14)
    exact = make_model(CASE[name], **{**options, "cache_bits": None}).double()(tokens).logits
    errors = {}
    for bits in (8, 4):
        model = make_model(CASE[name], **{**options, "cache_bits": bits}).double()
        errors[bits] = (model(tokens).logits - exact).norm() / exact.norm()
    assert 0 < errors[8] < 0.02
    assert errors[8] < errors[4] < 0.3


@pytest.mark.parametrize(("bits", "expected"), [(8, 72), (4, 40), (None, 128)])
def test_a_cache_holds_as_many_bytes_as_its_bits_say(bits, expected):
    """A key of 64 channels, of a model in bfloat16."""
    model = make_model(
        CASE["transformer"],
        layer_types=["full_attention"] * 2,
        hidden_size=256,
        cache_bits=bits,
    ).to(torch.bfloat16)
    cache = read(model, random_tokens(1, 20))
    assert state_bytes(cache) == 2 * 2 * 2 * 20 * expected  # keys and values, layers, heads, tokens


@every_case_with_bits
def test_bits_of_a_loaded_model_can_be_chosen(name, tmp_path):
    make_model(CASE[name]).save_pretrained(tmp_path)
    tokens = random_tokens(1, 9)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.config.cache_bits == make_config(CASE[name]).cache_bits
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, cache_bits=None)
    expected = make_model(CASE[name], cache_bits=None)
    assert torch.equal(exact(tokens).logits, expected(tokens).logits)
    saved.config.cache_bits = None
    assert torch.equal(saved(tokens).logits, expected(tokens).logits)
    assert state_bytes(read(saved, tokens)) == cache_bytes(saved.config, 9)
    saved.config.cache_bits = 4
    assert state_bytes(read(saved, tokens)) == cache_bytes(saved.config, 9)


@every_case_with_bits
def test_a_cache_in_other_bits_is_refused(name):
    model = make_model(CASE[name])
    cache = read(model, random_tokens(1, 9))
    for other in (None, 8, 4):
        model.config.cache_bits = other
        if state_bytes(read(model, random_tokens(1, 9))) == state_bytes(cache):
            continue
        with pytest.raises(ValueError, match="as cache_bits of the config says, got"):
            go_on(model, cache, random_tokens(1, 1))


@pytest.mark.parametrize(
    ("bits", "named"),
    [
        (16, r"cache_bits must be one of \(8, 4\), or None"),
        ({"window": 2}, "cache_bits of 'window' must be one of"),
        ({"attention": 8}, r"a dict with some of \['window', 'full_attention_heads'\]"),
    ],
)
def test_bits_that_no_state_can_have_are_refused(bits, named):
    with pytest.raises(ValueError, match=named):
        make_config(CASE["attention-kept-bits"], cache_bits=bits)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transformer-forget", r"None since keys and values of layers \[0, 1\] have all bits"),
        (
            "transformer-infinite",
            r"None, or a dict with some of \['memory'\], since .* layers \[\d",
        ),
    ],
)
def test_a_number_of_bits_that_not_all_keys_and_values_can_have_is_refused(name, expected):
    with pytest.raises(ValueError, match=rf"cache_bits must be {expected}.*, got 8"):
        make_model(CASE[name], cache_bits=8)
    model = make_model(CASE[name])
    model.config.cache_bits = 8
    with pytest.raises(ValueError, match="cache_bits must be None"):
        read(model, random_tokens(1, 4))


def test_bits_of_the_keys_and_values_that_can_have_them_are_taken():
    bits = {"memory": 8}
    model = make_model(CASE["transformer-infinite"], cache_bits=bits)
    assert {state.bits for spec in model.config.state_specs for state in spec.values()} == {8, None}


@pytest.mark.parametrize(
    ("name", "bits"), [("attention-kept", 4), ("deltanet", {"recurrent_states": 16})]
)
def test_generate_takes_the_bits_of_its_cache(name, bits):
    how = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 3}
    tokens = random_tokens(1, 9)
    model = make_model(CASE[name])
    before = model.generate(tokens, **how)
    found = model.generate(tokens, cache_bits=bits, **how)
    expected = make_model(CASE[name], cache_bits=bits).generate(tokens, **how)
    assert all(map(torch.equal, found.logits, expected.logits))
    assert state_bytes(cache_of(found)) == state_bytes(cache_of(expected))
    assert all(map(torch.equal, model.generate(tokens, **how).logits, before.logits))
    with pytest.raises(ValueError, match="cache_bits"):
        model.generate(tokens, cache_bits=3)
    assert model.config.cache_bits is None


def test_chunks_of_a_training_text_are_refused_since_bits_have_no_gradients():
    model = make_model(CASE["attention-kept-bits"])
    with pytest.raises(ValueError, match="chunk_length must be None with cache_bits="):
        model.model(random_tokens(1, 8), chunk_length=4)


@every_store
def test_gradients_are_nearly_those_without_rounding(name, options):
    """Training sees rounded keys and values, and their gradients are those of the numbers that are rounded."""
    tokens = random_tokens(2, 14)
    gradients = {}
    for bits in (None, 8):
        model = make_model(CASE[name], **{**options, "cache_bits": bits}).double()
        model(tokens, labels=tokens).loss.backward()
        gradients[bits] = torch.cat([x.grad.flatten() for x in model.parameters()])
    assert (gradients[8] - gradients[None]).norm() < 0.2 * gradients[None].norm()


DELTAFORMERS = ["deltaformer", "deltaformer-full-norope", "deltaformer-window"]


@pytest.mark.parametrize("name", DELTAFORMERS)
@torch.no_grad()
def test_what_a_deltaformer_writes_depends_on_calls_by_less_than_rounding_changes(name):
    tokens = random_tokens(2, 14)
    exact = make_model(CASE[name]).double()(tokens).logits
    model = make_model(CASE[name], cache_bits=8).double()
    whole = model(tokens).logits
    assert 0 < (whole - exact).norm() < 0.02 * exact.norm()
    for lengths in ([14], [5, 4, 5], [1] * 14):
        cache = DynamicCache(config=model.config)
        found = torch.cat([go_on(model, cache, x) for x in tokens.split(lengths, 1)], 1)
        assert (found - whole).norm() < 2 * (whole - exact).norm()
    assert state_bytes(cache) == 2 * cache_bytes(model.config, 14)  # of two rows


@pytest.mark.parametrize("name", DELTAFORMERS)
def test_a_deltaformer_learns_with_rounding(name):
    tokens = random_tokens(2, 14)
    gradients = []
    for bits in (None, 8):
        model = make_model(CASE[name], cache_bits=bits).double()
        model(tokens, labels=tokens).loss.backward()
        gradients.append(torch.cat([x.grad.flatten() for x in model.parameters()]))
    assert (gradients[1] - gradients[0]).norm() < 0.2 * gradients[0].norm()


def test_a_student_has_bits_of_heads_that_a_conversion_chooses():
    torch.manual_seed(0)
    teacher = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    bits = {"full_attention_heads": 4, "window": 8}
    options = {"cache_bits": bits, "sliding_window": 8, "num_kept_tokens": 8, "kept_block_size": 8}
    schedule = Schedule(2, 1e-3, batch_size=1, length=64)
    recipe = Recipe(keep="heads:1/4", options=options, distillation=schedule)
    student = convert(teacher, torch.randint(2, 64, (2000,)), recipe).student
    specs = student.config.state_specs
    assert any(student.config.full_attention_heads)
    assert {x.bits for spec in specs for name, x in spec.items() if name == "full_keys"} == {4}
    assert {x.bits for spec in specs for name, x in spec.items() if name == "keys"} == {8}


# A matrix, one of each level, weights that learn in chunks, slots, and windows beside them.
RECURRENT = [
    "linear-elu",
    "deltanet",
    "rwkv7",
    "log-linear-mamba2",
    "mesa",
    "titans-mac",
    "deltanet-window",
]
every_recurrent_case = pytest.mark.parametrize("name", RECURRENT)


@every_recurrent_case
@pytest.mark.parametrize("bits", [16, 8])
@torch.no_grad()
def test_matrices_are_rounded_once_at_the_end_of_a_call(name, bits):
    tokens = random_tokens(2, 14)
    exact = make_model(CASE[name]).double()(tokens).logits
    model = make_model(CASE[name], cache_bits={"recurrent_states": bits}).double()
    cache = DynamicCache(config=model.config)
    assert_close(go_on(model, cache, tokens[:, :9]), exact[:, :9])
    error = (go_on(model, cache, tokens[:, 9:]) - exact[:, 9:]).norm()
    assert 0 < error < 0.05 * exact[:, 9:].norm()
    cache = read(model.float(), tokens)
    assert state_bytes(cache) == 2 * cache_bytes(model.config, 14)  # of two rows


@every_recurrent_case
@torch.no_grad()
def test_caches_with_rounded_matrices_are_moved_and_undone_like_others(name):
    model = make_model(CASE[name], cache_bits={"recurrent_states": 8}).double()
    tokens = random_tokens(2, 14)
    expected = go_on(model, read(model, tokens[:, :9]), tokens[:, 9:10])
    cache = read(model, tokens[:, :9])
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.activate_past_recording()
    go_on(model, cache, tokens[:, 10:].flip(0))
    cache.crop(-4)
    assert_close(go_on(model, cache, tokens[:, 9:10].flip(0)).flip(0), expected)
    static = StaticCache(config=model.config, max_cache_len=16)
    go_on(model, static, tokens[:, :9])
    assert_close(go_on(model, static, tokens[:, 9:10]), expected)


@pytest.mark.parametrize("bits", [16, 8])
def test_rounded_matrices_are_saved_as_they_are(bits, tmp_path):
    model = make_model(CASE["titans-mac"], cache_bits={"recurrent_states": bits, "window": 8})
    cache = read(model, random_tokens(2, 9))
    save_memory(cache, tmp_path / "memory", model)
    for layer, loaded in zip(cache.layers, load_memory(tmp_path / "memory", model).layers):
        assert all(torch.equal(x, loaded.states[name]) for name, x in layer.states.items())


def test_bits_of_matrices_are_named_and_refused_where_there_are_none():
    bits = {"recurrent_states": 4}
    with pytest.raises(
        ValueError, match=r"cache_bits of 'recurrent_states' must be one of \(16, 8\)"
    ):
        make_config(CASE["gla"], cache_bits=bits)
    with pytest.raises(ValueError, match=r"a dict with some of \['memory'\]"):
        make_config(CASE["deltaformer"], cache_bits=bits)
    for case in CASES:
        config = make_config(case)
        states = [state for spec in config.state_specs for state in spec.values()]
        is_named = "recurrent_states" in config.kinds_in_bits
        assert is_named == any(state.is_recurrent for state in states), case.name


def test_a_number_of_bits_leaves_matrices_as_they_are():
    """Which lose more than keys and values do."""
    config = make_config(CASE["titans-mag"], cache_bits=8)
    spec = config.state_specs[0]
    assert spec["attention.keys"].bits == 8
    assert spec["memory.weights"].bits is None
