"""Attention transfer: each memory layer is trained to give the output of the attention layer that it replaces."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import torch
from accelerate.utils import reduce
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_memory.conversion.data import TokenWindows
from hf_memory.conversion.recipe import Schedule
from hf_memory.conversion.run import Run
from hf_memory.conversion.stages.sharding import sharded_teacher
from hf_memory.conversion.stages.trainer import StageTrainer, only_these_learn, run_trainer
from hf_memory.conversion.students.weights import check_student
from hf_memory.files.text import Text
from hf_memory.modeling.base import MemoryForCausalLM
from hf_memory.modeling.packing import packed_boundaries
from hf_memory.progress import History

TRANSFER = "attention transfer"


class AttentionTransfer(nn.Module):
    """The mixers of a student, and the loss that compares each with the attention that it replaces.

    L = sum over layers of |mixer(x) - attention(x)|^2 / |attention(x)|^2, where x is the input of the teacher's
    attention. One forward pass of the teacher serves all layers; no layer sees outputs of other student layers.
    """

    def __init__(self, student: MemoryForCausalLM, teacher: PreTrainedModel):
        super().__init__()
        mixers = {i: layer.mixer for i, layer in enumerate(student.model.layers)}
        # others stay as they are
        self.mixers = {i: mixer for i, mixer in mixers.items() if mixer.new_part is not None}
        self.learned = nn.ModuleDict({str(i): mixer.new_part for i, mixer in self.mixers.items()})
        parts = [
            x
            for part in self.learned.values()
            for x in (part if isinstance(part, nn.ModuleList) else [part])
        ]
        self._no_split_modules = sorted({type(part).__name__ for part in parts})
        # a submodule would be trained, saved and copied
        self._seen = lambda *read: attention_seen(teacher, *read)
        self.checkpointing = False

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The loss of tokens [B, T] without padding, which positions may pack; there is no use for labels."""
        losses = [
            F.mse_loss(output.float(), target.float())
            / reduce(target.float().square().mean(), "mean")
            for _, output, target in self.outputs(input_ids, position_ids)
        ]
        return {"loss": torch.stack(losses).sum()}

    def activation_checkpointing_enable(self, **kwargs) -> None:
        """Recompute the mixers in the backward pass, so that only their inputs are stored; the Trainer calls this."""
        self.checkpointing = True

    def outputs(
        self, input_ids: Tensor, position_ids: Tensor | None = None
    ) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
        """Each mixer, its output, and the output of the attention that it replaces, both [B, T, hidden_size]."""
        seen = self._seen(input_ids, position_ids)
        packed = packed_boundaries(input_ids, None, position_ids, None, {})
        for i, mixer in self.mixers.items():
            inputs, target = seen[i]
            run = partial(checkpoint, mixer, use_reentrant=False) if self.checkpointing else mixer
            read = {name: inputs[name] for name in ("hidden_states", "position_embeddings")}
            output, _ = run(**read, cu_seqlens=packed)
            yield mixer, output, target


@torch.no_grad()
def attention_seen(
    teacher: PreTrainedModel, input_ids: Tensor, position_ids: Tensor | None = None
) -> list[tuple[dict, Tensor]]:
    """Inputs and output of each attention layer of a teacher for tokens [B, T]."""
    seen: list[tuple[dict, Tensor]] = []
    keep = lambda module, args, kwargs, output: seen.append((kwargs, output[0]))  # noqa: E731
    with ExitStack() as hooks:
        for layer in teacher.model.layers:
            hooks.enter_context(layer.self_attn.register_forward_hook(keep, with_kwargs=True))
        teacher(input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=1)
    return seen


def attention_transfer(
    student: MemoryForCausalLM,
    teacher: PreTrainedModel,
    tokens: Text | Tensor,
    schedule: Schedule,
    *,
    seed: int = 0,
    run: Run = Run(),
) -> History:
    """Train each memory layer to give what the teacher's attention gives on the teacher's hidden states.

    Args:
        student: the student, whose memory layers are trained in place; other parts are not changed.
        teacher: the teacher; it is not changed.
        tokens: [T], the training text.
        schedule: the training schedule.
        seed: seed for the order of the windows.
        run: checkpoints, progress reports and options of the Trainer.

    Returns:
        The losses, [{"step", "loss"}, ...].
    """
    check_student(student, teacher)
    data = TokenWindows(tokens, schedule, seed)
    models = {"student": student, "teacher": teacher}
    with sharded_teacher(teacher.eval()) as teacher:
        transfer = AttentionTransfer(student, teacher)
        with only_these_learn(student, transfer.parameters()):
            return run_trainer(StageTrainer, transfer, data, TRANSFER, run, models)
