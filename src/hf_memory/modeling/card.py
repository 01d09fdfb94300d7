"""Model cards: of models that are saved or pushed without one, and what they have of the card of another model."""

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel
from yaml import YAMLError

from hf_memory.address import INSTALL
from hf_memory.modeling.loading import local_file

CARD = "README.md"
HUB = "https://huggingface.co"
TASKS = {  # by the end of a class name: the Auto class that loads it, and the Hub's name of what it does
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "Model": ("AutoModel", "feature-extraction"),
}
TERMS = ("license", "license_name", "license_link", "language")
TEXTS = ("", ".md", ".txt", ".pdf")  # ends of the names of license files
CONTEXTS = (1024, 8192, 32768)  # tokens after which the cache is measured
TEXT = """# A memory model of type `{kind}`

A model of the family {family} of the package hf_memory, with {parameters:,} parameters: {layers} layers ({kinds}),
hidden size {width}, vocabulary of {vocabulary:,} tokens. What it keeps of one text, in 16 bits: {caches}.

```python
import hf_memory  # registers the model type with transformers
from transformers import {auto}

model = {auto}.from_pretrained("path/or/repo/of/this/model")
```

To install hf_memory: {install}. Where it is installed, `trust_remote_code=True` can take the place of
the import. This card was written when the model was saved; nothing was measured.
"""


def make_card(model: PreTrainedModel, loaded: ModelCardData) -> ModelCard:
    """The card of a model of this package that has none; with the base model and license of what it was loaded from.

    Args:
        model: the model.
        loaded: the data of the card that it was loaded with, see `card_data`.
    """
    config = model.config
    auto, task = next(x for end, x in TASKS.items() if type(model).__name__.endswith(end))
    kinds = [str(kind) for kind in config.layer_types]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        base_model=loaded.base_model or config.teacher_name_or_path,
        base_model_relation=loaded.get("base_model_relation") if loaded.base_model else None,
        tags=["hf_memory", config.model_type],
        **license_and_language(config.name_or_path, loaded),
    )
    text = TEXT.format(
        kind=config.model_type,
        family=type(config).__name__.removesuffix("Config"),
        parameters=model.num_parameters(),
        layers=config.num_hidden_layers,
        kinds=", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)),
        width=config.hidden_size,
        vocabulary=config.vocab_size,
        caches=", ".join(
            f"{_cache_bytes(model, n) / 1e6:,.2f} MB after {n:,} tokens" for n in CONTEXTS
        ),
        auto=auto,
        install=INSTALL,
    )
    return ModelCard(f"---\n{data}\n---\n\n{text}")


def is_on_hub(name: str) -> bool:
    """Whether the name of a model is that of a repository on the Hub, and not of a folder or file."""
    return "/" in name and not Path(name).exists()


def is_blank(card: ModelCard) -> bool:
    """Whether a card is the one that transformers makes of nothing."""
    described = (
        "This is the model card of a \N{HUGGING FACE} transformers model that has been pushed on the Hub. "
        "This model card has been automatically generated."
    )
    return card.text == ModelCard.from_template(ModelCardData(), model_description=described).text


def card_data(name: str | Path) -> ModelCardData:
    """What the card of a model says to the Hub; nothing if no card is on this machine, or the Hub would refuse it.

    Args:
        name: a folder or a name on the Hub; nothing is downloaded.
    """
    try:
        file = local_file(name, CARD) if name else None
        if file is not None:
            return ModelCard.load(file, ignore_metadata_errors=True).data
    except (ValueError, TypeError, OSError, YAMLError):
        return ModelCardData()  # also of a name that no model can have
    return ModelCardData()


def license_and_language(name: str | Path, card: ModelCardData | None = None) -> dict[str, Any]:
    """The license and the languages of a model, which hold for a model that is made from it; see `card_data`.

    Args:
        name: a folder or a name on the Hub.
        card: the data of its card; default: they are read.

    Returns:
        The arguments `license`, `license_name`, `license_link` and `language` of `ModelCardData` that its card has. A
        link to a file of a repository becomes an address; one to a file in a folder stays, see `copy_license`.
    """
    given = (card_data(name) if card is None else card).to_dict()
    link = given.get("license_link")
    if isinstance(link, str) and not is_address(link):
        given["license_link"] = _from_elsewhere(name, link)
    return terms(**{name: given.get(name) for name in TERMS})


def terms(*, language: Any = None, **licenses: Any) -> dict[str, Any]:
    """Arguments of `ModelCardData` with the values that are words, or for `language` a list of words."""
    found = {name: x for name, x in licenses.items() if x and isinstance(x, str)}
    each = language if isinstance(language, list) else [language]
    # YAML takes Norwegian's code for a truth value
    words = ["no" if x is False else x for x in each]
    if words and all(x and isinstance(x, str) for x in words):
        found["language"] = words if isinstance(language, list) else words[0]
    return found


def is_address(link: str) -> bool:
    """Whether a link is an address of the web, and not a file."""
    return re.match("https?://", link) is not None


def copy_license(name: str | Path, folder: Path, card: ModelCardData | None = None) -> None:
    """Copy the file beside the card of a model in a folder to which its `license_link` leads, if it leads to one.

    `card` has the data of the card; default: they are read.
    """
    given = card_data(name) if card is None else card
    file = _license_file(name, given.license_link)
    if file is not None and not (folder / file.name).exists():
        shutil.copyfile(file, folder / file.name)


def _from_elsewhere(name: str | Path, link: str) -> str | None:
    """A link to a file of a model, for the card of another model; None if it leads nowhere."""
    if not Path(name).is_dir():
        return f"{HUB}/{name}/blob/main/{link}"
    return None if _license_file(name, link) is None else link


def _license_file(name: str | Path, link: Any) -> Path | None:
    """A text in the folder `name` itself: no other path, and no symbolic link, which may lead to anything."""
    if not isinstance(link, str) or Path(link).name != link:
        return None
    file = Path(name) / link
    is_text = file.suffix.lower() in TEXTS
    return file if is_text and file.is_file() and not file.is_symlink() else None


def _cache_bytes(model: PreTrainedModel, num_tokens: int) -> int:
    """Bytes of a cache in 16 bits, in which caches are compared."""
    states = [state for spec in model.config.state_specs for state in spec.values()]
    return sum(state.nbytes(num_tokens, torch.bfloat16) for state in states)
