"""The delta rule in a module of your own, which learns to look values up by their keys.

    python examples/op_in_a_module.py

A row shows pairs of a key and a value, and then some keys again. A model with one such layer says
which value belongs to each: nothing but the memory can carry it there.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that wait sleep

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_memory.ops import delta_rule

KEYS, VALUES, PAIRS, QUESTIONS = 16, 16, 8, 8


class DeltaMemory(nn.Module):
    """q, k and v from the input; what a key is bound to is replaced by a share beta."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.beta = nn.Linear(width, heads)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, width] -> the same
        q, k, v = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).chunk(3, dim=-2)  # [B, T, H, K]
        k = F.normalize(k, dim=-1)  # the op needs keys of unit length
        o, _ = delta_rule(q, k, v, self.beta(x).sigmoid())
        return self.output(o.flatten(-2))


def make_rows(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [B, T], values [B, T] (0 where they are asked for), and the answers [B, QUESTIONS]."""
    keys = torch.rand(count, KEYS).argsort(dim=1)[:, :PAIRS]
    values = torch.randint(1, VALUES + 1, (count, PAIRS))
    asked = torch.randint(PAIRS, (count, QUESTIONS))
    shown = torch.cat([values, torch.zeros_like(asked)], dim=1)
    return torch.cat([keys, keys.gather(1, asked)], dim=1), shown, values.gather(1, asked)


torch.manual_seed(0)
parts = {"key": nn.Embedding(KEYS, 64), "value": nn.Embedding(VALUES + 1, 64)}
model = nn.ModuleDict(parts | {"memory": DeltaMemory(64, 2), "head": nn.Linear(64, VALUES + 1)})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(101):
    keys, values, answers = make_rows(64)
    hidden = model["memory"](model["key"](keys) + model["value"](values))
    logits = model["head"](hidden[:, PAIRS:])
    F.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 25 == 0:
        print(f"step {step}: {(logits.argmax(-1) == answers).float().mean():.0%} of answers right")
