"""Seconds that no plan takes less than, whatever it shards, keeps, moves or cuts.

A *way* is a number of microbatches M, a schedule, and stages of so many ranks. What is proven of a
way holds for all of its plans as the simulator times them. An op in p pieces takes f(p) a piece at
least (`autopar.cost.least`); on a stage s of n ranks it is cut into n M pieces at most, and each
rank runs all ops of its stage, so a microbatch takes t_s on it, where every op is in one t_s:

    t_s >= sum of f_s(n M) over the ops of the stage                                     _PerStage

Every stage does its work; under a schedule of one chunk a stage whose backward is whole it also
waits for the first microbatch on its way down, and for the last on its way up:

    step >= M t_s                         step >= M t_s + sum of t_r over the stages r before s

With weights m >= 0 of these inequalities that add up to 1, an op counts with the least weight that
any stage gives it, wherever the cut puts it; `_weights` solves the program that makes this most for
stages of equal parts of the work. What runs once a step (ops that split no batch, the optimizer's
update) is added with the same weights. Where microbatches are few, more is said by one of them: its
forward goes through all stages, one behind the other, before any stage begins its M backwards; and
so does its backward where that is whole. Beside all this the host issues every op.

Nothing is claimed of communication, which may hide, nor of memory but this: parameters and
optimizer state that do not fit on all devices cross the host link in the update.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost.kernel import is_causal
from autopar.cost.least import Floats, Kernel, least_seconds
from autopar.cost.node import update_bytes_per_s
from autopar.ir.graph import DTYPE_BYTES, PARAMETER, SOURCE_OPS, Node, Phase
from autopar.ir.sharding import Mesh
from autopar.lower.builder import VIEW_OPS
from autopar.options import OptimizerSpec
from autopar.planner.hints import Settled
from autopar.planner.layout import Layout
from autopar.planner.request import Request
from autopar.schedules.table import schedule_named
from autopar.search.analysis import Analysis
from cost_models.cluster import Cluster

ROUNDING = 1e-9
"""Part of a bound that sums of many seconds may be off by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a step has to do, by kinds of ops.

    Attributes:
        kernels: One op of every kind.
        looped: How many of a kind every microbatch runs; ``forward`` those of them in the forward.
        once: How many a step runs once, or no less often.
        update_bytes: That the optimizer's update reads and writes.
        resident_bytes: Of parameters and their optimizer state.
        may_leave: Whether state may be in host memory.
    """

    kernels: tuple[Kernel, ...]
    looped: Floats
    forward: Floats
    once: Floats
    update_bytes: float
    resident_bytes: float
    may_leave: bool


def work_of(analysis: Analysis, optimizer: OptimizerSpec) -> Work:
    """The work of a captured step."""
    kernels, counts = [], []
    by_name = analysis.graph.by_name
    for members in analysis.folding.classes:
        kernel = _kernel(analysis, by_name[members[0]])
        if kernel is None:
            continue
        looped = [name for name in members if name in analysis.looped]
        forward = sum(by_name[name].phase is Phase.FORWARD for name in looped)
        kernels.append(kernel)
        counts.append((len(looped), forward, len(members) - len(looped)))
    looped_, forward_, once_ = np.array(counts, dtype=np.float64).reshape(len(counts), 3).T
    update, resident = _state_bytes(analysis, optimizer)
    return Work(
        kernels=tuple(kernels),
        looped=looped_,
        forward=forward_,
        once=once_,
        update_bytes=update,
        resident_bytes=resident,
        may_leave=optimizer.host_bucket_elements is not None,
    )


def _kernel(analysis: Analysis, node: Node) -> Kernel | None:
    """What a node runs; None if that is nothing, or a view."""
    if node.op in SOURCE_OPS:
        return None
    rule = analysis.rules[node.name]
    if rule.alias or rule.view or node.op in VIEW_OPS:
        return None
    return Kernel(
        op=node.op,
        operands=analysis.operand_types(node),
        outputs=node.outputs,
        causal=is_causal(node.op, node.args),
        flops=rule.flops,
        pieces=math.prod(rule.sizes[factor] for factor in rule.factors()),
    )


def _state_bytes(analysis: Analysis, optimizer: OptimizerSpec) -> tuple[float, float]:
    """Bytes that the update moves, and of parameters and state, of parameters that are read."""
    graph = analysis.graph
    read = {ref.node for node in graph.nodes for ref in node.operands}
    update = resident = 0.0
    for node in graph.sources(PARAMETER):
        if node.name not in read:
            continue
        (kind,) = node.outputs
        trained = node.target in graph.gradients
        size = kind.num_elements * DTYPE_BYTES[kind.dtype]
        state = kind.num_elements * optimizer.element_bytes(kind.dtype) * trained
        update += 2 * (size + state) + size * trained
        resident += size + state
    return update, resident


@dataclass(frozen=True, slots=True)
class _Place:
    """Ranks that run an op in equal parts, or one rank that takes any part.

    Attributes:
        devices: Numbers of the runs of devices, of which one prices the ranks.
        ranks: How many; 0 for one rank that takes any part.
        shared: Whether they take unlike parts of the batch: then nothing is known of the rest.
    """

    devices: tuple[int, ...]
    ranks: int
    shared: bool = False


class Bounds:
    """What is proven of the ways to plan a step on a cluster.

    Attributes:
        work: Of the step.
        cluster: Where; its runs of devices are numbered.
        away_bytes: Of parameters and state that no device has room for.
    """

    def __init__(self, analysis: Analysis, request: Request, settled: Settled) -> None:
        self.work = work_of(analysis, request.optimizer)
        self.cluster = request.cluster
        self.away_bytes = _away_bytes(self.work, self.cluster, settled)
        self._devices = [run.device for run in self.cluster.devices]
        self._kernels = [least_seconds(device, self.work.kernels) for device in self._devices]
        self._priced: dict[tuple[tuple[int, ...], int], Floats] = {}
        self._known: dict[tuple[tuple[_Place, ...], int, bool, bool], float] = {}

    def way_s(self, meshes: Sequence[Mesh], microbatches: int, layout: Layout) -> float:
        """Seconds that no plan of a way takes less than.

        Args:
            meshes: Of every stage, with the shares of the batch that its ranks take.
            microbatches: Of the step.
            layout: Schedule, stages and chunks.
        """
        whole = not schedule_named(layout.schedule).splits_backward
        chained = whole and layout.num_chunks == 1
        places, count = self._places(meshes), microbatches
        if len(meshes) == 1 and meshes[0].shares:
            # Of ranks that take unlike parts each is a place of its own, whatever it runs when.
            places, count, chained = self._one_by_one(), 1, False
        key = places, count, chained, whole
        if key not in self._known:
            self._known[key] = (1 - ROUNDING) * self._step_s(*key)
        return self._known[key]

    def _places(self, meshes: Sequence[Mesh]) -> tuple[_Place, ...]:
        found, first = [], 0
        for mesh in meshes:
            runs = self.cluster.runs_between(first, first + mesh.num_ranks)
            found.append(_Place(runs, mesh.num_ranks, bool(mesh.shares)))
            first += mesh.num_ranks
        return tuple(found)

    def _one_by_one(self) -> tuple[_Place, ...]:
        """Every rank, priced as a device that is no faster than its own."""
        peaks = [max(device.peak_flops_per_s.values()) for device in self._devices]
        slower = [
            tuple(other for other, least in enumerate(peaks) if least <= peak) for peak in peaks
        ]
        counts = [run.count for run in self.cluster.devices]
        return tuple(
            _Place(devices, 0)
            for devices, count in zip(slower, counts, strict=True)
            for _ in range(count)
        )

    def _step_s(self, places: tuple[_Place, ...], count: int, chained: bool, whole: bool) -> float:
        """Seconds of the step at least.

        Args:
            places: Stages.
            count: Microbatches.
            chained: Whether every stage waits for those before it, forth and back.
            whole: Whether the backward of a microbatch is one action.
        """
        run_s = [self._pieces_s(place, place.ranks * count) for place in places]
        once_s = [self._pieces_s(place, place.ranks) for place in places]
        issued_s = [self._issued_s(place) for place in places]
        shared_s = max(
            self._shared_s(places, own, once, count, chained)
            for own, once in ((run_s, once_s), (issued_s, issued_s))
        )
        alone_s = 0.0
        if places[0].ranks:
            alone_s = max(self._through_s(own, count, whole) for own in (run_s, issued_s))
        return max(shared_s, alone_s) + self._update_s(places)

    def _pieces_s(self, place: _Place, pieces: int) -> Floats:
        """Least seconds of a piece of every op, on any of the devices of a place."""
        key = place.devices, pieces
        if key not in self._priced:
            ranks = self.cluster.num_devices
            own = [self._kernels[device] for device in place.devices]
            each = [kernels.of(pieces) if pieces else kernels.parts_of(ranks) for kernels in own]
            self._priced[key] = np.min(each, axis=0)
        return self._priced[key]

    def _issued_s(self, place: _Place) -> Floats:
        """Seconds of the host to issue an op, of every op."""
        host_s = min(self._devices[device].host_op_s for device in place.devices)
        return np.full(len(self.work.kernels), host_s if place.ranks else 0.0)

    def _shared_s(
        self,
        places: Sequence[_Place],
        run_s: Sequence[Floats],
        once_s: Sequence[Floats],
        count: int,
        chained: bool,
    ) -> float:
        """Seconds of work that the stages share, at least."""
        speeds = _speeds(self.work.looped + self.work.once, run_s)
        shared = len(places) > 1 and any(place.shared for place in places)
        found = []
        for waits in {False, chained}:
            weights = _weights(speeds, count) if waits else speeds
            behind = _behind(weights) if waits else [0.0] * len(weights)
            heights = [count * own + more for own, more in zip(weights, behind, strict=True)]
            loop_s = float(self.work.looped @ _least(heights, run_s))
            around_s = 0.0 if shared else float(self.work.once @ _least(weights, once_s))
            found.append((loop_s + around_s) / sum(weights))
        return max(found)

    def _through_s(self, run_s: Sequence[Floats], count: int, whole: bool) -> float:
        """Seconds in which a microbatch goes through the stages, and what can only follow."""
        anywhere_s = np.min(run_s, axis=0)
        backward = self.work.looped - self.work.forward
        speeds = _speeds(backward, run_s)
        behind_s = count * float(backward @ _least(speeds, run_s)) / sum(speeds)
        forward_s = float(self.work.forward @ anywhere_s)
        return max(forward_s + behind_s, float(self.work.looped @ anywhere_s) * whole)

    def _update_s(self, places: Sequence[_Place]) -> float:
        """Seconds of the optimizer's update, at least."""
        if len(places) > 1 and any(place.shared for place in places):
            return 0.0
        rate = link = 0.0
        for place in places:
            own = [self._devices[device] for device in place.devices]
            ranks = place.ranks or 1
            rate += ranks * max(map(update_bytes_per_s, own))
            link += ranks * max(device.host_link_bytes_per_s for device in own)
        return max(self.work.update_bytes / rate, self.away_bytes / link)


LEAST_S = 1e-30
"""Instead of no seconds at all, where stages are compared."""


def _speeds(counts: Floats, seconds: Sequence[Floats]) -> list[float]:
    """How fast stages are at the same ops."""
    return [1 / max(float(counts @ own), LEAST_S) for own in seconds]


def _weights(speeds: Sequence[float], count: int) -> list[float]:
    """Weights of the stages' inequalities under which every stage gives work the same weight.

    A weight w of stage s counts for its work M times, and once for that of each stage before it.
    The last stage's is known, then those before it.
    """
    found: list[float] = []
    for speed in reversed(speeds):
        found.append(max(0.0, (speed - sum(found)) / count))
    return found[::-1]


def _behind(weights: Sequence[float]) -> list[float]:
    """Sums of the weights behind each."""
    sums = list(itertools.accumulate(reversed(weights), initial=0.0))
    return sums[-2::-1]


def _least(weights: Sequence[float], seconds: Sequence[Floats]) -> Floats:
    """Weighted seconds of every op where they are least."""
    pairs = zip(weights, seconds, strict=True)
    found: Floats = np.min([weight * own for weight, own in pairs], axis=0)
    return found


def _away_bytes(work: Work, cluster: Cluster, settled: Settled) -> float:
    """Bytes of parameters and their state that must be in host memory."""
    if not work.may_leave:
        return 0.0
    room = sum(run.count * settled.usable_bytes(run.device) for run in cluster.devices)
    return max(0.0, work.resident_bytes - room)
