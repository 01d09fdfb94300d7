"""What visitors can ask."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hf_memory.demo import HELD_OUT
from hf_memory.files.manual import sections

LETTER = Path(__file__).with_name("letter.txt").read_text(encoding="utf-8").strip()
QUESTIONS = (
    f"{LETTER}\n\nWhat is the number of the lock at the boathouse?",
    f"{LETTER}\n\nWhat does Mrs Berg make?",
    "Explain in three sentences why the sky is blue.",
)
BEGINNING = 900  # characters of a text that a model goes on with


def prompts_for(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Questions about a letter, for a model that answers; else beginnings of pages that the demo's models have not read."""
    if tokenizer.chat_template is not None:
        return [*QUESTIONS]
    held_out = sections()[HELD_OUT // 2 :: HELD_OUT]
    return [text[:BEGINNING].rsplit(" ", 1)[0] for text in held_out[:3]]
