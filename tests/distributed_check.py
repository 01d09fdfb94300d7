"""A model spread over two processes gives the logits and the gradients of one. Prints what differs."""

import os
import signal
import socket
import sys
from pathlib import Path

import torch
import torch.distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_memory  # noqa: F401  (registers the families)


def become(number: int) -> None:
    """Go on in several processes, as torchrun starts them but with one import for all; a failure ends all."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    size = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    os.environ |= {**size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.setpgrp()
    for rank in map(str, range(number)):
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
        if not os.fork():
            return
    for _ in range(number):
        if os.wait()[1]:
            os.killpg(0, signal.SIGKILL)
    os._exit(0)


TOKENS = torch.arange(3, 20)[None]


def logits(folder, **options):
    """Whole on every process."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        return whole(model(TOKENS).logits)


def gradients(folder, **options):
    """The gradients of all parameters."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options).train()
    model(TOKENS, labels=TOKENS).loss.backward()
    return torch.cat([whole(x.grad).flatten() for x in model.parameters()])


def whole(x):
    """A tensor that may be spread."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def spread_by(way: str) -> DistributedConfig:
    """Over two processes; with experts in one process each, other parts are spread by tensor parallelism."""
    return (
        DistributedConfig(tp_size=2, ep_size=2)
        if way == "ep_size"
        else DistributedConfig(**{way: 2})
    )


def main() -> None:
    """Arguments: a folder, then what to compare, a way to spread and a model each.

    Ways are tp_size, ep_size, fsdp_size and pp_size.
    """
    torch.set_num_threads(1)
    folder, *spread = sys.argv[1:]
    become(2)
    for which in spread:
        what, way, model = which.split("/")
        compared = {"logits": logits, "gradients": gradients}[what]
        expected = compared(Path(folder, model))
        difference = compared(Path(folder, model), distributed_config=spread_by(way)) - expected
        if os.environ["RANK"] == "0":
            print(which, (difference.abs().max() / expected.abs().max()).item(), flush=True)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(
        0
    )  # without winding down: threads of gloo that still hold tensors then abort the process now and then


if __name__ == "__main__":
    main()
