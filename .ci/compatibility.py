"""The contract tests with the oldest and with the newest version of each dependency that pyproject.toml allows.

Each has an environment in .compatibility, which later calls bring up to date. pip takes packages from PyPI, whose torch
for Linux is the build for CUDA of several GB, or from the places in PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and
PIP_FIND_LINKS; the CPU build is at download.pytorch.org/whl/cpu.
"""

import argparse
import re
import subprocess
import tomllib
import venv
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = (
    "cache",
    "cache_argument",
    "cli",
    "generation",
    "hub",
    "kernels",
    "loading",
    "mixers",
    "modeling",
    "recipes",
    "registration",
    "training",
)
TOOLS = ("pytest>=8.4", "pytest-xdist>=3.7", "datasets>=4", "trl")  # for tests alone
INSTALL = {
    "oldest": ["numpy<2.4"],  # with which Triton 3.6 interprets kernels
    "newest": ["--upgrade", "--upgrade-strategy", "eager", "torchao>=0.18"],
}
SPILLS = "tests/test_kernels.py::test_kernels_compile_ahead_of_time_without_spills"
TEST = {
    "oldest": ["--deselect", SPILLS],  # Triton 3.6 compiles them, and 28 to 128 bytes spill
    "newest": [
        "tests/test_torchao.py"
    ],  # here alone: every program prints its warnings once it is installed
}


def main() -> None:
    """Install and test; fails if the tests of an environment do."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", choices=[[], *INSTALL], help="which; default: both")
    parser.add_argument(
        "--environments",
        type=Path,
        default=ROOT / ".compatibility",
        help="folder of the environments",
    )
    parser.add_argument("--processes", default="2", help="of pytest-xdist")
    arguments = parser.parse_args()
    failed = []
    for versions in arguments.versions or INSTALL:
        folder = arguments.environments.absolute() / versions
        install(folder, versions)
        print(versions, *installed(folder), flush=True)
        tests = [f"tests/test_{name}.py" for name in FILES]
        command = [
            folder / "bin" / "pytest",
            "--numprocesses",
            arguments.processes,
            "-m",
            "not planted",
            *TEST[versions],
            *tests,
        ]
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(versions)
    if failed:
        raise SystemExit(f"tests failed with the versions: {', '.join(failed)}")


def install(folder: Path, versions: str) -> None:
    """Make an environment, or bring it up to date."""
    if not folder.exists():
        venv.create(folder, with_pip=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(
        "".join(f"{x}\n" for x in lower_bounds()) if versions == "oldest" else ""
    )
    pip = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        constraints,
    ]
    subprocess.run(
        [*pip, *INSTALL[versions], *TOOLS, "--editable", "."],
        cwd=ROOT,
        check=True,
    )


def dependencies() -> list[str]:
    """The requirements of the package, without extras."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def lower_bounds() -> list[str]:
    """Each requirement with its lower bound as the only version."""
    return [re.sub(r">=([^,;]+)[^;]*", r"==\1", requirement) for requirement in dependencies()]


def installed(folder: Path) -> list[str]:
    """The versions of the dependencies in an environment."""
    names = {
        re.match(r"[\w-]+", requirement)[0].replace("-", "_") for requirement in dependencies()
    }
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    found = {
        x.name.lower().replace("-", "_"): x.version for x in distributions(path=[str(packages)])
    }
    return [f"{name}=={found[name]}" for name in sorted(names & found.keys())]


if __name__ == "__main__":
    main()
