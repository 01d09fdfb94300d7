"""The plans for tensor, data and pipeline parallelism, in two processes on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

from cases import CASES, make_model

SCRIPT = Path(__file__).with_name("distributed_check.py")
SHARDED = ("linear-hedgehog-rope", "linear-full", "gla", "gated-deltanet-sliding", "kda")


@pytest.mark.parametrize(
    ("way", "names"), [("tp_size", SHARDED), ("fsdp_size", SHARDED[:1]), ("pp_size", SHARDED[1:2])]
)
def test_a_model_in_two_processes_equals_one(way, names, tmp_path):
    for case in CASES:
        if case.name in names:
            make_model(case).save_pretrained(tmp_path / case.name)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(SCRIPT), way]
    done = subprocess.run([*command, *(str(tmp_path / name) for name in names)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    differences = dict(line.split() for line in done.stdout.splitlines() if line.startswith(names))
    assert set(differences) == set(names)
    assert max(map(float, differences.values())) < 1e-5
