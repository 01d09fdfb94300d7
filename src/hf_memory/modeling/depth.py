"""Other ways through the layers of a model than one after the other."""

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.import_utils import is_tracing

from hf_memory.mixers.relations import Sinusoidal
from hf_memory.modeling.base import MemoryDecoderLayer

DEPTHS = ("fixed", "universal", "reversible")


class Universal(nn.Module):
    """One layer that runs several times: H_t = layer(H_{t-1} + P + S_t), with the positions P where they are embedded.

    S_t are the sines and cosines of the step t. Each step has a layer of the cache. https://arxiv.org/abs/1807.03819.
    """

    def __init__(self, config):
        super().__init__()
        self.steps = Sinusoidal(config)

    def forward(self, layer: MemoryDecoderLayer, hidden_states: Tensor, masks: list, positions, **kwargs) -> Tensor:
        """[B, T, hidden_size] through as many steps as there are masks."""
        for t, mask in enumerate(masks):
            hidden_states = self.step(t, layer, hidden_states, mask, positions, **kwargs)
        return hidden_states

    def step(self, t: int, layer: MemoryDecoderLayer, hidden_states: Tensor, mask, positions, **kwargs) -> Tensor:
        """The next hidden states."""
        here = self.steps(torch.tensor([[t]], device=hidden_states.device)) + positions
        return layer(hidden_states + here.to(hidden_states.dtype), attention_mask=mask, step=t, **kwargs)


class AdaptiveUniversal(Universal):
    """The same with as many steps as a token needs: it halts at the first N with p_1 + ... + p_N >= 1 - epsilon.

    p_t = sigmoid(w H_t + b), the last of all steps counts as 1, and the remainder is R = 1 - p_1 - ... - p_{N-1}. The
    output is p_1 H_1 + ... + p_{N-1} H_{N-1} + R H_N. A token that has halted is copied from step to step, so that
    later tokens find its keys and values. Its ponder cost is N + R. https://arxiv.org/abs/1603.08983.
    """

    def __init__(self, config):
        super().__init__(config)
        self.epsilon, self.weight = config.halting_epsilon, config.ponder_loss_weight
        self.halt = nn.Linear(config.hidden_size, 1)

    def init_own_parameters(self) -> None:
        """Three tokens of four halt after two steps or earlier."""
        init.ones_(self.halt.bias)

    def forward(self, layer: MemoryDecoderLayer, hidden_states: Tensor, masks: list, positions, **kwargs) -> Tensor:
        """[B, T, hidden_size] through at most as many steps as there are masks."""
        spent = hidden_states.new_zeros(hidden_states.shape[:2], dtype=torch.float32)  # p_1 + ... so far
        cost, output = torch.zeros_like(spent), torch.zeros_like(hidden_states)
        running = torch.ones_like(spent, dtype=torch.bool)
        for t, mask in enumerate(masks):
            made = self.step(t, layer, hidden_states, mask, positions, **kwargs)
            hidden_states = torch.where(running[..., None], made, hidden_states)
            p = self.halt(hidden_states)[..., 0].float().sigmoid()
            ends = running & ((spent + p >= 1 - self.epsilon) | (t == len(masks) - 1))
            cost = cost + running + torch.where(ends, 1 - spent, 0.0)
            weight = torch.where(ends, 1 - spent, p) * running
            output = output + weight[..., None].to(output.dtype) * hidden_states
            spent, running = spent + weight, running & ~ends
            if kwargs.get("past_key_values") is None and not is_tracing(running) and not running.any():
                break  # there is no cache that must hear of it
        kwargs["own_losses"].append(self.weight * _mean(cost, masks[0]))
        return output


def _mean(cost: Tensor, mask: Tensor | None) -> Tensor:
    """Over tokens that are no padding."""
    return cost.mean() if mask is None else (cost * mask).sum() / mask.sum()
