"""A trained Transformer becomes a memory model.

Its weights by a table of names, then attention transfer, then logits, then the text itself at a longer context.

`convert` does all of it; each stage is also a function of its own.
"""

from hf_memory.conversion.convert import (
    DISTILLATION_SCHEDULE,
    NO_FINE_TUNING,
    TRANSFER_SCHEDULE,
    Conversion,
    convert,
)
from hf_memory.conversion.data import TokenWindows, read_tokens
from hf_memory.conversion.fine_tuning import FINE_TUNING, FINE_TUNING_SCHEDULE, fine_tune
from hf_memory.conversion.other_libraries import import_mixer, import_model
from hf_memory.conversion.placement import (
    KEEP_WORDS,
    PLACEMENT_HEADER,
    LayerScore,
    kept_layers,
    placement_table,
    rank_layers,
)
from hf_memory.conversion.plan import plan, plan_fine_tuning
from hf_memory.conversion.report import ModelResult, Results, measure, new_folder, recipe, write_report
from hf_memory.conversion.sharding import processes
from hf_memory.conversion.stages import (
    Schedule,
    attention_transfer,
    check_cross_entropy,
    check_training,
    distill,
    train,
)
from hf_memory.conversion.students import make_student
from hf_memory.conversion.teacher_logits import TOP_K, distill_from_logits, save_logits
from hf_memory.conversion.teachers import TEACHERS, Teacher, check_bits, load_quantized
from hf_memory.conversion.weights import CarriedWeights, carry_over

__all__ = [
    "DISTILLATION_SCHEDULE",
    "FINE_TUNING",
    "FINE_TUNING_SCHEDULE",
    "KEEP_WORDS",
    "NO_FINE_TUNING",
    "PLACEMENT_HEADER",
    "TEACHERS",
    "TOP_K",
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
    "check_bits",
    "check_cross_entropy",
    "check_training",
    "convert",
    "distill",
    "distill_from_logits",
    "fine_tune",
    "import_mixer",
    "import_model",
    "kept_layers",
    "load_quantized",
    "make_student",
    "measure",
    "new_folder",
    "placement_table",
    "plan",
    "plan_fine_tuning",
    "processes",
    "rank_layers",
    "read_tokens",
    "recipe",
    "save_logits",
    "train",
    "write_report",
]
