"""Attention whose heads learn how far back they look."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_memory.layers import wide
from hf_memory.mixers.attention_blocks import Blocks
from hf_memory.mixers.relations import RELATIONS
from hf_memory.mixers.transformer import LocalMixer


class AdaptiveSpan(nn.Module):
    """a_ij ~ m(i - j) e^s_ij,   m(d) = clip((R + z_h - d) / R, 0, 1),   z_h the span of head h and R the ramp.

    https://arxiv.org/abs/1905.07799. log m joins the scores, which is the same. A span is held between 0 and the
    longest; the gradient of attention passes these bounds, so that a span can come back from there.
    """

    def __init__(self, config):
        super().__init__()
        self.inner: Any = RELATIONS[config.position](config) if config.position in RELATIONS else None
        self.longest, self.ramp = config.max_span, config.span_ramp
        self.span = nn.Parameter(torch.empty(config.num_attention_heads))  # as parts of the longest

    def init_own_parameters(self) -> None:
        """As published: the ramp alone."""
        init.zeros_(self.span)

    def start_open(self, half_life: int) -> None:
        """All heads look as far back as they can."""
        self.span.fill_(1)

    @property
    def spans(self) -> Tensor:
        """In tokens, [HQ]."""
        return self.longest * wide(self.span).clamp(0, 1)

    def forward(self, scores: Tensor, blocks: Blocks, scaling: float) -> Tensor:
        """See `Relation`."""
        if self.inner is not None:
            scores = self.inner(scores, blocks, scaling)
        free = self.longest * wide(self.span)
        z = (free + (self.spans - free).detach()).to(scores.dtype)[:, None, None]
        m = ((self.ramp + z - blocks.distance[:, None]) / self.ramp).clamp(0, 1)
        return torch.where(m > 0, scores + m.clamp(min=torch.finfo(m.dtype).tiny).log(), -torch.inf)

    def read(self, weights: Tensor, blocks: Blocks) -> Tensor | None:
        """See `Relation`."""
        return None if self.inner is None else self.inner.read(weights, blocks)


class AdaptiveSpanMixer(LocalMixer):
    """Attention to the tokens of the longest span, which alone are kept."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.relation = AdaptiveSpan(config)

    def forward(self, hidden_states: Tensor, *args, own_losses: list[Tensor] | None = None, **kwargs):
        """As the others'; spans cost something in training."""
        if own_losses is not None and self.training:
            own_losses.append(self.config.span_loss_weight * self.relation.spans.mean())
        return super().forward(hidden_states, *args, **kwargs)
