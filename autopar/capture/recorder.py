"""Recording: every op that reaches the dispatcher below autograd, on fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.ops import to_torch
from autopar.capture.provenance import Provenance
from autopar.capture.refusals import Refusal, refusal_of
from autopar.capture.shapes import Shapes
from autopar.capture.tape import LIFT, Tape, storage_id
from autopar.errors import CaptureError, UnsupportedError
from autopar.ir.graph import CONSTANT, STREAM, Arg, Const, Phase, Ref, Source, refs_in

Decompositions = Mapping[Any, Callable[..., Any]]

_DEVICE_QUERY = torch.ops.prim.device.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_STORAGE_VIEWS = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_scatter.default,
)
_OWN = ("aten::", "prims::", "autopar::")
_FAKE_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
MOST_STEPS = 200_000
"""Ops of a step. Llama 3 405B has 29,130; only loops make more."""

_PLAIN = frozenset({int, float, bool, str, type(None)})
_CONSTANT_KINDS = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}


@dataclass(frozen=True, slots=True)
class _OpFacts:
    """What a recorder needs to know of an op, looked up once.

    Attributes:
        name: ``aten.mm.default``.
        decompose: Records other ops instead; None to record the op.
        mutable: It writes to an operand.
        refusal: Why it cannot be captured, given its arguments.
        cached: Its output shapes follow from its operands' layouts.
        stream: Position of the name of what it draws; None if it draws nothing.
    """

    name: str
    decompose: Callable[..., Any] | None
    mutable: bool
    refusal: Refusal | None
    cached: bool
    stream: int | None

    @staticmethod
    def of(func: Any, decompositions: Decompositions) -> _OpFacts:
        name, mutable = func.name(), func._schema.is_mutable
        decompose = decompositions.get(func)
        if decompose is None and _is_composite(name):
            decompose = func.decompose
        return _OpFacts(
            name=str(func),
            decompose=decompose,
            mutable=mutable,
            refusal=refusal_of(func),
            cached=name.startswith(_OWN) and not mutable and func is not LIFT,
            stream=_stream_position(func),
        )


def _with_stream(read: tuple[Arg, ...], position: int) -> tuple[Arg, ...]:
    """The arguments with the name of what is drawn marked as such."""
    name = Const(STREAM, str(read[position]))
    return (*read[:position], name, *read[position + 1 :])


def _stream_position(func: Any) -> int | None:
    if func.namespace != "autopar":
        return None
    names = [argument.name for argument in func._schema.arguments]
    return names.index(STREAM) if STREAM in names else None


def _is_composite(name: str) -> bool:
    """Whether torch runs the op as other ops; such ones arrive where autograd is switched off."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records ops onto a tape while fake tensors compute their shapes.

    Args:
        shapes: Runs the ops; its fake mode must be active below this one.
        tape: Receives the steps.
        provenance: Tells where ops come from.
        decompositions: Ops that are recorded as the ops of a function instead.
        own: What stands for each tensor of the model, by the id of that.
    """

    def __init__(
        self,
        shapes: Shapes,
        tape: Tape,
        provenance: Provenance,
        decompositions: Decompositions,
        own: Mapping[int, Tensor],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.phase = Phase.FORWARD
        self.fixed_source: Source | None = None
        self._shapes = shapes
        self._provenance = provenance
        self._decompositions = decompositions
        self._facts: dict[Any, _OpFacts] = {}
        self._own = own
        self._constants: dict[int, Tensor] = {}
        self._device = torch.device("cpu")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # spares a wrapper around every op; nothing is compiled while recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE_QUERY:
            return self._device
        kwargs = kwargs or {}
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = _OpFacts.of(func, self._decompositions)
        if facts.decompose is not None:
            with self:
                made = facts.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if facts.refusal is not None or torch.is_autocast_enabled("cuda"):
            self._refuse(facts, args)
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs = {**kwargs, "device": self._device}
        if func is not LIFT:
            args, kwargs = self._faked(args), self._faked(kwargs)
        key: list[Any] = [func]
        read = self._read(args, key)
        if facts.stream is not None:
            read = _with_stream(read, facts.stream)
        named = self._named(kwargs, key) if kwargs else {}
        if func in _STORAGE_VIEWS:
            named["operand_stride"] = args[0].stride()
        try:
            result = self._shapes.run(func, args, kwargs, key if facts.cached else None)
        except _FAKE_ERRORS as error:
            known = self._constant_result(func, read)
            if known is not None:
                return known
            raise self._cannot_fake(facts.name, error) from error
        self._record(facts, func, read, named, result)
        return result

    def _record(
        self,
        facts: _OpFacts,
        func: Any,
        read: tuple[Arg, ...],
        named: dict[str, Arg],
        result: Any,
    ) -> None:
        outputs: tuple[Any, ...] = ()
        if isinstance(result, Tensor):
            outputs = (result,)
        elif isinstance(result, (tuple, list)):
            outputs = tuple(result)
        elif not facts.mutable:
            return
        step = self.tape.append(func, facts.name, read, named, outputs)
        step.phase = self.phase
        step.source = self._source()
        if len(self.tape.steps) > MOST_STEPS:
            raise self._too_long()
        if facts.mutable:
            self._note_writes(func, read, named)
            self._shapes.forget(outputs)

    def _note_writes(self, func: Any, read: tuple[Arg, ...], named: Mapping[str, Arg]) -> None:
        for position, parameter in enumerate(func._schema.arguments):
            if parameter.alias_info is None or not parameter.alias_info.is_write:
                continue
            arg = read[position] if position < len(read) else named.get(parameter.name)
            for ref in refs_in(arg):
                self.tape.written.add(storage_id(self.tape.tensor(ref)))

    def _source(self) -> Source:
        if self.fixed_source is not None:
            return self.fixed_source
        if self.phase is Phase.BACKWARD:
            return self._provenance.between_nodes()
        return self._provenance.now()

    def _read(self, args: Any, key: list[Any]) -> tuple[Arg, ...]:
        """The arguments as a graph has them; ``key`` receives what decides the result's shape."""
        found: list[Arg] = []
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                found.append(self._value(arg))
                key.append(self._shapes.layout(arg))
            elif kind in _PLAIN:
                found.append(arg)
                key.append(kind)
                key.append(arg)
            elif isinstance(arg, (list, tuple)):
                key.append(len(arg))
                found.append(self._read(arg, key))
            elif isinstance(arg, Tensor):
                found.append(self._value(arg))
                key.append(object())
            else:
                found.append(self._constant_arg(arg, kind))
                key.append(found[-1])
        return tuple(found)

    def _named(self, kwargs: Mapping[str, Any], key: list[Any]) -> dict[str, Arg]:
        key.extend(kwargs)
        return dict(zip(kwargs, self._read(kwargs.values(), key), strict=True))

    def _constant_arg(self, arg: Any, kind: type) -> Arg:
        if kind in _CONSTANT_KINDS:
            return Const(_CONSTANT_KINDS[kind], str(arg).removeprefix("torch."))
        if kind is torch.device:
            return Const("device", "cpu")
        if kind is complex:
            return Const("complex", str(arg))
        if kind is torch.Generator:
            return None
        raise CaptureError(
            f"cannot record an argument of type {kind.__name__!r} in {self._source()}: only "
            "tensors, numbers, strings, dtypes and lists of them can be part of a graph; wrap the "
            "computation in a torch.library op that takes those"
        )

    def _value(self, tensor: Tensor) -> Ref:
        ref = self.tape.ref(tensor)
        if ref is not None:
            return ref
        if isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"cannot trace a tensor in {self._source()}: it was made where the recording did "
                "not see it; compute it inside the model's forward or the loss function"
            )
        return self._constant(tensor)

    def _constant(self, tensor: Tensor) -> Ref:
        """A real tensor that the program reads but that is no parameter, buffer or input."""
        stands = self.tape.ref(self._own[id(tensor)]) if id(tensor) in self._own else None
        if stands is not None:
            name = self.tape.step_of(stands).target
            raise CaptureError(
                f"cannot capture parameter {name!r} as it is read in {self._source()}: through a "
                "list, a closure or another object that keeps it, where capture cannot follow; "
                "read it as the attribute of its module"
            )
        if tensor.requires_grad:
            raise CaptureError(
                f"cannot capture a tensor that requires grad in {self._source()}: it is no "
                "parameter of the model; register it with nn.Parameter"
            )
        if tensor.is_meta:
            raise CaptureError(
                f"cannot capture a tensor on meta in {self._source()}: it is no parameter or "
                "buffer of the model, so nothing will give it values; register it as a buffer"
            )
        name = f"constant_{len(self.tape.constants)}"
        self.tape.constants[name] = tensor
        return self.tape.add_source(CONSTANT, name, tensor)

    def _faked(self, arg: Any) -> Any:
        """The argument with real tensors made fake, each always as the same one."""
        kind = type(arg)
        if kind is FakeTensor or kind in _PLAIN:
            return arg
        if kind is tuple or kind is list:
            made = [self._faked(item) for item in arg]
            same = all(a is b for a, b in zip(made, arg, strict=True))
            return arg if same else kind(made)
        if kind is dict:
            return {key: self._faked(item) for key, item in arg.items()} if arg else arg
        if isinstance(arg, Tensor) and not isinstance(arg, FakeTensor):
            return self._fake_constant(arg)
        return arg

    def _fake_constant(self, tensor: Tensor) -> Tensor:
        stands = self._own.get(id(tensor))
        if stands is not None and not tensor.requires_grad:
            return stands
        found = self._constants.get(id(tensor))
        if found is None:
            ref = self._value(tensor)
            found = self._shapes.fake_mode.from_tensor(tensor.detach().cpu())
            self._constants[id(tensor)] = found
            self.tape.bind(found, ref)
        return found

    def _constant_result(self, func: Any, read: tuple[Arg, ...]) -> Any:
        """The Python value of an op whose operand no parameter, buffer or input decides."""
        if func is not _ITEM or not isinstance(read[0], Ref):
            return None
        steps = self.tape.constant_steps(read[0])
        if steps is None:
            return None
        env: dict[Ref, Any] = {}
        with unset_fake_temporarily():
            for step in steps:
                if step.op == CONSTANT:
                    made: Any = self.tape.constants[step.target].cpu()
                else:
                    args = [to_torch(arg, env, "cpu") for arg in step.args]
                    kwargs = {key: to_torch(arg, env, "cpu") for key, arg in step.kwargs.items()}
                    made = step.func(*args, **kwargs)
                outputs = made if isinstance(made, (tuple, list)) else (made,)
                env.update(zip((r for r in step.results if r), outputs, strict=False))
            return env[read[0]].item()

    def _refuse(self, facts: _OpFacts, args: tuple[Any, ...]) -> None:
        reason = facts.refusal(*args) if facts.refusal is not None else ""
        if reason:
            raise UnsupportedError(f"cannot capture {facts.name!r} in {self._source()}: {reason}")
        if torch.is_autocast_enabled("cuda"):
            raise UnsupportedError(
                f"cannot capture autocast of device type 'cuda' in {self._source()}: the step is "
                "captured without a GPU, where it casts nothing; use precision= instead"
            )

    def _too_long(self) -> CaptureError:
        """Of a loop, which is written out turn by turn."""
        sources = Counter(step.source for step in self.tape.steps)
        source, times = max(sources.items(), key=lambda item: (bool(item[0].line), item[1]))
        return CaptureError(
            f"cannot capture the step: it has more than {MOST_STEPS:,} ops, {times:,} of them from "
            f"{source}, a loop of which every turn is captured; use a form without the loop, or "
            "wrap it in a torch.library op with a rule of its own (autopar.rule)"
        )

    def _cannot_fake(self, name: str, error: Exception) -> CaptureError:
        where = self._source()
        if isinstance(error, DynamicOutputShapeException):
            return CaptureError(
                f"cannot capture {name!r} in {where}: the shape of its result depends on the data; "
                "keep every element and mask with torch.where, or wrap the computation in a "
                "torch.library op whose output shape is fixed"
            )
        if isinstance(error, DataDependentOutputException):
            return CaptureError(
                f"cannot capture {name!r} in {where}: it turns a tensor into a Python value (item, "
                "bool, int, if), so what runs next depends on the data; use tensor ops such as "
                "torch.where instead"
            )
        return CaptureError(
            f"cannot capture {name!r} in {where}: it has no shape function ({error}); register one "
            "with torch.library.register_fake"
        )
