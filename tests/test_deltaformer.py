"""What DeltaFormer is: attention, DeltaNet, or a machine that tracks swaps, by its kernels."""

from importlib import import_module

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache, StaticCache

from cases import CASE, make_model, random_tokens
from comparing import assert_close
from hf_memory.ops import delta_rule, deltaformer
from hf_memory.ops.deltaformer import KERNELS, corrected_values


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(T=70, H=2, D=8):
    q = random(2, T, H, D)
    v = random(2, T, H, D, seed=1)
    return q, F.normalize(random(2, T, H, D, seed=2), dim=-1), v, random(2, T, H, seed=3).sigmoid()


def test_nothing_erased_is_softmax_attention():
    q, k, v, beta = inputs()
    o, _ = deltaformer(q, k, v, 0 * beta)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    assert_close(o, expected)


def test_nothing_written_is_nothing():
    q, k, v, beta = inputs()
    assert not deltaformer(q, k, v, 0 * beta, beta_mode="delta")[0].any()


def test_linear_kernels_are_deltanet():
    q, k, v, beta = inputs()
    o, _ = deltaformer(
        q, k, v, beta, write_kernel="linear", read_kernel="linear", beta_mode="delta"
    )
    assert_close(o, delta_rule(q, k, v, beta, scale=1.0)[0])


def test_erasing_without_scaling_the_write_is_its_own_recurrence():
    """S <- S (I - beta k k^T) + v k^T with linear kernels."""
    q, k, v, beta = inputs(T=20)
    S = torch.zeros(2, 2, 8, 8, dtype=torch.float64)
    expected = []
    for t in range(20):
        erased = torch.einsum("bhkv,bhk->bhv", S, k[:, t]) * beta[:, t, :, None]
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t] - erased)
        expected.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    o, _ = deltaformer(q, k, v, beta, write_kernel="linear", read_kernel="linear")
    assert_close(o, torch.stack(expected, 1))


def test_a_kernel_of_finite_features_is_deltanet_on_them():
    """(x . y)^2 is the product of the outer products of x and y with themselves."""
    q, k, v, beta = inputs(D=3)
    squared = [torch.einsum("...i,...j->...ij", x, x).flatten(-2) for x in (q, k)]
    linear = {"write_kernel": "linear", "read_kernel": "linear", "beta_mode": "delta"}
    o, _ = deltaformer(*squared, v, beta, **linear)
    assert_close(o, delta_rule(*squared, v, beta, scale=1.0)[0])


def test_softmax_subtracts_the_first_value_from_the_second_whatever_the_keys():
    q, k, v, _ = inputs(T=2)
    u = deltaformer(q, k, v, beta_mode="none", output_final_state=True)[1].u
    assert_close(u[:, 1], v[:, 1] - v[:, 0])


@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize("T", [1, 16, 17, 70])
def test_the_size_of_a_block_changes_nothing(block, T, monkeypatch):
    from hf_memory.ops.deltaformer import chunk

    q, k, v, beta = (x.requires_grad_() for x in inputs(T=T))
    weight = random(2, T, 2, 8, seed=5)
    results = []
    for form in ("reference", "chunk"):
        monkeypatch.setattr(chunk, "BLOCK", block)
        monkeypatch.setitem(chunk.corrected_values.__wrapped__.__kwdefaults__, "block", block)
        o, _ = deltaformer(q, k, v, beta, backend=form)
        results.append((o, torch.autograd.grad((o * weight).sum(), (q, k, v, beta))))
    assert_close(*results)


def test_grouped_queries_share_corrected_values():
    _, k, v, beta = inputs(H=2)
    many = random(2, 70, 6, 8, seed=9)
    o, _ = deltaformer(many, k, v, beta)
    repeated = deltaformer(many, *(x.repeat_interleave(3, 2) for x in (k, v, beta)))[0]
    assert_close(o, repeated)


def test_a_window_sees_nothing_before_it():
    q, k, v, beta = inputs(T=30)
    o, _ = deltaformer(q, k, v, beta, window=5)
    for name, x in (("k", k), ("v", v)):
        changed = x.clone()
        changed[:, 20] += 1
        other, _ = deltaformer(
            q, changed if name == "k" else k, changed if name == "v" else v, beta, window=5
        )
        assert torch.equal(o[:, :20], other[:, :20])
        assert not torch.equal(o[:, 20:25], other[:, 20:25])


@pytest.mark.parametrize("kernel", KERNELS)
@torch.no_grad()
def test_a_static_cache_whose_window_rolls_equals_the_whole(kernel):
    """Tokens come one by one and several at once, before the window of a layer is full and after."""
    sliding = {
        "layer_types": ["sliding_memory", "memory"],
        "sliding_window": 4,
        "read_kernel": kernel,
    }
    model = make_model(CASE["deltaformer"], **sliding).double()
    tokens = random_tokens(2, 16)
    cache = StaticCache(config=model.config, max_cache_len=16)
    parts = [
        model(part, past_key_values=cache).logits for part in tokens.split([3, 1, 1, 1, 4, 1, 5], 1)
    ]
    assert_close(torch.cat(parts, 1), model(tokens).logits)


@pytest.mark.parametrize("name", ["deltaformer", "deltaformer-window"])
@torch.no_grad()
def test_padding_is_never_read_not_even_as_nan_and_takes_no_room_of_a_window(name):
    model = make_model(CASE[name]).double()
    tokens = random_tokens(2, 10)
    embeddings = model.get_input_embeddings()(tokens)
    mask = torch.ones(2, 10)
    cache = DynamicCache(config=model.config)
    embeddings[1, 5:8] = torch.nan
    mask[1, 5:8] = 0
    model(inputs_embeds=embeddings[:, :8], attention_mask=mask[:, :8], past_key_values=cache)
    more = model(inputs_embeds=embeddings[:, 8:], attention_mask=mask, past_key_values=cache).logits
    assert_close(more[1:], model(tokens[1:, mask[1].bool()]).logits[:, -2:])


def test_a_window_without_a_size_is_refused():
    with pytest.raises(ValueError, match=r"sliding_window must be set with .'sliding_memory'"):
        make_model(CASE["deltaformer"], layer_types=["memory", "sliding_memory"])


def swapped(write_kernel, n=256, swaps=1024, d=128):
    """Store n values under n > d keys, swap pairs of them, and say which part a read by rounded products finds.

    The keys are two bases, each spread evenly over the other, so that no two have a product above d ** -0.5 < 1 / 8.
    """
    generator = torch.Generator().manual_seed(0)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < d:
        hadamard = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.float64), hadamard)
    keys = torch.cat([torch.eye(d, dtype=torch.float64), hadamard / d**0.5])
    pairs = torch.stack([torch.randperm(n, generator=generator)[:2] for _ in range(swaps)])
    k = torch.cat([keys, keys[pairs[:, 0]] - keys[pairs[:, 1]]])
    v = torch.cat([torch.eye(n, dtype=torch.float64), torch.zeros(swaps, n, dtype=torch.float64)])
    u = corrected_values(k[None, :, None], v[None, :, None], kernel=write_kernel, beta_mode="none")
    held = (keys @ k.T).round() @ u[0, :, 0]  # the value under each key
    place = torch.arange(n)
    for a, b in pairs.tolist():
        place[[a, b]] = place[[b, a]]
    return (held.argmax(-1) == place).double().mean().item()


def test_only_rounded_writes_track_more_swaps_than_channels():
    assert swapped("round") == 1
    assert max(swapped(kernel) for kernel in ("linear", "relu", "softmax")) < 0.5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"write_kernel": "exp"}, "write_kernel must be one of softmax"),
        ({"beta_mode": "off"}, "beta_mode must be one of"),
        ({"beta": None}, "beta must be given"),
        ({"mask": torch.ones(2, 3)}, "mask must have shape"),
        ({"q": torch.zeros(2, 70, 3, 8, dtype=torch.float64)}, "k must have shape"),
        ({"cu_seqlens": torch.tensor([0, 70])}, "q must have B=1"),
    ],
)
def test_wrong_arguments_are_explained(wrong, message):
    q, k, v, beta = inputs()
    with pytest.raises(ValueError, match=message):
        deltaformer(**{"q": q, "k": k, "v": v, "beta": beta, **wrong})


@pytest.mark.parametrize("T", [1, 16, 33])
@pytest.mark.parametrize("beta_mode", ["erase", "delta", "none"])
def test_kernels_equal_the_reference(T, beta_mode):
    check_kernels(T, beta_mode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_equal_the_reference_over_several_panels(dtype, monkeypatch):
    """The last panel has part of a block, and what a panel reads of others is summed in other blocks than its own."""
    monkeypatch.setattr(import_module("hf_memory.ops.deltaformer.kernels.launch"), "PANEL", 128)
    check_kernels(T=300, beta_mode="erase", dtype=dtype)


def check_kernels(T, beta_mode, dtype=torch.float32):
    """Results and gradients, against what the reference loses in the same precision."""
    q, k, v, beta = (x.to(dtype) for x in inputs(T=T))
    arguments = (q, k, v) if beta_mode == "none" else (q, k, v, beta)
    weight = random(2, T, 2, 8, seed=5)
    results = []
    for backend, wide in (("triton", dtype), ("reference", torch.float64), ("reference", dtype)):
        given = [x.detach().to(wide).requires_grad_() for x in arguments]
        o, _ = deltaformer(*given, beta_mode=beta_mode, backend=backend)
        gradients = torch.autograd.grad((o * weight.to(wide)).sum(), given)
        results.append([o, *gradients])
    assert_close(*results)


def test_kernels_take_packed_sequences_and_refuse_what_they_do_not_know():
    exact = [x[:1] for x in inputs(T=40)]
    packed = {"cu_seqlens": torch.tensor([0, 7, 7, 40])}
    q, k, v, beta = (x.float() for x in exact)
    expected, rounded = (
        deltaformer(*x, backend="chunk", **packed)[0] for x in (exact, (q, k, v, beta))
    )
    assert_close(deltaformer(q, k, v, beta, backend="triton", **packed)[0], expected, rounded)
    for wrong in ({"window": 3}, {"mask": torch.ones(1, 40)}, {"write_kernel": "relu"}):
        with pytest.raises(
            ValueError, match="backend='triton' has no kernel for this call: it writes with softmax"
        ):
            deltaformer(q, k, v, beta, backend="triton", **wrong)
