"""A loaded model becomes a student with a small cache, in memory."""

import copy
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification, pipeline
from transformers.utils import logging

import hf_memory
from hf_memory.conversion import SIZES, Schedule, distill, shrink_cache
from hf_memory.conversion.students import own_window
from hf_memory.evaluation import cache_bytes, kv_cache_bytes
from teachers import (
    TEACHERS,
    every_teacher,
    make_teacher,
    make_tokenizer,
    text,
    with_long_rope,
)

# of which a text of 200 tokens is more than heads hold
SMALL = {"sliding_window": 4, "num_kept_tokens": 16, "num_sink_tokens": 1, "kept_block_size": 4}
HOW = {"keep": "heads:1/4", "kept_by_head": True, **SMALL}
TEXT = text(200)
# of the two heads of each of two layers
FOUND = {
    "full_attention_heads": [[1], []],
    "num_kept_tokens": [[4, 0], [2, 8]],
    "eviction": "change_of_output",
    "cache_bits": None,
}


def places(model):
    return {x.untyped_storage().data_ptr() for x in model.parameters()}


@pytest.fixture(scope="module")
def teacher():
    return make_teacher()


@pytest.fixture(scope="module")
def student(teacher):
    return shrink_cache(teacher, text=TEXT, **HOW)


@every_teacher
def test_a_student_has_the_weights_of_its_model_and_predicts_the_same_within_its_window(
    name, tmp_path
):
    model = make_teacher(name)
    options = {"sliding_window": own_window(model.config) or 16, "num_kept_tokens": 0}
    options |= {"full_attention_heads": [[], []], "cache_bits": None}
    student = shrink_cache(model, **options)
    # norms that are written as 1 + w, or divided, are the only others
    own = [
        n
        for n, x in student.named_parameters()
        if not {x.untyped_storage().data_ptr()} & places(model)
    ]
    assert all(n.endswith("norm.weight") for n in own)
    tokens = text(options["sliding_window"])[None]
    logits = student(tokens).logits
    torch.testing.assert_close(logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    student.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, logits)


def test_nothing_of_the_model_changes(teacher):
    model = copy.deepcopy(teacher).train()
    for x in model.model.embed_tokens.parameters():
        x.requires_grad = False
    before = copy.deepcopy(model.state_dict())
    shrunk = shrink_cache(model, text=TEXT, **HOW)
    assert model.training
    assert not shrunk.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not model.model.embed_tokens.weight.requires_grad
    assert model.lm_head.weight.requires_grad
    assert not shrunk.model.embed_tokens.weight.requires_grad
    assert not any(x.grad is not None for x in model.parameters())


def test_parts_of_a_fused_weight_learn_if_it_does():
    model = make_teacher("phi3")
    fused = model.model.layers[0].self_attn.qkv_proj
    fused.weight.requires_grad = False
    options = {**FOUND, "full_attention_heads": [[], []], "num_kept_tokens": 0}
    mixers = [layer.mixer for layer in shrink_cache(model, **options).model.layers]
    learns = [[getattr(x, f"{y}_proj").weight.requires_grad for y in "qkv"] for x in mixers]
    assert learns == [[False] * 3, [True] * 3]


def test_heads_are_chosen_within_inference_mode_too(teacher, student):
    with torch.inference_mode():
        made = shrink_cache(teacher, text=TEXT, **HOW)
    assert made.config.to_dict() == student.config.to_dict()
    made.train()(TEXT[None], labels=TEXT[None]).loss.backward()
    teacher.zero_grad()
    with torch.inference_mode():
        model = make_teacher()
    with pytest.raises(ValueError, match=r"model must be loaded outside torch\.infer"):
        shrink_cache(model, text=TEXT, **HOW)


def test_a_cache_is_smaller_than_the_models(teacher, student):
    tokens = 8192
    assert cache_bytes(student.config, tokens) < kv_cache_bytes(teacher.config, tokens) / 2


def test_what_was_found_is_saved_and_applied_again(teacher, student, tmp_path):
    student.config.save_pretrained(tmp_path)
    for config in (student.config, tmp_path, str(tmp_path)):
        again = shrink_cache(teacher, config)
        assert again.config.to_dict() == student.config.to_dict()
        assert torch.equal(again(TEXT[None]).logits, student(TEXT[None]).logits)
    fine_tuned = copy.deepcopy(teacher)
    fine_tuned.resize_token_embeddings(70, mean_resizing=False)
    assert shrink_cache(fine_tuned, tmp_path).config.vocab_size == 70
    fewer_bits = shrink_cache(teacher, tmp_path, cache_bits=4)
    assert fewer_bits.config.cache_bits == 4
    assert fewer_bits.config.num_kept_tokens == student.config.num_kept_tokens


def test_a_student_of_a_model_with_long_rope_has_the_positions_that_are_asked_for():
    model = with_long_rope(96)
    with pytest.raises(ValueError, match="max_position_embeddings must be given"):
        shrink_cache(model, **FOUND)
    options = {**FOUND, "sliding_window": 64, "num_kept_tokens": 0}
    student = shrink_cache(model, **options, max_position_embeddings=96)
    tokens = text(40)[None]
    torch.testing.assert_close(student(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    again = shrink_cache(model, student.config)
    assert torch.equal(again(tokens).logits, student(tokens).logits)


def test_a_student_is_saved_and_loaded_with_its_weights(teacher, tmp_path):
    made = shrink_cache(teacher, **{**SMALL, **FOUND})
    made.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(TEXT[None]).logits, made(TEXT[None]).logits)
    write = pipeline("text-generation", model=made, tokenizer=make_tokenizer())
    assert write("w5 w6", max_new_tokens=3)[0]["generated_text"]


def test_lora_on_a_student_does_not_change_the_model(teacher, student):
    before = teacher(TEXT[None]).logits
    adapted = get_peft_model(
        shrink_cache(teacher, student.config), LoraConfig(target_modules=["q_proj"], r=2)
    )
    for name, x in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.ones_(x)
    assert torch.equal(teacher(TEXT[None]).logits, before)
    assert not torch.equal(adapted(TEXT[None]).logits, before)


def test_distillation_of_shared_weights_is_refused(teacher, student):
    schedule = Schedule(steps=1, learning_rate=1e-3, batch_size=1, length=16)
    with pytest.raises(ValueError, match="student must be one with weights of its own, as copy"):
        distill(student, teacher, TEXT, schedule)
    before = copy.deepcopy(teacher.state_dict())
    distill(copy.deepcopy(student), teacher, TEXT, schedule)
    assert all(torch.equal(x, before[name]) for name, x in teacher.state_dict().items())


def test_a_text_in_words_is_read_by_the_models_tokenizer(teacher, tmp_path, monkeypatch):
    # the test tokenizer has special tokens that begin other words, w0 to w3
    tokens = 40 + TEXT % 20
    words = " ".join(f"w{i}" for i in tokens.tolist())
    by_tokens = shrink_cache(teacher, text=tokens, **HOW)
    by_words = shrink_cache(teacher, text=words, tokenizer=make_tokenizer(), **HOW)
    assert by_words.config == by_tokens.config
    teacher.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr("hf_memory.conversion.shrinking.sections", lambda: [words])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert shrink_cache(loaded, **HOW).config.num_kept_tokens == by_tokens.config.num_kept_tokens
    with pytest.raises(ValueError, match="tokenizer must be given, or text as tokens, for a model"):
        shrink_cache(teacher, **HOW)


NO_TEXTS = {
    "": "text must be at least 128 tokens long, got 0",
    "w5 w6": "text must be at least 128 tokens long, got 2",
    "my_text.txt": "text must be the text itself, got 'my_text.txt': is this a file",
    "a novel": "text must be the text itself, got 'a novel': is this a file",
    TEXT[:127]: "text must be at least 128 tokens long, got 127",
    Path(
        "a novel"
    ): r"text must be a string, a Text or a tensor \[T\] of whole numbers, got PosixP",
    (5, 6): r"text must be a string, a Text or a tensor \[T\] of whole numbers, got tuple",
    TEXT[None]: r"text must be a string, .* got \(1, 200\) of torch.int64",
    -TEXT: "tokens of the text must be from 0 to 63, .* got -63",
    TEXT + 9: "tokens of the text must be from 0 to 63, .* got 72",
}


@pytest.mark.parametrize("given", NO_TEXTS, ids=range(len(NO_TEXTS)))
def test_what_is_no_text_is_refused(teacher, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a novel").write_text("w5 " * 200)
    with pytest.raises(ValueError, match=NO_TEXTS[given]):
        shrink_cache(teacher, text=given, tokenizer=make_tokenizer())


def test_progress_is_reported_to_its_end(teacher):
    seen = []
    shrink_cache(teacher, text=TEXT, **HOW, report=seen.append)
    last = {now.task: now for now in seen}
    assert list(last) == ["ranking heads", "weighing what heads keep"]
    assert all(now.done == now.total for now in last.values())


def test_bars_are_those_of_transformers(teacher, capsys):
    is_shown = logging.is_progress_bar_enabled()
    try:
        logging.enable_progress_bar()
        shrink_cache(teacher, text=TEXT, **HOW)
        assert "ranking heads: 100%" in capsys.readouterr().err
        logging.disable_progress_bar()
        shrink_cache(teacher, text=TEXT, **HOW)
        assert "ranking" not in capsys.readouterr().err
    finally:
        (logging.enable_progress_bar if is_shown else logging.disable_progress_bar)()


def test_a_size_in_a_word(teacher):
    made = shrink_cache(teacher, text=TEXT, size="constant")
    assert made.config.full_attention_window == 2560
    assert made.config.cache_bits == SIZES["constant"]["cache_bits"]


def hooked(model):
    model.model.layers[0].register_forward_hook(lambda *given: None)
    return model


def replaced(model):
    model.model.layers[1].forward = model.model.layers[1].forward
    return model


def other_part(model):
    class Other(type(model.model.norm)):
        """Computes something else with the same weights."""

    model.model.norm = Other(model.config.hidden_size)
    return model


def quantized(model):
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    return model


def sharded(model):
    class Part(torch.Tensor):
        """As a DTensor of a model in parts, or a quantised tensor of torchao."""

    head = model.lm_head
    head.weight = nn.Parameter(head.weight.detach().as_subclass(Part))
    head.weight.data = head.weight.detach().as_subclass(Part)
    return model


REFUSED = {
    "a name": (lambda model: "path/to/llama", "model must be a model, got str 'path/to/llama': lo"),
    "peft": (
        lambda model: get_peft_model(model, LoraConfig(target_modules=["q_proj"])),
        "model must be one without adapters: merge them first .*, got 'PeftModel'",
    ),
    "hooks": (hooked, r"model must have no hooks .* got some in model\.layers\.0"),
    "a forward": (replaced, r"model must have no hooks .* got some in model\.layers\.1"),
    "a part": (
        other_part,
        r"model must have no hooks and no replaced parts .* got some in model\.norm",
    ),
    "quantised": (quantized, "model must not be quantised"),
    "sharded": (sharded, r"model must be one whose weights are neither .*, got \['Part'\]"),
    "compiled": (torch.compile, "model must be a LlamaForCausalLM.*, got 'OptimizedModule'"),
    "no head": (lambda model: model.model, "model must be a LlamaForCausalLM.*, got 'LlamaModel'"),
    "another head": (
        lambda model: LlamaForSequenceClassification(model.config),
        "model must be a LlamaForCausalLM.*, got 'LlamaForSequenceClassification'",
    ),
    "a module": (lambda model: nn.Linear(2, 2), "model must be a causal language model of transf"),
    "meta": (lambda model: model.to("meta"), "model must be loaded whole, .* got 'LlamaForCausal"),
    "a student": (
        lambda model: shrink_cache(model, **FOUND),
        "model must be a Transformer: a student is not converted again, got 'hf_mem",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_have_a_student_are_refused(teacher, name):
    change, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        shrink_cache(change(copy.deepcopy(teacher)), text=TEXT)


def test_a_gpt2_is_refused_with_the_types_that_can():
    from teachers import gpt2

    with pytest.raises(
        ValueError, match=r"model must be one of llama, .*, got a model of type 'gpt2'"
    ):
        shrink_cache(gpt2(), text=TEXT)


def test_arguments_that_do_not_fit(teacher, student, tmp_path):
    teacher.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="config must be the config of a student, a folder or"):
        shrink_cache(teacher, tmp_path)
    with pytest.raises(ValueError, match="report must be None or a function, got 'bar'"):
        shrink_cache(teacher, text=TEXT, report="bar")
    with pytest.raises(ValueError, match="text must be None with a config, which says what was"):
        shrink_cache(teacher, student.config, text=TEXT)
    with pytest.raises(
        ValueError, match=r"config must be the config of a student, .*'LlamaConfig'"
    ):
        shrink_cache(teacher, teacher.config)
    other = copy.deepcopy(student.config)
    other.hidden_size = 64
    with pytest.raises(
        ValueError, match="hidden_size of config must be 32, as in the model, got 64"
    ):
        shrink_cache(teacher, other)
    longer = copy.deepcopy(teacher.config)
    longer.num_hidden_layers = 3
    with pytest.raises(ValueError, match="num_hidden_layers of config must be 3, as in the model"):
        shrink_cache(type(teacher)(longer), student.config)
    with pytest.raises(ValueError, match=r"config must be a folder that .*, unlike size='small'"):
        shrink_cache(teacher, "small")
    with pytest.raises(ValueError, match=r"options must be options that add no .*sinks"):
        shrink_cache(
            teacher, full_attention_heads=[[], []], attention_sinks=True, num_kept_tokens=0
        )
    with pytest.raises(ValueError, match="num_kept_tokenz"):
        shrink_cache(teacher, text=TEXT, num_kept_tokenz=3)


def test_the_name_on_the_hub_is_said(teacher, tmp_path):
    model = copy.deepcopy(teacher)
    model.name_or_path = "someone/llama"
    made = shrink_cache(model, **FOUND)
    assert made.config.teacher_name_or_path == "someone/llama"
    made.save_pretrained(tmp_path)
    assert "base_model: someone/llama" in (tmp_path / "README.md").read_text()
    assert shrink_cache(teacher, **FOUND).config.teacher_name_or_path is None


def test_custom_generate_finds_heads_once_for_a_model(teacher):
    file = Path(__file__).parents[1] / "examples/custom_generate/custom_generate/generate.py"
    found = runpy.run_path(str(file))
    calls = []

    def counted(*given, **how):
        calls.append(given[1])
        return shrink_cache(*given, **(how or {}), **(SMALL if given[1] is None else {}))

    found["generate"].__globals__["shrink_cache"] = counted
    write = partial(found["generate"], text=TEXT, max_new_tokens=4, do_sample=False)
    model = copy.deepcopy(teacher)
    first, again = (write(model, inputs=TEXT[None, :20], max_length=None) for _ in range(2))
    assert torch.equal(first, again)
    assert calls == [None]
    write(model.double(), inputs=TEXT[None, :20])
    assert len(calls) == 2
    assert calls[1].full_attention_heads is not None


def test_it_is_found_at_the_top():
    assert hf_memory.shrink_cache is shrink_cache
    assert len(TEACHERS) > 20
