"""How many older tokens each layer of a student keeps: more where its distance from its teacher falls most by them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.conversion.stages.divergence import divergence
from hf_memory.evaluation.shares import mixers_with_memory
from hf_memory.files.text import Text
from hf_memory.modeling.any_model import head
from hf_memory.modeling.base import MemoryForCausalLM
from hf_memory.progress import Progress, silent

# one layer after the other is tried with these multiples of the usual number of tokens
LESS = 1 / 4
MORE = 5 / 2
Input = tuple[Tensor, dict[str, Any]]  # hidden states, and a layer's other arguments


class Step(NamedTuple):
    """That a layer keeps more tokens than before."""

    fall: float  # of the divergence, in nats for each of these tokens and each head of the layer
    layer: int  # place of the layer among those that keep tokens
    tokens: int  # how many more


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
    usual = config.num_kept_tokens
    fewer = round(usual * LESS)
    more = round(usual * MORE)
    mixers = [x for x in mixers_with_memory(student) if x.near_heads]
    text = Text.of(tokens)
    row = text.windows(torch.tensor([(len(text) - length) // 2]), length).to(teacher.device)
    target = teacher(row, use_cache=False).logits[0]
    inputs = _inputs(student, row)

    def distance(first: int) -> float:
        return divergence(_logits(student, inputs, first)[0], target).item() / length

    distances = {usual: distance(0)}
    steps: list[Step] = []
    for i, mixer in enumerate(mixers):
        report(Progress("measuring how many tokens layers keep", i, len(mixers)))
        for number in (fewer, more):
            with mixer.keeping(number):
                distances[number] = distance(mixer.layer_idx)
        steps += _steps(i, len(mixer.near_heads), distances)
    heads = [len(mixer.near_heads) for mixer in mixers]
    spread = [usual] * config.num_hidden_layers
    for mixer, number in zip(mixers, _tokens_by_layer(steps, heads, fewer, usual * sum(heads))):
        spread[mixer.layer_idx] = number
    return spread


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


def _steps(layer: int, heads: int, distances: Mapping[int, float]) -> list[Step]:
    """The steps of a layer from each number of tokens to the next, from the divergence with each of three numbers.

    They are one step if the second gains more by token than the first, since a step can only follow those before it.
    """
    numbers = sorted(distances)

    def step(n: int, m: int) -> Step:
        return Step((distances[n] - distances[m]) / (m - n) / heads, layer, m - n)

    steps = [step(n, m) for n, m in pairwise(numbers)]
    if steps[1] > steps[0]:
        return [step(numbers[0], numbers[-1])]
    return steps


def _tokens_by_layer(
    steps: Sequence[Step], heads: Sequence[int], least: int, total: int
) -> list[int]:
    """The number of tokens of each layer, `least` or more, by the best steps within a total of all heads."""
    numbers = [least] * len(heads)
    rest = total - least * sum(heads)
    for step in sorted(steps, reverse=True):
        added = min(step.tokens, rest // heads[step.layer])
        numbers[step.layer] += added
        rest -= added * heads[step.layer]
    return numbers
