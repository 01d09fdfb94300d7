"""What a conversion asks of the modules of a student, in one place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]  # cos and sin of rotary positions, [1 or B, n, channels] each


class ObservedAttention(NamedTuple):
    """What one attention layer of a teacher was seen to read, from which a mixer initialises what it adds to a window.

    Attributes:
        hidden_states: [B, T, hidden_size], what the layer read of a text.
        positions: of these T tokens, by the teacher.
        num_first_tokens: number of first tokens of a text for which attention sinks stand.
        distances: of distances in tokens at which the student's memory is read.
    """

    hidden_states: Tensor
    positions: Rotation
    num_first_tokens: int
    distances: Rotation


class Convertible:
    """A module of a student, such as a mixer, a gate or a feed-forward part. What does not concern it is left out.

    A conversion copies the weights that the teacher has; calls `start_from` of mixers, `start_open` of all modules,
    `start_steady` of gates, and `scale_output` or `open_gate` of mixers; and then trains each `new_part`, unless
    `exact_up_to` says that the student equals its teacher. `init_own_parameters`, and `starts` with initial values of
    parameters by name, are for models that are trained from scratch.
    """

    can_be_steady = False  # whether this is a gate for `start_steady`
    starts_from_attention = False  # whether `start_from` sets anything

    @classmethod
    def exact_up_to(cls, config, layer_idx: int, length: int) -> int | None:
        """How many tokens a token sees in a text of `length`, if a layer starts as softmax attention to them.

        Args:
            config: the student's config.
            layer_idx: number of the layer.
            length: tokens of the text.

        Returns:
            The number of the last tokens that all tokens see, as far as there are so many; None if the layer does not
            start as softmax attention, or leaves out other tokens than those farthest back.
        """
        return None

    @property
    def new_part(self) -> nn.Module | None:
        """The part that the teacher does not have: attention transfer trains it, and it may learn at its own rate."""
        return None

    @property
    def gate_beside_attention(self) -> nn.Parameter | None:
        """The factor of a memory that is added to attention; with zeros, the mixer is attention alone."""
        return None

    @contextmanager
    def keeping(self, num_tokens: int) -> Iterator[None]:
        """A context in which a mixer that keeps older tokens keeps so many of each head; others are not changed."""
        yield

    def start_from(self, observed: ObservedAttention) -> None:
        """Set initial values of slots and sinks, such that the output is near full attention."""

    def start_open(self, half_life: int) -> None:
        """Set initial values with which inputs pass: convolutions are identities, gates half open, and decay is slow.

        Args:
            half_life: number of tokens after which half of what was written has decayed.
        """

    def start_steady(self, direction: Tensor) -> None:
        """Start a gate that has no bias as nearly constant.

        Args:
            direction: [hidden_size], with which products of hidden states are about 1.
        """

    def scale_output(self, factor: Tensor) -> None:
        """Multiply the output by a factor, if there is a norm that can do so; otherwise do nothing."""

    def open_gate(self, output: Tensor, without: Tensor, target: Tensor) -> None:
        """Set `gate_beside_attention`.

        Args:
            output: [B, T, hidden_size], the mixer's output with a gate of one.
            without: [B, T, hidden_size], its output with a gate of zero.
            target: [B, T, hidden_size], the output of the attention that is replaced.
        """
