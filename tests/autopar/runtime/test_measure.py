"""Live bytes of tensors, and steps that leave nothing behind."""

from __future__ import annotations

from typing import Any

import torch

from autopar.runtime.measure import LiveBytes, StepTimes, time_steps
from tests.autopar.runtime.programs import batch, parallel_linear


def test_a_storage_lives_as_long_as_its_views() -> None:
    before = torch.ones(100)
    with LiveBytes() as measured:
        made = before + 1
        assert measured.live_bytes == 400
        view = made.view(10, 10)[2:]
        del made
        assert measured.live_bytes == 400
        view = view * 2
        assert measured.live_bytes == 320
        before.add_(1)
        del view
    assert measured.live_bytes == 0
    assert measured.peak_bytes == 720


def test_the_median_is_the_middle() -> None:
    assert StepTimes((3.0, 1.0, 2.0)).median_s == 2.0
    assert StepTimes((4.0, 1.0, 2.0, 3.0)).median_s == 2.5
    assert len(time_steps(lambda: None, repeats=5).seconds) == 5


def growth() -> list[int]:
    parallel = parallel_linear((2,), zero=True)
    optimizer = torch.optim.AdamW(parallel.parameters())
    live = []
    kept = []
    with LiveBytes() as measured:
        for _ in range(4):
            loss = parallel(batch())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(loss)  # a loss that is kept must not keep the step
            live.append(measured.live_bytes - 4 * len(kept))
    return live


def test_memory_does_not_grow_with_steps(pool: Any) -> None:
    for live in pool(2).run(growth):
        assert live[1] == live[2] == live[3]
