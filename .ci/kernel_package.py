"""Our ops as a package for the `kernels` library, which needs torch and triton alone: for the Hub, or a local folder.

    python .ci/kernel_package.py --output hf-memory-ops
    python -c "from pathlib import Path; from kernels import get_local_kernel; get_local_kernel(Path('hf-memory-ops'))"

The folder has the layout of kernels 0.17: build/torch-cuda and build/torch-cpu, each a package with metadata.json; and
README.md. Such a package is loaded from any path under a name of its own, beside other versions: so its imports are
relative, and its custom ops are in a namespace that ends in a digest of the sources.
"""

import argparse
import hashlib
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPS = ROOT / "src" / "hf_memory" / "ops"
NAME = "hf-memory-ops"
BACKENDS = ("cuda", "cpu")  # on a CPU, ops run in PyTorch
LICENSE = "Apache-2.0"
IMPORT = re.compile(r"^( *)from hf_memory\.ops(\S*) import ", re.MULTILINE)
CUSTOM_OP = re.compile(r'"hf_memory::')
README = """---
library_name: kernels
license: apache-2.0
tags:
- kernel
---

# Memories of hf_memory as kernels

Linear attention, the delta rule, DeltaFormer and neural memories as functions of tensors, in Triton on CUDA and in
PyTorch elsewhere. Python 3.11 or newer.

```python
from kernels import get_kernel

ops = get_kernel("OWNER/{name}", version={version}, trust_remote_code=True)
o, state = ops.linear_attention(q, k, v, output_final_state=True)  # q, k, v: [batch, tokens, heads, channels]
```
"""


def build(folder: Path, version: int = 1) -> None:
    """Write the package to a folder.

    Args:
        folder: a folder that is new or empty.
        version: that of the kernel on the Hub, which changes when a call of before no longer works.

    Raises:
        ValueError: if there is something in the folder.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"output must be a folder that is new or empty, got {folder}")
    sources = {path.relative_to(OPS): path.read_text("utf-8") for path in sorted(OPS.rglob("*.py"))}
    digest = hashlib.sha256("".join(sources.values()).encode()).hexdigest()[:8]
    for backend in BACKENDS:
        identity = f"_{NAME.replace('-', '_')}_{backend}_{digest}"
        variant = folder / "build" / f"torch-{backend}"
        for path, text in sources.items():
            target = variant / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(in_package(text, path, identity), "utf-8")
        metadata = {
            "name": NAME,
            "id": identity,
            "version": version,
            "license": LICENSE,
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (folder / "README.md").write_text(README.format(name=NAME, version=version))
    shutil.copy(ROOT / "LICENSE", folder)


def in_package(text: str, path: Path, namespace: str) -> str:
    """The source at a path below `ops` with relative imports, and its custom ops in a namespace."""
    dots = "." * len(path.parts)
    text = IMPORT.sub(lambda found: f"{found[1]}from {dots}{found[2].lstrip('.')} import ", text)
    return CUSTOM_OP.sub(f'"{namespace}::', text)


def main() -> None:
    """Read the arguments, and write the package."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path(NAME))
    parser.add_argument("--version", type=int, default=1, help="of the kernel on the Hub")
    given = parser.parse_args()
    build(given.output, given.version)
    print(f"Wrote {given.output}, which kernels.get_local_kernel loads")


if __name__ == "__main__":
    main()
