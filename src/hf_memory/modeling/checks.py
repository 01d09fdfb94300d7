"""Checks of the values in configs, which come from files and from the command line."""

from typing import Any

LARGEST = 2**31 - 1  # positions are int32 in kernels
TINY, HUGE = 1e-30, 1e30  # for factors, of which float32 is to hold products
DEFAULT_RANGES = {int: (1, LARGEST), float: (TINY, HUGE)}
RANGES = {  # of fields for which these are not right
    "num_hidden_layers": (1, 10_000),  # configs have lists with an entry for each
    "intermediate_size": (0, LARGEST),
    "rms_norm_eps": (TINY, 1),
    "layer_norm_eps": (TINY, 1),
    "output_norm_eps": (TINY, 1),
    "initializer_range": (0, HUGE),
    "partial_rotary_factor": (TINY, 1),
    "attention_dropout": (0, 1),
    "sliding_window": (2, LARGEST),  # caches of transformers keep one token less, and all of them instead of none
    "num_sink_tokens": (0, LARGEST),
    "num_kept_tokens": (0, LARGEST),
    "num_persistent_tokens": (0, LARGEST),
    "linear_conv_kernel_dim": (0, LARGEST),
    "memory_max_grad_norm": (0, HUGE),
    "pattern_seed": (0, 2**63 - 1),
    "halting_epsilon": (TINY, 0.999),
    "span_loss_weight": (0, HUGE),
    "ponder_loss_weight": (0, HUGE),
}


def check(is_right: bool, name: str, expected: str, given: Any) -> None:
    """Raise ValueError that says what was expected of a field and what was given, unless it is right."""
    if not is_right:
        raise ValueError(f"{name} must be {expected}, got {given!r}")


def check_values(config, here: str, **values: Any) -> None:
    """Raise ValueError unless fields of a config have these values, which they must have `here`."""
    for name, value in values.items():
        check(getattr(config, name) == value, name, f"{value} {here}", getattr(config, name))


def check_word(name: str, word: str, words: tuple[str, ...]) -> None:
    """Raise ValueError unless the value of an option is one of `words`."""
    check(word in words, name, f"one of {', '.join(map(repr, words))}", word)


def check_numbers(values: dict[str, Any]) -> None:
    """Raise ValueError unless each number among the values of some fields is in the range of its field."""
    for name, value in values.items():
        if type(value) in DEFAULT_RANGES:
            least, most = RANGES.get(name, DEFAULT_RANGES[type(value)])
            check(least <= value <= most, name, f"from {least} to {most}", value)


def check_each(config, name: str, given: list, words: tuple[str, ...] = ()) -> None:
    """Raise ValueError unless a field has an entry for each layer of a config, one of `words` if there are any."""
    expected = f"a list with one for each of the num_hidden_layers={config.num_hidden_layers} layers"
    check(len(given) == config.num_hidden_layers, name, expected, given)
    for word in given if words else ():
        check_word(name, word, words)
