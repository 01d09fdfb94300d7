"""The Memory Transformer: softmax attention with published positions, patterns, pasts and depths as options."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from hf_memory.mixers.transformer import BUCKETS, PASTS, PATTERNS, Kind, mixer_of
from hf_memory.mixers.transformer.relations import EMBEDDED, POSITIONS, RELATIONS
from hf_memory.mixers.transformer.slots import COMPRESSIONS
from hf_memory.mixers.transformer.store import JOINS
from hf_memory.modeling import base
from hf_memory.modeling.checks import (
    check,
    check_each,
    check_numbers,
    check_values,
    check_word,
    strict,
)
from hf_memory.modeling.configuration import MemoryConfig, of_mixers
from hf_memory.modeling.depth import (
    DEPTHS,
    AdaptiveUniversal,
    ReversibleLayer,
    Universal,
    run_reversible,
)
from hf_memory.modeling.room import check_room

COMPUTED_HERE = ("memory", "sliding_heads")  # layer types that this family computes itself
# Parameters of relations that have a part for each head.
BY_HEAD = ("content_bias", "distance_bias", "distance_proj", "rate", "bound")


@strict
class MemoryTransformerConfig(MemoryConfig):
    """Config of the Memory Transformer; its other options are those of `MemoryConfig`.

    Args:
        position (`str`, defaults to `"rope"`): how positions are represented: `"rope"`, `"none"`, `"sinusoidal"` or
            `"learned"` (both added to the embeddings), or by the scores of attention: `"relative"` (Shaw et al.),
            `"xl"`, `"alibi"`, `"distance_aware"` or `"forget"` (FoX), with a forget gate for each token and head.
        embedding_multiplier (`float`, *optional*): factor that multiplies the embeddings before positions are added.
            Default: as published, `sqrt(hidden_size)` where sinusoids are added, which is with `position="sinusoidal"`
            and `depth="universal"`; 1 otherwise. The head uses the embeddings without it if they are tied.
        max_relative_distance (`int`, defaults to 16): with `"relative"`, all larger distances are treated like this
            one.
        pattern (`str` or `list[str]`, defaults to `"full"`): which earlier tokens a token sees: a name in `PATTERNS`
            for all `"memory"` layers, or a list with one for each layer. A window alone is `"sliding_heads"` in
            `layer_types`.
        pattern_size (`int`, defaults to 128): number of tokens of a window, a stride or a block of such a pattern.
        sliding_window (`int`, *optional*): also size of the window with `past="memorizing"` and `past="infinite"`,
            where the default is 512.
        num_sink_tokens (`int`, defaults to 0): also number of first tokens that all tokens see with
            `"longformer_by_head"` and with `past="infinite"`.
        dilation (`int`, defaults to 2): with `"dilated"`, and for half of the heads with `"longformer_by_head"`,
            distance between the tokens that a token sees.
        num_summary_tokens (`int`, defaults to 8): with `"fixed"`, number of tokens of a block that later blocks see;
            with `"linformer"`, number of learned sums over a block that they see.
        num_random_blocks (`int`, defaults to 2): with `"bigbird"`, number of random blocks that a block sees.
        num_block_shifts (`int`, defaults to 2): with `"blockwise"`, number of groups of heads: those of the first group
            see their own block, those of the next the block before, and so on.
        pattern_seed (`int`, defaults to 0): seed of the random blocks of `"bigbird"`.
        num_buckets (`int`, defaults to 32): number of buckets of `"reformer"`, `"routing"` and `"routing_by_head"`.
        num_hashes (`int`, defaults to 4): number of hash rounds of `"reformer"`.
        max_span (`int`, defaults to 1024): longest span in tokens that a head can learn with `"adaptive_span"`.
        span_ramp (`int`, defaults to 32): number of tokens beyond the span over which attention decreases to zero.
        span_loss_weight (`float`, defaults to 2e-6): weight of the mean span of each layer, in tokens, in the training
            loss.
        span_limits (`list[int]`, *optional*): largest number of tokens that each layer sees; `trim_spans` sets it after
            training. Default: `max_span + span_ramp`.
        past (`str` or `list[str]`, defaults to `"cache"`): how much of a long past a token sees: a name in `PASTS` for
            all memory layers, or a list with one for each layer. All except `"cache"` require `pattern="full"`.
        past_window (`int`, defaults to 512): with `"xl"` and `"compressive"`, number of tokens seen before the current
            segment.
        segment_length (`int`, defaults to 512): number of tokens of a segment, with `"xl"` and `"compressive"`.
        compression (`str`, defaults to `"convolution"`): with `"compressive"`, how tokens are compressed into a slot:
            `"mean"`, `"max"`, `"convolution"`, which is learned, or `"most_used"`: of each head the token that got most
            attention.
        compression_rate (`int`, defaults to 4): number of tokens that are compressed into a slot.
        compressed_length (`int`, defaults to 512): number of slots that a token sees.
        memory_size (`int`, defaults to 8192): with `"memorizing"`, number of tokens in the store.
        memory_top_k (`int`, defaults to 32): number of these tokens that a head reads.
        memory_join (`str`, defaults to `"gate"`): how what was read joins the attention to the window: by a learned
            `"gate"` for each head, or in one `"softmax"`; both find the nearest unrotated keys. With `"attention"` the
            tokens are found by the scores of the attention itself, and share its softmax without new parameters.
        depth (`str`, defaults to `"fixed"`): how tokens pass through the layers: `"fixed"`: one layer after the other;
            `"universal"`: one layer that runs `num_hidden_layers` times; `"reversible"`: layers whose inputs are
            recomputed from their outputs in training, so that no activations are stored (with FSDP, only their inputs).
        adaptive_computation (`bool`, defaults to `False`): with `"universal"`, let each token run as many steps as it
            needs.
        halting_epsilon (`float`, defaults to 0.01): a token halts when the sum of its halting probabilities reaches
            one minus this.
        ponder_loss_weight (`float`, defaults to 0.01): weight in the training loss of the mean cost of a token: its
            number of steps plus a remainder.
    """

    model_type = "hf_memory_transformer"
    mixers = {**MemoryConfig.mixers, "memory": PATTERNS["full"].mixer}
    base_model_tp_plan = {
        **MemoryConfig.base_model_tp_plan,
        **of_mixers(
            local_params=("", "relation", "relation.inner"),
            colwise=("relation.span", "forget.proj", "memory_gate", "memory_scale", "centroids"),
        ),
        **of_mixers(
            colwise=tuple(f"relation.{x}{name}" for x in ("", "inner.") for name in BY_HEAD)
        ),
        **of_mixers(
            replicated_with_grad_allreduce=tuple(
                f"relation.{x}{y}" for x in ("", "inner.") for y in ("keys", "values")
            )
        ),
    }

    embedding_multiplier: float | int | None = None  # type: ignore[assignment]
    position: str = "rope"
    max_relative_distance: int = 16
    pattern: str | list[str] = "full"
    pattern_size: int = 128
    dilation: int = 2
    num_summary_tokens: int = 8
    num_random_blocks: int = 2
    num_block_shifts: int = 2
    pattern_seed: int = 0
    num_buckets: int = 32
    num_hashes: int = 4
    max_span: int = 1024
    span_ramp: int = 32
    span_loss_weight: float = 2e-6
    span_limits: list[int] | None = None
    past: str | list[str] = "cache"
    past_window: int = 512
    segment_length: int = 512
    compression: str = "convolution"
    compression_rate: int = 4
    compressed_length: int = 512
    memory_size: int = 8192
    memory_top_k: int = 32
    memory_join: str = "gate"
    depth: str = "fixed"
    adaptive_computation: bool = False
    halting_epsilon: float = 0.01
    ponder_loss_weight: float = 0.01

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        for name, here in self._unused().items():
            value = getattr(self, name)
            if value != self.__dataclass_fields__[name].default:
                warnings.warn(f"{name}={value!r} has no effect {here}", stacklevel=4)

    def _unused(self) -> dict[str, str]:
        """Sizes and factors that no layer reads, each with the options that they would need."""
        known = {name for kind in (*PATTERNS.values(), *PASTS.values()) for name in kind.options}
        unused = known - self.options_of_kinds - {"num_sink_tokens"}
        if any(kind.startswith("sliding") for kind in self.layer_types):
            unused.discard("sliding_window")
        here = f"with pattern={self.pattern!r} and past={self.past!r}"
        found = dict.fromkeys(sorted(unused), here)
        if self.position != "relative":
            found["max_relative_distance"] = "unless position is 'relative'"
        if not self.adaptive_computation:
            found["halting_epsilon"] = "without adaptive_computation"
            found["ponder_loss_weight"] = "without adaptive_computation"
        return found

    def set_defaults(self) -> None:
        """See `MemoryConfig.set_defaults`."""
        super().set_defaults()
        has_sinusoids = self.position == "sinusoidal" or self.depth == "universal"
        self.fill(
            embedding_multiplier=self.hidden_size**0.5 if has_sinusoids else 1.0,
            sliding_window=512 if "sliding_window" in self.options_of_kinds else None,
        )

    @property
    def patterns(self) -> list[str]:
        """The pattern of each layer; `"full"` in layers for which `layer_types` says what is seen."""
        if not isinstance(self.pattern, str):
            return self.pattern
        return [self.pattern if kind == "memory" else "full" for kind in self.layer_types]

    @property
    def pasts(self) -> list[str]:
        """The past of each layer; `"cache"` in layers for which `layer_types` says what is seen."""
        if not isinstance(self.past, str):
            return self.past
        return [self.past if kind == "memory" else "cache" for kind in self.layer_types]

    @property
    def options_of_kinds(self) -> set[str]:
        """Names of the options that the patterns and the pasts of this model read."""
        kinds = [PATTERNS[name] for name in self.patterns if name in PATTERNS]
        kinds += [PASTS[name] for name in self.pasts if name in PASTS]
        return {name for kind in kinds for name in kind.options}

    @property
    def takes_first_tokens(self) -> bool:
        """Whether a layer can see the first tokens; a memory layer can with a pattern or a past that does."""
        return super().takes_first_tokens or "num_sink_tokens" in self.options_of_kinds

    def mixer_class(self, layer_idx: int) -> type[nn.Module]:
        """The mixer of a layer."""
        if self.layer_types[layer_idx] in COMPUTED_HERE:
            return mixer_of(self, layer_idx)
        return super().mixer_class(layer_idx)

    def rotating_channels(self, layer_idx: int) -> int:
        """Number of rotated channels; 0 unless `position` is rope."""
        return super().rotating_channels(layer_idx) if self.position == "rope" else 0

    def exact_up_to(self, layer_idx: int, length: int) -> int | None:
        """See `MemoryConfig.exact_up_to`; None if position or depth differ from a teacher's."""
        if self.position != "rope" or self.depth != "fixed":
            return None
        return super().exact_up_to(layer_idx, length)

    def validate_architecture(self):
        """Check positions, patterns, pasts and depth, too."""
        position = self.position
        super().validate_architecture()
        check_word("position", self.position, POSITIONS)
        check_word("depth", self.depth, DEPTHS)
        check_word("memory_join", self.memory_join, JOINS)
        check_word("compression", self.compression, COMPRESSIONS)
        check_each(self, "pattern", self.patterns, tuple(PATTERNS))
        check_each(self, "past", self.pasts, tuple(PASTS))
        check_each(self, "span_limits", self.span_limits or self.layer_types)
        check_numbers({"span_limits": min(self.span_limits or [1])})
        is_alone = position not in (*RELATIONS, "forget") or {*self.layer_types} <= {*COMPUTED_HERE}
        check(
            is_alone,
            "layer_types",
            f"only {' and '.join(COMPUTED_HERE)} with position={position!r}",
            self.layer_types,
        )
        if position in RELATIONS:
            self._check_relation()
        for past, pattern in zip(self.pasts, self.patterns):
            check(
                past == "cache" or pattern == "full",
                "pattern",
                f"'full' in layers with past={past!r}",
                pattern,
            )
        self._check_sizes()
        if position == "forget":
            self._check_forgetting()
        if {*BUCKETS} & {*self.patterns}:
            self._check_buckets()
        if self.depth != "fixed":
            self._check_depth()
        can_adapt = self.depth == "universal" or not self.adaptive_computation
        check(can_adapt, "depth", "'universal' with adaptive_computation", self.depth)
        self._check_unused()

    def _check_unused(self) -> None:
        """Refuse patterns and pasts that no layer would use."""
        for option, names, default in (
            ("pattern", self.patterns, "full"),
            ("past", self.pasts, "cache"),
        ):
            others = [name for name, kind in zip(names, self.layer_types) if kind != "memory"]
            given = getattr(self, option)
            is_used = {*others} <= {default} and (given == default or "memory" in self.layer_types)
            check(is_used, option, f"{default!r} in layers of another type than 'memory'", given)

    def _check_sizes(self) -> None:
        has_summaries = "num_summary_tokens" in self.options_of_kinds
        is_inside = not has_summaries or self.num_summary_tokens <= self.pattern_size
        check(
            is_inside,
            "num_summary_tokens",
            f"at most pattern_size={self.pattern_size}",
            self.num_summary_tokens,
        )
        lengths = (self.segment_length, self.past_window) if "compressive" in self.pasts else ()
        is_whole = not any(x % self.compression_rate for x in lengths)
        divided = f"a divisor of segment_length and past_window, {lengths}"
        check(is_whole, "compression_rate", divided, self.compression_rate)

    def _check_kinds(self, is_possible: Callable[[Kind], bool], here: str) -> None:
        """Refuse patterns and pasts that are not possible with another option."""
        for option, names, table in (
            ("pattern", self.patterns, PATTERNS),
            ("past", self.pasts, PASTS),
        ):
            possible = [name for name in table if is_possible(table[name])]
            check({*names} <= {*possible}, option, f"one of {possible} {here}", names)

    def _check_relation(self) -> None:
        """Refuse what has no distance from a token, or is found without distances."""
        here = f"with position={self.position!r}"
        check_values(self, here, attention_sinks=False)
        full = self.full_attention_heads
        check(not any(full or []), "full_attention_heads", f"None {here}", full)
        keeps = any(any(numbers) for numbers in self.kept_tokens)
        check(not keeps, "num_kept_tokens", f"0 {here}", self.num_kept_tokens)

    def _check_forgetting(self) -> None:
        """Refuse what gates of single tokens have no meaning for."""
        here = "with position='forget'"
        check_values(self, here, attn_logit_softcapping=None, attention_sinks=False)
        self._check_kinds(lambda kind: kind.takes_forget_gates, here)

    def _check_buckets(self) -> None:
        """Refuse options that attention in buckets does not support."""
        here = "with pattern reformer or routing, whose keys are the queries"
        check_values(self, here, use_qk_norm=False, attn_logit_softcapping=None)
        heads = self.num_key_value_heads
        known = "rope, none, sinusoidal or learned with pattern reformer or routing"
        check(self.position not in RELATIONS, "position", known, self.position)
        check(self.num_buckets % 2 == 0, "num_buckets", "even", self.num_buckets)
        is_halved = "routing_by_head" not in self.patterns or heads % 2 == 0
        check(is_halved, "num_key_value_heads", "even with pattern 'routing_by_head'", heads)

    def mixer_of_step(self, step: int) -> int:
        """See `MemoryConfig.mixer_of_step`: a universal layer runs at each step."""
        return 0 if self.depth == "universal" else step

    def _check_depth(self) -> None:
        """Refuse what layers that run several times, or are inverted, do not support."""
        if self.depth == "universal":
            for name in ("layer_types", "mlp_types", "no_rope_layers", "patterns", "pasts"):
                is_one = len({*(getattr(self, name) or "-")}) == 1
                check(
                    is_one,
                    name,
                    "the same for all layers with depth='universal'",
                    getattr(self, name),
                )
            kind = self.layer_types[0]
            check(
                kind in COMPUTED_HERE,
                "layer_types",
                f"{' or '.join(COMPUTED_HERE)} with depth='universal'",
                kind,
            )
            return
        here = "with depth='reversible'"
        check(
            {*self.feed_forwards} <= {"mlp", "none"},
            "mlp_types",
            f"'mlp' or 'none' {here}",
            self.mlp_types,
        )
        gives_gradients = f"{here}, which gives no gradient to a loss that a layer has of its own"
        self._check_kinds(lambda kind: not kind.has_own_loss, gives_gradients)
        learns = "compressive" in self.pasts and self.compression == "convolution"
        check(not learns, "compression", f"other than 'convolution' {here}", self.compression)


class MemoryTransformerModel(base.MemoryModel):
    """The Memory Transformer without a head."""

    config: MemoryTransformerConfig
    _no_split_modules = ["MemoryDecoderLayer", "ReversibleLayer"]

    def __init__(self, config: MemoryTransformerConfig):
        super().__init__(config)
        self.embed_positions: Any = None
        if config.position in EMBEDDED:
            check_room(config, partial(EMBEDDED[config.position], config))
            self.embed_positions = EMBEDDED[config.position](config)
        self.recurrence: Any = None
        if config.depth == "universal":
            self.layers = self.layers[:1]
            recurrence = AdaptiveUniversal if config.adaptive_computation else Universal
            self.recurrence = recurrence(config)
        self.post_init()

    @torch.no_grad()
    def trim_spans(self) -> None:
        """Write the reach of learned spans into the config, so that caches keep no more; outputs do not change."""
        config = self.config
        config.span_limits = [config.max_span + config.span_ramp] * config.num_hidden_layers
        for i, name in enumerate(config.patterns):
            if name == "adaptive_span":
                longest = self.layers[i % len(self.layers)].mixer.relation.spans.max()
                config.span_limits[i] = math.ceil(config.span_ramp + float(longest))

    @property
    def layer_class(self) -> type[base.MemoryDecoderLayer]:
        """The layer class for `depth`."""
        return ReversibleLayer if self.config.depth == "reversible" else base.MemoryDecoderLayer

    def new_cache(self) -> Cache | None:
        """See `MemoryModel.new_cache`. In training, a reversible model has none, which would hold activations."""
        return None if self.training and self.config.depth == "reversible" else super().new_cache()

    def run_layers(
        self, hidden_states: Tensor, masks: list, own_losses: list[Tensor], **kwargs
    ) -> Tensor:
        """Add embedded positions and run the layers as `depth` says; see `MemoryModel.run_layers`."""
        positions = 0
        if self.embed_positions is not None:
            positions = self.embed_positions(kwargs["position_ids"])
        if self.recurrence is not None:
            return self.recurrence(
                self.layers[0], hidden_states, masks, positions, own_losses=own_losses, **kwargs
            )
        if self.embed_positions is not None:
            hidden_states = hidden_states + positions.to(hidden_states.dtype)
        if self.config.depth == "reversible":
            return run_reversible(self.layers, hidden_states, masks, **kwargs)
        return super().run_layers(hidden_states, masks, own_losses, **kwargs)


class MemoryTransformerForCausalLM(base.MemoryForCausalLM):
    """The Memory Transformer with a head that predicts the next token."""

    model_class = MemoryTransformerModel


class MemoryTransformerForSequenceClassification(base.MemoryForSequenceClassification):
    """The Memory Transformer with a head that classifies sequences."""


class MemoryTransformerForTokenClassification(base.MemoryForTokenClassification):
    """The Memory Transformer with a head that classifies tokens."""
