"""Settings every test shares: Triton kernels run in the interpreter, one thread a worker, no network."""

import functools
import gc
import os
import sys
from importlib import import_module
from importlib.util import find_spec

os.environ.setdefault("TRITON_INTERPRET", "1")  # `make sanitize` compiles instead
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # for tests that start processes with more threads

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_memory_cli
from cases import WORDS, word_tokenizer
from hf_memory.cli.terminal import console
from hf_memory.conversion import report

torch.set_num_threads(1)

# of a library that only the environment of the newest versions has, see .ci/compatibility.py
collect_ignore = [] if find_spec("torchao") else ["test_torchao.py"]


def pytest_collection_finish():
    """The garbage collector leaves out what was imported: accelerate calls it at each stage of training."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def freeze_what_stays():
    """And what a file leaves behind, such as all that torch.compile imports and keeps."""
    yield
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """Else libraries that look at the end for what they have lost find it."""
    gc.unfreeze()


# It halves the time of tests of kernels, with a Triton that has what it patches: 3.5 has it not.
interpreter = import_module("triton.runtime.interpreter") if find_spec("triton") else None
if hasattr(interpreter, "_LangPatchScope"):
    adapt_once = functools.cache(interpreter._patch_lang)
    restore = interpreter._LangPatchScope.restore

    def call_device_function(self, *args, **kwargs):
        """As the interpreter does, which adapts all of triton.language anew at each call, in half of its time."""
        adapt_once(self.fn)
        return self.rewrite()(*args, **kwargs)

    def restore_and_forget(self):
        """After a kernel, what it adapted is as it was, and what its device functions adapted too."""
        restore(self)
        adapt_once.cache_clear()

    interpreter.InterpretedFunction.__call__ = call_device_function
    interpreter._LangPatchScope.restore = restore_and_forget


@pytest.fixture
def wide_console(monkeypatch):
    """Tables in which no cell is cut."""
    monkeypatch.setattr(console, "width", 200)


@pytest.fixture
def run(monkeypatch, capsys, wide_console, tmp_path_factory):
    """Types a command; returns its exit code, what it printed, and its errors."""
    unscored = tmp_path_factory.mktemp("settings") / "unscored.yaml"
    unscored.write_text("items: 0")  # answers are scored where a test asks for it

    def type_command(*arguments):
        if arguments[0] == "convert" and "--items" not in arguments:
            arguments += ("--items", 0)
        if arguments[0] == "fine-tune" and "--config" not in arguments:
            arguments += ("--config", unscored)
        monkeypatch.setattr(sys, "argv", ["hf-memory", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            hf_memory_cli.app()
        return exit_.value.code or 0, *capsys.readouterr()

    return type_command


@pytest.fixture
def without_pictures(monkeypatch):
    """Cards without pictures, which take a third of the time of a small conversion."""
    for name in ("plot_conversion", "plot_heads", "plot_scores", "plot_task"):
        monkeypatch.setattr(report, name, lambda path, *others: None)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A folder with a small random Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=0)).save_pretrained(
        folder
    )
    word_tokenizer(WORDS, eos_token="end", unk_token="end").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of text in the words of `teacher`."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(" ".join(WORDS[1 + i * i % 15] for i in range(4000)))
    return file


@pytest.fixture(scope="module")
def tokenizer():
    """The tokenizer of the models in `cases.py`, whose tokens it calls w3 to w63."""
    words = "<pad>", "<s>", "<unk>", *(f"w{i}" for i in range(3, 64))
    return word_tokenizer(
        words, pad_token="<pad>", bos_token="<s>", unk_token="<unk>", padding_side="left"
    )
