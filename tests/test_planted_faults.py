"""The contract tests see the faults that transformers' own test-suite does not: each is planted, and one must fail."""

import math
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import test_attention_in_bits
import test_cache
import test_cache_argument
import test_cache_bits
import test_compile
import test_conversion
import test_conversion_plan
import test_decoding
import test_deltaformer
import test_depth
import test_distributed
import test_export
import test_forgetting
import test_generation
import test_gguf
import test_inputs
import test_kept_tokens
import test_kv_eviction
import test_loading
import test_modeling
import test_native
import test_neural_memory
import test_ops
import test_own_losses
import test_serving
import test_texts
import test_transformer
import test_vllm_plugin
from cases import CASE, CASES, every_recurrent_family, make_model, random_tokens
from forms import FORMS
from hf_memory import MemoryTransformerForTokenClassification, cache, cache_argument, save_memory
from hf_memory.cache import MemoryLayer
from hf_memory.cache_bits import ALL_BITS
from hf_memory.conversion import defaults, plan, recipe, students
from hf_memory.conversion.stages import distillation, trainer
from hf_memory.conversion.students import kept_tokens, weights
from hf_memory.conversion.teachers import gguf
from hf_memory.decoding import datastore
from hf_memory.evaluation import counts, language, scores, tasks
from hf_memory.export import exporting
from hf_memory.files import documents, fingerprints, tokenised
from hf_memory.integrations import native
from hf_memory.integrations.vllm import states
from hf_memory.mixers import base
from hf_memory.mixers.pasts import kept
from hf_memory.mixers.pasts.ring import Ring
from hf_memory.mixers.transformer import sparse, store
from hf_memory.modeling import base as modeling_base
from hf_memory.modeling import checks, context_parallel, depth, loading
from hf_memory.modeling.base import MemoryPreTrainedModel
from hf_memory.ops import exported, rows
from hf_memory.ops.attention_in_bits import chunk as codes
from hf_memory.ops.attention_in_bits import kernels as kernels_in_bits
from hf_memory.ops.gate_channels import GateChannels
from hf_memory.ops.kv_eviction import kernels as kernels_of_kept_tokens
from hf_memory.serving import memory_file

pytestmark = pytest.mark.planted


@every_recurrent_family
def test_a_reorder_that_does_nothing_is_seen(case, monkeypatch):
    monkeypatch.setattr(MemoryLayer, "reorder_cache", lambda self, beam_idx: None)
    with pytest.raises(AssertionError):
        test_generation.test_cache_changes_no_token(case, "several of sampled beams")


@every_recurrent_family
def test_ignored_padding_is_seen(case, monkeypatch):
    monkeypatch.setattr(base.MemoryMixer, "forward", _without("attention_mask"))
    monkeypatch.setattr(modeling_base, "blank", lambda x, mask: x)
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
        MemoryLayer,
        "read",
        lambda self, *args: {name: 0.9 * x for name, x in read(self, *args).items()},
    )
    with pytest.raises(AssertionError):
        test_modeling.test_step_by_step_equals_full_forward(case)


@pytest.mark.parametrize("name", cache_argument.NAMES)
def test_a_cache_that_vanishes_among_other_arguments_is_seen(name, monkeypatch):
    named = cache_argument.named_cache
    monkeypatch.setattr(
        cache_argument, "named_cache", lambda given, *to: named({**given, name: None}, *to)
    )
    with pytest.raises(AssertionError):
        test_cache_argument.test_decoding_with_a_cache_of_either_name_changes_no_token(
            CASES[0], name
        )


def test_a_cache_of_an_unknown_name_that_vanishes_is_seen(monkeypatch):
    monkeypatch.setattr(cache_argument, "check_no_cache", lambda name, value: None)
    with pytest.raises(pytest.fail.Exception):
        test_cache_argument.test_a_cache_of_another_name_is_refused(
            "language model", "past_key_value"
        )


@every_recurrent_family
def test_a_forgotten_row_is_seen(case, monkeypatch):
    def first_row(self, indices):
        self._map(lambda x: x[:1].expand(len(indices), *x.shape[1:]).clone())

    monkeypatch.setattr(MemoryLayer, "batch_select_indices", first_row)
    with pytest.raises(AssertionError):
        test_cache.test_rows_move_with_their_past(
            case, lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]
        )


def test_a_cache_of_another_model_that_is_read_is_seen(monkeypatch):
    monkeypatch.setattr(MemoryLayer, "check", lambda self, spec, mixer: None)
    with pytest.raises((KeyError, pytest.fail.Exception)):
        test_cache.test_a_cache_of_another_kind_of_model_is_refused_before_it_changes(CASES[0])


def test_a_decay_in_low_precision_is_seen(monkeypatch, tmp_path):
    case = next(case for case in CASES if case.name == "mamba2")
    make_model(case)  # which other tests will use
    monkeypatch.setattr(MemoryPreTrainedModel, "_keep_in_fp32_modules_strict", [])
    with pytest.raises(AssertionError, match="float32"):
        test_modeling.test_save_and_load_change_nothing(case, tmp_path)


def test_a_loss_without_the_texts_part_is_seen(monkeypatch):
    monkeypatch.setattr(distillation, "cross_entropy", lambda logits, labels: 0 * logits.sum())
    with pytest.raises(AssertionError):
        test_conversion.test_the_loss_of_a_distillation_is_that_of_its_definition(0.25)


def test_a_resume_that_starts_over_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(trainer, "last_whole_checkpoint", lambda folder: None)
    with pytest.raises(AssertionError):
        test_conversion.test_a_stopped_conversion_goes_on_as_if_it_had_not_been_stopped(
            tmp_path, "distillation"
        )


def test_errors_that_predictions_do_not_weigh_are_seen(monkeypatch):
    """As when heads get tokens by how far their outputs move, whether or not these are heard."""
    of_layers = kept_tokens.seen_by_layers

    def unweighed(*given):
        return [(seen, torch.ones_like(gradient)) for seen, gradient in of_layers(*given)]

    monkeypatch.setattr(kept_tokens, "seen_by_layers", unweighed)
    with pytest.raises(AssertionError):
        test_kept_tokens.test_the_one_head_that_predictions_need_keeps_most(1, 0)


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
        lambda mask, *inputs: [
            inputs[i] if i == argument else x for i, x in enumerate(blanked(mask, *inputs))
        ],
    )
    op, variant = next(
        form.values for form in FORMS if form.id == "delta_rule-decay=scalar-beta=random"
    )
    with pytest.raises(AssertionError):
        test_ops.test_padding_leaves_no_trace_whatever_stands_there(
            op, variant, "chunk", slice(60, 65)
        )


def test_a_decay_at_padding_is_seen(monkeypatch):
    """A cache goes on wrongly then, whatever else keeps padding away: a bias alone lets a memory decay."""
    linear_attention = import_module("hf_memory.ops.linear_attention")
    blanked = linear_attention.without_padding
    monkeypatch.setattr(
        linear_attention,
        "without_padding",
        lambda mask, *inputs: [*blanked(mask, *inputs[:3]), inputs[3]],
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


def test_a_text_without_its_beginning_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(tokenised, "start_of", lambda tokenizer: [])
    with pytest.raises(AssertionError):
        test_conversion.test_every_window_begins_as_the_tokenizer_begins_a_text(
            tmp_path, monkeypatch
        )


def test_a_past_that_is_overwritten_before_it_is_read_is_seen(monkeypatch):
    """As by a cache whose window rolls while views of it are read."""
    before = Ring.before

    def rolled(self, new, context):
        held = before(self, new, context)
        return held and held._replace(keys=held.keys.roll(-1, 1), values=held.values.roll(-1, 1))

    monkeypatch.setattr(Ring, "before", rolled)
    with pytest.raises(AssertionError):
        test_deltaformer.test_a_static_cache_whose_window_rolls_equals_the_whole("linear")


def test_a_wrong_third_derivative_is_seen(monkeypatch):
    """PyTorch's layer_norm has one, and the inner gradient of the reference is a derivative already."""

    def standardized(z):
        variance = z.var(-1, correction=0, keepdim=True)
        return F.layer_norm(z, z.shape[-1:], eps=network.NORM_EPS), (
            variance + network.NORM_EPS
        ).rsqrt()

    network = import_module("hf_memory.ops.neural_memory.network")
    monkeypatch.setattr(network, "standardized", standardized)
    normed = next(
        name for name, options in test_neural_memory.OPTIONS.items() if options.get("norm")
    )
    with pytest.raises(GradcheckError):
        test_neural_memory.test_second_derivatives_of_the_reference_are_those_of_differences(normed)


def test_equal_scores_in_any_order_are_seen(monkeypatch):
    monkeypatch.setattr(store, "LEAST", 0.0)
    with pytest.raises(AssertionError):
        test_transformer.test_a_query_of_zeros_reads_the_same_tokens_with_and_without_a_cache(
            "attention"
        )


def test_missing_weights_that_become_random_are_seen(monkeypatch, tmp_path):
    class Silent(AutoModelForCausalLM):
        @classmethod
        def from_pretrained(cls, *args, **kwargs):
            model, _ = AutoModelForCausalLM.from_pretrained(*args, **kwargs)
            return model, {"missing_keys": set(), "mismatched_keys": set()}

    monkeypatch.setattr(loading, "AutoModelForCausalLM", Silent)
    make_model(CASE["deltanet"]).save_pretrained(tmp_path)
    with pytest.raises(pytest.fail.Exception):
        test_loading.test_missing_weights_are_refused_by_name(tmp_path, loading.load_model)


def test_a_head_that_a_config_ties_in_vain_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "_differ", lambda *given: False)
    monkeypatch.setattr(loading, "_is_tied", lambda model: True)
    with pytest.raises(AssertionError):
        test_conversion.test_a_head_that_a_config_ties_in_vain_is_the_teachers_and_the_students(
            "llama", tmp_path
        )


def test_a_head_that_overwrites_the_embeddings_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(weights, "_overwritten", lambda *given: [])
    with pytest.raises(pytest.fail.Exception):
        test_conversion.test_a_teacher_with_two_tensors_for_one_of_its_student_is_refused(
            "llama", tmp_path
        )


@pytest.mark.parametrize("fault", ["texts beside data", "byte-order marks"])
def test_text_that_is_misread_is_seen(fault, monkeypatch, tmp_path):
    files_of = documents.files_of
    if fault == "texts beside data":
        monkeypatch.setattr(
            documents, "files_of", lambda x: [file for file in files_of(x) if file.suffix != ".txt"]
        )
    else:
        opened = Path.open

        def with_marks(self, mode="r", buffering=-1, encoding=None, **how):
            return opened(
                self, mode, buffering, encoding=encoding and encoding.removesuffix("-sig"), **how
            )

        monkeypatch.setattr(Path, "open", with_marks)
    with pytest.raises(AssertionError):
        test_texts.test_a_folder_of_texts_and_data_is_read_whole_and_a_byte_order_mark_is_no_text(
            tmp_path
        )


def test_a_card_that_is_measured_within_a_window_is_seen(monkeypatch, tmp_path):
    for measure in (language.agreement_by_position, language.perplexity_by_position):
        within = partial(_within, measure)
        monkeypatch.setattr(tasks, measure.__name__, within)
    with pytest.raises((AssertionError, KeyError)):
        test_conversion.test_what_is_written_can_be_loaded_and_read(tmp_path)


def _within(measure, *args, length, **how):
    """A measurement in windows of 32 tokens, whatever length is wanted."""
    return measure(*args, length=32, **how)


@pytest.mark.parametrize("name", ["not a number", "infinite", "too large", "integers"])
def test_a_forged_state_that_is_believed_is_seen(name, monkeypatch, tmp_path):
    model = make_model(CASE["linear-full"])
    path = tmp_path / "memory"
    save_memory(test_serving.read(model, random_tokens(1, 9)), path, model)
    monkeypatch.setattr(memory_file, "state_fault", lambda *args: None)
    with pytest.raises(pytest.fail.Exception):
        test_serving.test_a_forged_memory_is_refused((model, path), name)


@pytest.mark.parametrize("switch", test_serving.SWITCHES)
def test_a_memory_that_knows_no_adapters_is_seen(switch, monkeypatch, tmp_path):
    monkeypatch.setattr(fingerprints, "running_weights", lambda model: model.state_dict().items())
    with pytest.raises(pytest.fail.Exception):
        test_serving.test_a_memory_that_was_read_with_an_adapter_is_refused_with_another(
            switch, {}, tmp_path
        )


def test_a_memory_that_knows_its_own_version_alone_is_seen(monkeypatch, tmp_path):
    def all_that_differ(written, config):
        return [] if written == memory_file._fields(config) else ["something"]

    monkeypatch.setattr(memory_file, "_differing", all_that_differ)
    with pytest.raises(ValueError, match="config has other something"):
        test_serving.test_a_memory_of_an_earlier_version_with_fewer_options_is_loaded(
            CASE["linear-elu"], tmp_path
        )


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear"])
def test_a_memory_in_the_bits_of_the_model_and_not_of_the_cache_is_seen(
    kind, monkeypatch, tmp_path
):
    monkeypatch.setattr(memory_file, "held_bits", lambda cache: ALL_BITS)
    for bits in (8, {"recurrent_states": 16}):
        with pytest.raises((AssertionError, ValueError)):
            test_native.test_a_loaded_memory_in_few_bits_goes_on_as_the_one_that_was_saved(
                kind, bits, tmp_path
            )


def test_a_comparison_of_an_export_with_dropout_is_seen(monkeypatch, tmp_path):
    in_training = torch.no_grad()(exporting.compare.__wrapped__.__wrapped__)
    monkeypatch.setattr(exporting, "compare", in_training)
    with pytest.raises(ValueError, match="the exported model must have the model's logits"):
        test_export.test_a_model_in_training_is_compared_without_dropout(tmp_path)


def test_a_comparison_that_allows_whatever_decoding_differs_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(exporting, "MOST", math.inf)
    with pytest.raises(pytest.fail.Exception):
        test_export.test_an_export_is_refused_also_where_the_models_own_decoding_is_wrong(
            tmp_path, monkeypatch
        )


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_a_graph_of_the_number_of_blocks_of_its_example_is_seen(pattern, monkeypatch):
    def number(tokens, length):
        return (tokens + length - 1) // length

    monkeypatch.setattr(exported, "pieces", number)
    monkeypatch.setattr(sparse, "pieces", number)
    with pytest.raises(AssertionError, match="Guard failed"):
        test_compile.test_an_export_by_a_text_shorter_than_a_block_reads_texts_of_any_length(
            pattern
        )


def test_packing_that_attention_decides_by_itself_is_seen(monkeypatch):
    def positions(cu_seqlens, inputs_embeds):
        return torch.arange(inputs_embeds.shape[1]).expand(inputs_embeds.shape[:2])

    monkeypatch.setattr(modeling_base, "packed_positions", positions)
    with pytest.raises(AssertionError):
        test_modeling.test_no_packed_text_changes_another_whatever_positions_say(
            CASE["linear-full"]
        )


@pytest.mark.parametrize("name", ["deltanet-window", "mamba3"])
def test_a_state_in_the_dtype_of_autocast_is_seen(name, monkeypatch):
    monkeypatch.setattr(base, "as_declared", lambda states, *others: states)
    with pytest.raises(AssertionError):
        test_cache.test_states_have_the_dtypes_that_are_declared_whatever_computes_them(
            CASE[name], torch.bfloat16
        )


def _without(argument):
    forward = base.MemoryMixer.forward
    return lambda self, *args, **kwargs: forward(self, *args, **{**kwargs, argument: None})


def test_layers_that_are_computed_again_with_other_random_numbers_are_seen(monkeypatch):
    monkeypatch.setattr(depth.Surroundings, "again", lambda self: nullcontext())
    with pytest.raises(AssertionError):
        test_depth.test_a_reversible_transformer_is_computed_again_with_the_same_random_numbers(
            "a user's module", "alone"
        )


def test_a_loss_of_the_models_own_without_the_weight_of_a_micro_batch_is_seen(monkeypatch):
    averaged = modeling_base.mean_of_targets
    monkeypatch.setattr(
        modeling_base,
        "mean_of_targets",
        lambda *args, num_items_in_batch=None, **kwargs: averaged(*args, **kwargs),
    )
    with pytest.raises(AssertionError):
        test_own_losses.test_micro_batches_add_up_to_the_batch("routing", 1)


@pytest.mark.parametrize("name", ["routing", "ponder"])
def test_a_loss_of_padding_is_seen(name, monkeypatch):
    monkeypatch.setattr(modeling_base, "is_token", lambda attention_mask, T: None)
    with pytest.raises(AssertionError):
        test_own_losses.test_padding_has_no_loss_and_changes_that_of_no_token(name, "right")


@pytest.mark.parametrize("form", ["heads", "kept tokens", "xl", "strided"])
def test_gates_that_are_rounded_to_16_bits_are_seen(form, monkeypatch):
    decay = GateChannels.decay

    def rounded(self, q, k):  # as a product of 16 bits with -c_j is
        return decay(self, torch.zeros_like(q), k).to(q.dtype).float()

    monkeypatch.setattr(GateChannels, "decay", rounded)
    with pytest.raises(AssertionError):
        test_forgetting.test_no_gate_is_lost_in_16_bits(form, test_forgetting.WHOLE)


@pytest.mark.parametrize("form", ["heads", "kept tokens", "xl", "heads and wide ones"])
def test_kept_sums_that_do_not_move_are_seen(form, monkeypatch):
    monkeypatch.setattr(GateChannels, "moved", lambda self, k, units: k)
    with pytest.raises(AssertionError):
        test_forgetting.test_pieces_keep_the_sums_of_the_whole(form)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear-window-bits", {}),
        ("attention-kept-bits", {}),
        ("titans-mac", {"cache_bits": 8}),
        ("deltaformer", {"cache_bits": {"memory": 8}}),
    ],
)
def test_tokens_of_a_call_that_are_not_rounded_are_seen(name, options, monkeypatch):
    monkeypatch.setattr(rows, "rounded", lambda x, packed, bits: x)
    with pytest.raises(AssertionError):
        test_cache_bits.test_a_text_is_the_same_however_it_is_divided(name, options)


def test_matrices_that_are_not_rounded_are_seen(monkeypatch):
    monkeypatch.setattr(base, "as_stored", lambda states, spec: states)
    with pytest.raises(AssertionError):
        test_cache_bits.test_matrices_are_rounded_once_at_the_end_of_a_call("deltanet", 16)


@pytest.mark.parametrize(
    "fault",
    [
        lambda given: given._replace(visible=None),
        lambda given: given._replace(S=given.S - 1),
        lambda given: given._replace(v=given.k),
    ],
    ids=["hidden entries", "one entry less", "keys as values"],
)
@torch.no_grad()
def test_entries_in_bits_that_a_kernel_takes_wrongly_are_seen(fault, monkeypatch):
    launcher = kernels_in_bits.launcher

    def faulty(kernel, grid):
        launch = launcher(kernel, grid)

        def run(first, *others, **how):
            is_given = isinstance(first, kernels_in_bits.Given)
            return launch(fault(first) if is_given else first, *others, **how)

        return run

    monkeypatch.setattr(kernels_in_bits, "launcher", faulty)
    with pytest.raises(AssertionError):
        test_attention_in_bits.test_kernel_sees_what_is_visible("each row", 40)


@torch.no_grad()
def test_scales_of_other_groups_of_channels_are_seen(monkeypatch):
    monkeypatch.setattr(codes, "group_matrix", lambda D, like: like.new_ones(D // 32, D))
    with pytest.raises(AssertionError):
        test_attention_in_bits.test_products_of_codes_are_those_of_numbers(
            None, 96, rows.Rows(4, 4)
        )


@torch.no_grad()
def test_rows_that_read_the_entries_of_another_are_seen(monkeypatch):
    of_parts = codes._of_parts

    def of_the_first(function, x, parts, D):
        return of_parts(function, x, [parts[0]] * len(parts), D)

    monkeypatch.setattr(codes, "_of_parts", of_the_first)
    with pytest.raises(AssertionError):
        test_attention_in_bits.test_rows_anywhere_in_memory_are_read_as_one_tensor(
            "chunk", rows.Rows(8, 8)
        )


def test_the_end_of_a_static_cache_taken_for_that_of_its_text_is_seen(monkeypatch):
    seen_among = rows.Rows.seen_among

    def at_the_end(self, new, stored, held, end):
        return seen_among(self, new, stored, held, held[0].shape[-2])

    monkeypatch.setattr(rows.Rows, "seen_among", at_the_end)
    with pytest.raises(AssertionError):
        test_cache_bits.test_a_static_cache_reads_as_none("attention-sinks-bits", {}, True)


def test_states_of_a_static_cache_that_grow_with_the_text_are_seen(monkeypatch):
    layer = cache.StaticMemoryLayer
    monkeypatch.setattr(layer, "_with_room", lambda self, states, tokens_read: states)
    monkeypatch.setattr(layer, "room", None)
    with pytest.raises(AssertionError):
        test_compile.test_states_of_a_static_cache_are_written_in_place(CASE["mosaic-full"])


def test_calls_in_the_bits_of_another_thread_are_seen(monkeypatch):
    class Shared:
        value = None

        def set(self, bits):
            before, self.value = self.value, bits
            return before

        def get(self):
            return self.value

        reset = set

    monkeypatch.setattr(modeling_base, "BITS_OF_CALL", Shared())
    with pytest.raises((AssertionError, ValueError)):
        test_cache_bits.test_threads_generate_in_bits_of_their_own()


@pytest.mark.parametrize("theta", [0, -5.0, math.nan])
def test_a_theta_that_gives_no_angles_and_is_taken_is_seen(theta, monkeypatch):
    monkeypatch.setattr(checks, "ROPE_NUMBERS", ())
    with pytest.raises(pytest.fail.Exception):
        test_inputs.test_parameters_of_rope_that_give_no_angles_are_refused(
            "local_rope_parameters", {"rope_type": "default", "rope_theta": theta}, "rope_theta"
        )


class Taken(Exception):
    """A number that a planted fault takes, though it is out of its range."""


@pytest.mark.parametrize("message", [x for x in test_inputs.WRONG_MEASURES if "whole number" in x])
def test_a_count_below_its_least_that_is_taken_is_seen(message, monkeypatch):
    """What a measure does with such a number is another matter: it stops where the refusal is missing."""

    def take(is_right, name, *others):
        if not is_right:
            raise Taken(name)

    monkeypatch.setattr(counts, "check", take)
    with pytest.raises(Taken, match=message.split()[0]):
        test_inputs.test_measures_refuse_numbers_out_of_their_range(message)


def test_a_limit_of_no_tokens_that_is_taken_is_seen(tokenizer, text, monkeypatch):
    """As by a reader for which any limit that cannot be reached is none."""
    read = test_inputs.read_tokens

    def take(sources, tokenizer, *, limit):
        return read(sources, tokenizer, limit=limit if limit > 0 else None)

    monkeypatch.setattr(test_inputs, "read_tokens", take)
    with pytest.raises(pytest.fail.Exception):
        test_inputs.test_read_tokens_takes_a_limit_above_zero(tokenizer, text)


@pytest.mark.parametrize("name", ["steps", "length"])
def test_a_fraction_in_a_schedule_that_is_taken_is_seen(name, monkeypatch):
    monkeypatch.setattr(recipe, "check_type", lambda *given: None)
    schedule = recipe.Schedule(4, 1e-3)._replace(**{name: 8.5})
    with pytest.raises(pytest.fail.Exception):
        test_inputs.test_a_recipe_of_wrong_types_is_refused(
            {"transfer": schedule}, f"{name} of transfer must be int, got 8.5"
        )


def test_two_datastores_in_one_folder_that_are_both_written_are_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(datastore, "folder_lock", lambda *given: nullcontext())
    with pytest.raises((pytest.fail.Exception, AssertionError)):
        test_decoding.test_of_two_datastores_in_one_folder_one_is_refused(tmp_path)


@pytest.mark.parametrize("message", [x for x in test_inputs.WRONG_MEASURES if "tolerance" in x])
def test_a_tolerance_that_is_no_part_of_a_score_and_is_taken_is_seen(message, monkeypatch):
    monkeypatch.setattr(scores, "check", lambda *given: None)
    with pytest.raises(pytest.fail.Exception):
        test_inputs.test_measures_refuse_numbers_out_of_their_range(message)


@pytest.mark.parametrize("place", ["export", "student.gguf"])
def test_two_exports_to_one_place_that_are_both_written_are_seen(place, monkeypatch, tmp_path):
    monkeypatch.setattr(exporting, "folder_lock", lambda *given: nullcontext())
    with pytest.raises((pytest.fail.Exception, OSError)):
        test_export.test_of_two_exports_to_one_place_one_is_refused(place, tmp_path, monkeypatch)


def test_a_block_that_ends_token_by_token_without_its_scores_is_seen(monkeypatch):
    monkeypatch.setattr(kept, "score_after", lambda q, k, v, number, score, rule: score)
    with pytest.raises(AssertionError):
        test_kv_eviction.test_pieces_equal_the_whole("received_attention", [1] * 23, False, None)


def test_a_kernel_that_decides_by_another_policy_is_seen(monkeypatch):
    launch = kernels_of_kept_tokens.launcher

    def faulty(*given):
        run = launch(*given)

        def by_another(*others, meta, **options):
            return run(*others, meta=meta._replace(BY_CHANGE=False), **options)

        return by_another

    monkeypatch.setattr(kernels_of_kept_tokens, "launcher", faulty)
    with pytest.raises(AssertionError):
        test_kv_eviction.test_kernel_decides_as_its_definition("change_of_output", {}, None)


def test_scores_of_the_queries_of_a_call_alone_are_seen(monkeypatch):
    """As where the queries of a block that was begun in an earlier call are lost."""
    among = kept.Entries.among

    def without_queries(states, prefix):
        held = among(states, prefix)
        return held._replace(queries=torch.zeros_like(held.queries))

    monkeypatch.setattr(kept.Entries, "among", without_queries)
    with pytest.raises(AssertionError):
        test_kv_eviction.test_pieces_equal_the_whole("received_attention", [7, 1, 15], False, None)


@pytest.mark.parametrize("name", ["tokens_read", "keys", "values", "number", "queries"])
def test_a_state_of_vllm_that_another_sequence_writes_in_place_is_seen(name, monkeypatch):
    apart = states.Shelf.apart

    def of_first(self, layer, numbers):
        found = apart(self, layer, numbers)
        return [own | {name: found[0][name]} for own in found]

    monkeypatch.setattr(states.Shelf, "apart", of_first)
    with pytest.raises(AssertionError):
        test_vllm_plugin.test_sequences_in_steps_are_each_sequence_alone(CASE["attention-kept"])


def test_a_hybrid_that_reads_packed_sequences_as_one_is_seen(monkeypatch):
    monkeypatch.setattr(native, "keep_packed_apart", lambda *given: None)
    with pytest.raises(AssertionError):
        test_native.test_packed_sequences_are_read_apart("qwen3_5", "positions")


def test_a_hybrid_that_keeps_what_was_undone_is_seen(monkeypatch):
    monkeypatch.setattr(MemoryLayer, "crop", lambda self, tokens_to_remove: None)
    with pytest.raises(AssertionError):
        test_native.test_undone_tokens_leave_no_trace("qwen3_5")


@pytest.mark.parametrize("lost", ["attention_mask", "labels", "num_items_in_batch"])
def test_an_argument_that_is_lost_where_rows_are_split_is_seen(lost, monkeypatch, tmp_path):
    named = context_parallel.named_cache

    def without(given):
        return {name: x for name, x in named(given).items() if name != lost}

    monkeypatch.setattr(context_parallel, "named_cache", without)
    with (
        pytest.raises((AssertionError, TypeError)),
        test_distributed.process_group(tmp_path),
    ):
        test_distributed.test_a_model_whose_rows_are_split_is_called_as_any_model(
            test_distributed.of_a_trainer, None, None
        )


def test_different_rows_of_processes_that_share_them_are_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(context_parallel.Link, "check_same", lambda self, rows: None)
    with pytest.raises(pytest.fail.Exception), test_distributed.process_group(tmp_path):
        test_distributed.test_different_rows_in_processes_that_share_them_are_refused(
            None, monkeypatch
        )


def test_own_losses_that_vanish_from_a_loss_of_logits_are_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(modeling_base, "check_own_loss", lambda loss, own_loss: None)
    arguments = {"label_smoothing_factor": 0.1}
    with pytest.raises(pytest.fail.Exception):
        test_own_losses.test_a_trainer_that_computes_the_loss_itself_is_refused(
            "routing", arguments, None, tmp_path
        )


def test_own_losses_that_vanish_from_a_classifier_are_seen(monkeypatch):
    unchanged = MemoryTransformerForTokenClassification.forward.__wrapped__.__wrapped__.__wrapped__
    monkeypatch.setattr(MemoryTransformerForTokenClassification, "forward", unchanged)
    with pytest.raises(AssertionError):
        test_own_losses.test_heads_that_classify_add_what_the_model_adds(
            "routing", MemoryTransformerForTokenClassification
        )


def test_a_rotation_that_changes_with_the_length_of_a_text_is_seen(monkeypatch):
    monkeypatch.setattr(students, "with_one_rope", lambda shared, *others: shared)
    with pytest.raises(AssertionError):
        test_conversion.test_positions_of_a_student_are_asked_for_where_the_angles_of_its_teacher_change()


@pytest.mark.parametrize(
    ("case", "lost"),
    [
        ("gemma2", "attn_logit_softcapping"),
        ("gemma2", "final_logit_softcapping"),
        ("gemma2", "query_pre_attn_scalar"),
        ("gemma3", "query_pre_attn_scalar"),
        ("gemma3", "layer_types"),
        ("phi3 with windows", "sliding_window"),
    ],
)
def test_metadata_of_a_file_that_is_lost_is_seen(case, lost, monkeypatch, tmp_path):
    fields_of = gguf.fields_of

    def without(said, architecture):
        return {name: x for name, x in fields_of(said, architecture).items() if name != lost}

    monkeypatch.setattr(gguf, "fields_of", without)
    with pytest.raises(AssertionError):
        test_gguf.test_a_teacher_in_a_file_is_the_model_that_was_written(case, tmp_path)


def test_a_rotation_of_a_file_that_is_lost_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(gguf, "ropes_of", lambda said, given: given)
    with pytest.raises(AssertionError):
        test_gguf.test_a_teacher_in_a_file_is_the_model_that_was_written("phi3 in part", tmp_path)


def test_metadata_of_a_file_that_nobody_reads_is_seen(monkeypatch, tmp_path):
    monkeypatch.setattr(gguf, "refused", lambda said, architecture: None)
    with pytest.raises(pytest.fail.Exception):
        test_gguf.test_metadata_that_changes_predictions_and_is_not_read_is_refused(
            "a scale of scores", "llama", tmp_path
        )


def test_an_option_that_changes_another_is_seen(monkeypatch):
    options_of = defaults.student_options

    def with_another(recipe, keep, teacher):
        options = options_of(recipe, keep, teacher)
        return options | ({"kept_block_size": 32} if recipe.options else {})

    monkeypatch.setattr(plan, "student_options", with_another)
    with pytest.raises(AssertionError):
        test_conversion_plan.test_an_option_changes_what_it_names("num_sink_tokens", 8)
    with pytest.raises(AssertionError):
        test_conversion_plan.test_an_option_at_its_default_value_changes_nothing(
            "sliding_window", None
        )


def test_a_resolved_recipe_without_a_default_is_seen(monkeypatch):
    monkeypatch.setattr(plan, "with_loss", lambda recipe, *, is_exact: recipe)
    with pytest.raises(AssertionError):
        test_conversion_plan.test_a_resolved_recipe_is_its_own_default()


def test_a_default_that_does_not_see_the_teacher_is_seen(monkeypatch):
    monkeypatch.setattr(defaults, "within_teacher", lambda options, teacher: options)
    teacher = "all"
    layers, options = {"sliding_heads"}, test_conversion_plan.DEFAULT
    with pytest.raises(AssertionError):
        test_conversion_plan.test_a_default_is_that_of_the_teacher(
            teacher, layers, options, 1024, "heads:1/11"
        )
