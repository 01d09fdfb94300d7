"""The package of our ops for the `kernels` library: it needs torch and triton alone, and computes what the ops do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOREIGN = ("hf_memory", "transformers", "huggingface_hub", "safetensors", "accelerate")
LOAD = """
import importlib.util, json, sys
from pathlib import Path

for name in {foreign}:
    sys.modules[name] = None  # its import is an error

import torch

variant = Path({variant!r})
identity = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(identity, variant / "__init__.py")
sys.modules[identity] = ops = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ops)
for name in ("linear_attention", "delta_rule", "deltaformer", "neural_memory"):
    (op,) = [op for op in ops.OPS if op.name == name]
    given = op.example(B=1, T=8, **op.variants[0])
    if op.growth == "token":
        given |= dict(initial_state=None, mask=None)
    found, expected = (op.op(**given, backend=form)[0] for form in ("triton", "reference"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
names = {{name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names() if "hf_memory" in name}}
assert names == {{identity}}, names
"""


@pytest.fixture
def package(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / ".ci")
    import kernel_package

    return kernel_package


def test_the_package_needs_torch_and_triton_alone_and_its_kernels_equal_the_reference(
    package, tmp_path
):
    package.build(tmp_path)
    program = LOAD.format(foreign=FOREIGN, variant=str(tmp_path / "build" / "torch-cpu"))
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.stderr == ""
    assert done.returncode == 0


def test_the_layout_is_that_of_the_kernels_library(package, tmp_path):
    """A variant without compiled code for each backend, with the fields that metadata.json must have."""
    package.build(tmp_path, version=3)
    variants = {path.name: path for path in (tmp_path / "build").iterdir()}
    assert set(variants) == {"torch-cuda", "torch-cpu"}
    for name, folder in variants.items():
        metadata = json.loads((folder / "metadata.json").read_text())
        assert set(metadata) == {"name", "id", "version", "license", "python-depends", "backend"}
        assert metadata["version"] == 3
        assert metadata["backend"] == {"type": name.removeprefix("torch-")}
        assert metadata["id"].isidentifier()
        sources = [path.read_text() for path in folder.rglob("*.py")]
        assert not any("from hf_memory" in text or '"hf_memory::' in text for text in sources)
    with pytest.raises(ValueError, match="output must be"):
        package.build(tmp_path)
