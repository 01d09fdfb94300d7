"""The model class for vLLM: our model, with states in vLLM's pages and vLLM's attention. Only vLLM imports this."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from hf_memory.integrations.vllm.states import Pages, Reading, kept_states, memory_layers, readings
from hf_memory.mixers.base import MemoryMixer

ATTENTION = "hf_memory_vllm"  # name of the attention function in transformers


def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **kwargs):
    """vLLM's attention, for the tokens of all sequences in one row: [1, H, T, D] -> [1, T, H, D]."""
    shape = q.transpose(1, 2).shape
    q, k, v = (x.transpose(1, 2).flatten(2)[0] for x in (q, k, v))
    return module.get_submodule("vllm")(q, k, v).view(shape), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)


class Memory(Pages, MambaBase):
    """Replaces a mixer's forward by one that keeps states in pages that vLLM allocates."""

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def __init__(self, mixer: MemoryMixer, dtype: torch.dtype, name: str):
        super().__init__(mixer, dtype)
        self.name, self.alone = name, mixer.forward
        mixer.forward = self.forward  # type: ignore[assignment, method-assign]

    def get_state_shape(self) -> list[tuple[int, ...]]:
        """Shapes of the states of a sequence."""
        return [shape for shape, _ in self.kept.values()]

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the states, in the same order."""
        return tuple(dtype for _, dtype in self.kept.values())

    def forward(self, hidden_states: Tensor, position_embeddings, steps: list[Reading] | None, **kwargs):
        """The tokens of all sequences in one row [1, T, hidden_size] -> as many outputs, and no attention weights."""
        if steps is None:  # vLLM measures how much memory these tokens need
            return self.alone(hidden_states, position_embeddings)
        slots = get_forward_context().attn_metadata[self.name].state_indices_tensor
        return self.read(hidden_states, position_embeddings, steps, slots), None


class MemoryForVLLM(nn.Module, HasInnerState, IsHybrid):
    """Any language model of this package, pure or hybrid, in vLLM."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config, dtype = copy.deepcopy(vllm_config.model_config.hf_config), vllm_config.model_config.dtype
        self.ours = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.ours.config._attn_implementation = ATTENTION
        for name, x in (*self.ours.named_parameters(), *self.ours.named_buffers()):
            if self.ours._keep_in_fp32_modules_strict & set(name.split(".")):
                x.data = x.data.float()
        layers = vllm_config.compilation_config.static_forward_context
        self.memories = []
        for i, layer in enumerate(self.ours.model.layers):
            mixer, name = layer.mixer, f"model.layers.{i}.mixer"
            if i in memory_layers(config):
                layers[name] = Memory(mixer, dtype, name)
                self.memories.append(name)
                continue
            query_heads, key_heads, *_, D = mixer.heads
            mixer.vllm = Attention(
                query_heads,
                D,
                mixer.scaling,
                key_heads,
                cache_config=vllm_config.cache_config,
                logits_soft_cap=config.attn_logit_softcapping,
                per_layer_sliding_window=mixer.sliding_window,
                prefix=f"{name}.vllm",
            )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings of tokens, before the embedding multiplier."""
        return self.ours.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors=None,
        inputs_embeds: Tensor | None = None,
        **kwargs,
    ) -> Tensor:
        """The tokens of all sequences in one row [T] -> last hidden states [T, hidden_size]."""
        metadata = get_forward_context().attn_metadata
        step = metadata[self.memories[0]] if metadata else None
        return self.ours.model(
            input_ids=None if input_ids is None or inputs_embeds is not None else input_ids[None],
            inputs_embeds=None if inputs_embeds is None else inputs_embeds[None],
            position_ids=positions[None],
            attention_mask=dict.fromkeys(self.ours.config.layer_types),  # vLLM separates the sequences
            use_cache=False,
            steps=readings(step.query_start_loc, step.seq_lens) if step else None,
        ).last_hidden_state[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [N, vocab_size] of hidden states [N, hidden_size]."""
        return self.ours.predict(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the tensors of a checkpoint, which has our names."""
        own, loaded = self.ours.state_dict(), set(self.ours.all_tied_weights_keys)
        for name, x in weights:
            own[name].copy_(x)
            loaded.add(name)
        return {f"ours.{name}" for name in loaded}

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Shapes of the states of each memory layer."""
        return tuple(shape for shape, _ in cls._kept(vllm_config).values())

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Dtypes of the states of each memory layer."""
        return tuple(dtype for _, dtype in cls._kept(vllm_config).values())

    @classmethod
    def _kept(cls, vllm_config: VllmConfig):
        config = vllm_config.model_config.hf_config
        return kept_states(config.state_specs[memory_layers(config)[0]], vllm_config.model_config.dtype)
