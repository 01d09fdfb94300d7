"""Small Transformers, their tokenizer, and conversions of them that take a second."""

import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from cases import SIZES, random_tokens, word_tokenizer
from hf_memory import conversion
from hf_memory.conversion import Recipe, Run, Schedule, resolve

SHORT = "steps=2,batch_size=2,length=32"
FAST = [
    "--to",
    "linear",
    "--keep",
    "none",
    "--transfer",
    SHORT,
    "--distillation",
    SHORT,
]  # flags of the command convert
QWEN2_WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
LONG_ROPE = {
    "original_max_position_embeddings": 64,  # no test text is longer
    "max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "short_factor": [1.0, 2.0, 3.0, 4.0],
        "long_factor": [5.0] * 4,
    },
}
GEMMA2 = {
    "head_dim": 12,
    "sliding_window": 4,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 2.0,  # low enough to matter
    "final_logit_softcapping": 3.0,
}
GEMMA3 = {
    "head_dim": 12,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 20,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    },
}
MINISTRAL = {
    "head_dim": 12,
    "sliding_window": 4,
    "layer_types": ["full_attention", "sliding_attention"],
}
GRANITE = {
    "attention_bias": True,
    "mlp_bias": True,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
}
EXPERTS = {
    "experts_implementation": "eager",
    "head_dim": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
TEACHERS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-scaled-rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 12}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 4}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-windows": (Qwen2Config, Qwen2ForCausalLM, QWEN2_WINDOWS),
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"attention_bias": True, "head_dim": 12, "rms_norm_eps": 1e-3},
    ),
    "smollm3": (
        SmolLM3Config,
        SmolLM3ForCausalLM,
        {"no_rope_layers": [1, 0], "attention_bias": True},
    ),
    "smollm3-windows": (
        SmolLM3Config,
        SmolLM3ForCausalLM,
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 4,
            "mlp_bias": True,
        },
    ),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {"attention_bias": True}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"tie_word_embeddings": True}),
    "phi3-window": (Phi3Config, Phi3ForCausalLM, {"sliding_window": 4}),
    "phi3-part": (
        Phi3Config,
        Phi3ForCausalLM,
        {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 99.0}},
    ),
    "phi3-long": (Phi3Config, Phi3ForCausalLM, LONG_ROPE),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, GEMMA2),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, GEMMA3),
    "ministral": (MinistralConfig, MinistralForCausalLM, MINISTRAL),
    "granite": (GraniteConfig, GraniteForCausalLM, GRANITE),
    "granite-tied": (GraniteConfig, GraniteForCausalLM, {**GRANITE, "tie_word_embeddings": True}),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {**EXPERTS, "mlp_only_layers": [0]}),
}
every_teacher = pytest.mark.parametrize("name", TEACHERS)
SCHEDULE = Schedule(steps=8, learning_rate=1e-2, batch_size=2, length=16)
BOTH_STAGES = {"transfer": SCHEDULE, "distillation": SCHEDULE}
RUN = {"to": "gated", "keep": (1,), **BOTH_STAGES, "seed": 1}


def with_long_rope(positions):
    """A teacher whose angles change after 24 tokens."""
    rope = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 24,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 4.0, 8.0, 16.0],
    }
    options = {"max_position_embeddings": positions, "original_max_position_embeddings": 24}
    torch.manual_seed(0)
    return Phi3ForCausalLM(Phi3Config(**{**SIZES, **options, "rope_parameters": rope})).eval()


def make_teacher(name="llama"):
    """A small random teacher; biases and norms too, since zeros and ones would hide what is not carried over."""
    config, model, options = TEACHERS[name]
    torch.manual_seed(0)
    teacher = model(config(**{**SIZES, **options}))
    for parameter in teacher.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 1.0, 0.3)
    return teacher.eval()


def text(length=200):
    """Random tokens [length], the same for the same length."""
    return random_tokens(length, seed=1)


def convert(teacher, tokens, *, run=Run(), quantized=None, **recipe):
    """A conversion by the parts of its recipe; what is no part of one is an option of the student's."""
    options = {
        name: recipe.pop(name) for name in list(recipe) if name not in Recipe.__dataclass_fields__
    }
    recipe = Recipe(**{"to": "linear", "keep": "none", **recipe}, options=options)
    plan = resolve(recipe, teacher.config, tokens)
    return conversion.convert(teacher, tokens, plan, run, quantized=quantized)


def same(a, b):
    """Whether two models have the same weights, bit for bit."""
    return all(
        torch.equal(x, y)
        for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def make_tokenizer():
    """A tokenizer of the words w0, w1, ..., each of which is the token of its number."""
    words = [f"w{i}" for i in range(SIZES["vocab_size"])]
    return word_tokenizer(words, eos_token="w2", pad_token="w0", unk_token="w3")


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 4})).eval()


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    ).eval()
