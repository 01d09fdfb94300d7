"""Titans: a memory that learns at test time, alone or with attention over a window. https://arxiv.org/abs/2501.00663."""

from typing import NamedTuple

from hf_memory.mixers.attention_and_memory import MemoryAsGateMixer, MemoryAsLayerMixer
from hf_memory.mixers.memory_as_context import MemoryAsContextMixer
from hf_memory.mixers.neural_memory import NeuralMemoryMixer
from hf_memory.mixers.test_time_training import TTTMixer
from hf_memory.mixers.variants.atlas import AtlasMixer
from hf_memory.mixers.variants.large_chunk import LargeChunkMixer
from hf_memory.mixers.variants.miras import MirasMixer
from hf_memory.modeling import base
from hf_memory.modeling.checks import check, check_values, check_word, strict
from hf_memory.modeling.memory_heads import MemoryHeadsConfig
from hf_memory.ops.neural_memory import Learning

VARIANTS = {  # mixers with attention; "lmm" is the memory alone
    "mac": MemoryAsContextMixer,
    "mag": MemoryAsGateMixer,
    "mal": MemoryAsLayerMixer,
}
TITANS = {
    "variant": "mag",
    "memory_gate": "multiply",
    "memory_depth": 2,
    "memory_expansion": 2,
    "memory_activation": "silu",
    "memory_max_lr": 1.0,
    "memory_rope": False,
    "linear_conv_kernel_dim": 4,
    "output_gate": "silu",
    "num_persistent_tokens": 4,
}
TTT = {
    "variant": "lmm",
    "memory_gate": "multiply",
    "memory_expansion": 4,
    "memory_activation": "gelu_tanh",
    "memory_residual": True,
    "memory_chunk_size": 16,
    "memory_rope": True,
    "linear_conv_kernel_dim": 0,
    "output_gate": "none",
    "num_persistent_tokens": 0,
}
MIRAS = {
    **TITANS,
    "variant": "lmm",
    "memory_expansion": 4,
    "memory_activation": "gelu",
    "memory_residual": True,
    "num_persistent_tokens": 0,
}
LACT = {
    **TITANS,
    "memory_gate": "add",
    "memory_expansion": 1,
    "memory_residual": False,
    "memory_chunk_size": 2048,
    "sliding_window": 2048,
    "linear_conv_kernel_dim": 0,
    "output_gate": "none",
    "num_persistent_tokens": 0,
}


class MemoryRule(NamedTuple):
    """How a memory learns."""

    mixer: type[NeuralMemoryMixer]  # which has the gates and the steps
    defaults: dict  # of fields that a config does not set
    learning: Learning = {}  # loss, retention, and what weights decay to


RULES = {  # by `memory_rule`
    "titans": MemoryRule(NeuralMemoryMixer, TITANS),
    "ttt_linear": MemoryRule(
        TTTMixer, {**TTT, "memory_depth": 1, "memory_max_lr": 1.0}, {"forget_to": "anchor"}
    ),
    "ttt_mlp": MemoryRule(
        TTTMixer, {**TTT, "memory_depth": 2, "memory_max_lr": 0.1}, {"forget_to": "anchor"}
    ),
    "moneta": MemoryRule(
        MirasMixer, MIRAS, {"loss": "cubed", "retention": "norm", "forget_to": "zero"}
    ),
    "yaad": MemoryRule(MirasMixer, MIRAS, {"loss": "huber", "forget_to": "zero"}),
    "memora": MemoryRule(MirasMixer, MIRAS, {"retention": "softmax", "forget_to": "zero"}),
    "atlas": MemoryRule(AtlasMixer, {**MIRAS, "memory_residual": False}, {"forget_to": "zero"}),
    "lact": MemoryRule(LargeChunkMixer, LACT),
}


@strict
class TitansConfig(MemoryHeadsConfig):
    """Config of Titans and of other memories that learn at test time.

    Args:
        memory_rule (`str`, defaults to `"titans"`): how the memory learns: `"titans"`; `"ttt_linear"` or `"ttt_mlp"`
            (https://arxiv.org/abs/2407.04620); `"moneta"`, `"yaad"` or `"memora"` (https://arxiv.org/abs/2504.13173);
            `"atlas"` (https://arxiv.org/abs/2505.23735); or `"lact"` (https://arxiv.org/abs/2505.23884), whose chunks
            and window have 2,048 tokens by default. Moneta, Memora and ATLAS compute the memory's weights after every
            token, which makes them slower. Options that are not given follow the paper of the rule; the defaults
            below are those of `"titans"`.
        variant (`str`, defaults to `"mag"`): how the memory works together with attention: `"lmm"` (the memory alone),
            `"mac"` (what the memory recalls is context for attention within segments), `"mag"` (the memory beside
            attention over `sliding_window` tokens) or `"mal"` (the memory before such attention).
        memory_depth (`int`, defaults to 2): number of matrices of the memory.
        memory_expansion (`int`, defaults to 2): width of the memory between its matrices, in multiples of a head's
            channels.
        memory_activation (`str`, defaults to `"silu"`): activation between the matrices of the memory: `"silu"`,
            `"gelu"` or `"gelu_tanh"`.
        memory_residual (`bool`, *optional*): whether the memory adds its input to its output; default: yes if it has
            more than one matrix, and keys and values have the same number of channels.
        memory_rope (`bool`, defaults to `False`): rotate queries and keys of the memory by position. The TTT rules
            rotate them by default, by the position within `memory_chunk_size` tokens.
        memory_chunk_size (`int`, *optional*): tokens whose gradients are taken at the same weights. It is part of the
            function: a model must be used with the one it was trained with. Default: 1 for one matrix, else 16.
        memory_unit_values (`bool`, defaults to `False`): normalise values to unit length, as queries and keys are. With
            long values the inner gradient steps of a memory of more than one matrix are too large, and it may diverge.
            Students of a Transformer, whose values can have any length, set this option.
        memory_window (`int`, defaults to 8): number of last tokens that the memory of ATLAS learns at each token.
        memory_max_lr (`float`, defaults to 1.0): largest inner learning rate of a chunk, reached if its gate is open;
            with ATLAS and LaCT the learning rate of Muon's steps.
        memory_max_grad_norm (`float`, *optional*): largest norm of a token's inner gradient; larger ones are clipped,
            so that the memory's steps cannot grow from chunk to chunk until they overflow. 0: no clipping. Default: for
            Titans' memory with more than two matrices the square root of a head's value channels, which is an error of
            one in each channel, else 0. Kernels do not support it yet.
        memory_gate (`str`, defaults to `"multiply"`): how MAG combines memory and attention: `"multiply"` or `"add"`,
            which is the default of `"lact"`.
        segment_length (`int`, defaults to 128): tokens of each segment of MAC.
        num_persistent_tokens (`int`, defaults to 4): number of learned tokens before every sequence.
        sliding_window (`int`, *optional*): tokens that attention sees, the present one included; default: 512 for MAG
            and MAL.
    """

    model_type = "hf_memory_titans"

    memory_rule: str = "titans"
    variant: str | None = None
    memory_depth: int | None = None
    memory_expansion: int | None = None
    memory_activation: str | None = None
    memory_residual: bool | None = None
    memory_rope: bool | None = None
    memory_chunk_size: int | None = None
    memory_unit_values: bool = False
    memory_window: int = 8
    memory_max_lr: float | None = None
    memory_max_grad_norm: float | None = None
    memory_gate: str | None = None
    segment_length: int = 128
    num_persistent_tokens: int | None = None

    @property
    def mixers(self) -> dict:
        """The mixer class of each layer type."""
        memories = {"lmm": self.rule.mixer, **VARIANTS}
        return {**MemoryHeadsConfig.mixers, "memory": memories[self.variant]}

    @property
    def rule(self) -> MemoryRule:
        """How the memory learns."""
        return RULES[self.memory_rule]

    def set_defaults(self) -> None:
        """See `MemoryConfig.set_defaults`."""
        super().set_defaults()
        self.fill(**RULES.get(self.memory_rule, RULES["titans"]).defaults)
        self.fill(linear_key_head_dim=self.head_dim, linear_value_head_dim=self.head_dim)
        depth = self.memory_depth
        K = self.linear_key_head_dim
        V = self.linear_value_head_dim
        is_deep = self.memory_rule == "titans" and depth > 2
        self.fill(
            sliding_window=512 if self.variant in ("mag", "mal") else None,
            memory_residual=depth > 1 and K == V,
            memory_chunk_size=1 if depth == 1 else 16,
            memory_max_grad_norm=V**0.5 if is_deep else 0.0,
        )

    def validate_architecture(self):
        """Check the options of Titans, too."""
        rule = self.memory_rule
        K = self.linear_key_head_dim
        V = self.linear_value_head_dim
        check_word("memory_rule", rule, tuple(RULES))
        check_word(
            "variant", self.variant, ("lmm", "mag", "mal", *(("mac",) if rule == "titans" else ()))
        )
        check_word("memory_gate", self.memory_gate, ("multiply", "add"))
        check_word("memory_activation", self.memory_activation, ("silu", "gelu", "gelu_tanh"))
        super().validate_architecture()
        is_square = f"False unless linear_key_head_dim={K} equals linear_value_head_dim={V}"
        check(
            not self.memory_residual or K == V, "memory_residual", is_square, self.memory_residual
        )
        limit = self.memory_max_grad_norm
        clip = tuple(x for x in RULES if RULES[x].mixer.clips_gradients)
        check(
            not limit or rule in clip,
            "memory_max_grad_norm",
            f"0 unless memory_rule is in {clip}",
            limit,
        )
        self._check_unused()

    def _check_unused(self) -> None:
        """Refuse what the rule or the variant would ignore, unless it is the default."""
        defaults = {"memory_residual": False, **self.rule.defaults}
        if self.memory_rule == "atlas":
            check_values(self, "with memory_rule='atlas'", memory_residual=False)
        else:
            check_values(self, "unless memory_rule is 'atlas'", memory_window=8)
        if self.variant != "mac":
            check_values(self, "unless variant is 'mac'", segment_length=128)
        if self.variant != "mag":
            gate = defaults["memory_gate"]
            check_values(self, "unless variant is 'mag'", memory_gate=gate)
        if self.memory_rule == "lact":
            names = ("memory_depth", "memory_activation", "memory_residual")
            own = {name: defaults[name] for name in names}
            check_values(self, "with memory_rule='lact', whose memory is of one kind", **own)
        elif self.memory_depth == 1:
            names = ("memory_expansion", "memory_activation")
            own = {name: defaults[name] for name in names}
            check_values(self, "with memory_depth=1, which has no inner width", **own)


class TitansModel(base.MemoryModel):
    """Titans without a head."""


class TitansForCausalLM(base.MemoryForCausalLM):
    """Titans with a head that predicts the next token."""

    model_class = TitansModel


class TitansForSequenceClassification(base.MemoryForSequenceClassification):
    """Titans with a head that classifies sequences."""


class TitansForTokenClassification(base.MemoryForTokenClassification):
    """Titans with a head that classifies tokens."""
