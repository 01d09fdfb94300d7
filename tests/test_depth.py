"""Depths of the Transformer are their equations."""

import pytest
import torch
from torch.nn import functional as F

from cases import CASE, make_config, make_model, random_tokens

TRANSFORMER = CASE["transformer"]
STEPS, T = 4, 7


def sines(i, width=32):
    """Of a position or a step, as published: sine and cosine in turn."""
    angles = i / 10000 ** (torch.arange(0, width, 2) / width).double()
    return torch.stack([angles.sin(), angles.cos()], -1).flatten()


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("position", ["rope", "sinusoidal"])
@torch.no_grad()
def test_a_universal_transformer_runs_one_layer_many_times(position, is_adaptive):
    options = {"depth": "universal", "position": position, "adaptive_computation": is_adaptive}
    model = make_model(TRANSFORMER, num_hidden_layers=STEPS, ponder_loss_weight=0.5, **options).double().model
    assert len(model.layers) == 1
    tokens = random_tokens(1, T)
    angles = model.rotary_emb(model.embed_tokens(tokens), torch.arange(T)[None])
    at = torch.stack([sines(i) for i in range(T)]) if position == "sinusoidal" else 0

    state, expected = model.embed_tokens(tokens)[0], torch.zeros(T, 32, dtype=torch.float64)
    spent, cost, running = [0.0] * T, [0.0] * T, [True] * T
    for n in range(STEPS):
        made = model.layers[0]((state + at + sines(n))[None], position_embeddings=angles)[0]
        for i in range(T):
            if not running[i]:
                continue
            state[i] = made[i]
            cost[i] += 1
            p = float(model.recurrence.halt(state[i]).sigmoid()) if is_adaptive else 0.0
            if spent[i] + p >= 1 - 0.01 or n == STEPS - 1:
                p, running[i] = 1 - spent[i], False
                cost[i] += p
            expected[i] += p * state[i]
            spent[i] += p
    assert len({int(x) for x in cost}) > 1 or not is_adaptive
    outputs = model.train()(tokens, use_cache=False)
    torch.testing.assert_close(outputs.last_hidden_state[0], model.norm(expected), atol=1e-5, rtol=1e-5)
    if is_adaptive:
        assert float(outputs.own_loss) == pytest.approx(0.5 * sum(cost) / T, rel=1e-5)
    else:
        assert outputs.own_loss is None


def test_ponder_cost_is_learned_and_padding_costs_nothing():
    model = make_model(CASE["transformer-universal"], ponder_loss_weight=1.0).train()
    tokens = random_tokens(2, T)
    predictions = F.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    own = model.model(tokens).own_loss
    torch.testing.assert_close(model(tokens, labels=tokens).loss, predictions + own)
    mask = torch.ones(2, T, dtype=torch.long)
    mask[:, T - 2 :] = 0
    torch.testing.assert_close(model.model(tokens, mask).own_loss, model.model(tokens[:, : T - 2]).own_loss)
    own.backward()
    assert model.model.recurrence.halt.weight.grad.abs().sum() > 0
    assert model.eval().model(tokens).own_loss is None


def reversible(depth=3):
    """Its parameters in float64, its hidden states [1, T, hidden_size] before the layers, and what the layers take."""
    model = make_model(TRANSFORMER, depth="reversible", num_hidden_layers=depth).double().train()
    tokens = random_tokens(1, T)
    angles = model.model.rotary_emb(model.model.embed_tokens(tokens), torch.arange(T)[None])
    return model, tokens, {"position_embeddings": angles}


def test_a_reversible_transformer_is_its_equation_and_so_are_its_gradients():
    model, tokens, given = reversible()
    x1 = x2 = model.model.embed_tokens(tokens)
    for layer in model.model.layers:
        x1 = x1 + layer.mixer(layer.input_layernorm(x2), **given)[0]
        x2 = x2 + layer.mlp(layer.post_attention_layernorm(x1))
    expected = model.lm_head(model.model.norm((x1 + x2) / 2))
    found = model(tokens).logits
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    weight = torch.randn_like(expected)
    parameters = list(model.parameters())
    for mine, theirs in zip(*(torch.autograd.grad((y * weight).sum(), parameters) for y in (found, expected))):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def test_what_training_keeps_does_not_grow_with_reversible_layers():
    def kept(depth):
        sizes = []
        model, tokens, _ = reversible(depth)
        owned = {x.data_ptr() for x in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.append(0 if x.data_ptr() in owned else x.numel()) or x, lambda x: x
        ):
            model(tokens, labels=tokens)
        return sum(sizes)

    assert kept(2) == kept(6) > 0


def test_a_frozen_reversible_model_learns_what_is_not_frozen():
    model, tokens, _ = reversible()
    model.requires_grad_(False)
    weight = model.model.layers[1].mixer.q_proj.weight.requires_grad_()
    model(tokens, labels=tokens).loss.backward()
    assert weight.grad.abs().sum() > 0
    assert [name for name, x in model.named_parameters() if x.grad is not None] == [
        "model.layers.1.mixer.q_proj.weight"
    ]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"depth": "deep"}, "depth"),
        ({"adaptive_computation": True}, "depth"),
        ({"halting_epsilon": 0.0}, "halting_epsilon"),
        ({"depth": "universal", "layer_types": ["memory", "full_attention"]}, "layer_types"),
        ({"depth": "universal", "layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"depth": "universal", "mlp_types": ["mlp", "none"]}, "mlp_types"),
        ({"depth": "reversible", "mlp_types": ["mlp", "memory"]}, "mlp_types"),
    ],
)
def test_bad_options_are_refused_by_name(options, name):
    with pytest.raises(Exception, match=f"{name} must"):
        make_config(TRANSFORMER, **options)
