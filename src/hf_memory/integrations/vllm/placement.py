"""What of our models runs as vLLM's attention, and what part each process has. This module needs no vLLM."""

import re
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_memory.mixers.attention import AttentionMixer
from hf_memory.mixers.pasts.everything import Everything
from hf_memory.mixers.pasts.ring import Ring
from hf_memory.mixers.transformer.forgetting import ForgettingHeads
from hf_memory.mixers.windowed import WindowedMixer

ELSEWHERE = "Use generate or serve of transformers"
DIVIDED = (
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
)


def is_attention(config: Any, layer_idx: int) -> bool:
    """Whether vLLM's attention can run the mixer of a layer: attention over all tokens or the last ones."""
    mixer = config.mixer_class(layer_idx)
    if mixer is not WindowedMixer or config.layer_types[layer_idx] != "sliding_heads":
        return mixer is AttentionMixer
    pasts = [part.past for part in mixer.parts_of(config, layer_idx)]
    return all(type(x) is Everything or (type(x) is Ring and not x.first) for x in pasts)


def has_heads_of_attention(mixer: type) -> bool:
    """Whether vLLM's attention can run the heads of a mixer that keep everything, which it cannot with forget gates."""
    return issubclass(mixer, WindowedMixer) and not issubclass(mixer, ForgettingHeads)


def memory_layers(config: Any) -> list[int]:
    """The numbers of the other layers, whose states vLLM stores in pages of its own for them."""
    return [i for i in range(config.num_hidden_layers) if not is_attention(config, i)]


def check(config: Any) -> None:
    """Raise ValueError unless vLLM can store all states of the model."""
    if getattr(config, "depth", "fixed") == "universal":
        raise ValueError(
            f"vLLM has one page for a layer, so depth must be 'fixed', got {config.depth!r}. {ELSEWHERE}"
        )
    for i in memory_layers(config):
        growing = [name for name, state in config.state_specs[i].items() if state.growth != "fixed"]
        if growing and not has_heads_of_attention(config.mixer_class(i)):
            raise ValueError(
                "vLLM stores states of fixed size, and keys and values of attention, but nothing else that "
                f"grows with the text, got {' and '.join(growing)} in layer {i} of {config.model_type}. {ELSEWHERE}"
            )


def check_adapters(config: Any) -> None:
    """Raise ValueError if linear layers do not read all tokens of a step at once, as those with adapters do in vLLM."""
    for i in memory_layers(config):
        mixer = config.mixer_class(i)
        if not mixer.projects_all:
            raise ValueError(
                f"enable_lora must be False for {config.model_type} with {mixer.__name__} in layer {i}, whose linear "
                f"layers read sequences one after the other, got True. {ELSEWHERE}, with PEFT"
            )


def check_processes(config: Any, size: int) -> None:
    """Raise ValueError if some of so many processes have attention of vLLM and others none, which vLLM cannot start."""
    full = config.full_attention_heads or []
    heads = max(1, config.num_key_value_heads // size)
    having = {h // heads for layer in full for h in layer}
    is_memory = len(memory_layers(config)) == config.num_hidden_layers
    if is_memory and 0 < len(having) < size:
        raise ValueError(
            f"tensor_parallel_size must be 1, or each process must have some of full_attention_heads={full}, got {size}"
        )


def bits_of_engine(config: Any) -> list[str]:
    """The kinds of keys and values with bits of ours that vLLM's attention stores in its own dtype."""
    found = {
        state.kind.partition(".")[0]
        for i, spec in enumerate(config.state_specs)
        for state in spec.values()
        if state.kind and state.bits and (state.growth != "fixed" or is_attention(config, i))
    }
    return sorted(found)


def window_parts(config: Any) -> int:
    """Into how many caches of equal size the heads of a layer are divided, for their window.

    vLLM stores keys and values in pages of one size, and allocates a page for each of a group of caches at once. A head
    that keeps everything has a cache of its own, with more tokens in a page. If the caches of windows are more than
    those, by half, no group has places for heads that keep everything and are not there.
    """
    full = config.full_attention_heads or []
    heads = config.num_key_value_heads
    layers = sum(len(layer) < heads for layer in full)
    caches = sum(map(len, full))
    fitting = (n for n in range(1, heads) if heads % n == 0 and 2 * n * layers >= 3 * caches)
    return next(fitting, heads)


def share(config: Any, rank: int, size: int) -> Any:
    """The config of the part of a model that one of `size` processes has: some of the heads, and of the MLP's channels.

    Raises:
        ValueError: heads or channels are not divisible, or something needs all of them.
    """
    if size == 1:
        return config
    undivided = {
        "a norm of all heads": config.qk_norm_whole_width,
        "gate='retention', where each head's decay is that of its number": getattr(
            config, "gate", ""
        )
        == "retention",
        "num_householder above 1": getattr(config, "num_householder", 1) > 1,
        "slots beside full_attention_heads, since processes may have different numbers of the other heads": bool(
            config.full_attention_heads and "sliding_memory" in config.layer_types
        ),
        "attention_sinks beside full_attention_heads and kept tokens, for the same reason": bool(
            config.full_attention_heads and config.attention_sinks and memory_layers(config)
        ),
    }
    for name in (name for name, is_there in undivided.items() if is_there):
        raise ValueError(f"tensor_parallel_size must be 1 with {name}, got {size}. {ELSEWHERE}")
    mine = config.settled()
    for name in (*DIVIDED, "intermediate_size"):
        whole = getattr(config, name, None) or 0
        if whole % size:
            raise ValueError(
                f"tensor_parallel_size must be a divisor of {name}={whole}, got {size}"
            )
        if whole:
            setattr(mine, name, whole // size)
    heads = mine.num_key_value_heads
    full = config.full_attention_heads
    if full:
        mine.full_attention_heads = [
            [h % heads for h in layer if h // heads == rank] for layer in full
        ]
    return mine


def style(model: PreTrainedModel, name: str) -> str | None:
    """How the model's plan for tensor parallelism divides a module or a parameter; None: not at all."""
    return model.tp_plan.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", name))


def divided(config: Any, size: int) -> dict[str, int]:
    """The parameters of which each of `size` processes has a part, and the dimension in which each is divided.

    Raises:
        ValueError: the model cannot be divided so.
    """
    with torch.device("meta"):
        whole, part = (
            AutoModelForCausalLM.from_config(x) for x in (config, share(config, 0, size))
        )
    found: dict[str, int] = {}
    sizes = {name: x.shape for name, x in part.named_parameters()}
    for name, x in whole.named_parameters():
        dimensions = [
            d for d, (n, own) in enumerate(zip(x.shape, sizes.get(name, x.shape))) if n != own
        ]
        styles = {style(whole, name), style(whole, name.rpartition(".")[0])}
        if len(dimensions) > 1 or (dimensions and not styles & {"colwise", "rowwise"}):
            raise ValueError(
                f"tensor_parallel_size must be 1 for {config.model_type}, which does not divide {name}"
            )
        found |= dict.fromkeys([name], *dimensions) if dimensions else {}
    return found


def of_all_heads(x: Tensor, near: list[int], heads: int) -> Tensor:
    """Rows x [near * n, ...] of the heads with a window -> [heads * n, ...] of all heads, zero for the others."""
    rows = x.unflatten(0, (len(near), -1))
    found = rows.new_zeros(heads, *rows.shape[1:])
    found[near] = rows
    return found.flatten(0, 1)
