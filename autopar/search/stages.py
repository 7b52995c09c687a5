"""Pipeline stages: which node runs where, and what crosses.

Forward nodes are cut in their order; what depends on the batch alone is made again on every stage
that reads it. A backward node runs where its forward op ran, or earlier if what it reads was made
earlier: gradients flow against the stages only. A parameter belongs to the first stage that reads
it; other stages receive it before the loop and send their part of its gradient back behind it.

A stage here is a piece of the model; where ranks hold several, they are chunks of those ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.ir.alias import through
from autopar.ir.graph import PARAMETER, SOURCE_OPS, Node, Phase, Ref
from autopar.ir.sharding import WHOLE, Mesh, Partial, Sharding, Split, Whole
from autopar.plan.records import StagePlan, Transfer
from autopar.search.analysis import Analysis


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages and what crosses them."""

    stages: tuple[StagePlan, ...]
    transfers: tuple[Transfer, ...]


def forward_order(analysis: Analysis) -> tuple[str, ...]:
    """Forward nodes that a cut divides, in order."""
    return tuple(
        node.name
        for node in analysis.graph.nodes
        if node.phase is Phase.FORWARD and _is_cut(analysis, node)
    )


def _is_cut(analysis: Analysis, node: Node) -> bool:
    return (
        node.op not in SOURCE_OPS
        and Ref(node.name) not in analysis.aliases
        and node.name not in analysis.data
    )


def places(analysis: Analysis) -> Mapping[str, int]:
    """Position of every forward node that a cut divides, and of the backward of its line."""
    by_name = analysis.graph.by_name
    found = {name: position for position, name in enumerate(forward_order(analysis))}
    by_source = {by_name[name].source: position for name, position in found.items()}
    for node in analysis.graph.nodes:
        at = by_source.get(node.source)
        if at is not None and node.op not in SOURCE_OPS:
            found.setdefault(node.name, at)
    return found


def awaited(analysis: Analysis) -> frozenset[str]:
    """Backward nodes that the backward of an earlier op reads, through any others.

    The rest makes gradients of parameters alone: where a backward is split, it comes later.
    """
    place, found = places(analysis), set()
    never = len(place)
    reached: dict[str, int] = {}
    for node in reversed(analysis.graph.nodes):
        if node.phase is not Phase.BACKWARD or node.op in SOURCE_OPS:
            continue
        own = place.get(node.name, never)
        first = reached.get(node.name, own)
        if first < own:
            found.add(node.name)
        for ref in node.operands:
            made = analysis.root(ref).root.node
            reached[made] = min(reached.get(made, first), first, own)
    return frozenset(found)


def balanced_cuts(seconds: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """First positions of stages 1 and on, for the least longest stage.

    Args:
        seconds: Of each forward node, its backward included.
        num_stages: Number of stages, at most as many as nodes.
    """
    assert num_stages <= len(seconds), f"{len(seconds)} nodes for {num_stages} stages"
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    count = len(seconds)
    best, came = sums, []
    for stage in range(2, num_stages + 1):
        ends = np.arange(stage, count + 1)
        # Of a later first position the stages in front take longer, this one less: best is where
        # they meet, or just in front of it; of the same, the last.
        open_ = best[stage - 1 : count]
        meet = np.searchsorted(open_ + sums[stage - 1 : count], sums[ends])
        last = ends - stage
        short = np.clip(meet - 1, 0, last)
        long = np.minimum(meet, last)
        long = np.minimum(np.searchsorted(open_, open_[long], side="right") - 1, last)
        longest = [np.maximum(open_[at], sums[ends] - sums[at + stage - 1]) for at in (short, long)]
        first = np.where(longest[1] <= longest[0], long, short)
        best = np.full(count + 1, np.inf)
        best[ends] = np.minimum(*longest)
        came.append(np.concatenate([np.zeros(stage, dtype=np.int64), first + stage - 1]))
    cuts: list[int] = []
    end = count
    for firsts in reversed(came):
        end = int(firsts[end])
        cuts.append(end)
    return tuple(reversed(cuts))


def least_firsts(
    count: int, cuts: Collection[int], homes: Mapping[int, int], lanes: Sequence[int]
) -> list[list[int]]:
    """For every stage and end, the first position at which it may begin.

    Args:
        count: Number of forward nodes.
        cuts: Positions at which a stage begins.
        homes: Position to the group of ranks that must run it.
        lanes: Group of ranks that holds each stage.
    """
    by_lane: dict[int, list[int]] = {}
    for lane in set(lanes):
        least = [0]
        for position in range(count):
            if homes.get(position, lane) != lane:
                least.append(position + 1)
            else:
                least.append(position if position in cuts else least[-1])
        by_lane[lane] = least
    return [by_lane[lane] for lane in lanes]


def last_firsts(
    count: int, wanted: Collection[int], stages: Collection[int], num_stages: int
) -> list[list[int]]:
    """For every stage and end, the last position at which it may begin; -1 for none.

    Args:
        count: Number of forward nodes.
        wanted: Positions of which each of ``stages`` must hold one.
        stages: Those that must.
        num_stages: Number of stages.
    """
    before = [-1]
    for position in range(count):
        before.append(position if position in wanted else before[-1])
    anywhere = list(range(-1, count))
    return [before if stage in stages else anywhere for stage in range(num_stages)]


Row = Sequence[float] | NDArray[np.float64]
"""A number for every forward node, or for every position between them."""


def bounded_cuts(
    by_stage: Sequence[Row],
    least: Sequence[Sequence[int]],
    most: Sequence[Sequence[int]] | None = None,
    begins: Sequence[Row] | None = None,
) -> tuple[int, ...] | None:
    """As `balanced_cuts` within bounds, for stages of any speeds; None if there are no such cuts.

    The longest stage is found by bisection, to 1e-9 of the longest there could be: for a length,
    the ends that every stage can reach.

    Args:
        by_stage: For every stage, the seconds it takes for each forward node.
        least: As of `least_firsts`.
        most: As of `last_firsts`; by default anywhere.
        begins: For every stage, the seconds that beginning at each position adds; None for none.
    """
    sums = [np.concatenate([[0.0], np.cumsum(seconds)]) for seconds in by_stage]
    lasts = most or last_firsts(len(by_stage[0]), (), (), len(by_stage))
    bounds = [(np.asarray(own), np.asarray(last)) for own, last in zip(least, lasts, strict=True)]
    # A stage [a, b) fits a length if what is in front of b, less the length, is no more than this.
    keys = list(sums)
    if begins is not None:
        keys = [own - np.asarray(more) for own, more in zip(sums, begins, strict=True)]
    most_s = max(float(own[-1] - key.min()) for own, key in zip(sums, keys, strict=True))
    low_s, high_s = 0.0, most_s
    found = _reached(sums, keys, bounds, high_s)
    if found is None:
        return None
    while high_s - low_s > 1e-9 * most_s:
        middle_s = (low_s + high_s) / 2
        reached = _reached(sums, keys, bounds, middle_s)
        if reached is None:
            low_s = middle_s
        else:
            high_s, found = middle_s, reached
    cuts: list[int] = []
    end = len(by_stage[0])
    for stage in range(len(least) - 1, 0, -1):
        first, last = (int(bound[end]) for bound in bounds[stage])
        own = slice(first, last + 1)
        fits = keys[stage][own] >= sums[stage][end] - high_s - _ROUNDING
        end = first + int(np.flatnonzero(found[stage][own] & fits)[0])
        cuts.append(end)
    return tuple(reversed(cuts))


_ROUNDING = 1e-15


def _reached(
    sums: Sequence[np.ndarray],
    keys: Sequence[np.ndarray],
    bounds: Sequence[tuple[np.ndarray, np.ndarray]],
    longest_s: float,
) -> list[np.ndarray] | None:
    """For every stage, whether it can begin at each position; None if the last cannot end."""
    reached = [np.arange(len(sums[0])) == 0]
    for own, key, bound in zip(sums, keys, bounds, strict=True):
        best = _most_between(np.where(reached[-1], key, -np.inf), *bound)
        reached.append(best >= own - longest_s - _ROUNDING)
    return reached if reached[-1][-1] else None


def _most_between(keys: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """For every end, the most of the keys from its first position to its last; -inf for none.

    Args:
        keys: Of every position.
        first: Of every end; it never falls.
        last: Of every end; it never falls either.
    """
    found = np.full(len(keys), -np.inf)
    ends = np.flatnonzero(first <= last)
    # In runs of ends that have their first position in common.
    for own in np.split(ends, np.flatnonzero(np.diff(first[ends])) + 1):
        if len(own):
            begin = first[own[0]]
            most = np.maximum.accumulate(keys[begin : last[own[-1]] + 1])
            found[own] = most[last[own] - begin]
    return found


def split_stages(
    analysis: Analysis,
    plan: StagePlan,
    cuts: Sequence[int],
    lanes: Sequence[int] | None = None,
) -> Pipeline:
    """A plan of the whole step cut into stages of the same mesh.

    Args:
        analysis: The step.
        plan: Shardings of the whole step.
        cuts: First positions of stages 1 and on in `forward_order`.
        lanes: Group of ranks that holds each stage; by default one group each.
    """
    held = tuple(lanes or range(len(cuts) + 1))
    return split_lanes(analysis, equal_lanes(plan, max(held) + 1), cuts, held)


def equal_lanes(plan: StagePlan, count: int) -> tuple[StagePlan, ...]:
    """The same plan of the whole step on so many groups of ranks, one after the other."""
    ranks = plan.mesh.num_ranks
    return tuple(replace(plan, first_rank=plan.first_rank + n * ranks) for n in range(count))


def split_lanes(
    analysis: Analysis, wholes: Sequence[StagePlan], cuts: Sequence[int], lanes: Sequence[int]
) -> Pipeline:
    """A stage from each of several plans of the whole step, on groups of ranks of any meshes.

    Args:
        analysis: The step.
        wholes: For every group of ranks, shardings of the whole step on its mesh. Their
            microbatches hold the same samples.
        cuts: First positions of stages 1 and on in `forward_order`.
        lanes: Group of ranks that holds each stage.
    """
    return _Splitter(analysis, wholes, cuts, lanes).run()


@lru_cache(maxsize=8)
def homes(analysis: Analysis, cuts: tuple[int, ...]) -> Mapping[str, int]:
    """Stage of every node that a cut divides, and of the backward.

    Forward nodes on parameters alone run where their first reader runs.

    Args:
        analysis: The step.
        cuts: First positions of stages 1 and on in `forward_order`.
    """
    order = forward_order(analysis)
    bounds = [0, *cuts, len(order)]
    home = {
        name: stage
        for stage, (first, end) in enumerate(itertools.pairwise(bounds))
        for name in order[first:end]
    }
    _place_parameter_nodes(analysis, home)
    _place_backward(analysis, home, len(cuts))
    return home


def _place_parameter_nodes(analysis: Analysis, home: dict[str, int]) -> None:
    readers: dict[str, list[str]] = {}
    for node in analysis.graph.nodes:
        if node.op not in SOURCE_OPS and Ref(node.name) not in analysis.aliases:
            for ref in node.operands:
                readers.setdefault(analysis.root(ref).root.node, []).append(node.name)
    for node in reversed(analysis.graph.nodes):
        if node.name not in home or node.name in analysis.looped:
            continue
        found = [home[reader] for reader in readers.get(node.name, ()) if reader in home]
        reads_loop = any(analysis.root(ref).root.node in home for ref in node.operands)
        if found and node.phase is Phase.FORWARD and not reads_loop:
            home[node.name] = min(found)


def _place_backward(analysis: Analysis, home: dict[str, int], last: int) -> None:
    graph = analysis.graph
    twins = {node.source: home[node.name] for node in graph.nodes if node.name in home}
    for node in graph.nodes:
        if node.phase is Phase.FORWARD or not _is_cut(analysis, node):
            continue
        roots = [analysis.root(ref).root.node for ref in node.operands]
        before = [
            home[root]
            for root in roots
            if root in home and graph.by_name[root].phase is Phase.BACKWARD
        ]
        latest = min(before, default=last)
        home[node.name] = min(twins.get(node.source, latest), latest)


def owners_of(analysis: Analysis, home: Mapping[str, int]) -> dict[str, int]:
    """Stage of every parameter that is read: the first that reads it."""
    found: dict[str, int] = {}
    for node in analysis.graph.nodes:
        for ref in node.operands if node.name in home else ():
            root = analysis.graph.by_name[analysis.root(ref).root.node]
            if root.op == PARAMETER:
                stage = home[node.name]
                found[root.target] = min(found.get(root.target, stage), stage)
    return found


_Read = tuple[Ref, Sharding]
"""What a node reads, maybe through views, and in which sharding."""


def _holders(members: Sequence[Collection[str]]) -> dict[str, set[int]]:
    """Stages that run every node."""
    found: dict[str, set[int]] = {}
    for stage, own in enumerate(members):
        for name in own:
            found.setdefault(name, set()).add(stage)
    return found


class _Splitter:
    """Working state of `split_lanes`."""

    def __init__(
        self,
        analysis: Analysis,
        wholes: Sequence[StagePlan],
        cuts: Sequence[int],
        lanes: Sequence[int],
    ) -> None:
        self.analysis = analysis
        self.graph = analysis.graph
        plans = [{node.name: node for node in whole.nodes} for whole in wholes]
        self.wholes = [wholes[lane] for lane in lanes]
        self.plans = [plans[lane] for lane in lanes]
        self.lanes = lanes
        self.num_stages = len(cuts) + 1
        self.home = homes(analysis, tuple(cuts))

    def run(self) -> Pipeline:
        owners = self._owners()
        members = self._members(owners)
        transfers = self._transfers(members, owners)
        stages = []
        for stage, whole in enumerate(self.wholes):
            stages.append(
                replace(
                    whole,
                    nodes=tuple(n for n in whole.nodes if n.name in members[stage]),
                    parameters=tuple(p for p in whole.parameters if owners[p.name] == stage),
                    recomputed=tuple(n for n in whole.recomputed if n in members[stage]),
                    forgotten={
                        reader: own
                        for reader, names in whole.forgotten.items()
                        if reader in members[stage]
                        and (own := tuple(n for n in names if n in members[stage]))
                    },
                    offloaded=self._read_late(whole, members[stage]),
                )
            )
        return Pipeline(tuple(stages), transfers)

    def _read_late(self, whole: StagePlan, own: set[str]) -> tuple[str, ...]:
        """Of what a plan offloads, what the backward of a stage reads."""
        late = set(whole.recomputed)
        read = {
            str(self.analysis.root(ref).root)
            for node in self.graph.nodes
            if node.name in own and (node.phase is Phase.BACKWARD or node.name in late)
            for ref in node.operands
        }
        return tuple(value for value in whole.offloaded if value in read)

    def _owners(self) -> dict[str, int]:
        found = owners_of(self.analysis, self.home)
        return {p.name: found.get(p.name, 0) for p in self.wholes[0].parameters}

    def _members(self, owners: Mapping[str, int]) -> list[set[str]]:
        """Nodes of every stage, with what it makes again of the batch."""
        members: list[set[str]] = [set() for _ in range(self.num_stages)]
        for name, stage in self.home.items():
            members[stage].add(name)
        for name, ref in self.graph.gradients.items():
            self._place_result(members, ref, owners[name])
        results = [*dict(self.graph.aux).values(), *self.graph.mutations.values()]
        if self.graph.loss is not None:
            results.append(self.graph.loss)
        for result in results:
            self._place_result(members, result, self.num_stages - 1)
        holders = _holders(members)
        for node in reversed(self.graph.nodes):
            for stage in sorted(holders.get(node.name, ())):
                for ref in node.operands:
                    root = self.analysis.root(ref).root.node
                    if root in self.plans[0] and root not in self.home:
                        members[stage].add(root)
                        holders.setdefault(root, set()).add(stage)
        return members

    def _place_result(self, members: list[set[str]], ref: Ref, stage: int) -> None:
        """Have a result that depends on the batch alone made on a stage."""
        root = self.analysis.root(ref).root.node
        if root in self.plans[0] and root not in self.home:
            members[stage].add(root)

    def _transfers(
        self, members: Sequence[set[str]], owners: Mapping[str, int]
    ) -> tuple[Transfer, ...]:
        found: dict[tuple[Ref, int], Transfer] = {}
        for (root, stage), reads in self._reads(members, owners).items():
            source = self._made_on(root, owners, members)
            if source is None or source == stage or root.node in members[stage]:
                continue
            sharding, arrives = self._crosses(root, source, stage, reads)
            found[root, stage] = Transfer(
                value=str(root), source=source, target=stage, sharding=sharding, arrives=arrives
            )
        place = {node.name: position for position, node in enumerate(self.graph.nodes)}
        return tuple(found[key] for key in sorted(found, key=lambda k: (place[k[0].node], *k)))

    def _reads(
        self, members: Sequence[set[str]], owners: Mapping[str, int]
    ) -> Mapping[tuple[Ref, int], list[_Read]]:
        """(value, stage that reads it) to how it is read there."""
        found: dict[tuple[Ref, int], list[_Read]] = {}

        def add(ref: Ref, stage: int, sharding: Sharding) -> None:
            found.setdefault((self.analysis.root(ref).root, stage), []).append((ref, sharding))

        holders = _holders(members)
        for node in self.graph.nodes:
            for stage in sorted(holders.get(node.name, ())):
                operands = self.plans[stage][node.name].operands
                for ref, sharding in zip(node.operands, operands, strict=True):
                    add(ref, stage, sharding)
        for name, ref in self.graph.gradients.items():
            add(ref, owners[name], self._stored(name, owners[name]))
        return found

    def _at_root(self, read: _Read, stage: int) -> Sharding:
        """How the value lies that is read through views."""
        ref, sharding = read
        sizes, rules = self.wholes[stage].mesh.sizes, self.analysis.rules
        found = through(
            sharding,
            tuple(reversed(self.analysis.root(ref).chain)),
            lambda name, now: rules[name].carry_back(now, sizes),
        )
        assert found is not None, read
        return found

    def _crosses(
        self, root: Ref, source: int, target: int, reads: Sequence[_Read]
    ) -> tuple[Sharding, Sharding | None]:
        """How a value leaves its stage and arrives on one that reads it.

        What lies alike on both goes as it is, terms of sums too. Else sums are added up before
        they leave, and the value arrives as its first reader has it; if a reader wants terms of a
        sum, it arrives as it would have been made there.
        """
        time = self.wholes[source].mesh.time_axis
        leaves, made = self._made_as(root, source), self._made_as(root, target)
        if time is not None and all(sharding[-1] == WHOLE for _, sharding in reads):
            if isinstance(leaves[-1], Partial):
                leaves = (*leaves[:-1], WHOLE)
            if isinstance(made[-1], Partial):
                made = (*made[:-1], WHOLE)
        if leaves == made and self._space(source).sizes == self._space(target).sizes:
            return leaves, None
        num_axes = len(self._space(target).sizes)
        wanted = self._at_root(reads[0], target)
        if any(isinstance(axis, Partial) for _, read in reads for axis in read[:num_axes]):
            wanted = made
        complete = self._complete(root, leaves, source)
        return complete, (*wanted[:num_axes], *complete[len(self._space(source).sizes) :])

    def _space(self, stage: int) -> Mesh:
        return self.wholes[stage].mesh.space

    def _complete(self, root: Ref, sharding: Sharding, stage: int) -> Sharding:
        """A sharding with its sums over ranks added up, each rank keeping a part if it can."""
        shape, mesh = self.graph.type_of(root).shape, self.wholes[stage].mesh
        for axis, ranks in enumerate(mesh.space.sizes):
            if not isinstance(sharding[axis], Partial):
                continue
            taken = {s.dim for s in sharding if isinstance(s, Split)}
            free = [d for d, n in enumerate(shape) if d not in taken and n and n % ranks == 0]
            new: Split | Whole = WHOLE
            if free:
                new = Split(free[0], 1, shape[free[0]] // ranks)
            sharding = (*sharding[:axis], new, *sharding[axis + 1 :])
        return sharding

    def _made_on(
        self, root: Ref, owners: Mapping[str, int], members: Sequence[set[str]]
    ) -> int | None:
        node = self.graph.by_name[root.node]
        if node.op == PARAMETER:
            return owners[node.target]
        if node.op in SOURCE_OPS:
            return None
        return self.home.get(root.node)

    def _made_as(self, root: Ref, stage: int) -> Sharding:
        """How a stage's plan of the whole step makes a value."""
        node = self.graph.by_name[root.node]
        if node.op == PARAMETER:
            return self._stored(node.target, stage)
        return self.plans[stage][root.node].outputs[root.index]

    def _stored(self, name: str, stage: int) -> Sharding:
        return next(p.stored for p in self.wholes[stage].parameters if p.name == name)
