"""Conversion of a trained Transformer into a memory model.

The student gets the teacher's weights by a table of names. Then come attention transfer, distillation and, if wanted,
fine-tuning on text:

    student = convert(teacher, tokens, Recipe(to="deltanet", options={"gate": "scalar"})).student

`convert_and_save` does the same from files to a folder, with measurements and a card; the command line calls it.
Each stage is also a function of its own.
"""

from hf_memory.conversion.choice import Choice
from hf_memory.conversion.choosing import choose
from hf_memory.conversion.convert import Conversion, convert
from hf_memory.conversion.data import TokenWindows
from hf_memory.conversion.defaults import SERVABLE, SIZES
from hf_memory.conversion.describe import plan_rows
from hf_memory.conversion.goal import GoalNotReached, smallest_student
from hf_memory.conversion.keep import KEEP_WORDS, Keep
from hf_memory.conversion.other_libraries import import_mixer, import_model, rwkv7_config
from hf_memory.conversion.plan import Plan, check_run, check_space, resolve
from hf_memory.conversion.recipe import Recipe, Schedule
from hf_memory.conversion.report import Results, add_results, results_of, write_model, write_report
from hf_memory.conversion.request import Request
from hf_memory.conversion.run import Run
from hf_memory.conversion.saving import Saved, convert_and_save, dry_run
from hf_memory.conversion.shrinking import shrink_cache
from hf_memory.conversion.stages.distillation import distill
from hf_memory.conversion.stages.fine_tuning import FINE_TUNING, fine_tune
from hf_memory.conversion.stages.sharding import processes
from hf_memory.conversion.stages.trainer import train
from hf_memory.conversion.stages.transfer import attention_transfer
from hf_memory.conversion.students import STUDENTS
from hf_memory.conversion.students.heads import HEAD_SCORES
from hf_memory.conversion.students.weights import CarriedWeights, carry_over, shares_weights
from hf_memory.conversion.teachers import TEACHERS, Teacher
from hf_memory.conversion.teachers.gguf import describe_weights, find_gguf
from hf_memory.conversion.teachers.loading import (
    load_config,
    load_quantized,
    load_teacher,
    load_tokenizer,
)
from hf_memory.conversion.untrained import make_student, untrained_student
from hf_memory.files.folders import check_output, new_folder
from hf_memory.files.text import Text, TextFacts
from hf_memory.files.tokenised import read_tokens

__all__ = [
    "FINE_TUNING",
    "HEAD_SCORES",
    "KEEP_WORDS",
    "SERVABLE",
    "SIZES",
    "STUDENTS",
    "TEACHERS",
    "CarriedWeights",
    "Choice",
    "Conversion",
    "GoalNotReached",
    "Keep",
    "Plan",
    "Recipe",
    "Request",
    "Results",
    "Run",
    "Saved",
    "Schedule",
    "Teacher",
    "Text",
    "TextFacts",
    "TokenWindows",
    "add_results",
    "attention_transfer",
    "carry_over",
    "check_output",
    "check_run",
    "check_space",
    "choose",
    "convert",
    "convert_and_save",
    "describe_weights",
    "distill",
    "dry_run",
    "find_gguf",
    "fine_tune",
    "import_mixer",
    "import_model",
    "load_config",
    "load_quantized",
    "load_teacher",
    "load_tokenizer",
    "make_student",
    "new_folder",
    "plan_rows",
    "processes",
    "read_tokens",
    "resolve",
    "results_of",
    "rwkv7_config",
    "shares_weights",
    "shrink_cache",
    "smallest_student",
    "train",
    "untrained_student",
    "write_model",
    "write_report",
]
