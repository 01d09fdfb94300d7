"""No option is ignored beside another: each pair is refused by the config, or each of both changes something.

A model with many options at once stands for all their pairs: where leaving out one of them changes nothing, another one
has made it useless.
"""

import warnings
import zlib
from dataclasses import fields
from functools import cache
from itertools import chain
from typing import NamedTuple

import pytest
import torch
from transformers import DynamicCache, PreTrainedConfig, initialization

from cases import SIZES
from hf_memory import FAMILIES
from hf_memory.mixers import windowed
from hf_memory.mixers.transformer import PASTS, PATTERNS
from hf_memory.mixers.transformer.relations import POSITIONS
from hf_memory.modeling import delta_net, gated_linear_attention, titans

ROPE = {"rope_type": "default", "rope_theta": 10.0}
SMALL = {
    **SIZES,
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "sliding_window": 4,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "num_product_keys": 3,
    "product_key_heads": 1,
    "product_key_dim": 4,
    "product_key_top_k": 2,
    "num_experts": 4,
    "moe_intermediate_size": 6,
    "kept_block_size": 4,
    "num_memory_slots": 5,
}
TOKENS = torch.randint(3, 24, (1, 20), generator=torch.Generator().manual_seed(0))


EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
DEFAULTS_OF_OTHERS = [  # sizes of attention are defaults of a memory's, so they may be given to no end
    ({"num_attention_heads", "head_dim"}, {"linear_num_key_heads", "linear_num_value_heads"}),
    ({"num_attention_heads", "head_dim"}, {"linear_key_head_dim", "linear_value_head_dim"}),
    ({"use_qk_norm"}, {"memory_qk_norm"}),
]
BY_LAYER = [  # options that say of each layer what it has: in a model of one layer only one of them can have an effect
    {"position", "no_rope_layers", "rope_parameters"},
    {"memory_rope", "no_rope_layers"},
    {"position", "local_rope_layers", "rope_parameters"},
    {"mlp_types", "hidden_act", *EXPERT_SIZES},
    {"max_span", "span_ramp", "span_limits"},  # limits are set for learned spans
]
NOT_TESTED = {  # of the options that all families share, and of the Memory Transformer's
    "vocab_size, hidden_size, intermediate_size, num_hidden_layers, max_position_embeddings, layer_types": "sizes",
    "initializer_range, attention_dropout, sparse_memory_gradients": "training",
    "span_loss_weight, ponder_loss_weight": "losses",
    "use_cache, mixer_backend": "speed",
    "cache_bits": "how exactly states are stored: test_cache_bits.py",
    "pad_token_id, bos_token_id, eos_token_id": "names of tokens",
    "teacher_name_or_path": "what a card says: test_shrink_cache.py",
    "adaptive_computation, halting_epsilon": "models that run a layer more than once: test_depth.py",
}


class Change(NamedTuple):
    """Values of options, usually of one, and those without which they mean nothing."""

    values: dict
    needs: dict = {}

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.values.items())


def changes(needs=None, /, **options) -> list[Change]:
    """A change for each value of some options: lists have several."""
    return [Change({name: x}, needs or {}) for name, values in options.items() for x in values]


EXPERTS = {"mlp_types": ["experts"]}
PRODUCT_KEYS = {"mlp_types": ["mlp_and_memory"]}
BLOCK = [  # what all layers have around their mixers
    *changes(
        norm_placement=["post", "both"], residual_multiplier=[0.5], embedding_multiplier=[2.0]
    ),
    *changes(
        final_logit_softcapping=[1.0],
        tie_word_embeddings=[True],
        hidden_act=["gelu"],
        mlp_bias=[True],
    ),
    *changes(mlp_types=[["experts"], ["memory"], ["mlp_and_memory"], ["none"]], rms_norm_eps=[0.3]),
    *changes(
        EXPERTS,
        num_experts=[3],
        num_experts_per_tok=[1],
        moe_intermediate_size=[4],
        norm_topk_prob=[False],
    ),
    *changes(
        PRODUCT_KEYS,
        num_product_keys=[4],
        product_key_heads=[2],
        product_key_dim=[6],
        product_key_top_k=[1],
    ),
]
OUTSIDE = [  # some of these, for layers of other kinds: what is around a mixer does not know which one it is
    *changes(
        norm_placement=["post"],
        residual_multiplier=[0.5],
        final_logit_softcapping=[1.0],
        mlp_bias=[True],
    ),
]
HEADS = changes(num_attention_heads=[2], num_key_value_heads=[4], head_dim=[6])
ATTENTION = [
    *HEADS,
    *changes(
        attention_bias=[True],
        attention_output_bias=[True],
        use_qk_norm=[True],
        query_pre_attn_scalar=[3],
    ),
    *changes({"use_qk_norm": True}, qk_norm_whole_width=[True]),
    *changes(attn_logit_softcapping=[0.5]),
]
ROTATED = [
    *changes(no_rope_layers=[[0]]),
    *changes(rope_parameters=[{**ROPE, "rope_theta": 20.0, "partial_rotary_factor": 0.5}]),
    Change({"local_rope_layers": [1], "local_rope_parameters": ROPE}),
]
WINDOW = [
    *changes(
        sliding_window=[3],
        num_sink_tokens=[2],
        attention_sinks=[True],
        full_attention_heads=[[[1]]],
    ),
    *changes({"full_attention_heads": [[0]]}, full_attention_window=[6]),
]
KEPT = [
    *changes(num_kept_tokens=[3]),
    *changes({"num_kept_tokens": 3}, kept_block_size=[2], eviction=["largest_values"]),
]
SLOTS = changes(num_memory_slots=[3])
TRANSFORMER = [
    *changes(position=["none", "learned", "relative", "alibi", "forget"]),
    *changes({"position": "relative"}, max_relative_distance=[3]),
    *changes(depth=["universal", "reversible"]),
]
NAMES = [
    "block_local",
    "dilated",
    "longformer_by_head",
    "blockwise",
    "adaptive_span",
    "strided",
    "strided_by_head",
]
NAMES += [
    "fixed",
    "fixed_by_head",
    "bigbird",
    "linformer",
    "reformer",
    "routing",
    "routing_by_head",
]
OF_PATTERNS = [
    *changes(pattern=NAMES, past=["xl", "compressive", "memorizing", "infinite"]),
    *changes({"pattern": "strided"}, pattern_size=[3]),
    *changes({"pattern": "dilated"}, dilation=[3]),
    *changes({"pattern": "longformer_by_head"}, num_sink_tokens=[2]),
    *changes({"past": "infinite"}, num_sink_tokens=[2], sliding_window=[3]),
    *changes({"pattern": "fixed"}, num_summary_tokens=[1]),
    *changes({"pattern": "bigbird", "pattern_size": 2}, num_random_blocks=[2], pattern_seed=[5]),
    *changes({"pattern": "blockwise"}, num_block_shifts=[3]),
    *changes({"pattern": "routing"}, num_buckets=[2]),
    *changes({"pattern": "reformer"}, num_hashes=[1]),
    *changes({"pattern": "adaptive_span"}, max_span=[3], span_ramp=[5], span_limits=[[4]]),
    *changes({"past": "xl"}, past_window=[2], segment_length=[2]),
    *changes(
        {"past": "compressive"},
        compression=["mean", "most_used"],
        compression_rate=[4],
        compressed_length=[1],
    ),
    *changes(
        {"past": "memorizing"},
        memory_join=["softmax", "attention"],
        memory_size=[3],
        memory_top_k=[1],
    ),
]
OWN_SIZES = {
    "hf_memory_titans": {"memory_chunk_size": 8},
    "hf_memory_transformer": {
        "pattern_size": 4,
        "num_summary_tokens": 2,
        "num_random_blocks": 1,
        "num_buckets": 4,
        "num_hashes": 2,
        "max_span": 6,
        "span_ramp": 2,
        "past_window": 4,
        "segment_length": 4,
        "compression_rate": 2,
        "compressed_length": 3,
        "memory_size": 6,
        "memory_top_k": 2,
        "max_relative_distance": 6,
        "sliding_window": 4,
    },
}
OF_LAYERS = {
    "full_attention": [*BLOCK, *ATTENTION, *ROTATED],
    "sliding_attention": [*OUTSIDE, *ATTENTION, *ROTATED, *changes(sliding_window=[3])],
    "sliding_heads": [*OUTSIDE, *ATTENTION, *ROTATED, *WINDOW, *KEPT],
    "sliding_memory": [*OUTSIDE, *ATTENTION, *ROTATED, *WINDOW, *SLOTS],
}
OF_FAMILIES = {
    ("hf_memory_transformer", "memory"): [
        *changes(
            num_key_value_heads=[4],
            head_dim=[6],
            use_qk_norm=[True],
            attn_logit_softcapping=[0.5],
        ),
        *changes(position=["none", "relative", "forget"], depth=["universal", "reversible"]),
        *OF_PATTERNS,
    ],
    ("hf_memory_transformer", "sliding_heads"): [*OF_LAYERS["sliding_heads"], *TRANSFORMER],
    ("hf_memory_deltaformer", "memory"): [
        *OUTSIDE,
        *ATTENTION,
        *ROTATED,
        *changes(
            write_kernel=["linear", "relu", "round"],
            read_kernel=["linear", "relu"],
            write_rope=[False],
        ),
        *changes(beta_mode=["delta", "none"], beta_activation=["tanh", "identity"]),
    ],
}
OF_FAMILIES["hf_memory_deltaformer", "sliding_memory"] = [
    *OF_FAMILIES["hf_memory_deltaformer", "memory"],
    *WINDOW,
]
BIASES = changes(attention_bias=[True], attention_output_bias=[True])
NORMED = changes(num_attention_heads=[2], num_key_value_heads=[4], use_qk_norm=[True])
OF_FAMILIES["hf_memory_linear", "memory"] = [
    *OUTSIDE,
    *BIASES,
    *NORMED,
    *changes(head_dim=[6], memory_rope=[True], normalize=[False], output_norm=[True]),
    *changes(feature_map=["relu", "exp", "dpfp", "hedgehog", "taylor"]),
    *changes({"feature_dim": 6}, feature_map=["favor", "rfa"]),
    *changes({"feature_map": "favor"}, feature_dim=[4]),
]
OF_FAMILIES["hf_memory_mosaic", "memory"] = [
    *changes(num_attention_heads=[2], head_dim=[6]),
    *changes(final_logit_softcapping=[1.0], residual_multiplier=[0.5], attention_bias=[True]),
    *changes(attention_output_bias=[True], rms_norm_eps=[0.3], norm_placement=["post"]),
]
OF_FAMILIES["hf_memory_rwkv7", "memory"] = [
    *changes(num_attention_heads=[2], head_dim=[6]),
    *changes(final_logit_softcapping=[1.0], residual_multiplier=[0.5], attention_bias=[True]),
    *changes(attention_output_bias=[True], layer_norm_eps=[0.3], norm_placement=["post"]),
    *changes(decay_low_rank_dim=[3], a_low_rank_dim=[3], gate_low_rank_dim=[3]),
    *changes(allow_negative_eigenvalues=[True]),
]
HEADS_OF_ATTENTION = [
    *changes(num_attention_heads=[2], num_key_value_heads=[1], use_qk_norm=[True], head_dim=[6])
]
MEMORY_HEADS = [
    *BIASES,
    *changes(linear_num_key_heads=[2], linear_num_value_heads=[8], memory_qk_norm=[True]),
    *changes(linear_key_head_dim=[6], linear_value_head_dim=[10], linear_conv_kernel_dim=[0, 3]),
    *changes(memory_rope=[True], output_norm_eps=[0.3], output_gate=["none", "silu", "sigmoid"]),
    *changes(output_gate_low_rank_dim=[3], output_gate_bias=[True]),
]
OF_FAMILIES["hf_memory_deltanet", "memory"] = [
    *OUTSIDE,
    *HEADS_OF_ATTENTION,
    *MEMORY_HEADS,
    *changes(gate=[gate for gate in delta_net.MIXERS if gate != "none"], levels=["log"]),
    *changes(allow_negative_eigenvalues=[True], num_householder=[2]),
]
DECAY = changes(levels=["log"], gate_low_rank_dim=[3], gate_logit_normalizer=[4])
OWN_HEADS = ("mamba", "mamba2", "mamba3")  # gates whose heads do not depend on those of attention
GATES = [gate for gate in gated_linear_attention.MIXERS if gate not in ("vector", *OWN_HEADS)]
OF_FAMILIES["hf_memory_gated", "memory"] = [
    *OUTSIDE,
    *HEADS_OF_ATTENTION,
    *MEMORY_HEADS,
    *changes(gate=GATES),
    *DECAY,
]
DEEP = [
    *changes(memory_depth=[1, 3], memory_expansion=[3], memory_activation=["gelu"]),
    *changes(memory_residual=[False, True], memory_chunk_size=[5], memory_unit_values=[True]),
    *changes(memory_window=[2], memory_max_lr=[0.5], memory_max_grad_norm=[0.01]),
    *changes(memory_gate=["add", "multiply"], segment_length=[6], num_persistent_tokens=[0, 2]),
]
RULES = ["ttt_mlp", "moneta", "atlas"]  # one of each mixer
BESIDE_ATTENTION = [
    *HEADS_OF_ATTENTION,
    *changes(attention_bias=[True], attn_logit_softcapping=[0.5], query_pre_attn_scalar=[3]),
    *changes(sliding_window=[3], memory_rope=[True], linear_num_key_heads=[2]),
    *changes(memory_depth=[1], memory_expansion=[3], memory_chunk_size=[5], output_gate=["none"]),
    *changes(memory_gate=["add", "multiply"], segment_length=[6], num_persistent_tokens=[0, 2]),
]
FORMS = [  # further forms of memories, which have other options: family, options, changes
    *(("hf_memory_gated", {"gate": x}, [*OUTSIDE, *MEMORY_HEADS, *DECAY]) for x in OWN_HEADS),
    (
        "hf_memory_titans",
        {"variant": "lmm"},
        [*DEEP, *changes(memory_rule=RULES, output_gate=["none"], memory_qk_norm=[True])],
    ),
    ("hf_memory_titans", {"variant": "mag"}, [*BESIDE_ATTENTION, *changes(memory_rule=["lact"])]),
    ("hf_memory_titans", {"variant": "mal"}, BESIDE_ATTENTION),
    (
        "hf_memory_titans",
        {"variant": "mac", "segment_length": 4},
        [x for x in BESIDE_ATTENTION if "sliding_window" not in x.values],
    ),
]
FAMILY = {family.config.model_type: family for family in FAMILIES}


def merged(*parts: dict) -> dict | None:
    """Options together; None if two of them say different things of one."""
    options: dict = {}
    for part in parts:
        if any(options.get(name, value) != value for name, value in part.items()):
            return None
        options |= part
    return options


def is_by_layer(a: Change, b: Change) -> bool:
    of_a = {*a.needs, *a.values}
    of_b = {*b.needs, *b.values}
    return any(of_a & names and of_b & names for names in BY_LAYER)


def is_default_of_other(a: Change, b: Change) -> bool:
    """Whether one of two options may be given to no end, since the other one is given that it is the default of."""
    return any(
        {*x.needs, *x.values} & of_attention and {*y.needs, *y.values} & of_memory
        for of_attention, of_memory in DEFAULTS_OF_OTHERS
        for x, y in ((a, b), (b, a))
    )


class Layer:
    """Models of one layer of a kind in a family, by their options."""

    def __init__(self, family: str, **options):
        self.family = FAMILY[family]
        self.base = {**SMALL, **options}
        self.sizes = OWN_SIZES.get(family, {})
        if family == "hf_memory_transformer" and options.get("layer_types", ["memory"]) == [
            "memory"
        ]:
            del self.base["sliding_window"]
        self.configs: dict = {}
        self.found: dict = {}

    def config(self, options: dict):
        """A config, or None if it refuses the options or warns that one has no effect."""
        key = key_of(options)
        if key not in self.configs:
            self.configs[key] = self._config(options)
        return self.configs[key]

    def _config(self, options: dict):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*has no effect")
                return self.family.config(**self.base | self.sizes_for(options) | options)
        except (ValueError, UserWarning):
            return None

    def sizes_for(self, options: dict) -> dict:
        """Small sizes of what the options choose; others would have no effect."""
        if self.family.config.model_type != "hf_memory_transformer":
            return self.sizes
        pattern = PATTERNS[options.get("pattern", "full")]
        past = PASTS[options.get("past", "cache")]
        names = {*pattern.options, *past.options}
        if options.get("position") == "relative":
            names.add("max_relative_distance")
        return {name: x for name, x in self.sizes.items() if name in names}

    def takes(self, chosen: list[Change]) -> bool:
        """Whether changes go together."""
        options = options_of(chosen)
        return options is not None and self.config(options) is not None

    @torch.no_grad()
    def results(self, options: dict) -> tuple:
        """Logits and states, with weights that depend on their names alone."""
        key = key_of(options)
        if key not in self.found:
            config = self.config(options)
            with initialization.no_init_weights():
                model = self.family.causal_lm(config).double().eval()
            model.tie_weights()
            for name, x in [*model.named_parameters(), *model.named_buffers()]:
                if "rotary" not in name:
                    x.copy_(weights_of(name, x.shape))
            cache = DynamicCache(config=config)
            logits = model(TOKENS, past_key_values=cache).logits
            layer = cache.layers[0]
            states = (
                layer.states
                if hasattr(layer, "states")
                else {"keys": layer.keys, "values": layer.values}
            )
            assert logits.isfinite().all()
            self.found[key] = logits, dict(states)
        return self.found[key]

    def has_effect(self, options: dict, change: Change) -> bool:
        """Whether the options give other results than without a change."""
        without = {name: value for name, value in options.items() if name not in change.values}
        default = self.config(without)
        if default is None:
            return True  # the others need it
        if all(getattr(default, name) == value for name, value in change.values.items()):
            return True  # another one has changed the default to this value
        (one, states), (other, others) = self.results(options), self.results(without)
        if not torch.allclose(one, other, rtol=1e-9, atol=1e-9) or states.keys() != others.keys():
            return True
        return any(
            x.shape != others[name].shape or not torch.allclose(x, others[name])
            for name, x in states.items()
        )


def key_of(options: dict) -> str:
    return repr(sorted(options.items(), key=str))


@cache
def weights_of(name: str, shape: torch.Size) -> torch.Tensor:
    """Random numbers that depend on a name alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def may_be_together(a: Change, b: Change) -> bool:
    """Whether two changes are of different options, and none is what the other one needs."""
    return (
        not {*a.values} & {*b.needs, *b.values}
        and not {*b.values} & {*a.needs}
        and not is_by_layer(a, b)
        and not is_default_of_other(a, b)
    )


def options_of(chosen: list[Change]) -> dict | None:
    """Options with all of these changes; None if two of them need different values of one."""
    return merged(*(x.needs for x in chosen), *(x.values for x in chosen))


def sets_of(layer: Layer, all_changes: list[Change]):
    """Options with as many changes as a config takes together, until each pair that it takes is among them; and those
    of these changes that are in no earlier options with another one of them."""
    together = {
        frozenset((a.name, b.name))
        for i, a in enumerate(all_changes)
        for b in all_changes[:i]
        if may_be_together(a, b)
    }
    left = set(together)
    for i, a in enumerate(all_changes):
        for b in all_changes[:i]:
            if frozenset((a.name, b.name)) not in left:
                continue
            left.discard(frozenset((a.name, b.name)))
            chosen = [a, b]
            if not layer.takes(chosen):
                continue
            new = {a.name, b.name}
            for c in all_changes:
                pairs = {frozenset((c.name, x.name)) for x in chosen}
                adds_pairs = pairs <= together and pairs & left
                if adds_pairs and layer.takes([*chosen, c]):
                    new.update(*pairs & left)
                    left -= pairs
                    chosen.append(c)
            yield chosen, [x for x in chosen if x.name in new]


LAYERS = [
    *(("hf_memory_deltanet", {"layer_types": [kind]}, table) for kind, table in OF_LAYERS.items()),
    *((name, {"layer_types": [kind]}, table) for (name, kind), table in OF_FAMILIES.items()),
    *FORMS,
]
NAMES_OF_LAYERS = ["-".join([family, *map(str, options.values())]) for family, options, _ in LAYERS]


def with_all(table: list[Change], **options) -> list[Change]:
    """A table with these values in place of its own for these options."""
    return [x for x in table if not options.keys() & x.values.keys()] + changes(**options)


ALL_POSITIONS = {"position": [x for x in POSITIONS if x != "rope"]}
ALL_RULES = {"memory_rule": [x for x in titans.RULES if x != "titans"]}
COMPLETE = [  # tables that have one value of a kind above, with all of them: they take minutes
    *(
        (family, options, with_all(table, **ALL_POSITIONS))
        for family, options, table in LAYERS
        if family == "hf_memory_transformer"
    ),
    *(
        (family, options, with_all(table, **ALL_RULES))
        for family, options, table in FORMS
        if family == "hf_memory_titans"
    ),
]


@pytest.mark.parametrize(("family", "options", "all_changes"), LAYERS, ids=NAMES_OF_LAYERS)
def test_each_of_two_options_has_an_effect_or_both_are_refused(family, options, all_changes):
    layer = Layer(family, **options)
    ignored = []
    for chosen, new in sets_of(layer, all_changes):
        options = options_of(chosen)
        useless = [x.name for x in new if not layer.has_effect(options, x)]
        if useless:
            ignored.append((useless, [x.name for x in chosen]))
    assert not ignored


@pytest.mark.complete
@pytest.mark.parametrize(("family", "options", "all_changes"), COMPLETE)
def test_each_of_two_options_of_a_complete_table_has_an_effect_or_both_are_refused(
    family, options, all_changes
):
    test_each_of_two_options_has_an_effect_or_both_are_refused(family, options, all_changes)


REFUSED = [
    ("linear", {"no_rope_layers": [0], "local_rope_layers": [1], "local_rope_parameters": ROPE}),
    ("linear", {"mlp_types": ["experts"], "mlp_bias": True}),
    ("rwkv7", {"residual_multiplier": 0.5}),
    ("rwkv7", {"norm_placement": "post"}),
    ("mosaic", {"norm_placement": "post"}),
    ("transformer", {"num_sink_tokens": 2}),
    ("transformer", {"num_sink_tokens": 2, "pattern": "strided"}),
    ("transformer", {"num_sink_tokens": 2, "past": "xl"}),
    ("transformer", {"pattern": "strided", "layer_types": ["sliding_heads"]}),
    ("transformer", {"pattern": ["strided"], "layer_types": ["full_attention"]}),
    ("transformer", {"past": "xl", "layer_types": ["sliding_heads"]}),
]


@pytest.mark.parametrize(("family", "options"), REFUSED)
def test_what_no_layer_would_use_is_refused_by_name(family, options):
    with pytest.raises(ValueError, match=f"({'|'.join(options)}) must be"):
        FAMILY[f"hf_memory_{family}"].config(**SMALL, **options)


OF_KINDS = {name for kind in (*PATTERNS.values(), *PASTS.values()) for name in kind.options}
OF_OTHERS = {"max_relative_distance", "halting_epsilon", "ponder_loss_weight"}
VALUES = {
    "compression": "mean",
    "memory_join": "softmax",
    "span_limits": [4],
    "halting_epsilon": 0.3,
    "ponder_loss_weight": 0.3,
    "span_loss_weight": 0.3,
}


@pytest.mark.parametrize("name", sorted(OF_KINDS | OF_OTHERS))
def test_an_option_of_a_pattern_or_a_past_that_no_layer_has_is_refused_or_warned_of(name):
    layer = Layer("hf_memory_transformer")
    assert not layer.takes([Change({name: VALUES.get(name, 3)})])


def test_every_option_is_changed_or_has_a_reason():
    """Of those that all families share, and of the Memory Transformer and DeltaFormer."""
    changed = {name for x in chain(*(table for *_, table in LAYERS)) for name in x.values}
    known = changed | {name for names in NOT_TESTED for name in names.split(", ")}
    others = {field.name for field in fields(PreTrainedConfig)}
    for family in ("hf_memory_transformer", "hf_memory_deltaformer"):
        assert {field.name for field in fields(FAMILY[family].config)} - others <= known
    assert not changed & {name for names in NOT_TESTED for name in names.split(", ")}


def test_an_ignored_option_is_seen(monkeypatch):
    """Sinks that no mixer has, although the config takes them."""
    monkeypatch.setattr(
        windowed.WindowedMixer, "forward", _without_sinks(windowed.WindowedMixer.forward)
    )
    layer = Layer("hf_memory_deltanet", layer_types=["sliding_heads"])
    assert not layer.has_effect(
        {"attention_sinks": True, "use_qk_norm": True}, Change({"attention_sinks": True})
    )


def _without_sinks(forward):
    def run(self, *args, **kwargs):
        self.sinks = None
        return forward(self, *args, **kwargs)

    return run
