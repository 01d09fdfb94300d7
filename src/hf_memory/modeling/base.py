"""The language model that every family shares. A family adds a config with its mixer's options, and names."""

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, configuration_utils
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import (
    create_causal_mask,
    create_recurrent_attention_mask,
    create_sliding_window_causal_mask,
    find_packed_sequence_indices,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import RopeParameters
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from hf_memory.layers import RMSNorm, RotaryEmbedding, SwiGLU
from hf_memory.mixers.attention import AttentionMixer
from hf_memory.modeling.hub import HubClassMixin, HubConfigMixin
from hf_memory.ops.contract import BACKENDS

# The Trainer reads the config of a checkpoint that it resumes from without our class, and checks the words of all.
configuration_utils.ALLOWED_ATTN_LAYER_TYPES += ("memory",)
NORMS = {  # names, after transformers' models: before and after the mixer, before and after the MLP
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
MASKS = {
    "memory": create_recurrent_attention_mask,
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


@strict
class MemoryConfig(HubConfigMixin, PreTrainedConfig):
    """What every family's config has. Names and meanings are Llama's where Llama has them.

    Args:
        num_key_value_heads (`int`, defaults to `num_attention_heads`): heads of keys and values, each read by a group
            of query heads.
        head_dim (`int`, defaults to `hidden_size // num_attention_heads`): channels of a head.
        layer_types (`list[str]`, defaults to all `"memory"`): the mixer of each layer: `"memory"`, `"full_attention"`
            or `"sliding_attention"`.
        sliding_window (`int`): tokens that a sliding attention layer sees, the present one included.
        attention_bias (`bool`, defaults to `False`): biases of the q, k and v projections.
        attention_output_bias (`bool`, defaults to `False`): bias of the o projection.
        use_qk_norm (`bool`, defaults to `False`): RMS norm of each head's queries and keys, before rotation.
        qk_norm_whole_width (`bool`, defaults to `False`): let that norm span all heads at once, as in OLMo-2; not with
            tensor parallelism, where no process has all heads.
        rope_parameters (`dict`, *optional*): as in transformers; `partial_rotary_factor` in it is the part of a head's
            channels that rotates.
        norm_placement (`str`, defaults to `"pre"`): norms before mixer and MLP as in Llama, `"post"`: after them as in
            OLMo-2, or `"both"` as in Gemma-2.
        no_rope_layers (`list[int]`, defaults to all 1): 1 for a layer that rotates queries and keys, 0 for one that
            does not, as in SmolLM3.
        query_pre_attn_scalar (`float`, defaults to `head_dim`): attention scores are divided by its square root.
        attn_logit_softcapping (`float`, *optional*): attention scores s become cap tanh(s / cap), as in Gemma-2. SDPA
            does not have it: the default is then eager attention.
        final_logit_softcapping (`float`, *optional*): the same for the logits.
        embedding_multiplier (`float`, defaults to 1): of the embeddings before the first layer.
        memory_rope (`bool`, defaults to `False`): rotate queries and keys in memory layers too, not only in attention.
        mixer_backend (`str`, defaults to `"auto"`): what runs the memory: `"auto"`, `"reference"`, `"chunk"` or
            `"triton"`. Results differ by rounding only.
    """

    model_type = "hf_memory"
    keys_to_ignore_at_inference = ["past_key_values"]
    mixers = {"full_attention": AttentionMixer, "sliding_attention": AttentionMixer}  # a family adds its "memory"

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
    def has_memory_qk_norm(self) -> bool:
        """Whether queries and keys of memory layers have a norm: as those of attention, unless a family says more."""
        return self.use_qk_norm

    @property
    def mixer_types(self) -> list[str]:
        """The mixer of each layer: `layer_types`, unless a family's mixers share kinds of caches."""
        return self.layer_types

    def validate_architecture(self):
        """Check what the sizes and words of a config must have in common."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if self.head_dim * self.num_attention_heads != self.hidden_size and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads unless head_dim says otherwise, "
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
        """Check `layer_types`, whose words are not transformers' own."""
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types must name each of the num_hidden_layers={self.num_hidden_layers} layers, "
                f"got {len(self.layer_types)} names"
            )
        for mixer_type in self.mixer_types:
            check_word("layer_types", mixer_type, tuple(self.mixers))


def check_word(name: str, word: str, words: tuple[str, ...]) -> None:
    """Raise ValueError unless a config's word is one of those that exist."""
    if word not in words:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}, got {word!r}")


class MemoryDecoderLayer(GradientCheckpointingLayer):
    """Mixer, and MLP if there is one, each with its norms and around a residual; `layer_types` names the mixer."""

    def __init__(self, config: MemoryConfig, layer_idx: int):
        super().__init__()
        self.norms = NORMS[config.norm_placement]
        self.mixer = config.mixers[config.mixer_types[layer_idx]](config, layer_idx)
        self.has_mlp = config.intermediate_size > 0
        if self.has_mlp:
            self.mlp = SwiGLU(config)
        for name in self.norms if self.has_mlp else self.norms[:2]:
            if name:
                self.add_module(name, RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        """[B, T, hidden_size] -> the same; the rest is the mixer's."""
        before_mixer, after_mixer, before_mlp, after_mlp = self.norms
        mixed, _ = self.mixer(self._norm(before_mixer, hidden_states), **kwargs)
        hidden_states = hidden_states + self._norm(after_mixer, mixed)
        if not self.has_mlp:
            return hidden_states
        made = self.mlp(self._norm(before_mlp, hidden_states))
        return hidden_states + self._norm(after_mlp, made)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return getattr(self, name)(x) if name else x


class MemoryPreTrainedModel(HubClassMixin, PreTrainedModel):
    """What transformers must know of all families."""

    config: MemoryConfig
    base_model_prefix = "model"
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias", "D", "projection", "initial_weights"]
    supports_gradient_checkpointing = True
    _no_split_modules = ["MemoryDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": MemoryDecoderLayer, "attentions": AttentionMixer}

    def _sdpa_can_dispatch(self, is_init_check: bool = False) -> bool:
        if self.config.attn_logit_softcapping is not None:
            raise ValueError(
                'attn_implementation must be "eager", "flex_attention" or "flash_attention_2" with '
                'attn_logit_softcapping, got "sdpa"'
            )
        return super()._sdpa_can_dispatch(is_init_check)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if hasattr(module, "init_own_parameters"):
            module.init_own_parameters()


class MemoryModel(MemoryPreTrainedModel):
    """Embedding, layers and the last norm."""

    def __init__(self, config: MemoryConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(MemoryDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Run the layers.

        Args:
            input_ids: [B, T]; either these or `inputs_embeds`.
            attention_mask: [B, past + T], zero at padding on either side; or one mask for each layer type.
            position_ids: [B, T]; default: counted over the tokens that are not padding. Numbers that start again
                within a row mean packed sequences, as do `cu_seq_lens_q` [N + 1] and `seq_idx` [B, T] among `kwargs`.
            past_key_values: made by `DynamicCache(config=model.config)`, which is also the default with `use_cache`.
            inputs_embeds: [B, T, hidden_size].
            use_cache: whether to return a cache. Packed sequences without a cache given have none.
            **kwargs: passed to the mixers.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        cu_seqlens = packed_boundaries(inputs_embeds, attention_mask, position_ids, past_key_values, kwargs)
        if cu_seqlens is not None:
            attention_mask = None
            position_ids = _packed_positions(cu_seqlens, inputs_embeds) if position_ids is None else position_ids
        elif use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = _positions(inputs_embeds, attention_mask, past_key_values)
        masks = self._masks(inputs_embeds, attention_mask, past_key_values, position_ids)

        scale = self.config.embedding_multiplier
        hidden_states = inputs_embeds if scale == 1 else inputs_embeds * scale
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer_type, layer in zip(self.config.layer_types, self.layers):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[layer_type],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                cu_seqlens=cu_seqlens,
                **kwargs,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values if use_cache else None
        )

    def _masks(self, inputs_embeds, attention_mask, past_key_values, position_ids) -> dict:
        if isinstance(attention_mask, dict):  # generate has made them already
            return attention_mask
        return {
            layer_type: MASKS[layer_type](
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
            for layer_type in set(self.config.layer_types)
        }


def packed_boundaries(inputs_embeds, attention_mask, position_ids, past_key_values, kwargs: dict) -> Tensor | None:
    """Boundaries [N + 1] int32 of packed sequences in the B * T tokens of a batch, or None where nothing is packed.

    Trainers say it in three ways: `cu_seq_lens_q` and `seq_idx`, which are taken at their word, and `position_ids`
    that start again, which count as packing only where neither a mask nor a cache explains them.
    """
    B, T = inputs_embeds.shape[:2]
    cu_seqlens, seq_idx = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
    if cu_seqlens is None and seq_idx is None:
        if position_ids is None or attention_mask is not None or past_key_values is not None:
            return None
        seq_idx = find_packed_sequence_indices(position_ids.expand(B, T))
        if seq_idx is None:
            return None
    elif isinstance(attention_mask, Tensor) and not attention_mask.all():
        raise ValueError("attention_mask must be all ones or None when cu_seq_lens_q or seq_idx packs sequences")
    elif past_key_values is not None:
        raise ValueError("past_key_values must be None when cu_seq_lens_q or seq_idx packs sequences")
    if cu_seqlens is not None:
        if cu_seqlens[-1] != B * T:
            raise ValueError(f"cu_seq_lens_q must end at the number of tokens, {B * T}, got {int(cu_seqlens[-1])}")
        return cu_seqlens.to(torch.int32)
    starts = torch.ones(B, T, dtype=torch.bool, device=inputs_embeds.device)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    starts = starts.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_full((1,), B * T)]).to(torch.int32)


def _packed_positions(cu_seqlens: Tensor, inputs_embeds: Tensor) -> Tensor:
    """[B, T]: the position of each token in its own sequence."""
    B, T = inputs_embeds.shape[:2]
    tokens = torch.arange(B * T, device=inputs_embeds.device, dtype=cu_seqlens.dtype)
    starts = cu_seqlens[torch.searchsorted(cu_seqlens, tokens, right=True) - 1]
    return (tokens - starts).view(B, T)


def _positions(inputs_embeds: Tensor, attention_mask, past_key_values: Cache | None) -> Tensor:
    """[1 or B, T]: padding does not count, so that a padded row is rotated as the row alone would be."""
    T = inputs_embeds.shape[1]
    past = 0 if past_key_values is None else past_key_values.get_seq_length()
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -T:]
    return (torch.arange(T, device=inputs_embeds.device) + past)[None]


class MemoryForCausalLM(MemoryPreTrainedModel, GenerationMixin):
    """A model with a head that predicts the next token."""

    model_class: type[MemoryModel] = MemoryModel
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: MemoryConfig):
        super().__init__(config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Predict the next token at every position; the arguments are those of `MemoryModel.forward`, and two more.

        Args:
            input_ids: [B, T].
            attention_mask: [B, past + T].
            position_ids: [B, T].
            past_key_values: see `MemoryModel.forward`.
            inputs_embeds: [B, T, hidden_size].
            labels: [B, T] tokens, shifted inside; -100 is ignored.
            use_cache: see `MemoryModel.forward`.
            logits_to_keep: compute logits for the last so many positions only, or for these; 0 means all.
            **kwargs: passed to the mixers and to the loss.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        cap = self.config.final_logit_softcapping
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
