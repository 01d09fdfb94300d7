"""MLPs of which each token uses a few: Qwen3-MoE's, with its implementations and its plans for several processes."""

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.distributed.parallel_utils import _get_parameter_plan

from cases import CASE, FIRST_OF_FAMILY, make_config, make_model, random_tokens
from comparing import assert_close

EXPERTS = CASE["deltanet-as-in-gemma"]
WITH_MLPS = [case for case in FIRST_OF_FAMILY if make_config(case).feed_forwards == ["mlp"] * 2]
ODD = {"moe_intermediate_size": 10}  # rows of weights are no multiple of 16 bytes


def outputs(model, implementation):
    """Logits of a model, and the gradients of its experts."""
    model.set_experts_implementation(implementation)
    assert model.config._experts_implementation == implementation
    model.zero_grad()
    logits = model(random_tokens(2, 12)).logits
    logits.sin().sum().backward()
    return [
        logits.detach(),
        *(x.grad.clone() for name, x in model.named_parameters() if ".experts." in name),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, ODD], ids=["rows of 16 bytes", "odd rows"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_every_implementation_computes_the_same(implementation, options, dtype):
    model = make_model(EXPERTS, **options)
    expected = outputs(model.double(), "eager")
    rounded = outputs(make_model(EXPERTS, **options), "eager") if dtype == torch.float32 else None
    assert_close(
        outputs(make_model(EXPERTS, **options).to(dtype), implementation), expected, rounded
    )


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match='experts_implementation="loop"` is not supported'):
        make_model(EXPERTS).set_experts_implementation("loop")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, ODD], ids=["rows of 16 bytes", "odd rows"])
def test_experts_are_one_graph_unless_told_otherwise(options, dtype):
    torch._dynamo.reset()
    model = make_model(EXPERTS, **options).to(dtype)
    tokens = random_tokens(2, 12)
    compiled = torch.compile(
        model.forward, fullgraph=True, backend="eager"
    )  # raises at a graph break
    with torch.no_grad():
        logits = compiled(tokens, use_cache=False).logits
        assert_close(
            logits, make_model(EXPERTS, **options).double()(tokens).logits, model(tokens).logits
        )


@pytest.mark.parametrize("case", WITH_MLPS, ids=[case.name for case in WITH_MLPS])
@pytest.mark.parametrize("plan", ["tp_plan", "ep_plan"])
def test_experts_are_spread_over_processes_as_those_of_qwen3_moe(case, plan):
    model = make_model(case, mlp_types=["experts"] * 2)
    theirs = getattr(Qwen3MoeConfig, f"base_model_{plan}")
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    assert len(names) == 4
    for name in names:
        expected = _get_parameter_plan(name.removeprefix("model."), theirs)
        assert expected is not None
        assert _get_parameter_plan(name, getattr(model, plan)) == expected
    assert not any("experts" in name for name in getattr(make_model(case), plan))
