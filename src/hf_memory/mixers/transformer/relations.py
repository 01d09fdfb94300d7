"""Positions other than rotations: embeddings of positions, and relative positions in the scores of attention."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.utils.import_utils import is_tracing

from hf_memory.convertible import Convertible
from hf_memory.layers import upcast
from hf_memory.mixers.attention_blocks import Blocks


def _nothing(self, weights: Tensor, blocks: Blocks) -> None:
    """See `Relation.read`: nothing is added to the values."""


def sinusoids(positions: Tensor, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """sin and cos of i / 10000^(2 d / channels) at positions i [...], each [..., channels / 2]."""
    rate = 10000.0 ** (
        -torch.arange(0, channels, 2, device=positions.device, dtype=dtype) / channels
    )
    angles = positions[..., None].to(dtype) * rate
    return angles.sin(), angles.cos()


class Sinusoidal(nn.Module):
    """Alternating sines and cosines of a position. https://arxiv.org/abs/1706.03762."""

    def __init__(self, config):
        super().__init__()
        self.channels = config.hidden_size

    def forward(self, position_ids: Tensor) -> Tensor:
        """Embeddings [B, T, hidden_size] of positions [B, T]."""
        return torch.stack(sinusoids(position_ids, self.channels, torch.float32), -1).flatten(-2)


class Learned(nn.Embedding):
    """A learned vector for each position below `max_position_embeddings`."""

    def __init__(self, config):
        super().__init__(config.max_position_embeddings, config.hidden_size)

    def forward(self, position_ids: Tensor) -> Tensor:
        """Embeddings [B, T, hidden_size] of positions [B, T]."""
        if (
            not is_tracing(position_ids)
            and (newest := int(position_ids.max())) >= self.num_embeddings
        ):
            raise ValueError(
                f"max_position_embeddings must be at least {newest + 1} to read a token at position {newest} with "
                f"position='learned', got {self.num_embeddings}"
            )
        return super().forward(position_ids)


class Shaw(nn.Module):
    """s_ij = q_i (k_j + P_d),   o_i = sum_j a_ij (v_j + R_d),   d = min(i - j, the largest distance).

    https://arxiv.org/abs/1803.02155. Since attention is causal, there are no rows for negative distances.
    """

    def __init__(self, config):
        super().__init__()
        self.keys = nn.Embedding(config.max_relative_distance + 1, config.head_dim)
        self.values = nn.Embedding(config.max_relative_distance + 1, config.head_dim)

    def forward(self, scores: Tensor, blocks: Blocks, scaling: float) -> Tensor:
        """See `Relation`."""
        keys = _table(self.keys, scores).to(blocks.queries.dtype)
        by_distance = torch.einsum("bchd,nd->bhcn", blocks.queries, keys).to(scores.dtype) * scaling
        return scores + by_distance.gather(-1, self._rows(scores, blocks))

    def read(self, weights: Tensor, blocks: Blocks) -> Tensor:
        """See `Relation`."""
        values = _table(self.values, weights)
        shares = weights.new_zeros(*weights.shape[:3], len(values))
        return (shares.scatter_add(-1, self._rows(weights, blocks), weights) @ values).transpose(
            1, 2
        )

    def _rows(self, like: Tensor, blocks: Blocks) -> Tensor:
        return blocks.distance.clamp(max=self.keys.num_embeddings - 1)[:, None].expand(like.shape)


class TransformerXL(nn.Module):
    """s_ij = ((q_i + u) k_j + (q_i + v) W r_{i-j}) / sqrt(D), where r_d has the sines and cosines of a distance d.

    u is `content_bias`, v is `distance_bias` and W is `distance_proj`, each for every head.
    https://arxiv.org/abs/1901.02860. By sin(i - j) = sin i cos j - cos i sin j, the second part is a product of a
    vector at i and a vector at j, so that no matrix of distances is needed.
    """

    def __init__(self, config):
        super().__init__()
        heads = config.num_attention_heads
        D = config.head_dim
        self.content_bias = nn.Parameter(torch.empty(heads, D))
        self.distance_bias = nn.Parameter(torch.empty(heads, D))
        # tensor parallelism splits rows
        self.distance_proj = nn.Parameter(torch.empty(heads * D, config.hidden_size))
        self.std = config.initializer_range

    def init_own_parameters(self) -> None:
        """Initialised like other weights."""
        for x in self.parameters(recurse=False):
            init.normal_(x, std=self.std)

    def forward(self, scores: Tensor, blocks: Blocks, scaling: float) -> Tensor:
        """See `Relation`."""
        B, _, H, _ = blocks.keys.shape
        dtype = scores.dtype
        content = self.content_bias.to(blocks.keys.dtype).unflatten(0, (H, -1))
        of_keys = torch.einsum("bshd,hgd->bhgs", blocks.keys, content).flatten(1, 2).to(dtype)
        q = blocks.queries.to(dtype) + self.distance_bias.to(dtype)
        proj = self.distance_proj.unflatten(0, (-1, q.shape[-1]))
        sines, cosines = torch.einsum("bchd,hde->bhce", q, proj.to(dtype)).chunk(2, -1)
        E = 2 * sines.shape[-1]
        (sin_i, cos_i), (sin_j, cos_j) = (
            sinusoids(x, E, dtype) for x in (blocks.q_pos, blocks.k_pos)
        )
        sin_i = sin_i[:, None]
        cos_i = cos_i[:, None]
        by_query = torch.cat([sines * sin_i + cosines * cos_i, cosines * sin_i - sines * cos_i], -1)
        by_key = torch.cat([cos_j, sin_j], -1).expand(B, -1, -1)
        of_distances = torch.einsum("bhce,bse->bhcs", by_query, by_key)
        return scores + scaling * (of_keys[:, :, None] + of_distances)

    read = _nothing


class Alibi(nn.Module):
    """s_ij = q_i k_j / sqrt(D) - m_h (i - j), m_h fixed: from 1/2 for the first of 8 heads to 1/256 for the last.

    https://arxiv.org/abs/2108.12409.
    """

    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads

    def forward(self, scores: Tensor, blocks: Blocks, scaling: float) -> Tensor:
        """See `Relation`."""
        if scores.shape[1] != self.heads:
            raise ValueError(
                f"position must not be 'alibi' with tensor parallelism, got {scores.shape[1]} of {self.heads} heads"
            )
        return scores - alibi_slopes(self.heads, scores)[:, None, None] * blocks.distance[:, None]

    read = _nothing


def alibi_slopes(heads: int, like: Tensor) -> Tensor:
    """Slopes as published: 2^(-8 h / n) for the first n heads, n a power of two, and values between for others."""
    n = 2 ** (heads.bit_length() - 1)
    h = torch.arange(heads, device=like.device, dtype=like.dtype)
    return torch.exp2(-8 / n * torch.where(h < n, h + 1, h - n + 0.5))


class DistanceAware(nn.Module):
    """s_ij = relu(q_i k_j / sqrt(D)) f(a_h (i - j)),   f(R) = (1 + e^b_h) / (1 + e^(b_h - R)).

    https://arxiv.org/abs/2010.06925. f(0) = 1. With a negative a_h scores fall to 0 with distance; with a positive one
    they grow by a factor of up to 1 + e^b_h. A token with a score of 0 is still seen.
    """

    def __init__(self, config):
        super().__init__()
        self.rate = nn.Parameter(torch.empty(config.num_attention_heads))
        self.bound = nn.Parameter(torch.empty(config.num_attention_heads))
        self.std = config.initializer_range

    def init_own_parameters(self) -> None:
        """Scores start nearly independent of distances."""
        init.normal_(self.rate, std=self.std)
        init.zeros_(self.bound)

    def forward(self, scores: Tensor, blocks: Blocks, scaling: float) -> Tensor:
        """See `Relation`."""
        bound = self.bound.to(scores.dtype)[:, None, None]
        R = self.rate.to(scores.dtype)[:, None, None] * blocks.distance[:, None]
        return F.relu(scores) * (F.softplus(bound) - F.softplus(bound - R)).exp()

    read = _nothing


def _table(rows: nn.Embedding, like: Tensor) -> Tensor:
    return rows(torch.arange(rows.num_embeddings, device=like.device)).to(like.dtype)


EMBEDDED = {"sinusoidal": Sinusoidal, "learned": Learned}  # added to the embeddings
RELATIONS: dict[str, type[nn.Module]] = {
    "relative": Shaw,
    "xl": TransformerXL,
    "alibi": Alibi,
    "distance_aware": DistanceAware,
}
POSITIONS = ("rope", "none", "forget", *EMBEDDED, *RELATIONS)


class AdaptiveSpan(Convertible, nn.Module):
    """a_ij ~ m(i - j) e^s_ij,   m(d) = clip((R + z_h - d) / R, 0, 1),   z_h the span of head h and R the ramp.

    https://arxiv.org/abs/1905.07799. Computed by adding log m to the scores. A span is clamped between 0 and
    `max_span`. The gradient of attention ignores the clamp, so that a span at a bound can move back.
    """

    starts = {"span": 0.0}  # as published: heads see the ramp only

    def __init__(self, config):
        super().__init__()
        self.inner: Any = (
            RELATIONS[config.position](config) if config.position in RELATIONS else None
        )
        self.longest = config.max_span
        self.ramp = config.span_ramp
        self.span = nn.Parameter(torch.empty(config.num_attention_heads))  # relative to max_span

    def start_open(self, half_life: int) -> None:
        """Let all heads start with the longest span."""
        self.span.fill_(1)

    @property
    def spans(self) -> Tensor:
        """The span of each head in tokens, [HQ]."""
        return self.longest * upcast(self.span).clamp(0, 1)

    def forward(self, scores: Tensor, blocks: Blocks, scaling: float) -> Tensor:
        """See `Relation`."""
        if self.inner is not None:
            scores = self.inner(scores, blocks, scaling)
        free = self.longest * upcast(self.span)
        z = (free + (self.spans - free).detach()).to(scores.dtype)[:, None, None]
        m = ((self.ramp + z - blocks.distance[:, None]) / self.ramp).clamp(0, 1)
        return scores + torch.where(m > 0, m.clamp(min=torch.finfo(m.dtype).tiny).log(), -torch.inf)

    def read(self, weights: Tensor, blocks: Blocks) -> Tensor | None:
        """See `Relation`."""
        return None if self.inner is None else self.inner.read(weights, blocks)
