"""Models whose rows are split over two or four processes give what one process gives. Prints what differs."""

import copy
import os
import sys
from contextlib import nullcontext
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from cases import (
    CASE,
    CASES_OF_CACHES,
    FIRST_OF_FAMILY,
    make_model,
    passes_gradients,
    random_tokens,
)
from distributed_check import become, whole
from hf_memory import context_parallel
from test_own_losses import DIVISIBLE
from test_own_losses import make as with_own_losses

SPLIT = [*FIRST_OF_FAMILY, *(case for case in CASES_OF_CACHES if case not in FIRST_OF_FAMILY)]
SPLIT.append(CASE["gated-sliding-bits"])  # attention in few bits
T = 13
TOKENS = random_tokens(2, T)
WEIGHTS = torch.randn(2, T, 64, dtype=torch.float64)
MASK = torch.ones_like(TOKENS)
MASK[0, :2] = 0
MASK[1, -4:] = 0
LABELS = TOKENS.clone()
LABELS[:, ::3] = -100  # as many targets in each row, since the mean over processes is one of rows
SHARDED = CASE["gated-deltanet-sliding"]
PADDED = torch.ones_like(TOKENS)
PADDED[0, :2] = 0
PADDED[:, -4:] = 0  # the last of four processes gets nothing but padding
FEW_LABELS = TOKENS.masked_fill(PADDED == 0, -100)
FEW_LABELS[0, 2:7] = -100


def of_rows(model, group, mask) -> list:
    """Logits of whole rows, and the gradients of their weighted sum."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    here = slice(rank * T // size, (rank + 1) * T // size)
    model.zero_grad()
    logits = model(TOKENS, attention_mask=mask).logits * (
        1 if mask is None else mask[:, here, None]
    )
    (logits * WEIGHTS[:, here]).sum().backward()
    rows = torch.zeros(2, T, 64, dtype=logits.dtype)
    rows[:, here] = logits.detach()
    found = [
        rows,
        *(torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in model.parameters()),
    ]
    for x in found if size > 1 else ():
        dist.all_reduce(x, group=group)
    return found


def trained(model, tokens, labels) -> list:
    """The loss of rows in the mean over processes, and its gradients, which FSDP2 averages."""
    loss = model(tokens, labels=labels).loss
    loss.backward()
    loss = loss.detach()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return [loss, *(whole(x.grad) for x in model.parameters())]


def learned(model) -> list:
    """The loss of padded rows, and the gradients of all parameters, both in the mean over processes."""
    model.zero_grad()
    loss = model(TOKENS, attention_mask=PADDED, labels=FEW_LABELS).loss
    loss.backward()
    found = [
        loss.detach(),
        *(torch.zeros_like(x) if x.grad is None else x.grad.clone() for x in model.parameters()),
    ]
    for x in found if dist.is_initialized() else ():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return found


class SameRows(Trainer):
    """A Trainer whose processes all read the same batches."""

    def get_train_dataloader(self):
        """Without accelerate's division over the processes."""
        return DataLoader(self.train_dataset, self.args.per_device_train_batch_size)


def train(model, trainer_class, folder) -> float:
    """The loss of two steps of two padded rows, of which the second step changes weights that the first changed."""
    names = ("input_ids", "attention_mask", "labels")
    rows = [dict(zip(names, row)) for row in zip(TOKENS, PADDED, FEW_LABELS)] * 2
    arguments = TrainingArguments(
        folder,
        max_steps=2,
        per_device_train_batch_size=2,
        optim="sgd",
        learning_rate=0.1,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=2,
        ddp_backend="gloo" if dist.is_initialized() else None,
    )
    return trainer_class(model, arguments, train_dataset=rows).train().training_loss


def trained_by_trainer(model, trainer_class=SameRows) -> list:
    """Weights and loss after `train`; rows are split over the processes if there are several."""
    AcceleratorState._reset_state(
        reset_partial_state=True
    )  # of one process, before there were several
    model = copy.deepcopy(model).train()
    sharing = context_parallel(model) if dist.is_initialized() else nullcontext()
    with TemporaryDirectory() as folder, sharing:
        loss = train(model, trainer_class, folder)
    return [torch.tensor(loss), *(x.detach() for x in model.parameters())]


def refusal_of_divided_rows(model) -> str:
    """What a Trainer says whose processes read different rows."""
    try:
        trained_by_trainer(model, Trainer)
    except ValueError as error:
        return str(error)
    return ""


@torch.no_grad()
def continued(model, group=None) -> list:
    """What follows rows that were read into a cache, in the last process."""
    if group is None:
        cache = model(TOKENS, use_cache=True).past_key_values
    else:
        with context_parallel(model, group):
            cache = model(TOKENS, use_cache=True).past_key_values
        if dist.get_rank(group) < dist.get_world_size(group) - 1:
            return []
    return [model(x, past_key_values=cache).logits for x in TOKENS.split(5, 1)]


def report(name: str, found: list, expected: list) -> None:
    """The largest difference, as part of the largest number of a tensor if that is above one."""
    pairs = zip(found, expected, strict=True)
    print(
        name,
        max(((x - y).abs().max() / y.abs().max().clamp(min=1)).item() for x, y in pairs),
        flush=True,
    )


def compare_losses(models: dict, expected: dict) -> None:
    """What models with losses of their own learn from rows that are split over the processes."""
    for name, model in models.items():
        with context_parallel(model):
            found = learned(model)
        if dist.get_rank() == dist.get_world_size() - 1:
            report(f"loss/4/{name.replace(' ', '-')}", found, expected[name])


def main() -> None:
    """Arguments: names of cases; default: one for each kind of cache whose gradients flow through states."""
    torch.set_num_threads(1)
    cases = [CASE[name] for name in sys.argv[1:]] or filter(passes_gradients, SPLIT)
    models = {case.name: make_model(case).double() for case in cases}
    exact = {name: make_model(CASE[name], cache_bits=None).double() for name in models}
    expected = {
        name: [of_rows(model, None, mask) for mask in (None, MASK)] for name, model in exact.items()
    }
    prefilled = {case.name: make_model(case).double() for case in FIRST_OF_FAMILY}
    answers = {name: continued(model) for name, model in prefilled.items()}
    sharded = make_model(SHARDED).double().train()
    once = trained(copy.deepcopy(sharded), TOKENS, LABELS)
    adding = {name: with_own_losses(name) for name in DIVISIBLE}
    losses = {name: learned(model) for name, model in adding.items()}
    trained_in_one = trained_by_trainer(sharded)
    become(4)
    dist.init_process_group("gloo")
    last = dist.get_rank() == 3
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for name, model in models.items():
        for group, mask, one in zip(
            (dist.group.WORLD, pairs[dist.get_rank() // 2]), (None, MASK), expected[name]
        ):
            if mask is not None and name not in prefilled and len(sys.argv) == 1:
                continue
            with context_parallel(model, group):
                found = of_rows(model, group, mask)
            if last:
                report(f"rows/{dist.get_world_size(group)}/{name}", found, one)
    for name, model in prefilled.items():
        found = continued(model, dist.group.WORLD)
        if last:
            report(f"prefill/4/{name}", found, answers[name])
    compare_losses(adding, losses)
    found = trained_by_trainer(sharded)
    refusal = refusal_of_divided_rows(sharded)
    if last:
        report(f"trainer/4/{SHARDED.name}", found, trained_in_one)
        print("refused", refusal, flush=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
    for part in (*sharded.model.layers, sharded):
        fully_shard(part, mesh=mesh)
    row = slice(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1)
    with context_parallel(sharded, mesh["cp"].get_group()):
        found = trained(sharded, TOKENS[row], LABELS[row])
    if last:
        report(f"sharded/2x2/{SHARDED.name}", found, once)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
