"""`python -m hf_memory`, the same as `hf-memory`; launchers of several processes need it."""

import os
import sys

from hf_memory_cli import app

if __name__ == "__main__":
    # `python -m` has imported torch with this package already, and GNU OpenMP read then how its threads wait.
    if sys.platform == "linux" and "OMP_WAIT_POLICY" not in os.environ:
        os.execv(sys.executable, [sys.executable, "-m", "hf_memory_cli", *sys.argv[1:]])
    app()
