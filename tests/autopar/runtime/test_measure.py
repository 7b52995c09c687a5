"""Live bytes of tensors, and steps that leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable
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
            expected = live[0] if live else 0
            live.append(settled(lambda: measured.live_bytes - 4 * len(kept), expected))
    return live


def settled(read: Callable[[], int], expected: int) -> int:
    """What is read once it is no more than expected, or has had a second to fall.

    A gloo thread lets go of what it sent a moment after the collective is waited for.
    """
    until = time.monotonic() + 1
    while (value := read()) > expected and time.monotonic() < until:
        time.sleep(0.01)
    return value


def test_memory_does_not_grow_with_steps(pool: Any) -> None:
    for live in pool(2).run(growth):
        assert live[0] > 0
        assert all(later == live[0] for later in live[1:])
