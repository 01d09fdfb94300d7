"""What follows the mixer of a layer, by name: a class of (config), from [B, T, hidden_size] to the same."""

from collections.abc import Callable

from torch import nn

from hf_memory.layers import SwiGLU

FEED_FORWARDS: dict[str, Callable[..., nn.Module]] = {"swiglu": SwiGLU}
