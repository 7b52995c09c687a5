"""Long-lived gloo processes for tests, one pool a world size.

A worker runs functions by import path, so a test says ``pool.run(function, *args)`` with a module
level function that takes part in collectives on every rank; the results come back in rank order.
"""

from __future__ import annotations

import faulthandler
import atexit
import importlib
import io
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0


class WorkerError(AssertionError):
    """A function failed on one or more ranks.

    Attributes:
        errors: Rank to the exception it raised (or its text, if it cannot be pickled).
    """

    def __init__(self, message: str, errors: dict[int, Any]) -> None:
        super().__init__(message)
        self.errors = errors


class Pool:
    """``world_size`` processes in one gloo group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._start()

    def run(
        self, function: Callable[..., Any] | str, *args: Any, timeout_s: float = 120.0
    ) -> list[Any]:
        """Every rank's result of ``function(*args)``.

        Raises:
            WorkerError: It failed on a rank.
            TimeoutError: It took too long; the processes are killed and start anew at the next
                call.
        """
        outcomes = self.outcomes(function, *args, timeout_s=timeout_s)
        errors = {rank: found for rank, (ok, found, _) in enumerate(outcomes) if not ok}
        if errors:
            text = "\n".join(f"rank {r}:\n{outcomes[r][2]}" for r in errors)
            raise WorkerError(f"failed on ranks {sorted(errors)}\n{text}", errors)
        return [found for _, found, _ in outcomes]

    def outcomes(
        self, function: Callable[..., Any] | str, *args: Any, timeout_s: float = 120.0
    ) -> list[tuple[bool, Any, str]]:
        """For every rank: whether it succeeded, its result or exception, and its traceback."""
        if not self._processes:
            self._start()
        name = function if isinstance(function, str) else _path_of(function)
        for connection in self._connections:
            connection.send_bytes(_packed((name, args)))
        deadline = time.monotonic() + timeout_s
        found: list[tuple[bool, Any, str]] = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise TimeoutError(f"{name} did not end on rank {rank} within {timeout_s:.0f} s")
            try:
                found.append(_unpacked(connection.recv_bytes()))
            except EOFError:
                found.append((False, "the process ended", "the process ended"))
        if any(process.poll() is not None for process in self._processes):
            self.close()
        return found

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="autopar_pool_")
        folder = self._folder.name
        address = str(Path(folder) / "socket")
        # The store lives here, as torchrun's does in its agent: it outlives every rank.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        env = {
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "POOL_FOLDER": folder,
            "POOL_PORT": str(self._store.port),
            "POOL_WORLD_SIZE": str(self.world_size),
        }
        with Listener(address, "AF_UNIX", backlog=self.world_size) as listener:
            for rank in range(self.world_size):
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__], env={**env, "POOL_RANK": str(rank)}
                    )
                )
            by_rank = {}
            for _ in range(self.world_size):
                connection = _accept(listener, self._processes)
                by_rank[connection.recv()] = connection
        self._connections = [by_rank[rank] for rank in range(self.world_size)]


def _accept(listener: Listener, processes: Sequence[subprocess.Popen[bytes]]) -> Connection:
    accepted: list[Connection] = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept()), daemon=True)
    thread.start()
    thread.join(START_TIMEOUT_S)
    if not accepted:
        codes = [process.poll() for process in processes]
        raise TimeoutError(f"the pool's processes did not start: exit codes {codes}")
    return accepted[0]


_POOLS: dict[int, Pool] = {}


def get_pool(world_size: int) -> Pool:
    """This process's pool of that size, started at the first call."""
    if world_size not in _POOLS:
        _POOLS[world_size] = Pool(world_size)
        atexit.register(_POOLS[world_size].close)
    return _POOLS[world_size]


def _path_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def run_torchrun(
    script: str, *args: str, world_size: int, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run a script's text under a fresh torchrun; its output and exit code.

    Args:
        script: Python source.
        args: Arguments of the script.
        world_size: Number of processes.
        timeout_s: Limit, after which it is killed and `subprocess.TimeoutExpired` raised.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(script)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world_size}", file.name, *args]
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
    finally:
        Path(file.name).unlink()


def _packed(value: Any) -> bytes:
    """Bytes of any object; plain pickle fails for tensors of some dtypes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _worker() -> None:
    faulthandler.enable()
    rank, world_size = int(os.environ["POOL_RANK"]), int(os.environ["POOL_WORLD_SIZE"])
    folder = Path(os.environ["POOL_FOLDER"])
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", int(os.environ["POOL_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    connection = Client(str(folder / "socket"), "AF_UNIX")
    connection.send(rank)
    while True:
        try:
            name, args = _unpacked(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        connection.send_bytes(_outcome(name, args))


def _outcome(name: str, args: tuple[Any, ...]) -> bytes:
    module, _, attribute = name.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
        return _packed((True, function(*args), ""))
    except BaseException as error:  # noqa: BLE001  (handed to the test)
        text = traceback.format_exc()
        try:
            _unpacked(_packed(error))
        except Exception:  # noqa: BLE001  (pickling runs anything)
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return _packed((False, error, text))


if __name__ == "__main__":
    _worker()
