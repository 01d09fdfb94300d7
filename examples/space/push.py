"""Push the page to a Space of the Hub, with the source of hf_memory, which is not on PyPI.

    hf auth login
    python examples/space/push.py me/two-caches
    python examples/space/push.py me/two-caches --teacher Qwen/Qwen3-0.6B

The Space is private until you change that on its page.
"""

import argparse
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi

import hf_memory

HERE = Path(__file__).parent
TEACHER = "HuggingFaceTB/SmolLM2-135M-Instruct"
LEFT_OUT = ("push.py", "try_in_browser.py", "__pycache__")


def copy_to(folder: Path) -> None:
    """Copy the files of the Space to an empty folder."""
    package = Path(hf_memory.__file__).parent
    left_out = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(HERE, folder, ignore=left_out, dirs_exist_ok=True)
    shutil.copytree(package, folder / package.name, ignore=left_out)


def main() -> None:
    """Make the Space, unless it is there, and upload the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("space", help="where the page goes, such as me/two-caches")
    parser.add_argument("--teacher", default=TEACHER, help="a name on the Hub")
    given = parser.parse_args()
    api = HfApi()
    where = {"repo_id": given.space, "repo_type": "space"}
    api.create_repo(**where, space_sdk="gradio", private=True, exist_ok=True)
    api.add_space_variable(given.space, "TEACHER", given.teacher)
    with TemporaryDirectory() as folder:
        copy_to(Path(folder))
        api.upload_folder(**where, folder_path=folder)
    print(f"https://huggingface.co/spaces/{given.space} shows the page when it is built")


if __name__ == "__main__":
    main()
