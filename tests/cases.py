"""The small models that the contract tests run over: a new family adds entries here, not test files."""

import copy
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast, set_seed

import hf_memory
from hf_memory.cache import LAYER_TYPES
from hf_memory.mixers.levels import LevelWeights
from hf_memory.mixers.transformer.relations import AdaptiveSpan
from hf_memory.mixers.windowed import Sinks
from hf_memory.modeling import register_eviction

NEW = 6  # tokens that `generate` writes
WORDS = [
    "end",
    "a",
    "an",
    "the",
    "is",
    "not",
    "new",
    "old",
    "snake",
    "python",
    "list",
    "set",
    "of",
    "in",
    ".",
    "?",
]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,  # at 0.02 a state that is off by a tenth would not show
    "pad_token_id": 0,
    "bos_token_id": 1,
}
PRODUCT_KEYS = {
    "num_product_keys": 6,
    "product_key_heads": 2,
    "product_key_dim": 8,
    "product_key_top_k": 3,
}
FULL_HYBRID = {"layer_types": ["memory", "full_attention"]}
WINDOW = {"layer_types": ["sliding_memory"] * 2, "sliding_window": 4}
SINKS = {"sliding_window": 4, "attention_sinks": True}
KEPT_TOKENS = {
    "layer_types": ["sliding_heads"] * 2,
    "sliding_window": 2,
    "num_sink_tokens": 1,
    "num_kept_tokens": [3, 2],
    "kept_block_size": 3,
    "full_attention_heads": [[], [1]],
}
SLIDING_HYBRID = {"layer_types": ["sliding_attention", "memory"], "sliding_window": 4}

PAST = {
    "past_window": 4,
    "sliding_window": 4,
    "segment_length": 4,
    "compression_rate": 2,
    "compressed_length": 3,
}
STORE = {"memory_size": 6, "memory_top_k": 2}
PATTERN = {"pattern_size": 4}
SUMMARIES = {**PATTERN, "num_summary_tokens": 2}


def largest_values(block):
    """An eviction policy of a user: the tokens with the largest values stay."""
    return block.values.norm(dim=-1)


register_eviction("largest_values", largest_values)


class Case(NamedTuple):
    """One small model: a family by its model type, and options of its config."""

    name: str
    model_type: str
    options: dict
    has_kernels: bool = True  # for a forward of whole sequences without padding


CASES = (
    Case("linear-elu", "hf_memory_linear", {}),
    Case(
        "linear-hedgehog-rope", "hf_memory_linear", {"feature_map": "hedgehog", "memory_rope": True}
    ),
    Case("linear-favor", "hf_memory_linear", {"feature_map": "favor", "feature_dim": 16}),
    Case(
        "linear-identity-norm",
        "hf_memory_linear",
        {"feature_map": "identity", "normalize": False, "output_norm": True},
    ),
    Case(
        "linear-window", "hf_memory_linear", {**WINDOW, "num_sink_tokens": 2, "num_memory_slots": 6}
    ),
    Case(
        "linear-window-heads",
        "hf_memory_linear",
        {
            **WINDOW,
            "sliding_window": 3,
            "full_attention_heads": [[1], [0, 1]],
            "num_memory_slots": 6,
        },
    ),
    Case(
        "linear-full",
        "hf_memory_linear",
        {**FULL_HYBRID, "attention_bias": True, "use_qk_norm": True},
    ),
    Case("linear-sliding", "hf_memory_linear", {**SLIDING_HYBRID, "tie_word_embeddings": True}),
    Case("gla", "hf_memory_gated", {}),
    Case("retention", "hf_memory_gated", {"gate": "retention"}),
    Case(
        "gated-retention-full",
        "hf_memory_gated",
        {**FULL_HYBRID, "gate": "scalar", "linear_conv_kernel_dim": 3},
    ),
    Case("deltanet", "hf_memory_deltanet", {"allow_negative_eigenvalues": True}),
    Case("gated-deltanet-sliding", "hf_memory_deltanet", {**SLIDING_HYBRID, "gate": "scalar"}),
    Case(
        "grouped-deltanet",
        "hf_memory_deltanet",
        {"gate": "scalar", "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    ),
    Case(
        "deltanet-as-in-gemma",
        "hf_memory_deltanet",
        {
            **SLIDING_HYBRID,
            "norm_placement": "both",
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "local_rope_layers": [0, 1],
            "local_rope_parameters": {"rope_type": "default", "rope_theta": 10.0},
            "mlp_types": ["mlp", "experts"],
            "moe_intermediate_size": 24,
        },
    ),
    Case(
        "retention-as-in-olmo",
        "hf_memory_gated",
        {
            **FULL_HYBRID,
            "gate": "retention",
            "norm_placement": "post",
            "use_qk_norm": True,
            "qk_norm_whole_width": True,
            "no_rope_layers": [1, 0],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    Case("kda", "hf_memory_deltanet", {"gate": "vector", "output_gate_low_rank_dim": 8}),
    Case(
        "gated-deltanet-without-its-attentions-norm",
        "hf_memory_deltanet",
        {**FULL_HYBRID, "gate": "scalar", "use_qk_norm": True, "memory_qk_norm": False},
    ),
    Case(
        "deltaproduct",
        "hf_memory_deltanet",
        {"gate": "scalar", "num_householder": 2, "linear_num_key_heads": 2},
    ),
    Case(
        "gdn2",
        "hf_memory_deltanet",
        {"gate": "gdn2", "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    ),
    Case(
        "comba",
        "hf_memory_deltanet",
        {"gate": "comba", "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    ),
    Case("preconditioned", "hf_memory_deltanet", {"gate": "preconditioned"}),
    Case("deltaformer", "hf_memory_deltaformer", {}),
    Case(
        "deltaformer-full-norope",
        "hf_memory_deltaformer",
        {**FULL_HYBRID, "write_rope": False, "use_qk_norm": True, "beta_activation": "identity"},
    ),
    Case(
        "deltaformer-window",
        "hf_memory_deltaformer",
        {"layer_types": ["sliding_memory", "memory"], "sliding_window": 4, "beta_mode": "delta"},
        has_kernels=False,
    ),
    Case(
        "deltaformer-linear-relu",
        "hf_memory_deltaformer",
        {"write_kernel": "linear", "read_kernel": "relu", "beta_activation": "tanh"},
        has_kernels=False,
    ),
    Case(
        "titans-lmm-rope",
        "hf_memory_titans",
        {"variant": "lmm", "memory_chunk_size": 4, "num_persistent_tokens": 3, "memory_rope": True},
    ),
    Case(
        "titans-lmm-linear-full",
        "hf_memory_titans",
        {**FULL_HYBRID, "variant": "lmm", "memory_depth": 1},
        has_kernels=False,
    ),
    Case(
        "titans-mag",
        "hf_memory_titans",
        {"sliding_window": 4, "memory_chunk_size": 3, "num_persistent_tokens": 2},
    ),
    Case(
        "titans-mag-add",
        "hf_memory_titans",
        {
            "sliding_window": 6,
            "memory_depth": 1,
            "memory_gate": "add",
            "num_persistent_tokens": 0,
            "memory_rope": True,
        },
        has_kernels=False,
    ),
    Case(
        "titans-mac",
        "hf_memory_titans",
        {
            "variant": "mac",
            "segment_length": 4,
            "memory_chunk_size": 3,
            "memory_rope": True,
            "memory_unit_values": True,  # else inputs 1e-6 apart give logits 1e-3 apart
        },
    ),
    Case(
        "ttt-mlp-full",
        "hf_memory_titans",
        {**FULL_HYBRID, "memory_rule": "ttt_mlp", "memory_chunk_size": 4},
        has_kernels=False,
    ),
    Case(
        "atlas-full",
        "hf_memory_titans",
        {
            **FULL_HYBRID,
            "memory_rule": "atlas",
            "memory_chunk_size": 3,
            "memory_window": 3,
            "memory_max_lr": 0.02,
        },
        has_kernels=False,
    ),
    Case(
        "lact",
        "hf_memory_titans",
        {"memory_rule": "lact", "sliding_window": 4, "memory_chunk_size": 3, "memory_max_lr": 0.02},
        has_kernels=False,
    ),
    Case(
        "titans-mal",
        "hf_memory_titans",
        {"variant": "mal", "sliding_window": 4, "memory_chunk_size": 4},
    ),
    Case(
        "gated-window",
        "hf_memory_gated",
        {**WINDOW, "num_memory_slots": 5, "use_qk_norm": True, "attn_logit_softcapping": 5.0},
    ),
    Case(
        "deltanet-window",
        "hf_memory_deltanet",
        {
            **WINDOW,
            "sliding_window": 3,
            "num_sink_tokens": 1,
            "num_memory_slots": 6,
            "full_attention_heads": [[], [0]],
            "full_attention_window": 5,
        },
    ),
    Case(
        "gated-sinks",
        "hf_memory_gated",
        {
            **SINKS,
            "layer_types": ["sliding_memory"] * 2,
            "full_attention_heads": [[1], []],
            "num_memory_slots": 5,
        },
    ),
    Case(
        "retention-memory-layers",
        "hf_memory_gated",
        {"gate": "retention", "mlp_types": ["mlp_and_memory", "memory"], **PRODUCT_KEYS},
    ),
    Case("mosaic-full", "hf_memory_mosaic", {**FULL_HYBRID, "intermediate_size": 7}),
    Case("transformer", "hf_memory_transformer", {}),
    Case(
        "transformer-xl",
        "hf_memory_transformer",
        {
            **PATTERN,
            "position": "xl",
            "pattern": ["strided_by_head", "bigbird"],
            "num_random_blocks": 1,
        },
    ),
    Case(
        "transformer-shaw",
        "hf_memory_transformer",
        {
            "num_sink_tokens": 2,
            **PATTERN,
            "position": "relative",
            "max_relative_distance": 4,
            "pattern": ["longformer_by_head", "block_local"],
        },
    ),
    Case(
        "transformer-alibi",
        "hf_memory_transformer",
        {**SUMMARIES, "position": "alibi", "pattern": ["linformer", "fixed_by_head"]},
    ),
    Case(
        "transformer-learned",
        "hf_memory_transformer",
        {
            **PATTERN,
            "position": "learned",
            "max_position_embeddings": 130,
            "pattern": ["dilated", "blockwise"],
        },
    ),
    Case(
        "transformer-infinite",
        "hf_memory_transformer",
        {
            "num_sink_tokens": 2,
            **PAST,
            "past": ["infinite", "compressive"],
            "compression": "most_used",
            "use_qk_norm": True,
        },
    ),
    Case(
        "transformer-memorizing",
        "hf_memory_transformer",
        {**PAST, **STORE, "position": "distance_aware", "past": ["memorizing", "compressive"]},
    ),
    Case(
        "transformer-buckets",
        "hf_memory_transformer",
        {
            "pattern": ["routing_by_head", "reformer"],
            "pattern_size": 4,
            "num_buckets": 4,
            "num_hashes": 2,
        },
    ),
    Case(
        "transformer-segments",
        "hf_memory_transformer",
        {
            **PAST,
            **STORE,
            "past": ["compressive", "memorizing"],
            "compression": "max",
            "memory_join": "attention",
        },
    ),
    Case(
        "transformer-universal",
        "hf_memory_transformer",
        {
            "depth": "universal",
            "adaptive_computation": True,
            "position": "sinusoidal",
            "pattern": "adaptive_span",
            "max_span": 4,
            "span_ramp": 2,
        },
    ),
    Case(
        "transformer-reversible",
        "hf_memory_transformer",
        {
            "num_sink_tokens": 2,
            "past_window": 4,
            "segment_length": 4,
            "sliding_window": 4,
            "depth": "reversible",
            "past": ["xl", "cache"],
            "layer_types": ["memory", "sliding_heads"],
        },
    ),
    Case(
        "transformer-routing",
        "hf_memory_transformer",
        {**PATTERN, "position": "none", "pattern": ["strided", "routing"], "num_buckets": 4},
    ),
    Case(
        "transformer-forget",
        "hf_memory_transformer",
        {
            "sliding_window": 4,
            "num_sink_tokens": 2,
            "position": "forget",
            "past": ["infinite", "cache"],
        },
    ),
    Case(
        "transformer-forget-heads",
        "hf_memory_transformer",
        {
            "num_sink_tokens": 2,
            "position": "forget",
            "layer_types": ["sliding_heads", "memory"],
            "sliding_window": 4,
            "full_attention_heads": [[1], []],
        },
    ),
    Case(
        "transformer-longformer",
        "hf_memory_transformer",
        {
            "num_sink_tokens": 2,
            **SUMMARIES,
            "position": "relative",
            "layer_types": ["sliding_heads", "memory"],
            "sliding_window": 4,
            "pattern": "fixed",
        },
    ),
    Case(
        "transformer-pooled",
        "hf_memory_transformer",
        {
            **PAST,
            **STORE,
            "past": ["memorizing", "compressive"],
            "memory_join": "softmax",
            "compression": "mean",
        },
    ),
    Case("mamba", "hf_memory_gated", {"gate": "mamba", "intermediate_size": 0}, has_kernels=False),
    Case(
        "mamba3",
        "hf_memory_gated",
        {"gate": "mamba3", "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    ),
    Case("mesa", "hf_memory_gated", {"gate": "mesa"}, has_kernels=False),
    Case(
        "kalman",
        "hf_memory_gated",
        {"gate": "kalman", "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        has_kernels=False,
    ),
    Case("rwkv7", "hf_memory_rwkv7", {"allow_negative_eigenvalues": True}),
    Case(
        "mamba2",
        "hf_memory_gated",
        {"gate": "mamba2", "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    ),
    Case(
        "log-linear-mamba2",
        "hf_memory_gated",
        {"gate": "mamba2", "linear_key_head_dim": 16, "linear_value_head_dim": 16, "levels": "log"},
        has_kernels=False,
    ),
    Case(
        "log-linear-gated-deltanet",
        "hf_memory_deltanet",
        {"gate": "scalar", "levels": "log", "max_position_embeddings": 8},
        has_kernels=False,
    ),
    Case(
        "attention-heads",
        "hf_memory_transformer",
        {
            "layer_types": ["sliding_heads", "full_attention"],
            "sliding_window": 3,
            "num_sink_tokens": 2,
            "full_attention_heads": [[1], []],
        },
    ),
    Case(
        "attention-kept",
        "hf_memory_transformer",
        KEPT_TOKENS,
    ),
    Case(
        "attention-kept-by-head",
        "hf_memory_transformer",
        {
            **SINKS,
            "layer_types": ["sliding_heads"] * 2,
            "num_kept_tokens": [[3, 0], [1, 2]],
            "kept_block_size": 3,
            "eviction": "change_of_output",
        },
    ),
    Case(
        "attention-sinks",
        "hf_memory_transformer",
        {**SINKS, "layer_types": ["sliding_heads", "full_attention"]},
    ),
    Case(
        "linear-window-bits",
        "hf_memory_linear",
        {
            **WINDOW,
            "num_sink_tokens": 2,
            "num_memory_slots": 6,
            "full_attention_heads": [[1], []],
            "cache_bits": {"full_attention_heads": 4, "window": 8},
        },
    ),
    Case("gated-sliding-bits", "hf_memory_gated", {**SLIDING_HYBRID, "cache_bits": 4}),
    Case(
        "attention-kept-bits",
        "hf_memory_transformer",
        {**KEPT_TOKENS, "cache_bits": {"full_attention_heads": 4, "window": 8}},
    ),
    Case(
        "attention-sinks-bits",
        "hf_memory_transformer",
        {**SINKS, "layer_types": ["sliding_heads", "full_attention"], "cache_bits": 8},
    ),
    Case(
        "transformer-bits",
        "hf_memory_transformer",
        {
            "num_sink_tokens": 2,
            **SUMMARIES,
            "sliding_window": 4,
            "past": ["cache", "infinite"],
            "pattern": ["fixed", "full"],
            "cache_bits": 8,
        },
    ),
    Case(
        "transformer-local-bits",
        "hf_memory_transformer",
        {
            "num_sink_tokens": 2,
            **PATTERN,
            "position": "relative",
            "layer_types": ["sliding_heads", "memory"],
            "sliding_window": 4,
            "pattern": "block_local",
            "cache_bits": 4,
        },
    ),
)

CASE = {case.name: case for case in CASES}
every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def usually(usual):
    """Parametrizes a test over every case, of which those that are not usual run once a week.

    Args:
        usual: cases, one for each way that the tested code can take.
    """
    marks = {case.name: pytest.mark.complete for case in CASES if case not in usual}
    return pytest.mark.parametrize(
        "case", [pytest.param(case, marks=marks.get(case.name, ()), id=case.name) for case in CASES]
    )


FIRST_OF_FAMILY = {case.model_type: case for case in reversed(CASES)}.values()
every_family = pytest.mark.parametrize(
    "case", FIRST_OF_FAMILY, ids=[case.name for case in FIRST_OF_FAMILY]
)


def family_of(case: Case) -> hf_memory.Family:
    return next(
        family for family in hf_memory.FAMILIES if family.config.model_type == case.model_type
    )


RECURRENT = [case for case in FIRST_OF_FAMILY if family_of(case).growth == "fixed"]
every_recurrent_family = pytest.mark.parametrize(
    "case", RECURRENT, ids=[case.name for case in RECURRENT]
)


# What generates, saves or serves knows no mixer: it moves, copies, crops and fills caches, which differ in these ways.
KIND_OF_CACHE = (
    "linear-elu",  # a matrix
    "linear-window-heads",  # a window that rolls, slots, and heads that keep everything
    "linear-full",  # beside a cache of transformers that grows
    "linear-sliding",  # and one that rolls
    "deltaformer-window",  # states of both kinds in one model
    "titans-mac",  # segments and chunks, whose ends do not meet
    "retention-memory-layers",  # no states in the feed-forward part
    "mosaic-full",  # states that grow
    "transformer-memorizing",  # a store, and compressed tokens
    "transformer-segments",  # text that stops at segments
    "transformer-universal",  # one layer's states several times
    "transformer-reversible",  # two streams
    "rwkv7",  # the states of a feed-forward part, and values of the first layer
    "log-linear-mamba2",  # one state for each level
    "attention-kept-bits",  # kept tokens, in few bits
)
CASES_OF_CACHES = [CASE[name] for name in KIND_OF_CACHE]
every_kind_of_cache = usually(CASES_OF_CACHES)


def make_config(case: Case, **options):
    return family_of(case).config(**{**SIZES, **case.options, **options})


MADE: dict = {}


def make_model(case: Case, **options):
    """A random model in eval mode, the same at every call, as is the state of the generator after it."""
    key = repr((case, options))
    if key not in MADE:
        MADE[key] = _make(case, options), torch.get_rng_state()
    model, state = MADE[key]
    torch.set_rng_state(state)
    return copy.deepcopy(model)  # in half of the time


def _make(case: Case, options: dict):
    torch.manual_seed(0)
    model = family_of(case).causal_lm(make_config(case, **options)).eval()
    for module in model.modules():
        if isinstance(
            module, LevelWeights
        ):  # where all weigh one, as they do at first, a wrong level would not show
            torch.nn.init.normal_(module.proj.weight, std=0.3)
        if isinstance(module, Sinks):  # where all are zero, it would not show which head has which
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter)
        if isinstance(
            module, AdaptiveSpan
        ):  # where all are empty, a head that sees too far would not show
            torch.nn.init.uniform_(module.span)
    return model


def without_plain_attention(case: Case) -> dict:
    """Options of `make_model` with another layer of the case in place of attention with a cache of transformers."""
    kinds = make_config(case).layer_types
    other = next(kind for kind in kinds if kind in LAYER_TYPES)
    layers = {"layer_types": [kind if kind in LAYER_TYPES else other for kind in kinds]}
    return layers | _bits_of_layers(case, layers)


def _bits_of_layers(case: Case, layers: dict) -> dict:
    """All bits for some of the layers of a case in few bits, if none of these has keys and values of tokens."""
    kinds = make_config(case, **layers, cache_bits=None).kinds_in_bits
    has_rows = any(kind != "recurrent_states" for kind in kinds)
    return {} if has_rows or "cache_bits" not in case.options else {"cache_bits": None}


# Tests that take long, as those of compiled models, run over one case for each kind of layer: a memory that keeps other
# states than all layers of cases before it, or attention of a kind. Each case has the number of its layer of a new
# kind. Some of these tests take this layer alone; None stands for the whole model, where several are new.
LAYER_OF_NEW_KIND: dict[str, int | None] = {
    "linear-elu": 0,
    "linear-favor": 0,
    "linear-identity-norm": 0,
    "linear-window": 0,
    "linear-window-heads": None,
    "linear-full": None,
    "linear-sliding": None,
    "gla": 0,
    "gated-retention-full": 0,
    "deltanet": 0,
    "preconditioned": 0,
    "deltaformer": 0,
    "deltaformer-window": 0,
    "titans-lmm-rope": 0,
    "titans-mag": 0,
    "titans-mac": 0,
    "ttt-mlp-full": 0,
    "atlas-full": 0,
    "lact": 0,
    "gated-window": 0,
    "deltanet-window": None,
    "gated-sinks": 0,
    "mosaic-full": 0,
    "transformer": 0,
    "transformer-shaw": None,
    "transformer-infinite": None,
    "transformer-memorizing": None,
    "transformer-buckets": None,
    "transformer-reversible": 1,
    "transformer-forget": None,
    "transformer-forget-heads": 0,
    "transformer-longformer": 0,
    "mamba": 0,
    "mamba3": 0,
    "mesa": 0,
    "kalman": 0,
    "rwkv7": 0,
    "log-linear-mamba2": 0,
    "log-linear-gated-deltanet": 0,
    "attention-heads": 0,
    "attention-kept": None,
    "attention-kept-by-head": None,
}
WITHOUT_MEMORY = {"pattern": "full", "past": "cache"}
FIRST_OF_KIND = [CASE[name] for name in LAYER_OF_NEW_KIND]
every_kind_of_layer = pytest.mark.parametrize("case", FIRST_OF_KIND, ids=LAYER_OF_NEW_KIND)


def kinds_of_layers(case: Case) -> list:
    """What tells layers apart: memories of a family that keep other states, and kinds of attention."""
    config = make_config(case)
    layers = enumerate(zip(config.layer_types, config.state_specs))
    return [
        kind
        if "attention" in kind
        else (case.model_type, kind, *sorted(spec), *layouts_of(config, i))
        for i, (kind, spec) in layers
    ]


def layouts_of(config, layer_idx: int) -> list[str]:
    """What heads of a layer with a window see, by the layouts of their pasts."""
    mixer = config.mixer_class(layer_idx)
    parts = mixer.parts_of(config, layer_idx) if hasattr(mixer, "parts_of") else []
    return [type(part.past).__name__ for part in parts]


def passes_gradients(case: Case) -> bool:
    """Whether all layers give the gradients of whole rows if these are read in parts."""
    config = make_config(case)
    return all(config.mixer_class(i).passes_gradients for i in range(len(config.layer_types)))


def one_layer(case: Case) -> dict:
    """Options of `make_model` for what is asked of each layer alone; none for a case that needs all its layers.

    The layer is that of a new kind, and in other cases the memory, if all memories of the case are of one kind.
    """
    kinds = kinds_of_layers(case)
    memories = [i for i, kind in enumerate(kinds) if not isinstance(kind, str)]
    are_alike = len({kinds[i] for i in memories}) == 1
    number = LAYER_OF_NEW_KIND.get(case.name, memories[0] if are_alike else None)
    if number is None:
        return {}
    lists = {name: x for name, x in case.options.items() if isinstance(x, list)}
    of_layer = {name: x[number : number + 1] for name, x in lists.items()}
    if make_config(case).layer_types[number] != "memory":  # the others have no pattern and no past
        of_layer |= {x: WITHOUT_MEMORY[x] for x in WITHOUT_MEMORY if x in case.options}
    of_layer["num_hidden_layers"] = 1
    return of_layer | _bits_of_layers(case, of_layer)


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Tokens that are neither padding nor the beginning of a text."""
    return torch.randint(
        3, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed)
    )


def read(model, tokens) -> DynamicCache:
    """A cache that has read tokens."""
    cache = DynamicCache(config=model.config)
    go_on(model, cache, tokens)
    return cache


@torch.no_grad()
def go_on(model, cache, tokens) -> torch.Tensor:
    """The logits of tokens after those that a cache has read."""
    return model(tokens, past_key_values=cache).logits


def word_tokenizer(words, *, unk_token: str, **special) -> PreTrainedTokenizerFast:
    """A tokenizer of words; each is the token of its place."""
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=unk_token)
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=unk_token, **special)


def generate(model, tokens=None, **kwargs):
    """New tokens are never padding: its embedding is zero, where a norm turns rounding into noise."""
    set_seed(0)
    options = {"do_sample": False, "suppress_tokens": [model.config.pad_token_id], **kwargs}
    return model.generate(tokens, max_new_tokens=NEW, **options)
