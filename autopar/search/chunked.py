"""Pipelines with several pieces a stage, which no closed form gives: even cuts, best points.

The model is cut where pieces take equally long, and where they have equally many blocks; every
stage then takes the points that make its seconds least within its memory, and the schedule is
simulated. The memory of a stage counts, of each of its pieces, the microbatches that it holds when
it holds most of all of them, and what these add up if it has begun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autopar.schedules.actions import Kind, Row
from autopar.schedules.makespan import ChunkTime
from autopar.schedules.makespan import simulate as simulate_schedule
from autopar.schedules.table import schedule_named
from autopar.search.chain import Combination, Memo
from autopar.search.interproblem import Choice, Piece, Place, Point, Setting
from autopar.search.segments import Segments, costs_of
from autopar.search.stages import balanced_cuts, bounded_cuts
from autopar.search.timeline import BACKWARD, BEFORE, COSTS, REDUCE, WEIGHT


@dataclass(frozen=True, slots=True)
class Load:
    """What a lane holds of a chunk.

    Attributes:
        live: Microbatches between their forward and their last backward.
        begun: Whether any has had its backward.
    """

    live: int = 0
    begun: bool = False

    def bytes_of(self, point: Point) -> float:
        """What it holds of a block of the chunk, without what is transient."""
        return point.resident_bytes + self.begun * point.late_bytes + self.live * point.saved_bytes


def fullest(row: Row, setting: Setting) -> dict[int, Load]:
    """What a lane holds of its chunks when it holds most, of points as they are on average."""
    points = [p for front in setting.fronts for own in front for p in own]
    count = max(len(points), 1)
    saved = sum(point.saved_bytes for point in points) / count or 1.0
    late = sum(point.late_bytes for point in points) / count
    now = {action.chunk: Load() for action in row}
    most, found = -1.0, now
    for action in row:
        own = now[action.chunk]
        if action.kind is Kind.FORWARD:
            now = {**now, action.chunk: replace(own, live=own.live + 1)}
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
            now = {**now, action.chunk: Load(own.live - 1, begun=True)}
        held = sum(saved * load.live + late * load.begun for load in now.values())
        if held > most:
            most, found = held, now
    return found


def simulated_s(choice: Choice, sends_s: Sequence[float]) -> float:
    """Seconds of the step by the schedule's own timeline, with reductions behind it.

    Args:
        choice: Pieces, places and points.
        sends_s: Seconds of a message behind every piece but the last.
    """
    spec = schedule_named(choice.schedule)
    rows = spec.generate(len(choice.places), choice.chunks, choice.setting.microbatches)
    costs = [piece_costs(choice.setting, piece, choice.places[lane])
             for piece, lane in zip(choice.pieces, choice.lanes, strict=True)]  # fmt: skip
    times = [ChunkTime(forward_s=f, backward_s=b, weight_s=w) for f, b, w, *_ in costs]
    reduces, free_s = [0.0] * len(rows), [0.0] * len(rows)
    for lane, own in zip(choice.lanes, costs, strict=True):
        reduces[lane] += own[REDUCE]
        free_s[lane] += own[BEFORE]
    timeline = simulate_schedule(rows, times, sends_s, free_s)
    return max(ends[-1] + own for ends, own in zip(timeline.ends_s, reduces, strict=True))


def piece_costs(setting: Setting, piece: Piece, place: Place) -> tuple[float, ...]:
    """Costs of a piece, as `segments.costs_of` has them."""
    total = np.zeros(COSTS)
    for own, counts in piece.counts.items():
        total = total + np.array(counts) @ costs_of(setting.fronts[own][place.kind])
    total[WEIGHT] = min(total[WEIGHT], total[BACKWARD])
    return tuple(total.tolist())


class Chunked:
    """One combination whose stages have several pieces each."""

    def __init__(self, memo: Memo, combination: Combination, chunks: int) -> None:
        self.memo = memo
        self.setting = combination.setting
        self.schedule = combination.schedule
        self.chunks = chunks
        self.family = combination.family
        self.places = tuple(sorted(combination.family.places, key=lambda place: place.first))
        self.num_stages = combination.num_stages
        self._lanes: dict[object, tuple[tuple[tuple[int, ...], ...], float]] = {}

    def solve(self, cap_s: float) -> tuple[Choice | None, float]:
        """The best choice below `cap_s`, and a bound of all that is looked at."""
        spec = schedule_named(self.schedule)
        rows = spec.generate(self.num_stages, self.chunks, self.setting.microbatches)
        loads = [fullest(row, self.setting) for row in rows]
        best: Choice | None = None
        bound_s = float("inf")
        for cuts in self._cuts():
            most_s = min(cap_s, np.inf if best is None else best.step_s)
            pieces, least_s = self._points(cuts, loads, most_s)
            bound_s = min(bound_s, least_s)
            if least_s >= most_s:
                continue
            choice = Choice(
                setting=self.setting,
                schedule=self.schedule,
                chunks=self.chunks,
                places=self.places,
                pieces=pieces,
                step_s=0.0,
            )
            step_s = simulated_s(choice, self.memo.problem.sends_s(choice))
            if step_s < most_s:
                best = replace(choice, step_s=step_s)
        return best, bound_s

    def _cuts(self) -> list[tuple[int, ...]]:
        """Borders of the pieces: equally many seconds, equally many blocks."""
        blocks, number = self.memo.problem.blocks, self.num_stages * self.chunks
        kind = self.places[0].kind
        seconds = []
        for own in blocks:
            points = self.setting.fronts[own][kind]
            if not points:
                return []
            seconds.append(min(p.forward_s + p.backward_s for p in points))
        if starts := self.memo.problem.starts:
            rows = seconds, [1.0] * len(blocks)
            bounded = (bounded_cuts([row] * number, starts) for row in rows)
            return list(dict.fromkeys(cuts for cuts in bounded if cuts))
        even = tuple(round(i * len(blocks) / number) for i in range(1, number))
        found = [tuple(balanced_cuts(seconds, number)), even]
        return list(dict.fromkeys(found))

    def _points(
        self, cuts: Sequence[int], loads: Sequence[Mapping[int, Load]], most_s: float
    ) -> tuple[tuple[Piece, ...], float]:
        """The pieces with the points of least seconds, and a bound: infinite if they do not fit.

        Pieces are left out where a stage alone takes `most_s`.
        """
        borders = list(pairwise([0, *cuts, len(self.memo.problem.blocks)]))
        lane_of = schedule_named(self.schedule).lane_of_chunk
        reach_s = self._reach_s(cuts[: self.num_stages - 1])
        pieces: dict[int, Piece] = {}
        least_s = 0.0
        for lane, place in enumerate(self.places):
            own = [c for c in range(len(borders)) if lane_of(c, self.num_stages) == lane]
            taken, work_s = self._lane(place, {c: borders[c] for c in own}, loads[lane])
            least_s = max(least_s, reach_s[lane] + self.setting.microbatches * work_s)
            if least_s >= most_s:
                return (), least_s
            for chunk, counts in taken.items():
                first, end = borders[chunk]
                pieces[chunk] = Piece(first=first, end=end, counts=counts)
        return tuple(pieces[chunk] for chunk in range(len(borders))), least_s

    def _reach_s(self, cuts: Sequence[int]) -> list[float]:
        """Least seconds in front of the work of every stage.

        A stage has all its work to do. Its first forward waits for the first microbatch to come to
        its first piece. Unless weight gradients fill the end, its last backward is of that piece
        too, and has the way back to the first stage in front of it.
        """
        if schedule_named(self.schedule).splits_backward:
            return [0.0] * self.num_stages
        seconds = self.memo.work(self.setting, self.family).seconds
        return [0.0, *(float(seconds[cut]) for cut in cuts)]

    def _lane(
        self, place: Place, borders: Mapping[int, tuple[int, int]], loads: Mapping[int, Load]
    ) -> tuple[Mapping[int, Mapping[int, tuple[int, ...]]], float]:
        """Points of the classes of every piece of a stage, and their least seconds together.

        Infinite if they do not fit.
        """
        names = tuple(
            (place_of, own, number, loads[chunk])
            for place_of, (chunk, (first, end)) in enumerate(borders.items())
            for own, number in self.memo.counts(first, end)
        )
        key = place.kind, place.memory_bytes, names
        if key not in self._lanes:
            self._lanes[key] = self._taken(place, names)
        rows, work_s = self._lanes[key]
        chunks = list(borders)
        found: dict[int, dict[int, tuple[int, ...]]] = {chunk: {} for chunk in chunks}
        for (place_of, own, _, _), row in zip(names, rows, strict=False):
            found[chunks[place_of]][own] = row
        return found, work_s

    def _taken(
        self, place: Place, names: Sequence[tuple[int, int, int, Load]]
    ) -> tuple[tuple[tuple[int, ...], ...], float]:
        """How many blocks of each group take every point, and the seconds of all.

        Groups are (piece, class, blocks, what is held of them).
        """
        fronts = {
            name: _held(self.setting.fronts[own][place.kind], load)
            for name, (_, own, _, load) in enumerate(names)
        }
        segments = Segments(
            fronts, 0.0, place.memory_bytes, lambda costs: costs[:, :2].sum(axis=1, keepdims=True)
        )
        choices = segments.choices(tuple((name, own[2]) for name, own in enumerate(names)))
        if not choices:
            return (), np.inf
        costs, taken = min(choices, key=lambda choice: float(choice[0][:2].sum()))
        return tuple(row for _, row in taken), float(costs[:2].sum())


def _held(points: Sequence[Point], load: Load) -> tuple[Point, ...]:
    """Points of which what is held is resident."""
    return tuple(
        replace(p, resident_bytes=load.bytes_of(p), late_bytes=0.0, saved_bytes=0.0) for p in points
    )
