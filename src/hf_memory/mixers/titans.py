"""Titans' mixers: a memory that learns while it reads, alone, beside attention, or before it.

https://arxiv.org/abs/2501.00663. Persistent tokens stand before every sequence: a memory reads them once, attention
always sees them.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import States
from hf_memory.layers import RMSNorm, unit_length
from hf_memory.mixers.base import Context, MemoryMixer, OutputGate
from hf_memory.mixers.window_attention import window_attention
from hf_memory.ops.neural_memory import NeuralMemoryState, neural_memory


class Gate(nn.Linear):
    """One number a head, that starts at a bias."""

    def __init__(self, hidden_size: int, heads: int, start: float):
        super().__init__(hidden_size, heads)
        self.start = start

    def init_own_parameters(self) -> None:
        """The bias alone; the weight is initialised as any other."""
        init.constant_(self.bias, self.start)


class InitialWeights(nn.Module):
    """Matrices [H, d_in, d_out] of a memory that has read nothing; the last says little at first."""

    def __init__(self, heads: int, sizes: list[int]):
        super().__init__()
        self.depth = len(sizes) - 1
        for i, (d_in, d_out) in enumerate(zip(sizes, sizes[1:])):
            self.register_parameter(f"layer_{i}", nn.Parameter(torch.empty(heads, d_in, d_out)))

    def forward(self) -> tuple[Tensor, ...]:
        """In float32."""
        return tuple(self.get_parameter(f"layer_{i}").float() for i in range(self.depth))

    def init_own_parameters(self) -> None:
        """Products of the size of their inputs, and of a tenth of it in the last."""
        for i in range(self.depth):
            weights = self.get_parameter(f"layer_{i}")
            init.normal_(weights, std=(0.1 if i == self.depth - 1 else 1.0) * weights.shape[1] ** -0.5)


class NeuralMemoryMixer(MemoryMixer):
    """LMM: queries, keys and values of unit length, gates for each head, the neural memory, an output norm and gate.

    The inner rate is max_lr sigmoid(W x) (1 - eta) / chunk_size: steps of a chunk and of the momentum add up.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.make_projections(*config.memory_heads)
        self.make_convolutions(config.linear_conv_kernel_dim)
        heads, width = self.num_output_heads, config.hidden_size
        self.lr_proj, self.momentum_proj, self.decay_proj = (Gate(width, heads, start) for start in (0.0, 0.0, -6.0))
        inner = [config.memory_expansion * self.head_dim] * (config.memory_depth - 1)
        self.initial_weights = InitialWeights(heads, [self.head_dim, *inner, self.value_dim])
        if config.num_persistent_tokens:
            self.persistent = nn.Parameter(torch.empty(config.num_persistent_tokens, width))
        self.output_gate = OutputGate(width, heads, self.value_dim, config)

    def init_own_parameters(self) -> None:
        """Persistent tokens as small as embeddings."""
        if self.config.num_persistent_tokens:
            init.normal_(self.persistent, std=self.config.initializer_range)

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """States: weights, momentum and anchor [N, HV, ...], the phase [N], and those of the convolutions."""
        hidden_states, context, real = self._after_persistent(hidden_states, context)
        q, k, v, new_states = self.project(hidden_states, context)
        lr, momentum, decay = self._gates(hidden_states)
        o, state = neural_memory(
            unit_length(q),
            unit_length(k),
            v,
            lr,
            momentum,
            decay,
            self.initial_weights(),
            chunk_size=self.config.memory_chunk_size,
            activation=self.config.memory_activation,
            residual=self.config.memory_residual,
            mask=None if context.attention_mask is None else context.attention_mask.bool(),
            initial_state=_memory_state(context.states),
            output_final_state=True,
            cu_seqlens=context.cu_seqlens,
            backend="auto" if self.config.mixer_backend == "triton" else self.config.mixer_backend,
        )
        output = self.o_proj(self.output_gate(o, hidden_states))
        return (output if real is None else output[:, real]), {**new_states, **state._asdict()}

    def _gates(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """lr, log eta and log a [B, T, HV] in float32."""
        eta = self.momentum_proj(hidden_states).float()
        momentum, decay = F.logsigmoid(eta), F.logsigmoid(-self.decay_proj(hidden_states).float())
        scale = self.config.memory_max_lr / self.config.memory_chunk_size
        return scale * self.lr_proj(hidden_states).float().sigmoid() * (-eta).sigmoid(), momentum, decay

    def _after_persistent(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, Context, Tensor | None]:
        """Persistent tokens before every sequence that begins here, and where the real ones are then."""
        P = self.config.num_persistent_tokens
        if not P or context.states:
            return hidden_states, context, None
        B, T, device = *hidden_states.shape[:2], hidden_states.device
        bounds = context.cu_seqlens
        starts = torch.zeros(1, dtype=torch.long, device=device) if bounds is None else bounds[:-1]
        before = P * torch.arange(len(starts), device=device)  # persistent tokens before each sequence
        tokens = torch.arange(T, device=device)
        real = tokens + P * (tokens[:, None] >= starts).sum(1)
        order = torch.cat([real, ((starts + before)[:, None] + torch.arange(P, device=device)).flatten()]).argsort()
        wide = self.persistent.to(hidden_states.dtype).repeat(len(starts), 1).expand(B, -1, -1)
        hidden_states = torch.cat([hidden_states, wide], 1)[:, order]
        mask, cu_seqlens = context.attention_mask, context.cu_seqlens
        if mask is not None:
            mask = torch.cat([mask.new_ones(B, P), mask], 1)
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens + P * torch.arange(
                len(cu_seqlens), device=cu_seqlens.device, dtype=cu_seqlens.dtype
            )
        return hidden_states, context._replace(attention_mask=mask, cu_seqlens=cu_seqlens), real


def _memory_state(states: States) -> NeuralMemoryState | None:
    return NeuralMemoryState(*(states[name] for name in NeuralMemoryState._fields)) if states else None


class AttentionAndMemoryMixer(MemoryMixer):
    """What MAG and MAL share: sliding-window attention with the weights of a Transformer, and a memory."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.has_convolutions, self.conv_activation = False, None
        self.memory = NeuralMemoryMixer(config, layer_idx)
        if config.num_persistent_tokens:
            self.persistent = nn.Parameter(torch.empty(config.num_persistent_tokens, config.hidden_size))

    def init_own_parameters(self) -> None:
        """Persistent tokens as small as embeddings."""
        if self.config.num_persistent_tokens:
            init.normal_(self.persistent, std=self.config.initializer_range)

    def attend(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """[B, T, hidden_size] -> heads [B, T, H, D], and the window's states."""
        q, k, v = self.split_heads(self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
        q, k = self.normalize_and_rotate(q, k, context.position_embeddings)
        always = None
        if self.config.num_persistent_tokens:
            tokens = self.persistent.to(hidden_states.dtype)[None]
            _, keys, values = self.split_heads(self.q_proj(tokens), self.k_proj(tokens), self.v_proj(tokens))
            always = self.normalize_and_rotate(keys, keys, None)[1][0], values[0]
        return window_attention(
            q,
            k,
            v,
            window=self.config.sliding_window,
            scaling=self.scaling,
            states=_part(context.states, "attention_"),
            always=always,
            attention_mask=context.attention_mask,
            cu_seqlens=context.cu_seqlens,
        )

    def remember(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The memory's output [B, T, hidden_size], and its states."""
        own = context._replace(states=_part(context.states, "memory_"), position_embeddings=None)
        return self.memory.mix(hidden_states, own)


def _part(states: States, prefix: str) -> States:
    return {name.removeprefix(prefix): x for name, x in states.items() if name.startswith(prefix)}


def _joined(attention: States, memory: States) -> States:
    return {f"attention_{n}": x for n, x in attention.items()} | {f"memory_{n}": x for n, x in memory.items()}


class MemoryAsGateMixer(AttentionAndMemoryMixer):
    """MAG: attention over a window and the memory side by side.

    With `memory_gate="multiply"` the norms of both are multiplied, the memory's through a sigmoid, before the output
    projection; with `"add"` the output is attention's plus `gate` times the memory's. A gate of zero leaves attention.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.memory_gate == "add":
            self.gate = nn.Parameter(torch.empty(config.hidden_size))
        else:
            self.attention_norm, self.memory_norm = (RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))

    def init_own_parameters(self) -> None:
        """Open gates."""
        super().init_own_parameters()
        if self.config.memory_gate == "add":
            init.ones_(self.gate)

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """States: those of the memory and of the window."""
        heads, window = self.attend(hidden_states, context)
        remembered, memory = self.remember(hidden_states, context)
        attended = self.o_proj(heads.flatten(-2))
        if self.config.memory_gate == "add":
            output = attended + self.gate * remembered
        else:
            output = self.attention_norm(attended) * self.memory_norm(remembered).sigmoid()
        return output, _joined(window, memory)


class MemoryAsLayerMixer(AttentionAndMemoryMixer):
    """MAL: attention over a window reads x + gate * memory(x). A gate of zero leaves attention."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.gate = nn.Parameter(torch.empty(config.hidden_size))

    def init_own_parameters(self) -> None:
        """An open gate."""
        super().init_own_parameters()
        init.ones_(self.gate)

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """States: those of the memory and of the window."""
        remembered, memory = self.remember(hidden_states, context)
        heads, window = self.attend(hidden_states + self.gate * remembered, context)
        return self.o_proj(heads.flatten(-2)), _joined(window, memory)
