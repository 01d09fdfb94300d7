"""Memories of tokens that have left a window of attention, which take part in its softmax with a mass."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.layers import upcast
from hf_memory.mixers.base import Context
from hf_memory.mixers.gates import SigmoidDecay
from hf_memory.ops import delta_rule, linear_attention
from hf_memory.ops.layout import repeat_heads
from hf_memory.ops.masks import packed
from hf_memory.ops.precision import without_autocast

NOTHING = 1e-30  # mass of an empty memory or slot, so small that it takes no share from the window
LEAST = 1e-12  # smaller weights become zero: denormal products are a hundred times slower on CPUs
SHARPNESS = 8  # initial sharpness of slots, relative to the mean squared distance of keys from their centroids


class Leaving(NamedTuple):
    """The tokens that leave the window at each step."""

    keys: Tensor  # [B, T, H, D], not rotated
    values: Tensor  # [B, T, H, V]
    gates: Tensor  # [B, T, H, num_gates] float32, see `SlotMemory.gates`
    exists: Tensor  # [1 or B, T] bool: whether there is a token to write


class HeadProjection(nn.Module):
    """A separate affine map for each head: [B, T, H, D] -> [B, T, H, features], in float32."""

    def __init__(self, heads: int, dim: int, features: int):
        super().__init__()
        self.features = features
        self.dim = dim
        self.weight = nn.Parameter(torch.empty(heads * features, dim))
        self.bias = nn.Parameter(torch.empty(heads * features))

    def init_own_parameters(self) -> None:
        """Random weights that keep the scale of their inputs."""
        init.normal_(self.weight, std=self.dim**-0.5)
        init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        weight = self.weight.view(-1, self.features, self.dim).mT
        bias = self.bias.view(-1, 1, self.features)
        x, weight, bias = map(upcast, (x, weight, bias))
        by_head = x.flatten(0, 1).transpose(0, 1)
        y = without_autocast(torch.baddbmm, bias, by_head, weight)  # [H, B * T, features]
        return y.transpose(0, 1).unflatten(0, x.shape[:2])


class SlotMemory(nn.Module):
    """Keys are assigned softly to slots; a query sees the mean value of a slot, weighted by the slot's content.

        phi(k) = softmax(A k + a)     S <- S + phi(k) v^T     n <- n + phi(k)
        w = exp(B q + b)              o = S^T w / n^T w,      with the mass n^T w in the softmax

    With A, a = beta (c, -|c|^2 / 2) for centroids c of the keys and B = scaling c, attention sees each key as its
    centroid, as in Transformer-VQ (https://arxiv.org/abs/2309.16354), but with soft and learned assignment. With a slot
    for each key it equals attention. Queries and keys are not rotated, since a memory of rotated keys does not work
    beyond the trained length.
    """

    num_gates = 0  # gate values for each head and token

    def __init__(self, config, heads: int):
        super().__init__()
        self.heads = heads
        self.slots = config.num_memory_slots
        self.backend = config.mixer_backend
        groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
        self.k_slots = HeadProjection(heads, config.head_dim, self.slots)
        self.q_slots = HeadProjection(heads * groups, config.head_dim, self.slots)

    @classmethod
    def state_spec(cls, config, heads: int) -> Spec:
        """The values of the slots, and their denominators."""
        shape = heads, config.num_memory_slots, config.head_dim + 1
        return {"slot_values": State(shape, is_recurrent=True)}

    def gates(self, hidden_states: Tensor) -> Tensor:
        """Gates for the writes of tokens [B, T, hidden_size] that leave the window, [B, T, H, num_gates] float32."""
        return hidden_states.new_zeros(*hidden_states.shape[:2], self.heads, 0)

    def forward(
        self, q: Tensor, leaving: Leaving, context: Context
    ) -> tuple[Tensor, Tensor, States]:
        """Write the token that leaves the window at each step, and read with the current query.

        Args:
            q: queries [B, T, HQ, D], not rotated.
            leaving: the tokens that leave the window.
            context: the context, with the state `slot_values` [B, H, slots, V + 1].

        Returns:
            The outputs [B, T, HQ, V], the logarithm of their mass [B, T, HQ] in float32, and the states.
        """
        exponents = self.q_slots(q)
        most = exponents.detach().amax(-1, keepdim=True)
        weights = _without_smallest((exponents - most).exp())
        values = F.pad(leaving.values, (0, 1), value=1.0)
        o, states = self._recall(
            linear_attention, weights, self._slots_of(leaving), values, leaving, context
        )
        mass = o[..., -1:].to(most.dtype).clamp(min=NOTHING)
        return (o[..., :-1] / mass).to(values.dtype), (most + mass.log())[..., 0], states

    def _slots_of(self, leaving: Leaving) -> Tensor:
        """The assignment of keys to slots, [B, T, H, slots] float32."""
        return torch.where(
            leaving.exists[..., None, None],
            _without_smallest(self.k_slots(leaving.keys).softmax(-1)),
            0,
        )

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
        """Initialise the slots with centroids of a text's keys, so that reads are close to attention.

        Args:
            q: queries [tokens, HQ, D], not rotated.
            k: keys [tokens, H, D], not rotated.
            rotation: [D, D], the mean rotation of keys relative to queries far behind them: k @ rotation.
        """
        groups = q.shape[1] // k.shape[1]
        learned = self.k_slots.weight, self.k_slots.bias, self.q_slots.weight
        weights = (x.unflatten(0, (k.shape[1], -1)) for x in learned)
        weights_by_head = zip(*weights)
        queries_by_head = upcast(q).split(groups, 1)
        keys_by_head = upcast(k).unbind(1)
        for weights_h, q_h, k_h in zip(weights_by_head, queries_by_head, keys_by_head):
            self._start_head(weights_h, q_h.flatten(0, 1), k_h, rotation)
        self.q_slots.bias.zero_()

    def _start_head(
        self, weights: tuple[Tensor, ...], q: Tensor, k: Tensor, rotation: Tensor
    ) -> None:
        """Initialise one head from its queries [n, D] and keys [tokens, D]; `weights` are k_slots' and q_slots' of it.

        Distances between keys are those that queries see: differences of scores, by the square root of the mean q q^T.
        """
        k_weight, k_bias, q_weight = weights
        size, vectors = torch.linalg.eigh(q.mT @ q / len(q))
        seen = (
            rotation
            @ (vectors * (self.scaling * size.clamp(min=1e-4 * size.mean()).sqrt()))
            @ vectors.mT
        )
        points = k @ seen
        centers, members = centroids(points, self.slots)
        sharpness = SHARPNESS / (points - centers[members]).square().sum(-1).mean().clamp(min=1e-6)
        k_weight.copy_(sharpness * centers @ seen.mT)
        k_bias.copy_(-0.5 * sharpness * centers.square().sum(-1))
        middles = torch.stack(
            [k[members == i].mean(0) if (members == i).any() else k[0] for i in range(self.slots)]
        )
        q_weight.copy_((self.scaling * middles @ rotation).repeat(len(q_weight) // self.slots, 1))


class DecayedSlots(SlotMemory):
    """Slots with a decay for each head: n <- e^g n + phi(k), S <- e^g S + phi(k) v^T."""

    num_gates = 1

    def __init__(self, config, heads: int):
        super().__init__(config, heads)
        self.decay = SigmoidDecay(config.hidden_size, heads, None, 0, config.gate_logit_normalizer)

    def gates(self, hidden_states: Tensor) -> Tensor:
        """The logarithm of the decay, as a gate [B, T, H, 1] for hidden states [B, T, hidden_size]."""
        return self.decay(hidden_states)[..., None]


class DeltaSlots(SlotMemory):
    """Slots with the delta rule: a token's value replaces part of what its slots hold.

    S <- S + beta phi(k) (v - S^T phi(k))^T,   n <- n + phi(k),   w = n exp(B q + b),   o = S^T w / sum w, of mass sum w
    """

    num_gates = 1
    starts = {"b_proj.bias": -1.0}  # a write strength of about one quarter

    def __init__(self, config, heads: int):
        super().__init__(config, heads)
        self.b_proj = nn.Linear(config.hidden_size, heads)

    @classmethod
    def state_spec(cls, config, heads: int) -> Spec:
        """The values of the slots, and the sum of assignments to each slot."""
        counts = State((heads, config.num_memory_slots))
        values = State((*counts.shape, config.head_dim), is_recurrent=True)
        return {"slot_values": values, "slot_counts": counts}

    def gates(self, hidden_states: Tensor) -> Tensor:
        """The write strength, as a gate [B, T, H, 1] for hidden states [B, T, hidden_size]."""
        return upcast(self.b_proj(hidden_states)).sigmoid()[..., None]

    def forward(
        self, q: Tensor, leaving: Leaving, context: Context
    ) -> tuple[Tensor, Tensor, States]:
        """See `SlotMemory.forward`; the states are `slot_values` [B, H, slots, V] and `slot_counts` [B, H, slots]."""
        slots = self._slots_of(leaving)
        counts, states = self._counts(slots, context)
        weights = self.q_slots(q) + repeat_heads((counts + NOTHING).log(), q.shape[2])
        mass = weights.logsumexp(-1, keepdim=True)
        o, new = self._recall(
            delta_rule,
            _without_smallest((weights - mass).exp()),
            slots,
            leaving.values,
            leaving,
            context,
        )
        return o, mass[..., 0], states | new

    def _counts(self, slots: Tensor, context: Context) -> tuple[Tensor, States]:
        """[B, T, H, slots], the sum of earlier assignments to each slot in the same sequence."""
        counts = slots.cumsum(1)
        if context.cu_seqlens is not None:
            T = slots.shape[1]
            places = torch.arange(T, device=slots.device)
            starts = places - packed(context.cu_seqlens, T).position[0]
            return counts - F.pad(counts, (0, 0, 0, 0, 1, 0))[:, starts], {}
        if context.states:
            counts = counts + context.states["slot_counts"][:, None]
        return counts, {"slot_counts": counts[:, -1]}


def _without_smallest(weights: Tensor) -> Tensor:
    """Set the smallest weights to zero."""
    return F.threshold(weights, LEAST, 0.0)


def centroids(points: Tensor, number: int, *, rounds: int = 8) -> tuple[Tensor, Tensor]:
    """k-means of points [N, D]: centres [number, D], and each point's centre by index; empty centres are redrawn."""
    generator = torch.Generator(points.device).manual_seed(0)

    def drawn() -> Tensor:
        return points[
            torch.randint(len(points), (number,), generator=generator, device=points.device)
        ]

    centers = drawn()
    for _ in range(rounds):
        members = torch.cdist(points, centers).argmin(-1)
        sums = torch.zeros_like(centers).index_add_(0, members, points)
        counts = members.bincount(minlength=number)[:, None]
        centers = torch.where(counts > 0, sums / counts.clamp(min=1), drawn())
    return centers, torch.cdist(points, centers).argmin(-1)
