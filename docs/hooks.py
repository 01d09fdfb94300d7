"""What pages link to outside docs/ (pictures, figures, cards) is part of the site, under repository/."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")


def on_files(files, config):
    """Add what the pages link to."""
    texts = [Path(file.abs_src_path).read_text(encoding="utf-8") for file in files.documentation_pages()]
    for name in sorted({name for text in texts for name in OUTSIDE.findall(text)}):
        files.append(File.generated(config, f"repository/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown, **_):
    """Let links lead there."""
    return OUTSIDE.sub(r"](repository/\1", markdown)
