"""An export is the same function as its model, or it is refused: every line of the table of targets."""

import json
from typing import NamedTuple

import gguf
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

import hf_memory
from cases import SIZES, Case, make_config, random_tokens, word_tokenizer
from comparing import assert_close, in_float64
from hf_memory.cache import MemoryLayer
from hf_memory.conversion import SERVABLE, carry_over, import_model, make_student
from hf_memory.export import TARGETS, NotExportable, export_model, exporting, find_target

HYBRID = {"num_hidden_layers": 4, "layer_types": ["memory", "memory", "memory", "full_attention"]}
ALTERNATING = {"num_hidden_layers": 4, "layer_types": ["full_attention", "memory"] * 2}
QWEN3 = {**HYBRID, "use_qk_norm": True, "memory_qk_norm": False}
GDN = {
    "gate": "scalar",
    "output_gate": "silu",
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
KDA = {
    "gate": "vector",
    "output_gate": "sigmoid",
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
STUDENT = {
    "gate": "mamba2",
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"gate": "mamba2", "linear_key_head_dim": 16, "linear_value_head_dim": 16}
WINDOWS = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_heads", "full_attention", "sliding_heads"],
}
WINDOWS |= {"sliding_window": 4}
SINKS = {"attention_sinks": True}
DELTANET = "hf_memory_deltanet"
GATED = "hf_memory_gated"
TRANSFORMER = "hf_memory_transformer"


class Line(NamedTuple):
    """One line of the table."""

    target: str
    case: Case


EXACT = (
    Line("qwen3_5", Case("qwen3", DELTANET, {**GDN, **QWEN3})),
    Line(
        "qwen3_5",
        Case("tied", DELTANET, {**GDN, **QWEN3, **ALTERNATING, "tie_word_embeddings": True}),
    ),
    Line(
        "qwen3_5",
        Case(
            "no-decay-no-conv",
            DELTANET,
            {**GDN, **QWEN3, "gate": "none", "linear_conv_kernel_dim": 0},
        ),
    ),
    Line("qwen3_5", Case("pure", DELTANET, {**GDN, "output_gate_low_rank_dim": 3})),
    Line("qwen3_5", Case("llama", DELTANET, {**GDN, **HYBRID})),
    Line(
        "qwen3_5",
        Case(
            "partial-rope-and-scale",
            DELTANET,
            {
                **GDN,
                **HYBRID,
                "query_pre_attn_scalar": 20,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 100.0,
                    "partial_rotary_factor": 0.5,
                },
            },
        ),
    ),
    Line(
        "qwen3_5",
        Case(
            "more-and-wider-values",
            DELTANET,
            {
                **GDN,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_value_head_dim": 16,
            },
        ),
    ),
    Line("granite", Case("llama", GATED, {**STUDENT, **HYBRID})),
    Line(
        "granite",
        Case(
            "qwen2",
            GATED,
            {**STUDENT, **HYBRID, "attention_bias": True, "embedding_multiplier": 2.0},
        ),
    ),
    Line("granite", Case("smollm3", GATED, {**STUDENT, **HYBRID, "no_rope_layers": [1, 1, 1, 0]})),
    Line("granite", Case("scale", GATED, {**STUDENT, **HYBRID, "query_pre_attn_scalar": 20})),
    Line("granite", Case("new", GATED, MAMBA)),
    Line(
        "granite",
        Case(
            "padded",
            GATED,
            {
                **STUDENT,
                "num_attention_heads": 2,
            },
        ),
    ),
    Line("mamba2", Case("new", GATED, {**MAMBA, "intermediate_size": 0})),
    Line("kimi", Case("kda", DELTANET, {**KDA, "output_gate_low_rank_dim": 8})),
    Line("kimi", Case("gdn", DELTANET, {**KDA, "gate": "scalar", "output_gate_low_rank_dim": 4})),
    Line(
        "kimi",
        Case("tied", DELTANET, {**KDA, "output_gate_low_rank_dim": 4, "tie_word_embeddings": True}),
    ),
    Line("granite_swa", Case("sinks", TRANSFORMER, {**SINKS, **WINDOWS})),
    Line(
        "granite_swa",
        Case("qwen2", TRANSFORMER, {**SINKS, **WINDOWS, "attention_bias": True, "head_dim": 12}),
    ),
    Line(
        "granite_swa",
        Case(
            "smollm3",
            TRANSFORMER,
            {**SINKS, **WINDOWS, "no_rope_layers": [1, 0, 0], "tie_word_embeddings": True},
        ),
    ),
    Line(
        "granite_swa",
        Case("windows", TRANSFORMER, {**WINDOWS, "mlp_bias": True, "embedding_multiplier": 2.0}),
    ),
    Line(
        "granite_swa",
        Case(
            "multipliers",
            TRANSFORMER,
            {
                **SINKS,
                **WINDOWS,
                "residual_multiplier": 0.5,
                "query_pre_attn_scalar": 20,
                "hidden_act": "gelu",
            },
        ),
    ),
    Line(
        "granite_swa",
        Case(
            "none",
            TRANSFORMER,
            {**WINDOWS, "full_attention_heads": [[], [], []], "num_kept_tokens": [0, 0, 0]},
        ),
    ),
)
every_line = pytest.mark.parametrize(
    "line", EXACT, ids=[f"{line.target}-{line.case.name}" for line in EXACT]
)
PURE = r"layer_types all 'memory' .*got attention in \[3\]"
REFUSED = (
    (
        DELTANET,
        {**GDN, **HYBRID, "use_qk_norm": True},
        "qwen3_5 needs memory_qk_norm=False .*got q/k norm",
    ),
    (
        DELTANET,
        {**GDN, **HYBRID, "output_gate": "sigmoid"},
        "qwen3_5 needs output_gate='silu' .*got 'sigmoid'",
    ),
    (
        DELTANET,
        {**GDN, **HYBRID, "memory_rope": True},
        "qwen3_5 needs memory_rope=False .*got True",
    ),
    (
        DELTANET,
        {**GDN, **HYBRID, "allow_negative_eigenvalues": True},
        "qwen3_5 needs allow_negative_eigenvalues=False",
    ),
    (
        DELTANET,
        {**GDN, **HYBRID, "output_norm_eps": 1e-5},
        "qwen3_5 needs output_norm_eps=1e-06, got 1e-05",
    ),
    (
        DELTANET,
        {**GDN, **HYBRID, "attention_bias": True},
        "qwen3_5 needs attention_bias=False .*got True",
    ),
    (
        DELTANET,
        {**GDN, **HYBRID, "no_rope_layers": [1, 1, 1, 0]},
        "qwen3_5 needs no_rope_layers=1 in all layers",
    ),
    (
        DELTANET,
        {**GDN, **QWEN3, "query_pre_attn_scalar": 20},
        "qwen3_5 needs query_pre_attn_scalar=head_dim=8, got 20",
    ),
    (DELTANET, {**GDN, "norm_placement": "post"}, "needs norm_placement='pre' .*got 'post'"),
    (DELTANET, {**GDN, "hidden_act": "gelu"}, "needs hidden_act='silu'"),
    (DELTANET, {**GDN, "mlp_bias": True}, "needs mlp_bias=False"),
    (TRANSFORMER, {**WINDOWS, "cache_bits": 8}, "cache_bits=None .*options of their own.*got 8"),
    (DELTANET, {**GDN, "intermediate_size": 0}, "needs intermediate_size above 0"),
    (DELTANET, {**GDN, "final_logit_softcapping": 3.0}, "needs final_logit_softcapping=None"),
    (DELTANET, {**GDN, "embedding_multiplier": 2.0}, "needs embedding_multiplier=1.0"),
    (
        DELTANET,
        {**GDN, "layer_types": ["memory", "sliding_attention"], "sliding_window": 4},
        "layer_types with only 'memory' and 'full_attention', got 'sliding_attention'",
    ),
    (DELTANET, {**KDA, **HYBRID}, f"kimi needs {PURE}"),
    (
        DELTANET,
        {**KDA, "linear_value_head_dim": 16},
        "kimi needs linear_value_head_dim=linear_key_head_dim=8, got 16",
    ),
    (
        GATED,
        {**STUDENT, **HYBRID, "use_qk_norm": True, "memory_qk_norm": False},
        "granite needs use_qk_norm=False",
    ),
    (GATED, {**STUDENT, **HYBRID, "memory_rope": True}, "granite needs memory_rope=False"),
    (
        GATED,
        {**STUDENT, **HYBRID, "linear_conv_kernel_dim": 0},
        "granite needs linear_conv_kernel_dim above 0, got 0",
    ),
    (
        GATED,
        {**STUDENT, **HYBRID, "head_dim": 16},
        "granite needs head_dim=hidden_size / num_attention_heads = 8, got 16",
    ),
    (
        GATED,
        {**STUDENT, **ALTERNATING, "no_rope_layers": [1, 1, 0, 1]},
        "granite needs no_rope_layers the same",
    ),
    (GATED, {**STUDENT, **HYBRID, "intermediate_size": 0}, f"mamba2 needs {PURE}"),
    (
        TRANSFORMER,
        {**WINDOWS, "num_sink_tokens": 2},
        "granite_swa needs num_sink_tokens=0 .*may have sinks.*got 2",
    ),
    (
        TRANSFORMER,
        {**WINDOWS, "full_attention_heads": [[0], [], []]},
        "needs full_attention_heads=None .*see as far",
    ),
    (
        TRANSFORMER,
        {**WINDOWS, **SINKS, "use_qk_norm": True},
        "needs use_qk_norm=False .*no q/k norm there",
    ),
    (TRANSFORMER, {**WINDOWS, "norm_placement": "post"}, "granite_swa needs norm_placement='pre'"),
    (
        TRANSFORMER,
        {**WINDOWS, "attn_logit_softcapping": 2.0},
        "granite_swa needs attn_logit_softcapping=None",
    ),
    (
        TRANSFORMER,
        {
            **WINDOWS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e2,
                "partial_rotary_factor": 0.5,
            },
        },
        "granite_swa needs rotation of all 8 channels of a head, got 4",
    ),
)
UNSERVED = (
    ("hf_memory_linear", {}),
    ("hf_memory_deltaformer", {}),
    ("hf_memory_titans", {"variant": "lmm"}),
    *((GATED, {"gate": gate}) for gate in ("vector", "scalar", "retention")),
)


def make_model(case, **options):
    """A model with every weight random, so that none is at a value which would hide that it was not carried over."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(case, eos_token_id=2, **options)).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@every_line
def test_an_export_is_its_model(line, tmp_path):
    model = make_model(line.case)
    export = export_model(model, tmp_path / "export", line.target)
    theirs = AutoModelForCausalLM.from_pretrained(export.folder)
    assert not type(theirs).__module__.startswith("hf_memory")
    tokens = random_tokens(2, 40, seed=1)
    with torch.no_grad():
        expected = in_float64(model)(tokens).logits
        assert_close(theirs(tokens).logits, expected, model(tokens).logits)
    assert expected.std() > 0.5
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert theirs.generate(tokens, **greedy).tolist() == model.generate(tokens, **greedy).tolist()


@every_line
def test_auto_takes_the_first_target_that_is_exact(line):
    names = [target.name for target in TARGETS]
    found = find_target(make_config(line.case)).name
    assert names.index(found) <= names.index(line.target)
    assert found == line.target


@pytest.mark.parametrize(("model_type", "options", "message"), REFUSED)
def test_what_is_not_exact_is_refused_with_the_field_to_change(model_type, options, message):
    with pytest.raises(NotExportable, match=message):
        find_target(make_config(Case("refused", model_type, options)))


@pytest.mark.parametrize(("model_type", "options"), UNSERVED)
def test_memories_that_no_engine_has_are_refused_with_what_runs_them(model_type, options):
    with pytest.raises(
        NotExportable,
        match=f"no engine has the memory of {model_type}.*vLLM if hf_memory is installed",
    ):
        find_target(make_config(Case("unserved", model_type, options)))


@pytest.mark.parametrize(
    ("target", "case", "message"),
    [
        ("gguf", Case("", DELTANET, GDN), "target must be one of auto, qwen3_5, .*got 'gguf'"),
        (
            "granite",
            Case("", DELTANET, GDN),
            "granite is for models of type hf_memory_gated, got hf_memory_deltanet",
        ),
        (
            "kimi",
            Case("", DELTANET, KDA),
            "kimi needs output_gate_low_rank_dim of at most linear_key_head_dim=8, got None",
        ),
    ],
)
def test_a_target_that_is_named_is_the_only_one_considered(target, case, message):
    with pytest.raises(ValueError, match=message):
        find_target(make_config(case), target)


def test_small_norms_survive_16_bits(tmp_path):
    model = make_model(Case("", DELTANET, {**GDN, **HYBRID}))
    for layer in model.model.layers:
        layer.input_layernorm.weight.data.uniform_(0.01, 0.3)
        layer.post_attention_layernorm.weight.data.uniform_(0.01, 0.3)
    model = model.to(torch.bfloat16)
    export = export_model(model, tmp_path / "export")
    assert AutoModelForCausalLM.from_pretrained(export.folder).dtype == torch.bfloat16
    assert export.error < 5e-4


def test_an_export_that_is_another_function_is_not_written(tmp_path, monkeypatch):
    target = find_target(make_config(EXACT[0].case))
    faulty = {**target.options(make_config(EXACT[0].case)), "rms_norm_eps": 1e-2}
    monkeypatch.setattr(type(target), "options", lambda self, config: faulty)
    with pytest.raises(ValueError, match="the exported model must have the model's logits"):
        export_model(make_model(EXACT[0].case), tmp_path / "export")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["export", "student.gguf"])
def test_of_two_exports_to_one_place_one_is_refused(place, tmp_path, monkeypatch):
    model = make_model(EXACT[0].case)
    refused = []
    compare = exporting.compare
    names = {"export": ("export", "b.gguf"), "student.gguf": ("other", "student.gguf")}[place]

    def meanwhile(*args):
        monkeypatch.setattr(exporting, "compare", compare)
        with pytest.raises(
            ValueError,
            match=rf"must not be in use, got .*{place}, to which process \d+ on .* writes",
        ) as error:
            export_model(make_model(EXACT[0].case), tmp_path / names[0], gguf=tmp_path / names[1])
        refused.append(error)
        return compare(*args)

    monkeypatch.setattr(exporting, "compare", meanwhile)
    export_model(model, tmp_path / "export", gguf=tmp_path / "student.gguf")
    assert len(refused) == 1
    assert sorted(x.name for x in tmp_path.iterdir()) == ["export", "student.gguf"]


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args):
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(exporting, "save", fail)
    with pytest.raises(
        OSError, match=r"export could not be written to .*MB free: .*No space left on device"
    ):
        export_model(make_model(EXACT[0].case), tmp_path / "export")
    assert not list(tmp_path.iterdir())


def test_an_export_to_mamba2_is_imported_as_it_was(tmp_path):
    model = make_model(next(line.case for line in EXACT if line.target == "mamba2"))
    folder = export_model(model, tmp_path / "export").folder
    again = import_model(
        AutoConfig.from_pretrained(folder), load_file(folder / "model.safetensors")
    )
    for name, x in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], x, rtol=0, atol=0)


def test_files_have_what_single_engines_want(tmp_path):
    def written(case, name, target="auto"):
        folder = export_model(make_model(case), tmp_path / name, target).folder
        return json.loads((folder / "config.json").read_text()), load_file(
            folder / "model.safetensors"
        )

    config, weights = written(Case("", DELTANET, {**GDN, **HYBRID}), "qwen3_5")
    assert {
        "full_attention_interval": 4,
        "mamba_ssm_dtype": "float32",
        "qkv_bias": True,
    }.items() <= config.items()
    assert not any(name.endswith("o_proj.bias") for name in weights)
    compile((tmp_path / "qwen3_5" / config["model_file"]).read_text(), "model of mlx-lm", "exec")
    config, _ = written(Case("", TRANSFORMER, {**SINKS, **WINDOWS}), "granite_swa")
    compile(
        (tmp_path / "granite_swa" / config["model_file"]).read_text(), "model of mlx-lm", "exec"
    )
    config, _ = written(Case("", DELTANET, {**GDN, **QWEN3, **ALTERNATING}), "alternating")
    assert "full_attention_interval" not in config
    config, weights = written(
        Case("", DELTANET, {**KDA, "output_gate_low_rank_dim": 8}), "kimi", "kimi"
    )
    assert config["linear_attn_config"]["full_attn_layers"] == [3]
    assert {"model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_conv1d.weight"} <= set(
        weights
    )
    unlimited = [0.0, float("inf")]
    config, _ = written(Case("", GATED, {**MAMBA, "intermediate_size": 0}), "mamba2")
    assert config["time_step_limit"] == unlimited
    config, _ = written(Case("", GATED, {**STUDENT, **HYBRID}), "granite")
    assert config["layer_types"] == ["mamba", "mamba", "mamba", "attention"]
    assert config["time_step_limit"] == unlimited  # mlx-lm's own default is (0.001, 100)


@pytest.mark.parametrize(
    ("teacher", "to"),
    [
        (Qwen3Config, "deltanet"),
        (LlamaConfig, "deltanet"),
        (LlamaConfig, "gated"),
        (LlamaConfig, "attention"),
    ],
)
def test_servable_students_are_exported(teacher, to, tmp_path):
    config = teacher(**{**SIZES, "num_hidden_layers": 4, "head_dim": 8})
    teacher = AutoModelForCausalLM.from_config(config)
    student = make_student(teacher, to, keep=[3], **SERVABLE[to])
    carried = carry_over(student, teacher)
    norms = [f"model.layers.{i}.self_attn.{x}_norm.weight" for i in range(3) for x in "kq"]
    assert sorted(carried.dropped) == (norms if config.model_type == "qwen3" else [])
    assert export_model(student, tmp_path / "export").engines["vLLM"] == ""


def test_tokenizer_and_generation_config_go_along(tmp_path):
    words = {"eos_token": "end", "unk_token": "end", "chat_template": "{{ messages }}"}
    tokenizer = word_tokenizer(["end", "a", "b", "c"], **words)
    model = make_model(Case("", DELTANET, {**GDN, **QWEN3}))
    model.generation_config.max_new_tokens = 7
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "student")
    folder = export_model(tmp_path / "student", tmp_path / "export").folder
    exported = AutoTokenizer.from_pretrained(folder)
    assert exported("a c b").input_ids == [1, 3, 2]
    assert exported.chat_template == "{{ messages }}"
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.max_new_tokens == 7


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="folder must not exist yet"):
        export_model(make_model(EXACT[0].case), tmp_path)
    there = tmp_path / "there.gguf"
    there.touch()
    for gguf_file in (there, tmp_path, tmp_path / "export", "/nope/x"):
        with pytest.raises(ValueError, match=f"gguf must be (a|a new) file.*got {gguf_file}"):
            export_model(make_model(EXACT[0].case), tmp_path / "export", gguf=gguf_file)
    other = GPT2LMHeadModel(
        GPT2Config(vocab_size=SIZES["vocab_size"], n_embd=8, n_layer=1, n_head=1)
    )
    with pytest.raises(
        ValueError, match="model must be a causal language model of hf_memory, got GPT2LMHeadModel"
    ):
        export_model(other, tmp_path / "export")
    assert hf_memory.export_model is export_model


def bytes_tokenizer(before):
    """BPE over bytes, cut by these steps before it merges."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = Tokenizer(
        models.BPE({x: i for i, x in enumerate(["end", *sorted(alphabet), "ab"])}, [("a", "b")])
    )
    words.pre_tokenizer = before
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="end", chat_template="{{ messages }}"
    )


def written_gguf(case, tmp_path, before, **options):
    """The fields and tensors of a student's file."""
    for saved in (make_model(case, vocab_size=320, **options), bytes_tokenizer(before)):
        saved.save_pretrained(tmp_path / "student")
    export_model(tmp_path / "student", tmp_path / "export", gguf=tmp_path / "student.gguf")
    file = gguf.GGUFReader(tmp_path / "student.gguf")
    fields = {name: field.contents() for name, field in file.fields.items()}
    return fields, {tensor.name: torch.tensor(tensor.data) for tensor in file.tensors}


def test_a_gguf_file_of_qwen3_5_has_its_value_heads_apart(tmp_path):
    case = Case(
        "", DELTANET, {**GDN, **QWEN3, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    )
    fields, tensors = written_gguf(case, tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False))
    weights = load_file(tmp_path / "export" / "model.safetensors")
    layer = {
        name.removeprefix("model.layers.0."): x
        for name, x in weights.items()
        if ".layers.0." in name
    }
    rate = -layer["linear_attn.A_log"].double().exp()[[0, 2, 1, 3]]
    assert_close(tensors["blk.0.ssm_a"], rate, rate.float())
    order = torch.arange(32).view(2, 2, 8).transpose(0, 1).flatten()
    assert torch.equal(
        tensors["blk.0.ssm_out.weight"], layer["linear_attn.out_proj.weight"][:, order]
    )
    assert torch.equal(
        tensors["blk.0.attn_qkv.weight"][32:], layer["linear_attn.in_proj_qkv.weight"][32:][order]
    )
    assert torch.equal(tensors["output_norm.weight"], weights["model.norm.weight"] + 1)
    assert len(tensors) == len(weights)
    assert fields["general.architecture"] == "qwen35"
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["qwen35.attention.recurrent_layers"] == [True, True, True, False]
    assert fields["tokenizer.ggml.merges"] == ["a b"]
    assert fields["tokenizer.ggml.tokens"][0] == "end"
    assert fields["tokenizer.ggml.tokens"][-1] == "[PAD319]"
    assert fields["tokenizer.ggml.token_type"][::319] == [
        gguf.TokenType.CONTROL,
        gguf.TokenType.UNUSED,
    ]
    assert fields["tokenizer.chat_template"] == "{{ messages }}"


def test_a_gguf_file_of_granite_is_padded_and_ropes(tmp_path):
    digits = pre_tokenizers.Digits(individual_digits=True)
    before = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    llama3["original_max_position_embeddings"] = 64
    case = Case("", GATED, {**STUDENT, **HYBRID, "rope_parameters": llama3})
    fields, tensors = written_gguf(case, tmp_path, before)
    weights = load_file(tmp_path / "export" / "model.safetensors")
    assert fields["granitehybrid.ssm.inner_size"] == 2 * SIZES["hidden_size"]
    assert fields["granitehybrid.rope.scaling.finetuned"] is True
    assert fields["granitehybrid.attention.head_count_kv"] == [0, 0, 0, 2]
    assert fields["tokenizer.ggml.pre"] == "smollm"
    assert tensors["rope_freqs.weight"].tolist()[::3] == [
        1.0,
        8.0,
    ]  # the slowest is 8 times as slow
    out = tensors["blk.0.ssm_out.weight"]
    assert torch.equal(out[:, :32], weights["model.layers.0.mamba.out_proj.weight"])
    assert not out[:, 32:].any()
    q = weights["model.layers.3.self_attn.q_proj.weight"]
    assert torch.equal(
        tensors["blk.3.attn_q.weight"][:8], q[[0, 4, 1, 5, 2, 6, 3, 7]]
    )  # halves of a head are neighbours


def test_a_gguf_file_of_granite_swa_has_sinks_and_patterns(tmp_path):
    case = Case("", TRANSFORMER, {**SINKS, **WINDOWS, "no_rope_layers": [1, 0, 1]})
    fields, tensors = written_gguf(case, tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False))
    weights = load_file(tmp_path / "export" / "model.safetensors")
    assert fields["general.architecture"] == "granite_swa"
    assert fields["granite_swa.attention.sliding_window"] == 4
    assert fields["granite_swa.attention.sliding_window_pattern"] == [True, False, True]
    assert fields["granite_swa.attention.rope_pattern"] == [True, False, True]
    assert torch.equal(
        tensors["blk.0.attn_sinks.weight"], weights["model.layers.0.self_attn.sinks"]
    )
    assert (tensors["blk.1.attn_sinks.weight"] <= -1e30).all()
    assert torch.equal(
        tensors["blk.2.attn_output.bias"], weights["model.layers.2.self_attn.o_proj.bias"]
    )
    k = weights["model.layers.2.self_attn.k_proj.bias"]
    assert torch.equal(
        tensors["blk.2.attn_k.bias"][:8], k[[0, 4, 1, 5, 2, 6, 3, 7]]
    )  # halves of a head are neighbours
    assert len(tensors) == len(weights)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            Case("", DELTANET, {**KDA, "output_gate_low_rank_dim": 8}),
            "hf_memory writes GGUF files of qwen3_5, granite and granite_swa only",
        ),
        (
            Case("", DELTANET, {**GDN, "linear_value_head_dim": 16}),
            "it needs keys and values of the same width",
        ),
        (
            Case("", GATED, {**STUDENT, **HYBRID, "attention_bias": True}),
            "its memory layers have no biases",
        ),
        (
            Case("", DELTANET, GDN),
            "tokenizer must be a BPE tokenizer that splits text like one of gpt-2, .*got BPE .*Whitesp",
        ),
    ],
)
def test_what_llama_cpp_does_not_have_is_refused_before_the_work(case, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        written_gguf(case, tmp_path, pre_tokenizers.Whitespace())
    assert [path.name for path in tmp_path.iterdir()] == ["student"]


def test_a_token_without_an_embedding_is_refused_before_the_work(tmp_path):
    case = Case("", DELTANET, {**GDN, **QWEN3})
    written_gguf(case, tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "student")
    tokenizer.add_tokens([f"new{i}" for i in range(64)])
    tokenizer.save_pretrained(tmp_path / "student")
    with pytest.raises(ValueError, match=r"vocab_size=320 .*got 'new63' .*resize_token_embeddings"):
        export_model(tmp_path / "student", tmp_path / "other", gguf=tmp_path / "other.gguf")
    assert not (tmp_path / "other").exists()


ALONE = {
    "qwen3_5": (DELTANET, GDN, ["memory", "full_attention"]),
    "granite": (GATED, STUDENT, ["memory", "full_attention"]),
    "mamba2": (GATED, {**MAMBA, "intermediate_size": 0}, ["memory"]),
    "kimi": (DELTANET, {**KDA, "output_gate_low_rank_dim": 4}, ["memory"]),
    "granite_swa": (TRANSFORMER, {}, ["full_attention", "sliding_attention", "sliding_heads"]),
}


@pytest.mark.parametrize("target", [target.name for target in TARGETS])
def test_a_model_with_layers_of_one_kind_alone_is_exported(target, tmp_path):
    model_type, options, kinds = ALONE[target]
    for kind in kinds:
        window = {"sliding_window": 4} if kind.startswith("sliding") else {}
        case = Case(kind, model_type, {**options, **window, "layer_types": [kind] * 2})
        assert export_model(make_model(case), tmp_path / kind, target).error < 1e-4


def with_dropout():
    options = {**WINDOWS, **SINKS, "attention_dropout": 0.1}
    return make_model(Case("dropout", TRANSFORMER, options)).train()


def test_a_model_in_training_is_compared_without_dropout(tmp_path):
    model = with_dropout()
    assert export_model(model, tmp_path / "served").error < 1e-4
    assert all(x.training for x in model.modules())


def test_an_export_is_refused_also_where_the_models_own_decoding_is_wrong(tmp_path, monkeypatch):
    """Which makes what the model's rounding could be as large as any fault."""
    read = MemoryLayer.read
    halved = lambda self, *args: {name: 0.5 * x for name, x in read(self, *args).items()}  # noqa: E731
    monkeypatch.setattr(MemoryLayer, "read", halved)
    rewrite = exporting.rewrite

    def scaled(model, target):
        theirs = rewrite(model, target)
        theirs.model.norm.weight.data *= 1.05
        return theirs

    monkeypatch.setattr(exporting, "rewrite", scaled)
    with pytest.raises(ValueError, match="logits up to 5e-03 of the largest, got a difference"):
        export_model(make_model(EXACT[0].case), tmp_path / "served")
    assert not [*tmp_path.iterdir()]
