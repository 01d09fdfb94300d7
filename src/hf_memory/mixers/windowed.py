"""A memory beside attention over a window: tokens that leave the window are written to the memory.

The projections are those of attention. Most key-value heads see a window and the first tokens of the sequence or a
learned sink in their place (https://arxiv.org/abs/2309.17453), in one softmax with a memory of all tokens between. Some
heads can keep all keys and values instead (https://arxiv.org/abs/2410.10819), or those of a longer window.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.layers import wide
from hf_memory.mixers.attention_blocks import (
    Attended,
    Blocks,
    Columns,
    Scores,
    attended_rows,
    full_attention,
    joined_softmax,
    rows_of,
)
from hf_memory.mixers.base import Context, MemoryMixer
from hf_memory.mixers.far_memory import Leaving
from hf_memory.mixers.pasts import Everything, Past, Ring
from hf_memory.mixers.positions import Positions
from hf_memory.mixers.retention import Retention
from hf_memory.ops.masks import Tokens, all_tokens, causal, everything, window


class Sinks(nn.Module):
    """A sink takes part in the softmax of a head like a key whose score c is learned, and whose value u is too.

        o = sum_i p_i v_i + p u,   with p and p_i the softmax of c and of the scores of the tokens

    Each query head has a score, as `sinks` of gpt-oss, where the value is zero; each key-value head has a value. Since
    all p add up to one, biases can have the value's effect: -u that of the values, W_o u that of the output.
    """

    def __init__(self, query_heads: int, heads: int, value_dim: int):
        super().__init__()
        self.logits = nn.Parameter(torch.empty(query_heads))
        self.values = nn.Parameter(torch.empty(heads, value_dim))

    def init_own_parameters(self) -> None:
        """As a token of score and value zero."""
        init.zeros_(self.logits)
        init.zeros_(self.values)

    def of_queries(self) -> Tensor:
        """The values [1, 1, HQ, V], repeated for the queries of a group."""
        return self.values.repeat_interleave(len(self.logits) // len(self.values), 0)[None, None]

    def forward(self, attended: Attended) -> Attended:
        """Add the sinks to the results [B, T, HQ, V] of a softmax over tokens, and to its mass."""
        o, mass = attended
        return joined_softmax(attended, (self.of_queries().to(o.dtype), self.logits.to(mass.dtype)))


class VirtualToken(nn.Module):
    """A learned token before the first one, which every token sees. Each key-value head has its key f and value u.

        o = sum_i p_i v_i + p u,   with p and p_i the softmax of scaling q f and of the scores of the tokens

    f has a constant place in the rotation, so it costs no cache, as a sink, whatever the length. Since a softmax stays
    the same if all scores change alike, f is taken off the rotated keys of tokens, and the score is then zero.
    """

    def __init__(self, heads: int, key_dim: int, value_dim: int):
        super().__init__()
        self.keys, self.values = nn.Parameter(torch.empty(heads, key_dim)), nn.Parameter(torch.empty(heads, value_dim))

    def init_own_parameters(self) -> None:
        """As a token of score and value zero."""
        for parameter in self.parameters():
            init.zeros_(parameter)

    def forward(self, k: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """Rotated keys [B, T, H, D] of tokens less the token's, and its values [1, 1, H * groups, V], repeated for the
        queries of a group."""
        return k - self.keys.to(k.dtype), self.values.to(k.dtype).repeat_interleave(groups, 0)[None, None]


class WindowedMixer(MemoryMixer):
    """Attention over a window and the first tokens, a memory of the tokens between, and heads that keep everything."""

    padding_last = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        kept = config.full_attention_heads[layer_idx] if config.full_attention_heads else []
        self.full_heads = sorted(kept)
        self.near_heads = [h for h in range(config.num_key_value_heads) if h not in kept]
        order = self.near_heads + self.full_heads
        self.places = [order.index(h) for h in range(len(order))]  # place of each head among the outputs
        has_memory = config.layer_types[layer_idx] == "sliding_memory" and self.near_heads
        self.far = config.far_memory(config, len(self.near_heads)) if has_memory else None
        near, groups = len(self.near_heads), self.num_key_value_groups
        self.sinks: Any = Sinks(near * groups, near, self.value_dim) if config.attention_sinks and near else None
        sizes = config.num_key_value_heads, self.head_dim, self.value_dim
        self.virtual_token: Any = VirtualToken(*sizes) if config.virtual_token else None
        self.window = _window(config, config.sliding_window)._replace(leaves=self.far is not None)
        self.retention = _retention(config) if config.num_kept_tokens else None
        longer = config.full_attention_window
        self.full = Everything("full_") if longer is None else _window(config, longer, "full_")._replace(leaves=False)

    @property
    def heads(self) -> tuple[int, int, int, int, int]:
        """The heads of attention."""
        return self.config.attention_heads

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of `mix`; those of heads that keep everything grow with the text, unless they have a window."""
        full = len(config.full_attention_heads[layer_idx]) if config.full_attention_heads else 0
        heads, D = config.num_key_value_heads - full, cls.kept_channels(config)
        spec: Spec = {"tokens_read": State((), torch.long)}
        if heads:
            near = _retention(config) if config.num_kept_tokens else _window(config, config.sliding_window)
            spec |= near.spec(heads, D)
            if config.layer_types[layer_idx] == "sliding_memory":
                spec |= config.far_memory.state_spec(config, heads)
                kept = config.num_sink_tokens + config.sliding_window
                spec["slot_gates"] = State((kept, heads, config.far_memory.num_gates))
                spec["slot_angles"] = State((kept, config.rotating_channels(layer_idx)), None)
        if full and config.full_attention_window is not None:
            spec |= _window(config, config.full_attention_window, "full_").spec(full, D)
        elif full:
            spec |= Everything("full_").spec(full, D, D)
        return spec

    @classmethod
    def kept_channels(cls, config) -> int:
        """Number of channels of each kept key and value."""
        return config.head_dim

    @property
    def sees_positions(self) -> bool:
        """Always true, since attention sees positions."""
        return True

    @property
    def new_part(self) -> nn.Module | None:
        """Only the memory, sinks and virtual token; other weights have the same meaning as in the teacher."""
        parts = [part for part in (self.far, self.sinks, self.virtual_token) if part is not None]
        return nn.ModuleList(parts) if len(parts) > 1 else next(iter(parts), None)

    @property
    def normalizes(self) -> bool:
        """Whether queries and keys have an RMS norm, as in attention layers."""
        return self.config.use_qk_norm

    def mix(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The states are `tokens_read` [B]; `keys` and `values`, those of a `Ring`; those of the memory, with
        `slot_gates` [B, tokens, H, gates] and `slot_angles` [B, tokens, channels], also in a ring, for the writes of
        tokens that are still in the window; and of heads that keep everything `full_keys` and `full_values` [B, tokens,
        heads, D] and `full_positions` [B, tokens], or another ring if they have a window."""
        o, states = self.attend(hidden_states, *self.project_heads(hidden_states, None), context)
        return self.o_proj(o.flatten(2)), states

    def attend(self, hidden_states, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, States]:
        """The heads [B, T, HQ, D], and the states of `mix`."""
        if self.full_heads and k.shape[2] < len(self.places):
            heads = self.config.full_attention_heads
            raise ValueError(f"full_attention_heads must be None with tensor parallelism, got {heads}")
        tokens = context.tokens(hidden_states)
        (rotated, k), virtual, groups = self.rotate(q, k, context.positions), None, self.num_key_value_groups
        if self.virtual_token is not None:
            k, virtual = self.virtual_token(k, groups)
        outputs: list[Tensor] = []
        states: States = {}
        if self.near_heads:
            near = self._of(self.near_heads, None if self.far is None else q, rotated, k, v, virtual)
            o, states = self._near(hidden_states, tokens, context, *near)
            outputs += o.split(groups, 2) if self.full_heads else [o]
        if self.full_heads:
            o, new = self._full(tokens, context, *self._of(self.full_heads, rotated, k, v, virtual))
            outputs += o.split(groups, 2) if self.near_heads else [o]
            states |= new
        states["tokens_read"] = context.tokens_read(hidden_states)
        return outputs[0] if len(outputs) == 1 else torch.cat([outputs[i] for i in self.places], 2), states

    def start_near(self, hidden_states: Tensor, distances: Positions) -> None:
        """Initialise the memory close to attention to hidden states [B, T, hidden_size] at these distances."""
        if self.far is None:
            return
        q, k, _ = (x.flatten(0, 1) for x in self._of(self.near_heads, *self.project_heads(hidden_states, None)))
        back = Positions(*(wide(x.mean(1, keepdim=True)) for x in (distances.cos, -distances.sin)))
        units = torch.eye(self.head_dim, dtype=back.cos.dtype, device=k.device)[None, :, None]  # unit vectors as keys
        self.far.start_near(q, k, self.rotate(units, units, back)[0][0, :, 0])

    def start_sinks(self, hidden_states: Tensor, positions: Positions | None, first: int) -> None:
        """Initialise sinks to what late queries of hidden states [B, T, hidden_size] see in the first tokens.

        Their logit is the mean logarithm of the mass of these tokens, and their value is the mean value by mass.
        """
        if self.sinks is None:
            return
        q, k, v = self._of(self.near_heads, *self.project_heads(hidden_states, None))
        q, k = self.rotate(q, k, positions)
        W, tokens = self.config.sliding_window, all_tokens(q.shape[1], q)
        late = slice(min(W + first, q.shape[1] - 1), None)
        near, firsts = Columns(tokens, k, v, causal & window(W)), Columns(tokens, k, v, everything).of(slice(first))
        weights, logsumexp = self.scores.weights(Blocks.of(q[:, late], tokens.of(late), firsts, near))
        mass = weights[..., :first]  # [B, H, groups, T, first]
        self.sinks.logits.copy_((logsumexp[..., 0] + mass.sum(-1).log()).mean((0, 3)).flatten())
        values = torch.einsum("bhgts,bshd->hd", mass, wide(v[:, :first]))
        self.sinks.values.copy_(values / mass.sum((0, 2, 3, 4))[:, None])

    def start_virtual_token(self, hidden_states: Tensor, position: Positions) -> None:
        """Initialise it to the token of hidden states [1, 1, hidden_size] at this position."""
        if self.virtual_token is None:
            return
        q, k, v = self.project_heads(hidden_states, None)
        self.virtual_token.keys.copy_(self.rotate(q, k, position)[1][0, 0])
        self.virtual_token.values.copy_(v[0, 0])

    def _of(self, heads: list[int], *rows: Tensor | None) -> tuple[Any, ...]:
        """The parts [B, T, n, D] of queries, keys or values that some key-value heads have."""
        if len(heads) == len(self.places):
            return rows
        return tuple(None if x is None else _heads(x, heads, x.shape[2] // len(self.places)) for x in rows)

    def _near(
        self, hidden_states, tokens: Tokens, context: Context, q, rotated, k, v, virtual
    ) -> tuple[Tensor, States]:
        if self.retention is not None:
            attended, states = self.retention.attend(rotated, k, v, self.scores, context)
            attended = attended if self.sinks is None else self.sinks(attended)
            return _with_virtual(attended, virtual)[0], states
        past = self.window.read(k, v, tokens, context)
        groups = past.blocks(rotated, tokens)
        if self.far is None and self.sinks is None and virtual is None:
            return rows_of(map(self.scores.attend, groups), rotated), past.states
        if self.far is None and past.is_step and (self.sinks is None or virtual is None):
            logits, values = (None, virtual) if self.sinks is None else (self.sinks.logits, self.sinks.of_queries())
            (blocks,) = groups
            return _attend_with(logits, values, self.scores, blocks), past.states
        attended = attended_rows(map(self.scores.attend_with_mass, groups), rotated)
        o, logsumexp = _with_virtual(attended if self.sinks is None else self.sinks(attended), virtual)
        if self.far is None:
            return o, past.states
        leaving, waiting = self._leaving(self.far.gates(hidden_states), past, tokens, context)
        remembered, mass, memory = self.far(q, leaving, context)
        share = torch.sigmoid(mass - logsumexp)[..., None].to(o.dtype)
        return o + share * (remembered - o), past.states | waiting | memory

    def _full(self, tokens: Tokens, context: Context, q, k, v, virtual) -> tuple[Tensor, States]:
        past = self.full.read(k, v, tokens, context)
        if past.is_step and virtual is not None:
            return _attend_with(None, virtual, self.scores, *past.blocks(q, tokens)), past.states
        if past.is_step:
            return rows_of(map(self.scores.attend, past.blocks(q, tokens)), q), past.states
        W, scores, first = self.config.full_attention_window, self.scores, past.first
        if virtual is not None:
            values = virtual[:, :, :: self.num_key_value_groups].expand(len(k), -1, -1, -1)
            first = Columns(Tokens(tokens.position.new_zeros(1, 1)), torch.zeros_like(k[:, :1]), values, everything)
        o = full_attention(q, tokens, past.near, scores, first=first, window=W, is_whole=context.is_whole)
        return o, past.states

    def _leaving(self, gates: Tensor, past: Past, tokens: Tokens, context: Context) -> tuple[Leaving, States]:
        """The tokens that leave the window when each token is read, and the states that determine their writes.

        Their slots are computed only then: stored for each token of the window, they would be as large as the memory.
        """
        W, T, new = self.config.sliding_window, gates.shape[1], {"slot_gates": gates}
        if turns := context.positions is not None and self.rotates:
            new["slot_angles"] = context.positions.inverse().halves().expand(len(gates), -1, -1)
        (gates, *angles), states = self.window.extend(new, context)
        keys = past.keys[:, :T]
        if turns:
            keys = Positions.of_halves(angles[0][:, :T]).turn(keys)
        is_written = tokens.position >= W + self.config.num_sink_tokens  # the first tokens stay visible
        return Leaving(keys, past.values[:, :T], gates[:, :T], is_written), states


def _retention(config) -> Retention:
    needs_mass = config.attention_sinks or config.virtual_token
    sizes = config.sliding_window, config.num_sink_tokens, config.num_kept_tokens, config.kept_block_size
    return Retention(*sizes, needs_mass=needs_mass)


def _window(config, tokens: int, prefix: str = "") -> Ring:
    return Ring(tokens, config.num_sink_tokens, prefix)


def _with_virtual(attended: Any, values: Tensor | None) -> Attended:
    """The results of a softmax over tokens with a virtual token of these values, [1, 1, HQ, V], and of score zero."""
    return attended if values is None else joined_softmax(attended, (values, torch.zeros_like(attended[1])))


def _attend_with(logits: Tensor | None, values: Tensor, scores: Scores, blocks: Blocks) -> Tensor:
    """Softmax attention of one query of each row to tokens and to one more, [B, 1, HQ, V].

    This has logits [HQ], None: zero, and values [1, 1, HQ, V].
    """
    of_tokens, v = scores.of(blocks), blocks.values  # [B, H, groups, 1, S]
    if blocks.visible is not None:
        of_tokens = of_tokens.masked_fill(~blocks.visible[:, None], -torch.inf)
    H, groups = of_tokens.shape[1:3]
    more = of_tokens.new_zeros(()) if logits is None else logits.to(of_tokens.dtype).view(H, groups, 1, 1)
    both = torch.cat([of_tokens, more.expand(len(v), H, groups, 1, 1)], -1).softmax(-1).to(v.dtype)[..., 0, :]
    o = both[..., :-1] @ v.transpose(1, 2) + both[..., -1:] * values.view(H, groups, -1).to(v.dtype)
    return o.flatten(1, 2)[:, None]


def _heads(x: Tensor, heads: list[int], n: int) -> Tensor:
    """Some heads of x [B, T, H * n, D]: a view if possible, and without an index tensor in any case."""
    first, last = heads[0], heads[-1]
    step = heads[1] - first if n == 1 and len(heads) > 1 else 1
    if heads == [*range(first, last + 1, step)]:
        return x[:, :, first * n : (last + 1) * n : step]
    return torch.cat([x[:, :, h * n : (h + 1) * n] for h in heads], 2)
