"""Loading a teacher from a folder, from the Hub, or from a GGUF file."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_memory.conversion.teachers.gguf import find_gguf, read_config, read_model, read_tokenizer
from hf_memory.modeling import loading


def load_config(name: str) -> PreTrainedConfig:
    """The config of a teacher, or of a model to fine-tune, without its weights.

    Args:
        name: a folder, a name on the Hub, or a GGUF file.

    Raises:
        ValueError: if a GGUF file cannot be read completely (see `read_config`), or the config describes no model.
    """
    file = find_gguf(name)
    return loading.load_config(name) if file is None else read_config(file)


def load_tokenizer(name: str):
    """The tokenizer of a model; the argument is that of `load_config`."""
    file = find_gguf(name)
    return loading.load_tokenizer(name) if file is None else read_tokenizer(file)


def load_teacher(name: str) -> PreTrainedModel:
    """The teacher in float32; the argument is that of `load_config`."""
    file = find_gguf(name)
    return loading.load_model(name, dtype=torch.float32) if file is None else read_model(file)
