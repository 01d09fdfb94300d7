"""Keys and values of tokens as they are stored: numbers, or packed in few bits; see `hf_memory.ops.bits`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_memory.ops.bits import pack, rotated, rounded, unpack, unpack_rotated


# Neither frozen nor a tuple, since transformers' exporters set the attributes of what a cache holds.
@dataclass(unsafe_hash=True)
class Rows:
    """How keys and values are stored, each in bits of its own; None: as the numbers that they are.

    Queries see the numbers that are stored, also in the call that computes them: how a text is divided into calls does
    not matter. Gradients pass rounding within a call as if nothing were rounded, and do not pass what is stored.
    """

    key_bits: int | None = None
    value_bits: int | None = None

    @property
    def is_packed(self) -> bool:
        """Whether keys or values are packed."""
        return self.key_bits is not None or self.value_bits is not None

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values [..., D] as they are stored; what is packed already stays as it is."""
        is_one = self.key_bits == self.value_bits and k.shape == v.shape and k.dtype == v.dtype
        if is_one and self.is_packed and k.dtype != torch.uint8:
            # one call, which takes half of the time for one token
            keys, values = _stored(torch.stack([k, v]), self.key_bits).unbind()
            return keys, values
        return _stored(k, self.key_bits), _stored(v, self.value_bits)

    def numbers(self, keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of stored keys and values, with as many channels as k and v [..., D] have, in their dtypes."""
        return _numbers(keys, self.key_bits, k), _numbers(values, self.value_bits, v)

    def rotated(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., D], and the numbers of stored keys and values in their dtype, in the channels that are packed.

        Products of queries with keys, and of values with each other, are those of the numbers themselves.
        """
        if self.key_bits is None:
            k = keys.to(q.dtype)
        else:
            k = unpack_rotated(keys, q.shape[-1], self.key_bits, q.dtype)
            q = rotated(q)
        if self.value_bits is None:
            return q, k, values.to(q.dtype)
        return q, k, unpack_rotated(values, q.shape[-1], self.value_bits, q.dtype)

    def seen(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers that queries see of new k and v [..., D], which are stored as `keys` and `values`."""
        return _seen(k, keys, self.key_bits), _seen(v, values, self.value_bits)

    def seen_among(
        self,
        new: tuple[Tensor, Tensor],
        stored: tuple[Tensor, Tensor],
        held: tuple[Tensor, Tensor],
        end: int,
    ) -> tuple[Tensor, Tensor]:
        """The numbers that queries see of all that is held, of which the rows before `end` are the new ones.

        Args:
            new: keys and values [..., T, D].
            stored: the same as they are stored.
            held: all keys and values [..., S, D] as they are stored.
            end: the place in S after that of the last new token.
        """
        bits = self.key_bits, self.value_bits
        keys, values = (_seen_among(*each, end) for each in zip(new, stored, held, bits))
        return keys, values


PLAIN = Rows()


def _stored(x: Tensor, bits: int | None) -> Tensor:
    return x if bits is None or x.dtype == torch.uint8 else pack(x, bits)


def _numbers(stored: Tensor, bits: int | None, like: Tensor) -> Tensor:
    return (
        stored.to(like.dtype) if bits is None else unpack(stored, like.shape[-1], bits, like.dtype)
    )


def _seen(x: Tensor, stored: Tensor, bits: int | None) -> Tensor:
    return x if bits is None else rounded(x, stored, bits)


def _seen_among(x: Tensor, stored: Tensor, held: Tensor, bits: int | None, end: int) -> Tensor:
    if bits is None:
        return held
    numbers = unpack(held, x.shape[-1], bits, x.dtype)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return numbers
    start = end - x.shape[-2]
    return torch.cat([numbers[..., :start, :], rounded(x, stored, bits), numbers[..., end:, :]], -2)
