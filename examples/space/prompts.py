"""What visitors can ask."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hf_memory.demo import HELD_OUT
from hf_memory.files.manual import sections

LETTER = Path(__file__).with_name("letter.txt").read_text(encoding="utf-8").strip()
MANUAL = "".join(sections())[:7000]
QUESTIONS = {
    "A number in a letter": f"{LETTER}\n\nWhat is the number of the lock at the boathouse?",
    "A number before a long text": f"The number of the room is 7416.\n\n{MANUAL}\n\nWhat is the number of the room?",
    "A story": "Write a short story about a lighthouse.",
    "Why the sky is blue": "Explain in three sentences why the sky is blue.",
}
BEGINNING = 1500  # characters of a text that a model goes on with


def prompts_for(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Prompts by name: questions for a model that answers, else beginnings of pages new to the demo's models."""
    if tokenizer.chat_template is not None:
        return QUESTIONS
    held_out = sections()[HELD_OUT // 2 :: HELD_OUT]
    beginnings = [text[:BEGINNING].rsplit(" ", 1)[0] for text in held_out[:3]]
    return {f"Python's manual, part {i}": text for i, text in enumerate(beginnings, 1)}
