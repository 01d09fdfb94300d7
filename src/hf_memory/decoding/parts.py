"""Finds the layers of any causal language model of transformers, and their parts."""

from contextlib import ExitStack

from torch import nn
from transformers import PreTrainedModel

FEED_FORWARDS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "fc1")
LAST_NORMS = ("norm", "ln_f", "norm_f", "final_layer_norm", "final_layernorm", "embedding_norm")


class Attached(ExitStack):
    """What is attached to a model until the end of a `with` statement, or until `remove`."""

    def remove(self) -> None:
        """Leave the model as it was before."""
        self.close()


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a model in order: the first list of modules that has as many as the config has layers.

    Raises:
        ValueError: if there is none.
    """
    depth = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ValueError(f"model must have a list of its {depth} layers, got {type(model).__name__}")


def feed_forward(layer: nn.Module) -> nn.Module | None:
    """The feed-forward network of a layer: the child with one of the usual names; None if there is none."""
    return next((module for name, module in layer.named_children() if name in FEED_FORWARDS), None)


def last_norm(model: PreTrainedModel) -> nn.Module:
    """The final norm of a model: the last child of the base model with one of the usual names.

    Raises:
        ValueError: if there is none.
    """
    norms = [
        module
        for name, module in model.base_model.named_modules()
        if name.rpartition(".")[2] in LAST_NORMS
    ]
    outside = [
        module
        for module in norms
        if not any(module in set(layer.modules()) for layer in decoder_layers(model))
    ]
    if not outside:
        raise ValueError(
            f"model must have a final norm named {', '.join(LAST_NORMS)}, got {type(model).__name__}"
        )
    return outside[-1]
