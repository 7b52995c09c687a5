"""Process groups, and how ranks keep each other honest.

One `Session` per process: the default process group (made from torchrun's environment if there is
none), a gloo group for objects, a store for failures and signs of life, and the groups of every
mesh in use. A program's groups belong to nobody else, so closing them ends every rank that waits
in one of them.

What bounds a wait:

* ``PHASE_TIMEOUT_S``: an exchange after a phase (rank 0 may plan for long);
* ``STEP_TIMEOUT_S``: a collective of a step;
* a lost process ends its peers' collectives at once (the connection closes), and they name it
  within ``NAMING_S``;
* a rank that fails in a call and lives on gives the others ``SETTLE_S`` to fail alike, then closes
  its groups, that of exchanges too;
* a process that ends after a failure gives its groups ``ENDING_S`` to be freed;
* a rank that compiles a new step while another runs an old one (their batches differ) fails after
  ``SETTLE_S``.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh

import autopar.errors
from autopar.errors import AutoparError, BatchError, ClusterError, RuntimeFailure
from autopar.ir.sharding import Mesh
from autopar.runtime.module import AxisGroup

_c10d = torch.ops._c10d_functional

PHASE_TIMEOUT_S = 1800.0
STEP_TIMEOUT_S = 600.0
SETTLE_S = 10.0
BEAT_S = 1.0
NAMING_S = 15.0
ENDING_S = 5.0


@dataclass(frozen=True)
class MeshGroups:
    """The groups of one mesh.

    Attributes:
        mesh: The mesh.
        axes: Group of each mesh axis, for a program's collectives.
        active: Mesh axes of more than one rank (the first one if there are none): the axes of
            ``device_mesh``, in order.
        device_mesh: Mesh of the DTensors.
    """

    mesh: Mesh
    axes: tuple[AxisGroup, ...]
    active: tuple[int, ...]
    device_mesh: DeviceMesh


@dataclass(eq=False)
class MailGroups:
    """Two groups of all ranks, for what crosses meshes; the same ones for every program.

    Names, since a group that is held stays open when it is closed, and ranks that wait in it would
    not learn of it.

    Attributes:
        down: Name of the group of messages to later stages, and of results; ``up`` of that of
            messages to earlier ones.
        spoiled: Whether a step on them did not end: what it left behind would meet the next.
    """

    down: str
    up: str
    spoiled: bool = False

    @contextmanager
    def sound(self) -> Iterator[None]:
        """They are spoiled if what runs in this context does not end."""
        try:
            yield
        except BaseException:
            self.spoiled = True
            raise


@dataclass(frozen=True)
class StagePeers:
    """The ranks of every stage.

    Attributes:
        stage: This rank's stage; None where it is idle.
        first_ranks: Global number of the first rank of every stage.
        mail: The groups of all ranks.
    """

    stage: int | None
    first_ranks: tuple[int, ...]
    mail: MailGroups

    def rank_of(self, stage: int, place: int) -> int:
        """Global number of a rank, from its number on its stage."""
        return self.first_ranks[stage] + place


@dataclass(eq=False)
class Session:
    """This process among its peers.

    Attributes:
        rank: Global number of this process; ``world_size`` the number of processes.
        device: Where its tensors live.
        control: Gloo group of all ranks, for objects.
        store: Key-value store of all ranks.
        step_timeout_s: Longest wait for a collective of a step, in seconds.
        num_calls: Calls of compiled modules so far.
        activity: What this rank is doing, for the others to see; ``doing`` says where it is in it.
    """

    rank: int
    world_size: int
    device: torch.device
    control: Any
    store: Any
    step_timeout_s: float = STEP_TIMEOUT_S
    num_calls: int = 0
    activity: str = ""
    doing: Callable[[], str] = str
    _meshes: dict[tuple[Any, ...], MeshGroups] = field(default_factory=dict)
    _owned: dict[tuple[Any, ...], list[Any]] = field(default_factory=dict)
    _mail: MailGroups | None = None
    _epoch: int = 0
    _entered: int = 0
    _closed: str = ""

    def agree(self, phase: str, error: BaseException | None = None) -> None:
        """Exchange how a phase went; if a rank failed, raise its error on every rank.

        A rank that failed raises its own error; the others raise the lowest failed rank's, with
        that rank named in the message.

        Args:
            phase: What has just ended, for messages: ``capture``, ``plan`` ...
            error: What this rank failed with.
        """
        statuses = self._all_gather(phase, None if error is None else _describe(error))
        if error is not None:
            raise error
        for rank, status in enumerate(statuses):
            if status is not None:
                raise _rebuilt(status, rank, phase)

    def report(self, phase: str, error: Exception) -> None:
        """Tell ranks that may wait in `agree` of an error that this rank is about to raise."""
        with suppress(Exception):
            self.agree(phase, error)

    def agree_equal(
        self,
        what: str,
        digest: str,
        stage: int | None = 0,
        remedy: str = "give every rank the same model, batch, cluster and hints",
    ) -> None:
        """Raise on every rank unless all ranks of a stage have the same digest of ``what``.

        Raises:
            RuntimeFailure: They differ.
        """
        first: dict[int | None, tuple[int, str]] = {}
        for other, (own, found) in enumerate(self._all_gather(what, (stage, digest))):
            rank, expected = first.setdefault(own, (other, found))
            if found == expected:
                continue
            raise RuntimeFailure(
                f"cannot go on with different {what}: rank {rank} has {expected}, rank {other} has "
                f"{found}; {remedy}"
            )

    def broadcast_text(self, text: str | None) -> str:
        """The text of rank 0."""
        box = [text]
        if self.world_size > 1:
            self.check_open()
            with self._watched("the broadcast of rank 0's plan"):
                dist.broadcast_object_list(box, src=0, group=self.control)
        assert box[0] is not None
        return box[0]

    def gather_objects(self, what: str, value: Any) -> list[Any]:
        """Every rank's value, in rank order.

        Args:
            what: Name of the exchange, for messages.
            value: Anything that can be pickled.
        """
        return self._all_gather(what, value)

    def begin_call(self) -> None:
        """Note that a compiled module is called; ``activity`` says so until it is cleared."""
        self.num_calls += 1
        self.activity = f"run {self.num_calls}"

    def enter(self, what: str) -> None:
        """Wait until every rank has come here too.

        Args:
            what: What is entered: ranks that run something else at their same step are an error.

        Raises:
            BatchError: A rank runs a step it has compiled before, with this rank's step number.
        """
        if self.world_size == 1:
            return
        key, self._entered = f"enter/{self._entered}/", self._entered + 1
        self.store.set(f"{key}{self.rank}", what)
        self.activity = f"compile {self.num_calls}"
        start = time.monotonic()
        while time.monotonic() < start + PHASE_TIMEOUT_S:
            absent = [r for r in range(self.world_size) if not self.store.check([f"{key}{r}"])]
            if not absent:
                return
            time.sleep(min(self.beat_s, 0.01 + (time.monotonic() - start) / 10))
            if (failed := self._failed_of(absent, self._epoch)) is not None:
                raise self._failure(f"the start of {what}", *failed)
            if time.monotonic() < start + SETTLE_S:
                continue
            beats = self._beats()
            running = [r for r in absent if f" run {self.num_calls};" in beats[r]]
            if running:
                raise BatchError(
                    f"cannot start {what} on rank {self.rank}: rank {running[0]} runs a step it "
                    "has; give every rank the same global batch, or mark parts with parallel.shard"
                )
        raise RuntimeFailure(
            f"cannot start {what} on rank {self.rank}: ranks {absent[:8]} did not come within "
            f"{PHASE_TIMEOUT_S:.0f} s; see their output"
        )

    def _failed_of(self, ranks: Sequence[int], epoch: int) -> tuple[int, Any] | None:
        """The first of some ranks that has said that it failed, and what it said."""
        for rank in ranks:
            if self.store.check([f"failed/{epoch}/{rank}"]):
                return rank, json.loads(self.store.get(f"failed/{epoch}/{rank}"))
        return None

    def _failure(self, action: str, rank: int, status: Mapping[str, str]) -> RuntimeFailure:
        """The error for what could not end since another rank failed."""
        return RuntimeFailure(
            f"cannot finish {action} on rank {self.rank}: rank {rank} failed in "
            f"{status['action']}: {status['type']}: {status['message']}"
        )

    def groups(self, mesh: Mesh, first_rank: int = 0) -> MeshGroups:
        """Groups of a mesh, made at the first call and warmed up; every rank must call alike.

        Args:
            mesh: The mesh.
            first_rank: Global number of its first rank.
        """
        self.check_open()
        key = (mesh.names, mesh.sizes, first_rank)
        if key not in self._meshes:
            self._meshes[key], self._owned[key] = self._make_groups(mesh, first_rank)
            self._warm_up(self._owned[key])
        return self._meshes[key]

    def check_open(self) -> None:
        """Raise if a failed step has closed the groups.

        Raises:
            RuntimeFailure: It has.
        """
        if self._closed:
            raise RuntimeFailure(
                f"cannot run on rank {self.rank}: an earlier step failed ({self._closed}); start "
                "the processes again"
            )

    def settle(self, action: str, error: Exception) -> Exception:
        """The error to raise after a failed call; ends the other ranks' call if they run on.

        This rank's own error, or one that names the rank that was lost.

        Args:
            action: What this rank was doing.
            error: What it failed with.
        """
        self.activity = ""
        if self.world_size == 1:
            return error
        if _is_connection_error(error):
            return self._after_loss(action, error)
        status = {**_describe(error), "action": action, "entered": self._entered}
        try:
            self.store.set(f"failed/{self._epoch}/{self.rank}", json.dumps(status))
            alike = self._all_failed_as(status)
        except RuntimeError:  # the store is gone
            alike = False
        self._epoch += 1
        if not alike:
            self.close(str(error) or type(error).__name__, _tensors_of(error))
        return error

    def _all_failed_as(self, status: Mapping[str, Any]) -> bool:
        """Whether every rank fails at the same place as this one, soon."""
        keys = [f"failed/{self._epoch}/{rank}" for rank in range(self.world_size)]
        start = time.monotonic()
        while not self.store.check(keys):
            waited = time.monotonic() - start
            if waited > SETTLE_S:
                return False
            time.sleep(0.01 + waited / 10)
        found = (json.loads(self.store.get(key)) for key in keys)
        return all(other[what] == status[what] for other in found for what in ("action", "entered"))

    def close(self, reason: str, begun: Sequence[torch.Tensor] = ()) -> None:
        """Close the groups of all programs and exchanges: ranks that wait in them fail at once.

        Args:
            reason: What went wrong, for later calls.
            begun: What collectives that nobody will wait for may have made.
        """
        self._closed = self._closed or reason or "closed"
        owned, self._owned = self._owned, {}
        self._meshes.clear()
        groups = [group for groups in owned.values() for group in groups]
        owned.clear()
        control, self.control = self.control, None
        groups += [] if control is None else [control]
        del control
        # Freeing a group waits for its running collectives, which may themselves hang.
        thread = threading.Thread(target=_end, args=(groups, begun), daemon=True)
        thread.start()
        # A thread that is freeing a group when the interpreter ends would take the process down.
        atexit.register(thread.join, ENDING_S)

    def _after_loss(self, action: str, error: Exception) -> AutoparError:
        """The error for a collective that failed because of another rank."""
        epoch = self._epoch
        self._epoch += 1
        self.close(_first_line(error), _tensors_of(error))
        deadline = time.monotonic() + NAMING_S
        try:
            beats = self._beats()
            while time.monotonic() < deadline:
                failed = self._failed_of(range(self.world_size), epoch)
                if failed is not None:
                    return self._failure(action, *failed)
                time.sleep(3 * self.beat_s)
                lost = [r for r, beat in enumerate(self._beats()) if beat == beats[r]]
                lost = [r for r in lost if r != self.rank]
                if lost:
                    doing = beats[lost[0]].partition(";")[2]
                    return _lost(lost, action, self.rank, error, doing)
        except RuntimeError:
            return _lost([], action, self.rank, error)
        return _lost(None, action, self.rank, error)

    @property
    def beat_s(self) -> float:
        """Seconds between two signs of life of a rank."""
        return max(BEAT_S, self.world_size / 1000)

    def _beats(self) -> list[str]:
        """Every rank's last sign of life: a count, its activity, and where it is in it."""
        return [self.store.get(f"beat/{rank}").decode() for rank in range(self.world_size)]

    def _all_gather(self, what: str, value: Any) -> list[Any]:
        if self.world_size == 1:
            return [value]
        self.check_open()
        values: list[Any] = [None] * self.world_size
        with self._watched(f"the exchange after {what}"):
            dist.all_gather_object(values, value, group=self.control)
        return values

    def _watched(self, action: str) -> _Watched:
        return _Watched(self, action)

    def _make_groups(self, mesh: Mesh, first_rank: int) -> tuple[MeshGroups, list[Any]]:
        ranks = torch.arange(first_rank, first_rank + mesh.num_ranks).reshape(mesh.sizes or (1,))
        active = tuple(a for a, size in enumerate(mesh.sizes) if size > 1)
        axes, owned = [AxisGroup("", 1)] * len(mesh.sizes), []
        for axis in active:
            group = self._axis_group(ranks, axis)
            axes[axis] = AxisGroup("" if group is None else group.group_name, mesh.sizes[axis])
            owned += [] if group is None else [group]
        active = active or (0,)
        names = tuple(mesh.names[a] for a in active) if mesh.names else ("all",)
        grid = ranks.reshape([ranks.shape[a] for a in active])
        device_mesh = DeviceMesh(self.device.type, grid, mesh_dim_names=names)
        return MeshGroups(mesh, tuple(axes), active, device_mesh), owned

    def mail(self) -> MailGroups:
        """The groups of all ranks; every rank must call alike, between steps.

        They are made at the first call. After a step that did not end on some rank, all ranks make
        others: receives that it left posted would take the messages of the next.
        """
        self.check_open()
        mail = self._mail
        if mail is None:
            mail = self._mail = MailGroups(*self._make_mail())
        elif any(self.gather_objects("the last step", mail.spoiled)):
            _destroy(self._owned.pop(_MAIL))
            mail.down, mail.up = self._make_mail()
            mail.spoiled = False
        return mail

    def _make_mail(self) -> tuple[str, str]:
        timeout = _delta(self.step_timeout_s)
        made = [dist.new_group(timeout=timeout, backend=self._backend) for _ in range(2)]
        self._owned[_MAIL] = list(made)
        self._warm_up(made)
        down, up = (group.group_name for group in made)
        return down, up

    @property
    def _backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    def _axis_group(self, ranks: torch.Tensor, axis: int) -> Any:
        """This rank's group along an axis, None off the mesh; all ranks make all, in order."""
        own = None
        lines = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
        for line in sorted(lines):
            timeout = _delta(self.step_timeout_s)
            group = dist.new_group(line, timeout=timeout, backend=self._backend)
            own = group if self.rank in line else own
        return own

    def _warm_up(self, owned: Sequence[Any]) -> None:
        """Connect the groups before the first step, so that it isn't what finds them broken."""
        with self._watched("the warm-up of the process groups"):
            for group in owned:
                ones = torch.ones(1, device=self.device)
                dist.all_reduce(ones, group=group)
                assert ones.item() == dist.get_world_size(group)


_MAIL = ("mail",)
"""Where a session owns its `MailGroups`."""


def results_group(mesh: DeviceMesh | None) -> Any:
    """Open group of all ranks for values that lie on a mesh; None where it holds all ranks.

    Args:
        mesh: Where the values lie; None where this rank has none of them.
    """
    session = this_session()
    if session is None or session._mail is None:
        return None
    if mesh is not None and mesh.size() == session.world_size:
        return None
    return group_named(session._mail.down)


def this_session() -> Session | None:
    """The session of this process, if it has compiled anything."""
    return _SESSIONS.get(dist.group.WORLD) if dist.is_initialized() else None


def group_named(name: Any) -> Any:
    """The open process group of a name."""
    return _resolve_process_group(name)


@dataclass
class _Watched:
    """Turns the failure of an exchange into an error that names the rank."""

    session: Session
    action: str

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and _is_connection_error(error):
            raise self.session.settle(self.action, error) from error


_SESSIONS: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()
"""The session of each default process group: a process has one at a time."""


def open_session(
    device_type: str, num_ranks: int, step_timeout_s: float = STEP_TIMEOUT_S
) -> Session:
    """The session of this process; every rank must call it.

    Args:
        device_type: ``cpu`` or ``cuda``.
        num_ranks: Number of ranks the cluster has.
        step_timeout_s: Longest wait for a collective of a step, in seconds, in groups made from
            now on.

    Raises:
        ClusterError: Another number of processes runs.
    """
    _ensure_process_group(device_type, num_ranks)
    world_size = dist.get_world_size()
    default = dist.group.WORLD
    session = _SESSIONS.get(default)
    if session is None:
        session = _SESSIONS[default] = _new_session(device_type)
    session.step_timeout_s = step_timeout_s
    failed = None
    if world_size != num_ranks:
        failed = ClusterError(
            f"cannot run on a cluster of {num_ranks} ranks: {world_size} "
            f"process{'es are' if world_size != 1 else ' is'} running; start {num_ranks} with "
            f"torchrun --nproc-per-node, or describe the cluster that is there"
        )
    session.agree("reading the cluster", failed)
    return session


def _new_session(device_type: str) -> Session:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device(device_type)
    if device_type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank % max(1, torch.cuda.device_count())))
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    control = None
    if world_size > 1:
        control = dist.new_group(backend="gloo", timeout=_delta(PHASE_TIMEOUT_S))
    default_store: Any = dist.distributed_c10d._get_default_store()
    store = PrefixStore("autopar", default_store)
    session = Session(rank, world_size, device, control, store)
    if world_size > 1:
        # A store answers one caller at a time: the heart has a connection of its own.
        _start_heart(session, PrefixStore("autopar", default_store.clone()))
        store.wait([f"beat/{r}" for r in range(world_size)], _delta(PHASE_TIMEOUT_S))
    return session


def _ensure_process_group(device_type: str, num_ranks: int) -> None:
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if device_type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend)
        return
    if num_ranks == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return
    raise ClusterError(
        f"cannot run on a cluster of {num_ranks} ranks: 1 process is running and it was not "
        f"started by torchrun; start {num_ranks} with torchrun --nproc-per-node={num_ranks}"
    )


def _start_heart(session: Session, store: Any) -> None:
    """Write this rank's sign of life until the process ends."""
    stop = threading.Event()
    beat_s, rank = session.beat_s, session.rank

    def beat() -> None:
        count = 0
        while True:
            try:
                store.set(f"beat/{rank}", f"{count} {session.activity};{session.doing()}")
            except RuntimeError:  # the store has gone, and everyone will see that
                return
            count += 1
            if stop.wait(beat_s):
                return

    thread = threading.Thread(target=beat, name="autopar-heart", daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join(timeout=2 * beat_s)

    atexit.register(end)


def _tensors_of(error: BaseException) -> list[torch.Tensor]:
    """Tensors of the calls that an error went through."""
    found, trace = [], error.__traceback__
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            items = tuple(value.values()) if isinstance(value, dict) else value
            several = items if isinstance(items, (list, tuple)) else (items,)
            found += [item for item in several if type(item) is torch.Tensor]
        trace = trace.tb_next
    return found


def _end(groups: list[Any], begun: Sequence[torch.Tensor]) -> None:
    """Free groups, then take back collectives, of whose end torch would speak at the very end."""
    _destroy(groups)
    for tensor in begun:
        with suppress(Exception):
            _c10d.wait_tensor(tensor)


def _destroy(groups: list[Any]) -> None:
    while groups:
        group = groups.pop()
        dist.destroy_process_group(group)
        del group


def _delta(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def _describe(error: BaseException) -> dict[str, str]:
    return {"type": type(error).__name__, "message": str(error) or repr(error)}


def _rebuilt(status: Mapping[str, str], rank: int, phase: str) -> AutoparError:
    """Another rank's error, as this rank raises it."""
    kind = getattr(autopar.errors, status["type"], None)
    if isinstance(kind, type) and issubclass(kind, AutoparError):
        return kind(f"{status['message']} (on rank {rank})")
    return RuntimeFailure(
        f"cannot finish {phase}: rank {rank} failed: {status['type']}: {status['message']}"
    )


def as_failure(error: Exception, action: str, rank: int) -> AutoparError:
    """The error as one of ours, which says what failed on which rank."""
    if isinstance(error, AutoparError):
        return error
    return RuntimeFailure(
        f"cannot run {action} on rank {rank}: {type(error).__name__}: {_first_line(error)}"
    )


def _lost(
    ranks: list[int] | None, action: str, rank: int, error: Exception, doing: str = ""
) -> RuntimeFailure:
    if ranks is None:
        who = "another rank closed its connections"
    elif not ranks:
        who = "the store of the process group is gone, and with it the rank that kept it"
    else:
        named = ", ".join(str(r) for r in ranks[:8])
        who = f"rank{'s' if len(ranks) > 1 else ''} {named} gave no sign of life"
        who += f" since {doing}" if doing else ""
    return RuntimeFailure(
        f"cannot finish {action} on rank {rank}: {who} ({_first_line(error)}); see that rank's "
        "output, and start the processes again"
    )


def _first_line(error: BaseException) -> str:
    """The error in a line, without gloo's source locations and greetings."""
    line = (str(error) or repr(error)).strip().split("\n")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically")[0]


_LOSS_SIGNS = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "Timed out waiting")


def _is_connection_error(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(s in str(error) for s in _LOSS_SIGNS)
