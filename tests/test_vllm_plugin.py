"""What the plugin for vLLM does without vLLM: states in pages, the tokens of a step in one row, refusals."""

from types import SimpleNamespace

import pytest
import torch

from cases import CASES, make_config, make_model
from comparing import assert_close, in_float64
from hf_memory.integrations.vllm import ModelConfig
from hf_memory.integrations.vllm.states import Pages, check, memory_layers, readings

STEPS = (  # tokens of three sequences that each step reads: begun, gone on with, and written to
    (6, 1, 0),
    (3, 1, 5),
    (1, 1, 1),
)
SLOTS = torch.tensor([4, 1, 2])


def grows(case):
    """Some memory does, with the text."""
    config = make_config(case)
    return any(x.growth != "fixed" for i in memory_layers(config) for x in config.state_specs[i].values())


def has_no_place(case):
    """Something grows with the text, or layers keep different states."""
    config = make_config(case)
    kept = [config.state_specs[i] for i in memory_layers(config)]
    return grows(case) or any(spec != kept[0] for spec in kept)


SERVED = [case for case in CASES if not has_no_place(case) and memory_layers(make_config(case))]
REFUSED = [case for case in CASES if has_no_place(case)]


def step_by_step(model, mixer, texts):
    """Outputs of each text's tokens, read in STEPS through pages that hold nothing but NaN at first."""
    pages, seen = Pages(mixer, torch.float32), [0] * len(texts)
    pages.kv_cache = tuple(
        torch.full((6, *shape), torch.nan if dtype.is_floating_point else -7, dtype=dtype)
        for shape, dtype in pages.kept.values()
    )
    outputs = [[] for _ in texts]
    for step in STEPS:
        parts = [text[start : start + new] for text, start, new in zip(texts, seen, step)]
        places = torch.cat([torch.arange(start, start + new) for start, new in zip(seen, step)])
        seen = [start + new for start, new in zip(seen, step)]
        bounds = torch.tensor([0, *step]).cumsum(0)
        row = torch.cat(parts)[None]
        angles = model.model.rotary_emb(row, places[None])
        output = pages.read(row, angles, readings(bounds, torch.tensor(seen)), SLOTS)
        for mine, start, end in zip(outputs, bounds, bounds[1:]):
            mine.append(output[0, start:end])
    return [torch.cat(mine) for mine in outputs]


@pytest.mark.parametrize("case", SERVED, ids=[case.name for case in SERVED])
@torch.no_grad()
def test_sequences_in_steps_are_each_sequence_alone(case):
    model = make_model(case)
    mixer = model.model.layers[memory_layers(model.config)[0]].mixer
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randn(sum(lengths), 32, generator=generator) for lengths in zip(*STEPS)]
    for text, output in zip(texts, step_by_step(model, mixer, texts)):
        angles = model.model.rotary_emb(text[None], torch.arange(len(text))[None])
        exact = in_float64(mixer)(*in_float64((text[None], angles)))[0]
        assert_close(output[None], exact, mixer(text[None], angles)[0])


def test_a_step_is_read_in_as_few_calls_as_lengths_allow():
    bounds, lengths = torch.tensor([0, 1, 4, 5, 6, 6, 9]), torch.tensor([8, 3, 1, 5, 2, 9])
    found = [(x.sequences.tolist(), x.tokens.tolist(), x.begins) for x in readings(bounds, lengths)]
    assert found == [
        ([0, 3], [[0], [5]], False),
        ([1], [[1, 2, 3]], True),
        ([2], [[4]], True),
        ([5], [[6, 7, 8]], False),
    ]


@pytest.mark.parametrize("case", REFUSED, ids=[case.name for case in REFUSED])
def test_what_has_no_place_is_refused(case):
    fault = "pages of one size" if not grows(case) else r"got [\w ]+ in layer \d of \w+"
    with pytest.raises(ValueError, match=f"{fault}.*generate_stream"):
        check(make_config(case))


def test_only_whole_models_in_one_process():
    config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=False))
    config.parallel_config = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    config.cache_config = SimpleNamespace(enable_prefix_caching=True)
    ModelConfig.verify_and_update_config(config)
    assert config.model_config.enforce_eager
    assert not config.cache_config.enable_prefix_caching
    config.parallel_config.tensor_parallel_size = 2
    with pytest.raises(ValueError, match=r"tensor_parallel_size must be 1 .*got 2"):
        ModelConfig.verify_and_update_config(config)
