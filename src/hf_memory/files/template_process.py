"""A process that renders chat templates, so that one that takes too long or too much memory ends with it.

It is run as a script, which imports neither torch nor hf_memory. It says when it is ready, and then answers a line of
JSON with such a line.
"""

import faulthandler
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

MEMORY = 2**31  # bytes that a template may take
ERROR = 1000  # characters of an error that are told
READY = b"ready\n"


def answer(line: bytes, render) -> dict:
    """The text of a conversation and where the assistant's turns are in it, or an error.

    Args:
        line: JSON with the arguments of `render`, and the largest number of characters of the text as `most`.
        render: transformers' function.
    """
    try:
        arguments = json.loads(line)
        most = arguments.pop("most")
        (text,), places = render(return_assistant_tokens_mask=True, **arguments)
        if len(text) > most:
            raise ValueError(f"it wrote {len(text):,} characters")
        return {"text": text, "places": places[0]}
    except MemoryError:
        return {"error": f"it took more than {MEMORY / 2**30:g} GiB of memory"}
    except Exception as error:  # whatever the template raises
        return {"error": (str(error) or type(error).__name__)[:ERROR]}


def limit_memory() -> None:
    """Let allocations fail beyond what the process has now and MEMORY, where the system says the former."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, most))


def main() -> None:
    """Answer requests until the input ends, each of them `SECONDS BYTES` in a line before its own."""
    from transformers.utils.chat_template_utils import render_jinja_template

    limit_memory()
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    with open(os.devnull, "w") as nowhere:
        for seconds in sys.stdin.buffer:
            # ends C code, too
            faulthandler.dump_traceback_later(float(seconds), exit=True, file=nowhere)
            found = answer(sys.stdin.buffer.readline(), render_jinja_template)
            faulthandler.cancel_dump_traceback_later()
            sys.stdout.buffer.write(json.dumps(found).encode() + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
