"""The feature maps of linear attention as a module: it holds what a map has learned or drawn, and the op does the rest."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_memory.ops import feature_maps


class FeatureMap(nn.Module):
    """Maps queries and keys [B, T, H, D] to features [B, T, H, F] of one kernel."""

    def __init__(self, config):
        super().__init__()
        self.name = config.feature_map
        H, D = config.num_attention_heads, config.head_dim
        self.nu = config.dpfp_nu
        if self.name == "hedgehog":
            self.q_weight = nn.Parameter(torch.empty(H, D, D))
            self.k_weight = nn.Parameter(torch.empty(H, D, D))
        if self.name in ("favor", "rfa"):
            self.projection = nn.Buffer(torch.empty(config.feature_dim, D, dtype=torch.float32))
