"""The neural memory: a matrix or a small network that learns keys and values by gradient descent while it reads.

Titans, and with other options the delta rules, linear attention, TTT, Miras' memories and ATLAS.

There are kernels for Titans' memory of two matrices, with momentum, which forgets to its initial weights. They take
chunks of up to 64 tokens with heads of up to 64 channels, 16 with 128; in float32 32 with 16 channels, 16 with 64.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from hf_memory.ops.dispatch import Backend, choose_backend, kernel_limits
from hf_memory.ops.inputs import (
    Dims,
    check_chunk_size,
    check_gate,
    check_inputs,
    check_tensor,
    named_state,
)
from hf_memory.ops.layout import PIECE, per_sequence, without_padding
from hf_memory.ops.neural_memory import chunk, dual, reference
from hf_memory.ops.neural_memory.layout import pieces_of
from hf_memory.ops.neural_memory.network import (
    ACTIVATIONS,
    LOSSES,
    RETENTIONS,
    NeuralMemoryState,
    Norm,
    Rule,
)

__all__ = ["EarlierPairs", "Learning", "NeuralMemoryState", "neural_memory"]

MAX_KERNEL_CHUNKS = {  # bytes of a number: {channels of a head: tokens of a chunk}; with more, registers spill
    2: {64: 64, 128: 16},
    4: {16: 32, 64: 16},
}


class EarlierPairs(NamedTuple):
    """Further pairs that each token learns; in ATLAS those of the c tokens before it."""

    k: Tensor  # [B, T, H, c, K]
    v: Tensor  # [B, T, HV, c, V]
    lr: Tensor  # [B, T, HV, c], inner learning rates


class Learning(TypedDict, total=False):
    """How a neural memory M is trained to map k to v, by one step of gradient descent for each token.

        A <- W if a chunk of chunk_size tokens begins here                   (the anchor)
        S <- eta_t S - lr_t grad l(A),   l = 1/2 |M(k_t; A) - v_t|^2
        W <- a_t W + S                                                       (without momentum S is the last step alone)
        o_t = M(q_t; W)

    where with forget_to="initial" a_t W stands for a_t W + (1 - a_t) W_0, W_0 being the initial weights. M is a matrix,
    or several matrices with an activation between them. With `norm` a layer norm follows the last matrix; with
    `residual` the input is added to the output; with `retention` the weights are R(A) and R(W) in place of A and W. TTT
    is a memory with residual and norm, without momentum and decay.

    Args:
        activation: activation between matrices: "silu" (default), "gelu" or its approximation "gelu_tanh".
        residual: add the network's input to its output; requires K = V.
        norm: weight and bias [HV, V] of a layer norm, or None.
        forget_to: what the weights decay to: "initial" weights or "zero". Default: zero for one matrix, else initial,
            since a deeper network at zero has no gradient. With "anchor" only the steps of the present chunk decay:
            decays tau_i / tau_(i-1) and rates tau_i lr give TTT's rates tau_i lr_j for position i in a chunk.
        max_grad_norm: largest norm of a token's gradient, over all matrices of a head; larger gradients are clipped
            before they are multiplied by the learning rate. Without it the steps of a chunk, whose gradients are taken
            at the same weights, may overshoot, more in every chunk, until they overflow. Only with retention="all", one
            pair for each token, and without Muon.
        loss: the inner loss of the error e = M(k_t; A) - v_t: "squared" (default), with the gradient e; "cubed", sum
            |e|^3, with the gradient 3 sign(e) e^2; or "huber", with the gradient e where |e| <= threshold_t, else
            threshold_t sign(e). The sign is approximated by tanh(10 e).
        retention: "all" (default); "norm", R(W) = W / |W|_4^2 of each matrix; or "softmax" over what enters a channel.
    """

    activation: Literal["silu", "gelu", "gelu_tanh"]
    residual: bool
    norm: Norm | None
    forget_to: Literal["initial", "anchor", "zero"] | None
    max_grad_norm: float | None
    loss: Literal["squared", "cubed", "huber"]
    retention: Literal["all", "norm", "softmax"]


def neural_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    momentum: Tensor | None,
    decay: Tensor | None,
    weights: tuple[Tensor, ...],
    *,
    chunk_size: int,
    threshold: Tensor | None = None,
    muon_lr: Tensor | None = None,
    earlier: EarlierPairs | None = None,
    mask: Tensor | None = None,
    initial_state: NeuralMemoryState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
    **learning: Unpack[Learning],
) -> tuple[Tensor, NeuralMemoryState | None]:
    """Train a matrix or a small network to map k to v while reading, and apply it to q; `Learning` has the equations.

    The result depends on chunk_size, so a model must be used with the one it was trained with. Chunks are counted from
    the first token of a sequence, across calls, and without padding, so each row has its own phase. Sources:
    https://arxiv.org/abs/2501.00663, equations 8-18; https://arxiv.org/abs/2407.04620 (TTT).

    Args:
        q: queries [B, T, H, K].
        k: keys [B, T, H, K], best of unit length.
        v: values [B, T, HV, V], HV a multiple of H.
        lr: inner learning rate [B, T, HV], >= 0; since steps of a chunk add up, best proportional to 1 / chunk_size.
        momentum: natural logarithm of eta [B, T, HV], <= 0, or None for none.
        decay: natural logarithm of a [B, T, HV], <= 0, or None for a = 1; -inf forgets everything.
        weights: initial weights of each layer [HV, d_in, d_out], from K to V channels; one more row each is a bias.
        chunk_size: tokens whose gradients are taken at the same weights.
        threshold: [B, T, HV], > 0, only with loss="huber": the error from which on the gradient is bounded.
        muon_lr: [B, T, HV], >= 0, only with momentum: W becomes a_t W + muon_lr_t NS(S), with Muon's five steps NS.
        earlier: further pairs that a token learns.
        mask: [B, T] bool, False at padding, which does not change the memory and has an output of zero; or None.
        initial_state: the final state of an earlier call; default: `weights`, with no momentum.
        output_final_state: return the state after the last token; float32, or float64 for float64 inputs.
        cu_seqlens: boundaries [N + 1] of sequences packed into one row.
        backend: "reference", "chunk", "triton", or "auto": the kernels on CUDA where this module has some, else chunk.
        **learning: fields of `Learning`, such as activation="gelu".

    Returns:
        o [B, T, HV, V] in the dtype of q, and the final state or None.
    """
    dims = check_inputs(q, k, v, cu_seqlens)
    given = _checked(
        dims, q, lr=lr, momentum=momentum, decay=decay, threshold=threshold, muon_lr=muon_lr
    )
    pairs, window = _pairs(k, v, lr, earlier, dims)
    rule, norm = _rule(dims, q, weights, chunk_size, given, window, learning)
    if decay is None or (chunk_size == 1 and rule.forget_to == "anchor"):
        decay = torch.zeros_like(lr)  # nothing decays; with "anchor" only steps since the anchor do
    P = sum(W[0].numel() for W in weights)
    shapes = [
        (dims.N, dims.HV, width)
        for width in (P, 0 if momentum is None else P, P if chunk_size > 1 else 0)
    ]
    state = named_state(initial_state, NeuralMemoryState, [*shapes, (dims.N,)], like=q)
    rows = without_padding(mask, q, *pairs, momentum, decay, threshold, muon_lr)
    aligned, mask = pieces_of(q, mask, initial_state is None)
    chosen = choose_backend(backend, q, _kernels_refuse(q, dims, weights, given, norm, rule))
    o, state = per_sequence(
        _form(chosen, aligned),
        cu_seqlens,
        *rows,
        mask,
        initial_state=state,
        piece=PIECE if dual.is_solved(rule, weights, norm) else chunk_size,
        weights=tuple(weights),
        norm=norm,
        rule=rule,
    )
    return o, state if output_final_state else None


def _form(backend: str, aligned: bool) -> Callable:
    """The form that runs; `aligned`: whether a chunk of each row begins with the first token."""
    if backend == "reference":
        return reference.neural_memory
    if backend == "chunk":
        return partial(chunk.neural_memory, aligned=aligned)
    from hf_memory.ops.neural_memory.kernels import neural_memory as in_kernels

    return partial(in_kernels, aligned=aligned)


def _checked(dims: Dims, q: Tensor, **gates: Tensor | None) -> set[str]:
    """The names of gates that are given."""
    for name, gate in gates.items():
        check_gate(name, gate, dims, like=q)
    return {name for name, gate in gates.items() if gate is not None}


def _pairs(
    k: Tensor, v: Tensor, lr: Tensor, earlier: EarlierPairs | None, dims: Dims
) -> tuple[list[Tensor], int]:
    """k, v and lr, to which earlier pairs are appended; and the number of pairs that each token learns."""
    if earlier is None:
        return [k, v, lr], 1
    if not isinstance(earlier, tuple) or len(earlier) != 3 or earlier[0].ndim != 5:
        raise ValueError(
            f"earlier must be EarlierPairs with k [B, T, H, c, K], got {type(earlier).__name__}"
        )
    c = earlier[0].shape[3]
    shapes = ((dims.H, c, dims.K), (dims.HV, c, dims.V), (dims.HV, c))
    for name, x, shape in zip(EarlierPairs._fields, earlier, shapes):
        check_tensor(f"earlier.{name}", x, (dims.B, dims.T, *shape), like=k)
    return [
        torch.cat([x[:, :, :, None], y.to(x.dtype)], 3) for x, y in zip((k, v, lr), earlier)
    ], 1 + c


def _rule(
    dims: Dims,
    q: Tensor,
    weights: tuple[Tensor, ...],
    chunk_size: int,
    given: set[str],
    window: int,
    learning: Learning,
) -> tuple[Rule, Norm | None]:
    """The rule that the options describe, after checking them, and the norm."""
    options: dict = {"forget_to": None, **learning}
    norm = options.pop("norm", None)
    bias = _check_weights(weights, dims, q)
    rule = Rule(chunk_size, bias=bias, muon="muon_lr" in given, window=window, **options)
    _check_options(dims, q, chunk_size, rule.residual, norm)
    _check_choice("activation", rule.activation, tuple(ACTIVATIONS))
    _check_choice("forget_to", rule.forget_to, ("initial", "anchor", "zero", None))
    _check_choice("loss", rule.loss, tuple(LOSSES))
    _check_choice("retention", rule.retention, tuple(RETENTIONS))
    if (rule.loss == "huber") != ("threshold" in given):
        raise ValueError(
            f"threshold must be given with loss='huber', and with it alone, got loss={rule.loss!r}"
        )
    if rule.muon and "momentum" not in given:
        raise ValueError("momentum must be given with muon_lr, got None")
    if rule.max_grad_norm is not None and not (rule.max_grad_norm > 0 and rule.is_linear):
        raise ValueError(
            "max_grad_norm must be positive, or None with another retention, Muon or earlier pairs, "
            f"got {rule.max_grad_norm}"
        )
    return rule._replace(
        forget_to=rule.forget_to or ("initial" if len(weights) > 1 else "zero")
    ), norm


def _kernels_refuse(
    q: Tensor,
    dims: Dims,
    weights: tuple[Tensor, ...],
    given: set[str],
    norm: Norm | None,
    rule: Rule,
) -> str | None:
    """Why there is no kernel for this call, as a clause; None if there is one."""
    widest = max(dims.K, dims.V)
    limits = MAX_KERNEL_CHUNKS[min(q.dtype.itemsize, 4)]
    longest = next((tokens for channels, tokens in limits.items() if widest <= channels), 0)
    options = ("forget_to", "max_grad_norm", "loss", "retention")
    others = [(name, getattr(rule, name), getattr(Rule(), name)) for name in options]
    reasons = (
        (len(weights) != 2, f"weights must be 2 matrices, got {len(weights)}"),
        (rule.bias, "weights must be without bias"),
        (norm is not None, "norm must be None"),
        ("momentum" not in given, "momentum must be given, got None"),
        (rule.muon, "muon_lr must be None"),
        (rule.window > 1, "earlier must be None"),
        *((x != ours, f"{name} must be {ours!r}, got {x!r}") for name, x, ours in others),
        (
            not longest,
            f"K and V must be at most {max(limits)} in {q.dtype}, got {dims.K} and {dims.V}",
        ),
        (
            rule.chunk_size > longest,
            f"chunk_size must be at most {longest} with {widest} channels in {q.dtype}, got {rule.chunk_size}",
        ),
    )
    return next((reason for refused, reason in reasons if refused), kernel_limits(q, dims))


def _check_choice(name: str, given: str | None, choices: tuple) -> None:
    if given not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {given!r}")


def _check_weights(weights: tuple[Tensor, ...], dims: Dims, q: Tensor) -> bool:
    """Whether the weights have biases."""
    if (
        not isinstance(weights, (tuple, list))
        or not weights
        or not all(isinstance(W, Tensor) for W in weights)
    ):
        raise ValueError(
            f"weights must be a tuple of tensors, one for each layer, got {type(weights).__name__}"
        )
    if any(W.ndim != 3 for W in weights):
        raise ValueError(
            f"weights must be [HV, d_in, d_out] each, got {[tuple(W.shape) for W in weights]}"
        )
    bias = weights[0].shape[1] == dims.K + 1
    widths = [dims.K, *(W.shape[2] for W in weights[:-1]), dims.V]
    for n, (W, d_in, d_out) in enumerate(zip(weights, widths, widths[1:])):
        check_tensor(f"weights[{n}]", W, (dims.HV, d_in + bias, d_out), like=q)
    return bias


def _check_options(dims: Dims, q: Tensor, chunk_size: int, residual: bool, norm) -> None:
    check_chunk_size(chunk_size)
    if residual and dims.K != dims.V:
        raise ValueError(
            f"residual must be False unless K equals V, got True with K={dims.K} and V={dims.V}"
        )
    if norm is not None:
        if not isinstance(norm, (tuple, list)) or len(norm) != 2:
            raise ValueError(
                f"norm must be a pair of tensors, weight and bias, got {type(norm).__name__}"
            )
        for name, x in zip(("norm[0]", "norm[1]"), norm):
            check_tensor(name, x, (dims.HV, dims.V), like=q)
