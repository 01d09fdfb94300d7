"""Many requests at once: a running batch that requests join and leave between steps."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_memory.serving.rows import join, keep, take


@dataclass
class Request:
    """One text to continue.

    Args:
        input_ids: [T], all tokens that the model has not read yet; at least one.
        max_new_tokens: how many to generate at most.
        do_sample: draw from the distribution instead of taking the most likely token.
        temperature: of the distribution.
        top_k: draw from so many tokens; 0 means all.
        top_p: draw from the most likely tokens of so much probability together.
        repetition_penalty: divides the chances of tokens that were read or generated in this request.
        eos_token_id: tokens that end the answer; default: the model's.
        seed: of the draws; a request gives the same tokens in any company.
        cache: what was read before, from `Step.cache` of an earlier request or from `load_memory`; it is used up.
        keep_cache: give the cache back with the last token, for a request that goes on.
    """

    input_ids: Tensor
    max_new_tokens: int = 64
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    eos_token_id: list[int] | None = None
    seed: int = 0
    cache: DynamicCache | None = None
    keep_cache: bool = False


class Step(NamedTuple):
    """One token of one request."""

    request: int  # counted from 0, in the order that they were given
    token: int
    finished: bool
    cache: DynamicCache | None  # with the last token of a request that keeps it; has read all tokens but this last


@dataclass
class _Row:
    """A request while it runs."""

    request: Request
    number: int
    tokens: Tensor  # [T] of this request, read and generated
    length: int  # tokens in the cache
    end: set[int]
    processors: LogitsProcessorList
    generator: torch.Generator
    left: int = field(init=False)

    def __post_init__(self):
        self.left = self.request.max_new_tokens

    def choose(self, logits: Tensor) -> int:
        """The next token, given logits [V]; it is counted as the request's."""
        scores = self.processors(self.tokens[None], logits.float()[None])[0]
        if self.request.do_sample:
            token = int(torch.multinomial(scores.softmax(-1).cpu(), 1, generator=self.generator))
        else:
            token = int(scores.argmax())
        self.tokens = torch.cat([self.tokens, self.tokens.new_tensor([token])])
        self.left -= 1
        return token


@torch.no_grad()
def generate_stream(model: PreTrainedModel, requests: Iterable[Request], max_batch_size: int = 8) -> Iterator[Step]:
    """Continue many texts, each as it would be continued alone, and give every token as soon as it is there.

    Requests are taken from `requests` only when there is room, so it may be a generator that waits for them. A new
    one is read by itself between two steps of the others; then all of a step's tokens are made in one forward.

    Args:
        model: a causal language model of this package, pure or hybrid, in eval mode.
        requests: what to continue.
        max_batch_size: requests that run together.

    Yields:
        A Step for each token.

    Raises:
        ValueError: if a request has no tokens, or asks for none.
    """
    if max_batch_size < 1:
        raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
    waiting, exhausted = enumerate(requests), False
    rows: list[_Row] = []
    cache: DynamicCache | None = None
    while rows or not exhausted:
        while len(rows) < max_batch_size and not exhausted:
            arrived = next(waiting, None)
            if arrived is None:
                exhausted = True
                break
            row, alone, step = _read(model, *arrived)
            yield step
            if not step.finished:
                cache = join(cache, alone) if rows else alone
                rows.append(row)
        if rows:
            logits = _forward(model, rows, cache)
            steps = [_advance(row, x, cache, i) for i, (row, x) in enumerate(zip(rows, logits))]
            running = [i for i, step in enumerate(steps) if not step.finished]
            rows = [rows[i] for i in running]
            if 0 < len(rows) < len(steps):
                keep(cache, running, max(row.length for row in rows))
            yield from steps


def _read(model: PreTrainedModel, number: int, request: Request) -> tuple[_Row, DynamicCache, Step]:
    """Read a request's tokens by themselves, and choose its first."""
    tokens = torch.as_tensor(request.input_ids, device=model.device).flatten()
    if not len(tokens):
        raise ValueError(f"input_ids must hold at least one token, got none in request {number}")
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens} in request {number}")
    cache = DynamicCache(config=model.config) if request.cache is None else request.cache
    logits = model(tokens[None], past_key_values=cache, logits_to_keep=1).logits[0, -1]
    generator = torch.Generator().manual_seed(request.seed)
    end = request.eos_token_id if request.eos_token_id is not None else _end(model.generation_config)
    row = _Row(request, number, tokens, cache.get_seq_length(), set(end), _processors(request), generator)
    return row, cache, _advance(row, logits, cache, 0)


def _forward(model: PreTrainedModel, rows: list[_Row], cache: DynamicCache) -> Tensor:
    """Logits [B, V] after the last token of each row."""
    past = max(row.length for row in rows)
    lengths = torch.tensor([row.length for row in rows], device=model.device)
    mask = torch.arange(past + 1, device=model.device) >= past - lengths[:, None]
    tokens = torch.stack([row.tokens[-1:] for row in rows])
    outputs = model(tokens, attention_mask=mask.long(), position_ids=lengths[:, None], past_key_values=cache)
    for row in rows:
        row.length += 1
    return outputs.logits[:, -1]


def _advance(row: _Row, logits: Tensor, cache: DynamicCache, place: int) -> Step:
    token = row.choose(logits)
    finished = row.left == 0 or token in row.end
    kept = take(cache, place, row.length) if finished and row.request.keep_cache else None
    return Step(row.number, token, finished, kept)


def _end(config: GenerationConfig) -> list[int]:
    end = config.eos_token_id
    return [] if end is None else end if isinstance(end, list) else [end]


def _processors(request: Request) -> LogitsProcessorList:
    processors = LogitsProcessorList()
    if request.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(request.repetition_penalty))
    if request.do_sample:
        if request.temperature != 1:
            processors.append(TemperatureLogitsWarper(request.temperature))
        if request.top_k:
            processors.append(TopKLogitsWarper(request.top_k))
        if request.top_p < 1:
            processors.append(TopPLogitsWarper(request.top_p))
    return processors
