"""Training for early exit: a loss for the model, a classifier, and a threshold with a statistical guarantee."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_memory.decoding.early_exit import EarlyExit, exit_layers
from hf_memory.decoding.parts import decoder_layers, head, last_norm

THRESHOLDS = tuple(i / 20 for i in range(1, 20))


def exit_loss(model: PreTrainedModel, outputs, labels: Tensor, num_items_in_batch=None, *, layers=None) -> Tensor:
    """Cross-entropy of the predictions at all exits and at the end, weighted by the number of layers below.

    `Trainer(model, arguments, compute_loss_func=partial(exit_loss, model))` trains a model to predict at exits; its
    config must have `output_hidden_states=True`.

    Args:
        model: the model.
        outputs: its outputs, with `logits` and `hidden_states`.
        labels: [B, T], tokens, which this function shifts; -100 is ignored.
        num_items_in_batch: number of labels in all batches of a step, from the Trainer.
        layers: the exits; see `EarlyExit`.
    """
    exits = exit_layers(len(outputs.hidden_states) - 1, layers)
    weights, norm = [*exits, len(outputs.hidden_states) - 1], last_norm(model)
    logits = [*(head(model, norm(outputs.hidden_states[i])) for i in exits), outputs.logits]
    size, of_all = model.config.get_text_config().vocab_size, {"num_items_in_batch": num_items_in_batch}
    losses = [model.loss_function(logits=x, labels=labels, vocab_size=size, **of_all) for x in logits]
    return sum(w * loss for w, loss in zip(weights, losses)) / sum(weights)


@torch.no_grad()
def fit_classifier(
    model: PreTrainedModel, texts: Tensor, *, layers: Sequence[int] | None = None, steps: int = 100
) -> nn.Linear:
    """Fit a linear classifier of hidden states after the final norm: does an exit predict the same as the full model?

    Args:
        model: the model; it is not changed.
        texts: [n, T], tokens.
        layers: the exits; see `EarlyExit`.
        steps: largest number of steps of L-BFGS.
    """
    norm, features, agree = last_norm(model), [], []
    exits = exit_layers(len(decoder_layers(model)), layers)
    for row in texts.to(model.device).split(1):
        outputs = model(row, output_hidden_states=True, use_cache=False)
        for i in exits:
            last = norm(outputs.hidden_states[i])
            features.append(last[0].float())
            agree.append(head(model, last).argmax(-1)[0] == outputs.logits.argmax(-1)[0])
    x, y = torch.cat(features), torch.cat(agree).float()
    classifier = nn.Linear(x.shape[1], 1).to(x)
    classifier.weight.zero_(), classifier.bias.zero_()
    optimizer = torch.optim.LBFGS(classifier.parameters(), max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:  # LBFGS turns on gradients; with a small weight decay, there is an optimum
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(classifier(x)[:, 0], y) + 1e-4 * classifier.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return classifier.requires_grad_(False)


def calibrate(
    model: PreTrainedModel,
    texts: Tensor,
    *,
    tolerance: float = 0.1,
    error: float = 0.05,
    thresholds: Sequence[float] = THRESHOLDS,
    **options,
) -> float:
    """The lowest threshold at which at most a given share of the predictions differs from the full model's.

    With a probability of at least 1 - `error` over the choice of texts, the share in other texts of the same kind is at
    most `tolerance`. Thresholds are tested from the highest to the lowest, until one fails, with p-values by
    Hoeffding's inequality; see https://arxiv.org/abs/2110.01052.

    Args:
        model: the model.
        texts: [n, T], tokens; half of each text is a prompt, and the rest is read token by token.
        tolerance: largest share of predictions that may differ.
        error: largest probability that the share is larger than `tolerance`.
        thresholds: thresholds to test.
        **options: options of `EarlyExit`, except the threshold.

    Raises:
        ValueError: if there are too few texts for such a guarantee, or the highest threshold fails.
    """
    needed = math.ceil(math.log(1 / error) / (2 * tolerance**2))
    if len(texts) < needed:
        raise ValueError(f"texts must be at least {needed} for tolerance {tolerance}, error {error}, got {len(texts)}")
    wanted, lowest = [_predictions(model, text) for text in texts], None
    for threshold in sorted(thresholds, reverse=True):
        with EarlyExit(model, threshold=threshold, **options):
            found = [_predictions(model, text) for text in texts]
        risk = float(torch.stack([(x != y).double().mean() for x, y in zip(found, wanted)]).mean())
        if math.exp(-2 * len(texts) * max(0.0, tolerance - risk) ** 2) > error:
            break
        lowest = threshold
    if lowest is None:
        raise ValueError(
            f"thresholds must have one that meets the tolerance {tolerance}, got a share of {risk:.3f} differing "
            f"predictions in {len(texts)} texts at {max(thresholds)}"
        )
    return lowest


@torch.no_grad()
def _predictions(model: PreTrainedModel, text: Tensor) -> Tensor:
    """The most likely next tokens [T - T / 2] in the second half of a text [T], which is read token by token."""
    half = len(text) // 2
    row, found = text[None].to(model.device), []
    cache = model(row[:, :half], use_cache=True).past_key_values
    for t in range(half, len(text)):
        found.append(model(row[:, t : t + 1], past_key_values=cache, use_cache=True).logits[0, -1].argmax())
    return torch.stack(found)
