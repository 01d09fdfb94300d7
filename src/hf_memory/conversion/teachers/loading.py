"""A teacher by its name: a folder, a repository of the Hub, or a GGUF file."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from hf_memory.conversion.teachers.gguf import find_gguf, read_config, read_model, read_tokenizer


def load_config(name: str) -> PreTrainedConfig:
    """What is known of a teacher before its weights are loaded; also of a student, to go on from.

    Raises:
        ValueError: if it is in a GGUF file that cannot be read whole, see `read_config`, or has a size of 0.
    """
    file = find_gguf(name)
    try:
        return AutoConfig.from_pretrained(name) if file is None else read_config(file)
    except ZeroDivisionError as error:  # transformers divides sizes by each other before it checks them
        raise ValueError(f"the config of {name} must have no size of 0") from error


def load_tokenizer(name: str):
    """Its tokenizer."""
    file = find_gguf(name)
    return AutoTokenizer.from_pretrained(name) if file is None else read_tokenizer(file)


def load_teacher(name: str) -> PreTrainedModel:
    """It itself, in float32."""
    file = find_gguf(name)
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) if file is None else read_model(file)
