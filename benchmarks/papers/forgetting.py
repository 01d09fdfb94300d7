"""Without training: how long gated memories remember what they have read, given the initial values of their gates.

A gate limits how long a memory remembers, by its initial values for a few tokens to some hundreds
([2307.08621](https://arxiv.org/abs/2307.08621), [2312.06635](https://arxiv.org/abs/2312.06635),
[2405.21060](https://arxiv.org/abs/2405.21060)). The half-lives are as published, and a memory with a gate recalls
pairs that are not older than a few of them.

**Claim.** A memory without a gate never forgets; a gate limits how long it remembers. Head h of retention keeps a
fraction 1 - 2^(-5 - h) of its memory at each token, so its half-lives are 22, 44, 88 ... tokens (Sun et al.,
https://arxiv.org/abs/2307.08621). The sigmoid gates of GLA and gated retention have a temperature of 16, which gives
them a half-life of 16 tokens at initialization (https://arxiv.org/abs/2312.06635). The logarithmic gates of Mamba-2,
Gated DeltaNet and KDA are -A softplus(W x + b), with A in (1, 16) and initial steps in (0.001, 0.1), so their half
lives range from one token to 693 (https://arxiv.org/abs/2405.21060).

**Setting.** Models of eight heads with their initial weights read random tokens. The gates that they compute are then
applied to one key-value pair followed by 2,048 empty tokens. The half-life is the number of tokens during which the
answer to the key of this pair stays above half of what was written; three seeds. In a second part, a memory with 64 key
channels and one given half-life reads 256 random pairs. Recall is measured by the age of a pair, that is, by how many
pairs were read since.

**Expected.** The half-lives above. With a gate, a memory recalls only pairs that are not older than a few half-lives,
and it recalls these better than without a gate, since forgotten pairs no longer interfere.
"""

from statistics import mean, median

import torch
from torch.nn import functional as F

from claim import Claim, Rows
from hf_memory.ops import delta_rule, linear_attention
from interference import recalled
from learning import make
from pictures import curve, label_ends

SEEDS = 3
FAR = 2048
PAIRS = 256
D = 64
SIZES = {"vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8}
GATES = ("retention", "gated retention", "GLA", "Mamba-2", "Gated DeltaNet", "KDA")
HALF_LIVES = (None, 256, 64, 16)  # of the second part, in pairs
RETENTION = [22, 44, 88, 177, 355, 709, 1419, 2839]


def plan(rows: Rows):
    """A model a gate and a seed, then recall by age."""
    for seed in range(SEEDS):
        yield from ({"gate": gate, "seed": seed} for gate in GATES)
        yield from ({"half_life": half_life, "seed": seed} for half_life in HALF_LIVES)


def measure(*, seed: int, gate: str | None = None, half_life: int | None = None) -> dict:
    """Half-lives of a model's gate, or recall by age with one."""
    torch.manual_seed(seed)
    return half_lives(gate) if gate else recall_by_age(half_life)


@torch.no_grad()
def half_lives(gate: str) -> dict:
    """By head, and by channel where the gate has them, in the order of the heads; FAR stands for longer ones."""
    model = make(gate, {**SIZES, "intermediate_size": 256})
    layer = model.model.layers[0]
    hidden_states = layer.input_layernorm(model.model.embed_tokens(torch.randint(64, (1, FAR))))
    g = layer.mixer.decay(hidden_states)
    g = g[0] if isinstance(g, tuple) else g  # [1, T, H] or [1, T, H, K]
    g = g.flatten(2)
    k = F.pad(torch.ones(1, 1, g.shape[2], 1), (0, 0, 0, 0, 0, FAR - 1))
    kept = linear_attention(torch.ones_like(k), k, k, g, scale=1.0)[0][0, :, :, 0]
    return {"half_lives": (kept > 0.5 * kept[:1]).sum(0).tolist()}


def recall_by_age(half_life: int | None) -> dict:
    """Shares of eighths of the pairs, the newest first, by both rules."""
    k, v = (F.normalize(torch.randn(1, PAIRS, 1, D), dim=-1) for _ in range(2))
    g = (
        None
        if half_life is None
        else torch.full((1, PAIRS, 1), -torch.tensor(2.0).log().item() / half_life)
    )
    additive = linear_attention(k, k, v, g, output_final_state=True)[1]
    delta = delta_rule(k, k, v, torch.ones(1, PAIRS, 1), g, output_final_state=True)[1]
    found = {}
    for name, memory in (("additive", additive), ("delta", delta)):
        right = recalled(k[0, :, 0] @ memory[0, 0], v[0, :, 0])
        found[name] = [x.mean().item() for x in right.flip(0).split(PAIRS // 8)]
    return found


def gate_rows(rows: Rows) -> dict[str, list[int]]:
    """Half-lives by gate, of all seeds."""
    return {
        gate: [x for row in rows if row.get("gate") == gate for x in row["half_lives"]]
        for gate in GATES
    }


def table(rows: Rows) -> Rows:
    """Half-lives, then recall by age."""
    return [
        {
            "gate": gate,
            "shortest half-life, tokens": min(lives),
            "median half-life": round(median(lives)),
            "longest half-life": at_most(max(lives)),
        }
        for gate, lives in gate_rows(rows).items()
    ]


def at_most(tokens: int) -> str:
    """A half-life, if it ended within what was read."""
    return f"{tokens}" if tokens < FAR else f"over {FAR}"


def recall(rows: Rows, rule: str, half_life: int | None) -> list[float]:
    """Means over seeds, the newest eighth first."""
    mine = [row[rule] for row in rows if rule in row and row["half_life"] == half_life]
    return [mean(values) for values in zip(*mine)]


def draw(rows: Rows, figure) -> None:
    """Recall by age for both rules, a line a half-life."""
    figure.set_size_inches(10, 3.6)
    rules = {"additive": "additive memory", "delta": "delta rule"}
    for panel, (rule, title) in zip(figure.subplots(1, 2), rules.items()):
        for half_life in HALF_LIVES:
            ages = [PAIRS // 16 * (2 * i + 1) for i in range(8)]
            seeds = [row[rule] for row in rows if rule in row and row["half_life"] == half_life]
            curve(panel, ages, seeds, label=f"{half_life} tokens" if half_life else "no decay")
        panel.set(
            title=f"{title}, {D} key channels",
            xlabel="pairs read since; lines: half-lives",
            ylabel="recall",
            ylim=(-0.02, 1.02),
        )
        label_ends(panel)


def verdict(rows: Rows) -> tuple[str, str]:
    """Retention's half-lives by head, the start of sigmoid gates, the spread of the others, and recall by age."""
    lives = gate_rows(rows)
    heads = enumerate(lives["retention"])
    off = [f"head {i % 8} of retention: {x}" for i, x in heads if x not in near(RETENTION[i % 8])]
    off += [
        f"{gate}: median {median(lives[gate])}"
        for gate in GATES[1:3]
        if abs(median(lives[gate]) - 16) > 1
    ]
    wide = {gate: max(lives[gate]) / min(lives[gate]) for gate in GATES[3:]}
    off += [
        f"{gate}: the longest half-life is {x:.0f} times the shortest"
        for gate, x in wide.items()
        if x < 50
    ]
    plain, (newest, *_, oldest) = recall(rows, "additive", None)[0], recall(rows, "additive", 64)
    summary = f"with a half-life of 64, recall of 256 pairs is {newest:.2f} for the newest 32"
    summary += f" and {oldest:.2f} for the oldest 32"
    if not oldest < 0.2 < plain < newest:
        off.append(summary)
    return (
        ("partly reproduced", "; ".join(off))
        if off
        else ("reproduced", f"{summary}; without decay it is about {plain:.2f} for all")
    )


def near(tokens: int) -> range:
    """What counts as this half-life; all that is longer than what was read counts as FAR."""
    return range(min(tokens, FAR) - 1, min(tokens, FAR) + 2)


CLAIM = Claim(
    "forgetting", "Half-lives of gates", __doc__, 0.1, plan, measure, table, draw, verdict
)
