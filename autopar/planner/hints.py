"""Hints checked against a model and a cluster, and settled into what the search needs."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from autopar.errors import HintError
from autopar.hint import (
    Degrees,
    Hint,
    Keep,
    MemoryLimit,
    Microbatches,
    Offload,
    OffloadStates,
    PerMicrobatch,
    Ranks,
    Recompute,
    Replicate,
    Schedule,
    Shard,
    Shares,
)
from autopar.ir.graph import INPUT, PARAMETER, Graph, Phase
from autopar.options import OptimizerSpec
from autopar.planner.cuts import CutHint
from autopar.schedules.table import schedule_named
from autopar.search.analysis import Analysis
from autopar.search.restrict import Restrictions, below, matching
from autopar.search.space import has_host_memory
from cost_models.cluster import Cluster, Device

_Hint = TypeVar("_Hint", bound=Hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Hints in force.

    Attributes:
        degrees: The one ``hint.degrees``, or None.
        restrictions: What the search must keep to.
        schedule: Name of the schedule of a pipeline; ``schedule_is_hinted`` if a hint says it.
        chunks: Chunks of the model that each stage of one holds, at least; ``chunks_are_hinted``
            if a hint says how many.
        cuts: Hints about where a pipeline is cut.
        shares: Parts of the batch that the ranks of ``dp`` take, or None.
        ranks: Ranks that take part, or None.
        microbatches: Their forced number, or None.
        memory_limit_bytes: Bytes that a hint lets a rank use, or None.
        memory_fraction: Usable part of a device's memory without that hint.
    """

    degrees: Degrees | None
    restrictions: Restrictions
    schedule: str
    schedule_is_hinted: bool
    chunks: int
    chunks_are_hinted: bool
    cuts: tuple[CutHint, ...]
    shares: tuple[int, ...] | None
    ranks: Ranks | None
    microbatches: int | None
    memory_limit_bytes: int | None
    memory_fraction: float

    @property
    def num_stages(self) -> int | None:
        """Stages that a hint asks for, or None."""
        return None if self.degrees is None else self.degrees.pp

    @property
    def is_piped(self) -> bool:
        """Whether hints ask for more than one stage."""
        return bool(self.cuts) or (self.num_stages or 1) > 1

    def usable_bytes(self, device: Device) -> int:
        """Bytes that a rank on this device may use."""
        if self.memory_limit_bytes is not None:
            return min(self.memory_limit_bytes, device.memory_bytes)
        return int(device.memory_bytes * self.memory_fraction)


def settle(
    analysis: Analysis,
    cluster: Cluster,
    hints: Sequence[Hint],
    memory_fraction: float | None,
    *,
    first: bool = True,
) -> Settled:
    """The hints in force.

    Args:
        analysis: The step.
        cluster: Where.
        hints: As given.
        memory_fraction: Usable part of a device's memory; None for the cluster's own.
        first: Whether it is the first batch; a later one may be too small for the microbatches.

    Raises:
        HintError: A hint matches nothing, repeats another or names an axis that is not there.
    """
    for given in hints:
        _check_kind(given)
    degrees = _only(hints, Degrees, "hint.degrees")
    limit = _only(hints, MemoryLimit, "hint.memory_limit")
    schedule = _only(hints, Schedule, "hint.schedule")
    spec = schedule_named("1f1b" if schedule is None else schedule.name)
    microbatches = _only(hints, Microbatches, "hint.microbatches")
    if microbatches is not None and first:
        _check_microbatches(analysis.graph, microbatches.count)
    alone = tuple(h.pattern for h in hints if isinstance(h, PerMicrobatch))
    _check_match(analysis.graph, alone)
    count = None if microbatches is None else microbatches.count
    if alone or analysis.graph.alone:
        # The step is that of one number of microbatches.
        count = analysis.graph.microbatches
    parameters = tuple(h for h in hints if isinstance(h, Shard | Replicate))
    names = [node.target for node in analysis.graph.sources(PARAMETER)]
    names += list(analysis.graph.aliases)
    for hint in parameters:
        check_pattern(hint.pattern, names)
    _check_conflicts(parameters, names)
    cuts = tuple(h for h in hints if isinstance(h, CutHint))
    if cuts and degrees is not None and degrees.pp == 1:
        raise HintError(
            f"cannot apply {cuts[0]}: there is one stage, as hint.degrees(pp=1) asks; leave pp "
            "out, or give another number of stages"
        )
    shares = _only(hints, Shares, "hint.shares")
    if shares is not None:
        _check_shares(shares, degrees)
    recompute = tuple(h.pattern for h in hints if isinstance(h, Recompute))
    keep = tuple(h.pattern for h in hints if isinstance(h, Keep))
    away = [h for h in hints if isinstance(h, Offload)]
    offload = tuple(h.pattern for h in away if h.what == "activations")
    homes = tuple(h.pattern for h in away if h.what == "parameters")
    _check_modules(analysis.graph, recompute, keep, offload)
    for pattern in homes:
        _check_below(pattern, names)
    states = any(isinstance(h, OffloadStates) for h in hints)
    asked = next((h for h in hints if isinstance(h, Offload | OffloadStates)), None)
    if asked is not None:
        for run in cluster.devices:
            _check_host(run.device, asked)
    fraction = cluster.usable_memory_fraction if memory_fraction is None else memory_fraction
    return Settled(
        degrees=degrees,
        restrictions=Restrictions(
            zero=None if degrees is None else degrees.zero,
            parameters=parameters,
            recompute=recompute,
            keep=keep,
            offload=offload,
            offload_states=states,
            offload_parameters=homes,
        ),
        schedule=spec.name,
        schedule_is_hinted=schedule is not None,
        chunks=spec.least_chunks if schedule is None else schedule.chunks or spec.least_chunks,
        chunks_are_hinted=schedule is not None and schedule.chunks is not None,
        cuts=cuts,
        shares=None if shares is None else shares.parts,
        ranks=_ranks(hints, cluster),
        microbatches=count,
        memory_limit_bytes=None if limit is None else limit.limit_bytes,
        memory_fraction=fraction,
    )


def _check_kind(given: object) -> None:
    """Refuse what is no hint."""
    if not isinstance(given, Hint):
        raise HintError(
            f"cannot use {given!r} as a hint: it is a {type(given).__name__}; give a list of what "
            "the functions of autopar.hint return"
        )


def _ranks(hints: Sequence[Hint], cluster: Cluster) -> Ranks | None:
    """The one ``hint.ranks``, if the cluster has them."""
    given = _only(hints, Ranks, "hint.ranks")
    if given is not None and given.first + given.count > cluster.num_devices:
        raise HintError(
            f"cannot plan on {given.count} ranks from rank {given.first} on: cluster "
            f"{cluster.name!r} has ranks 0 to {cluster.num_devices - 1}; name ranks that are there"
        )
    return given


def _check_shares(shares: Shares, degrees: Degrees | None) -> None:
    """Refuse parts of the batch that no ranks would take."""
    given = None if degrees is None else degrees.dp
    counts = given if isinstance(given, tuple) else (given,)
    if len(shares.parts) not in counts:
        raise HintError(
            f"cannot apply hint.shares{shares.parts}: it has {len(shares.parts)} parts, and "
            f"{'dp is not fixed' if given is None else f'dp={given}'}; give one for every rank of "
            f"hint.degrees(dp={len(shares.parts)})"
        )


def _check_microbatches(graph: Graph, count: int) -> None:
    """Refuse microbatches that would hold no sample."""
    for node in graph.sources(INPUT):
        dim = graph.batch_dims.get(node.target)
        if dim is None or count == 1:
            continue
        samples = node.outputs[0].shape[dim]
        each = -(-samples // count)
        if each * (count - 1) >= samples:
            raise HintError(
                f"cannot cut the batch into {count} microbatches: input {node.target!r} has "
                f"{samples} sample{'s' if samples > 1 else ''}, so {count} microbatches of {each} "
                f"would leave one empty; use at most {-(-samples // each)}"
            )


def _only(hints: Sequence[Hint], kind: type[_Hint], name: str) -> _Hint | None:
    found = [h for h in hints if isinstance(h, kind)]
    if len(found) > 1:
        raise HintError(f"cannot use {len(found)} {name} hints: give one that says all")
    return found[0] if found else None


def check_pattern(pattern: str, names: Sequence[str]) -> None:
    """Refuse a pattern that matches no parameter, naming near misses."""
    if any(matching(pattern, name) for name in names):
        return
    modules = {name.rpartition(".")[0] for name in names} - {""}
    bare = pattern.strip("*.")
    near = difflib.get_close_matches(bare, [*names, *sorted(modules)], n=3, cutoff=0.3)
    near = near or [name for name in names if bare.split(".")[-1] in name][:3] or list(names[:3])
    raise HintError(
        f"cannot apply hint {pattern!r}: no parameter or module matches; did you mean "
        f"{', '.join(repr(name) for name in near)}?"
    )


def _check_below(pattern: str, names: Sequence[str]) -> None:
    """Refuse a pattern below which there is no parameter."""
    if not any(below(pattern, name) for name in names):
        check_pattern(pattern, names)


def check_optimizer(graph: Graph, restrictions: Restrictions, optimizer: OptimizerSpec) -> None:
    """Refuse to put what an optimizer updates where it cannot.

    Raises:
        HintError: It keeps its state on the device.
    """
    if optimizer.host_bucket_elements is not None:
        return
    asked: Offload | OffloadStates | None = None
    if restrictions.offload_states:
        asked = OffloadStates()
    for pattern in restrictions.offload_parameters:
        if any(below(pattern, name) for name in graph.gradients):
            asked = asked or Offload(pattern, "parameters")
    if asked is not None:
        raise HintError(
            f"cannot apply {asked}: the optimizer keeps its state on the device; pass "
            "optimizer=autopar.optim.AdamW, or an OptimizerSpec with host_bucket_elements"
        )


def _check_host(device: Device, asked: Offload | OffloadStates) -> None:
    """Refuse to offload where that frees nothing."""
    if has_host_memory(device):
        return
    why = "its host memory is its own memory" if device.unified_memory else "it has no host memory"
    raise HintError(
        f"cannot apply {asked} on device '{device.kind}': {why}, so that offload frees "
        "nothing; drop the hint, or give the device a host_memory and a host_link"
    )


_FATES = ("recompute", "keep", "offload")
_SAYS = {
    "recompute": "forgets its activations",
    "keep": "keeps them on the device",
    "offload": "keeps them in host memory",
}


def _check_modules(graph: Graph, *patterns: Sequence[str]) -> None:
    """Refuse patterns over modules that match nothing, or that say two things of one module.

    Args:
        graph: The step.
        patterns: Of `_FATES`, in that order.
    """
    _check_match(graph, tuple(itertools.chain(*patterns)))
    for path in sorted(_running(graph)):
        said = [
            (fate, pattern)
            for fate, own in zip(_FATES, patterns, strict=True)
            for pattern in own
            if below(pattern, path)
        ]
        other = next((s for s in said if s[0] != said[0][0]), None)
        if other is not None:
            (fate, first), (fate_2, second) = said[0], other
            raise HintError(
                f"cannot apply hint.{fate}({first!r}) and hint.{fate_2}({second!r}) to module "
                f"{path!r}: one {_SAYS[fate]}, the other {_SAYS[fate_2]}; drop one"
            )


def _running(graph: Graph) -> set[str]:
    """Paths of the modules that run in the forward."""
    return {node.source.module for node in graph.nodes if node.phase is Phase.FORWARD} - {""}


def _check_match(graph: Graph, patterns: Sequence[str]) -> None:
    """Refuse patterns over modules that match nothing, naming near misses."""
    paths = _running(graph)
    for pattern in patterns:
        if not any(below(pattern, path) for path in paths):
            near = difflib.get_close_matches(pattern.strip("*."), sorted(paths), n=3, cutoff=0.3)
            near = near or sorted(paths)[:3]
            ask = f"did you mean {', '.join(map(repr, near))}?"
            if not near:
                ask = "the model runs none: put what the hint is for in a module of its own"
            raise HintError(
                f"cannot apply hint {pattern!r}: no module that runs in the forward matches; {ask}"
            )


def _check_conflicts(hints: Sequence[Shard | Replicate], names: Sequence[str]) -> None:
    for name in names:
        own = [h for h in hints if matching(h.pattern, name)]
        if any(isinstance(h, Replicate) for h in own) and any(isinstance(h, Shard) for h in own):
            texts = " and ".join(str(h) for h in own)
            raise HintError(
                f"cannot apply {texts} to {name!r}: one splits it, the other keeps it whole; "
                "drop one"
            )
