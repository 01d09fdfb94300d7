"""The families. Importing this package registers each with transformers' Auto classes.

Tests, conversion and the Hub code loop over FAMILIES, which has an entry with the classes of each family.
"""

from hf_memory.mixers.pasts.policy import register_eviction
from hf_memory.modeling import (
    delta_net,
    deltaformer,
    gated_linear_attention,
    linear_transformer,
    memory_mosaic,
    rwkv7,
    titans,
    transformer,
)
from hf_memory.modeling.gate_registration import register_gate
from hf_memory.modeling.registration import (
    AUTO_CLASSES,
    IMPORTED,
    Family,
    name_the_import,
    register,
)

__all__ = ["AUTO_CLASSES", "FAMILIES", "Family", "register_eviction", "register_gate"]

FAMILIES = (
    Family.of(linear_transformer, "LinearTransformer"),
    Family.of(gated_linear_attention, "GatedLinearAttention"),
    Family.of(delta_net, "DeltaNet"),
    Family.of(deltaformer, "DeltaFormer", growth="token"),
    Family.of(memory_mosaic, "MemoryMosaic", growth="token", is_student=False),
    Family.of(rwkv7, "Rwkv7", is_student=False),
    Family.of(titans, "Titans"),
    Family.of(transformer, "MemoryTransformer", growth="token"),
)

for family in FAMILIES:
    register(family)
for model_type in IMPORTED:
    name_the_import(model_type)
