"""Without training: how many random key-value pairs an additive memory and a delta rule recall.

An additive memory adds each pair to what is there, and a delta rule replaces what was bound to the key
([2102.11174](https://arxiv.org/abs/2102.11174), [2406.06484](https://arxiv.org/abs/2406.06484)). So of 256 pairs in
64 channels the additive memory recalls more, and of the last 32 of 512 pairs the delta rule recalls nearly all.

**Claim.** (Schlag et al., https://arxiv.org/abs/2102.11174; Yang et al., https://arxiv.org/abs/2406.06484.) An additive
memory with d key channels that holds N pairs answers a key with its value plus noise that has (N - 1) / d times the
energy of a value. After t further pairs, the error of the first pair has grown to the square root of t / d. A delta
rule replaces the value that is bound to a key. Its error of the first pair stays near the square root of 2, which is
the distance to an unrelated value. So a delta rule remembers recent pairs; it does not hold more pairs. If N > d, it
recalls fewer of all pairs than an additive memory does, but it recalls more of them if the keys are correlated or if it
may read the pairs several times. Attention, and DeltaFormer with a read kernel that is not linear, recall all pairs.

**Setting.** The operators alone, without a model: d = 64, random unit keys and values, one head, write strength 1, five
seeds. Recall is the fraction of keys whose answer is nearer to the true value than to any other of the N values.
Softmax scores are scaled by sqrt(d), which is what keys and queries of length sqrt(d) give with the usual scale.

**Expected.** Of 256 pairs, the additive memory recalls 0.76 and the delta rule 0.25. Of the last 32 of 512 pairs, they
recall 0.28 and 1.00. Of 48 pairs whose keys have a mean cosine of 0.26, the additive memory recalls about 0.62 and the
delta rule 0.81, or 1.00 after eight readings. At a mean cosine of 0.67, a single reading helps neither of them.
"""

from statistics import mean

import torch
from torch import Tensor
from torch.nn import functional as F

from claim import Claim, Rows, spread
from hf_memory.ops import delta_rule, linear_attention
from hf_memory.ops.deltaformer import read
from pictures import curve, label_ends, plain_ticks

D = 64
SEEDS = 5
PAIRS = (8, 16, 32, 64, 128, 256, 512)
SHOWN = (16, 64, 256)  # of these, in the table
EXPECTED = {  # and how far off a figure may be, which is what draws of so few pairs differ by
    "noise, N=64": (63 / D, 0.1),
    "noise, N=512": (511 / D, 0.8),
    "additive, N=256": (0.76, 0.05),
    "delta, N=256": (0.25, 0.05),
    "first, additive, N=512": ((512 / D) ** 0.5, 0.5),
    "first, delta, N=512": (2**0.5, 0.2),
    "last 32 of 512, additive": (0.28, 0.1),
    "last 32 of 512, delta": (1.0, 0.05),
    "cosine 0.26, additive": (0.62, 0.15),
    "cosine 0.26, delta": (0.81, 0.1),
    "cosine 0.26, delta, 8": (1.0, 0.02),
    "cosine 0.67, delta": (0.02, 0.05),
    "bound again, additive": (1.0, 0.01),
    "bound again, delta": (0.0, 0.01),
}
READS = ("softmax", "linear", "relu", "round")


def additive(keys: Tensor, values: Tensor) -> Tensor:
    """A memory [K, V] of pairs [N, K] and [N, V]."""
    k = keys[None, :, None]
    v = values[None, :, None]
    return linear_attention(k, k, v, output_final_state=True)[1][0, 0]


def delta(keys: Tensor, values: Tensor, readings: int = 1) -> Tensor:
    """The same by the delta rule, of pairs that are read several times."""
    k, v = (x.repeat(readings, 1)[None, :, None] for x in (keys, values))
    return delta_rule(k, k, v, torch.ones(k.shape[:3]), output_final_state=True)[1][0, 0]


def by_kernel(kernel: str, keys: Tensor, values: Tensor) -> Tensor:
    """Answers [N, V] to all keys of DeltaFormer's read of all pairs; a query's own key and value are zero."""
    k, u = (F.pad(x, (0, 0, 0, 1)).expand(len(keys), -1, -1)[:, :, None] for x in (keys, values))
    return read(
        keys[:, None, None], k, u, kernel=kernel, scale=D**0.5 if kernel == "softmax" else 1.0
    )[:, 0, 0]


WAYS = {"additive": additive, "delta": delta}


def recalled(answers: Tensor, values: Tensor) -> Tensor:
    """Which of the values is nearest to its answer [N]."""
    return ((answers @ values.mT).argmax(-1) == torch.arange(len(values))).double()


def pairs(count: int, cosine: float = 0.0) -> tuple[Tensor, Tensor]:
    """Unit keys of a mean cosine, and unit values."""
    common, keys, values = (F.normalize(torch.randn(n, D), dim=-1) for n in (1, count, count))
    return F.normalize((1 - cosine) ** 0.5 * keys + cosine**0.5 * common, dim=-1), values


def measure(*, seed: int) -> dict:
    """All figures of one draw."""
    torch.manual_seed(seed)
    found = {"additive": [], "delta": [], "noise": [], "first, additive": [], "first, delta": []}
    found |= {kernel: [] for kernel in READS}
    for count in PAIRS:
        keys, values = pairs(count)
        sums = keys @ additive(keys, values)
        last = keys @ delta(keys, values)
        found["noise"].append((sums - values).square().sum(-1).mean().item())
        for name, answers in zip(WAYS, (sums, last)):
            found[name].append(recalled(answers, values).mean().item())
            found[f"first, {name}"].append((answers[0] - values[0]).norm().item())
        for kernel in READS:
            found[kernel].append(recalled(by_kernel(kernel, keys, values), values).mean().item())
    for name, answers in zip(WAYS, (sums, last)):
        found[f"last 32 of {count}, {name}"] = recalled(answers, values)[-32:].mean().item()
    return found | correlated() | bound_again()


def correlated() -> dict:
    """Recall of 48 pairs whose keys are alike."""
    found = {}
    for cosine in (0.26, 0.67):
        keys, values = pairs(48, cosine)
        ways = {
            "additive": additive(keys, values),
            "delta": delta(keys, values),
            "delta, 8": delta(keys, values, 8),
        }
        for name, memory in ways.items():
            found[f"cosine {cosine}, {name}"] = recalled(keys @ memory, values).mean().item()
    return found


def plan(rows: Rows):
    """A draw a seed."""
    return ({"seed": seed} for seed in range(SEEDS))


def bound_again() -> dict:
    """Error of 16 pairs after each of the orthonormal keys was bound to another value first."""
    keys = torch.linalg.qr(torch.randn(D, D))[0][:16]
    values = pairs(32)[1]
    both = keys.repeat(2, 1)
    errors = {
        name: (keys @ way(both, values) - values[16:]).norm(dim=-1) for name, way in WAYS.items()
    }
    return {f"bound again, {name}": error.mean().item() for name, error in errors.items()}


def table(rows: Rows) -> Rows:
    """Both memories: recall by the number of pairs, of the last pairs alone, and after other values were bound."""
    return [
        {
            "memory": READERS[way],
            **{f"recall of {count} pairs": f"{at(rows, way, count):.2f}" for count in SHOWN},
            "of the last 32 of 512": spread(rows, f"last 32 of 512, {way}"),
            "error of keys that were bound again": spread(rows, f"bound again, {way}"),
        }
        for way in WAYS
    ]


def at(rows: Rows, key: str, count: int) -> float:
    """Mean over seeds at a number of pairs."""
    return mean(row[key][PAIRS.index(count)] for row in rows)


READERS = {
    "additive": "additive memory",
    "delta": "delta rule",
    "softmax": "attention, softmax",
    "relu": "attention, relu",
    "round": "attention, round",
}


def draw(rows: Rows, figure) -> None:
    """Recall, and the error of the first pair, over pairs / key size."""
    figure.set_size_inches(11, 3.6)
    recall, error = figure.subplots(1, 2)
    for key, label in READERS.items():
        curve(recall, PAIRS, [row[key] for row in rows], label=label)
    for key in ("additive", "delta"):
        curve(error, PAIRS, [row[f"first, {key}"] for row in rows], label=READERS[key])
    error.plot(PAIRS, [(n / D) ** 0.5 for n in PAIRS], "k:", label="expected of an additive memory")
    error.axhline(2**0.5, color="gray", linestyle="--", label="an unrelated value")
    for axes, label in ((recall, "recall of all pairs"), (error, "error of the first pair")):
        plain_ticks(axes, PAIRS)
        axes.set(xlabel=f"pairs written, with {D} key channels", ylabel=label, ylim=(0, None))
    label_ends(recall)
    label_ends(error)


def figures(rows: Rows) -> dict[str, float]:
    """Means over seeds, by the names of EXPECTED."""
    found = {}
    for key, value in rows[0].items():
        if isinstance(value, list):
            found |= {f"{key}, N={n}": at(rows, key, n) for n in PAIRS}
        else:
            found[key] = mean(row[key] for row in rows)
    return found


def verdict(rows: Rows) -> tuple[str, str]:
    """Against the figures that are expected."""
    found = figures(rows)
    off = [
        key for key, (value, tolerance) in EXPECTED.items() if abs(found[key] - value) > tolerance
    ]
    if off:
        return "partly reproduced", ", ".join(
            f"{key}: {found[key]:.2f}, but {EXPECTED[key][0]:.2f} was expected" for key in off
        )
    return (
        "reproduced",
        f"{len(EXPECTED)} of {len(EXPECTED)} figures agree with the expected values",
    )


CLAIM = Claim(
    "interference",
    "Interference and overwriting",
    __doc__,
    0.1,
    plan,
    measure,
    table,
    draw,
    verdict,
)
