"""What part of the output of a layer's mixer its memory gives, where it stands beside attention."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_memory.mixers.windowed import WindowedMixer
from hf_memory.modeling.any_model import in_eval_mode

Seen = dict[WindowedMixer, tuple[tuple, dict[str, Any], Tensor]]  # arguments and output


def mixers_with_memory(model: PreTrainedModel) -> list[WindowedMixer]:
    """The mixers of a model that have slots or kept tokens beside a window."""
    return [
        x
        for x in model.modules()
        if isinstance(x, WindowedMixer) and (x.far is not None or x.keeps_tokens)
    ]


@in_eval_mode
@torch.no_grad()
def memory_shares(model: PreTrainedModel, input_ids: Tensor) -> dict[int, float]:
    """|o - w| / |o| by layer, over the second half of tokens [B, T]: o is what its mixer gives, w the same without the
    memory, for the same input. Layers without a memory beside attention are left out."""
    seen: Seen = {}
    keep = lambda mixer, args, given, output: seen.update({mixer: (args, given, output[0])})  # noqa: E731
    with ExitStack() as hooks:
        for mixer in mixers_with_memory(model):
            hooks.enter_context(mixer.register_forward_hook(keep, with_kwargs=True))
        model(input_ids.to(model.device), use_cache=False, logits_to_keep=1)
    half = input_ids.shape[1] // 2
    shares = {}
    for mixer, (args, given, output) in seen.items():
        with mixer.without_memory():
            rest, _ = mixer(*args, **given)
        o, change = (x[:, half:].float().norm() for x in (output, output - rest))
        shares[mixer.layer_idx] = (change / o).item()
    return shares
