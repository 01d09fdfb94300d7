"""What visitors can ask."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hf_memory.demo import HELD_OUT
from hf_memory.files.manual import sections

LETTER = Path(__file__).with_name("letter.txt").read_text(encoding="utf-8").strip()
QUESTIONS = {
    "The number in a letter": f"{LETTER}\n\nWhat is the number of the lock at the boathouse?",
    "Who makes the cheese": f"{LETTER}\n\nWho makes the cheese?",
    "A letter in short": f"{LETTER}\n\nSum up the letter in two sentences.",
    "Why the sky is blue": "Explain in three sentences why the sky is blue.",
}
BEGINNING = 900  # characters of a text that a model goes on with


def prompts_for(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Prompts by name: questions for a model that answers, else beginnings of pages new to the demo's models."""
    if tokenizer.chat_template is not None:
        return QUESTIONS
    held_out = sections()[HELD_OUT // 2 :: HELD_OUT]
    beginnings = [text[:BEGINNING].rsplit(" ", 1)[0] for text in held_out[:3]]
    return {f"{text[:40]} ...": text for text in beginnings}
