"""Why no plan fits, in the words of the user."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import (
    AutoparError,
    HintError,
    InfeasibleError,
    SearchTimeoutError,
    UnsupportedError,
)
from autopar.plan.wording import bytes_text
from autopar.planner.hints import Settled
from autopar.planner.lanes import prepare
from autopar.planner.layout import Layout
from autopar.planner.request import Failure, Request
from autopar.search.analysis import Analysis
from autopar.search.build import with_reruns
from autopar.search.intra import least_bytes
from cost_models.cluster import Cluster


def nothing_fits(
    analysis: Analysis, settled: Settled, failures: Sequence[Failure], cluster: Cluster
) -> AutoparError:
    """The error that says how near the meshes came, or that the time ran out."""
    impossible = [f for f in failures if f.contradicts is not None]
    if impossible and all(f.proven and f.least_bytes == math.inf for f in failures):
        return _contradiction(analysis, impossible[0])
    least = min((f.least_bytes for f in failures), default=float("inf"))
    limit = min(settled.usable_bytes(run.device) for run in cluster.devices)
    if not all(f.proven or f.least_bytes < float("inf") for f in failures):
        return SearchTimeoutError(
            f"cannot find a plan within the time limit over {len(failures)} meshes; raise "
            "options.time_limit_s or fix degrees with hint.degrees"
        )
    asked = min((f.host_bytes for f in failures), default=0.0)
    if asked:
        host = min(run.device.host_memory_bytes for run in cluster.devices)
        return InfeasibleError(
            f"cannot offload what the hints ask for: it needs {bytes_text(asked)} of host memory a "
            f"rank, each has {bytes_text(host)}; name fewer modules in hint.offload, or use more "
            "ranks"
        )
    where = _place(analysis, min(failures, key=lambda f: f.least_bytes).moment)
    biggest = max(
        (n for n in analysis.graph.nodes if n.op == "parameter"),
        key=lambda n: n.outputs[0].num_bytes,
        default=None,
    )
    largest = "" if biggest is None else f", the largest parameter is {biggest.target!r}"
    meshes = f"{len(failures)} mesh{'es' if len(failures) > 1 else ''}"
    proof = f"no plan fits on the {meshes} tried, which is proven"
    if not all(f.proven for f in failures):
        proof = f"no plan that fits was found on the {meshes} tried, which is no proof"
    needs = f"needs {bytes_text(least)}"
    if least <= limit:
        # Of the sums that the search knows; a program holds more.
        needs = f"needs more than {bytes_text(least)}"
    return InfeasibleError(
        f"cannot fit the step into {bytes_text(limit)} a rank: {proof}; the least found "
        f"{needs}{where}{largest}; use more ranks, a smaller batch, or raise hint.memory_limit"
    )


def _contradiction(analysis: Analysis, failure: Failure) -> HintError | UnsupportedError:
    """The error where no memory were enough: microbatches, or hints, that the step cannot have."""
    name = (failure.contradicts or "").partition(":")[0]
    node = analysis.graph.by_name.get(name)
    made = "a value" if node is None else f"what {node.op!r} in {node.source} makes"
    if failure.mesh.time_axis is not None:
        return UnsupportedError(
            f"cannot run {failure.mesh.microbatches} microbatches: {made} is returned or read for "
            "the whole batch at once; use hint.microbatches(1), return a sum or mean over the "
            "samples instead, or name a module or function around it with hint.per_microbatch"
        )
    return HintError(
        f"cannot shard the step as the hints say: {made} cannot be brought to where it is read; "
        "drop one of the hints"
    )


SETS = 64
"""Sets of hints that are tried for one that conflicts with the limit, the smallest first."""


def keep_conflict(
    analysis: Analysis, request: Request, settled: Settled, failures: Sequence[Failure]
) -> InfeasibleError | None:
    """The smallest set of ``hint.keep`` that cannot be met within the memory, if they are why."""
    keep = settled.restrictions.keep
    single = not settled.is_piped
    if not keep or not single or request.settled_plan is not None:
        return None
    mesh = min(failures, key=lambda failure: failure.least_bytes).mesh
    layout = Layout(schedule=settled.schedule, num_stages=1, num_chunks=settled.chunks)
    limit = min(settled.usable_bytes(run.device) for run in request.cluster.devices)

    def needed(patterns: tuple[str, ...]) -> float:
        own = replace(settled, restrictions=replace(settled.restrictions, keep=patterns))
        plain = prepare(analysis, request, own, (mesh,), layout).kinds[0].plain
        return least_bytes(with_reruns(plain).problem).num_bytes

    if needed(()) > limit:
        return None
    sets = (s for n in range(1, len(keep) + 1) for s in itertools.combinations(keep, n))
    for patterns in itertools.islice(sets, SETS):
        least = needed(patterns)
        if least > limit:
            hints = " and ".join(f"hint.keep({pattern!r})" for pattern in patterns)
            return InfeasibleError(
                f"cannot apply {hints} within {bytes_text(limit)} a rank: what they keep needs at "
                f"least {bytes_text(least)}, {bytes_text(least - limit)} more; drop one, or raise "
                "hint.memory_limit"
            )
    return None


def _place(analysis: Analysis, moment: str) -> str:
    """A moment of the step in words, as part of a sentence; empty if it is not known."""
    node = analysis.graph.by_name.get(moment)
    if node is None:
        return f" at {moment}" if moment else ""
    module = f" of module {node.source.module!r}" if node.source.module else ""
    return f" in the {node.phase.value}{module} ({node.op})"
