"""A person and a model in turn, on one memory."""

from collections.abc import Iterator

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from hf_memory.serving.stream import Request, generate_stream


class Conversation:
    """Each line is read after all that was said before, and nothing is read twice.

    Args:
        model: a causal language model of this package; its `generation_config` says how answers are drawn.
        tokenizer: of the model; its chat template is used if it has one.
        cache: what was read before.
        max_new_tokens: of an answer.
        seed: of the draws.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        cache: DynamicCache | None = None,
        max_new_tokens: int = 200,
        seed: int = 0,
    ):
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.max_new_tokens, self.seed = max_new_tokens, seed
        self.unread: list[int] = []  # the last token of an answer is chosen, but not read

    def answer(self, line: str) -> Iterator[int]:
        """Read a line, and give the tokens of the answer as they come."""
        for step in generate_stream(self.model, [self._request(line)], max_batch_size=1):
            yield step.token
            if step.finished:
                self.cache, self.unread = step.cache, [step.token]
        self.seed += 1

    def memory(self) -> DynamicCache:
        """The cache after all that was said.

        Raises:
            ValueError: if nothing was.
        """
        if self.cache is None:
            raise ValueError("a conversation must have begun to be remembered")
        if self.unread:
            with torch.no_grad():
                self.model(torch.tensor([self.unread], device=self.model.device), past_key_values=self.cache)
        self.unread = []
        return self.cache

    def _request(self, line: str) -> Request:
        config = self.model.generation_config
        return Request(
            torch.tensor(self.unread + self._tokens(line)),
            self.max_new_tokens,
            do_sample=bool(config.do_sample),
            temperature=config.temperature or 1.0,
            top_k=config.top_k or 0,
            top_p=config.top_p or 1.0,
            repetition_penalty=config.repetition_penalty or 1.0,
            seed=self.seed,
            cache=self.cache,
            keep_cache=True,
        )

    def _tokens(self, line: str) -> list[int]:
        if self.tokenizer.chat_template is None:
            return self.tokenizer(line, add_special_tokens=self.cache is None)["input_ids"]
        said = [{"role": "user", "content": line}]
        return self.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
