"""The versions that the package allows and those that are tested agree."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ALLOWED = {
    canonicalize_name(x.name): x.specifier for x in map(Requirement, PROJECT["dependencies"])
}


def pinned_versions() -> dict[str, str]:
    """The version of each package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version for name, version in pins}


def test_versions_that_tests_run_with_are_allowed():
    versions = pinned_versions()
    assert {name for name, allowed in ALLOWED.items() if versions[name] not in allowed} == set()


def test_each_dependency_has_a_lower_bound():
    assert {
        name for name, allowed in ALLOWED.items() if ">=" not in {x.operator for x in allowed}
    } == set()


def test_the_upper_bound_of_transformers_is_what_follows_the_version_that_tests_run_with():
    major, minor, _ = Version(pinned_versions()["transformers"]).release
    upper = next(x.version for x in ALLOWED["transformers"] if x.operator == "<")
    assert upper == f"{major}.{minor + 1}"
