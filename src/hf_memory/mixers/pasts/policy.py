"""Which tokens stay beside a window: eviction policies by name, those of this package and those of users.

A policy is one function of a block of tokens and of what its queries saw; see `hf_memory.ops.kv_eviction.Block`.
"""

from hf_memory.ops.kv_eviction import (
    change_of_output,
    random_choice,
    received_attention,
)
from hf_memory.ops.kv_eviction.policies import EvictionPolicy

POLICIES: dict[str, EvictionPolicy] = {
    "received_attention": received_attention,
    "change_of_output": change_of_output,
    "random": random_choice,
}


def register_eviction(name: str, policy: EvictionPolicy) -> None:
    """Let `eviction=name` in a config choose which tokens its layers keep.

    A saved model names its policy, not its code, so the file that registers a policy must be imported before such a
    model is loaded.

    Args:
        name: the name of the policy, which no other policy has.
        policy: a function of a `Block`, which returns what each entry is worth, a tensor [B, H, n], in any dtype. Those
            that are worth most stay; which do is open where it is NaN. It gets no gradients and changes nothing. What
            it says counts once for each block, whatever calls its tokens came in, but it may be asked about a block
            that is not complete yet.

    Raises:
        ValueError: if the name is taken, or `policy` is no function.
    """
    if not callable(policy):
        raise ValueError(f"policy must be a function of a Block, got {policy!r}")
    known = POLICIES.get(name, policy)
    if getattr(known, "__qualname__", known) != getattr(policy, "__qualname__", policy):
        raise ValueError(f"name must be one that no eviction policy has, got {name!r}")
    POLICIES[name] = policy
