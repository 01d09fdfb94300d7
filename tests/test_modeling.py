"""What every model keeps: one function of its tokens, however they are fed, padded, packed, saved or differentiated."""

import inspect
import itertools
import json
import re
import subprocess
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    LlamaConfig,
)

import hf_memory
from cases import (
    CASE,
    CASES,
    WINDOW,
    every_case,
    every_family,
    every_kind_of_layer,
    every_recurrent_family,
    family_of,
    make_config,
    make_model,
    one_layer,
    passes_gradients,
    random_tokens,
)
from comparing import assert_close
from hf_memory.mixers.attention import AttentionMixer
from hf_memory.modeling.registration import IMPORTED


def test_every_family_has_a_case():
    assert {case.model_type for case in CASES} == {
        family.config.model_type for family in hf_memory.FAMILIES
    }


@every_case
@torch.no_grad()
def test_step_by_step_equals_full_forward(case):
    model = make_model(case).double()
    tokens = random_tokens(2, 11)
    full = model(tokens).logits
    cache = DynamicCache(config=model.config)
    steps = [model(tokens[:, t : t + 1], past_key_values=cache).logits for t in range(11)]
    assert_close(torch.cat(steps, 1), full)
    assert cache.get_seq_length() == 11


@every_case
@torch.no_grad()
def test_any_split_of_a_prefill_equals_the_whole(case):
    model = make_model(case).double()
    tokens = random_tokens(2, 70)
    full = model(tokens).logits
    for splits in ((70,), (1, 63, 6), (3, 66, 1)):
        cache = DynamicCache(config=model.config)
        parts = [model(part, past_key_values=cache).logits for part in tokens.split(splits, dim=1)]
        assert_close(torch.cat(parts, 1), full)


@every_case
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_rows_equal_rows_alone(case, side):
    model = make_model(case).double()
    rows = [random_tokens(1, length, seed=length) for length in (9, 5, 1)]
    tokens, mask = _pad(rows, side, model)
    given = (
        [mask] if side == "left" else [mask.float(), None]
    )  # lm-eval gives none where padding is what follows
    for logits in (model(tokens, attention_mask=x).logits for x in given):
        for i, row in enumerate(rows):
            assert_close(logits[i][mask[i].bool()], model(row).logits[0])


@every_case
@torch.no_grad()
def test_a_padded_cache_continues_as_rows_alone(case):
    model = make_model(case).double()
    rows = [random_tokens(1, length, seed=length) for length in (9, 5)]
    tokens, mask = _pad([row[:, :-2] for row in rows], "left", model)
    cache = DynamicCache(config=model.config)
    model(tokens, attention_mask=mask, past_key_values=cache)
    mask = torch.cat([mask, mask.new_ones(2, 2)], 1)
    logits = model(
        torch.cat([row[:, -2:] for row in rows]), attention_mask=mask, past_key_values=cache
    ).logits
    for i, row in enumerate(rows):
        assert_close(logits[i], model(row).logits[0, -2:])


def _pad(rows, side, model):
    length = max(row.shape[1] for row in rows)
    tokens = torch.full(
        (len(rows), length), 7
    )  # not the pad token, whose embedding is zero and hides mistakes
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(length - row.shape[1], None) if side == "left" else slice(row.shape[1])
        tokens[i, place] = row[0]
        mask[i, place] = 1
    return tokens, mask


LENGTHS = (6, 1, 4)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
SEQ_IDX = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)])[None].int()
CU_SEQLENS = torch.tensor([0, 6, 7, 11], dtype=torch.int32)
PACKINGS = {
    "position_ids": {"position_ids": POSITIONS},
    "seq_idx": {"seq_idx": SEQ_IDX},
    "cu_seq_lens": {
        "cu_seq_lens_q": CU_SEQLENS,
        "cu_seq_lens_k": CU_SEQLENS,
        "max_length_q": 6,
        "max_length_k": 6,
    },
    "empty sequences": {"cu_seq_lens_q": CU_SEQLENS[[0, 0, 1, 2, 2, 2, 3, 3]]},
    "all": {"position_ids": POSITIONS, "seq_idx": SEQ_IDX, "cu_seq_lens_q": CU_SEQLENS},
    "all ones": {"seq_idx": SEQ_IDX, "attention_mask": torch.ones(1, 11, dtype=torch.long)},
}


@every_case
@torch.no_grad()
def test_packed_rows_equal_rows_apart(case):
    model = make_model(case).double()
    tokens = random_tokens(1, 11)
    apart = torch.cat([model(row).logits for row in tokens.split(LENGTHS, dim=1)], 1)
    for said in PACKINGS.values():
        assert_close(model(tokens, **said).logits, apart)


@every_case
@torch.no_grad()
def test_no_packed_text_changes_another_whatever_positions_say(case):
    model = make_model(case).double()
    tokens = random_tokens(1, 11)
    whole = torch.arange(11)[None]
    other = tokens.clone()
    other[:, :6] = random_tokens(1, 6, seed=1)
    for said in ({"seq_idx": SEQ_IDX}, {"cu_seq_lens_q": CU_SEQLENS}):
        logits, expected = (model(x, position_ids=whole, **said).logits for x in (other, tokens))
        assert_close(logits[:, 6:], expected[:, 6:])
        assert not torch.equal(logits[:, :6], expected[:, :6])


@every_case
@torch.no_grad()
def test_positions_that_jump_ahead_are_one_text(case):
    """As in training for more positions than there are tokens (PoSE)."""
    model = make_model(case).double()
    tokens = random_tokens(1, 11)
    positions = torch.tensor([[0, 1, 2, 5, 6, 7, 20, 21, 22, 23, 40]])
    cache = DynamicCache(config=model.config)
    logits = model(tokens, position_ids=positions).logits
    parts = zip(tokens.split(LENGTHS, 1), positions.split(LENGTHS, 1))
    read = [model(x, position_ids=here, past_key_values=cache).logits for x, here in parts]
    assert_close(logits, torch.cat(read, 1))


def test_attention_without_masks_is_told_what_is_packed():
    """As flash attention is, which would look for packed sequences in positions, by another rule."""
    told = []

    def attention(mixer, q, k, v, mask, **given):
        told.append(given)
        return torch.zeros_like(q).transpose(1, 2), None

    AttentionInterface.register("told", attention)
    model = make_model(CASE["linear-full"])
    tokens = random_tokens(1, 11)
    model.set_attn_implementation("told")
    model(tokens, position_ids=POSITIONS)
    assert torch.equal(told[-1]["cu_seq_lens_q"], CU_SEQLENS)
    assert torch.equal(told[-1]["cu_seq_lens_k"], CU_SEQLENS)
    assert told[-1]["max_length_q"] == told[-1]["max_length_k"] == max(LENGTHS)
    model(tokens, position_ids=POSITIONS.cumsum(1) + torch.arange(11))
    assert not {"cu_seq_lens_q", "position_ids"} & set(told[-1])


@every_case
@torch.no_grad()
def test_packed_rows_in_a_batch_stay_apart(case):
    model = make_model(case).double()
    tokens = random_tokens(2, 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 0]])
    packed = model(tokens, position_ids=positions).logits
    apart = [torch.cat([model(part).logits for part in row.split(n, dim=1)], 1)
             for row, n in ((tokens[:1], (3, 3)), (tokens[1:], (5, 1)))]  # fmt: skip
    assert_close(packed, torch.cat(apart))


@every_case
@torch.no_grad()
def test_what_is_no_number_stays_in_its_packed_sequence(case):
    """Attention hides other sequences by weights of zero, and zero times NaN is NaN."""
    model = make_model(case).double()
    others = SEQ_IDX != 1
    x = model.get_input_embeddings()(random_tokens(1, 11))
    broken = x.masked_fill(~others[..., None], torch.nan)
    logits, expected = (model(inputs_embeds=y, **PACKINGS["all"]).logits for y in (broken, x))
    assert_close(logits[others], expected[others])
    assert logits[~others].isnan().all()


@every_case
@torch.no_grad()
def test_what_is_no_number_at_padding_reaches_no_token(case):
    model = make_model(case).double()
    mask = torch.ones(3, 11, dtype=torch.bool)
    mask[1, :4] = False
    mask[2, -4:] = False
    x = model.get_input_embeddings()(random_tokens(3, 11))
    broken = x.masked_fill(~mask[..., None], torch.nan)
    logits, expected = (
        model(inputs_embeds=y, attention_mask=mask.long()).logits[mask] for y in (broken, x)
    )
    assert_close(logits, expected)


@every_family
def test_a_mask_of_pairs_is_refused(case):
    with pytest.raises(ValueError, match=r"attention_mask must be .* got shape \(1, 1, 5, 5\)"):
        make_model(case)(random_tokens(1, 5), attention_mask=torch.ones(1, 1, 5, 5).tril())


def test_attention_alone_takes_a_mask_of_pairs_which_says_what_is_packed():
    model = make_model(CASES[0], layer_types=2 * ["full_attention"]).double()
    tokens = random_tokens(1, 11)
    together = SEQ_IDX[0] == SEQ_IDX[0][:, None]
    mask = together.tril()[None, None]
    packed = model(
        tokens, position_ids=POSITIONS, attention_mask=mask, cu_seq_lens_q=CU_SEQLENS
    ).logits
    assert_close(packed, model(tokens, position_ids=POSITIONS).logits)


@pytest.mark.parametrize("shape", [(2, 0), (0, 5)])
def test_nothing_to_read_is_refused(shape):
    with pytest.raises(
        ValueError, match="input_ids must have at least one row and one token, got shape"
    ):
        make_model(CASES[0])(random_tokens(*shape))


def of_read(model, given):
    """A forward pass on two texts of five tokens with other arguments."""
    return model(**{"input_ids": random_tokens(2, 5), **given})


def of_generate(model, given):
    """The same in `generate`."""
    tokens = given.pop("input_ids", random_tokens(2, 5))
    return model.generate(tokens, max_new_tokens=2, **given)


ONES = torch.ones(3, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("given", "message", "calls"),
    [
        ({"attention_mask": ONES}, r"^attention_mask must .* got shape \(3, 5\)", "both"),
        ({"attention_mask": ONES.numpy()}, "^attention_mask must .* got ndarray", "both"),
        ({"attention_mask": ONES.tolist()}, "^attention_mask must .* got list", "both"),
        ({"input_ids": ONES[:, :0]}, r"^inputs?(_ids)? must have .* got shape \(3, 0\)", "both"),
        ({"input_ids": ONES[0]}, r"^input_ids must be .* got shape \(5,\)", "read"),
        ({"input_ids": ONES.tolist()}, "^input_ids must be .* got list", "read"),
        ({"position_ids": ONES}, r"^position_ids must be .* got shape \(3, 5\)", "read"),
        ({"chunk_length": 0}, "^chunk_length must be a number .* got 0", "read"),
        ({"chunk_length": -1}, "^chunk_length must be a number .* got -1", "read"),
        ({"chunk_length": "4"}, "^chunk_length must be a number .* got '4'", "read"),
    ],
)
def test_what_no_text_can_have_is_refused_by_its_name(given, message, calls):
    model = make_model(CASES[0])
    for call in (of_read, of_generate) if calls == "both" else (of_read,):
        with pytest.raises(ValueError, match=message):
            call(model, dict(given))


def test_one_row_of_a_mask_or_of_positions_is_for_all_texts():
    model = make_model(CASES[0]).double()
    expected = of_read(model, {}).logits
    assert_close(of_read(model, {"attention_mask": ONES[:1]}).logits, expected)
    assert_close(of_read(model, {"position_ids": torch.arange(5)[None]}).logits, expected)


@pytest.mark.parametrize(("tokens", "is_long"), [((8, 8), False), ((17,), True), ((9, 8), True)])
def test_a_text_beyond_the_positions_is_read_with_a_warning(tokens, is_long):
    model = make_model(CASE["attention-kept"], max_position_embeddings=16).eval()
    cache = model.model.new_cache()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for piece in random_tokens(1, sum(tokens)).split(tokens, 1):
            model(piece, past_key_values=cache)
    said = [x for x in seen if "max_position_embeddings=16" in str(x.message)]
    assert len(said) == is_long


def test_a_memory_without_positions_has_no_longest_text():
    model = make_model(CASE["gla"], max_position_embeddings=16)
    model(random_tokens(1, 17))


@every_family
def test_a_config_of_another_class_is_refused(case):
    with pytest.raises(ValueError, match=r"config must be a .*Config for .*, got a LlamaConfig"):
        type(make_model(case))(LlamaConfig())


@every_family
@pytest.mark.parametrize("length", [1, 4, 6, 8])
def test_a_mask_of_another_length_is_refused(case, length):
    model = make_model(case)
    mask = torch.ones(1, length, dtype=torch.long)
    model(
        random_tokens(1, 3),
        attention_mask=mask[:, :3].new_ones(1, 3),
        past_key_values=(cache := model.model.new_cache()),
    )
    with pytest.raises(
        ValueError, match=rf"attention_mask must be \[B, past \+ T\], .* got shape \(1, {length}\)"
    ):
        model(random_tokens(1, 2), attention_mask=mask, past_key_values=cache)
    with pytest.raises(
        ValueError, match=rf"attention_mask must be \[B, past \+ T\], .* got shape \(1, {length}\)"
    ):
        model(random_tokens(1, 7), attention_mask=mask, chunk_length=2)


@pytest.mark.parametrize("argument", ["cu_seq_lens_q", "attention_mask", "cache"])
def test_contradictory_packing_is_refused(argument):
    model = make_model(CASES[0])
    tokens = random_tokens(1, 11)
    kwargs = {
        "cu_seq_lens_q": {"cu_seq_lens_q": CU_SEQLENS[:-1]},
        "attention_mask": {
            "cu_seq_lens_q": CU_SEQLENS,
            "attention_mask": (torch.arange(11) > 0)[None],
        },
        "cache": {"cu_seq_lens_q": CU_SEQLENS, "cache": DynamicCache(config=model.config)},
    }[argument]
    with pytest.raises(ValueError, match=argument):
        model(tokens, **kwargs)


def test_packed_sequences_end_with_their_row():
    with pytest.raises(
        ValueError, match=r"cu_seq_lens_q must have the beginning of each row, such as 6, got"
    ):
        make_model(CASES[0])(random_tokens(2, 6), cu_seq_lens_q=torch.tensor([0, 4, 12]))


WIDE = {
    "A_log",
    "dt_bias",
    "D",
    "projection",
    "initial_weights",
    "span",
}  # in a model of low precision too


@every_case
def test_save_and_load_change_nothing(case, tmp_path):
    """In low precision, in which some parameters stay wide."""
    dtype = torch.bfloat16
    make_model(case).save_pretrained(tmp_path / "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=dtype)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, output_loading_info=True
    )
    assert type(loaded) is type(model)
    assert not any(
        info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    )
    theirs = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=0)
        assert tensor.dtype == (torch.float32 if WIDE & {*name.split(".")} else dtype), name
    tokens = random_tokens(1, 9)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)


@every_case
def test_a_trained_tensor_survives_loading_beside_a_missing_one(case, tmp_path):
    model = make_model(case)
    torch.nn.init.constant_(model.model.layers[0].mixer.q_proj.weight, 0.123)
    model.model.save_pretrained(tmp_path)  # without the head, which from_pretrained must initialise
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, tensor in model.model.state_dict().items():
        torch.testing.assert_close(loaded.model.state_dict()[name], tensor, rtol=0, atol=0)


@every_recurrent_family
@torch.no_grad()
def test_states_stay_float32_in_a_bf16_model(case):
    model = make_model(case).to(torch.bfloat16)
    cache = DynamicCache(config=model.config)
    assert model(random_tokens(1, 5), past_key_values=cache).logits.dtype == torch.bfloat16
    spec = cache.layers[0].spec
    states = cache.layers[0].states
    dtypes = {state.dtype for name, state in states.items() if spec[name].dtype is not None}
    assert {dtype for dtype in dtypes if dtype.is_floating_point} == {torch.float32}


@every_family
@pytest.mark.parametrize(
    "auto_class", [AutoModelForSequenceClassification, AutoModelForTokenClassification]
)
def test_classification_heads_train_and_ignore_padding(case, auto_class, tmp_path):
    torch.manual_seed(0)
    model = auto_class.from_config(make_config(case, num_labels=3)).eval().double()
    tokens = random_tokens(2, 7)
    length = 4
    tokens[1, length:] = model.config.pad_token_id
    mask = (tokens != model.config.pad_token_id).long()
    outputs = model(
        tokens, attention_mask=mask, labels=torch.ones(outputs_shape(auto_class), dtype=torch.long)
    )
    outputs.loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if p.requires_grad)
    alone = model(tokens[1:, :length]).logits[0]
    in_batch = outputs.logits[1] if alone.ndim == 1 else outputs.logits[1, :length]
    assert_close(in_batch, alone)


def outputs_shape(auto_class):
    return (2,) if auto_class is AutoModelForSequenceClassification else (2, 7)


@every_case
def test_every_parameter_gets_a_gradient(case):
    model = make_model(case).train()
    tokens = random_tokens(2, 12)  # what leaves the view before the last token is compressed
    model(tokens, labels=tokens).loss.backward()
    without = [
        name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0
    ]
    assert not without


@pytest.mark.parametrize(
    "case", [CASE["attention-kept"], CASE["attention-sinks"]], ids=lambda case: case.name
)
def test_lora_learns_in_every_projection_and_merges(case):
    model = make_model(case).double()
    tokens = random_tokens(2, 12)
    linears = (
        sum(isinstance(module, nn.Linear) for module in model.modules()) - 1
    )  # all but the head
    updates = LoraConfig(
        r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    adapted = get_peft_model(model, updates)
    output = adapted(tokens, labels=tokens)
    output.loss.backward()
    learned = [p.grad for p in adapted.parameters() if p.requires_grad]
    assert len(learned) == 2 * linears
    assert all(gradient.abs().sum() > 0 for gradient in learned)
    with torch.no_grad():
        assert_close(adapted.merge_and_unload()(tokens).logits, output.logits)


@every_case
def test_gradient_checkpointing_changes_no_gradient(case):
    gradients = []
    for checkpointing in (False, True):
        model = make_model(case).double().train()
        tokens = random_tokens(2, 9)
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(tokens, labels=tokens).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient)


@every_case
def test_a_row_in_chunks_has_the_gradients_of_the_whole(case):
    """And all bits, since gradients flow through the states of chunks."""
    model = make_model(case).model.double().train()
    tokens = random_tokens(2, 9)
    if not passes_gradients(case):
        with pytest.raises(ValueError, match="chunk_length must be None with"):
            model(tokens, chunk_length=4)
        return
    found = []
    exact = make_model(case, cache_bits=None).model.double().train()
    for reader, chunk_length in ((exact, None), (model, 4)):
        output = reader(tokens, chunk_length=chunk_length)
        (output.last_hidden_state.sin().sum() + (output.own_loss or 0)).backward()
        found.append([output.last_hidden_state, *(p.grad for p in reader.parameters())])
    assert_close(found[1], found[0])


def test_what_cannot_be_read_in_chunks_is_refused():
    model = make_model(CASE["linear-full"])
    tokens = random_tokens(2, 9)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    for given, expected in (
        ({"position_ids": positions}, "packed sequences"),
        ({"attention_mask": {"full_attention": None}}, "a mask for each layer type"),
        ({"past_key_values": DynamicCache(config=model.config)}, "a cache"),
    ):
        with pytest.raises(ValueError, match=f"chunk_length must be None with {expected}"):
            model(tokens, chunk_length=4, **given)
    model.train().activation_checkpointing_enable()
    with pytest.raises(ValueError, match="chunk_length must be None with activation_checkpointing"):
        model(tokens, chunk_length=4)


def test_what_cannot_be_split_over_processes_is_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 4)
    divisible = make_model(CASE["linear-full"])
    stops = make_model(CASE["transformer-segments"])
    for model, length, given, expected in (
        (
            divisible,
            9,
            {"past_key_values": DynamicCache(config=divisible.config)},
            "must not be used with a cache",
        ),
        (
            divisible,
            9,
            {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])},
            "with packed sequences",
        ),
        (divisible, 3, {}, "a token for each of the 4 processes, got 3"),
        (stops, 9, {}, "must not be used with CompressiveMixer"),
    ):
        with hf_memory.context_parallel(model), pytest.raises(ValueError, match=expected):
            model(random_tokens(2, length), **given)


@every_kind_of_layer
@torch.no_grad()
def test_compiled_forward_is_one_graph(case):
    model = make_model(case, **one_layer(case)).double()
    tokens = random_tokens(2, 5)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(tokens, use_cache=False).logits, model(tokens).logits)


@pytest.mark.complete  # it compiles headers of C++ for twenty seconds, and depends on torch's version alone
@torch.no_grad()
def test_compiled_forward_runs_through_inductor():
    model = make_model(CASES[0], num_hidden_layers=1).double()
    tokens = random_tokens(2, 9)
    compiled = torch.compile(model)
    assert_close(compiled(tokens, use_cache=False).logits, model(tokens).logits)


@every_case
@torch.no_grad()
def test_hidden_states_and_attentions_are_returned(case):
    model = make_model(case, attn_implementation="eager")
    tokens = random_tokens(1, 5)
    outputs = model(tokens, output_hidden_states=True, output_attentions=True)
    assert [x.shape for x in outputs.hidden_states] == [(1, 5, 32)] * (
        model.config.num_hidden_layers + 1
    )
    attentions = sum(isinstance(layer.mixer, AttentionMixer) for layer in model.model.layers)
    shown = getattr(model.config, "read_kernel", "softmax") == "softmax"
    assert len(outputs.attentions) == attentions * shown


@every_family
def test_the_first_argument_is_the_main_input(case):
    for model_class in (family_of(case).model, family_of(case).causal_lm):
        assert (
            list(inspect.signature(model_class.forward).parameters)[1]
            == model_class.main_input_name
        )


@every_case
@torch.no_grad()
def test_backends_agree(case):
    """Kernels in float32, which have no float64."""
    model = make_model(case, **one_layer(case))
    tokens = random_tokens(1, 10)
    rounded = model(tokens).logits
    model.config.mixer_backend = "triton"
    with (
        nullcontext()
        if case.has_kernels
        else pytest.raises(ValueError, match="has no kernel for this call")
    ):
        from_kernels = model(tokens).logits
    model.double().config.mixer_backend = "chunk"
    expected = model(tokens).logits
    model.config.mixer_backend = "reference"
    assert_close(model(tokens).logits, expected)
    if case.has_kernels:
        assert_close(from_kernels, expected, rounded)


BAD_CONFIGS = [
    ({"layer_types": ["memory"]}, "layer_types"),
    ({"layer_types": ["memory", "convolution"]}, "layer_types"),
    ({"layer_types": ["memory", "sliding_attention"]}, "sliding_window"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None}, "num_attention_heads"),
    ({"head_dim": 7}, "head_dim"),
    ({"mixer_backend": "cuda"}, "mixer_backend"),
    ({"mlp_types": ["memory"]}, "mlp_types"),
    ({"mlp_types": ["mlp", "adapter"]}, "mlp_types"),
    ({"product_key_dim": 7}, "product_key_dim"),
    ({"product_key_top_k": 1025}, "product_key_top_k"),
    ({"hidden_size": "wide"}, "hidden_size"),
    ({"hidden_act": "none"}, "hidden_act"),
    ({"sliding_window": 1}, "sliding_window"),
    ({"attention_dropout": 2.0}, "attention_dropout"),
    ({"rms_norm_eps": 2.0}, "rms_norm_eps"),
    ({"pad_token_id": 64}, "pad_token_id"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"rope_parameters": {"rope_type": "none"}}, "rope_type"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "rope_theta"),
]


@every_family
@torch.no_grad()
def test_a_model_on_the_meta_device_gives_shapes(case):
    tokens = random_tokens(2, 5).to("meta")
    assert make_model(case).to("meta")(tokens).logits.shape[:2] == (2, 5)


@every_family
@pytest.mark.parametrize(("options", "name"), BAD_CONFIGS, ids=[name for _, name in BAD_CONFIGS])
def test_bad_config_is_refused_by_name(case, options, name):
    with pytest.raises(Exception, match=name) as error:  # the strict dataclass wraps our ValueError
        make_config(case, **options)
    assert (
        "expected" in str(error.value)
        or "must" in str(error.value)
        or "multiple" in str(error.value)
    )


@every_family
def test_each_number_of_a_config_has_a_range(case):
    kinds = {name: str(x.type) for name, x in family_of(case).config.__dataclass_fields__.items()}
    names = [
        name
        for name in make_config(case).numbers
        if re.match(r"(<class ')?(int|float)", kinds[name])
    ]
    assert len(names) > 20
    for name, number in itertools.product(
        names, (-1, 2**63, -1.0, 1e31, float("nan"), float("inf"))
    ):
        with pytest.raises(Exception, match=name):
            make_config(case, **{name: number})


def test_a_cache_of_another_config_is_refused():
    with pytest.raises(ValueError, match="cache must hold a memory at layer 0"):
        make_model(CASES[0])(random_tokens(1, 3), past_key_values=DynamicCache())


def test_both_or_neither_kind_of_input_is_refused():
    model = make_model(CASES[0])
    tokens = random_tokens(1, 3)
    with pytest.raises(ValueError, match="input_ids"):
        model(tokens, inputs_embeds=model.get_input_embeddings()(tokens))
    with pytest.raises(ValueError, match="input_ids"):
        model()


def test_import_shadows_no_model_type_and_takes_no_kernels():
    """In a process without Triton, which kernels need."""
    script = """
import json, sys
class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoTriton())
import torch, hf_memory
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
config = hf_memory.LinearTransformerConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                           num_attention_heads=1)
finite = hf_memory.LinearTransformerForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits.isfinite().all().item()
ops = [name for name in sys.modules if name.startswith("hf_memory.ops.")]
print(json.dumps([finite, ops, sorted(CONFIG_MAPPING._extra_content), list(CONFIG_MAPPING_NAMES)]))
"""
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    finite, ops, added, theirs = json.loads(printed)
    assert finite
    assert "hf_memory.ops.delta_rule.chunk" in ops
    assert not [name for name in ops if "kernels" in name or "triton" in name]
    own = {family.config.model_type for family in hf_memory.FAMILIES}
    assert {*added} == own | {*IMPORTED}  # the latter only say which function imports such a model
    assert not {*added} & {*theirs}


@every_case
@torch.no_grad()
def test_weights_may_be_elsewhere_until_their_module_runs(case):
    """As where a device_map spills to CPU or disk: whoever owns a parameter uses it in its own forward."""
    model = make_model(case).double()
    tokens = random_tokens(1, 9)
    expected = model(tokens).logits
    cpu_offload(model, torch.device("cpu"), offload_buffers=True)
    assert all(p.is_meta for p in model.parameters())
    cache = DynamicCache(config=model.config)
    logits = [model(part, past_key_values=cache).logits for part in tokens.split((6, 3), dim=1)]
    assert_close(torch.cat(logits, 1), expected)


@every_family
@torch.no_grad()
def test_logits_are_made_where_they_are_asked_for(case):
    model = make_model(case).double()
    tokens = random_tokens(2, 5)
    full = model(tokens).logits
    places = torch.tensor([[0], [3]])
    mask = torch.tensor([[True, False, False, False, True], [False] * 5])
    asked = {
        0: full,
        2: full[:, 3:],
        places[:, 0]: full[:, [0, 3]],
        places: full[[0, 1], [0, 3]][:, None],
        mask: full[mask],
    }
    for positions, expected in asked.items():
        assert_close(model(tokens, logits_to_keep=positions).logits, expected)


@every_family
def test_auto_classes_find_the_family(case):
    family = family_of(case)
    config = make_config(case)
    assert type(AutoModelForCausalLM.from_config(config)) is family.causal_lm
    assert type(AutoModelForTokenClassification.from_config(config)) is family.token_classifier
    assert family.causal_lm.can_generate()


@every_case
def test_plans_name_what_a_model_has(case):
    model = make_model(case)
    names = {*model.state_dict(), *(name for name, _ in model.named_modules())}
    assert set(model.tp_plan) <= {re.sub(r"\.\d+\.", ".*.", name) for name in names}
    assert len(model.tp_plan) > 8
    assert model._keep_in_fp32_modules_strict == WIDE & {
        part for name in names for part in name.split(".")
    }


LEVELS = [
    case
    for case in CASES
    if any(
        getattr(make_config(case).mixer_class(i), "has_levels", False)
        for i in range(len(make_config(case).layer_types))
    )
]


@pytest.mark.parametrize("case", LEVELS, ids=[case.name for case in LEVELS])
@torch.no_grad()
def test_a_trained_model_becomes_log_linear_without_change(case, tmp_path):
    """With every gate: blocks whose weights have not learned weigh one; with others the model is another."""
    model = make_model(case, levels="one").double()
    tokens = random_tokens(2, 11)
    expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, levels="log", output_loading_info=True
    )
    assert {name.split(".level_weights.")[1] for name in info["missing_keys"]} == {
        "proj.weight",
        "proj.bias",
    }
    assert_close(loaded(tokens).logits, expected)
    learned = make_model(case, levels="log").double()
    cache = DynamicCache(config=loaded.config)
    full = learned(tokens).logits
    assert (full - expected).abs().max() > 0.1 * expected.abs().max()
    parts = [learned(part, past_key_values=cache).logits for part in tokens.split((3, 1, 7), dim=1)]
    assert_close(torch.cat(parts, 1), full)


@pytest.mark.parametrize("options", [WINDOW, {"gate": "mamba"}], ids=str)
def test_levels_are_refused_where_a_memory_has_none(options):
    with pytest.raises(Exception, match="levels must be 'one'"):
        make_config(CASE["gla"], levels="log", **options)


def test_options_given_to_from_pretrained_are_checked(tmp_path):
    (case,) = (case for case in CASES if case.name == "comba")
    make_model(case).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="levels must be 'one'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, levels="log")


@pytest.mark.parametrize("boundaries", [None, [0, 4, 9]])
def test_boundaries_of_keys_that_are_not_those_of_queries_are_refused(boundaries):
    of_queries = None if boundaries is None else torch.tensor(boundaries)
    with pytest.raises(ValueError, match="cu_seq_lens_k must be the same as cu_seq_lens_q="):
        make_model(CASE["linear-full"])(
            random_tokens(1, 9), cu_seq_lens_q=of_queries, cu_seq_lens_k=torch.tensor([0, 5, 9])
        )


@pytest.mark.parametrize("token", [2, -1, 0.5])
def test_anything_but_zero_in_a_mask_is_a_token(token):
    model = make_model(CASE["attention-kept"])
    tokens = random_tokens(1, 8)
    mask = torch.full((1, 8), token)
    mask[:, :2] = 0
    found = model(tokens, attention_mask=mask).logits[:, 2:]
    assert torch.equal(found, model(tokens[:, 2:]).logits)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_chunks_give_no_outputs_of_layers(name):
    model = make_model(CASE["gla"])
    with pytest.raises(ValueError, match=f"chunk_length must be None with {name}"):
        model(random_tokens(1, 8), chunk_length=4, **{name: True})


@pytest.mark.parametrize("name", ["linear-elu", "gla"])
def test_torch_func_gives_the_gradients_of_a_backward_pass(name):
    model = make_model(CASE[name]).double()
    tokens = random_tokens(1, 8)
    weights = dict(model.named_parameters())

    def loss(given):
        return torch.func.functional_call(model, given, (tokens,), {"labels": tokens}).loss

    found = torch.func.grad(loss)(weights)
    loss(weights).backward()
    for key, weight in weights.items():
        assert_close(found[key], weight.grad)


@pytest.mark.parametrize("name", ["titans-mac", "titans-lmm-rope"])
def test_a_neural_memory_takes_weights_of_a_call(name):
    model = make_model(CASE[name])
    tokens = random_tokens(1, 8)
    halves = {key: x * 0.5 for key, x in model.named_parameters()}
    found = torch.func.functional_call(model, halves, (tokens,)).logits
    model.load_state_dict(halves, strict=False)
    assert torch.equal(found, model(tokens).logits)
