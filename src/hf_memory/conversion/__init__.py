"""A trained Transformer becomes a memory model: its weights by a table of names, then attention transfer, then logits.

`convert` does all of it; each stage is also a function of its own.
"""

from hf_memory.conversion.convert import DISTILLATION_SCHEDULE, TRANSFER_SCHEDULE, Conversion, convert
from hf_memory.conversion.data import TokenWindows, read_tokens
from hf_memory.conversion.other_libraries import import_mixer, import_model
from hf_memory.conversion.placement import (
    KEEP_WORDS,
    PLACEMENT_HEADER,
    LayerScore,
    kept_layers,
    placement_table,
    rank_layers,
)
from hf_memory.conversion.plan import plan
from hf_memory.conversion.report import ModelResult, Results, measure, new_folder, recipe, write_report
from hf_memory.conversion.stages import Schedule, attention_transfer, distill, train
from hf_memory.conversion.students import make_student
from hf_memory.conversion.teachers import TEACHERS, Teacher
from hf_memory.conversion.weights import CarriedWeights, carry_over

__all__ = [
    "DISTILLATION_SCHEDULE",
    "KEEP_WORDS",
    "PLACEMENT_HEADER",
    "TEACHERS",
    "TRANSFER_SCHEDULE",
    "CarriedWeights",
    "Conversion",
    "LayerScore",
    "ModelResult",
    "Results",
    "Schedule",
    "Teacher",
    "TokenWindows",
    "attention_transfer",
    "carry_over",
    "convert",
    "distill",
    "import_mixer",
    "import_model",
    "kept_layers",
    "make_student",
    "measure",
    "new_folder",
    "placement_table",
    "plan",
    "rank_layers",
    "read_tokens",
    "recipe",
    "train",
    "write_report",
]
