"""What a plan does with one module: what is split over what, and what that costs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.errors import PlanError
from autopar.ir.graph import DTYPE_BYTES
from autopar.ir.sharding import Mesh, Sharding, Split, max_local_elements, whole
from autopar.plan.text import (
    KEY_OPS,
    OFFLOADED,
    WIDTH,
    add_grouped,
    add_row,
    alone_text,
    collective_table,
    copies_text,
    home_text,
    legend,
    mesh_text,
    op_of,
    place_text,
    proof_texts,
    render,
    saving_tables,
    section,
    table,
)
from autopar.plan.wording import Folded, bytes_text, dims_text, fold_names, sharding_text

if TYPE_CHECKING:
    from autopar.plan.records import NodePlan, ParameterPlan, Plan, StagePlan


def explain(plan: Plan, module: str = "", width: int = WIDTH) -> str:
    """What is split over what in a module and below it, as text.

    Args:
        plan: Any plan.
        module: Path of a module, or the end of one; ``""`` is the whole model.
        width: Columns of the text.

    Raises:
        PlanError: The plan knows no such module.
    """
    return render(explain_view(plan, module), width)


def explain_view(plan: Plan, module: str = "") -> RenderableType:
    """The same as something rich can print.

    Raises:
        PlanError: The plan knows no such module.
    """
    roots = _find(plan, module)
    title = ", ".join(one.name for one in fold_names((root, ()) for root in roots))
    where = f" of {plan.model}" if roots else f"{plan.model}"
    headline = Text.assemble((title, "bold"), where, f" on {plan.cluster}")
    parts: list[RenderableType] = [headline]
    cells: list[str] = []
    for number, stage in enumerate(plan.stages):
        own = [p for p in stage.parameters if _below(p.name, roots)]
        nodes = [n for n in stage.nodes if _below(plan.modules.get(n.name, ""), roots)]
        if roots and not own and not nodes:
            continue
        place = f", {place_text(plan, number)}" if len(plan.stages) > 1 else ""
        parts.append(Text(f"  mesh   {mesh_text(stage)}{place}"))
        for title, rows, columns in (
            ("parameters", fold_names(_parameters(own, stage, roots)), _PARAMETER),
            ("ops that change how values lie", fold_names(_ops(plan, nodes, stage, roots)), _OP),
        ):
            if rows:
                parts.append(section(title, [_filled(columns, rows)]))
                cells += [cell for row in rows for cell in row.meaning[1:]]
        savings = saving_tables(plan, stage, roots)
        parts += [section(what, [made]) for what, made in savings.items()]
        if OFFLOADED in savings:
            parts.append(section(copies_text(stage), []))
    alone = [
        path
        for path in plan.per_microbatch
        if _below(path, roots) or any(_below(root, (path,)) for root in roots)
    ]
    if alone:
        parts.append(section(f"{alone_text(alone)}, of {plan.microbatches}", []))
    parts += [legend(cells), *_communication(plan, roots)]
    if not roots:
        parts.append(section("proven", [Text(text) for text in proof_texts(plan)]))
    return Group(*parts)


def _find(plan: Plan, module: str) -> tuple[str, ...]:
    """Paths that ``module`` means: itself, or those that end with it."""
    if not module:
        return ()
    names = {name.rpartition(".")[0] for name in plan.parameters} | set(plan.modules.values())
    names |= set(plan.parameters)
    paths = {".".join(parts[:at]) for parts in (n.split(".") for n in names) for at in range(1, 99)}
    if module in paths:
        return (module,)
    ends = sorted(path for path in paths if path.endswith(f".{module}"))
    if ends:
        return tuple(ends)
    last = {path.rpartition(".")[2] for path in paths}
    near = difflib.get_close_matches(module, sorted(paths | last), 3)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise PlanError(f"cannot explain {module!r}: the plan knows no module of that name{hint}")


def _below(name: str, roots: Sequence[str]) -> bool:
    return not roots or any(name == root or name.startswith(f"{root}.") for root in roots)


def _short(name: str, roots: Sequence[str]) -> str:
    """A name as seen from the only root."""
    if len(roots) == 1 and name.startswith(f"{roots[0]}."):
        return name[len(roots[0]) + 1 :]
    return name


def _filled(columns: Sequence[str], rows: Iterable[Folded[tuple[str, ...]]]) -> Table:
    made = table(*columns, right=("a rank",))
    add_grouped(made, rows)
    return made


_PARAMETER = ("name", "shape", "stored", "a rank", "used", "so it is")


def _parameters(
    parameters: Iterable[ParameterPlan], stage: StagePlan, roots: Sequence[str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    mesh = stage.mesh
    for p in parameters:
        shape = p.type.shape
        local = max_local_elements(shape, p.stored) * DTYPE_BYTES[p.type.dtype]
        used = dict.fromkeys(p.used)
        yield (
            _short(p.name, roots),
            (
                dims_text(shape),
                f"{sharding_text(p.stored, mesh)}{home_text(p)}",
                bytes_text(local),
                " then ".join(sharding_text(s, mesh) for s in used) or "not used",
                "; ".join(_change(p, s, mesh) for s in used) or "only kept",
            ),
        )


def _change(parameter: ParameterPlan, used: Sharding, mesh: Mesh) -> str:
    """What happens to a parameter between storage and use."""
    axes = list(zip(mesh.names, parameter.stored, used, strict=True))
    gathered = [n for n, s, u in axes if isinstance(s, Split) and not isinstance(u, Split)]
    cut = [n for n, s, u in axes if isinstance(u, Split) and not isinstance(s, Split)]
    moved = [n for n, s, u in axes if isinstance(s, Split) and isinstance(u, Split) and s != u]
    words = ["brought to the device"] if parameter.on_host else []
    words += [
        f"{verb} over {', '.join(names)}"
        for verb, names in (("gathered", gathered), ("cut", cut), ("moved", moved))
        if names
    ]
    return ", ".join(words) or "read as stored"


_OP = ("module", "op", "reads", "gives")


def _ops(
    plan: Plan, nodes: Iterable[NodePlan], stage: StagePlan, roots: Sequence[str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Key ops, and others unless they only pass on the sharding of what they read."""
    calls: dict[tuple[str, str], int] = {}
    for node in nodes:
        module, op = plan.modules.get(node.name, ""), op_of(node.name)
        calls[module, op] = calls.get((module, op), 0) + 1
        if op not in KEY_OPS and _passes_on(node, stage.mesh):
            continue
        label = node.name if len(roots) == 1 else f"{op} {calls[module, op]}"
        own = "(itself)" if roots == (module,) else _short(module, roots) or "(model)"
        reads, gives = (
            " | ".join(dict.fromkeys(sharding_text(s, stage.mesh) for s in shardings))
            for shardings in (node.operands, node.outputs)
        )
        yield own, (label, reads, gives)


def _passes_on(node: NodePlan, mesh: Mesh) -> bool:
    """Whether the outputs lie as the operands do, those apart that are whole."""
    return set(node.operands) - {whole(mesh)} <= set(node.outputs) and len(set(node.outputs)) <= 1


def _communication(plan: Plan, roots: Sequence[str]) -> Iterator[RenderableType]:
    told = [c for c in plan.prediction.collectives if c.module]
    found = [c for c in told if _below(c.module, roots)] if roots else plan.prediction.collectives
    made = collective_table(found)
    if made.row_count:
        yield section("collectives a step, on one rank", [made])
    elif told or not plan.prediction.collectives:
        yield section("collectives: none", [])
    else:
        note = Table.grid()
        add_row(note, "this plan tells its collectives for the whole model only")
        yield section("collectives", [note])
