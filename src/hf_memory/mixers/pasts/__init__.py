"""What attention sees of the tokens before: everything, a window and the first tokens, or kept tokens, as states."""

from hf_memory.mixers.pasts.everything import Everything
from hf_memory.mixers.pasts.kept import Kept
from hf_memory.mixers.pasts.policy import POLICIES, register_eviction
from hf_memory.mixers.pasts.ring import (
    Ring,
    Window,
    columns,
    last,
    last_tokens,
    window_attention,
)
from hf_memory.mixers.pasts.rows import New, Past, Seen, of_rows, take

__all__ = [
    "POLICIES",
    "Everything",
    "Kept",
    "New",
    "Past",
    "Ring",
    "Seen",
    "Window",
    "columns",
    "last",
    "last_tokens",
    "of_rows",
    "register_eviction",
    "take",
    "window_attention",
]
