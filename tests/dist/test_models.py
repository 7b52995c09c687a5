"""Real models on real processes: every layout trains as one process does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.training import HINTS, assert_same_training, one_process, parallel_run
from tests.oracles.models import MODELS

DEFAULT = {
    ("mlp", 1, "auto"),
    ("mlp", 4, "auto"),
    ("mlp", 2, "pp2mb3-gpipe"),
    ("llama", 2, "auto"),
    ("llama", 2, "pp2mb2-1f1b"),
    ("llama", 4, "dp2tp2"),
    ("gpt2", 2, "tp2"),
    ("gpt2", 2, "pp2mb2-interleaved"),
    ("gpt2", 2, "pp2mb3-zb-v"),
    ("gpt2", 4, "pp2dp2mb2-zb-h1"),
    ("bert", 2, "zero3x2"),
    ("bert", 2, "pp2mb1-gpipe"),
}
"""What every run tries; the others are large."""

BY_RANKS = {1: ("auto",), 2: (), 4: ()}
BY_RANKS[2] = ("auto", "dp2", "tp2", "zero3x2", "dp2mb2")
BY_RANKS[2] += tuple(name for name in HINTS if name.startswith("pp2mb"))
BY_RANKS[4] = ("auto", "dp4", "tp4", "dp2tp2", "zero3x4", "zero3x2tp2")
BY_RANKS[4] += tuple(name for name in HINTS if name.startswith(("pp2dp2", "pp2tp2")))


def cases() -> list[Any]:
    return [
        pytest.param(
            model,
            ranks,
            layout,
            marks=() if (model, ranks, layout) in DEFAULT else pytest.mark.large,
        )
        for ranks, layouts in BY_RANKS.items()
        for model in MODELS
        for layout in layouts
    ]


@pytest.mark.parametrize(("model", "ranks", "layout"), cases())
def test_trains_as_one_process_does(pool: Any, model: str, ranks: int, layout: str) -> None:
    samples = 5 if "mb3" in layout else None
    found = pool(ranks).run(parallel_run, model, ranks, HINTS[layout], samples)
    if layout.startswith("pp2"):
        assert all(rank["stages"] == 2 for rank in found)
        assert f"mb{found[0]['microbatches']}-" in layout
    assert_same_training(found, one_process(model, samples))


def test_what_is_made_of_weights_alone_is_waited_for(pool: Any) -> None:
    """It runs in steps between messages: one begins a collective, another waits for it."""
    found = pool(4).run(parallel_run, "penalised", 4, HINTS["pp2tp2mb2-1f1b"])
    assert_same_training(found, one_process("penalised"))


@pytest.mark.parametrize("layout", ["dp2", "zero3x2"])
def test_a_module_under_two_paths_is_trained(pool: Any, layout: str) -> None:
    found = pool(2).run(parallel_run, "twice", 2, HINTS[layout])
    assert_same_training(found, one_process("twice"))
