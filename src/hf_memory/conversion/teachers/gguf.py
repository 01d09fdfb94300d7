"""Teachers in a GGUF file, the format of llama.cpp. transformers reads the weights; this module adds the rest.

The rest is how some tokenizers split text, the tokens that end a turn, sampling options, and a check that no tensor of
the file was skipped. The weights must be dequantised: otherwise transformers marks the model as quantised, and it can
neither be trained nor saved.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.integrations.gguf import (
    convert_gguf_tokenizer,
    dequant,
    get_gguf_tokenizer,
    read_gguf_metadata,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.gguf.reader import GgufHeader
from transformers.utils import is_gguf_available

from hf_memory.conversion.teachers.gguf_metadata import (
    ARCHITECTURES,
    fields_of,
    refused,
    ropes_of,
)
from hf_memory.files.chat_template import apply_template
from hf_memory.modeling.card import is_address, terms
from hf_memory.modeling.loading import is_fault, load_model

ENDS = ("eos", "eot", "eom")  # tokens that end a text, a turn, a message
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
GPT2_CUTS = (
    "gpt-2",
    "mpt",
    "olmo",
    "jais",
    "trillion",
)  # pre-tokenizers that split text as GPT-2 does
TERMS = {  # of the model's card
    "license": "general.license",
    "license_name": "general.license.name",
    "license_link": "general.license.link",
    "language": "general.languages",
}
DIGIT_CUTS = (
    "smollm",
    "starcoder",
    "refact",
    "command-r",
    "codeshell",
    "exaone",
    "minerva-7b",
)  # with digits apart


def find_gguf(name: str) -> Path | None:
    """The GGUF file that the name of a teacher refers to: the file, or the only one in a folder without a config.

    Raises:
        ValueError: if a folder has several, or the package to read them is not installed.
    """
    path = Path(name)
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    files = [file for file in files if file.suffix.lower() == ".gguf"]
    if not files or (path / "config.json").exists():
        return None
    if len(files) > 1:
        raise ValueError(
            f"teacher must be one GGUF file, got {name} with {', '.join(file.name for file in files)}"
        )
    if not is_gguf_available():
        raise ValueError(
            f"a teacher in a GGUF file needs gguf: pip install gguf, got {files[0].name}"
        )
    return files[0]


def read_more_types() -> None:
    """Let transformers read blocks of 32 weights in 5 bits, which files have where rows are no multiples of 256."""
    import gguf

    for kind in (gguf.GGMLQuantizationType.Q5_0, gguf.GGMLQuantizationType.Q5_1):
        dequant.GGML_BLOCK.setdefault(kind.value, gguf.GGML_QUANT_SIZES[kind])
        dequant.GGML_NAME.setdefault(kind.value, kind.name)
        dequant._DEQUANT.setdefault(kind.value, partial(_dequantized, kind))


def _dequantized(kind, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    import gguf

    return torch.from_numpy(gguf.dequantize(blocks.numpy(), kind)).to(dtype)


class UnsupportedFile(ValueError):
    """A GGUF file with something that would be lost."""


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """A context in which errors of the readers, which expect files as they were written, become sentences."""
    read_more_types()
    try:
        yield
    except (PermissionError, UnsupportedFile):
        raise
    except BaseException as error:
        if not is_fault(error):
            raise
        reason = str(error).split("\n")[0] or type(error).__name__
        raise UnsupportedFile(
            f"{file.name} is damaged or incomplete, or of a kind that is not read: {reason}"
        ) from error


def read_config(file: Path) -> PreTrainedConfig:
    """The config that the metadata of a GGUF file describes.

    Raises:
        ValueError: if the file is damaged, has metadata that transformers does not read, or lacks some that it needs.
    """
    with _reading(file):
        sizes = _sizes(file)
        metadata, _ = read_gguf_metadata(str(file))
        architecture = metadata["general.architecture"]
        if (blocks := metadata.get(f"{architecture}.block_count", 0)) > len(sizes):
            raise ValueError(
                f"it must have a tensor for each block, got {blocks:,} and {len(sizes)} tensors"
            )
        said = _said(file, architecture, metadata)
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        for name, value in fields_of(said, architecture).items():
            setattr(config, name, value)
        config.rope_parameters = ropes_of(said, config.rope_parameters)
        _check_tensors(file, architecture, config, sizes)
        return config


def _said(file: Path, architecture: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of an architecture, all of which is read."""
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise UnsupportedFile(
            f"a teacher in a GGUF file must be one of {supported}, got {file.name} of {architecture!r}"
        )
    start = f"{architecture}."
    said = {name.removeprefix(start): x for name, x in metadata.items() if name.startswith(start)}
    if given := refused(said, architecture):
        raise UnsupportedFile(
            f"{file.name} must have no metadata that changes predictions and is not read, got {start}{given}"
        )
    return said


def _sizes(file: Path) -> dict[str, int]:
    """The number of weights in each tensor, if all tensors are in the file, one after the other."""
    header = GgufHeader.from_file(str(file))
    end = 0
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise ValueError(f"{tensor.name} begins inside another tensor")
        end = tensor.offset + tensor.nbytes
    if header.data_start + end > (size := file.stat().st_size):
        raise ValueError(f"its tensors end at byte {header.data_start + end:,} of {size:,}")
    return {tensor.name: math.prod(tensor.shape) for tensor in header.tensors}


def _check_tensors(
    file: Path, architecture: str, config: PreTrainedConfig, sizes: Mapping[str, int]
) -> None:
    import gguf

    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if model.num_parameters() > 8 * file.stat().st_size:  # with less than one bit for each
        raise ValueError(f"it must have the weights of its header, got {model.num_parameters():,}")
    parameters = model.named_parameters()  # tied ones once
    read = {str(names.get_name(name, (".weight", ".bias"))): x.numel() for name, x in parameters}
    if others := sorted({name for name, _ in read.items() ^ sizes.items()}):
        raise UnsupportedFile(
            f"teacher must have the tensors of a model of type {config.model_type} and no others, "
            f"got {file.name}, which differs in {', '.join(others[:3])}"
        )


def read_tokenizer(file: Path):
    """The tokenizer and chat template of a GGUF file; if its folder has a tokenizer, that one.

    Raises:
        ValueError: if the tokenizer is damaged, or it is not known how it splits text before BPE.
    """
    beside = file.parent / "tokenizer.json"
    if beside.exists():
        try:
            return PreTrainedTokenizerFast.from_pretrained(file.parent)
        # whatever transformers and tokenizers raise for a damaged file
        except BaseException as error:
            if not is_fault(error):
                raise
            reason = str(error).split("\n")[0] or type(error).__name__
            raise UnsupportedFile(
                f"{beside} must describe a tokenizer, got a damaged one ({reason}): without it, {file.name} has one"
            ) from error
    with _reading(file):
        architecture, described, options = get_gguf_tokenizer(str(file))
        backend, _ = convert_gguf_tokenizer(architecture, described)
        content = json.loads(backend.to_str())
        # transformers may have added a token that the model does not have
        content["added_tokens"] = [
            x for x in content["added_tokens"] if x["id"] < len(described["tokens"])
        ]
        backend = Tokenizer.from_str(json.dumps(content))
        if (cut := described.get("pre_tokenizer_type")) in DIGIT_CUTS:
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        elif described["tokenizer_type"] == "gpt2" and cut not in (
            *GGUF_PRE_TOKENIZER_SPLITS,
            *GPT2_CUTS,
        ):
            raise UnsupportedFile(
                f"teacher must have a known pre-tokenizer, got {cut!r} in {file.name}; "
                "to use it, put the tokenizer.json of the original model into the same folder"
            )
        return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def read_model(file: Path) -> PreTrainedModel:
    """The model of a GGUF file, dequantised to float32, so that it can be trained and saved."""
    config = read_config(file)
    dequantized = GgufConfig(dequantize=True)
    options: dict = {"gguf_file": file.name, "config": config, "quantization_config": dequantized}
    with _reading(file):
        model = load_model(file.parent, dtype=torch.float32, **options)
        metadata, _ = read_gguf_metadata(str(file))
        named = [f"tokenizer.ggml.{end}_token_id" for end in ENDS]
        ends = sorted(
            {metadata[name] for name in named if name in metadata} | turn_ends(read_tokenizer(file))
        )
        sampling = {
            name: metadata.get(f"general.sampling.{given}") for given, name in SAMPLING.items()
        }
        generation = {name: x for name, x in sampling.items() if x is not None}
        if generation:
            generation["do_sample"] = True
        model.generation_config.update(
            eos_token_id=ends[0] if len(ends) == 1 else ends or None, **generation
        )
    return model.eval()


def turn_ends(tokenizer) -> set[int]:
    """The special tokens that a chat template writes after an answer; not every file declares them."""
    if tokenizer.chat_template is None:
        return set()
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    after = apply_template(tokenizer, talk).rpartition("!")[2]
    first = tokenizer(after, add_special_tokens=False)["input_ids"][:1]
    return {x for x in first if x in tokenizer.added_tokens_decoder}


def describe_weights(file: Path, count: int) -> str:
    """The type of the weights in a GGUF file, and their bits per weight."""
    import gguf

    given = read_gguf_metadata(str(file))[0].get("general.file_type")
    kind = next(
        (kind.name for kind in gguf.LlamaFileType if kind == given),
        "of a type that it does not name",
    )
    kind = kind.removeprefix("MOSTLY_").removeprefix("ALL_")
    return f"{kind}, {8 * file.stat().st_size / count:.1f} bits each, converted to float32"


def read_terms(file: Path) -> dict[str, Any]:
    """License and languages that a GGUF file names, as `license_and_language` gives those of a card."""
    metadata, _ = read_gguf_metadata(str(file), string_arrays=(TERMS["language"],))
    found = terms(**{name: metadata.get(key) for name, key in TERMS.items()})
    if not is_address(found.get("license_link", "")):
        found.pop("license_link", None)  # a file of the repository, which is not known
    return found
