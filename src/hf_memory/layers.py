"""Parts that mixers and blocks share. What transformers has, we take from it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaMLP as SwiGLU
from transformers.models.llama.modeling_llama import LlamaRMSNorm as RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding as RotaryEmbedding  # Llama's, also in part

__all__ = [
    "GroupRMSNorm",
    "RMSNorm",
    "RotaryEmbedding",
    "ShortConvolution",
    "SwiGLU",
    "unit_length",
]


def unit_length(x: Tensor) -> Tensor:
    """x / |x| over the last dimension, in float32; 1e-6 under the root keeps zero at zero."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


class GroupRMSNorm(RMSNorm):
    """RMS norm of each of `groups` equal parts of the channels."""

    def __init__(self, channels: int, groups: int, eps: float):
        super().__init__(channels, eps=eps)
        self.groups = groups

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., channels] -> the same."""
        parts = hidden_states.float().unflatten(-1, (self.groups, -1))
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * parts.flatten(-2).to(hidden_states.dtype)


class ShortConvolution(nn.Module):
    """Each channel's weighted sum of its last W tokens."""

    def __init__(self, channels: int, kernel_size: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel_size))  # the present token last
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def init_own_parameters(self) -> None:
        """Uniform, with variance 1 / (3 W): what a depthwise Conv1d starts from."""
        bound = self.weight.shape[1] ** -0.5
        init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.zeros_(self.bias)

    def start_open(self, half_life: int) -> None:
        """The present token passes as it is."""
        self.weight.zero_()[:, -1] = 1
        if self.bias is not None:
            self.bias.zero_()

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """y_t = sum_w weight_w x_{t-w}, over tokens of the same sequence that are not padding.

        Args:
            x: [B, T, channels].
            state: the last W - 1 tokens before x [B, W - 1, channels]; None means there were none.
            attention_mask: [B, T], zero at padding, or None.
            cu_seqlens: boundaries [N + 1] of packed sequences, with B == 1, or None.

        Returns:
            y [B, T, channels], zero at padding, and the state after x.
        """
        B, T, channels = x.shape
        W = self.weight.shape[1]
        if state is None:
            state = x.new_zeros(B, W - 1, channels)
        if attention_mask is not None:
            x, order = real_tokens_first(x, attention_mask)
        context = torch.cat([state.to(x.dtype), x], dim=1)  # [B, W - 1 + T, channels]
        y = F.conv1d(context.mT, self.weight[:, None], self.bias, groups=channels).mT
        if cu_seqlens is not None:
            y = y - self._leaked(context, cu_seqlens)
        if attention_mask is None:
            return y, context[:, T:].clone()  # a view would keep all of the context alive
        last = attention_mask.sum(1, keepdim=True) + torch.arange(W - 1, device=x.device)  # [B, W - 1]
        state = context.gather(1, last.long()[..., None].expand(-1, -1, channels))
        y = torch.zeros_like(y).scatter(1, order[..., None].expand_as(y), y)
        return y * attention_mask[..., None].to(y.dtype), state

    def _leaked(self, context: Tensor, cu_seqlens: Tensor) -> Tensor:
        """What the first W - 1 tokens of a packed sequence took from the one before it; zero elsewhere."""
        W = self.weight.shape[1]
        T = context.shape[1] - W + 1
        tokens = torch.arange(T, device=context.device, dtype=cu_seqlens.dtype)
        place = tokens - cu_seqlens[torch.searchsorted(cu_seqlens, tokens, right=True) - 1]  # in its own sequence
        leaks = [
            self.weight[:, W - 1 - w] * context[:, W - 1 - w : W - 1 - w + T] * (place < w)[:, None]
            for w in range(1, W)
        ]
        return torch.stack(leaks).sum(0)


def real_tokens_first(x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Each row with its padding moved to the end, and where each token came from [B, T]."""
    order = attention_mask.long().argsort(dim=1, descending=True, stable=True)
    return x.gather(1, order[..., None].expand_as(x)), order
