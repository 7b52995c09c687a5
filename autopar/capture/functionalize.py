"""A tape with in-place ops recorded once more as a tape without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.capture.ops import constant_to_torch
from autopar.capture.recorder import Recorder
from autopar.capture.tape import Tape
from autopar.errors import CaptureError
from autopar.ir.graph import SOURCE_OPS, Arg, Const, Ref

_COPY = "aten.copy_.default"


def functionalize(
    tape: Tape, results: Sequence[Ref], recorder_for: Callable[[Tape], Recorder]
) -> tuple[Tape, list[Ref], dict[tuple[str, str], Ref]]:
    """The same program without mutation.

    torch's functionalization turns writes into new values and writes through views into scatters;
    what a source holds in the end is written back to it, and is found by that.

    Args:
        tape: The program.
        results: Values of the tape that are wanted.
        recorder_for: Makes the recorder of a tape, to be active over fake tensors.

    Returns:
        The new tape, the values of ``results`` on it, and for every source that was written to,
        as (op, target), the value it holds in the end.
    """
    made = Tape()
    made.constants.update(tape.constants)
    recorder = recorder_for(made)
    sources = [step for step in tape.steps if step.op in SOURCE_OPS]
    values = [ref for step in sources for ref in step.results if ref is not None]
    fakes = [_fresh(tape.tensor(ref)) for ref in values]
    for step, fake in zip(sources, fakes, strict=True):
        made.add_source(step.op, step.target, fake)

    def program(*entering: Tensor) -> list[Tensor]:
        env: dict[Ref, Any] = dict(zip(values, entering, strict=True))
        _replay(tape, env, recorder)
        return [env[ref].clone() for ref in results]

    try:
        with torch.no_grad(), recorder:
            outputs = torch.func.functionalize(program)(*fakes)
    except RuntimeError as error:
        raise CaptureError(
            f"cannot remove in-place ops from the captured step: {error}; replace the in-place op "
            "by one that returns a new tensor"
        ) from error
    found = [made.ref(output) for output in outputs]
    return made, [ref for ref in found if ref is not None], _written_back(made)


def _fresh(tensor: Tensor) -> Tensor:
    """Another fake tensor like this one."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _replay(tape: Tape, env: dict[Ref, Any], recorder: Recorder) -> None:
    for step in tape.steps:
        if step.op in SOURCE_OPS:
            continue
        recorder.phase, recorder.fixed_source = step.phase, step.source
        args = [_torch(arg, env) for arg in step.args]
        kwargs = {
            name: _torch(arg, env) for name, arg in step.kwargs.items() if name != "operand_stride"
        }
        result = step.func(*args, **kwargs)
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        for ref, output in zip(step.results, outputs, strict=False):
            if ref is not None and ref not in env:
                env[ref] = output


def _torch(arg: Arg, env: Mapping[Ref, Any]) -> Any:
    if isinstance(arg, Ref):
        return env[arg]
    if isinstance(arg, tuple):
        return [_torch(item, env) for item in arg]
    if isinstance(arg, Const):
        return constant_to_torch(arg, "cpu")
    return arg


def _written_back(tape: Tape) -> dict[tuple[str, str], Ref]:
    """What is copied to sources at the end of the tape; there is no other in-place op."""
    written: dict[tuple[str, str], Ref] = {}
    for step in tape.steps:
        if step.func is None or not step.func._schema.is_mutable:
            continue
        target, value = step.args[0], step.args[1]
        if step.op != _COPY or not isinstance(target, Ref) or not isinstance(value, Ref):
            raise CaptureError(
                f"cannot remove in-place op {step.op!r} in {step.source}: torch has no functional "
                "form of it; replace it by an op that returns a new tensor"
            )
        source = tape.step_of(target)
        written[source.op, source.target] = value
    return written
