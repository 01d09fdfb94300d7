"""Where new weights of a student start, so that its memory layers are near the attention they replace."""

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.conversion.stages.transfer import AttentionTransfer, attention_seen
from hf_memory.conversion.students.weights import CarriedWeights, carry_over
from hf_memory.mixers.base import MemoryMixer
from hf_memory.mixers.gates import SoftplusDecay
from hf_memory.mixers.positions import Positions
from hf_memory.mixers.windowed import WindowedMixer
from hf_memory.modeling.base import MemoryForCausalLM

CALIBRATION = 4  # windows of text that a start looks at, at most
CALIBRATION_TOKENS = 4096  # and tokens in them, or one window
RIDGE = 0.1  # of what a channel's square is on average, in fits to so little text
STEADY = 1e-4  # the same where hidden states of an elsewhere equal direction are to give a constant
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
    number = min(CALIBRATION, max(1, CALIBRATION_TOKENS // length), len(tokens) // length)
    windows = tokens[: number * length].view(-1, length).to(runs.device)
    _fill_slots(student, runs, windows)
    start_open(student, length)
    if not is_exact:
        steady_gates(student, runs, windows)
        match_scale(student, runs, windows[:1])
        fit_outputs(student, runs, windows)
    return weights


@torch.no_grad()
def _fill_slots(student: MemoryForCausalLM, teacher: PreTrainedModel, windows: Tensor) -> None:
    """Memories beside a window begin where the teacher's keys are."""
    mixers = {i: x.mixer for i, x in enumerate(student.model.layers) if isinstance(x.mixer, WindowedMixer)}
    if not any(mixer.far for mixer in mixers.values()):
        return
    seen = attention_seen(teacher, windows)
    window = student.config.attention_window or 0
    distances = torch.logspace(0, math.log10(FARTHEST), 256, device=student.device).mul(window).long()[None]
    for i, mixer in mixers.items():
        hidden_states = seen[i][0]["hidden_states"]
        mixer.start_near(hidden_states, Positions(*student.model.rotary_emb(hidden_states, distances)))


@torch.no_grad()
def start_open(student: MemoryForCausalLM, half_life: int) -> None:
    """Let through what comes: convolutions pass the present token, gates are half open, and decay is slow.

    A memory without positions tells near from far by its decay alone, so there each head forgets at its own pace, if
    its decay is a softplus.

    Args:
        student: its new weights are set, in place.
        half_life: tokens after which a memory has lost half of what was written.
    """
    for module in student.modules():
        if hasattr(module, "start_open"):
            module.start_open(half_life)  # type: ignore[operator]
        if isinstance(module, MemoryMixer) and not module.sees_positions:
            for decay in (x for x in module.children() if isinstance(x, SoftplusDecay)):
                decay.spread(half_life)


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
    transfer.mixers = {i: x for i, x in transfer.mixers.items() if x.new_part is x or hasattr(x, "gate")}
    for mixer, output, target in transfer.outputs(input_ids) if transfer.mixers else ():
        bias: Tensor | None = mixer.get_submodule("o_proj").bias  # type: ignore[assignment]
        sizes = [(x if bias is None else x - bias).float().square().mean().sqrt() for x in (target, output)]
        mixer.scale_output(sizes[0] / sizes[1])  # type: ignore[operator]
    _open_gates(transfer, input_ids)


@torch.no_grad()
def steady_gates(student: MemoryForCausalLM, teacher: PreTrainedModel, windows: Tensor) -> None:
    """Output gates by silu, which start closed and of either sign, become constants: w.h = 1 for all hidden states h.

    A projection without a bias cannot be constant, but hidden states of a teacher have much in common: w.h is 1 +- 0.02
    in SmolLM2.

    Args:
        student: its gates are set, in place.
        teacher: stays as it is.
        windows: [B, T] of the text to learn on.
    """
    gates = {
        i: [x for x in layer.mixer.modules() if hasattr(x, "start_steady")]
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
        for gate in gates[i]:
            gate.start_steady(fit.solve(STEADY)[0])  # type: ignore[operator]


@torch.no_grad()
def fit_outputs(student: MemoryForCausalLM, teacher: PreTrainedModel, windows: Tensor) -> None:
    """Output projections of memories without attention beside them become those that are nearest to the teacher.

    W = argmin |o W^T - y|^2 + ridge |W - W'|^2, o what a memory gives behind its gate, y what the attention gave, W'
    the teacher's, which counts most where the text is short.

    Args:
        student: carries the teacher's weights already; its output projections are set, in place.
        teacher: stays as it is.
        windows: [B, T] of the text to learn on.
    """
    transfer, inputs = AttentionTransfer(student, teacher), []
    transfer.mixers = {i: x for i, x in transfer.mixers.items() if x.new_part is x and not hasattr(x, "gate")}
    fits = {mixer: LeastSquares() for mixer in transfer.mixers.values()}
    hooks = [mixer.o_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for mixer in fits]
    for window in windows.split(1) if fits else ():
        for mixer, output, target in transfer.outputs(window):
            fits[mixer].add(inputs.pop(), target - output)
    for hook in hooks:
        hook.remove()
    for mixer, fit in fits.items():
        mixer.o_proj.weight.add_(fit.solve(RIDGE))


class LeastSquares:
    """W with x W^T near y, from rows x [..., in] and y [..., out] that come one after the other."""

    def __init__(self) -> None:
        self.squares = self.products = torch.zeros(())

    def add(self, x: Tensor, y: Tensor) -> None:
        """More rows."""
        x, y = x.flatten(0, -2).float(), y.flatten(0, -2).float()
        self.squares, self.products = x.mT @ x + self.squares.to(x.device), x.mT @ y + self.products.to(x.device)

    def solve(self, ridge: float) -> Tensor:
        """W [out, in], with a penalty on its squares of so many times what a channel of x has on average."""
        squares = self.squares.double()
        penalty = ridge * squares.diagonal().mean()
        squares.diagonal().add_(penalty)
        return torch.linalg.solve(squares, self.products.double()).mT


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
