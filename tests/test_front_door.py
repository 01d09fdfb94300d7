"""What a newcomer meets first: `hf-memory` and `python -m hf_memory`, how threads wait, versions, addresses."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import hf_memory
import hf_memory_cli
from hf_memory.address import ADDRESS

ROOT = Path(__file__).parents[1]
# Imported by a process at its start, this prints how threads wait when torch is imported, and ends it if that was set.
WATCH = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            policy = os.environ.get("OMP_WAIT_POLICY")
            print(policy, flush=True)
            if policy is not None:
                os._exit(0)

sys.meta_path.insert(0, Watch())
"""


@pytest.fixture
def waiting(tmp_path):
    """Start Python with some arguments; returns how threads wait each time that it imports torch."""
    (tmp_path / "sitecustomize.py").write_text(WATCH, encoding="utf-8")

    def start(*arguments: str, **variables: str) -> list[str]:
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        environment = {name: x for name, x in os.environ.items() if name != "OMP_WAIT_POLICY"}
        environment |= {"PYTHONPATH": path, **variables}
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True
        )
        return done.stdout.split()

    return start


COMMAND = (
    "import sys, hf_memory_cli; sys.argv = ['hf-memory', 'info', 'nowhere']; hf_memory_cli.app()"
)


def test_threads_of_a_command_sleep_while_they_wait(waiting):
    assert waiting("-c", COMMAND) == ["PASSIVE"]


def test_a_command_keeps_what_the_user_has_set(waiting):
    assert waiting("-c", COMMAND, OMP_WAIT_POLICY="ACTIVE") == ["ACTIVE"]


def test_the_package_as_a_module_is_the_command(waiting):
    """It imports torch with the package before it can set how threads wait, so it starts anew."""
    assert waiting("-m", "hf_memory", "info", "nowhere") == ["None", "PASSIVE"]


def test_a_command_shows_no_bars_of_libraries(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "")  # which is restored after the test
    monkeypatch.delenv("TQDM_DISABLE")
    monkeypatch.setattr(hf_memory_cli, "commands", lambda **how: None)
    hf_memory_cli.app()
    assert os.environ["TQDM_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["convert", "llama"],
            "Missing option '--text'. Training text: folder of text, text file,",
        ),
        (["convert"], "Missing argument 'TEACHER'. Folder, Hub name or GGUF file"),
        (["fine-tune"], "Missing argument 'MODEL'. Folder, Hub name or GGUF file"),
    ],
)
def test_what_is_missing_is_said_with_what_it_is(words, told, run):
    code, _, err = run(*words)
    assert told in " ".join(err.replace("\u2502", " ").split())
    assert code == 2


def test_importing_the_library_changes_no_environment(tmp_path):
    code = "import os; before = dict(os.environ); import hf_memory; print([x for x in os.environ if x not in before])"
    environment = {name: x for name, x in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", ["conversion.distill", "decoding.EarlyExit"])
def test_subpackages_are_there_when_asked_for_and_not_before(name):
    code = f"""import sys, hf_memory
assert "hf_memory.{name.partition(".")[0]}" not in sys.modules
print(hf_memory.{name}.__name__)"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == name.rpartition(".")[2]


def test_the_version_is_that_of_the_package():
    done = subprocess.run(
        [sys.executable, "-m", "hf_memory_cli", "--version"], capture_output=True, text=True
    )
    assert done.stdout.strip() == hf_memory.__version__


def test_the_citation_has_the_version():
    assert (
        yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"]
        == hf_memory.__version__
    )


def test_the_address_stands_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project.get("urls", {}).get("Repository", "") == ADDRESS
