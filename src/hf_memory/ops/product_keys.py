"""Product keys: find the best of n^2 slots by comparing with 2 n half keys. https://arxiv.org/abs/1907.05242."""

import torch
from torch import Tensor


def best_slots(q: Tensor, keys: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The slots with the largest scores. The key of slot i n + j has the i-th first half and the j-th second half.

        score_ij = q_1 . keys_1i + q_2 . keys_2j,   q = [q_1, q_2]

    The search is exact: both halves of one of the k best slots are among the k best halves, or k slots would be better.

    Args:
        q: queries [..., H, K].
        keys: half keys of each kind and head [2, H, n, K / 2].
        top_k: number of slots, at most n.

    Returns:
        Scores [..., H, top_k], the largest first, and slots [..., H, top_k].
    """
    n = keys.shape[2]
    if not 1 <= top_k <= n:
        raise ValueError(f"top_k must be from 1 to num_product_keys={n}, got {top_k}")
    scores, halves = torch.einsum("...hsk,shnk->...hsn", q.unflatten(-1, (2, -1)), keys).topk(top_k)
    first, second = scores.unbind(-2)
    i, j = halves.unbind(-2)
    scores, pairs = (first[..., :, None] + second[..., None, :]).flatten(-2).topk(top_k)
    return scores, i.gather(-1, pairs // top_k) * n + j.gather(-1, pairs % top_k)
