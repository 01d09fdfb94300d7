"""A text that is on each machine with Python: the language reference, from the topics of `help()`."""

import re
from itertools import chain
from pydoc_data.topics import topics

SECTION = 4000  # characters of a section, at least
WRAPPED = 50  # a longer line is assumed to end because of the page width


def sections() -> list[str]:
    """The language reference in sections of equal size; paragraphs that occur in several topics appear once."""
    quoted = chain.from_iterable(re.split(r"\n *\n", text.strip("\n")) for text in topics.values())
    texts = [""]
    for paragraph in dict.fromkeys(map(unwrap, quoted)):
        if len(texts[-1]) > SECTION:
            texts.append("")
        texts[-1] += paragraph + "\n\n"
    return texts


def unwrap(paragraph: str) -> str:
    """Join the lines of prose, whose breaks have no meaning; code keeps its lines."""
    lines = paragraph.split("\n")
    is_prose = all(len(line) > WRAPPED for line in lines[:-1])
    return lines[0] + "".join(" " + line.strip() for line in lines[1:]) if is_prose else paragraph
