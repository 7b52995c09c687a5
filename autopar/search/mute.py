"""Keeps what a C library prints by itself from the user."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def muted() -> Iterator[None]:
    """Throw away what C code prints meanwhile, as HiGHS does where it repairs a solution.

    The C library's ``stdout`` is another stream until it is over. Python writes to the file
    descriptor itself, so nothing else is lost. Without glibc it does nothing.
    """
    streams = _streams()
    if streams is None:
        yield
        return
    stdout, nowhere = streams
    before, stdout.value = stdout.value, nowhere
    try:
        yield
    finally:
        stdout.value = before


@functools.cache
def _streams() -> tuple[ctypes.c_void_p, int] | None:
    """The variable that holds the C library's ``stdout``, and a stream that goes nowhere."""
    try:
        library = ctypes.CDLL(None)
        stdout = ctypes.c_void_p.in_dll(library, "stdout")
        library.fopen.restype = ctypes.c_void_p
        nowhere = library.fopen(os.fsencode(os.devnull), b"w")
    except (AttributeError, OSError, TypeError, ValueError):
        return None
    return (stdout, nowhere) if nowhere else None
