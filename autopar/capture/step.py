"""Capture: a module, a batch and a loss as one functional graph over the whole batch."""

from __future__ import annotations

import gc
import hashlib
import random
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.grad_mode import _force_original_view_tracking as force_view_replay

from autopar.capture import margins
from autopar.capture.alone import (
    BATCH_NORM,
    Alone,
    Apart,
    Dims,
    InTurn,
    Watch,
    catch,
    check_divides,
    dims_of_calls,
    functions_as_modules,
    part_of,
    paths_matching,
    samples_of,
)
from autopar.capture.batch import batch_dims, flatten_batch, unflatten_batch
from autopar.capture.checkpoints import without_checkpoints
from autopar.capture.decompose import DECOMPOSITIONS
from autopar.capture.draws import Draws
from autopar.capture.experts import routed_experts
from autopar.capture.functionalize import functionalize
from autopar.capture.functions import FUNCTIONS
from autopar.capture.intercept import Intercept
from autopar.capture.masks import mask_rewrites
from autopar.capture.precision import AS_IT_IS, Precision, casting, with_precision
from autopar.capture.provenance import Provenance
from autopar.capture.random import make_key
from autopar.capture.recorder import Recorder
from autopar.capture.rewrites import REWRITES
from autopar.capture.sdpa import SDPA, Attention
from autopar.capture.shapes import Shapes
from autopar.capture.simplify import finish, simplify
from autopar.capture.state import Counted, check_counted, check_state, counted_by, counted_on
from autopar.capture.substitute import Leaves, substituted
from autopar.capture.tape import Tape
from autopar.errors import AutoparError, CaptureError, UnsupportedError
from autopar.ir.graph import BUFFER, CONSTANT, INPUT, KEY, PARAMETER, Graph, Phase, Ref, Source

Loss = Callable[[nn.Module, Any], Any]
"""``loss(model, batch)``: a 0-d tensor, or that and a dict of further results."""


_READS_VALUES = (".numpy() is not supported", "access data pointer", "data_ptr")
"""In what torch says where a program reads values that fake tensors lack."""


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A captured step.

    Attributes:
        graph: The step.
        constants: Real tensor of every CONSTANT node, by its target.
        inputs: Paths of the batch's tensors, in order: the targets of INPUT nodes.
        fingerprint: Equal on every process that captured the same step.
        returns_dict: Whether the loss function returns ``(loss, dict)``, be the dict empty.
    """

    graph: Graph
    constants: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    fingerprint: str
    returns_dict: bool = False


@dataclass(frozen=True, kw_only=True)
class _Results:
    """What the program computed, as values of a tape."""

    loss: Ref
    aux: tuple[tuple[str, Ref], ...]
    gradients: Mapping[str, Ref]
    buffers: Mapping[str, Ref]
    returns_dict: bool

    def refs(self) -> list[Ref]:
        aux = [ref for _, ref in self.aux]
        return [self.loss, *aux, *self.gradients.values(), *self.buffers.values()]

    def renamed(self, refs: Iterable[Ref]) -> _Results:
        """The same results under other names, in the order of `refs`."""
        rest = iter(refs)
        return _Results(
            loss=next(rest),
            aux=tuple((name, next(rest)) for name, _ in self.aux),
            gradients={name: next(rest) for name in self.gradients},
            buffers={name: next(rest) for name in self.buffers},
            returns_dict=self.returns_dict,
        )


def capture_step(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    *,
    grad: bool,
    precision: Precision = AS_IT_IS,
    alone: Alone | None = None,
) -> Captured:
    """The training step of a model as a graph.

    The model runs once on fake tensors: it may be of any size and on any device, meta included,
    and is left as it was.

    Args:
        model: Any module.
        batch: The global batch: a dict (keyword arguments), a tuple (positional arguments) or one
            tensor; its values do not matter.
        loss: Computes the loss; by default the model's output if 0-d, else its ``loss``.
        grad: With the backward, or the forward alone under ``no_grad``.
        precision: Casts that become part of the step.
        alone: Modules to compute from each microbatch alone.

    Raises:
        CaptureError: The step is no fixed graph, or has no loss.
        UnsupportedError: The step uses something that this version cannot do exactly.
    """
    paths, tensors, _ = flatten_batch(batch)
    functions = functions_as_modules(model, () if alone is None else alone.patterns)
    with _no_collection(), functions, _no_other_draws():
        program = _Program(model, loss or default_loss, precision, grad)
        calls = _calls(program, batch, alone)
        tape, results, aliases, counted = _record(program, batch, calls)
        if counted:
            with counted_on(counted):
                again = _recorded_again(program, batch, calls)
            check_counted(counted, tape, again or tape)
        rewrites = {**REWRITES, **mask_rewrites(tape.constants)}
        drafts, refs = simplify(tape.steps, results.refs(), rewrites)
        nodes, refs = finish(drafts, refs)
        results = results.renamed(refs)
        graph = Graph(
            nodes=nodes,
            loss=results.loss,
            aux=results.aux,
            gradients=results.gradients,
            mutations=results.buffers,
            aliases=aliases,
            batch_dims=batch_dims(paths, tensors),
            alone=calls.paths,
            microbatches=calls.microbatches,
        )
        graph = with_precision(graph, precision)
        used = {node.target for node in graph.sources(CONSTANT)}
        constants = {name: value for name, value in tape.constants.items() if name in used}
        text = fingerprint(graph, constants)
    return Captured(
        graph=graph,
        constants=constants,
        inputs=paths,
        fingerprint=text,
        returns_dict=results.returns_dict,
    )


@contextmanager
def in_turn(
    model: nn.Module, batch: Any, loss: Loss | None = None, *, alone: Alone
) -> Iterator[None]:
    """Have modules of the eager model run on one microbatch after the other.

    This is the one-process reference of a step captured with ``alone``.

    Args:
        model: As of `capture_step`, as are ``batch`` and ``loss``; it is left as it was.
        batch: Of the sizes of those that it runs on.
        loss: Which is not run on numbers here.
        alone: What sees one microbatch at a time.

    Raises:
        UnsupportedError: A module cannot run so.
    """
    program = _Program(model, loss or default_loss, AS_IT_IS, grad=False)
    with functions_as_modules(model, alone.patterns):
        calls = _calls(program, batch, alone)
        caught = [model.get_submodule(path) for path in calls.paths]
        before = [vars(module).get("forward") for module in caught]
        catch(model, calls.paths, InTurn(calls.microbatches, calls.dims))
        try:
            yield
        finally:
            for module, own in zip(caught, before, strict=True):
                del module.forward
                if own is not None:
                    module.forward = own


@dataclass(frozen=True, slots=True)
class _Program:
    """What is captured, and whether with its backward."""

    model: nn.Module
    loss: Loss
    precision: Precision
    grad: bool


@dataclass(frozen=True, slots=True)
class _Calls:
    """Modules to catch.

    Attributes:
        paths: Of the modules.
        microbatches: That see them side by side.
        dims: Where their calls count samples.
        watch: Notes their calls instead of running them apart.
    """

    paths: tuple[str, ...] = ()
    microbatches: int = 1
    dims: Mapping[tuple[str, int], Dims] = field(default_factory=dict)
    watch: Watch | None = None


def _calls(program: _Program, batch: Any, alone: Alone | None) -> _Calls:
    """What must be known of the modules that see one microbatch at a time."""
    if alone is None or alone.microbatches == 1:
        return _Calls()
    check_divides(batch, alone.microbatches)
    paths = paths_matching(program.model, alone.patterns)
    if not paths:
        return _Calls()
    samples = samples_of(batch) // alone.microbatches
    watches = Watch(), Watch()
    for times, watch in enumerate(watches, 1):
        part = part_of(batch, times * samples)
        try:
            _record(replace(program, grad=False), part, _Calls(paths, watch=watch))
        except AutoparError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"cannot run the model on {times * samples} of its samples, as "
                f"hint.per_microbatch asks for with {alone.microbatches} microbatches: {error}; "
                "use fewer microbatches, or drop the hint"
            ) from error
    ran = tuple(dict.fromkeys(path for path, _ in watches[0].seen))
    return _Calls(ran, alone.microbatches if ran else 1, dims_of_calls(*watches))


def _recorded_again(program: _Program, batch: Any, calls: _Calls) -> Tape | None:
    """The step with its model as the last forward left it; None if that is not all it left."""
    try:
        return _record(program, batch, calls)[0]
    except Exception:  # noqa: BLE001  (a cache that was put back may be missed in any way)
        return None


def _record(
    program: _Program, batch: Any, calls: _Calls
) -> tuple[Tape, _Results, Mapping[str, str], tuple[Counted, ...]]:
    """A functional tape of the step, its results, second names of tied tensors, and what counts."""
    paths, tensors, _ = flatten_batch(batch)
    model = program.model
    shapes, tape, provenance = Shapes(), Tape(), Provenance(model)

    with (
        substituted(model, shapes, program.precision) as leaves,
        shapes.fake_mode,
        _plain_torch(),
    ):
        apart = Apart(calls.microbatches, calls.dims, tape)
        catch(model, calls.paths, calls.watch or apart)
        draws = Draws(shapes.like(make_key(0, 0)), lambda: apart.checked_path(provenance.path()))
        decompositions = {**DECOMPOSITIONS, **margins.DECOMPOSITIONS, **draws.table()}

        def recorder_for(tape: Tape) -> Recorder:
            return Recorder(shapes, tape, provenance, decompositions, leaves.stand_ins)

        fakes = [shapes.like(t).requires_grad_(t.requires_grad) for t in tensors]
        _enter(tape, leaves, paths, fakes)
        tape.add_source(KEY, KEY, draws.key)
        run = _Run(program, leaves, recorder_for(tape), provenance, draws, apart)
        results = run.step(unflatten_batch(batch, fakes))
        made = tape
        if tape.mutated:
            made, refs, written = functionalize(tape, results.refs(), recorder_for)
            results = _with_written(results.renamed(refs), written, tape)
        check_state(leaves, tape, {*results.gradients, *results.buffers})
        return made, results, leaves.aliases, counted_by(leaves)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection: nearly all that is made lives on, and looking takes long."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _no_other_draws() -> Iterator[None]:
    """Refuse what draws numbers from generators that are not torch's.

    Raises:
        CaptureError: Such numbers would be constants of the step, the same every time.
    """
    kinds: Mapping[str, Callable[[], Any]] = {
        "numpy.random": np.random.get_state,
        "random": random.getstate,
    }
    before = {kind: repr(state()) for kind, state in kinds.items()}
    yield
    for kind, state in kinds.items():
        if repr(state()) != before[kind]:
            raise CaptureError(
                f"cannot capture the step: it draws from the module '{kind}', whose numbers would "
                "be the same in every step; draw with torch, or draw outside of the step and pass "
                "the numbers in the batch"
            )


@contextmanager
def _plain_torch() -> Iterator[None]:
    """Without what replaces the program's ops or hides them from autograd.

    That is compiled modules; oneDNN's recurrent layers, which are opaque and whose backward does
    not run on fake tensors; and checkpoints.
    """
    compiler = sys.modules.get("torch._dynamo")
    eager = nullcontext() if compiler is None else torch.compiler.set_stance("force_eager")
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with eager, without_checkpoints():
            yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def capture_key(model: nn.Module, batch: Any, *, grad: bool) -> Hashable:
    """What a captured step depends on, apart from the code: equal keys, equal steps."""
    _, tensors, structure = flatten_batch(batch)
    return (
        structure,
        tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors),
        tuple(module.training for module in model.modules()),
        tuple(p.requires_grad for p in model.parameters()),
        grad,
    )


def fingerprint(graph: Graph, constants: Mapping[str, Tensor]) -> str:
    """A hash of what the graph computes; names of files and lines do not enter."""
    digest = hashlib.sha256()
    for n in graph.nodes:
        digest.update(f"{n.name} {n.op} {n.args} {n.kwargs} {n.outputs} {n.target}\n".encode())
    for results in (graph.gradients, graph.mutations, graph.aliases, graph.batch_dims):
        digest.update(f"{sorted(results.items())}\n".encode())
    digest.update(f"{graph.loss} {graph.aux}\n".encode())
    if graph.summed:
        digest.update(f"summed {sorted(graph.summed.items())}\n".encode())
    for name, value in constants.items():
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(name.encode() + content.numpy().tobytes())
    return digest.hexdigest()


def _enter(tape: Tape, leaves: Leaves, paths: Iterable[str], fakes: Iterable[Tensor]) -> None:
    for name, fake in leaves.parameters.items():
        tape.add_source(PARAMETER, name, fake)
    for name, fake in leaves.buffers.items():
        tape.add_source(BUFFER, name, fake)
    for path, fake in zip(paths, fakes, strict=True):
        tape.add_source(INPUT, path, fake)


def _with_written(
    results: _Results, written: Mapping[tuple[str, str], Ref], recorded: Tape
) -> _Results:
    """Results with the buffers that were written in place; writes to inputs are dropped."""
    for op, target in written:
        if op == PARAMETER:
            raise CaptureError(
                f"cannot capture a write to parameter {target!r}: a parameter changes in the "
                "optimizer's step only; make it a buffer, or write to it outside of the forward"
            )
        if op == CONSTANT and not recorded.is_literal(target):
            raise CaptureError(
                f"cannot capture a write in {recorded.first_use(target)} to a tensor that is no "
                "buffer of the model: it would not outlive the step; register it as a buffer"
            )
    buffers = {target: ref for (op, target), ref in written.items() if op == BUFFER}
    return replace(results, buffers={**buffers, **results.buffers})


@dataclass(frozen=True)
class _Run:
    """One run of the user's program under a recorder."""

    program: _Program
    leaves: Leaves
    recorder: Recorder
    provenance: Provenance
    draws: Draws
    apart: Apart

    def step(self, batch: Any) -> _Results:
        """Run forward, loss and backward."""
        model, precision, grad = self.program.model, self.program.precision, self.program.grad
        attention = Attention(self.draws, self.recorder.tape)
        intercept = Intercept(
            {
                SDPA: attention,
                F.dropout: self.draws.dropout,
                BATCH_NORM: self.apart.batch_norm,
                **FUNCTIONS,
            }
        )
        replayed_views = force_view_replay(True)
        with torch.set_grad_enabled(grad), replayed_views, self.recorder:
            with (
                casting(model, precision, self.provenance.inside),
                self.provenance.watch(),
                intercept,
                routed_experts(),
            ):
                loss, aux = self._forward(batch)
            _check_loss(loss, grad=grad)
            gradients = self._backward(loss) if grad else {}
        return _Results(
            loss=self._ref(loss, "the loss"),
            aux=tuple(
                (name, self._ref(value, f"result {name!r}")) for name, value in (aux or {}).items()
            ),
            gradients={name: self._ref(g, f"gradient {name!r}") for name, g in gradients.items()},
            buffers=self._replaced_buffers(),
            returns_dict=aux is not None,
        )

    def _forward(self, batch: Any) -> tuple[Any, Mapping[str, Any] | None]:
        try:
            made = self.program.loss(self.program.model, batch)
        except AutoparError:
            raise
        except Exception as error:
            where = self.provenance.failed(error)
            if any(text in str(error) for text in _READS_VALUES):
                raise CaptureError(
                    f"cannot capture {where}: it reads the values of a tensor (numpy, data_ptr), "
                    "which are not known before the step runs; use tensor ops instead"
                ) from error
            error.add_note(f"while autopar captured the step, in {where}")
            raise
        if not isinstance(made, tuple):
            return made, None
        if len(made) != 2 or not isinstance(made[1], Mapping):
            raise CaptureError(
                f"cannot use the loss function's result: found a tuple of {len(made)}; return a "
                "0-d tensor, or (loss, dict of tensors)"
            )
        return made

    def _backward(self, loss: Tensor) -> Mapping[str, Tensor]:
        self.recorder.phase = Phase.BACKWARD
        trained = {n: p for n, p in self.leaves.parameters.items() if p.requires_grad}
        if not trained:
            return {}
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return {
            name: self._summed(name, g)
            for name, g in zip(trained, found, strict=True)
            if g is not None
        }

    def _summed(self, name: str, gradient: Tensor) -> Tensor:
        self.recorder.fixed_source = Source(name.rpartition(".")[0])
        made = self.program.precision.through_sum(gradient)
        self.recorder.fixed_source = None
        return made

    def _ref(self, value: Any, what: str) -> Ref:
        ref = self.recorder.tape.ref(value) if isinstance(value, Tensor) else None
        if ref is None:
            raise CaptureError(
                f"cannot capture {what}: found {type(value).__name__}, not a tensor that the step "
                "computes; return a tensor made from the batch or the parameters"
            )
        return ref

    def _replaced_buffers(self) -> Mapping[str, Ref]:
        """Buffers whose attribute now holds another tensor."""
        tape = self.recorder.tape
        found: dict[str, Ref] = {}
        for name, fake in self.leaves.buffers.items():
            path, _, key = name.rpartition(".")
            now = self.program.model.get_submodule(path)._buffers.get(key)
            if now is not None and now is not fake:
                found[name] = self._ref(now, f"buffer {name!r}")
        assert all(tape.step_of(ref) for ref in found.values())
        return found


def default_loss(model: nn.Module, batch: Any) -> Any:
    """The model's output if it is 0-d, else its ``loss``."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, tuple):
        output = model(*batch)
    else:
        output = model(batch)
    if isinstance(output, Tensor):
        return output
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None:
        raise CaptureError(
            f"cannot find the loss in the model's output: found {type(output).__name__} without a "
            "'loss'; pass labels in the batch, or loss= to say how it is computed"
        )
    return found


def _check_loss(loss: Any, *, grad: bool) -> None:
    found = ""
    if not isinstance(loss, Tensor):
        found = f"a {type(loss).__name__}"
    elif loss.ndim:
        found = f"a tensor of shape {list(loss.shape)}"
    elif not loss.is_floating_point():
        found = f"a tensor of dtype {str(loss.dtype).removeprefix('torch.')}"
    if found:
        raise CaptureError(
            f"cannot use the loss: found {found}; it must be a 0-d floating-point tensor, so pass "
            "loss= or reduce it with sum() or mean()"
        )
    if grad and not loss.requires_grad:
        raise CaptureError(
            "cannot differentiate the loss: it does not require grad, so no trainable parameter "
            "has a part in it; unfreeze a parameter, or do not detach the loss"
        )
