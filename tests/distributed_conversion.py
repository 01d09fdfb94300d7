"""Two processes on the CPU: convert and leave students in a folder, or are the command line."""

import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import TrainerCallback

import hf_memory_cli
from distributed_check import become
from hf_memory.conversion import Run, processes
from teachers import RUN, SCHEDULE, convert, make_teacher, text

STAGES = dict.fromkeys(("transfer", "distillation"), SCHEDULE._replace(steps=6))


class Stop(TrainerCallback):
    """Ends the program's stage after its fifth step, as an error would."""

    def on_step_end(self, args, state, control, **kwargs):
        """Raise."""
        if args.run_name == "distillation" and state.global_step == 5:
            raise InterruptedError


def shard_on_the_cpu() -> None:
    """Accelerate shards on accelerators alone; tell it that the processes have one, with the CPU as device."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "ACCELERATE_TORCH_DEVICE": "cpu",
    }
    os.environ |= {
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }
    PartialState._reset_state()
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)


def convert_and_save(name: str, folder: Path, **run) -> None:
    """The student, from the first process."""
    made = convert(make_teacher(), text(), run=Run(**run), **RUN | STAGES)
    if processes().is_main_process:
        made.student.save_pretrained(folder / name)


def main() -> None:
    """Arguments: a folder, or those of the command line."""
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        shard_on_the_cpu()
        try:
            return hf_memory_cli.app()
        finally:  # before gloo's threads can abort the process on its way out
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    folder = Path(sys.argv[1])
    become(2)
    convert_and_save("copied", folder)
    shard_on_the_cpu()
    convert_and_save("sharded", folder)
    try:
        convert_and_save("resumed", folder, checkpoints=folder / "checkpoints", callbacks=(Stop(),))
    except InterruptedError:
        convert_and_save("resumed", folder, checkpoints=folder / "checkpoints")
    return torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
