"""Folders and repositories load where the package was never imported, and say how to install it where it is missing."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModelForCausalLM

import hf_memory
import hub_server
from cases import (
    CASES,
    FIRST_OF_FAMILY,
    every_family,
    family_of,
    make_model,
    random_tokens,
    word_tokenizer,
)
from hf_memory.address import INSTALL
from hf_memory.modeling import AUTO_CLASSES
from hf_memory.modeling.card import copy_license, license_and_language
from hf_memory.modeling.configuration import MemoryConfig
from teachers import make_teacher

SHIM = "modeling_hf_memory.py"
SAVED = ["README.md", "config.json", "generation_config.json", "model.safetensors", SHIM]
TOKENS = random_tokens(2, 9)
FRESH = """
import os, sys, torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
assert "hf_memory" not in sys.modules
torch.set_num_threads(1)
for code in {codes!r}:
    if not os.fork():
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    _, status = os.wait()
    assert status == 0
"""
BLOCKED = """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_memory":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def run(tmp_path):
    """Run codes in turn, each in a fork of a fresh interpreter that imported transformers alone.

    Its Hugging Face home is empty; codes find their arguments in sys.argv.
    """

    def run(*codes: str, arguments=(), endpoint: str = "http://127.0.0.1:1") -> str:
        environment = os.environ | {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_TOKEN": "hf_dummy",
        }
        environment.pop("HF_HUB_OFFLINE")
        command = [sys.executable, "-c", FRESH.format(codes=codes), *map(str, arguments)]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run


@every_family
def test_servers_find_the_classes_where_a_config_names_them(case):
    for cls in (getattr(family_of(case), name) for name in AUTO_CLASSES):
        assert getattr(sys.modules["transformers"], cls.__name__) is cls
    assert not family_of(case).causal_lm.is_backend_compatible()


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def save_tokenizer(folder):
    word_tokenizer([f"w{i}" for i in range(64)], unk_token="w2").save_pretrained(folder)


@every_family
def test_folder_names_every_class(case, tmp_path):
    model = make_model(case)
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == SAVED
    assert model.config.auto_map == {}
    family = family_of(case)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {
        "AutoConfig": f"modeling_hf_memory.{family.config.__name__}",
        "AutoModel": f"modeling_hf_memory.{family.model.__name__}",
        "AutoModelForCausalLM": f"modeling_hf_memory.{family.causal_lm.__name__}",
        "AutoModelForSequenceClassification": f"modeling_hf_memory.{family.sequence_classifier.__name__}",
        "AutoModelForTokenClassification": f"modeling_hf_memory.{family.token_classifier.__name__}",
    }
    loaded = {}
    exec((tmp_path / SHIM).read_text(), loaded)
    assert all(
        loaded[getattr(family, part).__name__] is getattr(family, part) for part in AUTO_CLASSES
    )


@every_family
def test_a_saved_model_has_a_card_whose_code_loads_it(case, tmp_path):
    make_model(case).save_pretrained(tmp_path / "path/or/repo/of/this/model")
    card = ModelCard.load(tmp_path / "path/or/repo/of/this/model" / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["hf_memory", case.model_type]
    assert INSTALL in card.text
    names = {}
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    with contextlib.chdir(tmp_path):
        exec(code, names)
    assert type(names["model"]) is family_of(case).causal_lm


def test_a_card_that_is_there_stays(tmp_path):
    (tmp_path / "README.md").write_text("My card.", encoding="utf-8")
    make_model(CASES[0]).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "My card."


def test_a_card_names_the_base_model_of_the_folder_that_was_loaded(tmp_path):
    model = make_model(CASES[0])
    model.save_pretrained(tmp_path / "student")
    card = ModelCard.load(tmp_path / "student" / "README.md")
    card.data.base_model = "someone/teacher"
    card.save(tmp_path / "student" / "README.md")
    AutoModelForCausalLM.from_pretrained(tmp_path / "student").save_pretrained(tmp_path / "trained")
    assert ModelCard.load(tmp_path / "trained" / "README.md").data.base_model == "someone/teacher"


LLAMA = """---
license: other
license_name: llama-community
license_link: LICENSE
language:
- en
- no
base_model: someone/llama
base_model_relation: finetune
---
"""


class TestTermsOfAModelHoldForWhatIsMadeOfIt:
    """What its card says of license and language, in a folder or in the cache of the Hub."""

    def expected(self, link):
        licenses = {"license": "other", "license_name": "llama-community", "license_link": link}
        return {**licenses, "language": ["en", "no"]}

    def test_in_a_folder_with_the_file_of_the_license(self, tmp_path):
        model = make_model(CASES[0])
        model.save_pretrained(tmp_path / "student")
        (tmp_path / "student" / "README.md").write_text(LLAMA)
        (tmp_path / "student" / "LICENSE").write_text("You may.")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
        with patch("hf_memory.modeling.card.ModelCard.load", wraps=ModelCard.load) as load:
            loaded.save_pretrained(tmp_path / "trained")
        load.assert_called_once()
        card = ModelCard.load(tmp_path / "trained" / "README.md")
        assert self.expected("LICENSE").items() <= card.data.to_dict().items()
        assert card.data.base_model_relation == "finetune"
        assert (tmp_path / "trained" / "LICENSE").read_text() == "You may."

    @pytest.mark.parametrize("link", ["../secret", "LICENSE", "secret.json", "absent"])
    def test_but_no_other_file(self, tmp_path, link):
        folder = tmp_path / "teacher"
        folder.mkdir()
        (tmp_path / "secret").write_text("a key")
        (folder / "secret.json").write_text("a key")
        (folder / "LICENSE").symlink_to(tmp_path / "secret")
        (folder / "README.md").write_text(LLAMA.replace("LICENSE", link))
        (tmp_path / "student").mkdir()
        copy_license(folder, tmp_path / "student")
        assert "license_link" not in license_and_language(folder)
        assert list((tmp_path / "student").iterdir()) == []

    def test_in_the_cache_without_a_call(self, tmp_path, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        cached = tmp_path / "models--someone--llama"
        commit = 40 * "1"
        (cached / "snapshots" / commit).mkdir(parents=True)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text(commit)
        (cached / "snapshots" / commit / "README.md").write_text(LLAMA)
        link = "https://huggingface.co/someone/llama/blob/main/LICENSE"
        assert license_and_language("someone/llama") == self.expected(link)

    @pytest.mark.parametrize("name", ["", "someone/unknown", "no/such/folder", "no name\0"])
    def test_nothing_is_said_of_an_unknown_model(self, name):
        assert license_and_language(name) == {}

    @pytest.mark.parametrize(
        "card", ["---\n- 1\n---\n", "---\nlicense: [\n---\n", "---\nlicense: 3\n---\n", "Text."]
    )
    def test_nothing_is_taken_from_a_damaged_card(self, tmp_path, card):
        (tmp_path / "README.md").write_text(card)
        assert license_and_language(tmp_path) == {}


def test_config_alone_saves_the_shim_too(tmp_path):
    config = hf_memory.DeltaNetConfig()
    config.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", SHIM]
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()


LOAD = """
from transformers.cli.serving import model_manager as server
for name in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    assert getattr(server.transformers, model.config.architectures[0]) is type(model)
    model.save_pretrained(f"{name}-again")
    model = AutoModelForCausalLM.from_pretrained(f"{name}-again", trust_remote_code=True)
    with torch.no_grad():
        torch.save(model(torch.load("tokens")).logits, f"{name}-logits")
    for auto in (AutoModel, AutoModelForSequenceClassification):
        assert type(auto.from_pretrained(name, trust_remote_code=True)).__module__ == type(model).__module__
    import hf_memory
    assert type(model) is getattr(hf_memory, type(model).__name__)
"""
GENERATE = """
from transformers import pipeline
generator = pipeline("text-generation", model="sharded", trust_remote_code=True)
print(generator("w5 w9 w7", max_new_tokens=6, do_sample=False, return_full_text=False)[0]["generated_text"])
"""
FAIL = """
for trust in (True, False):
    try:
        AutoModelForCausalLM.from_pretrained("sharded", trust_remote_code=trust)
    except (ImportError, ValueError) as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
"""


def test_every_family_loads_saves_and_generates_without_an_import_or_says_how_to_install_it(
    run, tmp_path
):
    saved = {case.name: make_model(case) for case in FIRST_OF_FAMILY}
    saved |= {"sharded": make_model(CASES[0]), "bfloat16": make_model(CASES[0]).bfloat16()}
    for name, model in saved.items():
        model.save_pretrained(
            tmp_path / name, max_shard_size="20KB" if name == "sharded" else "5GB"
        )
    save_tokenizer(tmp_path / "sharded")
    torch.save(TOKENS, tmp_path / "tokens")
    generated, missing, untrusted = run(
        GENERATE, LOAD, BLOCKED + FAIL, arguments=saved
    ).splitlines()
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    for name, model in saved.items():
        torch.testing.assert_close(
            torch.load(tmp_path / f"{name}-logits"), logits(model), rtol=0, atol=0
        )
        assert sorted(path.name for path in (tmp_path / f"{name}-again").iterdir()) == SAVED
        for file in ("config.json", SHIM):
            assert (tmp_path / f"{name}-again" / file).read_bytes() == (
                tmp_path / name / file
            ).read_bytes()
    tokens = saved["sharded"].generate(
        torch.tensor([[5, 9, 7]]), max_new_tokens=6, do_sample=False
    )[0, 3:]
    assert generated.split() == [f"w{token}" for token in tokens]
    assert missing == (
        "ImportError This model is made of classes from the package hf_memory, which could not be imported: "
        f"No module named 'hf_memory'. Install the newest version: {INSTALL}."
    )
    assert untrusted.startswith("ValueError")
    assert "trust_remote_code=True" in untrusted


@pytest.mark.parametrize("trust_remote_code", [None, True])
def test_imported_classes_win(tmp_path, trust_remote_code):
    model = make_model(CASES[0])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust_remote_code)
    assert type(loaded) is type(model)
    assert loaded.config.auto_map == {}
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)


def test_config_keeps_what_others_put_into_auto_map(tmp_path):
    auto_map = {
        "AutoConfig": "someone/repo--modeling_hf_memory.DeltaNetConfig",
        "AutoTokenizer": ["tokens.Slow", None],
    }
    config = hf_memory.DeltaNetConfig(auto_map=auto_map)
    assert config.auto_map == {"AutoTokenizer": ["tokens.Slow", None]}
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert saved["AutoTokenizer"] == ["tokens.Slow", None]
    assert saved["AutoConfig"] == "modeling_hf_memory.DeltaNetConfig"


class DerivedConfig(hf_memory.LinearTransformerConfig):
    model_type = "derived"


def test_only_classes_derived_elsewhere_are_copied(tmp_path):
    hf_memory.DeltaNetConfig.register_for_auto_class()
    hf_memory.DeltaNetForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    assert not hf_memory.DeltaNetConfig.is_remote_code()
    assert not hf_memory.DeltaNetForCausalLM.is_remote_code()
    assert not MemoryConfig.is_remote_code()
    DerivedConfig.register_for_auto_class()
    DerivedConfig().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "test_hub.DerivedConfig"
    }
    assert not (tmp_path / SHIM).exists()


PUSH = """
import hf_memory
from transformers import AutoConfig, AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained("model").push_to_hub("someone/model")
model = AutoModelForCausalLM.from_pretrained("model")
model.save_pretrained("described", push_to_hub=True, repo_id="someone/described")
AutoConfig.from_pretrained("model").save_pretrained("config", push_to_hub=True, repo_id="someone/config")
"""
PUSH_AGAIN = """
from peft import LoraConfig, get_peft_model
model = AutoModelForCausalLM.from_pretrained("someone/model", trust_remote_code=True)
model.push_to_hub("someone/model")
model.save_pretrained("again", push_to_hub=True, repo_id="someone/again")
tokens = torch.load("tokens")
with torch.no_grad():
    torch.save(model(tokens).logits, "logits")
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.push_to_hub("someone/adapter")
    torch.save(adapted(tokens).logits, "adapted")
"""
LOAD_ADAPTER = """
from peft import AutoPeftModelForCausalLM
with torch.no_grad():
    for auto in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        model = auto.from_pretrained("someone/adapter", trust_remote_code=True)
        torch.testing.assert_close(model(torch.load("tokens")).logits, torch.load("adapted"), rtol=0, atol=0)
"""


def test_push_and_load_from_the_hub(run, tmp_path):
    model = make_model(next(case for case in CASES if case.name == "gated-deltanet-sliding"))
    model.save_pretrained(tmp_path / "model")
    torch.save(TOKENS, tmp_path / "tokens")
    (tmp_path / "described").mkdir()
    (tmp_path / "described" / "README.md").write_text("The card of a student.", encoding="utf-8")
    with hub_server.serve() as hub:
        run(PUSH, PUSH_AGAIN, LOAD_ADAPTER, endpoint=hub.url)
    (_, first), (_, second) = hub.repos["someone/model"]
    assert sorted(first) == SAVED
    assert ModelCard(first["README.md"].decode()).data.pipeline_tag == "text-generation"
    assert first == second == hub.files("someone/again")
    assert {"config.json", SHIM} <= set(hub.files("someone/config"))
    assert b"The card of a student." in hub.files("someone/described")["README.md"]
    assert not any(file.endswith(".py") for file in hub.files("someone/adapter"))
    torch.testing.assert_close(torch.load(tmp_path / "logits"), logits(model), rtol=0, atol=0)
    assert hub.unanswered == []


SMALL_CACHE = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("teacher")
tokens = torch.load("tokens")
how = {"small_cache": "someone/found", "trust_remote_code": True, "max_new_tokens": 8, "do_sample": False}
made = [model.generate(tokens, custom_generate=x, **how) for x in (sys.argv[1], "someone/custom")]
made += [model.generate(tokens, custom_generate="someone/custom", **how)]
assert all(torch.equal(made[0], x) for x in made)
torch.save(made[0], "made")
written = model.generate(tokens, custom_generate=sys.argv[1], return_dict_in_generate=True, **how)
assert type(written.past_key_values.layers[0]).__name__ == "MemoryLayer"
"""


def test_a_small_cache_by_custom_generate_from_a_folder_and_the_hub(run, tmp_path):
    folder = Path(__file__).parents[1] / "examples" / "custom_generate"
    torch.save(random_tokens(1, 40), tmp_path / "tokens")
    teacher = make_teacher()
    teacher.save_pretrained(tmp_path / "teacher")
    options = {"full_attention_heads": [[], [1]], "sliding_window": 4, "num_kept_tokens": 4}
    student = hf_memory.shrink_cache(teacher, **options)
    student.config.save_pretrained(tmp_path / "found")
    files = {str(x.relative_to(folder)): x.read_bytes() for x in folder.rglob("*.*") if x.is_file()}
    with hub_server.serve() as hub:
        found = (tmp_path / "found" / "config.json").read_bytes()
        for repo, content in {"custom": files, "found": {"config.json": found}}.items():
            hub.repos[f"someone/{repo}"] = []
            hub.commit(f"someone/{repo}", content)
        run(SMALL_CACHE, arguments=[folder], endpoint=hub.url)
    tokens = torch.load(tmp_path / "tokens")
    expected = student.generate(tokens, max_new_tokens=8, do_sample=False)
    assert torch.equal(torch.load(tmp_path / "made"), expected)
    assert ModelCard.load(folder / "README.md").data.tags == ["custom_generate", "hf_memory"]
