"""The Linear Transformer's mixer: https://arxiv.org/abs/2006.16236."""

from torch import Tensor

from hf_memory.cache import Spec, State
from hf_memory.layers import RMSNorm
from hf_memory.mixers.base import Context, MemoryMixer, Projected, States
from hf_memory.mixers.feature_map import FeatureMap, num_features
from hf_memory.ops import LinearState, linear_attention


class LinearAttentionMixer(MemoryMixer):
    """Attention whose kernel is a product of features, so that the past fits into one matrix for each head."""

    has_silu = False

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.make_convolutions(0)
        self.feature_map = FeatureMap(config)
        if config.output_norm:
            self.o_norm = RMSNorm(self.value_dim, eps=config.rms_norm_eps)

    @classmethod
    def state_spec(cls, config, layer_idx: int) -> Spec:
        """A matrix for each head, the sum of the keys' features, and for favor their largest exponent."""
        H = config.num_attention_heads
        D = config.head_dim
        F = num_features(config)
        spec = {"memory": State((H, F, D), is_recurrent=True)}
        spec |= {"normalizer": State((H, F))} if config.normalize else {}
        return spec | ({"running_max": State((H,))} if config.feature_map == "favor" else {})

    def mix(self, projected: Projected, context: Context) -> tuple[Tensor, States]:
        """The states are `memory` [N, H, F, D], `normalizer` [N, H, F], and for favor `running_max` [N, H]."""
        q, k, v, _ = self.heads_of(projected, context)
        q, k, g, new_states = self.feature_map(q, k, context)
        past = context.past(LinearState) if self.config.normalize else context.states.get("memory")
        o, state = linear_attention(
            q.to(v.dtype),  # softmax and exp return float32 under autocast
            k.to(v.dtype),
            v,
            g,
            normalize=self.config.normalize,
            in_place=True,
            **context.options(self.config.mixer_backend, past),
        )
        if self.config.output_norm:
            o = self.o_norm(o)
        new_states |= state._asdict() if self.config.normalize else {"memory": state}
        return o.flatten(-2), new_states
