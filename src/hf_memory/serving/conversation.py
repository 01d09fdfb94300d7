"""A person and a model in turn, on one memory."""

from collections.abc import Generator
from typing import Any

from jinja2 import TemplateError
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from hf_memory.serving.stream import Request, generate_stream

ANSWER = "An answer of the model 8c1f6d0e"  # in a template's text, where the real one was said already
EXCHANGE = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}]


class Conversation:
    """Each line is read after all that was said before, and nothing is read twice.

    With a chat template, what is read is what the template makes of the whole talk: at first its beginning, then, for
    each line, what follows the answer before. An answer that was cut is closed like any other. No text is kept: the
    talk is in the memory.

    Args:
        model: a causal language model of this package; its `generation_config` says how answers are drawn.
        tokenizer: the model's tokenizer; its chat template is used if it has one.
        cache: what was read before.
        system: what the template is told first; default: what it says by itself.
        max_new_tokens: how many tokens an answer has at most.
        options: what differs from the `generation_config`, as in `Request`.
        seed: seed for sampling.

    Raises:
        ValueError: if there is a system prompt, but no template or not the beginning of a talk.
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
            missing = "a tokenizer without a chat template" if cache is None else "a memory of what was said before"
            raise ValueError(f"system must be None with {missing}, got {system!r}")
        self.model, self.tokenizer, self.cache, self.system = model, tokenizer, cache, system
        self.max_new_tokens, self.options, self.seed = max_new_tokens, options or {}, seed
        self.unread: list[int] = []  # tokens of the talk that the cache has not read

    def answer(self, line: str) -> Generator[int, None, None]:
        """Read a line, and give the tokens of the answer as they come; an iterator that is closed has cut it there."""
        said: list = []
        unread = self.unread + self._turn(line)
        request = Request(unread, self.max_new_tokens, self.options, self.seed, self.cache, keep_cache=True)
        self.seed += 1
        try:
            for step in generate_stream(self.model, [request], max_batch_size=1):
                if step.error is not None:
                    raise step.error
                said.append(step.token)
                if step.finished:
                    self.cache, unread, said = step.cache, [], said[-1:]
                yield said[-1]
        finally:
            if said:
                self.unread = unread + self._closed(said)

    def memory(self) -> DynamicCache:
        """The cache after all that was said.

        Raises:
            ValueError: if nothing was.
        """
        if self.unread:
            request = Request(self.unread, 1, cache=self.cache, keep_cache=True)
            (step,) = generate_stream(self.model, [request], max_batch_size=1)
            self.cache, self.unread = step.cache, []
        if self.cache is None:
            raise ValueError("a conversation must have begun to be remembered")
        return self.cache

    def reset(self) -> None:
        """Forget all that was said."""
        self.cache, self.unread = None, []

    def _turn(self, line: str) -> list[int]:
        """Tokens from the end of the last answer to where the next one begins."""
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

    def _closed(self, said: list[int]) -> list[int]:
        """The end of an answer as the template has it, whichever token it ended with, or none."""
        if self.tokenizer.chat_template is None:
            return said
        end = self.options.get("eos_token_id", self.model.generation_config.eos_token_id)
        ended = said[-1] in (end if isinstance(end, list) else [end])
        return (said[:-1] if ended else said) + self._tokens(*self._text(EXCHANGE))

    def _text(self, messages: list[dict], **options) -> tuple[str, int]:
        """What the template makes of messages, and where an answer in it ends."""
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except TemplateError as error:
            raise ValueError(f"the chat template of this model refuses the conversation: {error}") from error
        if messages[: len(EXCHANGE)] != EXCHANGE:
            return text, 0
        if ANSWER not in text:
            raise ValueError("the chat template of this model must show what was answered")
        return text, text.index(ANSWER) + len(ANSWER)

    def _tokens(self, text: str, start: int) -> list[int]:
        """Tokens of a text from a character on, as they are in the whole."""
        if not self.tokenizer.is_fast:  # and does not say where its tokens are
            return self.tokenizer(text[start:], add_special_tokens=False)["input_ids"]
        read = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [token for token, (begin, _) in zip(read["input_ids"], read["offset_mapping"]) if begin >= start]
