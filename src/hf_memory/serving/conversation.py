"""A conversation whose past is in one memory, so that no message is read twice."""

import warnings
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerationMode

from hf_memory.cache import MemoryLayer, copied
from hf_memory.cache_argument import cache_name
from hf_memory.files.chat_template import apply_template
from hf_memory.modeling.any_model import check_model
from hf_memory.modeling.checks import check
from hf_memory.serving.memory_file import check_layers

ANSWER = "An answer of the model 8c1f6d0e"  # placeholder for earlier answers when the template is applied
EXCHANGE = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}]
NEXT = {"role": "user", "content": "Next"}
QUIET: dict = {"verbose": False}  # a tokenizer's warning of indexing errors is wrong here
LONGEST = 200  # tokens of an answer, where nothing says how many
ONE_BY_ONE = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class Conversation:
    """A conversation between a user and a model. The memory holds all of it, and no message is read twice.

    With a chat template, the model reads the same tokens as if the template were applied to the whole conversation:
    first its beginning, then, for each message, what follows the previous answer. An answer that was cut short is
    ended as any other. Where the template would show an answer that was read otherwise, such as without its thinking,
    the next message is refused.

    Args:
        model: a causal language model of this package, or a hybrid of transformers after `use_memory_ops`; its
            `generation_config` says how tokens are sampled.
        tokenizer: the model's tokenizer; its chat template is used if it has one.
        cache: a memory of one text to start from; it is not changed. Default: an empty one.
        system: the system prompt; default: that of the template.
        max_new_tokens: largest number of tokens of an answer. Default: that of `options`, else of the model's
            `generation_config`, else 200.
        options: changes to the `generation_config`, by its names: do_sample, temperature, top_k, top_p,
            repetition_penalty, eos_token_id ... Penalties consider all tokens of the conversation, but not those that
            `cache` has read before.
        seed: seed for sampling.

    Raises:
        ValueError: if a system prompt is given without a chat template, or together with a cache; or the cache is of
            another model or of several texts; or the number of tokens is not one, or is given twice.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        cache: DynamicCache | None = None,
        system: str | None = None,
        max_new_tokens: int | None = None,
        options: dict[str, Any] | None = None,
        seed: int = 0,
    ):
        check_model("model", model)
        if system is not None and (tokenizer.chat_template is None or cache is not None):
            missing = (
                "a tokenizer without a chat template"
                if cache is None
                else "a memory of an earlier conversation"
            )
            raise ValueError(f"system must be None with {missing}, got {system!r}")
        if cache is not None:
            _check_cache(cache, model)
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache
        self.system = system
        self.max_new_tokens = max_new_tokens
        self.options = options or {}
        self.seed = seed
        self.tokens: list[int] = []  # of the conversation
        self.unread: list[int] = []  # the last of them, which the cache has not read
        self.changes_answers = False  # whether the template would show the last answer otherwise
        self._longest()

    def answer(self, line: str) -> Generator[int, None, None]:
        """Read a message, and yield the tokens of the answer as they are generated; closing the iterator stops it.

        Raises:
            ValueError: if the message is no text or has no token, or an option is wrong, or the template would show an
                earlier answer otherwise than it was read. It is then no part of the conversation.
        """
        check(isinstance(line, str), "line", "the text of one message", line)
        turn = self._turn(line)
        before = self.tokens + turn
        unread = self.unread + turn
        if not unread:
            raise ValueError(f"line must have at least one token, got {line!r}")
        read = len(before) - len(unread)  # tokens of the conversation that the cache has read
        answered: list[int] = []
        seed = self.seed
        self.seed += 1
        try:
            for token, cache in self._continued(before, unread, seed):
                answered.append(token)
                # at the end of the answer the cache has read all of it but this token
                if cache is not None:
                    self.cache = cache
                    read = len(before) + len(answered) - 1
                yield token
        finally:
            if answered:
                self.tokens = before + self._closed(answered)
                self.unread = self.tokens[read:]

    def memory(self) -> DynamicCache:
        """The cache after the whole conversation. It warns if the template would show the last answer otherwise.

        Raises:
            ValueError: if there was no message yet.
        """
        if self.unread:
            cache = self._own_cache()
            _read(self.model, self._ids(self.unread), cache)
            self.cache = cache
            self.unread = []
        if self.cache is None:
            raise ValueError(
                "a conversation must have at least one message before its memory can be taken"
            )
        if self.changes_answers:
            warnings.warn(
                "the memory has the last answer as it was written, which the chat template of this model would show "
                "otherwise before another message, such as without its thinking",
                stacklevel=2,
            )
        return self.cache

    def reset(self) -> None:
        """Forget the conversation."""
        self.cache = None
        self.tokens = []
        self.unread = []
        self.changes_answers = False

    @torch.no_grad()
    def _continued(
        self, tokens: list[int], unread: list[int], seed: int
    ) -> Iterator[tuple[int, DynamicCache | None]]:
        """The tokens that follow those of the conversation, one by one.

        Beside the last one is the cache that has read those before it.
        """
        model = self.model
        longest = self._longest()
        config = _generation_config(model, len(tokens), longest, self.options)
        processors = model._get_logits_processor(
            config, input_ids_seq_length=len(tokens), device=model.device
        )
        ends = [] if config._eos_token_tensor is None else config._eos_token_tensor.tolist()
        generator = torch.Generator().manual_seed(seed)
        cache = self._own_cache()
        logits = _read(model, self._ids(unread), cache)
        ids = self._ids(tokens)
        for left in reversed(range(longest)):
            scores = processors(ids, logits.to(torch.float32, copy=True))[0]
            if config.do_sample:
                token = int(torch.multinomial(scores.softmax(-1).cpu(), 1, generator=generator))
            else:
                token = int(scores.argmax())
            ids = torch.cat([ids, ids.new_tensor([[token]])], dim=1)
            if left == 0 or token in ends:
                yield token, cache
                return
            yield token, None
            logits = _read(model, ids[:, -1:], cache)

    def _longest(self) -> int:
        """The largest number of tokens of an answer, from where it is given."""
        check("max_length" not in self.options, "options", "without max_length", self.options)
        of_options = self.options.get("max_new_tokens")
        if self.max_new_tokens is not None and of_options is not None:
            both = f"{self.max_new_tokens!r} and {of_options!r}"
            raise ValueError(f"max_new_tokens must be given alone or in options, got both: {both}")
        places = {
            "max_new_tokens": self.max_new_tokens,
            "max_new_tokens of options": of_options,
            "max_new_tokens of the model's generation_config": (
                self.model.generation_config.max_new_tokens
            ),
        }
        name, number = next(((k, v) for k, v in places.items() if v is not None), ("", LONGEST))
        check(type(number) is int and number > 0, name, "a number of tokens above 0", number)
        return number

    def _ids(self, tokens: list[int]) -> Tensor:
        """Tokens as the model reads them, [1, T]."""
        size = self.model.config.vocab_size
        if max(tokens) >= size:
            raise ValueError(
                f"tokenizer must have at most the model's {size} tokens, got token {max(tokens)}"
            )
        return torch.tensor([tokens], device=self.model.device)

    def _own_cache(self) -> DynamicCache:
        """A copy of the cache, which an answer that is stopped leaves as it is."""
        return DynamicCache(config=self.model.config) if self.cache is None else copied(self.cache)

    def _turn(self, line: str) -> list[int]:
        """The tokens between the last answer and the next one."""
        user = {"role": "user", "content": line}
        begins = self.cache is None and not self.unread
        if self.tokenizer.chat_template is None:
            return self.tokenizer(line, add_special_tokens=begins, **QUIET)["input_ids"]
        if begins:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            return self._tokens(self._text([*system, user], add_generation_prompt=True), 0)
        self._check_earlier_answers()
        return self._after_answer(user)[len(self._closing()) :]

    def _closed(self, answered: list[int]) -> list[int]:
        """An answer with the tokens that end it, whatever follows, without those that it already has."""
        if self.tokenizer.chat_template is None:
            return answered
        end = self.options.get("eos_token_id", self.model.generation_config.eos_token_id)
        ended = answered[-1] in (end if isinstance(end, list) else [end])
        written = answered[:-1] if ended else answered
        self.changes_answers = not self._keeps(self.tokenizer.decode(written))
        return written + self._closing()

    def _check_earlier_answers(self) -> None:
        """Raise ValueError if the template shows earlier answers otherwise than they were read."""
        asked = self._text(EXCHANGE[:1], add_generation_prompt=True).rstrip()
        shown = self._text([*EXCHANGE, NEXT]).partition(ANSWER)[0]
        if self.changes_answers or shown.rstrip() != asked:
            raise ValueError(
                "the chat template of this model must show an answer, when another message follows, as it was read; it "
                "changes the last one, as templates do that drop earlier thinking. A memory cannot take back what it "
                "has read: use generate with the template of the whole conversation"
            )

    def _keeps(self, answer: str) -> bool:
        """Whether the template shows an answer as it is when another message follows, apart from space around it."""
        question, _ = EXCHANGE
        shown = self._text([question, {"role": "assistant", "content": answer}, NEXT])
        around = self._text([*EXCHANGE, NEXT])
        return shown in (around.replace(ANSWER, text) for text in (answer, answer.strip()))

    def _closing(self) -> list[int]:
        """The tokens that end an answer both where it is the last message and where another follows."""
        last = self._after_answer()
        earlier = self._after_answer(NEXT)
        same = [x == y for x, y in zip(last, earlier)]
        return last[: [*same, False].index(False)]

    def _after_answer(self, *messages: dict) -> list[int]:
        """The tokens after an answer when these messages follow."""
        text = self._text([*EXCHANGE, *messages], add_generation_prompt=bool(messages))
        if ANSWER not in text:
            raise ValueError("the chat template of this model must contain the text of answers")
        return self._tokens(text, text.index(ANSWER) + len(ANSWER))

    def _text(self, messages: list[dict], **options) -> str:
        """The text that the template makes of messages."""
        return apply_template(self.tokenizer, messages, **options)

    def _tokens(self, text: str, start: int) -> list[int]:
        """The tokens of a text after a character, tokenised together with the text before it."""
        if not self.tokenizer.is_fast:  # it has no offsets of tokens
            return self.tokenizer(text[start:], add_special_tokens=False, **QUIET)["input_ids"]
        options = {"add_special_tokens": False, "return_offsets_mapping": True, **QUIET}
        read = self.tokenizer(text, **options)
        return [
            token
            for token, (begin, _) in zip(read["input_ids"], read["offset_mapping"])
            if begin >= start
        ]


@torch.no_grad()
def _read(model: PreTrainedModel, ids: Tensor, cache: DynamicCache) -> Tensor:
    """The logits [1, V] after tokens [1, T], which the cache then has read."""
    return model(ids, **{cache_name(model): cache}, logits_to_keep=1).logits[:, -1]


def _generation_config(
    model: PreTrainedModel, length: int, new_tokens: int, options: dict
) -> GenerationConfig:
    """The model's generation config with these options, as in `generate`."""
    config, unknown = model._prepare_generation_config(None, **options)
    if unknown:
        raise ValueError(f"options must have names of GenerationConfig, got {', '.join(unknown)}")
    if config.get_generation_mode() not in ONE_BY_ONE or config.stop_strings or config.max_time:
        raise ValueError(
            "a conversation supports greedy decoding and sampling only: generation_config must have no beams, "
            f"assistants, stop_strings or max_time, got {config.get_generation_mode().value}"
        )
    config.max_length = length + new_tokens
    model._prepare_special_tokens(config, device=model.device)
    return config


def _check_cache(cache: DynamicCache, model: PreTrainedModel) -> None:
    check_layers(cache, model)
    if not all(layer.is_initialized for layer in cache.layers):
        raise ValueError("cache must have read tokens or be None, got an empty one")
    texts = {
        layer.batch_size if isinstance(layer, MemoryLayer) else len(layer.keys)
        for layer in cache.layers
    }
    if texts != {1}:
        raise ValueError(f"cache must be of one text, got one of {max(texts)}")
