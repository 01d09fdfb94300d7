"""Feed-forward networks by name. Each is a module made from a config, from [B, T, hidden_size] to the same shape."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.integrations.moe import batched_mm_experts_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeSparseMoeBlock

from hf_memory.convertible import Convertible
from hf_memory.layers import SwiGLU, upcast
from hf_memory.ops.exported import sums_of_rows
from hf_memory.ops.product_keys import best_slots

one_after_the_other: Callable = Qwen3MoeExperts.forward.__wrapped__  # type: ignore[attr-defined]
ReadValues = Callable[[Tensor, Tensor], Tensor]  # (slots, weights) -> weighted sums of values


class MemoryValues(Convertible, nn.EmbeddingBag):
    """A table with a value for each slot; all memory layers of a model share it."""

    def __init__(self, config):
        sparse = config.sparse_memory_gradients
        super().__init__(config.num_product_keys**2, config.hidden_size, mode="sum", sparse=sparse)

    @property
    def new_part(self) -> nn.Module:
        """The whole table, so that it has the learning rate of new parts in a conversion."""
        return self

    def init_own_parameters(self) -> None:
        """Values start with unit length on average."""
        init.normal_(self.weight, std=self.embedding_dim**-0.5)

    def forward(self, slots: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        """Sums [B, T, hidden_size] of the values of slots [B, T, n], weighted by [B, T, n]."""
        weights = weights.flatten(0, 1).to(self.weight.dtype)
        sums = sums_of_rows(slots.flatten(0, 1), self.weight, weights, sparse=self.sparse)
        return sums.unflatten(0, slots.shape[:2])


class ProductKeyMemory(Convertible, nn.Module):
    """W_o (y silu(W_g x)),   y = sum over heads and their best slots i of softmax(q . k)_i v_i,   q = W_q x.

    This is Memory+ of https://arxiv.org/abs/2412.09764, with product keys of https://arxiv.org/abs/1907.05242. Time
    grows with the square root of the number of slots. It has no state: its content is learned in training.
    """

    def __init__(self, config):
        super().__init__()
        heads = config.product_key_heads
        K = config.product_key_dim
        width = config.hidden_size
        self.top_k = config.product_key_top_k
        self.q_proj = nn.Linear(width, heads * K, bias=False)
        self.keys = nn.Parameter(torch.empty(2, heads, config.num_product_keys, K // 2))
        self.g_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    @property
    def new_part(self) -> nn.Module:
        """The whole module, since no teacher has one."""
        return self

    def init_own_parameters(self) -> None:
        """Keys are uniform with variance 2 / (3 K)."""
        bound = self.keys.shape[-1] ** -0.5
        init.uniform_(self.keys, -bound, bound)

    def start_open(self, half_life: int) -> None:
        """Start with an output of zero, so that a student starts as without it."""
        self.o_proj.weight.zero_()

    def forward(self, hidden_states: Tensor, read_values: ReadValues) -> Tensor:
        """[B, T, hidden_size] -> [B, T, hidden_size]."""
        q = self.q_proj(hidden_states).unflatten(-1, (self.keys.shape[1], -1))
        scores, slots = best_slots(q, self.keys.to(q.dtype), self.top_k)
        weights = upcast(scores).softmax(-1)
        y = read_values(slots.flatten(-2), weights.flatten(-2)).to(hidden_states.dtype)
        return self.o_proj(y * F.silu(self.g_proj(hidden_states)))


class SwiGLUAndMemory(SwiGLU):
    """The sum of a SwiGLU MLP and a memory layer."""

    def __init__(self, config):
        super().__init__(config)
        self.memory = ProductKeyMemory(config)

    def forward(self, hidden_states: Tensor, read_values: ReadValues) -> Tensor:  # type: ignore[override]
        """[B, T, hidden_size] -> [B, T, hidden_size]."""
        return super().forward(hidden_states) + self.memory(hidden_states, read_values)


class Experts(Qwen3MoeExperts):
    """The MLPs of Qwen3-MoE, which are computed as `set_experts_implementation` says.

    With grouped products, which are the default, they are computed one after the other where PyTorch has none, or as
    batches in a graph, which has no loops.
    """

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sums [n, hidden_size] over the MLPs of tokens [n, hidden_size], which are chosen and weighted by [n, k]."""
        inputs = hidden_states, top_k_index, top_k_weights
        implementation = self.config._experts_implementation  # type: ignore[union-attr]
        if implementation != "grouped_mm" or self.has_grouped_products:
            return super().forward(*inputs)
        if torch.compiler.is_compiling():
            return batched_mm_experts_forward(self, *inputs)
        return one_after_the_other(self, *inputs)

    @property
    def has_grouped_products(self) -> bool:
        """Whether PyTorch has them for these weights: not in float64, and for rows of a multiple of 16 bytes."""
        weights = self.gate_up_proj, self.down_proj
        return all(
            x.dtype != torch.float64 and x.shape[-1] * x.element_size() % 16 == 0 for x in weights
        )


class SparseMLP(Qwen3MoeSparseMoeBlock):
    """MLPs of which each token uses a few, as in Qwen3-MoE."""

    def __init__(self, config):
        super().__init__(config)
        self.experts = Experts(config)


FEED_FORWARDS: dict[str, Callable[..., nn.Module]] = {
    "mlp": SwiGLU,
    "memory": ProductKeyMemory,
    "mlp_and_memory": SwiGLUAndMemory,
    "experts": SparseMLP,
}
WITH_MEMORY = ("memory", "mlp_and_memory")  # these also take `read_values`


def parameter_groups(model: nn.Module, values_learning_rate: float = 1e-3) -> list[dict]:
    """Parameter groups for an optimizer. The values of memory layers have their own learning rate and no weight decay.

    They work with the Trainer:
    `Trainer(model, arguments, optimizers=(torch.optim.AdamW(parameter_groups(model), lr=3e-4), None))`.
    With `sparse_memory_gradients`, pass the last group, the values, to `torch.optim.SparseAdam` in a training loop of
    your own that does not clip gradients, since AdamW and the Trainer do not support sparse gradients.
    """
    values = {
        x
        for module in model.modules()
        if isinstance(module, MemoryValues)
        for x in module.parameters()
    }
    others = [x for x in model.parameters() if x not in values]
    return [
        {"params": others},
        {"params": list(values), "lr": values_learning_rate, "weight_decay": 0.0},
    ]
