"""Students whose weights torchao stores in 8 or 4 bits, as transformers loads them."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
from torchao.quantization.granularity import PerGroup
from transformers import AutoModelForCausalLM, TorchAoConfig

from cases import CASE, generate, make_model, random_tokens
from comparing import assert_close

BITS = {
    8: Int8WeightOnlyConfig(version=2),
    4: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16)),
}


def unpacked(model):
    """The same model with numbers for packed weights."""
    model = copy.deepcopy(model)
    packed = [x for x in model.modules() if isinstance(x, nn.Linear) and hasattr(x.weight, "qdata")]
    assert packed
    for linear in packed:
        linear.weight = nn.Parameter(linear.weight.dequantize())
    return model


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["gated-deltanet-sliding", "attention-kept"])
@torch.no_grad()
def test_a_student_in_few_bits_is_the_student_of_these_weights_also_when_saved(
    name, bits, tmp_path
):
    make_model(CASE[name], num_hidden_layers=2).save_pretrained(tmp_path / "student")
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path / "student", quantization_config=TorchAoConfig(BITS[bits])
    )
    tokens = random_tokens(2, 20)
    logits = quantized(tokens).logits
    plain = unpacked(quantized)
    rounded = plain(tokens).logits
    assert_close(logits, plain.double()(tokens).logits, rounded)
    quantized.save_pretrained(tmp_path / "packed")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(loaded(tokens).logits, logits)
    assert torch.equal(generate(loaded, tokens), generate(quantized, tokens))
