"""Losses computed slice by slice over the tokens, with gradients, so that logits of all tokens never exist at once."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_memory.conversion.stages.sharding import is_sharded
from hf_memory.layers import upcast
from hf_memory.modeling.any_model import head

SLICE = 2**24
# largest number of logits in a slice, and of logits that are compared in float32 at once
BLOCK = 2**18

LossOfTokens = Callable[[Tensor, slice], Tensor]
"""The sum of a loss over tokens, of their logits [n, V] and of where they stand among the tokens of the loss."""


def last_hidden_states(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor | None = None
) -> Tensor:
    """The input of `head`, [B, T, hidden_size]. The whole model is called, so that hooks on it run."""
    seen: list[Tensor] = []
    with model.base_model.register_forward_hook(
        lambda _, args, output: seen.append(output.last_hidden_state)
    ):
        model(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=1)
    return seen[0]


def slices(num_tokens: int, vocab_size: int, kept: int | None = None) -> list[slice]:
    """Slices of the tokens, each with at most SLICE logits, or with one token.

    There are as many slices of the `kept` tokens as of all, since sharded processes must run the head equally often.
    """
    number = max(1, -(-num_tokens // max(1, SLICE // vocab_size)))
    size = -(-(num_tokens if kept is None else kept) // number)
    return [slice(i * size, (i + 1) * size) for i in range(number)]


def sliced_loss(
    model: PreTrainedModel, hidden_states: Tensor, loss: LossOfTokens, kept: Tensor | None = None
) -> Tensor:
    """The sum of a loss over tokens, slice by slice, with the gradients that all logits at once would give.

    Args:
        model: the model; its head is called as a module, so that adapters and hooks take part.
        hidden_states: [B, T, hidden_size], the input of the head.
        loss: the loss of a slice.
        kept: [n], the tokens among all B * T that the loss is of; default: all.
    """
    hidden_states = hidden_states.flatten(0, -2)
    number = len(hidden_states)
    hidden_states = hidden_states if kept is None else hidden_states[kept]
    places = slices(number, model.config.vocab_size, len(hidden_states))
    if is_sharded():  # FSDP gathers the head's weights only during its own forward and backward
        checkpointed = partial(
            checkpoint, lambda x, where: loss(head(model, x), where), use_reentrant=False
        )
        return torch.stack([checkpointed(hidden_states[where], where) for where in places]).sum()
    parameters = [x for x in model.get_output_embeddings().parameters() if x.requires_grad]
    return _SlicedLoss.apply(model, loss, places, hidden_states, *parameters)


class _SlicedLoss(torch.autograd.Function):
    """Computes gradients in the forward pass, while the logits of a slice exist, so that none are computed twice."""

    @staticmethod
    def forward(ctx, model, loss, places, hidden_states, *parameters):
        learns = any(ctx.needs_input_grad)
        total = 0.0
        d_hidden = torch.zeros_like(hidden_states)
        sums = [torch.zeros_like(x, dtype=upcast(x[:0]).dtype) for x in parameters]
        for where in places:
            x = hidden_states[where].detach().requires_grad_(learns)
            with torch.set_grad_enabled(learns):
                part = loss(head(model, x), where)
            total = total + part.detach()
            if learns:
                d_hidden[where], *found = torch.autograd.grad(part, (x, *parameters))
                for gradient, more in zip(sums, found):
                    gradient += more
        ctx.save_for_backward(
            d_hidden, *(x.to(parameter.dtype) for x, parameter in zip(sums, parameters))
        )
        return total

    @staticmethod
    def backward(ctx, scale):
        return None, None, None, *(scale * gradient for gradient in ctx.saved_tensors)


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """temperature^2 KL(teacher || student) of logits [n, V], summed over tokens."""
    return _Divergence.apply(student, teacher, temperature)


class _Divergence(torch.autograd.Function):
    """temperature^2 KL(p || q), p, q = softmax(logits / temperature), in blocks."""

    @staticmethod
    def forward(ctx, student, teacher, temperature):
        rows = max(1, BLOCK // student.shape[-1])
        total = 0.0
        gradient = torch.empty_like(student)
        for s, t, d in zip(*(x.split(rows) for x in (student, teacher, gradient))):
            log_q, log_p = (tempered(x, temperature).log_softmax(-1) for x in (s, t))
            part, found = _forward(log_p, log_q)
            total = total + part
            d.copy_(found)
        ctx.save_for_backward(gradient)
        ctx.temperature = temperature
        return temperature**2 * total

    @staticmethod
    def backward(ctx, scale):
        (gradient,) = ctx.saved_tensors
        return ctx.temperature * scale * gradient, None, None


def _forward(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) and its gradient by the logits of q, q - p; changes both arguments."""
    p = log_p.exp()
    return log_p.sub_(log_q).mul_(p).sum(), log_q.exp_().sub_(p)


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Logits divided by the temperature, in float32 or float64."""
    return upcast(logits) if temperature == 1 else upcast(logits) / temperature


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The negative log-likelihood of labels [n] with logits [n, V], summed over those that are not -100."""
    return F.cross_entropy(upcast(logits), labels, reduction="sum")
