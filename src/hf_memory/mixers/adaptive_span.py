"""Attention whose heads learn how far back they see."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_memory.convertible import Convertible
from hf_memory.layers import wide
from hf_memory.mixers.attention_blocks import BLOCK, Blocks
from hf_memory.mixers.relations import RELATIONS
from hf_memory.mixers.transformer import LocalMixer


class AdaptiveSpan(Convertible, nn.Module):
    """a_ij ~ m(i - j) e^s_ij,   m(d) = clip((R + z_h - d) / R, 0, 1),   z_h the span of head h and R the ramp.

    https://arxiv.org/abs/1905.07799. Computed by adding log m to the scores. A span is clamped between 0 and
    `max_span`. The gradient of attention ignores the clamp, so that a span at a bound can move back.
    """

    def __init__(self, config):
        super().__init__()
        self.inner: Any = RELATIONS[config.position](config) if config.position in RELATIONS else None
        self.longest, self.ramp = config.max_span, config.span_ramp
        self.span = nn.Parameter(torch.empty(config.num_attention_heads))  # relative to max_span

    def init_own_parameters(self) -> None:
        """As published: spans start at zero, so that heads see the ramp only."""
        init.zeros_(self.span)

    def start_open(self, half_life: int) -> None:
        """Let all heads start with the longest span."""
        self.span.fill_(1)

    @property
    def spans(self) -> Tensor:
        """The span of each head in tokens, [HQ]."""
        return self.longest * wide(self.span).clamp(0, 1)

    def forward(self, scores: Tensor, blocks: Blocks, scaling: float) -> Tensor:
        """See `Relation`."""
        if self.inner is not None:
            scores = self.inner(scores, blocks, scaling)
        free = self.longest * wide(self.span)
        z = (free + (self.spans - free).detach()).to(scores.dtype)[:, None, None]
        m = ((self.ramp + z - blocks.distance[:, None]) / self.ramp).clamp(0, 1)
        return scores + torch.where(m > 0, m.clamp(min=torch.finfo(m.dtype).tiny).log(), -torch.inf)

    def read(self, weights: Tensor, blocks: Blocks) -> Tensor | None:
        """See `Relation`."""
        return None if self.inner is None else self.inner.read(weights, blocks)


class AdaptiveSpanMixer(LocalMixer):
    """Attention with learned spans; the cache holds as many tokens as the longest possible span."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.relation = AdaptiveSpan(config)

    def reach(self, T: int) -> int | None:
        """The reach of the longest span; None for a few tokens, and if reading it would break a graph."""
        if T <= BLOCK or torch.compiler.is_compiling():
            return None
        return math.ceil(self.relation.ramp + float(self.relation.spans.detach().max()))

    def forward(self, hidden_states: Tensor, *args, own_losses: list[Tensor] | None = None, **kwargs):
        """See `MemoryMixer.forward`; in training, the mean span is added to the losses."""
        if own_losses is not None and self.training:
            own_losses.append(self.config.span_loss_weight * self.relation.spans.mean())
        return super().forward(hidden_states, *args, **kwargs)
