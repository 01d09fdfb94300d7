"""A conversation whose past is in one memory, so that no message is read twice."""

from collections.abc import Generator
from typing import Any

from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from hf_memory.files.chat_template import apply_template
from hf_memory.serving.stream import Request, generate_stream

ANSWER = "An answer of the model 8c1f6d0e"  # placeholder for earlier answers when the template is applied
EXCHANGE = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}]


class Conversation:
    """A conversation between a user and a model. The memory holds all of it, and no message is read twice.

    With a chat template, the model reads the same tokens as if the template were applied to the whole conversation:
    first its beginning, then, for each message, what follows the previous answer. An answer that was cut short is
    ended as any other. No text is stored.

    Args:
        model: a causal language model of this package; its `generation_config` says how tokens are sampled.
        tokenizer: the model's tokenizer; its chat template is used if it has one.
        cache: a memory to start from; default: an empty one.
        system: the system prompt; default: that of the template.
        max_new_tokens: largest number of tokens of an answer.
        options: changes to the `generation_config`, as in `Request`.
        seed: seed for sampling.

    Raises:
        ValueError: if a system prompt is given without a chat template, or together with a cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        cache: DynamicCache | None = None,
        system: str | None = None,
        max_new_tokens: int = 200,
        options: dict[str, Any] | None = None,
        seed: int = 0,
    ):
        if system is not None and (tokenizer.chat_template is None or cache is not None):
            missing = "a tokenizer without a chat template" if cache is None else "a memory of an earlier conversation"
            raise ValueError(f"system must be None with {missing}, got {system!r}")
        self.model, self.tokenizer, self.cache, self.system = model, tokenizer, cache, system
        self.max_new_tokens, self.options, self.seed = max_new_tokens, options or {}, seed
        self.unread: list[int] = []  # tokens of the conversation that the cache has not read

    def answer(self, line: str) -> Generator[int, None, None]:
        """Read a message, and yield the tokens of the answer as they are generated; closing the iterator stops it."""
        answered: list = []
        unread = self.unread + self._turn(line)
        request = Request(unread, self.max_new_tokens, self.options, self.seed, self.cache, keep_cache=True)
        self.seed += 1
        try:
            for step in generate_stream(self.model, [request], max_batch_size=1):
                if step.error is not None:
                    raise step.error
                answered.append(step.token)
                if step.finished:
                    self.cache, unread, answered = step.cache, [], answered[-1:]
                yield answered[-1]
        finally:
            if answered:
                self.unread = unread + self._closed(answered)

    def memory(self) -> DynamicCache:
        """The cache after the whole conversation.

        Raises:
            ValueError: if there was no message yet.
        """
        if self.unread:
            request = Request(self.unread, 1, cache=self.cache, keep_cache=True)
            (step,) = generate_stream(self.model, [request], max_batch_size=1)
            self.cache, self.unread = step.cache, []
        if self.cache is None:
            raise ValueError("a conversation must have at least one message before its memory can be taken")
        return self.cache

    def reset(self) -> None:
        """Forget the conversation."""
        self.cache, self.unread = None, []

    def _turn(self, line: str) -> list[int]:
        """The tokens between the last answer and the next one."""
        user, begins = {"role": "user", "content": line}, self.cache is None and not self.unread
        if self.tokenizer.chat_template is None:
            return self.tokenizer(line, add_special_tokens=begins)["input_ids"]
        if begins:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            return self._tokens(*self._text([*system, user], add_generation_prompt=True))
        text, start = self._text([*EXCHANGE, user], add_generation_prompt=True)
        closed, end = self._text(EXCHANGE)
        closing = closed[end:]
        return self._tokens(text, start + len(closing) if text.startswith(closing, start) else start)

    def _closed(self, answered: list[int]) -> list[int]:
        """The tokens that end an answer in the template, without those that the answer already has."""
        if self.tokenizer.chat_template is None:
            return answered
        end = self.options.get("eos_token_id", self.model.generation_config.eos_token_id)
        ended = answered[-1] in (end if isinstance(end, list) else [end])
        return (answered[:-1] if ended else answered) + self._tokens(*self._text(EXCHANGE))

    def _text(self, messages: list[dict], **options) -> tuple[str, int]:
        """The text that the template makes of messages, and where the answer in it ends."""
        text = apply_template(self.tokenizer, messages, **options)
        if messages[: len(EXCHANGE)] != EXCHANGE:
            return text, 0
        if ANSWER not in text:
            raise ValueError("the chat template of this model must contain the text of answers")
        return text, text.index(ANSWER) + len(ANSWER)

    def _tokens(self, text: str, start: int) -> list[int]:
        """The tokens of a text after a character, tokenised together with the text before it."""
        if not self.tokenizer.is_fast:  # it has no offsets of tokens
            return self.tokenizer(text[start:], add_special_tokens=False)["input_ids"]
        read = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [token for token, (begin, _) in zip(read["input_ids"], read["offset_mapping"]) if begin >= start]
