"""Modules that see one microbatch at a time, in a step over the whole batch.

Some values need all samples at once: statistics of a batch norm, the balance of experts. Where the
user accepts them of each microbatch alone, the microbatches become a dim of their own: a module
that is given ``[batch, ...]`` runs under ``vmap`` on ``[microbatches, batch / microbatches, ...]``,
so the step stays one graph over the whole batch, whose values the time axis can split. What the
module returns for every sample is joined again; what it returns as one number is averaged.

Which dims count samples is seen in two runs on smaller batches, of n and of 2n samples: they are
those that double.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from autopar.capture.batch import batch_dims, flatten_batch, unflatten_batch
from autopar.capture.decompose import accumulation_dtype
from autopar.capture.tape import Tape, storage_id
from autopar.errors import HintError, UnsupportedError
from autopar.ir.graph import refs_in

BATCH_NORM = F.batch_norm
"""Torch's function, which a capture replaces."""

_Shape = tuple[int, ...] | None
"""Of a tensor; None for anything else."""

_Key = tuple[str, int]
"""Path of a module and how often it ran before."""


@dataclass(frozen=True, slots=True)
class Alone:
    """What a user wants computed from each microbatch alone.

    Attributes:
        patterns: Globs over module paths.
        microbatches: Into how many the batch is cut, the first samples being in the first.
    """

    patterns: tuple[str, ...]
    microbatches: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a module, caught."""

    path: str
    number: int
    module: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def key(self) -> _Key:
        return self.path, self.number

    def run(self) -> Any:
        return self.forward(*self.args, **self.kwargs)


Around = Callable[[Call], Any]
"""What runs in place of a call."""


def paths_matching(model: nn.Module, patterns: Iterable[str]) -> tuple[str, ...]:
    """Paths of the modules that match, without those inside of others that do."""
    found: list[str] = []
    for path, _ in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and not inside and any(fnmatchcase(path, pattern) for pattern in patterns):
            found.append(path)
    return tuple(found)


class _Function(nn.Module):
    """A function in the place of a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


@contextmanager
def functions_as_modules(model: nn.Module, patterns: Iterable[str]) -> Iterator[None]:
    """While active, functions that match are modules of the model.

    A function that the forward of a module calls by its name has the path of the module and that
    name: transformers' ``load_balancing_loss_func``, say, which the model itself calls.
    """
    modules = list(model.named_modules())
    put: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, module in modules:
            forward = inspect.unwrap(type(module).forward)
            code, known = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
            for name in () if code is None else code.co_names:
                full = f"{path}.{name}" if path else name
                function = known.get(name)
                if not inspect.isfunction(function) or hasattr(module, name):
                    continue
                if any(fnmatchcase(full, pattern) for pattern in patterns):
                    put += [(known, name, function), (module._modules, name, None)]
                    known[name] = module._modules[name] = _Function(function)
        yield
    finally:
        for table, name, before in reversed(put):
            if before is None:
                del table[name]
            else:
                table[name] = before


def catch(model: nn.Module, paths: Iterable[str], around: Around) -> None:
    """Have ``around`` run in place of the forward of these modules; they keep it as attribute."""
    for path in paths:
        module = model.get_submodule(path)
        module.forward = _Caught(path, module, module.forward, around)


@dataclass(slots=True)
class _Caught:
    """The forward of a module that is caught."""

    path: str
    module: nn.Module
    forward: Callable[..., Any]
    around: Around
    number: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = Call(self.path, self.number, self.module, self.forward, args, kwargs)
        self.number += 1
        return self.around(call)


# Which dims count samples.


@dataclass(frozen=True, slots=True)
class Dims:
    """Dims of a call's tensors that count samples, in the order of its tensors; None for none."""

    given: tuple[int | None, ...]
    returned: tuple[int | None, ...]


class Watch:
    """Notes the shapes of what modules are given and return."""

    def __init__(self) -> None:
        self.seen: dict[_Key, tuple[tuple[_Shape, ...], tuple[_Shape, ...]]] = {}

    def __call__(self, call: Call) -> Any:
        made = call.run()
        self.seen[call.key] = _shapes((call.args, call.kwargs)), _shapes(made)
        return made


def _shapes(tree: Any) -> tuple[_Shape, ...]:
    leaves = tree_flatten(tree)[0]
    return tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves)


def part_of(batch: Any, samples: int) -> Any:
    """The first samples of a batch."""
    paths, tensors, _ = flatten_batch(batch)
    dims = batch_dims(paths, tensors)
    cut = [
        tensor.narrow(dims[path], 0, samples) if path in dims else tensor
        for path, tensor in zip(paths, tensors, strict=True)
    ]
    return unflatten_batch(batch, cut)


def samples_of(batch: Any) -> int:
    """Samples of a batch, 1 if nothing counts them."""
    paths, tensors, _ = flatten_batch(batch)
    dims = batch_dims(paths, tensors)
    return next((t.shape[dims[p]] for p, t in zip(paths, tensors, strict=True) if p in dims), 1)


def check_divides(batch: Any, microbatches: int) -> None:
    """Refuse microbatches of unlike numbers of samples, whose statistics would weigh unlike."""
    samples = samples_of(batch)
    if samples % microbatches:
        raise HintError(
            f"cannot compute modules from each microbatch alone: {samples} samples are no multiple "
            f"of {microbatches} microbatches; use such a batch, or another hint.microbatches"
        )


def dims_of_calls(small: Watch, large: Watch) -> Mapping[_Key, Dims]:
    """Where samples are counted, from a run on n samples and one on 2n.

    Raises:
        UnsupportedError: A call cannot be cut into microbatches or joined again.
    """
    found = {}
    for key, (given, returned) in small.seen.items():
        if key not in large.seen:
            raise _refusal(key[0], "it runs in batches of some sizes only", "call it in all")
        other, made = large.seen[key]
        found[key] = Dims(
            given=tuple(_doubled(key[0], "is given", *pair) for pair in _pairs(given, other)),
            returned=tuple(_doubled(key[0], "returns", *pair) for pair in _pairs(returned, made)),
        )
        for shape, dim in zip(returned, found[key].returned, strict=True):
            if shape and dim is None:
                raise _refusal(
                    key[0],
                    f"it returns a tensor of shape {list(shape)} for each, and others read it",
                    "name the module around it and its readers",
                )
    return found


def _pairs(first: Sequence[_Shape], second: Sequence[_Shape]) -> Iterator[tuple[_Shape, _Shape]]:
    return zip(first, second, strict=True)


def _doubled(path: str, does: str, small: _Shape, large: _Shape) -> int | None:
    """The dim that is twice as large in a batch twice as large."""
    if small is None or large is None or small == large:
        return None
    same = len(small) == len(large)
    differ = [d for d, (a, b) in enumerate(zip(small, large, strict=False)) if a != b]
    if same and len(differ) == 1 and large[differ[0]] == 2 * small[differ[0]]:
        return differ[0]
    raise _refusal(
        path,
        f"it {does} a tensor of shape {list(small)}, and {list(large)} where there are twice as "
        "many samples, so that no single dim counts them",
        "name the module around it that returns a loss, or values of single samples",
    )


def _refusal(path: str, why: str, advice: str) -> UnsupportedError:
    return UnsupportedError(
        f"cannot compute module {path!r} from each microbatch alone: {why}; {advice}, or drop it "
        "from hint.per_microbatch"
    )


# The microbatches in turn: what one process does.


class InTurn:
    """Runs modules on one microbatch after the other.

    Args:
        microbatches: How many there are.
        dims: Where calls count samples.
    """

    def __init__(self, microbatches: int, dims: Mapping[_Key, Dims]) -> None:
        self._count = microbatches
        self._dims = dims
        self._busy = False

    def __call__(self, call: Call) -> Any:
        dims = self._dims.get(call.key)
        if self._busy or dims is None:
            return call.run()
        leaves, spec = tree_flatten((call.args, call.kwargs))
        self._busy = True
        made = []
        for number in range(self._count):
            parts = [
                leaf if dim is None else leaf.chunk(self._count, dim)[number]
                for leaf, dim in zip(leaves, dims.given, strict=True)
            ]
            args, kwargs = tree_unflatten(parts, spec)
            made.append(tree_flatten(call.forward(*args, **kwargs)))
        self._busy = False
        results = zip(*(own for own, _ in made), strict=True)
        joined = [_of_all(own, dim) for own, dim in zip(results, dims.returned, strict=True)]
        return tree_unflatten(joined, made[0][1])


def _of_all(own: Sequence[Any], dim: int | None) -> Any:
    """A result of all microbatches: their samples, or the average of their numbers."""
    if not isinstance(own[0], Tensor):
        return own[0]
    return torch.stack(list(own)).mean() if dim is None else torch.cat(list(own), dim)


# The microbatches side by side.


@dataclass(frozen=True, slots=True)
class _Norm:
    """Running statistics to update by those of every microbatch."""

    running: tuple[Tensor, Tensor]
    momentum: float
    stats: tuple[Tensor, Tensor]


@dataclass(slots=True)
class _Inside:
    """What happens in the call that runs."""

    path: str
    norms: list[_Norm] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    spec: Any = None


class Apart:
    """Runs modules on every microbatch alone.

    Args:
        microbatches: How many there are.
        dims: Where calls count samples.
        tape: Of the recording.
    """

    def __init__(self, microbatches: int, dims: Mapping[_Key, Dims], tape: Tape) -> None:
        self._count = microbatches
        self._dims = dims
        self._tape = tape
        self._inside: _Inside | None = None

    def checked_path(self, path: str) -> str:
        """The path of a module that draws random numbers, which one of these must not."""
        if self._inside is not None:
            raise _refusal(
                self._inside.path,
                f"module {path!r} in it draws random numbers",
                "name modules that need no dropout",
            )
        return path

    def __call__(self, call: Call) -> Any:
        dims = self._dims.get(call.key)
        if self._inside is not None or dims is None:
            return call.run()
        if all(dim is None for dim in dims.given):
            raise _refusal(call.path, "nothing it is given counts samples", "name another module")
        before = len(self._tape.steps)
        self._inside = inside = _Inside(call.path)
        try:
            values = self._side_by_side(call, dims, inside)
        except RuntimeError as error:
            raise _refusal(
                call.path,
                f"it cannot run on microbatches side by side ({error})",
                "name a module inside of it",
            ) from error
        finally:
            self._inside = None
        self._check_writes(call, inside, before)
        rest = iter(values)
        results = [
            _joined(next(rest), dim) if isinstance(made, Tensor) else made
            for made, dim in zip(inside.made, dims.returned, strict=True)
        ]
        self._update(call.module, inside.norms, rest)
        return tree_unflatten(results, inside.spec)

    def _side_by_side(self, call: Call, dims: Dims, inside: _Inside) -> Sequence[Tensor]:
        """Tensors of all microbatches, stacked: the results, then statistics of batch norms."""
        leaves, spec = tree_flatten((call.args, call.kwargs))
        own = {at: dim for at, dim in enumerate(dims.given) if dim is not None}

        def one(*parts: Tensor) -> tuple[Tensor, ...]:
            given = dict(zip(own, parts, strict=True))
            filled = [given.get(at, leaf) for at, leaf in enumerate(leaves)]
            args, kwargs = tree_unflatten(filled, spec)
            inside.made, inside.spec = tree_flatten(call.forward(*args, **kwargs))
            made = [item for item in inside.made if isinstance(item, Tensor)]
            return (*made, *(each for norm in inside.norms for each in norm.stats))

        apart = [_split(leaves[at], dim, self._count) for at, dim in own.items()]
        found: tuple[Tensor, ...] = torch.func.vmap(one, in_dims=tuple(own.values()))(*apart)
        return found

    def batch_norm(
        self,
        input: Tensor,  # noqa: A002  (torch's name)
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """In place of ``torch.nn.functional.batch_norm``."""
        if self._inside is None:
            with torch._C.DisableTorchFunction():
                return BATCH_NORM(
                    input, running_mean, running_var, weight, bias, training, momentum, eps
                )
        shape = [1, -1] + [1] * (input.ndim - 2)
        wide = input.to(accumulation_dtype(input.dtype))
        if training:
            over = [dim for dim in range(input.ndim) if dim != 1]
            variance, middle = torch.var_mean(wide, over, correction=0)
            if running_mean is not None and running_var is not None:
                self._note(input, (running_mean, running_var), momentum, (middle, variance))
        else:
            assert running_mean is not None and running_var is not None
            middle, variance = running_mean, running_var
        out = (wide - middle.view(shape)) * (variance + eps).rsqrt().view(shape)
        out = out if weight is None else out * weight.view(shape)
        out = out if bias is None else out + bias.view(shape)
        return out.to(input.dtype)

    def _note(
        self,
        input: Tensor,  # noqa: A002  (torch's name)
        running: tuple[Tensor, Tensor],
        momentum: float,
        stats: tuple[Tensor, Tensor],
    ) -> None:
        """Note statistics of a batch norm, the variance as torch keeps it."""
        assert self._inside is not None
        each = input.numel() // input.shape[1]
        unbiased = stats[1].detach() * (each / (each - 1))
        self._inside.norms.append(_Norm(running, momentum, (stats[0].detach(), unbiased)))

    @torch.no_grad()
    def _update(self, module: nn.Module, norms: Sequence[_Norm], stats: Iterator[Tensor]) -> None:
        """Running statistics after all microbatches in turn, as a weighted sum of theirs."""
        for norm in norms:
            left = 1.0 - norm.momentum
            shares = [norm.momentum * left**later for later in reversed(range(self._count))]
            for running in norm.running:
                each = next(stats)
                added = (torch.tensor(shares, dtype=each.dtype).view(-1, 1) * each).sum(0)
                running.copy_(running * left**self._count + added)
        for counted in _counters(module, norms):
            counted.add_(self._count - 1)

    def _check_writes(self, call: Call, inside: _Inside, before: int) -> None:
        """Refuse buffers that one microbatch would leave changed to the next."""
        counted = {storage_id(own) for own in _counters(call.module, inside.norms)}
        written = {
            storage_id(self._tape.tensor(ref))
            for step in self._tape.steps[before:]
            if step.func is not None and step.func._schema.is_mutable
            for ref in refs_in(step.args[:1])
        }
        for name, buffer in call.module.named_buffers():
            batched = torch._C._functorch.is_batchedtensor(buffer)
            if batched or storage_id(buffer) in written - counted:
                raise _refusal(
                    call.path,
                    f"it changes buffer {name!r}, which the next microbatch would read",
                    "keep such state in a module of its own",
                )


def _counters(module: nn.Module, norms: Sequence[_Norm]) -> list[Tensor]:
    """What counts the updates of batch norms that ran."""
    ran = {id(norm.running[0]) for norm in norms}
    found = [
        getattr(own, "num_batches_tracked", None)
        for own in module.modules()
        if id(getattr(own, "running_mean", None)) in ran
    ]
    return [counted for counted in found if isinstance(counted, Tensor)]


def _joined(value: Tensor, dim: int | None) -> Tensor:
    """A result of all microbatches, stacked: their samples, or the average of their numbers."""
    return value.mean() if dim is None else value.movedim(0, dim).flatten(dim, dim + 1)


def _split(tensor: Tensor, dim: int, count: int) -> Tensor:
    """The samples of every microbatch, microbatches in front of them."""
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])
