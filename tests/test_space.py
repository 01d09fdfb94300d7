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


def test_boxes_have_answers_and_texts_in_colours(space, both):
    theirs, ours = both
    tokenizer = make_tokenizer()
    words = ["<b>", "", *["word "] * (len(PROMPT) - 2)]
    for answer, whole in ((theirs, None), (ours, theirs)):
        box = space.drawing.answer_box("Model", answer, tokenizer, whole)
        assert f"<b>{space.drawing.megabytes(answer.measured[-1].bytes)}</b>" in box
        assert ("of the teacher's" in box) == (whole is not None)
        written = [x for x in answer.tokens[len(PROMPT) :] if x not in answer.ends]
        assert re.sub("<[^>]*>", "", box).endswith(tokenizer.decode(written))
        text = space.drawing.text_box(answer, words, "heads")
        assert "&lt;b&gt;" in text
        shares = [x for x, word in zip(answer.shares(), words) if word]
        assert re.findall(r"--share: ([\d.]+)", text) == [f"{x:.2f}" for x in shares]


def test_what_was_not_read_yet_is_pale(space, teacher, student, monkeypatch):
    monkeypatch.setattr(space.answering, "PIECE", 16)
    answers = next(space.answering.answer_both(teacher, student, PROMPT, NEW))
    for answer in answers:
        answer.measure()
        assert "reading the prompt" in space.drawing.answer_box("Model", answer, make_tokenizer())
        text = space.drawing.text_box(answer, ["word "] * len(PROMPT), "heads")
        assert text.count("of the heads") == 16 + 1  # the next one counts as read
        assert "word " * (len(PROMPT) - 17) in text


def test_the_plot_has_a_point_for_each_measurement_and_the_first_token(space, both):
    curves = dict(zip(("teacher", "student"), map(space.drawing.measured_curve, both)))
    drawn = space.drawing.plot(curves, len(PROMPT) + NEW, len(PROMPT))
    lines = [re.findall(r"[\d.]+,[\d.]+", x) for x in re.findall(r"points='([^']+)'", drawn)]
    assert [len(points) for points in lines] == [1 + len(answer.measured) for answer in both]
    for points in lines:
        places = [tuple(map(float, point.split(","))) for point in points]
        assert all(0 <= x <= space.drawing.WIDTH for x, _ in places)
        assert all(0 <= y <= space.drawing.HEIGHT for _, y in places)
        assert places == sorted(places, key=lambda place: place[0])


def test_labels_of_lines_are_apart(space):
    curves = {"teacher": [(1, 1.0), (9, 5.0)], "student": [(1, 4.9), (9, 5.1)]}
    drawn = space.drawing.plot(curves, 10)
    heights = {name: float(y) for y, name in re.findall(r"y='([\d.]+)'>(teacher|student)", drawn)}
    assert heights["teacher"] - heights["student"] == pytest.approx(space.drawing.LINE, abs=0.2)


def test_measured_curves_are_those_that_were_computed_before(space, both):
    for answer in both:
        computed = dict(space.drawing.computed_curve(answer.model.config, 16 * 3))
        measured = dict(space.drawing.measured_curve(answer))
        common = computed.keys() & measured.keys()
        assert len(common) > 3
        assert {x: computed[x] for x in common} == {x: measured[x] for x in common}


def test_numbers_say_what_longer_texts_take(space, both):
    configs = [x.model.config for x in both]
    theirs, ours = (cache_bytes(in_16_bits(config), 2048) for config in configs)
    cells = space.drawing.megabytes(theirs), space.drawing.megabytes(ours), f"{ours / theirs:.0%}"
    for table in (space.drawing.numbers(*configs), space.drawing.numbers(*configs, both)):
        assert "".join(f"<td>{cell}</td>" for cell in cells) in table
    assert "float32" in table
    assert space.drawing.comparison(*both) in table


def test_how_far_answers_are_the_same_is_said(space, both):
    theirs, ours = both
    assert space.drawing.comparison(theirs, theirs) == f"Both have written the same {NEW} tokens."
    other = copy.copy(ours)
    other.tokens = theirs.tokens[: len(PROMPT) + 2] + [0] * (NEW - 2)
    assert "begin with the same 2 tokens" in space.drawing.comparison(theirs, other)


def test_a_prompt_is_what_the_template_makes_of_it_and_shows_the_message_alone(space):
    tokenizer = make_tokenizer()
    assert space.answering.read_prompt(tokenizer, "  ").tokens == []
    plain = space.answering.read_prompt(tokenizer, " w5 w6\n")
    assert plain.tokens == [5, 6]
    assert "".join(plain.words) == "w5 w6"
    tokenizer.chat_template = "w7 w8 {{ messages[0]['content'] }} w9"
    prompt = space.answering.read_prompt(tokenizer, "w5 w6")
    assert prompt.tokens == [7, 8, 5, 6, 9]
    assert [bool(word) for word in prompt.words] == [False, False, True, True, False]


def test_students_share_the_weights_of_their_teacher(space, teacher, student):
    students = dict(space.models.make_students(teacher, student.config))
    # of 16, 8, 4 and 1 in three heads
    assert [*students] == [5, 3, 1, 0]
    for made in students.values():
        assert made.lm_head.weight.data_ptr() == teacher.lm_head.weight.data_ptr()


def test_loading_says_what_it_does(space, teacher, student, tmp_path, capsys):
    for part in (teacher, make_tokenizer()):
        part.save_pretrained(tmp_path / "tiny")
    student.config.save_pretrained(tmp_path / "config")
    made = space.models.load(str(tmp_path / "tiny"), str(tmp_path / "config"))
    said = capsys.readouterr().out
    assert re.findall(r"^\w+", said, re.MULTILINE) == ["Loading", "Making"]
    assert made.name == "tiny"
    assert [*made.students] == [5, 3, 1, 0]


def test_a_config_that_fits_is_taken_and_another_is_found(
    space, teacher, student, tmp_path, monkeypatch
):
    student.config.save_pretrained(tmp_path)
    monkeypatch.setattr(space.models, "SMOLLM2", tmp_path)
    taken = space.models.student_config(teacher, make_tokenizer(), None)
    assert taken.num_kept_tokens == student.config.num_kept_tokens
    monkeypatch.undo()
    options = {"num_kept_tokens": 7, "sliding_window": 4, "full_attention_heads": [[], []]}
    apply = space.models.shrink_cache

    def find(model, config=None, *, tokenizer=None):
        return apply(model, config) if config else apply(model, **options)

    monkeypatch.setattr(space.models, "shrink_cache", find)
    found = space.models.student_config(teacher, make_tokenizer(), None)
    assert found.kept_tokens == [[7, 7], [7, 7]]


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
    shown = [*answer("w5 w6 w7", 5, 16)]
    assert [len(x) for x in shown] == [6] * len(shown)
    assert "Both" in shown[-1][-1]
    assert not any(map(isinstance, shown[0], [dict] * 6))
    assert [*answer(" ", 5, 16), *answer("w5 " * 5000, 5, 16)] == []
    nothing, too_long = told
    assert "no prompt" in nothing
    assert "5,000 tokens" in too_long
