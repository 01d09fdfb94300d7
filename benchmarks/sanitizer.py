"""A pytest plugin for `make sanitize`, which executes the code that Triton compiles on the CPU, with ttsem.

ttsem reports accesses out of bounds and elements that two programs touch, at the line of the kernel. This plugin makes
it see more: memory that nobody has written is NaN inside custom ops and backward passes too, and so are masked lanes of
a load without `other`. And it keeps the code of a kernel for later launches with the same types and constants.
"""

import warnings

import numpy as np
import torch
from ttsem import harness
from ttsem.memory import Memory

NAN_OF_BFLOAT16 = 0x7FC0  # which NumPy holds as uint16
compiled: dict[tuple, object] = {}
load = Memory.load
compile_launch = harness.ir_for_launch


def load_with_nan(self, addresses, mask, other, dtype):
    """A load whose masked lanes are NaN unless the kernel says what they are."""
    kind = np.dtype(dtype)
    if other is None and mask is not None:
        is_bfloat16 = kind.kind == "u" and kind.itemsize == 2
        other = np.nan if kind.kind == "f" else NAN_OF_BFLOAT16 if is_bfloat16 else None
    return load(self, addresses, mask, other, dtype)


def cached(record, stage, target, *args, **kwargs):
    """The code of a launch, lowered to Triton's own IR only, once for each specialisation."""
    if stage != "ttir":
        return compile_launch(record, stage, target, *args, **kwargs)
    harness.mlir.enable_generic_printing()
    options, *specialised = harness._specialize(record.fn, record.args, record.kwargs, target)
    key = record.fn, repr((sorted(options.__dict__.items(), key=str), *specialised))
    if key not in compiled:
        compiled[key] = harness.mlir.to_generic(harness._stage_text(record, stage, target), None)
    return compiled[key]


warnings.filterwarnings("ignore", message=".*deterministic.*")
torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
Memory.load = load_with_nan
harness.ir_for_launch = cached
