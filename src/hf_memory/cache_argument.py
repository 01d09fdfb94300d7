"""The argument that takes a cache: transformers 5.24 calls it `cache`, earlier versions `past_key_values`.

Models of this package accept both names, whatever version is installed. A cache under another name is refused: models
have `**kwargs`, in which it would vanish, and each token would then be read as the first of its text.
"""

from collections.abc import Callable, Container
from functools import wraps
from inspect import signature
from typing import Any

from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

NAMES = ("cache", "past_key_values")
# transformers' own name
CACHE = next(name for name in NAMES if name in BaseModelOutputWithPast.__dataclass_fields__)
OTHER_NAMES = (
    "state",
    "mems",
)  # of RWKV and of Transformer-XL; others have "cache" or "past" in their names
NO_CACHES = ("cache_position", "cache_config", "position_ids")
OPTIONS = (type(None), bool, int, float, str)  # values of options such as use_cache


def takes_cache(function: Callable, name: str = "cache") -> Callable:
    """Let a function, which calls its cache `name`, take it as `cache` or `past_key_values`, and by no other name.

    Raises:
        ValueError: when called with two different caches, or with a cache under another name.
    """

    declared = frozenset(signature(function).parameters)

    @wraps(function)
    def with_cache(*args, **kwargs):
        return function(*args, **named_cache(kwargs, name, declared))

    return with_cache


def named_cache(
    kwargs: dict[str, Any], name: str = "cache", declared: Container[str] = ()
) -> dict[str, Any]:
    """Keyword arguments in which the cache, if there is one, has this name.

    Those that a function has `declared` need no check: it would not pass over a cache among them.

    Raises:
        ValueError: if there are two different caches, or one under an unknown name.
    """
    cache = None
    named = {}
    for key, value in kwargs.items():
        if key not in NAMES:
            if key not in declared and key not in NO_CACHES:
                check_no_cache(key, value)
            named[key] = value
        elif value is not None:
            if cache is not None and cache is not value:
                raise ValueError(
                    "cache and past_key_values are the same argument, got a different cache for each"
                )
            cache = value
    if cache is not None:
        named[name] = cache
    return named


def check_no_cache(key: str, value: Any) -> None:
    """Raise ValueError if an argument that is not named as a cache is one, by its type or by its name."""
    is_named = "cache" in key or "past" in key or key in OTHER_NAMES
    if isinstance(value, Cache) or (is_named and not isinstance(value, OPTIONS)):
        raise ValueError(
            f"a cache must be given as cache or past_key_values, got {type(value).__name__} as {key}, "
            "which the model would not read"
        )


def cache_name(model: nn.Module) -> str:
    """The name by which the forward of any language model takes a cache; that of Mamba can be another."""
    parameters = signature(model.forward).parameters
    return next((name for name in (*NAMES, "cache_params") if name in parameters), CACHE)


def cache_of(output: Any) -> Cache:
    """The cache in the output of a language model."""
    return getattr(output, CACHE)
