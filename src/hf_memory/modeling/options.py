"""Groups of options that all families share. `MemoryConfig` has all of them."""

from transformers import PreTrainedConfig

from hf_memory.feed_forward import FEED_FORWARDS
from hf_memory.mixers.pasts.policy import POLICIES
from hf_memory.modeling.checks import check, check_each, check_rope, check_values, check_word

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


class TeacherShape(PreTrainedConfig):
    """How published Transformers differ from Llama. With the defaults, a model has the shape of Llama.

    Args:
        attention_output_bias (`bool`, defaults to `False`): bias of the o projection.
        mlp_bias (`bool`, defaults to `False`): biases of the MLP's projections.
        qk_norm_whole_width (`bool`, defaults to `False`): apply the norm of `use_qk_norm` to all heads together, as in
            OLMo-2. It does not work with tensor parallelism, where no process has all heads.
        norm_placement (`str`, defaults to `"pre"`): where the norms of a layer are: `"pre"`: before mixer and MLP, as
            in Llama; `"post"`: after them, as in OLMo-2; `"both"`: before and after them, as in Gemma-2.
        no_rope_layers (`list[int]`, defaults to all 1): 1 for a layer that rotates queries and keys, 0 for one that
            does not, as in SmolLM3.
        query_pre_attn_scalar (`float`, defaults to `head_dim`): attention scores are divided by its square root.
        attn_logit_softcapping (`float`, *optional*): a cap: attention scores s become cap tanh(s / cap), as in Gemma-2.
            SDPA does not support it, so attention is then eager by default.
        final_logit_softcapping (`float`, *optional*): the same for the logits.
        embedding_multiplier (`float`, defaults to 1): factor that multiplies the embeddings before the first layer.
        residual_multiplier (`float`, defaults to 1): factor that multiplies what mixer and MLP add, as in Granite.
        local_rope_layers (`list[int]`, *optional*): 1 for a layer whose rotary positions are those of
            `local_rope_parameters` in place of `rope_parameters`, as the layers with a window in Gemma-3; 0 for others.
        local_rope_parameters (`dict`, *optional*): as `rope_parameters`, for these layers.
        teacher_name_or_path (`str`, *optional*): name on the Hub of the Transformer whose weights a student has.
    """

    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm_whole_width: bool = False
    norm_placement: str = "pre"
    no_rope_layers: list[int] | None = None
    query_pre_attn_scalar: float | int | None = None
    attn_logit_softcapping: float | int | None = None
    final_logit_softcapping: float | int | None = None
    embedding_multiplier: float | int = 1.0
    residual_multiplier: float | int = 1.0
    local_rope_layers: list[int] | None = None
    local_rope_parameters: dict | None = None
    teacher_name_or_path: str | None = None

    def norms(self, layer_idx: int) -> tuple[str, str, str, str]:
        """Names of the norms before and after the mixer and the MLP of a layer; empty if there is none."""
        return NORMS[self.norm_placement]

    def validate_architecture(self):
        """Check the norms and the layers with positions, too."""
        super().validate_architecture()
        check_word("norm_placement", self.norm_placement, tuple(NORMS))
        check_each(
            self,
            "no_rope_layers",
            (self.no_rope_layers or self.layer_types)[: self.num_hidden_layers],
        )
        local = self.local_rope_layers
        rope = self.local_rope_parameters
        check_each(self, "local_rope_layers", local or self.layer_types)
        check(
            (local is None) == (rope is None),
            "local_rope_parameters",
            f"given with local_rope_layers={local}",
            rope,
        )
        rotates = self.no_rope_layers or self.layer_types
        is_rotated = not any(own and not turned for own, turned in zip(local or [], rotates))
        expected = f"0 in layers that no_rope_layers={self.no_rope_layers} does not rotate"
        check(is_rotated, "local_rope_layers", expected, local)
        if rope is not None:
            check_rope("local_rope_parameters", rope, self.head_dim)


class AttentionWindow(PreTrainedConfig):
    """A window of softmax attention, with first tokens and with heads that see more.

    Args:
        sliding_window (`int`, *optional*): tokens that attention with a window sees, the present one included.
        num_sink_tokens (`int`, defaults to 0): number of first tokens of the sequence that it sees too, in
            `"sliding_heads"` and `"sliding_memory"` layers.
        attention_sinks (`bool`, defaults to `False`): whether each head of these layers that has a window has a learned
            sink, which takes part in its softmax like a further token that every token sees.
        num_kept_tokens (`int`, `list[int]` or `list[list[int]]`, defaults to 0): number of older tokens whose keys and
            values each key-value head of `"sliding_heads"` layers keeps beside its window. A list has the number of
            each layer, or a list of those of its key-value heads, of which heads that keep everything ignore theirs.
        eviction (`str`, defaults to `"received_attention"`): which tokens these are: the policy says which are worth
            most. `"received_attention"`: those that received most attention, of what sinks leave.
            `"change_of_output"`: those without which outputs would change most. `"random"` is for comparisons, and
            `register_eviction` adds others.
        kept_block_size (`int`, defaults to 32): number of tokens after which it is decided which ones stay; until then
            all of these are seen.
        full_attention_heads (`list[list[int]]`, *optional*): for each layer, the key-value heads of these layers that
            attend to all tokens instead of a window, and keep all their keys and values.
        full_attention_window (`int`, *optional*): window of these heads, so that the cache stops growing; they see the
            first tokens too. Default: all tokens.
        num_memory_slots (`int`, defaults to 64): number of slots for each key-value head of the memory of
            `"sliding_memory"` layers. Most options of the family's own memory are not used there.
    """

    far_memory = None  # class of the memory of "sliding_memory" layers
    heads_types = ("sliding_heads", "sliding_memory")  # layer types whose heads have these options

    sliding_window: int | None = None
    num_sink_tokens: int = 0
    attention_sinks: bool = False
    num_kept_tokens: int | list[int] | list[list[int]] = 0
    eviction: str = "received_attention"
    kept_block_size: int = 32
    full_attention_heads: list[list[int]] | None = None
    full_attention_window: int | None = None
    num_memory_slots: int = 64

    @property
    def kept_tokens(self) -> list[list[int]]:
        """The `num_kept_tokens` of each key-value head of each layer."""
        given = self.num_kept_tokens
        by_layer = given if isinstance(given, list) else [given] * self.num_hidden_layers
        return [x if isinstance(x, list) else [x] * self.num_key_value_heads for x in by_layer]

    def validate_architecture(self):
        """Check the window, too."""
        super().validate_architecture()
        near = self.sliding_window
        longer = self.full_attention_window
        heads = self.full_attention_heads
        sliding = [kind for kind in self.layer_types if kind.startswith("sliding")]
        check(not sliding or near, "sliding_window", f"set with {sliding[:1]} in layer_types", near)
        self._check_heads(heads)
        can_keep = "sliding_heads" in sliding and "sliding_memory" not in sliding
        only = "0 unless layers with a window are 'sliding_heads'"
        check_each(self, "num_kept_tokens", self.kept_tokens)
        kept = self.num_kept_tokens
        of_heads = self.kept_tokens
        heads_of_layer = self.num_key_value_heads
        are_of_heads = all(len(numbers) == heads_of_layer for numbers in of_heads)
        each = f"numbers of layers, or lists with one for each of {heads_of_layer} key-value heads"
        check(are_of_heads, "num_kept_tokens", each, kept)
        numbers = [number for layer in of_heads for number in layer]
        check(can_keep or not any(numbers), "num_kept_tokens", only, kept)
        check(min(numbers) >= 0, "num_kept_tokens", "at least 0", kept)
        is_longer = longer is None or (near and longer >= near)
        check(is_longer, "full_attention_window", f"at least sliding_window={near}", longer)
        check(
            not (longer and self.attention_sinks),
            "full_attention_window",
            "None with attention_sinks",
            longer,
        )
        known = tuple(POLICIES)
        wanted = f"one of {known}, or another after hf_memory.modeling.register_eviction"
        check(self.eviction in known, "eviction", wanted, self.eviction)

    @property
    def takes_first_tokens(self) -> bool:
        """Whether a layer can see the first tokens."""
        return bool({*self.heads_types} & {*self.layer_types})

    def _check_heads(self, heads: list[list[int]] | None) -> None:
        """Refuse options of heads in layers that do not have them."""
        without = f"unless layer_types has one of {self.heads_types}"
        is_seen = self.takes_first_tokens or not self.num_sink_tokens
        check(is_seen, "num_sink_tokens", f"0 {without}", self.num_sink_tokens)
        if not {*self.heads_types} & {*self.layer_types}:
            check(not any(heads or []), "full_attention_heads", f"None {without}", heads)
            check_values(self, without, attention_sinks=False)
        if heads is None:
            return
        check_each(self, "full_attention_heads", heads)
        last = self.num_key_value_heads - 1
        given = {head for layer in heads for head in layer}
        check(
            given <= {*range(last + 1)},
            "full_attention_heads",
            f"lists of heads from 0 to {last}",
            heads,
        )
        others = [
            kind
            for kind, own in zip(self.layer_types, heads)
            if own and kind not in self.heads_types
        ]
        check(not others, "full_attention_heads", f"[] for layer_types {others}", heads)


class Experts(PreTrainedConfig):
    """MLPs of which each token uses a few, as in Qwen3-MoE, in layers whose `mlp_types` is `"experts"`.

    Args:
        num_experts (`int`, defaults to 8): number of MLPs.
        num_experts_per_tok (`int`, defaults to 2): number of those that a token uses.
        moe_intermediate_size (`int`, defaults to 768): width of one.
        norm_topk_prob (`bool`, defaults to `True`): whether the weights of the MLPs that a token uses add up to one.
    """

    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = True

    def validate_architecture(self):
        """Check that there are as many experts as a token uses, too."""
        super().validate_architecture()
        most = self.num_experts
        used = self.num_experts_per_tok
        has_experts = "experts" in self.feed_forwards  # type: ignore[attr-defined]
        check(
            not has_experts or used <= most,
            "num_experts_per_tok",
            f"at most num_experts={most}",
            used,
        )


class ProductKeys(PreTrainedConfig):
    """What follows a mixer: an MLP, a memory layer with product keys, or both.

    Args:
        mlp_types (`list[str]`, *optional*): what follows the mixer of each layer: `"mlp"`, `"experts"` (see `Experts`),
            `"memory"` (a memory layer with product keys), `"mlp_and_memory"` (the sum of both) or `"none"`. Default:
            `"mlp"` in all layers, or `"none"` with an `intermediate_size` of 0. All memory layers share one table of
            values.
        num_product_keys (`int`, defaults to 1024): number of half keys of each kind and head; its square is the number
            of slots.
        product_key_heads (`int`, defaults to 4): number of queries of each token to the table.
        product_key_dim (`int`, defaults to 512): channels of such a query.
        product_key_top_k (`int`, defaults to 32): number of slots that a query reads.
        sparse_memory_gradients (`bool`, defaults to `False`): whether the gradient of the values is a sparse tensor, so
            that a training step spends no time on slots that were not read; see `parameter_groups`.
    """

    mlp_types: list[str] | None = None
    num_product_keys: int = 1024
    product_key_heads: int = 4
    product_key_dim: int = 512
    product_key_top_k: int = 32
    sparse_memory_gradients: bool = False

    @property
    def feed_forwards(self) -> list[str]:
        """The feed-forward part of each layer, by its name in `FEED_FORWARDS`, or `"none"`."""
        return (
            self.mlp_types
            or ["mlp" if self.intermediate_size > 0 else "none"] * self.num_hidden_layers
        )

    def validate_architecture(self):
        """Check the feed-forward parts, too."""
        super().validate_architecture()
        given = self.mlp_types or self.feed_forwards
        check_each(self, "mlp_types", given, (*FEED_FORWARDS, "none"))
        check(
            given == self.feed_forwards,
            "mlp_types",
            f"{self.feed_forwards} for {self.model_type}",
            given,
        )
        has_mlp = not {"mlp", "mlp_and_memory"}.isdisjoint(given)
        without = f"False without an MLP, with mlp_types={given}"
        check(has_mlp or not self.mlp_bias, "mlp_bias", without, self.mlp_bias)  # type: ignore[attr-defined]
        check(self.product_key_dim % 2 == 0, "product_key_dim", "even", self.product_key_dim)
        most = self.num_product_keys
        top_k = self.product_key_top_k
        check(top_k <= most, "product_key_top_k", f"at most num_product_keys={most}", top_k)
