"""Initial values for a student's new weights, which bring its memory layers close to the attention they replace.

Each function here sets weights of a student in place. Where it is given a teacher, this runs on windows [B, T] of the
training text, is not changed, and its weights are in the student already, except in `start_near`, which copies them.
"""

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.conversion.stages.transfer import AttentionTransfer, attention_seen
from hf_memory.conversion.students import SINKS
from hf_memory.conversion.students.weights import CarriedWeights, carry_over
from hf_memory.convertible import Convertible, ObservedAttention
from hf_memory.files.text import Text
from hf_memory.mixers.base import MemoryMixer
from hf_memory.modeling.base import MemoryForCausalLM

CALIBRATION = 4  # largest number of windows of text from which the initial values are computed
CALIBRATION_TOKENS = 4096  # largest number of tokens in them, unless a single window is longer
RIDGE = 0.1  # penalty of the fits, relative to the mean square of a channel: large, since the text is short
STEADY = 1e-4  # the same for the fit of a constant, which needs little: hidden states have a large common part
FARTHEST = 32  # the slots' queries are initialised for distances up to so many windows


def start_near(
    student: MemoryForCausalLM,
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    length: int,
    *,
    observed: PreTrainedModel | None = None,
    is_exact: bool = False,
) -> CarriedWeights:
    """Initialise a student: copy the teacher's weights, and set new weights so that outputs are close to the teacher's.

    Args:
        student: a student from `make_student`; its weights are set in place.
        teacher: the teacher; it is not changed.
        tokens: [T], the training text.
        length: number of tokens in a window.
        observed: the quantised teacher, which then runs instead of `teacher`; no weights are taken from it.
        is_exact: whether the student then equals its teacher, so that there is nothing to fit.
    """
    weights = carry_over(student, teacher)
    runs = observed or teacher
    number = min(CALIBRATION, max(1, CALIBRATION_TOKENS // length), len(tokens) // length)
    windows = Text.of(tokens).windows(length * torch.arange(number), length).to(runs.device)
    _start_from_attention(student, runs, windows)
    start_open(student, length)
    if not is_exact:
        steady_gates(student, runs, windows)
        match_scale(student, runs, windows[:1])
        fit_outputs(student, runs, windows)
    return weights


@torch.no_grad()
def _start_from_attention(
    student: MemoryForCausalLM, teacher: PreTrainedModel, windows: Tensor
) -> None:
    """Initialise what stands beside a window from what the teacher's attention reads of the windows of text [B, T]."""
    layers = {i: x for i, x in enumerate(student.model.layers) if x.mixer.starts_from_attention}
    if not layers:
        return
    seen = attention_seen(teacher, windows)
    farthest = math.log10(FARTHEST)
    window = student.config.sliding_window or 0
    distances = torch.logspace(0, farthest, 256, device=student.device).mul(window).long()[None]
    for i, layer in layers.items():
        inputs, _ = seen[i]
        rotary = student.model.local_rotary_emb if layer.is_local else student.model.rotary_emb
        layer.mixer.start_from(
            ObservedAttention(
                hidden_states=inputs["hidden_states"],
                positions=inputs["position_embeddings"],
                num_first_tokens=SINKS,
                distances=rotary(inputs["hidden_states"], distances),
            )
        )


@torch.no_grad()
def start_open(student: MemoryForCausalLM, half_life: int) -> None:
    """Make memory layers pass on their inputs: convolutions are the identity, gates are half open, and decay is slow.

    Args:
        student: the student; its new weights are set in place.
        half_life: number of tokens after which half of what was written has decayed.
    """
    for module in student.modules():
        if isinstance(module, Convertible):
            module.start_open(half_life)


@torch.no_grad()
def match_scale(student: MemoryForCausalLM, teacher: PreTrainedModel, input_ids: Tensor) -> None:
    """Scale the output norm of each memory layer so that its output is as large as the attention layer's.

    Where a memory is combined with attention over a window, its gate is set instead.
    """
    transfer = AttentionTransfer(student, teacher)
    mixers = transfer.mixers = {i: x for i, x in transfer.mixers.items() if x.new_part is x}
    for mixer, output, target in transfer.outputs(input_ids) if transfer.mixers else ():
        bias: Tensor | None = mixer.get_submodule("o_proj").bias  # type: ignore[assignment]
        sizes = [
            (x if bias is None else x - bias).float().square().mean().sqrt()
            for x in (target, output)
        ]
        mixer.scale_output(sizes[0] / sizes[1])  # type: ignore[operator]
    transfer.mixers = {i: x for i, x in mixers.items() if x.gate_beside_attention is not None}
    outputs = []  # with the memory, and without
    for value in (1, 0) if transfer.mixers else ():
        for mixer in transfer.mixers.values():
            mixer.gate_beside_attention.fill_(value)
        outputs.append(list(transfer.outputs(input_ids)))
    for (mixer, output, target), (_, without, _) in zip(*outputs):
        mixer.open_gate(output, without, target)


@torch.no_grad()
def steady_gates(student: MemoryForCausalLM, teacher: PreTrainedModel, windows: Tensor) -> None:
    """Initialise silu output gates as nearly constant: every row w of their projection has w.h = 1 for hidden states h.

    With random weights these gates would start near zero and have either sign. Without a bias they cannot be exactly
    constant, but hidden states have a large common part: in SmolLM2, w.h is 1 +- 0.02.
    """
    gates = {
        i: [x for x in layer.mixer.modules() if isinstance(x, Convertible) and x.can_be_steady]
        for i, layer in enumerate(student.model.layers)
        if isinstance(layer.mixer, MemoryMixer)
    }
    if not any(gates.values()):
        return
    fits = {i: LeastSquares() for i in gates}
    for window in windows.split(1):
        seen = attention_seen(teacher, window)
        for i, fit in fits.items():
            hidden_states = seen[i][0]["hidden_states"]
            fit.add(hidden_states, torch.ones_like(hidden_states[..., :1]))
    for i, fit in fits.items():
        direction = fit.solve(STEADY)[0]
        for gate in gates[i]:
            gate.start_steady(direction)


@torch.no_grad()
def fit_outputs(student: MemoryForCausalLM, teacher: PreTrainedModel, windows: Tensor) -> None:
    """Fit the output projections of memory layers to the attention outputs, where a layer has no attention of its own.

    W = argmin |o W^T - y|^2 + ridge |W - W'|^2, where o are the gated outputs of the memory, y the outputs of the
    attention, and W' the teacher's projection. The penalty keeps W close to W', since the text is short.
    """
    transfer = AttentionTransfer(student, teacher)
    inputs = []
    transfer.mixers = {
        i: x
        for i, x in transfer.mixers.items()
        if x.new_part is x and x.gate_beside_attention is None
    }
    fits = {mixer: LeastSquares() for mixer in transfer.mixers.values()}
    hooks = [
        mixer.o_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        for mixer in fits
    ]
    for window in windows.split(1) if fits else ():
        for mixer, output, target in transfer.outputs(window):
            fits[mixer].add(inputs.pop(), target - output)
    for hook in hooks:
        hook.remove()
    for mixer, fit in fits.items():
        mixer.o_proj.weight.add_(fit.solve(RIDGE))


class LeastSquares:
    """Ridge regression of y [..., out] on x [..., in]: finds W with x W^T near y. Rows can be added batch by batch."""

    def __init__(self) -> None:
        self.squares = self.products = torch.zeros(())

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows."""
        x = x.flatten(0, -2).float()
        y = y.flatten(0, -2).float()
        self.squares = x.mT @ x + self.squares.to(x.device)
        self.products = x.mT @ y + self.products.to(x.device)

    def solve(self, ridge: float) -> Tensor:
        """W [out, in]; the penalty on its squares is `ridge` times the mean square of the channels of x."""
        squares = self.squares.double()
        penalty = ridge * squares.diagonal().mean()
        squares.diagonal().add_(penalty)
        return torch.linalg.solve(squares, self.products.double()).mT
