"""What C code prints is thrown away, what Python prints is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRINTS = """
import ctypes
from autopar.search.mute import muted

library = ctypes.CDLL(None)
with muted():
    library.printf(b"unheard\\n")
    print("said", flush=True)
    with muted():
        library.puts(b"unheard")
library.printf(b"heard\\n")
library.fflush(None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_c_code_is_muted_alone() -> None:
    ended = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("said\nheard\n", "")
