"""The model classes for vLLM: our models, with vLLM's attention and states in its pages. Only vLLM imports this."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFunc, get_temporal_copy_spec
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsHybrid,
    SupportsLoRA,
    SupportsMambaPrefixCaching,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from hf_memory.integrations.vllm.placement import (
    divided,
    memory_layers,
    of_all_heads,
    share,
    style,
    window_parts,
)
from hf_memory.integrations.vllm.states import Pages, Reading, Shelf, readings, shelves
from hf_memory.layers import SwiGLU
from hf_memory.mixers.attention import AttentionMixer
from hf_memory.mixers.base import Projected, Projections
from hf_memory.mixers.positions import Positions
from hf_memory.mixers.windowed import WindowedMixer

NAME = "model.layers.{}.mixer"  # of the mixer of a layer
JOINED = {  # layers that read the same and are one in vLLM
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
PART_OF = {part: (name, i) for name, parts in JOINED.items() for i, part in enumerate(parts)}
OPERATION = "vllm::hf_memory_mix"  # at which vLLM divides its graph


class HeadsAttention(Attention):
    """vLLM's attention of some heads of a mixer, with a page of so many `blocks` of tokens."""

    def __init__(
        self, mixer: Projections, heads: slice, window: int | None, blocks: int = 1, **options
    ):
        n = heads.stop - heads.start
        options |= {
            "logits_soft_cap": mixer.config.attn_logit_softcapping,
            "per_layer_sliding_window": window,
        }
        super().__init__(
            n * mixer.num_key_value_groups, mixer.head_dim, mixer.scaling, n, **options
        )
        self.heads = heads
        self.blocks = blocks

    def get_kv_cache_spec(self, vllm_config: VllmConfig):
        """What a page holds."""
        size = vllm_config.cache_config.block_size * self.blocks
        return replace(super().get_kv_cache_spec(vllm_config), block_size=size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, G, D], k and v [T, H, D] of all heads of the mixer -> [T, heads, G, D] of its own."""
        q, k, v = (x[:, self.heads] for x in (q, k, v))
        return super().forward(q.flatten(1), k.flatten(1), v.flatten(1)).view(q.shape)


class InVLLM:
    """The first base of the class of a mixer in vLLM: the three steps, with the second as vLLM runs it."""

    middle: "Attended | Memory"

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs
    ) -> tuple[Tensor, None]:
        """The tokens of all sequences in one row [1, T, hidden_size] -> as many outputs, and no attention weights."""
        return self.middle(hidden_states, position_embeddings), None

    def project_each(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """See `Projections.project_each`."""
        joined: Any = getattr(self, "qkv_proj", None)
        if joined is None:
            return super().project_each(hidden_states)  # type: ignore[misc]
        return joined(hidden_states).split(joined.output_partition_sizes, -1)


class JoinedSwiGLU(SwiGLU):
    """An MLP whose gate and inputs are one layer."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> as much."""
        joined: Any = self.gate_up_proj
        gate, inputs = joined(x).chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * inputs)


@cache
def in_vllm(mixer: type) -> type:
    """The class of a mixer in vLLM."""
    return type(f"{mixer.__name__}InVLLM", (InVLLM, mixer), {"__module__": __name__})


class Attended:
    """The second step of a mixer is vLLM's attention.

    A window is of all heads, since vLLM stores alike caches together; heads that keep everything come after it, with
    caches of their own, and their outputs replace those of the window.
    """

    def __init__(self, mixer: Any, attentions: Iterable[HeadsAttention]):
        self.mixer = mixer
        mixer.attentions = nn.ModuleList(attentions)

    def __call__(self, hidden_states: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """The outputs of the mixer, of hidden states [1, T, hidden_size] and their angles [1, T, channels]."""
        projected = self.mixer.project(hidden_states, Positions(*angles))
        q, k, v = (projected[name][0] for name in "qkv")
        o = attended(self.mixer, q, k, v, getattr(self.mixer, "sinks", None))
        return self.mixer.finish(o.flatten(1)[None])


def attended(mixer: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any = None) -> Tensor:
    """Outputs [T, H, groups, D] of the heads that have vLLM's attention, of queries as many, k and v [T, H, D]."""
    q = q.view(len(q), k.shape[1], -1, k.shape[2])
    v = v if sinks is None else v - sinks.values
    o = torch.empty_like(q)
    for attention in mixer.attentions:
        o[:, attention.heads] = attention(q, k, v)
    return o if sinks is None else o + sinks.values[:, None]


class HeadSinks(nn.Module):
    """The sinks of all heads of a process, zero for heads that keep everything.

    Engines have sinks without values: with values less u of the tokens, and u added to the output, a sink's value is u.
    """

    def __init__(self, mixer: WindowedMixer, near: list[int], rank: int, size: int):
        super().__init__()
        query_heads, heads, _, D, _ = mixer.heads
        self.logits = nn.Parameter(torch.zeros(query_heads))
        self.values = nn.Parameter(torch.zeros(heads, D))

        def load(own: nn.Parameter, x: Tensor) -> None:
            own.data.copy_(of_all_heads(x, near, heads * size).chunk(size)[rank])

        for parameter in self.parameters():
            set_weight_attrs(parameter, {"weight_loader": load})


class Steps:
    """The readings of a step of vLLM, which all layers with a memory share."""

    def __init__(self, layers: list[int]):
        self.layers = layers
        self._metadata: Any = None
        self._readings: list[Reading] = []

    def of(self, metadata: Any) -> list[Reading]:
        """Those of the step with this metadata of attention, by name of a layer."""
        if metadata is not self._metadata:
            own = {i: metadata[NAME.format(i)] for i in self.layers}
            any_layer = own[self.layers[0]]
            slots = {i: x.state_indices_tensor for i, x in own.items()}
            self._readings = readings(any_layer.query_start_loc, any_layer.seq_lens, slots)
            self._metadata = metadata
        return self._readings


class Memory(Pages, MambaBase):
    """The second step of a mixer, with states in pages that vLLM allocates, of one size in all layers.

    Heads that keep everything have vLLM's attention.
    """

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def __init__(
        self, mixer: Any, layer: int, shelf: Shelf, steps: Steps, full: Iterable[HeadsAttention]
    ):
        super().__init__(mixer, layer, shelf)
        self.steps = steps
        mixer.attentions = nn.ModuleList(full)

    def get_state_shape(self) -> list[tuple[int, ...]]:
        """Shape of the page of a sequence."""
        return [(self.shelf.size,)]

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Dtype of the page."""
        return (torch.uint8,)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the pages [sequences, 1, 1, bytes]."""
        pages = kv_cache[:, 0, 0].view(torch.uint8)
        self.kv_cache = (pages[:, : self.shelf.size],)  # what vLLM copies from block to block
        self.shelf.bind(self.layer, pages)

    def __call__(self, hidden_states: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """The outputs of the mixer, of hidden states [1, T, hidden_size] and their angles [1, T, channels]."""
        projected = self.project(hidden_states, angles)
        of_heads = None
        if self.mixer.attentions:
            o = attended(self.mixer, *(projected[name] for name in "qkv"))
            of_heads = o[:, self.mixer.full_heads].flatten(1, 2)
        mixed = hidden_states.new_empty(hidden_states.shape[1], self.width)
        names = ",".join(projected)
        of_tokens = list(projected.values())
        torch.ops.vllm.hf_memory_mix(of_tokens, mixed, names, NAME.format(self.layer))
        return self.finish(mixed, of_heads)

    def mix_step(self, projected: Projected, mixed: Tensor) -> None:
        """Read the tokens of a step of vLLM, which says whose they are, into `mixed` [T, width]."""
        metadata: Any = get_forward_context().attn_metadata
        self.mix(projected, None if metadata is None else self.steps.of(metadata), mixed)


def _mix(projected: list[Tensor], mixed: Tensor, names: str, layer_name: str) -> None:
    """What reads states, as an operation at which vLLM divides its graph."""
    memory = get_forward_context().no_compile_layers[layer_name]
    memory.mix_step(dict(zip(names.split(","), projected)), mixed)


def _mix_without_data(*arguments) -> None:
    return None


direct_register_custom_op(
    OPERATION.partition("::")[2], _mix, mutates_args=["mixed"], fake_impl=_mix_without_data
)


class ModelForVLLM(nn.Module):
    """A language model of this package, or the part of it that a process has."""

    packed_modules_mapping = JOINED

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        whole = vllm_config.model_config.hf_config
        dtype = vllm_config.model_config.dtype
        self.rank = get_tensor_model_parallel_rank()
        self.size = get_tensor_model_parallel_world_size()
        self.config = share(copy.deepcopy(whole), self.rank, self.size)
        self.divided = divided(whole, self.size)
        ours = AutoModelForCausalLM.from_config(self.config, dtype=dtype)
        for name, x in (*ours.named_parameters(), *ours.named_buffers()):
            if ours._keep_in_fp32_modules_strict & set(name.split(".")):
                x.data = x.data.float()
        self._replace_linears(ours)
        self.model = ours.model
        self.model.embed_tokens = VocabParallelEmbedding(
            self.config.vocab_size, self.config.hidden_size
        )
        self.lm_head = ParallelLMHead(
            self.config.vocab_size, self.config.hidden_size, prefix="lm_head"
        )
        if self.config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(
            self.config.vocab_size, soft_cap=self.config.final_logit_softcapping
        )
        self._place_mixers(vllm_config)

    def _replace_linears(self, ours: PreTrainedModel) -> None:
        """Put vLLM's linear layers, which can be divided and have adapters, where the plan for parallelism has one."""
        for name, module in list(ours.named_modules()):
            if type(module) is SwiGLU:
                self._join(name, module, "gate_up_proj")
                module.__class__ = JoinedSwiGLU
            elif type(module) in (AttentionMixer, WindowedMixer):
                self._join(name, module, "qkv_proj")
        for name, linear in list(ours.named_modules()):
            kind = style(ours, name) if type(linear) is nn.Linear else None
            if kind in ("colwise", "rowwise"):
                outputs, inputs = linear.weight.shape
                options = {"bias": linear.bias is not None, "return_bias": False, "prefix": name}
                if kind == "colwise":
                    divided: Any = ColumnParallelLinear(inputs, outputs * self.size, **options)
                else:
                    divided = RowParallelLinear(inputs * self.size, outputs, **options)
                divided.out_features = outputs  # as in PyTorch's, of this process
                ours.set_submodule(name, divided)

    def _join(self, name: str, module: nn.Module, joined: str) -> None:
        """Put one linear layer in place of those of a module that read the same."""
        parts = [module.get_submodule(part) for part in JOINED[joined]]
        sizes = [part.out_features * self.size for part in parts]
        one = MergedColumnParallelLinear(
            parts[0].in_features,
            sizes,
            bias=parts[0].bias is not None,
            return_bias=False,
            prefix=f"{name}.{joined}",
        )
        for part in JOINED[joined]:
            delattr(module, part)
        setattr(module, joined, one)

    def _place_mixers(self, vllm_config: VllmConfig) -> None:
        """Let vLLM run attention, and keep the states of memories."""
        full = vllm_config.model_config.hf_config.full_attention_heads
        layers = vllm_config.compilation_config.static_forward_context
        parts = window_parts(self.config)
        numbers = count()
        options = vllm_config.cache_config
        self.memories = memory_layers(self.config)
        splitting = vllm_config.compilation_config.splitting_ops
        if self.memories and splitting is not None and OPERATION not in splitting:
            splitting.append(OPERATION)
        shelf = self._shelves(vllm_config)[self.rank]
        steps = Steps(self.memories)
        for i, layer in enumerate(self.model.layers):
            name = NAME.format(i)
            mixer = layer.mixer
            mixer.__class__ = in_vllm(mixer.__class__)
            if i in self.memories:
                grows = any(state.growth != "fixed" for state in mixer.spec.values())
                heads = full_attentions(mixer, mixer.heads[1], numbers, options) if grows else ()
                layers[name] = mixer.middle = Memory(mixer, i, shelf, steps, heads)
                continue
            if self.config.attention_sinks and isinstance(mixer, WindowedMixer):
                near = [
                    h for h in range(self.size * mixer.heads[1]) if not full or h not in full[i]
                ]
                mixer.sinks = HeadSinks(mixer, near, self.rank, self.size) if near else None
            mixer.middle = Attended(mixer, attentions(mixer, name, parts, numbers, options))

    @staticmethod
    def _shelves(vllm_config: VllmConfig) -> list[Shelf]:
        """Pages for the states of the part of a model that each process has, all of one size."""
        model = vllm_config.model_config
        size = vllm_config.parallel_config.tensor_parallel_size
        configs = [share(model.hf_config, rank, size) for rank in range(size)]
        layers = memory_layers(model.hf_config)
        return shelves([{i: x.state_specs[i] for i in layers} for x in configs], model.dtype)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings of tokens, before the embedding multiplier."""
        return self.model.embed_tokens(input_ids)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits [N, vocab_size] of hidden states [N, hidden_size]."""
        return self.logits_processor(self.lm_head, hidden_states)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors=None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """The tokens of all sequences in one row [T] -> last hidden states [T, hidden_size]."""
        model = self.model
        x = (model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds)[None]
        x = x * self.config.embedding_multiplier
        x = model.run_layers(
            x,
            [None] * len(model.layers),
            own_losses=[],
            position_ids=positions[None],
            **model.angles(x, positions[None]),
            read_values=model._read_values,
        )
        return model.norm(x)[0]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the tensors of a checkpoint, which has our names."""
        own = self.state_dict(keep_vars=True)
        loaded = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        for name, x in weights:
            *place, part, kind = name.split(".")
            joined, number = PART_OF.get(part, (part, 0))
            one = ".".join([*place, joined, kind])
            if part in PART_OF and one in own:
                own[one].weight_loader(own[one], x, number)
                loaded.add(one)
                continue
            if hasattr(own[name], "weight_loader"):
                own[name].weight_loader(own[name], x)
            else:
                own[name].data.copy_(
                    x.chunk(self.size, self.divided[name])[self.rank] if name in self.divided else x
                )
            loaded.add(name)
        return loaded


def attentions(
    mixer, name: str, parts: int, numbers: Iterator[int], options: CacheConfig
) -> Iterator[HeadsAttention]:
    """vLLM's attention for a mixer: over its window in so many parts, and for each head that keeps everything.

    Args:
        mixer: attention, or a window with full heads.
        name: name of the mixer.
        parts: into how many caches the heads of a window are divided.
        numbers: of heads that keep everything, over all layers, so that all processes have the same names.
        options: vLLM's options of caches.
    """
    heads = mixer.heads[1]
    if isinstance(mixer, AttentionMixer):
        yield HeadsAttention(
            mixer,
            slice(0, heads),
            mixer.sliding_window,
            cache_config=options,
            prefix=f"{name}.heads",
        )
        return
    n = heads // parts
    groups = mixer.num_key_value_groups
    config = mixer.config
    for first in range(0, heads, n) if mixer.near_heads else ():
        own = slice(first, first + n)
        of_queries = slice(first * groups, (first + n) * groups)
        sinks = {"sinks": mixer.sinks.logits.data[of_queries]} if mixer.sinks else {}
        place = f"{name}.heads_{first}"
        yield HeadsAttention(
            mixer, own, config.sliding_window, cache_config=options, prefix=place, **sinks
        )
    yield from full_attentions(mixer, n, numbers, options)


def full_attentions(
    mixer, blocks: int, numbers: Iterator[int], options: CacheConfig
) -> Iterator[HeadsAttention]:
    """vLLM's attention for each head of a mixer that keeps everything, with pages of so many blocks of tokens."""
    for h in mixer.full_heads:
        window = mixer.config.full_attention_window
        place = f"model.full_heads.{next(numbers)}"
        yield HeadsAttention(
            mixer,
            slice(h, h + 1),
            window,
            blocks,
            cache_config=options,
            prefix=place,
        )


@support_torch_compile
class AttentionForVLLM(ModelForVLLM, SupportsLoRA):
    """A model that keeps nothing but keys and values: all that vLLM can do with a Llama, it can do with this."""


@support_torch_compile
class MemoryForVLLM(
    ModelForVLLM, HasInnerState, IsHybrid, SupportsLoRA, SupportsMambaPrefixCaching
):
    """Any language model of this package, pure or hybrid, in vLLM."""

    @classmethod
    def get_mamba_state_shape_from_config(
        cls, vllm_config: VllmConfig
    ) -> tuple[tuple[int, ...], ...]:
        """Shape of the page of each memory layer."""
        return ((cls._shelves(vllm_config)[0].size,),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Dtype of the page of each memory layer."""
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        """How vLLM copies the page of each memory layer: whole."""
        return (get_temporal_copy_spec,)
