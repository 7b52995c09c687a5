"""A plan as tables that a person reads.

Repeated layers are folded, so the tables follow the kinds of layers, not the depth.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.hint import hint_of
from autopar.ir.sharding import Mesh, Sharding, Split
from autopar.plan.wording import (
    Folded,
    bytes_text,
    dims_text,
    fold_names,
    percent_text,
    ranks_text,
    seconds_text,
    sharding_text,
)

if TYPE_CHECKING:
    from autopar.plan.records import CollectivePlan, Memory, ParameterPlan, Plan, StagePlan

WIDTH = 100

KEY_OPS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "einsum"})
KEY_OPS |= {"attention", "embedding", "convolution", "contract"}
"""Ops whose outputs tell how a module is split; the others follow them."""


def plan_text(plan: Plan, width: int = WIDTH) -> str:
    """The plan as plain text, ``width`` columns wide."""
    return render(plan_view(plan), width)


def render(view: RenderableType, width: int = WIDTH) -> str:
    """Plain text of a view."""
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, force_terminal=False, emoji=False)
    console.print(view, highlight=False)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def plan_view(plan: Plan) -> RenderableType:
    """The plan as something rich can print."""
    parts: list[RenderableType] = [_headline(plan)]
    for number, stage in enumerate(plan.stages):
        parts += _stage(plan, stage, number)
    parts += [_collectives(plan.prediction.collectives), _two(_memory(plan), _time(plan))]
    parts += [_search(plan)]
    if plan.notes:
        parts.append(section("notes", [Text(f"- {note}") for note in plan.notes]))
    return Group(*parts)


def section(title: str, body: Iterable[RenderableType]) -> RenderableType:
    """A title above an indented body, with a blank line before it."""
    return Group(
        Text(""), Text(title, style="bold"), *(Padding(part, (0, 0, 0, 2)) for part in body)
    )


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table without rules, its header dim."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for at, column in enumerate(columns):
        justify: JustifyMethod = "right" if column in right else "left"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=at == 0)
    return made


# Headline.


def _headline(plan: Plan) -> RenderableType:
    ranks = f"{plan.cluster_ranks} rank{'s' * (plan.cluster_ranks != 1)}"
    if plan.idle_ranks:
        ranks += f" of which {len(plan.idle_ranks)} idle"
    title = Text.assemble(
        (plan.model, "bold"),
        f" on {plan.cluster}, {ranks}: predicted step ",
        (seconds_text(plan.prediction.step_s), "bold green"),
    )
    facts = Table.grid(padding=(0, 2, 0, 0))
    for text in _meshes(plan):
        add_row(facts, "mesh", text)
    if len(plan.stages) > 1:
        add_row(facts, "stages", pipeline_text(plan))
    if plan.idle_ranks:
        add_row(facts, "idle", ranks_text(plan.idle_ranks))
    add_row(facts, "batch", ", ".join(f"{path} {kind}" for path, kind in plan.batch.items()))
    if plan.microbatches != 1:
        add_row(facts, "", f"in {plan.microbatches} microbatches")
    if plan.per_microbatch:
        add_row(facts, "", alone_text(plan.per_microbatch))
    if plan.hints:
        add_row(facts, "hints", ", ".join(map(hint_text, plan.hints)))
    return Group(title, Padding(facts, (0, 0, 0, 2)))


def alone_text(modules: Iterable[str]) -> str:
    """What is computed from each microbatch alone, in words."""
    names = ", ".join(folded.name for folded in fold_names((path, "") for path in modules))
    return f"computed from each microbatch alone: {names}"


def _meshes(plan: Plan) -> Sequence[str]:
    """Mesh of all stages; where they are unlike, that of every stage with its ranks."""
    if len(set(plan.meshes)) == 1:
        return tuple(dict.fromkeys(map(mesh_text, plan.stages)))
    return [
        f"of stage {stage}: {mesh_text(chunk)}, {ranks_text(plan.ranks_of_stages[stage])}"
        for stage in range(plan.num_stages)
        for chunk in list(plan.chunks_of(stage).values())[:1]
    ]


def hint_text(text: str) -> str:
    """A hint that a plan keeps, as it is written in a call: ``hint.degrees(dp=2)``."""
    known = hint_of(text)
    return text if known is None else str(known)


def mesh_text(stage: StagePlan) -> str:
    """Axes with their sizes and what each is used for."""
    mesh = stage.mesh
    axes = []
    for name, size, roles in zip(mesh.names, mesh.sizes, axis_roles(stage), strict=True):
        others = ", ".join(role for role in roles.split(", ") if role != name)
        axes.append(f"{name}={size} ({others})" if others else f"{name}={size}")
    return " x ".join(axes) or "one rank"


def pipeline_text(plan: Plan) -> str:
    """Stages, chunks and schedule of a pipeline."""
    count, held = plan.num_stages, len(plan.stages) // plan.num_stages
    chunks = f" of {held} chunks each" if held > 1 else ""
    return f"{count}{chunks}, schedule {plan.schedule}"


def axis_roles(stage: StagePlan) -> tuple[str, ...]:
    """What each mesh axis is used for, in the words people use.

    An axis that a hint made has the hint's name. Of the others, ``tp`` splits most of the elements
    of parameters in use, ``dp`` and ``sp`` split the outer or an inner dim of what the key ops
    make; ``zero`` is added where most elements are stored split and used whole.
    """
    return tuple(_roles(stage, axis, given) for axis, given in enumerate(stage.mesh.roles))


def _roles(stage: StagePlan, axis: int, given: str) -> str:
    elements = sum(p.type.num_elements for p in stage.parameters)
    used, gathered = 0, 0
    for p in stage.parameters:
        cut = [_split(sharding, axis) is not None for sharding in p.used]
        used += p.type.num_elements * (bool(cut) and all(cut))
        gathered += p.type.num_elements * (_split(p.stored, axis) is not None and not all(cut))
    roles = [given] if given else ["tp"] if 2 * used > elements else _batch_roles(stage, axis)
    return ", ".join(roles + ["zero"] * (2 * gathered > elements)) or "replicated"


def _batch_roles(stage: StagePlan, axis: int) -> list[str]:
    """Whether an axis splits the outer dim of values, or an inner one."""
    made = [_split(n.outputs[0], axis) for n in stage.nodes if op_of(n.name) in KEY_OPS]
    splits = [split for split in made if split is not None]
    turns = (1, stage.mesh.turns)
    outer = sum(split.dim == 0 and split.outer in turns for split in splits)
    return [] if not splits else ["dp"] if 2 * outer >= len(splits) else ["sp"]


def _split(sharding: Sharding, axis: int) -> Split | None:
    found = sharding[axis]
    return found if isinstance(found, Split) else None


# Parameters and modules.

LEGEND = {
    "S": "S0(a): dim 0 is split over axis a",
    "/": "S0/8(a): each of 8 equal rows of dim 0 is split over axis a",
    "P": "P(a): each rank of axis a holds a term; the value is their sum",
}


def _stage(plan: Plan, stage: StagePlan, number: int) -> Iterator[RenderableType]:
    title = "" if len(plan.stages) == 1 else f" of {place_text(plan, number)}"
    total = sum(p.type.num_elements for p in stage.parameters)
    parameters = fold_names((p.name, parameter_cells(p, stage.mesh)) for p in stage.parameters)
    made = table("name", "shape", "stored", "used")
    add_grouped(made, parameters)
    yield section(f"parameters{title}: {total:,} elements", [made])
    values = fold_names(_values(plan, stage))
    if values:
        made = table("module", "op", "output")
        add_grouped(made, values)
        yield section(f"values{title}", [made])
    yield legend(cell for one in parameters + values for cell in one.meaning[1:])
    for what, made in saving_tables(plan, stage).items():
        yield section(f"{what}{title}", [made])
    if stage.copy_room_bytes is not None:
        yield section(f"{copies_text(stage)}{title}", [])


RECOMPUTED, OFFLOADED = "recomputed in the backward", "offloaded to host memory"


def saving_tables(plan: Plan, stage: StagePlan, roots: Sequence[str] = ()) -> Mapping[str, Table]:
    """What runs again and what is offloaded, by module below one of the roots; no empty table."""
    found = {}
    for what, names, title, cost in (
        (RECOMPUTED, stage.recomputed, "ops that run again", "takes a step"),
        (OFFLOADED, stage.offloaded, "made by", "copied in a step"),
    ):
        rows = fold_names(savings_by_module(plan, names, roots).items())
        if rows:
            made = table("module", title, "saves a rank", cost, right=("saves a rank", cost))
            add_grouped(made, rows)
            found[what] = made
    return found


def copies_text(stage: StagePlan) -> str:
    """What copies to host memory and back, where there are any, may hold on their way, in words."""
    if stage.copy_room_bytes is None:
        return "on their way: twice the largest copy of each direction" if stage.copies else "none"
    room = bytes_text(stage.copy_room_bytes)
    return f"on their way: {room} of copies more than is held without any"


def savings_by_module(
    plan: Plan, names: Sequence[str], roots: Sequence[str] = ()
) -> Mapping[str, tuple[str, ...]]:
    """Module to its ops among nodes or values (``mul x3, silu``), what they save and what it costs.

    Args:
        plan: The plan.
        names: Nodes, or values as text.
        roots: Modules below which they are looked for; everywhere if there are none.
    """
    by_name = {saving.name: saving for saving in plan.prediction.savings}
    found: dict[str, list[str]] = {}
    for name in names:
        module = plan.modules.get(name.partition(":")[0], "") or "(model)"
        if not roots or any(module == r or module.startswith(f"{r}.") for r in roots):
            found.setdefault(module, []).append(name)
    rows: dict[str, tuple[str, ...]] = {}
    for module, own in found.items():
        counts = Counter(op_of(name.partition(":")[0]) for name in own)
        known = [by_name[name] for name in own if name in by_name]
        rows[module] = (
            ", ".join(f"{op} x{n}" if n > 1 else op for op, n in counts.items()),
            bytes_text(sum(saving.saved_bytes for saving in known)) if known else "",
            seconds_text(sum(saving.seconds for saving in known)) if known else "",
        )
    return rows


def place_text(plan: Plan, number: int) -> str:
    """Stage and ranks of a chunk, in words."""
    stage = f"stage {plan.stage_of_chunks[number]}"
    several = len(plan.stages) > plan.num_stages
    where = f"chunk {number} on {stage}" if several else stage
    return f"{where}, from rank {plan.stages[number].first_rank}"


def parameter_cells(parameter: ParameterPlan, mesh: Mesh) -> tuple[str, ...]:
    """Shape, stored and used sharding of a parameter."""
    used = dict.fromkeys(sharding_text(sharding, mesh) for sharding in parameter.used)
    words = " then ".join(used) or "not used"
    stored = sharding_text(parameter.stored, mesh)
    return (
        dims_text(parameter.type.shape),
        f"{stored}{home_text(parameter)}",
        words if parameter.trainable else f"{words}, frozen",
    )


def home_text(parameter: ParameterPlan) -> str:
    """What of a parameter is in host memory."""
    if parameter.on_host:
        return ", on host"
    return ", state on host" if parameter.state_on_host else ""


def _values(plan: Plan, stage: StagePlan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Module, key op and its output; the first of each kind in a module is the forward one."""
    seen = set()
    for node in stage.nodes:
        op = op_of(node.name)
        module = plan.modules.get(node.name, "")
        if op in KEY_OPS and node.outputs and (module, op) not in seen:
            seen.add((module, op))
            yield module or "(model)", (op, sharding_text(node.outputs[0], stage.mesh))


def op_of(name: str) -> str:
    """The op a node's name speaks of: ``mm_3`` is an ``mm``."""
    return re.sub(r"(_default)?(_\d+)*$", "", name)


def add_grouped(made: Table, rows: Iterable[Folded[tuple[str, ...]]]) -> None:
    """Add rows by name; those of a folded layer stand together under the layer's name."""
    groups: dict[tuple[str, ...], list[Folded[tuple[str, ...]]]] = {}
    for row in rows:
        groups.setdefault(_layer(row) or row.parts, []).append(row)
    for layer, members in groups.items():
        if not _layer(members[0]):
            for row in members:
                add_row(made, row.name, *row.meaning)
            continue
        add_row(made, ".".join(layer))
        for row in members:
            add_row(made, f"  {'.'.join(row.parts[len(layer) :])}", *row.meaning)


def _layer(row: Folded[tuple[str, ...]]) -> tuple[str, ...]:
    """The folded layer a name lies in; empty if it lies in none."""
    if row.count > 1:
        for at, part in enumerate(row.parts[:-1], 1):
            if _RANGE.fullmatch(part):
                return row.parts[:at]
    return ()


_RANGE = re.compile(r"\d+[-,][\d,-]+")


def add_row(made: Table, *cells: str | Text) -> None:
    """Add a row of plain text: names may hold what rich would take for markup."""
    made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def legend(cells: Iterable[str]) -> RenderableType:
    """What the shardings in these cells mean, as far as they need it."""
    marks = {mark for cell in cells for mark in LEGEND if mark in cell}
    lines = [meaning for mark, meaning in LEGEND.items() if mark in marks]
    return Padding(Text("\n".join(lines), style="dim"), (0, 0, 0, 2)) if lines else Group()


# Predictions.


def _collectives(collectives: Iterable[CollectivePlan]) -> RenderableType:
    made = collective_table(collectives)
    title = "collectives a step, on one rank" if made.row_count else "collectives: none"
    return section(title, [made] if made.row_count else [])


def collective_table(collectives: Iterable[CollectivePlan]) -> Table:
    """Collectives summed over modules, the longest first."""
    summed: dict[tuple[str, str, str], tuple[int, int, float]] = {}
    for one in collectives:
        key = (one.purpose, one.kind, one.axis)
        count, size, seconds = summed.get(key, (0, 0, 0.0))
        count, size = count + one.count, size + one.tensor_bytes
        summed[key] = (count, size, seconds + one.predicted_s)
    right = ("calls", "tensors", "predicted")
    made = table("purpose", "kind", "axis", "calls", "tensors", "predicted", "", right=right)
    longest = max((seconds for _, _, seconds in summed.values()), default=0.0)
    for key, (count, size, seconds) in sorted(summed.items(), key=lambda item: -item[1][2]):
        figures = (f"{count:,}", bytes_text(size), seconds_text(seconds))
        add_row(made, *key, *figures, bar(seconds, longest))
    return made


def bar(value: float, longest: float, width: int = 16) -> Text:
    """A bar as long as the value's share of the longest."""
    eighths = 0 if longest <= 0 else round(8 * width * value / longest)
    blocks = " ▏▎▍▌▋▊▉"
    return Text("█" * (eighths // 8) + blocks[eighths % 8].strip(), style="cyan")


_MEMORY = {
    "parameters": "parameters_bytes",
    "gradients": "gradients_bytes",
    "optimizer": "optimizer_bytes",
    "saved for backward": "saved_bytes",
    "transient": "transient_bytes",
    "inputs": "inputs_bytes",
    "buffers": "buffers_bytes",
}


def memory_kinds(memory: Memory) -> Mapping[str, int]:
    """Bytes by the words people use, in a fixed order."""
    return {word: int(getattr(memory, field)) for word, field in _MEMORY.items()}


def _memory(plan: Plan) -> RenderableType:
    kinds = memory_kinds(plan.prediction.memory)
    total, limit = plan.prediction.memory.total_bytes, plan.memory_limit_bytes
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column()
    made.add_column(justify="right")
    for kind, size in kinds.items():
        if size:
            add_row(made, kind, bytes_text(size), bar(size, max(kinds.values())))
    if plan.prediction.memory.host_bytes:
        add_row(made, "host memory", bytes_text(plan.prediction.memory.host_bytes), "")
    share = f" ({percent_text(total / limit)})" if limit else ""
    title = f"memory a rank: {bytes_text(total)} of {bytes_text(limit)}{share}"
    return section(title, [made])


def _time(plan: Plan) -> RenderableType:
    found = plan.prediction
    hidden = max(0.0, found.communication_s - (found.exposed_s - found.copy_exposed_s))
    kinds = {
        "compute": found.compute_s,
        "communication": found.exposed_s - found.copy_exposed_s,
        "optimizer": found.optimizer_s,
    }
    if found.copies:
        kinds["host copies"] = found.copy_exposed_s
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column()
    made.add_column(justify="right")
    for kind, seconds in kinds.items():
        add_row(made, kind, seconds_text(seconds), bar(seconds, max(kinds.values())))
    if hidden:
        add_row(made, "hidden communication", seconds_text(hidden), "")
    copied = sum(copy.predicted_s for copy in found.copies) - found.copy_exposed_s
    if copied > 0:
        add_row(made, "hidden host copies", seconds_text(copied), "")
    return section(f"predicted step: {seconds_text(found.step_s)}", [made])


def _two(left: RenderableType, right: RenderableType) -> RenderableType:
    """Side by side where there is room, else one below the other."""
    return Columns([left, right], padding=(0, 4))


def proof_texts(plan: Plan) -> list[str]:
    """What is proven of the ways that were tried, and of all."""
    found, every = plan.search, plan.search.all_ways
    modelled = f"{seconds_text(found.objective_s)} if no collective hides"
    proof = f"proven bound {seconds_text(found.bound_s)}, gap {percent_text(found.gap)}"
    texts = [f"tried ways: {found.status}, modelled {modelled}, {proof}"]
    if not every.bound_s:
        return texts
    far = f"this one is at most {percent_text(every.gap)} from it"
    if every.gap <= NO_GAP:
        far = "this one is optimal over all ways"
    texts.append(f"all ways: no plan can take less than {seconds_text(every.bound_s)}, {far}")
    left = f"{every.estimated:,} by estimate"
    if not every.estimated:
        left = "none by estimate: no other way can be faster"
    texts.append(f"{every.tried:,} ways tried, {every.excluded:,} left out by proof, {left}")
    return texts


NO_GAP = 1e-3
"""Part of the step up to which a plan is said to be optimal."""


def _search(plan: Plan) -> RenderableType:
    found = plan.search
    facts = [
        *proof_texts(plan),
        f"searched in {seconds_text(found.seconds)}, captured in {seconds_text(found.capture_s)}",
    ]
    if found.num_classes:
        facts.append(
            f"{found.num_nodes:,} nodes in {found.num_classes:,} classes, "
            f"{found.num_strategies:,} strategies, {found.num_variables:,} variables"
        )
    body: list[RenderableType] = [Text(fact) for fact in facts]
    if len(found.meshes) > 1:
        tried = table("mesh tried", "modelled", right=("modelled",))
        for mesh, seconds in found.meshes:
            add_row(tried, mesh, "ruled out" if seconds is None else seconds_text(seconds))
        body.append(tried)
    return section("search", body)
