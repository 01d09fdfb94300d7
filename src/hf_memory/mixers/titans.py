"""Titans' mixers: a memory that learns while it reads, alone, beside attention, or before it.

https://arxiv.org/abs/2501.00663. Persistent tokens stand before every sequence: a memory reads them once, attention
always sees them.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import States
from hf_memory.layers import RMSNorm, real_tokens_first, unit_length
from hf_memory.mixers.base import Context, MemoryMixer, OutputGate, Positions, repeat_heads
from hf_memory.mixers.window_attention import window_attention
from hf_memory.ops.neural_memory import NeuralMemoryState, neural_memory
from hf_memory.ops.neural_memory.network import Rule, network, unpack


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
        self.size = sum(d_in * d_out for d_in, d_out in zip(sizes, sizes[1:]))  # numbers of a head
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
    """LMM: queries and keys of unit length, values, gates for each head, the neural memory, an output norm and gate.

    The inner rate is max_lr sigmoid(W x) (1 - eta) / chunk_size: steps of a chunk and of the momentum add up.
    """

    def __init__(self, config, layer_idx: int, *, reads_persistent: bool = True):
        super().__init__(config, layer_idx)
        self.make_projections(*config.memory_heads)
        self.make_convolutions(config.linear_conv_kernel_dim)
        self.num_persistent = config.num_persistent_tokens if reads_persistent else 0
        heads, width = self.num_output_heads, config.hidden_size
        self.lr_proj, self.momentum_proj, self.decay_proj = (Gate(width, heads, start) for start in (0.0, 0.0, -6.0))
        inner = [config.memory_expansion * self.head_dim] * (config.memory_depth - 1)
        self.initial_weights = InitialWeights(heads, [self.head_dim, *inner, self.value_dim])
        if self.num_persistent:
            self.persistent = nn.Parameter(torch.empty(self.num_persistent, width))
        self.output_gate = OutputGate(width, heads, self.value_dim, config)

    def init_own_parameters(self) -> None:
        """Persistent tokens as small as embeddings."""
        if self.num_persistent:
            init.normal_(self.persistent, std=self.config.initializer_range)

    def recall(self, hidden_states: Tensor, weights: Tensor, positions: Positions | None) -> Tensor:
        """What a memory that stays as it is, [N, HV, P] away from its start, says to [N, T, hidden_size]."""
        initial = self.initial_weights()
        q = F.silu(self.q_proj(hidden_states)).unflatten(-1, (-1, self.head_dim))
        q, _ = self.rotate(q, q, positions)
        q = repeat_heads(unit_length(q), self.num_output_heads).transpose(1, 2).float()
        moved = tuple(start + x for start, x in zip(initial, unpack(weights, initial)))
        rule = Rule(1, self.config.memory_activation, self.config.memory_residual, False, 1.0, False, "initial")
        o = network(q, moved, rule, None).transpose(1, 2).to(hidden_states.dtype)
        return self.o_proj(self.output_gate(o, hidden_states))

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """States: weights, momentum and anchor [N, HV, ...], the phase [N], and those of the convolutions."""
        hidden_states, context, real = self._after_persistent(hidden_states, context)
        q, k, v, new_states = self.project(hidden_states, context)
        lr, momentum, decay = self._gates(hidden_states)
        o, state = neural_memory(
            unit_length(q),
            unit_length(k),
            unit_length(v) if self.config.memory_unit_values else v,
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
            backend=self.config.mixer_backend,
        )
        output = self.o_proj(self.output_gate(o, hidden_states))
        own = state._asdict()  # type: ignore[union-attr]
        return (output if real is None else output[:, real]), new_states | own

    def _gates(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """lr, log eta and log a [B, T, HV] in float32."""
        eta = self.momentum_proj(hidden_states).float()
        momentum, decay = F.logsigmoid(eta), F.logsigmoid(-self.decay_proj(hidden_states).float())
        scale = self.config.memory_max_lr / self.config.memory_chunk_size
        return scale * self.lr_proj(hidden_states).float().sigmoid() * (-eta).sigmoid(), momentum, decay

    def _after_persistent(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, Context, Tensor | None]:
        """Persistent tokens before every sequence that begins here, and where the real ones are then."""
        P = self.num_persistent
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
            cu_seqlens = (cu_seqlens + F.pad(before + P, (1, 0))).to(cu_seqlens.dtype)
        positions = context.position_embeddings
        if positions is not None:  # persistent tokens have none
            cos, sin = (F.pad(x, (0, 0, 0, len(before) * P), value=y) for x, y in zip(positions, (1.0, 0.0)))
            positions = cos[:, order], sin[:, order]
        context = context._replace(position_embeddings=positions, attention_mask=mask, cu_seqlens=cu_seqlens)
        return hidden_states, context, real


def _memory_state(states: States) -> NeuralMemoryState | None:
    return NeuralMemoryState(*(states[name] for name in NeuralMemoryState._fields)) if states else None


class AttentionAndMemoryMixer(MemoryMixer):
    """What MAC, MAG and MAL share: attention with the weights of a Transformer, and a memory."""

    memory_reads_persistent = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.has_convolutions, self.conv_activation = False, None
        self.memory = NeuralMemoryMixer(config, layer_idx, reads_persistent=self.memory_reads_persistent)
        if config.num_persistent_tokens:
            self.persistent = nn.Parameter(torch.empty(config.num_persistent_tokens, config.hidden_size))

    def init_own_parameters(self) -> None:
        """Persistent tokens as small as embeddings."""
        if self.config.num_persistent_tokens:
            init.normal_(self.persistent, std=self.config.initializer_range)

    @property
    def sees_positions(self) -> bool:
        """Attention always does."""
        return True

    def attend(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """[B, T, hidden_size] -> heads [B, T, H, D], and the window's states."""
        q, k, v = self.split_heads(self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
        q, k = self.normalize_and_rotate(q, k, context.position_embeddings)
        return window_attention(
            q,
            k,
            v,
            window=self.config.sliding_window,
            scaling=self.scaling,
            states=_part(context.states, "attention_"),
            always=self.always(hidden_states.dtype),
            attention_mask=context.attention_mask,
            cu_seqlens=context.cu_seqlens,
        )

    def always(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Keys and values [P, H, D] of the persistent tokens, which have no positions."""
        if not self.config.num_persistent_tokens:
            return None
        tokens = self.persistent.to(dtype)[None]
        q, k, v = self.split_heads(self.q_proj(tokens), self.k_proj(tokens), self.v_proj(tokens))
        return self.normalize_and_rotate(q, k, None)[1][0], v[0]

    def remember(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The memory's output [B, T, hidden_size], and its states."""
        own = context._replace(states=_part(context.states, "memory_"), position_embeddings=self._of_memory(context))
        return self.memory.mix(hidden_states, own)

    def _of_memory(self, context: Context) -> Positions | None:
        return context.position_embeddings if self.memory.sees_positions else None


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


class MemoryAsContextMixer(AttentionAndMemoryMixer):
    """MAC: attention within segments, over the tokens and what the memory says to them.

        h_t = M(x_t), M as it was when the segment began
        y_t = norm of attention over persistent tokens and the pairs (h_i, x_i), i <= t, of the segment
        M reads y_t, and then is asked about it:   o_t = y_t sigmoid(norm(M_t(y_t)))

    The paper's mask lets a token see h_i of later tokens, and its last line reads a memory that has seen the whole
    segment; both would show the future. Here nothing after t is seen.
    """

    memory_reads_persistent = False

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.attention_norm, self.memory_norm = (RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """States: those of the memory; its weights where the segment began; how many tokens the segment has [N]; their
        keys and values, and those of what the memory said, [N, segment, 2, H, D]."""
        if context.cu_seqlens is not None:
            return self._each_sequence(hidden_states, context), {}
        if context.states:  # rows may be anywhere in their segments: a token at a time
            return self._pieces(hidden_states, context, 1)
        mask, order = context.attention_mask, None
        if mask is None:
            return self._pieces(hidden_states, context, self.config.segment_length)
        hidden_states, order = real_tokens_first(hidden_states, mask)
        context = context._replace(
            attention_mask=mask.gather(1, order),
            position_embeddings=_in_order(context.position_embeddings, order),
        )
        output, states = self._pieces(hidden_states, context, self.config.segment_length)
        return torch.zeros_like(output).scatter(1, order[..., None].expand_as(output), output), states

    def _each_sequence(self, hidden_states: Tensor, context: Context) -> Tensor:
        bounds = context.cu_seqlens.tolist()  # type: ignore[union-attr]
        alone = context._replace(cu_seqlens=None)
        parts = [slice(a, b) for a, b in zip(bounds, bounds[1:]) if b > a]
        return torch.cat([self.mix(hidden_states[:, x], alone.of(x, {}))[0] for x in parts], dim=1)

    def _pieces(self, hidden_states: Tensor, context: Context, length: int) -> tuple[Tensor, States]:
        states, outputs = context.states or self._empty(hidden_states), []
        for start in range(0, hidden_states.shape[1], length):
            tokens = slice(start, start + length)
            output, states = self._piece(hidden_states[:, tokens], context.of(tokens, states))
            outputs.append(output)
        return torch.cat(outputs, dim=1), states

    def _empty(self, hidden_states: Tensor) -> States:
        B, C = hidden_states.shape[0], self.config.segment_length
        heads = self.k_proj.out_features // self.head_dim
        pairs = hidden_states.new_zeros(B, C, 2, heads, self.head_dim)
        then = hidden_states.new_zeros(B, self.memory.num_output_heads, self.memory.initial_weights.size)
        offset = torch.zeros(B, dtype=torch.long, device=hidden_states.device)
        return {"then": then.float(), "offset": offset, "keys": pairs, "values": pairs}

    def _piece(self, x: Tensor, context: Context) -> tuple[Tensor, States]:
        """Tokens that end no later than the segment of any row."""
        states, C = context.states, self.config.segment_length
        real = torch.ones(x.shape[:2], device=x.device) if context.attention_mask is None else context.attention_mask
        real = real.bool()
        begins = (states["offset"] == C) & real.any(1)
        now = states.get("memory_weights", states["then"])
        then = torch.where(begins[:, None, None], now, states["then"])
        offset = torch.where(begins, 0, states["offset"])
        places = torch.where(real, offset[:, None] + real.cumsum(1) - 1, C)  # C: of padding, which is dropped
        recalled = self.memory.recall(x, then, self._of_memory(context))
        heads, keys, values = self._attend_pairs(x, recalled, places, context)
        y = self.attention_norm(self.o_proj(heads.flatten(-2)))
        remembered, memory = self.remember(y, context)
        output = y * self.memory_norm(remembered).sigmoid()
        own = {"then": then, "offset": offset + real.sum(1), "keys": keys, "values": values}
        return output, own | {f"memory_{name}": state for name, state in memory.items()}

    def _attend_pairs(self, x: Tensor, h: Tensor, places: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Heads [B, T, H, D] of tokens at places [B, T] of their segments, and its keys and values with theirs."""
        q, k, v = self.split_heads(self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k = self.normalize_and_rotate(q, k, context.position_embeddings)
        k_h, v_h = (y.unflatten(-1, (-1, self.head_dim)) for y in (self.k_proj(h), self.v_proj(h)))
        k_h = self.normalize_and_rotate(q, k_h, context.position_embeddings)[1]
        keys = _put(context.states["keys"], torch.stack([k_h, k], 2), places)
        values = _put(context.states["values"], torch.stack([v_h, v], 2), places)
        seen = torch.arange(keys.shape[1], device=x.device) <= places[..., None].clamp(max=keys.shape[1] - 1)
        seen = seen.repeat_interleave(2, -1)[:, None]  # [B, 1, T, 2 * segment]
        k, v = (pairs.flatten(1, 2).transpose(1, 2).to(q.dtype) for pairs in (keys, values))
        always = self.always(x.dtype)
        if always is not None:
            first = (tokens.transpose(0, 1).expand(len(x), -1, -1, -1) for tokens in always)
            k, v = (torch.cat(pair, dim=2) for pair in zip(first, (k, v)))
            seen = F.pad(seen, (len(always[0]), 0), value=True)
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, seen, scale=self.scaling, enable_gqa=True)
        return o.transpose(1, 2), keys, values


def _put(buffer: Tensor, pairs: Tensor, places: Tensor) -> Tensor:
    """[B, C, 2, H, D] with pairs [B, T, 2, H, D] at places [B, T]; those at C are dropped."""
    index = places[:, :, None, None, None].expand_as(pairs)
    return F.pad(buffer, (0, 0, 0, 0, 0, 0, 0, 1)).scatter(1, index, pairs.to(buffer.dtype))[:, :-1]


def _in_order(positions, order: Tensor):
    if positions is None:
        return None
    B, T = order.shape
    return tuple(x.expand(B, T, -1).gather(1, order[..., None].expand(-1, -1, x.shape[-1])) for x in positions)
