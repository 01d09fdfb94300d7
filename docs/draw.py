"""Draws the pictures of architecture.md, families.md and cache.md from the texts and rules below: python docs/draw.py

In a text for architecture.md each line is a row of boxes, with "|" between them; each box says "name: what it is". Rows
are read from top to bottom. A picture of a memory shows what it holds of each token that it has read, and its state.
"""

from html import escape
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "pictures"
CHARTS = {
    "house": """
        cli: hf-memory convert, evaluate, export, chat ...
        demo: a whole conversion, offline
        conversion: a Transformer becomes a memory model
        export: for inference engines | integrations: vLLM plugin
        evaluation: perplexity, recall, cost | serving: requests, saved memories | decoding: datastores, early exit
        modeling: configs and model classes of transformers, a file for each family
        mixers: projections, an op, output | feed_forward: MLPs and memory layers
        layers: norms, convolutions | cache: memories inside transformers' caches | files: texts, folders, locks
        ops: pure functions of tensors | progress: reports of progress | convertible: what a conversion asks of modules
    """,
    "token": """
        embedding: vector of the token
        norm: RMSNorm
        mixer: query, key, value and gates; short convolutions; rotation | cache: returns the states of this layer
        op or attention: states and token in, output and new states out | cache: stores the new states
        output: norm, gate and projection, added to the input of the layer
        feed-forward: norm and MLP, added to their input
        head: last norm, and logits of the next token
    """,
    "conversion": """
        Recipe: choices of the user | teacher: config and weights | text: tokens, a tenth of them held out
        resolve: makes a Plan, and refuses what cannot work
        start: copies weights, and initialises new parts so that the student is close to its teacher
        attention transfer: each memory layer learns to give the output of the attention it replaces
        distillation: the student learns to predict what the teacher predicts
        fine-tuning: optional; the student learns to predict the text
        student: saved with tokenizer and run.yaml
        report: teacher and student are measured on held-out text; model card and plots
    """,
}
KEYS = "ABCDBEFAGHC"  # of the tokens that the memories read: equal letters are equal keys, others are orthogonal


class Memory(NamedTuple):
    """The rule of a memory in numbers, and the parts of its state.

    The rule: surprise <- momentum surprise + rate k (v - erase S^T k)^T;   S <- decay S + surprise.
    """

    parts: tuple[
        str, ...
    ]  # "matrix: name", "vector: name", or "columns: name" with a column for each token it holds
    decay: float = 1.0
    rate: float = 1.0
    erase: float = 0.0
    momentum: float = 0.0
    blocks: tuple[int, ...] = ()  # tokens of each, oldest first; a block has a state of its own
    held: str = ""  # in place of a rule: of each token "x" where it is held, "o" where it shares slots with others


MEMORIES = {
    "linear_transformer": Memory(("matrix: S, K x V", "vector: z, K")),
    "gated_linear_attention": Memory(("matrix: S, K x V",), decay=0.8),
    "delta_net": Memory(("matrix: S, K x V",), erase=1.0),
    "levels": Memory(("matrix: 8 tokens", "matrix: 2 tokens", "matrix: 1 token"), blocks=(8, 2, 1)),
    "rwkv7": Memory(("matrix: S, K x V", "vector: token before"), decay=0.9, erase=0.7),
    "deltaformer": Memory(("columns: k and u of every token",)),
    "memory_mosaic": Memory(("columns: k and v of every token", "vector: n, K")),
    "titans": Memory(
        ("matrix: M, first", "matrix: M, second", "matrix: surprise", "matrix: surprise"),
        decay=0.95,
        rate=0.5,
        erase=1.0,
        momentum=0.5,
    ),
    "large_chunks": Memory(
        ("matrix: W_1", "matrix: W_2", "matrix: W_3", "columns: window"), held="ooooooooxxx"
    ),
    "memory_transformer": Memory(("columns: k and v of every token",)),
    "window": Memory(("columns: k and v of the window", "matrix: slots"), held="xooooooxxxx"),
}
WIDTH, HEIGHT, GAP = 760, 52, 18
CELL = 32  # of a token, in the picture of a memory
STYLE = "text{font-family:sans-serif;fill:#1a1a1a} rect{fill:#eef3fb;stroke:#3b6ea5} path{stroke:#3b6ea5;fill:none}"


def box(x: float, y: float, width: float, text: str) -> str:
    """A name, and below it what it is."""
    name, _, rest = (part.strip() for part in text.partition(":"))
    middle = x + width / 2
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="6"/>'
        f'<text x="{middle}" y="{y + 21}" text-anchor="middle" font-size="14" font-weight="bold">{escape(name)}</text>'
        f'<text x="{middle}" y="{y + 40}" text-anchor="middle" font-size="11">{escape(rest)}</text>'
    )


def arrow(y: float) -> str:
    """From a row to the next."""
    x = WIDTH / 2
    return f'<path d="M{x} {y}V{y + GAP - 2}M{x - 4} {y + GAP - 7}L{x} {y + GAP - 2}L{x + 4} {y + GAP - 7}"/>'


def draw_chart(text: str) -> str:
    """Rows of boxes with arrows between them."""
    rows = [line.split("|") for line in text.strip().splitlines()]
    parts = []
    for i, row in enumerate(rows):
        y, width = 2 + i * (HEIGHT + GAP), (WIDTH - 4 - GAP * (len(row) - 1)) / len(row)
        parts += [box(2 + j * (width + GAP), y, width, part) for j, part in enumerate(row)]
        parts += [arrow(y + HEIGHT)] * (i + 1 < len(rows))
    return svg("".join(parts), 4 + len(rows) * (HEIGHT + GAP) - GAP)


def left_of_tokens(memory: Memory) -> list[float]:
    """How much of each token's value an answer to its key contains, after all have been read."""
    if memory.held:
        return [{"x": 1.0, "o": 0.3}[x] for x in memory.held]
    state = {key: [0.0] * len(KEYS) for key in KEYS}  # of each key, how much of which token's value
    surprise = {key: [0.0] * len(KEYS) for key in KEYS}
    for t, now in enumerate(KEYS):
        for key in state:
            error = [
                (i == t) - memory.erase * x if key == now else 0.0 for i, x in enumerate(state[key])
            ]
            surprise[key] = [
                memory.momentum * s + memory.rate * e for s, e in zip(surprise[key], error)
            ]
            state[key] = [memory.decay * x + s for x, s in zip(state[key], surprise[key])]
    return [min(1.0, max(0.0, state[key][t])) for t, key in enumerate(KEYS)]


def token(i: int, left: float) -> str:
    """A token of the strip, the darker the more is left of it."""
    x, dashes = 2 + i * (CELL + 3), "" if left > 0.05 else ' stroke-dasharray="3"'
    fill = f'style="fill:#3b6ea5;fill-opacity:{0.7 * left:.2f}"'
    return (
        f'<rect x="{x}" y="8" width="{CELL}" height="{CELL}" {fill}{dashes}/>'
        f'<text x="{x + CELL / 2}" y="29" text-anchor="middle" font-size="13">{KEYS[i]}</text>'
    )


def part(kind: str, name: str, tokens: int, x: float, width: float) -> str:
    """A part of a state that holds so many tokens, drawn as a grid of its numbers."""
    columns = {"matrix": 5, "vector": 1, "columns": tokens}[kind]
    left = x + (width - 8 * columns) / 2
    cells = "".join(
        f'<rect x="{left + 8 * column}" y="{4 + 8 * row}" width="8" height="8"/>'
        for column in range(columns)
        for row in range(5)
    )
    return (
        cells
        + f'<text x="{x + width / 2}" y="62" text-anchor="middle" font-size="11">{escape(name)}</text>'
    )


def draw_memory(memory: Memory) -> str:
    """What is left of the tokens, and the state beside it."""
    end = 2 + len(KEYS) * (CELL + 3)
    parts = [token(i, left) for i, left in enumerate(left_of_tokens(memory))]
    for last, size in zip(
        (sum(memory.blocks[: i + 1]) for i in range(len(memory.blocks))), memory.blocks
    ):
        right = 2 + last * (CELL + 3) - 3
        parts.append(f'<path d="M{right - size * (CELL + 3) + 3} 44v5H{right}v-5"/>')
    caption = "tokens by key, oldest first; the darker, the more is left"
    parts.append(f'<text x="{end / 2}" y="62" text-anchor="middle" font-size="11">{caption}</text>')
    parts.append(f'<path d="M{end + 4} 24h26M{end + 23} 19l7 5l-7 5"/>')
    width = (WIDTH - end - 42) / len(memory.parts)
    for i, text in enumerate(memory.parts):
        kind, _, name = text.partition(": ")
        parts.append(
            part(kind, name, memory.held.count("x") or len(KEYS), end + 40 + i * width, width)
        )
    return svg("".join(parts), 70)


def svg(content: str, height: int) -> str:
    """A picture of a height."""
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{content}</svg>\n'


PICTURES = {name: draw_chart(text) for name, text in CHARTS.items()}
PICTURES |= {f"memory_{name}": draw_memory(memory) for name, memory in MEMORIES.items()}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for picture, content in PICTURES.items():
        (FOLDER / f"{picture}.svg").write_text(content, encoding="utf-8")
