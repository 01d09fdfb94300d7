"""What the site adds to its pages: what generated.py writes, files that they link to outside docs/, plain types.

When it is built, each link, anchor and picture that leads into the site must lead somewhere.
"""

import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from generated import PLACES, command_pages
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
TYPE = re.compile(r"<code>`[^<]*</code>")
CODE = re.compile(r"(?<!</span>)<code>([^<]*)</code>")  # in a sentence or a table, not a block
FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
CELL = re.compile(r"<td( [^>]*)?>(.*?)</td>", re.DOTALL)
LONG = 24  # characters from which on a cell of a table is text, which needs room on a phone
DOCS, ELSEWHERE = (
    "docs/",
    "repository/",
)  # folders: of pages in the repository, and of its other files in the site
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


def on_files(files, config):
    """Add the files that pages link to, and those that these link to, under repository/."""
    unread = [DOCS + file.src_uri for file in files.documentation_pages()]
    added: set[str] = set()
    while unread:
        page = unread.pop()
        for link in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            path = in_repository(page, link)
            if path.startswith(DOCS) or path in added or not (ROOT / path).is_file():
                continue
            added.add(path)
            files.append(File.generated(config, ELSEWHERE + path, abs_src_path=str(ROOT / path)))
            if path.endswith(".md"):
                unread.append(path)
    for name, text in command_pages():
        files.append(File.generated(config, f"reference/commands/{name}.md", content=text))
    return files


def in_repository(page: str, link: str) -> str:
    """The path in the repository to which a link of a page leads; both paths are relative to its root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def on_page_markdown(markdown, page, **_):
    """Let links lead to where the site has the files, and write what is generated where its place is."""
    uri = page.file.src_uri
    source = uri.removeprefix(ELSEWHERE) if uri.startswith(ELSEWHERE) else DOCS + uri

    def rewritten(found: re.Match) -> str:
        path = in_repository(source, found[1])
        target = path.removeprefix(DOCS) if path.startswith(DOCS) else ELSEWHERE + path
        return f"]({posixpath.relpath(target, posixpath.dirname(uri) or '.')}"

    text = LINK.sub(rewritten, markdown)
    for place, generated in PLACES.items():
        if place in text:
            text = text.replace(place, generated())
    return text


def on_page_content(html, **_):
    """Write types of transformers' docstrings, `int`, *optional*, as plain text; mark flags and cells with text."""
    html = TYPE.sub(lambda found: re.sub(r"[`*]", "", found[0]), html)
    html = CODE.sub(lambda found: FLAG.sub(r'<span class="flag">\g<0></span>', found[0]), html)
    return CELL.sub(marked, html)


def marked(cell: re.Match) -> str:
    """A cell of a table, of the class `text` if it is long."""
    words = re.sub(r"<[^>]*>", "", cell[2])
    if len(words) < LONG or "class=" in (cell[1] or ""):
        return cell[0]
    return f'<td{cell[1] or ""} class="text">{cell[2]}</td>'


class Targets(HTMLParser):
    """The anchors of a page, and where its links and pictures lead."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        """Collect what a tag names."""
        for name, value in attributes:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def on_post_build(config):
    """Stop the build if a link, an anchor or a picture of a page is not in the site."""
    site = Path(config["site_dir"])
    pages = {
        path: Targets(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))
    }
    dead = [
        f"{path.relative_to(site)}: {link}"
        for path, page in pages.items()
        for link in page.links
        if not leads_somewhere(link, path, site, pages)
    ]
    if dead:
        raise PluginError("dead links in the site:\n" + "\n".join(dict.fromkeys(dead)))


def leads_somewhere(link: str, source: Path, site: Path, pages: dict[Path, Targets]) -> bool:
    """Whether a link of a page leads out of the site, or to a file of it that has the anchor."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    where = unquote(parts.path)
    start = site if where.startswith("/") else source.parent
    target = source if not where else (start / where.lstrip("/")).resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return False
    anchor = unquote(parts.fragment)
    return not anchor or target not in pages or anchor in pages[target].anchors
