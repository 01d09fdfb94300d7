"""The feature maps of linear attention as a module, which holds learned weights and random projections."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_memory.mixers.base import Context, States
from hf_memory.ops import feature_maps
from hf_memory.ops.feature_maps import RANDOM_FEATURE_MAPS


def num_features(config) -> int:
    """Number of features of a head with the config's feature map."""
    D = config.head_dim
    F = config.feature_dim
    widths = {
        "hedgehog": 2 * D,
        "dpfp": 2 * D * feature_maps.DPFP_ROLLS,
        "taylor": 1 + D + D * (D + 1) // 2,
    }
    widths |= {"favor": F or D, "rfa": 2 * (F or 0) or D}
    return widths.get(config.feature_map, D)


class FeatureMap(nn.Module):
    """Maps queries and keys [B, T, H, D] to features [B, T, H, F]."""

    def __init__(self, config):
        super().__init__()
        self.name = config.feature_map
        H = config.num_attention_heads
        D = config.head_dim
        if self.name == "hedgehog":
            # tensor parallelism splits rows, which are heads
            self.q_weight = nn.Parameter(torch.empty(H * D, D))
            self.k_weight = nn.Parameter(torch.empty(H * D, D))
        if self.name in RANDOM_FEATURE_MAPS:
            self.projection = nn.Buffer(torch.empty(config.feature_dim, D))

    def init_own_parameters(self) -> None:
        """Learned maps start at the identity; random projections are drawn once and saved with the model."""
        if self.name == "hedgehog":
            for weight in (self.q_weight, self.k_weight):
                D = weight.shape[1]
                init.copy_(weight, torch.eye(D).repeat(weight.shape[0] // D, 1))
        if self.name in RANDOM_FEATURE_MAPS:
            init.copy_(self.projection, feature_maps.orthogonal_projection(*self.projection.shape))

    def forward(
        self, q: Tensor, k: Tensor, context: Context
    ) -> tuple[Tensor, Tensor, Tensor | None, States]:
        """Features of q and k, a decay that keeps the memory in range (favor only), and the states of the map."""
        mask = context.attention_mask
        cu_seqlens = context.cu_seqlens
        states = context.states
        if self.name == "favor":
            starts = None  # where a packed sequence begins
            if cu_seqlens is not None:
                starts = k.new_zeros(k.shape[1] + 1, dtype=torch.bool).index_fill(
                    0, cu_seqlens.long(), True
                )[:-1]
            q = feature_maps.favor_query(q, self.projection)
            k, g, running_max = feature_maps.favor_key(
                k, self.projection, states.get("running_max"), mask, starts
            )
            return q, k, g, {"running_max": running_max}
        return self._map(q, "q_weight"), self._map(k, "k_weight"), None, {}

    def _map(self, x: Tensor, weight: str) -> Tensor:
        phi = getattr(feature_maps, self.name)
        if self.name == "hedgehog":
            return phi(x, getattr(self, weight).unflatten(0, (-1, x.shape[-1])))
        return phi(x, self.projection) if self.name == "rfa" else phi(x)
