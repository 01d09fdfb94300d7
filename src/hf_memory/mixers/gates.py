"""Decay gates: from hidden states to the natural logarithm of the decay factor, <= 0 and in float32 or wider."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.convertible import Convertible
from hf_memory.layers import upcast


def low_rank(hidden_size: int, rank: int | None) -> tuple[nn.Module, int]:
    """A projection to `rank` channels, or the identity if `rank` is None, and the number of output channels."""
    if rank is None:
        return nn.Identity(), hidden_size
    return nn.Linear(hidden_size, rank, bias=False), rank


def steady_rows(down: nn.Module, proj: nn.Linear, direction: Tensor) -> None:
    """Let all outputs of a projection, or of a product of two, be hidden states times `direction` [hidden_size]."""
    if isinstance(down, nn.Linear):
        down.weight[0] = direction
        direction = torch.eye(1, proj.in_features, device=proj.weight.device)[0]
    proj.weight.copy_(direction.expand_as(proj.weight))


class FixedDecay(nn.Module):
    """The fixed decay of RetNet: at each token, head h decays by 1 - 2^(-5 - h). https://arxiv.org/abs/2307.08621."""

    def __init__(self, heads: int):
        super().__init__()
        self.heads = heads

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, T, hidden_size] -> g [B, T, H]."""
        heads = torch.arange(self.heads, device=hidden_states.device, dtype=torch.float32)
        return torch.log1p(-(2.0 ** (-5 - heads))).expand(*hidden_states.shape[:2], -1)


class SigmoidDecay(Convertible, nn.Module):
    """log sigmoid(W x) / temperature, for each head, or for each key channel with a low-rank W.

    Gated retention has the first (https://arxiv.org/abs/2405.05254), GLA the second (https://arxiv.org/abs/2312.06635).
    """

    def __init__(
        self, hidden_size: int, heads: int, channels: int | None, rank: int, temperature: float
    ):
        super().__init__()
        self.channels = channels
        self.temperature = temperature
        self.down, width = low_rank(hidden_size, None if channels is None else rank)
        self.proj = nn.Linear(width, heads * (channels or 1))

    def start_open(self, half_life: int) -> None:
        """Let the memory decay by half in `half_life` tokens."""
        self.proj.bias.fill_(-math.log(math.expm1(self.temperature * math.log(2) / half_life)))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, T, hidden_size] -> g [B, T, H] or [B, T, H, K]."""
        g = F.logsigmoid(upcast(self.proj(self.down(hidden_states)))) / self.temperature
        return g if self.channels is None else g.unflatten(-1, (-1, self.channels))


class SoftplusDecay(Convertible, nn.Module):
    """-exp(A_log) step with step = softplus(W x + dt_bias), for each head, or for each key channel with a low-rank W.

    Mamba-2 has the first (https://arxiv.org/abs/2405.21060), Kimi Delta Attention the second
    (https://arxiv.org/abs/2510.26692).
    """

    def __init__(self, hidden_size: int, heads: int, channels: int | None = None):
        super().__init__()
        self.channels = channels
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads * (channels or 1)))
        self.down, width = low_rank(hidden_size, channels)
        self.proj = nn.Linear(width, heads * (channels or 1), bias=False)

    def init_own_parameters(self) -> None:
        """As in Mamba-2: exp(A_log) uniform in (1, 16), and steps at W x = 0 log-uniform in (0.001, 0.1)."""
        A = torch.empty(self.A_log.shape).uniform_(1, 16)
        init.copy_(self.A_log, A.log())
        _start_steps(self.dt_bias)

    def start_open(self, half_life: int) -> None:
        """Let the memory decay by half in `half_life` tokens."""
        self.A_log.zero_()
        self.dt_bias.fill_(math.log(math.expm1(math.log(2) / half_life)))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, hidden_size] -> g [B, T, H] or [B, T, H, K], and the positive steps of the same shape."""
        steps = F.softplus(upcast(self.proj(self.down(hidden_states))) + upcast(self.dt_bias))
        A = upcast(self.A_log).exp()
        if self.channels is not None:
            A = A[:, None]
            steps = steps.unflatten(-1, (-1, self.channels))
        return -A * steps, steps


class StepDecay(Convertible, nn.Module):
    """Mamba-3's decay: a step softplus(W x + dt_bias) times a rate softplus(V x), of at least 1e-4, for each head.

    https://arxiv.org/abs/2603.15569.
    """

    def __init__(self, hidden_size: int, heads: int):
        super().__init__()
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.proj = nn.Linear(hidden_size, heads, bias=False)
        self.rate_proj = nn.Linear(hidden_size, heads, bias=False)

    def init_own_parameters(self) -> None:
        """Steps as in `SoftplusDecay`."""
        _start_steps(self.dt_bias)

    def start_open(self, half_life: int) -> None:
        """Let the memory decay by half in `half_life` tokens."""
        self.dt_bias.fill_(math.log(math.expm1(1 / half_life)))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, hidden_size] -> g [B, T, H], and the positive steps of the same shape."""
        steps = F.softplus(upcast(self.proj(hidden_states)) + upcast(self.dt_bias))
        return -F.softplus(upcast(self.rate_proj(hidden_states))).clamp(min=1e-4) * steps, steps


class ChannelDecay(nn.Module):
    """Mamba's decay: a step softplus(W x + dt_bias) for each value channel, with a low-rank W, times a rate exp(A_log)
    for each number of the state. https://arxiv.org/abs/2312.00752, section 3.6.
    """

    def __init__(self, channels: int, keys: int, rank: int):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(channels, keys))
        self.dt_bias = nn.Parameter(torch.empty(channels))
        self.down = nn.Linear(channels, rank, bias=False)
        self.proj = nn.Linear(rank, channels, bias=False)

    def init_own_parameters(self) -> None:
        """Rates 1, 2, 3, ... in each channel (S4D-Real), and steps as in `SoftplusDecay`."""
        channels, keys = self.A_log.shape
        init.copy_(self.A_log, torch.arange(1.0, keys + 1).log().expand(channels, -1))
        bound = self.proj.in_features**-0.5
        init.uniform_(self.proj.weight, -bound, bound)
        _start_steps(self.dt_bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, channels] -> positive steps [B, T, channels], and rates [1, keys, channels]."""
        steps = F.softplus(upcast(self.proj(self.down(x))) + upcast(self.dt_bias))
        return steps, upcast(self.A_log).mT.exp()[None]


def _start_steps(dt_bias: nn.Parameter) -> None:
    """Set the bias so that steps at W x = 0 are log-uniform in (0.001, 0.1)."""
    step = torch.empty(dt_bias.shape).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    init.copy_(dt_bias, step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
