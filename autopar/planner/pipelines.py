"""Pipelines that the planner looks for: meshes of stages, microbatches, schedules.

A *way* is one choice of the three, within what hints leave. Ways are taken in the order of an
estimate that grows sharper as it is asked for: from the seconds of the ops alone and about the
bubble of the schedule, over an outline of the chunks and their messages on the schedule's own
timeline, to the meshes without memory limit, within it, and to what a way on the same meshes took
beside its estimate. What then promises most is cut, lowered and simulated.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autopar.errors import HintError, UnsupportedError
from autopar.ir.sharding import Mesh
from autopar.planner.batches import COUNTS, batch_misfit, filling_count, in_time, samples_of
from autopar.planner.cuts import least_starts
from autopar.planner.hints import Settled
from autopar.planner.lanes import WORTH, Lanes, MeshSearch, prepare, shared_s, slowest
from autopar.planner.layout import Layout
from autopar.planner.outline import LEAST_S, Ranks, Seconds, course_of, outline
from autopar.planner.parts import seconds_alone
from autopar.planner.request import Candidate, Request
from autopar.schedules.table import schedule_named
from autopar.search.analysis import Analysis
from autopar.search.decode import solved_seconds
from autopar.search.problem import Solution
from cost_models.cluster import Cluster

PIPELINES = 3
"""Pipelines that are solved within memory, cut and simulated; more where the step is short."""

FILLED = 2
"""Of those under the schedule in force, how many are, until one fits."""

GAIN = 0.01
"""Least part of the step to gain; `WORTH` until the meshes of a long step were looked at."""

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


def layouts(analysis: Analysis, settled: Settled, num_stages: int) -> tuple[Layout, ...]:
    """Ways to lay so many stages out that hints leave: of every schedule and number of chunks.

    The first stands for all that have its chunks; see `siblings`. Where hints leave none, it is the
    one that is refused.

    Args:
        analysis: The step.
        settled: Hints in force.
        num_stages: Groups of ranks.
    """
    # Blocks that a cut should leave whole.
    depth = max((len(names) for names in analysis.folding.classes), default=1)
    hinted = Layout(
        schedule=settled.schedule,
        num_stages=num_stages,
        num_chunks=settled.chunks,
        hints=settled.cuts,
    )
    several = [("interleaved", chunks) for chunks in CHUNKS] + [("zb-v", 2)]
    more = [("zb-h1", 1)] + [
        (name, chunks) for name, chunks in several if num_stages * chunks <= depth
    ]
    if settled.schedule_is_hinted:
        more = [own for own in more if own[0] == settled.schedule]
    if settled.chunks_are_hinted:
        more = []
    found = [hinted]
    found += [replace(hinted, schedule=name, num_chunks=chunks) for name, chunks in more]
    return tuple(own for own in dict.fromkeys(found) if _can_be_cut(analysis, own)) or (hinted,)


def _can_be_cut(analysis: Analysis, layout: Layout) -> bool:
    """Whether there are ops for all chunks, and hints leave cuts."""
    if len(layout.lanes) > len(course_of(analysis).order):
        return False
    try:
        least_starts(analysis, layout.hints, layout.lanes)
    except HintError:
        return False
    return True


_SIBLINGS = {"1f1b": ("gpipe", "early-backward-2"), "zb-h1": ("zb-h2",)}
"""Schedules whose programs are those of another."""


def siblings(settled: Settled, layout: Layout) -> tuple[Layout, ...]:
    """Other schedules of the same chunks, with the same programs."""
    names = () if settled.schedule_is_hinted else _SIBLINGS.get(layout.schedule, ())
    return tuple(replace(layout, schedule=name) for name in names)


_Key = tuple[tuple[Mesh, ...], int, bool]


def _key(way: Way) -> _Key:
    """Ways of which the problem is one: between the parts of a split backward more is held."""
    return way.spaces, way.count, schedule_named(way.layout.schedule).splits_backward


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

    def is_beaten(self, spaces: Sequence[Mesh], microbatches: int, layout: Layout) -> bool:
        """Whether it is proven that no plan of a way is faster than the best."""
        ...

    def finish(self, search: Lanes) -> Candidate | None:
        """Solve, cut and simulate; None if nothing fits."""
        ...


class Pipelines:
    """Looks for a pipeline that beats what is known.

    Attributes:
        trials: What is known, and told.
        ideal_s: Least seconds of a step without a bubble if nothing moved.
        samples: Of the batch.
        cheap: Times that the step may be lowered because it is short.
        growth: Power of the microbatches with which a step grows.
        ways: All that there are.
    """

    def __init__(
        self, analysis: Analysis, request: Request, settled: Settled, trials: Trials
    ) -> None:
        self.analysis = analysis
        self.request = request
        self.settled = settled
        self.trials = trials
        device = slowest([run.device for run in request.cluster.devices])
        alone = seconds_alone(analysis, device)
        self.course = course_of(analysis)
        shares = self.course.seconds(alone)
        self.shares: Seconds = shares / max(float(shares.sum()), LEAST_S)
        self.samples = samples_of(analysis.graph)
        self.cheap = CHEAP // len(analysis.graph.nodes)
        ideal_s = trials.ideal_s
        if ideal_s == math.inf or self.cheap:
            # Ops that are shared out launch as often on each rank, those of fewer do not.
            ideal_s = min(ideal_s, sum(alone.values()) / request.cluster.num_devices)
        self.ideal_s = ideal_s * _shared_speed(request.cluster)
        self.growth = 2 if self.cheap > PIPELINES else 1
        self._prepared: dict[_Key, Lanes | None] = {}
        self._within: dict[_Key, float] = {}
        self._timed: set[Way] = set()
        self._outlined: dict[tuple[Way, float], float] = {}
        self._layouts: dict[int, tuple[Layout, ...]] = {}
        self._beside: dict[tuple[Mesh, ...], float] = {}
        self._done: dict[Way, Candidate | None] = {}
        self.ways: tuple[Way, ...] = ()

    def run(self, choices: Sequence[tuple[Mesh, ...]]) -> None:
        """Try what promises most, and in any case what the schedule in force promises.

        Args:
            choices: Meshes of the stages, of more and more stages.
        """
        self.ways = tuple(way for spaces in choices for way in self._ways(spaces))
        filled = self._filled(choices)
        if self.trials.best_s == math.inf:
            # Something to beat, or else nothing fits.
            self._try_first(filled)
            if self.trials.best_s == math.inf:
                return
        ways = list(self.ways)
        left = max(PIPELINES, self.cheap)
        while left and not self.trials.late():
            ways = [way for way in ways if self._promises(way)]
            if not ways:
                break
            way = min(ways, key=self._estimate_s)
            if self._is_vague(way):
                # What more stages take says most of what fewer will.
                way = max(ways, key=lambda way: (self._is_vague(way), len(way.spaces), way.count))
            if not self._sharpen(way):
                self._try(way)
                left -= 1
        self._try_first([way for way in filled if self._promises(way)][:FILLED])

    @property
    def outcomes(self) -> Mapping[Way, bool | None]:
        """Whether each way was solved; None if it cannot be."""
        return {way: way in self._done if self._can_be(way) else None for way in self.ways}

    def _try_first(self, ways: Sequence[Way]) -> None:
        """Try ways, what promises most first, until one fits."""
        for way in ways:
            while self._sharpen(way):
                pass
        for way in sorted(ways, key=self._estimate_s):
            if self.trials.late():
                break
            if way not in self._done and self._can_be(way):
                self._try(way)
            if self._done.get(way) is not None:
                break

    def _promises(self, way: Way) -> bool:
        """Whether a way may be enough faster than the best."""
        if way in self._done or not self._can_be(way):
            return False
        if self.trials.is_beaten(way.spaces, way.count, way.layout):
            return False
        least = GAIN if self.cheap or not self._is_vague(way) else WORTH
        return self._estimate_s(way) < (1 - least) * self.trials.best_s

    def _filled(self, choices: Sequence[tuple[Mesh, ...]]) -> list[Way]:
        """Under the schedule in force, with as many microbatches as fill it, what is worth a look.

        A pipeline idles for about (stages - 1) / microbatches of what it computes: where that
        leaves less than `WORTH` of the step to gain, it is not.
        """
        found = []
        for spaces in () if self.trials.late() else choices:
            (layout, *_) = self._layouts_of(spaces)
            way = Way(spaces=spaces, count=self._most(spaces, layout), layout=layout)
            ideal_s = self.ideal_s * (1 + way.idle)
            if self._is_possible(way) and ideal_s <= (1 - WORTH) * self.trials.best_s:
                self._timed.add(way)
                self._sharpen(way)
                if self._can_be(way):
                    found.append(way)
        return sorted(found, key=self._estimate_s)

    def _layouts_of(self, spaces: tuple[Mesh, ...]) -> tuple[Layout, ...]:
        """Layouts of so many stages."""
        count = len(spaces)
        if count not in self._layouts:
            self._layouts[count] = layouts(self.analysis, self.settled, count)
        return self._layouts[count]

    def _most(self, spaces: tuple[Mesh, ...], layout: Layout) -> int:
        """Most microbatches that are tried."""
        return self.settled.microbatches or filling_count(self.analysis.graph, layout, spaces[0])

    def _ways(self, spaces: tuple[Mesh, ...]) -> list[Way]:
        """All numbers of microbatches and schedules on some meshes."""
        forced, num_stages = self.settled.microbatches, len(spaces)
        own = self._layouts_of(spaces)
        most = self._most(spaces, own[0])
        rounds = {num_stages * n for n in COUNTS} | set(COUNTS)
        counts = [forced] if forced else sorted(n for n in rounds if 2 <= n <= most)
        ways = (Way(spaces=spaces, count=n, layout=layout) for n in counts for layout in own)
        return [way for way in ways if self._is_possible(way)]

    def _is_possible(self, way: Way) -> bool:
        """Whether the schedule exists, and the model and the batch can be cut so."""
        forced = way.count == self.settled.microbatches
        if not (forced or (way.count >= 2 and self.samples % way.count == 0)):
            return False
        if not way.layout.fits(way.count) or not _can_be_cut(self.analysis, way.layout):
            return False
        meshes = in_time(self.analysis.graph, way.spaces, way.count)
        return not any(batch_misfit(self.analysis.graph, mesh) for mesh in meshes)

    def _is_vague(self, way: Way) -> bool:
        """Whether its meshes have not been looked at."""
        return _key(way) not in self._prepared

    def _can_be(self, way: Way) -> bool:
        """Whether the problem of its meshes exists, as far as is known."""
        return self._is_vague(way) or self._prepared[_key(way)] is not None

    def _sharpen(self, way: Way) -> bool:
        """Make the estimate of a way sharper; False if it is as sharp as it gets."""
        key = _key(way)
        if way not in self._timed:
            self._timed.add(way)
        elif key not in self._prepared:
            self._prepared[key] = self._prepare(way)
        elif key not in self._within and self._is_bound(way):
            self._within[key] = self._solve_within(way)
        else:
            return False
        return True

    def _is_bound(self, way: Way) -> bool:
        """Whether memory binds on its meshes."""
        prepared = self._prepared.get(_key(way))
        return prepared is not None and prepared.is_bound

    def _solve_within(self, way: Way) -> float:
        """Seconds that a stage works within memory; infinite if nothing is found there."""
        prepared = self._prepared[_key(way)]
        assert prepared is not None, way
        for roomy in (False, True):
            solved = [
                self._rough(kind, kind.allowed if roomy else kind.first_limit)
                for kind in prepared.searches
            ]
            if all(solution.choice for solution in solved):
                return shared_s([solution.objective_s for solution in solved])
        return math.inf

    def _rough(self, kind: MeshSearch, limit: float) -> Solution:
        """About what is found on a mesh within a limit."""
        return kind.within(limit, self.trials.left_s, rough=True)[1]

    def _prepare(self, way: Way) -> Lanes | None:
        """The relaxed problem of a way's meshes, if they can run in microbatches."""
        meshes = in_time(self.analysis.graph, way.spaces, way.count)
        try:
            found = prepare(self.analysis, self.request, self.settled, meshes, way.layout)
        except (HintError, UnsupportedError):
            return None
        return found if found.work_s(self.trials.left_s) < math.inf else None

    def _try(self, way: Way) -> None:
        """Solve, cut and simulate a way."""
        self._done[way] = None
        prepared = self._prepared[_key(way)]
        assert prepared is not None, way
        others = siblings(self.settled, way.layout)
        # Where hints or the step leave no such cuts, it is no pipeline.
        with contextlib.suppress(HintError, UnsupportedError):
            found = self.trials.finish(replace(prepared, layout=way.layout, others=others))
            self._done[way] = found
            if found is not None and self._work_s(way) < math.inf:
                self._beside[way.spaces] = found.step_s / max(self._outline_s(way), LEAST_S)

    def _estimate_s(self, way: Way) -> float:
        """Seconds of the step, as far as they are known."""
        if way not in self._timed or self._work_s(way) == math.inf:
            return self._work_s(way) * (1 + way.idle)
        return self._outline_s(way) * self._beside.get(way.spaces, 1.0)

    def _outline_s(self, way: Way) -> float:
        """Seconds of the step by its outline."""
        work_s = float(f"{self._work_s(way):.3g}")
        if (way, work_s) not in self._outlined:
            first = [0, *itertools.accumulate(mesh.num_ranks for mesh in way.spaces)][:-1]
            # Those that hold more do not fit where memory binds.
            others = () if self._is_bound(way) else siblings(self.settled, way.layout)
            self._outlined[way, work_s] = outline(
                self.course,
                self._by_stage(way, work_s),
                (way.layout, *others),
                way.count,
                Ranks(
                    cluster=self.request.cluster,
                    first=tuple(first),
                    count=tuple(mesh.num_ranks for mesh in way.spaces),
                ),
            ).seconds
        return self._outlined[way, work_s]

    def _by_stage(self, way: Way, work_s: float) -> list[Seconds]:
        """What the whole step takes on every stage: of the relaxation, or what ops take alone."""
        prepared = self._prepared.get(_key(way))
        if prepared is not None:
            longer = work_s / max(prepared.work_s(self.trials.left_s), LEAST_S)
            found = {kind: longer * self._relaxed(kind) for kind in prepared.kinds}
            return [found[kind] for kind in prepared.searches]
        ranks_s = zip(way.spaces, self._rank_s(way), strict=True)
        speeds = [space.num_ranks / seconds for space, seconds in ranks_s]
        alone = {speed: work_s * sum(speeds) / speed * self.shares for speed in set(speeds)}
        return [alone[speed] for speed in speeds]

    def _relaxed(self, kind: MeshSearch) -> Seconds:
        """What the whole step takes on a mesh without memory limit, beside ops as these."""
        whole_s = kind.unbound_s(self.trials.left_s)
        assert kind.unlimited.solution is not None
        names = solved_seconds(kind.plain, self.analysis, kind.unlimited.solution)
        found = self.course.seconds(names)
        return found * (whole_s / max(float(found.sum()), LEAST_S))

    def _rank_s(self, way: Way) -> list[float]:
        """What the ranks of every stage take, in proportion: as their slowest device."""
        cluster, first, found = self.request.cluster, 0, []
        for space in way.spaces:
            runs = cluster.runs_between(first, first + space.num_ranks)
            device = slowest([cluster.devices[run].device for run in runs])
            found.append(1 / max(device.peak_flops_per_s.values()))
            first += space.num_ranks
        return found

    def _work_s(self, way: Way) -> float:
        """Seconds that a stage works: within memory, or no more than what it will be.

        What a step takes beyond its ops grows with the microbatches, in proportion where they are
        large, faster where they are small; and is taken to be no less with fewer stages, each of
        which then holds more parameters.
        """
        key = _key(way)
        prepared = self._prepared.get(key)
        if prepared is not None:
            return self._within.get(key) or prepared.work_s(self.trials.left_s)
        filled = way.count / self._most(way.spaces, way.layout)
        more = 0.0
        for (spaces, count, _), lanes in self._prepared.items():
            if lanes is None or not (spaces == way.spaces or len(spaces) > len(way.spaces)):
                continue
            beyond_s = lanes.work_s(self.trials.left_s) - self.ideal_s
            share = filled * self._most(spaces, lanes.layout) / count
            more = max(more, beyond_s * min(1.0, share) ** self.growth)
        return self.ideal_s + more


def _shared_speed(cluster: Cluster) -> float:
    """Seconds of work shared out as devices are fast, to those if all were as the slowest."""
    rates = [(max(run.device.peak_flops_per_s.values()), run.count) for run in cluster.devices]
    return cluster.num_devices * min(r for r, _ in rates) / sum(r * n for r, n in rates)
