"""In how many bits a cache stores its states: what `cache_bits` of a config or of `generate` says."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hf_memory.ops.bits import BITS

MATRIX_BITS = (16, 8)  # of a recurrent matrix: bfloat16, or codes
RECURRENT = "recurrent_states"  # the kind of states that each token changes as a whole
ROWS = ("keys", "values")


# Neither frozen nor a tuple, since transformers' exporters set the attributes of what a cache holds.
@dataclass(unsafe_hash=True)
class CacheBits:
    """Bits of each number by kind of state, as a value that can be compared, hashed and shared.

    A kind of keys and values, such as "window", has two: "window.keys" and "window.values".
    """

    by_kind: tuple[tuple[str, int], ...] = ()
    of_all_rows: int | None = None  # of all keys and values of tokens

    def of(self, kind: str | None) -> int | None:
        """Bits of each number of a kind of states; None: all."""
        if self.of_all_rows is not None and kind is not None and kind != RECURRENT:
            return self.of_all_rows
        return next((bits for name, bits in self.by_kind if name == kind), None)


ALL_BITS = CacheBits()


def read_bits(given: Any) -> CacheBits:
    """What `cache_bits` says: None, a number, or a dict of numbers or of {"keys": number, "values": number} by kind.

    Raises:
        ValueError: if a number is none that such a state can have.
    """
    if given is None:
        return ALL_BITS
    if not isinstance(given, dict):
        _check(given, "cache_bits", BITS, " or None, or a dict of bits by kind")
        return _of_all_rows(given)
    by_kind: dict[str, int] = {}
    for kind, bits in given.items():
        name = f"cache_bits of {kind!r}"
        if kind == RECURRENT:
            _check(bits, name, MATRIX_BITS)
            by_kind[kind] = bits
            continue
        if not isinstance(bits, dict):
            _check(bits, name, BITS, " or a dict with keys and values")
            bits = dict.fromkeys(ROWS, bits)
        for part, number in bits.items():
            if part not in ROWS:
                raise ValueError(f"{name} must have bits of 'keys' or 'values', got {part!r}")
            _check(number, f"{name}, of {part}", BITS)
            by_kind[f"{kind}.{part}"] = number
    return CacheBits(tuple(sorted(by_kind.items())))


@lru_cache
def _of_all_rows(bits: int) -> CacheBits:
    """The same object each time: objects that are the same need no comparison at each token."""
    return CacheBits(of_all_rows=bits)


def check_kinds(given: Any, states: list[str]) -> None:
    """Raise ValueError if `cache_bits` names states that a model does not have, or that cannot have few bits.

    `states` are those of the model, such as "window.keys" and "recurrent_states".
    """
    known = list(dict.fromkeys(name.partition(".")[0] for name in states))
    has_rows = any(name != RECURRENT for name in states)
    if isinstance(given, int) and not has_rows:
        expected = f"None, or a dict with some of {known}," if known else "None"
        raise ValueError(
            f"cache_bits must be {expected} since no layer has keys and values of tokens that can have few bits, got "
            f"{given}"
        )
    if not isinstance(given, dict):
        return
    for kind, bits in given.items():
        if kind not in known:
            raise ValueError(
                f"cache_bits must be a number, or a dict with some of {known}, got {kind!r}"
            )
        for part in bits if isinstance(bits, dict) else ():
            if f"{kind}.{part}" not in states:
                raise ValueError(
                    f"cache_bits of {kind!r} must have no bits of {part}, which keep all"
                )


def _check(bits: Any, name: str, possible: tuple[int, ...], otherwise: str = "") -> None:
    if type(bits) is not int or bits not in possible:
        raise ValueError(f"{name} must be one of {possible}{otherwise}, got {bits!r}")
