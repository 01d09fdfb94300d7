"""kNN-LM: a model's predictions mixed with what came next at the nearest places of a datastore.

https://arxiv.org/abs/1911.00172.
"""

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.decoding.datastore import Datastore, Neighbours, inputs_of
from hf_memory.modeling.base import kept_positions
from hf_memory.serving.memory_file import fingerprint


def mix(logits: Tensor, near: Neighbours, weight: float, temperature: float) -> Tensor:
    """log(weight p_kNN + (1 - weight) p_LM), p_kNN(y) ~ sum of exp(-distance / temperature) where y came next.

    Args:
        logits: [n, V] of the model.
        near: [n, k] neighbours; where none was found, the model's predictions stay as they are.
        weight: of the neighbours.
        temperature: of their distances.

    Returns:
        Log probabilities [n, V], in float32 or wider.
    """
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    weights = (-near.distances.to(log_p) / temperature).softmax(-1)
    retrieved = torch.zeros_like(log_p).scatter_add(-1, near.tokens, weights).log()
    mixed = torch.logaddexp(math.log1p(-weight) + log_p, math.log(weight) + retrieved)
    return torch.where(near.distances.isfinite().any(-1, keepdim=True), mixed, log_p)


class NearestNeighbours:
    """Mixes the predictions of a model with its datastore's until `remove`, or in a `with` statement.

    All that reads the model's logits sees the mixture: `generate` of any kind, perplexity, and the loss of `labels`.
    The logits are log probabilities then.

    Args:
        model: the one that made the datastore.
        datastore: see `build_datastore`.
        k: neighbours of each place.
        weight: of the neighbours in the mixture, between 0 and 1.
        temperature: of their squared distances; the larger, the more alike the neighbours weigh.

    Raises:
        ValueError: if a number is out of its range, or the datastore was made by another model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        datastore: Datastore,
        *,
        k: int = 1024,
        weight: float = 0.25,
        temperature: float = 1.0,
    ):
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if not 0 < weight < 1:
            raise ValueError(f"weight must be between 0 and 1, got {weight}")
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        if datastore.fingerprint != fingerprint(model):
            raise ValueError(f"datastore must be made by the same model and weights, got {datastore.folder}")
        self.datastore, self.k, self.weight, self.temperature = datastore, k, weight, temperature
        self._inputs = inputs_of(model, datastore.module)
        self._seen = self._inputs.__enter__()
        self._handle = model.register_forward_hook(self._mix, with_kwargs=True)

    def __enter__(self) -> "NearestNeighbours":
        return self

    def __exit__(self, *_) -> None:
        self.remove()

    def remove(self) -> None:
        """Let the model predict by itself again."""
        self._handle.remove()
        self._inputs.__exit__(None, None, None)

    def _mix(self, model: PreTrainedModel, _: tuple, given: dict, outputs):
        queries = kept_positions(self._seen[0], given.get("logits_to_keep", 0))
        near = self.datastore.nearest(queries.flatten(0, -2).to(outputs.logits.device), self.k)
        mixed = mix(outputs.logits.flatten(0, -2), near, self.weight, self.temperature)
        outputs.logits = mixed.view_as(outputs.logits)
        if given.get("labels") is not None:
            outputs.loss = model.loss_function(
                logits=outputs.logits, labels=given["labels"], vocab_size=model.config.get_text_config().vocab_size
            )
        return outputs
