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

import numpy as np

from autopar.ir.graph import PARAMETER, SOURCE_OPS, Node, Phase, Ref
from autopar.ir.sharding import WHOLE, Partial, Sharding
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


def balanced_cuts(seconds: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """First positions of stages 1 and on, for the least longest stage.

    Args:
        seconds: Of each forward node, its backward included.
        num_stages: Number of stages, at most as many as nodes.
    """
    assert num_stages <= len(seconds), f"{len(seconds)} nodes for {num_stages} stages"
    sums = [0.0, *itertools.accumulate(seconds)]
    count = len(seconds)
    best = [[float("inf")] * (count + 1) for _ in range(num_stages + 1)]
    came = [[0] * (count + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, num_stages + 1):
        first = stage - 1
        for end in range(stage, count + 1):
            while first + 1 < end and max(
                best[stage - 1][first + 1], sums[end] - sums[first + 1]
            ) <= max(best[stage - 1][first], sums[end] - sums[first]):
                first += 1
            best[stage][end] = max(best[stage - 1][first], sums[end] - sums[first])
            came[stage][end] = first
    cuts = []
    end = count
    for stage in range(num_stages, 1, -1):
        end = came[stage][end]
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


def bounded_cuts(
    seconds: Sequence[float], least: Sequence[Sequence[int]]
) -> tuple[int, ...] | None:
    """As `balanced_cuts` within bounds, to 1e-9 of the sum; None if there are no such cuts.

    The longest stage is found by bisection: for a length, the ends that every stage can reach.

    Args:
        seconds: Of each forward node, its backward included.
        least: As of `least_firsts`.
    """
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    bounds = [np.asarray(own) for own in least]
    low_s, high_s = 0.0, float(sums[-1])
    found = _reached(sums, bounds, high_s)
    if found is None:
        return None
    while high_s - low_s > 1e-9 * float(sums[-1]):
        middle_s = (low_s + high_s) / 2
        reached = _reached(sums, bounds, middle_s)
        if reached is None:
            low_s = middle_s
        else:
            high_s, found = middle_s, reached
    cuts: list[int] = []
    end = len(seconds)
    for stage in range(len(least) - 1, 0, -1):
        first = max(bounds[stage][end], np.searchsorted(sums, sums[end] - high_s - _ROUNDING))
        end = int(first + np.flatnonzero(found[stage][first:end])[0])
        cuts.append(end)
    return tuple(reversed(cuts))


_ROUNDING = 1e-15


def _reached(
    sums: np.ndarray, bounds: Sequence[np.ndarray], longest_s: float
) -> list[np.ndarray] | None:
    """For every stage, whether it can begin at each position; None if the last cannot end."""
    ends = np.arange(len(sums))
    shortest = np.searchsorted(sums, sums - longest_s - _ROUNDING)
    reached = [ends == 0]
    for least in bounds:
        before = np.concatenate([[0], np.cumsum(reached[-1])])
        first = np.minimum(np.maximum(least, shortest), ends)
        reached.append(before[ends] > before[first])
    return reached if reached[-1][-1] else None


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
    return _Splitter(analysis, plan, cuts, lanes or range(len(cuts) + 1)).run()


class _Splitter:
    """Working state of `split_stages`."""

    def __init__(
        self, analysis: Analysis, plan: StagePlan, cuts: Sequence[int], lanes: Sequence[int]
    ) -> None:
        self.analysis = analysis
        self.graph = analysis.graph
        self.plan = plan
        self.plans = {node.name: node for node in plan.nodes}
        self.num_stages = len(cuts) + 1
        self.lanes = lanes
        bounds = [*cuts, len(forward_order(analysis))]
        self.home: dict[str, int] = {}
        stage = 0
        for position, name in enumerate(forward_order(analysis)):
            while position >= bounds[stage]:
                stage += 1
            self.home[name] = stage

    def run(self) -> Pipeline:
        self._place_parameter_nodes()
        self._place_backward()
        owners = self._owners()
        members = self._members(owners)
        transfers = self._transfers(members, owners)
        stages = []
        for stage in range(self.num_stages):
            nodes = tuple(n for n in self.plan.nodes if n.name in members[stage])
            owned = tuple(p for p in self.plan.parameters if owners[p.name] == stage)
            stages.append(
                replace(
                    self.plan,
                    nodes=nodes,
                    parameters=owned,
                    recomputed=tuple(n for n in self.plan.recomputed if n in members[stage]),
                    first_rank=self.plan.first_rank + self.lanes[stage] * self.plan.mesh.num_ranks,
                )
            )
        return Pipeline(tuple(stages), transfers)

    def _place_parameter_nodes(self) -> None:
        """Forward nodes on parameters alone run where their first reader runs."""
        looped = self.analysis.looped
        for node in reversed(self.graph.nodes):
            if node.name not in self.home or node.name in looped:
                continue
            readers = self._readers.get(node.name, ())
            found = [self.home[r] for r in readers if r in self.home]
            if found and node.phase is Phase.FORWARD and not self._reads_loop(node):
                self.home[node.name] = min(found)

    def _reads_loop(self, node: Node) -> bool:
        return any(self.analysis.root(r).root.node in self.home for r in node.operands)

    @property
    def _readers(self) -> Mapping[str, Sequence[str]]:
        found: dict[str, list[str]] = {}
        for node in self.graph.nodes:
            if node.op in SOURCE_OPS or Ref(node.name) in self.analysis.aliases:
                continue
            for ref in node.operands:
                found.setdefault(self.analysis.root(ref).root.node, []).append(node.name)
        return found

    def _place_backward(self) -> None:
        twins: dict[object, int] = {}
        for node in self.graph.nodes:
            if node.name in self.home:
                twins[node.source] = self.home[node.name]
        last = self.num_stages - 1
        for node in self.graph.nodes:
            if node.phase is Phase.FORWARD or not _is_cut(self.analysis, node):
                continue
            before = [
                self.home[root.node]
                for root in (self.analysis.root(r).root for r in node.operands)
                if root.node in self.home and self.graph.by_name[root.node].phase is Phase.BACKWARD
            ]
            latest = min(before, default=last)
            self.home[node.name] = min(twins.get(node.source, latest), latest)

    def _owners(self) -> dict[str, int]:
        owners: dict[str, int] = {}
        for node in self.graph.nodes:
            for ref in node.operands if node.name in self.home else ():
                root = self.graph.by_name[self.analysis.root(ref).root.node]
                if root.op == PARAMETER:
                    stage = self.home[node.name]
                    owners[root.target] = min(owners.get(root.target, stage), stage)
        return {p.name: owners.get(p.name, 0) for p in self.plan.parameters}

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
        for node in reversed(self.graph.nodes):
            for own in members:
                if node.name in own:
                    for ref in node.operands:
                        root = self.analysis.root(ref).root.node
                        if root in self.plans and root not in self.home:
                            own.add(root)
        return members

    def _place_result(self, members: list[set[str]], ref: Ref, stage: int) -> None:
        """Have a result that depends on the batch alone made on a stage."""
        root = self.analysis.root(ref).root.node
        if root in self.plans and root not in self.home:
            members[stage].add(root)

    def _transfers(
        self, members: Sequence[set[str]], owners: Mapping[str, int]
    ) -> tuple[Transfer, ...]:
        found: dict[tuple[Ref, int], Transfer] = {}
        time = self.plan.mesh.time_axis
        wanted: list[tuple[Ref, int, bool]] = []
        for node in self.graph.nodes:
            for stage, own in enumerate(members):
                if node.name in own:
                    operands = self.plans[node.name].operands
                    for ref, sharding in zip(node.operands, operands, strict=True):
                        joined = time is not None and sharding[time] == WHOLE
                        wanted.append((self.analysis.root(ref).root, stage, joined))
        for name, ref in self.graph.gradients.items():
            wanted.append((self.analysis.root(ref).root, owners[name], time is not None))
        all_joined: dict[tuple[Ref, int], bool] = {}
        for root, stage, joined in wanted:
            all_joined[root, stage] = all_joined.get((root, stage), True) and joined
        for (root, stage), joined in all_joined.items():
            source = self._made_on(root, owners, members)
            if source is None or source == stage or root.node in members[stage]:
                continue
            sharding = self._leaves_as(root)
            if joined and time is not None and isinstance(sharding[time], Partial):
                sharding = (*sharding[:time], WHOLE)
            found[root, stage] = Transfer(
                value=str(root), source=source, target=stage, sharding=sharding
            )
        place = {node.name: position for position, node in enumerate(self.graph.nodes)}
        return tuple(found[key] for key in sorted(found, key=lambda k: (place[k[0].node], *k)))

    def _made_on(
        self, root: Ref, owners: Mapping[str, int], members: Sequence[set[str]]
    ) -> int | None:
        node = self.graph.by_name[root.node]
        if node.op == PARAMETER:
            return owners[node.target]
        if node.op in SOURCE_OPS:
            return None
        return self.home.get(root.node)

    def _leaves_as(self, root: Ref) -> Sharding:
        node = self.graph.by_name[root.node]
        if node.op == PARAMETER:
            return next(p.stored for p in self.plan.parameters if p.name == node.target)
        return self.plans[root.node].outputs[root.index]
