"""Settings every test shares: Triton kernels run in the interpreter, one thread a worker, no network."""

import gc
import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

torch.set_num_threads(1)


def pytest_collection_finish():
    """The garbage collector leaves out what was imported: accelerate calls it at each stage of training."""
    gc.freeze()


def pytest_sessionfinish():
    """Else libraries that look at the end for what they have lost find it."""
    gc.unfreeze()
