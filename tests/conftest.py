"""Settings every test shares: Triton kernels run in the interpreter, one thread a worker, no network."""

import functools
import gc
import os
from importlib.util import find_spec

os.environ["TRITON_INTERPRET"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_finish():
    """The garbage collector leaves out what was imported: accelerate calls it at each stage of training."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def freeze_what_stays():
    """And what a file leaves behind, such as all that torch.compile imports and keeps."""
    yield
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """Else libraries that look at the end for what they have lost find it."""
    gc.unfreeze()


if find_spec("triton"):
    from triton.runtime import interpreter

    adapt_once = functools.cache(interpreter._patch_lang)
    restore = interpreter._LangPatchScope.restore

    def call_device_function(self, *args, **kwargs):
        """As the interpreter does, which adapts all of triton.language anew at each call, in half of its time."""
        adapt_once(self.fn)
        return self.rewrite()(*args, **kwargs)

    def restore_and_forget(self):
        """After a kernel, what it adapted is as it was, and what its device functions adapted too."""
        restore(self)
        adapt_once.cache_clear()

    interpreter.InterpretedFunction.__call__ = call_device_function
    interpreter._LangPatchScope.restore = restore_and_forget
