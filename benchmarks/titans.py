"""Titans on the CPU: the dual form against one with a weight for every token, and training of all variants.

    python benchmarks/titans.py speed          # seconds
    python benchmarks/titans.py training       # 200 steps of 4096 tokens of each variant; resumes

Writes benchmarks/results/titans_{speed,training}.json.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import hf_memory
from hf_memory.demo import sections
from hf_memory.ops import neural_memory

RESULTS = Path(__file__).parent / "results"
SHAPE = {"B": 1, "T": 1024, "H": 8, "D": 64, "hidden": 128, "chunk_size": 16}
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
VARIANTS = {
    f"{variant}, depth {depth}": {"variant": variant, "memory_depth": depth}
    for depth in (2, 1)
    for variant in ("lmm", "mac", "mag", "mal")
}


def per_token_weights(q, k, v, lr, momentum, decay, weights, b):
    """The memory of two matrices as its equations say, with the weights after every token of a chunk in memory."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T, D]
    lr, eta, a = (x.transpose(1, 2)[..., None, None] for x in (lr, momentum.exp(), decay.exp()))
    W = [w[None].expand(q.shape[0], -1, -1, -1) for w in weights]
    initial, S, outputs = list(W), [torch.zeros_like(w) for w in W], []
    for start in range(0, q.shape[2], b):
        t = slice(start, start + b)
        z = k[:, :, t] @ W[0]
        x, slope = F.silu(z), z.sigmoid() * (1 + z * (1 - z.sigmoid()))
        e = x @ W[1] - v[:, :, t]
        d = (e @ W[1].mT) * slope
        gradients = (
            k[:, :, t, :, None] * d[:, :, :, None, :],
            x[:, :, :, :, None] * e[:, :, :, None, :],
        )  # [B, H, b, d_in, d_out]
        every: list[list[torch.Tensor]] = [[], []]
        for i, gradient in enumerate(gradients):
            for j in range(gradient.shape[2]):
                at = start + j
                S[i] = eta[:, :, at] * S[i] - lr[:, :, at] * gradient[:, :, j]
                W[i] = initial[i] + a[:, :, at] * (W[i] - initial[i]) + S[i]
                every[i].append(W[i])
        first, second = (torch.stack(x, 2) for x in every)
        outputs.append((F.silu(q[:, :, t, None] @ first) @ second)[:, :, :, 0])
    return torch.cat(outputs, 2).transpose(1, 2)


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
    """Forward of both, after a check that they are the same function."""
    torch.manual_seed(0)
    B, T, H, D, hidden, b = SHAPE.values()
    q, k = (F.normalize(torch.randn(B, T, H, D), dim=-1) for _ in range(2))
    v, lr = torch.randn(B, T, H, D), torch.rand(B, T, H) / b
    momentum, decay = F.logsigmoid(torch.randn(B, T, H)), F.logsigmoid(torch.randn(B, T, H) + 6)
    weights = torch.randn(H, D, hidden) / D**0.5, torch.randn(H, hidden, D) * 0.1 / hidden**0.5

    def dual():
        return neural_memory(q, k, v, lr, momentum, decay, weights, chunk_size=b)[0]

    def materialised():
        return per_token_weights(q, k, v, lr, momentum, decay, weights, b)

    torch.testing.assert_close(dual(), materialised(), rtol=1e-3, atol=1e-4)
    results = {"dual": median_seconds(dual), "per_token_weights": median_seconds(materialised)}
    results["ratio"] = results["per_token_weights"] / results["dual"]
    print({name: round(x, 4) for name, x in results.items()})
    machine = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    (RESULTS / "titans_speed.json").write_text(json.dumps({**SHAPE, **machine, **results}, indent=1))


def losses_of(options: dict, steps: int, length: int) -> list[float]:
    """Train a small byte model on the language reference, one text of `length` bytes a step."""
    torch.manual_seed(0)
    model = hf_memory.TitansForCausalLM(hf_memory.TitansConfig(**SIZES, **options))
    text = torch.tensor(list("".join(sections()).encode()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        start = int(torch.randint(len(text) - length, (1,), generator=generator))
        tokens = text[None, start : start + length]
        loss = model(tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def training(steps: int = 200, length: int = 4096) -> None:
    """All variants; every loss must be finite."""
    file = RESULTS / "titans_training.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else {}
    for name, options in VARIANTS.items():
        if name not in rows:
            start = time.perf_counter()
            losses = losses_of(options, steps, length)
            rows[name] = {
                "finite": all(map(torch.isfinite, torch.tensor(losses))),
                "first": losses[0],
                "last_20": statistics.mean(losses[-20:]),
                "seconds_a_step": (time.perf_counter() - start) / steps,
            }
            file.write_text(json.dumps({"steps": steps, "length": length, **SIZES, "rows": rows}, indent=1))
        print(f"{name:14} " + "  ".join(f"{key} {value:.3f}" for key, value in rows[name].items()), flush=True)


if __name__ == "__main__":
    RESULTS.mkdir(exist_ok=True)
    if sys.argv[1:] == ["speed"]:
        speed()
    elif sys.argv[1:] == ["training"]:
        training()
    else:
        sys.exit(__doc__)
