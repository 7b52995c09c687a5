"""`ParallelModule`: the user's model as sharded parameters and compiled steps."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.batch import flatten_batch
from autopar.capture.random import make_key
from autopar.errors import BatchError, UnsupportedError
from autopar.options import OptimizerSpec
from autopar.plan.records import Plan
from autopar.runtime.backward import Anchor, Token, attach
from autopar.runtime.groups import MeshGroups, Session, as_failure
from autopar.runtime.optimizer import mark_home, watch_optimizers
from autopar.runtime.params import ModelState, load_value, values_digest
from autopar.runtime.sampler import Deal, GlobalBatchSampler
from autopar.runtime.shell import build_shells, fill_shells
from autopar.runtime.step import Results, Step, StepSource

MAX_STEPS = 16
"""Compiled steps that are kept; the one used longest ago goes first."""

_SAME_BATCH = (
    "give every rank the same global batch, or each rank its part: parallel(parallel.shard(part)), "
    "with parallel.sampler(dataset) for data loaders"
)

EXTRA_STATE = "_extra_state"
"""Where nn.Module puts the step count in a state dict."""


@dataclass(frozen=True, slots=True)
class ShardedBatch:
    """A rank's part of a batch: its samples, or None on a rank that reads none."""

    part: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """What a step is wanted for.

    Attributes:
        batch: An example of the global batch.
        grad: Whether gradients are wanted.
        training: Module path to its ``training`` flag.
        trainable: Parameter name to its ``requires_grad``; empty before there are parameters.
    """

    batch: Any
    grad: bool
    training: Mapping[str, bool]
    trainable: Mapping[str, bool]


CompileStep = Callable[["ParallelModule", StepRequest], StepSource]
"""Captures, plans and lowers a step; the first time it also calls `ParallelModule.adopt`. It must
end alike on every rank (`Session.agree`)."""


@dataclass(frozen=True, slots=True)
class StepKey:
    """What a compiled step depends on.

    Attributes:
        mode: Grad mode, autocast dtype, training and ``requires_grad`` flags.
        structure: Structure of the batch and its leaves that are not tensors.
        types: Shape and dtype of each of its tensors.
    """

    mode: Hashable
    structure: Hashable
    types: Hashable


@dataclass(eq=False, kw_only=True)
class _Own:
    """Everything of a `ParallelModule` that is not a parameter, buffer or submodule."""

    compile_step: CompileStep
    session: Session
    shells: dict[str, nn.Module]
    anchor: Anchor
    plan: Plan | None = None
    groups: MeshGroups | None = None
    state: ModelState | None = None
    distinct: dict[str, nn.Parameter] = field(default_factory=dict)
    trainable: dict[str, bool] = field(default_factory=dict)
    steps: OrderedDict[StepKey, Step] = field(default_factory=OrderedDict)
    pending: weakref.ref[Token] | None = None
    seed: int = 0
    num_steps: int = 0


class ParallelModule(nn.Module):
    """A model that runs by a plan.

    It has the model's own parameter, buffer and submodule names; submodules only hold them. Call
    it with the global batch, the same on every rank, or with ``shard(part)``. `backward` says what
    the returned loss can do.
    """

    def __init__(self, model: nn.Module, session: Session, compile_step: CompileStep) -> None:
        """Make the shell; parameters come with the first plan.

        Args:
            model: Gives names and training flags.
            session: This process among its peers.
            compile_step: Makes a step when a batch needs a new one.
        """
        super().__init__()
        self._autopar = _Own(
            compile_step=compile_step,
            session=session,
            shells=build_shells(self, model),
            anchor=Anchor(session.device),
        )

    def adopt(
        self,
        plan: Plan,
        groups: MeshGroups,
        state: ModelState,
        optimizer: OptimizerSpec | None = None,
        *,
        seed: int,
    ) -> None:
        """Take the plan and what it runs on.

        Args:
            plan: The plan.
            groups: Groups of its mesh.
            state: This rank's parameters and buffers.
            optimizer: What the plan counted on, to check the real one.
            seed: Seed of random ops, the same on every rank.
        """
        own = self._autopar
        own.plan, own.groups, own.state, own.seed = plan, groups, state, seed
        fill_shells(own.shells, state)
        first: dict[int, str] = {}
        for name, parameter in state.parameters.items():
            first.setdefault(id(parameter), name)
        own.distinct = {name: state.parameters[name] for name in first.values()}
        own.trainable = {name: p.requires_grad for name, p in own.distinct.items()}
        for name, parameter in own.distinct.items():
            if (planned := plan.parameters.get(name)) is not None:
                mark_home(parameter, state_on_host=planned.state_on_host, on_host=planned.on_host)
        watch_optimizers(self, own.distinct.values(), optimizer)

    @property
    def plan(self) -> Plan:
        """The plan it runs by.

        Raises:
            UnsupportedError: There is none yet.
        """
        self._need_plan("show the plan")
        assert self._autopar.plan is not None
        return self._autopar.plan

    @property
    def session(self) -> Session:
        """This process among its peers."""
        return self._autopar.session

    @property
    def num_steps(self) -> int:
        """Training steps run so far; part of ``state_dict``.

        It is the step in the key of random ops, so a call without gradients that draws counts too.
        """
        return self._autopar.num_steps

    def prepare(self, batch: Any) -> None:
        """Plan, if nothing is planned, and compile the step for a batch without running it.

        Args:
            batch: Real, fake or meta tensors with the global batch's shapes.
        """
        try:
            self._find(batch)
        except Exception as error:  # noqa: BLE001  (raised, once the others know)
            raise self.session.settle("the preparation of a step", error) from error.__cause__

    def forward(self, batch: Any) -> Any:
        """The loss over the global batch, 0-d and equal on every rank.

        With a loss function that returns ``(loss, dict)``, that; the entries are detached.

        Args:
            batch: The global batch, or what `shard` returned.
        """
        own = self._autopar
        own.session.check_open()
        own.session.begin_call()
        try:
            grad = self._wants_grad()
            if grad:
                _check_pending(own.pending)
            sharded = isinstance(batch, ShardedBatch)
            step, tensors = self._find_for_part(batch.part) if sharded else self._find(batch)
            step.check_sound()
            if not step.has_run:
                self._check_alike(tensors, sharded)
        except Exception as error:  # noqa: BLE001  (raised, once the others know)
            raise own.session.settle("the check of the batch", error) from error.__cause__
        results = self._run(step, tensors, sharded)
        own.num_steps += grad or step.source.draws
        own.session.activity = ""
        return self._returned(step, results)

    def shard(self, part: Any) -> ShardedBatch:
        """Mark this rank's part of a batch: the samples `batch_slices` names, or None if none."""
        return ShardedBatch(part)

    def batch_slices(self, rank: int | None = None) -> dict[str, slice]:
        """Input path to the samples a rank reads, along the dim that counts them.

        Args:
            rank: Global number of the rank; this one by default.
        """
        step = self._last_step("say which samples a rank reads")
        return step.batch_slices(self.session.rank if rank is None else rank)

    def sampler(
        self, dataset: Any, *, shuffle: bool = False, seed: int = 0, drop_last: bool = True
    ) -> GlobalBatchSampler:
        """A batch sampler that yields this rank's indices of every global batch.

        Args:
            dataset: Anything with a length; its items are samples.
            shuffle: Whether each epoch has an order of its own (see ``set_epoch``).
            seed: Seed of that order; equal on every rank.
            drop_last: Whether to leave out a last batch that is not full.
        """
        step = self._last_step("deal out a dataset")
        slices = self.batch_slices()
        if len({(s.start, s.stop) for s in slices.values()}) != 1:
            raise BatchError(
                f"cannot deal out a dataset: on rank {self.session.rank} the plan takes other "
                f"samples of one input than of another ({slices}); read them by batch_slices()"
            )
        deal = Deal(
            num_items=len(dataset),
            batch_size=step.num_samples(),
            part=next(iter(slices.values())),
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        return GlobalBatchSampler(deal)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; an error before there is a plan."""
        self._need_plan("list parameters")
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As of any module; an error before there is a plan."""
        self._need_plan("list buffers")
        return super().named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Parameters as DTensors and buffers under the model's names, and the step count."""
        self._need_plan("save the state")
        return super().state_dict(*args, **kwargs)

    def get_extra_state(self) -> Tensor:
        """The step count, for ``state_dict``."""
        return torch.tensor(self._autopar.num_steps)

    def set_extra_state(self, state: Any) -> None:
        """Take the step count of a ``state_dict``."""
        self._autopar.num_steps = int(state)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy values into this rank's parameters and buffers.

        Args:
            state_dict: DTensors of any placements, or whole tensors, under the model's names; one
                name of a tied parameter is enough, and the step count may be absent.
            strict: Whether absent and unknown names are errors.
            assign: Must be False: the optimizer holds the parameters.

        Raises:
            RuntimeError: Names are absent or unknown, as of ``nn.Module.load_state_dict``.
        """
        if assign:
            raise UnsupportedError(
                "cannot assign a state: the optimizer holds the parameters; use assign=False"
            )
        own = self.state_dict(keep_vars=True)
        own.pop(EXTRA_STATE)
        given = {name: value for name, value in state_dict.items() if name != EXTRA_STATE}
        given_ids = {id(own[name]) for name in given if name in own}
        missing = [name for name, value in own.items() if id(value) not in given_ids]
        unexpected = [name for name in given if name not in own]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"cannot load the state: missing {missing[:5]}, unexpected {unexpected[:5]} (the "
                "first five of each); use strict=False to load what is there"
            )
        for name, value in given.items():
            if name in own:
                load_value(name, own[name], value)
        if EXTRA_STATE in state_dict:
            self.set_extra_state(state_dict[EXTRA_STATE])
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModule:
        probe = torch.empty(0, device=self.session.device)
        moved = fn(probe)
        if moved.dtype != probe.dtype or moved.device.type != probe.device.type:
            raise UnsupportedError(
                f"cannot move or cast a compiled model to {moved.device.type} {moved.dtype}: its "
                "plan was made for what it has; do that before autopar.compile"
            )
        return self

    def __deepcopy__(self, memo: Any) -> ParallelModule:
        raise UnsupportedError(
            "cannot copy a compiled model: its groups and steps belong to this one; copy the "
            "values of its state_dict"
        )

    def __getstate__(self) -> Any:
        raise UnsupportedError(
            "cannot copy or pickle a compiled model: its groups and steps belong to this process; "
            "save its state_dict, and its plan by plan.save()"
        )

    def _need_plan(self, what: str) -> None:
        if self._autopar.plan is None:
            raise UnsupportedError(
                f"cannot {what} before there is a plan: call parallel.prepare(batch), or pass "
                "batch to autopar.compile"
            )

    def _last_step(self, what: str) -> Step:
        self._need_plan(what)
        return next(reversed(self._autopar.steps.values()))

    def _wants_grad(self) -> bool:
        return torch.is_grad_enabled() and self.training

    def _mode(self) -> Hashable:
        own = self._autopar
        kind = own.session.device.type
        return (
            self._wants_grad(),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            tuple([shell.training for shell in own.shells.values()]),
            tuple([parameter.requires_grad for parameter in own.distinct.values()]),
        )

    def _find(self, batch: Any) -> tuple[Step, tuple[Tensor, ...]]:
        """The step for a global batch, compiled if it is new, and the batch's tensors."""
        own = self._autopar
        paths, tensors, structure = flatten_batch(batch)
        types = tuple([(t.shape, t.dtype) for t in tensors])
        key = StepKey(self._mode(), structure, types)
        step = own.steps.get(key)
        if step is None:
            step = self._compile(batch, paths)
            # The mode is read again: parameters, and so their flags, may just have come.
            key = StepKey(self._mode(), structure, types)
            own.steps[key] = step
            if len(own.steps) > MAX_STEPS:
                own.steps.popitem(last=False)
        own.steps.move_to_end(key)
        return step, tensors

    def _compile(self, batch: Any, paths: Sequence[str]) -> Step:
        own = self._autopar
        self._check_frozen()
        own.session.enter("the compilation of a step")
        request = StepRequest(
            batch=batch,
            grad=self._wants_grad(),
            training={path: shell.training for path, shell in own.shells.items()},
            trainable={name: p.requires_grad for name, p in own.distinct.items()},
        )
        source = own.compile_step(self, request)
        assert own.state is not None and own.groups is not None, "compile_step must adopt a plan"
        programs = source.microbatches or (source.program,)
        order = " ".join(dict.fromkeys(program.action_hash() for program in programs))
        own.session.agree_equal("orders of collectives", order, source.stage_number)
        return Step(source, own.state, own.groups, own.session.device, paths)

    def _check_frozen(self) -> None:
        """Refuse flags that only the ranks of one stage of a pipeline can see."""
        own = self._autopar
        if own.plan is None or len(own.plan.stages) == 1:
            return
        for name, trainable in own.trainable.items():
            if own.distinct[name].requires_grad != trainable:
                raise UnsupportedError(
                    f"cannot {'freeze' if trainable else 'unfreeze'} parameter {name!r} of a "
                    "compiled pipeline: the ranks of other stages do not have it; do that before "
                    "autopar.compile"
                )

    def _find_for_part(self, part: Any) -> tuple[Step, tuple[Tensor, ...]]:
        """The step for this rank's part of a batch; the same one on every rank."""
        own, mode = self._autopar, self._mode()
        steps = [(key, step) for key, step in own.steps.items() if key.mode == mode]
        if not steps:
            raise BatchError(
                "cannot run on a part of a batch: no step is compiled for this mode, and a part "
                "does not tell the whole; call parallel.prepare(batch) with the whole's shapes"
            )
        tensors: tuple[Tensor, ...] = ()
        problems = [step.problem_without_part() for _, step in steps]
        if part is not None:
            _, tensors, structure = flatten_batch(part)
            problems = [
                problem
                and (
                    step.problem_of_part(tensors)
                    if key.structure == structure
                    else "its structure is another"
                )
                for problem, (key, step) in zip(problems, steps, strict=True)
            ]
        fitting = [i for i, problem in enumerate(problems) if not problem]
        if len(steps) > 1:  # ranks could choose different ones: take what fits everywhere
            everyone = own.session.gather_objects("the choice of a step", fitting)
            fitting = [i for i in fitting if all(i in other for other in everyone)]
        if not fitting:
            raise BatchError(
                f"cannot run on rank {own.session.rank}'s part of a batch: "
                f"{problems[-1] or 'it fits no step that the parts of other ranks fit'}; pass the "
                "samples that parallel.batch_slices() names, or prepare(batch) another whole"
            )
        step = steps[fitting[-1]][1]
        reads = step.problem_without_part()
        return step, tensors if reads else step.no_samples()

    def _check_alike(self, tensors: Sequence[Tensor], sharded: bool) -> None:
        """Refuse global batches of the same shapes that differ between ranks, at a first step."""
        session = self.session
        digest = "" if sharded else values_digest((str(n), t) for n, t in enumerate(tensors))
        group = -1 - session.rank if sharded else 0
        session.agree_equal("global batches", digest, group, _SAME_BATCH)

    def _run(self, step: Step, tensors: Sequence[Tensor], sharded: bool) -> Results:
        session = self._autopar.session
        is_first = not step.has_run
        session.doing = step.doing
        try:
            own = self._autopar
            results = step.run(tensors, sharded, make_key(own.seed, own.num_steps))
        except Exception as error:
            action = step.action_of(error)
            failed = as_failure(session.settle(action, error), action, session.rank)
            if is_first:
                session.report("the first step", failed)
            raise failed from error
        if is_first:
            session.agree("the first step")
        return results

    def _returned(self, step: Step, results: Results) -> Any:
        own, loss = self._autopar, results.loss
        # Where no parameter gets a gradient on this rank, it may on another.
        is_stage = step.source.sharing is not None and self._wants_grad()
        if loss is not None and (results.gradients or is_stage):
            token = Token(step.targets, results.gradients)
            own.pending = weakref.ref(token)
            loss = attach(loss, token, own.anchor)
        return (loss, results.aux) if step.source.returns_dict else loss


def _check_pending(pending: weakref.ref[Token] | None) -> None:
    """Refuse a training step while the last one's gradients wait."""
    token = pending() if pending is not None else None
    if token is not None and token.gradients is not None:
        raise UnsupportedError(
            "cannot run a second training step: the loss of the last one waits for its backward; "
            "call loss.backward(), drop it with del loss, or run this step under torch.no_grad()"
        )
