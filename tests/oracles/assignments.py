"""Layer assignments with known optima: ``tests/data/layer_assignment_instances.json``."""

from __future__ import annotations

import json
from pathlib import Path

from autopar.search.assign import Layers

INSTANCES = Path(__file__).parents[1] / "data" / "layer_assignment_instances.json"


def known_assignments() -> list[tuple[Layers, float | None]]:
    """The programs, and the seconds of their optimum; None where nothing fits."""
    return [
        (
            Layers(
                count=given["layers"],
                sizes=tuple(given["memory_mb"]),
                seconds=tuple(given["seconds"]),
                transitions_s=tuple(map(tuple, given["transition_s"])),
                capacity=given["capacity_mb"],
            ),
            None if given["optimum_s"] is None else given["optimum_s"] - given["fixed_s"],
        )
        for given in json.loads(INSTANCES.read_text())
    ]
