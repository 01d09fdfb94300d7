"""Feature maps of linear attention: phi with phi(q)^T phi(k) = kernel(q, k). Pure functions over the last dimension."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memory.ops.precision import upcast

FEATURE_MAPS = ("elu", "relu", "identity", "exp", "dpfp", "hedgehog", "taylor", "favor", "rfa")
RANDOM_FEATURE_MAPS = (
    "favor",
    "rfa",
)  # these need a random projection, which is saved with the model
DPFP_ROLLS = 3  # shifted products of "dpfp"
NOTHING = -1e30  # the maximum over no token; finite, so that differences are finite


def elu(x: Tensor) -> Tensor:
    """elu(x) + 1, strictly positive. https://arxiv.org/abs/2006.16236."""
    return F.elu(x) + 1


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return F.relu(x)


def identity(x: Tensor) -> Tensor:
    """x itself. It is not positive, so it must be used without the normaliser."""
    return x


def exp(x: Tensor) -> Tensor:
    """e^x in each channel."""
    return upcast(x).exp().to(x.dtype)


def dpfp(x: Tensor, nu: int = DPFP_ROLLS) -> Tensor:
    """Products of [relu(x), relu(-x)] with itself rolled by 1 ... nu. https://arxiv.org/abs/2102.11174.

    Args:
        x: [..., D].
        nu: number of rolls.

    Returns:
        [..., 2 * D * nu].
    """
    r = torch.cat([x.relu(), (-x).relu()], dim=-1)
    return torch.cat([r * r.roll(j, dims=-1) for j in range(1, nu + 1)], dim=-1)


def hedgehog(x: Tensor, weight: Tensor) -> Tensor:
    """softmax([x W, -x W]), learned to be like softmax attention. https://arxiv.org/abs/2402.04347.

    Args:
        x: [B, T, H, D].
        weight: [H, D, F]; conversion starts from the identity.

    Returns:
        [B, T, H, 2 * F].
    """
    y = torch.bmm(x.flatten(0, 1).transpose(0, 1), weight.to(x.dtype))  # [H, B * T, F]
    y = upcast(y).transpose(0, 1).unflatten(0, x.shape[:2])
    return torch.cat([y, -y], dim=-1).softmax(dim=-1).to(x.dtype)


def taylor(x: Tensor) -> Tensor:
    """phi(q)^T phi(k) = 1 + s + s^2 / 2 with s = q^T k / sqrt(D), always positive. https://arxiv.org/abs/2402.18668.

    Args:
        x: [..., D].

    Returns:
        [..., 1 + D + D (D + 1) / 2]; a pair of channels appears once, with the weight of both orders.
    """
    D = x.shape[-1]
    x = x * D**-0.25
    i, j = torch.triu_indices(D, D, device=x.device)
    pairs = x[..., i] * x[..., j] * x.new_ones(len(i)).masked_fill(i == j, math.sqrt(0.5))
    return torch.cat([torch.ones_like(x[..., :1]), x, pairs], dim=-1)


def rfa(x: Tensor, projection: Tensor) -> Tensor:
    """[sin Wx, cos Wx] / sqrt(F) of x at unit length: a Gaussian kernel on average. https://arxiv.org/abs/2103.02143.

    Args:
        x: [..., D].
        projection: W [F, D], standard normal.

    Returns:
        [..., 2 * F]; products may be negative.
    """
    unit = F.normalize(upcast(x), dim=-1)
    angle = unit @ projection.to(unit.dtype).mT
    return (torch.cat([angle.sin(), angle.cos()], dim=-1) * projection.shape[0] ** -0.5).to(x.dtype)


def favor_query(q: Tensor, projection: Tensor) -> Tensor:
    """Performer's positive features of softmax, up to a factor that the normaliser cancels. https://arxiv.org/abs/2009.14794.

    Args:
        q: [..., D].
        projection: W [F, D], see `orthogonal_projection`.

    Returns:
        [..., F]: e^(W x - max(W x)) with x = q / D^(1/4).
    """
    features, _ = _favor_exponents(q, projection)
    return (features - features.amax(-1, keepdim=True)).exp().to(q.dtype)


def favor_key(
    k: Tensor,
    projection: Tensor,
    running_max: Tensor | None = None,
    attention_mask: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Performer's features of keys, stabilised by the largest exponent so far, which keeps them causal.

        phi_t = e^(W x_t - |x_t|^2 / 2 - m_t),   m_t = max(m_{t-1}, max(W x_t - |x_t|^2 / 2))

    What was written with m_{t-1} must be scaled by e^(m_{t-1} - m_t), for which linear attention has a scalar decay.

    Args:
        k: [B, T, H, D].
        projection: W [F, D].
        running_max: m before the first token [B, H]; None means there was no token.
        attention_mask: [B, T], zero at padding, which gets features of zero and does not change m; or None.
        starts: [T] bool, true at the first token of each packed sequence, where m restarts; or None.

    Returns:
        features [B, T, H, F], their log decay g <= 0 [B, T, H], and m after the last token [B, H].
    """
    exponents, half_square = _favor_exponents(k, projection)
    exponents = exponents - half_square
    largest = exponents.amax(-1)  # [B, T, H]
    if attention_mask is not None:
        largest = largest.masked_fill(~attention_mask.bool()[..., None], NOTHING)
    before = largest.new_full(largest.shape[::2], NOTHING) if running_max is None else running_max
    m = torch.cat([before[:, None], largest], dim=1)
    m = m.cummax(dim=1).values if starts is None else _restarting_cummax(m, starts)
    nothing_written = m[:, :-1] == NOTHING
    if starts is not None:
        nothing_written = nothing_written | starts[None, :, None]
    g = (m[:, :-1] - m[:, 1:]).masked_fill(nothing_written, 0.0)
    exponents = exponents - m[:, 1:, :, None]
    if attention_mask is not None:
        exponents = exponents.masked_fill(~attention_mask.bool()[..., None, None], -torch.inf)
    return exponents.exp().to(k.dtype), g, m[:, -1]


def _favor_exponents(x: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """W x [..., F] and |x|^2 / 2 [..., 1] in float32 or wider, with x scaled as in softmax attention."""
    x = upcast(x) * x.shape[-1] ** -0.25
    return x @ projection.to(x.dtype).mT, x.square().sum(-1, keepdim=True) / 2


def _restarting_cummax(m: Tensor, starts: Tensor) -> Tensor:
    """Running maximum of m [B, 1 + T, H] over the tokens, which restarts at each start; entry 0 precedes all tokens."""
    bounds = [0, *(starts.nonzero().flatten() + 1).tolist(), m.shape[1]]
    parts = [m[:, a:b].cummax(dim=1).values for a, b in zip(bounds, bounds[1:]) if b > a]
    return torch.cat(parts, dim=1)


def orthogonal_projection(
    features: int, dim: int, generator: torch.Generator | None = None
) -> Tensor:
    """A projection [features, dim] in float32: rows are orthogonal in blocks of `dim`, and as long as Gaussian rows.

    Its kernel estimate has less variance than with independent rows (https://arxiv.org/abs/2009.14794, section 3.3).
    """
    blocks = []
    for _ in range(-(-features // dim)):
        square = torch.randn(dim, dim, generator=generator)
        orthogonal, upper = torch.linalg.qr(square)
        blocks.append((orthogonal * upper.diagonal().sign()).mT)
    lengths = torch.randn(features, dim, generator=generator).norm(dim=1, keepdim=True)
    return torch.cat(blocks)[:features] * lengths
