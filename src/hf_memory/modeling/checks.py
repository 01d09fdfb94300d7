"""Checks of the values in configs, which come from files and from the command line."""

import warnings
from collections.abc import Collection, Iterable
from typing import Any, get_args

from huggingface_hub import dataclasses
from huggingface_hub.dataclasses import type_validator
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch.nn import Module
from transformers import GenerationConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_memory.files.names import nearest

LARGEST = 2**31 - 1  # positions are int32 in kernels
TINY = 1e-30
HUGE = 1e30  # for factors, of which float32 is to hold products
DEFAULT_RANGES = {int: (1, LARGEST), float: (TINY, HUGE)}
RANGES = {  # of fields for which these are not right
    "num_hidden_layers": (1, 10_000),  # configs have lists with an entry for each
    "intermediate_size": (0, LARGEST),
    "rms_norm_eps": (TINY, 1),
    "layer_norm_eps": (TINY, 1),
    "output_norm_eps": (TINY, 1),
    "initializer_range": (0, HUGE),
    "rope": (TINY, HUGE),  # numbers of the parameters of RoPE
    "partial_rotary_factor": (TINY, 1),
    "attention_dropout": (0, 1),
    "sliding_window": (
        2,
        LARGEST,
    ),  # caches of transformers keep one token less, and all of them instead of none
    "num_sink_tokens": (0, LARGEST),
    "num_kept_tokens": (0, LARGEST),
    "num_persistent_tokens": (0, LARGEST),
    "linear_conv_kernel_dim": (0, LARGEST),
    "memory_depth": (1, 1000),  # each layer of a deep memory is a tensor
    "memory_max_grad_norm": (0, HUGE),
    "pattern_seed": (0, 2**63 - 1),
    "halting_epsilon": (TINY, 0.999),
    "span_loss_weight": (0, HUGE),
    "ponder_loss_weight": (0, HUGE),
}
ROPE_NUMBERS = (  # of the parameters of RoPE
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
)
ROPE_LISTS = ("short_factor", "long_factor")  # with a number for each pair of channels
ROPE_NEEDS = {  # what a type of RoPE needs besides its theta
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}

PASSED_ON = (  # names that transformers takes for a config without a field
    "adapter_name",
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "partial_rotary_factor",
    "per_layer_config",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "tokenizer_class",
    "torch_dtype",
    "trust_remote_code",
    "transformers_version",
)
REMOVED = {  # options of earlier versions: the value with which they had no effect, and what must be given now
    "dpfp_nu": (3, "3 from hf_memory 0.1.0 on"),
    "virtual_token": (
        False,
        "False from hf_memory 0.2.0 on (convert again with num_sink_tokens=4 or attention_sinks=True)",
    ),
}
ELSEWHERE = {  # names of fields in other libraries
    "d_ff": "intermediate_size",
    "d_model": "hidden_size",
    "dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "n_ctx": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "window": "sliding_window",
    "window_size": "sliding_window",
}


def strict(config: type) -> type:
    """A class of configs whose fields are checked when they are set, as `strict` of huggingface_hub checks them.

    A value of a wrong type raises ValueError, as every other value that is refused does.
    """
    config = dataclasses.strict(config)
    set_checked: Any = config.__setattr__

    def set_field(self: Any, name: str, value: Any) -> None:
        try:
            set_checked(self, name, value)
        except StrictDataclassFieldValidationError as error:
            expected = config.__dataclass_fields__[name].type  # type: ignore[attr-defined]
            raise ValueError(f"{name} must be {_words(expected)}, got {value!r}") from error

    config.__setattr__ = set_field  # type: ignore[method-assign, assignment]
    return config


def check(is_right: bool, name: str, expected: str, given: Any) -> None:
    """Raise ValueError that says what was expected of a field and what was given, unless it is right."""
    if not is_right:
        raise ValueError(f"{name} must be {expected}, got {shown(given)}")


def shown(given: Any) -> str:
    """A value in an error message; a config or a model by its type alone, since the rest has hundreds of lines."""
    is_long = isinstance(given, PreTrainedConfig | Module)
    return type(given).__name__ if is_long else repr(given)


def check_type(name: str, value: Any, expected: Any) -> None:
    """Raise ValueError unless a value has the type of an annotation; whole numbers are floats, too."""
    if type(value) is int and float in (expected, *get_args(expected)):
        return
    try:
        type_validator(name, value, expected)
    except (TypeError, StrictDataclassFieldValidationError) as error:
        raise ValueError(f"{name} must be {_words(expected)}, got {shown(value)}") from error


def _words(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def check_values(config, here: str, **values: Any) -> None:
    """Raise ValueError unless fields of a config have these values, which they must have `here`."""
    for name, value in values.items():
        check(getattr(config, name) == value, name, f"{value} {here}", getattr(config, name))


def check_word(name: str, word: str, words: tuple[str, ...]) -> None:
    """Raise ValueError unless the value of an option is one of `words`."""
    check(word in words, name, f"one of {', '.join(map(repr, words))}", word)


def check_gate(gate: str, gates: tuple[str, ...]) -> None:
    """Raise ValueError unless a gate is one of the family's, which users can add to."""
    wanted = (
        f"one of {', '.join(map(repr, gates))}, or another after hf_memory.modeling.register_gate"
    )
    check(gate in gates, "gate", wanted, gate)


def without_removed(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a config without those that earlier versions had and this one has not.

    Raises:
        ValueError: if one was in use, since the model would predict something else without it.
    """
    for name, (unused, expected) in REMOVED.items():
        given = options.get(name, unused)
        check(given == unused, name, expected, given)
    return {name: value for name, value in options.items() if name not in REMOVED}


def warn_unknown(config_class: type, names: Iterable[str]) -> None:
    """Warn about names of options that a config does not have; it keeps them, but no model uses them.

    Configs in files have further names that transformers reads, and that are no options of a model.
    """
    known = {*PASSED_ON, *GenerationConfig().to_dict()}
    own = list(config_class.__dataclass_fields__)  # type: ignore[attr-defined]
    for name in names:
        if name.startswith("_") or name in known or hasattr(config_class, name):
            continue
        meant = suggested(name, own)
        warnings.warn(
            f"{config_class.__name__} has no option {name}, which has no effect{meant}",
            stacklevel=5,
        )


def suggested(name: str, own: Collection[str]) -> str:
    """The end of a sentence that asks which of a config's options was meant; empty if none is known."""
    elsewhere = ELSEWHERE.get(name)
    return f"; did you mean {elsewhere}?" if elsewhere in own else nearest(name, own)


def check_numbers(values: dict[str, Any]) -> None:
    """Raise ValueError unless each number among the values of some fields is in the range of its field."""
    for name, value in values.items():
        if type(value) in DEFAULT_RANGES:
            least, most = RANGES.get(name, DEFAULT_RANGES[type(value)])
            check(least <= value <= most, name, f"from {least} to {most}", value)


def check_rope(name: str, rope: Any, channels: int) -> None:
    """Raise ValueError unless a field has what its type of RoPE needs, with numbers that give finite angles.

    Args:
        name: the field.
        rope: its value: `rope_type`, `rope_theta` and what the type needs, as in transformers.
        channels: number of channels of a head; `partial_rotary_factor` of them are rotated.
    """
    check(isinstance(rope, dict), name, "a dict", rope)
    kind = rope.get("rope_type")
    check_word(f"rope_type of {name}", kind, ("default", *ROPE_INIT_FUNCTIONS))
    missing = [x for x in ("rope_theta", *ROPE_NEEDS.get(kind, ())) if rope.get(x) is None]
    check(not missing, name, f"a dict with {' and '.join(missing)} for rope_type={kind!r}", rope)
    least, most = RANGES["rope"]
    for part in ROPE_NUMBERS:
        if (value := rope.get(part)) is not None:
            is_right = type(value) in DEFAULT_RANGES and least <= value <= most
            check(is_right, f"{part} of {name}", f"a number from {least} to {most}", value)
    share = rope.get("partial_rotary_factor") or 1.0
    check(share <= 1, f"partial_rotary_factor of {name}", "at most 1", share)
    pairs = int(channels * share) // 2
    for part in ROPE_LISTS:
        if (values := rope.get(part)) is not None:
            is_right = isinstance(values, list) and len(values) == pairs
            is_right = is_right and all(
                type(x) in DEFAULT_RANGES and least <= x <= most for x in values
            )
            check(
                is_right,
                f"{part} of {name}",
                f"a list of {pairs} numbers from {least} to {most}",
                values,
            )
    changing = "one with the same angles in texts of any length, since states keep rotated keys"
    check(kind != "dynamic", f"rope_type of {name}", changing, kind)
    if kind == "longrope":
        short = rope["short_factor"]
        long = rope["long_factor"]
        equal = f"short_factor={short}, since states keep keys that were rotated by one of both"
        check(long == short, f"long_factor of {name}", equal, long)
    if kind == "llama3":
        low = rope["low_freq_factor"]
        high = rope["high_freq_factor"]
        check(high > low, f"high_freq_factor of {name}", f"above low_freq_factor={low}", high)


def check_each(config, name: str, given: list, words: tuple[str, ...] = ()) -> None:
    """Raise ValueError unless a field has an entry for each layer of a config, one of `words` if there are any."""
    expected = (
        f"a list with one for each of the num_hidden_layers={config.num_hidden_layers} layers"
    )
    check(len(given) == config.num_hidden_layers, name, expected, given)
    for word in given if words else ():
        check_word(name, word, words)
