"""What the site has beside its pages: files that they link to outside docs/, and types without Markdown's marks."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
TYPE = re.compile(r"<code>`[^<]*</code>")
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")


def on_files(files, config):
    """Add the files that the pages link to, under repository/."""
    texts = [Path(file.abs_src_path).read_text(encoding="utf-8") for file in files.documentation_pages()]
    for name in sorted({name for text in texts for name in OUTSIDE.findall(text)}):
        files.append(File.generated(config, f"repository/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown, **_):
    """Let links lead to repository/."""
    return OUTSIDE.sub(r"](repository/\1", markdown)


def on_page_content(html, **_):
    """Write the types of transformers' docstrings, `int`, *optional*, as plain text."""
    return TYPE.sub(lambda found: re.sub(r"[`*]", "", found[0]), html)
