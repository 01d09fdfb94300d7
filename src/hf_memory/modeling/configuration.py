"""The base class of all configs."""

from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from hf_memory.cache import Spec
from hf_memory.feed_forward import FEED_FORWARDS
from hf_memory.mixers.attention import AttentionMixer
from hf_memory.mixers.windowed import WindowedMixer
from hf_memory.modeling.checks import check, check_numbers, check_word
from hf_memory.modeling.hub import HubConfigMixin
from hf_memory.modeling.registration import KnownToPeft
from hf_memory.ops.contract import BACKENDS
from hf_memory.ops.masks import Mask, causal, window

NORMS = {  # names as in transformers: before and after the mixer, before and after the MLP
    "pre": ("input_layernorm", "", "post_attention_layernorm", ""),
    "post": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


@strict
class MemoryConfig(HubConfigMixin, KnownToPeft, PreTrainedConfig):
    """Options that all families share. Those that Llama has too have Llama's names and meanings.

    Args:
        num_key_value_heads (`int`, defaults to `num_attention_heads`): number of key-value heads, each shared by a
            group of query heads.
        head_dim (`int`, defaults to `hidden_size // num_attention_heads`): channels of each head.
        layer_types (`list[str]`, defaults to all `"memory"`): the mixer of each layer: `"memory"`, `"full_attention"`
            or `"sliding_attention"`.
        sliding_window (`int`): tokens that a sliding attention layer sees, the present one included.
        attention_bias (`bool`, defaults to `False`): biases of the q, k and v projections.
        attention_output_bias (`bool`, defaults to `False`): bias of the o projection.
        use_qk_norm (`bool`, defaults to `False`): apply an RMS norm to each head's queries and keys, before rotation.
        qk_norm_whole_width (`bool`, defaults to `False`): apply that norm to all heads together, as in OLMo-2. It does
            not work with tensor parallelism, where no process has all heads.
        rope_parameters (`dict`, *optional*): as in transformers; its `partial_rotary_factor` is the fraction of a
            head's channels that is rotated.
        norm_placement (`str`, defaults to `"pre"`): where the norms of a layer are: `"pre"`: before mixer and MLP, as
            in Llama; `"post"`: after them, as in OLMo-2; `"both"`: before and after them, as in Gemma-2.
        no_rope_layers (`list[int]`, defaults to all 1): 1 for a layer that rotates queries and keys, 0 for one that
            does not, as in SmolLM3.
        query_pre_attn_scalar (`float`, defaults to `head_dim`): attention scores are divided by its square root.
        attn_logit_softcapping (`float`, *optional*): a cap: attention scores s become cap tanh(s / cap), as in Gemma-2.
            SDPA does not support it, so attention is then eager by default.
        final_logit_softcapping (`float`, *optional*): the same for the logits.
        embedding_multiplier (`float`, defaults to 1): factor that multiplies the embeddings before the first layer.
        memory_rope (`bool`, defaults to `False`): rotate queries and keys in memory layers too, not only in attention.
        attention_window (`int`, *optional*): size of a window of softmax attention in memory layers, the present token
            included; what has left the window is in the memory. Default: no window, only the memory.
        num_sink_tokens (`int`, defaults to 0): number of first tokens of the sequence that this attention sees too.
        full_attention_heads (`list[list[int]]`, *optional*): for each layer, the key-value heads that attend to all
            tokens instead of a window, and keep all their keys and values.
        full_attention_window (`int`, *optional*): window of these heads, so that the cache stops growing; they see the
            first tokens too. Default: all tokens.
        window_memory (`bool`, defaults to `True`): whether there is a memory of what has left the window. Most options
            of the family's own memory are not used beside a window.
        num_memory_slots (`int`, defaults to 64): number of slots that this memory has for each key-value head.
        mlp_types (`list[str]`, *optional*): what follows the mixer of each layer: `"mlp"`, `"memory"` (a memory layer
            with product keys), `"mlp_and_memory"` (the sum of both) or `"none"`. Default: `"mlp"` in all layers, or
            `"none"` with an `intermediate_size` of 0. All memory layers share one table of values.
        num_product_keys (`int`, defaults to 1024): number of half keys of each kind and head; its square is the number
            of slots.
        product_key_heads (`int`, defaults to 4): number of queries of each token to the table.
        product_key_dim (`int`, defaults to 512): channels of such a query.
        product_key_top_k (`int`, defaults to 32): number of slots that a query reads.
        sparse_memory_gradients (`bool`, defaults to `False`): whether the gradient of the values is a sparse tensor, so
            that a training step spends no time on slots that were not read; see `parameter_groups`.
        mixer_backend (`str`, defaults to `"auto"`): backend of the memory's op: `"auto"`, `"reference"`, `"chunk"` or
            `"triton"`. Their results differ only by rounding.
    """

    model_type = "hf_memory"
    keys_to_ignore_at_inference = ["past_key_values"]
    mixers = {"full_attention": AttentionMixer, "sliding_attention": AttentionMixer}  # families add "memory"
    far_memory = None  # class of the memory beside attention over a window

    base_model_tp_plan = {
        "layers.*.mixer.q_proj": "colwise",
        "layers.*.mixer.k_proj": "colwise",
        "layers.*.mixer.v_proj": "colwise",
        "layers.*.mixer.q_norm": "replicated_with_grad_allreduce",
        "layers.*.mixer.k_norm": "replicated_with_grad_allreduce",
        "layers.*.mixer.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
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
    attention_output_bias: bool = False
    attention_dropout: float | int = 0.0
    mlp_bias: bool = False
    use_qk_norm: bool = False
    qk_norm_whole_width: bool = False
    norm_placement: str = "pre"
    no_rope_layers: list[int] | None = None
    query_pre_attn_scalar: float | int | None = None
    attn_logit_softcapping: float | int | None = None
    final_logit_softcapping: float | int | None = None
    embedding_multiplier: float | int = 1.0
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    memory_rope: bool = False
    attention_window: int | None = None
    num_sink_tokens: int = 0
    full_attention_heads: list[list[int]] | None = None
    full_attention_window: int | None = None
    window_memory: bool = True
    num_memory_slots: int = 64
    mlp_types: list[str] | None = None
    num_product_keys: int = 1024
    product_key_heads: int = 4
    product_key_dim: int = 512
    product_key_top_k: int = 32
    sparse_memory_gradients: bool = False
    mixer_backend: str = "auto"
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        check_numbers(self.numbers)
        self.set_defaults()
        super().__post_init__(**kwargs)

    def set_defaults(self) -> None:
        """Set fields that are not given, and whose default depends on other fields."""
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["memory"] * self.num_hidden_layers

    @property
    def numbers(self) -> dict[str, Any]:
        """The fields that are not in configs of transformers, and are no tokens."""
        names = {field.name for field in fields(self)} - PreTrainedConfig.__dataclass_fields__.keys()
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

    def near(self, tokens: int) -> Mask:
        """The mask of attention over the last tokens, beside a memory or in heads with a window."""
        return causal & window(tokens)

    def attends(self, layer_idx: int, length: int) -> int | None:
        """How many tokens a token sees in a text of `length`, if the layer starts as softmax attention; else None."""
        sees_all = self.attention_window is not None and length <= self.attention_window + self.num_sink_tokens
        return length if sees_all else None

    @property
    def feed_forwards(self) -> list[str]:
        """The feed-forward part of each layer, by its name in `FEED_FORWARDS`, or `"none"`."""
        return self.mlp_types or ["mlp" if self.intermediate_size > 0 else "none"] * self.num_hidden_layers

    def norms(self, layer_idx: int) -> tuple[str, str, str, str]:
        """Names of the norms before and after the mixer and the MLP of a layer; empty if there is none."""
        return NORMS[self.norm_placement]

    @property
    def mixer_types(self) -> list[str]:
        """The mixer of each layer: `layer_types`, except in families where several mixers have one type of cache."""
        return self.layer_types

    def mixer_class(self, layer_idx: int) -> type[nn.Module]:
        """The mixer class of a layer."""
        kind = self.mixer_types[layer_idx]
        return WindowedMixer if kind == "memory" and self.attention_window else self.mixers[kind]

    @property
    def state_specs(self) -> list[Spec]:
        """The states that each layer keeps for a sequence, by name."""
        return [self.mixer_class(i).state_spec(self, i) for i in range(self.num_hidden_layers)]

    def validate_architecture(self):
        """Check that sizes and options fit together."""
        check_numbers(self.numbers)
        check_word("norm_placement", self.norm_placement, tuple(NORMS))
        check_word("mixer_backend", self.mixer_backend, BACKENDS)
        check_word("hidden_act", self.hidden_act, tuple(ACT2FN))
        heads, groups, width = self.num_attention_heads, self.num_key_value_heads, self.hidden_size
        check(heads % groups == 0, "num_attention_heads", f"a multiple of num_key_value_heads={groups}", heads)
        is_divided = self.head_dim * heads == width or width % heads == 0
        check(is_divided, "hidden_size", f"a multiple of num_attention_heads={heads} unless head_dim is set", width)
        check(self.head_dim % 2 == 0, "head_dim", "even, since positions rotate pairs of channels", self.head_dim)
        pad = self.pad_token_id
        check(pad is None or pad < self.vocab_size, "pad_token_id", f"below vocab_size={self.vocab_size}", pad)
        self._check_layers()
        self._check_rope()
        self._check_window()
        self._check_feed_forwards()

    def _check_layers(self) -> None:
        self.check_each("layer_types", self.layer_types, tuple(self.mixers), self.mixer_types)
        sliding = [kind for kind in self.mixer_types if kind.startswith("sliding")]
        check(not sliding or self.sliding_window, "sliding_window", f"set with {sliding[:1]} in layer_types", None)
        self.check_each("no_rope_layers", (self.no_rope_layers or self.layer_types)[: self.num_hidden_layers])

    def check_each(self, name: str, given: list, words: tuple[str, ...] = (), names: list[str] | None = None) -> None:
        """Check that a field has one entry for each layer, and that its names are known."""
        expected = f"a list with one for each of the num_hidden_layers={self.num_hidden_layers} layers"
        check(len(given) == self.num_hidden_layers, name, expected, given)
        for word in (names or given) if words else ():
            check_word(name, word, words)

    def _check_rope(self) -> None:
        rope: Any = self.rope_parameters
        check_word("rope_type", rope.get("rope_type", "default"), ("default", *ROPE_INIT_FUNCTIONS))
        check_numbers({name: rope[name] for name in ("rope_theta", "partial_rotary_factor", "factor") if name in rope})

    def _check_window(self) -> None:
        near, longer, heads = self.attention_window, self.full_attention_window, self.full_attention_heads
        if near is None:
            is_alone = not (self.num_sink_tokens or heads)
            check(is_alone, "attention_window", "set with num_sink_tokens or full_attention_heads", None)
            return
        has_memory = not self.window_memory or self.far_memory is not None
        check(has_memory, "window_memory", f"False for {self.model_type}, which has no such memory", True)
        is_longer = longer is None or longer >= near
        check(is_longer, "full_attention_window", f"at least attention_window={near}", longer)
        if heads is not None:
            self.check_each("full_attention_heads", heads)
            last, given = self.num_key_value_heads - 1, {head for layer in heads for head in layer}
            check(given <= {*range(last + 1)}, "full_attention_heads", f"lists of heads from 0 to {last}", heads)

    def _check_feed_forwards(self) -> None:
        given = self.mlp_types or self.feed_forwards
        self.check_each("mlp_types", given, (*FEED_FORWARDS, "none"))
        check(given == self.feed_forwards, "mlp_types", f"{self.feed_forwards} for {self.model_type}", given)
        check(self.product_key_dim % 2 == 0, "product_key_dim", "even", self.product_key_dim)
        most, found = self.num_product_keys, self.product_key_top_k
        check(found <= most, "product_key_top_k", f"at most num_product_keys={most}", found)
