"""What registration.py changes in transformers and peft is still needed; a failing test names what to delete there."""

import inspect

import pytest
from peft import LoraConfig, get_peft_model
from peft.utils import constants
from transformers import PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING
from transformers.cli.serving import model_manager

from cases import CASES, LAYER_OF_NEW_KIND, kinds_of_layers, make_model
from hf_memory.cache import MemoryLayer
from hf_memory.modeling.registration import KnownToPeft


def test_each_kind_of_layer_is_in_the_table_of_cases_once():
    known = set()
    for case in CASES:
        kinds = kinds_of_layers(case)
        new = {*kinds} - known
        known |= new
        assert (case.name in LAYER_OF_NEW_KIND) == bool(new), case.name
        number = LAYER_OF_NEW_KIND.get(case.name)
        assert number is None or new == {kinds[number]}, case.name


def test_configs_of_transformers_refuse_unknown_layers():
    assert PreTrainedConfig(num_hidden_layers=1, layer_types=["memory"]).layer_types == ["memory"]
    with pytest.raises(Exception, match="layer_types"):
        PreTrainedConfig(num_hidden_layers=1, layer_types=["other"])


def test_static_caches_do_not_find_layers_by_their_type():
    type("Other", (MemoryLayer,), {"_layer_type": "other"})
    assert DYNAMIC_LAYER_TYPE_MAPPING.pop("other")
    assert "other" not in STATIC_LAYER_TYPE_MAPPING


def test_the_server_looks_for_classes_in_transformers():
    assert "getattr(transformers, config.architectures[0])" in inspect.getsource(model_manager)


def test_peft_has_no_targets_for_unknown_models(monkeypatch):
    targets = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    monkeypatch.delitem(targets, CASES[0].model_type, raising=False)
    monkeypatch.delattr(KnownToPeft, "to_dict")
    with pytest.raises(ValueError, match="target_modules"):
        get_peft_model(make_model(CASES[0]), LoraConfig(task_type="CAUSAL_LM"))
