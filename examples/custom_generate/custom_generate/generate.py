"""`model.generate(..., custom_generate=FOLDER)` with a cache that drops tokens: a student of hf_memory writes."""

from weakref import WeakKeyDictionary

try:
    from hf_memory import shrink_cache
    from hf_memory.conversion import shares_weights
except ImportError as error:
    raise ImportError(
        "This way to generate needs the package hf_memory 0.2.0 or newer: see README.md beside it."
    ) from error

STUDENTS = WeakKeyDictionary()  # of each model, by what they were made with


def generate(model, small_cache=None, size=None, text=None, tokenizer=None, **kwargs):
    """Write with a small cache; other arguments and what is returned are those of `model.generate`.

    The first call for a model finds which heads keep everything and which tokens the others keep, which takes minutes,
    unless `small_cache` says it. Later calls use what was found.

    Args:
        model (`PreTrainedModel`): a loaded model.
        small_cache (`str` or `MemoryTransformerConfig`, *optional*): what was found before: the config of a student, or
            a folder or a name on the Hub.
        size (`str`, *optional*): `"near"`, `"small"` or `"constant"`.
        text (`str`, *optional*): the text on which it is found; default: Python's language reference.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the model's; default: the one that it was loaded with.
        kwargs (`dict`): arguments of `model.generate`.
    """
    students = STUDENTS.setdefault(model, {})
    made_with = str(small_cache), size, text
    student = students.get(made_with)
    if student is None:
        student = shrink_cache(model, small_cache, text=text, size=size, tokenizer=tokenizer)
    elif not shares_weights(student, model):
        # the model is on another device now, or in another dtype
        student = shrink_cache(model, student.config)
    students[made_with] = student
    given = {name: value for name, value in kwargs.items() if value is not None}
    return student.generate(tokenizer=tokenizer, **given)
