"""Memories of what has left a window of attention: what they say, and how much of one common softmax it is."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.cache import States
from hf_memory.mixers.base import Context
from hf_memory.ops import linear_attention
from hf_memory.ops.contract import repeat_heads

NOTHING = 1e-30  # mass of an empty memory


class SlotMemory(nn.Module):
    """Keys are put into slots, softly, and a query sees a slot's mean value with the weight of all that is in it.

        phi(k) = softmax(A k + a)          m = sum of exp(B q + b) phi(k) v^T,   n = sum of exp(B q + b) phi(k)
        o = m / n, of the mass n in the softmax: with a slot at each key this is attention

    With A, a = beta (c, -|c|^2 / 2) for centroids c of the keys and B = scaling c, attention sees each key where its
    centroid is, as in Transformer-VQ (https://arxiv.org/abs/2309.16354), but softly and learned.
    """

    def __init__(self, config, heads: int):
        super().__init__()
        self.slots, self.dim, self.backend = config.num_memory_slots, config.head_dim, config.mixer_backend
        groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
        self.k_weight = nn.Parameter(torch.empty(heads * self.slots, self.dim))
        self.k_bias = nn.Parameter(torch.empty(heads * self.slots))
        self.q_weight = nn.Parameter(torch.empty(heads * groups * self.slots, self.dim))
        self.q_bias = nn.Parameter(torch.empty(heads * groups * self.slots))

    def init_own_parameters(self) -> None:
        """Random centroids."""
        init.normal_(self.k_weight, std=self.dim**-0.5)
        init.normal_(self.q_weight, std=self.dim**-0.5)
        init.zeros_(self.k_bias)
        init.zeros_(self.q_bias)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, written: Tensor, context: Context
    ) -> tuple[Tensor, Tensor, States]:
        """Write a token at each step and answer its query.

        Args:
            q: [B, T, HQ, D].
            k: [B, T, H, D] of the token that leaves the window at each step.
            v: [B, T, H, V], of the same.
            written: [1 or B, T] bool, whether there is one.
            context: the states, `slot_values` [B, H, slots, V + 1].

        Returns:
            The answers [B, T, HQ, V], the logarithm of their mass [B, T, HQ] in float32, and the states.
        """
        G, H = q.shape[2] // k.shape[2], k.shape[2]
        keys = self._logits(k, self.k_weight, self.k_bias).softmax(-1).to(v.dtype)
        asked = self._logits(q, self.q_weight, self.q_bias)
        most = asked.detach().amax(-1, keepdim=True)
        ones = F.pad(v, (0, 1), value=1.0)
        past = context.states.get("slot_values")
        o, state = linear_attention(
            (asked - most).exp().to(v.dtype),
            repeat_heads(keys, H * G),
            repeat_heads(ones, H * G),
            scale=1.0,
            mask=written.expand(len(k), -1),
            initial_state=None if past is None else past.repeat_interleave(G, 1),
            output_final_state=True,
            cu_seqlens=context.cu_seqlens,
            backend=self.backend,
        )
        mass = o[..., -1:].float().clamp(min=NOTHING)
        answer = (o[..., :-1] / mass).to(v.dtype)
        return answer, (most.float() + mass.log())[..., 0], {"slot_values": state[:, ::G]}

    def _logits(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """[B, T, H, D] -> [B, T, H, slots], float32."""
        weight, bias = weight.view(-1, self.slots, self.dim), bias.view(-1, self.slots)
        return torch.einsum("bthd,hsd->bths", x.float(), weight.float()) + bias.float()

    @torch.no_grad()
    def start_near(self, keys: Tensor) -> None:
        """Slots at the centroids of keys [tokens, H, D] of a text: near attention before any training."""
        centers = torch.stack([centroids(x.float(), self.slots) for x in keys.unbind(1)])  # [H, slots, D]
        distance = torch.cdist(keys.float().transpose(0, 1), centers).amin(-1)
        sharpness = 1 / (distance.square().mean(1) / self.dim).clamp(min=1e-3)[:, None, None]
        self.k_weight.copy_((sharpness * centers).flatten(0, 1))
        self.k_bias.copy_((-0.5 * sharpness * centers.square().sum(-1, keepdim=True)).flatten())
        groups = len(self.q_weight) // len(self.k_weight)
        self.q_weight.copy_(self.scaling * centers.repeat_interleave(groups, 0).flatten(0, 1))
        self.q_bias.zero_()


def centroids(points: Tensor, number: int, *, rounds: int = 8) -> Tensor:
    """k-means of points [N, D] -> [number, D]; a centre of nothing starts again at a point."""
    generator = torch.Generator(points.device).manual_seed(0)

    def drawn() -> Tensor:
        return points[torch.randint(len(points), (number,), generator=generator, device=points.device)]

    centers = drawn()
    for _ in range(rounds):
        nearest = torch.cdist(points, centers).argmin(-1)
        sums = torch.zeros_like(centers).index_add_(0, nearest, points)
        counts = nearest.bincount(minlength=number)[:, None]
        centers = torch.where(counts > 0, sums / counts.clamp(min=1), drawn())
    return centers
