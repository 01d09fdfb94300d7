"""Where new weights of a student start, so that its memory layers are near the attention they replace."""

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_memory.conversion.stages.transfer import AttentionTransfer
from hf_memory.conversion.students.weights import CarriedWeights, carry_over
from hf_memory.layers import RMSNorm, ShortConvolution
from hf_memory.mixers.attention_and_memory import AttentionAndMemoryMixer, MemoryAsGateMixer
from hf_memory.mixers.base import OutputGate
from hf_memory.mixers.gates import SigmoidDecay, SoftplusDecay
from hf_memory.modeling.base import MemoryForCausalLM

WINDOW = 0.1  # of what attention over a window says at first, beside a memory that must learn to see further


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
    start_open(student, length)
    if not is_exact:
        runs = observed or teacher
        match_scale(student, runs, tokens[:length][None].to(runs.device))
    return weights


@torch.no_grad()
def start_open(student: MemoryForCausalLM, half_life: int) -> None:
    """Let through what comes: convolutions pass the present token, gates are half open, and decay is slow.

    Args:
        student: its new weights are set, in place.
        half_life: tokens after which a memory has lost half of what was written.
    """
    for module in student.modules():
        if isinstance(module, ShortConvolution):
            module.weight.zero_()[:, -1] = 1
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, OutputGate) and module.activation == "sigmoid":
            module.proj.weight.zero_()
        elif isinstance(module, AttentionAndMemoryMixer):
            _start_as_attention(module)
        elif isinstance(module, SigmoidDecay):
            module.proj.bias.fill_(-math.log(math.expm1(module.temperature * math.log(2) / half_life)))
        elif isinstance(module, SoftplusDecay):
            module.A_log.zero_()
            module.dt_bias.fill_(math.log(math.expm1(math.log(2) / half_life)))


def _start_as_attention(mixer: AttentionAndMemoryMixer) -> None:
    """The memory's gate is closed, and its projections are attention's where they fit; they learn at once."""
    if hasattr(mixer, "gate"):
        mixer.get_parameter("gate").zero_()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        ours, theirs = mixer.memory.get_submodule(name), mixer.get_submodule(name)
        if ours.weight.shape == theirs.weight.shape:
            ours.load_state_dict(theirs.state_dict())


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
        for norm in _output_norms(mixer):
            norm.weight.mul_(sizes[0] / sizes[1])
    _open_gates(transfer, input_ids)


def _open_gates(transfer: AttentionTransfer, input_ids: Tensor) -> None:
    """Beside a window that starts small a memory learns all of attention; before one, what the window leaves out."""
    mixers = [mixer for mixer in transfer.mixers.values() if hasattr(mixer, "gate")]
    opened: list = []
    closed: list = []
    for value, outputs in ((1, opened), (0, closed)) if mixers else ():
        for mixer in mixers:
            mixer.get_parameter("gate").fill_(value)
        outputs += transfer.outputs(input_ids)
    for (mixer, output, target), (_, without, _) in zip(opened, closed):
        beside = isinstance(mixer, MemoryAsGateMixer)
        size = (target if beside else target - without).norm()
        mixer.get_parameter("gate").fill_(size / (output - without).norm())
        if beside:
            mixer.get_submodule("o_proj").weight.mul_(WINDOW)


def _output_norms(mixer: nn.Module) -> list[RMSNorm]:
    return [m for name, m in mixer.named_modules() if isinstance(m, RMSNorm) and name in ("o_norm", "output_gate.norm")]
