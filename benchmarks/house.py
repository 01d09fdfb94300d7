"""Prints the table of how the code is written: what was, what is wanted, and what is now. It takes ten seconds.

    python benchmarks/house.py

Nothing fails on it. A file mentions the bits of a cache if a name in its code contains `cache_bits` or `in_bits`. Calls
of `resolve` are places in the code, of which a conversion passes through some. A comment is in brackets if a statement
is broken over lines for it alone: what the brackets contain is one line without a comma at its end, and the comment
stands on this line or on that of the closing bracket. A tuple assignment of unrelated values is a statement whose
target is a tuple and whose value is a tuple display of as many elements, at least two, except swaps: `a, b = x, y`, but
neither `B, T = x.shape[:2]` nor `a, b = b, a`. A place that asks "is this one token?" compares T, a length or a second
dimension with 1. A `Plan` is rewritten by `replace(plan, ...)`, not by `replace(plan.recipe, ...)`, and by
`replace(self, ...)` in its module.
"""

import ast
import re
import tokenize
from pathlib import Path

import hf_memory
from hf_memory.cli import load

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ONE_TOKEN = r"(?:\bT|\blength|\.shape\[1\]) (?:==|!=|>) 1\b"
OF_BITS = r"cache_bits|in_bits"
# an opening bracket, one line and a closing bracket, with a comment on either of the last two lines
VALUE = r"[(\[{]\n +[^\n#]*[^\n,#\s]"
IN_BRACKETS = rf"{VALUE}  # [^\n]*\n\s*[)\]}}]|{VALUE}\n *[)\]}}][^\n#]*  # (?!fmt:)"
CALLS_OF_RESOLVE = r"(?<!def )(?<![.\w])resolve\("
OF_FAMILIES = r"(?:Model|For\w+|Config)$"  # classes that docs/hooks.py describes


def code_tokens(file: Path) -> int:
    """The number of Python's tokens in a file, without comments, docstrings and layout."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    docstrings = {body[0].lineno for body in bodies if body and is_text(body[0])}
    with file.open("rb") as source:
        tokens = [token for token in tokenize.tokenize(source.readline) if token.type not in LAYOUT]
    texts = [
        token for token in tokens if token.type == tokenize.STRING and token.start[0] in docstrings
    ]
    return len(tokens) - 1 - len(texts)  # without the end of the file


def names_in(file: Path) -> set[str]:
    """The names in the code of a file."""
    with file.open("rb") as source:
        return {x.string for x in tokenize.tokenize(source.readline) if x.type == tokenize.NAME}


def is_text(statement: ast.stmt) -> bool:
    """Whether a statement is nothing but a string."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def tuple_assignments(file: Path) -> int:
    """How many statements of a file assign unrelated values to a tuple."""
    found = 0
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        values = node.value.elts
        targets = [
            x.elts
            for x in node.targets
            if isinstance(x, ast.Tuple) and len(x.elts) == len(values) >= 2
        ]
        named = [sorted(map(ast.unparse, elements)) for elements in targets]
        found += any(names != sorted(map(ast.unparse, values)) for names in named)
    return found


def exports(file: Path) -> list[str]:
    """The names in a literal `__all__` of a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    lists = [
        x.value
        for x in tree.body
        if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "__all__"
    ]
    return [
        ast.literal_eval(x)
        for values in lists
        if isinstance(values, ast.List)
        for x in values.elts
        if is_name(x)
    ]


def is_name(element: ast.expr) -> bool:
    """Whether an element of a list is a literal."""
    return isinstance(element, ast.Constant)


def arguments(command: str) -> int:
    """The number of a command's arguments and options, without its help."""
    return sum(x.name != "help" for x in load(command).params)


def matches(pattern: str, name: str = "") -> int:
    """How often a regular expression matches in the sources, or in those with a name."""
    files = [file for file in SOURCES if file.name == (name or file.name)]
    return sum(len(re.findall(pattern, file.read_text(encoding="utf-8"))) for file in files)


def measures() -> list[tuple[str, str, str, str]]:
    """The rows of the table."""
    tokens = sum(map(code_tokens, SOURCES))
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in SOURCES)
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    below = [name for file in SOURCES if file.parent.name != "hf_memory" for name in exports(file)]
    names = {*hf_memory.__all__, *below}
    unnamed = sorted(
        x for x in names if not re.search(rf"\b{x}\b", pages) and not re.search(OF_FAMILIES, x)
    )
    above_ops = [file for file in SOURCES if "ops" not in file.parts]
    of_bits = [file for file in above_ops if any(re.search(OF_BITS, x) for x in names_in(file))]
    memory = [file for file in SOURCES if "neural_memory" in file.parts]
    of_memory = sum(map(code_tokens, memory))
    commands = " / ".join(str(arguments(name)) for name in ("convert", "evaluate", "fine-tune"))
    benchmarks = (ROOT / "benchmarks").rglob("*.py")
    written = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in benchmarks)
    packed = sum(map(tuple_assignments, SOURCES))
    rewritten = matches(r"\breplace\(plan,") + matches(r"\breplace\(self\b", "plan.py")
    said = f"{len(hf_memory.__all__)} / {len(below)}, in no page: {', '.join(unnamed) or 'none'}"
    return [
        ("code tokens under src", "299,465", "<= 275,000", f"{tokens:,}"),
        ("code tokens of ops/neural_memory", "28,418", "<= 17,000", f"{of_memory:,}"),
        ("files above ops that mention bits of a cache", "24", "<= 12", str(len(of_bits))),
        ("places that call `resolve`", "9", "1 in a conversion", str(matches(CALLS_OF_RESOLVE))),
        ("tokens a line", "6.9", "<= 6.5", f"{tokens / lines:.1f}"),
        ("tuple assignments of unrelated values", "8", "<= 20", str(packed)),
        ("comments in brackets", "117", "0", str(matches(IN_BRACKETS))),
        ("exported names at top level / in subpackages", "51 / 186", "all in the docs", said),
        (
            "arguments of convert / evaluate / fine-tune",
            "32 / 20 / 19",
            "<= 22 / 14 / 14",
            commands,
        ),
        ('places that ask "is this one token?"', "about 10", "2", str(matches(ONE_TOKEN))),
        ("times a Plan is rewritten", "5", "0", str(rewritten)),
        ("lines under benchmarks", "9,249", "<= 6,500", f"{written:,}"),
    ]


def main() -> None:
    """Print the table."""
    print("| measure | was | wanted | now |\n|---|---|---|---|")
    for row in measures():
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
