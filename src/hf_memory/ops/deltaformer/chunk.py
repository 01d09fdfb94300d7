"""DeltaFormer in PyTorch, by blocks of rows, so that memory use grows with T and not with its square.

For the rows I of a block, all rows J before it (including the past), and the kernel's weights P:

    U_I = (I + diag(beta) P_II)^-1 (a V_I - beta P_IJ U_J),   O_I = sum over columns of the read's weights times U

Backward, from the last block to the first, where dU is the gradient of U that was accumulated so far:

    G_I = (I + diag(beta) P_II)^-T dU_I,   dU_J -= P_IJ^T (beta G_I),   dP_I = -beta G_I U^T,   dV_I = a G_I

The weights of a block are recomputed in the backward pass; only U is saved.
"""

import torch
from torch import Tensor

from hf_memory.ops.autograd import first_derivatives_only
from hf_memory.ops.chunks import unit_lower_inverse
from hf_memory.ops.deltaformer.weights import DeltaFormerState, Rule, weights
from hf_memory.ops.exported import in_pieces, varies
from hf_memory.ops.masks import Mask, Tokens, seen
from hf_memory.ops.precision import in_float32

BLOCK = 64  # rows
COLUMNS = 512


@in_float32
def corrected_values(
    k: Tensor,
    v: Tensor,
    a: Tensor,
    beta: Tensor,
    past: DeltaFormerState,
    rule: Rule,
    *,
    block: int = BLOCK,
) -> tuple[Tensor, tuple]:
    """Same function as the reference."""
    k_all = torch.cat([past.k, k], 1).transpose(1, 2)  # [B, H, S + T, K]
    if varies(k.shape[1]):
        return _written_in_pieces(k, k_all, v, a, beta, past.u, rule, block), ()
    w, v, past_u = (x.transpose(1, 2) for x in (rule.scale * k, v, past.u))
    a, beta = (x.transpose(1, 2)[..., None] for x in (a, beta))  # [B, H, T, 1]
    settings = (rule.kernel, rule.mask, block)
    return _Write.apply(w, k_all, v, a, beta, past_u, rule.columns.position, settings).transpose(
        1, 2
    ), ()


@in_float32
def read(q: Tensor, k: Tensor, u: Tensor, rule: Rule) -> tuple[Tensor, tuple]:
    """Same function as the reference."""
    q, k, u = (x.transpose(1, 2) for x in (rule.scale * q, k, u))
    return _Read.apply(q, k, u, rule.columns.position, (rule.kernel, rule.mask, BLOCK)).transpose(
        1, 2
    ), ()


def _written_in_pieces(
    k: Tensor,
    k_all: Tensor,
    v: Tensor,
    a: Tensor,
    beta: Tensor,
    past_u: Tensor,
    rule: Rule,
    block: int,
) -> Tensor:
    """The corrected values in a graph for any number of tokens; `k_all` is [B, H, S + T, K]."""
    T = v.shape[1]
    columns = k_all.shape[2]
    place = torch.arange(columns, device=v.device)
    queries = rule.columns.position[:, columns - T :]

    def piece(U: Tensor, rows: tuple) -> tuple[list[Tensor], Tensor]:
        k, v, a, beta, position, own = rows
        w, v = (x.transpose(1, 2) for x in (rule.scale * k, v))
        a, beta = (x.transpose(1, 2)[..., None] for x in (a, beta))
        sees = seen(rule.mask, Tokens(position), rule.columns)
        P = weights(w @ k_all.mT, sees, rule.kernel)
        here = (own[0, :, None] - 1 == place).to(U.dtype)  # [block, S + T]; what fills has no place
        inverse = unit_lower_inverse(beta * (P @ here.mT))
        u = inverse @ (a * v - beta * (P @ U))
        return [u.transpose(1, 2)], U + here.mT @ u

    empty = torch.cat([past_u, torch.zeros_like(v)], 1).transpose(1, 2)
    own = (place[columns - T :] + 1)[None]
    (u,), _ = in_pieces(piece, block, empty, (k, v, a, beta, queries, own))
    return u


def _blocks(T: int, block: int) -> list[slice]:
    if varies(T):
        return [slice(0, T)]
    return [slice(start, min(start + block, T)) for start in range(0, T, block)]


def _seen(mask: Mask, position: Tensor, T: int, rows: slice) -> Tensor:
    """Which columns a block of C rows sees, [B, 1, C, columns]; the rows are among the last T columns.

    The number of columns is rounded up, so that few different sizes occur and memory can be reused. Bounds are counted
    from the end, or left out, since torch.compile would treat a growing bound as a constant.
    """
    columns = Tokens(position)
    if rows.stop == T:
        return seen(mask, columns.of(slice(rows.start - T, None)), columns)
    last = position.shape[1] - T + rows.stop
    wanted = -(-last // COLUMNS) * COLUMNS
    queries = columns.of(slice(rows.start - T, rows.stop - T))
    return seen(mask, queries, columns.of(slice(wanted)) if wanted < position.shape[1] else columns)


def _score_gradient(dP: Tensor, P: Tensor, kernel: str) -> Tensor:
    """The gradient of scores from that of weights; it is zero where weights are zero because of the mask."""
    if kernel == "softmax":
        return P * (dP - (P * dP).sum(-1, keepdim=True))
    return dP * (P > 0) if kernel == "relu" else dP


class _Write(torch.autograd.Function):
    """U [B, H, T, V] from w [B, H, T, K], k [B, H, S + T, K], v, a and beta [B, H, T, ...] and the past's u."""

    @staticmethod
    def forward(ctx, w, k, v, a, beta, past_u, position, settings):
        S = past_u.shape[2]
        T = v.shape[2]
        U = torch.cat([past_u, torch.zeros_like(v)], dim=2)
        for rows in _blocks(T, settings[-1]):
            sees = _seen(settings[1], position, T, rows)
            P = weights(w[:, :, rows] @ k[:, :, : sees.shape[-1]].mT, sees, settings[0])
            before = S + rows.start
            here = slice(S + rows.start, S + rows.stop)
            R = a[:, :, rows] * v[:, :, rows] - beta[:, :, rows] * (
                P[..., :before] @ U[:, :, :before]
            )
            system = beta[:, :, rows] * P[..., here]
            U[:, :, here] = torch.linalg.solve_triangular(
                system, R, upper=False, unitriangular=True
            )
        ctx.save_for_backward(w, k, v, a, beta, U, position)
        ctx.settings = settings
        ctx.S = S
        return U[:, :, S:].clone()

    @staticmethod
    @first_derivatives_only
    def backward(ctx, dU_new):
        w, k, v, a, beta, U, position = ctx.saved_tensors
        S = ctx.S
        settings = ctx.settings
        dU = torch.cat([torch.zeros_like(U[:, :, :S]), dU_new], dim=2)
        G = torch.empty_like(v)
        dw = torch.empty_like(w)
        dk = torch.zeros_like(k)
        dbeta = torch.empty_like(beta)
        for rows in reversed(_blocks(v.shape[2], settings[-1])):
            sees = _seen(settings[1], position, v.shape[2], rows)
            columns = sees.shape[-1]
            before = S + rows.start
            here = slice(S + rows.start, S + rows.stop)
            P = weights(w[:, :, rows] @ k[:, :, :columns].mT, sees, settings[0])
            system = (beta[:, :, rows] * P[..., here]).mT
            g = torch.linalg.solve_triangular(
                system, dU[:, :, here], upper=True, unitriangular=True
            )
            dU[:, :, :before] -= P[..., :before].mT @ (beta[:, :, rows] * g)
            Y = -(g @ U[:, :, :columns].mT)
            dbeta[:, :, rows] = (P * Y).sum(-1, keepdim=True)
            dX = _score_gradient(beta[:, :, rows] * Y * sees, P, settings[0])
            dw[:, :, rows] = dX @ k[:, :, :columns]
            dk[:, :, :columns] += dX.mT @ w[:, :, rows]
            G[:, :, rows] = g
        da = (G * v).sum(-1, keepdim=True)
        return dw, dk, a * G, da, dbeta, dU[:, :, :S], None, None


class _Read(torch.autograd.Function):
    """O [B, H, T, V] from q [B, H, T, K], k [B, H, S + T, K] and u [B, H, S + T, V]."""

    @staticmethod
    def forward(ctx, q, k, u, position, settings):
        outputs = []
        for rows in _blocks(q.shape[2], settings[-1]):
            sees = _seen(settings[1], position, q.shape[2], rows)
            columns = sees.shape[-1]
            P = weights(q[:, :, rows] @ k[:, :, :columns].mT, sees, settings[0])
            outputs.append(P @ u[:, :, :columns])
        ctx.save_for_backward(q, k, u, position)
        ctx.settings = settings
        return torch.cat(outputs, dim=2)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, do):
        q, k, u, position = ctx.saved_tensors
        dq = torch.empty_like(q)
        dk = torch.zeros_like(k)
        du = torch.zeros_like(u)
        for rows in _blocks(q.shape[2], ctx.settings[-1]):
            sees = _seen(ctx.settings[1], position, q.shape[2], rows)
            columns = sees.shape[-1]
            P = weights(q[:, :, rows] @ k[:, :, :columns].mT, sees, ctx.settings[0])
            dP = do[:, :, rows] @ u[:, :, :columns].mT * sees
            dX = _score_gradient(dP, P, ctx.settings[0])
            dq[:, :, rows] = dX @ k[:, :, :columns]
            dk[:, :, :columns] += dX.mT @ q[:, :, rows]
            du[:, :, :columns] += P.mT @ do[:, :, rows]
        return dq, dk, du, None, None
