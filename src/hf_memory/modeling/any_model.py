"""What any causal language model of transformers has, ours or another, under whatever names."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from os import PathLike
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_memory.modeling.checks import check, shown
from hf_memory.ops.soft_cap import soft_capped

COMMON_FIELDS = (  # of configs, with the same names in ours, in all teachers, and in what students are exported to
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "dtype",
)


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The type of each layer; if the config has no layer types, all layers have the same attention."""
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    given = getattr(config, "layer_types", None)
    return list(given or [kind] * config.num_hidden_layers)


def head_dim(config: PreTrainedConfig) -> int:
    """Channels of an attention head; not every config has a field for it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def head(model: PreTrainedModel, hidden_states: Tensor) -> Tensor:
    """Logits [..., V] of the last hidden states [..., hidden_size] of a model, after its final norm."""
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(hidden_states) / getattr(config, "logits_scaling", 1)
    cap = getattr(config, "final_logit_softcapping", None)
    return soft_capped(logits, cap)


def named_arguments(model: nn.Module, args: tuple, given: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call of a model by name, also those that were given by position."""
    return dict(zip(signature(model.forward).parameters, args)) | dict(given)


def check_model(name: str, model: Any) -> None:
    """Raise ValueError unless an argument is a model, and not the name of one."""
    if not isinstance(model, nn.Module):
        how = "load it first, as with AutoModelForCausalLM.from_pretrained"
        is_name = isinstance(model, str | PathLike)
        given = f"{type(model).__name__} {model!r}" if is_name else shown(model)
        raise ValueError(f"{name} must be a model, got {given}: {how}")


def check_config(name: str, config: Any) -> None:
    """Raise ValueError unless an argument is a config, and not its model."""
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"{name} must be a config, as model.config, got a {type(config).__name__}")


def check_pair(student: Any, teacher: Any) -> None:
    """Raise ValueError unless two arguments are models of one vocabulary, so that their predictions can be compared."""
    check_model("student", student)
    check_model("teacher", teacher)
    own, others = (model.config.get_text_config().vocab_size for model in (student, teacher))
    wanted = f"a model of its teacher's vocabulary of {others} tokens"
    check(own == others, "student", wanted, own)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which a model evaluates, without dropout; afterwards each of its parts trains that did before."""
    check_model("model", model)
    training = [x for x in model.modules() if x.training]
    model.eval()
    try:
        yield
    finally:
        for x in training:
            x.training = True


def in_eval_mode(measure: Callable) -> Callable:
    """Let a function whose first argument is a model run in `evaluating`."""

    @wraps(measure)
    def measured(model: nn.Module, *args, **kwargs):
        with evaluating(model):
            return measure(model, *args, **kwargs)

    return measured
