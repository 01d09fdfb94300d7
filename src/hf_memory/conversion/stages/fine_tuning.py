"""Fine-tuning, the last stage: a student is trained on text, usually with longer windows, fully or with LoRA."""

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_memory.conversion.data import TokenWindows
from hf_memory.conversion.recipe import Schedule, lora_rank_of
from hf_memory.conversion.run import Run
from hf_memory.conversion.stages.sharding import processes
from hf_memory.conversion.stages.trainer import (
    StageTrainer,
    new_parameters,
    only_these_learn,
    run_trainer,
)
from hf_memory.files.folders import written
from hf_memory.files.text import Text, TextFacts, check_length, check_tokens
from hf_memory.modeling.any_model import check_model
from hf_memory.modeling.checks import check
from hf_memory.modeling.configuration import MemoryConfig
from hf_memory.progress import History

FINE_TUNING = "fine-tuning"


def fine_tune(
    student: PreTrainedModel,
    tokens: Text | Tensor,
    schedule: Schedule,
    *,
    lora_rank: int | None = None,
    adapter: Path | None = None,
    seed: int = 0,
    run: Run = Run(),
) -> History:
    """Train a student to predict the next token of a text.

    With LoRA the weight W of each linear layer, except the last, becomes W + 2 B A, of which A [rank, in] and
    B [out, rank] are trained. Afterwards the product is added to W, so that the student is a model like any other.

    Args:
        student: the student, trained in place. If windows are longer than its `max_position_embeddings`, that is raised
            to their length.
        tokens: [T], the training text.
        schedule: the training schedule.
        lora_rank: rank of LoRA; default: all weights are trained.
        adapter: folder to write the LoRA weights to, for use by peft with the student as it was before.
        seed: seed for the order of the windows, and for A.
        run: checkpoints, progress reports and options of the Trainer.

    Returns:
        The loss over the steps.

    Raises:
        ValueError: if the rank is below one, the text is too short or the windows too long, the checkpoints are of
            other arguments, or a loss is not finite.
        OSError: if the adapter or a checkpoint cannot be written.
    """
    check_model("student", student)
    check_fine_tuning(tokens, student.config, schedule)
    if adapter and lora_rank is None:
        raise ValueError(f"adapter must not be given without lora_rank, got {adapter}")
    use_cache = student.config.use_cache
    data = TokenWindows(tokens, schedule, seed)
    belongs_to = {"student": student, "lora_rank": lora_rank}
    with nullcontext(student) if lora_rank is None else lora(student, lora_rank, seed) as learner:
        losses = run_trainer(StageTrainer, learner, data, FINE_TUNING, run, belongs_to)
        if adapter and processes().is_main_process:
            with written("adapter", adapter, "the student is as it was"):
                learner.save_pretrained(str(adapter))
    positions = getattr(student.config, "max_position_embeddings", None)
    if positions and positions < schedule.length:
        student.config.max_position_embeddings = schedule.length
    student.config.use_cache = use_cache  # the Trainer turns it off
    return losses


@contextmanager
def trained(student: PreTrainedModel, train: str, seed: int) -> Iterator[None]:
    """A context in which only those weights of a student learn that a recipe's `train` names."""
    rank = lora_rank_of(train)
    own = own_learners(student, train)
    with only_these_learn(student, own) if rank is None else lora(student, rank, seed, beside=own):
        yield


@contextmanager
def lora(
    model: PreTrainedModel, rank: int, seed: int, *, beside: Collection[nn.Parameter] = ()
) -> Iterator[PeftModel]:
    """A model with LoRA, as a context; the updates are merged into its weights if no exception was raised.

    Args:
        model: the model.
        rank: the rank.
        seed: seed for the updates.
        beside: parameters that are trained themselves.
    """
    check(rank >= 1, "lora_rank", "at least 1", rank)
    whole = [name for name, x in linears(model).items() if x.weight in beside]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        how: dict = {
            "target_modules": "all-linear",
            "exclude_modules": whole or None,
            "task_type": "CAUSAL_LM",
        }
        config = LoraConfig(r=rank, lora_alpha=2 * rank, **how)
        # peft asks for an old name
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            learner = get_peft_model(model, config)
    for x in beside:
        x.requires_grad_()
    try:
        yield learner  # type: ignore[misc]
        learner.merge_and_unload()
    except BaseException:
        learner.unload()
        raise
    finally:
        model.requires_grad_()


def linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The layers that LoRA changes, by name."""
    last = model.get_output_embeddings()
    return {
        name: x for name, x in model.named_modules() if isinstance(x, nn.Linear) and x is not last
    }


def own_learners(student: PreTrainedModel, train: str) -> set[nn.Parameter]:
    """The parameters that are trained themselves, without LoRA, by a recipe's `train`."""
    everything = set(student.parameters())
    new = new_parameters(student)
    if train == "all":
        return everything
    if train != "attention":
        return new
    ends = student.get_input_embeddings(), student.get_output_embeddings()
    fed = [x.mlp for x in student.modules() if hasattr(x, "mlp")]
    return everything - {x for part in (*ends, *fed) for x in part.parameters()} | new


def num_learned(model: PreTrainedModel, rank: int | None, beside: Collection[nn.Parameter]) -> int:
    """The number of parameters that are trained: those of LoRA, if it has a rank, and those `beside`."""
    updated = [x for x in linears(model).values() if x.weight not in beside] if rank else []
    return sum((rank or 0) * (x.in_features + x.out_features) for x in updated) + sum(
        x.numel() for x in beside
    )


def check_fine_tuning(
    tokens: Text | Tensor | TextFacts, config: PreTrainedConfig, schedule: Schedule
) -> None:
    """Raise ValueError if a model of this config cannot learn a text by a schedule."""
    schedule.check(FINE_TUNING)
    check_tokens(tokens, config)
    if schedule.chunk_length and not isinstance(config, MemoryConfig):
        raise ValueError(
            f"chunk_length of {FINE_TUNING} must be 0 for a model without memories, got {config.model_type}"
        )
    if not schedule.steps:
        return
    check_length(tokens, schedule.length)
    positions = getattr(config, "max_position_embeddings", None)
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    is_known = not positions or schedule.length <= positions or kind in ("default", "linear")
    expected = (
        f"at most the model's {positions} positions, which its RoPE of type {kind} is made for"
    )
    check(is_known, "length", expected, schedule.length)
