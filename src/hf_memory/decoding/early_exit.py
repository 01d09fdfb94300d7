"""Early exit: a token leaves the model after the first layer at which its prediction is confident.

The layers above still need the token's keys, values or state updates, since later tokens may use them. They compute
these from the hidden state with which the token left, and skip all that only their output needs. There are a loss with
which a model learns to predict early, a classifier, and a threshold with a statistical guarantee.

https://arxiv.org/abs/2207.07061 (CALM).
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_memory.cache_argument import cache_name, cache_of
from hf_memory.decoding.parts import Attached, decoder_layers, feed_forward, last_norm
from hf_memory.mixers.base import MemoryMixer
from hf_memory.modeling.any_model import check_model, head, in_eval_mode
from hf_memory.modeling.checks import check

CONFIDENCES = ("softmax", "cosine")
STATES = ("copied", "exact")
THRESHOLDS = tuple(i / 20 for i in range(1, 20))


class EarlyExit(Attached):
    """Lets tokens leave a model early, in a `with` statement or until `remove`; `generate` works as usual.

    A token that is decoded with a cache leaves after the first of `layers` at which the confidence reaches the
    threshold. All rows of a batch leave together, when each is confident. Prompts are read by all layers, in pieces
    too, and so are tokens that an assistant or prompt lookup has drafted.

    Args:
        model: any causal language model of transformers that calls its layers one after the other.
        confidence: "softmax": probability of the most likely token minus that of the second, by the model's own head;
            "cosine": similarity of the hidden states before and after a layer; or a classifier of `fit_classifier`.
        threshold: threshold of the confidence, from 0 to 1.
        decay: after t decoded tokens the threshold is min(1, 0.9 threshold + 0.1 exp(-decay t)), since errors in early
            tokens do most harm; the paper has decay = 4 / longest output. Default: a constant threshold.
        layers: numbers of layers after which a token may leave; default: a quarter, a half and three quarters of all.
        states: "copied": skipped layers compute keys, values or states from the hidden state with which the token left.
            "exact": all layers are computed, so that the past is that of the full model. This is not faster; it shows
            what copying costs. A text that is read without a cache then has an exit for each token.

    Attributes:
        depths: number of layers that were computed for each prediction, a tensor [B, T] for each forward pass.

    Raises:
        ValueError: if an option has an unknown value, a layer does not exist, or the model does not run its layers one
            after the other (`depth` of a Memory Transformer).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        confidence: Literal["softmax", "cosine"] | nn.Module = "softmax",
        threshold: float = 0.9,
        decay: float | None = None,
        layers: Sequence[int] | None = None,
        states: Literal["copied", "exact"] = "copied",
    ):
        super().__init__()
        check_model("model", model)
        if getattr(model.config, "depth", "fixed") != "fixed":
            raise ValueError(
                f"model must run its layers one after the other, got depth={model.config.depth!r}"
            )
        modules = decoder_layers(model)
        self.num_layers = len(modules)
        self.layers = exit_layers(self.num_layers, layers)
        if not isinstance(confidence, nn.Module):
            check(
                confidence in CONFIDENCES,
                "confidence",
                f"{', '.join(CONFIDENCES)} or a classifier",
                confidence,
            )
        is_share = type(threshold) in (int, float) and 0 <= threshold <= 1
        check(is_share, "threshold", "a number from 0 to 1", threshold)
        is_rate = decay is None or (type(decay) in (int, float) and 0 <= decay < math.inf)
        check(is_rate, "decay", "a number from 0 on, or None", decay)
        check(states in STATES, "states", f"one of {', '.join(STATES)}", states)
        self.model = model
        self.norm = last_norm(model)
        self.confidence = confidence
        self.threshold = threshold
        self.decay = decay
        self.states = states
        self.depths: list[Tensor] = []
        self.decoded = 0  # number of tokens since the prompt
        self.is_active = False
        self.reads_prompt = False  # whether `generate` does, in one pass or in pieces
        self.enter_context(replaced(model, partial(self._prefill, model._prefill), "_prefill"))
        for i, layer in enumerate(modules):
            run = partial(self._run, i, layer.forward, stateless_parts(layer))
            self.enter_context(replaced(layer, run))

    def mean_depth(self) -> float:
        """The mean number of layers that were computed for a prediction."""
        return float(torch.cat([x.flatten() for x in self.depths]).float().mean())

    def threshold_after(self, decoded: Tensor | int) -> Tensor:
        """The threshold after a number of decoded tokens."""
        start = torch.as_tensor(decoded, dtype=torch.float32)
        if self.decay is None:
            return torch.full_like(start, self.threshold)
        return (0.9 * self.threshold + 0.1 * torch.exp(-self.decay * start)).clamp(max=1)

    def _prefill(self, read: Callable, *args, **kwargs):
        """Replaces the method of `generate` that reads the prompt."""
        self.reads_prompt = True
        try:
            return read(*args, **kwargs)
        finally:
            self.reads_prompt = False

    def _run(
        self,
        i: int,
        layer: Callable,
        skipped: list[nn.Module],
        hidden_states: Tensor,
        *args,
        **kwargs,
    ):
        """Replaces the forward of a layer."""
        if i == 0:
            self._begin(hidden_states, [*args, *kwargs.values()])
        if not self.is_active:
            return layer(hidden_states, *args, **kwargs)
        if i in self.layers:
            self._decide(i, hidden_states)
        self.before = hidden_states
        left = self.states == "copied" and bool(self.has_left.all())
        with ExitStack() as stack:
            for part in skipped if left else ():
                stack.enter_context(replaced(part, partial(silent, part)))
            made = layer(hidden_states, *args, **kwargs)
        mixed, *others = made if isinstance(made, tuple) else (made,)
        if left:
            mixed = hidden_states
        if i == self.num_layers - 1:
            mixed = torch.where(self.has_left[..., None], self.leaving, mixed)
            self.depths.append(self.depth)
        return (mixed, *others) if isinstance(made, tuple) else mixed

    def _begin(self, hidden_states: Tensor, given: list) -> None:
        B, T = hidden_states.shape[:2]
        cache = next((x for x in given if isinstance(x, Cache)), None)
        if cache is None:
            self.is_active = self.states == "exact"
            decoded = torch.arange(T)
        else:
            self.is_active = T == 1 and cache.get_seq_length() > 0 and not self.reads_prompt
            self.decoded = self.decoded + 1 if self.is_active else 0
            decoded = torch.tensor([self.decoded])
        self.wanted = self.threshold_after(decoded).to(hidden_states.device)
        self.has_left = torch.zeros(B, T, dtype=torch.bool, device=hidden_states.device)
        self.depth = torch.full((B, T), self.num_layers, device=hidden_states.device)
        self.leaving = hidden_states

    def _decide(self, i: int, hidden_states: Tensor) -> None:
        if self.states == "copied" and self.has_left.all():
            return
        if self.confidence == "cosine":
            confidence = F.cosine_similarity(hidden_states.float(), self.before.float(), dim=-1)
        elif self.confidence == "softmax":
            best = head(self.model, self.norm(hidden_states)).float().softmax(-1).topk(2).values
            confidence = best[..., 0] - best[..., 1]
        else:
            confidence = self.confidence(self.norm(hidden_states).float()).squeeze(-1).sigmoid()
        leaves = (confidence >= self.wanted) & ~self.has_left  # [B, T]
        if self.states == "copied":
            leaves = leaves.all().expand_as(leaves)
        self.leaving = torch.where(leaves[..., None], hidden_states, self.leaving)
        self.depth = self.depth.masked_fill(leaves, i)
        self.has_left = self.has_left | leaves


def exit_layers(num_layers: int, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The numbers of layers after which a token may leave."""
    if layers is None:
        return tuple(sorted({num_layers * quarter // 4 for quarter in (1, 2, 3)} - {0}))
    are_inside = len(layers) > 0 and all(0 < i < num_layers for i in layers)
    check(are_inside, "layers", f"from 1 to {num_layers - 1}", list(layers))
    return tuple(sorted(set(layers)))


@contextmanager
def replaced(module: nn.Module, method: Callable, name: str = "forward"):
    """Replace a method of a module, as a context."""
    before = module.__dict__.get(name)
    setattr(module, name, method)
    try:
        yield
    finally:
        delattr(module, name)
        if before is not None:
            setattr(module, name, before)


def stateless_parts(layer: nn.Module) -> list[nn.Module]:
    """Parts of a layer that do not affect keys, values or states: the feed-forward part, and queries."""
    mlp = feed_forward(layer)
    attention = [x for x in layer.children() if not isinstance(x, MemoryMixer)]
    found = [
        getattr(x, name) for x in attention for name in ("q_proj", "o_proj") if hasattr(x, name)
    ]
    return found if mlp is None else [*found, mlp]


def silent(part: nn.Module, x: Tensor, *_, **__) -> Tensor:
    """The forward of a skipped part: zeros."""
    return x.new_zeros(*x.shape[:-1], getattr(part, "out_features", x.shape[-1]))


def exit_loss(
    model: PreTrainedModel, outputs, labels: Tensor, num_items_in_batch=None, *, layers=None
) -> Tensor:
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
    weights = [*exits, len(outputs.hidden_states) - 1]
    norm = last_norm(model)
    logits = [*(head(model, norm(outputs.hidden_states[i])) for i in exits), outputs.logits]
    size = model.config.get_text_config().vocab_size
    of_all = {"num_items_in_batch": num_items_in_batch}
    losses = [
        model.loss_function(logits=x, labels=labels, vocab_size=size, **of_all) for x in logits
    ]
    return sum(w * loss for w, loss in zip(weights, losses)) / sum(weights)


@in_eval_mode
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
    norm = last_norm(model)
    features = []
    agree = []
    exits = exit_layers(len(decoder_layers(model)), layers)
    for row in texts.to(model.device).split(1):
        outputs = model(row, output_hidden_states=True, use_cache=False)
        for i in exits:
            last = norm(outputs.hidden_states[i])
            features.append(last[0].float())
            agree.append(head(model, last).argmax(-1)[0] == outputs.logits.argmax(-1)[0])
    x = torch.cat(features)
    y = torch.cat(agree).float()
    classifier = nn.Linear(x.shape[1], 1).to(x)
    classifier.weight.zero_(), classifier.bias.zero_()
    optimizer = torch.optim.LBFGS(
        classifier.parameters(), max_iter=steps, line_search_fn="strong_wolfe"
    )

    # LBFGS turns on gradients; with a small weight decay, there is an optimum
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (
            F.binary_cross_entropy_with_logits(classifier(x)[:, 0], y)
            + 1e-4 * classifier.weight.square().sum()
        )
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
    least = f"at least {needed} for tolerance {tolerance}, error {error}"
    check(len(texts) >= needed, "texts", least, len(texts))
    wanted = [_predictions(model, text) for text in texts]
    lowest = None
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


@in_eval_mode
@torch.no_grad()
def _predictions(model: PreTrainedModel, text: Tensor) -> Tensor:
    """The most likely next tokens [T - T / 2] in the second half of a text [T], which is read token by token."""
    half = len(text) // 2
    row = text[None].to(model.device)
    found = []
    past = {"use_cache": True, cache_name(model): cache_of(model(row[:, :half], use_cache=True))}
    for t in range(half, len(text)):
        found.append(model(row[:, t : t + 1], **past).logits[0, -1].argmax())
    return torch.stack(found)
