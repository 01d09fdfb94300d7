"""Draws the pictures of architecture.md from the texts below: python docs/draw.py

A line is a row of boxes, with "|" between them; each box says "name: what it is". Rows are read from top to bottom.
"""

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "pictures"
PICTURES = {
    "house": """
        cli: hf-memory convert, evaluate, export, chat ... | demo: a whole conversion, offline
        conversion: a Transformer becomes a memory model | export: for inference engines | integrations: vLLM plugin
        evaluation: perplexity, recall, needles, cost | serving: streams of requests, saved memories
        modeling: configs and classes of transformers, one thin file a family
        mixers: projections, one op, output | feed_forward: what follows a mixer
        layers: norms, convolutions | cache: memories inside transformers' caches
        ops: pure functions of tensors, as equation, in PyTorch and in Triton | progress: how far long work is
    """,
    "token": """
        embedding: of the token
        norm: RMSNorm
        mixer: query, key, value and gates; short convolutions; rotation | cache: gives the states of this layer
        op: state and token in, output and new state out | cache: keeps the new states
        output: norm, gate and projection, added to the input
        feed-forward: norm and MLP, added to the input
        head: final norm, and logits of the next token
    """,
    "conversion": """
        Recipe: what is wanted | teacher: config and weights | text: tokens, a tenth of them held out
        resolve: decides everything, refuses what cannot work, gives a Plan
        start: copies weights, sets new parts where the student is nearest to its teacher
        transfer: each memory layer learns what attention gave
        distillation: the student learns the teacher's predictions
        fine-tuning: the student learns the text, if asked to
        student: saved with tokenizer and run.yaml
        report: teacher and student measured on held-out text; card and plots
    """,
}
WIDTH, HEIGHT, GAP = 760, 52, 18
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


def draw(text: str) -> str:
    """Rows of boxes with arrows between them."""
    rows = [line.split("|") for line in text.strip().splitlines()]
    parts = []
    for i, row in enumerate(rows):
        y, width = 2 + i * (HEIGHT + GAP), (WIDTH - 4 - GAP * (len(row) - 1)) / len(row)
        parts += [box(2 + j * (width + GAP), y, width, part) for j, part in enumerate(row)]
        parts += [arrow(y + HEIGHT)] * (i + 1 < len(rows))
    height = 4 + len(rows) * (HEIGHT + GAP) - GAP
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for picture, content in PICTURES.items():
        (FOLDER / f"{picture}.svg").write_text(draw(content), encoding="utf-8")
