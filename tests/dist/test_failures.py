"""Ranks that fail, differ or die: every rank ends with an error that names the culprit, in time."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar import hint
from autopar.errors import (
    AutoparError,
    BatchError,
    CaptureError,
    ClusterError,
    RuntimeFailure,
)
from autopar.runtime import groups
from autopar.runtime.executor import ParallelModule
from autopar.runtime.groups import open_session
from tests.autopar.runtime.programs import batch, parallel_linear
from tests.dist.pool import Pool, run_torchrun
from tests.oracles.models import mlp


def agreements() -> list[str]:
    session = open_session("cpu", 2)
    messages = []

    def caught(function: Any, kind: type[Exception]) -> None:
        with pytest.raises(kind) as found:
            function()
        messages.append(str(found.value))

    session.agree("capture")
    failed = CaptureError("cannot capture 'x'") if session.rank == 1 else None
    caught(lambda: session.agree("capture", failed), CaptureError)
    other = ValueError("odd") if session.rank == 0 else None
    caught(lambda: session.agree("plan", other), (RuntimeFailure, ValueError))  # type: ignore[arg-type]
    session.agree_equal("plans", "same")
    caught(lambda: session.agree_equal("plans", f"digest{session.rank}"), RuntimeFailure)
    assert session.broadcast_text("plan" if session.rank == 0 else None) == "plan"
    caught(lambda: open_session("cpu", 8), ClusterError)
    return messages


def test_one_rank_s_error_is_raised_by_all(pool: Any) -> None:
    first, second = pool(2).run(agreements)
    assert first[0] == "cannot capture 'x' (on rank 1)"
    assert second[0] == "cannot capture 'x'"
    assert first[1] == "odd"
    assert second[1] == "cannot finish plan: rank 0 failed: ValueError: odd"
    assert "rank 0 has digest0, rank 1 has digest1" in first[2]
    assert "8 ranks: 2 processes are running" in first[3]


def alike() -> None:
    parallel = parallel_linear((2,))
    for _ in range(2):
        with pytest.raises(BatchError):
            parallel({"x": object()})
    parallel(batch()).backward()


def test_an_error_on_all_ranks_leaves_the_groups_usable(pool: Any) -> None:
    start = time.monotonic()
    pool(2).run(alike)
    assert time.monotonic() - start < groups.SETTLE_S


def _failing_on_rank_1(parallel: ParallelModule) -> None:
    step = parallel._last_step("test")
    instructions = step.source.program.instructions
    (module,) = step.modules
    node = next(n for n in module.graph.nodes if n.name == instructions[1].name)

    def broken(*args: Any) -> None:
        raise IndexError("index out of range")

    if dist.get_rank() == 1:
        node.target = broken
        module.recompile()
        step._call = module.forward


def lingering() -> tuple[str, float]:
    groups.SETTLE_S = 2.0
    parallel = parallel_linear((2,))
    parallel(batch()).backward()
    _failing_on_rank_1(parallel)
    start = time.monotonic()
    with pytest.raises(RuntimeFailure) as caught:
        parallel(batch())
    seconds = time.monotonic() - start
    with pytest.raises(RuntimeFailure, match="start the processes again"):
        parallel(batch())
    return str(caught.value), seconds


@pytest.fixture
def fresh_pool() -> Any:
    """A pool of its own: what runs in it breaks it."""
    made = Pool(2)
    yield made
    made.close()


def test_a_rank_that_fails_and_lives_on_ends_the_others(fresh_pool: Pool) -> None:
    (first, seconds), (second, _) = fresh_pool.run(lingering)
    assert "rank 1 failed in aten.mul.Tensor" in first
    assert "IndexError: index out of range" in first
    assert "cannot run aten.mul.Tensor" in second
    assert seconds < groups.SETTLE_S


def dying() -> tuple[str, float]:
    parallel = parallel_linear((2,))
    parallel(batch()).backward()
    if dist.get_rank() == 1:
        os._exit(3)
    start = time.monotonic()
    with pytest.raises(RuntimeFailure) as caught:
        parallel(batch())
    return str(caught.value), time.monotonic() - start


def test_a_rank_that_dies_is_named(fresh_pool: Pool) -> None:
    (ok, (message, seconds), _), (died, _, _) = fresh_pool.outcomes(dying)
    assert ok
    assert not died
    assert "rank 1 gave no sign of life" in message
    assert "autopar.all_reduce" in message
    assert seconds < groups.NAMING_S


def dying_in_a_phase() -> str:
    session = open_session("cpu", 2)
    if dist.get_rank() == 1:
        os._exit(3)
    with pytest.raises(RuntimeFailure) as caught:
        session.agree("capture")
    return str(caught.value)


def test_a_rank_that_dies_in_a_phase_is_named(fresh_pool: Pool) -> None:
    (ok, message, _), _ = fresh_pool.outcomes(dying_in_a_phase)
    assert ok
    assert "the exchange after capture on rank 0: rank 1 gave no sign of life" in message


def different_batches() -> str:
    groups.SETTLE_S = 2.0
    parallel = parallel_linear((2,))
    parallel(batch()).backward()
    x = batch()["x"]
    with pytest.raises(AutoparError) as caught:
        parallel({"x": x if dist.get_rank() == 0 else x[:3]})
    return f"{type(caught.value).__name__}: {caught.value}"


def test_batches_that_differ_between_ranks_do_not_hang(fresh_pool: Pool) -> None:
    first, second = fresh_pool.run(different_batches)
    assert second.startswith("BatchError: cannot start the compilation of a step on rank 1: rank 0")
    assert first.startswith("RuntimeFailure")
    assert "same global batch" in first


ONE_RANK = """
import os
import torch
from autopar.runtime import groups
from tests.autopar.runtime.programs import batch, parallel_linear
from tests.dist.test_failures import _failing_on_rank_1

torch.set_num_threads(1)
groups.SETTLE_S = 2.0
parallel = parallel_linear((2,))
parallel(batch()).backward()
if {dies} and os.environ["RANK"] == "1":
    os._exit(3)
_failing_on_rank_1(parallel)
parallel(batch())
"""


@pytest.mark.slow
@pytest.mark.parametrize("dies", [pytest.param(True, marks=pytest.mark.large), False])
def test_torchrun_ends_when_a_rank_fails(dies: bool) -> None:
    ended = run_torchrun(ONE_RANK.format(dies=dies), world_size=2, timeout_s=90)
    assert ended.returncode != 0
    assert f"exitcode  : {3 if dies else 1} " in ended.stderr
    # The error is what is said last, by a process that ends by itself.
    for said in ("terminate called", "exitcode  : -6", "unwaited collective"):
        assert said not in ended.stderr


def test_without_torchrun_one_process_is_enough() -> None:
    script = """
from tests.autopar.runtime.programs import batch, parallel_linear
parallel = parallel_linear((1,))
parallel(batch()).backward()
try:
    parallel_linear((2,))
except Exception as error:
    print(type(error).__name__, error)
"""
    import subprocess
    import sys

    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stdout.startswith("ClusterError cannot run on a cluster of 2 ranks"), ended.stderr


def compiled_with(what: str) -> str:
    """Compile and run a model of which rank 1 has another ``what``; the error."""
    rank = dist.get_rank()
    model, batch, loss = mlp()
    cluster, plan = autopar.Cluster.local(2), None
    if what == "weights of the model" and rank == 1:
        torch.nn.init.normal_(model.up.weight)
    if what == "given plans" and rank == 0:
        plan = autopar.plan(model, cluster, batch, loss=loss)
    if what == "cluster" and rank == 1:
        cluster = autopar.Cluster.local(3)
    hints = (hint.degrees(dp=2),) if what == "hints" and rank == 1 else ()
    precision = "bf16" if what == "precisions" and rank == 1 else None
    with pytest.raises(AutoparError) as caught:
        parallel = autopar.compile(
            model, cluster, batch, loss=loss, plan=plan, hints=hints, precision=precision
        )
        parallel({**batch, "y": batch["y"] + rank})
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("what", "remedy"),
    [
        ("weights of the model", "torch.manual_seed"),
        ("global batches", "parallel.shard"),
        ("given plans", "hints"),
        ("cluster", "start 3"),
        ("hints", "rank 1 has hint.degrees(dp=2)"),
        ("precisions", "give every rank the same"),
    ],
)
def test_what_differs_between_ranks_is_refused(pool: Any, what: str, remedy: str) -> None:
    for message in pool(2).run(compiled_with, what):
        assert what in message
        assert remedy in message


def parts_of_a_batch() -> float:
    """A first step for which one rank passes the whole batch, the other its part."""
    model, batch, loss = mlp()
    hints = (hint.degrees(dp=2, tp=1),)
    parallel = autopar.compile(model, autopar.Cluster.local(2), batch, loss=loss, hints=hints)
    if dist.get_rank() == 0:
        return float(parallel(batch).detach())
    slices = parallel.batch_slices()
    part = {name: value[slices[name]] for name, value in batch.items()}
    return float(parallel(parallel.shard(part)).detach())


def test_parts_are_not_compared(pool: Any) -> None:
    model, batch, loss = mlp()
    expected = float(loss(model, batch).detach())
    assert pool(2).run(parts_of_a_batch) == pytest.approx([expected] * 2)


def failing_before_a_first_step() -> tuple[str, float]:
    """Rank 0 freezes what it alone has, so only there the first step is refused."""
    groups.SETTLE_S = 2.0
    model, batch, loss = mlp()
    hints = (hint.degrees(pp=2, dp=1, tp=1), hint.microbatches(2))
    parallel = autopar.compile(model, autopar.Cluster.local(2), batch, loss=loss, hints=hints)
    if dist.get_rank() == 0:
        next(parallel.parameters()).requires_grad_(False)
    start = time.monotonic()
    with pytest.raises(AutoparError) as caught:
        parallel(batch)
    return str(caught.value), time.monotonic() - start


def test_a_rank_that_fails_before_a_first_step_ends_the_others(fresh_pool: Pool) -> None:
    (first, _), (second, seconds) = fresh_pool.run(failing_before_a_first_step, timeout_s=60)
    assert first.startswith("cannot freeze parameter")
    assert "rank 0 failed in the check of the batch" in second
    assert "cannot freeze parameter" in second
    assert seconds < groups.NAMING_S
