"""Groups of arguments that kernels share. Tensors that a launch does not have or need are None."""

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """What a memory gets for each token, or the gradients of that."""

    q: Any = None  # [B, T, H, K]
    k: Any = None  # [B, T, H, K]
    v: Any = None  # [B, T, HV, V]
    beta: Any = None  # [B, T, HV]
    g: Any = None  # [B, T, HV] or [B, T, HV, K]
    a: Any = None  # [B, T, HV, K]
    b: Any = None  # [B, T, HV, K]


class Outputs(NamedTuple):
    """What a memory gives for each token, or the gradients of that."""

    o: Any = None  # [B, T, HV, V]; gradients are those of the numerator
    den: Any = None  # [B, T, HV] float32: denominators of linear attention
    e: Any = None  # [B, T, HV, V]: errors of the delta rule, or what a reads


class States(NamedTuple):
    """States before and after sequences, or the gradients of both."""

    S0: Any = None  # [N, HV, K, V] float32, as all; None for zeros
    ST: Any = None  # [N, HV, K, V]
    z0: Any = None  # [N, HV, K]
    zT: Any = None  # [N, HV, K]


class Call(NamedTuple):
    """What programs know of a call besides its tensors."""

    bounds: Any  # [N + 1]: tokens where packed sequences begin, and the end of the last; None for N sequences of T
    T: int
    scale: float = 1.0
    tokens: int | None = None  # B * T, where results are sums of tiles


class Meta(NamedTuple):
    """What is known when kernels are compiled; zero where a kernel does not use it."""

    H: int = 0
    HV: int = 0
    K: int = 0
    V: int = 0
    C: int = 0  # tokens of a chunk
    ROWS: int = 0  # of a block that has more rows than columns
    BK: int = 0  # tile sizes
    BV: int = 0
    PARTS: int = 1  # of the sums in products (`tiles.split_dot`)
    DECAY: int = 0
    NORMALIZE: bool = False
    BACKWARDS: bool = False
    PRECISION: str = ""
