"""Pipelines whose ranks die or fail: every other rank ends, in time, and says who it was."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import RuntimeFailure
from autopar.runtime import groups
from autopar.runtime.mail import Mail
from tests.dist.pool import Pool
from tests.dist.training import HINTS
from tests.oracles.models import mlp


@pytest.fixture
def fresh_pool() -> Iterator[Pool]:
    """A pool of its own: what runs in it breaks it."""
    made = Pool(2)
    yield made
    made.close()


def pipeline(schedule: str) -> tuple[Any, Any]:
    model, batch, loss = mlp()
    hints = HINTS[f"pp2mb2-{schedule}"]
    parallel = autopar.compile(model, autopar.Cluster.local(2), batch, loss=loss, hints=hints)
    parallel(batch).backward()
    return parallel, batch


def break_backward(parallel: Any, replacement: Any) -> None:
    """Make rank 1 do something else in its first op of a backward."""
    step = parallel._last_step("test")
    backwards = {i.name for i in step.source.program.instructions if i.section.value == "backward"}
    module, node = next(
        (module, node)
        for module in step.modules
        for node in module.graph.nodes
        if node.meta.get("instruction") in backwards and node.op == "call_function"
    )
    node.target = replacement
    module.recompile()
    parts = step._call.__self__
    for body in parts._bodies.values():
        if body.call.__self__ is module:
            object.__setattr__(body, "call", module.forward)


def broken(*args: Any, **kwargs: Any) -> None:
    raise IndexError("index out of range")


def dead(*args: Any, **kwargs: Any) -> None:
    os._exit(3)


def step_with(replacement: Any, schedule: str) -> tuple[str, float]:
    groups.SETTLE_S = 2.0
    parallel, batch = pipeline(schedule)
    if dist.get_rank() == 1:
        break_backward(parallel, replacement)
    start = time.monotonic()
    with pytest.raises(RuntimeFailure) as caught:
        parallel(batch)
    seconds = time.monotonic() - start
    with pytest.raises(RuntimeFailure, match="start the processes again"):
        parallel(batch)
    return str(caught.value), seconds


def failing(schedule: str) -> tuple[str, float]:
    return step_with(broken, schedule)


def dying(schedule: str) -> tuple[str, float]:
    return step_with(dead, schedule)


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.large), "zb-v"])
def test_a_stage_that_fails_mid_schedule_ends_the_others(fresh_pool: Pool, schedule: str) -> None:
    (first, seconds), (second, _) = fresh_pool.run(failing, schedule, timeout_s=60)
    chunk = "chunk 2 on " if schedule == "zb-v" else ""
    assert f"in the backward of {chunk}stage 1 for microbatch 0" in second
    assert "IndexError: index out of range" in second
    assert "rank 1 failed in" in first
    assert "IndexError: index out of range" in first
    assert seconds < groups.NAMING_S


@pytest.mark.parametrize(
    "schedule", ["1f1b", pytest.param("interleaved", marks=pytest.mark.large)]
)
def test_a_stage_that_dies_mid_schedule_is_named(fresh_pool: Pool, schedule: str) -> None:
    (ok, found, _), (died, _, _) = fresh_pool.outcomes(dying, schedule, timeout_s=60)
    assert ok, found
    assert not died
    assert "rank 1 gave no sign of life" in found[0]
    assert re.search(r"stage 0 for microbatch \d, which waits for rank 1 of stage 1,", found[0])
    assert found[1] < groups.NAMING_S


def counted() -> tuple[int, int]:
    """Process groups and threads of this process."""
    threads = Path("/proc/self/task")
    number = len(list(threads.iterdir())) if threads.exists() else 0
    return len(dist.distributed_c10d._world.pg_map), number


def compiled_often() -> list[tuple[int, int]]:
    found = []
    for _ in range(4):
        pipeline("1f1b")
        gc.collect()
        found.append(counted())
    return found


def test_compiling_again_makes_no_new_groups(pool: Any) -> None:
    for first, *others in pool(2).run(compiled_often):
        assert set(others) == {first}


def interrupted() -> tuple[list[float], int]:
    """Losses after a step that is stopped while messages are under way, and groups more."""
    parallel, batch = pipeline("1f1b")
    with torch.no_grad():
        expected = float(parallel(batch))
    before, _ = counted()

    def stop(mail: Mail, messages: Any, microbatch: int, env: Any) -> None:
        if messages:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Mail, "take", stop)
        parallel(batch)
    with pytest.raises(RuntimeFailure, match="call autopar.compile again on all ranks"):
        parallel(batch)
    again, _ = pipeline("1f1b")
    found = [float(module(batch).detach()) for module in (again, parallel, again)]
    return [loss - expected for loss in found], counted()[0] - before


def test_messages_of_an_interrupted_step_do_not_reach_the_next(fresh_pool: Pool) -> None:
    for differences, more in fresh_pool.run(interrupted, timeout_s=90):
        assert differences == pytest.approx([0.0] * 3, abs=1e-6)
        assert more == 0
