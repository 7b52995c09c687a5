"""Recording: every op that reaches the dispatcher below autograd, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.ops import dtype_name
from autopar.capture.provenance import Provenance
from autopar.errors import CaptureError, UnsupportedError
from autopar.ir.graph import CONSTANT, Arg, Const, Phase, Ref, Source, TensorType

Op = torch._ops.OpOverload
Decompositions = Mapping[Any, Callable[..., Any]]

_DEVICE_QUERY = torch.ops.prim.device.default
_LIFT = torch.ops.aten.lift_fresh.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_PLAIN = frozenset({int, float, bool, str, type(None)})
_CONSTANT_KINDS = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}


@dataclass(slots=True)
class Step:
    """One recorded op, or a source.

    Attributes:
        op: Name, ``aten.mm.default`` or one of ``SOURCE_OPS``.
        args: Positional arguments; values are named ``Ref(number of their step, output)``.
        kwargs: Keyword arguments.
        results: The value of every output; an in-place op returns the value it was given.
        outputs: Type of every output; None where the op gives no tensor.
        phase: Forward or backward.
        source: Where it comes from.
        target: Name of a source.
        func: The op itself, None for sources.
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: dict[str, Arg]
    results: tuple[Ref | None, ...]
    outputs: tuple[TensorType | None, ...]
    phase: Phase
    source: Source
    target: str = ""
    func: Any = None


class Tape:
    """The steps of one recording, the tensors they made, and the constants they read."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.constants: dict[str, Tensor] = {}
        self.mutated = False
        self._refs: dict[int, Ref] = {}
        self._alive: list[Any] = []
        self._tensors: dict[Ref, Tensor] = {}
        self._types: dict[Any, TensorType] = {}

    def add_source(self, op: str, target: str, tensor: Tensor) -> Ref:
        """Record what enters the graph; ops that read ``tensor`` then read this value."""
        ref = Ref(str(len(self.steps)))
        self.bind(tensor, ref)
        kind = self.type_of(tensor)
        self.steps.append(Step(op, (), {}, (ref,), (kind,), Phase.FORWARD, Source(), target))
        return ref

    def bind(self, tensor: Tensor, ref: Ref) -> None:
        self._refs[id(tensor)] = ref
        self._alive.append(tensor)
        self._tensors[ref] = tensor

    def ref(self, tensor: Tensor) -> Ref | None:
        """The value a tensor is, None if it was not recorded."""
        return self._refs.get(id(tensor))

    def tensor(self, ref: Ref) -> Tensor:
        return self._tensors[ref]

    def step_of(self, ref: Ref) -> Step:
        """The step that made a value."""
        return self.steps[int(ref.node)]

    def type_of(self, tensor: Tensor) -> TensorType:
        key = (tensor.shape, tensor.dtype)
        found = self._types.get(key)
        if found is None:
            found = TensorType(tuple(tensor.shape), dtype_name(tensor.dtype))
            self._types[key] = found
        return found

    def append(
        self, func: Any, op: str, args: tuple[Arg, ...], kwargs: dict[str, Arg], outputs: Any
    ) -> Step:
        """Record an op and what it returned."""
        number = str(len(self.steps))
        results: list[Ref | None] = []
        types: list[TensorType | None] = []
        for index, output in enumerate(outputs):
            if output is None:
                results.append(None)
                types.append(None)
                continue
            ref = self._refs.get(id(output))
            if ref is None:
                ref = Ref(number, index)
                self.bind(output, ref)
            results.append(ref)
            types.append(self.type_of(output))
        step = Step(
            op, args, kwargs, tuple(results), tuple(types), Phase.FORWARD, Source(), "", func
        )
        self.steps.append(step)
        return step


class Recorder(TorchDispatchMode):
    """Records ops onto a tape while fake tensors compute their shapes.

    Args:
        fake_mode: The mode that runs the ops; it must be active below this one.
        tape: Receives the steps.
        provenance: Tells where ops come from.
        decompositions: Ops that are recorded as the ops of a function instead.
    """

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        tape: Tape,
        provenance: Provenance,
        decompositions: Decompositions,
    ) -> None:
        super().__init__()
        self.tape = tape
        self.phase = Phase.FORWARD
        self.fixed_source: Source | None = None
        self._fake_mode = fake_mode
        self._provenance = provenance
        self._decompositions = decompositions
        self._names: dict[Any, str] = {}
        self._constants: dict[int, Tensor] = {}
        self._device = torch.device("cpu")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE_QUERY:
            return self._device
        decompose = self._decompositions.get(func)
        if decompose is not None:
            with self:
                made = decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs = {**kwargs, "device": self._device}
        if func is not _LIFT:
            args, kwargs = self._faked(args), self._faked(kwargs)
        self._check(func)
        try:
            result = func(*args, **kwargs)
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            UnsupportedFakeTensorException,
            UnsupportedOperatorException,
        ) as error:
            raise self._cannot_fake(func, error) from error
        self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        outputs: tuple[Any, ...]
        if isinstance(result, Tensor):
            outputs = (result,)
        elif isinstance(result, (tuple, list)):
            outputs = tuple(result)
        else:
            outputs = ()
        if not outputs and not func._schema.is_mutable:
            return
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = str(func)
        read = tuple([self._arg(arg) for arg in args])
        named = {key: self._arg(arg) for key, arg in kwargs.items()}
        step = self.tape.append(func, name, read, named, outputs)
        step.phase = self.phase
        step.source = self._source()
        if func._schema.is_mutable:
            self.tape.mutated = True

    def _source(self) -> Source:
        if self.fixed_source is not None:
            return self.fixed_source
        if self.phase is Phase.BACKWARD:
            return self._provenance.between_nodes()
        return self._provenance.now()

    def _arg(self, arg: Any) -> Arg:
        kind = type(arg)
        if kind in _PLAIN:
            return arg  # type: ignore[no-any-return]
        if isinstance(arg, Tensor):
            return self._value(arg)
        if kind in (list, tuple) or isinstance(arg, (list, tuple)):
            return tuple([self._arg(item) for item in arg])
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
        if isinstance(arg, FakeTensor):
            return arg
        if isinstance(arg, Tensor):
            found = self._constants.get(id(arg))
            if found is None:
                ref = self._value(arg)
                if isinstance(self.tape.tensor(ref), FakeTensor):
                    return self.tape.tensor(ref)
                found = self._fake_mode.from_tensor(arg.detach().cpu())
                self._constants[id(arg)] = found
                self.tape.bind(found, ref)
            return found
        kind = type(arg)
        if kind is tuple or kind is list:
            return kind([self._faked(item) for item in arg])
        if kind is dict:
            return {key: self._faked(item) for key, item in arg.items()}
        return arg

    def _check(self, func: Any) -> None:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UnsupportedError(
                f"cannot capture random op {str(func)!r} in {self._source()}: random ops are not "
                "supported yet; set dropout to 0 or call model.eval()"
            )
        if torch.is_autocast_enabled("cuda"):
            raise UnsupportedError(
                f"cannot capture autocast of device type 'cuda' in {self._source()}: the step is "
                "captured without a GPU, where it casts nothing; use precision= instead"
            )

    def _cannot_fake(self, func: Any, error: Exception) -> CaptureError:
        where = self._source()
        name = str(func)
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
