"""Titans' third mixer (MAC): the memory's outputs are context for attention. https://arxiv.org/abs/2501.00663."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.cache import Spec, State, States, nested, storage_of
from hf_memory.layers import RMSNorm, upcast
from hf_memory.mixers.attention_and_memory import AttentionAndMemoryMixer
from hf_memory.mixers.attention_blocks import Blocks, Columns
from hf_memory.mixers.base import Context, Projected
from hf_memory.mixers.neural_memory import NeuralMemoryMixer
from hf_memory.mixers.pasts.rows import states_of_rows
from hf_memory.mixers.positions import Positions
from hf_memory.ops.exported import in_pieces, varies
from hf_memory.ops.layout import per_sequence
from hf_memory.ops.masks import Tokens, causal


class MemoryAsContextMixer(AttentionAndMemoryMixer):
    """MAC: attention within segments, over the tokens and what the memory recalls for them.

        h_t = M(x_t), with M from the start of the segment
        y_t = norm(attention over persistent tokens and the pairs (h_i, x_i), i <= t, of the segment)
        M is updated with y_t, and then read:   o_t = y_t sigmoid(norm(M_t(y_t)))

    In the paper, a token also sees h_i of later tokens, and the last read uses a memory that has read the whole
    segment. Both would leak the future. Here a token sees nothing after itself.
    """

    memory_reads_persistent = False

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.attention_norm, self.memory_norm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The memory's states, its weights at the start of the segment, and the segment's keys and values so far."""
        memory = NeuralMemoryMixer.state_spec(config, layer_idx)
        _, heads, _, D, _ = config.attention_heads
        keys, values = states_of_rows("window", (config.segment_length, 2, heads), D, D)
        return {
            "then": memory["weights"],
            "offset": State((), torch.long, largest=config.segment_length),
            "keys": keys,
            "values": values,
            "memory": memory,
        }

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The states are those of the memory, its weights at the start of the segment, the number of tokens of the
        segment so far [N], and keys and values of these tokens and of what the memory recalled,
        [N, segment, 2, H, D]."""
        hidden_states = projected["x"]
        if context.cu_seqlens is not None:
            alone = context._replace(cu_seqlens=None)

            def one(x: Tensor, *angles: Tensor, initial_state):
                context = alone._replace(positions=Positions(*angles) if angles else None)
                return self.mix({"x": x}, context)[0], initial_state

            return per_sequence(
                one, context.cu_seqlens, hidden_states, *(context.positions or ()), initial_state={}
            )
        # after other tokens, rows may be at different places of their segments
        length = 1 if context.states else self.config.segment_length
        if varies(hidden_states.shape[1]):
            return self._loop(hidden_states, context, length)
        states = context.states or self._empty(hidden_states, context)
        outputs = []
        for start in range(0, hidden_states.shape[1], length):
            tokens = slice(start, start + length)
            output, states = self._piece(hidden_states[:, tokens], context.of(tokens, states))
            outputs.append(output)
        return torch.cat(outputs, dim=1), states

    def _loop(self, hidden_states: Tensor, context: Context, length: int) -> tuple[Tensor, States]:
        """The same for torch.export with a variable number of pieces: a loop in the graph, and padding at the end."""

        def piece(states: States, rows: tuple) -> tuple[list[Tensor], States]:
            x, mask, positions = rows
            here = context._replace(positions=positions, attention_mask=mask, states=states)
            output, states = self._piece(x, here)
            return [output], states

        mask = context.attention_mask
        if mask is None:
            mask = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
        states = context.states or self._all_empty(hidden_states, context)
        rows = hidden_states, mask, context.positions
        (output,), states = in_pieces(piece, length, states, rows)
        return output, states

    def _empty(self, hidden_states: Tensor, context: Context) -> States:
        B = hidden_states.shape[0]
        C = self.config.segment_length
        heads = self.k_proj.out_features // self.head_dim
        spec = self.spec_in(context.bits)
        keys, values = (
            hidden_states.new_zeros(B, C, 2, heads, stored.shape[-1], dtype=stored.dtype)
            for stored in (spec["keys"], spec["values"])
        )
        then = hidden_states.new_zeros(
            B, self.memory.num_output_heads, self.memory.initial_weights.size
        )
        offset = torch.zeros(B, dtype=torch.long, device=hidden_states.device)
        return {"then": upcast(then), "offset": offset, "keys": keys, "values": values}

    def _all_empty(self, hidden_states: Tensor, context: Context) -> States:
        """Empty states, with those of a memory that has read nothing."""

        def zeros(state: State) -> Tensor:
            x = hidden_states.new_zeros(hidden_states.shape[0], *state.shape, dtype=state.dtype)
            return (
                x.to(torch.promote_types(x.dtype, hidden_states.dtype))
                if x.is_floating_point()
                else x
            )

        spec = self.spec_in(context.bits)
        seen = {name: state.numbers or state for name, state in spec.items()}
        return nested({name: zeros(state) for name, state in seen.items()})

    def _piece(self, x: Tensor, context: Context) -> tuple[Tensor, States]:
        """Mix tokens that do not cross the end of a segment in any row."""
        states = context.states
        C = self.config.segment_length
        real = (
            x.new_ones(x.shape[:2], dtype=torch.bool)
            if context.attention_mask is None
            else context.attention_mask
        )
        begins = (states["offset"] == C) & real.any(1)
        now = states["memory"]["weights"] if "memory" in states else states["then"]
        then = torch.where(begins[:, None, None], now, states["then"])
        offset = torch.where(begins, 0, states["offset"])
        # padding gets C and is dropped
        places = torch.where(real, offset[:, None] + real.cumsum(1) - 1, C)
        recalled = self.memory.recall(x, then, self._of_memory(context))
        heads, keys, values = self._attend_pairs(x, recalled, places, context)
        y = self.attention_norm(self.o_proj(heads.flatten(-2)))
        remembered, memory = self.remember(y, context)
        output = y * self.memory_norm(remembered).sigmoid()
        segment = {"then": then, "offset": offset + real.sum(1), "keys": keys, "values": values}
        return output, segment | {"memory": memory}

    def _attend_pairs(
        self, x: Tensor, h: Tensor, places: Tensor, context: Context
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention outputs [B, T, H, D] of tokens at places [B, T] of their segments; the updated keys and values."""
        q, k, v = self.project_heads(x, context.positions)
        k_h, v_h = (self.by_head(proj(h)) for proj in (self.k_proj, self.v_proj))
        k_h = self.normalize_and_rotate(q, k_h, context.positions)[1]
        keys, values, stored = self._put(
            torch.stack([k_h, k], 2), torch.stack([v_h, v], 2), places, context
        )
        columns = Tokens(
            torch.arange(keys.shape[1], device=x.device).expand(2, -1).mT.flatten()[None]
        )
        all_keys, all_values = (x.flatten(1, 2).to(q.dtype) for x in (keys, values))
        segment = Columns(columns, all_keys, all_values, causal)
        always = self.always(x)
        first = [] if always is None else [always.map(lambda x: x.expand(q.shape[0], *x.shape[1:]))]
        blocks = Blocks.of(q, Tokens(places), *first, segment)
        return self.scores.attend(blocks), stored[0], stored[1]

    def _put(
        self, k: Tensor, v: Tensor, places: Tensor, context: Context
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Pairs [B, T, 2, H, D] at places [B, T] among those of the states, as tokens see them; and the new states."""
        rows = storage_of(context.bits, "window")
        held = context.states["keys"], context.states["values"]
        new = rows.stored(k, v)
        stored = [_put(x, y, places) for x, y in zip(held, new)]
        if not rows.is_packed:
            return stored[0], stored[1], stored
        pairs = zip(rows.numbers(*held, k, v), rows.seen(k, v, *new))
        keys, values = (_put(x, y, places) for x, y in pairs)
        return keys, values, stored


def _put(buffer: Tensor, pairs: Tensor, places: Tensor) -> Tensor:
    """The buffer [B, C, 2, H, D] with pairs [B, T, 2, H, D] written at places [B, T]; place C means: drop."""
    index = places[:, :, None, None, None].expand_as(pairs)
    return F.pad(buffer, (0, 0, 0, 0, 0, 0, 0, 1)).scatter(1, index, pairs.to(buffer.dtype))[:, :-1]
