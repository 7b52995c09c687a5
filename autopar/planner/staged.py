"""Pipelines lowered: what their chunks take, and what a schedule makes of them.

Every chunk's program is simulated section by section; the schedule's timeline gives the step, and
where its turns stand in a stage's row gives what the stage holds. Stages that are alike are
lowered once. Schedules of the same chunks on the same ranks have the same programs, so that one
lowering serves for all of them.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cost.node import NodeCost
from autopar.ir.graph import DTYPE_BYTES, Ref
from autopar.lower.chunks import lower_chunks, on_one_rank
from autopar.lower.held import Loop
from autopar.lower.live import Moment
from autopar.lower.overlap import overlap
from autopar.lower.program import Message, Program, ProgramInput, Section
from autopar.lower.ranks import slowest_coordinates
from autopar.lower.rows import turns_of
from autopar.lower.simulate import Simulation, entered_bytes, prices, simulate
from autopar.lower.spmd import Crossing, Facts, facts_of
from autopar.lower.unroll import Row, with_refs
from autopar.plan.records import StagePlan
from autopar.planner.alike import texts
from autopar.planner.layout import Layout
from autopar.planner.pipeline import Kind, Lane
from autopar.schedules.makespan import ChunkTime
from autopar.schedules.makespan import simulate as simulate_schedule
from autopar.schedules.table import rows_of, schedule_named
from autopar.search.analysis import Analysis
from autopar.search.stages import Pipeline
from cost_models.cluster import Cluster
from cost_models.collectives import collective_s, pair_link


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One chunk of a stage, lowered.

    Attributes:
        number: In the pipeline it was lowered for.
        program: Of the first rank.
        sections: Simulation of every section, for one microbatch.
    """

    number: int
    program: Program
    sections: Mapping[Section, Simulation]

    @property
    def time(self) -> ChunkTime:
        """Seconds for one microbatch."""
        weight_s = self.sections[Section.WEIGHT_GRADIENT].seconds
        return ChunkTime(
            forward_s=self.sections[Section.FORWARD].seconds,
            backward_s=self.sections[Section.BACKWARD].seconds + weight_s,
            weight_s=weight_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredStage:
    """One stage, or several that are alike.

    Attributes:
        cost: What prices it.
        chunks: In their order.
        together: The program of its first rank with all of them.
        loops: The loop as `peak` wants it, as soon as it was asked for.
    """

    cost: NodeCost
    chunks: tuple[Chunk, ...]
    together: Program
    loops: list[Loop] = field(default_factory=list)

    def _loop(self, row: Row) -> Loop:
        if not self.loops:
            self.loops.append(Loop(self.together, row))
        return self.loops[0]

    def between(self, row: Row, at: int, without: Container[str] = ()) -> tuple[int, int]:
        """Bytes that its ranks hold behind a turn of a row that leaves no microbatch begun.

        What was made before the loop, and what the microbatches add up.

        Beside what enters the program, what they receive for the next turn, and what some nodes
        make.
        """
        arriving = sum(
            part.num_elements * DTYPE_BYTES[message.local_type.dtype]
            for message in self.together.receives
            if message.section is row[at + 1].section
            for part in message.parts
        )
        before, within = self._loop(row).behind(row, at, without)
        return before, within - arriving

    def profile(self, row: Row) -> tuple[Moment, ...]:
        """What its ranks hold when, as of `peak`."""
        return self._loop(row).profile(row)

    def peak(self, row: Row) -> Simulation:
        """The bytes of its ranks in a row, whose turns have the numbers of `chunks`."""
        held = self._loop(row).held(row)
        return replace(
            self.chunks[0].sections[Section.FORWARD],
            peak_bytes=held.peak_bytes,
            saved_bytes=held.saved_bytes,
            gradient_bytes=held.gradient_bytes,
            host_bytes=held.host_bytes,
            input_bytes=entered_bytes(self.together),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """What one stage of a pipeline takes.

    Attributes:
        cost: What prices it.
        program: Of its first rank, with all its chunks.
        sections: Simulation of every section of every chunk, for one microbatch.
        peak: Simulation of its bytes alone; its seconds mean nothing.
    """

    cost: NodeCost
    program: Program
    sections: Mapping[tuple[Section, int], Simulation]
    peak: Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """What a pipeline takes.

    Attributes:
        ends_s: When every stage is done but for the update.
        stages: Of every stage.
    """

    ends_s: tuple[float, ...]
    stages: tuple[StageResult, ...]

    def seconds(self, updates_s: Sequence[float] = ()) -> float:
        """Of the step, without the update or with what it takes on every stage."""
        more_s = updates_s or [0.0] * len(self.ends_s)
        return max(end + own for end, own in zip(self.ends_s, more_s, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredPipeline:
    """All stages of a pipeline, lowered.

    Attributes:
        layout: What they were lowered for.
        microbatches: Of the step.
        stages: Every stage.
        chunks: Every chunk of the model, in order; alike ones are one.
        sends_s: Seconds of a message behind every chunk but the last.
        before_s: Seconds before the loop, of every stage.
        behind_s: Seconds behind it.
    """

    layout: Layout
    microbatches: int
    stages: tuple[LoweredStage, ...]
    chunks: tuple[Chunk, ...]
    sends_s: tuple[float, ...]
    before_s: tuple[float, ...]
    behind_s: tuple[float, ...]

    def step_s(self, layout: Layout) -> float:
        """Seconds of the step without the update, under a schedule of the same chunks."""
        return max(self.ends_s(layout))

    def ends_s(self, layout: Layout) -> tuple[float, ...]:
        """When every stage is done but for the update, under a schedule of the same chunks."""
        rows = rows_of(layout.schedule, layout.num_stages, layout.num_chunks, self.microbatches)
        times = [chunk.time for chunk in self.chunks]
        ran = simulate_schedule(rows, times, self.sends_s, self.before_s)
        return tuple(
            ends[-1] + own_s for ends, own_s in zip(ran.ends_s, self.behind_s, strict=True)
        )

    def under(self, layout: Layout) -> PipelineResult:
        """What it takes under a schedule that has the same chunks on the same stages."""
        assert layout.lanes == self.layout.lanes, (layout, self.layout)
        results = []
        for stage, chunks, row in self._rows(layout):
            sections = {(s, n): self.chunks[n].sections[s] for n in chunks for s in Section}
            peak = stage.peak(row)
            results.append(
                StageResult(cost=stage.cost, program=stage.together, sections=sections, peak=peak)
            )
        return PipelineResult(ends_s=self.ends_s(layout), stages=tuple(results))

    def profiles(self, pipeline: Pipeline, layout: Layout) -> tuple[tuple[Moment, ...], ...]:
        """What the ranks of every stage hold when, by its own nodes and chunks.

        Args:
            pipeline: The chunks that were lowered.
            layout: As of `under`.
        """
        found = []
        for stage, chunks, row in self._rows(layout):
            place = {chunk.number: n for n, chunk in zip(chunks, stage.chunks, strict=True)}
            own = {
                (number, a.name): b.name
                for number, n in place.items()
                for a, b in zip(
                    pipeline.stages[number].nodes, pipeline.stages[n].nodes, strict=True
                )
            }
            found.append(
                tuple(
                    moment._replace(
                        origin=own.get((moment.chunk, moment.origin), moment.origin),
                        chunk=place[moment.chunk],
                    )
                    for moment in stage.profile(row)
                )
            )
        return tuple(found)

    def _rows(self, layout: Layout) -> Iterator[tuple[LoweredStage, list[int], Row]]:
        """Every stage, its chunks, and its row with the numbers of the chunks it was lowered as."""
        turns = turns_of(layout.schedule, layout.num_stages, layout.num_chunks, self.microbatches)
        for number, (stage, row) in enumerate(zip(self.stages, turns, strict=True)):
            own = [n for n, lane in enumerate(layout.lanes) if lane == number]
            place = {n: chunk.number for n, chunk in zip(own, stage.chunks, strict=True)}
            yield stage, own, [turn._replace(chunk=place[turn.chunk]) for turn in row]


def lower_pipeline(
    analysis: Analysis,
    lanes: Sequence[Lane],
    pipeline: Pipeline,
    layout: Layout,
    cluster: Cluster,
) -> LoweredPipeline:
    """Lower every stage of a pipeline and simulate its sections.

    Args:
        analysis: The step.
        lanes: The ranks of every stage.
        pipeline: The chunks.
        layout: Stages, chunks and schedule.
        cluster: For the links between stages.
    """
    shared = _shared(analysis, pipeline, layout)
    known: dict[Hashable, LoweredStage] = {}
    stages: list[LoweredStage] = []
    chunks: dict[int, Chunk] = {}
    for number, text in enumerate(texts(analysis, pipeline, layout.lanes)):
        held = _held_by(pipeline, layout, number)
        cost = lanes[number].kind.cost
        if (id(cost), text) not in known:
            known[id(cost), text] = _lower_stage(analysis, held, cost, shared)
        stages.append(known[id(cost), text])
        chunks.update(zip(held, stages[-1].chunks, strict=True))
    ordered = tuple(chunks[n] for n in range(len(chunks)))
    first = [lanes[stage].first_rank for stage in layout.lanes]
    sends_s = tuple(
        collective_s(
            "send", _border_bytes(*ordered[at : at + 2]), pair_link(cluster, *first[at : at + 2])
        )
        for at in range(len(ordered) - 1)
    )

    def once_s(section: Section) -> tuple[float, ...]:
        return tuple(
            sum(chunk.sections[section].seconds for chunk in stage.chunks) for stage in stages
        )

    return LoweredPipeline(
        layout=layout,
        microbatches=pipeline.stages[0].mesh.microbatches,
        stages=tuple(stages),
        chunks=ordered,
        sends_s=sends_s,
        before_s=once_s(Section.PROLOGUE),
        behind_s=once_s(Section.EPILOGUE),
    )


def bytes_of_stage(
    analysis: Analysis, kind: Kind, pipeline: Pipeline, layout: Layout, number: int
) -> tuple[LoweredStage, Simulation]:
    """One stage of a pipeline lowered, and the bytes of its ranks, with none of the others."""
    shared = _shared(analysis, pipeline, layout)
    stage = _lower_stage(analysis, _held_by(pipeline, layout, number), kind.cost, shared)
    microbatches = pipeline.stages[0].mesh.microbatches
    turns = turns_of(layout.schedule, layout.num_stages, layout.num_chunks, microbatches)
    return stage, stage.peak(turns[number])


def _shared(analysis: Analysis, pipeline: Pipeline, layout: Layout) -> tuple[Crossing, Facts]:
    """What the stages of a pipeline have in common."""
    crossing = Crossing(
        transfers=pipeline.transfers,
        meshes=tuple(stage.mesh for stage in pipeline.stages),
        splits_backward=schedule_named(layout.schedule).splits_backward,
    )
    return crossing, facts_of(analysis.graph, analysis.rules)


def _held_by(pipeline: Pipeline, layout: Layout, number: int) -> dict[int, StagePlan]:
    """The chunks of one stage."""
    return {n: pipeline.stages[n] for n, own in enumerate(layout.lanes) if own == number}


def lower_some(
    analysis: Analysis,
    kind: Kind,
    pipeline: Pipeline,
    numbers: Sequence[int],
    *,
    splits_backward: bool,
) -> dict[int, LoweredStage]:
    """Some chunks of a pipeline, each as the only one of its ranks.

    Args:
        analysis: The step.
        kind: Of the ranks of all.
        pipeline: The chunks.
        numbers: Of those that are lowered.
        splits_backward: Whether weight gradients are a section of their own.
    """
    crossing = Crossing(
        transfers=pipeline.transfers,
        meshes=tuple(stage.mesh for stage in pipeline.stages),
        splits_backward=splits_backward,
    )
    shared = crossing, facts_of(analysis.graph, analysis.rules)
    return {
        number: _lower_stage(analysis, {number: pipeline.stages[number]}, kind.cost, shared)
        for number in numbers
    }


def _lower_stage(
    analysis: Analysis,
    held: Mapping[int, StagePlan],
    cost: NodeCost,
    shared: tuple[Crossing, Facts],
) -> LoweredStage:
    """Lower the chunks of one stage."""
    priced = prices(cost.device, cost.collective_s)
    coordinates = slowest_coordinates(analysis.graph, list(held.values()))
    programs = lower_chunks(
        analysis.graph, analysis.rules, held, coordinates, cost.collective_s, *shared
    )
    chunks = []
    for number, program in zip(sorted(held), programs, strict=True):
        ready = overlap(program, priced)
        sections = {s: simulate(section_program(ready, s), priced) for s in Section}
        chunks.append(Chunk(number=number, program=ready, sections=sections))
    together = chunks[0].program
    if len(chunks) > 1:
        together = on_one_rank(analysis.graph, programs, held, priced)
    return LoweredStage(cost=cost, chunks=tuple(chunks), together=together)


def _border_bytes(before: Chunk, behind: Chunk) -> int:
    """Most bytes that a rank sends, or gets, between two chunks for one microbatch."""
    return max(
        _moved_bytes(before.program.sends, before.number + 1),
        _moved_bytes(behind.program.receives, behind.number - 1),
    )


def _moved_bytes(messages: Sequence[Message], peer: int) -> int:
    return sum(
        part.num_elements * DTYPE_BYTES[m.local_type.dtype]
        for m in messages
        if m.peer == peer and m.section is Section.FORWARD
        for part in m.parts
    )


def section_program(program: Program, section: Section) -> Program:
    """One section as a program of its own; what it reads of others enters it."""
    chosen = tuple(i for i in program.instructions if i.section is section)
    made = {Ref(i.name, n): kind for i in program.instructions for n, kind in enumerate(i.outputs)}
    made |= {m.ref: m.local_type for m in program.receives}
    own = {i.name for i in chosen}
    entered = {Ref(item.name) for item in program.inputs}
    extra: dict[Ref, ProgramInput] = {}
    rename: dict[Ref, Ref] = {}
    for instruction in chosen:
        for ref in instruction.operands:
            if ref.node in own or ref in entered or ref in extra:
                continue
            name = f"{ref.node}#{ref.index}"
            kind = made[ref]
            rename[ref] = Ref(name)
            extra[ref] = ProgramInput(
                name=name,
                kind="between",
                target=name,
                global_type=kind,
                sharding=(),
                local_type=kind,
            )
    renamed = tuple(with_refs(i, rename) for i in chosen)
    return replace(
        program,
        inputs=(*program.inputs, *extra.values()),
        instructions=renamed,
        loss=None,
        aux=(),
        gradients={},
        mutations={},
        sends=(),
        receives=(),
        microbatches=1,
    )
