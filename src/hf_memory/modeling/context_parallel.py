"""Context parallelism: the tokens of a row are split over processes, and each hands its states to the next.

What a cache holds after a process's tokens is all that later tokens need: memories of fixed size, the last tokens of
windows and of short convolutions, and the keys and values of heads that keep everything. A process starts a layer when
the states of this layer arrive, so that the processes follow each other through the layers like a wave: with L layers
and n processes a pass takes L + n - 1 turns. Within a layer the processes wait for each other, for all memories.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_memory.cache import (
    PACKED,
    Inputs,
    MemoryLayer,
    Packed,
    Spec,
    States,
    keep_all,
    set_bits,
)
from hf_memory.cache_argument import named_cache
from hf_memory.modeling.any_model import check_model, named_arguments
from hf_memory.modeling.base import MemoryForCausalLM, MemoryModel, MemoryPreTrainedModel
from hf_memory.modeling.chunks import check_divisible


@contextmanager
def context_parallel(model: nn.Module, group: Any = None) -> Iterator[None]:
    """A context in which the processes of a group share the rows of a model, each with its part of the tokens.

    All processes call the model with the same whole rows. Each gets the outputs for its own part. Its loss is that of
    its part times the number of processes, so that loss and gradients are those of whole rows in the mean over the
    processes, as data parallelism takes it. With `use_cache` the last process gets the cache of the whole rows.

    Args:
        model: a causal language model of this package, or a module around one, as peft makes it. Its parameters may be
            sharded.
        group: the process group, such as that of a dimension of a device mesh; default: all processes.

    Raises:
        ValueError: if the model or its inputs cannot be divided, or processes were given different rows.
    """
    divided = partial(_own_part, link=Link(group))
    hook = _language_model(model).register_forward_pre_hook(divided, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _language_model(model: nn.Module) -> nn.Module:
    """The model of this package that a module is or has, if it gives a prediction or a state for each token."""
    check_model("model", model)
    found = next((x for x in model.modules() if isinstance(x, MemoryPreTrainedModel)), model)
    if not isinstance(found, MemoryForCausalLM | MemoryModel):
        raise ValueError(
            "context_parallel must be given a causal language model of this package, "
            f"got {type(found).__name__}"
        )
    return found


def _own_part(
    model: nn.Module, args: tuple, given: dict[str, Any], link: "Link"
) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a model for this process's part of the tokens."""
    given = named_cache(named_arguments(model, args, given))
    rows = given["input_ids"] if given.get("inputs_embeds") is None else given["inputs_embeds"]
    T = rows.shape[1]
    mask = given.get("attention_mask")
    positions = given.get("position_ids")
    check_divisible(
        model.base_model, rows, mask, positions, given, "context_parallel must not be used"
    )
    if given.get("cache") is not None:
        raise ValueError(
            "context_parallel must not be used with a cache, since each process has its own"
        )
    if link.size > T:
        raise ValueError(f"rows must have a token for each of the {link.size} processes, got {T}")
    link.check_same(rows)
    here = slice(link.rank * T // link.size, (link.rank + 1) * T // link.size)
    given |= {
        name: given[name][:, here]
        for name in ("input_ids", "inputs_embeds")
        if given.get(name) is not None
    }
    given |= {"cache": _cache(model.config, link, here.start)}
    if mask is not None:
        given["attention_mask"] = mask[:, : here.stop]
    if positions is not None:
        given["position_ids"] = positions[:, here]
    if (labels := given.get("labels")) is not None:
        targets = given.get("shift_labels")
        targets = F.pad(labels[:, 1:], (0, 1), value=-100) if targets is None else targets
        count = given.get("num_items_in_batch")
        count = (targets != -100).sum() if count is None else count
        given |= {"labels": labels[:, here], "shift_labels": targets[:, here].contiguous()}
        given |= {"num_items_in_batch": count / link.size}
    return (), given


class Link:
    """What connects a process to those before and after it in a group."""

    def __init__(self, group: Any = None):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def check_same(self, rows: Tensor) -> None:
        """Raise ValueError if processes were given different rows: tokens [B, T], or of embeddings another shape."""
        is_embedded = rows.is_floating_point()  # processes may round these differently
        content = b"" if is_embedded else rows.cpu().numpy().tobytes()
        own = (tuple(rows.shape), hashlib.sha256(content).digest())
        of_processes: list[Any] = [None] * self.size
        dist.all_gather_object(of_processes, own, group=self.group)
        if any(given != own for given in of_processes):
            shapes = [shape for shape, _ in of_processes]
            raise ValueError(
                "rows must be the same in all processes that share them, got different ones of shapes "
                f"{shapes}; a data loader that divides batches over processes gives each its own"
            )

    def receive(self, device: torch.device) -> States:
        """The states that the process before has sent; the first process has none."""
        if self.rank == 0:
            return {}
        header: list[Any] = [None]
        dist.recv_object_list(header, group=self.group, group_src=self.rank - 1)
        learns = torch.is_grad_enabled() and any(x[-1] for x in header[0])
        states = _Receive.apply(
            self, header[0], torch.zeros((), device=device, requires_grad=learns)
        )
        return {name: x for (name, *_), x in zip(header[0], states)}

    def send(
        self, passed: tuple[Tensor, ...], received: States, states: States
    ) -> tuple[Tensor, ...]:
        """Send states to the process after this one; the last process keeps them.

        Args:
            passed: tensors that this process goes on with.
            received: the states that came before, whose gradients are sent back even if nothing has used them.
            states: the states to send.

        Returns:
            The passed tensors.
        """
        sent = list(states.values()) if self.rank < self.size - 1 else []
        if sent:
            header = [(name, x.shape, x.dtype, x.requires_grad) for name, x in states.items()]
            dist.send_object_list([header], group=self.group, group_dst=self.rank + 1)
        return _Send.apply(self, len(passed), len(received), *passed, *received.values(), *sent)


class _Receive(torch.autograd.Function):
    """States of the process before; the backward pass sends it their gradients."""

    @staticmethod
    def forward(ctx, link, header, anchor):
        states = []
        ctx.link = link
        ctx.learns = [x[-1] for x in header]
        for _, shape, dtype, _ in header:
            states.append(torch.empty(shape, dtype=dtype, device=anchor.device))
            dist.recv(states[-1], group=link.group, group_src=link.rank - 1)
        ctx.mark_non_differentiable(*(x for x, learns in zip(states, ctx.learns) if not learns))
        return tuple(states)

    @staticmethod
    def backward(ctx, *gradients):
        for gradient, learns in zip(gradients, ctx.learns):
            if learns:
                dist.send(gradient.contiguous(), group=ctx.link.group, group_dst=ctx.link.rank - 1)
        return None, None, None


class _Send(torch.autograd.Function):
    """Sends states to the process after; the backward pass adds the gradients that come back from it."""

    @staticmethod
    def forward(ctx, link, num_passed, num_received, *tensors):
        passed = tensors[:num_passed]
        sent = tensors[num_passed + num_received :]
        for x in sent:
            dist.send(x.contiguous(), group=link.group, group_dst=link.rank + 1)
        ctx.link = link
        ctx.num_received = num_received
        ctx.like = [(x.shape, x.dtype, x.device) for x in sent]
        return tuple(x.view_as(x) for x in passed)

    @staticmethod
    def backward(ctx, *gradients):
        back: list[Tensor | None] = []
        of_sent = ctx.needs_input_grad[3 + len(gradients) + ctx.num_received :]
        for (shape, dtype, device), learns in zip(ctx.like, of_sent):
            back.append(torch.empty(shape, dtype=dtype, device=device) if learns else None)
            if learns:
                dist.recv(back[-1], group=ctx.link.group, group_src=ctx.link.rank + 1)
        return None, None, None, *gradients, *[None] * ctx.num_received, *back


class _Memory(MemoryLayer):
    """States of a mixer that begin with those of the process before."""

    def __init__(self, link: Link, before: int):
        super().__init__()
        self.link = link
        self.tokens_read = before
        self.received: States | None = None  # until the first write

    def read(
        self,
        inputs: Inputs | None = None,
        spec: Spec | None = None,
        mixer: str | None = None,
    ) -> States:
        """See `MemoryLayer.read`; states come from the process before when this one reads its first tokens."""
        if inputs is not None and not self.is_initialized:
            self.received = self.link.receive(next(iter(inputs.values())).device)
            if self.received:
                self.fill(self.received, self.tokens_read)
        return super().read(inputs, spec, mixer)

    def write(self, inputs: Inputs, states: States, output: Tensor) -> Tensor:
        """See `MemoryLayer.write`; states go to the process after when this one has read its first tokens."""
        output = super().write(inputs, states, output)
        if self.received is None:
            return output
        received = self.received
        self.received = None
        return self.link.send((output,), received, self.states)[0]


class _Keys(DynamicLayer):
    """Keys and values of full attention that begin with those of the processes before."""

    def __init__(self, link: Link, before: int, *args):
        super().__init__(*args)
        self.link = link
        self.before = before

    def get_seq_length(self) -> int:
        """Number of tokens seen so far, or that come before."""
        return super().get_seq_length() if self.is_initialized else self.before

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """See `DynamicLayer.update`; keys and values come and go when this process reads its first tokens."""
        if self.is_initialized:
            return super().update(key_states, value_states, *args, **kwargs)
        received = self.link.receive(key_states.device)
        self.lazy_initialization(key_states, value_states)
        if received:
            self.keys, self.values = received.values()
        seen = super().update(key_states, value_states, *args, **kwargs)
        return self.link.send(seen, received, {"keys": self.keys, "values": self.values})  # type: ignore[return-value]


class _WindowKeys(_Keys, DynamicSlidingWindowLayer):
    """The same for attention over a window, of which only the last tokens are handed on."""

    def __init__(self, link: Link, before: int, window: int):
        super().__init__(link, before, window)
        self.cumulative_length = before

    def get_seq_length(self) -> int:
        """See `_Keys.get_seq_length`."""
        return self.cumulative_length


class _PackedKeys(Packed, _Keys):
    """See `Packed`."""


class _PackedWindowKeys(Packed, _WindowKeys):
    """See `Packed`."""


PACKED.update({_Keys: _PackedKeys, _WindowKeys: _PackedWindowKeys})


def _cache(config, link: Link, before: int) -> Cache:
    """A cache that goes on after the states of the process before, which has read `before` tokens with the others.

    With gradients, which do not flow through states in few bits, these have all their bits.
    """
    layers: list[Any] = []
    for layer in DynamicCache(config=config).layers:
        if isinstance(layer, MemoryLayer):
            layers.append(_Memory(link, before))
        elif isinstance(layer, DynamicSlidingWindowLayer):
            layers.append(_WindowKeys(link, before, layer.sliding_window))
        else:
            layers.append(_Keys(link, before))
    cache = Cache(layers=layers)
    if torch.is_grad_enabled():
        keep_all(cache)
    else:
        set_bits(cache, config.default_bits)
    return cache
