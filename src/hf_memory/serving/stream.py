"""A scheduler for many requests: they join and leave a running batch between its steps."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import GenerationMode

from hf_memory.cache import MemoryLayer, copied
from hf_memory.cache_argument import cache_name
from hf_memory.serving.rows import check_layers, join, keep, take

MOMENT = 1e-3  # seconds that a running batch waits for the next request
ONE_BY_ONE = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@dataclass(eq=False)
class Request:
    """A text to continue.

    Args:
        input_ids: [T] or [1, T], at least one token: those that are not in `cache`.
        max_new_tokens: largest number of tokens to generate.
        options: changes to the model's `generation_config`, by its names: do_sample, temperature, top_k, top_p,
            repetition_penalty, eos_token_id ... Penalties consider only the tokens of this request.
        seed: seed for sampling; the result does not depend on the other requests of the batch.
        cache: a memory to start from: `Step.cache` of an earlier request, or from `load_memory`. It is not changed, so
            several requests can start from the same one. If its states have gradients, these are left out.
        keep_cache: return the cache with the last token, so that another request can continue from it.
    """

    input_ids: Tensor
    max_new_tokens: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    cache: DynamicCache | None = None
    keep_cache: bool = False
    cancelled: bool = field(default=False, init=False)

    def __post_init__(self):
        tokens = torch.as_tensor(self.input_ids)
        if not tokens.numel():
            raise ValueError("input_ids must have at least one token, got none")
        if tokens.is_floating_point() or tokens.ndim not in (1, 2) or tokens.numel() != tokens.shape[-1]:
            raise ValueError(f"input_ids must be integers [T] of one text, got {tokens.dtype} {list(tokens.shape)}")
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be an integer of at least 1, got {self.max_new_tokens}")
        self.input_ids = tokens.flatten()

    def cancel(self) -> None:
        """End the request before its next token; this can be called from any thread. Its last Step has no token."""
        self.cancelled = True


class Step(NamedTuple):
    """A generated token of a request.

    Attributes:
        request: number of the request, counted from 0 in the order in which they were given.
        token: the token; None if the request was cancelled or has failed.
        finished: whether this is the request's last step.
        cache: in the last step of a request with `keep_cache`, its cache, which has read all tokens but the last one.
        error: the exception if the request has failed; other requests go on.
    """

    request: int
    token: int | None
    finished: bool
    cache: DynamicCache | None
    error: Exception | None = None


@dataclass
class _Row:
    """A running request."""

    request: Request
    number: int
    tokens: Tensor  # [T], tokens of this request, read and generated
    length: int  # number of tokens in the cache
    end: set[int]
    sample: bool
    processors: LogitsProcessorList
    generator: torch.Generator
    left: int

    def choose(self, logits: Tensor) -> int:
        """Choose the next token by logits [V], and append it."""
        scores = self.processors(self.tokens[None], logits.to(torch.float32, copy=True)[None])[0]
        if self.sample:
            token = int(torch.multinomial(scores.softmax(-1).cpu(), 1, generator=self.generator))
        else:
            token = int(scores.argmax())
        self.tokens = torch.cat([self.tokens, self.tokens.new_tensor([token])])
        self.left -= 1
        return token


@torch.no_grad()
def generate_stream(model: PreTrainedModel, requests: Iterable[Request], max_batch_size: int = 8) -> Iterator[Step]:
    """Continue many texts in one running batch, and yield each token as soon as it is generated.

    Every request gets the tokens that it would get alone. Requests are taken from `requests` when the batch has room,
    in a thread of their own, so `requests` may be a generator that waits. The prompt of a new request is read between
    two steps of the batch; each step is one forward pass for all running requests.

    Args:
        model: a causal language model of this package, pure or hybrid, in eval mode.
        requests: the requests.
        max_batch_size: largest number of requests that run at the same time.

    Yields:
        A Step for each token. A request that fails has one Step, with the error.
    """
    if max_batch_size < 1:
        raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
    arrivals, batch = _Arrivals(requests), _Batch(model)
    while batch.rows or not arrivals.exhausted:
        while len(batch.rows) < max_batch_size and (arrived := arrivals.take(idle=not batch.rows)):
            yield batch.add(*arrived)
        if batch.rows:
            yield from batch.step()


class _Arrivals:
    """Numbered requests. A daemon thread waits for the next one, so that it does not keep the process alive."""

    def __init__(self, requests: Iterable[Request]):
        self.requests = enumerate(requests)
        self.coming: Future | None = None
        self.exhausted = False

    def take(self, idle: bool) -> tuple[int, Request] | None:
        """The next request; None if there are no more, or if it has not arrived yet and `idle` is False."""
        if self.exhausted:
            return None
        patience = None if idle else MOMENT if self.coming is None else 0
        if self.coming is None:
            self.coming = Future()
            Thread(target=self._next, args=(self.coming,), daemon=True).start()
        if not wait([self.coming], patience).done:
            return None
        arrived, self.coming = self.coming.result(), None
        self.exhausted = arrived is None
        return arrived

    def _next(self, coming: Future) -> None:
        try:
            coming.set_result(next(self.requests, None))
        except BaseException as error:  # errors of the producer are raised in `take`
            coming.set_exception(error)


class _Batch:
    """The running requests, and a cache with a row for each."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.rows: list[_Row] = []
        self.cache: DynamicCache | None = None

    def add(self, number: int, request: Request) -> Step:
        """Read the prompt of a request, and choose its first token."""
        try:
            if not isinstance(request, Request):
                raise ValueError(f"requests must be of type Request, got {type(request).__name__}")
            if request.cancelled:
                return Step(number, None, True, None)
            row, cache, logits = _read(self.model, number, request)
        except Exception as error:
            return Step(number, None, True, None, error)
        step = _advance(row, logits, cache, 0)
        if not step.finished:
            self.cache = join(self.cache, cache) if self.rows else cache
            self.rows.append(row)
        return step

    def step(self) -> list[Step]:
        """Generate a token for every row, or end it."""
        cancelled = [_leave(row, self.cache, i) for i, row in enumerate(self.rows) if row.request.cancelled]
        self._keep([i for i, row in enumerate(self.rows) if not row.request.cancelled])
        if not self.rows:
            return cancelled
        logits = _forward(self.model, self.rows, self.cache)
        steps = [_advance(row, x, self.cache, i) for i, (row, x) in enumerate(zip(self.rows, logits))]
        self._keep([i for i, step in enumerate(steps) if not step.finished])
        return cancelled + steps

    def _keep(self, running: list[int]) -> None:
        if 0 < len(running) < len(self.rows):
            keep(self.cache, running, max(self.rows[i].length for i in running))
        self.rows = [self.rows[i] for i in running]


def _read(model: PreTrainedModel, number: int, request: Request) -> tuple[_Row, DynamicCache, Tensor]:
    """The row of a request, a cache that has read its tokens, and the logits [V] after them."""
    tokens = request.input_ids.to(model.device)
    size = model.config.vocab_size
    if tokens.min() < 0 or tokens.max() >= size:
        raise ValueError(f"input_ids must be from 0 to {size - 1}, got {int(tokens.min())} to {int(tokens.max())}")
    config = _generation_config(model, request)
    processors = model._get_logits_processor(config, input_ids_seq_length=len(tokens), device=model.device)
    end = config._eos_token_tensor
    cache = _own_cache(model, request)
    logits = model(tokens[None], **{cache_name(model): cache}, logits_to_keep=1).logits[0, -1]
    row = _Row(
        request,
        number,
        tokens,
        cache.get_seq_length(),
        end=set() if end is None else set(end.tolist()),
        sample=bool(config.do_sample),
        processors=processors,
        generator=torch.Generator().manual_seed(request.seed),
        left=request.max_new_tokens,
    )
    return row, cache, logits


def _generation_config(model: PreTrainedModel, request: Request) -> GenerationConfig:
    """The model's generation config with a request's options, as in `generate`."""
    config, unknown = model._prepare_generation_config(None, **request.options)
    if unknown:
        raise ValueError(f"options must have names of GenerationConfig, got {', '.join(unknown)}")
    if config.get_generation_mode() not in ONE_BY_ONE or config.stop_strings or config.max_time:
        raise ValueError(
            "a stream supports greedy decoding and sampling only: generation_config must have no beams, assistants, "
            f"stop_strings or max_time, got {config.get_generation_mode().value}"
        )
    config.max_length = len(request.input_ids) + request.max_new_tokens
    model._prepare_special_tokens(config, device=model.device)
    return config


def _own_cache(model: PreTrainedModel, request: Request) -> DynamicCache:
    if request.cache is None:
        return DynamicCache(config=model.config)
    check_layers(request.cache, model)
    texts = {layer.batch_size if isinstance(layer, MemoryLayer) else len(layer.keys) for layer in request.cache.layers}
    if texts != {1}:
        raise ValueError(f"cache must be of one text, got one of {max(texts)}")
    return copied(request.cache)


def _forward(model: PreTrainedModel, rows: list[_Row], cache: DynamicCache) -> Tensor:
    """Logits [B, V] after the last token of each row."""
    past = max(row.length for row in rows)
    lengths = torch.tensor([row.length for row in rows], device=model.device)
    mask = torch.arange(past + 1, device=model.device) >= past - lengths[:, None]
    tokens = torch.stack([row.tokens[-1:] for row in rows])
    read = {"attention_mask": mask.long(), "position_ids": lengths[:, None], cache_name(model): cache}
    outputs = model(tokens, **read)
    for row in rows:
        row.length += 1
    return outputs.logits[:, -1]


def _advance(row: _Row, logits: Tensor, cache: DynamicCache, place: int) -> Step:
    try:
        token = row.choose(logits)
    except Exception as error:  # such as logits of NaN, from which no token can be sampled
        return _leave(row, cache, place)._replace(error=error)
    if row.left == 0 or token in row.end:
        return _leave(row, cache, place)._replace(token=token)
    return Step(row.number, token, False, None)


def _leave(row: _Row, cache: DynamicCache, place: int) -> Step:
    kept = take(cache, place, row.length) if row.request.keep_cache else None
    return Step(row.number, None, True, kept)
