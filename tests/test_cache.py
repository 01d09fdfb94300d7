"""What a MemoryLayer does inside transformers' caches."""

import copy

import pytest
import torch
from transformers import DynamicCache

from cases import CASES, every_case, every_family, make_model, random_tokens
from hf_memory.cache import MemoryLayer, memory_layer, state_bytes


def read(model, tokens):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    return cache


def next_logits(model, cache, tokens):
    with torch.no_grad():
        return model(tokens, past_key_values=cache).logits


def addresses(cache):
    return [x.data_ptr() for layer in cache.layers if isinstance(layer, MemoryLayer) for x in layer.states.values()]


@every_family
def test_states_keep_their_address(case):
    model, tokens = make_model(case), random_tokens(2, 6)
    cache = read(model, tokens[:, :3])
    before = addresses(cache)
    assert before
    for t in range(3, 6):
        next_logits(model, cache, tokens[:, t : t + 1])
    cache.reset()
    assert cache.get_seq_length() == 0
    next_logits(model, cache, tokens)
    assert addresses(cache) == before


@every_case
def test_reset_forgets_everything(case):
    model, tokens = make_model(case, layer_types=["memory"] * 2), random_tokens(1, 6)
    cache = read(model, random_tokens(1, 9, seed=1))
    cache.reset()
    torch.testing.assert_close(next_logits(model, cache, tokens), model(tokens).logits)


@every_case
@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ],
    ids=["reorder", "select", "repeat"],
)
def test_rows_move_with_their_past(case, change, rows):
    model, tokens, word = make_model(case), random_tokens(3, 6), random_tokens(1, 1, seed=1)
    cache = read(model, tokens)
    change(cache)
    moved = next_logits(model, cache, word.expand(len(rows), 1))
    expected = next_logits(model, read(model, tokens[rows]), word.expand(len(rows), 1))
    torch.testing.assert_close(moved, expected)
    assert cache.layers[0].get_seq_length() == 7


@every_case
def test_a_copied_cache_leads_its_own_life(case):
    model, tokens, word = make_model(case), random_tokens(1, 6), random_tokens(1, 1, seed=1)
    cache = read(model, tokens)
    other = copy.deepcopy(cache)
    expected = next_logits(model, cache, word)
    next_logits(model, cache, word)
    torch.testing.assert_close(next_logits(model, other, word), expected)


@every_family
def test_offloaded_states_come_back(case):
    model, tokens, word = make_model(case), random_tokens(1, 6), random_tokens(1, 1, seed=1)
    cache, expected = read(model, tokens), next_logits(model, read(model, tokens), word)
    for layer in cache.layers:
        layer.offload()
        assert all(state.device.type == "cpu" for state in layer.states.values())
        layer.prefetch()
    torch.testing.assert_close(next_logits(model, cache, word), expected)


@every_family
def test_size_does_not_grow_with_the_past(case):
    model = make_model(case, layer_types=["memory"] * 2)
    assert state_bytes(read(model, random_tokens(1, 5))) == state_bytes(read(model, random_tokens(1, 50)))


def test_crop_is_refused():
    cache = read(make_model(CASES[0]), random_tokens(1, 5))
    with pytest.raises(RuntimeError, match="cannot be cropped"):
        cache.crop(-1)
    with pytest.raises(RuntimeError, match="cannot be cropped"):
        cache.activate_past_recording()


def test_keys_and_values_are_refused():
    with pytest.raises(RuntimeError, match="no keys and values"):
        MemoryLayer().update(torch.zeros(1), torch.zeros(1))


def test_a_layer_without_memory_is_refused():
    with pytest.raises(ValueError, match="past_key_values"):
        memory_layer(DynamicCache(), 0)


def test_caches_count_tokens_and_rows():
    cache = read(make_model(CASES[0]), random_tokens(3, 5))
    assert cache.get_seq_length() == 5
    assert cache.batch_size == 3
    assert cache.get_max_length() == -1
    assert cache.get_mask_sizes(2, 0) == (7, 0)
    assert cache.has_previous_state(0)
