"""What all commands write to."""

import os

from rich.console import Console

IS_FIRST = os.environ.get("RANK", "0") == "0"  # of the processes that a launcher started; the others say nothing
console, errors = Console(quiet=not IS_FIRST), Console(stderr=True, quiet=not IS_FIRST)
