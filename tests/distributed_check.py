"""Run by torchrun in two processes: a model spread over both gives the logits of one. Prints what differs."""

import os
import sys

import torch
import torch.distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_memory  # noqa: F401  (registers the families)


def logits(folder, **options):
    """On 17 tokens, whole on every process."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        result = model(torch.arange(3, 20)[None]).logits
    return result.full_tensor() if hasattr(result, "full_tensor") else result


def main() -> None:
    """Arguments: how to spread (tp_size, fsdp_size or pp_size), then folders of models."""
    torch.set_num_threads(1)
    way, *folders = sys.argv[1:]
    for folder in folders:
        expected = logits(folder)
        difference = logits(folder, distributed_config=DistributedConfig(**{way: 2})) - expected
        if os.environ["RANK"] == "0":
            print(os.path.basename(folder), (difference.abs().max() / expected.abs().max()).item(), flush=True)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # without winding down: threads of gloo that still hold tensors then abort the process now and then


if __name__ == "__main__":
    main()
