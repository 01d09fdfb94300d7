"""What attention sees of the tokens before, everything or a window and the first tokens, and its states."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.cache import Spec, State, States
from hf_memory.mixers.attention_blocks import (
    BLOCK,
    Attended,
    Blocks,
    Columns,
    Scores,
    joined_softmax,
    near_blocks,
    rows_of,
)
from hf_memory.mixers.base import Context
from hf_memory.ops.attention_in_bits import attention_in_bits, reads_bytes
from hf_memory.ops.bits import pack_both, rounded, unpack
from hf_memory.ops.exported import varies
from hf_memory.ops.layout import expand_dims_like
from hf_memory.ops.masks import Mask, Tokens, causal, older, window


class Seen(NamedTuple):
    """What one token of each row sees, itself included."""

    keys: Tensor  # [B, S, H, D], or packed rows
    values: Tensor  # [B, S, H, D], or packed rows
    visible: Tensor | None  # [B, 1, 1, S] bool, which of them exist; None: all
    left: Any = (
        None  # key and value [B, 1, H, D] of the token that leaves a ring, if they are asked for
    )
    bits: Any = None  # of packed rows, see `hf_memory.ops.bits`
    backend: Any = None  # of the op that reads packed rows
    always: Any = None  # key and value [1, 1, H, D] that packed rows come after, if there are any

    def without(self, lead: int) -> "Seen":
        """The same without the first entries."""
        visible = None if self.visible is None else self.visible[..., lead:]
        return self._replace(
            keys=self.keys[:, lead:], values=self.values[:, lead:], visible=visible
        )

    def after(self, always: Any) -> "Seen":
        """The same with the entry `always`, a key and a value [1, 1, H, D], before the others; None: without one."""
        if always is None:
            return self
        keys, values = (
            torch.cat([x.to(y.dtype).expand(y.shape[0], -1, -1, -1), y], 1)
            for x, y in zip(always, (self.keys, self.values))
        )
        visible = None if self.visible is None else F.pad(self.visible, (1, 0), value=True)
        return Seen(keys, values, visible, self.left)

    def attend(self, q: Tensor, scores: Scores) -> Tensor:
        """Attention of queries [B, 1, H, groups, D] whose scores do not depend on positions: [B, 1, H, groups, V]."""
        is_in_bits = self.bits is not None and self._is_read_in_bits(q, scores)
        if scores.is_plain and not is_in_bits:
            seen = self if self.bits is None else self._numbers(q)
            return scores.attend_one(q, seen.keys, seen.values, seen.visible)
        by_head = q.flatten(2, 3)
        if is_in_bits:
            o = self._attend_to_bytes(by_head, scores, needs_mass=False)[0]
        else:
            o = scores.attend_with_mass(self._blocks(by_head))[0]
        return o.unflatten(2, q.shape[2:4])

    def attend_with_mass(self, q: Tensor, scores: Scores) -> Attended:
        """Outputs [B, 1, HQ, V] of queries [B, 1, HQ, D], and the logarithms of their mass [B, 1, HQ]."""
        if self.bits is not None and self._is_read_in_bits(q, scores):
            return self._attend_to_bytes(q, scores)
        return scores.attend_with_mass(self._blocks(q))

    def _is_read_in_bits(self, q: Tensor, scores: Scores) -> bool:
        return scores._replace(softcap=None).is_plain and reads_bytes(q, self.backend)

    def _attend_to_bytes(self, q: Tensor, scores: Scores, needs_mass: bool = True) -> Any:
        """The same for packed rows; the mass is None if it is not asked for."""
        B, _, HQ, D = q.shape
        H = self.keys.shape[2]
        o, mass, _ = attention_in_bits(
            q.view(B, H, -1, D),
            self.keys.transpose(1, 2),
            self.values.transpose(1, 2),
            None if self.visible is None else self.visible.squeeze(1),
            bits=self.bits,
            scale=scores.scaling,
            softcap=scores.softcap,
            needs_mass=needs_mass or self.always is not None,
            backend=self.backend,
        )
        attended: Any = o.view(q.shape), None if mass is None else mass.view(B, 1, HQ)
        if self.always is None:
            return attended
        key, value = (x.to(q.dtype).expand(B, -1, -1, -1) for x in self.always)
        alone = Seen(key, value, None)
        return joined_softmax(attended, scores.attend_with_mass(alone._blocks(q)))

    def _blocks(self, q: Tensor) -> Blocks:
        seen = self if self.bits is None else self._numbers(q)
        return Blocks(q, seen.keys, seen.values, seen.visible, None, None)  # type: ignore[arg-type]

    def _numbers(self, q: Tensor) -> "Seen":
        """The same with numbers for packed rows, as many for each row as queries have and in their dtype."""
        keys, values = (
            unpack(x, q.shape[-1], self.bits, q.dtype) for x in (self.keys, self.values)
        )
        return Seen(keys, values, self.visible, self.left).after(self.always)


class Past(NamedTuple):
    """The keys and values that queries can see, and the states after the new tokens."""

    near: Columns  # of tokens before the new ones, and of these
    first: Any  # columns of the first tokens of the sequence, or None
    states: States
    keys: Any  # [B, kept + T, H, D], of all tokens that are kept and the new ones
    values: Any

    def blocks(self, q: Tensor, queries: Tokens) -> list[Blocks]:
        """Queries [B, T, HQ, D] with what they see; see `near_blocks`."""
        return near_blocks(q, queries, self.near, self.first)


class Everything(NamedTuple):
    """All tokens. The names of the states begin with `prefix`."""

    prefix: str = ""

    def spec(self, heads: int, K: int, V: int) -> Spec:
        """The states `keys` and `values` [B, tokens, H, D], and `positions` [B, tokens], -1 at padding."""
        shapes = {
            "keys": State((heads, K), None, "token"),
            "values": State((heads, V), None, "token"),
        }
        shapes |= {"positions": State((), torch.int32, "token", absent=-1)}
        return {f"{self.prefix}{name}": state for name, state in shapes.items()}

    def read_many(
        self, k: Tensor, v: Tensor, tokens: Tokens, context: Context, always: Any = None
    ) -> Past:
        """Add the new tokens, keys and values [B, T, H, D]; the states have no entries that precede them."""
        new = {"keys": k, "values": v, "positions": tokens.position.expand(k.shape[0], -1).int()}
        past, states = context.grown({f"{self.prefix}{name}": x for name, x in new.items()})
        keys, values, position = past.values()
        near = Columns(Tokens(position, tokens.sequence), keys, values, causal)
        return Past(near, None, states, keys, values)

    def read_one(self, k: Tensor, v: Tensor, context: Context, always: Any = None) -> Seen:
        """Add one token of each row [B, 1, H, D] to the states, in their dict.

        What is seen begins with the entry `always` [1, 1, H, D], if there is one.
        """
        states = context.states
        new = {"keys": k, "values": v, "positions": states["tokens_read"][:, None].int()}
        for name, x in new.items():
            old = states[f"{self.prefix}{name}"]
            states[f"{self.prefix}{name}"] = torch.cat([old, x.to(old.dtype)], 1)
        keys = states[f"{self.prefix}keys"].to(k.dtype)
        values = states[f"{self.prefix}values"].to(v.dtype)
        visible = None
        if context.uniform_length is None:
            visible = (states[f"{self.prefix}positions"] >= 0)[:, None, None]
        return Seen(keys, values, visible).after(always)


class Window(NamedTuple):
    """An attention pattern: tokens within `reach`, and possibly the first tokens of the sequence."""

    sees: Mask  # which tokens a token sees within reach
    reach: int  # length of the window in which all but the first tokens are seen, including the token itself
    first: int = 0  # number of first tokens that are seen from everywhere
    prefix: str = ""  # of the names of its states
    spare: int = 0  # number of tokens that are kept before the window
    has_gaps: bool = False  # whether some tokens within reach are not seen
    kinds: int = 1  # number of heads with different masks; further heads repeat these

    @classmethod
    def of_last(cls, tokens: int, first: int = 0, **more) -> "Window":
        """The last tokens, and the first ones."""
        return cls(causal & window(tokens), tokens, first, **more)

    @property
    def kept(self) -> int:
        """Number of tokens before the present one that are kept."""
        return self.reach - 1 + self.spare

    def spec(self, heads: int, D: int) -> Spec:
        """The states `keys` and `values` [B, kept, H, D] of the last tokens, and `sink_keys` and `sink_values`
        [B, first, H, D] of the first ones, if there are any."""
        sizes = {"": self.kept} | ({"sink_": self.first} if self.first else {})
        return {
            f"{self.prefix}{kind}{name}": State((n, heads, D), None)
            for kind, n in sizes.items()
            for name in ("keys", "values")
        }

    def read_many(
        self, k: Tensor, v: Tensor, tokens: Tokens, context: Context, *, reach: int | None = None
    ) -> Past:
        """Add the new tokens, keys and values [B, T, H, D], which see at most `reach` tokens of the window."""
        (keys, values), new = kept(
            context.states,
            {f"{self.prefix}keys": k, f"{self.prefix}values": v},
            self.kept,
            context.lengths,
        )
        unseen = self.kept + 1 - min(self.reach, reach or self.reach)
        tokens_read = context.states.get("tokens_read")
        near = columns(tokens, tokens_read, keys[:, unseen:], values[:, unseen:], self.sees)
        first = None
        if self.first:
            first = self._first_tokens(k, v, context)
            new |= {
                f"{self.prefix}sink_keys": first.keys,
                f"{self.prefix}sink_values": first.values,
            }
        return Past(near, first, new, keys, values)

    def _first_tokens(self, k: Tensor, v: Tensor, context: Context) -> Columns:
        """The first tokens of each sequence, from the states if they were read before, or from the new ones."""
        place = torch.arange(self.first, device=k.device)
        T = k.shape[1]
        states = context.states
        if context.cu_seqlens is not None:
            return _first_of_packed(k, v, place, context.cu_seqlens)._replace(
                sees=older(self.reach)
            )
        before, after = context.counts(k)
        if T == 1:
            keys, values = (x.repeat(1, self.first, 1, 1) for x in (k, v))
        else:
            keys, values = (take(x, (place - before).clamp(min=0, max=T - 1)) for x in (k, v))
        if states:
            is_old = (place < before)[..., None, None]
            old = (states[f"{self.prefix}{name}"] for name in ("sink_keys", "sink_values"))
            keys, values = (
                torch.where(is_old, x.to(y.dtype), y) for x, y in zip(old, (keys, values))
            )
        return Columns(
            Tokens(torch.where(place < after, place, -1)), keys, values, older(self.reach)
        )


class Ring(NamedTuple):
    """A causal window and the first tokens of the sequence, in states in which a new token replaces the oldest one.

    The states [B, lead + first + size, H, D] have, in this order, `lead` entries that are no tokens, such as those of a
    learned token before each sequence; the `first` tokens of the sequence; and the last `size` tokens after these. A
    token at position p >= first is the entry lead + first + (p - first) % size.
    """

    size: int
    first: int = 0
    prefix: str = ""  # of the names of its states
    leaves: bool = True  # whether the tokens that leave the window are asked for
    lead: int = 0  # number of entries, of keys and values alone, that are no tokens

    def spec(self, heads: int, D: int) -> Spec:
        """The states `keys` and `values`."""
        shape = self.lead + self.first + self.size, heads, D
        return {f"{self.prefix}{name}": State(shape, None) for name in ("keys", "values")}

    def read_many(
        self, k: Tensor, v: Tensor, tokens: Tokens, context: Context, always: Any = None
    ) -> Past:
        """Add the new tokens, keys and values [B, T, H, D], to states that begin with those of `always`
        [1, lead, H, D]."""
        new = {f"{self.prefix}keys": k, f"{self.prefix}values": v}
        if self.lead and context.states:
            ours = {name: context.states[name][:, self.lead :] for name in new}
            context = context._replace(states=context.states | ours)
        (keys, values), states = self.extend(new, context)
        sees = causal & window(self.size)
        near = columns(tokens, context.states.get("tokens_read"), keys[:, 1:], values[:, 1:], sees)
        first = None
        if self.first:
            among = keys[:, self.size :], values[:, self.size :]
            first = self._first_tokens(*among, states, context)
        if self.lead:
            lead = (x.to(k.dtype).expand(k.shape[0], -1, -1, -1) for x in always)
            states = {n: torch.cat([x, y], 1) for x, (n, y) in zip(lead, states.items())}
        return Past(near, first, states, keys, values)

    def read_one(self, k: Tensor, v: Tensor, context: Context, always: Any = None) -> Seen:
        """Add one token of each row [B, 1, H, D] in place; the states have the entries that precede it."""
        left = self.replace({f"{self.prefix}keys": k, f"{self.prefix}values": v}, context)
        keys = context.states[f"{self.prefix}keys"]
        values = context.states[f"{self.prefix}values"]
        size = keys.shape[1]
        visible = None
        if context.uniform_length is None:
            position = context.states["tokens_read"][:, None]
            visible = (torch.arange(size, device=k.device) <= self.lead + position)[:, None, None]
        elif (seen := self.lead + context.uniform_length + 1) < size:
            keys = keys[:, :seen]
            values = values[:, :seen]
        return Seen(keys.to(k.dtype), values.to(v.dtype), visible, left)

    def _first_tokens(self, k: Tensor, v: Tensor, states: States, context: Context) -> Columns:
        place = torch.arange(self.first, device=k.device)
        sees = older(self.size)
        if context.cu_seqlens is not None:
            return _first_of_packed(k, v, place, context.cu_seqlens)._replace(sees=sees)
        position = torch.where(place < context.counts(k)[1], place, -1)
        keys, values = (x[:, : self.first] for x in states.values())
        return Columns(Tokens(position), keys, values, sees)

    def extend(self, new: States, context: Context) -> tuple[list[Any], States]:
        """Add new tokens [B, T, ...] by name.

        Returns:
            The tokens with those of the ring in front, [B, size + T, ...] in the order of their positions. And the
            states after the tokens; none for packed sequences.
        """
        states = context.states
        if context.cu_seqlens is not None or not states:
            seen = [F.pad(x, (0, 0) * (x.ndim - 2) + (self.size, 0)) for x in new.values()]
        if context.cu_seqlens is not None:
            return seen, {}
        like = next(iter(new.values()))
        before, after = context.counts(like)
        if states:
            # Tokens before the first one have a negative position; any entry does, since attention hides them.
            position = before + torch.arange(-self.size, 0, device=like.device)
            order = self._places(position).clamp(min=0)
            seen = [
                torch.cat([take(states[name], order).to(x.dtype), x], 1) for name, x in new.items()
            ]
        # After the tokens each place has the last token that belongs there, so many tokens before the newest one. It
        # is a new one, or what the state has already; a place that no token has reached stays empty.
        place = torch.arange(self.first + self.size, device=like.device)
        newest = after - 1
        back = torch.where(place < self.first, newest - place, (newest - place) % self.size)
        token = newest - back
        is_new = (token >= before) & (place < after)
        among_new = (token - before).clamp(0, like.shape[1] - 1)
        return seen, {
            name: torch.where(expand_dims_like(is_new, x), take(x, among_new), states.get(name, 0))
            for name, x in new.items()
        }

    def replace(self, new: States, context: Context) -> list[Any]:
        """Write one token of each row [B, 1, ...] by name in place, and return the ones that leave, if `leaves`."""
        states = context.states
        left: list[Any] = []
        if context.uniform_length is None:
            place = self.lead + self._places(states["tokens_read"][:, None])
            for name, x in new.items():
                state = states[name]
                left.append(take(state, place).to(x.dtype) if self.leaves else None)
                state.scatter_(1, expand_dims_like(place, x).expand_as(x), x.to(state.dtype))
            return left
        here = self.lead + self._place(context.uniform_length)
        for name, x in new.items():
            old = states[name][:, here : here + 1]
            left.append(old.to(x.dtype, copy=True) if self.leaves else None)
            old.copy_(x)
        return left

    def _place(self, position: int) -> int:
        return (
            position if position < self.first else self.first + (position - self.first) % self.size
        )

    def _places(self, position: Tensor) -> Tensor:
        if not self.first:
            return position % self.size
        return torch.where(
            position < self.first, position, self.first + (position - self.first) % self.size
        )


class InBits(NamedTuple):
    """A past whose keys and values are stored in few bits, see `hf_memory.ops.bits`.

    Queries see the numbers that are stored, also in the call that reads them: how a text is divided into calls does not
    matter. Packed rows take the way of numbers through the past, which moves and selects them. Gradients pass rounding
    within a call, and do not pass states.
    """

    past: Any  # Everything, Window, or a Ring without `lead`
    bits: int
    config: Any  # whose `mixer_backend` reads packed rows

    @property
    def first(self) -> int:
        """Number of first tokens that are seen from everywhere."""
        return self.past.first

    @property
    def lead(self) -> int:
        """0: what comes before the tokens in a ring is not packed."""
        return 0

    def spec(self, *sizes: int) -> Spec:
        """The states of the past, with keys and values in bytes."""
        return {name: x.in_bits(self.bits) for name, x in self.past.spec(*sizes).items()}

    def read_many(
        self, k: Tensor, v: Tensor, tokens: Tokens, context: Context, always: Any = None, **more
    ) -> Past:
        """See `read_many` of the past."""
        packed = pack_both(k, v, self.bits)
        numbers = [rounded(x, y, self.bits) for x, y in zip((k, v), packed)]
        before = context._replace(states=self._unpacked(context.states, k, v))
        past = self.past.read_many(*numbers, tokens, before, **more)
        return past._replace(states=self.past.read_many(*packed, tokens, context, **more).states)

    def read_one(self, k: Tensor, v: Tensor, context: Context, always: Any = None) -> Seen:
        """See `read_one` of the past."""
        seen = self.past.read_one(*pack_both(k, v, self.bits), context)
        left = seen.left
        if left is not None and left[0] is not None:
            left = self._numbers(left[0], left[1], k, v)
        backend = self.config.mixer_backend
        return seen._replace(left=left, bits=self.bits, backend=backend, always=always)

    def extend(self, new: States, context: Context) -> tuple[list[Any], States]:
        """See `Ring.extend`; for other states of the same tokens, which are not packed."""
        return self.past.extend(new, context)

    def replace(self, new: States, context: Context) -> list[Any]:
        """See `Ring.replace`; for other states of the same tokens, which are not packed."""
        return self.past.replace(new, context)

    def _unpacked(self, states: States, k: Tensor, v: Tensor) -> States:
        numbers = dict(states)
        for kind in ("", "sink_"):
            names = [f"{self.past.prefix}{kind}{x}" for x in ("keys", "values")]
            if names[0] in states:
                of_kind = self._numbers(states[names[0]], states[names[1]], k, v)
                numbers |= dict(zip(names, of_kind))
        return numbers

    def _numbers(self, keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """The numbers of packed keys and values, as many for each row as k and v have, and in their dtypes."""
        pairs = zip((keys, values), (k, v))
        return [unpack(x, like.shape[-1], self.bits, like.dtype) for x, like in pairs]


def in_bits(past: Any, config: Any, kind: str) -> Any:
    """A past whose keys and values are stored in the bits of their kind, or the past itself if there are none."""
    bits = config.bits_of(kind)
    return past if bits is None else InBits(past, bits, config)


def _first_of_packed(k: Tensor, v: Tensor, place: Tensor, cu_seqlens: Tensor) -> Columns:
    """The tokens at these places of each packed sequence."""
    starts = cu_seqlens[:-1, None].long()
    size = cu_seqlens.diff()[:, None]
    index = (starts + place).clamp(max=k.shape[1] - 1).flatten()[None]
    sequence = torch.arange(1, len(size) + 1, device=k.device).repeat_interleave(len(place))[None]
    tokens = Tokens(torch.where(place < size, place, -1).flatten()[None], sequence)
    return Columns(tokens, take(k, index), take(v, index), causal)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Context,
    window: Any,
    scores: Scores,
    *,
    always: Columns | None = None,
    reach: int | None = None,
) -> tuple[Tensor, States]:
    """Each token attends to a window that ends with it, and maybe to the first tokens or to persistent ones.

    Args:
        q: [B, T, HQ, D].
        k: [B, T, H, D], HQ a multiple of H.
        v: [B, T, H, D].
        context: the padding, at the ends of rows, the packing, and the states.
        window: a `Window`, which may be stored in bits.
        scores: how scores are computed.
        always: keys and values of persistent tokens, which precede every sequence, or None; not with first tokens.
        reach: number of tokens of the window that any of these queries sees; default: all.

    Returns:
        o [B, T, HQ, D], and the states after the tokens: those of the window, and `tokens_read` [B].
    """
    tokens, tokens_read = context.tokens_and_count(k)
    past = window.read_many(k, v, tokens, context, reach=reach)
    groups = near_blocks(q, tokens, past.near, past.first if window.first else always)
    return rows_of(map(scores.attend, groups), q), past.states | {"tokens_read": tokens_read}


def kept(
    states: States, new: States, W: int, lengths: Tensor | None
) -> tuple[list[Tensor], States]:
    """New tokens [B, T, ...] by name, with the W tokens of `states` in front, [B, W + T, ...]; and the new states.

    For `lengths` see `last`.
    """
    if not states:
        seen = [F.pad(x, (0, 0) * (x.ndim - 2) + (W, 0)) for x in new.values()]
    else:
        seen = [torch.cat([states[name].to(x.dtype), x], 1) for name, x in new.items()]
    return seen, {name: last(x, lengths, W) for name, x in zip(new, seen)}


def last(x: Tensor, lengths: Tensor | None, W: int) -> Tensor:
    """The last W real tokens of x [B, W + T, ...]; `lengths` [B] of the T new tokens are real, or all if it is None."""
    if lengths is None:
        return x[:, x.shape[1] - W :]
    return take(x, lengths[:, None] + torch.arange(W, device=x.device))


def columns(
    tokens: Tokens, tokens_read: Tensor | None, keys: Tensor, values: Tensor, sees: Mask
) -> Columns:
    """Keys and values [B, W + T, H, D] of the new tokens and of the W before them, of which `tokens_read` [B] exist.

    If `tokens_read` is None, nothing was read before, and these W columns are left out, unless blocks need them.
    """
    T = tokens.position.shape[1]
    W = keys.shape[1] - T
    if tokens_read is not None:
        before = tokens_read[:, None] - torch.arange(W, 0, -1, device=keys.device)
        return Columns(Tokens(torch.cat([before, tokens.position], 1)), keys, values, sees)
    if not varies(T) and max(W + 1, BLOCK) < T:
        return Columns(tokens.map(lambda x: F.pad(x, (W, 0), value=-1)), keys, values, sees)
    return Columns(tokens, keys[:, W:], values[:, W:], sees)


def take(x: Tensor, places: Tensor) -> Tensor:
    """Select x [B, S, ...] at places [B, n]: [B, n, ...]"""
    return x.gather(1, expand_dims_like(places, x).expand(-1, -1, *x.shape[2:]))
