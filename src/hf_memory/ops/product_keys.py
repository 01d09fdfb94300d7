"""Product keys: the best of n^2 slots found by looking at 2 n half keys. https://arxiv.org/abs/1907.05242."""

import torch
from torch import Tensor


def best_slots(q: Tensor, keys: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The slots with the largest scores, where slot i n + j has the first half of its key from i, the second from j.

        score_ij = q_1 . keys_1i + q_2 . keys_2j,   q = [q_1, q_2]

    Exact: whoever is among the k best slots has each half among the k best of its kind, else k slots would be better.

    Args:
        q: queries [..., H, K].
        keys: half keys of each kind and head [2, H, n, K / 2].
        top_k: how many slots, at most n.

    Returns:
        Scores [..., H, top_k], the largest first, and slots [..., H, top_k].
    """
    n = keys.shape[2]
    if not 1 <= top_k <= n:
        raise ValueError(f"top_k must be from 1 to the {n} half keys of a kind, got {top_k}")
    scores, halves = torch.einsum("...hsk,shnk->...hsn", q.unflatten(-1, (2, -1)), keys).topk(top_k)
    (first, second), (i, j) = scores.unbind(-2), halves.unbind(-2)
    scores, pairs = (first[..., :, None] + second[..., None, :]).flatten(-2).topk(top_k)
    return scores, i.gather(-1, pairs // top_k) * n + j.gather(-1, pairs % top_k)
