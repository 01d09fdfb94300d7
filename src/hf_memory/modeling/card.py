"""Model cards of models that are saved or pushed without one: what the model is, and how it is loaded."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedConfig, PreTrainedModel
from yaml import YAMLError

from hf_memory.address import INSTALL

CARD = "README.md"
TASKS = {  # by the end of a class name: the Auto class that loads it, and the Hub's name of what it does
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "Model": ("AutoModel", "feature-extraction"),
}
CONTEXTS = (1024, 8192, 32768)  # tokens after which the cache is measured
TEXT = """# A memory model of type `{kind}`

A model of the family {family} of the package hf_memory, with {parameters:,} parameters: {layers} layers ({kinds}),
hidden size {width}, vocabulary of {vocabulary:,} tokens. What it keeps of one text: {caches}.

```python
import hf_memory  # registers the model type with transformers
from transformers import {auto}

model = {auto}.from_pretrained("path/or/repo/of/this/model")
```

To install hf_memory: {install}. Where it is installed, `trust_remote_code=True` can take the place of
the import. This card was written when the model was saved; nothing was measured.
"""


def make_card(model: PreTrainedModel) -> ModelCard:
    """The card of a model of this package that has none; its base model is that of the folder it was loaded from."""
    config = model.config
    auto, task = next(x for end, x in TASKS.items() if type(model).__name__.endswith(end))
    kinds = [str(kind) for kind in config.layer_types]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        base_model=_base_model(config),
        tags=["hf_memory", config.model_type],
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


def is_blank(card: ModelCard) -> bool:
    """Whether a card is the one that transformers makes of nothing."""
    described = (
        "This is the model card of a \N{HUGGING FACE} transformers model that has been pushed on the Hub. "
        "This model card has been automatically generated."
    )
    return card.text == ModelCard.from_template(ModelCardData(), model_description=described).text


def _base_model(config: PreTrainedConfig) -> str | list[str] | None:
    """The base model in the card beside the files that a model was loaded from, if these are in a folder."""
    card = Path(config.name_or_path or ".") / CARD
    if not config.name_or_path or not card.is_file():
        return None
    try:
        return ModelCard.load(card).data.base_model
    except (ValueError, YAMLError):  # a card that the Hub would refuse
        return None


def _cache_bytes(model: PreTrainedModel, num_tokens: int) -> int:
    states = [state for spec in model.config.state_specs for state in spec.values()]
    return sum(state.nbytes(num_tokens, model.dtype) for state in states)
