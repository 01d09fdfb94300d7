"""Loading a teacher from a folder, from the Hub, or from a GGUF file, also quantised to learn from it.

A student can learn from a quantised teacher if the full-precision one does not fit into memory.
"""

import logging
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import is_bitsandbytes_available

from hf_memory.conversion.teachers.gguf import (
    find_gguf,
    read_config,
    read_model,
    read_terms,
    read_tokenizer,
)
from hf_memory.modeling import loading
from hf_memory.modeling.card import license_and_language


def load_config(name: str) -> PreTrainedConfig:
    """The config of a teacher, or of a model to fine-tune, without its weights.

    Args:
        name: a folder, a name on the Hub, or a GGUF file.

    Raises:
        ValueError: if a GGUF file cannot be read completely (see `read_config`), or the config describes no model.
    """
    file = find_gguf(name)
    return loading.load_config(name) if file is None else read_config(file)


def has_weights(name: str) -> bool:
    """Whether a teacher's weights are on this machine; the argument is that of `load_config`."""
    return find_gguf(name) is not None or loading.has_weights(name)


def load_tokenizer(name: str):
    """The tokenizer of a model; the argument is that of `load_config`."""
    file = find_gguf(name)
    return loading.load_tokenizer(name) if file is None else read_tokenizer(file)


def load_terms(name: str) -> dict[str, Any]:
    """License and languages of a model, see `license_and_language`; the argument is that of `load_config`."""
    file = find_gguf(name)
    return license_and_language(name) if file is None else read_terms(file)


def load_teacher(name: str) -> PreTrainedModel:
    """The teacher in float32; the argument is that of `load_config`."""
    file = find_gguf(name)
    return loading.load_model(name, dtype=torch.float32) if file is None else read_model(file)


def load_quantized(name: str, bits: int, device: torch.device | str) -> PreTrainedModel:
    """A teacher whose linear layers are quantised to 8 (LLM.int8) or 4 bits (NF4); the rest is in float32.

    Its hidden states and logits are float32, and close to the full teacher's. Pass it to `convert` as `quantized`.

    Args:
        name: folder or Hub name of the teacher.
        bits: bits of a weight, 8 or 4.
        device: device to run on.

    Raises:
        ValueError: if the bits are not supported, or bitsandbytes is not installed.
    """
    check_bits(bits)
    check_bitsandbytes(bits)
    quantized = BitsAndBytesConfig(
        load_in_8bit=bits == 8,
        load_in_4bit=bits == 4,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = loading.load_model(
        name, dtype=torch.float32, quantization_config=quantized, device_map={"": device}
    )
    # or it warns at each step that inputs are rounded
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return model.eval()


def check_bits(bits: int) -> None:
    """Raise ValueError if a teacher cannot be loaded with so many bits."""
    if bits not in (8, 4):
        raise ValueError(f"teacher_bits must be 8 or 4, got {bits}")


def check_bitsandbytes(bits: int | None) -> None:
    """Raise ValueError unless what quantises a teacher is installed; a plan does not need it."""
    if bits is not None and not is_bitsandbytes_available():
        raise ValueError(f"a teacher in {bits} bits needs bitsandbytes: pip install bitsandbytes")


def num_quantized(teacher: PreTrainedModel) -> int:
    """Number of a teacher's weights that are quantised: those of all linear layers except the last."""
    linears = [
        x
        for x in teacher.modules()
        if isinstance(x, nn.Linear) and x is not teacher.get_output_embeddings()
    ]
    return sum(x.weight.numel() for x in linears)
