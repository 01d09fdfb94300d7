"""Export to architectures that inference engines have: the same function, checked by loading the result."""

from hf_memory.export.exporting import Export, export_model
from hf_memory.export.target import Target
from hf_memory.export.targets import TARGETS, NotExportable, find_target

__all__ = ["TARGETS", "Export", "NotExportable", "Target", "export_model", "find_target"]
