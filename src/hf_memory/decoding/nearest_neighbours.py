"""Models with a datastore: tokens that followed similar contexts are mixed with the model's predictions."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_memory.decoding.datastore import Datastore, Neighbours, check_datastore, inputs_of, windows
from hf_memory.decoding.parts import Attached
from hf_memory.files.fingerprints import model_fingerprint
from hf_memory.files.text import Text
from hf_memory.layers import upcast
from hf_memory.modeling.any_model import check_model, in_eval_mode, named_arguments
from hf_memory.modeling.base import kept_positions
from hf_memory.modeling.checks import check

LOSS_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")
WEIGHTS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


def mix(logits: Tensor, near: Neighbours, weight: float, temperature: float) -> Tensor:
    """log(weight p_kNN + (1 - weight) p_LM), p_kNN(y) ~ sum of exp(-distance / temperature) where y came next.

    Args:
        logits: [n, V], the model's logits.
        near: [n, k], the neighbours; rows without neighbours keep the model's predictions.
        weight: weight of the neighbours.
        temperature: temperature of their distances.

    Returns:
        Log probabilities [n, V], in float32 or wider.
    """
    log_p = upcast(logits).log_softmax(-1)
    weights = (-near.distances.to(log_p) / temperature).softmax(-1)
    retrieved = torch.zeros_like(log_p).scatter_add(-1, near.tokens, weights).log()
    mixed = torch.logaddexp(math.log1p(-weight) + log_p, math.log(weight) + retrieved)
    return torch.where(near.distances.isfinite().any(-1, keepdim=True), mixed, log_p)


class Beside(Attached):
    """Base class: looks up neighbours of each position while a model runs, in a `with` statement or until `remove`.

    Raises:
        ValueError: if k is less than 1, or the datastore was made by another model.
    """

    def __init__(self, model: PreTrainedModel, datastore: Datastore, k: int):
        super().__init__()
        check_model("model", model)
        check_datastore(datastore)
        check(k >= 1, "k", "at least 1", k)
        if datastore.fingerprint != model_fingerprint(model.base_model, torch.bfloat16):
            raise ValueError(
                f"datastore must be made by the same model and weights, got {datastore.folder}"
            )
        vocab_size = model.config.get_text_config().vocab_size
        if (largest := int(datastore.tokens.max())) >= vocab_size:
            raise ValueError(
                f"datastore must have tokens of the model, below {vocab_size}, got {largest} in {datastore.folder}, "
                "which is damaged; build it again"
            )
        self.datastore = datastore
        self.k = k
        self._inputs = self.enter_context(inputs_of(model, datastore.module))

    def nearest(self, logits_to_keep: int | Tensor, like: Tensor) -> Neighbours:
        """The neighbours of the positions whose logits are kept, on the device of `like`."""
        queries = kept_positions(self._inputs[0], logits_to_keep)
        return self.datastore.nearest(queries.flatten(0, -2).to(like.device), self.k)


class NearestNeighbours(Beside):
    """kNN-LM: mixes the predictions of a model with those of a datastore. https://arxiv.org/abs/1911.00172.

    The model returns the logarithm of the mixture as its logits, so all of `generate`, perplexity and the loss use it.

    Args:
        model: the model that made the datastore.
        datastore: the datastore; see `build_datastore`.
        k: number of neighbours of each position.
        weight: weight of the neighbours in the mixture, between 0 and 1; default: that kept in the datastore (see
            `tune`), otherwise 0.25.
        temperature: temperature of the squared distances; a larger one gives neighbours more equal weights. Default:
            that kept in the datastore, otherwise 1.

    Raises:
        ValueError: if a number is out of its range, or the datastore was made by another model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        datastore: Datastore,
        *,
        k: int = 1024,
        weight: float | None = None,
        temperature: float | None = None,
    ):
        check_datastore(datastore)
        weight = datastore.mixture.get("weight", 0.25) if weight is None else weight
        temperature = (
            datastore.mixture.get("temperature", 1.0) if temperature is None else temperature
        )
        check(0 < weight < 1, "weight", "between 0 and 1", weight)
        check(temperature > 0, "temperature", "positive", temperature)
        super().__init__(model, datastore, k)
        self.weight = weight
        self.temperature = temperature
        self.enter_context(model.register_forward_hook(self._mix, with_kwargs=True))

    def _mix(self, model: PreTrainedModel, args: tuple, given: dict, outputs):
        given = named_arguments(model, args, given)
        check(
            not isinstance(outputs, tuple),
            "return_dict",
            "True with NearestNeighbours, which change logits and loss of the outputs",
            False,
        )
        near = self.nearest(given.get("logits_to_keep", 0), outputs.logits)
        logits = outputs.logits
        outputs.logits = mix(logits.flatten(0, -2), near, self.weight, self.temperature).view_as(
            logits
        )
        if outputs.loss is not None:
            of_text = {name: given[name] for name in LOSS_ARGUMENTS if name in given}
            of_text["vocab_size"] = model.config.get_text_config().vocab_size
            # the model's own loss may have more parts than that of its predictions
            change = model.loss_function(outputs.logits, **of_text) - model.loss_function(
                logits, **of_text
            )
            outputs.loss = outputs.loss + change
        return outputs


@in_eval_mode
@torch.no_grad()
def tune(
    model: PreTrainedModel,
    datastore: Datastore,
    tokens: Text | Tensor,
    *,
    k: int = 1024,
    length: int = 1024,
    weights: Sequence[float] = WEIGHTS,
    temperatures: Sequence[float] | None = None,
) -> dict[str, float]:
    """The `weight` and `temperature` of `NearestNeighbours` with the lowest perplexity on a text.

    `Datastore.keep_mixture` keeps them in the datastore.

    Args:
        model: the model that made the datastore.
        datastore: the datastore; see `build_datastore`.
        tokens: a text that is not in the datastore.
        k: number of neighbours of each position.
        length: tokens of a window, as in `build_datastore`.
        weights: the weights to choose from.
        temperatures: the temperatures to choose from; default: the mean distance divided by 1, 2, 4, ..., 256.
    """
    text = Text.of(tokens)
    parts = []
    with Beside(model, datastore, k) as beside:
        for window, scored in windows(len(text) - 1, length - len(text.start)):
            read = text.begun(text.tokens[None, window]).to(model.device)
            log_p = model(read, use_cache=False).logits[0, -scored:].float().log_softmax(-1)
            following = text.tokens[window.stop - scored + 1 : window.stop + 1, None].to(
                log_p.device, torch.long
            )
            near = beside.nearest(scored, log_p)
            parts.append(
                (
                    log_p.gather(-1, following)[:, 0],
                    near.distances.float(),
                    near.tokens == following,
                )
            )
    log_p, distances, same = (torch.cat(x) for x in zip(*parts))
    mean = float(distances[distances.isfinite()].mean())
    choices = [(w, t) for w in weights for t in temperatures or [mean / 2**n for n in range(9)]]

    def log_likelihood(choice: tuple[float, float]) -> float:
        weight, temperature = choice
        retrieved = ((-distances / temperature).softmax(-1) * same).sum(-1).log()
        return float(
            torch.logaddexp(math.log1p(-weight) + log_p, math.log(weight) + retrieved).mean()
        )

    return dict(zip(("weight", "temperature"), max(choices, key=log_likelihood)))


class RetrievalGate(nn.Linear):
    """The gate of SPALM: z = (1 - g) m + g h, g = sigmoid(w h), m = sum_i softmax(y_i h)_i y_i.

    h is the input of the output head, and y_i are the rows of the head for the neighbours' tokens. Train the gate with
    `Spalm` on a text that is not in the datastore: otherwise the nearest neighbour of each position is itself.
    https://arxiv.org/abs/2102.02557.
    """

    def __init__(self, hidden_size: int, **kwargs):
        super().__init__(hidden_size, 1, bias=False, **kwargs)

    def forward(self, hidden_states: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:  # type: ignore[override]
        """z [n, D] from h [n, D], the neighbours' tokens [n, k] and all rows of the head [V, D]."""
        y = rows[tokens]
        weights = upcast((y @ hidden_states[..., None])[..., 0]).softmax(-1).to(y.dtype)
        m = (weights[:, None] @ y)[:, 0]
        return torch.lerp(m, hidden_states, super().forward(hidden_states).sigmoid())


class Spalm(Beside):
    """SPALM: lets a gate mix output embeddings of the neighbours' tokens into the input of a model's head.

    The gate can be trained by any loss of the model. The head may be trained too, but all weights that change keys (all
    others, and embeddings tied to the head) must stay frozen.

    Args:
        model: the model that made the datastore.
        datastore: the datastore; see `build_datastore`.
        gate: a `RetrievalGate(hidden_size)`, on the model's device and in its dtype.
        k: number of neighbours of each position.

    Raises:
        ValueError: if k is less than 1, or the datastore was made by another model.
    """

    def __init__(
        self, model: PreTrainedModel, datastore: Datastore, gate: RetrievalGate, *, k: int = 4
    ):
        super().__init__(model, datastore, k)
        self.gate = gate
        self._kept = 0
        self.enter_context(model.register_forward_pre_hook(self._note, with_kwargs=True))
        self.enter_context(model.get_output_embeddings().register_forward_pre_hook(self._mix))

    def _note(self, model: nn.Module, args: tuple, given: dict) -> None:
        self._kept = named_arguments(model, args, given).get("logits_to_keep", 0)

    def _mix(self, head: nn.Module, arguments: tuple) -> tuple[Tensor]:
        h = arguments[0]
        near = self.nearest(self._kept, h)
        return (self.gate(h.flatten(0, -2), near.tokens, head.weight).view_as(h),)
