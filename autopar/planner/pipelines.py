"""Pipelines that the planner looks for by itself: meshes of stages, microbatches, schedules.

A *way* is one choice of the three. Ways are taken in the order of an estimate that grows sharper as
it is asked for: from the seconds of the ops alone and about the bubble of the schedule, over the
schedule's own timeline with its messages, to the relaxation of the meshes without memory limit.
What then promises most is solved within memory, cut, lowered and simulated.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from autopar.errors import HintError, UnsupportedError
from autopar.ir.sharding import Mesh
from autopar.planner.batches import COUNTS, batch_misfit, filling_count, in_time, samples_of
from autopar.planner.hints import Settled
from autopar.planner.lanes import WORTH, Lanes, prepare
from autopar.planner.pipeline import FORWARD, Layout, filled_s, least_crossing_bytes
from autopar.planner.request import Candidate, Request
from autopar.schedules.table import schedule_named
from autopar.search.analysis import Analysis
from cost_models.cluster import Cluster
from cost_models.collectives import collective_s, pair_link

PIPELINES = 3
"""Pipelines that are solved within memory, cut and simulated; more where the step is short."""

FILLED = 2
"""Of those under the schedule in force, how many are, until one fits."""

CHEAP = 5_000
"""Nodes that may be lowered all the same: a step of a tenth as many is lowered ten times."""

CHUNKS = (2, 4, 8)
"""Chunks of a stage that are tried, where the schedule has any number."""

_IDLE = {"zb-h1": 1 / 3, "zb-h2": 1 / 3, "zb-v": 1 / 6}
"""About what is left of the bubble of 1F1B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A pipeline to try.

    Attributes:
        spaces: Mesh of every stage.
        count: Microbatches.
        layout: Stages, chunks and schedule.
    """

    spaces: tuple[Mesh, ...]
    count: int
    layout: Layout

    @property
    def idle(self) -> float:
        """About what a stage idles for, as a part of what it works, if messages were free."""
        share = _IDLE.get(self.layout.schedule, 1 / self.layout.num_chunks)
        return share * (self.layout.num_stages - 1) / self.count


def layouts(settled: Settled, num_stages: int, depth: int) -> tuple[Layout, ...]:
    """Ways to lay so many stages out: as the hint says, else under every schedule.

    The first stands for all that have its chunks; see `siblings`.

    Args:
        settled: Hints in force.
        num_stages: Groups of ranks.
        depth: Blocks that a cut should leave whole.
    """
    hinted = Layout(
        schedule=settled.schedule,
        num_stages=num_stages,
        num_chunks=settled.chunks,
        hints=settled.cuts,
    )
    if settled.schedule_is_hinted:
        return (hinted,)
    several = [("interleaved", chunks) for chunks in CHUNKS] + [("zb-v", 2)]
    more = [("zb-h1", 1)] + [
        (name, chunks) for name, chunks in several if num_stages * chunks <= depth
    ]
    return (
        hinted,
        *(replace(hinted, schedule=name, num_chunks=chunks) for name, chunks in more),
    )


_SIBLINGS = {"1f1b": ("gpipe", "early-backward-2"), "zb-h1": ("zb-h2",)}
"""Schedules whose programs are those of another."""


def siblings(settled: Settled, layout: Layout) -> tuple[Layout, ...]:
    """Other schedules of the same chunks, with the same programs."""
    names = () if settled.schedule_is_hinted else _SIBLINGS.get(layout.schedule, ())
    return tuple(replace(layout, schedule=name) for name in names)


class Trials(Protocol):
    """What has been tried, and how to try more."""

    @property
    def ideal_s(self) -> float:
        """Least seconds of a step without a pipeline if nothing moved; infinite if not known."""
        ...

    @property
    def best_s(self) -> float:
        """Simulated step of the best that fits; infinite if there is none."""
        ...

    @property
    def left_s(self) -> float:
        """Seconds that a solver may take."""
        ...

    def late(self) -> bool:
        """Whether the time is over."""
        ...

    def finish(self, search: Lanes) -> Candidate | None:
        """Solve, cut and simulate; None if nothing fits."""
        ...


class Pipelines:
    """Looks for a pipeline that beats what is known.

    Attributes:
        trials: What is known, and told.
        ideal_s: Least seconds of a step without a bubble if nothing moved.
        depth: Blocks of the model.
        samples: Of the batch.
        cheap: Times that the step may be lowered because it is short.
        growth: Power of the microbatches with which a step grows.
    """

    def __init__(
        self, analysis: Analysis, request: Request, settled: Settled, trials: Trials
    ) -> None:
        self.analysis = analysis
        self.request = request
        self.settled = settled
        self.trials = trials
        ideal_s = 0.0 if trials.ideal_s == math.inf else trials.ideal_s
        self.ideal_s = ideal_s * _shared_speed(request.cluster)
        self.depth = max((len(names) for names in analysis.folding.classes), default=1)
        self.samples = samples_of(analysis.graph)
        self.cheap = CHEAP // len(analysis.graph.nodes)
        self.growth = 2 if self.cheap > PIPELINES else 1
        self._prepared: dict[tuple[tuple[Mesh, ...], int], Lanes | None] = {}
        self._timed: set[Way] = set()
        self._done: dict[Way, Candidate | None] = {}

    def run(self, choices: Sequence[tuple[Mesh, ...]]) -> None:
        """Try what promises most, and in any case what the schedule in force promises.

        Args:
            choices: Meshes of the stages, of more and more stages.
        """
        known_s = self.trials.best_s
        filled = self._filled(choices)
        ways = [way for spaces in choices for way in self._ways(spaces)]
        left = max(PIPELINES, self.cheap)
        while left and not self.trials.late():
            promise_s = (1 - WORTH) * self.trials.best_s
            ways = [
                way
                for way in ways
                if way not in self._done and self._can_be(way) and self._estimate_s(way) < promise_s
            ]
            if not ways:
                break
            way = min(ways, key=self._estimate_s)
            if self._is_vague(way):
                # What more stages take says most of what fewer will.
                way = max(ways, key=lambda way: (self._is_vague(way), len(way.spaces), way.count))
            if not self._sharpen(way):
                self._try(way)
                left -= 1
        for way in sorted(filled, key=self._estimate_s)[:FILLED]:
            if self._estimate_s(way) >= (1 - WORTH) * known_s:
                break
            if self.trials.late():
                break
            if way not in self._done and self.ideal_s * (1 + way.idle) < self.trials.best_s:
                self._try(way)
            if self._done.get(way) is not None:
                break

    def _filled(self, choices: Sequence[tuple[Mesh, ...]]) -> list[Way]:
        """Under the schedule in force, with as many microbatches as fill it, what is worth a look.

        A pipeline idles for about (stages - 1) / microbatches of what it computes: where that
        leaves less than `WORTH` of the step to gain, it is not.
        """
        found = []
        for spaces in () if self.trials.late() else choices:
            (layout, *_) = layouts(self.settled, len(spaces), self.depth)
            way = Way(spaces=spaces, count=self._most(spaces, layout), layout=layout)
            ideal_s = self.ideal_s * (1 + way.idle)
            if self._is_possible(way) and ideal_s <= (1 - WORTH) * self.trials.best_s:
                self._timed.add(way)
                self._sharpen(way)
                if self._can_be(way):
                    found.append(way)
        return found

    def _most(self, spaces: tuple[Mesh, ...], layout: Layout) -> int:
        """Most microbatches that are tried."""
        return self.settled.microbatches or filling_count(self.analysis.graph, layout, spaces[0])

    def _ways(self, spaces: tuple[Mesh, ...]) -> list[Way]:
        """All numbers of microbatches and schedules on some meshes."""
        forced, num_stages = self.settled.microbatches, len(spaces)
        own = layouts(self.settled, num_stages, self.depth)
        most = self._most(spaces, own[0])
        rounds = {num_stages * n for n in COUNTS} | set(COUNTS)
        counts = [forced] if forced else sorted(n for n in rounds if 2 <= n <= most)
        ways = (Way(spaces=spaces, count=n, layout=layout) for n in counts for layout in own)
        return [way for way in ways if self._is_possible(way)]

    def _is_possible(self, way: Way) -> bool:
        """Whether the schedule exists, and the batch can be cut so."""
        if not way.layout.fits(way.count) or way.count < 2 or self.samples % way.count:
            return False
        meshes = in_time(self.analysis.graph, way.spaces, way.count)
        return not any(batch_misfit(self.analysis.graph, mesh) for mesh in meshes)

    def _is_vague(self, way: Way) -> bool:
        """Whether its meshes have not been looked at."""
        return (way.spaces, way.count) not in self._prepared

    def _can_be(self, way: Way) -> bool:
        """Whether the problem of its meshes exists and has room, as far as is known.

        Between the parts of a split backward more is held than the problem knows of, so that there
        is none where memory binds.
        """
        if self._is_vague(way):
            return True
        prepared = self._prepared[way.spaces, way.count]
        if prepared is None:
            return False
        return not (schedule_named(way.layout.schedule).splits_backward and prepared.is_bound)

    def _sharpen(self, way: Way) -> bool:
        """Make the estimate of a way sharper; False if it is as sharp as it gets."""
        key = way.spaces, way.count
        if way not in self._timed:
            self._timed.add(way)
        elif key not in self._prepared:
            self._prepared[key] = self._prepare(way)
        else:
            return False
        return True

    def _prepare(self, way: Way) -> Lanes | None:
        """The relaxed problem of a way's meshes, if they can run in microbatches."""
        (layout, *_) = layouts(self.settled, len(way.spaces), self.depth)
        meshes = in_time(self.analysis.graph, way.spaces, way.count)
        try:
            found = prepare(self.analysis, self.request, self.settled, meshes, layout)
        except (HintError, UnsupportedError):
            return None
        return found if found.work_s(self.trials.left_s) < math.inf else None

    def _try(self, way: Way) -> None:
        """Solve, cut and simulate a way."""
        self._done[way] = None
        prepared = self._prepared[way.spaces, way.count]
        assert prepared is not None, way
        others = siblings(self.settled, way.layout)
        # Where hints or the step leave no such cuts, it is no pipeline.
        with contextlib.suppress(HintError, UnsupportedError):
            self._done[way] = self.trials.finish(
                replace(prepared, layout=way.layout, others=others)
            )

    def _estimate_s(self, way: Way) -> float:
        """Seconds of the step, as far as they are known."""
        work_s = self._work_s(way)
        if way not in self._timed or work_s == 0:
            return work_s * (1 + way.idle)
        each_s = work_s / way.count
        share = round(self._send_s(way) / each_s, 3)
        return each_s * filled_s(way.layout, way.count, FORWARD, share)

    def _work_s(self, way: Way) -> float:
        """Seconds that a stage works: of the relaxation, or no more than what it will be.

        What a step takes beyond its ops grows with the microbatches, in proportion where they are
        large, faster where they are small; and is taken to be no less with fewer stages, each of
        which then holds more parameters.
        """
        prepared = self._prepared.get((way.spaces, way.count))
        if prepared is not None:
            return prepared.work_s(self.trials.left_s)
        filled = way.count / self._most(way.spaces, way.layout)
        more = 0.0
        for (spaces, count), lanes in self._prepared.items():
            if lanes is None or not (spaces == way.spaces or len(spaces) > len(way.spaces)):
                continue
            beyond_s = lanes.work_s(self.trials.left_s) - self.ideal_s
            share = filled * self._most(spaces, lanes.layout) / count
            more = max(more, beyond_s * min(1.0, share) ** self.growth)
        return self.ideal_s + more

    def _send_s(self, way: Way) -> float:
        """Least seconds of the slowest message between stages."""
        ranks = [0, *itertools.accumulate(mesh.num_ranks for mesh in way.spaces)]
        size = int(self._crossing_bytes / way.count / max(m.num_ranks for m in way.spaces))
        return max(
            collective_s("send", size, pair_link(self.request.cluster, a, b))
            for a, b in pairwise(ranks[:-1])
        )

    @functools.cached_property
    def _crossing_bytes(self) -> int:
        return least_crossing_bytes(self.analysis)


def _shared_speed(cluster: Cluster) -> float:
    """Seconds of work shared out as devices are fast, to those if all were as the slowest."""
    rates = [(max(run.device.peak_flops_per_s.values()), run.count) for run in cluster.devices]
    return cluster.num_devices * min(r for r, _ in rates) / sum(r * n for r, n in rates)
