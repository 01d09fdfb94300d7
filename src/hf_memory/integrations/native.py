"""Hybrid models of transformers with the ops, the cache and the packing of this package, and their own weights."""

from abc import abstractmethod
from functools import cache as remembered
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.masking_utils import create_causal_mask

from hf_memory.cache import Spec, State, States, hold_a_memory, keep_keys_and_values
from hf_memory.cache_argument import CACHE, NAMES, named_cache
from hf_memory.cache_bits import RECURRENT, CacheBits, check_kinds, read_bits
from hf_memory.layers import causal_convolution, unit_length, upcast
from hf_memory.mixers.base import Context, MemoryMixer, Projected
from hf_memory.mixers.positions import Positions
from hf_memory.modeling.any_model import check_model
from hf_memory.modeling.assisted import note_read, sequence_length
from hf_memory.modeling.packing import (
    PACKING,
    flash_arguments,
    packed_boundaries,
    packed_positions,
)
from hf_memory.ops import delta_rule

SILU = ("silu", "swish")  # names of the activation that follows the convolution
Model = TypeVar("Model", bound=nn.Module)


class NativeMixer(MemoryMixer):
    """A mixer of transformers that reads its parameters itself, and is given the rest by `MemoryMixer`.

    Its subclasses are combined with transformers' class, whose constructor has made the parameters.
    """

    has_parts = False
    sees_positions = False
    conv1d: Any  # over queries, keys and values at once
    bits_by_default: CacheBits  # of caches, see `use_memory_ops`

    @property
    def default_bits(self) -> CacheBits:
        """See `Projections.default_bits`."""
        return self.bits_by_default

    @property
    def backend(self) -> str:
        """See `Projections.backend`."""
        return "auto"

    def spec_in(self, bits: CacheBits) -> Spec:
        """The states: the last inputs of the convolution, and a matrix for each head."""
        known = self.__dict__.setdefault("_specs", {})
        if bits not in known:
            known[bits] = self._declared_in(bits)
        return known[bits]

    def _declared_in(self, bits: CacheBits) -> Spec:
        _, value_heads, K, V = self.sizes
        channels, _, kernel_size = self.conv1d.weight.shape
        memory = State((value_heads, K, V), is_recurrent=True)
        conv = State((kernel_size - 1, channels), None)
        return {"conv": conv, "memory": memory.stored(bits)}

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """How to copy or pickle an instance, whose class has no name in a module."""
        return unfilled, type(self).__bases__, self.__dict__

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int, int, int]:
        """Numbers of key and value heads, and of channels of a key and of a value."""

    @property
    def width(self) -> int:
        """See `Projections.width`."""
        _, value_heads, _, V = self.sizes
        return value_heads * V

    @abstractmethod
    def project(self, hidden_states: Tensor, positions: Positions | None = None) -> Projected:
        """`qkv` [B, T, channels] before the convolution, `beta` [B, T, HV], `gate` [B, T, HV, V] of the output, and `g`
        [B, T, HV], or [B, T, HV, K] with a decay for each key channel."""

    @abstractmethod
    def gated(self, o: Tensor, gate: Tensor) -> Tensor:
        """What was read [B, T, HV, V], normed, with its gate [B, T, HV, V]."""

    @force_accelerate_hooks("conv1d")
    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        *,
        cache_params: Cache | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs,
    ) -> Tensor:
        """Mix tokens with each other and with the past.

        Args:
            hidden_states: [B, T, hidden_size].
            cache: a cache, or None; transformers 5.23 calls it `cache_params`.
            attention_mask: [B, T], zero at padding, or None.
            cache_params: the same as `cache`.
            cu_seq_lens_q: boundaries [N + 1] of sequences packed into the B * T tokens, or None.
            **kwargs: arguments of other mixers, which are ignored.

        Returns:
            The output [B, T, hidden_size].

        Raises:
            ValueError: if the cache was filled without the ops of this package.
        """
        cache = cache_params if cache is None else cache
        if cache is not None:
            hold_a_memory(cache, self.layer_idx)
        output, _ = super().forward(
            hidden_states, attention_mask=attention_mask, cache=cache, cu_seqlens=cu_seq_lens_q
        )
        return output

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The states are `memory` [N, HV, K, V] and `conv` [N, W - 1, channels]."""
        qkv, conv = causal_convolution(
            projected["qkv"],
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            context.states.get("conv"),
            context.attention_mask,
            context.cu_seqlens,
            silu=True,
        )
        key_heads, value_heads, K, V = self.sizes
        q, k, v = qkv.split([key_heads * K, key_heads * K, value_heads * V], -1)
        o, memory = delta_rule(
            unit_length(q.unflatten(-1, (-1, K))),
            unit_length(k.unflatten(-1, (-1, K))),
            v.unflatten(-1, (-1, V)),
            projected["beta"],
            projected["g"],
            in_place=True,
            **context.options("auto", context.states.get("memory")),
        )
        mixed = self.gated(o, projected["gate"]).flatten(-2)
        return mixed, {"conv": conv, "memory": memory}


class GatedDeltaNet(NativeMixer):
    """What Qwen3-Next, Qwen3.5 and OLMo-Hybrid share."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    A_log: Tensor  # [HV]
    dt_bias: Tensor  # [HV]
    norm: Any
    out_proj: Any

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Numbers of key and value heads, and of channels of a key and of a value."""
        return self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim

    def decay(self, a: Tensor) -> Tensor:
        """The natural logarithm [B, T, HV] of the decay, from its projection [B, T, HV]."""
        return -upcast(self.A_log).exp() * F.softplus(upcast(a) + upcast(self.dt_bias))

    def gated(self, o: Tensor, gate: Tensor) -> Tensor:
        """See `NativeMixer.gated`."""
        return self.norm(o, gate)

    def finish(self, mixed: Tensor) -> Tensor:
        """See `Projections.finish`."""
        return self.out_proj(mixed)


class Qwen3NextMixer(GatedDeltaNet):
    """Projections of several inputs at once, ordered by key heads."""

    in_proj_qkvz: Any
    in_proj_ba: Any
    fix_query_key_value_ordering: Any

    def project(self, hidden_states: Tensor, positions: Positions | None = None) -> Projected:
        """See `NativeMixer.project`."""
        *qkv, gate, b, a = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)
        )
        beta = upcast(b).sigmoid()
        qkv = torch.cat([x.flatten(-2) for x in qkv], -1)
        return {"qkv": qkv, "beta": beta, "g": self.decay(a), "gate": gate}


class Qwen35Mixer(GatedDeltaNet):
    """One projection of queries, keys and values, and one of each other input."""

    in_proj_qkv: Any
    in_proj_z: Any
    in_proj_b: Any
    in_proj_a: Any

    def project(self, hidden_states: Tensor, positions: Positions | None = None) -> Projected:
        """See `NativeMixer.project`."""
        gate = self.in_proj_z(hidden_states).unflatten(-1, (-1, self.head_v_dim))
        beta = upcast(self.in_proj_b(hidden_states)).sigmoid()
        g = self.decay(self.in_proj_a(hidden_states))
        return {"qkv": self.in_proj_qkv(hidden_states), "beta": beta, "g": g, "gate": gate}


class ProjectedApart:
    """Names of projections that OLMo-Hybrid and Kimi Linear share."""

    q_proj: Any
    k_proj: Any
    v_proj: Any
    b_proj: Any
    o_norm: Any
    o_proj: Any

    def projected_apart(self, hidden_states: Tensor) -> Tensor:
        """Queries, keys and values [B, T, channels] in one tensor, from the projection of each."""
        return torch.cat(
            [proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj)], -1
        )

    def gated(self, o: Tensor, gate: Tensor) -> Tensor:
        """See `NativeMixer.gated`."""
        return self.o_norm(o, gate)

    def finish(self, mixed: Tensor) -> Tensor:
        """See `Projections.finish`."""
        return self.o_proj(mixed)


class OlmoHybridMixer(ProjectedApart, GatedDeltaNet):
    """A projection of each input, and a write strength that can reach 2."""

    allow_neg_eigval: bool
    a_proj: Any
    g_proj: Any

    def project(self, hidden_states: Tensor, positions: Positions | None = None) -> Projected:
        """See `NativeMixer.project`."""
        gate = self.g_proj(hidden_states).unflatten(-1, (-1, self.head_v_dim))
        beta = upcast(self.b_proj(hidden_states)).sigmoid()
        if self.allow_neg_eigval:
            beta = 2 * beta
        g = self.decay(self.a_proj(hidden_states))
        return {"qkv": self.projected_apart(hidden_states), "beta": beta, "g": g, "gate": gate}


class KimiLinearMixer(ProjectedApart, NativeMixer):
    """Kimi Delta Attention: as many key heads as value heads, and a decay for each key channel."""

    num_heads: int
    forget_gate: Any
    g_a_proj: Any
    g_b_proj: Any

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Numbers of key and value heads, and of channels of a key and of a value."""
        return self.num_heads, self.num_heads, self.head_dim, self.head_dim

    def project(self, hidden_states: Tensor, positions: Positions | None = None) -> Projected:
        """See `NativeMixer.project`."""
        gate = self.g_b_proj(self.g_a_proj(hidden_states)).unflatten(-1, (-1, self.head_dim))
        beta = upcast(self.b_proj(hidden_states)).sigmoid()
        g = self.forget_gate(hidden_states)
        return {"qkv": self.projected_apart(hidden_states), "beta": beta, "g": g, "gate": gate}


MIXERS: dict[str, type[NativeMixer]] = {  # by the name of transformers' class
    "Qwen3NextGatedDeltaNet": Qwen3NextMixer,
    "Qwen3_5GatedDeltaNet": Qwen35Mixer,
    "Qwen3_5MoeGatedDeltaNet": Qwen35Mixer,
    "OlmoHybridGatedDeltaNet": OlmoHybridMixer,
    "KimiLinearDeltaAttention": KimiLinearMixer,
}
SUPPORTED = "Qwen3-Next, Qwen3.5, Qwen3.5-MoE, OLMo-Hybrid or Kimi Linear"


def use_memory_ops(model: Model, cache_bits: int | dict[str, int] | None = None) -> Model:
    """Let a hybrid model of transformers use the ops and the cache of this package for its linear attention.

    The model keeps its class, its weights and its config; it is saved and trained as before. What changes:

    - linear attention is computed by `hf_memory.ops.delta_rule`;
    - `DynamicCache` and `StaticCache` hold its states in a `MemoryLayer`, so that `crop` undoes tokens in all layers,
      and assisted decoding and prompt lookup work;
    - packed sequences stay apart, whether `cu_seq_lens_q`, `seq_idx` or `position_ids` that start again declare them;
    - `DynamicCache` holds few bits, if they are given. Another call gives others, for the caches that follow.

    Args:
        model: a model of Qwen3-Next, Qwen3.5, Qwen3.5-MoE, OLMo-Hybrid or Kimi Linear, with any head; it is changed.
        cache_bits: as in the configs of this package: 8 or 4 bits of each number of keys and values, or a dict with
            some of `"attention"` (8 or 4) and `"recurrent_states"` (16 or 8, rounded at the end of each call).

    Returns:
        The same model.

    Raises:
        ValueError: if the model is none of these, or has an option that the ops do not have, or cannot have these bits.
            It is then unchanged.
    """
    check_model("model", model)
    bits = read_bits(cache_bits)
    check_kinds(cache_bits, ["attention", RECURRENT])
    modules = list(model.modules())
    mixers: list[Any] = [x for x in modules if is_of_transformers(x) and type(x).__name__ in MIXERS]
    changed = [x for x in modules if isinstance(x, NativeMixer)]
    if not mixers and not changed:
        raise ValueError(
            f"model must be a {SUPPORTED} of transformers with linear attention, got {type(model).__name__}"
        )
    for mixer in mixers:
        if mixer.activation not in SILU:
            raise ValueError(
                f"hidden_act of model must be silu, which follows its convolutions, got {mixer.activation!r}"
            )
        check_forward(mixer)
    for mixer in mixers:
        use_our_forward(mixer)
    let_have(modules, bits)
    for module in modules:
        if isinstance(module, PreTrainedModel):
            adapt_model(module)
    return model


def adapt_model(model: Any) -> None:
    """Let a model with or without a head undo tokens, go on from caches, and keep packed sequences apart."""
    model._is_stateful = False  # transformers refuses to undo tokens of models that are
    if isinstance(model, GenerationMixin):
        go_on_from_caches(model)
    if has_mixers(model) and not hasattr(model, "keeps_packed_apart"):
        names = list(signature(model.forward).parameters)
        model.register_forward_pre_hook(partial(keep_packed_apart, names), with_kwargs=True)
        model.keeps_packed_apart = True


def check_forward(mixer: Any) -> None:
    """Raise ValueError if something other than a hook of accelerate is in the place of a mixer's `forward`."""
    name = replaced_forward(mixer)
    if (
        name is not None
        and getattr(mixer.__dict__[name], "__func__", None) is not type(mixer).forward
    ):
        raise ValueError(
            f"model must compute linear attention by transformers' own forward, got a {type(mixer).__name__} whose "
            "forward was replaced: call use_memory_ops before what replaces it"
        )


def replaced_forward(mixer: Any) -> str | None:
    """The attribute of a mixer that stands in for its class's `forward`: accelerate calls one from its hooks."""
    return next((name for name in ("_old_forward", "forward") if name in mixer.__dict__), None)


def use_our_forward(mixer: Any) -> None:
    """Let a mixer have the methods of ours, also where hooks of accelerate call its `forward`."""
    theirs: Any = type(mixer)
    mixer.__class__ = combined(MIXERS[theirs.__name__], theirs)
    if name := replaced_forward(mixer):
        setattr(mixer, name, MethodType(type(mixer).forward, mixer))


def go_on_from_caches(model: Any) -> None:
    """Let assisted decoding read what a cache has not read; see `hf_memory.modeling.assisted`."""
    model._get_candidate_generator = partial(candidate_generator, model)
    model.prepare_inputs_for_generation = partial(prepared_inputs, model)


def candidate_generator(model: Any, *, generation_config, input_ids, model_kwargs, **kwargs) -> Any:
    """`_get_candidate_generator` of a model's class, which then notes what was read."""
    given = {"generation_config": generation_config, "input_ids": input_ids}
    make = type(model)._get_candidate_generator
    generator = make(model, model_kwargs=model_kwargs, **given, **kwargs)
    note_read(model_kwargs, generation_config, input_ids)
    return generator


def prepared_inputs(
    model: Any, input_ids: Tensor, next_sequence_length: int | None = None, **kwargs
) -> dict[str, Any]:
    """`prepare_inputs_for_generation` of a model's class, for what is new."""
    length = sequence_length(kwargs, input_ids, next_sequence_length)
    return type(model).prepare_inputs_for_generation(model, input_ids, length, **kwargs)


def is_of_transformers(module: nn.Module) -> bool:
    """Whether a module's class is one of transformers' own."""
    return type(module).__module__.startswith("transformers.models.")


def let_have(modules: list[Any], bits: CacheBits) -> None:
    """Let caches have these bits by default that mixers and attention layers among some modules fill."""
    for module in modules:
        if isinstance(module, NativeMixer):
            module.bits_by_default = bits
        elif is_attention(module):
            if not hasattr(module, "bits_by_default"):
                module.register_forward_pre_hook(keep_in_bits, with_kwargs=True)
            module.bits_by_default = bits


def is_attention(module: Any) -> bool:
    """Whether a module is an attention layer of transformers, with keys and values in a cache."""
    is_named = type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")
    return is_named and is_of_transformers(module)


def keep_in_bits(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """A hook before an attention layer: its layer of the cache, if there is one, gets the bits of the module."""
    for cache in (kwargs[name] for name in NAMES if kwargs.get(name) is not None):
        keep_keys_and_values(cache, module.layer_idx, module.bits_by_default)


@remembered
def combined(ours: type, theirs: type) -> type:
    """A class with the methods of ours, for instances that theirs has made."""
    return type(f"{theirs.__name__}WithMemoryOps", (ours, theirs), {"__module__": __name__})


def unfilled(ours: type, theirs: type) -> NativeMixer:
    """An instance without parameters."""
    made: Any = combined(ours, theirs)
    return made.__new__(made)


def has_mixers(module: nn.Module) -> bool:
    """Whether a module is the model whose list of layers has our mixers."""
    layers = getattr(module, "layers", None)
    return isinstance(layers, nn.ModuleList) and any(
        isinstance(x, NativeMixer) for x in layers.modules()
    )


def keep_packed_apart(
    names: list[str], model: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """A hook before a model without a head: arguments that tell all its layers which tokens are of one sequence.

    Attention gets a mask, linear attention boundaries, and rotary positions start again if there are none. Without
    packed sequences nothing changes. `names` are those of the model's arguments, in their order.
    """
    given = named_cache(dict(zip(names, args)) | kwargs, CACHE)
    embeds = given.get("inputs_embeds")
    tokens = given.get("input_ids") if embeds is None else embeds
    if tokens is None:
        return None  # which the model refuses itself
    positions = given.get("position_ids")
    cu_seqlens = packed_boundaries(
        tokens,
        given.get("attention_mask"),
        text_positions(positions),
        given.get(CACHE),
        given,
    )
    if cu_seqlens is None:
        return None
    places = packed_positions(cu_seqlens, tokens)
    like = tokens if embeds is not None else tokens.new_empty((*tokens.shape, 0), dtype=model.dtype)
    nothing: dict[str, Any] = {"attention_mask": None, CACHE: None}
    mask = create_causal_mask(model.config, inputs_embeds=like, position_ids=places, **nothing)
    given = {name: x for name, x in given.items() if name not in PACKING}
    return (), given | flash_arguments(cu_seqlens) | {
        "attention_mask": {"full_attention": mask, "linear_attention": None},
        "position_ids": places if positions is None else positions,
        "use_cache": False,
    }


def text_positions(positions: Tensor | None) -> Tensor | None:
    """The positions [B, T] of tokens in their text; with images, they are the first of four, if they are given."""
    if positions is None or positions.ndim == 2:
        return positions
    return positions[0] if positions.shape[0] == 4 else None
