"""A teacher's weights under the names of a student."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

# The teacher's name: the student's. {i} is the number of a layer, {rest} the end of the name.
NAMES = {
    "model.embed_tokens.{rest}": "model.embed_tokens.{rest}",
    "model.layers.{i}.input_layernorm.{rest}": "model.layers.{i}.input_layernorm.{rest}",
    "model.layers.{i}.self_attn.{rest}": "model.layers.{i}.mixer.{rest}",
    "model.layers.{i}.post_attention_layernorm.{rest}": "model.layers.{i}.post_attention_layernorm.{rest}",
    "model.layers.{i}.mlp.{rest}": "model.layers.{i}.mlp.{rest}",
    "model.norm.{rest}": "model.norm.{rest}",
    "lm_head.{rest}": "lm_head.{rest}",
}
NEW_WEIGHTS = re.compile(r"model\.layers\.\d+\.mixer\.")  # where a student may have weights that no teacher has


class CarriedWeights(NamedTuple):
    """What became of each tensor."""

    used: dict[str, str]  # the teacher's name: the student's
    dropped: list[str]  # the teacher's names
    new: list[str]  # the student's names


def rename(name: str, names: Mapping[str, str] = NAMES) -> str:
    """The name in the other model, or an empty one if the table does not know it."""
    for source, target in names.items():
        pattern = re.escape(source).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{rest\}", "(?P<rest>.+)")
        match = re.fullmatch(pattern, name)
        if match:
            return target.format(**match.groupdict())
    return ""


def rename_back(name: str) -> str:
    """The teacher's name of a student's tensor, or an empty one if the table does not know it."""
    return rename(name, {target: source for source, target in NAMES.items()})


@torch.no_grad()
def carry_over(student: nn.Module, teacher: nn.Module, *, drop: tuple[str, ...] = ()) -> CarriedWeights:
    """Copy every tensor of a teacher into the student's tensor of the same meaning.

    Args:
        student: has the teacher's sizes; its mixers may have tensors that the teacher lacks, and these are left alone.
        teacher: a causal language model with Llama's names.
        drop: regular expressions for whole names of the teacher's tensors that the student does without.

    Raises:
        ValueError: if a tensor has no place or another shape, or the student has a new one outside its mixers.
    """
    source, target = teacher.state_dict(), student.state_dict()
    dropped = [name for name in source if any(re.fullmatch(pattern, name) for pattern in drop)]
    used = {name: rename(name) for name in source if name not in dropped}
    new = [name for name in target if name not in used.values()]
    faults = _misfits(used, source, target)
    faults += [f"the student's {name} has no counterpart" for name in new if not NEW_WEIGHTS.match(name)]
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ValueError(f"every weight of the teacher must fit into the student, but {'; '.join(faults[:3])}{more}")
    for name, other in used.items():
        target[other].copy_(source[name])
    return CarriedWeights(used, dropped, new)


def _misfits(used: dict[str, str], source: dict[str, Tensor], target: dict[str, Tensor]) -> list[str]:
    faults = [f"the teacher's {name} has no place" for name, other in used.items() if other not in target]
    for name, other in used.items():
        if other in target and source[name].shape != target[other].shape:
            shapes = tuple(source[name].shape), tuple(target[other].shape)
            faults.append(f"{name} is {shapes[0]} in the teacher and {shapes[1]} in the student")
    return faults
