"""Memories as files, and many readers of one memory."""

import copy
import json
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from cases import (
    CASE,
    CASES,
    SIZES,
    every_case,
    every_kind_of_cache,
    family_of,
    generate,
    go_on,
    make_config,
    make_model,
    random_tokens,
    read,
)
from comparing import assert_close
from hf_memory import load_memory, save_memory
from hf_memory.cache import held_bits
from hf_memory.cache_argument import cache_of
from hf_memory.serving import memory_file


@every_case
def test_a_saved_memory_is_what_it_was(case, tmp_path):
    model = make_model(case)
    tokens = random_tokens(2, 9)
    word = random_tokens(2, 3, seed=1)
    cache = read(model, tokens[:, :6])
    cache.activate_past_recording()
    go_on(model, cache, torch.cat([tokens[:, 6:], word], 1))
    cache.crop(-3)
    save_memory(cache, tmp_path / "memory.safetensors", model)
    loaded = load_memory(tmp_path / "memory.safetensors", model)
    assert loaded.get_seq_length() == 9
    assert torch.equal(go_on(model, loaded, word), go_on(model, cache, word))


@every_case
def test_a_memory_is_loaded_after_its_model_was_saved_and_loaded(case, tmp_path):
    model = make_model(case).double()
    tokens = random_tokens(1, 9)
    words = random_tokens(1, 3, seed=1)
    cache = read(model, tokens)
    save_memory(cache, tmp_path / "memory", model)
    model.save_pretrained(tmp_path / "model")
    load_memory(tmp_path / "memory", model)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    loaded = load_memory(tmp_path / "memory", again)
    assert_close(go_on(again, loaded, words), go_on(model, cache, words))


FORMS = {  # of configs that are written otherwise, or leave something out, once they were saved
    "bits in another order": (
        "attention-kept",
        {"cache_bits": {"window": 8, "full_attention_heads": 4}},
    ),
    "local angles": ("deltanet-as-in-gemma", {"local_rope_parameters": {"rope_theta": 10}}),
    "slots that do not rotate": ("linear-window", {"no_rope_layers": [1, 0]}),
    "slots of another kind": ("deltanet-window", {"no_rope_layers": [0, 0]}),
    "gated slots": ("gated-window", {"no_rope_layers": [1, 0]}),
    "kept tokens of one layer": (
        "transformer-universal",
        {
            "pattern": "full",
            "layer_types": ["sliding_heads"] * 2,
            "sliding_window": 4,
            "num_kept_tokens": [3, 2],
            "full_attention_heads": [[], [1]],
        },
    ),
    "a window of two tokens": ("linear-sliding", {"sliding_window": 2}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_memory_is_loaded_whatever_form_the_config_has(form, tmp_path):
    name, options = FORMS[form]
    test_a_saved_memory_is_what_it_was(
        CASE[name]._replace(options=CASE[name].options | options), tmp_path
    )
    test_a_memory_is_loaded_after_its_model_was_saved_and_loaded(
        CASE[name]._replace(options=CASE[name].options | options), tmp_path
    )


def without(*names):
    """A change of a file: its config lacks these fields, and has one that a later version dropped."""

    def forge(header, tensors):
        config = json.loads(header["config"])
        for name in names:
            del config[name]
        header["config"] = json.dumps(config | {"dropped_later": 3})

    return forge


@every_kind_of_cache
def test_a_memory_of_an_earlier_version_with_fewer_options_is_loaded(case, tmp_path):
    model = make_model(case)
    save_memory(read(model, random_tokens(1, 9)), tmp_path / "memory", model)
    usual = family_of(case).config(vocab_size=SIZES["vocab_size"]).to_dict()
    added = ["hidden_act", "attention_bias", "mlp_types"]
    added = [name for name in added if usual[name] == getattr(model.config, name)]
    assert added
    rewrite(tmp_path / "memory", without(*added))
    assert load_memory(tmp_path / "memory", model).get_seq_length() == 9


def test_a_memory_of_an_earlier_version_is_refused_where_an_option_is_not_as_usual(tmp_path):
    model = make_model(CASE["deltanet-as-in-gemma"])
    save_memory(read(model, random_tokens(1, 9)), tmp_path / "memory", model)
    rewrite(tmp_path / "memory", without("residual_multiplier"))
    with pytest.raises(ValueError, match="whose config has other residual_multiplier"):
        load_memory(tmp_path / "memory", model)


def test_a_memory_of_an_earlier_format_says_what_to_do(memory):
    model, path = memory
    rewrite(path, lambda header, tensors: header.update(format="hf_memory memory 2"))
    with pytest.raises(ValueError, match="read the text again"):
        load_memory(path, model)


@pytest.mark.parametrize("name", ["deltanet", "linear-full", "attention-kept"])
def test_states_of_a_model_in_float64_are_loaded_in_float64(name, tmp_path):
    model = make_model(CASE[name]).double()
    cache = read(model, random_tokens(1, 9))
    save_memory(cache, tmp_path / "memory", model)
    loaded = load_memory(tmp_path / "memory", model)
    words = random_tokens(1, 3, seed=1)
    assert torch.equal(go_on(model, loaded, words), go_on(model, cache, words))


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    model = make_model(CASE["linear-full"])
    cache = read(model, random_tokens(1, 9))
    cache.layers[1].keys[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"cache must have a state 1\.keys of finite numbers"):
        save_memory(cache, tmp_path / "memory", model)
    assert not [*tmp_path.iterdir()]


def adapted(model, names="AB", **options):
    """A model with adapters of LoRA that change its logits."""
    config = LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    torch.manual_seed(1)
    first, *others = names
    model = get_peft_model(model, config, adapter_name=first)
    for name in others:
        model.add_adapter(name, config)
    return model.eval()


SWITCHES = {
    "another adapter": lambda model: model.set_adapter("B"),
    "none": lambda model: model.base_model.disable_adapter_layers(),
    "another scale": lambda model: model.base_model.model.lm_head.set_scale("A", 3.0),
    "both": lambda model: model.base_model.set_adapter(["A", "B"]),
}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize(
    "kind", [{}, {"modules_to_save": ["embed_tokens"]}], ids=["low rank", "whole"]
)
def test_a_memory_that_was_read_with_an_adapter_is_refused_with_another(switch, kind, tmp_path):
    if switch == "both" and kind:
        kind = {}  # which a module that is trained as a whole cannot have
    targets = ["q_proj", "v_proj", "lm_head"]
    model = adapted(make_model(CASE["deltanet"]), target_modules=targets, **kind)
    model.set_adapter("A")
    save_memory(read(model, random_tokens(1, 9)), tmp_path / "memory", model)
    load_memory(tmp_path / "memory", model)
    SWITCHES[switch](model)
    with pytest.raises(
        ValueError, match=r"of another model or of other weights: .* other adapters"
    ):
        load_memory(tmp_path / "memory", model)


@pytest.mark.parametrize(
    "kind", [{}, {"modules_to_save": ["embed_tokens"]}], ids=["low rank", "whole"]
)
def test_a_memory_knows_its_model_with_an_adapter_beside_others_and_by_any_name(kind, tmp_path):
    plain = make_model(CASE["deltanet"])
    options = {"target_modules": ["q_proj", "v_proj"], **kind}
    model = adapted(copy.deepcopy(plain), **options)
    model.set_adapter("A")
    save_memory(read(model, random_tokens(1, 9)), tmp_path / "memory", model)
    for same in (model, model.get_base_model(), adapted(copy.deepcopy(plain), "C", **options)):
        assert load_memory(tmp_path / "memory", same).get_seq_length() == 9
    model.base_model.disable_adapter_layers()
    save_memory(read(model, random_tokens(1, 9)), tmp_path / "memory", model)
    assert load_memory(tmp_path / "memory", plain).get_seq_length() == 9


@torch.no_grad()
def test_a_memory_is_loaded_by_its_model_in_parts_on_a_disk(tmp_path):
    model = make_model(CASE["linear-full"])
    model.save_pretrained(tmp_path / "model")
    save_memory(read(model, random_tokens(1, 9)), tmp_path / "memory", model)
    places = {"model.embed_tokens": "disk", "model.layers.0": "disk", "model.layers.1": "cpu"}
    rest = {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    parts = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places | rest, offload_folder=tmp_path / "offloaded"
    )
    words = random_tokens(1, 3, seed=1)
    loaded = load_memory(tmp_path / "memory", parts)
    expected = go_on(model, load_memory(tmp_path / "memory", model), words)
    assert torch.equal(go_on(parts, loaded, words), expected)
    save_memory(loaded, tmp_path / "again", parts)
    assert load_memory(tmp_path / "again", model).get_seq_length() == 12


def test_a_memory_of_the_model_in_float32_is_one_in_bfloat16(tmp_path):
    model = make_model(CASE["linear-full"])
    save_memory(read(model, random_tokens(1, 9)), tmp_path / "memory", model)
    loaded = load_memory(tmp_path / "memory", model.bfloat16())
    assert go_on(model, loaded, random_tokens(1, 3)).dtype == torch.bfloat16


ANOTHER_PROCESS = """
import sys, torch, hf_memory
from transformers import AutoModelForCausalLM
text = torch.tensor([list(map(int, sys.argv[1].split()))])
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    cache = hf_memory.load_memory(f"{folder}/memory", model)
    print(*model.generate(text, past_key_values=cache, max_new_tokens=6, do_sample=False)[0].tolist())
"""


def test_another_process_goes_on_with_a_memory(tmp_path):
    tokens = random_tokens(1, 9)
    expected = []
    folders = [tmp_path / name for name in ("linear-sliding", "titans-mal")]
    for folder in folders:
        model = make_model(CASE[folder.name])
        model.save_pretrained(folder)
        save_memory(read(model, tokens[:, :8]), folder / "memory", model)
        expected.append(model.generate(tokens, max_new_tokens=6, do_sample=False)[0].tolist())
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        ANOTHER_PROCESS,
        " ".join(map(str, tokens[0].tolist())),
        *folders,
    ]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [list(map(int, line.split())) for line in printed.splitlines()] == expected


@pytest.fixture
def memory(tmp_path):
    model = make_model(CASE["linear-full"])
    save_memory(read(model, random_tokens(1, 9)), tmp_path / "memory", model)
    return model, tmp_path / "memory"


def test_a_damaged_memory_is_refused(memory):
    model, path = memory
    whole = path.read_bytes()
    for part in (
        whole[:100],
        whole[:-10],
        b"",
        whole.replace(b'"tokens_read":"9"', b'"tokens_read":"8"'),
    ):
        assert part != whole
        path.write_bytes(part)
        with pytest.raises(ValueError, match="damaged"):
            load_memory(path, model)
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(ValueError, match="changed after it was written"):
        load_memory(path, model)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="must have the format"):
        load_memory(path, model)


FORGED = {
    "no count": (
        lambda header, tensors: header.pop("tokens_read"),
        "was changed after it was written",
    ),
    "negative count": (lambda header, tensors: header.update(tokens_read="-9"), "got -9 tokens"),
    "layers": (lambda header, tensors: header.update(layers="["), "must have layers"),
    "missing state": (
        lambda header, tensors: tensors.pop("1.keys"),
        "must have the states .*1.keys",
    ),
    "other state": (lambda header, tensors: tensors.update(x=torch.ones(1)), "got .* x"),
    "not a number": (
        lambda header, tensors: tensors["0.memory"].view(-1)[0].fill_(float("nan")),
        "0.memory of finite",
    ),
    "infinite": (
        lambda header, tensors: tensors["1.keys"].view(-1)[0].fill_(torch.inf),
        "1.keys of finite",
    ),
    "too large": (
        lambda header, tensors: tensors["0.memory"].view(-1)[0].fill_(-3e38),
        "0.memory of finite",
    ),
    "no texts": (
        lambda header, tensors: tensors.update({n: x[:0] for n, x in tensors.items()}),
        r"the shape \[1, ",
    ),
    "no rows": (
        lambda header, tensors: tensors.update({"0.memory": torch.ones(())}),
        r"the shape \[1, ",
    ),
    "too many tokens": (
        lambda header, tensors: header.update(tokens_read="9" * 30),
        "from 1 to 2147483647 tokens",
    ),
    "integers": (
        lambda header, tensors: tensors.update({"1.keys": tensors["1.keys"].int()}),
        "1.keys .*float32",
    ),
    "other heads": (
        lambda header, tensors: tensors.update({"1.values": tensors["1.values"][:, :1]}),
        "the shape",
    ),
    "more than was read": (
        lambda header, tensors: header.update(tokens_read="8"),
        r"\[1, 2, 8, 8\], got \[1, 2, 9, 8\]",
    ),
    "fewer than were read": (
        lambda header, tensors: header.update(tokens_read="10"),
        r"\[1, 2, 10, 8\], got \[1, 2, 9, 8\]",
    ),
    "fewer texts": (
        lambda header, tensors: tensors.update({"1.keys": tensors["1.keys"].repeat(2, 1, 1, 1)}),
        "shape",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_memory_is_refused(memory, name):
    model, path = memory
    forge, message = FORGED[name]
    rewrite(path, forge)
    with pytest.raises(ValueError, match=message):
        load_memory(path, model)


def rewrite(path, forge):
    """Change the header and the tensors of a memory, with a checksum that fits."""
    with safe_open(path, "pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    forge(header, tensors)
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    save_file(tensors, path, metadata=header | {"checksum": memory_file._checksum(header, tensors)})


DTYPES = [torch.bool, torch.uint16, torch.uint64, torch.int64, torch.float8_e4m3fn, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_of_another_kind_of_number_are_refused(memory, dtype):
    model, path = memory
    rewrite(path, lambda header, tensors: tensors.update({"1.keys": tensors["1.keys"].to(dtype)}))
    with pytest.raises(
        ValueError, match=rf"must have a state 1.keys of torch.float32, got {dtype}"
    ):
        load_memory(path, model)


@every_kind_of_cache
def test_a_memory_with_a_forged_number_of_texts_is_refused_where_it_is_read(case, tmp_path):
    model = make_model(case)
    path = tmp_path / "memory"
    save_memory(read(model, random_tokens(1, 9)), path, model)
    rewrite(
        path,
        lambda header, tensors: tensors.update(
            {name: torch.cat([x, x]) for name, x in tensors.items()}
        ),
    )
    with pytest.raises(
        ValueError,
        match="cache must be of as many texts as there are rows of tokens, 1, got one of 2",
    ):
        go_on(model, load_memory(path, model), random_tokens(1, 3))
    assert go_on(model, load_memory(path, model), random_tokens(2, 3)).shape[0] == 2


def test_a_count_of_tokens_with_thousands_of_digits_is_refused(memory):
    model, path = memory
    rewrite(path, lambda header, tensors: header.update(tokens_read="9" * 5000))
    with pytest.raises(
        ValueError, match=r"memory must have read from 1 to 2147483647 tokens, got 9{40} tokens"
    ):
        load_memory(path, model)


def test_a_pipe_is_no_memory(memory, tmp_path):
    model, _ = memory
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        ValueError, match="path must be a file, not a pipe or a device, got the pipe"
    ):
        load_memory(tmp_path / "pipe", model)
    with pytest.raises(
        ValueError, match="path must be a file, not a pipe or a device, got the pipe"
    ):
        save_memory(read(model, random_tokens(1, 3)), tmp_path / "pipe", model)


COUNTS = {  # states that count, with their largest value after nine tokens
    ("titans-mac", "0.memory.phase"): 2,
    ("titans-mac", "0.offset"): 4,
    ("deltanet-window", "0.tokens_read"): 9,
    ("transformer-buckets", "0.buckets"): 3,
}


@pytest.mark.parametrize(("name", "state"), COUNTS)
def test_counts_that_reading_cannot_have_led_to_are_refused(name, state, tmp_path):
    model = make_model(CASE[name])
    for wrong in (-2, COUNTS[name, state] + 1, 2**31 - 1):
        save_memory(read(model, random_tokens(1, 9)), tmp_path / "memory", model)
        rewrite(tmp_path / "memory", lambda header, tensors: tensors[state].fill_(wrong))  # noqa: B023
        with pytest.raises(
            ValueError, match=rf"{state} of numbers from .* to {COUNTS[name, state]}, got {wrong}"
        ):
            load_memory(tmp_path / "memory", model)


def test_another_models_memory_is_refused(memory):
    model, path = memory
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight *= 1.1
    for wrong in (
        other,
        make_model(CASE["linear-elu"]),
        make_model(CASE["linear-full"], rms_norm_eps=1e-3),
    ):
        with pytest.raises(ValueError, match="another model"):
            load_memory(path, wrong)


def test_the_header_says_what_the_file_is(memory):
    _, path = memory
    with safe_open(path, "pt") as file:
        header = file.metadata()
    assert header["tokens_read"] == "9"
    assert json.loads(header["layers"]) == ["MemoryLayer", "DynamicLayer"]
    assert header["model"] == "LinearTransformerForCausalLM"


def test_a_directory_is_no_memory(memory, tmp_path):
    model, _ = memory
    with pytest.raises(IsADirectoryError, match="must be a file"):
        load_memory(tmp_path, model)
    with pytest.raises(IsADirectoryError, match="must be a file"):
        save_memory(read(model, random_tokens(1, 3)), tmp_path, model)
    with pytest.raises(FileNotFoundError):
        load_memory(tmp_path / "nothing", model)


def test_an_empty_or_foreign_cache_is_refused(memory, tmp_path):
    model, _ = memory
    static = StaticCache(config=model.config, max_cache_len=9)
    go_on(model, static, random_tokens(1, 3))
    with pytest.raises(ValueError, match="must have read tokens"):
        save_memory(DynamicCache(config=model.config), tmp_path / "new", model)
    for cache in (DynamicCache(), static):
        with pytest.raises(ValueError, match="cache must be a DynamicCache"):
            save_memory(cache, tmp_path / "new", model)
    assert not (tmp_path / "new").exists()


def test_a_full_disk_leaves_the_old_memory(memory):
    model, path = memory
    before = path.read_bytes()
    cache = read(model, random_tokens(1, 200))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        with pytest.raises(OSError, match="could not write"):
            save_memory(cache, path, model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["memory"]


@every_kind_of_cache
def test_many_readers_of_one_prefix(case):
    model = make_model(case).double()
    prefix = random_tokens(1, 7)
    more = random_tokens(3, 2, seed=1)
    once = read(model, prefix)
    once.batch_repeat_interleave(3)
    texts = torch.cat([prefix.expand(3, -1), more], 1)
    together = generate(model, texts, past_key_values=once)
    apart = [generate(model, text[None], past_key_values=read(model, prefix)) for text in texts]
    assert torch.equal(together, torch.cat(apart))
    assert torch.equal(together, generate(model, texts))


IN_BITS = [case for case in CASES if make_config(case).kinds_in_bits]
every_case_with_bits = pytest.mark.parametrize("case", IN_BITS, ids=[x.name for x in IN_BITS])


@every_case_with_bits
def test_a_memory_is_loaded_in_the_bits_that_it_has_whatever_the_config_says(case, tmp_path):
    """Bits of each kind alone, and of all kinds; of a call of generate, which leaves the config as it is."""
    plain = make_config(case, cache_bits=None).state_specs
    kinds = [
        kind
        for kind in make_config(case).kinds_in_bits
        if make_config(case, cache_bits={kind: 8}).state_specs != plain
    ]
    each = {kind: 16 if kind == "recurrent_states" else 8 for kind in kinds}
    tokens = random_tokens(2, 9)
    for bits in ({}, *({kind: number} for kind, number in each.items()), each):
        model = make_model(case, cache_bits=bits)
        cache = read(model, tokens)
        save_memory(cache, tmp_path / "memory", model)
        with safe_open(tmp_path / "memory", "pt") as file:
            written = json.loads(file.metadata()["cache_bits"])
            assert written == dict(held_bits(cache).by_kind)
            assert {name.partition(".")[0] for name in written} == {*bits}
        for other in ({}, each):
            loaded = load_memory(tmp_path / "memory", make_model(case, cache_bits=other))
            assert held(loaded).keys() == held(cache).keys()
            assert all(torch.equal(x, held(cache)[name]) for name, x in held(loaded).items())
        words = random_tokens(2, 3, seed=1)
        loaded = load_memory(tmp_path / "memory", model)
        assert torch.equal(go_on(model, loaded, words), go_on(model, cache, words))


def held(cache):
    """The states, keys and values of a cache, by the layer, the name and the dtype."""
    found = {}
    for i, layer in enumerate(cache.layers):
        states = getattr(layer, "states", None) or {"keys": layer.keys, "values": layer.values}
        window = getattr(layer, "sliding_window", 0) or 0
        for name, x in states.items():
            rows = x[..., x.shape[-2] - min(x.shape[-2], window - 1) :, :] if window else x
            found[i, name, x.dtype] = rows
    return found


def test_the_cache_that_generate_returns_in_bits_is_saved_in_these(tmp_path):
    model = make_model(CASE["attention-kept"])
    output = model.generate(
        random_tokens(1, 9), max_new_tokens=3, cache_bits=8, return_dict_in_generate=True
    )
    cache = cache_of(output)
    save_memory(cache, tmp_path / "memory", model)
    loaded = load_memory(tmp_path / "memory", model)
    assert model.config.cache_bits is None
    assert loaded.layers[0].states["keys"].dtype == torch.uint8
    assert torch.equal(loaded.layers[0].states["keys"], cache.layers[0].states["keys"])


def test_scales_that_are_no_numbers_are_refused(tmp_path):
    model = make_model(CASE["attention-kept-bits"])
    save_memory(read(model, random_tokens(1, 9)), tmp_path / "memory", model)
    rewrite(tmp_path / "memory", lambda header, tensors: tensors["0.keys"].fill_(255))
    with pytest.raises(ValueError, match=r"state 0\.keys with finite scales"):
        load_memory(tmp_path / "memory", model)


@pytest.mark.parametrize("how", [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}])
@pytest.mark.parametrize("name", ["deltanet", "attention-kept", "titans-mag"])
def test_a_loaded_memory_of_one_text_is_refused_for_several_rows_of_generate(name, how, tmp_path):
    model = make_model(CASE[name])
    tokens = random_tokens(1, 9)
    save_memory(read(model, tokens), tmp_path / "memory", model)
    loaded = load_memory(tmp_path / "memory", model)
    with pytest.raises(ValueError, match="cache must be of as many texts as there are rows"):
        model.generate(random_tokens(1, 12), past_key_values=loaded, max_new_tokens=2, **how)
