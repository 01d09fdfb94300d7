"""Ways to run the layers of a model other than one after the other: universal and reversible."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states
from transformers import initialization as init
from transformers.utils.import_utils import is_tracing

from hf_memory.cache_argument import CACHE
from hf_memory.layers import upcast
from hf_memory.mixers.transformer.relations import Sinusoidal
from hf_memory.modeling.base import MemoryDecoderLayer, run_layer

DEPTHS = ("fixed", "universal", "reversible")


class Universal(nn.Module):
    """One layer that runs several times: H_t = layer(H_{t-1} + P + S_t), with embedded positions P, if there are any.

    S_t are sines and cosines of the step t. Each step has its own cache layer. https://arxiv.org/abs/1807.03819.
    """

    def __init__(self, config):
        super().__init__()
        self.steps = Sinusoidal(config)

    def forward(
        self, layer: MemoryDecoderLayer, hidden_states: Tensor, masks: list, positions, **kwargs
    ) -> Tensor:
        """Run the layer once for each mask: [B, T, hidden_size] -> [B, T, hidden_size]."""
        for t, mask in enumerate(masks):
            hidden_states = self.step(t, layer, hidden_states, mask, positions, **kwargs)
        return hidden_states

    def step(
        self,
        t: int,
        layer: MemoryDecoderLayer,
        hidden_states: Tensor,
        mask: Tensor | None,
        positions: Tensor | int,
        own_losses: list[Tensor],
        **kwargs,
    ) -> Tensor:
        """Run step t: [B, T, hidden_size] -> [B, T, hidden_size].

        Args:
            t: number of the step, from 0, which is also that of its cache layer.
            layer: the layer.
            hidden_states: [B, T, hidden_size].
            mask: the layer's mask, or None.
            positions: embedded positions [B, T, hidden_size], or 0.
            own_losses: gets the layer's own loss [B, T], if it has one.
            **kwargs: further arguments of the layer.
        """
        here = self.steps(torch.tensor([[t]], device=hidden_states.device)) + positions
        hidden_states = hidden_states + here.to(hidden_states.dtype)
        return run_layer(layer, hidden_states, own_losses, attention_mask=mask, step=t, **kwargs)


class AdaptiveUniversal(Universal):
    """One layer that runs for as many steps as a token needs.

    A token halts at the first step N with p_1 + ... + p_N >= 1 - epsilon, where
    p_t = sigmoid(w H_t + b), except in the last possible step, where it is 1. With R = 1 - p_1 - ... - p_{N-1}, the
    output is p_1 H_1 + ... + p_{N-1} H_{N-1} + R H_N. A halted token is copied from step to step, so that later tokens
    find its keys and values. Its ponder cost is N + R. https://arxiv.org/abs/1603.08983.
    """

    def __init__(self, config):
        super().__init__(config)
        self.epsilon = config.halting_epsilon
        self.weight = config.ponder_loss_weight
        self.halt = nn.Linear(config.hidden_size, 1)

    def init_own_parameters(self) -> None:
        """Set the bias so that most tokens halt after at most two steps at first."""
        init.ones_(self.halt.bias)

    def forward(
        self, layer: MemoryDecoderLayer, hidden_states: Tensor, masks: list, positions, **kwargs
    ) -> Tensor:
        """Run the layer at most once for each mask: [B, T, hidden_size] -> [B, T, hidden_size]."""
        spent = torch.zeros_like(upcast(hidden_states[..., 0]))  # p_1 + ... so far
        cost = torch.zeros_like(spent)
        output = torch.zeros_like(hidden_states)
        running = torch.ones_like(spent, dtype=torch.bool)
        for t, mask in enumerate(masks):
            after_step = self.step(t, layer, hidden_states, mask, positions, **kwargs)
            hidden_states = torch.where(running[..., None], after_step, hidden_states)
            p = upcast(self.halt(hidden_states)[..., 0]).sigmoid()
            ends = running & ((spent + p >= 1 - self.epsilon) | (t == len(masks) - 1))
            cost = cost + running + torch.where(ends, 1 - spent, 0.0)
            weight = torch.where(ends, 1 - spent, p) * running
            output = output + weight[..., None].to(output.dtype) * hidden_states
            spent = spent + weight
            running = running & ~ends
            if kwargs.get(CACHE) is None and not is_tracing(running) and not running.any():
                break  # with a cache, all steps must write to it
        kwargs["own_losses"].append(self.weight * cost)
        return output


class ReversibleLayer(MemoryDecoderLayer):
    """y_1 = x_1 + mixer(x_2), y_2 = x_2 + MLP(y_1), each with its norms. https://arxiv.org/abs/2001.04451."""

    def forward(
        self,
        hidden_states: Tensor,
        x1: Tensor,
        x2: Tensor,
        read_values: Callable | None = None,
        surroundings: "list[Surroundings] | None" = None,
        **kwargs,
    ):
        """((x_1 + x_2) / 2, x_1, x_2) -> ((y_1 + y_2) / 2, y_1, y_2), all [B, T, hidden_size].

        The mean is not an input of the equations: it is what other layers call hidden states. The list `surroundings`
        gets those of the mixer and those of the MLP.
        """
        if surroundings is not None:
            surroundings.append(Surroundings(x2))
        y1 = x1 + self.mixed(x2, **kwargs)[0]
        if surroundings is not None:
            surroundings.append(Surroundings(y1))
        y2 = x2 + self.fed(y1, read_values) if self.has_mlp else x2
        return (y1 + y2) / 2, y1, y2


class Surroundings:
    """What the result of a function depends on besides its arguments: the random generators, and autocast.

    As in `torch.utils.checkpoint`, generators are those of the CPU and of the device of a tensor.
    """

    def __init__(self, x: Tensor):
        self.device_type = x.device.type
        self.state_of_cpu = torch.get_rng_state()
        self.devices, self.states_of_devices = get_device_states(x)
        self.autocasts = [_autocast(kind) for kind in {"cpu", self.device_type}]

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context in which these are as they were; afterwards they are as they were before it."""
        with ExitStack() as contexts:
            contexts.enter_context(
                torch.random.fork_rng(self.devices, device_type=self.device_type)
            )
            torch.set_rng_state(self.state_of_cpu)
            set_device_states(self.devices, self.states_of_devices, device_type=self.device_type)
            for autocast in self.autocasts:
                contexts.enter_context(torch.autocast(**autocast))
            yield


def _autocast(device_type: str) -> dict:
    """The arguments of `torch.autocast` that describe what holds now."""
    return {
        "device_type": device_type,
        "dtype": torch.get_autocast_dtype(device_type),
        "enabled": torch.is_autocast_enabled(device_type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def run_reversible(layers: nn.ModuleList, hidden_states: Tensor, masks: list, **kwargs) -> Tensor:
    """Run reversible layers on x_1 = x_2 = hidden_states, and return the mean of both halves [B, T, hidden_size].

    FSDP gathers the parameters of a layer when the layer is called as a whole. With it, the input of each layer is
    stored, and the backward pass computes the layer again from it.
    """
    in_training = torch.is_grad_enabled() and kwargs.get(CACHE) is None
    is_sharded = any(isinstance(x, DTensor) for x in layers.parameters())
    if in_training and not is_sharded:
        learns = [x for layer in layers for x in _learns(layer)]
        return _Reversible.apply(layers, masks, kwargs, hidden_states, *learns)
    states = (hidden_states, hidden_states, hidden_states)
    for layer, mask in zip(layers, masks):
        run = partial(layer, attention_mask=mask, **kwargs)
        states = checkpoint(run, *states, use_reentrant=False) if in_training else run(*states)
    return states[0]


class _Reversible(torch.autograd.Function):
    """Saves only the output of the last layer; the backward pass computes each layer's input from its output."""

    @staticmethod
    def forward(ctx, layers, masks, kwargs, hidden_states, *parameters):
        states = (hidden_states, hidden_states, hidden_states)
        ctx.surroundings = []
        for layer, mask in zip(layers, masks):
            surroundings: list[Surroundings] = []
            states = layer(*states, attention_mask=mask, surroundings=surroundings, **kwargs)
            ctx.surroundings.append(surroundings)
        mean, *halves = states
        ctx.save_for_backward(*halves)
        ctx.layers = layers
        ctx.masks = masks
        ctx.kwargs = kwargs
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        y1, y2 = ctx.saved_tensors
        d1 = gradient / 2
        d2 = d1
        of_parameters: list[Tensor | None] = []
        read_values = ctx.kwargs["read_values"]
        kwargs = {x: y for x, y in ctx.kwargs.items() if x != "read_values"}
        for layer, mask, surroundings in reversed(
            list(zip(ctx.layers, ctx.masks, ctx.surroundings))
        ):
            of_mixer, of_mlp = surroundings
            learns = _learns(layer)
            by_mlp = []
            if layer.has_mlp:
                feed = partial(layer.fed, read_values=read_values)
                fed, more, by_mlp = _differentiate(feed, y1, d2, learns, of_mlp)
                y2 = y2 - fed
                d1 = d1 + more
            mix = partial(layer.mixed, attention_mask=mask, **kwargs)
            mixed, more, by_mixer = _differentiate(lambda x: mix(x)[0], y2, d1, learns, of_mixer)  # noqa: B023
            y1 = y1 - mixed
            d2 = d2 + more
            by_mlp = by_mlp or [None] * len(learns)
            of_parameters = [
                x if y is None else y for x, y in zip(by_mlp, by_mixer)
            ] + of_parameters
        return None, None, None, d1 + d2, *of_parameters


def _differentiate(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    gradient: Tensor,
    parameters: list,
    surroundings: Surroundings,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """function(x) as it was computed once, and the gradients of x and the parameters, given that of the result."""
    x = x.detach().requires_grad_()
    with torch.enable_grad(), surroundings.again():
        y = function(x)
    of_x, *of_parameters = torch.autograd.grad(
        y, [x, *parameters], gradient.to(y.dtype), allow_unused=True
    )
    return y.detach(), of_x, of_parameters


def _learns(layer: nn.Module) -> list[nn.Parameter]:
    return [x for x in layer.parameters() if x.requires_grad]
