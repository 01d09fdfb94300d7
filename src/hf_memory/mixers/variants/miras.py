"""The memories of Miras, with other inner losses and other kinds of retention. https://arxiv.org/abs/2504.13173."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import initialization as init

from hf_memory.layers import upcast
from hf_memory.mixers.base import Context, Projected
from hf_memory.mixers.neural_memory import Gate, NeuralMemoryMixer
from hf_memory.mixers.positions import Positions


class MirasMixer(NeuralMemoryMixer):
    """Moneta, Yaad and Memora, whose memory is f(x; W) = x + LN(gelu(x W_1) W_2).

    With e = f(k_t; W) - v_t, and gradients g_t by the weights W at the start of a chunk:

        Moneta   A_t = a_t A_{t-1} - lr_t g_t,   g_t of sum |e|^3,   W_t = A_t / |A_t|_4^2 of each matrix
        Yaad     W_t = a_t W_{t-1} - lr_t g_t,   g_t of 1/2 |e|^2 where |e| <= delta_t, else of delta_t sum |e_i|
        Memora   W_t = softmax(a_t log W_{t-1} - lr_t g_t),   g_t of 1/2 |e|^2
        o_t = f(q_t; W_t)

    Memora's softmax is over the weights that enter one channel. Since a softmax ignores constants, log W_t can be
    replaced by A_t as in Moneta, and W_t = softmax(A_t) holds for every token, not only for the first one of a chunk.
    tanh(10 e) approximates the sign of e, as the paper suggests. There is one gate for each head; the paper has one for
    each channel. Source: https://arxiv.org/abs/2504.13173, with p = 3 and q = 4.
    """

    gates = {"lr": 0.0, "decay": -6.0}
    has_norm = True
    clips_gradients = False

    def make_gates(self, width: int, heads: int) -> None:
        """The gates of Titans without momentum, Yaad's threshold, and the norm."""
        super().make_gates(width, heads)
        if self.config.rule.learning.get("loss") == "huber":
            self.threshold_proj = Gate(width, heads, 0.0)

    def init_own_parameters(self) -> None:
        """Memora's logarithms must differ from each other, or all weights that enter a channel would be equal."""
        super().init_own_parameters()
        if self.config.rule.learning.get("retention") == "softmax":
            for logarithms in self.initial_weights.parameters():
                init.normal_(logarithms)

    def project(self, hidden_states: Tensor, positions: Positions | None) -> Projected:
        """See `NeuralMemoryMixer.project`; with W x of Yaad's threshold."""
        rows = super().project(hidden_states, positions)
        if self.config.rule.learning.get("loss") == "huber":
            rows["threshold"] = upcast(self.threshold_proj(hidden_states))
        return rows

    def learning(self, projected: Projected, context: Context) -> dict[str, Any]:
        """The gates of each token. A threshold of sqrt(V) means an error of one in each channel."""
        lr = self.inner_rate(projected)
        gates = {"lr": lr, "momentum": None, "decay": self.log_decay(projected)}
        if "threshold" in projected:
            gates["threshold"] = self.value_dim**0.5 * F.softplus(projected["threshold"])
        return gates
