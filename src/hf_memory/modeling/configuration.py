"""The base class of all configs."""

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from hf_memory.cache import Spec
from hf_memory.feed_forward import FEED_FORWARDS
from hf_memory.mixers.attention import AttentionMixer
from hf_memory.mixers.windowed import WindowedMixer
from hf_memory.modeling.hub import HubConfigMixin
from hf_memory.modeling.registration import tell_peft
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
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")


@strict
class MemoryConfig(HubConfigMixin, PreTrainedConfig):
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
        for name in SIZES:
            if (size := getattr(self, name)) is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["memory"] * self.num_hidden_layers
        super().__post_init__(**kwargs)

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

    def to_dict(self) -> dict:
        """The config as a dict. peft calls this first, so that it can be told the default targets of LoRA."""
        tell_peft(self.model_type)
        return super().to_dict()

    def mixer_class(self, layer_idx: int) -> type[nn.Module]:
        """The mixer class of a layer."""
        kind = self.mixer_types[layer_idx]
        return WindowedMixer if kind == "memory" and self.attention_window else self.mixers[kind]

    @property
    def state_specs(self) -> list[Spec]:
        """The states that each layer keeps for a sequence, by name."""
        return [self.mixer_class(i).state_spec(self, i) for i in range(self.num_hidden_layers)]

    def validate_window(self):
        """Check the options of attention over a window."""
        if self.attention_window is None:
            if self.num_sink_tokens or self.full_attention_heads:
                raise ValueError("attention_window must be set with num_sink_tokens or full_attention_heads, got None")
            return
        for name, least in (("attention_window", 1), ("num_sink_tokens", 0), ("num_memory_slots", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.window_memory and self.far_memory is None:
            raise ValueError(f"window_memory must be False for {self.model_type}, which has no such memory, got True")
        heads, longer = self.full_attention_heads, self.full_attention_window
        if longer is not None and longer < self.attention_window:
            raise ValueError(
                f"full_attention_window must be at least attention_window={self.attention_window}, got {longer}"
            )
        if heads is not None and (
            len(heads) != self.num_hidden_layers
            or not {head for layer in heads for head in layer} <= set(range(self.num_key_value_heads))
        ):
            raise ValueError(
                f"full_attention_heads must list heads from 0 to {self.num_key_value_heads - 1} for each of "
                f"{self.num_hidden_layers} layers, got {heads}"
            )

    def validate_mlp_types(self):
        """Check the feed-forward parts."""
        given = self.mlp_types or self.feed_forwards
        if len(given) != self.num_hidden_layers:
            raise ValueError(
                f"mlp_types must name one for each of the num_hidden_layers={self.num_hidden_layers} layers, "
                f"got {len(given)} names"
            )
        for name in given:
            check_word("mlp_types", name, (*FEED_FORWARDS, "none"))
        if given != self.feed_forwards:
            raise ValueError(f"mlp_types must be {self.feed_forwards} for {self.model_type}, got {given}")
        if self.product_key_dim % 2 or min(self.product_key_dim, self.product_key_heads) < 1:
            raise ValueError(
                f"product_key_dim must be even and at least 2, and product_key_heads at least 1, "
                f"got {self.product_key_dim} and {self.product_key_heads}"
            )
        if not 1 <= self.product_key_top_k <= self.num_product_keys:
            raise ValueError(
                f"product_key_top_k must be from 1 to num_product_keys={self.num_product_keys}, "
                f"got {self.product_key_top_k}"
            )

    def validate_architecture(self):
        """Check that sizes and options fit together."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if self.head_dim * self.num_attention_heads != self.hidden_size and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads unless head_dim is set, "
                f"got {self.hidden_size} and {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, since positions rotate pairs of channels, got {self.head_dim}")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError("sliding_window must be set when layer_types has 'sliding_attention', got None")
        if self.no_rope_layers is not None and len(self.no_rope_layers) < self.num_hidden_layers:
            raise ValueError(
                f"no_rope_layers must have a number for each of the num_hidden_layers={self.num_hidden_layers} layers, "
                f"got {len(self.no_rope_layers)}"
            )
        check_word("norm_placement", self.norm_placement, tuple(NORMS))
        check_word("mixer_backend", self.mixer_backend, BACKENDS)

    def validate_layer_type(self):
        """Check `layer_types`, whose names differ from those of transformers."""
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types must name each of the num_hidden_layers={self.num_hidden_layers} layers, "
                f"got {len(self.layer_types)} names"
            )
        for mixer_type in self.mixer_types:
            check_word("layer_types", mixer_type, tuple(self.mixers))


def check_word(name: str, word: str, words: tuple[str, ...]) -> None:
    """Raise ValueError unless the value of an option is one of `words`."""
    if word not in words:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}, got {word!r}")
