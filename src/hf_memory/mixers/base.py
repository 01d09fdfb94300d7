"""Base classes of mixers: projections with Llama's names, rotary positions, padding, packing, and states of a cache."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from hf_memory.cache import (
    Inputs,
    MemoryLayer,
    Spec,
    State,
    States,
    as_declared,
    as_stored,
    flat,
    held_memory,
    in_numbers,
    memory_layer,
    nested,
)
from hf_memory.cache_argument import takes_cache
from hf_memory.cache_bits import ALL_BITS, CacheBits
from hf_memory.convertible import Convertible
from hf_memory.layers import RMSNorm, ShortConvolution, in_their_places, real_tokens_first
from hf_memory.mixers.attention_blocks import Scores
from hf_memory.mixers.gates import low_rank, steady_rows
from hf_memory.mixers.positions import Positions
from hf_memory.ops.layout import blank, repeat_heads
from hf_memory.ops.masks import Tokens, count, packed

# What a mixer knows of each token by itself: tensors [1 or B, T, ...] by name.
Projected = dict[str, Any]


class Context(NamedTuple):
    """What a memory needs besides the hidden states: positions, mask, packing and past; see `MemoryMixer.forward`."""

    positions: Positions | None
    attention_mask: Tensor | None  # [B, T] bool
    cu_seqlens: Tensor | None  # [N + 1]
    states: States  # before the tokens; ops may overwrite them; empty: nothing was read
    # [B, T], the places of the tokens before padding was moved to the end
    order: Tensor | None = None
    # number of tokens that each row has read before, if known on the host; a list of numbers if `states` are lists, too
    uniform_length: Any = None
    # where the new tokens go in states that have room for them; None: they are appended
    room: Tensor | None = None
    bits: CacheBits = ALL_BITS  # in which the states are stored
    backend: Any = "auto"  # of ops

    def is_step(self, x: Tensor) -> bool:
        """Whether each row of x [B, T, ...] is one token that follows others, without padding or gradients."""
        return (
            x.shape[1] == 1
            and bool(self.states)
            and self.attention_mask is None
            and self.cu_seqlens is None
            and not torch.is_grad_enabled()
        )

    def of(self, tokens: slice, states: States) -> "Context":
        """The context of some of the tokens, which are read after `states`; not for packed sequences."""
        positions = self.positions
        mask = self.attention_mask
        return self._replace(
            positions=None if positions is None else positions.of(tokens),
            attention_mask=None if mask is None else mask[:, tokens],
            states=states,
        )

    def each_row(self) -> list["Context"]:
        """The contexts of rows whose states are apart: each state is a list with a tensor [1, ...] for each row."""
        return [
            self._replace(
                states={name: x[i] for name, x in self.states.items()}, uniform_length=length
            )
            for i, length in enumerate(self.uniform_length)
        ]

    def apart(self) -> list[tuple[slice, "Context"]]:
        """For each packed sequence that is not empty, the slice of its tokens, and their context without packing."""
        alone = self._replace(cu_seqlens=None)
        bounds = self.cu_seqlens.unique().tolist()  # type: ignore[union-attr]
        return [(slice(*ends), alone.of(slice(*ends), {})) for ends in pairwise(bounds)]

    def part(self, name: str) -> "Context":
        """The context of a part of the mixer, with the states of this part."""
        return self._replace(states=self.states.get(name, {}))

    def with_padding_last(self, x: Tensor) -> tuple[Tensor, "Context"]:
        """Tokens x [B, T, ...] with the padding of each row moved to its end, and their context."""
        if self.attention_mask is None:
            return x, self
        x, order = real_tokens_first(x, self.attention_mask)
        positions = None if self.positions is None else self.positions.gather(order)
        return x, self._replace(
            positions=positions, attention_mask=self.attention_mask.gather(1, order), order=order
        )

    def in_their_places(self, x: Tensor) -> Tensor:
        """The inverse of `with_padding_last` for results [B, T, ...]."""
        return x if self.order is None else in_their_places(x, self.order)

    @property
    def lengths(self) -> Tensor | None:
        """[B], the number of tokens that are not padding; None if there is no padding."""
        return None if self.attention_mask is None else self.attention_mask.sum(1)

    def options(self, backend: str, initial_state: Any) -> dict[str, Any]:
        """Arguments of an op that reads these tokens after a state, None if nothing was read, and returns the next."""
        return {
            "mask": self.attention_mask,
            "initial_state": initial_state,
            "output_final_state": True,
            "cu_seqlens": self.cu_seqlens,
            "backend": backend,
        }

    def past(self, State: Any) -> Any:
        """The states that are fields of a NamedTuple, or None if nothing was read."""
        return State(*(self.states[name] for name in State._fields)) if self.states else None

    @property
    def is_whole(self) -> bool:
        """Whether the tokens are one sequence a row from its beginning, and none is padding."""
        return not self.states and self.attention_mask is None and self.cu_seqlens is None

    def grown(self, new: States) -> tuple[States, States]:
        """The entries of states that grow with the text: those of the tokens before, then the new ones [B, T, ...].

        They come twice: in the order of the new tokens, and for the cache, where padding stays where it was. Where
        states have room, there are empty entries between old and new ones, which their positions hide.
        """
        past = self._after(new)
        if self.order is not None:
            new = {name: self.in_their_places(x) for name, x in new.items()}
        if self.room is not None and self.states:
            T = next(iter(new.values())).shape[1]
            places = self.room + torch.arange(T, device=self.room.device)
            return past, {name: written(self.states[name], 1, places, x) for name, x in new.items()}
        return past, past if self.order is None else self._after(new)

    def _after(self, new: States) -> States:
        if not self.states:
            return new
        return {name: torch.cat([self.states[name].to(x.dtype), x], 1) for name, x in new.items()}

    def counts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 1] each: the number of tokens of a row that were read before x [B, T, ...], and with these."""
        before = self._read_before(x)
        lengths = self.lengths
        return before, before + (x.shape[1] if lengths is None else lengths[:, None])

    def _read_before(self, x: Tensor) -> Tensor:
        return (
            self.states["tokens_read"][:, None]
            if self.states
            else x.new_zeros(x.shape[0], 1, dtype=torch.long)
        )

    def tokens_and_count(self, x: Tensor) -> tuple[Tokens, Tensor]:
        """The position of each token x [B, T, ...] in its sequence, and `tokens_read` [B], including these."""
        before, after = self.counts(x)
        return self._tokens_after(before, x), after.flatten()

    def _tokens_after(self, before: Tensor, x: Tensor) -> Tokens:
        T = x.shape[1]
        mask = self.attention_mask
        if self.cu_seqlens is not None:
            return packed(self.cu_seqlens, T)
        if mask is None:
            return Tokens(before if T == 1 else before + torch.arange(T, device=x.device))
        place = count(mask)
        return Tokens(torch.where(place < 0, -1, before + place))


class Projections(nn.Module, ABC):
    """The parts that attention and memory share: projections of q, k, v and the output, q/k norms, and rotation.

    A mixer is three steps: `project` looks at each token by itself, `mix` at other tokens and at the past, and `finish`
    again at each token. `forward` takes them in turn; an engine that stores the past itself takes them one by one.
    """

    # Whether gradients of a row are the same if it is read in parts, one after the states of another.
    passes_gradients = True

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.rotates = config.rotating_channels(layer_idx) > 0
        query_heads, key_heads, value_heads, self.head_dim, self.value_dim = self.heads
        self._specs: dict[CacheBits, Spec] = {}
        self.has_parts = any("." in name for name in self.plain_spec)
        self.scaling = (config.query_pre_attn_scalar or self.head_dim) ** -0.5
        self.softcap = config.attn_logit_softcapping
        self.num_key_value_groups = query_heads // key_heads
        self.num_output_heads = max(query_heads, value_heads)
        width = config.hidden_size
        bias = config.attention_bias
        self.q_proj = nn.Linear(width, query_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, key_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, value_heads * self.value_dim, bias=bias)
        self.o_proj = nn.Linear(
            self.num_output_heads * self.value_dim, width, bias=config.attention_output_bias
        )
        self.q_norm: Any = None
        self.k_norm: Any = None
        if self.normalizes:
            heads = (query_heads, key_heads) if config.qk_norm_whole_width else (1, 1)
            self.q_norm, self.k_norm = (
                RMSNorm(n * self.head_dim, eps=config.rms_norm_eps) for n in heads
            )

    @property
    def spec(self) -> Spec:
        """The states in the bits of the config."""
        return self.spec_in(self.default_bits)

    @property
    def backend(self) -> Any:
        """The backend of the ops."""
        return self.config.mixer_backend

    @property
    def default_bits(self) -> CacheBits:
        """The bits of caches that are not given others."""
        return self.config.default_bits

    @property
    def plain_spec(self) -> Spec:
        """The states with all their bits."""
        return self.spec_in(ALL_BITS)

    def spec_in(self, bits: CacheBits) -> Spec:
        """The states as a cache of some bits stores them, by joined names."""
        spec = self._specs.get(bits)
        if spec is None:
            spec = self.declared(self.config, self.layer_idx, bits)
            if not torch.compiler.is_compiling():  # a graph has no way to make the key anew
                self._specs[bits] = spec
        return spec

    @property
    def heads(self) -> tuple[int, int, int, int, int]:
        """Numbers of query, key and value heads, and of channels of a key and of a value."""
        return self.config.attention_heads

    @property
    def normalizes(self) -> bool:
        """Whether each of queries and keys has an RMS norm."""
        return self.config.use_qk_norm

    @property
    def width(self) -> int:
        """Number of channels of what `mix` gives for each token."""
        return self.num_output_heads * self.value_dim

    def finish(self, mixed: Tensor) -> Tensor:
        """The last step: the output [B, T, hidden_size] from what `mix` gives, [B, T, width]."""
        return self.o_proj(mixed)

    @classmethod
    @abstractmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The states that the mixer of a layer keeps for each sequence, by name."""

    @abstractmethod
    def check_cache(self, cache: Cache, layer_idx: int) -> None:
        """Raise ValueError if the layer of a cache is not empty and has not the states of this mixer."""

    @classmethod
    def declared(cls, config, layer_idx: int, bits: CacheBits) -> Spec:
        """`state_spec` as a cache of some bits stores the states, by joined names."""
        states = flat(cls.state_spec(config, layer_idx))
        return {name: state.stored(bits) for name, state in states.items()}

    @classmethod
    def packable_states(cls, config, layer_idx: int) -> list[str]:
        """The kinds of states of a layer that can be stored in few bits, such as "window.keys"."""
        states = flat(cls.state_spec(config, layer_idx)).values()
        kinds = (state.name_of_kind for state in states)
        return list(dict.fromkeys(kind for kind in kinds if kind is not None))

    def split_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., H * D] -> [..., H, D]; with tensor parallelism H is smaller than in the config."""
        rows = q.shape[:-1]
        K = self.head_dim
        V = self.value_dim
        return q.view(*rows, -1, K), k.view(*rows, -1, K), v.view(*rows, -1, V)

    def by_head(self, x: Tensor) -> Tensor:
        """[..., H * D] -> [..., H, D], of keys."""
        return x.unflatten(-1, (-1, self.head_dim))

    def project_heads(
        self, hidden_states: Tensor, positions: Positions | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, HQ, K], k [B, T, H, K] and v [B, T, H, V]; q and k normalised, and rotated to given positions."""
        q, k, v = self.split_heads(*self.project_each(hidden_states))
        return *self.normalize_and_rotate(q, k, positions), v

    def project_each(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The projections q, k and v [B, T, channels]; an engine computes them in one product."""
        return self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)

    def normalize_and_rotate(
        self, q: Tensor, k: Tensor, positions: Positions | None
    ) -> tuple[Tensor, Tensor]:
        """Apply q/k norms, if the config has them, and rotary positions, if they are given, to q and k [B, T, H, D]."""
        if self.q_norm is not None:
            whole = self.config.qk_norm_whole_width
            dtype = q.dtype  # norms return float32 under autocast
            q, k = (
                (norm(x.flatten(-2)).view_as(x) if whole else norm(x)).to(dtype)
                for norm, x in ((self.q_norm, q), (self.k_norm, k))
            )
        return self.rotate(q, k, positions)

    def rotate(self, q: Tensor, k: Tensor, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Rotate q and k [B, T, H, D] if positions are given and this layer uses them."""
        return (q, k) if positions is None or not self.rotates else positions.rotate(q, k)


class MemoryMixer(Convertible, Projections):
    """A mixer whose past is a set of states.

    Subclasses implement `mix`, which reads and updates the states, and add what else it needs of a token to `project`.
    """

    padding_last = False  # whether `mix` is given rows with padding at the end
    projects_all = True  # whether all linear maps of tokens are in `project` and `finish`
    projects_positions = False  # whether `project` is all that needs positions
    has_silu = True  # silu after the short convolutions, or after the projections if there are no convolutions
    convolved = "qkv"  # what has convolutions and silu

    @property
    def new_part(self) -> nn.Module | None:
        """The whole mixer, since all projections change their meaning."""
        return self

    @property
    def sees_positions(self) -> bool:
        """Whether queries and keys of this mixer are rotated by position."""
        return self.config.memory_rope

    @property
    def scores(self) -> Scores:
        """How scores of attention are computed."""
        return Scores(self.scaling, self.softcap)

    @property
    def heads(self) -> tuple[int, int, int, int, int]:
        """The numbers of heads and channels of the memory, which may differ from those of attention."""
        return self.config.memory_heads

    @property
    def normalizes(self) -> bool:
        """Whether each of queries and keys has an RMS norm."""
        return self.config.has_memory_qk_norm

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """The memory, a matrix for each head, and the last inputs of the convolutions."""
        *_, K, V = config.memory_heads
        return convolution_spec(config, cls.convolved) | {
            "memory": State((config.num_output_heads, K, V), is_recurrent=True)
        }

    def scale_output(self, factor: Tensor) -> None:
        """Scale the norm before or after the gate of the output, if there is one."""
        for name, weight in self.named_parameters():
            if name in ("output_gate.norm.weight", "o_norm.weight"):
                weight.mul_(factor)

    def make_convolutions(self, kernel_size: int, bias: bool = False) -> None:
        """Short convolutions on q, k and v; a kernel size of 0 means none."""
        self.has_convolutions = kernel_size > 0
        if self.has_convolutions:
            for x in self.convolved:
                channels = getattr(self, f"{x}_proj").out_features
                setattr(self, f"{x}_conv1d", ShortConvolution(channels, kernel_size, bias))

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        step: int | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """Mix tokens with each other and with the past.

        Args:
            hidden_states: [B, T, hidden_size].
            position_embeddings: (cos, sin), [1 or B, T, head_dim] each; used if `sees_positions`.
            attention_mask: [B, T], zero at padding, or None. Padding does not change the memory.
            cache: a cache, whose layer `layer_idx` holds the states, or None.
            cu_seqlens: boundaries [N + 1] of sequences packed into the B * T tokens, or None.
            step: number of the cache's layer, if a model runs one mixer several times; default: `layer_idx`.
            **kwargs: arguments of other mixers, which are ignored.

        Returns:
            The output [B, T, hidden_size], and None, since a memory has no attention weights.
        """
        B, T = hidden_states.shape[:2]
        inputs = self.inputs(hidden_states, position_embeddings, attention_mask, cu_seqlens)
        place = self.layer_idx if step is None else step
        layer = None if cache is None else memory_layer(cache, place)
        if layer is None:
            output, _ = self.mix_inputs(inputs, {}, cu_seqlens)
        else:
            if layer.is_behind:
                self.catch_up(layer)
            first, *others = layer.parts(inputs)
            output = self._advance(layer, first, cu_seqlens)
            if others:
                outputs = [self._advance(layer, part, cu_seqlens) for part in others]
                output = torch.cat([output, *outputs], 1)
        return output if cu_seqlens is None else output.view(B, T, -1), None

    def check_cache(self, cache: Cache, layer_idx: int) -> None:
        """See `Projections.check_cache`."""
        layer = held_memory(cache, layer_idx)
        if not torch.compiler.is_compiling():  # a graph would be for this object alone
            for spec in self._specs.values():
                if layer.spec is spec:  # it has read with the layer before
                    return
        layer.check(self.spec_in(layer.bits or self.default_bits), type(self).__name__)

    def catch_up(self, layer: MemoryLayer) -> None:
        """Read again the inputs that stay, in a cache's layer that is behind since tokens were undone."""
        with torch.no_grad():
            for inputs in layer.replay():
                self._advance(layer, inputs)

    def _advance(
        self, layer: MemoryLayer, inputs: Inputs, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """The output [B, T, hidden_size] for inputs that follow those of a cache's layer, which gets the new states."""
        spec = self.spec_in(layer.bits or layer.own_bits(self.default_bits))
        before = layer.read(inputs, spec, type(self).__name__)
        if layer.has_rounded_states:
            before = in_numbers(before, spec, inputs["hidden_states"].dtype)
        output, states = self.mix_inputs(inputs, before, cu_seqlens, layer)
        if layer.has_rounded_states:
            states = as_stored(states, spec)
        return layer.write(inputs, states, output)

    def inputs(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> Inputs:
        """The inputs of `mix_inputs` by name, from arguments of `forward`; packed rows become one."""
        B = hidden_states.shape[0]
        inputs = {"hidden_states": hidden_states}
        if position_embeddings is not None and self.sees_positions:
            inputs["cos"], inputs["sin"] = position_embeddings
        if cu_seqlens is not None and B > 1:  # rows are boundaries of sequences too
            inputs = {name: x.expand(B, -1, -1).flatten(0, 1)[None] for name, x in inputs.items()}
        if attention_mask is not None:
            mask = attention_mask.bool()
            inputs |= {"hidden_states": blank(hidden_states, mask), "attention_mask": mask}
        return inputs

    def mix_inputs(
        self,
        inputs: Inputs,
        states: States,
        cu_seqlens: Tensor | None = None,
        layer: MemoryLayer | None = None,
    ) -> tuple[Tensor, States]:
        """The same as `mix` for the tokens in their places, from inputs by name, as a cache records them.

        The states are those of a cache's layer, if there is one.
        """
        parts = nested(states) if self.has_parts else states
        hidden_states, context = self.in_context(inputs, parts, cu_seqlens, layer)
        output, after = self.run(hidden_states, context)
        output = output if context.order is None else context.in_their_places(output)
        after = flat(after) if self.has_parts else after
        spec = self.spec if layer is None else layer.spec
        return output, as_declared(after, states, spec, hidden_states.dtype)

    def in_context(
        self,
        inputs: Inputs,
        states: States,
        cu_seqlens: Tensor | None = None,
        layer: MemoryLayer | None = None,
    ) -> tuple[Tensor, Context]:
        """The hidden states among the inputs, with padding last if the mixer wants that, and their context."""
        positions = Positions(inputs["cos"], inputs["sin"]) if "cos" in inputs else None
        mask = inputs.get("attention_mask")
        if layer is None:
            context = Context(
                positions, mask, cu_seqlens, states, bits=self.default_bits, backend=self.backend
            )
        else:
            context = Context(
                positions,
                mask,
                cu_seqlens,
                states,
                uniform_length=layer.uniform_length,
                room=layer.room,
                bits=layer.bits or self.default_bits,
                backend=self.backend,
            )
        if self.padding_last and mask is not None:
            return context.with_padding_last(inputs["hidden_states"])
        return inputs["hidden_states"], context

    def run(self, hidden_states: Tensor, context: Context) -> tuple[Tensor, States]:
        """The three steps: the output [B, T, hidden_size], and the states after these tokens."""
        mixed, states = self.mix(self.project(hidden_states, context.positions), context)
        return self.finish(mixed), states

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """The first step: what `mix` needs of each token. Here q, k and v [B, T, channels] before convolutions."""
        return {x: getattr(self, f"{x}_proj")(hidden_states) for x in "qkv"}

    @abstractmethod
    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The second step: its result [B, T, width], and the states after these tokens."""

    def heads_of(
        self, projected: Projected, context: Context
    ) -> tuple[Tensor, Tensor, Tensor, States]:
        """q and k [B, T, H, K], v [B, T, HV, V] with HV a multiple of H, and the states of the convolutions."""
        parts = {x: projected[x] for x in "qkv"}
        new_states: States = {}
        for x in self.convolved:
            parts[x] = self.convolve(x, parts[x], context, new_states)
        q, k, v = self.split_heads(*parts.values())
        q, k = self.normalize_and_rotate(q, k, context.positions)
        return q, repeat_heads(k, q.shape[2]), repeat_heads(v, q.shape[2]), new_states

    def convolve(self, name: str, x: Tensor, context: Context, new_states: States) -> Tensor:
        """A projection [B, T, channels] after its convolution and silu, if it has them; the new state is added."""
        if not self.has_convolutions:
            return F.silu(x) if self.has_silu else x
        state = context.states.get(f"{name}_conv")
        convolution = getattr(self, f"{name}_conv1d")
        where = context.attention_mask, context.cu_seqlens
        x, new_states[f"{name}_conv"] = convolution(x, state, *where, silu=self.has_silu)
        return x


def written(x: Tensor, dim: int, places: Tensor, new: Tensor) -> Tensor:
    """x with new entries at places [n] of a dimension: in place, unless a gradient may need what was there."""
    new = new.to(x.dtype)
    if torch.is_grad_enabled():
        return x.index_copy(dim, places, new)
    return x.index_copy_(dim, places, new)


def convolution_spec(config, convolved: str = "qkv") -> Spec:
    """States of the short convolutions of these projections."""
    query_heads, key_heads, value_heads, K, V = config.memory_heads
    channels = {"q": query_heads * K, "k": key_heads * K, "v": value_heads * V}
    if not config.linear_conv_kernel_dim:
        return {}
    return {
        f"{x}_conv": State((config.linear_conv_kernel_dim - 1, channels[x]), None)
        for x in convolved
    }


# for output gates
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


class WholeMixer(MemoryMixer):
    """A mixer in which linear maps follow the past, so that `mix` does nearly all and gives the output."""

    projects_all = False

    @property
    def width(self) -> int:
        """See `Projections.width`."""
        return self.config.hidden_size

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """The hidden states."""
        return {"x": hidden_states}

    def finish(self, mixed: Tensor) -> Tensor:
        """The output is what `mix` gives."""
        return mixed


class OutputGate(Convertible, nn.Module):
    """An RMS norm of each head, times activation(W x) of the hidden states x unless `output_gate` is none."""

    can_be_steady = True

    def __init__(self, heads: int, value_dim: int, config):
        super().__init__()
        self.norm = RMSNorm(value_dim, eps=config.output_norm_eps or config.rms_norm_eps)
        self.activation = config.output_gate
        if self.activation != "none":
            self.down, width = low_rank(
                config.hidden_size, getattr(config, "output_gate_low_rank_dim", None)
            )
            self.proj = nn.Linear(
                width, heads * value_dim, bias=getattr(config, "output_gate_bias", False)
            )

    def start_open(self, half_life: int) -> None:
        """Start a sigmoid gate half open."""
        if self.activation == "sigmoid":
            self.proj.weight.zero_()

    def start_steady(self, direction: Tensor) -> None:
        """Start a silu gate as nearly constant; products of hidden states and `direction` are about 1."""
        if self.activation == "silu":
            steady_rows(self.down, self.proj, direction)

    def project(self, hidden_states: Tensor) -> Projected:
        """The gate [B, T, HV * V] by name, if there is one."""
        if self.activation == "none":
            return {}
        gate = self.proj(self.down(hidden_states))
        return {"output_gate": ACTIVATIONS[self.activation](gate)}

    def forward(self, o: Tensor, projected: Projected) -> Tensor:
        """o [B, T, HV, V] -> [B, T, HV * V], with the gate that is projected."""
        o = self.norm(o).flatten(-2)
        return o if self.activation == "none" else o * projected["output_gate"]
