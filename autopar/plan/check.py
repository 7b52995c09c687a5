"""Whether a plan is one for this step and these ranks; no solver, no rules.

A plan may come from a file that a person edited or that another model left behind, so every fault
is an error of its own that names what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise

from autopar.errors import PlanError
from autopar.ir.graph import INPUT, PARAMETER, SOURCE_OPS, Graph, Node, Phase, Ref, TensorType
from autopar.ir.sharding import WHOLE, Mesh, Partial, Sharding, Split, is_legal
from autopar.plan.records import NodePlan, ParameterPlan, Plan, StagePlan, Transfer
from autopar.plan.wording import sharding_text

Follows = Callable[[Node, NodePlan, Mesh], bool]
"""Whether a node computes what it should under the shardings of its plan."""


def check(
    plan: Plan,
    graph: Graph,
    cluster_ranks: int,
    *,
    fingerprint: str | None = None,
    views: Collection[str] = (),
    follows: Follows | None = None,
) -> None:
    """Refuse a plan that is not legal here.

    Args:
        plan: The plan.
        graph: The step captured here.
        cluster_ranks: Ranks there are here.
        fingerprint: Of the step captured here; None leaves it unchecked.
        views: Nodes that only rename dims, which a plan leaves out.
        follows: Whether the rule of a node allows its shardings; None leaves that unchecked.

    Raises:
        PlanError: It says what does not fit.
    """
    _check_ranks(plan, cluster_ranks)
    _check_batch(plan, graph)
    _check_model(plan, graph)
    if graph.alone and plan.microbatches != graph.microbatches:
        raise _edited(
            f"modules are computed from each of {graph.microbatches} microbatches alone, it has "
            f"{plan.microbatches}"
        )
    if fingerprint is not None and plan.fingerprint != fingerprint:
        raise _refusal(
            "parameters and batch are the same, but the captured step is another: the model's "
            "code, its mode, the precision or the loss differs"
        )
    for stage in plan.stages:
        for parameter in stage.parameters:
            _check_stored(parameter, stage.mesh)
            _check_home(parameter)
        _check_inputs(stage, graph)
        _check_nodes(stage, graph, views)
        _check_kept(stage, graph)
        _check_recomputed(stage, graph)
        _check_offloaded(stage, graph)
        _check_added_up(stage, graph)
        _check_follows(stage, graph, follows)
    _check_complete(plan, graph, views)
    _check_transfers(plan, graph)
    _check_reached(plan, graph, views)


def _refusal(what: str, remedy: str = "plan again for this model and batch") -> PlanError:
    return PlanError(f"cannot use this plan: {what}; {remedy}")


def _edited(what: str) -> PlanError:
    return _refusal(what, "undo the edit or plan again")


def _check_ranks(plan: Plan, cluster_ranks: int) -> None:
    if plan.cluster_ranks != cluster_ranks:
        raise _refusal(
            f"it is for {plan.cluster_ranks} ranks of {plan.cluster!r}, here are {cluster_ranks}",
            f"start {plan.cluster_ranks} processes or plan again",
        )
    for number, stage in enumerate(plan.stages):
        if stage.mesh.microbatches != plan.microbatches:
            raise _edited(
                f"it has {plan.microbatches} microbatches, stage {number} {stage.mesh.microbatches}"
            )
        last = stage.first_rank + stage.mesh.num_ranks
        if stage.first_rank < 0 or last > cluster_ranks:
            raise _edited(
                f"stage {number} has ranks {stage.first_rank} to {last - 1} of {cluster_ranks}"
            )
    _check_stages_apart(plan)


def _check_stages_apart(plan: Plan) -> None:
    """Chunks are on the same ranks, with the same mesh, or share none."""
    first: dict[int, int] = {}
    for number, stage in enumerate(plan.stages):
        other = first.setdefault(stage.first_rank, number)
        if plan.stages[other].mesh != stage.mesh:
            raise _edited(
                f"chunks {other} and {number} both begin at rank {stage.first_rank}, on different "
                "meshes"
            )
    chunks = sorted((stage.first_rank, number) for number, stage in enumerate(plan.stages))
    for (rank, number), (after, other) in pairwise(chunks):
        last = rank + plan.stages[number].mesh.num_ranks
        if rank < after < last:
            raise _edited(
                f"stage {number} has ranks {rank} to {last - 1}, stage {other} begins at {after}"
            )


def _check_batch(plan: Plan, graph: Graph) -> None:
    here = {node.target: node.outputs[0] for node in graph.sources(INPUT)}
    if difference := _difference(plan.batch, here, "input"):
        raise _refusal(f"it is for another batch: {difference}")


def _check_model(plan: Plan, graph: Graph) -> None:
    here = {node.target: node.outputs[0] for node in graph.sources(PARAMETER)}
    there = {p.name: p.type for stage in plan.stages for p in stage.parameters}
    if difference := _difference(there, here, "parameter"):
        raise _refusal(f"it is for another model, a {plan.model}: {difference}")
    seen: set[str] = set()
    for parameter in (p for stage in plan.stages for p in stage.parameters):
        if parameter.name in seen:
            raise _edited(f"parameter {parameter.name!r} is owned twice")
        seen.add(parameter.name)
        if parameter.trainable != (parameter.name in graph.gradients) and graph.gradients:
            words = {True: "trainable", False: "frozen"}
            says, not_so = words[parameter.trainable], words[not parameter.trainable]
            raise _refusal(f"parameter {parameter.name!r} is {says} in it and {not_so} here")


def _difference(
    there: Mapping[str, TensorType], here: Mapping[str, TensorType], kind: str
) -> str | None:
    """The first difference between types by name, as text."""
    for name, own in there.items():
        if name not in here:
            return f"{kind} {name!r} of the plan is not here"
        if here[name] != own:
            return f"{kind} {name!r} is {own} in it and {here[name]} here"
    missing = next((name for name in here if name not in there), None)
    return None if missing is None else f"{kind} {missing!r} is not in it"


def _check_stored(parameter: ParameterPlan, mesh: Mesh) -> None:
    what = f"parameter {parameter.name!r}"
    _check_sharding(parameter.stored, parameter.type, mesh, f"{what} is stored")
    for used in parameter.used:
        _check_sharding(used, parameter.type, mesh, f"{what} is used")
    for axis in parameter.stored:
        if isinstance(axis, Partial):
            raise _edited(f"{what} is stored as terms of a sum, no rank would hold it")
    if not _is_plain(parameter.stored, parameter.type, mesh):
        raise _edited(
            f"{what} is stored {sharding_text(parameter.stored, mesh)}, which is not contiguous "
            "pieces in the order of the mesh axes"
        )


def _is_plain(sharding: Sharding, kind: TensorType, mesh: Mesh) -> bool:
    """Whether DTensor says it with ``Shard``: each axis cuts what the axes before it left."""
    pieces: dict[int, int] = {}
    for axis, size in zip(sharding, mesh.sizes, strict=True):
        if isinstance(axis, Split):
            row = kind.shape[axis.dim] // axis.outer
            if (
                axis.outer != pieces.get(axis.dim, 1)
                or axis.block != -(-row // size)
                or axis.shares
            ):
                return False
            pieces[axis.dim] = axis.outer * size
    return True


def _check_sharding(sharding: Sharding, kind: TensorType, mesh: Mesh, what: str) -> None:
    if len(sharding) != len(mesh.sizes):
        raise _edited(
            f"{what} with {len(sharding)} entries, the mesh has {len(mesh.sizes)} axes "
            f"({', '.join(mesh.names)})"
        )
    for axis, name, size in zip(sharding, mesh.names, mesh.sizes, strict=True):
        if isinstance(axis, Split) and axis.dim >= len(kind.shape):
            raise _edited(f"{what} split along dim {axis.dim}, its type is {kind}")
        if isinstance(axis, Split) and not is_legal(kind.shape, sharding, mesh, empty=True):
            raise _edited(
                f"{what} {sharding_text(sharding, mesh)} in blocks of {axis.block}, which does "
                f"not fit {kind} on mesh axis {name!r} of size {size}"
            )


def _check_home(parameter: ParameterPlan) -> None:
    if parameter.on_host and parameter.trainable and not parameter.state_on_host:
        raise _edited(
            f"it keeps parameter {parameter.name!r} in host memory, but its optimizer state on the "
            "device"
        )


def _check_inputs(stage: StagePlan, graph: Graph) -> None:
    here = {node.target: node.outputs[0] for node in graph.sources(INPUT)}
    for path, sharding in stage.inputs.items():
        if path not in here:
            raise _edited(f"it splits input {path!r}, which is not here")
        _check_sharding(sharding, here[path], stage.mesh, f"input {path!r} is taken")


def _check_nodes(stage: StagePlan, graph: Graph, views: Collection[str]) -> None:
    seen: set[str] = set()
    for entry in stage.nodes:
        node = graph.by_name.get(entry.name)
        if node is None or node.op in SOURCE_OPS:
            raise _edited(f"it places node {entry.name!r}, which is not in the captured step")
        if entry.name in seen:
            raise _edited(f"it places node {entry.name!r} twice")
        if entry.name in views:
            raise _edited(f"it places node {entry.name!r}, a view, which follows its operand")
        seen.add(entry.name)
        _check_node(entry, node, graph, stage.mesh)


def _check_node(entry: NodePlan, node: Node, graph: Graph, mesh: Mesh) -> None:
    reads = tuple(graph.type_of(ref) for ref in node.operands)
    for side, shardings, types in (
        ("operand", entry.operands, reads),
        ("output", entry.outputs, node.outputs),
    ):
        if len(shardings) != len(types):
            raise _edited(f"node {node.name!r} has {len(types)} {side}s, it gives {len(shardings)}")
        for index, (sharding, kind) in enumerate(zip(shardings, types, strict=True)):
            _check_sharding(sharding, kind, mesh, f"{side} {index} of {node.name!r} is")


def _check_kept(stage: StagePlan, graph: Graph) -> None:
    for name, shardings in stage.kept.items():
        kind = _type_of(name, graph, "keeps")
        for sharding in shardings:
            _check_sharding(sharding, kind, stage.mesh, f"value {name!r} is kept")


def _check_added_up(stage: StagePlan, graph: Graph) -> None:
    for name, sharding in stage.added_up.items():
        kind = _type_of(name, graph, "adds up")
        _check_sharding(sharding, kind, stage.mesh, f"value {name!r} is added up")
        time = stage.mesh.time_axis
        if time is None or sharding[time] != WHOLE:
            raise _edited(f"it adds up value {name!r}, but not over its microbatches")


def _type_of(name: str, graph: Graph, does: str) -> TensorType:
    """Type of a value named in a plan."""
    node, _, index = name.partition(":")
    at = int(index) if index.isdecimal() else 0
    if node not in graph.by_name or at >= len(graph.by_name[node].outputs):
        raise _edited(f"it {does} value {name!r}, which is not in the captured step")
    return graph.type_of(Ref(node, at))


def _check_recomputed(stage: StagePlan, graph: Graph) -> None:
    placed = {entry.name for entry in stage.nodes}
    for name in stage.recomputed:
        if name not in placed:
            raise _edited(f"it recomputes node {name!r}, which does not run there")
        if graph.by_name[name].phase is not Phase.FORWARD:
            raise _edited(f"it recomputes node {name!r}, which runs in the backward")
    again = set(stage.recomputed)
    for reader, names in stage.forgotten.items():
        if reader not in placed or graph.by_name[reader].phase is not Phase.BACKWARD:
            raise _edited(f"it forgets results before {reader!r}, which is no backward node there")
        for name in set(names) - again:
            raise _edited(f"it forgets what {name!r} makes, which it does not recompute")


def _check_offloaded(stage: StagePlan, graph: Graph) -> None:
    for name in stage.offloaded:
        node = graph.by_name.get(name.partition(":")[0])
        if node is None or name not in stage.kept:
            raise _edited(f"it offloads value {name!r}, which it does not keep")
        if node.op in SOURCE_OPS or node.phase is not Phase.FORWARD:
            raise _edited(f"it offloads value {name!r}, which the forward does not make")
        if node.name in stage.recomputed:
            raise _edited(f"it offloads value {name!r}, which it recomputes as well")
    room = stage.copy_room_bytes
    if room is not None and room < 0:
        raise _edited(f"it leaves {room:,} bytes for copies on their way; 0 is the least")
    if room is not None and not stage.copies:
        raise _edited(f"it leaves {room:,} bytes for copies on their way, of which there are none")


def _check_follows(stage: StagePlan, graph: Graph, follows: Follows | None) -> None:
    if follows is None:
        return
    for entry in stage.nodes:
        node = graph.by_name[entry.name]
        if not follows(node, entry, stage.mesh):
            reads = ", ".join(sharding_text(s, stage.mesh) for s in entry.operands)
            gives = ", ".join(sharding_text(s, stage.mesh) for s in entry.outputs)
            raise _edited(f"'{node.op}' of {node.source} cannot make {gives} from {reads}")


def _check_complete(plan: Plan, graph: Graph, views: Collection[str]) -> None:
    placed = {entry.name for stage in plan.stages for entry in stage.nodes}
    for node in graph.nodes:
        needed = node.op not in SOURCE_OPS and node.name not in views
        if needed and node.name not in placed:
            raise _edited(f"it does not place node {node.name!r}, '{node.op}' of {node.source}")


def _check_transfers(plan: Plan, graph: Graph) -> None:
    for transfer in plan.transfers:
        kind = _type_of(transfer.value, graph, "sends")
        what = f"value {transfer.value!r}"
        for chunk in (transfer.source, transfer.target):
            if not 0 <= chunk < len(plan.stages):
                raise _edited(f"it sends {what} over chunk {chunk} of {len(plan.stages)}")
        source, target = plan.stages[transfer.source].mesh, plan.stages[transfer.target].mesh
        _check_sharding(transfer.sharding, kind, source, f"{what} leaves chunk {transfer.source}")
        _check_sharding(transfer.arrival, kind, target, f"{what} reaches chunk {transfer.target}")
        _check_pieces(transfer, plan, what)


def _check_reached(plan: Plan, graph: Graph, views: Collection[str]) -> None:
    """Every value that a chunk reads is made there or crosses to it from one that makes it."""
    made = [_made(stage, graph) for stage in plan.stages]
    crosses: dict[tuple[str, int], int] = {}
    for transfer in plan.transfers:
        value, source, target = transfer.value, transfer.source, transfer.target
        if value.partition(":")[0] not in made[source]:
            raise _edited(f"it sends value {value!r} from chunk {source}, which does not make it")
        crosses[value, target] = source
    for number, stage in enumerate(plan.stages):
        for ref, reader in _reads(stage, graph):
            while ref.node in views:
                ref = graph.by_name[ref.node].operands[0]
            node = graph.by_name[ref.node]
            everywhere = node.op in SOURCE_OPS and node.op != PARAMETER
            if everywhere or ref.node in made[number] or (str(ref), number) in crosses:
                continue
            for home in (n for n, own in enumerate(made) if ref.node in own):
                raise _refusal(
                    f"{reader} reads value {str(ref)!r} on chunk {number} {_place(plan, number)}, "
                    f"and no transfer brings it there from chunk {home} {_place(plan, home)}, "
                    "which makes it",
                    f"add a transfer of it from {home} to {number}, undo the edit or plan again",
                )


def _made(stage: StagePlan, graph: Graph) -> set[str]:
    """Nodes whose values a chunk has without a transfer: those it runs, parameters it owns."""
    owned = {p.name for p in stage.parameters}
    nodes = {node.name for node in graph.sources(PARAMETER) if node.target in owned}
    return nodes | {entry.name for entry in stage.nodes}


def _reads(stage: StagePlan, graph: Graph) -> Iterator[tuple[Ref, str]]:
    """Values that a chunk reads, and what reads them, in words."""
    for entry in stage.nodes:
        node = graph.by_name[entry.name]
        for ref in node.operands:
            yield ref, f"'{node.op}' of {node.source}"
    for parameter in stage.parameters:
        if parameter.name in graph.gradients:
            yield graph.gradients[parameter.name], f"the gradient of {parameter.name!r}"


def _place(plan: Plan, chunk: int) -> str:
    return f"(stage {plan.stage_of_chunks[chunk]})"


def _check_pieces(transfer: Transfer, plan: Plan, what: str) -> None:
    """Whether the target's pieces can be put together from those of the source."""
    source, target = plan.stages[transfer.source].mesh, plan.stages[transfer.target].mesh
    where = f"{what} goes from chunk {transfer.source} to {transfer.target}"
    if source.space.sizes == target.space.sizes and transfer.sharding == transfer.arrival:
        return
    if plan.stage_of_chunks[transfer.source] == plan.stage_of_chunks[transfer.target]:
        raise _edited(f"{where} on the same ranks, and does not arrive as it leaves")
    if any(isinstance(axis, Partial) for axis in transfer.sharding[: len(source.space.sizes)]):
        raise _edited(
            f"{where} between unlike meshes as {sharding_text(transfer.sharding, source)}, terms "
            "of a sum that must be added up before they leave"
        )
    if source.time_axis is not None and transfer.sharding[-1] != transfer.arrival[-1]:
        raise _edited(
            f"{where} and leaves as {sharding_text(transfer.sharding, source)}, but arrives as "
            f"{sharding_text(transfer.arrival, target)}: other microbatches"
        )
