"""What a rank does before and behind its loop, in steps between messages.

Parameters go from the stage that owns them to later ones, their gradients come back, and what the
loop added up may go either way; two ranks that each waited for everything before they sent
anything would wait for ever. So a rank runs its instructions in order, waits for a message where
the first of them reads it, and sends what is made before it waits again. Their order is one that
all ranks share: prologues by chunk, epilogues as in the captured step; so whoever holds the
earliest value that has not arrived can always send it. Collectives stay in the order they have.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import Ref
from autopar.lower.program import Instruction, Message, Program, Section


@dataclass(frozen=True, slots=True)
class Segment:
    """One step: take, then run, then give.

    Attributes:
        takes: Messages to wait for.
        instructions: What to run, in order.
        gives: Messages to send.
    """

    takes: tuple[Message, ...]
    instructions: tuple[Instruction, ...]
    gives: tuple[Message, ...]


def segments(program: Program, section: Section) -> tuple[Segment, ...]:
    """The steps of the prologue or the epilogue of a rank's program.

    Args:
        program: Of one rank, with all its chunks.
        section: Prologue or epilogue.
    """
    waiting = {m.ref: m for m in program.receives if m.section is section}
    leaving = sorted((m for m in program.sends if m.section is section), key=lambda m: m.number)
    own = {i.name for i in program.instructions if i.section is section}
    made: set[Ref] = set()
    found: list[Segment] = []
    takes: list[Message] = []
    run: list[Instruction] = []

    def end() -> None:
        ready = [m for m in leaving if _is_there(m.ref, own, made, waiting)]
        leaving[:] = [m for m in leaving if m not in ready]
        if takes or run or ready:
            found.append(Segment(tuple(takes), tuple(run), tuple(ready)))
        takes.clear()
        run.clear()

    for instruction in program.instructions:
        if instruction.section is not section:
            continue
        needed = [waiting.pop(ref) for ref in dict.fromkeys(instruction.operands) if ref in waiting]
        if needed:
            end()
            takes += needed
        run.append(instruction)
        made |= {Ref(instruction.name, index) for index in range(len(instruction.outputs))}
    end()
    takes += waiting.values()
    waiting.clear()
    end()
    assert not leaving, leaving
    return tuple(found) or (Segment((), (), ()),)


def _is_there(ref: Ref, own: set[str], made: set[Ref], waiting: dict[Ref, Message]) -> bool:
    """Whether a value can leave: it entered the section, was received, or was made in it."""
    return ref not in waiting if ref.node not in own else ref in made
