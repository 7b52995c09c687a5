"""From a functional tape to graph nodes: canonical ops, no no-ops, no duplicates, no dead code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.capture.tape import Step
from autopar.ir.graph import (
    CONSTANT,
    KEY,
    SOURCE_OPS,
    Arg,
    Const,
    Node,
    Phase,
    Ref,
    Source,
    TensorType,
    refs_in,
)

CPU = Const("device", "cpu")
_NO_OP_KWARGS = frozenset(
    {"device", "layout", "memory_format", "pin_memory", "non_blocking", "copy"}
)
"""Keyword arguments that change neither shape nor values of an op with a tensor operand."""


@dataclass(slots=True)
class Draft:
    """A node in the making; ``args`` name values of the new graph."""

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[TensorType, ...]
    phase: Phase
    source: Source
    target: str = ""

    @property
    def operands(self) -> tuple[Ref, ...]:
        """Every value it reads, in order."""
        args = (*self.args, *(arg for _, arg in self.kwargs))
        return tuple([ref for arg in args for ref in refs_in(arg)])


Rewrite = Callable[["Builder", Draft], "tuple[Ref, ...] | None"]
"""Values of an op's outputs made otherwise; None to keep the op, which it may have changed."""


class Builder:
    """Collects nodes; an op that was already emitted on the same values is not emitted again."""

    def __init__(self, rewrites: Mapping[str, Rewrite]) -> None:
        self.nodes: list[Draft] = []
        self._rewrites = rewrites
        self._known: dict[tuple[object, ...], tuple[Ref, ...]] = {}

    def type_of(self, ref: Ref) -> TensorType:
        return self.nodes[int(ref.node)].outputs[ref.index]

    def maker(self, ref: Ref) -> Draft:
        """The node that makes a value."""
        return self.nodes[int(ref.node)]

    def emit(self, draft: Draft) -> tuple[Ref, ...]:
        """The values of the op's outputs, rewritten or shared where possible."""
        rewrite = self._rewrites.get(draft.op)
        if rewrite is not None:
            made = rewrite(self, draft)
            if made is not None:
                return made
        return self.keep(draft)

    def keep(self, draft: Draft) -> tuple[Ref, ...]:
        """The values of the op's outputs, of an equal earlier node if there is one."""
        key = (draft.op, draft.args, draft.kwargs, draft.outputs, draft.target)
        found = self._known.get(key)
        if found is None:
            name = str(len(self.nodes))
            self.nodes.append(draft)
            found = tuple([Ref(name, i) for i in range(len(draft.outputs))])
            self._known[key] = found
        return found

    def derive(
        self, draft: Draft, op: str, args: tuple[Arg, ...], output: TensorType, **kwargs: Arg
    ) -> Ref:
        """One-output op that takes the place of ``draft``, or a part of it."""
        made = Draft(op, args, tuple(sorted(kwargs.items())), (output,), draft.phase, draft.source)
        return self.emit(made)[0]


def simplify(
    steps: Sequence[Step], results: Sequence[Ref], rewrites: Mapping[str, Rewrite]
) -> tuple[list[Draft], list[Ref]]:
    """Nodes that compute ``results`` (values of the tape), and what those are called now."""
    builder = Builder(rewrites)
    values: dict[Ref, Ref] = {}
    for step in live_steps(steps, results):
        draft = Draft(
            step.op,
            tuple([_renamed(arg, values) for arg in step.args]),
            _kwargs(step, values),
            _types(step),
            step.phase,
            step.source,
            step.target,
        )
        for old, new in zip(step.results, builder.emit(draft), strict=True):
            if old is not None:
                values[old] = new
    return builder.nodes, [values[ref] for ref in results]


def live_steps(steps: Sequence[Step], results: Iterable[Ref]) -> list[Step]:
    """The steps that some result needs, in order; sources are kept."""
    needed = {ref.node for ref in results}
    kept: list[Step] = []
    for number in range(len(steps) - 1, -1, -1):
        step = steps[number]
        if step.op in SOURCE_OPS or str(number) in needed:
            kept.append(step)
            for arg in (*step.args, *step.kwargs.values()):
                needed.update([ref.node for ref in refs_in(arg)])
    kept.reverse()
    return kept


def _renamed(arg: Arg, values: Mapping[Ref, Ref]) -> Arg:
    if isinstance(arg, Ref):
        return values[arg]
    if isinstance(arg, tuple):
        return tuple([_renamed(item, values) for item in arg])
    return arg


def _kwargs(step: Step, values: Mapping[Ref, Ref]) -> tuple[tuple[str, Arg], ...]:
    if not step.kwargs:
        return ()
    kept = {name: _renamed(arg, values) for name, arg in step.kwargs.items() if arg is not None}
    if step.op.startswith("aten."):
        kept = {name: arg for name, arg in kept.items() if name not in _NO_OP_KWARGS}
    return tuple(sorted(kept.items()))


def _types(step: Step) -> tuple[TensorType, ...]:
    """Types of the outputs; one the op does not give is an empty tensor."""
    given = next((kind for kind in step.outputs if kind is not None), None)
    absent = TensorType((0,), given.dtype if given else "float32")
    return tuple([absent if kind is None else kind for kind in step.outputs])


def finish(drafts: Sequence[Draft], results: Sequence[Ref]) -> tuple[tuple[Node, ...], list[Ref]]:
    """Named nodes, sources first, without those that no result needs, and the results' names."""
    needed = {int(ref.node) for ref in results}
    for number in range(len(drafts) - 1, -1, -1):
        draft = drafts[number]
        if number in needed:
            for arg in draft.args:
                needed.update([int(ref.node) for ref in refs_in(arg)])
            for _, arg in draft.kwargs:
                needed.update([int(ref.node) for ref in refs_in(arg)])
    live = [
        n
        for n, draft in enumerate(drafts)
        if n in needed or (draft.op in SOURCE_OPS and draft.op not in (CONSTANT, KEY))
    ]
    live.sort(key=lambda n: drafts[n].op not in SOURCE_OPS)
    names = _names(drafts, live)
    refs: dict[Ref, Ref] = {}
    nodes: list[Node] = []
    for number in live:
        draft = drafts[number]
        name = names[number]
        for index in range(len(draft.outputs)):
            refs[Ref(str(number), index)] = Ref(name, index)
        nodes.append(
            Node(
                name=name,
                op=draft.op,
                args=tuple([_renamed(arg, refs) for arg in draft.args]),
                kwargs=tuple([(key, _renamed(arg, refs)) for key, arg in draft.kwargs]),
                outputs=draft.outputs,
                phase=draft.phase,
                source=draft.source,
                target=draft.target,
            )
        )
    return tuple(nodes), [refs[ref] for ref in results]


def _names(drafts: Sequence[Draft], live: Sequence[int]) -> dict[int, str]:
    """A readable name for every node: its source's name, or its op's and a count."""
    used: dict[str, int] = {}
    names: dict[int, str] = {}
    taken: set[str] = set()
    for number in live:
        draft = drafts[number]
        base = draft.target if draft.op in SOURCE_OPS else draft.op.split(".")[1].strip("_")
        base = re.sub(r"\W", "_", base)
        if not base.isidentifier():
            base = f"n_{base}"
        name = base
        while name in taken:
            used[base] = used.get(base, 0) + 1
            name = f"{base}_{used[base]}"
        taken.add(name)
        names[number] = name
    return names
