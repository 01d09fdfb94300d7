"""A model is loaded with all of its weights or not at all, and a config alone takes no time and no memory."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from cases import CASE, SIZES, make_model, word_tokenizer
from hf_memory import export_model
from hf_memory.cli.writing import LoadingFlags
from hf_memory.conversion import load_teacher
from hf_memory.modeling.loading import load_config, load_model, load_tokenizer

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "tied": lambda: make_model(CASE["linear-sliding"]),
    "own": lambda: make_model(CASE["deltanet"]),
}


@pytest.fixture(params=MODELS)
def folder(request, tmp_path):
    MODELS[request.param]().save_pretrained(tmp_path)
    return tmp_path


def change(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_whole_models_are_loaded(folder):
    assert load_model(folder).config.to_dict() == load_config(folder).to_dict() | {
        "dtype": "float32"
    }


@pytest.mark.parametrize("same", [False, True])
def test_a_config_ties_a_head_only_if_its_values_are_the_embeddings(folder, same):
    file = folder / "model.safetensors"
    weights = load_file(file)
    embeddings = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embeddings.clone() if same else 2 * embeddings}, file)
    change(folder, tie_word_embeddings=True)
    assert load_config(folder).tie_word_embeddings is same
    model = load_model(folder)
    assert model.config.tie_word_embeddings is same
    assert torch.equal(model.lm_head.weight, (1 if same else 2) * embeddings)


def test_a_head_in_a_file_without_a_header_is_found_when_it_is_loaded(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    change(folder, tie_word_embeddings=True)
    assert not load_model(folder).config.tie_word_embeddings


@pytest.mark.parametrize(
    "fields", [{"num_labels": 10**9}, {"id2label": dict.fromkeys(map(str, range(20_000)), "x")}]
)
def test_a_config_with_very_many_labels_is_refused_at_once(folder, fields):
    change(folder, **fields)
    with pytest.raises(ValueError, match="must have at most 10,000 labels, got"):
        load_config(folder)


@pytest.mark.parametrize(
    "use",
    [
        load_model,
        load_teacher,
        LoadingFlags("cpu").load,
        lambda x: export_model(x, f"{x}-exported"),
    ],
)
def test_missing_weights_are_refused_by_name(folder, use):
    file = folder / "model.safetensors"
    kept = {name: x for name, x in load_file(file).items() if ".layers.1." not in name}
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"must have all weights .* no values for model\.layers\.1\.\S+ .*more"
    ):
        use(str(folder))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"vocab_size": 65},
            r"must have all weights .* got another shape for .*model\.embed_tokens",
        ),
        ({"vocab_size": 10**9}, r"must have the weights of its config, got .* in files of"),
        (
            {"num_hidden_layers": 10**9, "layer_types": None},
            "must have a tensor for each layer of its config",
        ),
        (
            {"text_config": {"n_layer": 10**9}},
            "must have a tensor for each layer .* got 1,000,000,000",
        ),
        ({"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}}, "nope"),
        ({"dtype": "nope"}, "must describe a model that can be built, got AttributeError"),
        (
            {
                "model_type": "nope",
                "auto_map": {"AutoConfig": "x.X", "AutoModelForCausalLM": "x.Y"},
            },
            "custom code",
        ),
    ],
)
def test_a_config_unlike_its_weights_is_refused_before_they_are_made(folder, fields, message):
    change(folder, **fields)
    with pytest.raises(Exception, match=message):
        load_model(folder)


def test_a_wrong_type_in_a_config_is_a_value_error(folder):
    change(folder, hidden_size="wide")
    with pytest.raises(ValueError, match=r"hidden_size'? (expected|must be) int, got .*wide"):
        load_config(folder)


def test_a_tokenizer_whose_reader_panics_is_named(folder):
    tokenizer = word_tokenizer(["w0", "w1"], unk_token="w0")
    words = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    words["model"] = {"type": "BPE", "continuing_subword_prefix": "#" * 99, **merges}
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ValueError, match=r"the files of .* must describe a tokenizer, got Panic"):
        load_tokenizer(folder)


def test_an_interruption_while_a_tokenizer_is_read_stays_one(folder, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    word_tokenizer(["w0"], unk_token="w0").save_pretrained(folder)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(folder)


def test_an_index_of_weights_names_files_of_its_folder(folder):
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=r"weight_map must name files in the folder .* got \.\./model\.safetensors"
    ):
        load_model(folder)
