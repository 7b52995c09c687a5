"""A program of several microbatches as one list of instructions, for the simulator.

The loop is written out in the order of a schedule's row; what it makes of a value in every
microbatch is added in place to what the first one made, as the runtime does. What one action
receives is there while the action before it runs, since its receive is posted then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.ir.graph import MICROBATCH_NUMBER, Arg, Const, Ref, replace_refs
from autopar.lower.program import (
    ACCUMULATE,
    LOOP,
    MICROBATCH,
    Instruction,
    Message,
    Program,
    Section,
)

JOIN = "aten.add_.Tensor"


class Turn(NamedTuple):
    """An action of a rank: a section of the loop, of one chunk and for one microbatch."""

    section: Section
    chunk: int
    microbatch: int


Row = Sequence[Turn]
"""What a rank does in its loop, in order."""


@dataclass(frozen=True, slots=True)
class Lives:
    """How long the values of a loop live.

    Attributes:
        until: (value, microbatch) to the position in the row of the last turn that makes, gets,
            reads or sends it; values that are read behind the loop are not there.
        joins: For every position, the values that are added to their totals behind it.
    """

    until: Mapping[tuple[Ref, int], int]
    joins: tuple[tuple[Ref, ...], ...]


def lives(programs: Sequence[Program], row: Row) -> Lives:
    """How long each value of the loop lives in a row.

    Args:
        programs: The rank's program of every microbatch, with all its chunks; the last one serves
            for all that follow.
        row: Its turns.
    """
    touched = [_touched(program) for program in programs]
    behind = [set(program.results) | _read_behind(program) for program in programs]
    until: dict[tuple[Ref, int], int] = {}
    for at, (section, chunk, number) in enumerate(row):
        own = min(number, len(programs) - 1)
        here = touched[own].get((section, chunk), ())
        until.update(((ref, number), at) for ref in here if ref not in behind[own])
    joins: list[list[Ref]] = [[] for _ in row]
    totals = [totals_of(program) for program in programs]
    for number in dict.fromkeys(turn.microbatch for turn in row):
        for ref in totals[min(number, len(programs) - 1)]:
            if (ref, number) in until:
                joins[until[ref, number]].append(ref)
    return Lives(until, tuple(map(tuple, joins)))


def _read_behind(program: Program) -> set[Ref]:
    """What the epilogue reads as it is."""
    epilogue = (i for i in program.instructions if i.section is Section.EPILOGUE)
    return {ref for i in epilogue if i.op != ACCUMULATE for ref in i.operands}


def totals_of(program: Program) -> tuple[Ref, ...]:
    """Values of the loop that are joined over the microbatches."""
    return tuple(dict.fromkeys(i.operands[0] for i in program.instructions if i.op == ACCUMULATE))


def _touched(program: Program) -> Mapping[tuple[Section, int], Mapping[Ref, None]]:
    """For every section and chunk, the values of the loop that it makes, gets, reads or sends."""
    makers = _makers(program)
    found: dict[tuple[Section, int], dict[Ref, None]] = {}
    for i in program.instructions:
        if i.section in LOOP:
            refs = (*i.operands, *_outputs(i))
            own = found.setdefault((i.section, i.chunk), {})
            own.update((ref, None) for ref in refs if ref in makers)
    for message in (*program.receives, *program.sends):
        if message.ref in makers and message.section in LOOP:
            found.setdefault((message.section, message.chunk), {})[message.ref] = None
    return found


def _makers(program: Program) -> dict[Ref, Instruction]:
    """Every value of the loop, and what makes it: an instruction, or a message as one."""
    made = {ref: i for i in program.instructions if i.section in LOOP for ref in _outputs(i)}
    return made | {m.ref: _received(m, "") for m in program.receives if m.section in LOOP}


def _outputs(instruction: Instruction) -> tuple[Ref, ...]:
    return tuple(Ref(instruction.name, index) for index in range(len(instruction.outputs)))


class Written(NamedTuple):
    """Instructions of a loop that is written out, that stay together in any row.

    Attributes:
        turn: Whose they are; None for what runs before and behind the loop.
        posted: Whether they are the receives of a turn, which are posted one turn ahead.
        instructions: In order.
    """

    turn: Turn | None
    posted: bool
    instructions: tuple[Instruction, ...]


def unroll(program: Program, row: Row) -> Program:
    """The program with its loop written out in the order of ``row``.

    Args:
        program: Of any number of microbatches, or of a rank of a pipeline.
        row: Its turns; microbatch 0 comes first of each section.
    """
    return unrolled(program, written(program, row))


def looped(program: Program, times: int) -> Program:
    """The program of an only stage with so many of its microbatches written out.

    One after the other; what one makes is added up when all of it has run. Where more follow, what
    is made before the loop is held to the end of the last.
    """
    both = (Section.FORWARD, Section.BACKWARD)
    row = [Turn(section, 0, number) for number in range(times) for section in both]
    makers = _makers(program)
    made = tuple(ref for ref in totals_of(program) if ref in makers)
    joins = [made if turn.section is Section.BACKWARD else () for turn in row]
    parts = written(program, row, joins)
    if times < program.microbatches:
        parts = (*parts[:-1], Written(None, False, _shared(program)), parts[-1])
    return unrolled(program, parts)


def _shared(program: Program) -> tuple[Instruction, ...]:
    """Have what is made before the loop, and is read in it, there until now."""
    read = {ref for i in program.instructions if i.section in LOOP for ref in i.operands}
    before = (i for i in program.instructions if i.section is Section.PROLOGUE)
    return tuple(
        replace(
            maker,
            name=f"{maker.name}:{index} held",
            op="aten.alias.default",
            args=(Ref(maker.name, index),),
            kwargs=(),
            outputs=(kind,),
            view=True,
        )
        for maker in before
        for index, kind in enumerate(maker.outputs)
        if Ref(maker.name, index) in read
    )


def unrolled(program: Program, parts: Sequence[Written]) -> Program:
    """The program whose loop is written out as ``parts``."""
    makers = _makers(program)
    first = {ref: Ref(f"{ref.node}@0", ref.index) for ref in makers}
    return replace(
        program,
        instructions=tuple(i for part in parts for i in part.instructions),
        receives=(),
        sends=(),
        loss=None if program.loss is None else first.get(program.loss, program.loss),
        aux=tuple((name, first.get(ref, ref)) for name, ref in program.aux),
        gradients={name: first.get(ref, ref) for name, ref in program.gradients.items()},
        mutations={name: first.get(ref, ref) for name, ref in program.mutations.items()},
        microbatches=1,
    )


def written(
    program: Program, row: Row, joins: Sequence[Sequence[Ref]] | None = None
) -> tuple[Written, ...]:
    """What runs before the loop, in the turns of a row with what they receive, and behind it.

    Args:
        program: As of `unroll`.
        row: Its turns.
        joins: For every turn, what is added to its total behind it; None for what the row is
            through with.
    """
    parts: dict[tuple[Section, int], list[Instruction]] = {}
    for i in program.instructions:
        parts.setdefault((i.section, i.chunk), []).append(i)
    makers = _makers(program)
    made = {ref.node for ref in makers}
    joins = lives([program], row).joins if joins is None else joins
    before = [m for m in program.receives if m.section is Section.PROLOGUE]
    begin = [*_posted(before, ""), *_unpacked(before, "")]
    begin += [i for i in program.instructions if i.section is Section.PROLOGUE]
    begin += _gone([m for m in program.sends if m.section is Section.PROLOGUE], made, 0)
    found = [Written(None, False, tuple(begin))]
    for at, (section, chunk, number) in enumerate(row):
        for turn in row[at + 1 if at else 0 : at + 2]:
            posted = _posted(of_turn(turn, program.receives), f"@{turn.microbatch}")
            found.append(Written(turn, True, tuple(posted)))
        own = _unpacked(of_turn(row[at], program.receives), f"@{number}")
        own += [_renamed(i, made, number) for i in parts.get((section, chunk), ())]
        own += _gone(of_turn(row[at], program.sends), made, number)
        if number:
            own += [_join(ref, makers[ref], number) for ref in joins[at]]
        found.append(Written(row[at], False, tuple(own)))
    behind = [m for m in program.receives if m.section is Section.EPILOGUE]
    end = [*_posted(behind, ""), *_unpacked(behind, "")]
    first = {ref: Ref(f"{ref.node}@0", ref.index) for ref in makers}
    end += [_behind(i, first) for i in program.instructions if i.section is Section.EPILOGUE]
    return (*found, Written(None, False, tuple(end)))


def of_turn(turn: Turn, messages: Sequence[Message]) -> list[Message]:
    """The messages of a turn."""
    return [m for m in messages if (m.section, m.chunk) == turn[:2]]


def _posted(messages: Sequence[Message], suffix: str) -> list[Instruction]:
    """The buffers of messages to come, and rooms for what does not arrive where it will lie."""
    rooms = [_room(m, suffix) for m in messages if m.copied_elements]
    return [_received(m, suffix) for m in messages] + rooms


def _unpacked(messages: Sequence[Message], suffix: str) -> list[Instruction]:
    """The end of those rooms."""
    return [_left(_room(m, suffix)) for m in messages if m.copied_elements]


def _gone(messages: Sequence[Message], made: set[str], number: int) -> list[Instruction]:
    """Messages sent, with the rooms of what does not leave from where it lies."""
    rooms = [_room(m, f"@{number}") for m in messages if m.copied_elements]
    return [_sent(m, made, number) for m in messages] + rooms + [_left(room) for room in rooms]


def _room(message: Message, suffix: str) -> Instruction:
    kind = replace(message.local_type, shape=(message.copied_elements,))
    bare = _received(replace(message, local_type=kind), "")
    return replace(bare, name=f"room {message.number}{suffix} of {message.ref.node}")


def _left(room: Instruction) -> Instruction:
    """Has a room there until now."""
    args = (Ref(room.name),)
    return replace(
        room, name=f"{room.name} left", op="aten.alias.default", args=args, kwargs=(), view=True
    )


def _received(message: Message, suffix: str) -> Instruction:
    """The buffer into which a message is received."""
    return Instruction(
        name=f"{message.ref.node}{suffix}",
        op="aten.empty.memory_format",
        args=(message.local_type.shape,),
        kwargs=(("dtype", Const("dtype", message.local_type.dtype)),),
        outputs=(message.local_type,),
        origin=message.value,
        section=message.section,
        chunk=message.chunk,
    )


def _sent(message: Message, made: set[str], number: int) -> Instruction:
    """What is sent is there until its turn is over."""
    ref = message.ref
    return Instruction(
        name=f"send {message.number}@{number}",
        op="aten.contiguous.default",
        args=(Ref(f"{ref.node}@{number}", ref.index) if ref.node in made else ref,),
        outputs=(message.local_type,),
        origin=message.value,
        view=True,
        section=message.section,
        chunk=message.chunk,
    )


def _renamed(instruction: Instruction, made: set[str], number: int) -> Instruction:
    """An instruction of the loop in one microbatch."""

    def own(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(f"{arg.node}@{number}", arg.index) if arg.node in made else arg
        if isinstance(arg, tuple):
            return tuple(map(own, arg))
        return number if isinstance(arg, Const) and arg == MICROBATCH_NUMBER else arg

    args = tuple(map(own, instruction.args))
    kwargs = tuple((key, own(arg)) for key, arg in instruction.kwargs)
    name = f"{instruction.name}@{number}"
    if instruction.op == MICROBATCH:
        start = int(str(args[1])) * number
        rows = (args[0], 1, start, start + int(str(args[2])))
        return replace(instruction, name=name, op="aten.slice.Tensor", args=rows, view=True)
    return replace(instruction, name=name, args=args, kwargs=kwargs)


def _join(ref: Ref, maker: Instruction, number: int) -> Instruction:
    """What one microbatch made of a value, added to what the first one made."""
    total, term = Ref(f"{ref.node}@0", ref.index), Ref(f"{ref.node}@{number}", ref.index)
    return Instruction(
        name=f"{ref.node}_{ref.index}+{number}",
        op=JOIN,
        args=(total, term),
        outputs=(maker.outputs[ref.index],),
        origin=maker.origin,
        phase=maker.phase,
        view=True,
        section=maker.section,
        chunk=maker.chunk,
    )


def _behind(instruction: Instruction, first: Mapping[Ref, Ref]) -> Instruction:
    if instruction.op == ACCUMULATE:
        ref = first.get(instruction.operands[0], instruction.operands[0])
        return replace(instruction, op="aten.alias.default", args=(ref,), view=True)
    return with_refs(instruction, first)


def with_refs(instruction: Instruction, change: Mapping[Ref, Ref]) -> Instruction:
    """The instruction with the values it reads replaced as ``change`` says."""
    refs = (change.get(ref, ref) for ref in instruction.operands)
    args = tuple(replace_refs(arg, refs) for arg in instruction.args)
    kwargs = tuple((key, replace_refs(arg, refs)) for key, arg in instruction.kwargs)
    return replace(instruction, args=args, kwargs=kwargs)
