"""The demo: trains a small Llama on Python's documentation, converts it, and compares both; offline, in minutes."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hf_memory.conversion import (
    Recipe,
    Results,
    Run,
    Schedule,
    convert,
    resolve,
    results_of,
    train,
    untrained_student,
)
from hf_memory.evaluation import OF_CARD, Subject, evaluate
from hf_memory.files.manual import sections

END = "<|endoftext|>"
HELD_OUT = 10  # every tenth section is held out
PROMPTS = ("When a function is called", "A class definition", "If an exception is raised")


class Settings(NamedTuple):
    """Sizes and schedules of the demo."""

    vocab_size: int = 4096
    hidden_size: int = 128
    num_layers: int = 4
    teacher: Schedule = Schedule(steps=360, learning_rate=5e-3, batch_size=2, length=512)
    transfer: Schedule = Schedule(steps=100, learning_rate=3e-3, batch_size=4)
    distillation: Schedule = Schedule(
        steps=40, learning_rate=1e-4, batch_size=1, length=1024, repeats=0.3
    )


SETTINGS = Settings()


class Corpus(NamedTuple):
    """The text of the demo as tokens, and the tokenizer."""

    tokenizer: PreTrainedTokenizerFast
    training: Tensor  # [T]
    held_out: Tensor  # [T]


class Demo(NamedTuple):
    """The results of the demo."""

    teacher: PreTrainedModel
    student: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    results: Results


def make_corpus(vocab_size: int, texts: list[str]) -> Corpus:
    """Hold out every tenth text, train a byte-level BPE on the others, and tokenise both."""
    held_out = texts[HELD_OUT // 2 :: HELD_OUT]
    training = [text for text in texts if text not in held_out]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(training, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END
    )
    read = [torch.tensor(bpe.encode("".join(part)).ids) for part in (training, held_out)]
    return Corpus(tokenizer, *read)


def make_teacher(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A small Llama with random weights."""
    torch.manual_seed(0)
    teacher = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=settings.hidden_size * 5 // 2,
            num_hidden_layers=settings.num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    teacher.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.5,
        repetition_penalty=1.1,  # without it so small a model repeats itself
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return teacher


class MuonWithAdamW(Optimizer):
    """Muon for the matrices of the layers, AdamW for the rest; here it needs half as many steps as AdamW alone."""

    def __init__(self, model: nn.Module, lr: float):
        matrices = [
            p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name
        ]
        others = [p for p in model.parameters() if not any(p is x for x in matrices)]
        super().__init__(matrices + others, {})
        self.parts = (
            Muon(matrices, lr=lr, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"),
            AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.3),
        )
        self._share_groups()

    def _share_groups(self) -> None:
        # schedulers change these
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        """One step of both optimizers."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict:
        """The states of both optimizers."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict) -> None:
        """Load the states of both optimizers."""
        for part, state in zip(self.parts, state_dict["parts"]):
            part.load_state_dict(state)
        self._share_groups()


def run_demo(
    *,
    to: str = "attention",
    settings: Settings = SETTINGS,
    run: Run = Run(),
    say: Callable[[str], None] = print,
    **options,
) -> Demo:
    """Train a teacher, convert it as `hf-memory convert` does by default, and compare both on held-out text.

    Args:
        to: the student's memory, a name in STUDENTS, or `"attention"`.
        settings: sizes and schedules.
        run: progress reports and options of the Trainer.
        say: is called with a line of text about each step.
        **options: fields of the student's config, such as `gate`.
    """
    corpus = make_corpus(settings.vocab_size, sections())
    tokens = corpus.training
    held_out = corpus.held_out
    say(f"read the language reference: {len(tokens)} tokens to train on, {len(held_out)} held out")
    teacher = make_teacher(settings, corpus.tokenizer)
    wanted = Recipe(
        to, transfer=settings.transfer, distillation=settings.distillation, options=options
    )
    plan = resolve(wanted, teacher.config, tokens)
    say(f"made a Llama of {teacher.num_parameters():,} parameters")
    optimizer = MuonWithAdamW(teacher, settings.teacher.learning_rate)
    losses = {
        "teacher": train(
            teacher, tokens, settings.teacher, name="teacher", optimizer=optimizer, run=run
        )
    }
    made = convert(teacher, tokens, plan, run)
    before, _ = untrained_student(teacher, tokens, made.plan)
    models = {
        "teacher": teacher,
        "before training": before,
        "student": made.student,
    }
    rows = {}
    for name, x in models.items():
        subject = Subject(x, held_out, None if x is teacher else teacher, max_tokens=None)
        rows[name] = evaluate(subject, OF_CARD, name=name, report=run.report)
    results = results_of(
        made.plan,
        losses | made.losses,
        rows,
        teacher="a small Llama trained by hf-memory demo",
        text="the Python language reference",
        training={},
    )
    return Demo(teacher, made.student, corpus.tokenizer, results)
