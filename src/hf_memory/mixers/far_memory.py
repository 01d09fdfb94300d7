"""Memories of what has left a window of attention: what they say, and how much of one common softmax it is."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.mixers.base import Context
from hf_memory.mixers.gates import SigmoidDecay
from hf_memory.ops import delta_rule, linear_attention
from hf_memory.ops.contract import repeat_heads

NOTHING = 1e-30  # mass of an empty memory or slot: more would take a share from the window
LEAST = 1e-12  # of a weight, else zero: products of less are denormal, which CPUs multiply a hundred times slower
SHARPNESS = 8  # of slots at their start, over the mean square of how far a key is from its centroid


class Leaving(NamedTuple):
    """The token that leaves the window at each step."""

    keys: Tensor  # [B, T, H, D], not rotated
    values: Tensor  # [B, T, H, V]
    gates: Tensor  # [B, T, H, num_gates] float32, see `SlotMemory.gates`
    exists: Tensor  # [1 or B, T] bool: whether there is one, and it is to be written


class HeadProjection(nn.Module):
    """An affine map of each head's own: [B, T, H, D] -> [B, T, H, features], float32."""

    def __init__(self, heads: int, dim: int, features: int):
        super().__init__()
        self.features, self.dim = features, dim
        self.weight = nn.Parameter(torch.empty(heads * features, dim))
        self.bias = nn.Parameter(torch.empty(heads * features))

    def init_own_parameters(self) -> None:
        """Random, of unit size for channels of unit size."""
        init.normal_(self.weight, std=self.dim**-0.5)
        init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        weight, bias = self.weight.view(-1, self.features, self.dim).mT, self.bias.view(-1, 1, self.features)
        x, weight, bias = (y.to(torch.promote_types(y.dtype, torch.float32)) for y in (x, weight, bias))
        y = torch.baddbmm(bias, x.flatten(0, 1).transpose(0, 1), weight)  # [H, B * T, features]
        return y.transpose(0, 1).unflatten(0, x.shape[:2])


class SlotMemory(nn.Module):
    """Keys are put into slots, softly, and a query sees a slot's mean value with the weight of all that is in it.

        phi(k) = softmax(A k + a)     S <- S + phi(k) v^T     n <- n + phi(k)
        w = exp(B q + b)              o = S^T w / n^T w,      with the mass n^T w in the softmax

    With A, a = beta (c, -|c|^2 / 2) for centroids c of the keys and B = scaling c, attention sees each key where its
    centroid is, as in Transformer-VQ (https://arxiv.org/abs/2309.16354), but softly and learned; with a slot at each
    key it is attention. Queries and keys are not rotated: a memory of rotated keys breaks beyond the length it has
    learned at.
    """

    num_gates = 0  # numbers that say how a head writes a token

    def __init__(self, config, heads: int):
        super().__init__()
        self.heads, self.slots, self.backend = heads, config.num_memory_slots, config.mixer_backend
        groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
        self.k_slots = HeadProjection(heads, config.head_dim, self.slots)
        self.q_slots = HeadProjection(heads * groups, config.head_dim, self.slots)

    @classmethod
    def state_spec(cls, config, heads: int) -> Spec:
        """Values of the slots, and what they are divided by."""
        return {"slot_values": State((heads, config.num_memory_slots, config.head_dim + 1))}

    def gates(self, hidden_states: Tensor) -> Tensor:
        """How tokens [B, T, hidden_size] are to be written when they leave the window, [B, T, H, num_gates] float32."""
        return hidden_states.new_zeros(*hidden_states.shape[:2], self.heads, 0)

    def forward(self, q: Tensor, leaving: Leaving, context: Context) -> tuple[Tensor, Tensor, States]:
        """Write a token at each step, and answer the query of another.

        Args:
            q: [B, T, HQ, D], not rotated.
            leaving: the token that leaves the window at each step.
            context: the states `slot_values`, [B, H, slots, V + 1] here.

        Returns:
            The answers [B, T, HQ, V], the logarithm of their mass [B, T, HQ] in float32, and the states.
        """
        asked = self.q_slots(q)
        most = asked.detach().amax(-1, keepdim=True)
        weights, values = _no_less((asked - most).exp()), F.pad(leaving.values, (0, 1), value=1.0)
        o, states = self._recall(linear_attention, weights, self._slots_of(leaving), values, leaving, context)
        mass = o[..., -1:].to(most.dtype).clamp(min=NOTHING)
        return (o[..., :-1] / mass).to(values.dtype), (most + mass.log())[..., 0], states

    def _slots_of(self, leaving: Leaving) -> Tensor:
        """How much of each slot a key is in, [B, T, H, slots] float32."""
        return torch.where(leaving.exists[..., None, None], _no_less(self.k_slots(leaving.keys).softmax(-1)), 0)

    def _recall(self, op, q, slots, v, leaving: Leaving, context: Context) -> tuple[Tensor, States]:
        gates = torch.where(leaving.exists[..., None, None], leaving.gates, 0)
        o, state = op(
            q.to(v.dtype),
            slots.to(v.dtype),
            v,
            *gates.unbind(-1),
            scale=1.0,
            initial_state=context.states.get("slot_values"),
            output_final_state=True,
            in_place=True,
            cu_seqlens=context.cu_seqlens,
            backend=self.backend,
        )
        return o, {"slot_values": state}

    @torch.no_grad()
    def start_near(self, q: Tensor, k: Tensor, rotation: Tensor) -> None:
        """Slots at centroids of a text's keys: near attention before any training.

        Args:
            q: [tokens, HQ, D], not rotated.
            k: [tokens, H, D], not rotated.
            rotation: [D, D] that keys have, k @ rotation, as queries far behind them see them on average.
        """
        groups = q.shape[1] // k.shape[1]
        learned = self.k_slots.weight, self.k_slots.bias, self.q_slots.weight
        weights = (x.unflatten(0, (k.shape[1], -1)) for x in learned)
        for of_head, queries, keys in zip(zip(*weights), q.float().split(groups, 1), k.float().unbind(1)):
            self._start_head(of_head, queries.flatten(0, 1), keys, rotation)
        self.q_slots.bias.zero_()

    def _start_head(self, weights: tuple[Tensor, ...], q: Tensor, k: Tensor, rotation: Tensor) -> None:
        """Keys are near each other where queries see little difference between them."""
        k_weight, k_bias, q_weight = weights
        size, vectors = torch.linalg.eigh(q.mT @ q / len(q))
        seen = rotation @ (vectors * (self.scaling * size.clamp(min=1e-4 * size.mean()).sqrt())) @ vectors.mT
        points = k @ seen
        centers, members = centroids(points, self.slots)
        sharpness = SHARPNESS / (points - centers[members]).square().sum(-1).mean().clamp(min=1e-6)
        k_weight.copy_(sharpness * centers @ seen.mT)
        k_bias.copy_(-0.5 * sharpness * centers.square().sum(-1))
        middles = torch.stack([k[members == i].mean(0) if (members == i).any() else k[0] for i in range(self.slots)])
        q_weight.copy_((self.scaling * middles @ rotation).repeat(len(q_weight) // self.slots, 1))


class DecayedSlots(SlotMemory):
    """The same, but what is in the slots decays, by head: n <- e^g n + phi(k), S <- e^g S + phi(k) v^T."""

    num_gates = 1

    def __init__(self, config, heads: int):
        super().__init__(config, heads)
        self.decay = SigmoidDecay(config.hidden_size, heads, None, 0, config.gate_logit_normalizer)

    def gates(self, hidden_states: Tensor) -> Tensor:
        """The logarithm of the decay."""
        return self.decay(hidden_states)[..., None]


class DeltaSlots(SlotMemory):
    """The same, but a token's value replaces part of what its slots say, by the delta rule.

    S <- S + beta phi(k) (v - S^T phi(k))^T,   n <- n + phi(k),   w = n exp(B q + b),   o = S^T w / sum w, of mass sum w
    """

    num_gates = 1

    def __init__(self, config, heads: int):
        super().__init__(config, heads)
        self.b_proj = nn.Linear(config.hidden_size, heads)

    @classmethod
    def state_spec(cls, config, heads: int) -> Spec:
        """Values of the slots, and what was put into them."""
        counts = State((heads, config.num_memory_slots))
        return {"slot_values": State((*counts.shape, config.head_dim)), "slot_counts": counts}

    def init_own_parameters(self) -> None:
        """Tokens are written with a quarter of their strength."""
        init.constant_(self.b_proj.bias, -1.0)

    def gates(self, hidden_states: Tensor) -> Tensor:
        """The strength of writing."""
        return self.b_proj(hidden_states).float().sigmoid()[..., None]

    def forward(self, q: Tensor, leaving: Leaving, context: Context) -> tuple[Tensor, Tensor, States]:
        """As that of slots, with the states `slot_values` [B, H, slots, V] and `slot_counts` [B, H, slots]."""
        slots = self._slots_of(leaving)
        counts, states = self._counts(slots, context)
        weights = self.q_slots(q) + repeat_heads((counts + NOTHING).log(), q.shape[2])
        mass = weights.logsumexp(-1, keepdim=True)
        o, new = self._recall(delta_rule, _no_less((weights - mass).exp()), slots, leaving.values, leaving, context)
        return o, mass[..., 0], states | new

    def _counts(self, slots: Tensor, context: Context) -> tuple[Tensor, States]:
        """[B, T, H, slots]: what was put into each slot until then, in the same sequence."""
        counts = slots.cumsum(1)
        if context.cu_seqlens is not None:
            starts = context.cu_seqlens.long()
            sequence = torch.searchsorted(starts, torch.arange(slots.shape[1], device=starts.device), right=True) - 1
            return counts - F.pad(counts, (0, 0, 0, 0, 1, 0))[:, starts[sequence]], {}
        if context.states:
            counts = counts + context.states["slot_counts"][:, None]
        return counts, {"slot_counts": counts[:, -1]}


def _no_less(weights: Tensor) -> Tensor:
    """Zeros in place of the least weights."""
    return F.threshold(weights, LEAST, 0.0)


def centroids(points: Tensor, number: int, *, rounds: int = 8) -> tuple[Tensor, Tensor]:
    """k-means of points [N, D]: centres [number, D], and the centre of each point; one of nothing starts again."""
    generator = torch.Generator(points.device).manual_seed(0)

    def drawn() -> Tensor:
        return points[torch.randint(len(points), (number,), generator=generator, device=points.device)]

    centers = drawn()
    for _ in range(rounds):
        members = torch.cdist(points, centers).argmin(-1)
        sums = torch.zeros_like(centers).index_add_(0, members, points)
        counts = members.bincount(minlength=number)[:, None]
        centers = torch.where(counts > 0, sums / counts.clamp(min=1), drawn())
    return centers, torch.cdist(points, centers).argmin(-1)
