"""Teachers in a GGUF file: nothing of what it says is lost, and what cannot be read is refused."""

import json
import random
import re
import shutil
from contextlib import suppress

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import teachers
from hf_memory.conversion import (
    describe_weights,
    find_gguf,
    load_config,
    load_teacher,
    load_tokenizer,
)
from hf_memory.conversion.teachers.gguf import turn_ends
from hf_memory.conversion.teachers.gguf_metadata import ARCHITECTURES
from hf_memory.modeling.any_model import head_dim
from teachers import FAST

END = "<end>"
START = "<start>"
TEMPLATE = """{% for m in messages %}<start>{{ m.role }} {{ m.content }}<end>{% endfor %}"""
TEXT = "The snake is 12 days old.\n\n3. A list of 1024 new   things, or 7 "
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
Q4 = gguf.GGMLQuantizationType.Q4_1


def make_tokenizer():
    """A byte-level BPE that takes each digit alone, as SmolLM's."""
    bpe = Tokenizer(models.BPE())
    cuts = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    bpe.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=[END, START], initial_alphabet=alphabet
    )
    bpe.train_from_iterator([TEXT * 3], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=START, eos_token=END)


def make_teacher(tokenizer):
    torch.manual_seed(0)
    sizes = {
        **SIZES,
        "vocab_size": len(tokenizer),
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    return LlamaForCausalLM(
        LlamaConfig(**sizes, rms_norm_eps=2.0**-20, tie_word_embeddings=True)
    ).eval()


def as_llama_cpp(name, x):
    """llama.cpp rotates neighbours where transformers rotates halves, so its queries and keys are permuted."""
    heads = 4 if ".q_proj." in name else 2 if ".k_proj." in name else 0
    return x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape) if heads else x


def write(file, tokenizer, model, matrices=Q4, **others):
    """A GGUF file with matrices of one type, and other metadata or none where a value is None."""
    writer = gguf.GGUFWriter(file, "llama")
    config = model.config
    vocab = tokenizer.get_vocab()
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    metadata = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": 1e4,
        "llama.rope.dimension_count": 8,
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_Q4_1),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.get),
        "tokenizer.ggml.token_type": [3 if i < 2 else 1 for i in range(len(vocab))],
        "tokenizer.ggml.merges": [" ".join(x) for x in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 5,  # that of texts; the template's, which ends a turn, is another
        "tokenizer.chat_template": TEMPLATE,
        "general.sampling.temp": 0.25,
        "general.license": "apache-2.0",
        "general.license.link": "LICENSE",  # in a repository that the file does not name
        "general.languages": ["en", "fr"],
        **others,
    }
    for name, value in metadata.items():
        add = {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }
        if value is not None:
            add[type(value)](name, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, x in model.named_parameters():
        kind = matrices if x.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(np.ascontiguousarray(as_llama_cpp(name, x.detach().numpy())), kind)
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind)
    if "extra" in others:
        writer.add_tensor("rope_freqs.weight", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a GGUF file, and what it was made from."""
    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = make_tokenizer()
    model = make_teacher(tokenizer)
    write(folder / "tiny.Q4_1.gguf", tokenizer, model)
    return folder, tokenizer, model


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q5_0, gguf.GGMLQuantizationType.Q5_1])
def test_weights_in_five_bits_are_read(kind, folder, tmp_path):
    _, tokenizer, model = folder
    teacher = load_teacher(str(write(tmp_path / "tiny.gguf", tokenizer, model, kind)))
    weight = model.model.layers[0].mlp.up_proj.weight.detach().numpy()
    expected = torch.as_tensor(gguf.dequantize(gguf.quantize(weight, kind), kind))
    assert torch.equal(teacher.model.layers[0].mlp.up_proj.weight, expected)


def test_weights_are_those_of_the_file_and_can_be_saved(folder, tmp_path):
    folder, _, model = folder
    teacher = load_teacher(str(folder))
    for name, x in model.named_parameters():
        rounded = (
            gguf.dequantize(gguf.quantize(x.detach().numpy(), Q4), Q4)
            if x.ndim == 2
            else x.detach()
        )
        assert torch.equal(teacher.get_parameter(name), torch.as_tensor(rounded)), name
    teacher.save_pretrained(tmp_path)
    ids = torch.arange(20)[None]
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, teacher(ids).logits
    )


def test_a_tokenizer_cuts_text_as_its_merges_were_learned(folder, tmp_path):
    folder, tokenizer, _ = folder
    read = load_tokenizer(str(folder / "tiny.Q4_1.gguf"))
    read.save_pretrained(tmp_path)
    texts = [TEXT, "a  1", "x\n\n2. y", "1234", "<start>user 5<end>", "\u00bd\U0001f642 3"]
    for text in texts:
        assert read(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert (
            AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
            == tokenizer(text)["input_ids"]
        )
    assert read.get_vocab() == tokenizer.get_vocab()
    assert read.chat_template == TEMPLATE
    assert read.bos_token == START


def test_a_student_of_a_gguf_file_has_all_that_its_teacher_had(run, folder, tmp_path):
    file = folder[0] / "tiny.Q4_1.gguf"
    text = tmp_path / "text.txt"
    student = tmp_path / "student"
    text.write_text(TEXT * 200)
    code, _, err = run("convert", file, "--text", text, "--output", student, *FAST)
    assert code == 0, err
    model = AutoModelForCausalLM.from_pretrained(student)
    tokenizer = AutoTokenizer.from_pretrained(student)
    assert tokenizer.chat_template == TEMPLATE
    generation = model.generation_config
    assert generation.bos_token_id == 1
    assert generation.eos_token_id == [0, 5]
    assert generation.do_sample is True
    assert generation.temperature == 0.25
    card = (student / "README.md").read_text()
    assert "\nlanguage:\n- en\n- fr\n" in card
    assert "\nlicense: apache-2.0\n" in card
    assert "license_link" not in card
    assert "tiny.Q4_1.gguf" in card
    assert str(tmp_path) not in card
    assert "| teacher_weights | Q4_1, " in card
    tuning = ["--steps", 1, "--batch-size", 1, "--length", 32]
    code, _, err = run("fine-tune", file, "--text", text, "--output", tmp_path / "tuned", *tuning)
    assert code == 0, err
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert tuned.config.model_type == "llama"
    assert tuned.generation_config.temperature == 0.25
    code, _, err = run(
        "convert", file, "--text", text, "--output", tmp_path / "x", "--teacher-bits", 4, *FAST
    )
    assert code == 2
    assert "teacher_bits must not be given for a GGUF file" in err


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"tokenizer.ggml.pre": "default"}, "known pre-tokenizer, got 'default' in other.gguf"),
        ({"tokenizer.ggml.pre": None}, "known pre-tokenizer, got None"),
        ({"llama.rope.scaling.type": "yarn"}, "got llama.rope.scaling.type='yarn'"),
        ({"llama.block_count": 3}, "got other.gguf, which differs in blk.2.attn_k.weight"),
        ({"llama.block_count": 10**9}, "got 1,000,000,000 and 20 tensors"),
        (
            {"llama.embedding_length": 10**9},
            "other.gguf must have no metadata .*, got llama.rope.dimension_count=8",
        ),
        (
            {"llama.embedding_length": 10**9, "llama.rope.dimension_count": None},
            "other.gguf is damaged .* it must have the weights of its header, got",
        ),
        ({"extra": None}, "differs in rope_freqs.weight"),
    ],
)
def test_what_would_be_lost_is_refused(folder, tmp_path, others, message):
    write(tmp_path / "other.gguf", *folder[1:], **others)
    with pytest.raises(ValueError, match=message):
        load_config(str(tmp_path)), load_tokenizer(str(tmp_path))
    folder[1].save_pretrained(tmp_path / "beside")
    (tmp_path / "beside" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert load_tokenizer(str(tmp_path))("a  1")["input_ids"] == folder[1]("a  1")["input_ids"]


def test_a_template_that_fails_is_explained_while_a_file_is_loaded():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages + 1 }}"
    with pytest.raises(
        ValueError, match="the model's chat template raised an error for this conversation"
    ):
        turn_ends(tokenizer)


def test_a_folder_with_two_files_or_a_config_is_told_apart(folder, tmp_path, monkeypatch):
    assert find_gguf(str(tmp_path)) is None
    (tmp_path / "A.GGUF").touch()
    assert find_gguf(str(tmp_path)) == find_gguf(str(tmp_path / "A.GGUF")) == tmp_path / "A.GGUF"
    (tmp_path / "A.GGUF").rename(tmp_path / "a.gguf")
    assert find_gguf(str(tmp_path)) == find_gguf(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(
        ValueError, match=r"teacher must be one GGUF file, got .* with a.gguf, b.gguf"
    ):
        find_gguf(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert find_gguf(str(tmp_path)) is None
    monkeypatch.setattr("hf_memory.conversion.teachers.gguf.is_gguf_available", lambda: False)
    with pytest.raises(ValueError, match="pip install gguf"):
        find_gguf(str(folder[0]))


def test_a_damaged_file_is_refused_with_one_sentence(folder, tmp_path):
    whole = (folder[0] / "tiny.Q4_1.gguf").read_bytes()
    file = tmp_path / "x.gguf"
    dice = random.Random(0)
    for cut in (
        0,
        3,
        20,
        100,
        3000,
        *(dice.randrange(len(whole)) for _ in range(10)),
        len(whole) - 1,
    ):
        file.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"x.gguf is damaged or incomplete"):
            load_config(str(file)), load_tokenizer(str(file))
    for _ in range(15):  # in the header; not each change can be seen
        changed = bytearray(whole)
        changed[dice.randrange(2000)] ^= dice.randrange(1, 256)
        file.write_bytes(changed)
        with suppress(ValueError):
            load_config(str(file)), load_tokenizer(str(file)), load_teacher(str(file))


TOKENIZERS = {
    "without added tokens": lambda words: words.pop("added_tokens"),
    "added tokens that are no list": lambda words: words.update(added_tokens=None),
    "added tokens that are words": lambda words: words.update(added_tokens=["a"]),
    "without a model": lambda words: words.pop("model"),
    "a prefix that no merge has": lambda words: words["model"].update(
        continuing_subword_prefix="#" * 99
    ),
}


@pytest.mark.parametrize("damage", [*TOKENIZERS, "empty"])
def test_a_damaged_tokenizer_beside_a_file_is_named(damage, folder, tmp_path):
    shutil.copy(folder[0] / "tiny.Q4_1.gguf", tmp_path / "x.gguf")
    words = json.loads(folder[1].backend_tokenizer.to_str())
    TOKENIZERS.get(damage, dict)(words)
    (tmp_path / "tokenizer.json").write_text("" if damage == "empty" else json.dumps(words))
    with pytest.raises(
        ValueError, match=r"tokenizer.json must describe a tokenizer, .*without it, x.gguf has one"
    ):
        load_tokenizer(str(tmp_path / "x.gguf"))


@pytest.mark.parametrize("given", [None, 9999, "Q4_1"])
def test_a_file_that_does_not_name_its_type_of_weights_is_described(folder, tmp_path, given):
    file = write(tmp_path / "x.gguf", *folder[1:], **{"general.file_type": given})
    assert re.match(r"of a type that it does not name, \d", describe_weights(file, 10**5))


def about(architecture, **said):
    """Metadata of an architecture, of which dots are written as two underscores."""
    return {f"{architecture}.{name.replace('__', '.')}": value for name, value in said.items()}


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
GEMMA2_SCALES = {**teachers.GEMMA2, "query_pre_attn_scalar": 12}
GEMMA3_SCALES = {**teachers.GEMMA3, "query_pre_attn_scalar": 12}
GEMMA3_SAYS = {
    "attention__sliding_window": 4,
    "final_logit_softcapping": 3.0,
    "rope__freq_base": 1000.0,
    "rope__freq_base_swa": 10.0,
    "rope__scaling__type": "linear",
    "rope__scaling__factor": 8.0,
}
WRITTEN = {  # a teacher of tests, its architecture, other options, and what a file says of it besides its sizes
    "llama": ("llama", "llama-tied", {}, {}),
    "a longer head": ("llama", "mistral", {}, {}),
    "linear RoPE": (
        "llama",
        "llama-tied",
        {"rope_parameters": LINEAR},
        {"rope__freq_base": 500.0, "rope__scaling__factor": 4.0},  # whose type is linear by default
    ),
    "linear RoPE as once": (
        "llama",
        "llama-tied",
        {"rope_parameters": LINEAR},
        {"rope__freq_base": 500.0, "rope__scale_linear": 4.0},
    ),
    "no RoPE scaling": (
        "llama",
        "llama-tied",
        {},
        {"rope__scaling__type": "none", "rope__scaling__factor": 4.0},
    ),
    "what has no effect": (
        "llama",
        "llama-tied",
        {},
        {"expert_count": 0, "attention__causal": True, "rope__scaling__finetuned": False},
    ),
    "qwen2": ("qwen2", "qwen2", {}, {}),
    "qwen3": ("qwen3", "qwen3", {"attention_bias": False}, {}),
    "phi3": ("phi3", "phi3", {}, {}),
    "phi3 with windows": ("phi3", "phi3-window", {}, {"attention__sliding_window": 4}),
    "phi3 in part": (
        "phi3",
        "phi3-part",
        {},
        {"rope__dimension_count": 4, "rope__freq_base": 99.0},
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        GEMMA2_SCALES,
        {
            "attention__sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2 as published": (
        "gemma2",
        "gemma2",
        {
            **GEMMA2_SCALES,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        {"attention__sliding_window": 4},
    ),
    "gemma3": (
        "gemma3",
        "gemma3",
        GEMMA3_SCALES,
        {**GEMMA3_SAYS, "attention__sliding_window_pattern": 2},
    ),
    "gemma3 by layer": (
        "gemma3",
        "gemma3",
        {**GEMMA3_SCALES, "layer_types": ["full_attention", "sliding_attention"]},
        {**GEMMA3_SAYS, "attention__sliding_window_pattern": [False, True]},
    ),
}


def small(name, **options):
    """A teacher of tests with other options."""
    config, model, usual = teachers.TEACHERS[name]
    torch.manual_seed(0)
    made = model(config(**{**teachers.SIZES, **usual, **options}))
    for parameter in made.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return made.eval()


def write_teacher(file, architecture, model, **said):
    """A GGUF file of a model of any architecture, in float32."""
    config = model.config
    channels = head_dim(config)
    vocabulary = ["a", "b", "ab", *(f"t{i}" for i in range(config.vocab_size - 3))]
    usual = {
        "block_count": config.num_hidden_layers,
        "context_length": 512,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention__head_count": config.num_attention_heads,
        "attention__head_count_kv": config.num_key_value_heads,
        "attention__layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention__key_length": channels,
        "attention__value_length": channels,
        "rope__dimension_count": channels,
    }
    metadata = about(architecture, **usual | said) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [1] * len(vocabulary),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
    }
    writer = gguf.GGUFWriter(file, architecture)
    add = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for name, value in metadata.items():
        if value is not None:
            add[type(value)](name, value)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, x in model.named_parameters():
        data = x.detach().numpy()
        if architecture == "llama":
            data = as_llama_cpp(name, data)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            data = 1 + data
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("case", WRITTEN)
@torch.no_grad()
def test_a_teacher_in_a_file_is_the_model_that_was_written(case, tmp_path):
    architecture, name, options, said = WRITTEN[case]
    model = small(name, **options)
    teacher = load_teacher(str(write_teacher(tmp_path / "x.gguf", architecture, model, **said)))
    tokens = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    expected = model(tokens).logits
    assert (teacher(tokens).logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_queries_by_its_width(architecture, layers, tmp_path):
    """As llama.cpp has it, which tells it by its number of layers."""
    model = small(architecture, head_dim=12, num_hidden_layers=layers, layer_types=None)
    write_teacher(tmp_path / "x.gguf", architecture, model, attention__sliding_window=4)
    config = load_config(str(tmp_path / "x.gguf"))
    assert config.query_pre_attn_scalar == 32 // 4
    assert config.layer_types == model.config.layer_types


def test_every_architecture_that_is_read_is_written_here():
    assert {architecture for architecture, *_ in WRITTEN.values()} == {*ARCHITECTURES}


UNREAD = {
    "a cap of another architecture": {"attn_logit_softcapping": 2.0},
    "a scale of scores": {"attention__scale": 0.5},
    "a scale of logits": {"logit_scale": 4.0},
    "a scale of residuals": {"residual_scale": 0.5},
    "a scale of embeddings": {"embedding_scale": 12.0},
    "experts": {"expert_count": 4},
    "heads by layer": {"attention__head_count_kv": [2, 2]},
    "values of another width": {"attention__value_length": 4},
    "a key that nobody knows": {"surprise": 1},
    "yarn": {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
    "a factor of attention": {"rope__scaling__attn_factor": 1.2},
    "no causal mask": {"attention__causal": False},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("case", UNREAD)
def test_metadata_that_changes_predictions_and_is_not_read_is_refused(case, architecture, tmp_path):
    name = next(name for kind, name, *_ in WRITTEN.values() if kind == architecture)
    own = next(said for kind, _, _, said in WRITTEN.values() if kind == architecture)
    said = {**own, **UNREAD[case]}
    if case.startswith("a cap") and architecture == "gemma2":
        said["a_cap"] = said.pop("attn_logit_softcapping")
    options = {"attention_bias": False} if architecture == "qwen3" else {}
    model = small(name, **options)
    write_teacher(tmp_path / "x.gguf", architecture, model, **said)
    expected = (
        rf"x.gguf must have no metadata that changes predictions .*, got {architecture}\.\S+="
    )
    with pytest.raises(ValueError, match=expected):
        load_config(str(tmp_path / "x.gguf"))


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("llama", {"rope__dimension_count": 4}),
        ("qwen2", {"attention__sliding_window": 4}),
        ("llama", {"attention__sliding_window": 4}),
        ("phi3", {"rope__scaling__factor": 2.0}),
        ("gemma3", {"attention__sliding_window": 4, "attention__sliding_window_pattern": [True]}),
        ("gemma3", {}),
    ],
)
def test_what_a_config_of_an_architecture_cannot_have_is_refused(architecture, said, tmp_path):
    name = next(name for kind, name, *_ in WRITTEN.values() if kind == architecture)
    write_teacher(tmp_path / "x.gguf", architecture, small(name), **said)
    key = [*said, "attention__sliding_window"][-1 if not said else len(said) - 1]
    with pytest.raises(ValueError, match=key.replace("__", r"\.")):
        load_config(str(tmp_path / "x.gguf"))


def test_a_window_that_no_text_exceeds_is_none(tmp_path):
    file = tmp_path / "x.gguf"
    write_teacher(file, "llama", small("llama-tied"), attention__sliding_window=512)
    assert getattr(load_config(str(file)), "sliding_window", None) is None


def test_a_file_of_another_architecture_is_told_which_are_read(tmp_path):
    write_teacher(tmp_path / "x.gguf", "olmo2", small("olmo2", attention_bias=False))
    expected = r"must be one of llama, qwen2, qwen3, phi3, gemma2, gemma3, got x.gguf of 'olmo2'"
    with pytest.raises(ValueError, match=expected):
        load_config(str(tmp_path / "x.gguf"))
