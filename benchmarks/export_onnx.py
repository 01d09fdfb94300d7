"""Models as ONNX graphs for any number of rows and tokens: do they give our logits in onnxruntime?

    pip install onnx onnxruntime onnxscript
    python benchmarks/export_onnx.py              # minutes; or: python benchmarks/export_onnx.py DeltaNet KDA
    python benchmarks/export_onnx.py student      # a model in a folder

Small random models in float32, exported by transformers' exporter with 2 rows of 12 tokens, and run with 3 rows of 37
and 1 row of 130. Where states have a fixed size, a step is exported, too: one token of each of 2 rows, given the states
after 12 tokens, and run 8 times, each time with the states that it returned before. Prints a table: the largest
differences of logits, relative to the largest logit, or the error.
"""

import contextlib
import io
import logging
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, StaticCache
from transformers.exporters.base import ExportedModel
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

import hf_memory  # noqa: F401, registers our models

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,  # at 0.02 a wrong state would hardly show
}
MAMBA = {"gate": "mamba2", "linear_key_head_dim": 16, "linear_value_head_dim": 16}
WINDOW = {"layer_types": ["sliding_heads"], "sliding_window": 4}
FULL = {"full_attention_heads": [[1]]}
OWN_WINDOW = {"layer_types": ["sliding_memory"], "sliding_window": 4}
SLOTS = {**OWN_WINDOW, "num_memory_slots": 6}
KEPT = {"num_sink_tokens": 2, "num_kept_tokens": 6, "kept_block_size": 4}
PATTERN = {"pattern_size": 4}
PAST = {"past_window": 4, "segment_length": 4}
COMPRESSIVE = {**PAST, "past": "compressive", "compression_rate": 2, "compressed_length": 3}
MEMORIZING = {**PAST, "past": "memorizing", "memory_size": 20, "memory_top_k": 16}
PRODUCT_KEYS = {
    "mlp_types": ["memory"],
    "num_product_keys": 6,
    "product_key_heads": 2,
    "product_key_dim": 8,
    "product_key_top_k": 3,
}
FORMS = {
    "Linear Transformer": ("linear", {}),
    "gated linear attention": ("gated", {}),
    "Mamba-2": ("gated", MAMBA),
    "DeltaNet": ("deltanet", {}),
    "Gated DeltaNet": ("deltanet", {"gate": "scalar"}),
    "KDA": ("deltanet", {"gate": "vector"}),
    "RWKV-7": ("rwkv7", {}),
    "DeltaFormer": ("deltaformer", {}),
    "DeltaFormer in a window": ("deltaformer", OWN_WINDOW),
    "linear attention beside a window": ("linear", SLOTS),
    "window": ("transformer", {**WINDOW, "num_sink_tokens": 2}),
    "window and full heads": ("transformer", {**WINDOW, **FULL}),
    "kept tokens": ("transformer", {**WINDOW, **KEPT}),
    "kept tokens and full heads": ("transformer", {**WINDOW, **FULL, **KEPT}),
    "Transformer-XL's positions, random": (
        "transformer",
        {**PATTERN, "position": "xl", "pattern": "bigbird"},
    ),
    "strided": ("transformer", {**PATTERN, "pattern": "strided_by_head"}),
    "Shaw's positions": (
        "transformer",
        {**PATTERN, "position": "relative", "pattern": "block_local"},
    ),
    "routing": ("transformer", {"pattern": "routing", "num_buckets": 4}),
    "Infinite attention": ("transformer", {**PAST, "past": "infinite"}),
    "Titans": ("titans", {}),
    "Mamba": ("gated", {"gate": "mamba"}),
    "Mamba-3": ("gated", {**MAMBA, "gate": "mamba3"}),
    "MesaNet": ("gated", {"gate": "mesa"}),
    "Gated KalmaNet": ("gated", {"gate": "kalman"}),
    "log-linear Mamba-2": ("gated", {**MAMBA, "levels": "log"}),
    "log-linear Gated DeltaNet": ("deltanet", {"gate": "scalar", "levels": "log"}),
    "Memory Mosaics": ("mosaic", {}),
    "learned positions": ("transformer", {"position": "learned"}),
    "adaptive spans": (
        "transformer",
        {"pattern": "adaptive_span", "max_span": 8, "span_ramp": 4},
    ),
    "Transformer-XL's segments": ("transformer", {**PAST, "past": "xl"}),
    "Memorizing Transformer": ("transformer", MEMORIZING),
    "compressive, mean": ("transformer", {**COMPRESSIVE, "compression": "mean"}),
    "compressive, max": ("transformer", {**COMPRESSIVE, "compression": "max"}),
    "compressive, most used": ("transformer", {**COMPRESSIVE, "compression": "most_used"}),
    "forget gates": ("transformer", {"position": "forget"}),
    "product keys": ("gated", PRODUCT_KEYS),
    "attention in 4 bits": ("transformer", {"layer_types": ["full_attention"], "cache_bits": 4}),
    "window in 8 bits": ("transformer", {**WINDOW, "num_sink_tokens": 2, "cache_bits": 8}),
    "kept tokens in 8 bits": ("transformer", {**WINDOW, **KEPT, "cache_bits": 8}),
    "kept tokens and full heads in 8 bits": (
        "transformer",
        {**WINDOW, **FULL, **KEPT, "cache_bits": 8},
    ),
    "Gated DeltaNet in 8 bits": (
        "deltanet",
        {"gate": "scalar", "cache_bits": {"recurrent_states": 8}},
    ),
}
EXPORTED = (2, 12)  # rows and tokens
RUN = ((3, 37), (1, 130))
STEPS = 8


def tokens(rows: int, length: int) -> torch.Tensor:
    """Random tokens [rows, length]."""
    return torch.randint(3, SIZES["vocab_size"], (rows, length))


def model_of(name: str) -> PreTrainedModel:
    """The model in a folder; or of a form, random and with one layer, the same at every call."""
    if Path(name).is_dir():
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    family, options = FORMS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(f"hf_memory_{family}", **SIZES, **options)
    return AutoModelForCausalLM.from_config(config).eval()


def exported(model: PreTrainedModel, sample: dict, **options: Any) -> ExportedModel:
    """The graph of a call of the model, which onnxruntime runs."""
    with contextlib.redirect_stdout(io.StringIO()):  # of progress
        return OnnxExporter().export(model, sample, config=OnnxConfig(**options))


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of logits, relative to the largest logit."""
    difference = (torch.as_tensor(found) - expected).abs().max()
    return (difference / expected.abs().max()).item()


def of_texts(model: PreTrainedModel) -> float:
    """The largest difference for whole texts."""
    graph = exported(model, {"input_ids": tokens(*EXPORTED), "use_cache": False}, dynamic=True)
    texts = [tokens(*shape) for shape in RUN]
    return max(off(graph(input_ids=x).logits, model(x).logits) for x in texts)


def of_steps(model: PreTrainedModel) -> float | None:
    """The largest difference for steps after each other; None if a state grows with the text."""
    spec = model.config.state_specs
    if any(state.growth == "token" for layer in spec for state in layer.values()):
        return None
    read = tokens(*EXPORTED)
    step, graph_cache, our_cache = (_read(model, read) for _ in range(3))
    sample = {"input_ids": read[:, :1], "past_key_values": step}
    # of known shapes, onnxscript 0.7.2 drops reshapes that change a product
    graph = exported(model, sample, dynamic=False, optimize=False)
    largest = 0.0
    for token in tokens(EXPORTED[0], STEPS).split(1, 1):
        found = graph(input_ids=token, past_key_values=graph_cache)
        graph_cache = found.past_key_values
        expected = model(token, past_key_values=our_cache).logits
        largest = max(largest, off(found.logits, expected))
    return largest


def _read(model: PreTrainedModel, read: torch.Tensor) -> StaticCache:
    """A cache that has read these tokens."""
    cache = StaticCache(config=model.config, max_cache_len=64)
    model(read, past_key_values=cache)
    return cache


def cell(measure: Callable, model: PreTrainedModel) -> str:
    """A difference, or the error."""
    try:
        result = measure(model)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return "-" if result is None else f"{result:.1e}"


@torch.no_grad()
def main(names: list[str]) -> None:
    """Print the table of some forms or folders, or of all forms."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    onnxruntime.set_default_logger_severity(4)
    versions = f"onnxruntime {onnxruntime.__version__}, transformers {transformers.__version__}"
    print(f"{platform.machine()}, torch {torch.__version__}, {versions}\n")
    print("| form | texts | steps |\n|---|---|---|")
    for name in names or FORMS:
        model = model_of(name)
        print(f"| {name} | {cell(of_texts, model)} | {cell(of_steps, model)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
