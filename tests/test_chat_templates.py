"""Whatever a chat template does, it ends: with its text, or with one sentence."""

import json
import os
import signal
import threading
import time

import pytest

from hf_memory.conversion import read_tokens
from hf_memory.files import chat_template, tokenised
from hf_memory.files.chat_template import apply_template, tokens_and_targets
from hf_memory.files.fingerprints import tokens_fingerprint
from teachers import make_tokenizer

TALK = [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}]
PLAIN = "{% for m in messages %}w4 {{ m.content }} w2 {% endfor %}"
ENDED = {  # templates that run in C, and cannot be ended from Python
    "{{ (range(99999) | list * 300) | sort }}": "it took more than 0.5 seconds",
    "{{ ('a ' * 10**8) | wordwrap(1) }}": "it took more than 0.5 seconds",
}
FAIL = {
    "{{ 'x' * 10**10 }}": "it took more than 2 GiB of memory",
    "{{ 'x' * 2000000 }}": "it wrote 2,000,000 characters",
    "{{ raise_exception('a' * 5000) }}": "a{1000}$",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "maximum recursion depth exceeded",
    "{{ range(10**12) }}": "Range too big",
    "{% for": "unexpected",
}


def tokenizer_with(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", ENDED)
def test_a_template_that_does_not_end_is_ended_and_others_go_on(template, tmp_path, monkeypatch):
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": TALK}))
    with monkeypatch.context() as patch:
        patch.setattr(chat_template, "SECONDS", 0.5)
        begin = time.monotonic()
        with pytest.raises(
            ValueError, match=f"raised an error for this conversation: {ENDED[template]}"
        ):
            read_tokens([tmp_path / "talk.jsonl"], tokenizer_with(template))
        assert time.monotonic() - begin < 20
    assert apply_template(tokenizer_with(PLAIN), TALK) == "w4 w7 w2 w4 w8 w2 "


@pytest.mark.parametrize("template", FAIL)
def test_a_template_that_fails_is_explained_and_its_process_goes_on(template):
    running = chat_template._process.running
    with pytest.raises(
        ValueError, match=f"raised an error for this conversation: {FAIL[template]}"
    ):
        apply_template(tokenizer_with(template), TALK)
    assert apply_template(tokenizer_with(PLAIN), TALK)
    assert running in (None, chat_template._process.running)


def test_what_is_rendered_is_what_transformers_renders():
    template = "{{ bos_token }}{{ messages | tojson }}{{ messages[0].name }}{% if add_generation_prompt %}w5{% endif %}"
    tokenizer = tokenizer_with(template)
    talk = [
        {"role": "user", "content": "\u00e9\U0001f642", "name": None},
        {"role": "tool", "content": 1.5, "more": [1]},
    ]
    for prompt in (False, True):
        expected = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=prompt)
        assert apply_template(tokenizer, talk, add_generation_prompt=prompt) == expected


def test_marked_turns_are_those_of_transformers():
    tokenizer = tokenizer_with(
        "{% for m in messages %}w4 {% generation %}{{ m.content }} w2{% endgeneration %} {% endfor %}"
    )
    how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    expected = tokenizer.apply_chat_template(TALK, **how)
    ids, targets = tokens_and_targets(tokenizer, TALK)
    assert ids == expected["input_ids"]
    assert targets.int().tolist() == expected["assistant_masks"]


def test_of_several_templates_the_default_is_applied(tmp_path):
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": TALK}))
    tokenizer = tokenizer_with({"default": PLAIN, "tool_use": "{{ raise_exception('no tools') }}"})
    for assistant_only in (False, True):
        read = read_tokens(
            [tmp_path / "talk.jsonl"],
            tokenizer,
            assistant_only=assistant_only,
            cache=tmp_path / "cache",
        )
        assert read.tokens.tolist() == [4, 7, 2, 4, 8, 2]
    with pytest.raises(ValueError, match="multiple chat templates with no default"):
        apply_template(tokenizer_with({"rag": PLAIN, "tool_use": PLAIN}), TALK)


def test_several_threads_render_as_one_does(tmp_path, monkeypatch):
    rows = "".join(
        json.dumps({"messages": [{"role": "user", "content": f"w{i}"}]}) + "\n"
        for i in range(3, 40)
    )
    (tmp_path / "a.jsonl").write_text(rows)
    texts = []
    started = []
    start = chat_template._Process._start
    monkeypatch.setattr(
        chat_template._Process, "_start", lambda self: started.append(self) or start(self)
    )
    for number in (1, 2):
        monkeypatch.setattr(tokenised, "THREADS", number)
        monkeypatch.setattr("os.cpu_count", lambda: 2)
        monkeypatch.setattr(tokenised, "BATCH", 200)
        texts.append(read_tokens([tmp_path / "a.jsonl"], tokenizer_with(PLAIN)))
    assert len({tokens_fingerprint(text) for text in texts}) == 1
    assert len(started) <= 1
    assert apply_template(tokenizer_with(PLAIN), TALK)


def test_threads_get_their_own_answers():
    found = {}

    def render(word):
        talk = [{"role": "user", "content": word}]
        found[word] = {
            apply_template(tokenizer_with("{{ messages[0].content }}"), talk) for _ in range(20)
        }

    threads = [threading.Thread(target=render, args=(f"w{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {word: {word} for word in found}


def test_a_process_that_was_killed_or_interrupted_is_started_again(monkeypatch):
    tokenizer = tokenizer_with("{{ messages[0].content }}")
    assert apply_template(tokenizer, TALK) == "w7"
    os.kill(chat_template._process.running.pid, signal.SIGKILL)
    chat_template._process.running.wait()
    with pytest.raises(ValueError, match="its process ended"):
        apply_template(tokenizer, TALK)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat_template._Process, "_line", interrupted)
        with pytest.raises(KeyboardInterrupt):
            apply_template(tokenizer, TALK)
    assert chat_template._process.running is None
    assert apply_template(tokenizer, TALK[1:]) == "w8"


@pytest.fixture
def no_process():
    """No process of templates before and after a test."""
    chat_template._process._end()
    yield
    chat_template._process._end()


FAKE = """
def render_jinja_template(conversations, **options):
    {body}
"""


def fake_transformers(folder, before="", body="return ['imported'], [[]]"):
    """A module that takes the place of transformers in a process that finds it first."""
    package = folder / "transformers" / "utils"
    package.mkdir(parents=True)
    for part in (package.parent, package):
        (part / "__init__.py").touch()
    (package / "chat_template_utils.py").write_text(before + FAKE.format(body=body))


def test_the_process_imports_what_its_parent_would(no_process, tmp_path, monkeypatch):
    fake_transformers(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert apply_template(tokenizer_with(PLAIN), TALK) == "imported"


def test_a_process_that_does_not_start_is_ended(no_process, tmp_path, monkeypatch):
    fake_transformers(tmp_path, before="import time; time.sleep(99)\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        patch.setattr(chat_template, "STARTING", 0.3)
        begin = time.monotonic()
        with pytest.raises(ValueError, match=r"its process did not start within 0\.3 seconds"):
            apply_template(tokenizer_with(PLAIN), TALK)
        assert time.monotonic() - begin < 20
    assert apply_template(tokenizer_with(PLAIN), TALK) == "w4 w7 w2 w4 w8 w2 "


def test_a_process_that_is_stopped_is_ended(no_process, monkeypatch):
    tokenizer = tokenizer_with(PLAIN)
    assert apply_template(tokenizer, TALK)
    os.kill(chat_template._process.running.pid, signal.SIGSTOP)
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    with pytest.raises(ValueError, match=r"it took more than 0\.2 seconds"):
        apply_template(tokenizer, TALK)
