"""What the site adds to its pages: families, files that they link to outside docs/, types without Markdown's marks."""

import re
from pathlib import Path

from mkdocs.structure.files import File

from hf_memory import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
TYPE = re.compile(r"<code>`[^<]*</code>")
OPTIONS = "options: {members: false, heading_level: 4}"  # of a section
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")


def on_files(files, config):
    """Add the files that the pages link to, under repository/."""
    texts = [Path(file.abs_src_path).read_text(encoding="utf-8") for file in files.documentation_pages()]
    for name in sorted({name for text in texts for name in OUTSIDE.findall(text)}):
        files.append(File.generated(config, f"repository/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown, **_):
    """Let links lead to repository/, and describe the families where their place is."""
    return OUTSIDE.sub(r"](repository/\1", markdown).replace("<!-- families -->", "\n\n".join(sections()))


def sections():
    """A section for each family: its model classes, and the options of its config."""
    for family in FAMILIES:
        name = family.config.__name__
        models = ", ".join(f"`{model.__name__}`" for model in (family.model, family.causal_lm, *family[3:5]))
        yield f"### {name.removesuffix('Config')}\n\n{models}\n\n::: hf_memory.{name}\n    {OPTIONS}"


def on_page_content(html, **_):
    """Write the types of transformers' docstrings, `int`, *optional*, as plain text."""
    return TYPE.sub(lambda found: re.sub(r"[`*]", "", found[0]), html)
