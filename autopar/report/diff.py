"""What differs between two plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.plan.records import Plan, Prediction
from autopar.plan.text import (
    OFFLOADED,
    RECOMPUTED,
    add_grouped,
    add_row,
    copies_text,
    hint_text,
    memory_kinds,
    mesh_text,
    parameter_cells,
    pipeline_text,
    render,
    savings_by_module,
    section,
    table,
)
from autopar.plan.wording import (
    bytes_text,
    fold_names,
    percent_text,
    ranks_text,
    seconds_text,
    sharding_text,
)

Names = tuple[str, str]
"""What to call the two plans."""


def diff(a: Plan, b: Plan, names: Names = ("a", "b"), width: int = 100) -> str:
    """What differs between two plans, as text; empty if nothing does."""
    view = diff_view(a, b, names)
    return "" if view is None else render(view, width)


def diff_view(a: Plan, b: Plan, names: Names = ("a", "b")) -> RenderableType | None:
    """The same as something rich can print; None if the plans decide and predict the same."""
    if a == b:
        return None
    parts: list[RenderableType] = [Text(f"{names[0]} -> {names[1]}", style="bold")]
    for title, rows in (("plan", _facts(a, b)), ("predicted", _predictions(a, b))):
        made = table("", *names, "")
        for row in rows:
            add_row(made, *row)
        if made.row_count:
            parts.append(section(title, [made]))
    for title, left, right, without in (
        ("parameters: stored, used", _parameters(a), _parameters(b), "absent"),
        ("nodes: outputs", _nodes(a), _nodes(b), "absent"),
        (RECOMPUTED, _recomputed(a), _recomputed(b), "nothing"),
        (OFFLOADED, _offloaded(a), _offloaded(b), "nothing"),
    ):
        changed = fold_names(_changes(left, right, without))
        if changed:
            made = table("name", *names)
            add_grouped(made, changed)
            parts.append(section(title, [made]))
    return Group(*parts)


def _facts(a: Plan, b: Plan) -> Iterator[tuple[str, str, str]]:
    for what, left, right in (
        ("model", a.model, b.model),
        ("captured step", a.fingerprint[:12], b.fingerprint[:12]),
        ("cluster", a.cluster, b.cluster),
        ("batch", _batch(a), _batch(b)),
        ("mesh", _mesh(a), _mesh(b)),
        ("from each microbatch alone", _alone(a), _alone(b)),
        ("idle", _idle(a), _idle(b)),
        ("copies", _copies(a), _copies(b)),
        ("hints", _hints_text(a), _hints_text(b)),
        ("notes", "; ".join(a.notes) or "none", "; ".join(b.notes) or "none"),
    ):
        if left != right:
            yield what, left, right


def _hints_text(plan: Plan) -> str:
    return ", ".join(map(hint_text, plan.hints)) or "none"


def _batch(plan: Plan) -> str:
    return ", ".join(f"{path} {kind}" for path, kind in plan.batch.items())


def _mesh(plan: Plan) -> str:
    meshes = "; ".join(dict.fromkeys(map(mesh_text, plan.stages)))
    return meshes if len(plan.stages) == 1 else f"{meshes}, stages: {pipeline_text(plan)}"


def _alone(plan: Plan) -> str:
    return ", ".join(plan.per_microbatch) or "nothing"


def _idle(plan: Plan) -> str:
    return ranks_text(plan.idle_ranks) if plan.idle_ranks else "none"


def _copies(plan: Plan) -> str:
    return "; ".join(dict.fromkeys(map(copies_text, plan.stages)))


def _predictions(a: Plan, b: Plan) -> Iterator[tuple[str, str, str, str]]:
    x, y = a.prediction, b.prediction
    for what, left, right in (
        ("step", x.step_s, y.step_s),
        ("compute", x.compute_s, y.compute_s),
        ("communication", x.communication_s, y.communication_s),
        ("exposed communication", _communication_s(x), _communication_s(y)),
        ("exposed host copies", x.copy_exposed_s, y.copy_exposed_s),
        ("optimizer", x.optimizer_s, y.optimizer_s),
    ):
        if left != right:
            yield what, seconds_text(left), seconds_text(right), _change(left, right)
    kinds = zip(memory_kinds(x.memory).items(), memory_kinds(y.memory).values(), strict=True)
    for (kind, before), after in kinds:
        if before != after:
            yield kind, bytes_text(before), bytes_text(after), _change(before, after)
    host, other_host = x.memory.host_bytes, y.memory.host_bytes
    if host != other_host:
        yield "host memory", bytes_text(host), bytes_text(other_host), _change(host, other_host)
    total, other = x.memory.total_bytes, y.memory.total_bytes
    if total != other:
        yield "memory a rank", bytes_text(total), bytes_text(other), _change(total, other)


def _communication_s(found: Prediction) -> float:
    return found.exposed_s - found.copy_exposed_s


def _change(before: float, after: float) -> str:
    return f"{'+' if after > before else ''}{percent_text(after / before - 1)}" if before else ""


def _parameters(plan: Plan) -> Mapping[str, str]:
    return {
        p.name: ", ".join(parameter_cells(p, stage.mesh)[1:])
        for stage in plan.stages
        for p in stage.parameters
    }


def _nodes(plan: Plan) -> Mapping[str, str]:
    return {
        node.name: ", ".join(sharding_text(s, stage.mesh) for s in node.outputs)
        for stage in plan.stages
        for node in stage.nodes
    }


def _recomputed(plan: Plan) -> Mapping[str, str]:
    return _savings(plan, [name for stage in plan.stages for name in stage.recomputed])


def _offloaded(plan: Plan) -> Mapping[str, str]:
    return _savings(plan, [value for stage in plan.stages for value in stage.offloaded])


def _savings(plan: Plan, names: Sequence[str]) -> Mapping[str, str]:
    """Module to ops, what they save and what it costs: ``mul x3, 24 MiB for 1 ms``."""
    rows = savings_by_module(plan, names).items()
    return {
        module: f"{ops}, {saved} for {seconds}" if saved else ops
        for module, (ops, saved, seconds) in rows
    }


def _changes(
    a: Mapping[str, str], b: Mapping[str, str], without: str
) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name in dict.fromkeys([*a, *b]):
        left, right = a.get(name, without), b.get(name, without)
        if left != right:
            yield name, (left, right)
