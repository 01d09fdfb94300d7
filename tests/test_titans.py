"""What Titans' variants promise beyond the contracts: causality, and gates that close to a Transformer."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import DynamicCache

from cases import CASES, Case, generate, make_model, random_tokens
from comparing import assert_close, in_float64
from hf_memory.layers import unit_length
from hf_memory.mixers import neural_memory
from hf_memory.mixers.attention_and_memory import AttentionAndMemoryMixer
from hf_memory.mixers.base import Context
from hf_memory.modeling.titans import RULES

TITANS = [case for case in CASES if case.model_type == "hf_memory_titans"]
AS_PUBLISHED = dict.fromkeys(
    ("variant", "memory_rope", "num_persistent_tokens")
)  # what a paper leaves to its preset


@pytest.mark.parametrize("case", TITANS, ids=lambda case: case.name)
def test_no_output_depends_on_a_later_input(case):
    """By gradient, over several chunks and segments: of each third output with respect to every input."""
    model = make_model(case)
    x = model.get_input_embeddings()(random_tokens(1, 14)).detach().requires_grad_()
    hidden = model.model(inputs_embeds=x, use_cache=False).last_hidden_state
    for t in range(0, 14, 3):
        (gradient,) = torch.autograd.grad(hidden[0, t].square().sum(), x, retain_graph=True)
        sizes = gradient[0].abs().sum(-1)
        assert not sizes[t + 1 :].any()
        assert sizes[: t + 1].all()


@pytest.mark.parametrize("variant", ["lmm", "mag", "mal"])
@torch.no_grad()
def test_a_memory_can_be_told_values_of_unit_length(variant, monkeypatch):
    told = []
    learn = neural_memory.neural_memory
    monkeypatch.setattr(
        neural_memory,
        "neural_memory",
        lambda q, k, v, *a, **b: told.append(v) or learn(q, k, v, *a, **b),
    )
    model = make_model(
        next(case for case in TITANS if case.name == "titans-lmm-rope"),
        variant=variant,
        sliding_window=4,
    )
    for model.config.memory_unit_values in (True, False):
        model(random_tokens(1, 9))
    with_option = told[0].norm(dim=-1)
    without = told[-1].norm(dim=-1)
    torch.testing.assert_close(with_option, torch.ones_like(with_option), rtol=0, atol=0.01)
    assert (without < 0.9).any()


@torch.no_grad()
def test_long_inner_gradients_are_cut_where_a_memory_is_deep_or_is_told_to():
    models = [make_model(TITANS[0], memory_depth=depth) for depth in (1, 2, 3)]
    limits = [model.config.memory_max_grad_norm for model in models]
    assert limits == [0, 0, models[2].config.linear_value_head_dim ** 0.5]
    tokens = random_tokens(1, 9)
    for model in models:
        short = model(tokens).logits
        model.config.memory_max_grad_norm = 1e-3
        assert not torch.allclose(model(tokens).logits, short)


@pytest.mark.parametrize("case", TITANS, ids=lambda case: case.name)
@torch.no_grad()
def test_what_was_read_before_the_window_is_remembered(case):
    """Beyond every window and segment, the first token still matters."""
    model = make_model(case, layer_types=["memory"] * 2)
    tokens = random_tokens(1, 24)
    other = tokens.clone()
    other[0, 0] = 3 + (tokens[0, 0] - 2) % 60
    difference = model(tokens).logits[:, -1] - model(other).logits[:, -1]
    assert difference.abs().max() > 1e-6


@pytest.mark.parametrize("name", ["titans-mag-add", "titans-mal"])
@torch.no_grad()
def test_a_closed_gate_leaves_attention(name):
    case = next(case for case in CASES if case.name == name)
    model = make_model(case, num_persistent_tokens=0)
    tokens = random_tokens(1, 12)
    mixers = [module for module in model.modules() if isinstance(module, AttentionAndMemoryMixer)]
    for mixer in mixers:
        mixer.gate.zero_()
    closed = model(tokens).logits
    for mixer in mixers:
        mixer.memory.o_proj.weight.mul_(7)
    assert torch.equal(model(tokens).logits, closed)
    for mixer in mixers:
        mixer.gate.fill_(1)
    assert not torch.allclose(model(tokens).logits, closed)


def ttt(mixer, hidden_states, q, k, v, head):
    """Outputs of a head's tokens, and what it learns by: mini-batches of 4, the gradient of each token by autograd."""
    norm = [x[head] for x in mixer.inner_norm()]
    lr = mixer.config.memory_max_lr / 8 * mixer.lr_proj(hidden_states)[0, :, head].sigmoid()
    tau = 1 / torch.arange(1.0, 5.0, dtype=torch.float64) + mixer.position_rate

    def f(x, W):
        z = x @ W[0][:-1] + W[0][-1]
        for w in W[1:]:
            z = F.gelu(z, approximate="tanh") @ w[:-1] + w[-1]
        return x + F.layer_norm(z, (8,), *norm, eps=1e-6)

    W = [w[head].detach() for w in mixer.initial_weights()]
    outputs = []
    for t in range(len(q)):
        if t % 4 == 0:
            A = [w.detach().requires_grad_() for w in W]
            total = [torch.zeros_like(w) for w in W]
        gradients = torch.autograd.grad((f(k[t], A) - v[t]).square().sum() / 2, A)
        total = [x + lr[t] * g for x, g in zip(total, gradients)]
        W = [a - tau[t % 4] * x for a, x in zip(A, total)]
        outputs.append(f(q[t], W))
    return torch.stack(outputs)


def miras(mixer, hidden_states, q, k, v, head):
    """The same of Moneta, Yaad and Memora; Memora as the paper writes it, with log W and not what is kept of it."""
    norm = [x[head] for x in mixer.inner_norm()]
    rule = mixer.config.memory_rule
    gates = {
        "lr": mixer.lr_proj,
        "decay": mixer.decay_proj,
        "delta": getattr(mixer, "threshold_proj", mixer.lr_proj),
    }
    lr, decay, delta = (gate(hidden_states)[0, :, head] for gate in gates.values())
    lr = lr.sigmoid() / 4
    a = 1 - decay.sigmoid()
    delta = 8**0.5 * F.softplus(delta)

    def f(x, W):
        return x + F.layer_norm(F.gelu(x @ W[0]) @ W[1], (8,), *norm, eps=1e-6)

    def by_answer(e, limit):
        if rule == "moneta":
            return 3 * torch.tanh(10 * e) * (e**2 + 1e-6)
        return limit * torch.tanh(10 * e) if rule == "yaad" and e.norm() > limit else e

    def weights_of(kept):
        if rule == "moneta":
            return [x / x.norm(p=4) ** 2 for x in kept]
        return [x.softmax(0) for x in kept] if rule == "memora" else kept

    kept = [w[head].detach() for w in mixer.initial_weights()]
    outputs = []
    for t in range(len(q)):
        if t % 4 == 0:
            A = [w.detach().requires_grad_() for w in weights_of(kept)]
        recalled = f(k[t], A)
        gradients = torch.autograd.grad(recalled, A, by_answer(recalled - v[t], delta[t]).detach())
        before = [x.log_softmax(0) for x in kept] if rule == "memora" else kept
        kept = [a[t] * x - lr[t] * g for x, g in zip(before, gradients)]
        outputs.append(f(q[t], weights_of(kept)))
    return torch.stack(outputs)


def newton_schulz(x):
    """Muon's orthogonal part of a matrix."""
    transposed = x.shape[0] > x.shape[1]
    x = (x.T if transposed else x) / (x.square().sum() + 1e-12).sqrt()
    for _ in range(5):
        A = x @ x.T
        x = 3.4445 * x + (-4.7750 * A + 2.0315 * A @ A) @ x
    return x.T if transposed else x


def atlas(mixer, hidden_states, q, k, v, head):
    """The same of ATLAS, with windows of 3 tokens, from the features that the mixer makes."""
    gates = (mixer.token_proj, mixer.lr_proj, mixer.momentum_proj, mixer.decay_proj)
    gamma, lr, eta, forget = (gate(hidden_states)[0, :, head].sigmoid() for gate in gates)

    def f(x, W):
        return F.gelu(x @ W[0]) @ W[1]

    W = [w[head].detach() for w in mixer.initial_weights()]
    outputs = []
    S = [torch.zeros_like(w) for w in W]
    for t in range(len(q)):
        if t % 4 == 0:
            A = [w.detach().requires_grad_() for w in W]
        loss = sum(
            gamma[i].detach() * (f(k[i], A) - v[i]).square().sum() / 2
            for i in range(max(0, t - 2), t + 1)
        )
        S = [eta[t] * s - g for s, g in zip(S, torch.autograd.grad(loss, A))]
        W = [(1 - forget[t]) * w + lr[t] / 4 * newton_schulz(s) for w, s in zip(W, S)]
        outputs.append(f(q[t], W))
    return torch.stack(outputs)


def lact(mixer, hidden_states, q, k, v, head):
    """The same of LaCT, a chunk of 4 at a time: the gradient is that of the sum over its tokens."""
    lr = F.softplus(mixer.lr_proj(hidden_states))[0, :, head]
    eta = mixer.momentum_proj(hidden_states)[0, :, head]

    def f(x, W):
        return (F.silu(x @ W[0]) * (x @ W[1])) @ W[2]

    first = [w[head].detach() for w in mixer.initial_weights()]
    W = first
    S = [torch.zeros_like(w) for w in first]
    outputs = []
    for start in range(0, len(q), 4):
        chunk = slice(start, start + 4)
        outputs.append(f(q[chunk], W))
        A = [w.detach().requires_grad_() for w in W]
        gradients = torch.autograd.grad(
            (lr[chunk].detach()[:, None] * f(k[chunk], A) * v[chunk]).sum(), A
        )
        S = [eta[chunk].sigmoid().mean() * s + g for s, g in zip(S, gradients)]
        moved = [w + mixer.config.memory_max_lr * newton_schulz(s) for w, s in zip(W, S)]
        W = [w / w.norm(dim=0) * w0.norm(dim=0) for w, w0 in zip(moved, first)]
    return torch.cat(outputs)


EQUATIONS = {
    "ttt_linear": ttt,
    "ttt_mlp": ttt,
    **dict.fromkeys(("moneta", "yaad", "memora"), miras),
    "atlas": atlas,
    "lact": lact,
}


def test_every_rule_has_its_equations():
    assert {"titans", *EQUATIONS} == set(RULES)


@pytest.mark.parametrize(("rule", "equations"), EQUATIONS.items())
def test_a_memory_is_its_papers_equations(rule, equations):
    """A token at a time in float64, from the mixer's own queries, keys and values, with parameters that have moved."""
    options = {**AS_PUBLISHED, "variant": "lmm", "memory_rule": rule}
    if rule == "atlas":
        options["memory_window"] = 3
    mixer = make_model(TITANS[0], **options).model.layers[0].mixer.double()
    x = torch.randn(1, 11, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gate_inputs = []
    for parameter in mixer.parameters():
        parameter.data += (
            0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double()
        )
    mixer.output_gate.register_forward_pre_hook(lambda _, inputs: gate_inputs.append(inputs[0]))
    mixer(x)
    q, k, v, _ = mixer.heads_of(mixer.project(x, None), Context(None, None, None, {}))
    if mixer.unit_keys:
        q = unit_length(q)
        k = unit_length(k)
    for head in range(4):
        rows = (
            q[0, :, head],
            *(y.repeat_interleave(4 // y.shape[2], 2)[0, :, head] for y in (k, v)),
        )
        expected = equations(mixer, x, *(row.detach() for row in rows), head)
        assert_close(gate_inputs[0][0, :, head], expected)


@torch.no_grad()
def test_moneta_decodes_as_it_reads_up_to_what_rounding_loses():
    """Its rule amplifies rounding: in float32 a long text ends far from float64, however it is read."""
    options = {"memory_rule": "moneta", "num_hidden_layers": 1, "intermediate_size": 16}
    case = Case("moneta", "hf_memory_titans", options)
    model = make_model(case)
    tokens = random_tokens(1, 600)

    def read(model):
        cache = DynamicCache(config=model.config)
        pieces = tokens.split([550, *[1] * 50], 1)
        decoded = [model(piece, past_key_values=cache).logits for piece in pieces]
        return model(tokens, use_cache=False).logits, torch.cat(decoded, 1)

    exact, decoded = read(in_float64(model))
    assert_close(decoded, exact)
    whole, decoded = read(model)
    assert_close(decoded, exact, whole)


@pytest.mark.parametrize("case", TITANS, ids=[case.name for case in TITANS])
def test_rows_with_adapters_of_their_own_are_generated_as_alone(case):
    """Also where projections read persistent tokens."""
    tokens = random_tokens(2, 9)
    lora = LoraConfig(
        r=2, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False
    )
    model = get_peft_model(make_model(case), lora, adapter_name="one")
    model.add_adapter("two", lora)
    model.double().eval()
    together = generate(model, input_ids=tokens, adapter_names=["one", "two"])
    for i, name in enumerate(("one", "two")):
        model.set_adapter(name)
        assert torch.equal(generate(model, input_ids=tokens[i : i + 1])[0], together[i])
