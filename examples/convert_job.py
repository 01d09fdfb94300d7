# /// script
# requires-python = ">=3.11"
# dependencies = ["hf-memory[data]"]
#
# [tool.uv.sources]
# hf-memory = { index = "wheels" }
#
# [[tool.uv.index]]
# name = "wheels"
# url = "/wheels"
# format = "flat"
# explicit = true
#
# [tool.hf-jobs]
# flavor = "l4x1"
# timeout = "6h"
# secrets = ["HF_TOKEN"]
# volumes = ["./wheels:/wheels"]
# ///
"""Convert a Transformer on a machine of Hugging Face Jobs, and upload the student to a private repository.

    pip wheel --no-deps . --wheel-dir wheels
    hf jobs uv run examples/convert_job.py TEACHER me/student --text someone/a-data-set --max-tokens 600000

What follows the repository are options of `hf-memory convert`. The job takes hf_memory from its wheel, and all else
from PyPI: the package has no public address yet, and the block above keeps its name from being looked up elsewhere.
"""

import argparse
import subprocess
import sys

from huggingface_hub import HfApi

STUDENT = "student"


def main(arguments: list[str]) -> None:
    """Convert and upload.

    Args:
        arguments: the teacher, the repository, and options of `hf-memory convert`.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("teacher", help="a name on the Hub")
    parser.add_argument("repository", help="where the student goes, such as me/student")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of hf-memory convert")
    given = parser.parse_args(arguments)
    api = HfApi()
    api.create_repo(given.repository, private=True, exist_ok=True)  # fails now, not after hours
    convert = ["convert", given.teacher, "--output", STUDENT, *given.options]
    subprocess.run([sys.executable, "-m", "hf_memory", *convert], check=True)
    api.upload_folder(repo_id=given.repository, folder_path=STUDENT)


if __name__ == "__main__":
    main(sys.argv[1:])
