"""Later variants of the delta rule: DeltaProduct, Gated DeltaNet 2, Comba and preconditioning."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_memory.cache import Spec, State
from hf_memory.layers import unit_length, upcast
from hf_memory.mixers.base import Context, Projected, States
from hf_memory.mixers.delta_net import DeltaNetMixer
from hf_memory.mixers.gates import SoftplusDecay
from hf_memory.mixers.levels import Written
from hf_memory.mixers.positions import Positions
from hf_memory.ops import linear_attention
from hf_memory.ops.layout import repeat_heads


class DeltaProductMixer(DeltaNetMixer):
    """S <- e^g S, and then n steps S <- S + beta k (v - S^T k)^T, each with a key, a value and a strength of its own.

    The n steps are n tokens of the delta rule, of which the first decays and the last reads.
    https://arxiv.org/abs/2502.10297.
    """

    has_levels = False

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.steps = config.num_householder
        for name in ("k_proj", "v_proj", "b_proj"):
            one = getattr(self, name)
            outputs = self.steps * one.out_features
            setattr(self, name, nn.Linear(one.in_features, outputs, bias=one.bias is not None))
        self.make_convolutions(config.linear_conv_kernel_dim)

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of DeltaNet, where the convolutions of keys and values have n times as many channels."""
        spec = super().state_spec(config, layer_idx)
        n = config.num_householder
        for name in {"k_conv", "v_conv"} & spec.keys():
            width, channels = spec[name].shape
            spec[name] = replace(spec[name], shape=(width, n * channels))
        return spec

    def split_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, K], k [B, T * n, H, K] and v [B, T * n, HV, V]: each token has n keys and values."""
        q, k, v = super().split_heads(q, k, v)
        return q, self._steps_as_tokens(k), self._steps_as_tokens(v)

    def _steps_as_tokens(self, x: Tensor) -> Tensor:
        """[B, T, n * H, ...] -> [B, T * n, H, ...]."""
        return x.unflatten(2, (self.steps, -1)).flatten(1, 2)

    def update(
        self, projected: Projected, context: Context, written: Written
    ) -> tuple[Tensor, States]:
        """See `DeltaNetMixer`."""
        n = self.steps
        mask = context.attention_mask
        cu_seqlens = context.cu_seqlens
        context = context._replace(
            attention_mask=None if mask is None else mask.repeat_interleave(n, 1),
            cu_seqlens=None if cu_seqlens is None else n * cu_seqlens,
        )
        q, k, v, g, beta = written
        q = F.pad(q[:, :, None], (0, 0, 0, 0, n - 1, 0)).flatten(1, 2)
        if g is not None:
            g = F.pad(g[:, :, None], (0, 0) * (g.ndim - 2) + (0, n - 1)).flatten(1, 2)
        written = Written(q, k, v, g, self._steps_as_tokens(beta))
        o, states = super().update(projected, context, written)
        return o[:, n - 1 :: n], states


class GatedDeltaNet2Mixer(DeltaNetMixer):
    """S <- e^g S;   S <- S + k (w v - S^T (b k))^T: gates b and w of each channel erase and write.

    https://arxiv.org/abs/2605.22791.
    """

    has_levels = False

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        heads = self.num_output_heads
        self.b_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=False)
        self.w_proj = nn.Linear(config.hidden_size, heads * self.value_dim, bias=False)

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """See `DeltaNetMixer`; with the gate w."""
        rows = super().project(hidden_states, positions)
        return rows | {"write": self.w_proj(hidden_states).sigmoid()}

    def update(
        self, projected: Projected, context: Context, written: Written
    ) -> tuple[Tensor, States]:
        """See `DeltaNetMixer`; g is [B, T, HV, K], and beta [B, T, HV * K] has the gates b."""
        q, k, v, g, beta = written
        k = unit_length(k)
        b = repeat_heads(k, v.shape[2])
        a = -(g.exp() * beta.view_as(b) * b).to(k.dtype)
        ones = torch.ones_like(beta[..., : v.shape[2]])
        written = Written(unit_length(q), k, projected["write"].view_as(v) * v, g, ones)
        return self.remember(projected, context, written, a=a, b=b)


class CombaMixer(DeltaNetMixer):
    """S <- e^g S + beta k (v - S^T p)^T;   o = S^T (q - D p), with p = sigmoid(inner_decay) k.

    The value that the memory predicts for p is that before the decay, and queries are corrected by D p. As in the
    published code, p and q - D p are scaled to unit length before they read. https://arxiv.org/abs/2506.02475.
    """

    has_levels = False
    starts = {"inner_decay": 1.0, "D": 1.0}  # as published

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        heads = self.q_proj.out_features // self.head_dim
        self.inner_decay = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))

    def start_open(self, half_life: int) -> None:
        """Set D to zero, so that queries start without a correction."""
        self.D.zero_()

    def update(
        self, projected: Projected, context: Context, written: Written
    ) -> tuple[Tensor, States]:
        """See `DeltaNetMixer`."""
        q, k, v, g, beta = written
        p = (self.inner_decay.sigmoid()[:, None] * k).to(k.dtype)
        q = q - self.D.to(k.dtype)[:, None] * p
        p = repeat_heads(p, v.shape[2])
        k = unit_length(k)
        b = (beta[..., None] * repeat_heads(k, v.shape[2])).to(k.dtype)
        written = Written(unit_length(q), k, v, g, beta)
        return self.remember(projected, context, written, a=-unit_length(p), b=b)


class PreconditionedMixer(DeltaNetMixer):
    """A <- e^f A + c k^2;   S <- e^g S;   S <- S + beta (m k) (v - S^T k)^T, with m = 1.5^-softsign(log A - center).

    A has the decayed sum of squares of each key channel, so channels that have been written more get smaller writes.
    https://arxiv.org/abs/2604.21100.
    """

    has_levels = False
    starts = {"center": -0.2}  # as published

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        heads = self.q_proj.out_features // self.head_dim
        self.key_decay = SoftplusDecay(config.hidden_size, heads)
        self.c_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self.center = nn.Parameter(torch.empty(heads))

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of DeltaNet, and the sums A of squares of keys."""
        heads, _, _, K, _ = config.memory_heads
        return super().state_spec(config, layer_idx) | {"key_squares": State((heads, 1, K))}

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """See `DeltaNetMixer`; with the strength c and the decay f of the sums of squares."""
        rows = super().project(hidden_states, positions)
        rows["c"] = self.c_proj(hidden_states).sigmoid()
        rows["f"] = self.key_decay(hidden_states)[0]
        return rows

    def update(
        self, projected: Projected, context: Context, written: Written
    ) -> tuple[Tensor, States]:
        """See `DeltaNetMixer`; the sums are a linear attention with one key channel, which decays by head."""
        q, k, v, g, beta = written
        k = unit_length(k)
        squares, sums = linear_attention(
            torch.ones_like(k[..., :1]),
            projected["c"][..., None].to(k.dtype),
            k.square(),
            projected["f"],
            scale=1.0,
            **context.options(self.config.mixer_backend, context.states.get("key_squares")),
        )
        excess = F.softsign((upcast(squares) + 1e-6).log() - upcast(self.center)[:, None])
        writes = (k * (-math.log(1.5) * excess).exp()).to(k.dtype)
        k, b = (repeat_heads(x, v.shape[2]) for x in (k, writes))
        decay = g.exp() if g.ndim == 4 else g.exp()[..., None]
        a = -(decay * k).to(k.dtype)
        b = (beta[..., None] * b).to(k.dtype)
        written = Written(unit_length(q), writes, v, g, beta)
        o, states = self.remember(projected, context, written, a=a, b=b)
        return o, states | {"key_squares": sums}
