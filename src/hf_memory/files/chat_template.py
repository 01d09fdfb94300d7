"""Chat templates: programs of a model's author, which may fail, take forever, or write too much."""

import sys
import time

SECONDS = 5.0  # that a template may take; usual ones take milliseconds
ADDED = 10**6  # characters that a template may add to a conversation


def apply_template(tokenizer, messages: list[dict], **options) -> str:
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
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        if len(text) > ADDED + 10 * len(str(messages)):
            raise ValueError(f"it wrote {len(text):,} characters")
    except Exception as error:  # whatever the template raises
        raise ValueError(
            f"the model's chat template raised an error for this conversation: {str(error) or type(error).__name__}"
        ) from error
    finally:
        sys.settrace(before)
    return text
