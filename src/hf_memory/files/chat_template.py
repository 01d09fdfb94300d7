"""Chat templates: programs of a model's author, which may fail, take forever, or write too much."""

import re
import sys
import time
from typing import Any

import torch
from torch import Tensor

SECONDS = 5.0  # that a template may take; usual ones take milliseconds
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # before what the model writes, in templates that say it
ADDED = 10**6  # characters that a template may add to a conversation


def tokens_and_targets(tokenizer, messages: list[dict]) -> tuple[list[int], Tensor]:
    """The tokens of a conversation, and which of them the assistant writes, with the end of each of its turns.

    Args:
        tokenizer: a fast tokenizer with a chat template, which marks the assistant's turns with {% generation %}, or
            renders the beginning of a conversation as it renders the whole.
        messages: the messages, with roles and contents.

    Returns:
        The tokens, and [T] of bool.

    Raises:
        ValueError: if tokenizer or template is of another kind, or the template fails.
    """
    if MARKS.search(tokenizer.chat_template):
        how: dict = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = apply_template(tokenizer, messages, **how)
        return found["input_ids"], torch.tensor(found["assistant_masks"], dtype=torch.bool)
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer must be a fast one to find the assistant's turns, got {type(tokenizer).__name__}")
    text = apply_template(tokenizer, messages)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts, ends = torch.tensor(found["offset_mapping"]).view(-1, 2).unbind(1)
    targets = torch.zeros(len(starts), dtype=torch.bool)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = apply_template(tokenizer, messages[:i], add_generation_prompt=True) if i else ""
            until = apply_template(tokenizer, messages[: i + 1]).rstrip()
            if not (text.startswith(until) and until.startswith(before)):
                raise ValueError(
                    "chat template must mark the assistant's turns with {% generation %}, or render the beginning of a "
                    "conversation as it renders the whole, got one that does not"
                )
            targets |= (starts < len(until)) & (ends > len(before))
    return found["input_ids"], targets


def apply_template(tokenizer, messages: list[dict], **options) -> Any:
    """The text that a tokenizer's chat template makes of messages.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the messages, with roles and contents.
        **options: further arguments of `apply_chat_template`, such as `add_generation_prompt`.

    Raises:
        ValueError: if the template raises an error, does not end in time, or writes far more than the messages.
    """
    before, end = sys.gettrace(), time.monotonic() + SECONDS

    def watch(frame, event, argument):
        if frame.f_code.co_filename != "<template>":  # as jinja2 calls the code of a template
            return None
        if time.monotonic() > end:
            raise TimeoutError(f"it took more than {SECONDS:g} seconds")
        return watch

    sys.settrace(watch)
    try:
        text = tokenizer.apply_chat_template(messages, **{"tokenize": False, **options})
        if len(text) > ADDED + 10 * len(str(messages)):
            raise ValueError(f"it wrote {len(text):,} characters")
    except Exception as error:  # whatever the template raises
        raise ValueError(
            f"the model's chat template raised an error for this conversation: {str(error) or type(error).__name__}"
        ) from error
    finally:
        sys.settrace(before)
    return text
