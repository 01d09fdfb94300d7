"""`python -m hf_memory_cli`, the same as `hf-memory`."""

from hf_memory_cli import app

if __name__ == "__main__":
    app()
