"""`compile` and `plan`: the stages in order.

Every rank captures the step; rank 0 plans and sends the plan as text; every rank lowers its own
program. Each phase ends with an exchange, so a rank that fails makes all ranks raise its error.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import nn

from autopar.capture import Captured, capture_step
from autopar.capture.alone import Alone
from autopar.capture.cache import RememberedCaptures, stored_capture
from autopar.capture.precision import Precision, check_held, dtype_of, precision_of
from autopar.cost.node import axis_seconds
from autopar.errors import AutoparError, HintError, PlanError, UnsupportedError
from autopar.hint import Hint, PerMicrobatch, hint_of
from autopar.ir.graph import KEY, PARAMETER, Graph, Node, Ref
from autopar.ir.sharding import Mesh
from autopar.lower.chunks import lower_chunks, on_one_rank
from autopar.lower.program import Program
from autopar.lower.rows import turns_of
from autopar.lower.simulate import prices
from autopar.lower.spmd import Crossing
from autopar.optim import BUCKET_ELEMENTS, AdamW
from autopar.options import OptimizerSpec, Options, rules_by_op
from autopar.plan.check import check
from autopar.plan.records import NodePlan, ParameterPlan, Plan
from autopar.plan.serialize import from_json, to_json
from autopar.planner.alone import best_plan
from autopar.planner.driver import make_plan
from autopar.planner.pipeline import stage_without_parameter
from autopar.planner.request import Request
from autopar.rules.strategies import strategies
from autopar.runtime.executor import ParallelModule, StepRequest
from autopar.runtime.groups import Session, StagePeers, open_session
from autopar.runtime.mail import Route
from autopar.runtime.optimizer import transients_of
from autopar.runtime.params import shard_model, values_digest
from autopar.runtime.pipeline import StageSource
from autopar.runtime.results import SharedResult, Sharing
from autopar.runtime.step import StepSource
from autopar.schedules.table import Size, schedule_named
from autopar.search.analysis import Analysis, analyse
from cost_models.cluster import Cluster

Loss = Callable[[Any, Any], Any]
Optimizer = type[torch.optim.Optimizer] | functools.partial[Any] | OptimizerSpec | None

_SAME_WEIGHTS = (
    "call torch.manual_seed with one number on every rank before the model is made, load one "
    "checkpoint, or make the model on meta"
)

_REMEMBERED = RememberedCaptures()
"""The latest captures that `plan` made of models of Python code, in this process."""


def compile(
    model: nn.Module,
    cluster: Cluster,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer = None,
    precision: Precision | str | None = None,
    hints: Sequence[Hint] = (),
    plan: Plan | str | PathLike[str] | None = None,
    init: Callable[[nn.Module], None] | None = None,
    options: Options | None = None,
) -> ParallelModule:
    """The model as a parallel program on this process's rank.

    Args:
        model: Unmodified, on any device, meta included.
        cluster: Where it runs; as many devices as there are processes.
        batch: Example of the global batch, the same on every rank: a dict (keyword arguments), a
            tuple (positional arguments) or one tensor; real, fake or meta. Without it the first
            batch, or ``parallel.prepare(batch)``, makes the plan.
        loss: ``loss(model, batch)`` returns a 0-d tensor or ``(loss, dict)``; by default the
            model's output if it is 0-d, else its ``loss``.
        optimizer: Class, ``functools.partial`` or `OptimizerSpec`, for the memory sum.
        precision: An `autopar.Precision` or the name of one: ``"fp32"`` (stored and computed in
            it), ``"bf16"`` (stored in fp32, computed in bf16, gradients summed in fp32) or
            ``"zero_paper"``; None for the model as it is.
        hints: Restrictions, of ``autopar.hint``.
        plan: A plan or the path of one; nothing is searched then. Hints beside it must be those it
            was made under: other batches and modes are planned with them.
        init: Fills a model on meta; by default transformers' own, else every module's
            ``reset_parameters``.
        options: How to plan and run.

    Raises:
        AutoparError: On every rank alike; the subclass says what went wrong.
    """
    job = _Job(
        model=model,
        cluster=cluster,
        loss=loss,
        spec=optimizer_spec(optimizer, _device_type(cluster)),
        precision=_checked(precision, model, optimizer),
        hints=_listed(hints),
        init=init,
        options=options or Options(),
    )
    session = open_session(_device_type(cluster), cluster.num_devices, job.options.timeout_s)
    given = None
    failed: Exception | None = None
    try:
        given = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
        _check_hints(given, job.hints)
    except AutoparError as error:
        failed = error
    session.agree("reading the plan", failed)
    session.agree_equal("given plans", "none" if given is None else _digest(given))
    session.agree_equal("hints", ", ".join(map(str, job.hints)) or "none")
    session.agree_equal("precisions", str(job.precision))
    compiler = _Compiler(job, session, given)
    parallel = ParallelModule(model, session, compiler)
    if batch is not None:
        parallel.prepare(batch)
    return parallel


def plan(
    model: nn.Module,
    cluster: Cluster,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer = None,
    precision: Precision | str | None = None,
    hints: Sequence[Hint] = (),
    options: Options | None = None,
    recipe: str | None = None,
) -> Plan:
    """The plan alone: no processes, no device, a model on meta is enough.

    Args:
        model: As for `compile`.
        cluster: Any cluster, of any size.
        batch: Example of the global batch.
        loss: As for `compile`.
        optimizer: As for `compile`.
        precision: As for `compile`.
        hints: As for `compile`.
        options: How to plan.
        recipe: All that model and batch were made from, as text, for models made from a file: a
            capture stored on disk for an equal recipe is used again.

    Raises:
        AutoparError: The subclass says what went wrong.
    """
    own = planner(
        model,
        cluster,
        batch,
        loss=loss,
        optimizer=optimizer,
        precision=precision,
        options=options,
        recipe=recipe,
    )
    return own(hints)


def planner(
    model: nn.Module,
    cluster: Cluster,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer = None,
    precision: Precision | str | None = None,
    options: Options | None = None,
    recipe: str | None = None,
) -> Callable[[Sequence[Hint]], Plan]:
    """What makes plans of one step under hints: it is captured once, its problems are built once.

    The arguments are those of `plan`.
    """
    options = options or Options()
    casts = _checked(precision, model, optimizer)
    spec = optimizer_spec(optimizer, _device_type(cluster))
    steps: dict[Alone | None, tuple[Analysis, Request]] = {}

    def captured_of(alone: Alone | None) -> Captured:
        def capture() -> Captured:
            return capture_step(model, batch, loss, grad=True, precision=casts, alone=alone)

        if recipe is None or loss is not None:
            return _REMEMBERED.get(model, batch, loss, capture, (casts, alone))
        depends = [str(own) for own in (None if precision is None else casts, alone) if own]
        return stored_capture(" ".join((recipe, *depends)), capture)

    def step_of(alone: Alone | None) -> tuple[Analysis, Request]:
        if alone not in steps:
            start = time.perf_counter()
            captured = captured_of(alone)
            request = Request(
                model=type(model).__name__,
                fingerprint=captured.fingerprint,
                cluster=cluster,
                optimizer=spec,
                time_limit_s=options.time_limit_s,
                memory_fraction=options.memory_fraction,
                capture_s=time.perf_counter() - start,
            )
            steps[alone] = analyse(captured.graph, rules_by_op(options)), request
        return steps[alone]

    def plan_under(given: Sequence[Hint]) -> Plan:
        hints = _listed(given)

        def hinted(count: int) -> tuple[Analysis, Request]:
            analysis, request = step_of(_alone(hints, count))
            return analysis, replace(request, hints=hints)

        return best_plan(hinted)

    return plan_under


def _listed(hints: Sequence[Hint]) -> tuple[Hint, ...]:
    """The hints of a list.

    Raises:
        HintError: It is one hint, or nothing of the kind.
    """
    given: object = hints
    if isinstance(given, str | Hint) or not isinstance(given, Iterable):
        raise HintError(f"cannot use hints={hints}: give a list of hints, hints=[{hints}]")
    return tuple(hints)


def _check_hints(plan: Plan | None, hints: Sequence[Hint]) -> None:
    """Refuse hints that a given plan was not made under, since nothing would follow them."""
    known = [] if plan is None else [hint_of(text) or text for text in plan.hints]
    other = next((own for own in hints if own not in known), None)
    if plan is not None and other is not None:
        raise PlanError(
            f"cannot use hint {other} beside plan=: the plan decides what it would, and was not "
            "made under it; leave hints out, or make the plan with autopar.plan(..., hints=...)"
        )


def _alone(hints: Sequence[Hint], count: int) -> Alone | None:
    """What hints want computed from each of ``count`` microbatches alone."""
    patterns = tuple(h.pattern for h in hints if isinstance(h, PerMicrobatch))
    return Alone(patterns, count) if patterns else None


def _alone_of(plan: Plan | None) -> Alone | None:
    """What a plan computes from each microbatch alone."""
    if plan is None or not plan.per_microbatch:
        return None
    return Alone(plan.per_microbatch, plan.microbatches)


def _checked(given: Precision | str | None, model: nn.Module, optimizer: Optimizer) -> Precision:
    """What a precision means for this model.

    Raises:
        UnsupportedError: It is none, or nothing could hold its gradients or states.
    """
    found = precision_of(given)
    check_held(found, model, own_optimizer=isinstance(optimizer, OptimizerSpec))
    return found


def optimizer_spec(optimizer: Optimizer, device_type: str) -> OptimizerSpec:
    """Bytes of an optimizer given as a class, a partial of one or a spec; of AdamW for None.

    Raises:
        UnsupportedError: The class is not known and no spec was given.
    """
    if isinstance(optimizer, OptimizerSpec):
        return optimizer
    own = optimizer or torch.optim.AdamW
    if not isinstance(own, type | functools.partial):
        raise UnsupportedError(
            f"cannot use a {type(own).__name__} as optimizer=: a plan is made before there are its "
            "parameters; give its class, a functools.partial of that, or an autopar.OptimizerSpec"
        )
    partial = own if isinstance(own, functools.partial) else functools.partial(own)
    kind: Any = partial.func
    options = partial.keywords
    moments = {
        AdamW: 2,
        torch.optim.AdamW: 2 + bool(options.get("amsgrad")),
        torch.optim.Adam: 2 + bool(options.get("amsgrad")),
        torch.optim.NAdam: 2,
        torch.optim.RAdam: 2,
        torch.optim.Adamax: 2,
        torch.optim.SGD: int(bool(options.get("momentum"))),
        torch.optim.Adagrad: 1,
        torch.optim.Adadelta: 2,
        torch.optim.RMSprop: 1 + bool(options.get("momentum")) + bool(options.get("centered")),
    }.get(kind)
    if moments is None:
        raise UnsupportedError(
            f"cannot tell the state of optimizer {getattr(kind, '__name__', kind)!r}: give "
            "autopar.OptimizerSpec(state_bytes=...) with its bytes a parameter element"
        )
    bucket = options.get("bucket_elements", BUCKET_ELEMENTS) if kind is AdamW else None
    # Of ours, torch's is the kernel.
    kernel = functools.partial(torch.optim.AdamW) if kind is AdamW else partial
    transients = transients_of(kernel, device_type)
    return OptimizerSpec(moments=moments, transients=transients, host_bucket_elements=bucket)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What the caller asked `compile` for."""

    model: nn.Module
    cluster: Cluster
    loss: Loss | None
    spec: OptimizerSpec
    precision: Precision
    hints: tuple[Hint, ...]
    init: Callable[[nn.Module], None] | None
    options: Options


_Step = tuple[Captured, Analysis, float]
"""A captured step, analysed, and the seconds of its capture."""


class _Compiler:
    """Captures, plans and lowers a step whenever the module meets a new one."""

    def __init__(self, job: _Job, session: Session, given: Plan | None) -> None:
        self.job = job
        self.session = session
        self.given = given
        self.settled: Plan | None = None
        self.peers: StagePeers | None = None

    def __call__(self, parallel: ParallelModule, request: StepRequest) -> StepSource:
        known = _alone_of(self.settled or self.given)
        found = self._captured(request, known)
        plan = self._plan(request, found)
        if known is None and plan.per_microbatch:
            found = self._captured(request, _alone_of(plan))
        captured, analysis, _ = found
        self._phase("the check of the plan", lambda: self._check(plan, captured, analysis))
        programs = self._phase("lowering", lambda: self._lower(analysis, plan))
        if self.settled is None:
            values = self._phase("reading the weights", self._digest_of_weights)
            self.session.agree_equal("weights of the model", values, remedy=_SAME_WEIGHTS)
            self._phase("sharding the parameters", lambda: self._adopt(parallel, captured, plan))
            self.settled = plan
        return StepSource(
            program=programs[0],
            stage=self._stage_source(plan),
            sharing=self._sharing(analysis, plan, programs[0]),
            microbatches=programs if len(programs) > 1 else (),
            plan=plan,
            constants=captured.constants,
            returns_dict=captured.returns_dict,
            batch_dims=captured.graph.batch_dims,
            draws=any(captured.graph.sources(KEY)),
        )

    def _phase(self, name: str, work: Callable[[], Any]) -> Any:
        """Run a phase and exchange how it went."""
        failed: Exception | None = None
        result = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  (raised on every rank by agree)
            failed = error
        self.session.agree(name, failed)
        return result

    def _captured(self, request: StepRequest, alone: Alone | None) -> _Step:
        """The step, the same on every rank."""
        found: _Step = self._phase("capture", lambda: self._capture(request, alone))
        self.session.agree_equal("captured steps", found[0].fingerprint)
        return found

    def _capture(self, request: StepRequest, alone: Alone | None) -> _Step:
        start = time.perf_counter()
        with _InMode(self.job.model, request.training, request.trainable):
            captured = capture_step(
                self.job.model,
                request.batch,
                self.job.loss,
                grad=request.grad,
                precision=self.job.precision,
                alone=alone,
            )
        capture_s = time.perf_counter() - start
        return captured, analyse(captured.graph, rules_by_op(self.job.options)), capture_s

    def _plan(self, request: StepRequest, found: _Step) -> Plan:
        """The plan of this step: the given one, or rank 0's."""
        given = self.given if self.settled is None else None
        if given is not None:
            plan = given
        else:
            text = self._phase("planning", lambda: self._search(request, found))
            plan = from_json(self.session.broadcast_text(text))
        self.session.agree_equal("plans", _digest(plan))
        return plan

    def _search(self, request: StepRequest, found: _Step) -> str | None:
        """Rank 0's plan, as text."""
        if self.session.rank != 0:
            return None
        if self.settled is not None:
            return to_json(make_plan(found[1], self._asked(found)))

        def step_of(count: int) -> tuple[Analysis, Request]:
            alone = _alone(self.job.hints, count)
            own = found if alone is None else self._capture(request, alone)
            return own[1], self._asked(own)

        return to_json(best_plan(step_of))

    def _asked(self, found: _Step) -> Request:
        """What to plan of a step."""
        captured, _, capture_s = found
        options = self.job.options
        return Request(
            model=type(self.job.model).__name__,
            fingerprint=captured.fingerprint,
            cluster=self.job.cluster,
            hints=self.job.hints,
            optimizer=self.job.spec,
            time_limit_s=options.time_limit_s,
            memory_fraction=options.memory_fraction,
            capture_s=capture_s,
            settled_plan=self.settled,
        )

    def _check(self, plan: Plan, captured: Captured, analysis: Analysis) -> None:
        check(
            plan,
            captured.graph,
            self.job.cluster.num_devices,
            fingerprint=captured.fingerprint,
            views=frozenset(ref.node for ref in analysis.aliases),
            follows=None if plan is not self.given else _Follows(analysis),
        )
        if len(plan.stages) > 1:
            _check_stages(plan)

    def _coordinates(self, plan: Plan) -> tuple[int, ...] | None:
        """This rank's coordinates on its stage's mesh of ranks; None where it is idle."""
        stage = plan.stage_of_rank(self.session.rank)
        if stage is None:
            return None
        place = self.session.rank - plan.ranks_of_stages[stage].start
        return plan.meshes[stage].coordinates(place)

    def _lower(self, analysis: Analysis, plan: Plan) -> tuple[Program, ...]:
        """This rank's program of every microbatch."""
        stage, coordinates = plan.stage_of_rank(self.session.rank), self._coordinates(plan)
        if stage is None or coordinates is None:
            return (_idle_program(analysis.graph, plan),)
        first = plan.ranks_of_stages[stage].start
        seconds = axis_seconds(self.job.cluster, plan.meshes[stage], first)
        cost = prices(self.job.cluster.device(first), seconds)
        times = [(m,) for m in range(plan.microbatches)] if plan.microbatches > 1 else [()]
        chunks = plan.chunks_of(stage)
        graph, rules = analysis.graph, analysis.rules
        crossing = Crossing(
            transfers=plan.transfers,
            meshes=tuple(chunk.mesh for chunk in plan.stages),
            splits_backward=schedule_named(plan.schedule).splits_backward,
        )
        found = []
        for microbatch in times:
            place = (*coordinates, *microbatch)
            programs = lower_chunks(graph, rules, chunks, place, seconds, crossing)
            found.append(_with_results(on_one_rank(graph, programs, chunks, cost), graph))
        return tuple(found)

    def _stage_source(self, plan: Plan) -> StageSource | None:
        if len(plan.stages) == 1 or self.peers is None or self.peers.stage is None:
            return None
        held = plan.stage_of_chunks
        num_chunks = len(held) // plan.num_stages
        rows = turns_of(plan.schedule, plan.num_stages, num_chunks, plan.microbatches)
        return StageSource(
            row=rows[self.peers.stage],
            route=Route(peers=self.peers, stages=held, num_transfers=len(plan.transfers)),
            stage=self.peers.stage,
        )

    def _sharing(self, analysis: Analysis, plan: Plan, program: Program) -> Sharing | None:
        """How results that not every rank makes reach all ranks."""
        if self.peers is None:
            return None
        graph = analysis.graph
        members = [{node.name for node in stage.nodes} for stage in plan.stages]
        head = [] if graph.loss is None else [graph.loss]
        head += [ref for _, ref in graph.aux]
        behind = enumerate(graph.mutations.values(), len(head) + len(program.gradients))
        shared = []
        for index, ref in [*enumerate(head), *behind]:
            made = analysis.root(ref).root.node
            held = zip(plan.stage_of_chunks, members, strict=True)
            stage = next((s for s, nodes in held if made in nodes), 0)
            shared.append(SharedResult(index=index, stage=stage, type=graph.type_of(ref)))
        return Sharing(peers=self.peers, results=tuple(shared))

    def _adopt(self, parallel: ParallelModule, captured: Captured, plan: Plan) -> None:
        firsts = [ranks.start for ranks in plan.ranks_of_stages]
        made = [self.session.groups(m.space, f) for m, f in zip(plan.meshes, firsts, strict=True)]
        own = plan.stage_of_rank(self.session.rank)
        if len(plan.stages) > 1 or plan.idle_ranks:
            self.peers = StagePeers(own, tuple(firsts), self.session.mail())
        stored, homes = {}, {}
        for stage, parameter in self._listed(plan, own):
            stored[parameter.name] = parameter.stored[: len(plan.meshes[stage].space.sizes)]
            homes[parameter.name] = made[stage]
        groups = made[own or 0]
        seed = self._seed()
        state = shard_model(
            self.job.model,
            stored=stored,
            dtypes={n.target: dtype_of(n.outputs[0]) for n in captured.graph.sources(PARAMETER)},
            aliases=captured.graph.aliases,
            groups=groups,
            coordinates=self._coordinates(plan),
            device=self.session.device,
            on_host={p.name for p in plan.parameters.values() if p.on_host},
            init=self.job.init,
            seed=seed,
            owned=stored if len(plan.stages) > 1 else None,
            homes=homes,
        )
        parallel.adopt(plan, groups, state, self.job.spec, seed=seed)

    def _listed(self, plan: Plan, own: int | None) -> list[tuple[int, ParameterPlan]]:
        """The parameters that this rank lists, with their stages: those of its own stage.

        An idle rank lists all. A stage of frozen parameters alone also lists what others train, so
        that an optimizer of what is trained finds parameters on every rank.
        """
        everything = [
            (stage, parameter)
            for stage in range(plan.num_stages)
            for chunk in plan.chunks_of(stage).values()
            for parameter in chunk.parameters
        ]
        if own is None:
            return everything
        trained = {name for name, p in self.job.model.named_parameters() if p.requires_grad}
        away = [(stage, p) for stage, p in everything if stage != own and p.name in trained]
        listed = [(stage, p) for stage, p in everything if stage == own]
        return listed if any(p.name in trained for _, p in listed) else listed + away

    def _digest_of_weights(self) -> str:
        model = self.job.model
        return values_digest((*model.named_parameters(), *model.named_buffers()))

    def _seed(self) -> int:
        """The seed of the options, or rank 0's."""
        seed = self.job.options.seed
        own = torch.initial_seed() if seed is None else seed
        return int(self.session.broadcast_text(str(own) if self.session.rank == 0 else None))


def _check_stages(plan: Plan) -> None:
    """Refuse stages that hold nothing, and a schedule that these stages cannot run."""
    empty = stage_without_parameter(plan.stages)
    if empty is not None:
        raise UnsupportedError(
            f"cannot run a pipeline of {plan.num_stages} stages: stage {empty} would hold no "
            "parameter, so that its ranks have nothing to train; use fewer stages"
        )
    try:
        spec = schedule_named(plan.schedule)
        num_chunks, rest = divmod(len(plan.stages), plan.num_stages)
        placed = [spec.lane_of_chunk(n, plan.num_stages) for n in range(len(plan.stages))]
        if rest or placed != list(plan.stage_of_chunks):
            raise PlanError(
                f"its chunks lie on stages {list(plan.stage_of_chunks)}, schedule "
                f"'{spec.name}' has them on {placed}; undo the edit or plan again"
            )
        spec.check(Size(lanes=plan.num_stages, chunks=num_chunks, microbatches=plan.microbatches))
    except AutoparError as error:
        raise PlanError(f"cannot use this plan: {error}") from None


def _with_results(program: Program, graph: Graph) -> Program:
    """The program with places for results and buffers that other ranks make."""
    aux = dict(program.aux)
    return replace(
        program,
        loss=None if graph.loss is None else program.loss or Ref("#loss"),
        aux=tuple((name, aux.get(name, Ref(f"#{name}"))) for name, _ in graph.aux),
        mutations={n: program.mutations.get(n, Ref(f"#buffer {n}")) for n in graph.mutations},
    )


def _idle_program(graph: Graph, plan: Plan) -> Program:
    """What an idle rank runs: nothing, with a place for all results."""
    none = Program(
        mesh=plan.mesh.space,
        coordinates=(),
        inputs=(),
        instructions=(),
        loss=None,
        gradients={name: Ref(f"#{name}") for name in graph.gradients},
    )
    return _with_results(none, graph)


class _Follows:
    """Whether a node's shardings are a strategy of its rule: a plan may have been edited."""

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis
        self._known: dict[object, frozenset[tuple[object, object]]] = {}

    def __call__(self, node: Node, entry: NodePlan, mesh: Mesh) -> bool:
        rule = self._analysis.rules[node.name]
        # Nodes of one rule may be cut at different places.
        cuts = self._analysis.cuts.get(node.name, {})
        types = self._analysis.operand_types(node)
        key = (id(rule), mesh, tuple(types), node.outputs, frozenset(cuts.items()))
        known = self._known.get(key)
        if known is None:
            # What is only stored is split evenly, whatever shares of the batch ranks take.
            found = [
                strategy
                for own in dict.fromkeys((mesh, mesh.even))
                for strategy in strategies(rule, types, node.outputs, own, cuts=cuts)
            ]
            known = self._known[key] = frozenset((s.operands, s.outputs) for s in found)
        return (entry.operands, entry.outputs) in known


class _InMode:
    """The model with the training and ``requires_grad`` flags of the compiled module."""

    def __init__(
        self, model: nn.Module, training: Mapping[str, bool], trainable: Mapping[str, bool]
    ) -> None:
        self._modules = [
            (module, training[path], module.training)
            for path, module in model.named_modules(remove_duplicate=False)
            if path in training
        ]
        self._parameters = [
            (p, trainable[name], p.requires_grad)
            for name, p in model.named_parameters()
            if name in trainable
        ]

    def __enter__(self) -> None:
        for module, wanted, _ in self._modules:
            module.training = wanted
        for parameter, wanted, _ in self._parameters:
            parameter.requires_grad_(wanted)

    def __exit__(self, *failure: object) -> None:
        for module, _, before in self._modules:
            module.training = before
        for parameter, _, before in self._parameters:
            parameter.requires_grad_(before)


def _device_type(cluster: Cluster) -> str:
    """``cpu`` for clusters of CPU processes, else ``cuda``."""
    return "cpu" if cluster.device(0).kind.startswith("cpu") else "cuda"


def _digest(plan: Plan) -> str:
    decided = replace(plan, search=replace(plan.search, seconds=0.0, capture_s=0.0))
    return hashlib.sha256(to_json(decided).encode()).hexdigest()[:16]
