"""Random inputs for the examples of ops, from which tests and benchmarks draw."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map


class Sample:
    """Sizes and random float64 numbers for the example of an op. A call of it gives numbers for each token."""

    def __init__(
        self,
        *,
        B: int = 2,
        T: int = 65,
        H: int = 2,
        HV: int | None = None,
        K: int = 16,
        V: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ):
        self.B = B
        self.T = T
        self.H = H
        self.HV = HV or H
        self.K = K
        self.V = V or K
        self.dtype = dtype
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Normal numbers of this shape."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def __call__(self, *shape: int) -> Tensor:
        """Normal numbers [B, T, *shape]."""
        return self.normal(self.B, self.T, *shape)

    def unit(self, *shape: int) -> Tensor:
        """Random vectors of unit length [B, T, *shape]."""
        return F.normalize(self(*shape), dim=-1)

    def decay(self, kind: str) -> Tensor | None:
        """Logarithms of a decay; `kind` is "none", "scalar" or "vector"."""
        shapes = {"scalar": (self.HV,), "vector": (self.HV, self.K)}
        return F.logsigmoid(self(*shapes[kind]) + 1) if kind in shapes else None

    def state(self) -> Tensor:
        """A matrix for each head."""
        return self.normal(self.B, self.HV, self.K, self.V)

    def arguments(self, rows: dict[str, Any], **others: Any) -> dict[str, Any]:
        """Arguments of a call: rows in its dtype, the others in that of states; those that are None are left out."""

        def cast(x: Any, dtype: torch.dtype) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.to(self.device, dtype if x.is_floating_point() else x.dtype)

        wide = torch.promote_types(self.dtype, torch.float32)
        given = {n: x for n, x in others.items() if x is not None}
        return tree_map(lambda x: cast(x, self.dtype), rows) | tree_map(
            lambda x: cast(x, wide), given
        )
