"""Functions that generate and chat share: flags for sampling, loading a model, and printing its tokens."""

import time
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from hf_memory import conversion
from hf_memory.cli.command import ADVANCED, WHERE
from hf_memory.cli.options import CacheBits, Seed, found, set_cache_bits
from hf_memory.cli.terminal import console, errors
from hf_memory.modeling.loading import load_model

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class SamplingFlags:
    """Flags of how tokens are sampled."""

    temperature: Annotated[
        float | None,
        typer.Option(
            help="Sampling temperature; default: the model's generation config.",
            rich_help_panel=ADVANCED,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Nucleus sampling: smallest set of tokens with this total probability; default: the model's.",
            rich_help_panel=ADVANCED,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Sample from this many most likely tokens, 0 for all; default: the model's.",
            rich_help_panel=ADVANCED,
        ),
    ] = None
    greedy: Annotated[
        bool,
        typer.Option(
            "--greedy",
            help="Take the most likely token instead of sampling.",
            rich_help_panel=ADVANCED,
        ),
    ] = False
    seed: Seed = 0

    def options(self) -> dict:
        """These flags as options of a GenerationConfig."""
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        given = {name: value for name, value in given.items() if value is not None}
        if self.greedy and given:
            raise ValueError(f"greedy must not be given with {', '.join(given)}")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p must be from 0 to 1, got {self.top_p}")
        return {"do_sample": False} if self.greedy else given and {"do_sample": True, **given}


@dataclass(frozen=True)
class LoadingFlags:
    """Flags of where a model runs, and in which dtype."""

    device: Annotated[
        str | None,
        typer.Option(
            help="Where the model runs: cpu, cuda, cuda:1 ...; default: cuda if there is one.",
            rich_help_panel=WHERE,
        ),
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            help=f"Dtype of the weights: {', '.join(DTYPES)}; auto: as they were saved.",
            rich_help_panel=ADVANCED,
        ),
    ] = "auto"
    cache_bits: CacheBits = None

    def load(self, model: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load a model and its tokenizer."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            torch.zeros(1, device=device).item()
        except (
            RuntimeError,
            AssertionError,
        ) as error:  # unknown or missing devices, and those without numbers
            raise ValueError(f"device must be available to torch, got {device}: {error}") from error
        if conversion.find_gguf(found(model)):
            loaded = conversion.load_teacher(model).eval()
            loaded = loaded if self.dtype == "auto" else loaded.to(getattr(torch, self.dtype))
        else:
            loaded = load_model(model, dtype=self.dtype)
        tokenizer = conversion.load_tokenizer(model)
        size = loaded.config.get_text_config().vocab_size
        if tokenizer.vocab_size > size:
            raise ValueError(
                f"the tokenizer of {model} must be the model's, whose embedding has {size} tokens, got one with "
                f"{tokenizer.vocab_size}"
            )
        set_cache_bits(loaded.config, self.cache_bits)
        return loaded.to(device), tokenizer  # type: ignore[arg-type]


class Writer(TextStreamer):
    """Prints tokens as text as soon as they are generated, and measures their speed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        super().__init__(tokenizer, skip_special_tokens=True)
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Take the tokens of a prompt [1, T], or a new token [1]."""
        if value.ndim == 1:
            self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print text that later tokens cannot change."""
        console.out(text, end="\n" if stream_end else "")
        console.file.flush()

    def say_speed(self) -> None:
        """Print the number of tokens per second to stderr."""
        if len(self.times) > 1:
            rate = (len(self.times) - 1) / (self.times[-1] - self.times[0])
            errors.out(f"{len(self.times)} tokens, {rate:.1f} tokens/s")


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, seed: int, **options
) -> Writer:
    """Print a prompt and the model's continuation; the options are those of `generate`."""
    read = tokenizer(prompt, return_tensors="pt").to(model.device)
    if not read["input_ids"].numel():
        raise ValueError(f"prompt must have at least one token, got {prompt!r}")
    torch.manual_seed(seed)
    writer = Writer(tokenizer)
    model.generate(**read, streamer=writer, **options)  # type: ignore[operator]
    return writer
