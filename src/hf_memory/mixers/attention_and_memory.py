"""Titans' mixers that combine a memory and attention over a window: in parallel (MAG), or memory first (MAL).

https://arxiv.org/abs/2501.00663. Learned persistent tokens precede every sequence. The memory reads them once, and
attention always sees them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_memory.cache import Spec, State, States
from hf_memory.layers import RMSNorm
from hf_memory.mixers.attention_blocks import Columns
from hf_memory.mixers.base import Context, Projected, Projections, WholeMixer
from hf_memory.mixers.pasts.ring import Window, window_attention
from hf_memory.mixers.pasts.rows import New
from hf_memory.mixers.positions import Positions
from hf_memory.ops.masks import all_tokens, everything

WINDOW = 0.1  # initial factor of the window's output, so that the memory learns what is beyond it


class AttentionAndMemoryMixer(WholeMixer):
    """Base class of MAC, MAG and MAL: attention with a Transformer's projections, and a memory."""

    padding_last = True
    memory_reads_persistent = True
    sees_positions = True  # as attention does
    heads = Projections.heads  # those of attention

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.memory = config.rule.mixer(
            config, layer_idx, reads_persistent=self.memory_reads_persistent
        )
        if config.num_persistent_tokens:
            self.persistent = nn.Parameter(
                torch.empty(config.num_persistent_tokens, config.hidden_size)
            )
        self.gate: Any = None
        if _adds_memory(config):
            self.gate = nn.Parameter(torch.empty(config.hidden_size))

    def init_own_parameters(self) -> None:
        """Persistent tokens start like embeddings, and the gate at one."""
        if self.config.num_persistent_tokens:
            init.normal_(self.persistent, std=self.config.initializer_range)
        if self.gate is not None:
            init.ones_(self.gate)

    @property
    def gate_beside_attention(self) -> nn.Parameter | None:
        """The gate, if the memory is added."""
        return self.gate

    def start_open(self, half_life: int) -> None:
        """Copy attention's projections into the memory where sizes fit, and close the gate."""
        if self.gate is not None:
            self.gate.zero_()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            ours = self.memory.get_submodule(name)
            theirs = self.get_submodule(name)
            if ours.weight.shape == theirs.weight.shape:
                ours.load_state_dict(theirs.state_dict())

    @classmethod
    def exact_up_to(cls, config, layer_idx: int, length: int) -> int | None:
        """See `Convertible.exact_up_to`: attention over the window, as long as the gate of the memory is closed."""
        if not _adds_memory(config) or config.num_persistent_tokens:
            return None
        return min(length, config.sliding_window or length)

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states of the memory, and the keys and values within the window."""
        _, heads, _, D, _ = config.attention_heads
        attention = _window(config).spec(heads, D, D) | {"tokens_read": State((), torch.long)}
        return {"attention": attention, "memory": config.rule.mixer.state_spec(config, layer_idx)}

    def attend(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The output of attention over the window, as heads [B, T, H, D], and its states."""
        q, k, v = self.project_heads(hidden_states, context.positions)
        window = _window(self.config)
        return window_attention(
            q,
            New.of(k, v, window.kind, context),
            context.part("attention"),
            window,
            self.scores,
            always=self.always(hidden_states),
        )

    def always(self, hidden_states: Tensor) -> Columns | None:
        """Keys and values of the persistent tokens, which have no positions, for each row of hidden states [B, T, ...].

        Rows may have adapters of their own, so that projections need all of them.
        """
        if not self.config.num_persistent_tokens:
            return None
        rows = self.persistent.to(hidden_states.dtype).expand(hidden_states.shape[0], -1, -1)
        _, k, v = self.project_heads(rows, None)
        return Columns(all_tokens(k.shape[1], k), k, v, everything)

    def remember(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The output of the memory [B, T, hidden_size], and its states."""
        return self.memory(
            hidden_states, context.part("memory")._replace(positions=self._of_memory(context))
        )

    def _of_memory(self, context: Context) -> Positions | None:
        return context.positions if self.memory.sees_positions else None


class MemoryAsGateMixer(AttentionAndMemoryMixer):
    """MAG: attention over a window and the memory in parallel.

    With `memory_gate="multiply"`, the normed output of attention is multiplied by the sigmoid of the memory's normed
    output, before the output projection. With `"add"`, the output is that of attention plus `gate` times that of the
    memory; a gate of zero leaves attention alone.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        if self.gate is None:
            self.attention_norm, self.memory_norm = (
                RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
            )

    def open_gate(self, output: Tensor, without: Tensor, target: Tensor) -> None:
        """Scale the memory's output to the size of full attention's output, and scale the window's output down."""
        self.gate.fill_(target.norm() / (output - without).norm())
        self.o_proj.weight.mul_(WINDOW)

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The states are those of the memory and of the window."""
        hidden_states = projected["x"]
        heads, window = self.attend(hidden_states, context)
        remembered, memory = self.remember(hidden_states, context)
        attended = self.o_proj(heads.flatten(-2))
        if self.gate is not None:
            output = attended + self.gate * remembered
        else:
            output = self.attention_norm(attended) * self.memory_norm(remembered).sigmoid()
        return output, {"attention": window, "memory": memory}


class MemoryAsLayerMixer(AttentionAndMemoryMixer):
    """MAL: attention over a window reads x + gate * memory(x). A gate of zero leaves attention alone."""

    def open_gate(self, output: Tensor, without: Tensor, target: Tensor) -> None:
        """Scale the memory's output to the size of what the window misses."""
        self.gate.fill_((target - without).norm() / (output - without).norm())

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The states are those of the memory and of the window."""
        hidden_states = projected["x"]
        remembered, memory = self.remember(hidden_states, context)
        heads, window = self.attend(hidden_states + self.gate * remembered, context)
        return self.o_proj(heads.flatten(-2)), {"attention": window, "memory": memory}


def _window(config) -> Window:
    return Window.of_last(config.sliding_window)


def _adds_memory(config) -> bool:
    """Whether the memory is added to attention with a gate that can be zero."""
    return config.variant == "mal" or (config.variant == "mag" and config.memory_gate == "add")
