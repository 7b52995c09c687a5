"""Run a model's programs on real processes and compare every number with one process."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Group, RenderableType
from rich.text import Text
from torch import Tensor, nn

from autopar.api import compile as compile_parallel
from autopar.capture import Alone, in_turn
from autopar.capture.keyed import keyed
from autopar.capture.precision import AS_IT_IS, Precision, casting, precision_of
from autopar.hint import Hint
from autopar.inputs import Subject, load_cluster, load_subject, parse_hints
from autopar.optim import AdamW
from autopar.options import Options
from autopar.plan.text import add_row, table
from autopar.plan.wording import fold_names
from autopar.runtime.clip import clip_grad_norm_
from autopar.runtime.optimizer import has_host_state
from autopar.spawn import Event, run_workers, work

SEED = 0
"""Seed of what the model draws, in both runs."""

SIZE_FLOOR = 0.1
"""Tensors whose largest element is smaller are compared as if it were this large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest differences that count as equal, relative to the largest element."""

    loss: float = 1e-5
    gradient: float = 1e-5
    parameter: float = 1e-4

    @staticmethod
    def of(dtype: torch.dtype) -> Tolerance:
        """What rounding in this dtype leaves."""
        if dtype in (torch.float32, torch.float64):
            return Tolerance()
        return Tolerance(loss=2e-2, gradient=5e-2, parameter=5e-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One number or tensor on several processes against one.

    Attributes:
        kind: ``loss``, ``gradient``, ``gradient norm``, ``parameter`` or ``buffer``.
        name: Of the parameter or buffer; the step of a loss.
        difference: Largest difference, relative to the largest element.
        allowed: What counts as equal.
    """

    kind: str
    name: str
    difference: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.allowed  # false for nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a verification found."""

    comparisons: tuple[Comparison, ...]
    num_processes: int
    steps: int

    @property
    def passed(self) -> bool:
        return bool(self.comparisons) and all(c.passed for c in self.comparisons)


def verify(
    model: str,
    cluster: str,
    *,
    plan: str | None = None,
    hints: Sequence[str] = (),
    batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    steps: int = 5,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Report:
    """Train some steps on several processes and on one, and compare.

    Compared are the loss of every step, every gradient of the first step, the gradient norm, and
    parameters and buffers after all steps of AdamW with clipping.

    Args:
        model: See `autopar.inputs.load_subject`.
        cluster: ``local:N``.
        plan: Path of a plan; None searches one.
        hints: See `autopar.inputs.parse_hints`.
        batch: Samples, for a transformers config.
        seq: Tokens of a sample, for a transformers config.
        precision: Name of a precision, in both runs.
        steps: Steps to train.
        on_event: Called with what the workers tell: ``{"phase": ..., "step": ...}``.

    Raises:
        AutoparError: Model, cluster, plan or hints cannot be used, or a process failed.
    """
    parse_hints(hints)
    casts = precision_of(precision)
    ranks = load_cluster(cluster).num_devices
    spec: dict[str, Any] = {"model": model, "cluster": cluster, "plan": plan, "steps": steps}
    spec |= {"hints": list(hints), "batch": batch, "seq": seq, "precision": precision}
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as name:
        traces = []
        for who, count in (("parallel", ranks), ("reference", 1)):
            folder = Path(name) / who
            folder.mkdir()
            (folder / "job.json").write_text(json.dumps(spec | {"who": who}))
            run_workers("autopar.verify", folder, count, on_event=on_event)
            traces.append(_joined(folder))
            # What a plan computes from each microbatch alone, the reference does too.
            spec["alone"] = json.loads((folder / "alone.json").read_text())
    parallel, reference = traces
    found = compare(reference, parallel, casts)
    return Report(comparisons=found, num_processes=ranks, steps=steps)


class Trace(NamedTuple):
    """What a training run leaves to compare."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def _joined(folder: Path) -> Trace:
    """What the ranks have left: of stages, the parameters of each."""
    found = [
        Trace(**torch.load(path, weights_only=True)) for path in sorted(folder.glob("trace-*.pt"))
    ]
    return found[0]._replace(
        gradients={name: t for trace in found for name, t in trace.gradients.items()},
        parameters={name: t for trace in found for name, t in trace.parameters.items()},
    )


def compare(
    reference: Trace, parallel: Trace, precision: Precision = AS_IT_IS
) -> tuple[Comparison, ...]:
    """Everything of two runs in this precision, side by side."""
    stored = {t.dtype for t in reference.parameters.values() if t.is_floating_point()}
    dtypes = stored | {precision.computed(dtype) for dtype in stored}
    allowed = Tolerance.of(min(dtypes, key=lambda d: torch.finfo(d).bits, default=torch.float32))
    found = []
    for kind, floor, limit, ours, theirs in (
        ("loss", 1.0, allowed.loss, parallel.losses, reference.losses),
        ("gradient norm", SIZE_FLOOR, allowed.gradient, parallel.norms, reference.norms),
    ):
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
            size = abs(a - b) / max(abs(b), floor)
            found.append(Comparison(kind=kind, name=f"step {step}", difference=size, allowed=limit))
    for kind, limit, mine, other in (
        ("gradient", allowed.gradient, parallel.gradients, reference.gradients),
        ("parameter", allowed.parameter, parallel.parameters, reference.parameters),
        ("buffer", allowed.parameter, parallel.buffers, reference.buffers),
    ):
        for name in dict.fromkeys([*other, *mine]):
            size = difference(mine.get(name), other.get(name))
            found.append(Comparison(kind=kind, name=name, difference=size, allowed=limit))
    return tuple(found)


def difference(a: Tensor | None, b: Tensor | None) -> float:
    """Largest difference relative to the largest element of ``b``; an absent tensor is zero."""
    if a is None or b is None:
        there = a if b is None else b
        assert there is not None
        return 0.0 if not there.count_nonzero() else float("inf")
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    x, y = a.double(), b.double()
    return float((x - y).abs().max() / y.abs().max().clamp(min=SIZE_FLOOR))


def report_view(report: Report) -> RenderableType:
    """A report as something rich can print: the worst of each kind, and everything that failed."""
    columns = ("", "", "compared", "difference", "allowed", "largest in")
    made = table(*columns, right=("compared", "difference", "allowed"))
    for kind in dict.fromkeys(c.kind for c in report.comparisons):
        own = [c for c in report.comparisons if c.kind == kind]
        worst = max(own, key=lambda c: (not c.passed, c.difference))
        where = worst.name if worst.difference else ""
        mark = "equal" if all(c.passed for c in own) else "DIFFERENT"
        style = "green" if mark == "equal" else "bold red"
        figures = (str(len(own)), f"{worst.difference:.1e}", f"{worst.allowed:.0e}", where)
        add_row(made, kind, Text(mark, style=style), *figures)
    parts: list[RenderableType] = [made]
    failed = [c for c in report.comparisons if not c.passed]
    if failed:
        names = fold_names((c.name, c.kind) for c in failed)
        said = ", ".join(f"{one.meaning} {one.name}" for one in names[:12])
        more = f" and {len(names) - 12} more" if len(names) > 12 else ""
        parts.append(Text(f"different: {said}{more}", style="red"))
    count = f"{report.num_processes} processes and one, {report.steps} steps"
    verdict = "the same" if report.passed else "NOT the same"
    style = "bold green" if report.passed else "bold red"
    parts.append(Text.assemble(f"{count}: ", (verdict, style)))
    return Group(*parts)


# The workers' side.


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW; its eps keeps gradients that are zero up to rounding from becoming whole steps."""
    own = list(parameters)
    kind = AdamW if any(map(has_host_state, own)) else torch.optim.AdamW
    return kind(own, lr=1e-3, eps=1e-5)


def train(
    step: Callable[[], Tensor],
    module: nn.Module,
    clip: Callable[[], Any],
    steps: int,
    tell: Callable[..., None],
) -> Trace:
    """Train and note everything that is compared."""
    optimizer = make_optimizer(module.parameters())
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for number in range(steps):
        loss = step()
        loss.backward()  # type: ignore[no-untyped-call]
        if number == 0:
            gradients = {
                name: _full(p.grad)
                for name, p in module.named_parameters()
                if p.grad is not None and p.requires_grad
            }
        norms.append(float(_full(clip())))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        tell(step=number + 1, steps=steps, loss=losses[-1])
    return Trace(
        losses=losses,
        norms=norms,
        gradients=gradients,
        parameters={name: _full(p) for name, p in module.named_parameters()},
        buffers={name: _full(b) for name, b in module.named_buffers()},
    )


def _full(value: Any) -> Tensor:
    """A whole tensor, detached, of what may be a DTensor."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return torch.as_tensor(value).detach().clone().cpu()


def _reference(subject: Subject, spec: Mapping[str, Any], tell: Callable[..., None]) -> Trace:
    precision, alone = precision_of(spec["precision"]), Alone(**spec["alone"])
    numbers = itertools.count()
    for parameter in subject.model.parameters():
        parameter.data = parameter.data.to(precision.stored(parameter.dtype))

    def step() -> Tensor:
        with (
            in_turn(subject.model, subject.batch, subject.loss, alone=alone),
            casting(subject.model, precision),
            keyed(subject.model, SEED, next(numbers)),
        ):
            if subject.loss is None:
                found = _call(subject.model, subject.batch)
                found = found if isinstance(found, Tensor) else found.loss
            else:
                found = subject.loss(subject.model, subject.batch)
        loss: Tensor = found[0] if isinstance(found, tuple) else found
        return loss

    parameters = [p for p in subject.model.parameters() if p.requires_grad]
    return train(
        step,
        subject.model,
        lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        spec["steps"],
        tell,
    )


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _parallel(
    subject: Subject, spec: Mapping[str, Any], hints: tuple[Hint, ...], tell: Callable[..., None]
) -> tuple[Trace | None, Alone]:
    """What this rank leaves, None where another of its stage speaks for it."""
    parallel = compile_parallel(
        subject.model,
        load_cluster(spec["cluster"]),
        subject.batch,
        loss=subject.loss,
        precision=spec["precision"],
        hints=hints,
        plan=spec["plan"],
        options=Options(seed=SEED),
    )

    def step() -> Tensor:
        result = parallel(subject.batch)
        loss: Tensor = result[0] if isinstance(result, tuple) else result
        return loss

    trace = train(step, parallel, lambda: clip_grad_norm_(parallel, 1.0), spec["steps"], tell)
    plan, rank = parallel.plan, parallel.session.rank
    speaks = plan.speaks(rank)
    if not speaks:
        trace = trace._replace(gradients={}, parameters={})
    told = trace if speaks or rank == 0 else None
    return told, Alone(plan.per_microbatch, plan.microbatches)


def main(folder: str) -> None:
    """One worker: the reference, or a rank of the parallel run."""
    torch.set_num_threads(1)
    with work(folder) as job:
        spec = job.spec
        who = spec["who"]
        job.tell(phase=who, step=0, steps=spec["steps"])
        subject = load_subject(spec["model"], batch=spec["batch"], seq=spec["seq"], real=True)

        def tell(**event: Any) -> None:
            job.tell(phase=who, **event)

        trace: Trace | None
        if who == "reference":
            trace, alone = _reference(subject, spec, tell), Alone(**spec["alone"])
        else:
            trace, alone = _parallel(subject, spec, parse_hints(spec["hints"]), tell)
        if job.rank == 0:
            (job.folder / "alone.json").write_text(json.dumps(asdict(alone)))
        if trace is not None:
            torch.save(trace._asdict(), job.folder / f"trace-{job.rank:05}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
