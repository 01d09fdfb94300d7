"""Models as ONNX graphs for any number of rows and tokens: do they give our logits in onnxruntime?

    pip install onnx onnxruntime onnxscript
    python benchmarks/export_onnx.py              # minutes; or: python benchmarks/export_onnx.py DeltaNet KDA

Small random models in float32, exported by transformers' exporter with 2 rows of 12 tokens, and run with 3 rows of 37
and 1 row of 130. Prints a table: the largest difference of logits, relative to the largest logit, or the error.
"""

import contextlib
import io
import logging
import platform
import sys
import warnings

import onnxruntime
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
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
WINDOW = {"layer_types": ["sliding_heads"], "sliding_window": 4, "full_attention_heads": [[1]]}
KEPT = {"num_sink_tokens": 2, "num_kept_tokens": 6, "kept_block_size": 4}
PATTERN = {"pattern_size": 4}
PAST = {"sliding_window": 4, "num_sink_tokens": 2, "past_window": 4, "segment_length": 4}
FORMS = {
    "Linear Transformer": ("linear", {}),
    "gated linear attention": ("gated", {}),
    "Mamba-2": ("gated", MAMBA),
    "DeltaNet": ("deltanet", {}),
    "Gated DeltaNet": ("deltanet", {"gate": "scalar"}),
    "KDA": ("deltanet", {"gate": "vector"}),
    "RWKV-7": ("rwkv7", {}),
    "DeltaFormer": ("deltaformer", {}),
    "full heads beside windows": ("transformer", WINDOW),
    "kept tokens": ("transformer", {**WINDOW, **KEPT}),
    "Transformer-XL": ("transformer", {**PATTERN, "position": "xl", "pattern": "bigbird"}),
    "Shaw": ("transformer", {**PATTERN, "position": "relative", "pattern": "block_local"}),
    "Infinite": ("transformer", {**PAST, "past": "infinite"}),
    "Titans": ("titans", {}),
}
EXPORTED = (2, 12)  # rows and tokens
RUN = ((3, 37), (1, 130))


def tokens(rows: int, length: int) -> torch.Tensor:
    """Random tokens [rows, length]."""
    return torch.randint(3, SIZES["vocab_size"], (rows, length))


@torch.no_grad()
def difference(family: str, options: dict) -> float:
    """The largest difference of logits of onnxruntime from ours, relative to the largest logit."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(f"hf_memory_{family}", **SIZES, **options)
    model = AutoModelForCausalLM.from_config(config).eval()
    sample = {"input_ids": tokens(*EXPORTED), "use_cache": False}
    with contextlib.redirect_stdout(io.StringIO()):  # of progress
        exported = OnnxExporter().export(model, sample, config=OnnxConfig(dynamic=True))
    largest = 0.0
    for shape in RUN:
        read = tokens(*shape)
        expected = model(read).logits
        found = torch.as_tensor(exported(input_ids=read).logits)
        off = (found - expected).abs().max() / expected.abs().max()
        largest = max(largest, off.item())
    return largest


def main(names: list[str]) -> None:
    """Print the table of some forms, or of all."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    onnxruntime.set_default_logger_severity(4)
    versions = f"onnxruntime {onnxruntime.__version__}, transformers {transformers.__version__}"
    print(f"{platform.machine()}, torch {torch.__version__}, {versions}\n")
    print("| form | difference |\n|---|---|")
    for name in names or FORMS:
        try:
            result = f"{difference(*FORMS[name]):.1e}"
        except Exception as error:
            result = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        print(f"| {name} | {result} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
