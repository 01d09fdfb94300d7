"""Layers that mixers and blocks share; many come from transformers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaMLP as SwiGLU
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import (
    Phi3RotaryEmbedding as RotaryEmbedding,  # Llama's, and partial
)

from hf_memory.convertible import Convertible
from hf_memory.ops import cpu
from hf_memory.ops.layout import expand_dims_like, true_first
from hf_memory.ops.masks import packed
from hf_memory.ops.precision import upcast
from hf_memory.ops.short_convolution import convolution_step

__all__ = [
    "GroupRMSNorm",
    "RMSNorm",
    "RotaryEmbedding",
    "ShortConvolution",
    "SwiGLU",
    "causal_convolution",
    "last_tokens",
    "token_before",
    "unit_length",
    "upcast",
]


def unit_length(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6) over the last dimension, computed in float32; zero stays zero."""
    return (upcast(x) * torch.rsqrt(upcast(x).square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


class RMSNorm(LlamaRMSNorm):
    """Llama's RMS norm, in one call."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., channels] -> [..., channels]."""
        weight = self.weight
        eps = self.variance_epsilon
        if hidden_states.dtype != weight.dtype:  # under autocast
            return weight * F.rms_norm(hidden_states, weight.shape, eps=eps)
        is_plain = cpu.runs(hidden_states) and type(weight) is nn.Parameter and weight.is_cpu
        if is_plain and hidden_states.shape[1] == 1:  # one token of each row
            return cpu.rms_norm(hidden_states, weight, eps)
        return torch.rms_norm(hidden_states, weight.shape, weight, eps)


class GroupRMSNorm(RMSNorm):
    """RMS norm of each of `groups` equal parts of the channels."""

    def __init__(self, channels: int, groups: int, eps: float):
        super().__init__(channels, eps=eps)
        self.groups = groups

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., channels] -> [..., channels]."""
        parts = hidden_states.unflatten(-1, (self.groups, -1))
        return self.weight * F.rms_norm(parts, parts.shape[-1:], eps=self.variance_epsilon).flatten(
            -2
        )


class ShortConvolution(Convertible, nn.Module):
    """A causal depthwise convolution: for each channel a weighted sum over the last W tokens."""

    def __init__(self, channels: int, kernel_size: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel_size))  # the current token is last
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def init_own_parameters(self) -> None:
        """Uniform with variance 1 / (3 W), as PyTorch initialises a depthwise Conv1d."""
        bound = self.weight.shape[1] ** -0.5
        init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.zeros_(self.bias)

    def start_open(self, half_life: int) -> None:
        """Start as the identity."""
        self.weight.zero_()[:, -1] = 1
        if self.bias is not None:
            self.bias.zero_()

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        silu: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """`causal_convolution` of x [B, T, channels] with this weight and bias."""
        return causal_convolution(
            x, self.weight, self.bias, state, attention_mask, cu_seqlens, silu=silu
        )


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    """y_t = bias + sum_w weight_w x_{t-w}, over tokens of the same sequence that are not padding; then silu if asked.

    Args:
        x: [B, T, channels].
        weight: [channels, W], that of the token itself last.
        bias: [channels] or None.
        state: the last W - 1 tokens before x [B, W - 1, channels], which may be overwritten; None means there were
            none.
        attention_mask: [B, T], zero at padding, or None.
        cu_seqlens: boundaries [N + 1] of packed sequences, with B == 1, or None.
        silu: whether silu follows.

    Returns:
        y [B, T, channels], zero at padding, and the state after x.
    """
    W = weight.shape[1]
    is_plain = attention_mask is None and cu_seqlens is None
    if state is not None and W > 1 and x.shape[1] == 1 and is_plain:
        return convolution_step(x, state, weight, bias, silu=silu, in_place=True)
    y, state = _over_last_tokens(
        lambda context: _weighted_sums(context, weight, bias, cu_seqlens),
        W,
        x,
        state,
        attention_mask,
    )
    return F.silu(y) if silu else y, state


def _weighted_sums(
    context: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """The weighted sums over each token and the W - 1 tokens before it in the same packed sequence, in float32.

    [B, W - 1 + T, channels] -> [B, T, channels]. On the CPU this takes a sixth of the time of a convolution.
    """
    W = weight.shape[1]
    T = context.shape[1] - W + 1
    weight = weight.mT.to(torch.promote_types(context.dtype, torch.float32)).contiguous()
    place = None if cu_seqlens is None else packed(cu_seqlens, T).position[0, :, None]
    y = context[:, W - 1 :] * weight[-1]
    for w in range(1, W):
        past = context[:, W - 1 - w : W - 1 - w + T]
        y.addcmul_(past if place is None else past.where(place >= w, 0), weight[-1 - w])
    return y if bias is None else y + bias


def token_before(
    x: Tensor, state: Tensor | None, attention_mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The previous token of each of x [B, T, channels] in its sequence, zero for the first, and the state.

    The state [B, 1, channels] is the last token of x. The arguments are those of a `ShortConvolution` over two tokens.
    """

    def before(context: Tensor) -> Tensor:
        past = context[:, :-1]
        if cu_seqlens is None:
            return past
        return past.where(packed(cu_seqlens, past.shape[1]).position[0, :, None] > 0, 0)

    return _over_last_tokens(before, 2, x, state, attention_mask)


def _over_last_tokens(
    f: Callable[[Tensor], Tensor],
    W: int,
    x: Tensor,
    state: Tensor | None,
    attention_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The results of f, which reads a window of W tokens, and the state after x.

    Args:
        f: [B, W - 1 + T, channels], the W - 1 tokens before x and those of x -> results [B, T, channels]. It is given
            each row with its padding at the end.
        W: number of tokens of a window.
        x: [B, T, channels].
        state: [B, W - 1, channels], the tokens before x, or None if there were none.
        attention_mask: [B, T], zero at padding, or None.

    Returns:
        The results [B, T, ...], zero at padding, and the last W - 1 tokens that are not padding.
    """
    B, T, channels = x.shape
    if state is None:
        state = x.new_zeros(B, W - 1, channels)
    if attention_mask is not None:
        x, order = real_tokens_first(x, attention_mask)
    context = torch.cat([state.to(x.dtype), x], dim=1)
    y = f(context).to(x.dtype)
    if attention_mask is None:
        return y, context[:, T:]
    last = attention_mask.sum(1, keepdim=True) + torch.arange(W - 1, device=x.device)  # [B, W - 1]
    state = context.gather(1, last.long()[..., None].expand(-1, -1, channels))
    return in_their_places(y, order) * attention_mask[..., None].to(y.dtype), state


def last_tokens(
    x: Tensor,
    W: int,
    state: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The last W tokens [B, T, W, channels] at each token x [B, T, channels], zero before a sequence; and the state.

    The arguments are those of `ShortConvolution`; the token itself comes last.
    """

    def windows(context: Tensor) -> Tensor:
        T = context.shape[1] - W + 1
        tokens = torch.stack([context[:, w : w + T] for w in range(W)], dim=2)
        if cu_seqlens is not None:
            age = torch.arange(W - 1, -1, -1, device=context.device)
            tokens = tokens.where((packed(cu_seqlens, T).position[0, :, None] >= age)[..., None], 0)
        return tokens.flatten(2)

    tokens, state = _over_last_tokens(windows, W, x, state, attention_mask)
    return tokens.unflatten(2, (W, -1)), state


def real_tokens_first(x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, T, ...] with the padding of each row moved to the end, and the original places of the tokens [B, T]."""
    order = true_first(attention_mask.bool())
    return x.gather(1, _index(order, x)), order


def in_their_places(x: Tensor, order: Tensor) -> Tensor:
    """The inverse of `real_tokens_first`."""
    return torch.zeros_like(x).scatter(1, _index(order, x), x)


def _index(order: Tensor, x: Tensor) -> Tensor:
    return expand_dims_like(order, x).expand_as(x)
