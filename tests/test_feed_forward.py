"""Memory layers: product keys find the best slots, and the table of values learns as it should."""

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from cases import CASE, make_config, make_model, random_tokens
from comparing import assert_close
from hf_memory.feed_forward import MemoryValues, ProductKeyMemory, parameter_groups
from hf_memory.ops.product_keys import best_slots

MEMORY = CASE["retention-memory-layers"]


@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_product_keys_find_what_a_search_of_all_slots_finds(top_k):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 50, 3, 8, generator=generator, dtype=torch.float64)
    keys = torch.randn(2, 3, 6, 4, generator=generator, dtype=torch.float64)
    first, second = (torch.einsum("bthk,hnk->bthn", x, y) for x, y in zip(q.chunk(2, -1), keys))
    expected = (first[..., :, None] + second[..., None, :]).flatten(-2).topk(top_k)
    scores, slots = best_slots(q, keys, top_k)
    assert_close(scores, expected.values)
    assert torch.equal(slots, expected.indices)
    with pytest.raises(ValueError, match=r"top_k must be from 1 to num_product_keys=6, got 7"):
        best_slots(q, keys, 7)


def test_a_memory_layer_is_its_formula():
    torch.manual_seed(0)
    config = make_config(MEMORY)
    layer = ProductKeyMemory(config).double()
    values = MemoryValues(config).double()
    x = torch.randn(2, 7, 32).double()
    layer.init_own_parameters()
    q = layer.q_proj(x).unflatten(-1, (2, 2, -1))
    scores = torch.einsum("bthsk,shnk->bthsn", q, layer.keys)
    scores = (scores[..., 0, :, None] + scores[..., 1, None, :]).flatten(-2)
    smallest = scores.topk(3).values[..., -1:]
    weights = scores.masked_fill(scores < smallest, -torch.inf).softmax(-1)
    y = torch.einsum("bthn,nd->btd", weights, values.weight)
    expected = layer.o_proj(y * F.silu(layer.g_proj(x)))
    assert_close(layer(x, values), expected)


def test_weights_of_slots_are_computed_in_float32():
    """In bfloat16 they would have 8 bits, and the sums of values would be off by as much."""
    torch.manual_seed(0)
    layer = ProductKeyMemory(make_config(MEMORY)).bfloat16()
    seen = []
    layer.init_own_parameters()
    layer(
        torch.randn(1, 5, 32).bfloat16(),
        lambda slots, weights: seen.append(weights) or torch.zeros(1, 5, 32),
    )
    weights = seen[0].unflatten(-1, (2, -1))  # of the slots of each head
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 5, 2), rtol=0, atol=1e-6)


def gradients(**options):
    """The gradients of a model with one table for two layers, by name, and the model."""
    model = make_model(MEMORY, **options).double()
    tokens = random_tokens(1, 4)
    model(tokens, labels=tokens).loss.backward()
    return {name: x.grad for name, x in model.named_parameters()}, model


def test_sparse_gradients_are_the_same_and_touch_what_was_read_alone():
    (dense, _), (sparse, model) = gradients(), gradients(sparse_memory_gradients=True)
    assert [name for name, x in sparse.items() if x.is_sparse] == ["model.memory_values.weight"]
    for name, x in dense.items():
        assert_close(sparse[name].to_dense(), x)
    values = model.model.memory_values.weight
    before = values.detach().clone()
    read = dense["model.memory_values.weight"].abs().sum(-1) > 0
    torch.optim.SparseAdam(parameter_groups(model)[-1:]).step()
    assert torch.equal((values != before).any(-1), read)
    assert 0 < read.sum() < len(read)


def test_values_have_a_learning_rate_of_their_own(tmp_path):
    model = make_model(MEMORY)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    optimizer = torch.optim.AdamW(parameter_groups(model, values_learning_rate=1e-2), lr=0.0)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, report_to="none", use_cpu=True, save_strategy="no"
    )
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(2, 9)]
    Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None)).train()
    moved = [name for name, x in model.named_parameters() if not torch.equal(x, before[name])]
    assert moved == ["model.memory_values.weight"]
