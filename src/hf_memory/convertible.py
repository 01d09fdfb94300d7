"""What a conversion asks of the modules of a student, in one place."""

from torch import Tensor, nn


class Convertible:
    """A module of a student, such as a mixer, a gate or a feed-forward part. What does not concern it is left out.

    A conversion copies the weights that the teacher has; calls `start_open` of all modules, `start_steady` of gates,
    and `scale_output` or `open_gate` of mixers; and then trains each `new_part`. Up to which length a layer equals
    attention before training is told by `exact_up_to` of the config. `init_own_parameters`, and `starts` with initial
    values of parameters by name, are for models that are trained from scratch.
    """

    can_be_steady = False  # whether this is a gate for `start_steady`

    @property
    def new_part(self) -> nn.Module | None:
        """The part that the teacher does not have: attention transfer trains it, and it may learn at its own rate."""
        return None

    @property
    def gate_beside_attention(self) -> nn.Parameter | None:
        """The factor of a memory that is added to attention; with zeros, the mixer is attention alone."""
        return None

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
