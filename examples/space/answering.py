"""Teacher and student answer the same prompt, a step of each in turn."""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, RepetitionPenaltyLogitsProcessor

from hf_memory.cache import state_bytes
from hf_memory.evaluation import held_tokens, text_of_tokens
from hf_memory.evaluation.efficiency import bytes_in_16_bits, empty_cache
from hf_memory.files.chat_template import apply_template
from hf_memory.modeling.base import MemoryForCausalLM

PIECE = 64  # tokens that a model reads at once: a page shows after each piece how far it is


class Measured(NamedTuple):
    """What a cache takes after some tokens."""

    tokens: int
    bytes: int  # in 16 bits, or the fewer that the model has
    bytes_here: int  # in the dtype in which the model runs here


class Answer:
    """A prompt that a model reads, and the greedy answer that it writes.

    Args:
        model: any causal language model.
        prompt: the tokens of the prompt, at least one.
        max_new_tokens: largest number of tokens of the answer.
    """

    def __init__(self, model: PreTrainedModel, prompt: list[int], max_new_tokens: int):
        self.model = model
        self.tokens = list(prompt)  # of the prompt, and then of the answer
        self.prompt_length = len(prompt)
        self.max_length = len(prompt) + max_new_tokens
        self.cache, self.past = empty_cache(model)
        self.num_read = 0  # tokens that the cache has read
        self.seconds = 0.0  # of writing
        self.measured: list[Measured] = []
        config = model.generation_config
        given = config.eos_token_id
        self.ends = given if isinstance(given, list) else [given]
        self.penalty = RepetitionPenaltyLogitsProcessor(config.repetition_penalty or 1.0)

    @property
    def num_written(self) -> int:
        """Number of tokens of the answer so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete."""
        has_ended = self.num_written > 0 and self.tokens[-1] in self.ends
        return has_ended or len(self.tokens) == self.max_length

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of writing; None if too little was written."""
        return (self.num_written - 1) / self.seconds if self.num_written > 1 else None

    def step(self) -> None:
        """Read the next piece of the prompt, or the last token; at the end of the prompt, write one more."""
        piece = self.tokens[self.num_read : self.num_read + PIECE]
        start = time.perf_counter()
        logits = self._read(piece)
        self.num_read += len(piece)
        if self.num_read == len(self.tokens):
            scores = self.penalty(torch.tensor([self.tokens]), logits.float())
            self.tokens.append(int(scores.argmax()))
        if self.num_written > 1:
            self.seconds += time.perf_counter() - start

    def measure(self) -> None:
        """Measure the cache, and add the result to `measured`."""
        size = bytes_in_16_bits(self.model.config, self.cache, self.num_read)
        self.measured.append(Measured(self.num_read, size, state_bytes(self.cache)))

    def shares(self) -> list[float]:
        """The share of heads that hold each token, of the heads that keep tokens beside a window.

        Of a model that is not ours all heads hold all tokens. The token that was written last counts as held.
        """
        if not isinstance(self.model, MemoryForCausalLM):
            return [1.0] * (self.num_read + 1)
        held = held_tokens(self.model, self.cache).double().mean(0)
        return [*held.tolist(), 1.0]

    @torch.no_grad()
    def _read(self, piece: list[int]) -> Tensor:
        """The logits [1, V] after the last token of a piece."""
        ids = torch.tensor([piece], device=self.model.device)
        return self.model(ids, **self.past, logits_to_keep=1).logits[:, -1].cpu()


class Prompt(NamedTuple):
    """A prompt as a model reads it."""

    tokens: list[int]
    words: list[str]  # the text of each token; empty for those that the chat template adds


def read_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> Prompt:
    """A message to a model that answers, or the beginning of a text for one that goes on with it."""
    text = text.strip()
    if not text:
        return Prompt([], [])
    rendered = text
    if is_chat := tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": text}]
        rendered = apply_template(tokenizer, messages, add_generation_prompt=True)
    read = tokenizer(rendered, add_special_tokens=not is_chat, return_offsets_mapping=True)
    begin = max(0, rendered.find(text))
    own = [begin <= start < end <= begin + len(text) for start, end in read["offset_mapping"]]
    words = text_of_tokens(tokenizer, read["input_ids"])
    return Prompt(read["input_ids"], [word if shown else "" for word, shown in zip(words, own)])


def answer_both(
    teacher: PreTrainedModel, student: PreTrainedModel, prompt: list[int], max_new_tokens: int
) -> Iterator[tuple[Answer, Answer]]:
    """The answers of teacher and student after each step of both."""
    both = Answer(teacher, prompt, max_new_tokens), Answer(student, prompt, max_new_tokens)
    while not all(answer.is_finished for answer in both):
        for answer in both:
            if not answer.is_finished:
                answer.step()
        yield both


def num_equal(teacher: Answer, student: Answer) -> int:
    """How many tokens at the beginning of both answers are the same."""
    pairs = zip(teacher.tokens[teacher.prompt_length :], student.tokens[student.prompt_length :])
    same = [x == y for x, y in pairs]
    return [*same, False].index(False)
