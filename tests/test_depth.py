"""Depths of the Transformer are their equations."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cases import CASE, make_config, make_model, random_tokens
from comparing import assert_close
from hf_memory.modeling.depth import run_reversible

TRANSFORMER = CASE["transformer"]
STEPS = 4
T = 7


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("position", ["rope", "sinusoidal"])
@torch.no_grad()
def test_a_universal_transformer_runs_one_layer_many_times(position, is_adaptive):
    options = {"depth": "universal", "position": position, "adaptive_computation": is_adaptive}
    model = (
        make_model(TRANSFORMER, num_hidden_layers=STEPS, ponder_loss_weight=0.5, **options)
        .double()
        .model
    )
    assert len(model.layers) == 1
    tokens = random_tokens(1, T)
    angles = model.rotary_emb(model.embed_tokens(tokens), torch.arange(T)[None])
    at = model.embed_positions(torch.arange(T)[None])[0] if position == "sinusoidal" else 0

    state = 32**0.5 * model.embed_tokens(tokens)[0]
    expected = torch.zeros(T, 32, dtype=torch.float64)
    spent = [0.0] * T
    cost = [0.0] * T
    running = [True] * T
    for n in range(STEPS):
        here = model.recurrence.steps(torch.tensor([[n]]))[0] + at
        made = model.layers[0]((state + here)[None], position_embeddings=angles)[0]
        for i in range(T):
            if not running[i]:
                continue
            state[i] = made[i]
            cost[i] += 1
            p = float(model.recurrence.halt(state[i]).sigmoid()) if is_adaptive else 0.0
            if spent[i] + p >= 1 - 0.01 or n == STEPS - 1:
                p = 1 - spent[i]
                running[i] = False
                cost[i] += p
            expected[i] += p * state[i]
            spent[i] += p
    assert len({int(x) for x in cost}) > 1 or not is_adaptive
    outputs = model.train()(tokens, use_cache=False)
    assert_close(outputs.last_hidden_state[0], model.norm(expected))
    if is_adaptive:
        assert float(outputs.own_loss) == pytest.approx(0.5 * sum(cost) / T, rel=1e-5)
    else:
        assert outputs.own_loss is None


def test_ponder_cost_is_learned_and_padding_costs_nothing():
    model = make_model(CASE["transformer-universal"], ponder_loss_weight=1.0).double().train()
    tokens = random_tokens(2, T)
    with torch.no_grad():
        logits = model(tokens).logits
    predictions = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    outputs = model.model(tokens)
    own = outputs.own_losses[:, :-1].mean()  # of tokens that predict a label
    assert_close(
        model(tokens, labels=tokens).loss.float(), predictions + own, (predictions + own).float()
    )
    assert_close(outputs.own_loss, outputs.own_losses.mean())
    mask = torch.ones(2, T, dtype=torch.long)
    mask[:, T - 2 :] = 0
    assert_close(model.model(tokens, mask).own_loss, model.model(tokens[:, : T - 2]).own_loss)
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
    assert_close(found, expected)
    weight = torch.randn_like(expected)
    parameters = list(model.parameters())
    for mine, theirs in zip(
        *(torch.autograd.grad((y * weight).sum(), parameters) for y in (found, expected))
    ):
        assert_close(mine, theirs)


def test_reversible_layers_are_computed_again_in_the_precision_of_the_forward():
    model = make_model(TRANSFORMER, depth="reversible", num_hidden_layers=3).train()
    x = torch.randn(1, T, 32)
    positions = torch.arange(T)[None]
    given = {"position_embeddings": model.model.rotary_emb(x, positions), "read_values": None}
    parameters = list(model.model.layers.parameters())
    gradients = []
    for run in (run_reversible, run_one_after_the_other):
        with torch.autocast("cpu", torch.bfloat16):
            y = run(model.model.layers, x, [None] * 3, **given)
        gradients.append(torch.autograd.grad(y.square().sum(), parameters))
    for mine, theirs in zip(*gradients):
        assert (mine - theirs).norm() < 1e-3 * theirs.norm()


def run_one_after_the_other(layers, hidden_states, masks, **kwargs):
    states = (hidden_states, hidden_states, hidden_states)
    for layer in layers:
        states = layer(*states, **kwargs)
    return states[0]


def random_reversible(randomness):
    """A reversible model whose output is random in training."""
    options = {"num_hidden_layers": 3, "depth": "reversible"}
    if randomness == "attention_dropout":
        options |= {"layer_types": ["full_attention"] * 3, "attention_dropout": 0.5}
    model = make_model(TRANSFORMER, **options)
    if randomness == "lora_dropout":
        targets = ["q_proj", "v_proj", "down_proj"]
        lora = LoraConfig(r=2, target_modules=targets, lora_dropout=0.5, init_lora_weights=False)
        model = get_peft_model(model, lora)
    if randomness == "a user's module":
        for layer in model.model.layers:
            layer.mlp.down_proj = nn.Sequential(nn.Dropout(0.5), layer.mlp.down_proj)
    return model.double().train()


@pytest.mark.parametrize(
    "way",
    ["alone", "use_reentrant=False", "use_reentrant=True", "inside a checkpoint", "in chunks"],
)
@pytest.mark.parametrize("randomness", ["lora_dropout", "attention_dropout", "a user's module"])
def test_a_reversible_transformer_is_computed_again_with_the_same_random_numbers(randomness, way):
    model = random_reversible(randomness)
    tokens = random_tokens(2, T)
    if "reentrant" in way:
        model.enable_input_require_grads()
        model.activation_checkpointing_enable({"use_reentrant": way == "use_reentrant=True"})
    given = {"chunk_length": 4} if way == "in chunks" else {"use_cache": False}
    learned = [x for x in model.parameters() if x.requires_grad]
    directions = [torch.randn_like(x) for x in learned]

    def output():
        return model(input_ids=tokens, **given).logits.sin().sum()

    def run():
        torch.manual_seed(1)
        return checkpoint(output, use_reentrant=False) if way == "inside a checkpoint" else output()

    with torch.no_grad():
        assert run() != output()  # which goes on with the random numbers after those of the run
    run().backward()
    slope = sum((x.grad * direction).sum() for x, direction in zip(learned, directions))
    ends = []
    for step in (1e-6, -2e-6):
        for x, direction in zip(learned, directions):
            x.data.add_(direction, alpha=step)
        ends.append(run().detach())
    assert float(slope) == pytest.approx(float(ends[0] - ends[1]) / 2e-6, rel=1e-4)


def test_a_backward_pass_leaves_the_random_generator_as_it_is():
    model = random_reversible("a user's module")
    tokens = random_tokens(2, T)
    loss = model(tokens, labels=tokens).loss
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


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


def spans(**options):
    """In float64, with heads that look back by various spans between 0 and the longest, 8 tokens."""
    model = make_model(
        TRANSFORMER, pattern="adaptive_span", max_span=8, span_ramp=3, **options
    ).double()
    for n, layer in enumerate(model.model.layers):
        layer.mixer.relation.span.data = torch.tensor(
            [0.0, 0.2, 0.55, 0.4 + 0.1 * n], dtype=torch.float64
        )
    return model


@pytest.mark.parametrize("position", ["none", "alibi"])
@torch.no_grad()
def test_heads_see_as_far_as_their_spans(position):
    T = 13
    mixer = spans(position=position).model.layers[0].mixer
    x = torch.randn(1, T, 32, dtype=torch.float64)
    q, k, v = (
        proj(x)[0].unflatten(-1, (-1, 8)) for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    expected = torch.zeros(T, 4, 8, dtype=torch.float64)
    for h, z in enumerate(8 * mixer.relation.span):
        for i in range(T):
            slope = 2.0 ** (-8 * (h + 1) / 4) if position == "alibi" else 0.0
            weights = [
                ((3 + z - (i - j)) / 3).clamp(0, 1)
                * (q[i, h] @ k[j, h // 2] / 8**0.5 - slope * (i - j)).exp()
                for j in range(i + 1)
            ]
            expected[i, h] = sum(w * v[j, h // 2] for j, w in enumerate(weights)) / sum(weights)
    assert_close(mixer(x)[0][0], mixer.o_proj(expected.flatten(1)))


def test_spans_cost_what_they_reach_and_may_grow_again():
    model = spans().train()
    tokens = random_tokens(2, T)
    spent = [8 * layer.mixer.relation.span.mean() for layer in model.model.layers]
    model.config.span_loss_weight = 0.5
    assert_close(model.model(tokens).own_loss, 0.5 * sum(spent))
    for outside in (-0.1, 1.1):
        model.zero_grad()
        for layer in model.model.layers:
            layer.mixer.relation.span.data.fill_(outside)
        model(tokens, labels=tokens).loss.backward()
        assert model.model.layers[0].mixer.relation.span.grad.abs().min() > 0 or outside > 1


@torch.no_grad()
def test_a_cache_is_trimmed_to_the_spans_that_were_learned(tmp_path):
    model = spans()
    tokens = random_tokens(2, 80)
    before = model(tokens).logits
    model.model.trim_spans()
    assert model.config.span_limits == [8, 8]  # ceil(3 + 8 * 0.55)
    assert_close(model(tokens).logits, before)
    cache = model(tokens[:, :79]).past_key_values
    assert {layer.states["keys"].shape[1] for layer in cache.layers} == {8}
    assert_close(model(tokens[:, 79:], past_key_values=cache).logits, before[:, -1:])
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).config.span_limits == [8, 8]


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
        ({"depth": "reversible", "pattern": "adaptive_span"}, "pattern"),
        ({"depth": "reversible", "pattern": "routing"}, "pattern"),
        ({"depth": "reversible", "past": "compressive"}, "compression"),
        ({"pattern": "adaptive_span", "max_span": 0}, "max_span"),
        ({"pattern": "adaptive_span", "span_limits": [4]}, "span_limits"),
    ],
)
def test_bad_options_are_refused_by_name(options, name):
    with pytest.raises(Exception, match=f"{name} must"):
        make_config(TRANSFORMER, **options)
