"""The page on which teacher and student answer, examples/space: what is behind it, and that it can be published."""

import copy
import re
import shutil
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import HfApi
from packaging.specifiers import SpecifierSet

from hf_memory import MemoryTransformerConfig, shrink_cache
from hf_memory.evaluation import cache_bytes, kv_cache_bytes
from hf_memory.evaluation.efficiency import in_16_bits
from teachers import make_teacher, make_tokenizer

ROOT = Path(__file__).parents[1]
SPACE = ROOT / "examples" / "space"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
KEEPS = {
    "sliding_window": 4,
    "num_sink_tokens": 1,
    "kept_block_size": 4,
    "num_kept_tokens": [[8, 4], [4, 4]],
    "full_attention_heads": [[1], []],
    "cache_bits": 8,
}
NEW = 12  # tokens of an answer
PROMPT = [5 + i * i % 50 for i in range(41)]


@pytest.fixture
def space(monkeypatch):
    """The modules of the page by name."""
    monkeypatch.syspath_prepend(SPACE)
    names = "answering", "drawing", "models", "prompts", "push"
    return SimpleNamespace(**{name: import_module(name) for name in names})


@pytest.fixture(scope="module")
def teacher():
    made = make_teacher()
    made.generation_config.repetition_penalty = 1.1
    return made


@pytest.fixture(scope="module")
def student(teacher):
    return shrink_cache(teacher, **KEEPS)


@pytest.fixture
def both(space, teacher, student, monkeypatch):
    """The answers of both models, after each of which the caches were measured."""
    monkeypatch.setattr(space.answering, "PIECE", 16)
    for answers in space.answering.answer_both(teacher, student, PROMPT, NEW):
        for answer in answers:
            answer.measure()
    return answers


def test_both_answer_as_generate_does(both):
    for answer in both:
        ids = torch.tensor([PROMPT])
        expected = answer.model.generate(ids, max_new_tokens=NEW, do_sample=False)
        assert answer.tokens == expected[0].tolist()


def test_an_answer_ends_with_the_token_that_says_so(space, teacher, student, both):
    ending = copy.deepcopy(teacher.generation_config)
    ending.eos_token_id = both[0].tokens[len(PROMPT) + 3]
    written = both[0].tokens[len(PROMPT) :]
    answer = space.answering.Answer(teacher, PROMPT, NEW)
    answer.ends = [ending.eos_token_id]
    while not answer.is_finished:
        answer.step()
    end = written.index(ending.eos_token_id) + 1
    assert answer.tokens == [*PROMPT, *written[:end]]


def test_bytes_are_those_of_caches_in_16_bits_and_those_that_are_there(both):
    theirs, ours = both
    assert [x.tokens for x in theirs.measured] == [16, 32, 41, *range(42, 41 + NEW)]
    for measured in theirs.measured:
        config = theirs.model.config
        assert measured.bytes == kv_cache_bytes(in_16_bits(config), measured.tokens)
        assert measured.bytes_here == kv_cache_bytes(config, measured.tokens)
    for measured in ours.measured:
        config = ours.model.config
        assert measured.bytes == cache_bytes(in_16_bits(config), measured.tokens)


def test_shares_are_of_heads_that_keep_some_tokens(both):
    theirs, ours = both
    assert set(theirs.shares()) == {1.0}
    shares = ours.shares()
    read = len(PROMPT) + NEW - 1
    assert len(shares) == len(theirs.shares()) == read + 1
    assert shares[0] == 1
    assert shares[-5:] == [1] * 5
    in_block = read % KEEPS["kept_block_size"]
    always = KEEPS["sliding_window"] + KEEPS["num_sink_tokens"] + in_block
    # of three heads, since the fourth keeps everything
    assert sum(shares[:-1]) * 3 == pytest.approx(3 * always + 8 + 4 + 4)


def test_how_far_answers_are_the_same(space, both):
    theirs, ours = both
    equal = space.answering.num_equal(theirs, ours)
    assert theirs.tokens[: len(PROMPT) + equal] == ours.tokens[: len(PROMPT) + equal]
    assert theirs.tokens[len(PROMPT) + equal :][:1] != ours.tokens[len(PROMPT) + equal :][:1] or (
        equal == NEW
    )
    assert space.answering.num_equal(theirs, theirs) == NEW


def test_panels_have_the_texts_and_sizes(space, both):
    words = ["<b>", *["word "] * (len(PROMPT) - 1)]
    for answer, panel in zip(both, space.drawing.panels(*both, words, make_tokenizer())):
        assert "&lt;b&gt;" in panel
        assert panel.count("word ") == len(PROMPT) - 1
        assert f"<b>{space.drawing.megabytes(answer.measured[-1].bytes)}</b>" in panel
        assert panel.count("of the heads") == len(answer.tokens) - (
            answer.tokens[-1] in answer.ends
        )
    assert "% of the teacher's" in panel


def test_a_panel_says_how_much_of_the_prompt_is_left_to_read(space, teacher, student, monkeypatch):
    monkeypatch.setattr(space.answering, "PIECE", 16)
    answers = next(space.answering.answer_both(teacher, student, PROMPT, NEW))
    for answer in answers:
        answer.measure()
    for panel in space.drawing.panels(*answers, ["word"] * len(PROMPT), make_tokenizer()):
        assert "25 tokens of the prompt to read" in panel
        assert "class='answer'" not in panel


def test_the_plot_has_a_point_for_each_measurement(space, both):
    drawn = space.drawing.plot(*both)
    lines = re.findall(r"<polyline class='(\w+)' points='([^']+)'", drawn)
    assert [name for name, _ in lines] == ["teacher", "student"]
    for (_, points), answer in zip(lines, both):
        places = [tuple(map(float, point.split(","))) for point in points.split()]
        assert len(places) == len(answer.measured)
        assert all(0 <= x <= space.drawing.WIDTH and 0 <= y <= space.drawing.HEIGHT for x, y in places)
        assert places == sorted(places, key=lambda place: place[0])


def test_numbers_say_what_longer_texts_take(space, both):
    theirs, ours = (cache_bytes(in_16_bits(x.model.config), 2048) for x in both)
    table = space.drawing.numbers(*both)
    cells = space.drawing.megabytes(theirs), space.drawing.megabytes(ours), f"{ours / theirs:.0%}"
    assert "".join(f"<td>{cell}</td>" for cell in cells) in table
    assert "float32" in table


def test_students_share_the_weights_of_their_teacher(space, teacher, student):
    students = dict(space.models.make_students(teacher, student.config))
    # of 16, 8, 4 and 1 in three heads
    assert [*students] == [5, 3, 1, 0]
    for made in students.values():
        assert made.lm_head.weight.data_ptr() == teacher.lm_head.weight.data_ptr()


def test_the_config_of_smollm2_has_what_its_recipe_says():
    recipe = yaml.safe_load((ROOT / "recipes" / "smollm2.yaml").read_text(encoding="utf-8"))
    config = MemoryTransformerConfig.from_pretrained(SPACE / "smollm2")
    assert {name: getattr(config, name) for name in recipe["option"]} == recipe["option"]


def test_the_space_installs_what_the_package_needs():
    lines = (SPACE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("--")] == PROJECT["dependencies"]


def test_the_card_of_the_space_says_what_runs():
    _, block, text = (SPACE / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    card = yaml.safe_load(block)
    (extra,) = PROJECT["optional-dependencies"]["space"]
    assert card["sdk"] == "gradio"
    assert card["sdk_version"] in SpecifierSet(extra.removeprefix("gradio"))
    assert card["python_version"] in SpecifierSet(PROJECT["requires-python"])
    assert (SPACE / card["app_file"]).exists()
    assert len(card["short_description"]) <= 60
    named = set(re.findall(r"`([\w/]+\.\w+)`", text)) - {"recipes/smollm2.yaml"}
    there = {x.relative_to(SPACE).as_posix() for x in SPACE.rglob("*.*") if "__" not in str(x)}
    assert named == there - {"README.md", "requirements.txt"}


def test_a_push_uploads_the_page_and_the_package(space, monkeypatch, tmp_path):
    calls = []
    uploaded = tmp_path / "uploaded"

    def upload(_, folder_path, **where):
        shutil.copytree(folder_path, uploaded)
        calls.append(where)

    monkeypatch.setattr(HfApi, "create_repo", lambda _, **options: calls.append(options))
    monkeypatch.setattr(HfApi, "add_space_variable", lambda _, *words: calls.append(words))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    monkeypatch.setattr("sys.argv", ["push.py", "me/two-caches"])
    space.push.main()
    where = {"repo_id": "me/two-caches", "repo_type": "space"}
    assert calls == [
        where | {"space_sdk": "gradio", "private": True, "exist_ok": True},
        ("me/two-caches", "TEACHER", space.push.TEACHER),
        where,
    ]
    files = {x.relative_to(uploaded).as_posix() for x in uploaded.rglob("*") if x.is_file()}
    assert {"app.py", "README.md", "requirements.txt", "hf_memory/__init__.py"} <= files
    assert "smollm2/config.json" in files
    assert not {"push.py", "try_in_browser.py"} & files


def test_the_page_answers_and_refuses(space, teacher, student, monkeypatch):
    gradio = pytest.importorskip("gradio")
    app = import_module("app")
    told = []
    monkeypatch.setattr(gradio, "Warning", told.append)
    students = dict(space.models.make_students(teacher, student.config))
    models = space.models.Models("tiny", teacher, students, make_tokenizer())
    made = app.page(models)
    (answer,) = [x.fn for x in made.fns.values() if x.name == "answer"]
    *_, last = answer("w5 w6 w7", 5, 16)
    assert len(last) == 4
    assert "class='answer'" in last[0]
    assert [*answer(" ", 5, 16)] == [({"__type__": "update"},) * 4]
    assert [*answer("w5 " * 5000, 5, 16)] == [({"__type__": "update"},) * 4]
    nothing, too_long = told
    assert "no prompt" in nothing
    assert "5,000 tokens" in too_long
