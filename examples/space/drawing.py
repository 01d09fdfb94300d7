"""What the page shows of two answers, as HTML: coloured texts, sizes of the caches, and how they grow."""

import html
from collections.abc import Callable, Sequence
from typing import Any

from answering import Answer, num_equal
from matplotlib.ticker import MaxNLocator

from hf_memory.evaluation import cache_bytes, coloured_text, text_of_tokens
from hf_memory.evaluation.efficiency import in_16_bits

WIDTH = 640
HEIGHT = 250  # of the plot
LEFT, RIGHT, TOP, BOTTOM = 48, 96, 12, 44  # its margins; labels of lines are on the right
LINE = 18  # distance of labels that can be told apart


def panels(teacher: Answer, student: Answer, words: Sequence[str], tokenizer: Any) -> tuple[str, str]:
    """For each model the size of its cache, and the text, coloured by the share of heads that hold a token.

    Args:
        teacher: the teacher's answer so far.
        student: the student's.
        words: the text of each token of the prompt.
        tokenizer: the tokenizer of both.
    """
    ours, theirs = student.measured[-1].bytes, teacher.measured[-1].bytes
    return (
        _size(theirs, f"cache of {teacher.num_read:,} tokens") + _text(teacher, words, tokenizer),
        _size(ours, f"{ours / theirs:.0%} of the teacher's") + _text(student, words, tokenizer),
    )


def waiting(note: str) -> str:
    """What stands in the place of a panel before the first answer."""
    return _size(0, "nothing was read yet") + _box(f"<p class='note'>{html.escape(note)}</p>")


def _size(count: int, note: str) -> str:
    return f"<p class='size'><b>{megabytes(count)}</b> {note}</p>"


def _text(answer: Answer, words: Sequence[str], tokenizer: Any) -> str:
    """The prompt as far as it was read, and the answer without the token that ends it."""
    shares = answer.shares()
    read = coloured_text(words, shares)
    if not answer.num_written:
        left = answer.prompt_length - answer.num_read
        return _box(f"{read}<p class='note'>{left:,} tokens of the prompt to read …</p>")
    ended = answer.tokens[-1] in answer.ends
    tokens = answer.tokens[answer.prompt_length : len(answer.tokens) - ended]
    written = coloured_text(text_of_tokens(tokenizer, tokens), shares[answer.prompt_length :])
    return _box(f"{read}<div class='answer'>{written}</div>")


def _box(inner: str) -> str:
    # the outer element runs upwards, so that the end of a text is seen while it grows
    return f"<div class='text' tabindex='0'><div>{inner}</div></div>"


def megabytes(count: int) -> str:
    """A number of bytes in MB."""
    return f"{count / 1e6:.{2 if count < 1e7 else 1}f} MB"


def plot(teacher: Answer, student: Answer) -> str:
    """How both caches grow with the text, as SVG. The axes have room for the longest answer."""
    last = teacher.max_length
    most = max(last * x.bytes / x.tokens for x in teacher.measured[-1:])
    most = max(most, *(x.bytes for x in student.measured)) / 1e6

    def x(tokens: float) -> float:
        return LEFT + tokens / last * (WIDTH - LEFT - RIGHT)

    def y(mb: float) -> float:
        return HEIGHT - BOTTOM - mb / most * (HEIGHT - TOP - BOTTOM)

    parts = [*_grid(x, y, last, most, teacher.prompt_length)]
    ends = []
    for name, answer in (("teacher", teacher), ("student", student)):
        points = [(x(each.tokens), y(each.bytes / 1e6)) for each in answer.measured]
        places = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f"<polyline class='{name}' points='{places}'/>")
        ends.append((name, *points[-1]))
    (_, _, upper), (_, _, lower) = ends
    # labels of lines that are near stand one below the other
    apart = max(0.0, LINE - abs(upper - lower)) / 2 * (1 if upper <= lower else -1)
    for (name, right, height), shift in zip(ends, (-apart, apart)):
        parts.append(f"<circle class='{name}' cx='{right:.1f}' cy='{height:.1f}' r='4'/>")
        parts.append(
            f"<text class='{name}' x='{right + 10:.1f}' y='{height + shift + 5:.1f}'>{name}</text>"
        )
    label = "Megabytes of both caches by number of tokens"
    body = "".join(parts)
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{label}'>{body}</svg>"


def _grid(
    x: Callable[[float], float], y: Callable[[float], float], last: int, most: float, prompt: int
) -> list[str]:
    """Lines and numbers of the axes, and where the answer begins."""
    parts = []
    for tick in MaxNLocator(4).tick_values(0, most):
        if tick <= most:
            parts.append(f"<line x1='{LEFT}' x2='{x(last):.1f}' y1='{y(tick):.1f}' y2='{y(tick):.1f}'/>")
            parts.append(f"<text x='{LEFT - 8}' y='{y(tick) + 5:.1f}' class='right'>{tick:g}</text>")
    for tick in MaxNLocator(5, integer=True).tick_values(0, last):
        if tick <= last:
            parts.append(f"<text x='{x(tick):.1f}' y='{HEIGHT - 24}' class='middle'>{tick:,.0f}</text>")
    parts.append(f"<text x='{x(last / 2):.1f}' y='{HEIGHT - 4}' class='middle'>tokens read and written</text>")
    parts.append(f"<line class='begins' x1='{x(prompt):.1f}' x2='{x(prompt):.1f}' y1='{TOP}' y2='{HEIGHT - BOTTOM}'/>")
    return parts


def numbers(teacher: Answer, student: Answer) -> str:
    """A table of both caches now and for longer texts, and what else was measured."""
    longest = teacher.model.config.max_position_embeddings
    now = teacher.measured[-1], student.measured[-1]
    rows = [_row(f"{now[0].tokens:,}, now", *(x.bytes for x in now))]
    for tokens in (longest // 4, longest):
        if tokens > now[0].tokens:
            sizes = (cache_bytes(in_16_bits(x.model.config), tokens) for x in (teacher, student))
            rows.append(_row(f"{tokens:,}", *sizes))
    head = "<tr><th>tokens</th><th>teacher</th><th>student</th><th></th></tr>"
    here = " and ".join(megabytes(x.bytes_here) for x in now)
    dtype = str(teacher.model.dtype).removeprefix("torch.")
    speeds = [x.tokens_per_second for x in (teacher, student)]
    facts = [f"In 16 bits; in {dtype}, as here, the caches hold {here} now."]
    if None not in speeds:
        facts.append(f"Teacher and student write {speeds[0]:.0f} and {speeds[1]:.0f} tokens a second.")
    if teacher.num_written and student.num_written:
        facts.append(_comparison(teacher, student))
    notes = "".join(f"<p>{fact}</p>" for fact in facts)
    return f"<table>{head}{''.join(rows)}</table>{notes}"


def _row(tokens: str, teacher: int, student: int) -> str:
    cells = tokens, megabytes(teacher), megabytes(student), f"{student / teacher:.0%}"
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _comparison(teacher: Answer, student: Answer) -> str:
    same = num_equal(teacher, student)
    if same == min(teacher.num_written, student.num_written):
        return f"So far both answers are the same, {same} tokens."
    return f"Both answers begin with the same {same} tokens."
