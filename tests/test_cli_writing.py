"""generate, chat and info as a user types them, and how the command line begins and ends."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from functools import partial
from importlib.metadata import version

import pytest
import torch
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from cases import CASE, make_model
from hf_memory.cli import chat, turns
from hf_memory.cli.info import CONTEXTS
from hf_memory.cli.terminal import console
from hf_memory.evaluation import cache_bytes, kv_cache_bytes

WORDS = [
    "<end>",
    "<start>",
    "user",
    "assistant",
    "system",
    "snake",
    "new",
    ":smile:",
    "[/b]",
    "\x1b[31m",
    "a\rb",
]
TEMPLATE = """{% for m in messages %}<start> {{ m.role }} {{ m.content }} <end> {% endfor %}
{%- if add_generation_prompt %}<start> assistant {% endif %}"""


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """A folder with a small random student, whose words are not all harmless."""
    folder = tmp_path_factory.mktemp("student")
    make_model(CASE["linear-full"], vocab_size=len(WORDS), eos_token_id=0).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="new"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    words.add_special_tokens(["<end>", "<start>"])
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    return folder


def test_help_is_there_without_torch():
    code = """
import sys, hf_memory_cli
try:
    hf_memory_cli.app()
finally:
    assert not {"torch", "transformers", "hf_memory"} & set(sys.modules)
"""
    for flag, expected in (
        ("--help", "chat "),
        ("-h", "chat "),
        ("--version", version("hf-memory")),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, flag], capture_output=True, text=True, check=True
        )
        assert expected in done.stdout


@pytest.mark.parametrize(
    ("command", "extra"), [("evaluate", "reasoning-gym"), ("datastore", "faiss-cpu")]
)
def test_help_names_extras(command, extra, run):
    assert extra in run(command, "--help")[1]


def test_text_is_shown_as_it_is_and_commands_no_terminal(run, student):
    prompt = "snake :smile: [/b] \x1b[31m a\rb"
    code, out, err = run("generate", student, "--prompt", prompt, "--max-new-tokens", 4, "--greedy")
    assert code == 0
    assert out.startswith("snake :smile: [/b] \\x1b[31m a\\x0db")
    assert out.count("\n") == 1
    assert err.startswith("4 tokens, ")
    assert err.endswith(" tokens/s\n")


def test_nothing_that_is_shown_is_markup(capsys, wide_console):
    rows = Table(":smile:")
    rows.add_row("folder/[/b]")
    console.print(rows)
    console.print("[/b] :new:")
    shown = capsys.readouterr().out
    assert all(word in shown for word in (":smile:", "folder/[/b]", "[/b] :new:"))


def test_flags_of_sampling_are_those_of_generate(run, student):
    def output_of(*flags):
        code, out, _ = run("generate", student, "--prompt", "snake", "--max-new-tokens", 8, *flags)
        assert code == 0
        return out

    greedy = output_of("--greedy")
    assert (
        output_of("--top-k", 1)
        == output_of("--top-p", 0.01)
        == output_of("--temperature", 1e-4)
        == greedy
    )
    assert output_of() == greedy  # the model's own generation_config
    drawn = {output_of("--temperature", 9, "--seed", seed) for seed in (0, 0, 1, 2)}
    assert len(drawn) == 3
    assert output_of("--dtype", "bfloat16", "--device", "cpu", "--greedy").startswith("snake")


@pytest.fixture
def type_lines(monkeypatch):
    """What the user types, as bytes."""
    return lambda *lines: monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n".join(lines)), "utf-8")
    )


TURNS = """import runpy, sys
if sys.argv[2] == "plain": sys.modules["readline"] = None
for text in runpy.run_path(sys.argv[1])["turns"](): print(repr(text), flush=True)"""


@pytest.mark.parametrize("editor", ["readline", "plain"])
def test_a_paste_is_one_turn_and_an_empty_line_is_none(editor):
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", TURNS, turns.__file__, editor]
    child = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    shown = b""
    for typed in (b"snake\r", b"\r", b"\x1b[200~new\r\r/exit\r  old\x1b[201~ end\r", b"\x04", None):
        with contextlib.suppress(OSError):  # the end of a terminal
            while not shown.endswith((b"> ", b"> \x1b[?2004h")) and (part := os.read(ours, 4096)):
                shown += part
        if typed:
            os.write(ours, typed)
            shown += b"|"
    os.close(ours)
    assert child.wait() == 0
    said = [line for line in shown.decode().splitlines() if line.endswith("'")]
    assert [line[line.index("'") :] for line in said] == ["'snake'", r"'new\n\n/exit\n  old end'"]
    assert shown.rindex(b"\x1b[?2004l") > shown.rindex(b"\x1b[?2004h")


def tokens_of(out):
    assert "Saved " in out
    return int(out.split(": ")[-1].split()[0])


def test_a_chat_goes_on_from_its_memory(run, student, type_lines, tmp_path):
    memory = tmp_path / "memory"
    talk = ("chat", student, "--memory", memory, "--max-new-tokens", 3, "--temperature", 1)
    type_lines(b"snake", b"", b"/help", b" ", b"new snake", b"/exit", b"snake")
    code, out, err = run(*talk)
    assert code == 0, err
    assert "/reset  empty the memory" in out
    assert err.count(" tokens/s") <= 2
    read = tokens_of(out)
    assert 2 * 6 + 3 <= read <= 2 * 6 + 3 + 2 * 3
    type_lines(b"")
    assert tokens_of(run(*talk)[1]) == read
    type_lines(b"snake\xff", b"new")  # a byte that is not UTF-8
    assert tokens_of(run(*talk)[1]) >= read + 2 * 6
    type_lines(b"snake", b"/reset", b"new", b"")
    assert tokens_of(run(*talk)[1]) <= 6 + 3
    type_lines(b"/reset")
    assert "There was no message" in run(*talk)[1]
    memory.write_bytes(b"")
    assert "damaged" in run(*talk)[2]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_talk_that_is_ended_is_kept(
    run, student, type_lines, tmp_path, monkeypatch, request, number, code
):
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    shown = []
    request.addfinalizer(partial(signal.signal, number, signal.getsignal(number)))
    signal.signal(number, usual)  # a shell starts what runs in its background with SIGINT ignored

    class Ended(chat.Writer):
        def put(self, value):
            shown.append(value)
            if len(shown) == 2:
                signal.raise_signal(number)

    monkeypatch.setattr(chat, "Writer", Ended)
    type_lines(b"snake", b"new", b"new")
    flags = (
        "--memory",
        tmp_path / "memory",
        "--system",
        "new",
        "--max-new-tokens",
        3,
        "--temperature",
        1,
        "--top-k",
        5,
    )
    found, out, err = run("chat", student, *flags, "--seed", 3)
    assert found == code
    assert "Traceback" not in err
    assert tokens_of(out) >= 4 + 6 + 2
    assert signal.getsignal(number) == usual


def test_a_system_prompt_is_read_first(run, student, type_lines, tmp_path):
    flags = ("--memory", tmp_path / "memory", "--system", "new", "--max-new-tokens", 1, "--greedy")
    type_lines(b"snake")
    code, out, _ = run("chat", student, *flags)
    assert code == 0
    assert tokens_of(out) >= 4 + 6
    assert (
        "system must be None with a memory of an earlier conversation"
        in run("chat", student, *flags)[2]
    )


def test_info_of_a_transformer_compares_it_with_itself(run, teacher):
    code, out, _ = run("info", teacher)
    assert code == 0
    assert out.count("100.00%") == len(CONTEXTS) + 1


def test_info_compares_packed_numbers_with_attention_in_16_bits(run, student):
    config = AutoConfig.from_pretrained(student, cache_bits={"attention": 4})
    code, out, _ = run("info", student, "--cache-bits", "attention=4")
    assert config.dtype == torch.float32
    config.dtype = torch.bfloat16
    share = cache_bytes(config, 8192) / kv_cache_bytes(config, 8192)
    assert f"{share:.2%}" in out
    assert code == 0


def test_bits_of_a_cache_are_chosen_where_a_model_is_loaded(run, student, type_lines, tmp_path):
    _, exact, _ = run("info", student)
    code, out, _ = run("info", student, "--cache-bits", "attention=4")
    assert code == 0
    assert out != exact
    memory = tmp_path / "memory"
    for message in (b"a list", b"new"):  # the second chat loads the memory of the first
        type_lines(message)
        code, _, err = run("chat", student, "--memory", memory, "--cache-bits", "4")
        assert "Error" not in err
        assert code == 0
    type_lines(b"a")
    code, _, err = run("chat", student, "--memory", memory)  # which goes on in its own bits
    assert "Error" not in err
    assert code == 0


def damaged(student, folder):
    whole = (student / "model.safetensors").read_bytes()
    return write_model(student, folder, {"model.safetensors": whole[:-100]})


def with_files(files):
    return lambda student, folder: write_model(student, folder, files)


def without_tokenizer(student, folder):
    write_model(student, folder, {})
    for file in folder.glob("tokenizer*"):
        file.unlink()
    return folder


def without_heads(student, folder):
    config = json.loads((student / "config.json").read_text())
    return write_model(
        student, folder, {"config.json": json.dumps(config | {"num_attention_heads": 0}).encode()}
    )


def transformer_without_heads(student, folder):
    config = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 0}
    return write_model(student, folder, {"config.json": json.dumps(config).encode()})


def write_model(student, folder, files):
    for file in student.iterdir():
        (folder / file.name).write_bytes(files.get(file.name, file.read_bytes()))
    return folder


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["info", "./[/b]"],
            "model must be a folder that exists or the name of a repository on the Hub, got ./[/b]",
        ),
        (
            ["info", "studnt"],
            "model must be a folder that exists or the name of a repository on the Hub, got studnt",
        ),
        (["info", "./\x1b[31m"], r"got ./\x1b[31m"),
        (["info", without_heads], "num_attention_heads must be"),
        (
            ["info", transformer_without_heads],
            "must describe a model that can be built, got ZeroDivisionError",
        ),
        (["generate", damaged, "--prompt", "new"], "a file of weights is damaged or incomplete"),
        (["generate", "STUDENT", "--prompt", ""], "prompt must have at least one token, got ''"),
        (
            ["generate", "STUDENT", "--prompt", "new", "--greedy", "--top-k", 3],
            "greedy must not be given with top_k",
        ),
        (["generate", "STUDENT", "--prompt", "new", "--temperature", -1], "temperature"),
        (
            ["generate", "STUDENT", "--prompt", "new", "--top-p", 2],
            "top_p must be from 0 to 1, got 2.0",
        ),
        (
            ["generate", "STUDENT", "--prompt", "new", "--top-p", "nan"],
            "top_p must be from 0 to 1, got nan",
        ),
        (
            ["generate", "STUDENT", "--prompt", "new", "--datastore-weight", 0.5],
            "without datastore, got 0.5",
        ),
        (
            ["generate", without_tokenizer, "--prompt", "new"],
            "must have the files of a tokenizer, such as tokenizer.json: copy them",
        ),
        (
            ["generate", with_files({"tokenizer.json": b"{}"}), "--prompt", "new"],
            "must describe a tokenizer, got KeyError",
        ),
        (
            ["info", with_files({"config.json": b"[" * 100_000})],
            "must describe a model that can be built, got Recursion",
        ),
        (
            ["generate", "STUDENT", "--prompt", "new", "--dtype", "int8"],
            "dtype must be one of auto, float32,",
        ),
        (
            ["generate", "STUDENT", "--prompt", "new", "--device", "abacus"],
            "device must be available to torch",
        ),
        (
            ["generate", "STUDENT", "--prompt", "new", "--device", "meta"],
            "device must be available to torch, got meta",
        ),
        (
            ["chat", "STUDENT", "--memory", "/no/such/folder/memory"],
            "memory must be a file in a folder that exists",
        ),
        (
            ["chat", "TEACHER", "--memory", "OUT"],
            "memory must not be given for a model of another package, got a Llama",
        ),
        (["chat", "STUDENT", "--memory", "."], "memory must be a file in a folder that exists"),
        (["fine-tune", "STUDENT", "--text", "", "--output", "OUT"], "text must"),
        (
            ["fine-tune", "STUDENT", "--text", "a.txt", "--output", "OUT", "--training", "bf16"],
            "training must look like name=value, got 'bf16'",
        ),
        (["export", "STUDENT", "--output", "OUT", "--to", "onnx"], "to must be one of 'auto', 'qw"),
        (
            ["export", "STUDENT", "--output", "."],
            "output must be a folder that does not exist yet, got '.'",
        ),
        (
            ["info", "STUDENT", "--cache-bits", "3"],
            "cache_bits must be one of (8, 4) or None, or a dict of bits by kind, got 3",
        ),
        (
            ["info", "STUDENT", "--cache-bits", "few"],
            "cache_bits must be int | dict[str, int | dict[str, int]], got 'few'",
        ),
        (
            ["info", "STUDENT", "--cache-bits", "window=8"],
            "a dict with some of ['recurrent_states', 'attention'], got",
        ),
        (
            ["info", "TEACHER", "--cache-bits", "8"],
            "must not be given for a model of another package",
        ),
    ],
)
def test_errors_are_sentences(run, student, teacher, tmp_path, arguments, sentence):
    names = {"STUDENT": student, "TEACHER": teacher, "OUT": tmp_path / "out"}
    arguments = [x(student, tmp_path) if callable(x) else names.get(x, x) for x in arguments]
    code, _, err = run(*arguments)
    assert err.count("\n") == 1
    assert code == 2
    assert err.startswith("Error: ")
    assert sentence in err
