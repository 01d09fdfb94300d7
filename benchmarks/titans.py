"""Titans on the CPU: the dual form against forms with weights for every token.

    python benchmarks/titans.py                # seconds

Writes benchmarks/results/titans_speed.json. What its parts are worth is a claim (benchmarks/claims/ablation.py).
"""

import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait sleep: before torch is imported

import torch
from torch.nn import functional as F

from hf_memory.ops import neural_memory

RESULTS = Path(__file__).parent / "results"
SHAPE = {"B": 1, "T": 1024, "H": 8, "D": 64, "hidden": 128, "chunk_size": 16}


def per_token_weights(q, k, v, lr, momentum, decay, weights, b, weights_of):
    """The memory of two matrices as its equations say, with the weights after every token of a chunk in memory.

    `weights_of` makes them [B, H, b, d_in, d_out] for a layer, and its momentum, from the steps of the tokens.
    """
    tokens = (x.transpose(1, 2).split(b, dim=2) for x in (q, k, v, lr, momentum.exp(), decay.exp()))
    W = [w[None].expand(q.shape[0], -1, -1, -1) for w in weights]
    initial, S, outputs = list(W), [torch.zeros_like(w) for w in W], []
    for q, k, v, lr, eta, a in zip(*tokens):
        z = k @ W[0]
        x, slope = F.silu(z), z.sigmoid() * (1 + z * (1 - z.sigmoid()))
        e = x @ W[1] - v
        d = (e @ W[1].mT) * slope
        every = []
        for i, (rows, gradient) in enumerate(((k, d), (x, e))):
            steps = (lr[..., None] * rows)[..., :, None] * gradient[..., None, :]
            stacked, S[i] = weights_of(W[i], S[i], initial[i], steps, eta, a)
            W[i] = stacked[:, :, -1]
            every.append(stacked)
        outputs.append((F.silu(q[:, :, :, None] @ every[0]) @ every[1])[:, :, :, 0])
    return torch.cat(outputs, 2).transpose(1, 2)


def in_turn(W, S, initial, steps, eta, a):
    """One token after the other: S <- eta S - step, W <- initial + a (W - initial) + S."""
    every = []
    for j in range(steps.shape[2]):
        S = eta[:, :, j, None, None] * S - steps[:, :, j]
        W = initial + a[:, :, j, None, None] * (W - initial) + S
        every.append(W)
    return torch.stack(every, 2), S


def at_once(W, S, initial, steps, eta, a):
    """All tokens together, by products with the lower triangles of eta_{i+1} ... eta_t and a_{i+1} ... a_t."""

    def run(start, inputs, c):
        later = torch.ones(c.shape[2], c.shape[2]).tril(-1).bool()
        sums = c.log()[..., None].expand(*c.shape, c.shape[2]).masked_fill(~later, 0).cumsum(-2)
        triangle = sums.masked_fill(later.mT, -torch.inf).exp()
        product = torch.einsum("bhti,bhixy->bhtxy", triangle, inputs)
        return product + c.cumprod(-1)[..., None, None] * start[:, :, None]

    S = run(S, -steps, eta)
    return initial[:, :, None] + run(W - initial, S, a), S[:, :, -1]


def median_seconds(call, runs: int = 5) -> float:
    """After one to warm up."""
    call()
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


@torch.no_grad()
def speed() -> None:
    """Forward of all forms, after a check that they are the same function."""
    torch.manual_seed(0)
    B, T, H, D, hidden, b = SHAPE.values()
    q, k = (F.normalize(torch.randn(B, T, H, D), dim=-1) for _ in range(2))
    v, lr = torch.randn(B, T, H, D), torch.rand(B, T, H) / b
    momentum, decay = F.logsigmoid(torch.randn(B, T, H)), F.logsigmoid(torch.randn(B, T, H) + 6)
    weights = torch.randn(H, D, hidden) / D**0.5, torch.randn(H, hidden, D) * 0.1 / hidden**0.5

    def dual():
        return neural_memory(q, k, v, lr, momentum, decay, weights, chunk_size=b)[0]

    def materialised(weights_of):
        return lambda: per_token_weights(q, k, v, lr, momentum, decay, weights, b, weights_of)

    forms = {"dual": dual, "weights_at_once": materialised(at_once), "weights_in_turn": materialised(in_turn)}
    for form in forms.values():
        torch.testing.assert_close(dual(), form(), rtol=1e-3, atol=1e-4)
    results = {name: median_seconds(form, runs=9) for name, form in forms.items()}
    results |= {f"{name}_ratio": results[name] / results["dual"] for name in list(forms)[1:]}
    print({name: round(x, 4) for name, x in results.items()})
    machine = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    (RESULTS / "titans_speed.json").write_text(json.dumps({**SHAPE, **machine, **results}, indent=1))


if __name__ == "__main__":
    RESULTS.mkdir(exist_ok=True)
    speed()
