"""What the plugin for vLLM does without vLLM: states in pages, the tokens of a step in one row, refusals."""

import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from cases import CASE, CASES, make_config, make_model
from comparing import assert_close, in_float64
from hf_memory.cache import State
from hf_memory.integrations.vllm import ALONE, ModelConfig
from hf_memory.integrations.vllm.placement import (
    check,
    check_adapters,
    divided,
    memory_layers,
    of_all_heads,
    share,
    window_parts,
)
from hf_memory.integrations.vllm.states import Pages, Shelf, readings, shelves
from hf_memory.mixers.positions import Positions
from hf_memory.mixers.windowed import WindowedMixer
from hf_memory.modeling.whole_layers import WholeLayersConfig

STEPS = (  # tokens of three sequences that each step reads: begun, gone on with, written to, and asked again
    (6, 1, 0),
    (3, 1, 5),
    *[(1, 1, 1)] * 4,
    (2, 1, 2),
)
SLOTS = torch.tensor([4, 1, 2])


def has_no_place(case):
    """Some memory grows with the text, beside heads that keep everything, or a layer runs several times."""
    config = make_config(case)
    if getattr(config, "depth", "") == "universal":
        return True
    layers = [i for i in memory_layers(config) if config.mixer_class(i) is not WindowedMixer]
    return any(x.growth != "fixed" for i in layers for x in config.state_specs[i].values())


SERVED = [case for case in CASES if not has_no_place(case) and memory_layers(make_config(case))]
KEPT = CASE["attention-kept"]
WINDOWED = KEPT.options | {"full_attention_window": 5}
SERVED.append(KEPT._replace(name="attention-kept-window", options=WINDOWED))
BY_HEAD = {"num_key_value_heads": 4, "num_kept_tokens": [[3, 0, 5, 3], [2, 2, 2, 2]]}
SERVED.append(KEPT._replace(name="attention-kept-by-head", options=KEPT.options | BY_HEAD))
FORGETTING = {**CASE["transformer-forget-heads"].options, "layer_types": ["sliding_heads"] * 2}
FULL_FORGETTING = CASE["transformer"]._replace(name="forget-full", options=FORGETTING)
FORGETTING = FORGETTING | {"full_attention_heads": None}
SERVED.append(FULL_FORGETTING._replace(name="forget-windows", options=FORGETTING))
REFUSED = [*(case for case in CASES if has_no_place(case)), FULL_FORGETTING]


def heads_alone(mixer, text, angles):
    """Outputs [T, heads, V] of heads that keep everything, as an engine's attention gives them, if there are any."""
    if not any(state.growth != "fixed" for state in mixer.spec.values()):
        return None
    q, k, v = mixer.project_heads(text[None], Positions(*angles))
    of_heads = (
        x.unflatten(2, (len(mixer.place_of_head), -1))[:, :, mixer.full_heads].flatten(2, 3)
        for x in (q, k, v)
    )
    q, k, v = (x.transpose(1, 2) for x in of_heads)
    o = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=mixer.scaling, enable_gqa=True
    )
    return o[0].transpose(0, 1)


def step_by_step(model, layer, texts):
    """Outputs of each text's tokens, read in STEPS through pages that hold nothing but NaN at first."""
    memories = memory_layers(model.config)
    mixer = model.model.layers[layer].mixer
    seen = [0] * len(texts)
    shelf = Shelf({i: model.config.state_specs[i] for i in memories}, torch.float32)
    slots = {i: SLOTS.roll(i) for i in memories}
    for i in memories:
        shelf.bind(i, torch.full((6, shelf.size + 24), 255, dtype=torch.uint8)[:, 8:-8])
    everything = torch.arange(max(map(len, texts)))
    attended = [
        heads_alone(mixer, text, model.model.rotary_emb(text[None], everything[None, : len(text)]))
        for text in texts
    ]
    outputs = [[] for _ in texts]
    for step in STEPS:
        parts = [text[start : start + new] for text, start, new in zip(texts, seen, step)]
        places = torch.cat([torch.arange(start, start + new) for start, new in zip(seen, step)])
        seen = [start + new for start, new in zip(seen, step)]
        bounds = torch.tensor([0, *step]).cumsum(0)
        row = torch.cat(parts)[None]
        angles = model.model.rotary_emb(row, places[None])
        own = [
            None if o is None else o[end - new : end] for o, new, end in zip(attended, step, seen)
        ]
        full = None if own[0] is None else torch.cat(own)
        output = Pages(mixer, layer, shelf).read(
            row, angles, readings(bounds, torch.tensor(seen), slots), full
        )
        for mine, start, end in zip(outputs, bounds, bounds[1:]):
            mine.append(output[0, start:end])
    return [torch.cat(mine) for mine in outputs]


@pytest.mark.parametrize("case", SERVED, ids=[case.name for case in SERVED])
@torch.no_grad()
def test_sequences_in_steps_are_each_sequence_alone(case):
    model = make_model(case)
    if isinstance(model.config.cache_bits, dict):  # those of full heads are the engine's choice
        model.config.cache_bits = {"window": model.config.cache_bits["window"]}
    generator = torch.Generator().manual_seed(1)
    width = 32 + (32 if model.config.model_type == "hf_memory_rwkv7" else 0)  # and first values
    texts = [torch.randn(sum(lengths), width, generator=generator) for lengths in zip(*STEPS)]
    memories = {str(model.config.state_specs[i]): i for i in reversed(memory_layers(model.config))}
    for layer in memories.values():  # the first with these states
        mixer = model.model.layers[layer].mixer
        for text, output in zip(texts, step_by_step(model, layer, texts)):
            angles = model.model.rotary_emb(text[None], torch.arange(len(text))[None])
            exact = in_float64(mixer)(*in_float64((text[None], angles)))[0]
            assert_close(output[None], exact, mixer(text[None], angles)[0])


@torch.no_grad()
def test_pages_hold_matrices_in_few_bits():
    model = make_model(CASE["deltanet"], cache_bits={"recurrent_states": 8})
    mixer = model.model.layers[0].mixer
    generator = torch.Generator().manual_seed(0)
    lengths = list(zip(*STEPS))
    texts = [torch.randn(sum(x), 32, generator=generator) for x in lengths]
    for text, calls, output in zip(texts, lengths, step_by_step(model, 0, texts)):
        cache = DynamicCache(config=model.config)
        parts = [x for x in text[None].split(calls, 1) if x.shape[1]]
        expected = torch.cat([mixer(x, cache=cache)[0] for x in parts], 1)[0]
        assert (output - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("name", ["gla", "attention-kept", "gated-deltanet-sliding"])
@torch.no_grad()
def test_tokens_without_a_step_are_one_text(name):
    model = in_float64(make_model(CASE[name]))
    layer = memory_layers(model.config)[0]
    mixer = model.model.layers[layer].mixer
    x = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0)).double()
    angles = model.model.rotary_emb(x, torch.arange(7)[None])
    text = Pages(mixer, layer, Shelf({}, torch.float64))
    attended = heads_alone(mixer, x[0], angles)
    output = x.new_empty(7, text.width)
    text.mix(text.project(x, angles), None, output)
    assert_close(text.finish(output, attended), mixer(x, angles)[0])


def test_a_step_is_read_in_as_few_calls_as_lengths_allow():
    bounds = torch.tensor([0, 1, 4, 5, 6, 6, 9])
    lengths = torch.tensor([8, 3, 1, 5, 2, 9])
    slots = {0: torch.arange(10, 16), 2: torch.arange(20, 26)}
    found = [
        ({i: rows.tolist() for i, rows in x.rows.items()}, x.tokens.tolist(), x.uniform_length)
        for x in readings(bounds, lengths, slots)
    ]
    assert found == [
        ({0: [10, 13], 2: [20, 23]}, [[0], [5]], None),
        ({0: [11], 2: [21]}, [[1, 2, 3]], 0),
        ({0: [12], 2: [22]}, [[4]], 0),
        ({0: [15], 2: [25]}, [[6, 7, 8]], 6),
    ]


def test_pages_are_hardly_larger_than_needed():
    sizes = {0: (90, 90, 2), 1: (10, 10), 3: (40, 40, 40)}
    shelf = Shelf(
        {i: {str(n): State((x,)) for n, x in enumerate(own)} for i, own in sizes.items()},
        torch.bfloat16,
    )
    assert shelf.size == 480  # bytes of float32: 360 twice, then 160, 160, 160, 40, 40 and 8
    taken = [
        (x.page, byte)
        for own in shelf.places.values()
        for x in own.values()
        for byte in range(x.bytes.start, x.bytes.stop)
    ]
    assert len(taken) == len({*taken}) == 4 * 322


def test_pages_of_two_processes_have_one_size():
    config = make_config(CASE["attention-kept"])
    parts = [share(config, rank, 2).state_specs for rank in range(2)]
    found = shelves([{0: specs[0], 1: specs[1]} for specs in parts], torch.float32)
    alone = [Shelf({0: specs[0], 1: specs[1]}, torch.float32).size for specs in parts]
    assert alone[0] > alone[1] > 0  # the second process has a head that keeps everything
    assert [shelf.size for shelf in found] == [alone[0]] * 2


@pytest.mark.parametrize("case", REFUSED, ids=[case.name for case in REFUSED])
def test_what_has_no_place_is_refused(case):
    with pytest.raises(
        ValueError, match=r"got ([\w ]+ in layer \d of \w+|'universal').*serve of transformers"
    ):
        check(make_config(case))


def part_of(model, rank, size):
    """The part of a model that a process has, with its part of the weights."""
    dimensions = divided(model.config, size)
    own = share(model.config, rank, size)
    part = type(model)(own).eval()
    weights = {
        name: x.chunk(size, dimensions[name])[rank] if name in dimensions else x
        for name, x in model.state_dict().items()
    }
    part.load_state_dict(weights)
    for layer in part.model.layers if rank else ():  # added once
        if layer.mixer.o_proj.bias is not None:
            layer.mixer.o_proj.bias.data.zero_()
    return part


def can_be_divided(case):
    """Whether the plugin says so, for two processes."""
    try:
        return bool(divided(make_config(case), 2))
    except ValueError:
        return False


DIVIDED = [
    case
    for case in SERVED
    if can_be_divided(case) and not isinstance(make_config(case), WholeLayersConfig)
]


@pytest.mark.parametrize("case", DIVIDED, ids=[case.name for case in DIVIDED])
@torch.no_grad()
def test_mixers_of_two_processes_add_up(case):
    whole = in_float64(make_model(case))
    parts = [in_float64(part_of(make_model(case), rank, 2)) for rank in range(2)]
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0)).double()
    angles = whole.model.rotary_emb(x, torch.arange(9)[None])
    for layer, *shares in zip(*(model.model.layers for model in (whole, *parts))):
        assert_close(sum(part.mixer(x, angles)[0] for part in shares), layer.mixer(x, angles)[0])


def test_what_cannot_be_divided_is_refused():
    for name, fault in (
        ("retention-as-in-olmo", "a norm of all heads"),
        ("retention", "each head's decay"),
        ("deltaproduct", "num_householder"),
        ("titans-mag", "does not divide model.layers.0"),
        ("gated-sinks", "slots beside full_attention_heads"),
    ):
        with pytest.raises(ValueError, match=f"tensor_parallel_size must be 1.*{fault}"):
            divided(make_config(CASE[name]), 2)
    with pytest.raises(ValueError, match="a divisor of num_attention_heads=4, got 3"):
        share(make_config(CASE["gla"]), 0, 3)


def with_heads(*full, **options):
    """Four layers with a window, and key-value heads that keep everything."""
    config = {
        "layer_types": ["sliding_heads"] * 4,
        "num_hidden_layers": 4,
        "sliding_window": 4,
        **options,
    }
    return make_config(
        CASE["transformer"],
        full_attention_heads=list(full) or None,
        num_key_value_heads=4,
        **config,
    )


def test_heads_of_a_process_have_its_numbers():
    halves = [share(with_heads([1], [0, 3], [], [2, 3]), rank, 2) for rank in range(2)]
    assert [half.full_attention_heads for half in halves] == [
        [[1], [0], [], []],
        [[], [1], [], [0, 1]],
    ]


@pytest.mark.parametrize(
    ("full", "parts"),
    [
        ([], 1),
        ([[1], [], [], []], 1),
        ([[1], [2], [], []], 1),
        ([[1], [2], [3], []], 2),
        ([[0, 1, 2, 3], [1], [2], [3]], 4),
    ],
)
def test_windows_have_more_caches_than_heads_that_keep_everything(full, parts):
    assert window_parts(with_heads(*full)) == parts


def test_sinks_of_heads_without_a_window_are_zero():
    assert of_all_heads(torch.arange(1, 5), [1, 3], 4).tolist() == [0, 0, 1, 2, 0, 0, 3, 4]


def test_the_plugin_needs_nothing_that_the_environment_of_vllm_does_not_have():
    """Dependencies of ours alone are those of conversions; the environment is that of benchmarks/vllm.txt."""
    root = Path(__file__).parents[1]
    of_vllm = {
        re.split("[=<>\\[]", x)[0] for x in (root / "benchmarks/vllm.txt").read_text().split()
    }
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    ours = [re.split("[=<>\\[ ]", x)[0] for x in declared]
    missing = [name for name in ours if name not in of_vllm]
    assert missing
    code = f"import sys; sys.modules |= dict.fromkeys({missing}); import hf_memory.integrations.vllm.states"
    subprocess.run([sys.executable, "-c", code], check=True)


def vllm_config(config, **options):
    """What vLLM asks the plugin to look at."""
    found = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False, hf_config=config, quantization=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        cache_config=SimpleNamespace(
            enable_prefix_caching=True,
            cache_dtype="auto",
            sliding_window=4,
            block_size=None,
            user_specified_block_size=False,
            prefix_match_unit=None,
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
        lora_config=None,
    )
    vars(found.parallel_config).update(options)
    return found


def test_memories_need_whole_models():
    given = vllm_config(make_config(CASE["gla"]))
    ModelConfig.verify_and_update_config(given)
    assert not given.model_config.enforce_eager
    given.speculative_config = object()
    with pytest.raises(ValueError, match=r"speculative_config must be None: a memory"):
        ModelConfig.verify_and_update_config(given)
    with pytest.raises(ValueError, match=r"pipeline_parallel_size must be 1 .*got 2"):
        ModelConfig.verify_and_update_config(
            vllm_config(make_config(CASE["gla"]), pipeline_parallel_size=2)
        )


@pytest.mark.parametrize("case", ["gla", "attention-kept"])
def test_states_are_found_again_at_ends_of_pages_alone(case):
    given = vllm_config(make_config(CASE[case]))
    ModelConfig.verify_and_update_config(given)
    assert given.cache_config.enable_prefix_caching is True
    assert given.cache_config.prefix_match_unit is None
    given.cache_config.prefix_match_unit = 32
    with pytest.raises(ValueError, match=r"prefix_match_unit must be None .* got 32"):
        ModelConfig.verify_and_update_config(given)


def test_attention_alone_may_have_prefixes_of_any_unit():
    given = vllm_config(with_heads([1], [], [], []))
    given.cache_config.prefix_match_unit = 16
    ModelConfig.verify_and_update_config(given)
    assert given.cache_config.prefix_match_unit == 16


def test_each_process_has_attention_or_none_has():
    for full in ([[0], [1]], None):
        given = make_config(CASE["attention-kept"], full_attention_heads=full)
        ModelConfig.verify_and_update_config(vllm_config(given, tensor_parallel_size=2))
    unlike = vllm_config(make_config(CASE["attention-kept"]), tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"must have some of full_attention_heads=.*, got 2"):
        ModelConfig.verify_and_update_config(unlike)


@pytest.mark.parametrize("case", ["gla", "transformer"])
def test_quantised_weights_are_refused(case):
    given = vllm_config(make_config(CASE[case]))
    given.model_config.quantization = "fp8"
    with pytest.raises(ValueError, match=r"quantization must be None .* got 'fp8'"):
        ModelConfig.verify_and_update_config(given)


def has_adapters(case):
    """Whether the plugin says so."""
    try:
        check_adapters(make_config(case))
    except ValueError:
        return False
    return True


ADAPTED = [case for case in SERVED if has_adapters(case)]


def test_kept_tokens_have_adapters_and_memories_of_whole_mixers_do_not():
    names = {case.name for case in ADAPTED}
    assert {"attention-kept", "attention-kept-by-head", "gla", "deltanet"} <= names
    assert not {"rwkv7", "titans-mag", "mamba"} & names
    given = vllm_config(make_config(CASE["titans-mag"]))
    given.lora_config = object()
    with pytest.raises(ValueError, match=r"enable_lora must be False for .* got True"):
        ModelConfig.verify_and_update_config(given)


@pytest.mark.parametrize("case", ADAPTED, ids=[case.name for case in ADAPTED])
@torch.no_grad()
def test_with_adapters_linear_layers_read_all_tokens_of_a_step(case, monkeypatch):
    model = make_model(case)
    angles = model.model.rotary_emb(torch.empty(1, 7, 32), torch.arange(7)[None])
    for layer in memory_layers(model.config):
        pages = Pages(model.model.layers[layer].mixer, layer, Shelf({}, torch.float32))
        projected = pages.project(torch.randn(1, 7, 32), angles)
        with monkeypatch.context() as patched:
            patched.setattr(torch.nn.Linear, "forward", None)
            pages.mix(projected, None, torch.empty(7, pages.width))


def test_attention_alone_is_a_class_of_its_own_with_small_blocks():
    given = vllm_config(with_heads([1], [], [], []))
    ModelConfig.verify_and_update_config(given)
    assert not given.model_config.enforce_eager
    cache = given.cache_config
    assert cache.enable_prefix_caching is True
    assert cache.sliding_window is None
    assert cache.block_size == 32
    asked = []
    given.model_config.registry = SimpleNamespace(
        inspect_model_cls=lambda names, _: asked.append(names) or ("info", ALONE)
    )
    ModelConfig.verify_and_update_model_config(given.model_config)
    assert given.model_config.hf_config.architectures == asked[0] == [ALONE]
    assert given.model_config._model_info == "info"
    assert given.model_config._architecture == ALONE


@pytest.mark.parametrize(
    ("full", "options", "named"),
    [
        ([[1], [], [], []], {"cache_bits": 8}, "full_attention_heads and window"),
        ([[1], [], [], []], {"cache_bits": 8, "num_sink_tokens": 2}, "full_attention_heads"),
        ([], {"cache_bits": {"window": 4}}, "window"),
        ([], {"cache_bits": 8, "layer_types": ["full_attention"] * 4}, "attention"),
        ([], {"cache_bits": 8, "num_sink_tokens": 2}, ""),
        ([[1], [], [], []], {}, ""),
    ],
)
def test_bits_that_vllm_does_not_have_are_named_unless_it_has_its_own(full, options, named):
    given = vllm_config(with_heads(*full, **options))
    given.cache_config.cache_dtype = "fp8"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ModelConfig.verify_and_update_config(given)
        assert not caught
        given.cache_config.cache_dtype = "auto"
        ModelConfig.verify_and_update_config(given)
    said = [str(warning.message).partition(" in the model's dtype")[0] for warning in caught]
    assert said == [f"vLLM stores keys and values of {named}"] * bool(named)
