"""`python -m hf_memory.cli`, which launchers of several processes need."""

from hf_memory_cli import app

if __name__ == "__main__":
    app()
