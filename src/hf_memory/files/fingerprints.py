"""Fingerprints of models and texts, by which files say to what they belong."""

import hashlib
import json
from collections.abc import Collection

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_memory.files.running_weights import running_weights
from hf_memory.files.text import Text

OF_LOADING = {
    "_name_or_path",
    "dtype",
    "transformers_version",
    "use_cache",
}  # fields that do not describe the model
BLOCK = 2**20  # tokens that are read at once
SAMPLES = 64  # numbers of each weight that go into a fingerprint


def tokens_fingerprint(tokens: Text | Tensor) -> str:
    """A fingerprint of a text."""
    text = Text.of(tokens)
    digest = hashlib.sha256(text.start.cpu().numpy().tobytes())
    for part in text.tokens.split(BLOCK):
        digest.update(part.cpu().long().numpy().tobytes())
    for x in (text.targets, text.documents):
        digest.update(b"" if x is None else x.cpu().numpy().data)
    digest.update(repr(text.mixture).encode() if text.mixture else b"")
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A fingerprint of a tokenizer: its tokens, how it splits text, and its chat template."""
    splits = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else type(tokenizer).__name__
    parts = [
        sorted(tokenizer.get_vocab().items()),
        splits,
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def model_fingerprint(
    model: PreTrainedModel, dtype: torch.dtype = torch.float32, without: Collection[str] = ()
) -> str:
    """A fingerprint of the config and some numbers of each weight, rounded to a dtype; the same on every device.

    Fields of the config whose names are in `without` do not change it.
    """
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in OF_LOADING and name not in without
    }
    if config.get("cache_bits", 0) is None:  # as of models that had no such field
        del config["cache_bits"]
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in running_weights(model):
        digest.update(_sample(name, weight, dtype))
    return digest.hexdigest()


def weights_fingerprint(model: PreTrainedModel, dtype: torch.dtype) -> str:
    """A fingerprint of some numbers of each weight, rounded to a dtype; the same on every device."""
    samples = sorted(_sample(name, weight, dtype) for name, weight in running_weights(model))
    return hashlib.sha256(b"".join(samples)).hexdigest()


def _sample(name: str, weight: Tensor, dtype: torch.dtype) -> bytes:
    numbers = weight.detach().flatten()
    sample = numbers[:: max(1, len(numbers) // SAMPLES)].to("cpu", dtype).float()
    return f"{name} {tuple(weight.shape)}".encode() + sample.numpy().tobytes()
