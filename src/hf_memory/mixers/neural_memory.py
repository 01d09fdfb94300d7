"""Titans' memory, a network that is trained while it reads. https://arxiv.org/abs/2501.00663."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.layers import unit_length, upcast
from hf_memory.mixers.base import (
    Context,
    MemoryMixer,
    OutputGate,
    Projected,
    convolution_spec,
)
from hf_memory.mixers.positions import Positions
from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.neural_memory import NeuralMemoryState, neural_memory
from hf_memory.ops.neural_memory.network import Rule, network, unpack


class Gate(nn.Linear):
    """A projection to one number for each head, whose bias has a given initial value."""

    def __init__(self, hidden_size: int, heads: int, start: float):
        super().__init__(hidden_size, heads)
        self.starts = {"bias": start}  # the weight is initialised like any other


class InitialWeights(nn.Module):
    """The learned initial weights of a memory, matrices [H, d_in, d_out]; the last one starts small.

    A bias, which starts at zero, is one more row.
    """

    def __init__(self, heads: int, shapes: list[tuple[int, int]], has_bias: bool = False):
        super().__init__()
        self.depth = len(shapes)
        self.has_bias = has_bias
        # number of weights of a head
        self.size = sum((d_in + has_bias) * d_out for d_in, d_out in shapes)
        for i, (d_in, d_out) in enumerate(shapes):
            self.register_parameter(f"layer_{i}", nn.Parameter(torch.empty(heads, d_in, d_out)))
            if has_bias:
                self.register_parameter(f"bias_{i}", nn.Parameter(torch.empty(heads, 1, d_out)))

    def forward(self) -> tuple[Tensor, ...]:
        """The weights in float32."""
        weights: list[Tensor] = [getattr(self, f"layer_{i}") for i in range(self.depth)]
        if self.has_bias:
            weights = [
                torch.cat([W, getattr(self, f"bias_{i}")], dim=1) for i, W in enumerate(weights)
            ]
        return tuple(map(upcast, weights))

    def init_own_parameters(self) -> None:
        """Random matrices that keep the scale of their inputs; the last one reduces it to a tenth."""
        for i in range(self.depth):
            weights = self.get_parameter(f"layer_{i}")
            init.normal_(
                weights, std=(0.1 if i == self.depth - 1 else 1.0) * weights.shape[1] ** -0.5
            )
            if self.has_bias:
                init.zeros_(self.get_parameter(f"bias_{i}"))


class InnerNorm(nn.Module):
    """Weight and bias [H, V] of the layer norm in each head's memory."""

    starts = {"weight": 1.0, "bias": 0.0}

    def __init__(self, heads: int, value_dim: int):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(heads, value_dim)) for _ in range(2))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Weight and bias in float32."""
        return upcast(self.weight), upcast(self.bias)


class NeuralMemoryMixer(MemoryMixer):
    """Titans' memory alone (LMM): q, k and v, gates of each head, a neural memory, and a norm and gate of its output.

    The inner learning rate is max_lr sigmoid(W x) (1 - eta) / chunk_size, since steps add up over the tokens of a chunk
    and in the momentum eta.
    """

    projects_all = False

    # names of the gates, and initial values of their biases
    gates: dict[str, float] = {"lr": 0.0, "momentum": 0.0, "decay": -6.0}
    unit_keys = True  # whether keys and queries have unit length
    has_bias = False
    has_norm = False
    clips_gradients = True  # whether `memory_max_grad_norm` is possible: with one gradient a token

    def __init__(self, config, layer_idx: int, *, reads_persistent: bool = True):
        super().__init__(config, layer_idx)
        self.make_convolutions(config.linear_conv_kernel_dim)
        self.num_persistent = config.num_persistent_tokens if reads_persistent else 0
        heads = self.num_output_heads
        width = config.hidden_size
        self.make_gates(width, heads)
        self.initial_weights = InitialWeights(heads, self.layer_shapes(config), self.has_bias)
        if self.num_persistent:
            self.persistent = nn.Parameter(torch.empty(self.num_persistent, width))
        self.output_gate = OutputGate(heads, self.value_dim, config)

    def make_gates(self, width: int, heads: int) -> None:
        """Create the gates of each head, and the norm of the memory's output."""
        for name, start in self.gates.items():
            self.register_module(f"{name}_proj", Gate(width, heads, start))
        if self.has_norm:
            self.inner_norm = InnerNorm(heads, self.value_dim)

    def init_own_parameters(self) -> None:
        """Persistent tokens start like embeddings."""
        if self.num_persistent:
            init.normal_(self.persistent, std=self.config.initializer_range)

    @staticmethod
    def input_size(head_dim: int) -> int:
        """Number of input channels of the memory."""
        return head_dim

    @classmethod
    def layer_shapes(cls, config) -> list[tuple[int, int]]:
        """Input and output channels of each matrix of the memory."""
        *_, K, V = config.memory_heads
        sizes = [cls.input_size(K), *[config.memory_expansion * K] * (config.memory_depth - 1), V]
        return list(zip(sizes, sizes[1:]))

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """Weights of each head, their momentum, the anchor, and the number of tokens in the current chunk."""
        size = sum((d_in + cls.has_bias) * d_out for d_in, d_out in cls.layer_shapes(config))
        has = {
            "weights": True,
            "momentum": "momentum" in cls.gates,
            "anchor": config.memory_chunk_size > 1,
        }
        spec = {
            name: State((config.num_output_heads, size if has_it else 0), is_recurrent=has_it)
            for name, has_it in has.items()
        }
        return (
            convolution_spec(config)
            | spec
            | {"phase": State((), torch.long, largest=config.memory_chunk_size - 1)}
        )

    def forward(self, hidden_states: Tensor, *args, **kwargs):
        """Like any mixer; or, as a part of another mixer and with a `Context`, like `run`, so that hooks run."""
        if args and isinstance(args[0], Context):
            return self.run(hidden_states, args[0])
        return super().forward(hidden_states, *args, **kwargs)

    def recall(self, hidden_states: Tensor, weights: Tensor, positions: Positions | None) -> Tensor:
        """Read a memory without updating it: the output [B, T, hidden_size] for hidden states [B, T, hidden_size].

        `weights` [B, HV, P] are those of the memory minus the initial weights.
        """
        initial = self.initial_weights()
        q = self.by_head(F.silu(self.q_proj(hidden_states)))
        q, _ = self.rotate(q, q, positions)
        q = repeat_heads(unit_length(q), self.num_output_heads).transpose(1, 2).to(weights.dtype)
        moved = tuple(start + x for start, x in zip(initial, unpack(weights, initial)))
        rule = Rule(activation=self.config.memory_activation, residual=self.config.memory_residual)
        o = network(q, moved, rule, None).transpose(1, 2).to(hidden_states.dtype)
        return self.o_proj(self.output_gate(o, self.output_gate.project(hidden_states)))

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """See `MemoryMixer.project`; with W x of each gate, [B, T, HV] in float32, and the gate of the output."""
        rows = super().project(hidden_states, positions)
        for gate in self.gates:
            rows[gate] = upcast(self.get_submodule(f"{gate}_proj")(hidden_states))
        return rows | self.output_gate.project(hidden_states)

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The states are weights, momentum and anchor [N, HV, ...], the phase [N], and those of the convolutions."""
        projected, context, real = self._after_persistent(projected, context)
        q, k, v, new_states = self.heads_of(projected, context)
        o, memory = self.learn(
            unit_length(q) if self.unit_keys else q,
            unit_length(k) if self.unit_keys else k,
            unit_length(v) if self.config.memory_unit_values else v,
            self.learning(projected, context),
            context,
        )
        mixed = self.output_gate(o, projected)
        return (mixed if real is None else mixed[:, real]), new_states | memory

    def learn(
        self, q: Tensor, k: Tensor, v: Tensor, learning: dict, context: Context
    ) -> tuple[Tensor, States]:
        """Outputs [B, T, HV, V] and states of the memory, given the arguments from `learning`."""
        config = self.config
        options = context.options(config.mixer_backend, context.past(NeuralMemoryState))
        o, state = neural_memory(
            q,
            k,
            v,
            weights=self.initial_weights(),
            chunk_size=config.memory_chunk_size,
            activation=config.memory_activation,
            residual=config.memory_residual,
            max_grad_norm=config.memory_max_grad_norm or None,
            norm=self.inner_norm() if self.has_norm else None,
            **config.rule.learning,
            **learning,
            **options,
        )
        return o, state._asdict()  # type: ignore[union-attr]

    def learning(self, projected: Projected, context: Context) -> dict[str, Any]:
        """Arguments of the op for each token, such as lr, log eta and log a [B, T, HV] in float32."""
        eta = projected["momentum"]
        lr = self.inner_rate(projected) * (-eta).sigmoid()
        return {"lr": lr, "momentum": F.logsigmoid(eta), "decay": self.log_decay(projected)}

    def log_decay(self, projected: Projected) -> Tensor:
        """log a = log sigmoid(-W x), [B, T, HV]."""
        return F.logsigmoid(-projected["decay"])

    def inner_rate(self, projected: Projected) -> Tensor:
        """memory_max_lr / memory_chunk_size sigmoid(W x), [B, T, HV]."""
        scale = self.config.memory_max_lr / self.config.memory_chunk_size
        return scale * projected["lr"].sigmoid()

    def _after_persistent(
        self, projected: Projected, context: Context
    ) -> tuple[Projected, Context, Tensor | None]:
        """The tokens with persistent tokens before each sequence that begins here, and their context.

        The third result is the new place [T] of each token that was given; None if nothing was inserted.
        """
        P = self.num_persistent
        if not P or context.states:
            return projected, context, None
        q = projected["q"]
        B, T = q.shape[:2]
        device = q.device
        bounds = context.cu_seqlens
        starts = torch.zeros(1, dtype=torch.long, device=device) if bounds is None else bounds[:-1]
        # persistent tokens of earlier sequences
        before = P * torch.arange(len(starts), device=device)
        tokens = torch.arange(T, device=device)
        real = tokens + P * (tokens[:, None] >= starts).sum(1)
        persistent_places = (starts + before)[:, None] + torch.arange(P, device=device)
        order = torch.cat([real, persistent_places.flatten()]).argsort()
        # rows may have adapters of their own, so that projections need all of them
        persistent = self.project(self.persistent.to(q.dtype).expand(B, -1, -1), None)
        projected = {
            name: torch.cat([x, *[persistent[name]] * len(starts)], 1)[:, order]
            for name, x in projected.items()
        }
        mask = context.attention_mask
        cu_seqlens = context.cu_seqlens
        if mask is not None:
            mask = torch.cat([mask.new_ones(B, P), mask], 1)
        if cu_seqlens is not None:
            cu_seqlens = (cu_seqlens + F.pad(before + P, (1, 0))).to(cu_seqlens.dtype)
        positions = context.positions
        if positions is not None:
            positions = positions.pad(len(before) * P).gather(order[None])
        context = context._replace(positions=positions, attention_mask=mask, cu_seqlens=cu_seqlens)
        return projected, context, real
