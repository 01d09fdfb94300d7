"""What the recipes cost: the table of recipes/README.md, from the run files and the published sizes of their teachers.

    python benchmarks/recipe_costs.py

It is what `hf-memory convert --config RECIPE --dry-run --gpu h100` prints, without teacher, tokenizer and text.
"""

import json
import os
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # threads that wait sleep: before torch is imported

import torch
import yaml
from transformers import AutoConfig

from hf_memory.cli.convert import StudentFlags
from hf_memory.conversion import resolve
from hf_memory.conversion.costs import costs, read_device
from hf_memory.evaluation import cache_share

RECIPES = Path(__file__).parents[1] / "recipes"
DEVICES = {"qwen3-8b": "8xh100"}  # for others one H100
START = "<!-- costs -->"
END = "<!-- /costs -->"
CONTEXT = 32768
PARTS = ("student", "teacher", "optimizer", "gradients", "activations", "logits")
HEADER = ("recipe", "GPUs", "tokens", *PARTS, "peak", "time", "cache at 32,768")


def row(name: str, sizes: dict) -> list[str]:
    """A row of the table."""
    run = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    stages = {
        x: [f"{k}={v}" for k, v in run[x].items()] for x in ("transfer", "distillation") if x in run
    }
    pairs = [f"{k}={str(v).lower()}" for k, v in run.get("option", {}).items()]
    flags = StudentFlags(
        keep=run["keep"], option=pairs, servable=run.get("servable", False), **stages
    )
    teacher = AutoConfig.for_model(**sizes)
    plan = resolve(flags.recipe(), teacher, torch.zeros(4096, dtype=torch.long))
    words = DEVICES.get(name, "h100")
    number, device = read_device(words)
    training = run["training"] | (
        {"bf16": True, "activation_checkpointing": True} if number > 1 else {}
    )
    found = costs(plan, training, processes=number)
    most = max(found, key=lambda cost: cost.peak)
    parts = [f"{most.parts[part] / 1e9:.1f}" for part in PARTS]
    time = sum(cost.seconds(device, number) for cost in found) / 60
    share = cache_share(plan.student, teacher, CONTEXT)
    tokens = f"{sum(cost.tokens for cost in found):,}"
    return [
        f"`{name}.yaml`",
        words,
        tokens,
        *parts,
        f"{most.peak / 1e9:.1f}",
        f"{time:.0f} min",
        f"{share:.0%}",
    ]


def main() -> None:
    """The table, printed and written."""
    rows = [HEADER, ["---"] * len(HEADER)]
    for name, sizes in sorted(json.loads((RECIPES / "teachers.json").read_text()).items()):
        rows.append(row(name, sizes))
        print(*rows[-1], flush=True)
    page = RECIPES / "README.md"
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    before, _, rest = page.read_text(encoding="utf-8").partition(START)
    page.write_text(
        f"{before}{START}\n\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
