"""The ranges of numbers that measures take."""

from typing import Any

from hf_memory.modeling.checks import check

LEAST = {  # smallest values, by the names of arguments
    "context": 2,
    "distances": 1,
    "gap": 0,
    "items": 0,
    "length": 2,
    "lengths": 2,
    "max_tokens": 1,
    "new_tokens": 1,
    "num_tokens": 0,
    "passage": 2,
    "samples": 1,
    "score_lengths": 2,
    "trials": 1,
    "windows": 1,
}


def check_counts(**counts: Any) -> None:
    """Raise ValueError unless each argument is a whole number, or several, and not too small; None is no number."""
    for name, given in counts.items():
        several = isinstance(given, list | tuple)
        numbers = given if several else [] if given is None else [given]
        is_right = all(type(x) is int and x >= LEAST[name] for x in numbers)
        what = "whole numbers" if several else "a whole number"
        check(is_right, name, f"{what} of at least {LEAST[name]}", given)
