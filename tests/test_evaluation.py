"""Every measure must tell a good model from a bad one."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from cases import CASE, SIZES, every_family, make_model
from hf_memory.evaluation import (
    Estimate,
    agreement,
    cache_bytes,
    cache_bytes_after,
    coloured_text,
    copy_gain,
    cost,
    kv_cache_bytes,
    language,
    perplexity,
    perplexity_by_position,
    plot_conversion,
    recall_by_distance,
    text_of_tokens,
)
from hf_memory.evaluation.efficiency import in_16_bits
from hf_memory.evaluation.estimates import described, exp_of_mean
from hf_memory.evaluation.needles import RIGHT
from hf_memory.evaluation.plots import plot_task
from hf_memory.evaluation.shares import memory_shares

VOCABULARY = 64


class Predictor(nn.Module):
    """A model made of a function from tokens [B, T] to the logits [B, T, V] of the next ones."""

    device = torch.device("cpu")
    config = LlamaConfig(vocab_size=2000)

    def __init__(self, predict):
        super().__init__()
        self.predict = predict

    def forward(self, input_ids, use_cache, logits_to_keep=slice(None)):
        return SimpleNamespace(logits=self.predict(input_ids)[:, logits_to_keep])


def certain(tokens):
    return 100.0 * nn.functional.one_hot(tokens, VOCABULARY).float()


def know_nothing(input_ids):
    return torch.zeros(*input_ids.shape, VOCABULARY)


def copy_what_followed(input_ids):
    """Certain that a token is followed by what followed it last time; knows nothing of new tokens."""
    logits = know_nothing(input_ids)
    for row, tokens in enumerate(input_ids.tolist()):
        followed = {}
        for t, token in enumerate(tokens):
            if t:
                followed[tokens[t - 1]] = token
            if token in followed:
                logits[row, t, followed[token]] = 100.0
    return logits


def counting(length=400):
    return torch.arange(length) % VOCABULARY


def random_text(length=400):
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(0))


def small_llama(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **options})).eval()


def test_perplexity_of_a_model_that_knows_the_answer_is_one():
    assert perplexity(
        Predictor(lambda x: certain((x + 1) % VOCABULARY)), counting(), length=32
    ) == pytest.approx(1)


def test_perplexity_of_a_model_that_knows_nothing_is_the_vocabulary():
    assert perplexity(Predictor(know_nothing), counting(), length=32) == pytest.approx(VOCABULARY)


def test_perplexity_of_one_window_is_the_exponential_of_the_loss():
    model = small_llama()
    tokens = random_text(48)
    loss = model(tokens[None], labels=tokens[None]).loss
    assert perplexity(model, tokens, length=48) == pytest.approx(loss.exp().item(), rel=1e-5)


def test_perplexity_scores_every_token_once():
    seen = []

    def score(x):
        """The loss of a token is its number, so the mean tells which tokens were counted."""
        seen.append(x)
        logits = torch.zeros(*x.shape, 2000)
        following = x.roll(-1, dims=1)
        return logits.scatter(2, following[..., None], -following[..., None].float() / 100)

    tokens = torch.arange(1, 97)
    losses = [math.log(1999 + math.exp(-t / 100)) + t / 100 for t in range(2, 97)]
    assert perplexity(Predictor(score), tokens, length=32) == pytest.approx(
        math.exp(sum(losses) / len(losses))
    )
    assert torch.cat(seen).shape == (5, 32)


def test_a_model_that_would_return_too_many_logits_reads_again_and_gives_the_same(monkeypatch):
    student = small_llama()
    teacher = small_llama()
    tokens = random_text(96)
    kept = []
    student.register_forward_pre_hook(
        lambda _, args, given: kept.append(given.get("logits_to_keep")), with_kwargs=True
    )
    teacher.lm_head.weight.data *= 1.5

    def measured():
        return [
            perplexity(student, tokens, length=48),
            *agreement(student, teacher, tokens, length=48),
        ]

    whole = measured()
    assert kept
    assert not any(x is not None for x in kept)
    monkeypatch.setattr(language, "WHOLE", 20 * student.config.vocab_size)
    assert measured() == pytest.approx(whole, rel=1e-5)
    assert all(x is not None and len(x) <= 20 for x in kept[-2:])


def test_perplexity_leaves_the_mode_alone():
    model = small_llama().train()
    perplexity(model, random_text(64), length=32)
    assert model.training


def test_too_short_a_text_is_refused():
    with pytest.raises(ValueError, match="tokens must be at least one window of 256 tokens, got 9"):
        perplexity(Predictor(know_nothing), random_text(9))


def test_a_model_agrees_with_itself():
    kl, top1, ratio = agreement(small_llama(), small_llama(), random_text(), length=32)
    assert kl == pytest.approx(0, abs=1e-6)
    assert top1 == 1
    assert ratio == 1


def test_agreement_sees_a_difference():
    teacher = Predictor(lambda x: certain((x + 1) % VOCABULARY))
    kl, top1, ratio = agreement(Predictor(know_nothing), teacher, counting(), length=32)
    assert kl == pytest.approx(math.log(VOCABULARY))  # from certainty to none
    assert top1 < 0.1
    assert ratio == pytest.approx(VOCABULARY)  # to one of all, from one of one


def test_only_a_model_that_recalls_has_a_copy_gain():
    text = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    assert copy_gain(Predictor(know_nothing), text, passage=8, gap=8) == pytest.approx(0, abs=1e-6)
    assert copy_gain(Predictor(copy_what_followed), text, passage=8, gap=8) > 2


def test_a_copy_gain_asks_for_no_more_logits_than_it_needs():
    model = small_llama()
    asked = []
    model.register_forward_pre_hook(
        lambda _, args, given: asked.append(given["logits_to_keep"]), with_kwargs=True
    )
    copy_gain(model, random_text(300), passage=8, gap=8)
    assert {len(places) for places in asked} == {7}


def test_a_copy_gain_does_not_come_from_knowing_the_text():
    knows = Predictor(lambda x: certain((x + 1) % VOCABULARY))
    assert copy_gain(knows, counting(), passage=8, gap=8) == pytest.approx(0, abs=1e-6)


def test_a_model_that_gives_up_with_distance_recalls_none_the_less():
    def gives_up(input_ids):
        logits = copy_what_followed(input_ids)
        far = torch.arange(input_ids.shape[1]) > 16
        return torch.where(far[:, None], logits.clamp(max=1.0), logits)

    text = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    assert 0 < copy_gain(Predictor(gives_up), text, passage=8, gap=8) < 1


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 20])
@every_family
def test_cache_bytes_are_those_of_a_real_cache(case, num_tokens):
    layers = {
        "num_hidden_layers": 4,
        "layer_types": ["memory", "sliding_attention", "full_attention", "memory"],
    }
    model = make_model(case, **layers, sliding_window=4)
    assert cache_bytes(model.config, num_tokens) == cache_bytes_after(model, num_tokens)


@pytest.mark.parametrize("num_tokens", [3, 20])
def test_cache_bytes_of_teachers(num_tokens):
    llama = small_llama()
    mistral = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)).eval()
    assert cache_bytes(llama.config, num_tokens) == cache_bytes_after(llama, num_tokens)
    assert cache_bytes(mistral.config, num_tokens) == cache_bytes(llama.config, 3)
    for model in (
        llama,
        mistral,
    ):  # a window of transformers holds all that it has just read, until the next token
        assert kv_cache_bytes(model.config, num_tokens) == cache_bytes_after(model, num_tokens)


def test_a_memory_stays_the_same_size_and_a_cache_grows():
    memory = make_model(CASE["linear-elu"])
    attention = small_llama()
    assert cache_bytes_after(memory, 5) == cache_bytes_after(memory, 50)
    assert 10 * cache_bytes_after(attention, 5) == cache_bytes_after(attention, 50)


def test_models_of_transformers_with_states_of_one_size_are_measured_too():
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 16,
    }
    mamba = Mamba2ForCausalLM(Mamba2Config(**sizes, n_groups=1, chunk_size=16)).eval()
    states = 4 * 16 * 16 + (64 + 2 * 16) * mamba.config.conv_kernel
    assert cache_bytes_after(mamba, 20) == cache_bytes_after(mamba, 30) == 4 * states
    assert cost(mamba, 20, new_tokens=2)["cache bytes in 16 bits"] == 4 * states


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_cache_is_compared_in_16_bits_whatever_the_model_runs_in(case, dtype):
    model = make_model(case).to(dtype)
    found = cost(model, 20, new_tokens=2)["cache bytes in 16 bits"]
    assert found == cache_bytes(in_16_bits(model.config), 20)
    assert found == cost(make_model(case).bfloat16(), 20, new_tokens=2)["cache bytes in 16 bits"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_cache_of_attention_is_compared_in_16_bits(dtype):
    model = small_llama().to(dtype)
    expected = kv_cache_bytes(in_16_bits(model.config), 20)
    assert cost(model, 20, new_tokens=2)["cache bytes in 16 bits"] == expected


def test_costs_are_of_reading_at_once_and_writing_with_a_cache_within_the_positions_of_a_model():
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=64, n_positions=7)
    ).eval()
    lengths = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(args[0].shape[1]), with_kwargs=True
    )
    found = cost(model, 7, new_tokens=3)
    assert min(found["tokens/s read"], found["tokens/s written"]) > 0
    assert found["cache bytes in 16 bits"] == cache_bytes_after(model, 7) / 2
    assert lengths[:12] == 3 * [4, 1, 1, 1]


def test_perplexity_by_position_puts_each_token_where_it_stands():
    """A model that knows nothing of the first 33 tokens of a window, and everything after them."""

    def predict(x):
        known = torch.arange(x.shape[1])[:, None] >= 33 - 1  # what stands at t predicts t + 1
        return known * certain((x + 1) % VOCABULARY)

    tokens = counting(length=400)
    found = perplexity_by_position(Predictor(predict), tokens, length=128, windows=3)
    assert list(found) == [32, 64, 128]
    assert found[32] == pytest.approx(VOCABULARY)
    assert found[64] == pytest.approx(VOCABULARY ** (1 / 32))
    assert found[128] == pytest.approx(1)


def test_recall_by_distance_sees_how_far_a_memory_reaches():
    def forget_after(x, reach=16):
        return torch.cat(
            [
                copy_what_followed(x[:, max(0, t - reach) : t + 1])[:, -1:]
                for t in range(x.shape[1])
            ],
            1,
        )

    text = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    found = recall_by_distance(Predictor(forget_after), text, [12, 24], passage=4, trials=4)
    assert found[12] > 2
    assert found[24] == pytest.approx(0, abs=1e-6)


MEASURES = {
    "perplexity": lambda model, text, **how: perplexity(model, text, length=16, **how),
    "agreement": lambda model, text, **how: agreement(model, model, text, length=16, **how),
    "perplexity_by_position": lambda model, text, **how: perplexity_by_position(
        model, text, length=64, **how
    ),
    "copy_gain": lambda model, text, **how: copy_gain(model, text, passage=8, gap=8, **how),
    "recall_by_distance": lambda model, text, **how: recall_by_distance(
        model, text, [8, 24], passage=8, **how
    ),
}


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_keeps_to_its_budget_and_says_what_it_has_read(name):
    read = []
    told = []

    def predict(tokens):
        read.append(tokens.numel())
        return know_nothing(tokens)

    text = counting(1000)
    MEASURES[name](Predictor(predict), text, max_tokens=300, progress=told.append)
    models = 2 if name == "agreement" else 1
    assert models * sum(told) == sum(read)
    assert 100 < sum(told) <= 300
    told.clear()
    MEASURES[name](Predictor(predict), text, max_tokens=None, progress=told.append)
    assert sum(told) > 300


def test_a_part_of_the_windows_is_spread_over_the_text():
    seen = []

    def predict(tokens):
        seen.extend(tokens[:, 0].tolist())
        return torch.zeros(*tokens.shape, 1000)

    perplexity(Predictor(predict), torch.arange(1000), length=20, max_tokens=60)
    assert seen == [0, 490, 980]


class Float32Sizes(TorchDispatchMode):
    """The sizes of all float32 tensors that are made."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
            self.sizes.append(made.numel())
        return made


@pytest.mark.parametrize("name", MEASURES)
def test_no_more_than_a_slice_of_the_logits_is_in_float32(name, monkeypatch):
    text = random_text(300)
    random_logits = torch.randn(
        400, SIZES["vocab_size"], generator=torch.Generator().manual_seed(0)
    ).bfloat16()
    model = Predictor(lambda x: random_logits[x + torch.arange(x.shape[1])])
    whole = MEASURES[name](model, text)
    monkeypatch.setattr(language, "SLICE", 3 * 8 * SIZES["vocab_size"])
    monkeypatch.setattr(language, "BATCH", 160)
    with Float32Sizes() as made:
        assert MEASURES[name](model, text) == pytest.approx(whole, rel=1e-5)
    assert max(made.sizes) <= language.SLICE


def test_an_estimate_is_as_sure_as_its_samples_are_many():
    samples = torch.randn(400, generator=torch.Generator().manual_seed(0)).double()
    low, high = Estimate(samples).interval()
    assert low < samples.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * samples.std().item() / 20, rel=0.1)
    assert Estimate([3.0]).interval() is None
    assert Estimate([1.0, 1.0]).interval() == (1, 1)


def test_an_estimate_weighs_its_samples_and_is_copied_whole():
    found = Estimate([0.0, 3.0], torch.tensor([2, 1]), of=exp_of_mean)
    assert found == pytest.approx(math.e)
    again = copy.deepcopy(found)
    assert again == found
    assert again.interval() == found.interval() == pytest.approx((1, math.e**3))


def drawn(found, monkeypatch):
    """The panels and the legend of a task's picture."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    plot_task(None, found)
    ((figure,), legends) = figures, figures[0].legends
    return figure.axes, [text.get_text() for legend in legends for text in legend.get_texts()]


def test_a_picture_shows_all_models_also_at_one_length_and_with_equal_figures(monkeypatch):
    one = described(Estimate([19.0, 21.0]))
    names = ["_teacher", "$student$", "new\x1b[31m"]
    (panel,), legend = drawn(
        {"not measured": {}} | {name: {"256": {"perplexity": one}} for name in names}, monkeypatch
    )
    places = [line.get_xdata()[0] for line in panel.lines if line.get_marker() == "o"]
    low, high = panel.get_xlim()
    assert len({round(x, 3) for x in places}) == 3
    assert low < min(places) <= max(places) < high
    assert [name.lstrip("\u200b") for name in legend] == [
        "_teacher",
        r"\$student\$",
        r"new\x1b[31m",
    ]
    assert not any(name.startswith("_") for name in legend)  # matplotlib would hide it
    assert panel.get_xlabel() == "tokens"
    assert [x.get_text() for x in panel.get_xticklabels()] == ["256"]


def test_an_axis_of_zeros_does_not_show_rounding(monkeypatch):
    zeros = {at: {"KL": described(Estimate([x, -x]))} for at, x in (("256", 0.0), ("512", 1e-18))}
    (panel,), _ = drawn({"model": zeros}, monkeypatch)
    assert panel.get_ylim()[1] > 0.1


def test_bytes_are_drawn_in_megabytes(monkeypatch):
    sizes = {
        at: {"cache bytes in 16 bits": described(x)}
        for at, x in (("256", 50_000_000), ("512", 150_000_000))
    }
    (panel,), _ = drawn({"model": sizes}, monkeypatch)
    panel.figure.draw_without_rendering()
    shown = [label.get_text() for label in panel.get_yticklabels()]
    assert panel.get_title() == "cache MB in 16 bits"
    assert "100" in shown
    assert panel.yaxis.get_offset_text().get_text() == ""


def test_the_plot_is_a_picture(tmp_path):
    history = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    plot_conversion(
        tmp_path / "plot.png", {"distillation": history}, {"teacher": 3.0, "student": 4.0}
    )
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    one = described(Estimate([0.0, 1.0]))
    plot_task(
        tmp_path / "task.png",
        {"teacher": {"256": {RIGHT: one}, "512": {RIGHT: one}}, "student": {"512": {RIGHT: one}}},
    )
    assert (tmp_path / "task.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "alone"), [("gated-sinks", {}), ("attention-kept", {"num_kept_tokens": 0})]
)
def test_the_share_of_a_memory_is_what_a_model_without_it_lacks(name, alone):
    model = make_model(CASE[name])
    tokens = torch.randint(VOCABULARY, (1, 40))
    twin = make_model(CASE[name], **alone, layer_types=["sliding_heads"] * 2)
    twin.load_state_dict(model.state_dict(), strict=False)
    outputs: list = []
    for x in (model, twin):
        x.model.layers[0].mixer.register_forward_hook(
            lambda *given: outputs.append(given[-1][0][:, 20:])
        )
        x(tokens, use_cache=False)
    o, without = outputs
    shares = memory_shares(model, tokens)
    assert list(shares) == [0, 1]
    assert shares[0] == pytest.approx(((o - without).norm() / o.norm()).item(), rel=1e-5)
    assert shares[0] > 0.01
    assert not memory_shares(twin, tokens)


def test_texts_of_tokens_are_the_whole_text_with_characters_of_several_tokens_at_their_last():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    tokens = tokenizer("a é <b>")["input_ids"]
    words = [*text_of_tokens(tokenizer, tokens)]
    assert words == ["a", " ", "", "é", " ", "<", "b", ">"]
    assert [*text_of_tokens(tokenizer, tokens[:3])] == words[:3]
    coloured = coloured_text(words, [1.0, 0.25, *[0.0] * 6])
    assert coloured.count("<span") == 7
    assert '--share: 0.25" title="25% of the heads"> </span>' in coloured
    assert "&lt;</span>" in coloured


def test_recall_by_distance_wants_a_distance():
    with pytest.raises(
        ValueError, match=r"distances must be at least the 4 tokens of a passage, got \[\]"
    ):
        recall_by_distance(Predictor(copy_what_followed), torch.arange(64), [], passage=4)
