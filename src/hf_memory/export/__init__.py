"""Our models as architectures that engines have: the same function under other names, checked by loading it back."""

from hf_memory.export.exporting import Export, export_model
from hf_memory.export.targets import TARGETS, NotExportable, Target, find_target

__all__ = ["TARGETS", "Export", "NotExportable", "Target", "export_model", "find_target"]
