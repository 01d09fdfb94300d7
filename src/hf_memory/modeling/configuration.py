"""The base class of all configs."""

import copy
from typing import Any, Self

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

from hf_memory.cache import Spec, State
from hf_memory.cache_argument import NAMES
from hf_memory.cache_bits import CacheBits, check_kinds, read_bits
from hf_memory.mixers.attention import AttentionMixer
from hf_memory.mixers.windowed import WindowedMixer
from hf_memory.modeling.checks import (
    check,
    check_each,
    check_numbers,
    check_rope,
    check_word,
    strict,
    warn_unknown,
    without_removed,
)
from hf_memory.modeling.hub import HubClassMixin, HubConfigMixin
from hf_memory.modeling.options import AttentionWindow, Experts, ProductKeys, TeacherShape
from hf_memory.modeling.registration import KnownToPeft
from hf_memory.ops.dispatch import BACKENDS


def of_mixers(**names: tuple[str, ...]) -> dict[str, str]:
    """A plan of tensor parallelism: its style for each module and parameter of the mixers; "" is a mixer itself."""
    return {
        f"layers.*.mixer.{name}".rstrip("."): style
        for style, names_of_style in names.items()
        for name in names_of_style
    }


def _has_all_bits(name: str, state: State) -> bool:
    """Whether a state has keys or values of tokens in the model's dtype."""
    kind = name.rpartition(".")[2].rpartition("_")[2]
    return kind in ("keys", "values") and state.dtype is None and state.bits is None


def of_feed_forwards(plan: dict[str, str]) -> dict[str, str]:
    """The part of a plan of transformers for the MLPs and the experts, which are transformers' own."""
    return {name: style for name, style in plan.items() if ".mlp." in name}


@strict
class MemoryConfig(
    TeacherShape, AttentionWindow, Experts, ProductKeys, HubConfigMixin, HubClassMixin, KnownToPeft
):
    """Options that all families share. Those that Llama has too have Llama's names and meanings.

    Args:
        num_key_value_heads (`int`, defaults to `num_attention_heads`): number of key-value heads, each shared by a
            group of query heads.
        head_dim (`int`, defaults to `hidden_size // num_attention_heads`): channels of each head.
        layer_types (`list[str]`, defaults to all `"memory"`): the mixer of each layer: `"memory"`: that of the family;
            `"full_attention"`; `"sliding_attention"`: attention over the last `sliding_window` tokens;
            `"sliding_heads"`: the same with the options of `AttentionWindow`; `"sliding_memory"`: in the first three
            families such attention in one softmax with a memory of what has left the window.
        attention_bias (`bool`, defaults to `False`): biases of the q, k and v projections.
        use_qk_norm (`bool`, defaults to `False`): apply an RMS norm to each head's queries and keys, before rotation.
        rope_parameters (`dict`, *optional*): as in transformers; its `partial_rotary_factor` is the fraction of a
            head's channels that is rotated.
        memory_rope (`bool`, defaults to `False`): rotate queries and keys in memory layers too, not only in attention.
        mixer_backend (`str`, defaults to `"auto"`): backend of the memory's op: `"auto"`, `"reference"`, `"chunk"` or
            `"triton"`. Their results differ only by rounding.
        cache_bits (`int` or `dict`, *optional*): bits of each number of keys and values in new caches, 8 or 4, with
            scales beside them; default: all bits of the model's dtype. A cache goes on in the bits in which it began. A
            number is for all keys and values of tokens, and refused if some cannot have it; a dict has those of some
            kinds: `"full_attention_heads"`; `"window"`: first tokens, window and kept tokens of the other heads;
            `"attention"`: layers of attention; `"memory"`: memory layers with keys and values of tokens, but for the
            corrected values of DeltaFormer. Of each kind keys and values can have bits of their own:
            `{"window": {"keys": 8, "values": 4}}`. `"recurrent_states"`: matrices of memory layers, 16 (bfloat16) or 8
            in place of float32, rounded at the end of each call. Other states keep their bits.
    """

    model_type = "hf_memory"
    keys_to_ignore_at_inference = [*NAMES]
    mixers = {  # by layer type; families add "memory"
        "full_attention": AttentionMixer,
        "sliding_attention": AttentionMixer,
        "sliding_heads": WindowedMixer,
    }

    base_model_tp_plan = {
        **of_mixers(
            colwise=("q_proj", "k_proj", "v_proj", "far.b_proj", "far.decay.proj"),
            rowwise=("o_proj",),
            replicated_with_grad_allreduce=("q_norm", "k_norm"),
            local_params=("far.k_slots", "far.q_slots", "far.decay", "sinks"),
        ),
        **of_mixers(colwise=("sinks.logits", "sinks.values")),
        **of_mixers(
            colwise=tuple(f"far.{x}_slots.{name}" for x in "kq" for name in ("weight", "bias"))
        ),
        **of_feed_forwards(Qwen3MoeConfig.base_model_tp_plan),
    }
    base_model_ep_plan = of_feed_forwards(Qwen3MoeConfig.base_model_ep_plan)
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters | dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    use_qk_norm: bool = False
    layer_types: list[str] | None = None  # type: ignore[assignment]
    memory_rope: bool = False
    mixer_backend: str = "auto"
    cache_bits: int | dict[str, int | dict[str, int]] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        kwargs = without_removed(kwargs)
        warn_unknown(type(self), kwargs)
        check_numbers(self.numbers)
        derived = self._derive({})
        layer_types = self.layer_types
        super().__post_init__(**kwargs)
        # transformers has renamed some words, such as "mamba", and errors are to name what was given
        self.__dict__["layer_types"] = layer_types
        self.fill_local_rope()
        self.__dict__["_derived"] = derived
        self.validate_architecture()
        if self.cache_bits is not None:
            check_kinds(self.cache_bits, self.packable_states)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; fields that were not given and whose default depends on it follow, as if it had been given.

        A value that is refused leaves the config as it was.
        """
        if name not in self.__dataclass_fields__ or "_derived" not in self.__dict__:
            super().__setattr__(name, value)
            return
        before = dict(self.__dict__)
        try:
            super().__setattr__(name, value)
            self._derive_again(name)
            if name == "cache_bits":
                self.checked_bits(value)
        except Exception:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _derive_again(self, name: str) -> None:
        """Derive what depends on a field that was assigned."""
        before = self.__dict__.pop("_derived")
        check_numbers(self.numbers)
        known = {key: x for key, x in before.items() if key != name}
        self.__dict__["_derived"] = self._derive(known)

    def settled(self) -> Self:
        """A copy in which all options count as given, so that assigning one of them changes no other."""
        copied = copy.deepcopy(self)
        copied.__dict__["_derived"] = {}
        return copied

    def _derive(self, before: dict[str, Any]) -> dict[str, Any]:
        """Set the fields that are not given, and return their values.

        Args:
            before: their values by name, if they were set before; those that were changed since then are given.
        """
        for name, value in before.items():
            if self.__dict__[name] == value:
                self.__dict__[name] = None
        missing = [name for name in self.__dataclass_fields__ if self.__dict__.get(name) is None]
        self.set_defaults()
        return {
            name: copy.deepcopy(self.__dict__[name])
            for name in missing
            if self.__dict__.get(name) is not None
        }

    def to_dict(self) -> dict[str, Any]:
        """The config as a dict."""
        described = super().to_dict()
        described.pop("_derived", None)
        return described

    def set_defaults(self) -> None:
        """Set fields that are not given, and whose default depends on other fields."""
        heads = self.num_attention_heads
        width = self.hidden_size
        is_divided = self.head_dim is not None or width % heads == 0
        wanted = f"a multiple of num_attention_heads={heads} unless head_dim is set"
        check(is_divided, "hidden_size", wanted, width)
        self.fill(
            num_key_value_heads=heads,
            head_dim=width // heads,
            layer_types=["memory"] * self.num_hidden_layers,
        )

    def fill_local_rope(self) -> None:
        """Give `local_rope_parameters` the defaults that transformers gives `rope_parameters`."""
        if isinstance(self.local_rope_parameters, dict):
            usual = {
                "rope_type": self.local_rope_parameters.get("type", "default"),
                "rope_theta": self.default_theta,
            }
            self.local_rope_parameters = usual | self.local_rope_parameters

    def fill(self, **values) -> None:
        """Set fields that are None."""
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    @property
    def numbers(self) -> dict[str, Any]:
        """The fields that are not in configs of transformers, and are no tokens and no bits."""
        names = own_options(self) - {"cache_bits"}
        return {name: getattr(self, name) for name in names if not name.endswith("_token_id")}

    @property
    def attention_heads(self) -> tuple[int, int, int, int, int]:
        """Numbers of query, key and value heads, and of channels of a key and of a value, in attention layers."""
        key_value_heads: Any = self.num_key_value_heads
        head_dim: Any = self.head_dim
        return self.num_attention_heads, key_value_heads, key_value_heads, head_dim, head_dim

    @property
    def memory_heads(self) -> tuple[int, int, int, int, int]:
        """The same for memory layers."""
        return self.attention_heads

    @property
    def num_output_heads(self) -> int:
        """Number of heads of a memory's output: that of queries, or that of values if it is larger."""
        query_heads, _, value_heads, _, _ = self.memory_heads
        return max(query_heads, value_heads)

    @property
    def has_memory_qk_norm(self) -> bool:
        """Whether queries and keys of memory layers have a norm."""
        return self.use_qk_norm

    @property
    def rotary_dim(self) -> int:
        """Number of channels of a head that are rotated, in layers with rotary positions."""
        head_dim: Any = self.head_dim
        rope: Any = self.rope_parameters
        return int(head_dim * rope.get("partial_rotary_factor", 1.0))

    def rotating_channels(self, layer_idx: int) -> int:
        """Number of channels of a head that a layer rotates by position; may be 0."""
        if self.no_rope_layers is not None and not self.no_rope_layers[layer_idx]:
            return 0
        return self.rotary_dim

    def exact_up_to(self, layer_idx: int, length: int) -> int | None:
        """How many tokens a token sees in a text of `length`, if the layer starts as softmax attention; else None.

        See `Convertible.exact_up_to` of its mixer. With `cache_bits` this is attention up to the rounding of its keys
        and values, which no training of the layer takes away.
        """
        return self.mixer_class(layer_idx).exact_up_to(self, layer_idx, length)

    def mixer_class(self, layer_idx: int) -> Any:
        """The mixer class of a layer."""
        return self.mixers[self.layer_types[layer_idx]]

    @property
    def default_bits(self) -> CacheBits:
        """The bits of caches that are not given others."""
        return read_bits(self.cache_bits)

    def checked_bits(self, cache_bits: Any) -> CacheBits:
        """Bits for caches of this model.

        Raises:
            ValueError: if numbers cannot have them, no layer has such states, or a number is for keys and values of
                tokens of which some cannot have it.
        """
        bits = read_bits(cache_bits)
        check_kinds(cache_bits, self.packable_states)
        if not isinstance(cache_bits, int):
            return bits
        specs = enumerate(self.state_specs_in(bits))
        without = [i for i, spec in specs if any(_has_all_bits(*state) for state in spec.items())]
        wanted = "None or a dict of bits by kind, since keys or values"
        all_have = f"{wanted} of layers {without} keep all bits of the model's dtype"
        check(not without, "cache_bits", all_have, cache_bits)
        return bits

    @property
    def kinds_in_bits(self) -> list[str]:
        """The kinds of states of this model that can be stored in few bits, as `cache_bits` names them."""
        return list(dict.fromkeys(name.partition(".")[0] for name in self.packable_states))

    @property
    def packable_states(self) -> list[str]:
        """The states of these kinds, such as "window.keys" and "window.values"."""
        layers = range(self.num_hidden_layers)
        found = [kind for i in layers for kind in self.mixer_class(i).packable_states(self, i)]
        return list(dict.fromkeys(found))

    @property
    def state_specs(self) -> list[Spec]:
        """The states that each layer keeps for a sequence, by name."""
        return self.state_specs_in(self.default_bits)

    def state_specs_in(self, bits: CacheBits) -> list[Spec]:
        """The same in a cache of some bits."""
        layers = [self.mixer_of_step(step) for step in range(self.num_hidden_layers)]
        return [self.mixer_class(i).declared(self, i, bits) for i in layers]

    def mixer_of_step(self, step: int) -> int:
        """The layer whose mixer fills a layer of the cache."""
        return step

    def validate_architecture(self):
        """Check that sizes and options fit together."""
        check_numbers(self.numbers)
        check_word("mixer_backend", self.mixer_backend, BACKENDS)
        check_word("hidden_act", self.hidden_act, tuple(ACT2FN))
        check_each(self, "layer_types", self.layer_types, tuple(self.mixers))
        heads = self.num_attention_heads
        groups = self.num_key_value_heads
        check(
            heads % groups == 0,
            "num_attention_heads",
            f"a multiple of num_key_value_heads={groups}",
            heads,
        )
        check(
            self.head_dim % 2 == 0,
            "head_dim",
            "even, since positions rotate pairs of channels",
            self.head_dim,
        )
        pad = self.pad_token_id
        check(
            pad is None or pad < self.vocab_size,
            "pad_token_id",
            f"below vocab_size={self.vocab_size}",
            pad,
        )
        check_rope("rope_parameters", self.rope_parameters, self.head_dim)
        read_bits(self.cache_bits)
        super().validate_architecture()


def own_options(config: MemoryConfig) -> frozenset[str]:
    """The names of the options that a config has beside those of every config of transformers."""
    fields = type(config).__dataclass_fields__
    return frozenset(fields) - frozenset(PreTrainedConfig.__dataclass_fields__)
