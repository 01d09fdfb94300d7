"""Does a memory learn more if the window beside it is left out at times? Hybrids can bypass their memory (2510.05901).

    python benchmarks/window_dropout.py  # an hour on one core; goes on where it was stopped

Students of benchmarks/twins.py with slots beside a window, in which eight heads or a quarter of the layers keep
everything. With dropout, each layer's window shrinks to 16 tokens in a training step with a chance that falls from 0.75
to 0 over three quarters of each stage. KL and recall are those of twins.py. Writes
benchmarks/results/window_dropout.json.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from random import Random

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import smollm2
import twins
from hf_memory.files.folders import replaced
from hf_memory.mixers.windowed import WindowedMixer
from hf_memory.progress import Progress

RESULTS = smollm2.ROOT / "benchmarks" / "results" / "window_dropout.json"
SHORT = 16  # tokens of a shrunk window
CHANCE, UNTIL = 0.75, 0.75  # of it at first, and the part of a stage after which there is none
KEPT = {"8 heads": "retrieval:1/11", "1/4 of layers": "1/4"}  # what keeps everything


@contextmanager
def window_dropout(dice: Random) -> Iterator[None]:
    """Shrink windows as above where gradients are taken; a stopwatch is told what part of a stage is done."""
    done, tell = 1.0, smollm2.Stopwatch.tell

    def told(watch: smollm2.Stopwatch, progress: Progress) -> None:
        nonlocal done
        done = progress.done / progress.total
        tell(watch, progress)

    def shrink(mixer, _) -> None:
        if isinstance(mixer, WindowedMixer) and torch.is_grad_enabled():
            if "usual" not in vars(mixer):
                mixer.usual, mixer.config = mixer.config.sliding_window, copy(mixer.config)
            is_short = dice.random() < CHANCE * (1 - done / UNTIL)
            mixer.config.sliding_window = SHORT if is_short else mixer.usual
            mixer.window = mixer.window._replace(size=mixer.config.sliding_window)

    smollm2.Stopwatch.tell = told
    hook = register_module_forward_pre_hook(shrink)
    try:
        yield
    finally:
        hook.remove()
        smollm2.Stopwatch.tell = tell


def main() -> None:
    """Make what is not there yet."""
    logging.disable_progress_bar()
    teacher, tokenizer, tokens, held_out = smollm2.materials()
    slots = twins.recipes()["slots, 8 heads, 256 entries, seed 1"]
    found = twins.read(RESULTS)
    for kept, keep in KEPT.items():
        usual = f"slots, {kept}, 256 entries, seed 1"
        for name, around in ((f"{usual}, dropout", window_dropout(Random(0))), (usual, nullcontext())):
            if name in found:
                continue
            with around:  # students without dropout are those of twins.py
                recipe = replace(slots, keep=keep)
                folder, _ = smollm2.make(f"twins, {name}", recipe, teacher, tokenizer, tokens, {"bf16": True})
            student = AutoModelForCausalLM.from_pretrained(folder).eval()
            measures = twins.measures(student, teacher, tokenizer, held_out)
            found[name] = {"KL": measures["by position to 2048"]()["all"]["kl"], "recall": measures["recall"]()}
            with replaced(RESULTS) as partial:
                partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(name, found[name], flush=True)


if __name__ == "__main__":
    main()
