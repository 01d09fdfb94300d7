"""A learned choice of the old tokens that stay, beside several numbers of full heads and at two sizes.

    python benchmarks/learned_score_grid.py

Students are those of twins.py before training, and the scores are regressions of learned_score.py: of the moving
average and the age, and of all features, each fitted to any tokens of 8 texts of 2,048 tokens, which differ with the
seed. KL is of 2 held-out windows of 2,048 tokens. Writes benchmarks/results/learned_score_grid.json, goes on where it
was stopped, and prints a table with means and 95 % intervals over seeds.
"""

import json
from itertools import product

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

import learned_score
import smollm2
import twins
from hf_memory.evaluation import agreement
from hf_memory.files.folders import replaced
from hf_memory.files.text import Text

RESULTS = smollm2.ROOT / "benchmarks" / "results" / "learned_score_grid.json"
HEADS = ("8 heads", "4 heads", "3 heads of 2,560 tokens", "no head")
SCORES = ("average and age", "average, age, values and keys")
LENGTH, WINDOWS = 2048, 2  # of held-out text
TEXTS = 8  # that a regression is fitted to


def moments(seed: int, tokens: Text, teacher: PreTrainedModel, student: PreTrainedModel) -> Tensor:
    """What the regressions of a seed are fitted to, of the heads that keep tokens."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - LENGTH, (TEXTS,), generator=generator)
    found = [learned_score.of_any_tokens(teacher, student, row) for row in tokens.windows(starts, LENGTH)]
    return torch.stack(found).sum(0)[learned_score.near_heads(student)]


def choose(student: PreTrainedModel, score: str, sums: Tensor, frequencies: Tensor) -> None:
    """Keep tokens by a regression."""
    weights = learned_score.fitted(sums, learned_score.FEATURES[score])
    learned_score.choose_by(student, learned_score.predicted(student, weights, frequencies))


def figures(heads: str, size: str, materials: tuple) -> dict[str, list[float]]:
    """KL of the students of a cell by how they choose, for each seed."""
    teacher, tokenizer, tokens, held_out = materials
    name = f"kept before training, {heads}, {size}, seed 0"
    folder, _ = smollm2.make(f"twins, {name}", twins.recipes()[name], teacher, tokenizer, tokens, {"bf16": True})
    remembered = twins.Remembered(teacher, learned_score.WORK / "teacher")

    def student() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folder).eval()

    def kl(model: PreTrainedModel) -> float:
        return float(agreement(model, remembered, held_out, length=LENGTH, max_tokens=WINDOWS * LENGTH).kl)

    found = {learned_score.AVERAGE: [kl(student())], **{score: [] for score in SCORES}}
    for seed in twins.SEEDS:
        sums = moments(seed, tokens, teacher, student())
        for score in SCORES:
            choose(model := student(), score, sums, learned_score.frequencies_of(teacher))
            found[score].append(kl(model))
    return found


def table(cells: dict[str, dict[str, list[float]]]) -> str:
    """The cells in Markdown."""
    lines = [[name, *(twins.over_seeds(kl, ".4f") for kl in cell.values())] for name, cell in cells.items()]
    return smollm2.markdown(["KL before training", learned_score.AVERAGE, *SCORES], lines)


def main() -> None:
    """Make the cells that are missing."""
    logging.disable_progress_bar()
    materials = smollm2.materials()
    materials[0].set_attn_implementation("eager")  # which gives its weights
    cells = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for heads, size in product(HEADS, twins.SIZES):
        if (name := f"{heads}, {size}") not in cells:
            cells[name] = figures(heads, size, materials)
            with replaced(RESULTS) as partly:
                partly.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
            print(name, cells[name], flush=True)
    print(table(cells))


if __name__ == "__main__":
    main()
