"""Where terms of a gradient may not be summed: where they are narrower than it asks for.

Back from a gradient, through ops that are linear in what they read, every value that nothing else
reads and that holds no samples is a gradient in the making: over the axes that split the batch it
is partial. If it is narrower than the dtype the gradient is to be summed in, its terms are carried
on, to the value of that dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from autopar.ir.alias import Alias
from autopar.ir.graph import DTYPE_BYTES, SOURCE_OPS, Graph, Node, Phase, Ref
from autopar.ir.sharding import Partial
from autopar.plan.records import NodePlan
from autopar.rules.notation import Rule

if TYPE_CHECKING:
    from autopar.search.analysis import Analysis

Pieces = Mapping[str, Mapping[str, frozenset[tuple[int, int]]]]


def carried_terms(
    graph: Graph, rules: Mapping[str, Rule], aliases: Mapping[Ref, Alias], batch: Pieces
) -> frozenset[Ref]:
    """The values whose terms are carried on, as roots of views.

    Args:
        graph: The step.
        rules: Rule of every node that is no source.
        aliases: Its views.
        batch: Pieces of factors that come from the batch.
    """
    if not graph.summed:
        return frozenset()
    return _Walk(graph, rules, aliases, batch).run()


class _Walk:
    """Working state of `carried_terms`."""

    def __init__(
        self, graph: Graph, rules: Mapping[str, Rule], aliases: Mapping[Ref, Alias], batch: Pieces
    ) -> None:
        self.graph, self.rules, self.batch = graph, rules, batch
        self.aliases = aliases
        self.readers: dict[Ref, dict[str, set[int]]] = {}
        for node in self._computing():
            for port, ref in enumerate(node.operands):
                own = self.readers.setdefault(self._root(ref), {})
                own.setdefault(node.name, set()).add(port)
        others = [] if graph.loss is None else [graph.loss]
        others += [ref for _, ref in graph.aux]
        others += list(graph.mutations.values())
        self.others = {self._root(ref) for ref in others}
        self.dtypes: dict[Ref, str] = {}
        for name, dtype in graph.summed.items():
            self._widen(self._root(graph.gradients[name]), dtype)

    def run(self) -> frozenset[Ref]:
        """Walk from readers to what they read."""
        for node in reversed(list(self._computing())):
            for index in range(len(node.outputs)):
                value = Ref(node.name, index)
                for reader in self.readers.get(value, ()):
                    if dtype := self._read_by(value, reader):
                        self._widen(value, dtype)
                if not self._is_in_the_making(node, index):
                    self.dtypes.pop(value, None)
        return frozenset(value for value in self.dtypes if self._is_narrow(value))

    def _computing(self) -> list[Node]:
        return [
            node
            for node in self.graph.nodes
            if node.op not in SOURCE_OPS and Ref(node.name) not in self.aliases
        ]

    def _root(self, ref: Ref) -> Ref:
        return self.aliases.get(ref, Alias(ref)).root

    def _widen(self, value: Ref, dtype: str) -> None:
        before = self.dtypes.get(value)
        if before is None or DTYPE_BYTES[before] < DTYPE_BYTES[dtype]:
            self.dtypes[value] = dtype

    def _read_by(self, value: Ref, reader: str) -> str | None:
        """The dtype that the result of a reader is summed in, if terms pass through it."""
        ports = self.readers[value][reader]
        if not any(ports <= together for together in self.rules[reader].linear):
            return None
        made = [Ref(reader, i) for i in range(len(self.graph.by_name[reader].outputs))]
        found = [self.dtypes.get(ref) for ref in made if ref in self.readers or ref in self.dtypes]
        known = [dtype for dtype in found if dtype is not None]
        return max(known, key=DTYPE_BYTES.__getitem__) if known and None not in found else None

    def _is_in_the_making(self, node: Node, index: int) -> bool:
        """Whether a value is nothing but terms of gradients."""
        value = Ref(node.name, index)
        if node.phase is not Phase.BACKWARD or value in self.others:
            return False
        if any(self._read_by(value, reader) is None for reader in self.readers.get(value, ())):
            return False
        pieces = self.batch.get(node.name, {})
        dims = self.rules[node.name].outputs[index]
        return not any(pieces.get(factor) for dim in dims for factor in dim)

    def _is_narrow(self, value: Ref) -> bool:
        kind = self.graph.type_of(value)
        return kind.is_floating and DTYPE_BYTES[kind.dtype] < DTYPE_BYTES[self.dtypes[value]]


def summed_early(analysis: Analysis, nodes: Iterable[NodePlan]) -> Mapping[str, str]:
    """Module paths where a plan sums terms that would be carried on if what reads them could.

    Args:
        analysis: The step.
        nodes: Shardings of its nodes.

    Returns:
        The path to the dtype they are summed in.
    """
    plans = {plan.name: plan for plan in nodes}
    found: dict[str, str] = {}
    for plan in plans.values() if analysis.carried else ():
        node = analysis.graph.by_name[plan.name]
        for ref, wanted in zip(node.operands, plan.operands, strict=True):
            root = analysis.root(ref).root
            if root not in analysis.carried or root.node not in plans:
                continue
            made = plans[root.node].outputs[root.index]
            pairs = zip(made, wanted, strict=True)
            if any(isinstance(a, Partial) and not isinstance(b, Partial) for a, b in pairs):
                module = analysis.graph.by_name[root.node].source.module
                found[module] = analysis.graph.type_of(root).dtype
    return found
