"""Local moves: what else could run again or be kept, what that holds and saves, and what is best.

A *change* keeps what one node makes, has nodes run again, or drops before a node of the backward
what ran again and waits for it, so that it is made once more. Changes come in *lanes*: the members
of a class from its first or from its last on, since copies of a block differ at its ends. What the
first change of a lane holds and saves is taken for the others too; lanes that save time and lanes
that free memory are then put together so that they fit and save most, and the ledger is asked.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from autopar.planner.ledger import Choice, Held, Ledger, Life, Own

OFFERED = 24
"""Lanes of either kind that are put together: those that save or free most for what they take."""

MOST_KEPT, MOST_FREED = 2, 3
"""Changes put together: that save time, and that free memory for them."""

TRIED = 50
"""Changes put together that the ledger is asked about, the best first."""

ASKED = 1500
"""Times that the ledger is asked before no more changes are tried that do not fit by themselves."""

LEAST = 1e-6
"""Least part of the seconds of what runs again that a change must save."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a choice.

    Attributes:
        keep: Nodes whose results are kept.
        again: Nodes that run again.
        drop: (backward node, node): what the second made again is dropped before the first.
        hold: The same, and it is not dropped any more.
    """

    keep: frozenset[str] = frozenset()
    again: frozenset[str] = frozenset()
    drop: frozenset[tuple[str, str]] = frozenset()
    hold: frozenset[tuple[str, str]] = frozenset()

    def of(self, own: Own) -> Own:
        """The choice of a part, changed."""
        dropped = (own.dropped | self.drop) - self.hold
        return Own(
            again=(own.again | self.again) - self.keep,
            dropped=frozenset(d for d in dropped if d[1] not in self.keep),
        )


class Way(Enum):
    """What becomes of a value that the backward needs."""

    KEPT = auto()
    ONCE = auto()
    EACH = auto()
    ELSE = auto()


@dataclass(frozen=True, slots=True)
class Lane:
    """Changes of one kind, one after the other: of the members of a class, or one by itself.

    Attributes:
        way: What becomes of the members: kept, made again once, or for each use.
        names: The members, in order; of a change by itself none.
        part: Of the change that is one by itself; ``change`` what it is.
    """

    way: Way
    names: tuple[str, ...] = ()
    part: int = -1
    change: Change = Change()


@dataclass(frozen=True, slots=True)
class _Offer:
    """What the next change of a lane does to the peak and to the seconds of what runs again."""

    lane: Lane
    num_bytes: int
    seconds: float
    over_bytes: float


class Moves:
    """Local moves within a limit."""

    def __init__(
        self, ledger: Ledger, groups: Sequence[tuple[str, ...]], limit_bytes: float
    ) -> None:
        """The moves of a stage.

        Args:
            ledger: Of the stage.
            groups: Members of every class that may run again or be kept.
            limit_bytes: What the ledger may hold.
        """
        self.ledger = ledger
        self.limit_bytes = limit_bytes
        self.asked = 0
        self.free = frozenset(name for names in groups for name in names)
        self.lanes = [
            Lane(way, names)
            for own in groups
            for way in (Way.KEPT, Way.ONCE, Way.EACH)
            for names in dict.fromkeys((own, own[::-1]))
        ]

    def best(self, choice: Choice) -> Choice | None:
        """The choice after all changes that help; None if none was found that fits."""
        found: Choice | None = self._fitting(choice)
        best = found
        while found is not None:
            best, found = found, self._faster(found) or self._exchanged(found)
        return best

    def held(self, choice: Choice) -> Held:
        self.asked += 1
        return self.ledger.held(choice, self.limit_bytes)

    def _fitting(self, choice: Choice, most_s: float = math.inf) -> Choice | None:
        """The choice with what frees most for its seconds, until it fits; None if that takes more.

        Args:
            choice: The choice.
            most_s: Seconds that all that runs again may take.
        """
        now = self.held(choice)
        while now.peak_bytes > self.limit_bytes:
            offers = [
                offer
                for offer in self._offers(choice, now)
                if offer.over_bytes < 0 and now.seconds + offer.seconds < most_s
            ]
            if not offers or self.asked > ASKED:
                return None
            best = min(offers, key=lambda o: max(o.seconds, 0.0) / -o.over_bytes)
            while now.peak_bytes > self.limit_bytes:
                changed = self._changed(choice, (best.lane,))
                then = None if changed is None else self.held(changed)
                if changed is None or then is None or then.over_bytes >= now.over_bytes:
                    break
                choice, now = changed, then
        return choice if now.seconds < most_s else None

    def _exchanged(self, choice: Choice) -> Choice | None:
        """The choice after a change that saves time, and others that make it fit again.

        Until the ledger has been asked so often.
        """
        now = self.held(choice)
        saving = [offer for offer in self._offers(choice, now) if offer.seconds < 0]
        for offer in sorted(saving, key=lambda o: o.seconds):
            changed = self._changed(choice, (offer.lane,)) if self.asked < ASKED else None
            if changed is not None:
                found = self._fitting(changed, now.seconds * (1 - LEAST))
                if found is not None:
                    return found
        return None

    def _faster(self, choice: Choice) -> Choice | None:
        """The choice after the changes that save most, each as often as it helps; None if none."""
        now, found = self.held(choice), None
        for lanes in self._together(self._offers(choice, now), now):
            while (changed := self._changed(found or choice, lanes)) is not None:
                then = self.held(changed)
                saves = then.seconds < now.seconds * (1 - LEAST)
                if then.peak_bytes > self.limit_bytes or not saves:
                    break
                found, now = changed, then
        return found

    def _together(self, offers: Sequence[_Offer], now: Held) -> Iterator[tuple[Lane, ...]]:
        """Lanes whose changes, put together, fit and save time by what they do alone."""
        saving = [o for o in offers if o.seconds < 0]
        freeing = [o for o in offers if o.seconds >= 0 and o.num_bytes < 0]
        saving.sort(key=lambda o: o.seconds / max(o.num_bytes, 1))
        freeing.sort(key=lambda o: o.seconds / -o.num_bytes)
        gains = list(_multisets(saving[:OFFERED], MOST_KEPT))
        costs = list(_multisets(freeing[:OFFERED], MOST_FREED))
        more, less = (
            np.array([sum(o.num_bytes for o in s) for s in own]) for own in (gains, costs)
        )
        saved, paid = (np.array([sum(o.seconds for o in s) for s in own]) for own in (gains, costs))
        seconds = saved[:, None] + paid[None]
        fits = more[:, None] + less[None] <= self.limit_bytes - now.peak_bytes
        seconds[~fits] = 0.0
        for at in np.argsort(seconds, axis=None, kind="stable")[:TRIED].tolist():
            gain, cost = divmod(at, len(costs))
            if seconds[gain, cost] >= 0:
                return
            yield tuple(offer.lane for offer in (*gains[gain], *costs[cost]))

    def _offers(self, choice: Choice, now: Held) -> list[_Offer]:
        """What the next change of every lane does."""
        found = []
        for lane in (*self.lanes, *self._waiting(choice, now), *self._dropped(choice)):
            changed = self._changed(choice, (lane,))
            if changed is not None:
                then = self.held(changed)
                found.append(
                    _Offer(
                        lane,
                        then.peak_bytes - now.peak_bytes,
                        then.seconds - now.seconds,
                        then.over_bytes - now.over_bytes,
                    )
                )
        return found

    def _changed(self, choice: Choice, lanes: Iterable[Lane]) -> Choice | None:
        """The choice after a change of each lane; None if one has none left."""
        found, touched = list(choice), set()
        for lane, often in Counter(lanes).items():
            changes = list(itertools.islice(self._changes(lane, found), often))
            if len(changes) < often:
                return None
            for part, change in changes:
                found[part] = change.of(found[part])
                touched.add(part)
        for part in touched:
            found[part] = self.ledger.plain(part, found[part])
        return tuple(found)

    def _changes(self, lane: Lane, choice: Sequence[Own]) -> Iterator[tuple[int, Change]]:
        """(part, change) of a lane, one after the other."""
        if lane.part >= 0:
            if lane.change.of(choice[lane.part]) != choice[lane.part]:
                yield lane.part, lane.change
            return
        for name in lane.names:
            part = self.ledger.part_of[name]
            change = self._one(lane.way, name, choice[part])
            if change.of(choice[part]) != choice[part]:
                yield part, change

    def _one(self, way: Way, name: str, own: Own) -> Change:
        """The change of one member."""
        if way is Way.KEPT:
            return Change(keep=frozenset((name,)))
        again = self._behind(name, own.again)
        if way is Way.ONCE:
            return Change(again=again)
        late = self.ledger.late(name)
        return Change(again=again, drop=frozenset((r, n) for r in late for n in again))

    def _behind(self, name: str, again: Collection[str]) -> frozenset[str]:
        """A node, and those behind it whose results would be kept for it alone."""
        found, waiting = {name}, [name]
        while waiting:
            for maker in self.ledger.inputs(waiting.pop()):
                alone = maker in self.free and not self.ledger.read_late(maker)
                if alone and maker not in found and maker not in again:
                    found.add(maker)
                    waiting.append(maker)
        return frozenset(found)

    def _waiting(self, choice: Choice, now: Held) -> Iterator[Lane]:
        """What ran again and waits at the peak for a reader before which it could be dropped.

        With what it is made of, as far as that is not read any more; or by itself.
        """
        lives: dict[str, list[Life]] = defaultdict(list)
        for life in self.ledger.lives(choice):
            lives[life.node].append(life)
        for life in (life for own in lives.values() for life in own):
            reader = next((reader for at, reader in life.reads if at > now.peak_at), None)
            if life.made >= now.peak_at or reader is None:
                continue
            start = self.ledger.start(reader)
            if start <= now.peak_at:
                continue
            part = self.ledger.part_of[life.node]
            again = choice[part].again
            names = {frozenset((life.node,)), self._idle(life.node, again, lives, start)}
            for own in names:
                yield Lane(
                    Way.ELSE, part=part, change=Change(drop=frozenset((reader, n) for n in own))
                )

    def _idle(
        self, name: str, again: Collection[str], lives: Mapping[str, list[Life]], start: int
    ) -> frozenset[str]:
        """A node and what runs again for it that nothing reads from a time on."""
        found, waiting = {name}, [name]
        while waiting:
            for maker in self.ledger.inputs(waiting.pop()):
                if maker not in again or maker in found:
                    continue
                if not any(at >= start for life in lives[maker] for at, _ in life.reads):
                    found.add(maker)
                    waiting.append(maker)
        return frozenset(found)

    def _dropped(self, choice: Choice) -> Iterator[Lane]:
        """What is dropped before a node of the backward and could be held for it."""
        for part, own in enumerate(choice):
            readers = defaultdict(set)
            for reader, name in own.dropped:
                readers[reader].add((reader, name))
            for dropped in readers.values():
                yield Lane(Way.ELSE, part=part, change=Change(hold=frozenset(dropped)))


def _multisets(offers: Sequence[_Offer], most: int) -> Iterator[tuple[_Offer, ...]]:
    """Up to so many of the offers, each as often as may be."""
    for count in range(most + 1):
        yield from itertools.combinations_with_replacement(offers, count)
