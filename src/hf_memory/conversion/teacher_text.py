"""Training text that the teacher generates. It is kept as a file, and a call that was stopped continues it."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_memory.conversion.run_identity import describe
from hf_memory.evaluation.writing import continued
from hf_memory.files.chat_template import apply_template
from hf_memory.files.documents import read_prompts
from hf_memory.files.folders import written
from hf_memory.files.text import start_of
from hf_memory.progress import Progress, silent

SOURCE = re.compile(r"teacher:(\d+)([kKmM]?)(?::(.+))?")
UNITS = {"": 1, "k": 1000, "m": 1_000_000}
BATCH = 16
LENGTH = 512
QUESTION = 64  # texts in a batch, tokens of a text, tokens of a generated question
Row = dict[str, Any]
PLACE = "\N{BLACK SQUARE}"


def parse_source(source: str) -> tuple[int, list[str]] | None:
    """Tokens and prompts (one per line) of `teacher:500k` or `teacher:500k:prompts.txt`; None for other sources.

    Raises:
        OSError: if the file of prompts does not exist.
        ValueError: if it has no prompts, or the source begins with `teacher:` but is not of this form.
    """
    match = SOURCE.fullmatch(source)
    if match is None:
        if source.startswith("teacher:"):
            raise ValueError(
                f"text must be teacher:500k or teacher:1M, with :FILE for prompts of a file, got {source}"
            )
        return None
    return int(match[1]) * UNITS[match[2].lower()], read_prompts(Path(match[3])) if match[3] else []


def write_text(
    folder: Path,
    teacher: PreTrainedModel,
    tokenizer,
    num_tokens: int,
    *,
    prompts: Sequence[str] = (),
    seed: int = 0,
    report: Callable[[Progress], None] = silent,
) -> Path:
    """Let a teacher generate text, sampled as its generation config says.

    With a chat template, the teacher answers the prompts one after the other; without prompts it answers questions that
    it generates itself. Without a template it continues the prompts, or the beginning-of-text token. Batch n depends
    only on the seed and n, so a call that was stopped gives the same text when it is repeated.

    Args:
        folder: folder of the file, whose name depends on teacher, prompts and seed.
        teacher: the teacher.
        tokenizer: the teacher's tokenizer.
        num_tokens: smallest number of tokens to generate.
        prompts: prompts to answer, or to continue without a template.
        seed: seed for the sampling.
        report: is called with the progress.

    Returns:
        The file, with a text as JSON in each line, or with a template the messages of a conversation.

    Raises:
        OSError: if the file cannot be written; what was written before stays.
    """
    words = describe(
        {"teacher": teacher, "num_tokens": num_tokens, "prompts": list(prompts), "seed": seed}
    )
    name = hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:12]
    file = folder / f"teacher-{name}.jsonl"
    partial = folder / f"teacher-{name}.partial"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    rows = _whole_batches(partial)
    tokens = sum(_size(tokenizer, row) for row in rows)
    with written(partial.name, folder, "its texts so far are kept"), partial.open("a") as lines:
        for number in count(len(rows) // BATCH):
            report(Progress("the teacher writes", min(tokens, num_tokens), num_tokens, 1))
            if tokens >= num_tokens:
                break
            places = range(number * BATCH, (number + 1) * BATCH)
            some = [prompts[i % len(prompts)] for i in places] if prompts else []
            batch = list(_rows(teacher, tokenizer, some, seed + number))
            lines.writelines(json.dumps(row) + "\n" for row in batch)
            lines.flush()
            os.fsync(lines.fileno())
            tokens += sum(_size(tokenizer, row) for row in batch)
    partial.replace(file)
    return file


def _whole_batches(partial: Path) -> list[Row]:
    """The texts of the whole batches that a stopped call has written; the file loses only what follows them."""
    if not partial.exists():
        return []
    lines = partial.read_bytes().splitlines(keepends=True)
    complete = [line for line in lines if line.endswith(b"\n")]
    whole = complete[: len(complete) // BATCH * BATCH]
    os.truncate(partial, sum(map(len, whole)))
    return [json.loads(line) for line in whole]


def _size(tokenizer, row: Row) -> int:
    """The tokens of a text, or of messages without what a template adds."""
    texts = [row["text"]] if "text" in row else [x["content"] for x in row["messages"]]
    return sum(len(tokenizer(text)["input_ids"]) for text in texts)


@torch.no_grad()
def _rows(teacher: PreTrainedModel, tokenizer, prompts: Sequence[str], seed: int) -> Iterator[Row]:
    """Generate a batch of texts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if tokenizer.chat_template is None:
            starts = list(prompts) or [tokenizer.bos_token or tokenizer.eos_token] * BATCH
            ends = _continued(teacher, tokenizer, starts, LENGTH)
            yield from (
                {"text": start + end if prompts else end} for start, end in zip(starts, ends)
            )
        else:
            before, _, _ = apply_template(
                tokenizer, [{"role": "user", "content": PLACE}]
            ).partition(PLACE)
            questions = list(prompts) or _continued(teacher, tokenizer, [before] * BATCH, QUESTION)
            talks = [[{"role": "user", "content": question.strip()}] for question in questions]
            starts = [apply_template(tokenizer, x, add_generation_prompt=True) for x in talks]
            answers = _continued(teacher, tokenizer, starts, LENGTH)
            for talk, answer in zip(talks, answers):
                yield {"messages": [*talk, {"role": "assistant", "content": answer}]}


def _continued(teacher: PreTrainedModel, tokenizer, starts: list[str], length: int) -> list[str]:
    read = tokenizer(starts, add_special_tokens=False)["input_ids"]
    start = start_of(tokenizer)
    # templates may write it themselves
    begun = [ids if ids[: len(start)] == start else start + ids for ids in read]
    return continued(teacher, tokenizer, begun, do_sample=True, max_new_tokens=length)
