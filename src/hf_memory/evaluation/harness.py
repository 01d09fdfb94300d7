"""Tasks of EleutherAI's lm-eval (an optional dependency) for a loaded model."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_memory.evaluation.estimates import WIDTH

YAML = ".yaml"
BATCH = 8  # requests at a time


def lm_eval(model: PreTrainedModel, tokenizer, task: str) -> dict[str, dict[str, Any]]:
    """Run a task and return its figures by metric, in the form of `described`.

    Args:
        model: the model.
        tokenizer: the model's tokenizer.
        task: the name of a task in lm-eval, or a YAML file with a task of the same name.

    Raises:
        ValueError: if lm-eval is not installed.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f"lm_eval needs lm-eval: pip install lm-eval, got {task}") from error
    name, folder = task_name(task), str(Path(task).parent) if task.endswith(YAML) else None
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH)
    manager = TaskManager(include_path=folder)
    figures = {}
    for part, row in simple_evaluate(wrapped, tasks=[name], task_manager=manager, log_samples=False)["results"].items():
        for key, value in row.items():  # such as {"acc,none": 0.5, "acc_stderr,none": 0.1}
            metric, _, filtered = key.partition(",")
            if filtered and not metric.endswith("_stderr"):
                spread = row.get(f"{metric}_stderr,{filtered}")
                low, high = (
                    (value - WIDTH * spread, value + WIDTH * spread) if isinstance(spread, float) else (None, None)
                )
                label = metric if filtered == "none" else f"{metric} ({filtered})"
                label = label if part == name else f"{part} {label}"  # a group has several tasks
                figures[label] = {"value": value, "low": low, "high": high}
    return figures


def task_name(task: str) -> str:
    """The name of a task in lm-eval."""
    return Path(task).stem if task.endswith(YAML) else task
