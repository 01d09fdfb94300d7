"""Gates that users register in files of their own."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import nn
from transformers import AutoModelForCausalLM

import hf_memory
from cases import random_tokens
from hf_memory.mixers.delta_net import DeltaNetMixer
from hf_memory.mixers.positions import Positions
from hf_memory.modeling import register_gate
from hf_memory.modeling.gate_registration import TABLES

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


class HalvingMixer(DeltaNetMixer):
    """A DeltaNet whose queries have half their length."""

    def mix(self, projected, context):
        o, states = super().mix(projected, context)
        return o / 2, states


@pytest.fixture
def registered(monkeypatch):
    """DeltaNet with the gate "halving"; the table is as before when the test ends."""
    table = TABLES[hf_memory.DeltaNetConfig]
    monkeypatch.setitem(table, "halving", HalvingMixer)  # so that it is taken out again
    del table["halving"]
    register_gate(hf_memory.DeltaNetConfig, "halving", HalvingMixer)
    return table


def test_a_registered_gate_is_saved_and_loaded(registered, tmp_path):
    model = AutoModelForCausalLM.from_config(
        hf_memory.DeltaNetConfig(**SIZES, gate="halving")
    ).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded.model.layers[0].mixer) is HalvingMixer
    with torch.no_grad():
        assert torch.equal(loaded(random_tokens(1, 9)).logits, model(random_tokens(1, 9)).logits)


def test_loading_names_what_is_missing_where_a_gate_is_not_registered(registered, tmp_path):
    AutoModelForCausalLM.from_config(
        hf_memory.DeltaNetConfig(**SIZES, gate="halving")
    ).save_pretrained(tmp_path)
    del registered["halving"]
    with pytest.raises(
        (ValueError, StrictDataclassClassValidationError),
        match=r"gate must be .*register_gate, got 'halving'",
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    registered["halving"] = HalvingMixer


@pytest.mark.parametrize(
    ("config", "name", "mixer", "message"),
    [
        (hf_memory.TitansConfig, "mine", HalvingMixer, r"config must be .* or DeltaNetConfig, got"),
        (
            hf_memory.DeltaNetConfig,
            "vector",
            HalvingMixer,
            "name must be one that no gate of this family has",
        ),
        (
            hf_memory.DeltaNetConfig,
            "mine",
            torch.nn.Linear,
            "mixer must be a subclass of MemoryMixer",
        ),
    ],
)
def test_a_gate_that_cannot_be_registered_is_refused(config, name, mixer, message):
    with pytest.raises(ValueError, match=message):
        register_gate(config, name, mixer)


class SteadyDecay(nn.Module):
    """Each head keeps half of its memory at each token."""

    def forward(self, hidden_states):
        return hidden_states.new_full((*hidden_states.shape[:2], 2), 0.5).log()


class SteadyMixer(DeltaNetMixer):
    """A DeltaNet whose decay is no pair with sizes of steps, as those of gated linear attention are not."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.decay = SteadyDecay()


def test_a_decay_of_ones_own_may_be_a_tensor(registered, monkeypatch):
    monkeypatch.setitem(registered, "halving", SteadyMixer)
    model = AutoModelForCausalLM.from_config(hf_memory.DeltaNetConfig(**SIZES, gate="halving"))
    mixer = model.model.layers[0].mixer
    positions = torch.zeros(1, 9, 16), torch.zeros(1, 9, 16)
    g = mixer.project(torch.randn(1, 9, 16), Positions(*positions))["g"]
    assert torch.equal(g, torch.full((1, 9, 2), 0.5).log())
    assert model(random_tokens(1, 9)).logits.isfinite().all()
