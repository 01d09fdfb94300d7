"""Which tokens of a text the heads of a student hold, as a tensor and as coloured text."""

import html
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_memory.mixers.pasts.kept import Kept
from hf_memory.mixers.pasts.kept_by_head import KeptByHead
from hf_memory.modeling.base import MemoryForCausalLM

UNFINISHED = "\ufffd"  # what tokenizers write for bytes that are no character yet


def held_tokens(model: MemoryForCausalLM, cache: Cache) -> Tensor:
    """Whether each head that keeps tokens beside a window holds each token of a text.

    Args:
        model: a model some of whose heads keep tokens (`num_kept_tokens`).
        cache: its cache, which has read one text of T tokens.

    Returns:
        Bools [heads, T], of the key-value heads of all layers in turn without those that keep everything.

    Raises:
        ValueError: if no head keeps tokens beside a window.
    """
    decoder: Any = model.model
    layers: list[Any] = cache.layers
    places = torch.arange(1, cache.get_seq_length() + 1)
    found = []
    for layer, of_cache in zip(decoder.layers, layers):
        for part in getattr(layer.mixer, "parts", ()):
            if isinstance(part.past, Kept | KeptByHead):
                numbers = part.past.numbers(of_cache.states)
                found += [torch.isin(places, of_head[0].cpu().long()) for of_head in numbers]
    if not found:
        kinds = model.config.layer_types
        raise ValueError(f"the model must have heads that keep tokens beside a window, got {kinds}")
    return torch.stack(found)


def text_of_tokens(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """The text of each token; a character of several tokens is the text of the last of them."""
    before: list[int] = []  # some tokenizers write no space before a token that is alone
    unwritten: list[int] = []
    for token in tokens:
        unwritten.append(token)
        text = tokenizer.decode(before + unwritten)
        if text.endswith(UNFINISHED):
            yield ""
            continue
        yield text.removeprefix(tokenizer.decode(before))
        before = unwritten
        unwritten = []


def coloured_text(words: Iterable[str], shares: Iterable[float]) -> str:
    """HTML of a text: each token is a span with the share of heads that hold it as its title and as `--share`.

    A style sheet makes colours of the shares: `background: rgb(255 140 0 / var(--share))`.

    Args:
        words: the text of each token, see `text_of_tokens`.
        shares: the share of heads that hold it, from 0 to 1.
    """
    spans = (
        f'<span style="--share: {share:.2f}" title="{share:.0%} of the heads">{html.escape(word)}</span>'
        for word, share in zip(words, shares)
        if word
    )
    return "".join(spans)
