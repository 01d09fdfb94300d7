"""Which heads do answers need? Untrained students of SmolLM2 with eight full heads, chosen in three ways.

    python benchmarks/answer_heads.py

Heads are ranked by their retrieval, by their part in the teacher's answers to questions about chains of
variables (`window_divergences`; these questions are not those that are scored), and by the sum of both, each relative
to its largest. The other heads have a window of 259 tokens and the first four. Students answer 24 questions of each
kind in prompts of 512 tokens, in bfloat16. Writes benchmarks/results/answer_heads.json.
"""

import json
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait sleep: before torch is imported

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from head_choice import ROOT
from hf_memory.conversion import carry_over, load_teacher, load_tokenizer, make_student, read_tokens
from hf_memory.conversion.students.heads import by_layer, rank_heads_by_retrieval, ranked, window_divergences
from hf_memory.evaluation.scores import KINDS, ask, places, score
from smollm2 import example

RESULTS = ROOT / "benchmarks" / "results" / "answer_heads.json"
WINDOW, FIRST, HEADS, LENGTH = 259, 4, 8, 512
RANKED_ON, SCORED = 8, 24  # questions
GROUPS = ("retrieval", "long_answers", "turns")


def questions(tokenizer):
    """Questions about chains with their answers, and the places before the answers' tokens."""
    (place,) = (x for x in places("retrieval", (LENGTH,)) if x.kind == "variables")
    for i in range(RANKED_ON):
        prompt, question = ask(tokenizer, KINDS["retrieval"]["variables"], place, f"other {i}")
        answer = tokenizer(question.answer, add_special_tokens=False)["input_ids"]
        row = torch.tensor([prompt + answer])
        yield row, torch.arange(len(prompt) - 1, row.shape[1] - 1)


def scores(model: PreTrainedModel, tokenizer) -> dict[str, float]:
    """Mean score of each kind of question whose answer stands in the text."""
    model = model.eval().to(torch.bfloat16)
    return {
        str(place): float(score(model, tokenizer, group, place, items=SCORED))
        for group in GROUPS
        for place in places(group, (LENGTH,))
    }


def main() -> None:
    """All rows."""
    logging.set_verbosity_error()
    file = str(example.fetch_teacher())
    teacher, tokenizer = load_teacher(file).eval(), load_tokenizer(file)
    tokens = read_tokens([example.fetch_text()], tokenizer, limit=400_000)[:360_000]
    chains = window_divergences(teacher, list(questions(tokenizer)), window=WINDOW, first=FIRST)
    retrieval = torch.zeros_like(chains)
    for layer, head, x in rank_heads_by_retrieval(teacher, tokens):
        retrieval[layer, head] = x
    rankings = {"retrieval": retrieval, "chains": chains, "both": chains / chains.max() + retrieval / retrieval.max()}
    rows = {"teacher": {"scores": scores(load_teacher(file), tokenizer)}}
    for name, found in rankings.items():
        heads = [(x.layer, x.head) for x in ranked(found)[:HEADS]]
        options = {"full_attention_heads": by_layer(heads, len(found)), "sliding_window": WINDOW}
        student = make_student(teacher, "attention", num_sink_tokens=FIRST, **options)
        carry_over(student, teacher)
        rows[name] = {"heads": heads, "scores": scores(student, tokenizer)}
        print(name, rows[name], flush=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
