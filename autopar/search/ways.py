"""How a value may change from layout to layout."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

from autopar.cost.node import NodeCost, local_bytes
from autopar.cost.reshard import ALL_REDUCE, Step, replaced, step_kind
from autopar.ir.sharding import WHOLE, AxisSharding, Mesh, Partial, Sharding, Split, is_legal
from autopar.search.layouts import Layouts, axis_order, leading
from autopar.search.problem import Arc


class Ways:
    """Ways between layouts on a mesh, each kind of value's found once."""

    def __init__(self, mesh: Mesh, cost: NodeCost) -> None:
        self.mesh = mesh
        self.cost = cost
        self.found: dict[Hashable, tuple[tuple[Sharding, ...], tuple[Arc, ...]]] = {}

    def between(
        self,
        layouts: Layouts,
        needed: frozenset[int],
        in_time: str,
        joined: bool,
    ) -> tuple[Arc, ...]:
        """Changes of layout of one member that lead to what is needed.

        Adds the layouts between those that are there. Terms are summed if ``joined``.
        """
        key = (layouts.kind, tuple(layouts.index), needed, in_time, joined)
        found = self.found.get(key)
        if found is None:
            everything = Layouts(layouts.kind, dict(layouts.index))
            self._add_between(everything)
            arcs = self._all_arcs(everything, in_time, joined)
            found = self.found[key] = leading(everything, arcs, needed, len(layouts.index))
        for sharding in found[0]:
            layouts.number(sharding)
        return found[1]

    def _add_between(self, layouts: Layouts) -> None:
        """Add the layouts that mix what those that are there do on every axis.

        An axis may also do nothing where it does several things, since it may not get from one to
        the other at once. There is no way from one split on the time axis to another, only from
        what is not split there to any: layouts of different splits do not mix.
        """
        time = self.mesh.time_axis
        loose: list[Sharding] = []
        groups: dict[AxisSharding, list[Sharding]] = {}
        for sharding in layouts.index:
            if time is not None and isinstance(sharding[time], Split):
                groups.setdefault(sharding[time], []).append(sharding)
            else:
                loose.append(sharding)
        # Whatever a layout that is not split may become, it may become before it is.
        before = {(*s[:time], WHOLE) for known in groups.values() for s in known} if loose else ()
        for known in ((*loose, *before), *((*own, *loose) for own in groups.values())):
            options = [{s[axis] for s in known} for axis in range(len(self.mesh.sizes))]
            for axis, own in enumerate(options):
                if len(own) > 1 and axis != time:
                    own.add(WHOLE)
            for mixed in itertools.product(*(sorted(own, key=axis_order) for own in options)):
                if is_legal(layouts.kind.shape, mixed, self.mesh, empty=True):
                    layouts.number(mixed)

    def _all_arcs(self, layouts: Layouts, in_time: str, joined: bool) -> list[Arc]:
        """Everything that one member may do from layout to layout."""
        kind, arcs = layouts.kind, []
        options = [
            sorted({s[axis] for s in layouts.index}, key=axis_order)
            for axis in range(len(self.mesh.sizes))
        ]
        for before, tail in layouts.index.items():
            for axis, choices in enumerate(options):
                if not joined and isinstance(before[axis], Partial):
                    continue
                for new in choices:
                    after = replaced(before, axis, new)
                    head = layouts.index.get(after)
                    what = None if head is None else step_kind(kind.shape, before, after, axis)
                    if what is None or head is None:
                        continue
                    if axis == self.mesh.time_axis and what != in_time:
                        continue
                    step = Step(what, axis, before, after)
                    seconds = self.cost.step_s(kind, step)
                    if seconds == float("inf"):
                        continue
                    added_up = axis == self.mesh.time_axis and what == ALL_REDUCE
                    held = float(local_bytes(kind, after)) if added_up else 0.0
                    arcs.append(Arc(tail, head, seconds, held))
        return arcs
