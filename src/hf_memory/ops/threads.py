"""Threads of operations on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which operations of this thread run on one core.

    For loops over small operations: to wake a second core for each of them takes longer than its help saves, most of
    all where threads that wait sleep (OMP_WAIT_POLICY=PASSIVE). While a graph is traced nothing is changed.
    """
    if torch.compiler.is_compiling():
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
