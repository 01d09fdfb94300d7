"""Saved folders that can be loaded by a process that did not import this package.

transformers finds custom classes by `auto_map` in config.json, which names a module file in the same folder. This
module writes that file: a shim that imports the classes from the installed package, without copying code.
"""

import copy
import os
from pathlib import Path

from huggingface_hub import ModelCard
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from hf_memory.address import INSTALL
from hf_memory.files.folders import replaced
from hf_memory.modeling.card import CARD, card_data, copy_license, is_blank, make_card
from hf_memory.modeling.registration import AUTO_CLASSES, REGISTERED

SHIM_MODULE = "modeling_hf_memory"
SHIM = '''"""The classes of this model; they live in the package hf_memory: {install}."""

try:
    from hf_memory import (
{classes}
    )
except ImportError as error:
    raise ImportError(
        "This model is made of classes from the package hf_memory, which could not be imported: "
        f"{{error}}. Install the newest version: {install}."
    ) from error
'''


class HubClassMixin:
    """Keeps `save_pretrained` of configs and models from copying the code of this package."""

    @classmethod
    def register_for_auto_class(cls, *auto_class):
        """Let `save_pretrained` copy the module of a class derived outside this package; no effect on our classes.

        Args:
            *auto_class (`str` or `type`): the Auto class that should find the class, as in transformers.
        """
        if cls.__module__.split(".")[0] != __name__.split(".")[0]:
            super().register_for_auto_class(*auto_class)


class HubModel(HubClassMixin, PreTrainedModel):
    """For models: what is saved or pushed has a model card, and a card that is there already stays."""

    _card = ""  # the text of the card in the folder to which this model was saved last

    def save_pretrained(self, save_directory, is_main_process: bool = True, **kwargs):
        """Save the model, with a model card unless the folder has one; other arguments are those of transformers.

        Args:
            save_directory (`str` or `os.PathLike`): the folder.
            is_main_process (`bool`, defaults to `True`): whether this process writes.
            kwargs (`dict`): see `PreTrainedModel.save_pretrained`.
        """
        path = Path(save_directory) / CARD
        name = self.config.name_or_path
        loaded = None if path.is_file() else card_data(name)
        self._card = (
            path.read_text(encoding="utf-8") if loaded is None else str(make_card(self, loaded))
        )
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process and path.parent.is_dir() and not path.exists():
            path.write_text(self._card, encoding="utf-8")
            copy_license(name, path.parent, loaded)

    def _upload_modified_files(self, working_dir, *args, **kwargs):
        """Upload a folder, in which transformers may have put a blank card."""
        path = Path(working_dir) / CARD
        pushed = ModelCard.load(path)
        if is_blank(pushed):
            card = ModelCard(self._card)
            tags = [*(card.data.tags or ()), *(pushed.data.tags or ())]
            card.data.tags = list(dict.fromkeys(tags))
            card.save(path)
        return super()._upload_modified_files(working_dir, *args, **kwargs)


class HubConfigMixin:
    """For configs: config.json names the classes of the family, and the shim beside it imports them.

    These entries are only in the file: the config object's `auto_map` holds entries made by others.
    """

    def __post_init__(self, **kwargs):
        # never None: trainers look up custom models in it
        auto_map = kwargs.pop("auto_map", None) or {}
        foreign = {name: value for name, value in auto_map.items() if SHIM_MODULE not in str(value)}
        super().__post_init__(auto_map=foreign, **kwargs)

    def to_json_file(self, json_file_path: str | os.PathLike, use_diff: bool = True):
        """Save as JSON; a config.json gets the shim beside it.

        Args:
            json_file_path (`str` or `os.PathLike`): the file.
            use_diff (`bool`, defaults to `True`): leave out values that are transformers' defaults.
        """
        path = Path(json_file_path)
        saved = self
        classes = auto_classes(type(self))
        if path.name == CONFIG_NAME and classes:
            names = "\n".join(f"        {name}," for name in classes.values())
            # so that no process reads half of it
            with replaced(path.with_name(f"{SHIM_MODULE}.py")) as partial:
                partial.write_text(SHIM.format(classes=names, install=INSTALL), encoding="utf-8")
            saved = copy.copy(self)
            saved.auto_map = {
                auto: f"{SHIM_MODULE}.{name}" for auto, name in classes.items()
            } | self.auto_map
        PreTrainedConfig.to_json_file(saved, json_file_path, use_diff=use_diff)


def auto_classes(config_class: type) -> dict[str, str]:
    """The class name for each Auto class, for a family's config; empty for configs derived outside this package."""
    if config_class not in REGISTERED:
        return {}
    family = REGISTERED[config_class]
    return {
        auto_class.__name__: getattr(family, part).__name__
        for part, auto_class in AUTO_CLASSES.items()
    }
