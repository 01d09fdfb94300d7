"""How many kernels a decode step of a layer launches on a GPU, counted without one: `python benchmarks/launches.py`.

Steps of models with two and three layers are run on the CPU, with our kernels in Triton's interpreter, and the
operations of PyTorch are counted that compute something; the difference is that of a layer. PyTorch's RMS norm counts
as one, which it is on CUDA. Prints a line for each model, with its most frequent operations.
"""

import argparse
import collections
import os
from contextlib import ExitStack
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

import hf_memory  # noqa: F401  (registers the families)
from hf_memory.cache_argument import CACHE, cache_of
from hf_memory.ops import contract, rwkv7_gates, short_convolution

WINDOWS = {"layer_types": ["sliding_heads"], "sliding_window": 4}
HEADS = {**WINDOWS, "full_attention_heads": [[1]]}
MODELS = {  # options that are lists are repeated for each layer
    "Llama": ("llama", {}),
    "Linear Transformer": ("hf_memory_linear", {}),
    "GLA": ("hf_memory_gated", {"gate": "vector"}),
    "DeltaNet": ("hf_memory_deltanet", {}),
    "Gated DeltaNet": ("hf_memory_deltanet", {"gate": "scalar"}),
    "KDA": ("hf_memory_deltanet", {"gate": "vector"}),
    "RWKV-7": ("hf_memory_rwkv7", {}),
    "windows": ("hf_memory_transformer", WINDOWS),
    "windows, sinks": ("hf_memory_transformer", {**WINDOWS, "attention_sinks": True}),
    "windows, virtual token": ("hf_memory_transformer", {**WINDOWS, "virtual_token": True}),
    "windows, a full head": ("hf_memory_transformer", HEADS),
    "windows, sinks, a full head": ("hf_memory_transformer", {**HEADS, "attention_sinks": True}),
    "windows, virtual token, a full head": ("hf_memory_transformer", {**HEADS, "virtual_token": True}),
}
SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
FREE = "view unsafe_view transpose unsqueeze slice select expand permute split split_with_sizes squeeze t alias detach "
FREE += "unbind as_strided reshape chunk narrow promote_types empty empty_like new_empty"


class Launches(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.__name__.split(".")[0]
        if name.strip("_") not in FREE.split():
            self.counts[name] += 1
        return operation(*args, **(kwargs or {}))


pytorch_rms_norm = F.rms_norm


@torch.library.custom_op("hf_memory_benchmarks::rms_norm", mutates_args=())
def one_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float | None) -> torch.Tensor:
    """PyTorch's, as one operation."""
    return pytorch_rms_norm(x, x.shape[-1:], weight, eps)


def count_norm(x: torch.Tensor, shape, weight: torch.Tensor | None = None, eps: float | None = None) -> torch.Tensor:
    """`F.rms_norm` as one operation."""
    return one_rms_norm(x, weight, eps)


def step(model_type: str, options: dict, layers: int) -> collections.Counter:
    """The operations of a step after eight tokens."""
    options = {name: x * layers if isinstance(x, list) else x for name, x in options.items()}
    config = AutoConfig.for_model(model_type, **SIZES, num_hidden_layers=layers, **options)
    model, tokens = AutoModelForCausalLM.from_config(config).eval(), torch.ones(1, 8, dtype=torch.long)
    with torch.no_grad():
        cache = cache_of(model(tokens, use_cache=True))
        with Launches() as launches:
            model(tokens[:, :1], **{CACHE: cache}, use_cache=True)
    return launches.counts


def as_on_cuda(backend: str, q: torch.Tensor, kernel_refuses: str | None) -> str:
    """`choose_backend` for tensors that are taken to be on a GPU."""
    if backend == "auto":
        return "chunk" if kernel_refuses else "triton"
    return backend


def main() -> None:
    """A line for each model."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(F, "rms_norm", count_norm))
        for module in (contract, rwkv7_gates, short_convolution):
            patches.enter_context(mock.patch.object(module, "choose_backend", as_on_cuda))
        for name, (model_type, options) in MODELS.items():
            counts = step(model_type, options, 3) - step(model_type, options, 2)
            most = ", ".join(f"{operation} {n}" for operation, n in counts.most_common(8))
            print(f"{name:35} {sum(counts.values()):4} launches a layer: {most}", flush=True)


if __name__ == "__main__":
    main()
