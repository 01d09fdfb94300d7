"""GGUF files for llama.cpp, for the targets that it supports. The package `gguf` has tensor names and format."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import is_gguf_available

from hf_memory.export.granite_swa import GraniteSWA
from hf_memory.export.mamba import LLAMA_CPP_EXPAND, Granite
from hf_memory.export.qwen3_5 import Qwen35
from hf_memory.export.target import Target
from hf_memory.modeling.base import MemoryConfig

TOKENIZER = "tokenizer_config.json"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {  # ways to split text before BPE: llama.cpp's name, and the steps in tokenizer.json
    "gpt-2": ["ByteLevel"],
    "smollm": ["Digits", "ByteLevel"],
    "llama-bpe": [WORDS % r"\p{N}{1,3}"],
    "qwen2": [WORDS % r"\p{N}"],
}


class Layout(NamedTuple):
    """How a target is written for llama.cpp."""

    architecture: str  # a name in gguf.MODEL_ARCH, with the names of the tensors
    parameters: Callable[..., None]
    # with names from gguf's table
    tensors: Callable[[PreTrainedConfig, str, Tensor], Iterator[tuple[str, Tensor]]]
    target: Target  # whose options and weights are written, which may be padded
    name: str = ""  # llama.cpp's name, where the package gguf does not have the architecture


def _common(writer, config: PreTrainedConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _qwen3_5(writer, config: PreTrainedConfig) -> None:
    _common(writer, config)
    rotating = round(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(rotating)
    # pairs for each dimension of a picture
    writer.add_rope_dimension_sections([-(-rotating // 6)] * 3 + [0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    recurrent = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array("qwen35.attention.recurrent_layers", recurrent)


def _qwen3_5_tensors(
    config: PreTrainedConfig, name: str, x: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """llama.cpp has value heads in another order: the first of each key head, then the second of each, and so on."""
    heads = config.linear_num_key_heads
    more = config.linear_num_value_heads
    part = name.rpartition("linear_attn.")[2]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        keys, values = x.squeeze(1).tensor_split([2 * heads * config.linear_key_head_dim])
        x = torch.cat([keys, _apart(values, heads, more)])
    elif part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        x = _apart(x, heads, more)
    elif part == "out_proj.weight":
        x = _apart(x.mT, heads, more).mT
    if name.endswith("A_log"):
        x = -x.float().exp()
    elif name.endswith("norm.weight") and part != "norm.weight":
        x = 1 + x.float()
    yield name.replace("dt_bias", "dt_proj.bias"), x


def _apart(x: Tensor, heads: int, more: int) -> Tensor:
    """Sort the rows [heads * group * D, ...] by their place in the group first."""
    return x.unflatten(0, (heads, more // heads, -1)).transpose(0, 1).flatten(0, 2)


def _scales(writer, config: PreTrainedConfig) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _granite_swa(writer, config: PreTrainedConfig) -> None:
    _common(writer, config)
    _scales(writer, config)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_sliding_window(config.sliding_window or config.max_position_embeddings)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_array(
        "granite_swa.attention.rope_pattern", [theta > 0 for theta in config.layer_rope_theta]
    )


def _granite_swa_tensors(
    config: PreTrainedConfig, name: str, x: Tensor
) -> Iterator[tuple[str, Tensor]]:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.sinks", name)
    yield f"blk.{layer[1]}.attn_sinks.weight" if layer else name, _neighbours(config, name, x)


def _neighbours(config: PreTrainedConfig, name: str, x: Tensor) -> Tensor:
    """Rows of queries and keys in llama.cpp's order, which rotates neighbouring channels."""
    heads = {
        "self_attn.q_proj": config.num_attention_heads,
        "self_attn.k_proj": config.num_key_value_heads,
    }
    count = next((count for part, count in heads.items() if part in name), 0)
    return x.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2) if count else x


def _granite(writer, config: PreTrainedConfig) -> None:
    _common(writer, config)
    _scales(writer, config)
    is_attention = [kind == "full_attention" for kind in config.layer_types]
    writer.add_feed_forward_length(config.shared_intermediate_size)
    writer.add_head_count_kv([config.num_key_value_heads if kept else 0 for kept in is_attention])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    # False turns RoPE off
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)


def _granite_tensors(
    config: PreTrainedConfig, name: str, x: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """llama.cpp names a shared expert without other experts as an MLP."""
    x = _neighbours(config, name, x)
    if name.endswith("input_linear.weight"):
        parts = (
            name.replace("shared_mlp.input_linear", f"mlp.{part}_proj") for part in ("gate", "up")
        )
        yield from zip(parts, x.chunk(2))
        return
    if name.endswith("A_log"):
        x = -x.float().exp()[:, None]
    elif name.endswith(".D"):
        x = x[:, None]
    elif name.endswith("mamba.norm.weight"):
        x = x.unflatten(0, (config.mamba_n_groups, -1))
    elif name.endswith("conv1d.weight"):
        x = x.squeeze(1)
    yield (
        name.replace("dt_bias", "dt_proj.bias").replace(
            "shared_mlp.output_linear", "mlp.down_proj"
        ),
        x,
    )


LAYOUTS = {
    "qwen3_5": Layout("QWEN35", _qwen3_5, _qwen3_5_tensors, Qwen35()),
    "granite": Layout("GRANITE_HYBRID", _granite, _granite_tensors, Granite(LLAMA_CPP_EXPAND)),
    "granite_swa": Layout(
        "GRANITE", _granite_swa, _granite_swa_tensors, GraniteSWA(), "granite_swa"
    ),
}


def check_gguf(
    target: Target, config: MemoryConfig, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Raise ValueError if a model cannot be written as a GGUF file."""
    fault = target.engines(config).get("llama.cpp", "it does not support the target")
    if target.name not in LAYOUTS:
        *first, last = LAYOUTS
        fault = f"hf_memory writes GGUF files of {', '.join(first)} and {last} only"
    if fault:
        raise ValueError(
            f"the model must be supported by llama.cpp to be written as GGUF, but {fault}"
        )
    if not is_gguf_available():
        raise ValueError("a GGUF file needs gguf: pip install gguf")
    if tokenizer is not None:
        pre_tokenizer(tokenizer)
        _check_vocabulary(tokenizer, config.vocab_size)


def _check_vocabulary(tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    """Raise ValueError if a tokenizer has a token for which a model of this vocabulary has no embedding."""
    word, number = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if number >= size:
        raise ValueError(
            f"the tokenizer must have tokens below the model's vocab_size={size} to be written as GGUF, got {word!r} "
            f"with the number {number}: call resize_token_embeddings({number + 1}) of the model, and save it again"
        )


def pre_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """llama.cpp's name for a tokenizer's way to split text before BPE.

    Raises:
        ValueError: if llama.cpp does not have it.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    kind = described["model"]["type"]
    before = described["pre_tokenizer"] or {"type": "none"}
    steps = [step for step in map(_step, before.get("pretokenizers", [before])) if step]
    for name, known in PRE_TOKENIZERS.items():
        if kind == "BPE" and steps == known:
            return name
    expected = "a BPE tokenizer that splits text like one of " + ", ".join(PRE_TOKENIZERS)
    raise ValueError(f"the tokenizer must be {expected} to be written as GGUF, got {kind} {steps}")


def _step(step: dict) -> str:
    """A step as a string, which is empty if the step does not split text."""
    if step["type"] == "Split":
        return step["pattern"].get("Regex", "")
    if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
        return "ByteLevel" if step["use_regex"] else ""
    return "Digits" if step == {"type": "Digits", "individual_digits": True} else str(step)


def write_gguf(theirs: PreTrainedModel, target: Target, folder: Path, file: Path) -> None:
    """Write a rewritten model as one file.

    Args:
        theirs: the result of `rewrite` for the padded target.
        target: a target with an entry in `LAYOUTS`.
        folder: the folder to which the model was exported; its tokenizer is used if it has one.
        file: the file to write to.
    """
    import gguf

    layout = LAYOUTS[target.name]
    config = theirs.config
    architecture = gguf.MODEL_ARCH[layout.architecture]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, layout.name or gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(folder.name)
    layout.parameters(writer, config)
    _add_tokens(writer, folder, config.vocab_size)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, x in theirs.state_dict().items():
        if name not in tied and not name.endswith(target.unsaved):
            for part, y in layout.tensors(config, name, x):
                _add_tensor(
                    writer, names.get_name(part, try_suffixes=(".weight", ".bias")) or part, y
                )
    if (factors := _rope_factors(config)) is not None:
        _add_tensor(writer, "rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer, name: str, x: Tensor) -> None:
    """Add a tensor: matrices in the model's precision, all else in float32."""
    import gguf

    kinds = {
        torch.bfloat16: gguf.GGMLQuantizationType.BF16,
        torch.float16: gguf.GGMLQuantizationType.F16,
    }
    is_matrix = (
        x.ndim == 2 and name.endswith(".weight") and "conv1d" not in name and "norm" not in name
    )
    kind = (
        kinds.get(x.dtype, gguf.GGMLQuantizationType.F32)
        if is_matrix
        else gguf.GGMLQuantizationType.F32
    )
    writer.add_tensor(
        name, gguf.quants.quantize(x.float().contiguous().numpy(), kind), raw_dtype=kind
    )


def _add_tokens(writer, folder: Path, vocab_size: int) -> None:
    import gguf

    if not (folder / TOKENIZER).exists():
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(vocab_size)
        return
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = {i: word for word, i in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    kinds = [
        gguf.TokenType.NORMAL if i in words else gguf.TokenType.UNUSED for i in range(vocab_size)
    ]
    for i, token in added.items():
        kinds[i] = gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer(tokenizer))
    writer.add_token_list([words.get(i, f"[PAD{i}]") for i in range(vocab_size)])
    writer.add_token_types(kinds)
    gguf.SpecialVocab(folder, load_merges=True).add_to_gguf(writer, quiet=True)


def _rope_factors(config: PreTrainedConfig) -> Tensor | None:
    """The factors by which the frequencies of plain RoPE are divided, or None if there is no scaling."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return None
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    channels = 2 * len(frequencies)
    return rope["rope_theta"] ** -(torch.arange(0, channels, 2) / channels) / frequencies
