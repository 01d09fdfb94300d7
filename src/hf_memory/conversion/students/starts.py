"""Where new weights of a student start, so that its memory layers are near the attention they replace."""

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.conversion.stages.transfer import AttentionTransfer, attention_seen
from hf_memory.conversion.students.weights import CarriedWeights, carry_over
from hf_memory.mixers.positions import Positions
from hf_memory.mixers.windowed import WindowedMixer
from hf_memory.modeling.base import MemoryForCausalLM

CALIBRATION = 4  # windows of text that a start looks at
FARTHEST = 32  # windows behind a query, for which a memory's first queries are made


def start_near(
    student: MemoryForCausalLM,
    teacher: PreTrainedModel,
    tokens: Tensor,
    length: int,
    *,
    observed: PreTrainedModel | None = None,
    is_exact: bool = False,
) -> CarriedWeights:
    """Everything before the first step: the teacher's weights, and new ones that start near what they replace.

    Args:
        student: made by `make_student`; its weights are set, in place.
        teacher: stays as it is.
        tokens: [T] of the text to learn on.
        length: tokens of a window of it.
        observed: the same teacher to run instead, in few bits; no weights are taken from it.
        is_exact: whether the student is its teacher then, so that there is nothing to match.
    """
    weights = carry_over(student, teacher)
    runs = observed or teacher
    _fill_slots(student, runs, tokens[: CALIBRATION * length], length)
    start_open(student, length)
    if not is_exact:
        match_scale(student, runs, tokens[:length][None].to(runs.device))
    return weights


@torch.no_grad()
def _fill_slots(student: MemoryForCausalLM, teacher: PreTrainedModel, tokens: Tensor, length: int) -> None:
    """Memories beside a window begin where the teacher's keys are."""
    mixers = {i: x.mixer for i, x in enumerate(student.model.layers) if isinstance(x.mixer, WindowedMixer)}
    if not any(mixer.far for mixer in mixers.values()):
        return
    seen = attention_seen(teacher, tokens[: len(tokens) // length * length].view(-1, length).to(teacher.device))
    window = student.config.attention_window or 0
    distances = torch.logspace(0, math.log10(FARTHEST), 256, device=student.device).mul(window).long()[None]
    for i, mixer in mixers.items():
        hidden_states = seen[i][0]["hidden_states"]
        mixer.start_near(hidden_states, Positions(*student.model.rotary_emb(hidden_states, distances)))


@torch.no_grad()
def start_open(student: MemoryForCausalLM, half_life: int) -> None:
    """Let through what comes: convolutions pass the present token, gates are half open, and decay is slow.

    Args:
        student: its new weights are set, in place.
        half_life: tokens after which a memory has lost half of what was written.
    """
    for module in student.modules():
        if hasattr(module, "start_open"):
            module.start_open(half_life)  # type: ignore[operator]


@torch.no_grad()
def match_scale(student: MemoryForCausalLM, teacher: PreTrainedModel, input_ids: Tensor) -> None:
    """Scale the output norms so that each memory layer's first output is as large as its attention layer's.

    A memory beside attention over a window is gated instead, to be as large, and the window starts small.

    Args:
        student: carries the teacher's weights already.
        teacher: stays as it is.
        input_ids: [B, T] of the text to learn on.
    """
    transfer = AttentionTransfer(student, teacher)
    for mixer, output, target in transfer.outputs(input_ids):
        bias: Tensor | None = mixer.get_submodule("o_proj").bias  # type: ignore[assignment]
        sizes = [(x if bias is None else x - bias).float().square().mean().sqrt() for x in (target, output)]
        mixer.scale_output(sizes[0] / sizes[1])  # type: ignore[operator]
    _open_gates(transfer, input_ids)


def _open_gates(transfer: AttentionTransfer, input_ids: Tensor) -> None:
    """Each memory beside attention over a window is compared with what the window says alone."""
    mixers = [mixer for mixer in transfer.mixers.values() if hasattr(mixer, "gate")]
    opened: list = []
    closed: list = []
    for value, outputs in ((1, opened), (0, closed)) if mixers else ():
        for mixer in mixers:
            mixer.get_parameter("gate").fill_(value)
        outputs += transfer.outputs(input_ids)
    for (mixer, output, target), (_, without, _) in zip(opened, closed):
        mixer.open_gate(output, without, target)
