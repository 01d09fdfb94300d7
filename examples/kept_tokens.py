"""Which tokens of a text the heads of a student still hold at its end, as a page with one column for each policy.

    python examples/kept_tokens.py student my_text.txt kept.html
    python examples/kept_tokens.py student my_text.txt kept.html change_of_output random

The darker a token, the more heads hold it, among those that do not keep everything. The first tokens and the window
stay in any case. The student is that of a folder or a repository whose heads keep tokens beside a window; without names
of policies, received attention and change of the output are shown.
"""

import html
import os
import string
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that wait sleep

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_memory.evaluation import coloured_text, held_tokens, text_of_tokens

LENGTH = 2048  # tokens of the text that are read
POLICIES = ("received_attention", "change_of_output")
PAGE = """<!doctype html><meta charset="utf-8"><title>Kept tokens</title>
<style>
body {{ font: 14px/1.7 system-ui, sans-serif; margin: 2em; color: #222 }}
main {{ display: grid; grid-template-columns: repeat({columns}, 1fr); gap: 2em }}
section {{ white-space: pre-wrap; overflow-wrap: anywhere }}
span {{ border-radius: 2px; background: rgb(255 140 0 / var(--share)) }}
</style>
<h1>What heads hold after {tokens} tokens</h1>
<p>The darker a token, the more of the {heads} heads with a window hold it. {always} stay in any case.</p>
<main>{sections}</main>
"""


def section(policy: str, words: list[str], of_heads: Tensor, window: int) -> str:
    """A column: what share is punctuation or white space, and the text."""
    shares = of_heads.double().mean(0).tolist()
    older = slice(max(0, len(words) - window))
    marks = string.punctuation + string.whitespace
    says_little = torch.tensor([not word.strip(marks) for word in words[older]], dtype=torch.bool)
    kept = of_heads[:, older]
    part = kept[:, says_little].sum().item() / max(1, kept.sum().item())
    text = coloured_text(words, shares)
    heading = f"<h2>{html.escape(policy)}</h2>"
    return f"<section>{heading}<p>{part:.0%} of what is kept is punctuation or white space.</p>{text}</section>"


def page(folder: str, text: str, policies: tuple[str, ...]) -> str:
    """The page of a text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(text, return_tensors="pt").input_ids[:, :LENGTH]
    words = [*text_of_tokens(tokenizer, tokens[0].tolist())]
    sections = []
    for policy in policies:
        model = AutoModelForCausalLM.from_pretrained(folder, eviction=policy).eval()
        config = model.config
        cache = DynamicCache(config=config)
        with torch.no_grad():
            model(tokens, past_key_values=cache, logits_to_keep=1)
        of_heads = held_tokens(model, cache)
        window = config.sliding_window + config.kept_block_size
        sections.append(section(policy, words, of_heads, window))
    return PAGE.format(
        columns=len(policies),
        tokens=len(words),
        heads=len(of_heads),
        always=f"The first {config.num_sink_tokens} tokens and the last {config.sliding_window}",
        sections="".join(sections),
    )


def main() -> None:
    """Write the page."""
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    folder, text, output, *policies = sys.argv[1:]
    made = page(folder, Path(text).read_text(encoding="utf-8"), tuple(policies) or POLICIES)
    Path(output).write_text(made, encoding="utf-8")
    print(f"{output} has the page")


if __name__ == "__main__":
    main()
