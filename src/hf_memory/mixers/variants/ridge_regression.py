"""MesaNet and Gated KalmaNet, whose memories are read by solving a linear system."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_memory.cache import Spec, State
from hf_memory.layers import unit_length, upcast
from hf_memory.mixers.base import Context, MemoryMixer, OutputGate, Projected, States
from hf_memory.mixers.gates import SigmoidDecay, SoftplusDecay
from hf_memory.mixers.positions import Positions
from hf_memory.ops import RidgeState, ridge_regression

LEAST_RIDGE = 0.25


class MesaMixer(MemoryMixer):
    """H <- e^g H + beta k k^T;   S <- e^g S + beta k v^T;   o = S^T (H + L)^-1 q,   L = diag(softplus(ridge) + 1/4).

    https://arxiv.org/abs/2506.05233.
    """

    convolved = "qk"
    given: tuple[str, ...] = ("beta", "g")  # arguments of the op that are projected
    # a regulariser of one
    starts: dict[str, float] = {"ridge": math.log(math.expm1(1 - LEAST_RIDGE))}

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.make_convolutions(config.linear_conv_kernel_dim)
        heads = self.num_output_heads
        self.b_proj = nn.Linear(config.hidden_size, heads)
        self.decay: Any = SigmoidDecay(config.hidden_size, heads, None, 0, 1)
        self.ridge = nn.Parameter(torch.empty(heads * self.head_dim))
        self.output_gate = OutputGate(heads, self.value_dim, config)

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The sums S and H of products of keys with values and with keys, and the last inputs of the convolutions."""
        spec = super().state_spec(config, layer_idx)
        K = config.memory_heads[3]
        products = State((config.num_output_heads, K, K), is_recurrent=True)
        return spec | {"key_products": products}

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """See `MemoryMixer.project`; with the gates and the gate of the output."""
        rows = super().project(hidden_states, positions) | self.gates(hidden_states)
        return rows | self.output_gate.project(hidden_states)

    def gates(self, hidden_states: Tensor) -> Projected:
        """Arguments of the op for each token: beta and g [B, T, HV] in float32."""
        beta = upcast(self.b_proj(hidden_states)).sigmoid()
        return {"beta": beta, "g": self.decay(hidden_states)}

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The states are `key_products` [N, HV, K, K], `memory` [N, HV, K, V] and those of the convolutions."""
        q, k, v, new_states = self.heads_of(projected, context)
        options = context.options(self.config.mixer_backend, context.past(RidgeState))
        options |= self.regulariser()
        options |= {name: projected[name] for name in self.given}
        o, state = ridge_regression(unit_length(q), unit_length(k), v, **options)
        return self.output_gate(o, projected), new_states | state._asdict()

    def regulariser(self) -> dict[str, Any]:
        """Arguments of the op that all tokens share: the regulariser [HV, K] in float32."""
        ridge = F.softplus(upcast(self.ridge)).unflatten(0, (-1, self.head_dim)) + LEAST_RIDGE
        return {"ridge": ridge}


class KalmanMixer(MesaMixer):
    """The memory of `MesaMixer` with (beta + 1e-6)^2 for beta, L = |H| / 50, and another read.

        o = S^T (q + alpha (x - q)),   x = (H + L)^-1 q

    https://arxiv.org/abs/2511.21016.
    """

    convolved = "qkv"
    given = ("beta", "g", "alpha")
    starts: dict[str, float] = {}  # there is no regulariser

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        heads = self.num_output_heads
        self.decay = SoftplusDecay(config.hidden_size, heads)
        self.alpha_proj = nn.Linear(config.hidden_size, heads)
        del self.ridge

    def gates(self, hidden_states: Tensor) -> Projected:
        """Arguments of the op for each token: beta, g and alpha [B, T, HV] in float32."""
        strength, alpha = (
            upcast(proj(hidden_states)).sigmoid() for proj in (self.b_proj, self.alpha_proj)
        )
        beta = (strength + 1e-6).square()
        return {"beta": beta, "g": self.decay(hidden_states)[0], "alpha": alpha}

    def regulariser(self) -> dict[str, Any]:
        """Arguments of the op that all tokens share: the regulariser relative to |H|, and the scale."""
        return {"ratio": 0.02, "scale": self.head_dim**-0.5}
