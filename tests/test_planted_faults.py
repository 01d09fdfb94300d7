"""The contract tests see the faults that transformers' own test-suite does not: each is planted, and one must fail."""

from importlib import import_module

import pytest
import torch

import test_cache
import test_conversion
import test_generation
import test_modeling
import test_ops
from cases import CASE, CASES, every_recurrent_family, make_model
from hf_memory import cache
from hf_memory.cache import MemoryLayer
from hf_memory.conversion.stages import distillation, trainer
from hf_memory.mixers import base
from hf_memory.modeling.base import MemoryPreTrainedModel


@every_recurrent_family
def test_a_reorder_that_does_nothing_is_seen(case, monkeypatch):
    monkeypatch.setattr(MemoryLayer, "reorder_cache", lambda self, beam_idx: None)
    with pytest.raises(AssertionError):
        test_generation.test_cache_changes_no_token(case, "several of sampled beams")


@every_recurrent_family
def test_ignored_padding_is_seen(case, monkeypatch):
    monkeypatch.setattr(base.MemoryMixer, "forward", _without("attention_mask"))
    with pytest.raises(AssertionError):
        test_modeling.test_padded_rows_equal_rows_alone(case, "left")


@every_recurrent_family
def test_ignored_packing_is_seen(case, monkeypatch):
    monkeypatch.setattr(base.MemoryMixer, "forward", _without("cu_seqlens"))
    with pytest.raises(AssertionError):
        test_modeling.test_packed_rows_equal_rows_apart(case)


@every_recurrent_family
def test_a_state_off_by_a_tenth_is_seen(case, monkeypatch):
    read = MemoryLayer.read
    monkeypatch.setattr(
        MemoryLayer, "read", lambda self, *args: {name: 0.9 * x for name, x in read(self, *args).items()}
    )
    with pytest.raises(AssertionError):
        test_modeling.test_step_by_step_equals_full_forward(case)


@every_recurrent_family
def test_a_forgotten_row_is_seen(case, monkeypatch):
    def first_row(self, indices):
        self._map(lambda x: x[:1].expand(len(indices), *x.shape[1:]).clone())

    monkeypatch.setattr(MemoryLayer, "batch_select_indices", first_row)
    with pytest.raises(AssertionError):
        test_cache.test_rows_move_with_their_past(
            case, lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]
        )


def test_a_decay_in_low_precision_is_seen(monkeypatch, tmp_path):
    case = next(case for case in CASES if case.name == "mamba2")
    make_model(case)  # which other tests will use
    monkeypatch.setattr(MemoryPreTrainedModel, "_keep_in_fp32_modules_strict", [])
    with pytest.raises(AssertionError, match="float32"):
        test_modeling.test_save_and_load_change_nothing(case, torch.bfloat16, tmp_path)


def test_a_loss_without_the_texts_part_is_seen(monkeypatch):
    monkeypatch.setattr(distillation, "cross_entropy", lambda logits, labels: 0 * logits.sum())
    with pytest.raises(AssertionError):
        test_conversion.test_the_loss_of_a_distillation_is_that_of_its_definition(0.25)


def test_a_resume_that_starts_over_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(trainer, "last_whole_checkpoint", lambda folder: None)
    with pytest.raises(AssertionError):
        test_conversion.test_a_stopped_conversion_goes_on_as_if_it_had_not_been_stopped(tmp_path, "distillation")


def test_a_teacher_with_dropout_is_seen(monkeypatch):
    def stubborn():
        teacher = with_dropout()
        teacher.eval = lambda: teacher
        return teacher

    with_dropout = test_conversion.with_dropout
    monkeypatch.setattr(test_conversion, "with_dropout", stubborn)
    with pytest.raises(AssertionError):
        test_conversion.test_a_teacher_reads_without_dropout()


@pytest.mark.parametrize("argument", range(5), ids=["q", "k", "v", "beta", "g"])
def test_what_stands_at_padding_is_seen(argument, monkeypatch):
    delta_rule = import_module("hf_memory.ops.delta_rule")
    blanked = delta_rule.without_padding
    monkeypatch.setattr(
        delta_rule,
        "without_padding",
        lambda mask, *inputs: [inputs[i] if i == argument else x for i, x in enumerate(blanked(mask, *inputs))],
    )
    op, variant = next(form.values for form in test_ops.FORMS if form.id == "delta_rule-decay=scalar-beta=random")
    with pytest.raises(AssertionError):
        test_ops.test_padding_leaves_no_trace_whatever_stands_there(op, variant, "chunk", slice(60, 65))


def test_a_decay_at_padding_is_seen(monkeypatch):
    """Of a cache that goes on, whatever else keeps padding away: a bias alone lets a memory decay."""
    linear_attention = import_module("hf_memory.ops.linear_attention")
    blanked = linear_attention.without_padding
    monkeypatch.setattr(
        linear_attention, "without_padding", lambda mask, *inputs: [*blanked(mask, *inputs[:3]), inputs[3]]
    )
    case = next(case for case in CASES if case.name == "gla")
    with pytest.raises(AssertionError):
        test_cache.test_a_right_padded_cache_goes_on_as_the_row_alone(case, 0)


@pytest.mark.parametrize("name", ["linear-favor", "linear-sliding"])
def test_a_state_that_holds_the_whole_prefill_is_seen(name, monkeypatch):
    monkeypatch.setattr(cache, "owned", lambda x: x)
    with pytest.raises(AssertionError):
        test_cache.test_a_cache_holds_the_memory_that_its_states_declare(CASE[name])


def test_a_reset_that_goes_on_recording_is_seen(monkeypatch):
    def reset(self):
        recording = self.record_past, self.recorded
        forget(self)
        self.record_past, self.recorded = recording

    forget = MemoryLayer.reset
    monkeypatch.setattr(MemoryLayer, "reset", reset)
    with pytest.raises(pytest.fail.Exception):
        test_cache.test_a_reset_ends_the_recording()


def _without(argument):
    forward = base.MemoryMixer.forward
    return lambda self, *args, **kwargs: forward(self, *args, **{**kwargs, argument: None})
