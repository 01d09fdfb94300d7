"""The language model that all families share. A family adds a config with the options of its mixer, and class names."""

import copy
import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from itertools import cycle
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from hf_memory.cache import (
    LAYER_TYPES,
    check_has_layers,
    check_texts,
    padding_mask,
    set_bits,
)
from hf_memory.cache_argument import CACHE, NAMES, cache_of, named_cache, takes_cache
from hf_memory.cache_bits import CacheBits
from hf_memory.feed_forward import FEED_FORWARDS, WITH_MEMORY, MemoryValues
from hf_memory.layers import RMSNorm, RotaryEmbedding
from hf_memory.mixers.attention import AttentionMixer
from hf_memory.modeling.assisted import note_read, sequence_length
from hf_memory.modeling.checks import check
from hf_memory.modeling.chunks import read_in_chunks
from hf_memory.modeling.configuration import MemoryConfig, own_options
from hf_memory.modeling.hub import HubModel
from hf_memory.modeling.inputs import (
    check_generate_inputs,
    check_mask_length,
    check_positions,
    check_rows,
    check_some_tokens,
    of_bools,
    warn_beyond_positions,
)
from hf_memory.modeling.packing import (
    PACKING,
    are_finite,
    default_positions,
    flash_arguments,
    packed_boundaries,
    packed_positions,
)
from hf_memory.modeling.room import check_room
from hf_memory.ops.layout import blank
from hf_memory.ops.soft_cap import soft_capped

MASKS = {
    **dict.fromkeys(LAYER_TYPES, padding_mask),
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


@dataclass
class MemoryModelOutput(BaseModelOutputWithPast):
    """The output of a model; in training also what its parts add to the loss, such as the spans that they learn.

    `own_losses` [B, T] are those of each token, summed over the parts, and zero at padding. `own_loss` is their mean
    over the tokens that are not padding.
    """

    own_loss: Tensor | None = None
    own_losses: Tensor | None = None


class MemoryDecoderLayer(GradientCheckpointingLayer):
    """A mixer and an MLP, if there is one, each with norms and a residual connection; `layer_types` names the mixer."""

    def __init__(self, config: MemoryConfig, layer_idx: int):
        super().__init__()
        self.norms = config.norms(layer_idx)
        self.factor = config.residual_multiplier
        self.is_local = bool(config.local_rope_layers and config.local_rope_layers[layer_idx])
        self.mixer = config.mixer_class(layer_idx)(config, layer_idx)
        kind = config.feed_forwards[layer_idx]
        self.has_mlp = kind != "none"
        self.reads_values = kind in WITH_MEMORY
        if self.has_mlp:
            self.mlp = FEED_FORWARDS[kind](config)
        for name in self.norms if self.has_mlp else self.norms[:2]:
            if name:
                self.add_module(name, RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, hidden_states: Tensor, read_values: Callable | None = None, **kwargs) -> Any:
        """[B, T, hidden_size] -> [B, T, hidden_size]; `read_values` is for memory layers, the rest for the mixer.

        In training, a layer whose mixer has a loss of its own returns it too, [B, T]. It leaves as an output, not in a
        list, so that it has a gradient if the layer is computed again in the backward pass.
        """
        mixed, own_losses = self.mixed(hidden_states, **kwargs)
        hidden_states = hidden_states + mixed
        if self.has_mlp:
            hidden_states = hidden_states + self.fed(hidden_states, read_values)
        return (hidden_states, *own_losses) if own_losses else hidden_states

    def mixed(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor | None = None,
        local_embeddings: Any = None,
        **kwargs,
    ) -> tuple[Tensor, list[Tensor]]:
        """The output of the mixer with its norms and factor, without the residual, and its own loss, if it has one.

        A packed sequence with a number that is not finite is not shown to the mixer, since attention multiplies the
        values of other sequences by zero, and zero times NaN is NaN. Its output is NaN.
        """
        before, after = self.norms[:2]
        x = self._norm(before, hidden_states)
        if self.is_local:
            kwargs["position_embeddings"] = local_embeddings
        if self.training:
            kwargs["with_own_loss"] = True
        if cu_seqlens is None:
            output, _, *own_losses = self.mixer(x, **kwargs)
            return self._added(after, output), own_losses
        finite = are_finite(x, cu_seqlens)
        output, _, *own_losses = self.mixer(blank(x, finite), cu_seqlens=cu_seqlens, **kwargs)
        return self._added(after, output.masked_fill(~finite[..., None], torch.nan)), own_losses

    def fed(self, hidden_states: Tensor, read_values: Callable | None = None) -> Tensor:
        """The output of the feed-forward part with its norms and factor, without the residual."""
        before, after = self.norms[2:]
        reads = (read_values,) if self.reads_values else ()
        return self._added(after, self.mlp(self._norm(before, hidden_states), *reads))

    def _added(self, norm: str, x: Tensor) -> Tensor:
        if norm:
            x = self._norm(norm, x)
        return x if self.factor == 1 else x * self.factor

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return getattr(self, name)(x) if name else x


class MemoryPreTrainedModel(HubModel):
    """Base class of all models, with the class attributes that transformers needs."""

    config: MemoryConfig
    base_model_prefix = "model"
    _keep_in_fp32_modules_strict = [
        "A_log",
        "dt_bias",
        "D",
        "projection",
        "initial_weights",
        "span",
    ]
    supports_gradient_checkpointing = True
    _no_split_modules = ["MemoryDecoderLayer"]
    _skip_keys_device_placement = [*NAMES]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    # an engine's own attention would leave memories without a past
    _supports_attention_backend = False
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": MemoryDecoderLayer, "attentions": AttentionMixer}

    def __init__(self, config: PreTrainedConfig, *args, **kwargs):
        own = self.config_class
        if isinstance(config, PreTrainedConfig) and not isinstance(config, own):
            raise ValueError(
                f"config must be a {own.__name__} for {type(self).__name__}, got a {type(config).__name__}"
            )
        super().__init__(config, *args, **kwargs)

    def post_init(self):
        """Called at the end of a model's constructor; sets what depends on the config."""
        parts = {part for name in self.state_dict() for part in name.split(".")}
        self._keep_in_fp32_modules_strict = parts & set(type(self)._keep_in_fp32_modules_strict)
        super().post_init()

    @property
    def is_gradient_checkpointing(self) -> bool:
        """As `is_activation_checkpointing`. peft reads this older name, and transformers warns of it in vain."""
        return self.is_activation_checkpointing

    def init_parallel_plans(self):
        """Set up tensor and expert parallelism, without plans for modules that this model does not have."""
        super().init_parallel_plans()
        modules = {name for name, _ in self.named_modules()} | set(self.state_dict())
        names = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in modules}
        self._tp_plan = {name: style for name, style in self._tp_plan.items() if name in names}
        self._ep_plan = {name: style for name, style in self._ep_plan.items() if name in names}

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Always true, since experts are Qwen3-MoE's; transformers would look for them in the source of the class."""
        return True

    def _sdpa_can_dispatch(self, is_init_check: bool = False) -> bool:
        if self.config.attn_logit_softcapping is not None:
            raise ValueError(
                'attn_implementation must be "eager", "flex_attention" or "flash_attention_2" with '
                'attn_logit_softcapping, got "sdpa"'
            )
        return super()._sdpa_can_dispatch(is_init_check)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False):
        """Initialise a module as for transformers' own models, also modules that have no parameters themselves."""
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, Qwen3MoeExperts | Qwen3MoeTopKRouter):
            for x in module.parameters():
                init.normal_(x, std=self.config.initializer_range)
        for name, value in getattr(module, "starts", {}).items():
            init.constant_(module.get_parameter(name), value)
        if hasattr(module, "init_own_parameters"):
            module.init_own_parameters()


# `cache_bits` of the call of `generate` in this thread
BITS_OF_CALL: ContextVar[CacheBits | None] = ContextVar("cache_bits", default=None)


class MemoryModel(MemoryPreTrainedModel):
    """Embedding, layers and final norm."""

    layer_class: type[MemoryDecoderLayer] = MemoryDecoderLayer

    def __init__(self, config: MemoryConfig):
        config.validate_architecture()  # again, since from_pretrained sets options of a config that was checked
        config.validate()
        super().__init__(config)
        self._check_bits()
        check_room(config, *self._parts(config))
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            self.layer_class(config, i) for i in range(config.num_hidden_layers)
        )
        self.memory_values: Any = (
            MemoryValues(config) if set(WITH_MEMORY) & set(config.feed_forwards) else None
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.local_rotary_emb: Any = None
        if config.local_rope_layers:
            local = copy.copy(config)
            local.rope_parameters = config.local_rope_parameters
            self.local_rotary_emb = RotaryEmbedding(local)
        self.option_names = own_options(config)
        self.has_memory = any(type(layer.mixer) is not AttentionMixer for layer in self.layers)
        self.rotates = any(
            getattr(layer.mixer, "sees_positions", True) and config.rotating_channels(i)
            for i, layer in enumerate(self.layers)
        )
        self.gradient_checkpointing = False
        self.post_init()

    def _parts(self, config: MemoryConfig) -> list[Callable[[], nn.Module]]:
        """What makes the first and the last layer of each kind, and the table of values if there is one."""
        kinds = list(zip(config.layer_types or (), config.feed_forwards))
        last = {kind: i for i, kind in enumerate(kinds)}
        numbers = {*last.values(), *map(kinds.index, last)}
        tables = [partial(MemoryValues, config)] if {*WITH_MEMORY} & {*config.feed_forwards} else []
        return [*(partial(self.layer_class, config, i) for i in sorted(numbers)), *tables]

    @takes_cache
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        chunk_length: int | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Run the layers.

        Args:
            input_ids: [B, T]; either these or `inputs_embeds`.
            attention_mask: [B, past + T], zero at padding on either side; or one mask for each layer type.
            position_ids: [B, T]; default: counted over the tokens that are not padding. Without a mask and a cache,
                numbers that start again, at one that is not larger than the one before it, mean packed sequences, as do
                `cu_seq_lens_q` [N + 1] and `seq_idx` [B, T] among `kwargs`. Numbers that jump ahead do not.
            cache: made by `DynamicCache(config=model.config)`, which is also the default with `use_cache`; it can be
                given as `past_key_values` too.
            inputs_embeds: [B, T, hidden_size].
            use_cache: whether to return a cache. Packed sequences without a cache given have none.
            chunk_length: read the rows in chunks of so many tokens, from a new cache: with the gradients of whole rows
                without `cache_bits`, in little more memory than those of a chunk, and with a second forward pass.
            **kwargs: passed to the mixers.

        Raises:
            ValueError: if an argument has a wrong shape, contradicts another, or is an option of the config.
        """
        if self.config.cache_bits != self.checked_bits:
            self._check_bits()
        self._check_no_options(kwargs)
        inputs_embeds = self._embedded(input_ids, inputs_embeds)
        if cache is not None:
            self._check_cache(cache, inputs_embeds.shape[0])
        check_mask_length(inputs_embeds, attention_mask, cache)
        attention_mask = of_bools(attention_mask)
        check_positions(inputs_embeds, position_ids)
        is_length = chunk_length is None or (type(chunk_length) is int and chunk_length > 0)
        check(is_length, "chunk_length", "a number of tokens above 0, or None", chunk_length)
        if chunk_length is not None and chunk_length < inputs_embeds.shape[1]:
            where = attention_mask, position_ids, cache
            output, cache, losses = read_in_chunks(
                self, inputs_embeds, chunk_length, *where, **kwargs
            )
            losses_of_output = _own_losses(losses, is_token(attention_mask, inputs_embeds.shape[1]))
            return MemoryModelOutput(output, cache if use_cache else None, **losses_of_output)
        attention_mask = self._for_all_layers(attention_mask)
        cu_seqlens = None
        # which would separate packed sequences already
        if self.has_memory or not isinstance(attention_mask, dict):
            cu_seqlens = packed_boundaries(
                inputs_embeds, attention_mask, position_ids, cache, kwargs
            )
        kwargs = {name: x for name, x in kwargs.items() if name not in PACKING}
        places = None  # of tokens in their packed sequences
        if cu_seqlens is not None:
            attention_mask = None
            places = packed_positions(cu_seqlens, inputs_embeds)
            position_ids = places if position_ids is None else position_ids
            kwargs |= flash_arguments(cu_seqlens)
        else:
            if self.rotates and not self.training:
                warn_beyond_positions(self.config, inputs_embeds, cache)
            if use_cache and cache is None:
                cache = self.new_cache()
        if position_ids is None:
            position_ids = default_positions(inputs_embeds, attention_mask, cache)
        if isinstance(attention_mask, Tensor):
            inputs_embeds = blank(
                inputs_embeds, attention_mask[:, -inputs_embeds.shape[1] :].bool()
            )
        own_losses: list[Tensor] = []  # [B, T] each, of parts
        scale = self.config.embedding_multiplier
        hidden_states = inputs_embeds if scale == 1 else inputs_embeds * scale
        hidden_states = self.run_layers(
            hidden_states,
            self._masks_of_layers(inputs_embeds, attention_mask, cache, places),
            **self.angles(hidden_states, position_ids),
            position_ids=position_ids,
            # by the name that transformers knows, whose activation checkpointing takes it away
            **{CACHE: cache},
            cu_seqlens=cu_seqlens,
            read_values=self._read_values,
            own_losses=own_losses,
            **kwargs,
        )
        of_tokens = torch.stack(own_losses).sum(0) if self.training and own_losses else None
        return MemoryModelOutput(
            self.norm(hidden_states),
            cache if use_cache else None,
            **_own_losses(of_tokens, is_token(attention_mask, inputs_embeds.shape[1])),
        )

    def _check_no_options(self, kwargs: dict[str, Any]) -> None:
        """Refuse options of the config among the arguments of a call, where they would have no effect."""
        for name in kwargs:
            if name in self.option_names:
                where = f"an option of the config, as from_pretrained(..., {name}=...) sets it"
                raise ValueError(f"{name} must be {where}, got it in a forward pass")

    def _check_bits(self) -> None:
        """Refuse bits that caches of this model cannot have, since a dict in the config can be changed in place."""
        self.config.checked_bits(self.config.cache_bits)
        self.checked_bits = copy.deepcopy(self.config.cache_bits)

    def _check_cache(self, cache: Any, rows: int) -> None:
        """Raise ValueError unless a cache is empty, or was filled by this model with so many rows."""
        # fewer than there are layers while a model drafts for itself
        steps = self.config.num_hidden_layers
        check_has_layers(cache, max(steps, len(self.layers)))
        for i, layer in zip(range(steps), cycle(self.layers)):
            layer.mixer.check_cache(cache, i)
        check_texts(cache, rows)

    def angles(
        self, hidden_states: Tensor, position_ids: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """The cosines and sines of rotary positions [B, T], [B, T, channels] each, as arguments of the layers."""
        embeddings = {"position_embeddings": self.rotary_emb(hidden_states, position_ids)}
        if self.local_rotary_emb is not None:
            embeddings["local_embeddings"] = self.local_rotary_emb(hidden_states, position_ids)
        return embeddings

    def new_cache(self) -> Cache | None:
        """The cache that a forward with `use_cache` creates if none is given, in the bits of a call of `generate`."""
        cache = DynamicCache(config=self.config)
        bits = None if torch.compiler.is_compiling() else BITS_OF_CALL.get()
        if bits is not None:
            set_bits(cache, bits)
        return cache

    def run_layers(
        self, hidden_states: Tensor, masks: list, own_losses: list[Tensor], **kwargs
    ) -> Tensor:
        """Run each layer with its mask on [B, T, hidden_size]; the list `own_losses` gets those of parts, [B, T]."""
        for layer, mask in zip(self.layers, masks):
            hidden_states = run_layer(
                layer, hidden_states, own_losses, attention_mask=mask, **kwargs
            )
        return hidden_states

    def _read_values(self, slots: Tensor, weights: Tensor) -> Tensor:
        """Read the table of values. Layers get this function, not the module, which accelerate would move."""
        return self.memory_values(slots, weights)

    def _embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if input_ids is not None:
            check_rows("input_ids", input_ids)
            return self.embed_tokens(input_ids)
        check_some_tokens("inputs_embeds", inputs_embeds)
        return inputs_embeds

    def _for_all_layers(self, attention_mask: Tensor | dict | None) -> Tensor | dict | None:
        if not isinstance(attention_mask, Tensor) or attention_mask.ndim == 2:
            return attention_mask
        if self.has_memory:
            raise ValueError(
                "attention_mask must be [B, past + T], zero at padding, or a dict with a mask for each layer type, "
                f"since a memory cannot show a token to some tokens only, got shape {tuple(attention_mask.shape)}"
            )
        return dict.fromkeys(self.config.layer_types, attention_mask)

    @property
    def _running_types(self) -> list[str]:
        """The types of the layers that run, which are the first ones while a model drafts for itself."""
        kinds: Any = self.config.layer_types
        return kinds[: self.config.num_hidden_layers]

    def _masks_of_layers(self, inputs_embeds, attention_mask, cache, places: Tensor | None) -> list:
        if not isinstance(attention_mask, dict):
            attention_mask = self.masks(inputs_embeds, attention_mask, cache, places)
        return [attention_mask[kind] for kind in self._running_types]

    def masks(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        cache,
        places: Tensor | None = None,
    ) -> dict:
        """The mask for each layer type, as long as the cache of the first layer of this type says.

        Args:
            inputs_embeds: [B, T, ...], of which the shape matters alone.
            attention_mask: [B, past + T], zero at padding, or None.
            cache: the cache, or None.
            places: [B, T], of the tokens in their packed sequences, which are separated for attention; or None.
        """
        given = {
            "config": self.config,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            CACHE: cache,
            "position_ids": places,
        }
        kinds = self._running_types
        return {kind: MASKS[kind](**given, layer_idx=kinds.index(kind)) for kind in {*kinds}}


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

    def init_continuous_batching(self, *args, **kwargs) -> NoReturn:
        """Refuse `generate_batch` of transformers: its paged cache has no place for a memory.

        Raises:
            ValueError: always; the message names what reads several texts at once.
        """
        raise ValueError(
            "generate_batch must be called on a model that reads the paged cache of transformers, got "
            f"{type(self).__name__}. Use generate with several prompts, which are padded on the left, or "
            "vLLM with hf_memory installed, which batches requests by itself"
        )

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        loss_from: Callable[[PreTrainedModel, Tensor], Tensor] | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Predict the next token at every position; the arguments are those of `MemoryModel.forward`, and three more.

        Args:
            input_ids: [B, T].
            attention_mask: [B, past + T].
            position_ids: [B, T].
            cache: see `MemoryModel.forward`.
            inputs_embeds: [B, T, hidden_size].
            labels: [B, T] tokens, shifted inside; -100 is ignored.
            use_cache: see `MemoryModel.forward`.
            logits_to_keep: number of last positions to compute logits for; or positions [n] or [B, n], or a mask
                [B, T]; 0 means all.
            loss_from: function of this model and its last hidden states [B, T, hidden_size] that returns the loss
                without logits of all tokens, which may need too much memory.
            **kwargs: passed to the mixers and to the loss.

        What parts of the model add to the loss in training is averaged over the same tokens as the loss of predictions:
        those that predict a label, or, with `loss_from`, those that are not padding.

        Raises:
            ValueError: if parts of the model add to the loss, and the model is not asked for it in training.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        if loss_from is not None:
            loss = loss_from(self, outputs.last_hidden_state)
            return CausalLMOutputWithPast(
                loss=loss if outputs.own_loss is None else loss + outputs.own_loss
            )
        logits = self.predict(kept_positions(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
            if outputs.own_losses is not None:
                own_losses = kept_positions(outputs.own_losses[..., None], logits_to_keep)
                loss = loss + mean_of_targets(own_losses.squeeze(-1), labels, **kwargs)
        check_own_loss(loss, outputs.own_loss)
        return CausalLMOutputWithPast(
            loss, logits, cache_of(outputs), outputs.hidden_states, outputs.attentions
        )

    _generate = takes_cache(GenerationMixin.generate, CACHE)

    @wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        """The same as in transformers; `cache_bits` are those of the cache of this call, in place of the config's.

        They may also be given in the generation config, as all that transformers' `generate` takes. A cache that is
        given goes on in the bits in which it began.

        Raises:
            ValueError: if there are two caches, or one of other bits, or the model cannot have the bits.
        """
        given = dict(zip(("inputs",), args)) | kwargs
        names = ("inputs_embeds", "inputs", "input_ids")
        name = next((name for name in names if given.get(name) is not None), "")
        check_generate_inputs(name, given.get(name), given.get("attention_mask"))
        bits = None
        if "cache_bits" in kwargs:
            bits = self.config.checked_bits(kwargs.pop("cache_bits"))
        before = BITS_OF_CALL.set(bits)
        try:
            return self._generate(*args, **kwargs)
        finally:
            BITS_OF_CALL.reset(before)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """Give the cache of a call of `generate` the bits of this call, too."""
        prepare: Any = super()._prepare_cache_for_generation
        prepare(generation_config, model_kwargs, *args, **kwargs)
        bits = BITS_OF_CALL.get()
        if bits is None and hasattr(generation_config, "cache_bits"):
            bits = self.config.checked_bits(generation_config.cache_bits)
            BITS_OF_CALL.set(bits)  # until the call ends
        cache = model_kwargs.get(CACHE)
        if isinstance(cache, Cache) and bits is not None:
            set_bits(cache, bits)

    def _get_candidate_generator(self, *, generation_config, input_ids, model_kwargs, **kwargs):
        """What drafts tokens in assisted decoding; then the first forward pass reads what the cache has not read."""
        given = {"generation_config": generation_config, "input_ids": input_ids}
        generator = super()._get_candidate_generator(model_kwargs=model_kwargs, **given, **kwargs)
        note_read(model_kwargs, generation_config, input_ids)
        return generator

    @wraps(GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, input_ids, next_sequence_length=None, **kwargs):
        """The arguments of a forward pass of `generate`.

        With a static cache they have a mask for each layer type, whose shape does not grow with the text: each shape
        would be another graph. transformers does this for models of which it knows all layer types.

        Raises:
            ValueError: if a cache has read as many tokens as are given, or more, and no mask says that all are new.
        """
        next_sequence_length = sequence_length(kwargs, input_ids, next_sequence_length)
        if next_sequence_length is not None and next_sequence_length < 1:
            embeds = kwargs.get("inputs_embeds")
            given = (input_ids if embeds is None else embeds).shape[1]
            read = given - next_sequence_length
            raise ValueError(
                f"input_ids must be all tokens of the text, those that the cache has read too, got {given} tokens for "
                f"a cache that has read {read}; new tokens alone need attention_mask=torch.ones(batch, {read + given})"
            )
        inputs = super().prepare_inputs_for_generation(
            input_ids, next_sequence_length, **named_cache(kwargs, CACHE)
        )
        mask = inputs.get("attention_mask")
        cache = inputs.get(CACHE)
        is_plain_mask = isinstance(mask, Tensor) and mask.ndim == 2
        if is_plain_mask and cache is not None and cache.is_compileable:
            embeds = inputs.get("inputs_embeds")
            tokens = inputs["input_ids"] if embeds is None else embeds
            rows = torch.empty((*tokens.shape[:2], 0), dtype=self.dtype, device=mask.device)
            inputs["attention_mask"] = self.base_model.masks(rows, mask, cache)
        return inputs

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Always true; transformers would decide by the class name, in which it looks for rwkv."""
        return True

    def predict(self, hidden_states: Tensor) -> Tensor:
        """Logits [..., vocab_size] of last hidden states [..., hidden_size]."""
        return soft_capped(self.lm_head(hidden_states), self.config.final_logit_softcapping)


def run_layer(
    layer: nn.Module, hidden_states: Tensor, own_losses: list[Tensor], **kwargs
) -> Tensor:
    """Run a layer on [B, T, hidden_size]; if it also returns a loss of its own, [B, T], this joins the list."""
    output = layer(hidden_states, **kwargs)
    if isinstance(output, Tensor):
        return output
    hidden_states, own_loss = output
    own_losses.append(own_loss)
    return hidden_states


def mean_of_targets(
    values: Tensor,
    labels: Tensor,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    **kwargs,
) -> Tensor:
    """The mean of values over the tokens that predict a label, as transformers averages the loss of predictions.

    Results for micro-batches, and for parts of rows, add up to that of the batch if they get its number of labels.

    Args:
        values: [B, T], a number for each token.
        labels: [B, T], which are shifted here.
        shift_labels: [B, T], labels that are shifted already, if they are given.
        num_items_in_batch: number of labels that are predicted in the batch. Default: of these.
        ignore_index: what stands where there is no label.
        **kwargs: arguments of the model's loss that have no effect here.
    """
    targets = (
        F.pad(labels[..., 1:], (0, 1), value=ignore_index) if shift_labels is None else shift_labels
    )
    predicts = targets.to(values.device).view_as(values) != ignore_index
    count = predicts.sum() if num_items_in_batch is None else num_items_in_batch
    if isinstance(count, Tensor):
        count = count.to(values.device)
    return values.where(predicts, 0).sum() / count


def is_token(attention_mask: Tensor | dict | None, T: int) -> Tensor | None:
    """[B, T], whether each of the last T tokens is not padding; None if all are."""
    if isinstance(attention_mask, dict):
        attention_mask = next(
            (attention_mask[kind] for kind in LAYER_TYPES if kind in attention_mask), None
        )
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    return attention_mask[:, -T:].bool()


def _own_losses(losses: Tensor | None, mask: Tensor | None) -> dict[str, Tensor]:
    """Own losses [B, T] as fields of a model's output; `mask` [B, T] is false at padding."""
    if losses is None:
        return {}
    if mask is None:
        return {"own_loss": losses.mean(), "own_losses": losses}
    losses = losses.where(mask, 0)
    return {"own_loss": losses.sum() / mask.sum().clamp(min=1), "own_losses": losses}


def kept_positions(hidden_states: Tensor, positions: int | Tensor) -> Tensor:
    """The hidden states [B, T, D] at the positions that `logits_to_keep` selects."""
    if isinstance(positions, int):
        return hidden_states[:, -positions:]  # 0 gives all
    if positions.ndim == 1:
        return hidden_states[:, positions]
    if positions.dtype == torch.bool:
        return hidden_states[positions]
    return hidden_states.take_along_dim(positions[..., None], dim=1)


def check_own_loss(loss: Tensor | None, own_loss: Tensor | None) -> None:
    """Raise ValueError if nothing would learn from what parts of a model add to its loss, which it does not compute."""
    if loss is None and own_loss is not None and own_loss.requires_grad:
        raise ValueError(
            "labels must be given in training to a model whose parts add to its loss (spans, routing, a learned "
            "compression, steps of a token), got none: a loss that is computed from the logits would be without "
            "what they add, as is that of a Trainer with label_smoothing_factor or compute_loss_func"
        )


def adding_own_loss(forward: Callable) -> Callable:
    """Let the forward of a classifier add what parts of the model add to the loss in training, see `own_loss`."""

    @wraps(forward)
    def with_own_loss(self, *args, **kwargs):
        kwargs["return_dict"] = True
        if not self.training:
            return forward(self, *args, **kwargs)
        seen: list[MemoryModelOutput] = []
        with self.model.register_forward_hook(lambda _, args, output: seen.append(output)):
            outputs = forward(self, *args, **kwargs)
        own_loss = seen[0].own_loss
        check_own_loss(outputs.loss, own_loss)
        if outputs.loss is not None and own_loss is not None:
            outputs.loss = outputs.loss + own_loss
        return outputs

    return can_return_tuple(with_own_loss)


class MemoryForSequenceClassification(GenericForSequenceClassification, MemoryPreTrainedModel):
    """A model with a head that classifies sequences."""

    forward = takes_cache(adding_own_loss(GenericForSequenceClassification.forward), CACHE)


class MemoryForTokenClassification(GenericForTokenClassification, MemoryPreTrainedModel):
    """A model with a head that classifies tokens."""

    forward = takes_cache(adding_own_loss(GenericForTokenClassification.forward), CACHE)
