"""README and docs: their code runs, their commands parse, their links lead somewhere."""

import inspect
import json
import pkgutil
import re
import shlex
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_memory
from cases import word_tokenizer
from hf_memory import cache, conversion, decoding, evaluation, export, modeling, ops, serving
from hf_memory.cli import load
from hf_memory.mixers.pasts.policy import POLICIES
from hf_memory.modeling.gate_registration import TABLES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    *ROOT.glob("recipes/*.md"),
    *ROOT.glob("model_cards/*/README.md"),
]
PUBLIC = (hf_memory, modeling, serving, decoding, conversion, evaluation, export, ops, cache)


def name_of(page: Path) -> str:
    """The path of a page in the repository, without its ending."""
    return page.relative_to(ROOT).with_suffix("").as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=[name_of(page) for page in PAGES])


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in a language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def commands(page: Path) -> list[list[str]]:
    """The words of each command in its shell blocks, without comments."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", "").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def ours(words: list[str]) -> list[str]:
    """What follows hf-memory, or nothing."""
    if words[0] == "hf-memory":
        return words[1:]
    return words[words.index("hf_memory") + 1 :] if "hf_memory" in words else []


@pytest.fixture
def run_page(tmp_path, monkeypatch):
    """Runs the code of a page where a student and a text are, as pages assume; returns its variables."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    layers = {
        "layer_types": ["memory", "sliding_heads"],
        "full_attention_heads": [[], [0]],
        "sliding_window": 8,
    }
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    student = hf_memory.DeltaNetConfig(**sizes, **layers, num_attention_heads=2, eos_token_id=None)
    hf_memory.DeltaNetForCausalLM(student).save_pretrained("student")
    vocabulary = ["<unk>", *(f"w{i}" for i in range(1, 64))]
    word_tokenizer(vocabulary, unk_token="<unk>").save_pretrained("student")
    words = " ".join(f"w{1 + i * i % 63}" for i in range(3000))
    Path("book.txt").write_text(words, encoding="utf-8")
    # a folder takes the place of the repository of this name
    teacher = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=None))
    for model in (teacher, word_tokenizer(vocabulary, unk_token="<unk>")):
        model.save_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    monkeypatch.setattr("hf_memory.conversion.shrinking.sections", lambda: [words])

    def run(page: Path) -> dict:
        names: dict = {"__name__": "__main__"}
        for block in blocks(page, "python"):
            exec(compile(block, str(page), "exec"), names)
        return names

    tables = *TABLES.values(), POLICIES  # to which pages add a gate and a policy
    before = [dict(table) for table in tables]
    yield run
    for table, entries in zip(tables, before):
        table.clear()
        table.update(entries)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_code_runs(page, run_page):
    run_page(page)


OWN_LOADS = re.compile(r"""pipeline\(.*model="student"|from_pretrained\("(?:student|my_model)""")


@every_page
def test_code_that_loads_our_models_imports_the_package_in_the_same_section(page):
    """A reader runs a section in a fresh process, without what tests have imported."""
    for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        code = "".join(re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL))
        if found := OWN_LOADS.search(code):
            before = code[: found.start()]
            assert re.search(r"^(import|from) hf_memory", before, re.MULTILINE), section[:80]


def test_the_start_page_names_every_extra_for_users():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {*project["optional-dependencies"]} - {"test", "docs", "notebook", "dev"}
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert {extra for extra in extras if f"| `{extra}` |" not in page} == set()


def test_a_checkpoint_that_a_page_names_is_written_by_its_command():
    page = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    (steps,) = re.findall(r"--save_steps (\d+)", page)
    (number,) = re.findall(r"checkpoint-(\d+)", page)
    assert int(number) % int(steps) == 0


def test_a_loaded_memory_goes_on_as_the_page_says(run_page):
    names = run_page(ROOT / "docs" / "memory.md")
    model = names["model"]
    whole = names["whole"]
    expected = model.generate(whole, max_new_tokens=20, do_sample=False)[0, whole.shape[1] :]
    assert torch.equal(names["output"][0, names["question"].shape[1] :], expected)
    assert not any(
        x.requires_grad for layer in names["cache"].layers for x in layer.states.values()
    )


def test_the_start_page_says_the_version():
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert f"| version | {hf_memory.__version__}," in page


@every_page
def test_commands_parse(page, monkeypatch):
    monkeypatch.chdir(ROOT)  # where the files of recipes are
    for words in filter(None, map(ours, commands(page))):
        load(words[0]).make_context(words[0], words[1:])


@every_page
def test_targets_of_make_exist(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in commands(page):
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\((?!https?:|#)([^)\s#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


def test_a_run_file_has_the_names_of_flags(tmp_path):
    (block,) = blocks(ROOT / "docs" / "convert_choices.md", "yaml")
    (tmp_path / "run.yaml").write_text(block, encoding="utf-8")
    flags = ["--config", str(tmp_path / "run.yaml"), "--output", "student"]
    assert load("convert").make_context("convert", flags).params["teacher_bits"] == 8


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name == "research"], ids=name_of
)
def test_tables_of_research_notes_fit_a_screen(page):
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert [row for row in rows if row.count("|") - 1 > 6] == []


def test_pictures_of_research_notes_have_lines_that_can_be_told_apart(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    draw_notes = import_module("draw_notes")
    pages = sorted((ROOT / "docs" / "research").glob("*.md"))
    found = [picture for page in pages for picture in draw_notes.pictures(page)]
    assert found
    for picture in found:
        assert picture.file.exists()
        assert all(len(values) == len(picture.places) for values in picture.rows.values())


def test_pictures_are_those_of_the_script():
    names: dict = {"__name__": "draw", "__file__": str(ROOT / "docs" / "draw.py")}
    exec((ROOT / "docs" / "draw.py").read_text(encoding="utf-8"), names)
    for picture, content in names["PICTURES"].items():
        drawn = (ROOT / "docs" / "pictures" / f"{picture}.svg").read_text(encoding="utf-8")
        assert drawn == content


def test_the_reference_has_every_public_name():
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    page = "\n".join(x.read_text(encoding="utf-8") for x in pages)
    families = "".join(f"`{x.__name__}`\n" for family in hf_memory.FAMILIES for x in family[:5])
    page = page.replace("<!-- families -->", families)  # as docs/generated.py does
    described = re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)
    objects = {path: pkgutil.resolve_name(path) for path in described}
    assert [
        path for path, x in objects.items() if inspect.ismodule(x) or not inspect.getdoc(x)
    ] == []
    names = {path.rsplit(".")[-1] for path in described} | set(re.findall(r"`(\w+)`", page))
    assert [
        f"{module.__name__}.{name}"
        for module in PUBLIC
        for name in module.__all__
        if name not in names
    ] == []


def test_the_reference_has_every_option_of_every_command(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    for name, page in import_module("generated").command_pages():
        shown = [option for x in load(name).params if not x.hidden for option in x.opts]
        assert [option for option in shown if option.startswith("--") and option not in page] == []


@pytest.fixture
def tiny_teacher(tmp_path):
    """A folder with a random Llama and a tokenizer of two words."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 2, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=0)).save_pretrained(
        tmp_path
    )
    words = word_tokenizer(
        ["end", "the"], eos_token="end", unk_token="the", chat_template="{{ messages }}"
    )
    words.save_pretrained(tmp_path)
    return tmp_path


def test_the_notebook_runs(tiny_teacher, monkeypatch):
    for name, value in {"TEACHER": str(tiny_teacher), "STEPS": "1", "LENGTH": "32"}.items():
        monkeypatch.setenv(name, value)
    notebook = json.loads((ROOT / "examples" / "convert_smollm2.ipynb").read_text(encoding="utf-8"))
    names: dict = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert names["cache"].get_seq_length() == 2048
