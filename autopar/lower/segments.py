"""What a rank does before and behind its loop, in steps between messages.

Parameters go from the stage that owns them to later ones, their gradients come back, and what the
loop added up may go either way; two ranks that each waited for everything before they sent
anything would wait for ever. So a rank takes its messages in the order in which the captured step
makes them, and between two of them runs and sends all that needs no later one: whoever holds the
earliest value that has not arrived can always send it.
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
    receives = sorted((m for m in program.receives if m.section is section), key=_number)
    needed = {m.ref: place for place, m in enumerate(receives, start=1)}
    runs: list[list[Instruction]] = [[] for _ in range(len(receives) + 1)]
    gives: list[list[Message]] = [[] for _ in runs]
    for instruction in program.instructions:
        if instruction.section is section:
            place = max((needed.get(ref, 0) for ref in instruction.operands), default=0)
            runs[place].append(instruction)
            results = (Ref(instruction.name, index) for index in range(len(instruction.outputs)))
            needed.update(dict.fromkeys(results, place))
    for message in sorted((m for m in program.sends if m.section is section), key=_number):
        gives[needed.get(message.ref, 0)].append(message)
    found, takes = [], []
    for place, (run, give) in enumerate(zip(runs, gives, strict=True)):
        takes += receives[place - 1 : place] if place else []
        if run or give or place == len(receives):
            found.append(Segment(tuple(takes), tuple(run), tuple(give)))
            takes = []
    return tuple(found)


def _number(message: Message) -> int:
    return message.number
