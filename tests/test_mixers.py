"""What a mixer with a memory keeps by itself: its output and states are a function of the tokens, not of padding."""

import pytest
import torch
from transformers import DynamicCache

from cases import CASE, every_case, make_model
from comparing import assert_close
from hf_memory.mixers.base import MemoryMixer

T = 11


def memories(case):
    model = make_model(case).double()
    return model, [
        layer.mixer for layer in model.model.layers if isinstance(layer.mixer, MemoryMixer)
    ]


def read(case, *parts, rows=slice(None), mask=None, x=None):
    """Output and states of a case's first memory after so many tokens at a time of [2, T, hidden_size], or of x."""
    model, (mixer, *_) = memories(case)
    tokens = (
        torch.randn(2, T, 32, generator=torch.Generator().manual_seed(0)).double()
        if x is None
        else x
    )
    positions = model.model.rotary_emb(tokens, torch.arange(T)[None])
    cache = DynamicCache(config=model.config)
    outputs = []
    for part in parts:
        mine = None if mask is None else mask[:, part]
        angles = tuple(angle[:, part] for angle in positions)
        outputs.append(mixer(tokens[rows, part], angles, mine, past_key_values=cache)[0])
    growing = {name for name, state in mixer.spec.items() if state.growth == "token"}
    return torch.cat(outputs, 1), cache.layers[mixer.layer_idx].read(), growing


@every_case
@torch.no_grad()
def test_parts_leave_the_states_of_the_whole(case):
    (whole, states, _), (parts, after, _) = read(case, slice(T)), read(case, slice(7), slice(7, T))
    assert_close(parts, whole)
    assert_close(after, states)


@every_case
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_what_stands_at_padding_reaches_nothing(case, side):
    real = slice(3, T) if side == "left" else slice(T - 3)
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[1] = False
    mask[1, real] = True
    tokens = torch.randn(2, T, 32, generator=torch.Generator().manual_seed(0)).double()
    padded, states, growing = read(
        case, slice(T), mask=mask, x=tokens.masked_fill(~mask[..., None], torch.nan)
    )
    alone, expected, _ = read(case, real, rows=slice(1, 2))
    assert_close(padded[1:, real], alone)
    fixed = expected.keys() - growing  # padding has a place in what grows
    assert_close(
        {name: states[name][1:] for name in fixed}, {name: expected[name] for name in fixed}
    )


@torch.no_grad()
def test_the_first_values_of_rwkv7_are_those_of_its_first_memory_layer():
    """Layers before it, which have attention, change nothing: the same memory layers without them give the same."""
    hybrid = (
        make_model(
            CASE["rwkv7"], num_hidden_layers=3, layer_types=["full_attention", "memory", "memory"]
        )
        .double()
        .model
    )
    alone = make_model(CASE["rwkv7"]).double().model
    for mine, theirs in zip(alone.layers, hybrid.layers[1:]):
        mine.load_state_dict(theirs.state_dict())
    outputs = []
    for layers in (hybrid.layers[1:], alone.layers):
        x = (
            torch.randn(1, T, 32, generator=torch.Generator().manual_seed(0)).double(),
            torch.zeros(1, T, 32).double(),
        )
        for layer in layers:
            x = layer(*x)
        outputs.append(x)
    assert outputs[0][1].std() > 0.01
    assert_close(*outputs)
