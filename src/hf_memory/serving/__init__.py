"""Saved memories, and conversations."""

from hf_memory.serving.conversation import Conversation
from hf_memory.serving.memory_file import load_memory, save_memory

__all__ = ["Conversation", "load_memory", "save_memory"]
