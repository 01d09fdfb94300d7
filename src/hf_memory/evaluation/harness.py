"""Tasks of EleutherAI's lm-eval, which is an extra, on a model that is loaded."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

YAML = ".yaml"
WIDTH = 1.96  # standard errors to each side, of a 95 % interval


def lm_eval(model: PreTrainedModel, tokenizer, task: str, *, batch_size: int = 8) -> dict[str, dict[str, Any]]:
    """Figures of a task as `described` gives them, by the name of what was measured.

    Args:
        model: to measure.
        tokenizer: the model's tokenizer.
        task: a name that lm-eval knows, or a YAML file of a task, which is named as the task is.
        batch_size: requests read at once.

    Raises:
        ValueError: if lm-eval is not installed.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f"lm_eval needs lm-eval: pip install 'hf-memory[eval]', got {task}") from error
    name, folder = task_name(task), str(Path(task).parent) if task.endswith(YAML) else None
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    manager = TaskManager(include_path=folder)
    found = simple_evaluate(wrapped, tasks=[name], task_manager=manager, log_samples=False)["results"]
    parts = {part: _figures(row) for part, row in found.items()}  # of a group, each of its tasks
    return {
        metric if part == name else f"{part} {metric}": figure
        for part, figures in parts.items()
        for metric, figure in figures.items()
    }


def task_name(task: str) -> str:
    """What lm-eval calls it."""
    return Path(task).stem if task.endswith(YAML) else task


def _figures(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{"acc,none": 0.5, "acc_stderr,none": 0.1} as {"acc": a figure with its interval}."""
    figures = {}
    for key, value in row.items():
        metric, _, filtered = key.partition(",")
        error = row.get(f"{metric}_stderr,{filtered}")
        if filtered and not metric.endswith("_stderr"):
            name = metric if filtered == "none" else f"{metric} ({filtered})"
            ends = [value - WIDTH * error, value + WIDTH * error] if isinstance(error, float) else [None, None]
            figures[name] = {"value": value, "low": ends[0], "high": ends[1]}
    return figures
