"""Cuts, places and points of a pipeline with one piece a stage: an exact dynamic program.

Stages are placed from the last to the first. For every number of stages behind, first block and
foremost place, it keeps the states of a `timeline.Timeline` that no other beats. A *cap* keeps it
small: what cannot end before the cap is dropped. Bounds for that come from a walk the other way,
which for every number of stages in front, block and device has the least seconds of what is in
front, by the relaxation of each stage (`segments.Segments.least_s`).

The cap is raised from a lower bound until something is found; then that is the optimum. Where a
gap is allowed, choices of a stage may be dearer by that part; step times are homogeneous in the
seconds of the stages, so that the step is too, and no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopar.search.interproblem import Choice, Family, InterProblem, Piece, Place, Setting
from autopar.search.knapsack import Floats, frontier
from autopar.search.segments import Counts, Segments, Taken
from autopar.search.timeline import Timeline

RAISES = (
    *(1 + 2.0**n for n in range(-9, -5)),
    *(1.04**n for n in range(1, 18)),
    *(2.0**n for n in range(1, 6)),
    float("inf"),
)
"""Caps that are tried, over the lower bound: a cap that is much too high costs most."""

_DIGITS = 12


@dataclass(frozen=True, slots=True)
class _Way:
    """How a state came about: the pieces and places behind, as a linked list."""

    first: int
    end: int
    place: Place
    taken: Taken
    behind: _Way | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One way through the outer choices.

    Attributes:
        setting: Microbatches, fronts and messages.
        family: Places.
        schedule: Of one piece a stage.
        num_stages: Of the pipeline.
    """

    setting: Setting
    family: Family
    schedule: str
    num_stages: int

    @property
    def name(self) -> str:
        return (
            f"{self.schedule}, {self.num_stages} stages on {self.family.name}, "
            f"{self.setting.microbatches} microbatches"
        )


@dataclass(frozen=True, slots=True)
class Work:
    """Least work of the blocks in front of every block, and of all.

    Attributes:
        seconds: Of a microbatch's forward and backward, each block on whichever place is fastest.
        device_s: The same times devices, each block where that is least.
        devices: Of the family.
    """

    seconds: Floats
    device_s: Floats
    devices: int

    def step_s(self, microbatches: int, num_stages: int) -> float:
        """Least seconds of a step: stages, or devices, share the work evenly; one in turn."""
        total_s, device_s = float(self.seconds[-1]), float(self.device_s[-1])
        shared_s = max(total_s / num_stages, device_s / self.devices)
        return max(microbatches * shared_s, total_s)


class Memo:
    """What is the same for several combinations."""

    def __init__(self, problem: InterProblem, gap: float) -> None:
        self.problem = problem
        self.gap = gap
        self.counts = Counts(problem.blocks)
        self._known: dict[tuple[object, ...], Segments] = {}
        self._works: dict[tuple[int, int], Work] = {}

    def work(self, setting: Setting, family: Family) -> Work:
        """Least work of the blocks on places of a family."""
        key = (id(setting), id(family))
        if key not in self._works:
            sizes = {(place.kind, place.size) for place in family.places}
            least: dict[int, tuple[float, float]] = {}
            for own in self.counts.classes:
                each = [
                    (p.forward_s + p.backward_s, size * (p.forward_s + p.backward_s))
                    for kind, size in sizes
                    for p in setting.fronts[own][kind]
                ]
                seconds, device_s = zip(*each, strict=True) if each else ((np.inf,), (np.inf,))
                least[own] = min(seconds), min(device_s)
            rows = np.array([(0.0, 0.0), *(least[own] for own in self.problem.blocks)])
            sums = rows.cumsum(axis=0)
            self._works[key] = Work(sums[:, 0], sums[:, 1], family.end - family.first)
        return self._works[key]

    def segments(
        self, setting: Setting, timeline: Timeline, place: Place, behind: int, num_stages: int
    ) -> Segments:
        """Runs of blocks on a place with so many stages behind it."""
        live = timeline.live(behind, num_stages)
        key = (id(setting), timeline, place.kind, place.memory_bytes, behind, live)
        found = self._known.get(key)
        if found is None:
            fronts = {own: setting.fronts[own][place.kind] for own in self.counts.classes}
            found = self._known[key] = Segments(
                fronts,
                live,
                place.memory_bytes,
                lambda costs: timeline.measures(costs, behind),
                self.gap,
            )
        return found


class Chain:
    """One combination of setting, family, schedule and number of stages."""

    def __init__(self, memo: Memo, combination: Combination, timeline: Timeline) -> None:
        self.memo = memo
        self.problem = memo.problem
        self.setting = combination.setting
        self.family = combination.family
        self.schedule = combination.schedule
        self.num_stages = combination.num_stages
        self.timeline = timeline
        self.num_blocks = len(self.problem.blocks)
        self.first, self.end = combination.family.first, combination.family.end
        self.starting: dict[int, list[Place]] = {}
        for place in combination.family.places:
            self.starting.setdefault(place.first, []).append(place)
        self.work = memo.work(combination.setting, combination.family)

    def alone_s(self, place: Place) -> float:
        """Least seconds of all blocks on one place, which must have all devices."""
        if (place.first, place.end) != (self.first, self.end):
            return float("inf")
        return self._segments(place, 0).least_s(self.memo.counts(0, self.num_blocks))

    def solve(self, cap_s: float) -> tuple[Choice | None, float]:
        """The best choice below `cap_s`, if there is one, and a proven bound below the cap."""
        low_s, gap = self.work.step_s(self.setting.microbatches, self.num_stages), self.memo.gap
        if not low_s < float("inf"):
            return None, float("inf")
        if cap_s < float("inf") and self._front(cap_s) is None:
            return None, cap_s / (1 + gap)
        last = 0.0
        for raised in RAISES:
            if raised < (1 + gap) * last:
                continue
            last = raised
            cap = min(low_s * raised, cap_s) if low_s else cap_s
            found = self._below(cap)
            if found is not None:
                return found, found.step_s / (1 + gap)
            if cap >= cap_s:
                break
        return None, cap_s / (1 + gap)

    def _below(self, cap_s: float) -> Choice | None:
        """The best choice below the cap, if there is one."""
        front = self._front(cap_s)
        if front is None:
            return None
        start: Key = (self.num_blocks, None)
        layer: dict[Key, tuple[Floats, list[_Way | None]]] = {
            start: (self.timeline.start(), [None])
        }
        for behind in range(self.num_stages):
            layer = self._placed(layer, front[self.num_stages - 1 - behind], behind, cap_s)
            if not layer:
                return None
        best: tuple[float, _Way] | None = None
        for states, ways in layer.values():
            seconds = self.timeline.seconds(states)
            index = int(np.argmin(seconds))
            way = ways[index]
            if way is not None and (best is None or seconds[index] < best[0]):
                best = float(seconds[index]), way
        if best is None or not best[0] < cap_s:
            return None
        return self._choice(*best)

    def _front(self, cap_s: float) -> list[dict[tuple[int, int], float]] | None:
        """Of every number of stages in front: (blocks placed, devices used) to least seconds.

        None if no way leads through.
        """
        layers: list[dict[tuple[int, int], float]] = [{(0, self.first): 0.0}]
        for stage in range(self.num_stages):
            reached: dict[tuple[int, int], float] = {}
            for (block, device), before_s in layers[-1].items():
                for place in self.starting.get(device, ()):
                    for end, own_s in self._ends(stage, block, place, before_s, cap_s):
                        key = (end, place.end)
                        reached[key] = min(reached.get(key, np.inf), before_s + own_s)
            if not reached:
                return None
            layers.append(reached)
        return layers if (self.num_blocks, self.end) in layers[-1] else None

    def _ends(
        self, stage: int, block: int, place: Place, before_s: float, cap_s: float
    ) -> Iterator[tuple[int, float]]:
        """Where a stage that begins with a block may end, and its least seconds."""
        behind = self.num_stages - 1 - stage
        if (place.end == self.end) != (behind == 0):
            return
        segments = self._segments(place, behind)
        first = self.num_blocks if behind == 0 else block + 1
        most_s = self.timeline.most_s(cap_s, before_s, 0.0, behind)
        for end in range(first, self.num_blocks - behind + 1):
            own_s = segments.least_s(self.memo.counts(block, end))
            if not own_s < most_s:
                return
            if (
                self.problem.may_hold(stage, block, end)
                and own_s < self._most_s(cap_s, before_s, end, behind)
                and self._rest_fits(before_s + own_s, (end, place.end), behind, cap_s)
            ):
                yield end, own_s

    def _rest_fits(self, before_s: float, rest: tuple[int, int], behind: int, cap_s: float) -> bool:
        """Whether the stages behind can have all blocks that are left before the cap is reached.

        `rest` are the first of these blocks and of the devices that are left.
        """
        if not behind:
            return True
        end, device = rest
        each_s = max(self.timeline.most_s(cap_s, before_s, 0.0, k) for k in (0, behind - 1))
        seconds, device_s = self.work.seconds, self.work.device_s
        return bool(
            seconds[-1] - seconds[end] <= behind * each_s
            and device_s[-1] - device_s[end] <= (self.end - device) * each_s
        )

    def _most_s(self, cap_s: float, before_s: float, end: int, behind: int) -> float:
        """Seconds of a stage that ends before block `end` at which the cap is reached."""
        beyond_s = float(self.work.seconds[-1] - self.work.seconds[end])
        return self.timeline.most_s(cap_s, before_s, beyond_s, behind)

    def _segments(self, place: Place, behind: int) -> Segments:
        return self.memo.segments(self.setting, self.timeline, place, behind, self.num_stages)

    def _placed(
        self,
        layer: dict[Key, tuple[Floats, list[_Way | None]]],
        front: dict[tuple[int, int], float],
        behind: int,
        cap_s: float,
    ) -> dict[Key, tuple[Floats, list[_Way | None]]]:
        """One more stage in front of every state."""
        found: dict[Key, tuple[list[Floats], list[_Way]]] = {}
        by_start: dict[int, list[Key]] = {}
        for key in layer:
            by_start.setdefault(self.end if key[1] is None else key[1].first, []).append(key)
        for (block, device), before_s in front.items():
            for place in self.starting.get(device, ()):
                for key in by_start.get(place.end, ()):
                    if key[0] > block:
                        self._extend(
                            layer[key], key, (block, place), (behind, before_s, cap_s), found
                        )
        return {key: self._thinned(*rows) for key, rows in found.items() if rows[1]}

    def _extend(
        self,
        source: tuple[Floats, list[_Way | None]],
        source_key: Key,
        target: tuple[int, Place],
        limits: tuple[int, float, float],
        found: dict[Key, tuple[list[Floats], list[_Way]]],
    ) -> None:
        """Put one stage of blocks in front of some states; those below the cap are added."""
        (end, next_place), (block, place), (behind, before_s, cap_s) = source_key, target, limits
        segments, counts = self._segments(place, behind), self.memo.counts(block, end)
        states, ways = source
        if not self.problem.may_hold(self.num_stages - 1 - behind, block, end):
            return
        most_s = self._most_s(cap_s, before_s, end, behind)
        if not segments.least_s(counts) < most_s:
            return
        choices = segments.choices(counts, most_s)
        if not choices:
            return
        send_s = 0.0
        if next_place is not None:
            send_s = self.problem.send_s(self.setting, end - 1, place, next_place)
        costs = np.stack([cost for cost, _ in choices])
        grown = self.timeline.extend(states, costs, send_s, behind).reshape(-1, states.shape[1])
        keep = np.flatnonzero(self.timeline.least_s(grown, before_s) < cap_s)
        rows, trails = found.setdefault((block, place), ([], []))
        rows.append(grown[keep])
        for index in keep.tolist():
            state, option = divmod(index, len(choices))
            trails.append(_Way(block, end, place, choices[option][1], ways[state]))

    def _thinned(self, rows: list[Floats], trails: list[_Way]) -> tuple[Floats, list[_Way | None]]:
        """The states that no other beats."""
        states = np.concatenate(rows)
        finite = np.where(np.isfinite(states), states, -1.0)
        scale = max(float(finite.max()), 1e-300)
        kept = frontier(np.round(finite / scale, _DIGITS))
        return states[kept], [trails[index] for index in kept.tolist()]

    def _choice(self, step_s: float, way: _Way | None) -> Choice:
        pieces, places = [], []
        while way is not None:
            pieces.append(Piece(first=way.first, end=way.end, counts=dict(way.taken)))
            places.append(way.place)
            way = way.behind
        return Choice(
            setting=self.setting,
            schedule=self.schedule,
            chunks=1,
            places=tuple(places),
            pieces=tuple(pieces),
            step_s=step_s,
        )


Key = tuple[int, Place | None]
"""First block of what is placed, and the place it is on."""
