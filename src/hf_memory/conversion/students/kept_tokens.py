"""How many older tokens each layer of a student keeps: more where its distance from its teacher falls most by them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.conversion.stages.divergence import divergence
from hf_memory.decoding.parts import head
from hf_memory.evaluation.shares import mixers_with_memory
from hf_memory.files.text import Text
from hf_memory.mixers.windowed import WindowedMixer
from hf_memory.modeling.base import MemoryForCausalLM
from hf_memory.progress import Progress, silent

LESS = 1 / 4
MORE = 5 / 2  # of the tokens that all layers keep, which one layer after the other is tried with
Part = tuple[
    float, int, int
]  # KL that falls for each token of a head, the place of a layer, and how many tokens
Input = tuple[Tensor, dict[str, Any]]  # hidden states, and a layer's other arguments


@torch.no_grad()
def spread_kept_tokens(
    student: MemoryForCausalLM,
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    *,
    length: int,
    report: Callable[[Progress], None] = silent,
) -> list[int]:
    """The number of kept tokens of each layer with which an untrained student is nearest to its teacher.

    All heads together keep as many tokens as before. KL(teacher || student) is measured with a quarter of the tokens in
    one layer, and with 2.5 times as many, for one layer after the other, of which those before it are not read again.
    It is then taken to be a sum over layers, and linear between these numbers, and tokens go where it falls most.

    Args:
        student: a student whose layers all keep `num_kept_tokens`; it is not changed.
        teacher: its teacher.
        tokens: the training text, of which the window in the middle is read.
        length: tokens of this window.
        report: is called with the progress.
    """
    config: Any = student.config
    kept = config.num_kept_tokens
    mixers = [x for x in mixers_with_memory(student) if x.near_heads]
    sizes = [round(kept * LESS), kept, round(kept * MORE)]
    text = Text.of(tokens)
    row = text.windows(torch.tensor([(len(text) - length) // 2]), length).to(teacher.device)
    target = teacher(row, use_cache=False).logits[0]
    inputs = _inputs(student, row)

    def distance(first: int) -> float:
        return divergence(_logits(student, inputs, first)[0], target).item() / length

    usual = distance(0)
    parts = list[Part]()
    for i, mixer in enumerate(mixers):
        report(Progress("measuring how many tokens layers keep", i, len(mixers)))
        less, more = (_with(mixer, size, distance) for size in (sizes[0], sizes[2]))
        parts += _parts(i, sizes, (less, usual, more), len(mixer.near_heads))
    heads = [len(mixer.near_heads) for mixer in mixers]
    found = [kept] * config.num_hidden_layers
    for mixer, number in zip(mixers, _filled(parts, heads, sizes[0], kept * sum(heads))):
        found[mixer.layer_idx] = number
    return found


def _inputs(student: MemoryForCausalLM, input_ids: Tensor) -> list[Input]:
    """What each layer reads of tokens [B, T]."""
    inputs: list[Input] = []
    keep = lambda _, args, others: inputs.append((*args, others))  # noqa: E731
    with ExitStack() as hooks:
        for layer in student.model.layers:
            hooks.enter_context(layer.register_forward_pre_hook(keep, with_kwargs=True))
        student(input_ids, use_cache=False, logits_to_keep=1)
    return inputs


def _logits(student: MemoryForCausalLM, inputs: Sequence[Input], first: int) -> Tensor:
    """Logits [B, T, V] if the layers from the first on are read again."""
    hidden_states, _ = inputs[first]
    for layer, (_, others) in zip(student.model.layers[first:], inputs[first:]):
        hidden_states = layer(hidden_states, **others)
    return head(student, student.model.norm(hidden_states))


def _with(mixer: WindowedMixer, kept: int, measure: Callable[[int], float]) -> float:
    """What is measured from a layer on while it keeps so many tokens."""
    before = mixer.kv_eviction
    assert before is not None
    mixer.kv_eviction = before._replace(kept=kept)
    try:
        return measure(mixer.layer_idx)
    finally:
        mixer.kv_eviction = before


def _parts(place: int, sizes: Sequence[int], distances: Sequence[float], heads: int) -> list[Part]:
    """What a layer gains from each step to more tokens, the first of which gains most; else they are one step."""
    ends = list(zip(sizes, distances))
    falls = [((y - z) / (n - m) / heads, place, n - m) for (m, y), (n, z) in zip(ends, ends[1:])]
    if falls[1] > falls[0]:
        (m, y), _, (n, z) = ends
        return [((y - z) / (n - m) / heads, place, n - m)]
    return falls


def _filled(parts: list[Part], heads: list[int], least: int, total: int) -> list[int]:
    """The number of tokens of each layer, from `least` on, as the best parts allow within a total of all heads."""
    found = [least] * len(heads)
    rest = total - least * sum(heads)
    for _, place, more in sorted(parts, reverse=True):
        taken = min(more, rest // heads[place])
        found[place] += taken
        rest -= taken * heads[place]
    return found
