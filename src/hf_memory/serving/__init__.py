"""Saved memories, conversations, and a scheduler that serves many requests from one running batch."""

from hf_memory.serving.conversation import Conversation
from hf_memory.serving.memory_file import load_memory, save_memory
from hf_memory.serving.stream import Request, Step, generate_stream

__all__ = ["Conversation", "Request", "Step", "generate_stream", "load_memory", "save_memory"]
