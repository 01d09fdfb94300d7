"""Copies a teacher's weights into a student, by their names."""

import re
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_memory.conversion.teachers import find_teacher, has_two_ropes
from hf_memory.modeling.any_model import check_pair
from hf_memory.modeling.checks import check
from hf_memory.modeling.configuration import MemoryConfig

NEW_WEIGHTS = re.compile(  # names of weights that a teacher does not have
    r"model\.(layers\.\d+\.(mixer|mlp\.memory)|memory_values|embed_positions)\."
)

ANGLES = {  # buffers with the angles of a field, in a student and in a teacher
    "rope_parameters": ("rotary_emb.inv_freq", "rotary_emb.full_attention_inv_freq"),
    "local_rope_parameters": ("local_rotary_emb.inv_freq", "rotary_emb.sliding_attention_inv_freq"),
}


class CarriedWeights(NamedTuple):
    """Which tensors of a teacher were copied into a student.

    Attributes:
        used: names in the student by names in the teacher; several if the teacher fuses them.
        dropped: names of the teacher's tensors that the student has no use for.
        new: names of the student's tensors that the teacher does not have.
    """

    used: dict[str, tuple[str, ...]]
    dropped: list[str]
    new: list[str]


@torch.no_grad()
def carry_over(student: nn.Module, teacher: PreTrainedModel) -> CarriedWeights:
    """Copy every tensor of a teacher into the corresponding tensor of a student.

    Norms of queries and keys are left out where the student's memories have none.

    Args:
        student: a student with the teacher's sizes. Tensors of mixers and memory layers that the teacher does not have
            are not changed.
        teacher: a causal language model of a type in TEACHERS.

    Raises:
        ValueError: if a tensor has no counterpart or another shape, the student has new tensors elsewhere, or it
            rotates by other angles.
    """
    target = student.state_dict()
    values, weights = _values(student, target, teacher)
    for name, x in values.items():
        target[name].copy_(x)
    return weights


@torch.no_grad()
def share(student: nn.Module, teacher: PreTrainedModel) -> CarriedWeights:
    """Let the parameters of a student be views of those of its teacher, where they are equal; nothing is copied.

    Norms that a teacher writes in another way, as 1 + w in Gemma, are computed anew. Parameters of the student that the
    teacher does not have are not changed. Arguments and errors are those of `carry_over`; the student's parameters may
    be on the meta device.
    """
    values, weights = _values(student, student.state_dict(), teacher)
    parameters = dict(teacher.named_parameters(remove_duplicate=False))
    source_of = {name: source for source, names in weights.used.items() for name in names}
    shared: dict[tuple, nn.Parameter] = {}
    for name, x in values.items():
        place, _, own_name = name.rpartition(".")
        key = x.data_ptr(), x.shape, x.stride()
        if key not in shared:
            learns = parameters[source_of[name]].requires_grad
            shared[key] = nn.Parameter(x, requires_grad=learns)
        setattr(student.get_submodule(place), own_name, shared[key])
    return weights


def check_student(student: Any, teacher: Any) -> None:
    """Raise ValueError unless an argument is a student that can learn from a teacher."""
    check_pair(student, teacher)
    is_student = isinstance(student.config, MemoryConfig)
    check(is_student, "student", "one, as make_student makes", type(student).__name__)


def shares_weights(student: nn.Module, teacher: nn.Module) -> bool:
    """Whether a parameter of a student has the memory of one of its teacher's."""
    places = [
        {x.untyped_storage().data_ptr() for x in model.parameters() if x.device.type != "meta"}
        for model in (student, teacher)
    ]
    return bool(places[0] & places[1] - {0})


def _values(
    student: nn.Module, target: dict[str, Tensor], teacher: PreTrainedModel
) -> tuple[dict[str, Tensor], CarriedWeights]:
    """What a teacher's tensors give the tensors of a student, by the names in the student, and which they are."""
    _check_angles(student, teacher)
    source = teacher.state_dict()
    config: Any = student.config
    memories = [i for i, kind in enumerate(config.layer_types or ()) if kind == "memory"]
    norms = tuple(f"model.layers.{i}.self_attn.{x}_norm." for i in memories for x in "qk")
    has_norms = not config.use_qk_norm or config.has_memory_qk_norm
    dropped = [] if has_norms else [name for name in source if name.startswith(norms)]
    # a fused tensor has several
    parts_of = partial(find_teacher(teacher.config).parts, teacher.config)
    kept = {name: x for name, x in source.items() if name not in dropped}
    moves = [
        (name, part.replace(".self_attn.", ".mixer."), y)
        for name, x in kept.items()
        for part, y in parts_of(name, x).items()
    ]
    placed = {target_name for _, target_name, _ in moves}
    new = [name for name in target if name not in placed]
    faults = _misfits(moves, target) + _overwritten(moves, target)
    faults += [
        f"the student's {name} has no counterpart" for name in new if not NEW_WEIGHTS.match(name)
    ]
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ValueError(
            f"every weight of the teacher must fit into the student, but {'; '.join(faults[:3])}{more}"
        )
    used: dict[str, tuple[str, ...]] = {}
    for name, other, _ in moves:
        used[name] = (*used.get(name, ()), other)
    values = {other: x for _, other, x in moves}
    return values, CarriedWeights(used, dropped, new)


def _check_angles(student: nn.Module, teacher: PreTrainedModel) -> None:
    """Raise ValueError unless a student rotates by its teacher's angles; not of those that change with the text."""
    if has_two_ropes(teacher.config):
        return
    models = [dict(model.get_submodule("model").named_buffers()) for model in (student, teacher)]
    for field, names in ANGLES.items():
        found = [model[name] for model in models for name in names if name in model]
        known = [x for x in found if x.device.type != "meta"]
        wanted = f"those of the angles of the teacher, a {type(teacher).__name__}"
        is_same = len(known) < 2 or _are_close(*known)
        check(is_same, f"{field} of the student", wanted, getattr(student.config, field))


def _are_close(x: Tensor, y: Tensor) -> bool:
    """Whether angles are the same, up to their rounding to 16 bits."""
    x, y = (angles.float().cpu() for angles in (x, y))
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-2, atol=1e-6)


def _overwritten(moves: list[tuple[str, str, Tensor]], target: dict[str, Tensor]) -> list[str]:
    """Which different values would be written to one tensor of the student, as triples of `_misfits`."""
    writers: dict[int, tuple[str, Tensor]] = {}
    faults = []
    for name, other, x in moves:
        # none for an empty tensor, and for one on the meta device, whose weights are only counted
        place = target[other].data_ptr() if other in target else 0
        if not place:
            continue
        first, y = writers.setdefault(place, (name, x))
        if x.data_ptr() != y.data_ptr() and not torch.equal(x, y):
            faults.append(
                f"{first} and {name} are one tensor in the student, and differ in the teacher: set "
                "tie_word_embeddings=False in its config, as load_teacher does"
            )
    return faults


def _misfits(moves: list[tuple[str, str, Tensor]], target: dict[str, Tensor]) -> list[str]:
    """What does not fit, of triples of the teacher's name, the student's name and the values."""
    faults = [
        f"the teacher's {name} has no counterpart"
        for name, other, _ in moves
        if other not in target
    ]
    for name, other, x in moves:
        if other in target and x.shape != target[other].shape:
            shapes = tuple(x.shape), tuple(target[other].shape)
            faults.append(f"{name} is {shapes[0]} in the teacher and {shapes[1]} in the student")
    return faults
