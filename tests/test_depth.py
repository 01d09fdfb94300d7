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


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"depth": "deep"}, "depth"),
        ({"adaptive_computation": True}, "depth"),
        ({"halting_epsilon": 0.0}, "halting_epsilon"),
        ({"depth": "universal", "layer_types": ["memory", "full_attention"]}, "layer_types"),
        ({"depth": "universal", "layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"depth": "universal", "mlp_types": ["mlp", "none"]}, "mlp_types"),
    ],
)
def test_bad_options_are_refused_by_name(options, name):
    with pytest.raises(Exception, match=f"{name} must"):
        make_config(TRANSFORMER, **options)
