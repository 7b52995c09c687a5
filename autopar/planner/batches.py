"""How the batch can be cut: over ranks, into microbatches, between the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.ir.graph import INPUT, Graph
from autopar.ir.sharding import Mesh
from autopar.planner.layout import Layout
from autopar.search.analysis import Analysis
from autopar.search.outer import batch_parts, common_rows
from cost_models.cluster import Cluster

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of microbatches that are tried."""


def stage_counts(analysis: Analysis, cluster: Cluster, *, whole: bool = True) -> tuple[int, ...]:
    """Numbers of stages to try: of whole nodes or equal parts of nodes.

    Args:
        analysis: The step.
        cluster: The nodes.
        whole: Whether there are no more than repeated blocks.
    """
    nodes = cluster.num_devices // cluster.devices_per_node
    depth = max((len(names) for names in analysis.folding.classes), default=1)
    most = min(MOST_STAGES, max(depth, 2)) if whole else MOST_STAGES
    return tuple(
        count
        for count in range(2, most + 1)
        if cluster.num_devices % count == 0 and (nodes % count == 0 or count % nodes == 0)
    )


MOST_STAGES = 16
"""Of pipelines that are tried without a hint."""


def filling_count(graph: Graph, layout: Layout, mesh: Mesh) -> int:
    """Microbatches of a pipeline: the most that leave every outer rank a sample, up to 8 a stage.

    Args:
        graph: The step.
        layout: The pipeline.
        mesh: Of one stage; its outermost axis is the likeliest to split the batch.
    """
    samples = samples_of(graph)
    outer = mesh.sizes[0] if len(mesh.sizes) > 1 else 1
    fitting = [
        count
        for count in COUNTS
        if samples % count == 0
        and samples // count >= min(outer, samples)
        and count <= 8 * layout.num_stages
        and layout.fits(count)
    ]
    return max(fitting, default=1)


def samples_of(graph: Graph) -> int:
    """Samples of the batch: of its input that has fewest."""
    return min(
        (
            node.outputs[0].shape[graph.batch_dims[node.target]]
            for node in graph.sources(INPUT)
            if node.target in graph.batch_dims
        ),
        default=1,
    )


def microbatch_counts(
    graph: Graph,
    forced: int | None,
    layout: Layout | None = None,
    fits: Callable[[int], bool] = lambda count: True,
) -> tuple[int, ...]:
    """Numbers of microbatches to try, fewest first: more are needed only where memory binds.

    Args:
        graph: The step.
        forced: The number a hint gives, or None.
        layout: Stages to keep busy: a pipeline starts at four microbatches a stage.
        fits: Whether the batch can be cut into so many over the ranks; ignored if none can.

    Raises:
        UnsupportedError: The schedule cannot do the number that is forced, or any.
    """
    num_stages = 1 if layout is None else layout.num_stages
    if forced is not None:
        if layout is not None and num_stages > 1:
            layout.check(forced)
        return (forced,)
    samples = samples_of(graph)
    dividing = [count for count in COUNTS[:-1] if samples % count == 0]
    fitting = [count for count in dividing if fits(count)] or dividing
    if layout is None or num_stages == 1:
        return tuple(fitting)
    possible = [count for count in fitting if layout.fits(count)]
    if not possible:
        layout.check(fitting[-1])
    enough = [count for count in possible if count >= 4 * num_stages]
    return tuple(enough or possible[-1:])


def in_time(graph: Graph, spaces: Sequence[Mesh], microbatches: int) -> tuple[Mesh, ...]:
    """The meshes of stages with a time axis on which all run the same microbatches.

    Where the step says which samples are a microbatch, they follow each other in the batch.
    """
    in_turn = bool(graph.alone)
    rows = 1 if in_turn else common_rows(spaces)
    return tuple(space.with_time(microbatches, rows, in_turn=in_turn) for space in spaces)


def batch_misfit(graph: Graph, mesh: Mesh) -> str:
    """Why the batch cannot be cut over ``dp`` and into the mesh's microbatches; empty if it can."""
    ranks = max(batch_parts(mesh), mesh.rows)
    parts = ranks * mesh.microbatches
    for node in graph.sources(INPUT):
        dim = graph.batch_dims.get(node.target)
        samples = 0 if dim is None else node.outputs[0].shape[dim]
        divides = min(ranks, mesh.microbatches) > 1
        if dim is not None and mesh.shares and samples % parts:
            shares = " + ".join(str(n) for own in mesh.shares for n in own)
            return (
                f"cannot share the batch out as {shares} in {mesh.microbatches} microbatches: "
                f"input {node.target!r} has {samples} samples, not a multiple of {parts}; use such "
                "a batch or other parts"
            )
        if dim is not None and divides and samples % parts:
            return (
                f"cannot cut the batch into {mesh.microbatches} microbatches over dp={ranks}: "
                f"input {node.target!r} has {samples} samples, not a multiple of {parts}; use "
                "such a batch, dp=1 (any number of samples), or another hint.microbatches"
            )
    return ""
