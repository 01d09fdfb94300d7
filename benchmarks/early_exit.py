"""Early exit: layers, speed and quality by confidence and threshold, on a trained Llama and on SmolLM2-135M.

    python benchmarks/early_exit.py              # both: half an hour on one core
    python benchmarks/early_exit.py small        # a small Llama on bytes, taught to predict early; minutes
    python benchmarks/early_exit.py SmolLM2      # as it is: nobody taught it

Texts are Python's documentation. The small Llama (8 layers) is trained with `exit_loss` on nine tenths of it. Each row
reads texts of 64 tokens, the first half as a prompt and the rest token by token: layers that were computed for a token,
CPU time of one thread for it beside the whole model's, how often the likeliest token is the whole model's, and
perplexity beside its. With exact states all layers are computed: the difference is what copied hidden states cost.

Prints a table, and writes benchmarks/results/early_exit.json.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for examples

from examples import real_teacher as example  # noqa: E402

from hf_memory.cache_argument import CACHE, cache_of  # noqa: E402
from hf_memory.conversion import load_teacher, load_tokenizer  # noqa: E402
from hf_memory.decoding import EarlyExit, exit_loss, fit_classifier  # noqa: E402
from hf_memory.demo import sections  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "early_exit.json"
LENGTH = 64  # tokens of a text
SMALL = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8}
STEPS, BATCH, WINDOW = 240, 8, 128
THRESHOLDS = {"softmax": (0.9, 0.6, 0.3), "cosine": (0.99, 0.95, 0.9), "classifier": (0.9, 0.7, 0.5)}


@torch.no_grad()
def decode(model: PreTrainedModel, texts: Tensor) -> dict[str, Tensor | float]:
    """Predictions and losses of the second half of each text, and milliseconds a token."""
    half, chosen, losses, seconds = texts.shape[1] // 2, [], [], 0.0
    for row in texts.split(1):
        cache = cache_of(model(row[:, :half], use_cache=True))
        for t in range(half, row.shape[1] - 1):
            start = time.thread_time()
            logits = model(row[:, t : t + 1], **{CACHE: cache}, use_cache=True).logits[0, -1]
            seconds += time.thread_time() - start
            chosen.append(logits.argmax())
            losses.append(F.cross_entropy(logits.float(), row[0, t + 1]))
    ms = 1e3 * seconds / len(chosen)
    return {"chosen": torch.stack(chosen), "loss": torch.stack(losses).mean(), "ms": ms}


@torch.no_grad()
def agree_with_exact_states(model: PreTrainedModel, texts: Tensor, whole: Tensor) -> float:
    """How often the likeliest token is the whole model's, where all layers are computed: of all tokens at once."""
    half = texts.shape[1] // 2
    found = [model(row, use_cache=False).logits[0, half:-1].argmax(-1) for row in texts.split(1)]
    return float((torch.cat(found) == whole).float().mean())


def rows_of(model: PreTrainedModel, texts: Tensor, learned: Tensor) -> list[dict]:
    """A row for each confidence and threshold; classifiers learn from other texts."""
    whole, rows = decode(model, texts), []
    kinds = {"softmax": "softmax", "cosine": "cosine", "classifier": fit_classifier(model, learned)}
    for kind, confidence in kinds.items():
        for threshold in THRESHOLDS[kind]:
            how: dict = {"confidence": confidence, "threshold": threshold}
            with EarlyExit(model, **how) as early:
                found = decode(model, texts)
            with EarlyExit(model, states="exact", **how):
                exact = agree_with_exact_states(model, texts, whole["chosen"])
            rows.append(
                {
                    "confidence": kind,
                    "threshold": threshold,
                    "layers": early.mean_depth(),
                    "of": early.num_layers,
                    "time": found["ms"] / whole["ms"],
                    "same": float((found["chosen"] == whole["chosen"]).float().mean()),
                    "same_with_exact_states": exact,
                    "perplexity": float((found["loss"] - whole["loss"]).exp()),
                }
            )
            print(rows[-1], flush=True)
    return rows


def train(tokens: Tensor) -> PreTrainedModel:
    """A small Llama, taught to predict at its exits too."""
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, num_attention_heads=8, tie_word_embeddings=True, output_hidden_states=True)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, STEPS)
    for step in range(STEPS):
        starts = torch.randint(len(tokens) - WINDOW, (BATCH, 1))
        batch = tokens[starts + torch.arange(WINDOW)]
        outputs = model(batch, use_cache=False)
        loss = exit_loss(model, outputs, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss:.3f}", flush=True)
    model.config.output_hidden_states = False
    return model.eval()


def windows(tokens: Tensor, count: int) -> Tensor:
    """[count, LENGTH], evenly spread over a text."""
    starts = torch.linspace(0, len(tokens) - LENGTH, count).long()
    return tokens[starts[:, None] + torch.arange(LENGTH)]


def measure_small() -> dict:
    """A small model that was taught to predict early."""
    text = torch.tensor(list("".join(sections()).encode()))
    learn, held = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    model = train(learn)
    return {"small Llama, taught": {"rows": rows_of(model, windows(held, 16), windows(learn, 60))}}


def measure_smollm2() -> dict:
    """The teacher of examples/real_teacher.py."""
    teacher = str(example.fetch_teacher())
    model, tokenizer = load_teacher(teacher).eval(), load_tokenizer(teacher)
    tokens = tokenizer("".join(sections()), return_tensors="pt", verbose=False)["input_ids"][0]
    half = len(tokens) // 2
    return {"SmolLM2-135M": {"rows": rows_of(model, windows(tokens[half:], 8), windows(tokens[:half], 16))}}


def table(found: dict) -> str:
    """Markdown."""
    lines = [
        "| model | confidence | threshold | layers | time of a token | same token | with exact states | perplexity |"
    ]
    lines.append("|" + " --- |" * 8)
    for name, of_model in found.items():
        for row in of_model["rows"]:
            cells = name, row["confidence"], f"{row['threshold']:g}", f"{row['layers']:.1f} of {row['of']}"
            cells += f"{row['time']:.2f}", f"{row['same']:.1%}", f"{row['same_with_exact_states']:.1%}"
            lines.append("| " + " | ".join((*cells, f"{row['perplexity']:.2f}")) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is asked for, and write."""
    torch.set_num_threads(1)
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, measure in (("small", measure_small), ("SmolLM2", measure_smollm2)):
        if name in sys.argv[1:] or len(sys.argv) == 1:
            found |= measure()
            RESULTS.write_text(json.dumps(found, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()
