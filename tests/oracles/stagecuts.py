"""Ways to cut a step into stages of one device each, with and without an eye on memory.

What the planner must not lose against, under 1F1B and from the same captured step:

* *balanced*: cut where seconds are balanced; nothing runs again and nothing leaves;
* *cut first*: the same cuts, each stage then made to fit by what costs it least;
* *whole blocks*: cut between repeated blocks alone, as evenly as fits, each stage made to fit.

Every stage is lowered and simulated, so its bytes are those of the program that would run. What a
stage may choose from are solutions of the whole step within less and less memory, with and without
copies to the host.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise

from autopar import hint
from autopar.errors import InfeasibleError
from autopar.lower.rows import turns_of
from autopar.options import ADAMW
from autopar.plan.records import StagePlan
from autopar.planner.batches import samples_of
from autopar.planner.driver import make_plan
from autopar.planner.evaluate import predicted_memory
from autopar.planner.hints import settle
from autopar.planner.lanes import MeshSearch, prepare
from autopar.planner.layout import Layout
from autopar.planner.pipeline import Kind, Lane, cut, seconds_by_forward
from autopar.planner.request import Request, Unlimited
from autopar.planner.staged import lower_pipeline, lower_some
from autopar.planner.update import states_on_host, update_of
from autopar.search.analysis import Analysis
from autopar.search.build import with_reruns
from autopar.search.decode import decode
from autopar.search.intra import least_bytes, solve
from autopar.search.outer import meshes
from autopar.search.stages import Pipeline, equal_lanes, forward_order, split_lanes
from cost_models.cluster import Cluster

SCHEDULE = "1f1b"

LIMITS = 6
"""Of memory, below all that is kept down to the least of any program."""

PLENTY_S = 3600.0
"""For the planner, so that no clock decides what it finds."""

ROUNDS = 6
"""Times the seconds of the longest stage are bisected."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A pipeline, simulated.

    Attributes:
        step_s: With the update.
        peaks: Bytes of every stage.
        bound: Whether every stage runs something again or sends it away.
    """

    step_s: float
    peaks: tuple[int, ...]
    bound: tuple[bool, ...]

    @property
    def spread(self) -> float:
        """Bytes of the fullest stage, as a multiple of those of the emptiest."""
        return max(self.peaks) / min(self.peaks)

    @property
    def bound_spread(self) -> float:
        """The same of the stages that have a use for more memory; 1 where none has."""
        peaks = [peak for peak, own in zip(self.peaks, self.bound, strict=True) if own]
        return max(peaks) / min(peaks) if peaks else 1.0


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stage alone: seconds of a microbatch, and bytes."""

    seconds: float
    peak_bytes: int


class StageCuts:
    """A step in microbatches on as many stages as a cluster has devices."""

    def __init__(self, analysis: Analysis, cluster: Cluster, microbatches: int) -> None:
        self.analysis = analysis
        self.cluster = cluster
        self.microbatches = microbatches
        self.num_stages = cluster.num_devices
        self.samples = samples_of(analysis.graph)
        self.layout = Layout(schedule=SCHEDULE, num_stages=self.num_stages, num_chunks=1)
        self.order = forward_order(analysis)
        self.known: dict[Hashable, Unlimited] = {}
        self.kept_search = self._search(hint.keep("*"))
        self.cost = self.kept_search.cost
        self.limit_bytes = int(self.kept_search.allowed)
        self.rows = turns_of(SCHEDULE, self.num_stages, 1, microbatches)
        self._pieces: dict[tuple[int, int, int, int], _Piece] = {}

    def within(self, limit_bytes: int) -> StageCuts:
        """The same step where every device holds so much; what is known of it serves both."""
        # What every limit wants is made once.
        _ = self.even_cuts, self.families
        other = copy.copy(self)
        other.limit_bytes = limit_bytes
        return other

    def balanced(self) -> Staged:
        """Cut where seconds are balanced; everything is kept."""
        wholes = equal_lanes(self.kept, self.num_stages)
        lanes = range(self.num_stages)
        return self._measured(split_lanes(self.analysis, wholes, self.even_cuts, lanes))

    def cut_first(self) -> Staged | None:
        """The same cuts, every stage then made to fit; None where one cannot."""
        return self._fitted(self.even_cuts)

    def cut_first_fits(self) -> bool:
        """Whether every stage of these cuts can be made to fit."""
        bounds = pairwise([0, *self.even_cuts, len(self.order)])
        return all(self._fits(stage, a, b) for stage, (a, b) in enumerate(bounds))

    def whole_blocks(self) -> Staged | None:
        """The most even cut between blocks, every stage made to fit; None if none fits."""
        found = self._filled(math.inf)
        low_s, high_s = 0.0, sum(self.seconds)
        for _ in range(ROUNDS if found is not None else 0):
            middle_s = (low_s + high_s) / 2
            more_even = self._filled(middle_s)
            low_s, high_s = (middle_s, high_s) if more_even is None else (low_s, middle_s)
            found = more_even or found
        return None if found is None else self._fitted(found)

    def whole_blocks_fit(self) -> bool:
        """Whether any cut between blocks fits."""
        return self._filled(math.inf) is not None

    def planned(self) -> Staged | None:
        """What the planner makes of it; None where it finds nothing."""
        hints = (
            hint.degrees(pp=self.num_stages, dp=1, tp=1),
            hint.microbatches(self.microbatches),
            hint.schedule(SCHEDULE),
            hint.memory_limit(self.limit_bytes),
        )
        try:
            plan = make_plan(self.analysis, self._request(*hints))
        except InfeasibleError:
            return None
        found = self._measured(Pipeline(plan.stages, plan.transfers))
        assert max(found.peaks) == plan.prediction.memory.total_bytes
        return found

    @functools.cached_property
    def kept(self) -> StagePlan:
        """A plan of the whole step that keeps everything, and else holds least."""
        return self._within(self.kept_search, 0.0, copies=False)

    @functools.cached_property
    def families(self) -> tuple[tuple[StagePlan, ...], ...]:
        """Plans of the whole step that hold less and less: without copies to the host, and with."""
        parts = [1 - n / LIMITS for n in range(1, LIMITS)]
        return tuple(
            (self.kept, *(self._within(self.search, part, copies=copies) for part in parts), least)
            for copies, least in zip((False, True), self.leanest, strict=True)
        )

    @functools.cached_property
    def leanest(self) -> tuple[StagePlan, ...]:
        """The last of each family, which hold least."""
        return tuple(self._within(self.search, 0.0, copies=copies) for copies in (False, True))

    @functools.cached_property
    def search(self) -> MeshSearch:
        """Of a stage's mesh, with nothing that must be kept."""
        return self._search()

    @functools.cached_property
    def even_cuts(self) -> tuple[int, ...]:
        """Where the planner cuts the plan that keeps everything."""
        kind = Kind(self.kept, self.cost)
        lanes = [Lane(kind, stage) for stage in range(self.num_stages)]
        pipeline = cut(self.analysis, lanes, [self.layout], self.cluster)
        home = {n.name: at for at, stage in enumerate(pipeline.stages) for n in stage.nodes}
        looped = [(at, n) for at, n in enumerate(self.order) if n in self.analysis.looped]
        return tuple(
            next(at for at, name in looped if home[name] >= stage)
            for stage in range(1, self.num_stages)
        )

    @functools.cached_property
    def seconds(self) -> Sequence[float]:
        """Of every forward node, with its backward, where everything is kept."""
        found = seconds_by_forward(self.analysis, Kind(self.kept, self.cost))
        return [float(own) for own in found.sum(axis=0)]

    @functools.cached_property
    def borders(self) -> tuple[int, ...]:
        """Positions at which a repeated block begins, or the last of a run has ended."""
        copies = [self.analysis.copies.of.get(name) for name in self.order]
        blocks = [None if copy is None else (copy.run, copy.index) for copy in copies]
        return tuple(at for at, (a, b) in enumerate(pairwise(blocks), start=1) if a != b)

    def _request(self, *hints: hint.Hint) -> Request:
        return Request(
            model="m",
            fingerprint="f",
            cluster=self.cluster,
            hints=hints,
            time_limit_s=PLENTY_S,
            known=self.known,
        )

    def _search(self, *hints: hint.Hint) -> MeshSearch:
        """The search of a stage's mesh, as the planner has it."""
        settled = settle(self.analysis, self.cluster, hints, None)
        (mesh, *_) = meshes(self.cluster, None, num_stages=self.num_stages)
        spaces = (mesh.with_time(self.microbatches),) * self.num_stages
        found = prepare(self.analysis, self._request(*hints), settled, spaces, self.layout)
        return found.kinds[0]

    def _within(self, search: MeshSearch, part: float, *, copies: bool) -> StagePlan:
        """The fastest plan within a part of the way from the least memory to all that is kept."""
        built = search.joint = search.joint or with_reruns(search.plain)
        problem = built.problem
        if problem.link is not None and not copies:
            problem = replace(problem, link=replace(problem.link, host_limit_bytes=0.0))
        least = least_bytes(problem).num_bytes
        most = max(search.within(None, 60.0)[1].memory_bytes) if part else least
        limit = LOOSE * (least + part * max(0.0, most - least))
        solution = solve(replace(problem, memory_limit_bytes=limit))
        assert solution.choice, (part, solution.status)
        return decode(built, self.analysis, solution)

    def _fitted(self, cuts: tuple[int, ...]) -> Staged | None:
        """Every stage with what costs it least to fit; None where one cannot."""
        bounds = pairwise([0, *cuts, len(self.order)])
        found = [self._cheapest(stage, a, b) for stage, (a, b) in enumerate(bounds)]
        wholes = [replace(own, first_rank=n) for n, own in enumerate(found) if own is not None]
        if len(wholes) < len(found):
            return None
        return self._measured(split_lanes(self.analysis, wholes, cuts, range(self.num_stages)))

    def _cheapest(self, stage: int, start: int, end: int) -> StagePlan | None:
        """Of the first plan of each family with which a stage fits, the faster one."""
        found: list[tuple[float, int, StagePlan]] = []
        for number, family in enumerate(self.families):
            pieces = ((self._piece(stage, start, end, whole), whole) for whole in family)
            fitting = (own for own in pieces if own[0].peak_bytes <= self.limit_bytes)
            found += [(piece.seconds, number, whole) for piece, whole in [*islice(fitting, 1)]]
        return min(found)[2] if found else None

    def _filled(self, most_s: float) -> tuple[int, ...] | None:
        """As many whole blocks in every stage as fit and take no longer; None if some are left.

        A stage of fewer blocks holds no more, so that no other cut fits if this one does not.
        """
        ends = [0, *self.borders, len(self.order)]
        sums = [0.0, *accumulate(self.seconds)]
        cuts, first = [], 0
        for stage in range(self.num_stages):
            start = ends[first]
            high = len(ends) - self.num_stages + stage
            while high > first and sums[ends[high]] - sums[start] > most_s:
                high -= 1
            low, at = first, high
            while low < high:
                low, high = (at, high) if self._fits(stage, start, ends[at]) else (low, at - 1)
                at = (low + high + 1) // 2
            if low == first:
                return None
            cuts.append(ends[low])
            first = low
        return tuple(cuts[:-1]) if cuts[-1] == len(self.order) else None

    def _fits(self, stage: int, start: int, end: int) -> bool:
        """Whether a stage fits that holds as little as it can."""
        return any(
            self._piece(stage, start, end, whole).peak_bytes <= self.limit_bytes
            for whole in self.leanest
        )

    def _piece(self, stage: int, start: int, end: int, whole: StagePlan) -> _Piece:
        """A stage of some forward nodes alone, lowered and simulated."""
        key = (stage, start, end, id(whole))
        if key not in self._pieces:
            self._pieces[key] = self._lowered(stage, start, end, whole)
        return self._pieces[key]

    def _lowered(self, stage: int, start: int, end: int, whole: StagePlan) -> _Piece:
        cuts = [at for at in (start, end) if 0 < at < len(self.order)]
        own = 1 if start else 0
        wholes = equal_lanes(whole, len(cuts) + 1)
        pipeline = split_lanes(self.analysis, wholes, cuts, range(len(wholes)))
        kind = Kind(whole, self.cost)
        lowered = lower_some(self.analysis, kind, pipeline, (own,), splits_backward=False)[own]
        peak = lowered.peak([turn._replace(chunk=own) for turn in self.rows[stage]])
        away = states_on_host(pipeline.stages[own])
        memory = predicted_memory(lowered.together, peak, ADAMW, away=away)
        time = lowered.chunks[0].time
        return _Piece(time.forward_s + time.backward_s, memory.total_bytes)

    def _measured(self, pipeline: Pipeline) -> Staged:
        """What a pipeline takes, to the byte."""
        kind = Kind(pipeline.stages[0], self.cost)
        lanes = [Lane(kind, stage) for stage in range(self.num_stages)]
        lowered = lower_pipeline(self.analysis, lanes, pipeline, self.layout, self.cluster)
        result = lowered.under(self.layout)
        away = states_on_host(*pipeline.stages)
        updates_s = [
            update_of(s.program, ADAMW, away=away).seconds(self.cost.device) for s in result.stages
        ]
        peaks = tuple(
            predicted_memory(s.program, s.peak, ADAMW, away=away).total_bytes for s in result.stages
        )
        bound = tuple(bool(own.recomputed or own.offloaded) for own in pipeline.stages)
        return Staged(result.seconds(updates_s), peaks, bound)


LOOSE = 1 + 1e-4
"""More than a limit that is the least there is, for the solver's own tolerance."""
