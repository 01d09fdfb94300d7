"""What the page shows of two answers, as HTML: coloured texts, sizes of the caches, and how they grow."""

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from answering import Answer, num_equal
from matplotlib.ticker import MaxNLocator
from transformers import PreTrainedConfig

from hf_memory.evaluation import cache_bytes, coloured_text, text_of_tokens
from hf_memory.evaluation.efficiency import in_16_bits

WIDTH = 640
HEIGHT = 250  # of the plot
LEFT, RIGHT, TOP, BOTTOM = 48, 80, 12, 44  # its margins; labels of lines are on the right
LINE = 18  # distance of labels that can be told apart
POINTS = 16  # of a line that is computed
ROOM = (
    "The student's room for few tokens is there from the first token on. What grows then are the heads that keep "
    "everything."
)

Curve = Sequence[tuple[int, float]]  # numbers of tokens, and MB after them


def answer_box(title: str, answer: Answer, tokenizer: Any, whole: Answer | None = None) -> str:
    """The size of a cache, and the answer, in the colours of `text_box`.

    Args:
        title: the name of the model.
        answer: the answer so far.
        tokenizer: the tokenizer of the model.
        whole: the teacher's answer, if this is the student's.
    """
    count = answer.measured[-1].bytes
    size = f"<b>{megabytes(count)}</b> of cache after {answer.num_read:,} tokens"
    if whole is not None:
        size += f", {count / whole.measured[-1].bytes:.0%} of the teacher's"
    if not answer.num_written:
        return box(title, size, f"<i>reading the prompt, {answer.prompt_length:,} tokens …</i>")
    # without the token that ends it
    tokens = [x for x in answer.tokens[answer.prompt_length :] if x not in answer.ends]
    words = text_of_tokens(tokenizer, tokens)
    return box(title, size, coloured_text(words, answer.shares()[answer.prompt_length :]))


def box(title: str, size: str, inner: str) -> str:
    """A model with what it has written; all of it is HTML."""
    size = f"<p class='size'>{size}</p>"
    return f"<h3>{title}</h3>{size}<div class='answer' tabindex='0'>{inner}</div>"


def text_box(answer: Answer, words: Sequence[str], heads: str) -> str:
    """The prompt, each token the darker, the more heads hold it; what was not read yet is pale.

    Args:
        answer: the answer so far.
        words: the text of each token of the prompt; empty for tokens that are not shown.
        heads: which heads these are, in HTML.
    """
    read = coloured_text(words, answer.shares())
    unread = html.escape("".join(words[answer.num_read + 1 :]))
    text = f"<div class='text' tabindex='0'>{read}<span class='unread'>{unread}</span></div>"
    return f"<p class='note'>What {heads} hold of the prompt</p>{text}"


def megabytes(count: int) -> str:
    """A number of bytes in MB."""
    return f"{count / 1e6:.{2 if count < 1e7 else 1}f} MB"


def computed_curve(config: PreTrainedConfig, last: int) -> Curve:
    """How the cache of a model grows to some number of tokens, in 16 bits or the fewer that it has."""
    config = in_16_bits(config)
    places = [1, *(last * i // POINTS for i in range(1, POINTS + 1))]
    return [(tokens, cache_bytes(config, tokens) / 1e6) for tokens in places]


def measured_curve(answer: Answer) -> Curve:
    """The same as it was measured, after the first token."""
    first, *_ = computed_curve(answer.model.config, POINTS)
    return [first, *((x.tokens, x.bytes / 1e6) for x in answer.measured)]


def plot(curves: Mapping[str, Curve], last: int, prompt_length: int | None = None) -> str:
    """Curves by name as SVG.

    Args:
        curves: those of teacher and student.
        last: the number of tokens where the plot ends.
        prompt_length: where the answer begins, if there is one.
    """
    tokens, mb = curves["teacher"][-1]
    # the teacher's line goes on as it began
    most = max(mb * last / tokens, *(mb for curve in curves.values() for _, mb in curve))

    def x(tokens: float) -> float:
        return LEFT + tokens / last * (WIDTH - LEFT - RIGHT)

    def y(mb: float) -> float:
        return HEIGHT - BOTTOM - mb / most * (HEIGHT - TOP - BOTTOM)

    parts = [*grid(x, y, last, most)]
    if prompt_length is not None:
        parts.append(end_of_prompt(x(prompt_length)))
    above, below = sorted(curves, key=lambda name: -curves[name][-1][1])
    heights = {name: y(curve[-1][1]) + 5 for name, curve in curves.items()}
    # labels of lines that are near stand one below the other
    apart = max(0.0, LINE - heights[below] + heights[above]) / 2
    heights[above] -= apart
    heights[below] += apart
    for name, curve in curves.items():
        places = [(x(tokens), y(mb)) for tokens, mb in curve]
        joined = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        a, b = places[-1]
        line = f"<polyline points='{joined}'/><circle cx='{a:.1f}' cy='{b:.1f}' r='4'/>"
        label = f"<text x='{a + 10:.1f}' y='{heights[name]:.1f}'>{name}</text>"
        parts.append(f"<g class='{name}'>{line}{label}</g>")
    label = "Megabytes of both caches by number of tokens"
    shape = f"viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{label}'"
    svg = f"<svg class='plot' {shape}>{''.join(parts)}</svg>"
    return f"<h3>Both caches, in MB</h3>{svg}<p class='note'>{ROOM}</p>"


def grid(
    x: Callable[[float], float], y: Callable[[float], float], last: int, most: float
) -> Iterator[str]:
    """Lines and numbers of the axes, to some number of tokens and of MB."""
    bottom = HEIGHT - BOTTOM
    for mb in MaxNLocator(4).tick_values(0, most):
        if mb <= most:
            yield f"<line x1='{LEFT}' x2='{x(last):.1f}' y1='{y(mb):.1f}' y2='{y(mb):.1f}'/>"
            yield f"<text x='{LEFT - 8}' y='{y(mb) + 5:.1f}' text-anchor='end'>{mb:g}</text>"
    for tokens in MaxNLocator(5, integer=True).tick_values(0, last):
        if tokens <= last:
            yield f"<text x='{x(tokens):.1f}' y='{bottom + 20}' text-anchor='middle'>{tokens:,.0f}</text>"
    yield f"<text x='{x(last / 2):.1f}' y='{bottom + 40}' text-anchor='middle'>tokens</text>"


def end_of_prompt(x: float) -> str:
    """A line where the answer begins."""
    line = f"<line class='end' x1='{x:.1f}' x2='{x:.1f}' y1='{TOP}' y2='{HEIGHT - BOTTOM}'/>"
    return f"{line}<text x='{x - 6:.1f}' y='{TOP + 12}' text-anchor='end'>prompt</text>"


def numbers(
    teacher: PreTrainedConfig, student: PreTrainedConfig, both: Sequence[Answer] = ()
) -> str:
    """A table of both caches now and for longer texts, and how far the answers are the same."""
    longest = teacher.max_position_embeddings
    rows = {}
    notes = ["In 16 bits, or the fewer that a cache has."]
    if both:
        now = [answer.measured[-1] for answer in both]
        rows[f"{now[0].tokens:,}, now"] = [x.bytes for x in now]
        here = " and ".join(megabytes(x.bytes_here) for x in now)
        dtype = str(both[0].model.dtype).removeprefix("torch.")
        notes = [f"{notes[0]} In {dtype}, as here, they hold {here} now.", comparison(*both)]
    for tokens in (longest // 4, longest):
        if not both or tokens > both[0].num_read:
            sizes = [cache_bytes(in_16_bits(config), tokens) for config in (teacher, student)]
            rows[f"{tokens:,}"] = sizes
    head = "<tr><th>tokens</th><th>teacher</th><th>student</th><th></th></tr>"
    body = "".join(_row(name, *sizes) for name, sizes in rows.items())
    below = "".join(f"<p class='note'>{note}</p>" for note in notes)
    return f"<h3>In numbers</h3><table>{head}{body}</table>{below}"


def _row(tokens: str, teacher: int, student: int) -> str:
    cells = tokens, megabytes(teacher), megabytes(student), f"{student / teacher:.0%}"
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def comparison(teacher: Answer, student: Answer) -> str:
    """A sentence on how far both answers are the same; none before the first tokens."""
    written = min(teacher.num_written, student.num_written)
    same = num_equal(teacher, student)
    if not written:
        return ""
    if same == written:
        return f"Both have written the same {same} tokens."
    return f"Both answers begin with the same {same} tokens; then they differ."
