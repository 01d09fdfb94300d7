"""Forget gates of softmax attention (FoX), as further channels of queries, keys and values."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_memory.cache import Spec, State, States
from hf_memory.mixers.attention_blocks import Scores
from hf_memory.mixers.base import Context, Projected
from hf_memory.mixers.gates import SigmoidDecay
from hf_memory.mixers.pasts.kept import Kept
from hf_memory.mixers.pasts.kept_by_head import KeptByHead
from hf_memory.mixers.positions import Positions
from hf_memory.mixers.windowed import Part, WindowedMixer
from hf_memory.ops.gate_channels import PARTS, UNIT, GateChannels
from hf_memory.ops.layout import blank

TOKENS_READ = State((), torch.long)  # their number


def kept_heads(config) -> tuple[int, int]:
    """Number of the heads of keys and values that are kept, and of their channels, in eights with forget gates."""
    query_heads, heads, _, D, _ = config.attention_heads
    return heads, D + (
        -(-PARTS * query_heads // heads // 8) * 8 if config.position == "forget" else 0
    )


def counts(config) -> Spec:
    """The number of tokens read, and the sums of the logarithms of their forget gates: in float64, which adds a gate
    close to one even to a sum over a million tokens."""
    sums = State((config.num_attention_heads,), torch.float64)
    return {"tokens_read": TOKENS_READ} | (
        {"forgotten": sums} if config.position == "forget" else {}
    )


class ForgetGates(SigmoidDecay):
    """s_ij = q_i k_j / sqrt(D) + log f_{j+1} + ... + log f_i,   f = sigmoid(W x + b), for each query head.

    https://arxiv.org/abs/2503.02130.
    """

    def __init__(self, config, scaling: float):
        super().__init__(config.hidden_size, config.num_attention_heads, None, 0, 1)
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.all_channels = kept_heads(config)[1]
        self.sums_in = GateChannels(config.head_dim, scaling)

    def sums(self, g: Tensor, context: Context) -> Tensor:
        """c_i = log f_1 + ... + log f_i for the gates f of all tokens up to each, [B, T, HQ] in float64.

        `g` has the logarithms of the gates of these tokens. In packed sequences the sums begin anywhere, since their
        differences alone matter.
        """
        g = g if context.attention_mask is None else blank(g, context.attention_mask)
        before = context.states["forgotten"][:, None] if context.states else 0
        return before + g.double().cumsum(1)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, HQ, D], k and v [B, T, H, D] with the sums c [B, T, HQ] in more channels."""
        return self.sums_in.extend(q, k, v, c, self.all_channels)

    def settled(self, states: States, c: Tensor, bounded: list["BoundedKeys"]) -> States:
        """The states with `forgotten` [B, HQ], from the sums c [B, HQ] up to the last token.

        Of keys whose number does not grow, the sums are moved by whole units, so that the newest is between -UNIT and 0
        however long the text is.

        Args:
            states: the states after the tokens.
            c: these sums.
            bounded: the states of such keys.
        """
        due = (-c / UNIT).floor().unflatten(1, (-1, self.groups))
        units = torch.zeros_like(due)
        for keys in bounded:
            of_heads = torch.cat([due[:, heads] for heads in keys.heads], 1)
            kept = keys.kept
            of_keys = of_heads.unsqueeze(1) if kept is None else kept.of_entries(of_heads)
            moved = {keys.name: self.sums_in.moved(states[keys.name], of_keys)}
            if kept is not None:
                of_queries = of_heads.flatten(1)[..., None]
                name = f"{kept.prefix}queries"
                moved[name] = self.sums_in.moved_queries(states[name], of_queries)
            states = states | moved
            for heads in keys.heads:
                units[:, heads] = due[:, heads]
        return states | {"forgotten": c + UNIT * units.flatten(1)}


class BoundedKeys(NamedTuple):
    """A state of keys whose number does not grow."""

    name: str
    heads: list[slice]  # which key-value heads it has
    kept: Kept | KeptByHead | None = None  # the past that it is of, if this has queries, too


def _kept(past: object) -> Kept | KeptByHead | None:
    return past if isinstance(past, Kept | KeptByHead) else None


class PlainHeads(WindowedMixer):
    """Heads as of `WindowedMixer` whose positions are in the embeddings, or nowhere."""

    @classmethod
    def exact_up_to(cls, config, layer_idx: int, length: int) -> int | None:
        """None, since a teacher has rotations."""
        return None

    @property
    def new_part(self) -> nn.Module | None:
        """All, since queries and keys change their meaning without rotations."""
        return self


class ForgettingHeads(PlainHeads):
    """Heads with forget gates that see a window and the first tokens, and heads that see everything.

    Keys have sums of gates in further channels, which need all their bits.
    """

    can_have_few_bits = False

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.forget = ForgetGates(config, self.scaling)
        spec = self.plain_spec
        names = [f"{part.past.prefix}keys" for part in self.parts]
        self.bounded = [
            BoundedKeys(name, part.slices or [slice(None)], _kept(part.past))
            for name, part in zip(names, self.parts)
            if spec[name].growth == "fixed"
        ]

    @property
    def scores(self) -> Scores:
        """See `MemoryMixer.scores`; with the gates."""
        return Scores(self.scaling, gates=self.forget.sums_in)

    @classmethod
    def kept_channels(cls, config) -> int:
        """See `kept_heads`."""
        return kept_heads(config)[1]

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """As of `WindowedMixer`, and the sums of the logarithms of the gates."""
        return super().state_spec(config, layer_idx) | counts(config)

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """See `WindowedMixer.project`; and the logarithms of forget gates [B, T, HQ]."""
        gates = self.forget(hidden_states)
        return super().project(hidden_states, positions) | {"forget": gates}

    def attend(
        self, parts: list[Part], projected: Projected, context: Context
    ) -> tuple[list[Tensor], States]:
        """See `WindowedMixer.attend`; there is one more state, `forgotten` [B, HQ]."""
        c = self.forget.sums(projected["forget"], context)
        q, k, v = (projected[name] for name in "qkv")
        q, k, v = self.forget.extend(q.flatten(2, 3), k, v, c)
        extended = {"q": self._by_group(q, k), "k": k, "v": v}
        outputs, states = super().attend(parts, projected | extended, context)
        if context.cu_seqlens is None:
            states = self.forget.settled(states, c[:, -1], self.bounded)
        return [o[..., : self.value_dim] for o in outputs], states
