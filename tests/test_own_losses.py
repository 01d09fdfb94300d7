"""What parts of a model add to the loss in training is averaged over the same tokens as the loss of predictions."""

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from cases import CASE, make_model, random_tokens
from comparing import assert_close
from hf_memory import (
    MemoryTransformerForSequenceClassification,
    MemoryTransformerForTokenClassification,
)
from hf_memory.mixers.transformer.base import TransformerMixer

TRANSFORMER = CASE["transformer"]
SEGMENTS = {"past_window": 4, "segment_length": 4, "compressed_length": 3, "compression_rate": 2}
OWN_LOSSES = {
    "span": {"pattern": "adaptive_span", "max_span": 8, "span_ramp": 2, "span_loss_weight": 0.1},
    "span of one layer": {
        "pattern": ["full", "adaptive_span"],
        "max_span": 8,
        "span_ramp": 2,
        "span_loss_weight": 0.1,
    },
    "routing": {"pattern": "routing", "pattern_size": 4, "num_buckets": 4},
    "routing by head": {"pattern": "routing_by_head", "pattern_size": 4, "num_buckets": 4},
    "compression": {"past": "compressive", **SEGMENTS},
    "compression beside attention": {"past": ["cache", "compressive"], **SEGMENTS},
    "ponder": {"depth": "universal", "adaptive_computation": True, "ponder_loss_weight": 1.0},
    "ponder and span": {
        "depth": "universal",
        "adaptive_computation": True,
        "ponder_loss_weight": 1.0,
        "pattern": "adaptive_span",
        "max_span": 8,
        "span_ramp": 2,
        "span_loss_weight": 0.1,
    },
}
DIVISIBLE = [
    name for name in OWN_LOSSES if "compression" not in name
]  # which passes no gradients to segments before
every_own_loss = pytest.mark.parametrize("name", OWN_LOSSES)
T = 24
LENGTHS = (24, 9, 20, 13)  # of four texts, two of which are as long as the other two


def make(name):
    """A model in training, in float64, all of whose own losses have gradients."""
    model = make_model(TRANSFORMER, **OWN_LOSSES[name]).double().train()
    for parameter, x in model.named_parameters():
        if parameter.endswith("relation.span"):
            x.data.uniform_(0.2, 0.8)
    return model


def rows(side="right"):
    """Four texts with padding [4, T]: tokens, mask and labels, some of which are left out, as those of prompts."""
    tokens = random_tokens(4, T)
    mask = torch.zeros(4, T, dtype=torch.long)
    for row, length in zip(mask, LENGTHS):
        row[slice(T - length, T) if side == "left" else slice(length)] = 1
    labels = tokens.masked_fill(
        mask.cumsum(1) * mask < 2, -100
    )  # not that of a first token, which nothing predicts
    labels[0, 3:9] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def count(labels):
    return (labels[:, 1:] != -100).sum()


def learned(model, *losses):
    """The sum of losses, and its gradients."""
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return [sum(loss.detach() for loss in losses), {n: x.grad for n, x in model.named_parameters()}]


def of_predictions(model, **given):
    """The loss without what the model's own parts add."""
    logits = model(**given).logits
    return model.loss_function(logits, vocab_size=64, **given)


def assert_equal(found, expected):
    """Losses, which predictions have in float32, and gradients."""
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, x in expected[1].items():
        if x is None:
            assert found[1][name] is None or not found[1][name].any(), name
        else:
            assert (found[1][name] - x).abs().max() <= 1e-6 * x.abs().max(), name


def test_every_mixer_that_adds_to_the_loss_is_tested_here():
    def subclasses(cls):
        return {cls}.union(*map(subclasses, cls.__subclasses__()))

    add = {cls for cls in subclasses(TransformerMixer) if "own_loss" in vars(cls)} - {
        TransformerMixer
    }
    tested = {type(layer.mixer) for name in OWN_LOSSES for layer in make(name).model.layers}
    assert add == add & set().union(*(cls.mro() for cls in tested))


@every_own_loss
def test_the_loss_is_a_mean_over_tokens_that_predict_a_label(name):
    model = make(name)
    batch = rows()
    own = model.model(batch["input_ids"], attention_mask=batch["attention_mask"]).own_losses
    predicts = F.pad(batch["labels"][:, 1:], (0, 1), value=-100) != -100
    assert own.requires_grad
    assert own[predicts].min() > -1e-12
    assert own[predicts].sum() > 1e-3
    expected = of_predictions(model, **batch) + own[predicts].mean()
    assert float(model(**batch).loss) == pytest.approx(float(expected), rel=1e-6)


@every_own_loss
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_has_no_loss_and_changes_that_of_no_token(name, side):
    model = make(name)
    batch = rows(side)
    output = model.model(batch["input_ids"], attention_mask=batch["attention_mask"])
    is_token = batch["attention_mask"].bool()
    assert not output.own_losses[~is_token].any()
    alone = [
        model.model(row[here][None]).own_losses[0]
        for row, here in zip(batch["input_ids"], is_token)
    ]
    assert_close(output.own_losses[is_token], torch.cat(alone))
    assert_close(output.own_loss, torch.cat(alone).mean())


@every_own_loss
def test_packed_texts_have_the_losses_of_each_alone(name):
    model = make(name)
    texts = [row[:length] for row, length in zip(random_tokens(4, T), LENGTHS)]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    alone = torch.cat([model.model(text[None]).own_losses[0] for text in texts])
    for number in (1, 2):
        packed, where = (x.view(number, -1) for x in (torch.cat(texts), positions))
        output = model.model(packed, position_ids=where, use_cache=False)
        assert_close(output.own_losses.flatten(), alone)
        assert_close(output.own_loss, alone.mean())


@every_own_loss
@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_add_up_to_the_batch(name, size):
    model = make(name)
    batch = rows()
    number = count(batch["labels"])
    whole = learned(model, model(**batch, num_items_in_batch=number).loss)
    assert_equal(learned(model, model(**batch).loss), whole)
    parts = [dict(zip(batch, part)) for part in zip(*(x.split(size) for x in batch.values()))]
    assert_equal(
        learned(model, *(model(**part, num_items_in_batch=int(number)).loss for part in parts)),
        whole,
    )


@every_own_loss
def test_the_trainer_accumulates_what_it_learns_from_a_batch(name, tmp_path):
    batch = rows()
    found = []
    data = [dict(zip(batch, row)) for row in zip(*batch.values())]
    for size in (4, 1):
        model = make(name)
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=4 // size,
            optim="sgd",
            learning_rate=1.0,
            max_grad_norm=0.0,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
        )
        before = {n: x.detach().clone() for n, x in model.named_parameters()}
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train()
        found.append(
            [
                trainer.state.log_history[0]["loss"],
                {n: x - before[n] for n, x in model.named_parameters()},
            ]
        )
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)  # the log rounds
    for key, x in found[0][1].items():
        assert (found[1][1][key] - x).abs().max() <= 1e-5 * x.abs().max(), key


@every_own_loss
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again_have_the_same_gradients(name, reentrant):
    model = make(name)
    batch = rows()
    expected = learned(model, model(**batch, use_cache=False).loss)
    model.enable_input_require_grads()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert_equal(learned(model, model(**batch, use_cache=False).loss), expected)


@pytest.mark.parametrize("name", DIVISIBLE)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [5, 8])
def test_rows_in_chunks_have_the_loss_and_the_gradients_of_whole_ones(name, side, length):
    model = make(name)
    batch = rows(side)
    batch = {
        key: x[1:3] for key, x in batch.items()
    }  # some chunks of 5 and 8 tokens are nothing but padding
    expected = learned(model, model(**batch).loss)
    assert_equal(learned(model, model(**batch, chunk_length=length).loss), expected)
    outputs = [
        model.model(batch["input_ids"], batch["attention_mask"], chunk_length=x)
        for x in (None, length)
    ]
    assert_close(outputs[1].own_loss, outputs[0].own_loss)
    assert_close(outputs[1].own_losses, outputs[0].own_losses)


def test_labels_that_were_shifted_before_are_used_as_they_are():
    model = make("ponder")
    batch = rows()
    expected = model(**batch).loss
    shifted = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    assert_close(
        model(**batch | {"labels": batch["labels"].flip(1)}, shift_labels=shifted).loss, expected
    )


def loss_of_logits(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


@every_own_loss
@pytest.mark.parametrize(
    ("arguments", "loss"),
    [({"label_smoothing_factor": 0.1}, None), ({}, loss_of_logits)],
    ids=["smoothed labels", "compute_loss_func"],
)
def test_a_trainer_that_computes_the_loss_itself_is_refused(name, arguments, loss, tmp_path):
    batch = rows()
    data = [dict(zip(batch, row)) for row in zip(*batch.values())]
    how = {"max_steps": 1, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    trainer = Trainer(
        make(name),
        TrainingArguments(str(tmp_path), **how, **arguments),
        train_dataset=data,
        compute_loss_func=loss,
    )
    with pytest.raises(ValueError, match=r"labels must be given in training .*, got none: a loss"):
        trainer.train()


def test_logits_without_labels_are_refused_only_where_something_would_be_lost():
    tokens = random_tokens(2, T)
    model = make("routing")
    with torch.no_grad():
        assert model(tokens).loss is None
    assert model.eval()(tokens).loss is None
    assert make_model(TRANSFORMER).train()(tokens).loss is None


@every_own_loss
@pytest.mark.parametrize(
    "head", [MemoryTransformerForSequenceClassification, MemoryTransformerForTokenClassification]
)
def test_heads_that_classify_add_what_the_model_adds(name, head):
    made = make(name)
    made.config.classifier_dropout = 0.0
    model = head(made.config).double().train()
    model.model.load_state_dict(made.model.state_dict())
    batch = rows()
    labels = batch.pop("labels").clamp(0, 1)
    if head is MemoryTransformerForSequenceClassification:
        labels = labels[:, 0]
    own = model.model(**batch).own_loss
    logits = model(**batch, labels=labels).logits
    of_logits = model.loss_function(
        logits=logits, pooled_logits=logits, labels=labels, config=model.config
    )
    assert own > 1e-6
    found = model(**batch, labels=labels)
    assert float(found.loss) == pytest.approx(float(of_logits + own), rel=1e-6)
    assert float(model(**batch, labels=labels, return_dict=False)[0]) == float(found.loss)
    assert float(model.eval()(**batch, labels=labels).loss) == pytest.approx(
        float(of_logits), rel=1e-6
    )
    with pytest.raises(ValueError, match="labels must be given in training"):
        model.train()(**batch)
