"""Forget gates in few bits: every form of attention that has them, after texts whose gates have a large sum."""

import copy
import functools

import pytest
import torch
from transformers import DynamicCache

from cases import PAST, SIZES, STORE, SUMMARIES
from hf_memory import MemoryTransformerConfig, MemoryTransformerForCausalLM
from hf_memory.mixers.transformer import PASTS, PATTERNS
from hf_memory.ops.gate_channels import UNIT

T = 2000
LAST = 60
STEPS = 20
SHARED = {**SIZES, "num_hidden_layers": 1, "position": "forget"}
OF_KINDS = {**SUMMARIES, **PAST, **STORE, "max_span": 20, "span_ramp": 4, "num_sink_tokens": 2}


def with_sizes(**named):
    """Options with a pattern or a past, and with the sizes that it has."""
    (kind,) = ((PATTERNS | PASTS)[name] for name in named.values())
    return SHARED | named | {name: x for name, x in OF_KINDS.items() if name in kind.options}


HEADS = {**SHARED, "layer_types": ["sliding_heads"], "sliding_window": 16, "num_sink_tokens": 2}
KEPT = {**HEADS, "num_kept_tokens": 8, "kept_block_size": 8}
WIDE = {"full_attention_heads": [[0, 1]], "full_attention_window": 40}
NAMED = {
    "heads": HEADS,
    "heads without first tokens": {**HEADS, "num_sink_tokens": 0},
    "heads and full ones": {**HEADS, "full_attention_heads": [[1]]},
    "heads and wide ones": {**HEADS, "full_attention_heads": [[0]], "full_attention_window": 40},
    "kept tokens": KEPT,
    "kept tokens by head": {**KEPT, "num_kept_tokens": [[8, 2]]},
    "kept tokens of one head": {**KEPT, "num_kept_tokens": [[0, 8]]},
    "kept tokens and full heads": {**KEPT, "full_attention_heads": [[1]]},
    "kept tokens and wide heads": {**KEPT, **WIDE, "full_attention_heads": [[0]]},
    "wide heads alone": {**HEADS, **WIDE},
    "wide heads in place of kept tokens": {**KEPT, **WIDE},
    "as many entries as heads": {
        **KEPT,
        **WIDE,
        "num_sink_tokens": 0,
        "sliding_window": 2,
        "full_attention_window": 2,
    },
    "full heads in place of kept tokens": {**KEPT, "full_attention_heads": [[0, 1]]},
    **{name: with_sizes(pattern=name) for name in PATTERNS},
    **{name: with_sizes(past=name) for name in PASTS},
}


def is_allowed(options):
    try:
        MemoryTransformerConfig(**options)
    except ValueError:
        return False
    return True


FORMS = {name: options for name, options in NAMED.items() if is_allowed(options)}
FUSED = (
    "full",
    "cache",
    "heads and full ones",
    "kept tokens and full heads",
    "full heads in place of kept tokens",
)  # whole texts, in float32 of kernels
every_form = pytest.mark.parametrize("form", FORMS)


@functools.cache
def mixers(form, dtype, gate=2.0):
    """A mixer with gates of about sigmoid(gate), the same in float64, and hidden states."""
    torch.manual_seed(0)
    model = MemoryTransformerForCausalLM(MemoryTransformerConfig(**FORMS[form])).eval()
    mixer = model.model.layers[0].mixer
    mixer.forget.proj.bias.data.fill_(gate)
    mixer = mixer.to(dtype)
    x = torch.randn(1, T, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    return mixer, copy.deepcopy(mixer).double(), x


@torch.no_grad()
def read(mixer, x, pieces):
    """The outputs of the last tokens, and the states, of a text that is read in pieces."""
    cache = DynamicCache(config=mixer.config)
    outputs = [mixer(piece, past_key_values=cache)[0] for piece in x.split(pieces, 1)]
    return torch.cat(outputs, 1)[:, -LAST:].double(), cache.layers[0].states


def error(form, dtype, pieces, **options):
    """The relative error of the last tokens in few bits."""
    mixer, exact, x = mixers(form, dtype, **options)
    found = read(mixer, x, pieces)[0]
    expected = read(exact, x.double(), [T])[0]
    return (found - expected).norm() / expected.norm()


WHOLE = [T]
DECODED = [T - LAST, LAST - STEPS, *[1] * STEPS]


@every_form
@pytest.mark.parametrize("pieces", [WHOLE, DECODED], ids=["whole", "decoded"])
def test_no_gate_is_lost_in_16_bits(form, pieces):
    """Where scores were rounded to 16 bits with these sums, the error was above 0.3."""
    assert error(form, torch.bfloat16, pieces) < 0.01


@every_form
def test_no_gate_is_lost_in_half_precision(form):
    assert error(form, torch.float16, DECODED) < 0.002


@every_form
def test_gates_of_large_sums_are_as_exact_in_float32(form):
    """A sum of 16,000, of which float32 has three digits after the point; within a text and after one."""
    pieces = [[T - LAST, LAST - STEPS, *[1] * STEPS]]
    if form not in FUSED:
        pieces.append([T])
    for sizes in pieces:
        assert error(form, torch.float32, sizes, gate=-8.0) < 2e-6


@every_form
def test_pieces_keep_the_sums_of_the_whole(form):
    mixer, _, x = mixers(form, torch.float64)
    (whole, states), (found, again) = (
        read(mixer, x, pieces) for pieces in ([T], [700, T - 730, 1, 29])
    )
    assert (found - whole).abs().max() < 1e-10
    assert (states["forgotten"] - again["forgotten"]).abs().max() < 1e-10


@pytest.mark.parametrize(
    "form",
    [
        *("heads", "kept tokens", "infinite", "xl", "block_local", "heads and wide ones"),
        *("wide heads in place of kept tokens", "as many entries as heads"),
    ],
)
def test_kept_sums_do_not_grow_with_the_text(form):
    mixer, _, x = mixers(form, torch.float32)
    states = read(mixer, x, [T])[1]
    assert (states["forgotten"] > -UNIT).all()
    assert (states["forgotten"] <= 0).all()
