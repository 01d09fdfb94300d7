"""Tokens that leave a model early, ours or not."""

import copy
import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from cases import CASE, make_model, random_tokens
from comparing import assert_close
from hf_memory.cache import _tensors
from hf_memory.cache_argument import CACHE, cache_of
from hf_memory.decoding import EarlyExit, calibrate, exit_loss, fit_classifier
from hf_memory.decoding.parts import decoder_layers
from teachers import gpt2, llama

MODELS = {"llama": llama, "gpt2": gpt2} | {
    name: partial(make_model, CASE[name])
    for name in ("gated-deltanet-sliding", "rwkv7", "titans-mac", "deltaformer-window", "mamba")
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
NEVER = 1.0
ALWAYS = 0.0


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def unchanged(layer, read, made):
    """What a layer has read, in the place of what it made of it."""
    return (read[0], *made[1:]) if isinstance(made, tuple) else read[0]


@every_model
def test_skipped_layers_have_the_past_of_what_left(make):
    model = make().double()
    other = copy.deepcopy(model)
    decoder_layers(other)[1].register_forward_hook(unchanged)
    prompt, following = random_tokens(2, 9).split([6, 3], dim=1)
    cache = cache_of(model(prompt, use_cache=True))
    same = copy.deepcopy(cache)
    with EarlyExit(model, threshold=ALWAYS, layers=[1]) as early:
        for token in following.split(1, dim=1):
            found = model(token, **{CACHE: cache}).logits
            expected = other(token, **{CACHE: same}).logits
            assert_close(found, expected)
    assert early.mean_depth() == 1
    for mine, theirs in zip(cache.layers, same.layers):
        assert_close(_tensors(mine), _tensors(theirs))


@every_model
def test_a_threshold_out_of_reach_changes_nothing(make):
    model = make()
    prompt = random_tokens(2, 5)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    plain = model.generate(prompt, **options)
    for states in ("copied", "exact"):
        with EarlyExit(model, threshold=NEVER, states=states) as early:
            assert model.generate(prompt, **options).equal(plain)
        assert early.mean_depth() == 2
        assert len(early.depths) == 4  # the prompt is read by all layers
    assert "forward" not in vars(model)
    assert model.generate(prompt, **options).equal(plain)


def confidences(model, hidden, kind):
    """[B, T] after the first layer, as the paper has it."""
    if kind == "cosine":
        return F.cosine_similarity(hidden[0], hidden[1], dim=-1)
    best = model.lm_head(model.model.norm(hidden[1])).softmax(-1).sort(descending=True).values
    return best[..., 0] - best[..., 1]


@pytest.mark.parametrize("kind", ["softmax", "cosine"])
def test_each_token_leaves_when_its_confidence_reaches_the_threshold(kind):
    model = llama().double()
    tokens = random_tokens(2, 12)
    outputs = model(tokens, output_hidden_states=True)
    sure = confidences(model, outputs.hidden_states, kind)
    threshold = float(sure.median())
    decay = 0.3
    early = EarlyExit(
        model, confidence=kind, threshold=threshold, decay=decay, layers=[1], states="exact"
    )
    with early:
        found = model(tokens, use_cache=False).logits
        cache = cache_of(model(tokens[:, :1], use_cache=True))
        one_by_one = [
            model(token, **{CACHE: cache}).logits for token in tokens[:, 1:].split(1, dim=1)
        ]
    wanted = (0.9 * threshold + 0.1 * torch.exp(-decay * torch.arange(12))).clamp(max=1)
    leaves = sure >= wanted
    assert 0 < leaves.float().mean() < 1
    first = model.lm_head(model.model.norm(outputs.hidden_states[1]))
    assert_close(found, torch.where(leaves[..., None], first, outputs.logits))
    assert_close(torch.cat(one_by_one, 1), found[:, 1:])
    assert early.depths[0].equal(torch.where(leaves, 1, 2))


def test_a_batch_leaves_when_its_least_sure_row_is_sure():
    model = llama()
    prompt, token = random_tokens(2, 6).split([5, 1], dim=1)
    rows = torch.cat([prompt, token], dim=1)
    sure = confidences(model, model(rows, output_hidden_states=True).hidden_states, "softmax")[
        :, -1
    ]
    for threshold, depth in ((max(0.0, float(sure.min()) - 0.01), 1), (float(sure.mean()), 2)):
        with EarlyExit(model, threshold=threshold, layers=[1]) as early:
            model(token, **{CACHE: cache_of(model(prompt))})
        assert early.mean_depth() == depth


def test_a_classifier_learns_when_the_whole_model_agrees():
    model = llama()
    texts = random_tokens(8, 32)
    model.lm_head.weight.data *= (torch.arange(64) < 4)[:, None]  # so that exits agree often enough
    classifier = fit_classifier(model, texts)
    outputs = model(texts, output_hidden_states=True)
    hidden = model.model.norm(outputs.hidden_states[1])
    agrees = model.lm_head(hidden).argmax(-1) == outputs.logits.argmax(-1)
    probability = classifier(hidden).squeeze(-1).sigmoid()
    assert probability[agrees].mean() > probability[~agrees].mean() + 0.1
    with EarlyExit(model, confidence=classifier, threshold=0.5, states="exact") as early:
        model(texts, use_cache=False)
    assert early.depths[0].equal(torch.where(probability >= 0.5, 1, 2))


def test_the_loss_of_exits_is_weighted_by_their_layers():
    model = llama().double()
    tokens = random_tokens(2, 9)
    outputs = model(tokens, output_hidden_states=True)
    first = model.lm_head(model.model.norm(outputs.hidden_states[1]))
    losses = [
        F.cross_entropy(x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        for x in (first, outputs.logits)
    ]
    expected = (losses[0] + 2 * losses[1]) / 3
    assert_close(exit_loss(model, outputs, tokens), expected, expected.float())


def test_a_calibrated_threshold_keeps_its_promise():
    """On 24 texts, a share of tolerance - sqrt(log 20 / 48) of the predictions may differ from the whole model's."""
    model = llama()
    texts = random_tokens(24, 6)
    outputs = model(texts, output_hidden_states=True)
    first = model.lm_head(model.model.norm(outputs.hidden_states[1]))
    differ = (first.argmax(-1) != outputs.logits.argmax(-1))[:, 3:]
    sure = confidences(model, outputs.hidden_states, "softmax")[:, 3:]
    thresholds = sure.flatten().quantile(torch.tensor([0.1, 0.4, 0.7, 0.9])).tolist()
    shares = [float((differ & (sure >= threshold)).float().mean()) for threshold in thresholds]
    assert shares[0] > shares[1] > shares[2] > 0
    room = math.sqrt(math.log(20) / 48)
    tolerance = room + (shares[1] + shares[2]) / 2
    found = calibrate(
        model, texts, tolerance=tolerance, thresholds=thresholds, layers=[1], states="exact"
    )
    assert found == thresholds[2]
    with pytest.raises(
        ValueError, match=r"a share of 0.\d+ differing predictions in 24 texts at 0\.\d+"
    ):
        calibrate(
            model,
            texts,
            tolerance=room + shares[0] / 2,
            thresholds=thresholds[:1],
            layers=[1],
            states="exact",
        )


def test_what_makes_no_sense_is_refused():
    model = llama()
    for options, words in (
        ({"layers": [2]}, "layers must be from 1 to 1, got \\[2\\]"),
        (
            {"confidence": "entropy"},
            "confidence must be softmax, cosine or a classifier, got 'entropy'",
        ),
        *(
            ({"threshold": x}, f"threshold must be a number from 0 to 1, got {x!r}")
            for x in (5, -1, "x", float("nan"))
        ),
        ({"decay": -1.0}, "decay must be a number from 0 on, or None, got -1.0"),
        ({"states": "none"}, "states must be one of copied, exact, got 'none'"),
    ):
        with pytest.raises(ValueError, match=words):
            EarlyExit(model, **options)
    with pytest.raises(
        ValueError, match="model must run its layers one after the other, got depth='reversible'"
    ):
        EarlyExit(make_model(CASE["transformer-reversible"]))
    with pytest.raises(
        ValueError, match=r"texts must be at least 150 for tolerance 0.1, error 0.05, got 3"
    ):
        calibrate(model, random_tokens(3, 8))


@pytest.mark.parametrize("size", [1, 3])
def test_a_prompt_in_pieces_is_read_by_all_layers(size):
    model = make_model(CASE["attention-kept"])
    tokens = random_tokens(1, 7)
    how = {"max_new_tokens": 3, "do_sample": False}
    with EarlyExit(model, threshold=ALWAYS) as leaving:
        expected = model.generate(tokens, **how)
        decoded = leaving.decoded
        found = model.generate(tokens, prefill_chunk_size=size, **how)
    assert torch.equal(found, expected)
    assert leaving.decoded == decoded > 0
