"""Small models by name, and one way to train them on a task that makes its own data."""

import time
from collections.abc import Callable, Iterable
from statistics import mean

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import hf_memory  # noqa: F401  # registers the families

IGNORED = -100  # a target of a place that is not asked
EVERY = 25  # steps between two points of a curve

Batch = Callable[
    [int, torch.Generator], tuple[Tensor, Tensor]
]  # tokens [B, T] and targets [B, T] or [B, T, parts]
SIZES_OF_MAMBA = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "initializer_range",
    "tie_word_embeddings",
)
MODELS = {
    "softmax attention": ("llama", {}),
    "transformers' Mamba-2": (
        "mamba2",
        {"head_dim": 16, "state_size": 32, "n_groups": 1, "chunk_size": 32},
    ),
    "linear attention": ("hf_memory_linear", {}),
    "retention": ("hf_memory_gated", {"gate": "retention"}),
    "gated retention": ("hf_memory_gated", {"gate": "scalar"}),
    "GLA": ("hf_memory_gated", {"gate": "vector"}),
    "Mamba-2": (
        "hf_memory_gated",
        {"gate": "mamba2", "linear_key_head_dim": 32, "linear_value_head_dim": 16},
    ),
    "DeltaNet": ("hf_memory_deltanet", {}),
    "Gated DeltaNet": ("hf_memory_deltanet", {"gate": "scalar"}),
    "KDA": ("hf_memory_deltanet", {"gate": "vector"}),
    "DeltaFormer": ("hf_memory_deltaformer", {"use_qk_norm": True}),
    "Titans, linear": ("hf_memory_titans", {"variant": "lmm", "memory_depth": 1}),
    "Titans": ("hf_memory_titans", {"variant": "lmm"}),
}
ONLY_HERE = {"RWKV-7": ("hf_memory_rwkv7", {})}  # not in every claim


def make(name: str, sizes: dict, **options) -> PreTrainedModel:
    """A model by its name at these sizes; Mamba-2's own has no feed-forward layers, and twice the width inside."""
    model_type, own = {**MODELS, **ONLY_HERE}[name]
    if model_type == "mamba2":
        sizes = {key: value for key, value in sizes.items() if key in SIZES_OF_MAMBA}
        sizes["num_heads"] = 2 * sizes["hidden_size"] // own["head_dim"]
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**sizes, **own, **options})
    )


def learn(
    model: PreTrainedModel,
    batch: Batch,
    *,
    lr: float,
    steps: int,
    rows: int,
    seed: int,
    solved: float = 0.999,
):
    """Train on fresh rows at every step, until the rows of `EVERY` steps are right or the steps are used up.

    Returns:
        What a result keeps: the curve, its last accuracy, the steps and the seconds of CPU time.
    """
    generator = torch.Generator().manual_seed(seed)
    start = time.process_time()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    curve = []
    last = []
    for step in range(1, steps + 1):
        loss, right = loss_and_accuracy(model, *batch(rows, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        last.append((loss.item(), right))
        if step % EVERY == 0 or step == steps:
            curve.append(
                {
                    "step": step,
                    "loss": mean(x for x, _ in last),
                    "accuracy": mean(x for _, x in last),
                }
            )
            last = []
            if curve[-1]["accuracy"] >= solved:
                break
    return {
        "steps": step,
        "accuracy": curve[-1]["accuracy"],
        "seconds": time.process_time() - start,
        "curve": curve,
    }


def in_turn(batches: Iterable[Batch]) -> Batch:
    """A kind of rows for every step: a curriculum, or a mixture."""
    kinds = iter(batches)
    return lambda rows, generator: next(kinds)(rows, generator)


def loss_and_accuracy(
    model: PreTrainedModel, tokens: Tensor, targets: Tensor
) -> tuple[Tensor, float]:
    """Loss and accuracy at the places that are asked; where a target has parts, a part has its share of the logits.

    In training, a model's own loss is added, such as that of a learned compression.
    """
    outputs = model.base_model(tokens, use_cache=False)
    logits = model.lm_head(outputs.last_hidden_state)
    own_loss = getattr(outputs, "own_loss", None)
    asked = targets != IGNORED
    if targets.ndim > 2:
        logits = logits.unflatten(-1, (targets.shape[2], -1))
    logits = logits[asked]
    targets = targets[asked]
    right = (logits.argmax(-1) == targets).double().mean().item()
    loss = F.cross_entropy(logits.float(), targets)
    return loss if own_loss is None else loss + own_loss, right


@torch.no_grad()
def accuracy(model: PreTrainedModel, batch: Batch, *, rows: int = 256, seed: int = 10_000) -> float:
    """On fresh rows, the same for every model."""
    model.eval()
    return loss_and_accuracy(model, *batch(rows, torch.Generator().manual_seed(seed)))[1]
