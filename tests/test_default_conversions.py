"""What convert makes of each type of teacher by default, and that the student is what the plan has promised."""

import sys

import pytest
import torch

from hf_memory import conversion
from hf_memory.conversion import Recipe, Run, Schedule, plan_rows, resolve
from hf_memory.conversion.students import STUDENTS
from hf_memory.evaluation import cache_bytes, cache_share
from hf_memory.evaluation.efficiency import cache_bytes_after, in_16_bits
from teachers import every_teacher, make_teacher
from teachers import text as random_text

SHORT = Schedule.with_some(steps=1, length=32)
TOKENS = random_text(300)
GOAL = {"goal": 9.0, "options": {"sliding_window": 8, "num_kept_tokens": 0}}


@every_teacher
def test_a_default_student_is_what_its_plan_promises(name):
    teacher = make_teacher(name)
    draft = resolve(Recipe(distillation=SHORT), teacher.config, TOKENS)
    made = conversion.convert(teacher, TOKENS, draft)
    config = made.student.config
    options = made.plan.recipe.options
    assert {x: getattr(config, x) for x in options} == options
    full = [(layer, h) for layer, heads in enumerate(config.full_attention_heads) for h in heads]
    assert sorted(made.plan.choice.heads) == full
    assert len(full) == draft.num_heads_to_rank >= 1
    assert config.layer_types == draft.student.layer_types
    halved = made.student.bfloat16()
    for n in (8, 60):
        promised = cache_bytes(in_16_bits(draft.student), n)
        assert cache_bytes_after(halved, n) == promised == cache_bytes(in_16_bits(config), n)
    theirs = cache_bytes(in_16_bits(teacher.config), 2**17)
    ours = cache_bytes(in_16_bits(config), 2**17)
    assert ours / theirs == cache_share(draft.student, draft.teacher, 2**17)
    cells = [words for row, words in plan_rows(made.plan) if row == "cache of 32,768 tokens"]
    assert f"{cache_share(config, teacher.config, 2**15):.1%} of the teacher" in cells[0]


@pytest.mark.filterwarnings("ignore:sliding_window=4 has no effect")  # of the teacher
@every_teacher
@pytest.mark.parametrize("to", [to for to in STUDENTS if to != "attention"])
def test_each_family_has_a_default_for_each_teacher(name, to):
    found = resolve(Recipe(to), make_teacher(name).config, random_text(4000))
    again = resolve(found.recipe, found.teacher, random_text(4000))
    assert again.recipe == found.recipe
    assert again.student.to_dict() == found.student.to_dict()


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("recipe", [{}, GOAL, {"keep": "auto:1/2", "to": "deltanet"}])
def test_a_conversion_is_resolved_once(recipe, teacher, text, tmp_path, monkeypatch):
    calls = []

    def counted(*given):
        calls.append(given)
        return resolve(*given)

    names = [x for x in sys.modules if x.startswith("hf_memory.conversion.")]
    for module in map(sys.modules.get, names):
        if getattr(module, "resolve", None) is resolve:
            monkeypatch.setattr(module, "resolve", counted)
    short = Recipe(**recipe, transfer=SHORT, distillation=SHORT)
    asked = conversion.Request(str(teacher), [str(text)], tmp_path / "student", short, items=0)
    saved = conversion.convert_and_save(asked)
    assert saved.plan.is_final
    assert len(calls) == 1


def test_a_choice_is_said_before_anything_is_trained():
    told = []
    run = Run(chosen=lambda x: told.append(x), report=lambda now: told.append(now.task))
    made = conversion.convert(make_teacher(), TOKENS, Recipe(distillation=SHORT), run)
    assert told[0] == "ranking heads"
    assert told[told.index(made.plan) + 1] == "training"


@pytest.mark.parametrize("tokens", [1, 7, 100])
@pytest.mark.parametrize("steps", [None, 0])
def test_a_text_shorter_than_windows_should_be_is_refused(tokens, steps):
    recipe = Recipe(distillation=Schedule.with_some(steps=steps))
    with pytest.raises(ValueError, match="tokens must be at least 128, unless distillation has a"):
        conversion.convert(make_teacher(), random_text(tokens), recipe)


def test_a_student_is_not_converted_again():
    student = conversion.make_student(make_teacher())
    with pytest.raises(ValueError, match="teacher must be a Transformer: a student is not conv"):
        conversion.convert(student, TOKENS, Recipe())


def test_presets_do_not_change_what_was_resolved(monkeypatch):
    """As a later version with other defaults would."""
    first = resolve(Recipe(), make_teacher().config, TOKENS)
    other = Schedule(1, 1.0, batch_size=3, length=77)
    schedules = {"NEAR_SCHEDULE": other, "TRANSFER_SCHEDULE": other}
    for name, value in {**schedules, "WINDOW": 99, "SHARE": "none"}.items():
        monkeypatch.setattr(f"hf_memory.conversion.defaults.{name}", value)
    again = resolve(first.recipe, make_teacher().config, TOKENS)
    assert again.recipe == first.recipe
    assert again.student.to_dict() == first.student.to_dict()
    assert resolve(Recipe(), make_teacher().config, TOKENS).recipe != first.recipe


def test_a_plan_may_get_its_text_later():
    config = make_teacher().config
    early = resolve(Recipe(), config)
    assert early.with_text(TOKENS) == resolve(Recipe(), config, TOKENS)
    with pytest.raises(ValueError, match="tokens must be at least 128"):
        early.with_text(torch.zeros(9, dtype=torch.long))
