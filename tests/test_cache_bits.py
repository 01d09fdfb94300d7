"""Keys and values of a cache in few bits. Contracts of caches run over the cases with bits among all others."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
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
    "attention-kept-by-head": {},
    "titans-mag": {},
    "titans-mac": {},
    "mosaic-full": {},
    "transformer-memorizing": {"past": ["memorizing", "xl"]},
    "deltaformer": {},
    "deltaformer-full-norope": {},
    "deltaformer-window": {},
}
KINDS = {  # where a number is refused, since some keep all bits
    "deltaformer": ["memory"],
    "deltaformer-full-norope": ["memory", "attention"],
    "deltaformer-window": ["memory"],
}


def bits_of(name, bits):
    """The same bits of all keys and values of a case that can have them."""
    return dict.fromkeys(KINDS[name], bits) if name in KINDS else bits


every_store = pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in NAMES),
        *((name, {**x, "cache_bits": bits_of(name, 8)}) for name, x in STORES.items()),
    ],
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
        model = make_model(CASE[name], **{**options, "cache_bits": bits_of(name, bits)}).double()
        errors[bits] = (model(tokens).logits - exact).norm() / exact.norm()
    assert 0 < errors[8] < 0.03
    assert errors[8] < errors[4] < 0.3


@pytest.mark.parametrize(("bits", "expected"), [(8, 66), (4, 40), (None, 128)])
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
def test_a_cache_goes_on_in_the_bits_in_which_it_began(name):
    """Whatever the config says later; other bits are refused."""
    model = make_model(CASE[name])
    tokens = random_tokens(1, 12)
    expected = go_on(model, read(model, tokens[:, :9]), tokens[:, 9:])
    how = {"max_new_tokens": 1, "do_sample": False}
    for other in (None, 8, 4):
        model.config.cache_bits = make_config(CASE[name]).cache_bits
        cache = read(model, tokens[:, :9])
        model.config.cache_bits = other
        if state_bytes(read(model, tokens[:, :9])) != state_bytes(cache):
            with pytest.raises(
                ValueError, match="cache_bits must be those of the cache, which goes on"
            ):
                model.generate(tokens, past_key_values=cache, cache_bits=other, **how)
        assert torch.equal(go_on(model, cache, tokens[:, 9:]), expected)


@pytest.mark.parametrize(
    ("bits", "named"),
    [
        (0, r"cache_bits must be one of \(8, 4\) or None, or a dict of bits by kind, got 0"),
        (16, r"cache_bits must be one of \(8, 4\) or None, or a dict of bits by kind, got 16"),
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
        ("deltanet", "None, or a dict with some of ['recurrent_states'], since no layer has keys"),
        ("transformer-forget", "None since no layer has keys and values of tokens"),
        (
            "transformer-infinite",
            "None or a dict of bits by kind, since keys or values of layers [1]",
        ),
        ("deltaformer", "None or a dict of bits by kind, since keys or values of layers [0, 1]"),
    ],
)
def test_a_number_of_bits_that_not_all_keys_and_values_can_have_is_refused(name, expected):
    refusal = f"cache_bits must be {re.escape(expected)}.*, got 8"
    with pytest.raises(ValueError, match=refusal):
        make_model(CASE[name], cache_bits=8)
    model = make_model(CASE[name])
    with pytest.raises(ValueError, match=refusal):
        model.config.cache_bits = 8
    with pytest.raises(ValueError, match=refusal):
        model.generate(random_tokens(1, 4), cache_bits=8)
    assert model.config.cache_bits is None


@pytest.mark.parametrize(
    "bits",
    [
        *(16, 3, 0, -8, True, 8.0, "8", [8]),
        *({"window": 2}, {"windows": 8}, {"recurrent_states": 4}),
        *({"window": {"keys": 2}}, {"window": {"key": 8}}, {"window": {"values": None}}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["attention-heads", "transformer", "deltanet", "titans-mac"])
def test_bits_that_no_state_can_have_are_refused_wherever_they_are_said(name, bits):
    model = make_model(CASE[name])
    tokens = random_tokens(1, 9)
    expected = model(tokens).logits
    before = model.config.to_dict()
    with pytest.raises(ValueError, match="cache_bits"):
        make_config(CASE[name], cache_bits=bits)
    with pytest.raises(ValueError, match="cache_bits"):
        model.config.cache_bits = bits
    with pytest.raises(ValueError, match="cache_bits"):
        model.generate(tokens, cache_bits=bits)
    assert model.config.to_dict() == before
    assert torch.equal(model(tokens).logits, expected)


def test_bits_of_the_keys_and_values_that_can_have_them_are_taken():
    bits = {"memory": 8}
    model = make_model(CASE["transformer-infinite"], cache_bits=bits)
    assert {state.bits for spec in model.config.state_specs for state in spec.values()} == {8, None}


def test_bits_that_are_changed_in_place_are_those_of_new_caches():
    model = make_model(CASE["attention-kept"], cache_bits={"window": 8})
    tokens = random_tokens(1, 9)
    read(model, tokens)
    model.config.cache_bits["window"] = 4
    model.config.cache_bits["full_attention_heads"] = 4
    bits = {"window": 4, "full_attention_heads": 4}
    expected = make_model(CASE["attention-kept"], cache_bits=bits)
    cache = read(model, tokens)
    assert torch.equal(model(tokens).logits, expected(tokens).logits)
    assert state_bytes(cache) == state_bytes(read(expected, tokens))
    assert state_bytes(cache) == cache_bytes(model.config, 9)
    model.config.cache_bits["window"] = 2
    with pytest.raises(ValueError, match=r"cache_bits of 'window'.* must be one of"):
        read(model, tokens)


@pytest.mark.parametrize("parts", [{"keys": 8, "values": 4}, {"keys": 4}, {"values": 8}], ids=str)
@every_store
@torch.no_grad()
def test_keys_and_values_can_have_bits_of_their_own(name, options, parts, tmp_path):
    bits = {
        kind: parts
        for kind in make_config(CASE[name], **options).kinds_in_bits
        if kind != "recurrent_states"
    }
    if name in KINDS:  # a DeltaFormer packs its keys alone
        bits["memory"] = {part: x for part, x in parts.items() if part == "keys"}
    model = make_model(CASE[name], **{**options, "cache_bits": bits}).double()
    tokens = random_tokens(2, 14)
    whole = model(tokens).logits
    exact = make_model(CASE[name], **{**options, "cache_bits": None}).double()
    error = (whole - exact(tokens).logits).norm()
    assert (error > 0) == any(bits.values())
    assert error < 0.3 * whole.norm()
    for lengths in ([5, 4, 5], [1] * 14):
        cache = DynamicCache(config=model.config)
        found = torch.cat([go_on(model, cache, x) for x in tokens.split(lengths, 1)], 1)
        assert_close(found, whole)
    cache = read(model.float(), tokens)
    assert state_bytes(cache) == 2 * cache_bytes(model.config, 14)  # of two rows
    save_memory(cache, tmp_path / "memory", model)
    loaded = load_memory(tmp_path / "memory", make_model(CASE[name], **options))
    words = random_tokens(2, 3, seed=1)
    assert torch.equal(go_on(model, loaded, words), go_on(model, cache, words))


@pytest.mark.parametrize(
    ("name", "bits"), [("attention-kept", 4), ("deltanet", {"recurrent_states": 16})]
)
def test_generate_takes_the_bits_of_its_cache(name, bits):
    how = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 3}
    tokens = random_tokens(1, 9)
    model = make_model(CASE[name])
    before = model.generate(tokens, **how)
    in_file = GenerationConfig(cache_bits=bits, **how)
    expected = make_model(CASE[name], cache_bits=bits).generate(tokens, **how)
    for call in ({"cache_bits": bits, **how}, {"generation_config": in_file}):
        found = model.generate(tokens, **call)
        assert all(map(torch.equal, found.logits, expected.logits))
        assert state_bytes(cache_of(found)) == state_bytes(cache_of(expected))
    # the call's own word counts
    found = model.generate(tokens, generation_config=in_file, cache_bits=None)
    assert all(map(torch.equal, found.logits, before.logits))
    assert all(map(torch.equal, model.generate(tokens, **how).logits, before.logits))
    for call in ({"cache_bits": 3}, {"generation_config": GenerationConfig(cache_bits=3)}):
        with pytest.raises(ValueError, match="cache_bits must be one of"):
            model.generate(tokens, **call)
    assert model.config.cache_bits is None


@pytest.mark.parametrize("option", [{"cache_bits": 4}, {"cache_bits": None}, {"sliding_window": 3}])
def test_a_forward_pass_takes_no_options_of_the_config(option):
    model = make_model(CASE["attention-kept"])
    name = next(iter(option))
    for call in (model, model.model):
        with pytest.raises(ValueError, match=f"{name} must be an option of the config, as from_p"):
            call(random_tokens(1, 9), **option)


@pytest.mark.parametrize("name", ["attention-kept", "transformer", "linear-sliding"])
def test_the_cache_of_a_call_of_generate_goes_on_without_a_word_of_its_bits(name):
    bits = {"attention": 8} if name == "linear-sliding" else 8
    how = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 3}
    found = []
    for model, more in (
        (make_model(CASE[name]), {"cache_bits": bits}),
        (make_model(CASE[name], cache_bits=bits), {}),
    ):
        first = model.generate(random_tokens(1, 9), **how, **more)
        second = model.generate(first.sequences, past_key_values=cache_of(first), **how)
        logits = go_on(model, cache_of(second), random_tokens(1, 2))
        held = torch.tensor(state_bytes(cache_of(second)))
        found.append([*first.logits, *second.logits, logits, held])
    assert all(map(torch.equal, *found))


def test_threads_generate_in_bits_of_their_own():
    model = make_model(CASE["attention-kept"])
    tokens = random_tokens(1, 20)

    def logits(bits):
        how = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 4}
        return torch.stack(model.generate(tokens, cache_bits=bits, **how).logits)

    bits = [8, 4, None, 8]
    alone = {x: logits(x) for x in {*bits}}
    with ThreadPoolExecutor(len(bits)) as threads:
        found = [*threads.map(logits, 4 * bits)]
    assert all(torch.equal(x, alone[n]) for x, n in zip(found, 4 * bits))
    assert model.config.cache_bits is None


@pytest.mark.parametrize("grad", [False, True])
@every_store
def test_a_static_cache_reads_as_none(name, options, grad):
    """Also with gradients, and with keys and values of tokens that were read in an earlier call."""
    model = make_model(CASE[name], **options).double()
    tokens = random_tokens(2, 14)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.set_grad_enabled(grad):
        expected = model(tokens, use_cache=False).logits
        found = [model(x, past_key_values=cache).logits for x in tokens.split([9, 1, 4], 1)]
    assert_close(torch.cat(found, 1), expected)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("bits", [8, 4])
@every_store
def test_static_caches_in_bits_give_the_tokens_of_growing_ones(name, options, bits, chunk):
    """Also where a prompt is read in chunks, before which transformers makes the tensors of a static cache."""
    model = make_model(CASE[name], **{**options, "cache_bits": None})
    how = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 4}
    how |= {"cache_bits": bits_of(name, bits), "eos_token_id": None, "do_sample": False}
    tokens = random_tokens(2, 9)
    expected = model.generate(tokens, **how)
    static = {"cache_implementation": "static", "disable_compile": True}
    found = model.generate(tokens, prefill_chunk_size=chunk, **static, **how)
    assert torch.equal(found.sequences, expected.sequences)


def test_chunks_of_a_training_text_have_all_bits():
    """Their gradients flow through the states, which few bits do not pass."""
    tokens = random_tokens(2, 14)
    gradients = []
    for bits, length in ((None, None), (8, 4)):
        model = make_model(CASE["attention-kept-bits"], cache_bits=bits).double()
        model(tokens, chunk_length=length, use_cache=False).logits.square().mean().backward()
        gradients.append([x.grad for x in model.parameters()])
    assert_close(*gradients)


@every_store
def test_gradients_are_nearly_those_without_rounding(name, options):
    """Training sees rounded keys and values, and their gradients are those of the numbers that are rounded."""
    tokens = random_tokens(2, 14)
    gradients = {}
    for bits in (None, 8):
        model = make_model(CASE[name], **{**options, "cache_bits": bits and bits_of(name, bits)})
        model.double()(tokens, labels=tokens).loss.backward()
        gradients[bits] = torch.cat([x.grad.flatten() for x in model.parameters()])
    assert (gradients[8] - gradients[None]).norm() < 0.2 * gradients[None].norm()


@pytest.mark.parametrize("name", KINDS)
def test_a_deltaformer_packs_its_keys_alone(name):
    """Later u are computed from earlier ones, so that rounded ones would depend on how a text is divided."""
    model = make_model(CASE[name], cache_bits={"memory": 4})
    cache = read(model, random_tokens(2, 14))
    states = [
        x.states for x, kind in zip(cache.layers, model.config.layer_types) if "memory" in kind
    ]
    assert {x["keys"].dtype for x in states} == {torch.uint8}
    assert {x["values"].dtype for x in states} == {torch.float32}
    assert state_bytes(cache) == 2 * cache_bytes(model.config, 14)  # of two rows


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


def test_bits_of_values_are_refused_where_keys_alone_can_have_few():
    make_config(CASE["deltaformer"], cache_bits={"memory": {"keys": 8}})
    with pytest.raises(ValueError, match="cache_bits of 'memory' must have no bits of values"):
        make_config(CASE["deltaformer"], cache_bits={"memory": {"keys": 8, "values": 8}})


def test_bits_of_matrices_are_named_and_refused_where_there_are_none():
    with pytest.raises(
        ValueError, match=r"cache_bits of 'recurrent_states' must be one of \(16, 8\)"
    ):
        make_config(CASE["gla"], cache_bits={"recurrent_states": 4})
    with pytest.raises(ValueError, match=r"a dict with some of \['memory'\]"):
        make_config(CASE["deltaformer"], cache_bits={"recurrent_states": 8})
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


def test_guidance_has_the_bits_of_a_call():
    how = {"max_new_tokens": 2, "guidance_scale": 2.0, "return_dict_in_generate": True}
    how["output_scores"] = True
    how["negative_prompt_ids"] = random_tokens(1, 6)
    tokens = random_tokens(1, 9)
    model = make_model(CASE["attention-kept"])
    expected = make_model(CASE["attention-kept"], cache_bits=4).generate(tokens, **how)
    for bits in ({"cache_bits": 4}, {"generation_config": GenerationConfig(cache_bits=4)}):
        found = model.generate(tokens, **bits, **how)
        assert all(map(torch.equal, found.scores, expected.scores))
    assert not torch.equal(model.generate(tokens, **how).scores[0], expected.scores[0])
