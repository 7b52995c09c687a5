"""Two ranks that send to each other behind the loop: each sends what it has before it waits."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import Ref, TensorType
from autopar.ir.sharding import Mesh
from autopar.lower.program import Instruction, Message, Program, Section
from autopar.lower.segments import segments

KIND = TensorType((2,), "float32")


def program(
    instructions: Sequence[tuple[str, str]], sends: dict[str, int], receives: dict[str, int]
) -> Program:
    """An epilogue of negations, given as (result, operand); messages by value and number."""

    def messages(of: dict[str, int]) -> tuple[Message, ...]:
        return tuple(
            Message(
                ref=Ref(name),
                value=name,
                chunk=0,
                peer=1,
                section=Section.EPILOGUE,
                local_type=KIND,
                number=number,
                parts=(),
            )
            for name, number in of.items()
        )

    return Program(
        mesh=Mesh((), ()),
        coordinates=(),
        inputs=(),
        instructions=tuple(
            Instruction(
                name=name,
                op="aten.neg.default",
                args=(Ref(operand),),
                outputs=(KIND,),
                origin=name,
                section=Section.EPILOGUE,
            )
            for name, operand in instructions
        ),
        loss=None,
        sends=messages(sends),
        receives=messages(receives),
    )


def steps(of: Program) -> list[tuple[list[str], list[str], list[str]]]:
    """What each step takes, runs and gives."""
    return [
        (
            [m.ref.node for m in segment.takes],
            [i.name for i in segment.instructions],
            [m.ref.node for m in segment.gives],
        )
        for segment in segments(of, Section.EPILOGUE)
    ]


def test_what_is_made_leaves_before_anything_is_waited_for() -> None:
    here = program([("a", "loop"), ("b", "got")], {"a": 0}, {"got": 1})
    assert steps(here) == [([], ["a"], ["a"]), (["got"], ["b"], [])]


def test_what_comes_back_is_made_of_what_was_sent() -> None:
    there = program([("c", "got"), ("d", "c")], {"d": 1}, {"got": 0})
    assert steps(there) == [(["got"], ["c", "d"], ["d"])]


def test_a_message_that_this_rank_does_not_read_is_taken_at_the_end() -> None:
    here = program([("a", "loop")], {"a": 0, "passed": 2}, {"got": 1})
    assert steps(here) == [([], ["a"], ["a", "passed"]), (["got"], [], [])]


def test_a_rank_that_sends_and_receives_nothing_has_one_step() -> None:
    assert steps(program([("a", "loop")], {}, {})) == [([], ["a"], [])]
    assert steps(program([], {}, {})) == [([], [], [])]
