"""Attention over a window, beside older tokens that are kept or a memory of the tokens that have left the window.

The projections are those of attention. Most key-value heads see a window and the first tokens of the sequence or a
learned sink in their place (https://arxiv.org/abs/2309.17453). In one softmax with these is nothing else; or older
tokens that received attention, as in students by default (`KVEviction`); or a memory of all tokens between. Some heads
can keep all keys and values instead (https://arxiv.org/abs/2410.10819), or those of a longer window.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_memory.cache import Spec, State, States
from hf_memory.convertible import ObservedAttention
from hf_memory.layers import upcast
from hf_memory.mixers.attention_blocks import (
    Attended,
    Blocks,
    Columns,
    attended_rows,
    full_attention,
    joined_softmax,
    rows_of,
)
from hf_memory.mixers.base import RECURRENT, Context, MemoryMixer, Projections
from hf_memory.mixers.far_memory import Leaving
from hf_memory.mixers.kv_eviction import KVEviction
from hf_memory.mixers.pasts import Everything, Past, Ring, Seen, in_bits
from hf_memory.mixers.positions import Positions
from hf_memory.ops.bits import pack_both
from hf_memory.ops.masks import Tokens, all_tokens, causal, everything, window


class Sinks(nn.Module):
    """A sink takes part in the softmax of a head like a key whose score c is learned, and whose value u is too.

        o = sum_i p_i v_i + p u,   with p and p_i the softmax of c and of the scores of the tokens

    Each query head has a score, as `sinks` of gpt-oss, where the value is zero; each key-value head has a value. Since
    all p add up to one, biases can have the value's effect: -u that of the values, W_o u that of the output.
    """

    starts = {"logits": 0.0, "values": 0.0}  # as a token of score and value zero

    def __init__(self, query_heads: int, heads: int, value_dim: int):
        super().__init__()
        self.logits = nn.Parameter(torch.empty(query_heads))
        self.values = nn.Parameter(torch.empty(heads, value_dim))

    def forward(self) -> tuple[Tensor, Tensor]:
        """The values [1, 1, H, V], and the logits [HQ]."""
        return self.values[None, None], self.logits


class VirtualToken(nn.Module):
    """A learned token before the first one, which every token sees. Each key-value head has its key f and value u.

        o = sum_i p_i v_i + p u,   with p and p_i the softmax of scaling q f and of the scores of the tokens

    f has a constant place in the rotation, so that a window needs one entry for it, whatever the length.
    """

    starts = {"keys": 0.0, "values": 0.0}  # as a token of score and value zero

    def __init__(self, heads: int, key_dim: int, value_dim: int):
        super().__init__()
        self.keys = nn.Parameter(torch.empty(heads, key_dim))
        self.values = nn.Parameter(torch.empty(heads, value_dim))

    def forward(self) -> tuple[Tensor, Tensor]:
        """The keys and the values, [1, 1, H, D] each."""
        return self.keys[None, None], self.values[None, None]


class WindowedMixer(MemoryMixer):
    """Attention over a window and the first tokens, a memory of the tokens between, and heads that keep everything."""

    padding_last = True
    sees_positions = True  # as attention does, which also has these heads and norms
    heads = Projections.heads
    normalizes = Projections.normalizes

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        kept = config.full_attention_heads[layer_idx] if config.full_attention_heads else []
        self.full_heads = sorted(kept)
        self.near_heads = [h for h in range(config.num_key_value_heads) if h not in kept]
        order = self.near_heads + self.full_heads
        self.place_of_head = [
            order.index(h) for h in range(len(order))
        ]  # place of each head among the outputs
        has_memory = config.layer_types[layer_idx] == "sliding_memory" and self.near_heads
        self.far = config.far_memory(config, len(self.near_heads)) if has_memory else None
        near = len(self.near_heads)
        groups = self.num_key_value_groups
        self.sinks: Any = (
            Sinks(near * groups, near, self.value_dim) if config.attention_sinks and near else None
        )
        sizes = config.num_key_value_heads, self.head_dim, self.value_dim
        self.virtual_token: Any = VirtualToken(*sizes) if config.virtual_token else None
        self.kv_eviction = (
            _kv_eviction(config, layer_idx) if config.kept_tokens[layer_idx] else None
        )
        parts = (True, self.near_heads), (False, self.full_heads)
        self.parts = [(is_near, _slices(heads)) for is_near, heads in parts if heads]
        self._declare_pasts()

    def declare(self) -> None:
        """See `Projections.declare`."""
        super().declare()
        self._declare_pasts()

    def _declare_pasts(self) -> None:
        self.near_past = _near_past(self.config, self.layer_idx, leaves=self.far is not None)
        self.full_past = _full_past(self.config, self.layer_idx)
        if self.kv_eviction is not None:
            self.kv_eviction = self.kv_eviction._replace(bits=self.config.bits_of("window"))
        # One token's keys and values of both parts are packed in one call, which takes half of the time, unless the
        # memory needs their numbers.
        bits = [self.config.bits_of(kind) for kind in ("window", "full_attention_heads")]
        is_one = len(self.parts) > 1 and self.far is None and bits[0] == bits[1]
        self.bits_of_parts = bits[0] if is_one else None

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of `mix`; those of heads that keep everything grow with the text, unless they have a window."""
        full = len(config.full_attention_heads[layer_idx]) if config.full_attention_heads else 0
        heads = config.num_key_value_heads - full
        D = cls.kept_channels(config)
        spec: Spec = {"tokens_read": State((), torch.long)}
        if heads:
            keeps = config.kept_tokens[layer_idx]
            near = _kv_eviction(config, layer_idx) if keeps else _near_past(config, layer_idx)
            spec |= near.spec(heads, D)
            if config.layer_types[layer_idx] == "sliding_memory":
                spec |= config.far_memory.state_spec(config, heads)
                kept = config.num_sink_tokens + config.sliding_window
                spec["slot_gates"] = State((kept, heads, config.far_memory.num_gates))
                if channels := config.rotating_channels(layer_idx):
                    spec["slot_angles"] = State((kept, channels), None)
        if full and config.full_attention_window is not None:
            spec |= _full_past(config, layer_idx).spec(full, D)
        elif full:
            spec |= _full_past(config, layer_idx).spec(full, D, D)
        return spec

    @classmethod
    def kinds_in_bits(cls, config, layer_idx: int) -> tuple[str, ...]:
        """See `Projections.kinds_in_bits`; also without full heads, which a conversion chooses later."""
        has_slots = config.layer_types[layer_idx] == "sliding_memory"
        return "window", "full_attention_heads", *([RECURRENT] if has_slots else [])

    @classmethod
    def exact_up_to(cls, config, layer_idx: int, length: int) -> int | None:
        """See `Convertible.exact_up_to`: all tokens, as long as the window and the first tokens are all of them."""
        if config.attention_sinks or config.virtual_token:
            return None
        return length if length <= config.sliding_window + config.num_sink_tokens else None

    @classmethod
    def kept_channels(cls, config) -> int:
        """Number of channels of each kept key and value."""
        return config.head_dim

    @property
    def new_part(self) -> nn.Module | None:
        """Only the memory, sinks and virtual token; other weights have the same meaning as in the teacher."""
        parts = self._parts_beside_window
        return nn.ModuleList(parts) if len(parts) > 1 else next(iter(parts), None)

    @property
    def _parts_beside_window(self) -> list[nn.Module]:
        return [part for part in (self.far, self.sinks, self.virtual_token) if part is not None]

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """See `MemoryMixer.mix`. The states are:

        - `tokens_read` [B];
        - of heads with a window `keys` and `values` [B, tokens, H, D] of a `Ring`; or with kept tokens those of
          `Entries`: `keys` and `values` [B, H, n, D], `number` and `received` [B, H, n];
        - those of the memory, with `slot_gates` [B, tokens, H, gates] and `slot_angles` [B, tokens, channels] of the
          ring, for the writes of tokens that are still in the window;
        - of heads that keep everything `full_keys` and `full_values` [B, tokens, heads, D] and `full_positions`
          [B, tokens], or another ring if they have a window.
        """
        o, states = self.attend(hidden_states, *self.project_heads(hidden_states, None), context)
        return self.o_proj(o.flatten(2)), states

    def mix_one(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """See `MemoryMixer.mix_one`."""
        inputs = self.project_heads(hidden_states, None)
        o, states = self.attend_one(hidden_states, *inputs, context)
        return self.o_proj(o.flatten(2)), states

    def attend_after(
        self, hidden_states: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Context
    ) -> tuple[Tensor, States]:
        """The outputs [B, T, HQ * D] of heads that are projected already, and the states; see `mix_after`."""
        is_one = self.reads_one(hidden_states, context)
        attend = self.attend_one if is_one else self.attend
        o, states = attend(hidden_states, q, k, v, context)
        return o.flatten(2), states

    @property
    def reads_rows_apart(self) -> bool:
        """Whether one token of each row can be read with `Context.rows`: windows of full heads are read together."""
        has_windows = bool(self.full_heads) and isinstance(self.full_past, Ring)
        return self.kv_eviction is not None and not has_windows

    def attend(
        self, hidden_states, q: Tensor, k: Tensor, v: Tensor, context: Context
    ) -> tuple[Tensor, States]:
        """The heads [B, T, HQ, D], and the states of `mix`."""
        self._check_heads(k)
        tokens, tokens_read = context.tokens_and_count(hidden_states)
        rotated, k = self.rotate(q, k, context.positions)
        outputs: list[Tensor] = []
        states: States = {}
        for is_near, heads in self.parts:
            if not is_near and context.attended is not None:
                outputs.append(context.attended)
                continue
            rows = self._of(heads, None if self.far is None else q, rotated, k, v)
            if is_near:
                o, new = self._attend_near(hidden_states, rows, context, heads, tokens)
            else:
                o, new = self._attend_full(rows, context, heads, tokens)
            outputs.append(o)
            states |= new
        states["tokens_read"] = tokens_read
        if len(outputs) == 1:
            return outputs[0], states
        parts = (x.unflatten(2, (-1, self.num_key_value_groups)) for x in outputs)
        return self._in_order(parts), states

    def attend_one(
        self, hidden_states, q: Tensor, k: Tensor, v: Tensor, context: Context
    ) -> tuple[Tensor, States]:
        """The same for one token of each row that follows others; states that do not grow change in place.

        The heads may be [B, 1, H, groups, D], in the same order.
        """
        self._check_heads(k)
        rotated, k = self.rotate(q, k, context.positions)
        by_group = rotated.view(k.shape[0], 1, k.shape[2], -1, k.shape[3])
        if self.bits_of_parts is not None:
            k, v = pack_both(k, v, self.bits_of_parts)
        of_all_heads: tuple[Tensor, ...] = by_group, k, v
        outputs: list[Tensor] = []
        states: States = {}  # that are neither changed in place nor grown in the context's dict
        for is_near, heads in self.parts:
            if not is_near and context.attended is not None:
                outputs.append(context.attended.unflatten(2, (-1, self.num_key_value_groups)))
                continue
            rows = of_all_heads
            if len(self.parts) > 1:
                rows = tuple([_heads(x, heads) for x in of_all_heads])
            if not is_near:
                outputs.append(self._attend_full_one(rows, context, heads))
                continue
            o, new = self._attend_near_one(hidden_states, q, rows, context, heads)
            outputs.append(o)
            states |= new
        for alone in context.rows or [context]:
            alone.states["tokens_read"].add_(1)
        after = context.states | states if states else context.states
        return outputs[0] if len(outputs) == 1 else self._in_order(outputs), after

    def _check_heads(self, k: Tensor) -> None:
        if self.full_heads and k.shape[2] < len(self.place_of_head):
            heads = self.config.full_attention_heads
            raise ValueError(
                f"full_attention_heads must be None with tensor parallelism, got {heads}"
            )

    def _in_order(self, parts: Iterable[Tensor]) -> Tensor:
        """The queries' outputs [B, T, HQ, D] from those of parts of the heads [B, T, n, groups, D]."""
        outputs = [x for part in parts for x in part.unbind(2)]
        return torch.cat([outputs[i] for i in self.place_of_head], 2)

    @contextmanager
    def without_memory(self) -> Iterator[None]:
        """Read without slots and kept tokens, to see what they give."""
        memory = self.far, self.kv_eviction
        self.far = self.kv_eviction = None
        try:
            yield
        finally:
            self.far, self.kv_eviction = memory

    @contextmanager
    def keeping(self, num_tokens: int) -> Iterator[None]:
        """See `Convertible.keeping`."""
        usual = self.kv_eviction
        self.kv_eviction = None if usual is None else usual._replace(kept=num_tokens)
        try:
            yield
        finally:
            self.kv_eviction = usual

    @property
    def starts_from_attention(self) -> bool:  # type: ignore[override]
        """Whether there are slots, sinks or a virtual token."""
        return len(self._parts_beside_window) > 0

    def start_from(self, observed: ObservedAttention) -> None:
        """See `Convertible.start_from`."""
        hidden_states = observed.hidden_states
        self.start_sinks(hidden_states, Positions(*observed.positions), observed.num_first_tokens)
        self.start_virtual_token(observed.beginning, Positions(*observed.before_text))
        self.start_near(hidden_states, Positions(*observed.distances))

    def start_near(self, hidden_states: Tensor, distances: Positions) -> None:
        """Initialise the memory close to attention to hidden states [B, T, hidden_size] at these distances."""
        if self.far is None:
            return
        q, k, _ = (
            x.flatten(0, 1)
            for x in self._of(self.parts[0][1], *self.project_heads(hidden_states, None))
        )
        back = Positions(
            *(upcast(x.mean(1, keepdim=True)) for x in (distances.cos, -distances.sin))
        )
        units = torch.eye(self.head_dim, dtype=back.cos.dtype, device=k.device)[
            None, :, None
        ]  # unit vectors as keys
        self.far.start_near(q, k, self.rotate(units, units, back)[0][0, :, 0])

    def start_sinks(self, hidden_states: Tensor, positions: Positions | None, first: int) -> None:
        """Initialise sinks to what late queries of hidden states [B, T, hidden_size] see in the first tokens.

        Their logit is the mean logarithm of the mass of these tokens, and their value is the mean value by mass.
        """
        if self.sinks is None:
            return
        q, k, v = self._of(self.parts[0][1], *self.project_heads(hidden_states, None))
        q, k = self.rotate(q, k, positions)
        W = self.config.sliding_window
        tokens = all_tokens(q.shape[1], q)
        late = slice(min(W + first, q.shape[1] - 1), None)
        near = Columns(tokens, k, v, causal & window(W))
        firsts = Columns(tokens, k, v, everything).of(slice(first))
        weights, logsumexp = self.scores.weights(
            Blocks.of(q[:, late], tokens.of(late), firsts, near)
        )
        mass = weights[..., :first]  # [B, H, groups, T, first]
        self.sinks.logits.copy_((logsumexp[..., 0] + mass.sum(-1).log()).mean((0, 3)).flatten())
        values = torch.einsum("bhgts,bshd->hd", mass, upcast(v[:, :first]))
        self.sinks.values.copy_(values / mass.sum((0, 2, 3, 4))[:, None])

    def start_virtual_token(self, hidden_states: Tensor, position: Positions) -> None:
        """Initialise it to the token of hidden states [1, 1, hidden_size] at this position."""
        if self.virtual_token is None:
            return
        q, k, v = self.project_heads(hidden_states, None)
        self.virtual_token.keys.copy_(self.rotate(q, k, position)[1][0, 0])
        self.virtual_token.values.copy_(v[0, 0])

    def _of(self, heads: list[slice], *rows: Tensor | None) -> tuple[Any, ...]:
        """The parts [B, T, n, D] of queries, keys or values that some key-value heads have."""
        if len(self.parts) == 1:
            return rows
        H = len(self.place_of_head)
        return tuple(
            None if x is None else _heads(x.unflatten(2, (H, -1)), heads).flatten(2, 3)
            for x in rows
        )

    def _attend_near(
        self, hidden_states, rows: tuple, context: Context, heads: list[slice], tokens: Tokens
    ) -> tuple[Tensor, States]:
        q, rotated, k, v = rows
        if self.kv_eviction is not None:
            return self._attend_kept(self._kept_tokens.read_many, rows, context, heads)
        virtual = self._virtual(heads, k.shape[0])
        always = None if virtual is None else (virtual.keys, virtual.values)
        if self.sinks is not None:
            values, _ = self.sinks()
            always = torch.zeros_like(values), values
        past = self.near_past.read_many(k, v, tokens, context, always)
        groups = (past if virtual is None else past._replace(first=virtual)).blocks(rotated, tokens)
        if self.far is None and self.sinks is None:
            return rows_of(map(self.scores.attend, groups), rotated), past.states
        attended = attended_rows(map(self.scores.attend_with_mass, groups), rotated)
        o, logsumexp = self._with_sinks(attended)
        if self.far is None:
            return o, past.states
        leaving, waiting = self._leaving(self.far.gates(hidden_states), past, tokens, context)
        o, memory = self._with_far(o, logsumexp, q, leaving, context)
        return o, past.states | waiting | memory

    def _attend_near_one(
        self, hidden_states, q: Tensor, rows: tuple, context: Context, heads: list[slice]
    ) -> tuple[Tensor, States]:
        """The outputs [B, 1, n, groups, D] of near heads, and states that are not changed in place."""
        rotated, k, v = rows
        groups = rotated.shape[2:4]
        if self.kv_eviction is not None:
            of_kept = None, rotated.flatten(2, 3), k, v
            o, states = self._attend_kept(self._kept_tokens.read_one, of_kept, context, heads)
            return o.unflatten(2, groups), states
        near_past = self.near_past
        always = None
        if self.virtual_token is not None and not near_past.lead:
            always = self._always(heads)
        seen = near_past.read_one(k, v, context, always)
        scores = self.scores
        if self.far is None and self.sinks is None:
            return seen.attend(rotated, scores), {}
        if self.far is None and near_past.lead and scores.is_plain:
            return self._with_sink_scores(seen).attend(rotated, scores), {}
        if self.sinks is not None:
            seen = seen.without(near_past.lead)
        by_head = rotated.flatten(2, 3)
        attended = self._with_sinks(seen.attend_with_mass(by_head, scores))
        if self.far is None:
            return attended[0].unflatten(2, groups), {}
        key, value = seen.left
        leaving = self._leaving_one(self.far.gates(hidden_states), key, value, context)
        (of_near,) = self._of(heads, q)
        o, memory = self._with_far(*attended, of_near, leaving, context)
        return o.unflatten(2, groups), memory

    def _with_sink_scores(self, seen: Seen) -> Seen:
        """The logits of sinks as scores that are added to that of the first entry, which is theirs."""
        S, H = seen.keys.shape[1:3]
        _, logits = self.sinks()
        added = F.pad(logits.to(seen.keys.dtype).view(1, H, -1, 1), (0, S - 1))
        if seen.visible is not None:
            added = added.masked_fill(~seen.visible, -torch.inf)
        return seen._replace(visible=added)

    @property
    def _kept_tokens(self) -> KVEviction:
        kept: Any = self.kv_eviction
        return kept._replace(backend=self.config.mixer_backend)

    def _attend_kept(
        self, read: Callable, rows: tuple, context: Context, heads: list[slice]
    ) -> tuple[Tensor, States]:
        """Attention to kept tokens, which `read` reads, with a virtual token or sinks if there are any."""
        _, rotated, k, v = rows
        attended, states = read(rotated, k, v, self.scores, context)
        virtual = self._virtual(heads, k.shape[0])
        if virtual is not None:
            tokens = all_tokens(rotated.shape[1], rotated)  # places do not matter: all see it
            of_virtual = self.scores.attend_with_mass(Blocks.of(rotated, tokens, virtual))
            attended = joined_softmax(attended, of_virtual)
        return self._with_sinks(attended)[0], states

    def _with_far(
        self, o: Tensor, logsumexp: Tensor, q: Tensor, leaving: Leaving, context: Context
    ) -> tuple[Tensor, States]:
        """Outputs [B, T, HQ, D] of mass e^logsumexp with those of the memory, and its states."""
        far: Any = self.far
        remembered, mass, memory = far(q, leaving, context)
        share = torch.sigmoid(mass - logsumexp)[..., None].to(o.dtype)
        return o + share * (remembered - o), memory

    def _attend_full(
        self, rows: tuple, context: Context, heads: list[slice], tokens: Tokens
    ) -> tuple[Tensor, States]:
        _, q, k, v = rows
        virtual = self._virtual(heads, k.shape[0])
        always = None if virtual is None else (virtual.keys, virtual.values)
        past = self.full_past.read_many(k, v, tokens, context, always)
        first = past.first if virtual is None else virtual
        W = self.config.full_attention_window
        o = full_attention(
            q, tokens, past.near, self.scores, first=first, window=W, is_whole=context.is_whole
        )
        return o, past.states

    def _attend_full_one(self, rows: tuple, context: Context, heads: list[slice]) -> Tensor:
        q, k, v = rows
        always = None if self.virtual_token is None else self._always(heads)
        seen = self.full_past.read_one(k, v, context, always)
        return seen.attend(q, self.scores)

    def _always(self, heads: list[slice]) -> list[Tensor]:
        """The key and the value of the virtual token of some heads [1, 1, H, D]."""
        return [_heads(x, heads) for x in self.virtual_token()]

    def _virtual(self, heads: list[slice], rows: int) -> Columns | None:
        """The virtual token of some heads, as often as there are rows; None without one."""
        if self.virtual_token is None:
            return None
        keys, values = (_heads(x, heads).expand(rows, -1, -1, -1) for x in self.virtual_token())
        return Columns(
            Tokens(torch.zeros(1, 1, dtype=torch.long, device=keys.device)),
            keys,
            values,
            everything,
        )

    def _with_sinks(self, attended: Any) -> Attended:
        """Results [B, T, HQ, V] of a softmax over tokens, and its mass, with sinks if there are any."""
        if self.sinks is None:
            return attended
        (o, mass), (values, logits) = attended, self.sinks()
        values = values.repeat_interleave(self.num_key_value_groups, 2)
        return joined_softmax(attended, (values.to(o.dtype), logits.to(mass.dtype)))

    def _leaving(
        self, gates: Tensor, past: Past, tokens: Tokens, context: Context
    ) -> tuple[Leaving, States]:
        """The tokens that leave the window when each token is read, and the states that determine their writes.

        Their slots are computed only then: stored for each token of the window, they would be as large as the memory.
        """
        W = self.config.sliding_window
        T = gates.shape[1]
        new = {"slot_gates": gates}
        if turns := context.positions is not None and self.rotates:
            new["slot_angles"] = context.positions.inverse().halves().expand(gates.shape[0], -1, -1)
        (gates, *angles), states = self.near_past.extend(new, context)
        keys = past.keys[:, :T]
        if turns:
            keys = Positions.of_halves(angles[0][:, :T]).turn(keys)
        is_written = (
            tokens.position >= W + self.config.num_sink_tokens
        )  # the first tokens stay visible
        return Leaving(keys, past.values[:, :T], gates[:, :T], is_written), states

    def _leaving_one(self, gates: Tensor, key: Tensor, value: Tensor, context: Context) -> Leaving:
        """The token of each row that leaves the window for another, given its key and value [B, 1, H, D].

        What determines the write of the other takes its place in the states.
        """
        new = {"slot_gates": gates}
        turns = context.positions is not None and self.rotates
        if turns:
            new["slot_angles"] = context.positions.inverse().halves().expand(gates.shape[0], -1, -1)  # type: ignore[union-attr]
        gates, *angles = self.near_past.replace(new, context)
        if turns:
            key = Positions.of_halves(angles[0]).turn(key)
        position = context.states["tokens_read"][:, None]
        is_written = position >= self.config.sliding_window + self.config.num_sink_tokens
        return Leaving(key, value, gates, is_written)


def _kv_eviction(config, layer_idx: int) -> KVEviction:
    needs_mass = config.attention_sinks or config.virtual_token
    sizes = (
        config.sliding_window,
        config.num_sink_tokens,
        config.kept_tokens[layer_idx],
        config.kept_block_size,
    )
    return KVEviction(*sizes, needs_mass=needs_mass, bits=config.bits_of("window"))


def _near_past(config, layer_idx: int, *, leaves: bool = True) -> Any:
    ring = _ring(config, layer_idx, config.sliding_window, config.bits_of("window"))
    return in_bits(ring._replace(leaves=leaves), config, "window")


def _full_past(config, layer_idx: int) -> Any:
    bits = config.bits_of("full_attention_heads")
    past: Any = Everything("full_")
    if (longer := config.full_attention_window) is not None:
        past = _ring(config, layer_idx, longer, bits)._replace(prefix="full_", leaves=False)
    return in_bits(past, config, "full_attention_heads")


def _ring(config, layer_idx: int, tokens: int, bits: int | None) -> Ring:
    learned = config.attention_sinks or config.virtual_token
    has_lead = learned and config.layer_types[layer_idx] == "sliding_heads" and bits is None
    return Ring(tokens, config.num_sink_tokens, lead=int(has_lead))


def _slices(heads: list[int]) -> list[slice]:
    """Slices that have these heads in turn, and only one if they are equally far from each other."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    if heads == [*range(heads[0], heads[-1] + 1, step)]:
        return [slice(heads[0], heads[-1] + 1, step)]
    runs = [[h for _, h in run] for _, run in groupby(enumerate(heads), lambda x: x[1] - x[0])]
    return [slice(run[0], run[-1] + 1) for run in runs]


def _heads(x: Tensor, heads: list[slice]) -> Tensor:
    """Some heads of x [B, T, H, ...]: a view if possible, and without an index tensor in any case."""
    return x[:, :, heads[0]] if len(heads) == 1 else torch.cat([x[:, :, here] for here in heads], 2)
