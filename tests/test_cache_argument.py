"""A cache is read by both names that transformers has given the argument, and by no other."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from cases import (
    CASES,
    every_family,
    every_kind_of_layer,
    family_of,
    generate,
    make_config,
    make_model,
    random_tokens,
)
from comparing import assert_close
from hf_memory.cache_argument import CACHE, NAMES, cache_name, cache_of, named_cache

both_names = pytest.mark.parametrize("name", NAMES)
ENTRIES = (
    "language model",
    "model without head",
    "sequence classification",
    "token classification",
    "generate",
    "prepare_inputs_for_generation",
    "mixer",
)
OTHERS = ("past_key_value", "cache_params", "kv_cache", "layer_past", "state", "mems", "memory")


def call(entry: str, **given):
    """Give arguments to what takes a cache: a model, a part of it, or a function of it."""
    model = make_model(CASES[0])
    tokens = random_tokens(1, 3)
    hidden = torch.zeros(1, 1, model.config.hidden_size)
    mixer = model.model.layers[0].mixer
    angles = model.model.angles(hidden, torch.zeros(1, 1, dtype=torch.long))["position_embeddings"]
    runs = (
        lambda: model(tokens, **given),
        lambda: model.model(tokens, **given),
        lambda: classifier(CASES[0], "sequence_classifier")(tokens, **given),
        lambda: classifier(CASES[0], "token_classifier")(tokens, **given),
        lambda: generate(model, tokens, **given),
        lambda: model.prepare_inputs_for_generation(tokens, **given),
        lambda: mixer(hidden, angles, **given),
    )
    return dict(zip(ENTRIES, runs, strict=True))[entry]()


def classifier(case, part: str):
    """A small classifier of two classes."""
    torch.manual_seed(0)
    return getattr(family_of(case), part)(make_config(case, num_labels=2)).double().eval()


@every_kind_of_layer
@both_names
def test_decoding_with_a_cache_of_either_name_changes_no_token(case, name):
    model = make_model(case).double()
    tokens = random_tokens(2, 5)
    expected = generate(model, tokens, use_cache=False)
    cache = DynamicCache(config=model.config)
    assert torch.equal(generate(model, tokens, **{name: cache}), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1


@every_family
@both_names
def test_parts_of_a_text_after_a_cache_of_either_name_equal_the_whole_text(case, name):
    model = make_model(case).double()
    tokens = random_tokens(2, 7)
    given = {name: DynamicCache(config=model.config)}
    parts = [model(part, **given).logits for part in tokens.split((4, 1, 2), dim=1)]
    assert_close(torch.cat(parts, 1), model(tokens).logits)


@every_family
@both_names
@torch.no_grad()
def test_a_classifier_reads_a_cache_of_either_name(case, name):
    model = classifier(case, "token_classifier")
    tokens = random_tokens(2, 7)
    given = {name: DynamicCache(config=model.config)}
    parts = [model(part, **given).logits for part in tokens.split((4, 3), dim=1)]
    assert_close(torch.cat(parts, 1), model(tokens).logits)


@both_names
def test_inputs_of_generation_have_the_cache_of_either_name(name):
    model = make_model(CASES[0])
    cache = DynamicCache(config=model.config)
    inputs = model.prepare_inputs_for_generation(random_tokens(1, 3), **{name: cache})
    assert inputs[CACHE] is cache


@both_names
def test_recomputed_layers_write_to_no_cache(name):
    model = make_model(CASES[0])
    tokens = random_tokens(2, 5)
    model.train()
    model.activation_checkpointing_enable()
    cache = DynamicCache(config=model.config)
    model(tokens, labels=tokens, **{name: cache}).loss.backward()
    assert cache.get_seq_length() == 0


def test_a_cache_may_be_given_by_both_names_if_it_is_the_same():
    cache = DynamicCache()
    assert named_cache({"cache": cache, "past_key_values": cache}, "past_key_values") == {
        "past_key_values": cache
    }
    assert named_cache({"cache": None, "past_key_values": cache, "use_cache": True}) == {
        "use_cache": True,
        "cache": cache,
    }
    assert named_cache({"cache": None, "past_key_value": None}) == {"past_key_value": None}


@pytest.mark.parametrize("entry", ENTRIES)
def test_two_different_caches_are_refused(entry):
    with pytest.raises(ValueError, match="got a different cache for each"):
        call(entry, cache=DynamicCache(), past_key_values=DynamicCache())


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_cache_of_another_name_is_refused(entry, name):
    with pytest.raises(
        ValueError, match=f"must be given as cache or past_key_values, got DynamicCache as {name}"
    ):
        call(entry, **{name: DynamicCache()})


@pytest.mark.parametrize("name", OTHERS[:-1])
def test_keys_and_values_of_another_name_are_refused(name):
    with pytest.raises(ValueError, match=f"got tuple as {name}"):
        make_model(CASES[0])(random_tokens(1, 3), **{name: ((torch.zeros(1), torch.zeros(1)),)})


@both_names
def test_what_is_no_cache_is_refused(name):
    with pytest.raises(ValueError, match=r"cache must be made by DynamicCache.* got tuple"):
        make_model(CASES[0])(random_tokens(1, 3), **{name: ((torch.zeros(1), torch.zeros(1)),)})


def test_other_arguments_are_passed_on():
    other = {
        "use_cache": True,
        "cache_position": torch.arange(3),
        "cache_implementation": "static",
        "labels": None,
    }
    assert named_cache(other) == other


def test_a_cache_is_found_in_the_arguments_and_in_the_output_of_any_model(teacher):
    for model in (make_model(CASES[0]), AutoModelForCausalLM.from_pretrained(teacher)):
        cache = DynamicCache(config=model.config)
        assert cache_of(model(random_tokens(1, 3) % 16, **{cache_name(model): cache})) is cache
        assert cache.get_seq_length() == 3
