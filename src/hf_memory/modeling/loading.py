"""Loading models whose files may be incomplete, or may not describe what is in them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

# layers of a model that can be built in seconds, even if its files have fewer tensors
DEEPEST = 256
MOST_LABELS = 10_000  # of a config, which transformers lists one by one


def load_config(name: str | Path) -> PreTrainedConfig:
    """The config of a model, which is built without weights to check it. No code of the repository runs.

    If it ties an output head to the embeddings, and the files have another head, then `tie_word_embeddings` is false,
    since transformers reads both.

    Args:
        name: a folder or a name on the Hub.

    Raises:
        ValueError: if no model can be built from the config, or only one that is larger than the files of weights.
    """
    with _explained(f"the config of {name} must describe a model that can be built"):
        described = PreTrainedConfig.get_config_dict(name)[0]
        files = _files(name)
    tensors = sum(len(safe_open(file, "pt").keys()) for file in files)
    if (depth := _depth(described)) > max(DEEPEST, tensors):
        raise ValueError(
            f"{name} must have a tensor for each layer of its config, got {depth:,} and {tensors} tensors"
        )
    if (labels := _labels(described)) > MOST_LABELS:
        raise ValueError(
            f"the config of {name} must have at most {MOST_LABELS:,} labels, got {labels:,}"
        )
    with _explained(f"the config of {name} must describe a model that can be built"):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            return config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    parameters = model.num_parameters()
    size = sum(file.stat().st_size for file in files)
    # the fewest bits that a parameter takes
    bits = 1 if getattr(config, "quantization_config", None) else 8
    if files and parameters * bits > size * 8:
        raise ValueError(
            f"{name} must have the weights of its config, got {parameters:,} in files of {size:,} bytes"
        )
    if any(_differ(files, *pair) for pair in model.all_tied_weights_keys.items()):
        config.tie_word_embeddings = False
    return config


def _differ(files: list[Path], first: str, second: str) -> bool:
    """Whether files of weights have two tensors with different values."""
    found: dict[str, Path] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            found |= dict.fromkeys({first, second} & {*tensors.keys()}, file)
    return len(found) == 2 and not torch.equal(*(_tensor(file, x) for x, file in found.items()))


def _tensor(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name)


def load_model(name: str | Path, **options) -> PreTrainedModel:
    """A causal language model with all of its weights. No code of the repository runs.

    Args:
        name: a folder or a name on the Hub.
        **options: further arguments of `from_pretrained`; `config` is checked by `load_config` unless it is given.

    Raises:
        ValueError: if weights are missing, which transformers would replace by random ones, or have other shapes.
    """
    config = options.pop("config", None) or load_config(name)
    checks = {
        "trust_remote_code": False,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    loaded: Any = AutoModelForCausalLM.from_pretrained(name, config=config, **checks, **options)
    model, info = loaded
    parameters = {name for name, _ in model.named_parameters()}  # without tied ones
    for what, keys in (
        ("no values", info["missing_keys"] & parameters),
        ("another shape", {key for key, *_ in info["mismatched_keys"]}),
    ):
        if keys:
            first = sorted(keys)[:3]
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise ValueError(
                f"{name} must have all weights of its config, got {what} for {', '.join(first)}{more}"
            )
    if model.config.tie_word_embeddings and not _is_tied(model):
        model.config.tie_word_embeddings = False
    return model


def _is_tied(model: PreTrainedModel) -> bool:
    """Whether the output head of a model is its embeddings, or has their values."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    weights = [getattr(x, "weight", None) for x in ends]
    if any(x is None for x in weights):
        return True
    return weights[0] is weights[1] or torch.equal(*weights)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. No code of the repository runs.

    Args:
        name: a folder or a name on the Hub.

    Raises:
        ValueError: if its files describe no tokenizer, or a folder has none.
        OSError: if a model on the Hub has none.
    """
    if Path(name).is_dir() and not any(map(_is_of_tokenizer, Path(name).iterdir())):
        raise ValueError(
            f"{name} must have the files of a tokenizer, such as tokenizer.json: copy them from the model that it was "
            "made from"
        )
    with _explained(f"the files of {name} must describe a tokenizer"):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def _is_of_tokenizer(file: Path) -> bool:
    """Whether a file may be one of a tokenizer."""
    words = "token", "vocab", "merges", ".model", "tekken"
    return any(word in file.name for word in words)


def has_weights(name: str | Path) -> bool:
    """Whether the weights of a model are on this machine: in a folder, or in the cache of the Hub.

    Args:
        name: a folder or a name on the Hub.
    """
    return len(_files(name)) > 0


def _files(name: str | Path) -> list[Path]:
    """The files of weights that have headers, which safetensors have; none if not all are on this machine."""
    files = [SAFE_WEIGHTS_NAME]
    index = local_file(name, SAFE_WEIGHTS_INDEX_NAME)
    if local_file(name, SAFE_WEIGHTS_NAME) is None and index is not None:
        files = sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    for file in files:
        if Path(file).name != file:
            raise ValueError(f"weight_map must name files in the folder of {name}, got {file}")
    paths = [local_file(name, file) for file in files]
    return [] if None in paths else paths


def local_file(name: str | Path, file: str) -> Path | None:
    """A file of a model if it is on this machine, in a folder or in the cache of the Hub; nothing is downloaded.

    Args:
        name: a folder or a name on the Hub.
        file: the name of the file.

    Raises:
        OSError: if the name can be neither.
    """
    path = cached_file(
        name, file, local_files_only=True, _raise_exceptions_for_missing_entries=False
    )
    return None if path is None else Path(path)


def _depth(described: dict) -> int:
    """The largest number that a config calls a number of layers."""
    counts = [x for key, x in described.items() if "layer" in key and type(x) is int]
    return max(
        [0, *counts, *(_depth(part) for part in described.values() if isinstance(part, dict))]
    )


def _labels(described: dict) -> int:
    """The largest number of labels that a config gives, or lists."""
    counts = [x for key, x in described.items() if key == "num_labels" and type(x) is int]
    counts += [
        len(x)
        for key, x in described.items()
        if key in ("id2label", "label2id") and hasattr(x, "__len__")
    ]
    return max(
        [0, *counts, *(_labels(part) for part in described.values() if isinstance(part, dict))]
    )


@contextmanager
def _explained(wanted: str) -> Iterator[None]:
    """Errors from a wrong value in a file, which transformers does not check everywhere, as a ValueError."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except StrictDataclassError as error:  # of a wrong type, in several lines
        reason = str(error).strip().splitlines()[-1].strip()
        raise ValueError(f"{wanted}, got {reason}") from error
    except BaseException as error:
        if not is_fault(error):
            raise
        raise ValueError(f"{wanted}, got {type(error).__name__} ({error})") from error


def is_fault(error: BaseException) -> bool:
    """Whether an error is no interruption. A panic in Rust, as in tokenizers, is an error that is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
