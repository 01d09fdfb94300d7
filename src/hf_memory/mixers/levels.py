"""One memory for the whole past, or one for each of log2 T blocks, chosen by `levels`."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_memory.cache import Spec, State
from hf_memory.layers import upcast
from hf_memory.mixers.base import Context, Projected, States
from hf_memory.mixers.positions import Positions
from hf_memory.ops import LogLinearState, delta_rule, linear_attention, log_linear_attention
from hf_memory.ops.exported import varies

ONE = math.log(math.e - 1)  # softplus(ONE) = 1


class LevelWeights(nn.Module):
    """Weights of the blocks for each token: softplus(W x + b + log(e - 1)), which start at one."""

    starts = {
        "proj.weight": 0.0,
        "proj.bias": 0.0,
    }  # weights of one, which give the same outputs as a single memory

    def __init__(self, hidden_size: int, heads: int, levels: int):
        super().__init__()
        self.levels = levels
        self.proj = nn.Linear(hidden_size, heads * (levels + 1))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Weights [B, T, HV, L + 1] in float32 for hidden states [B, T, hidden_size]."""
        return F.softplus(upcast(self.proj(hidden_states)) + ONE).unflatten(
            -1, (-1, self.levels + 1)
        )


class Written(NamedTuple):
    """What tokens write to a memory, and the queries that read it; the names are those of the ops' arguments."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Any  # [B, T, HV] or [B, T, HV, K], or None: no decay
    beta: Any = None  # [B, T, HV], or None: the memory is additive


class Levels:
    """Adds `remember` to a `MemoryMixer`: linear attention or the delta rule, with one memory or with levels."""

    has_levels = True
    config: Any
    spec: Spec
    num_output_heads: int

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)  # type: ignore[call-arg]
        if config.levels == "log":
            self.level_weights = LevelWeights(
                config.hidden_size, self.num_output_heads, config.num_levels
            )

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """With levels, a matrix for each head and level, and the number of tokens read, which determines the blocks."""
        spec = super().state_spec(config, layer_idx)  # type: ignore[misc]
        if config.levels == "one":
            return spec
        memory = replace(spec["memory"], growth="log", at_most=2**config.num_levels - 1)
        return spec | {"memory": memory, "tokens_read": State((), torch.long)}

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """See `MemoryMixer.project`; with the weights of levels, if there are any."""
        rows = super().project(hidden_states, positions)  # type: ignore[misc]
        if self.config.levels == "log":
            rows["level_weights"] = self.level_weights(hidden_states)
        return rows

    def remember(
        self,
        projected: Projected,
        context: Context,
        written: Written,
        *,
        scale: float | None = None,
        **erase: Any,
    ) -> tuple[Tensor, States]:
        """Outputs [B, T, HV, V] and the memory after the tokens; `erase` are arguments a and b of the delta rule."""
        q, k, v, g, beta = written
        memory = context.states.get("memory")
        backend = self.config.mixer_backend
        if self.config.levels == "log":
            past = None
            T = q.shape[1]
            longest = 2**self.config.num_levels if varies(T) else T
            (levels,) = self.spec["memory"].grown_shape(longest)
            if memory is not None:
                past = LogLinearState(memory, context.states["tokens_read"])
                levels = memory.shape[1]
            weights = projected["level_weights"][..., : levels + 1]
            options = context.options(backend, past)
            o, after = log_linear_attention(
                q, k, v, weights, beta, g, scale=scale, **erase, **options
            )
            return o, {"memory": after.levels, "tokens_read": after.tokens_read}
        options = {**context.options(backend, memory), "scale": scale, "in_place": True}
        if beta is None:
            o, memory = linear_attention(q, k, v, g, **options)
        else:
            o, memory = delta_rule(q, k, v, beta, g, **erase, **options)
        return o, {"memory": memory}
