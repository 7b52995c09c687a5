"""The package knows numbers only."""

from __future__ import annotations

import subprocess
import sys


def test_importing_everything_loads_neither_torch_nor_autopar() -> None:
    program = (
        "import sys\n"
        "import cost_models.calibration, cost_models.formulas, cost_models.memory\n"
        "import cost_models.overlap, cost_models.pipeline\n"
        "print(sorted({'torch', 'autopar'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
