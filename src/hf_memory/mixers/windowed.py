"""Attention over a window, beside older tokens that are kept or a memory of the tokens that have left the window.

The projections are those of attention. Most key-value heads see a window and the first tokens of the sequence or a
learned sink in their place (https://arxiv.org/abs/2309.17453). In one softmax with these is nothing else; or older
tokens that are worth most, as in students by default (`Kept`); or a memory of all tokens between. Some heads
can keep all keys and values instead (https://arxiv.org/abs/2410.10819), or those of a longer window.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_memory.cache import Spec, State, States, storage_of
from hf_memory.convertible import ObservedAttention
from hf_memory.layers import upcast
from hf_memory.mixers.attention_blocks import (
    Attended,
    Blocks,
    Columns,
    attended_rows,
    joined_softmax,
)
from hf_memory.mixers.base import Context, MemoryMixer, Projected, Projections
from hf_memory.mixers.far_memory import Leaving
from hf_memory.mixers.pasts.everything import Everything
from hf_memory.mixers.pasts.kept import Kept
from hf_memory.mixers.pasts.kept_by_head import KeptByHead
from hf_memory.mixers.pasts.ring import Ring
from hf_memory.mixers.pasts.rows import New
from hf_memory.mixers.positions import Positions
from hf_memory.ops.cpu import TokenReader, TokenReaderInGraph
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
        """The values [1, 1, H, 1, V], and the logits by group [H, groups]."""
        return self.values[None, None, :, None], self.logits.view(len(self.values), -1)


class Part(NamedTuple):
    """Some of the key-value heads, and what they see."""

    heads: list[int]
    slices: list[slice]  # that have these heads in turn; none if these are all heads
    past: Everything | Kept | KeptByHead | Ring
    is_near: bool  # whether they have a window, and what a layer has beside windows, such as sinks

    @classmethod
    def of_heads(cls, heads: list[int], past: Any, is_near: bool) -> "Part":
        """The part of these heads."""
        return cls(heads, _slices(heads), past, is_near)

    def of(self, x: Tensor) -> Tensor:
        """Its heads of x [B, T, H, ...]: a view if possible, and without an index tensor in any case."""
        if not self.slices:
            return x
        if len(self.slices) == 1:
            return x[:, :, self.slices[0]]
        return torch.cat([x[:, :, here] for here in self.slices], 2)

    def spec(self, channels: int) -> Spec:
        """The states of its heads, each with so many channels."""
        return self.past.spec(len(self.heads), channels, channels)


class WindowedMixer(MemoryMixer):
    """Attention over a window and the first tokens, a memory of the tokens between, and heads that keep everything."""

    padding_last = True
    sees_positions = True  # as attention does, which also has these heads and norms
    projects_positions = True
    heads = Projections.heads
    normalizes = Projections.normalizes
    can_have_few_bits = True  # whether keys and values can be stored in few bits

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.parts = self.parts_of(config, layer_idx)
        self.full_heads = _full_heads(config, layer_idx)
        self.near_heads = _near_heads(config, layer_idx)
        order = [h for part in self.parts for h in part.heads]
        # place of each head among the outputs
        self.place_of_head = [order.index(h) for h in range(len(order))]
        near = len(self.near_heads)
        has_memory = config.layer_types[layer_idx] == "sliding_memory" and near
        self.far = config.far_memory(config, near) if has_memory else None
        groups = self.num_key_value_groups
        has_sinks = config.attention_sinks and near
        self.sinks: Any = Sinks(near * groups, near, self.value_dim) if has_sinks else None

    @classmethod
    def parts_of(cls, config, layer_idx: int, kept: list[int] | None = None) -> list[Part]:
        """The heads of a layer that see alike: with a window, also with tokens that are kept beside it, and without.

        `kept` has these numbers for each key-value head; default: those of the config.
        """
        kept = config.kept_tokens[layer_idx] if kept is None else kept
        near = _near_heads(config, layer_idx)
        keeping = [h for h in near if kept[h]]
        others = [h for h in near if not kept[h]]
        parts = []
        if others:
            parts.append(Part.of_heads(others, cls.window(config), True))
        if keeping:
            prefix = "kept_" if others else ""
            past = cls.kept_past(config, [kept[h] for h in keeping], prefix)
            parts.append(Part.of_heads(keeping, past, True))
        if full := _full_heads(config, layer_idx):
            parts.append(Part.of_heads(full, cls.full_past(config), False))
        return parts if len(parts) > 1 else [part._replace(slices=[]) for part in parts]

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of `attend`; those of heads that keep everything grow with the text, unless they have a window."""
        spec: Spec = {"tokens_read": State((), torch.long)}
        for part in cls.parts_of(config, layer_idx):
            spec |= part.spec(cls.kept_channels(config))
        heads = len(_near_heads(config, layer_idx))
        if heads and config.layer_types[layer_idx] == "sliding_memory":
            spec |= config.far_memory.state_spec(config, heads)
            size = config.num_sink_tokens + config.sliding_window
            spec["slot_gates"] = State((size, heads, config.far_memory.num_gates))
            if channels := config.rotating_channels(layer_idx):
                spec["slot_angles"] = State((size, channels), None)
        return spec

    @classmethod
    def kept_past(cls, config, numbers: list[int], prefix: str = "") -> Kept | KeptByHead:
        """What heads see that have a window and keep so many other tokens each."""
        sizes = config.sliding_window, config.num_sink_tokens, numbers[0], config.kept_block_size
        groups = config.num_attention_heads // config.num_key_value_heads
        past = Kept(*sizes, config.eviction, cls.kind("window"), prefix, groups)
        return past if len({*numbers}) == 1 else KeptByHead.of(past, numbers)

    @classmethod
    def window(cls, config) -> Ring:
        """A window and the first tokens."""
        return Ring(config.sliding_window, config.num_sink_tokens, cls.kind("window"))

    @classmethod
    def full_past(cls, config) -> Everything | Ring:
        """What heads see that keep everything, or a longer window."""
        kind = cls.kind("full_attention_heads")
        longer = config.full_attention_window
        if longer is None:
            return Everything(kind, "full_")
        return Ring(longer, config.num_sink_tokens, kind, "full_", is_long=True)

    @classmethod
    def kind(cls, name: str) -> str | None:
        """What `cache_bits` calls keys and values; None: nothing, since they need all their bits."""
        return name if cls.can_have_few_bits else None

    @classmethod
    def packable_states(cls, config, layer_idx: int) -> list[str]:
        """See `Projections.packable_states`; also without full heads, which a conversion chooses later."""
        found = super().packable_states(config, layer_idx)
        later = [state.kind for state in cls.full_past(config).spec(1, 1, 1).values()]
        return list(dict.fromkeys([*found, *filter(None, later)]))

    @classmethod
    def exact_up_to(cls, config, layer_idx: int, length: int) -> int | None:
        """See `Convertible.exact_up_to`: all tokens, as long as the window and the first tokens are all of them."""
        if config.attention_sinks:
            return None
        return length if length <= config.sliding_window + config.num_sink_tokens else None

    @classmethod
    def kept_channels(cls, config) -> int:
        """Number of channels of each kept key and value."""
        return config.head_dim

    @property
    def new_part(self) -> nn.Module | None:
        """Only the memory and sinks; other weights have the same meaning as in the teacher."""
        parts = self._parts_beside_window
        return nn.ModuleList(parts) if len(parts) > 1 else next(iter(parts), None)

    @property
    def _parts_beside_window(self) -> list[nn.Module]:
        return [part for part in (self.far, self.sinks) if part is not None]

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """See `MemoryMixer.mix`. The states are:

        - `tokens_read` [B];
        - of heads with a window `keys` and `values` [B, tokens, H, D] of a `Ring`; or with kept tokens the entries of
          `Kept`, or of `KeptByHead` if they keep different numbers, named `kept_keys` and so on if some keep none;
        - those of the memory, with `slot_gates` [B, tokens, H, gates] and `slot_angles` [B, tokens, channels] of the
          ring, for the writes of tokens that are still in the window;
        - of heads that keep everything `full_keys` and `full_values` [B, tokens, heads, D] and `full_positions`
          [B, tokens], or another ring if they have a window.
        """
        outputs, states = self.attend(self.parts, projected, context)
        return self.in_order(outputs).flatten(2), states

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """What each token [B, T, hidden_size] has by itself: queries by group [B, T, H, groups, D], keys and values."""
        if self.far is None:
            q, k, v = self.project_heads(hidden_states, positions)
            return {"q": self._by_group(q, k), "k": k, "v": v}
        plain_q, k, v = self.project_heads(hidden_states, None)
        q, k = self.rotate(plain_q, k, positions)
        found = {"q": self._by_group(q, k), "k": k, "v": v}
        found |= {"plain_q": self._by_group(plain_q, k), "gates": self.far.gates(hidden_states)}
        if positions is not None and self.rotates:
            angles = positions.inverse().halves()
            found["angles"] = angles.expand(k.shape[0], -1, -1)
        return found

    def _by_group(self, q: Tensor, k: Tensor) -> Tensor:
        return q.view(*q.shape[:2], k.shape[2], -1, q.shape[-1])

    def attend(
        self, parts: list[Part], projected: Projected, context: Context
    ) -> tuple[list[Tensor], States]:
        """The outputs [B, T, n, groups, D] of some parts, and their states."""
        q = projected["q"]
        k = projected["k"]
        v = projected["v"]
        self._check_heads(k)
        if context.is_step(q):
            return self._attend_one(parts, projected, context)
        tokens, tokens_read = context.tokens_and_count(q)
        outputs = []
        states: States = {}
        for part, new in zip(parts, self.new_rows(parts, k, v, context)):
            o, of_part = self.attend_part(part, projected, new, tokens, context)
            outputs.append(o)
            states |= of_part
        states["tokens_read"] = tokens_read
        return outputs, states

    def _attend_one(
        self, parts: list[Part], projected: Projected, context: Context
    ) -> tuple[list[Tensor], States]:
        """`attend` for one token of each row, which follows others."""
        outputs: list[Any] = []
        others = []
        for i, part in enumerate(parts):
            outputs.append(self._read_token(part, projected, context))
            if outputs[i] is None:
                others.append(i)
        changed: States = {}
        if others:
            rows = projected["k"], projected["v"]
            new_rows = self.new_rows([parts[i] for i in others], *rows, context)
            for i, new in zip(others, new_rows):
                outputs[i], of_part = self.attend_part(parts[i], projected, new, None, context)
                changed |= of_part
        counts = context.states["tokens_read"]
        for x in counts if isinstance(counts, list) else [counts]:
            x.add_(1)
        return outputs, context.states | changed if changed else context.states

    def _read_token(self, part: Part, projected: Projected, context: Context) -> Tensor | None:
        """The outputs [B, 1, n, groups, D] for one token of each row; None if compiled code does not read the part."""
        q = projected["q"]
        reader = self.reader(part, q, context)
        if reader is None:
            return None
        B, T, H, groups, D = q.shape
        positions = context.uniform_length
        if positions is None:
            positions = context.states["tokens_read"]
        elif isinstance(positions, int):
            positions = (positions,) * B
        else:
            positions = tuple(positions)
        o = q.new_empty(B, T, len(part.heads) if part.slices else H, groups, D)
        reader(q, projected["k"], projected["v"], positions, o)
        return o

    def reader(
        self, part: Part, q: Tensor, context: Context
    ) -> TokenReader | TokenReaderInGraph | None:
        """What reads tokens of each row for a part, queries q [B, T, H, groups, D]; see `Kept.reader`."""
        past = part.past
        is_alone = self.far is None and self.sinks is None and len(part.slices) < 2
        if not is_alone or not isinstance(past, Kept | KeptByHead):
            return None
        among = part.slices[0] if part.slices else slice(0, q.shape[2], 1)
        return past.reader(q, context, self.scores, among)

    def new_rows(self, parts: list[Part], k: Tensor, v: Tensor, context: Context) -> list[New]:
        """New keys and values [B, T, H, D] of each part: stored in one call if all heads store them alike."""
        kinds = [part.past.kind for part in parts]
        if len(parts) < 2 or len({storage_of(context.bits, kind) for kind in kinds}) > 1:
            rows = zip(parts, kinds)
            return [New.of(part.of(k), part.of(v), kind, context) for part, kind in rows]
        whole = New.of(k, v, kinds[0], context)
        return [whole.map(part.of) for part in parts]

    def attend_part(
        self, part: Part, projected: Projected, new: New, tokens: Tokens | None, context: Context
    ) -> tuple[Tensor, States]:
        """The outputs [B, T, n, groups, D] of the heads of a part, and its states, but for those changed in place.

        `tokens` is None if each row is one token that follows others.
        """
        q = part.of(projected["q"])
        if part.is_near and self.far is not None:
            return self._attend_beside_memory(part, q, projected, new, tokens, context)
        if part.is_near and self.sinks is not None:
            return self._attend_beside_sinks(part, q, new, tokens, context)
        if tokens is None:
            return part.past.attend_one(q, new, context, self.scores), {}
        o, states = part.past.attend(q.flatten(2, 3), new, tokens, context, self.scores)
        return o.unflatten(2, q.shape[2:4]), states

    def _attend_beside_sinks(
        self, part: Part, q: Tensor, new: New, tokens: Tokens | None, context: Context
    ) -> tuple[Tensor, States]:
        """See `attend_part`; in one softmax with sinks."""
        past: Any = part.past
        states: States = {}
        if tokens is None:
            attended = past.attend_one_with_mass(q, new, context, self.scores)
        else:
            rows = q.flatten(2, 3), new, tokens, context, self.scores
            attended, states = past.attend_with_mass(*rows)
        return self._with_sinks(attended, part)[0].unflatten(2, q.shape[2:4]), states

    def _attend_beside_memory(
        self,
        part: Part,
        q: Tensor,
        projected: Projected,
        new: New,
        tokens: Tokens | None,
        context: Context,
    ) -> tuple[Tensor, States]:
        """See `attend_part`; in one softmax with a memory of the tokens that have left the window."""
        past: Any = part.past
        far: Any = self.far
        waiting: States = {}
        beside = {"slot_gates": projected["gates"]}
        if "angles" in projected:
            beside["slot_angles"] = projected["angles"]
        if tokens is None:
            leaving = self._leaving_one(past, new, beside, context)
            seen = past.read_one(new, context)
            attended = self._with_sinks(seen.attend_with_mass(q, self.scores), part)
        else:
            rows = q.flatten(2, 3)
            read = past.read_many(new, tokens, context)
            groups = read.blocks(rows, tokens)
            attended = attended_rows(map(self.scores.attend_with_mass, groups), rows)
            attended = self._with_sinks(attended, part)
            leaving, waiting = self._leaving(past, read, tokens, beside, context)
            waiting = read.states | waiting
        o, logsumexp = attended
        plain_q = part.of(projected["plain_q"])
        remembered, mass, memory = far(plain_q.flatten(2, 3), leaving, context)
        share = torch.sigmoid(mass - logsumexp)[..., None].to(o.dtype)
        o = o + share * (remembered - o)
        return o.unflatten(2, q.shape[2:4]), waiting | memory

    def _check_heads(self, k: Tensor) -> None:
        are_alike = len(self.parts) == 1 and not isinstance(self.parts[0].past, KeptByHead)
        if not are_alike and k.shape[2] < len(self.place_of_head):
            heads = self.config.full_attention_heads
            raise ValueError(
                "full_attention_heads must be None, and num_kept_tokens one number, with tensor parallelism, got "
                f"{heads} and {self.config.num_kept_tokens}"
            )

    def in_order(self, outputs: list[Tensor]) -> Tensor:
        """The queries' outputs [B, T, HQ, D] from those of the parts [B, T, n, groups, D]."""
        if len(outputs) == 1:
            return outputs[0].flatten(2, 3)
        heads = [x for part in outputs for x in part.unbind(2)]
        return torch.cat([heads[i] for i in self.place_of_head], 2)

    @contextmanager
    def without_memory(self) -> Iterator[None]:
        """Read without slots and kept tokens, to see what they give."""
        far = self.far
        self.far = None
        try:
            with self.keeping(0):
                yield
        finally:
            self.far = far

    @contextmanager
    def keeping(self, num_tokens: int) -> Iterator[None]:
        """See `Convertible.keeping`."""
        usual = self.parts
        kept = [num_tokens] * len(self.place_of_head)
        self.parts = self.parts_of(self.config, self.layer_idx, kept)
        try:
            yield
        finally:
            self.parts = usual

    @property
    def keeps_tokens(self) -> bool:
        """Whether heads keep tokens beside their window."""
        return any(isinstance(part.past, Kept | KeptByHead) for part in self.parts)

    @property
    def starts_from_attention(self) -> bool:  # type: ignore[override]
        """Whether there are slots or sinks."""
        return len(self._parts_beside_window) > 0

    def start_from(self, observed: ObservedAttention) -> None:
        """See `Convertible.start_from`."""
        hidden_states = observed.hidden_states
        self.start_sinks(hidden_states, Positions(*observed.positions), observed.num_first_tokens)
        self.start_near(hidden_states, Positions(*observed.distances))

    def start_near(self, hidden_states: Tensor, distances: Positions) -> None:
        """Initialise the memory close to attention to hidden states [B, T, hidden_size] at these distances."""
        if self.far is None:
            return
        q, k, _ = (
            x.flatten(0, 1) for x in self._of_near_heads(*self.project_heads(hidden_states, None))
        )
        back = Positions(
            *(upcast(x.mean(1, keepdim=True)) for x in (distances.cos, -distances.sin))
        )
        unit_keys = torch.eye(self.head_dim, dtype=back.cos.dtype, device=k.device)
        units = unit_keys[None, :, None]
        self.far.start_near(q, k, self.rotate(units, units, back)[0][0, :, 0])

    def start_sinks(self, hidden_states: Tensor, positions: Positions | None, first: int) -> None:
        """Initialise sinks to what late queries of hidden states [B, T, hidden_size] see in the first tokens.

        Their logit is the mean logarithm of the mass of these tokens, and their value is the mean value by mass.
        """
        if self.sinks is None:
            return
        q, k, v = self._of_near_heads(*self.project_heads(hidden_states, None))
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

    def _of_near_heads(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Those of queries, keys or values [B, T, heads, D] that heads with a window have."""
        H = len(self.place_of_head)
        near = Part.of_heads(self.near_heads, self.parts[0].past, True)
        return tuple(near.of(x.unflatten(2, (H, -1))).flatten(2, 3) for x in rows)

    def _with_sinks(self, attended: Any, part: Part) -> Attended:
        """Results [B, T, HQ, V] of a softmax over tokens, and its mass, with the sinks of a part if there are any."""
        if self.sinks is None:
            return attended
        (o, mass), (values, logits) = attended, self.sinks()
        values = values.expand(-1, -1, -1, self.num_key_value_groups, -1)
        if len(part.heads) < len(self.near_heads):
            places = [self.near_heads.index(h) for h in part.heads]
            values, logits = values[:, :, places], logits[places]
        return joined_softmax(
            attended, (values.flatten(2, 3).to(o.dtype), logits.flatten().to(mass.dtype))
        )

    def _leaving(
        self, past: Ring, read: Any, tokens: Tokens, beside: States, context: Context
    ) -> tuple[Leaving, States]:
        """The tokens that leave the window when each token is read, and the states that determine their writes.

        Their slots are computed only then: stored for each token of the window, they would be as large as the memory.
        """
        T = beside["slot_gates"].shape[1]
        (gates, *angles), states = past.extend(beside, context)
        keys = read.keys[:, :T]
        if angles:
            keys = Positions.of_halves(angles[0][:, :T]).turn(keys)
        # the first tokens stay visible
        is_written = tokens.position >= past.size + past.first
        return Leaving(keys, read.values[:, :T], gates[:, :T], is_written), states

    def _leaving_one(self, past: Ring, new: New, beside: States, context: Context) -> Leaving:
        """The token of each row that leaves the window for another.

        What determines the write of the other takes its place in the states.
        """
        key, value = past.leaving(new, context)
        gates, *angles = past.oldest([*beside], context)
        past.replace(beside, context)
        if angles:
            key = Positions.of_halves(angles[0]).turn(key)
        position = context.states["tokens_read"][:, None]
        is_written = position >= past.size + past.first
        return Leaving(key, value, gates, is_written)


def _full_heads(config, layer_idx: int) -> list[int]:
    return sorted(config.full_attention_heads[layer_idx]) if config.full_attention_heads else []


def _near_heads(config, layer_idx: int) -> list[int]:
    full = _full_heads(config, layer_idx)
    return [h for h in range(config.num_key_value_heads) if h not in full]


def _slices(heads: list[int]) -> list[slice]:
    """Slices that have these heads in turn, and only one if they are equally far from each other."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    if heads == [*range(heads[0], heads[-1] + 1, step)]:
        return [slice(heads[0], heads[-1] + 1, step)]
    runs = [[h for _, h in run] for _, run in groupby(enumerate(heads), lambda x: x[1] - x[0])]
    return [slice(run[0], run[-1] + 1) for run in runs]
