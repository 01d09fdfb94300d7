"""Greedy answers of a model, regardless of its generation config."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_memory.files.chat_template import apply_template
from hf_memory.modeling.any_model import in_eval_mode

BATCH = 2**12  # tokens of a batch of prompts, unless a prompt has more
TEXTS = "texts"  # key of the answers in a record
PROMPTS = (
    "What is gravity?",
    "Name three animals that live in the sea.",
    "Why do leaves fall in autumn?",
    "What is the capital of France, and what is it known for?",
    "Explain in one sentence what a computer program is.",
    "Write a sentence about a dog and a river.",
    "How many days are there in a week? Name them.",
    "What is the opposite of cold?",
    "Give me a short recipe for pancakes.",
    "What does a doctor do?",
    "Translate into French: Good morning.",
    "What is 7 plus 5?",
    "Who wrote Romeo and Juliet?",
    "List four colours of the rainbow.",
    "Why is the sky blue?",
    "What is the difference between a lake and an ocean?",
    "Write a polite sentence that declines an invitation.",
    "What do bees make, and from what?",
    "Tell me a fact about the moon.",
    "How do I boil an egg?",
)


def answers(
    model: PreTrainedModel,
    tokenizer,
    prompts: Sequence[str],
    new_tokens: int,
    progress: Callable[[int], object],
) -> Iterator[str]:
    """Greedy answers with the chat template if there is one, else greedy continuations of the prompts."""
    has_template = tokenizer.chat_template is not None
    for prompt in prompts:
        if has_template:
            prompt = apply_template(
                tokenizer, [{"role": "user", "content": prompt}], add_generation_prompt=True
            )
        asked = tokenizer(prompt, add_special_tokens=not has_template)["input_ids"]
        yield from greedy(model, tokenizer, [asked], new_tokens)
        progress(new_tokens)


@torch.no_grad()
def greedy(
    model: PreTrainedModel,
    tokenizer,
    prompts: Sequence[list[int]],
    new_tokens: int,
    progress: Callable[[int], object] = lambda tokens: None,
) -> list[str]:
    """The texts that follow prompts, which are read in batches."""
    rows = max(1, BATCH // max(map(len, prompts)))
    texts = []
    with plain_generation(model):
        for first in range(0, len(prompts), rows):
            batch = prompts[first : first + rows]
            texts += continued(model, tokenizer, batch, max_new_tokens=new_tokens)
            progress(len(batch) * max(map(len, batch)))
    return texts


@contextmanager
def plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """A context in which a model has nothing of its generation config but the numbers of special tokens.

    `generate` takes the model's own for what it is not given: samples, beams, penalties, words that are not written.
    """
    given = model.generation_config
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(**{name: getattr(given, name) for name in names})
    try:
        yield
    finally:
        model.generation_config = given


@in_eval_mode
def continued(model: PreTrainedModel, tokenizer, prompts: Sequence[list[int]], **how) -> list[str]:
    """The texts that `generate` writes after prompts, which it reads with padding on the left."""
    padding = next(
        (x for x in (tokenizer.pad_token_id, tokenizer.eos_token_id) if x is not None), 0
    )
    longest = max(map(len, prompts))
    read = torch.tensor([[padding] * (longest - len(x)) + x for x in prompts], device=model.device)
    mask = torch.tensor(
        [[0] * (longest - len(x)) + [1] * len(x) for x in prompts], device=model.device
    )
    made = model.generate(read, attention_mask=mask, pad_token_id=padding, **how)  # type: ignore[operator]
    return tokenizer.batch_decode(made[:, longest:], skip_special_tokens=True)


def words_alike(text: str, other: str) -> int:
    """The number of words at the beginning of two texts that are the same."""
    words = text.split()
    others = other.split()
    same = [word == other for word, other in zip(words, others)]
    return [*same, False].index(False)
