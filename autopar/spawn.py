"""Worker processes for the command line: started by torchrun's launcher, watched by their parent.

Parent and workers share a folder: the parent writes ``job.json``, workers append events to
``events.jsonl`` and leave their results and errors there. The library itself spawns nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autopar import errors
from autopar.errors import AutoparError, RuntimeFailure

Event = Mapping[str, Any]
POLL_S = 0.1


def run_workers(
    module: str,
    folder: Path,
    num_processes: int,
    *,
    on_event: Callable[[Event], None] = lambda event: None,
    timeout_s: float = 600.0,
) -> None:
    """Run ``python -m module folder`` on several processes and wait for their end.

    Args:
        module: Module with a main that calls `work`.
        folder: Where job, events, results and errors lie.
        num_processes: Processes; one is started without a launcher.
        on_event: Called with everything a worker tells.
        timeout_s: Longest wait for the end, in seconds.

    Raises:
        AutoparError: What a worker raised, or that workers failed or took too long.
    """
    command = [sys.executable, "-m"]
    if num_processes > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
        command += ["-m"]
    (folder / "events.jsonl").touch()
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [*command, module, str(folder)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
        )
        try:
            _watch(process, folder, on_event, timeout_s)
        finally:
            _end(process)
    if process.returncode != 0:
        raise _failure(folder, process.returncode)


def _environment() -> dict[str, str]:
    """The parent's, with one thread a process and the same places to import from."""
    places = [place for place in sys.path if place]
    launch = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {key: value for key, value in os.environ.items() if key not in launch}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}


def _watch(
    process: subprocess.Popen[bytes],
    folder: Path,
    on_event: Callable[[Event], None],
    timeout_s: float,
) -> None:
    deadline = time.monotonic() + timeout_s
    with (folder / "events.jsonl").open() as events:
        while True:
            ended = process.poll() is not None
            while line := events.readline():
                on_event(json.loads(line))
            if ended:
                return
            if time.monotonic() > deadline:
                raise RuntimeFailure(
                    f"cannot wait longer than {timeout_s:.0f} s for the worker processes: they "
                    f"have not ended; their log is '{folder / 'log.txt'}'"
                )
            time.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that no worker outlives its parent."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _failure(folder: Path, code: int) -> AutoparError:
    """The error to raise for workers that failed: the first rank's own, if it is one of ours."""
    found = [json.loads(p.read_text()) for p in sorted(folder.glob("error-*.json"))]
    for error in found:
        kind = getattr(errors, error["type"], None)
        if isinstance(kind, type) and issubclass(kind, AutoparError):
            return kind(error["message"])
    if found:
        error = found[0]
        what = f"rank {error['rank']} failed with {error['type']}: {error['message']}"
        return RuntimeFailure(f"cannot finish the worker processes: {what}\n{error['trace']}")
    tail = (folder / "log.txt").read_text(errors="replace").strip().splitlines()[-5:]
    return RuntimeFailure(
        f"cannot finish the worker processes: they ended with code {code}\n" + "\n".join(tail)
    )


# The workers' side.


class Job:
    """What a worker is to do, and how it tells its parent.

    Attributes:
        folder: Shared with the parent.
        spec: What the parent wrote.
        rank: Of this process.
        world: Number of processes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec: Mapping[str, Any] = json.loads((folder / "job.json").read_text())
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))

    def tell(self, **event: Any) -> None:
        """Tell the parent something; rank 0 speaks for all."""
        if self.rank == 0:
            with (self.folder / "events.jsonl").open("a") as events:
                events.write(json.dumps(event) + "\n")


@contextmanager
def work(folder: str) -> Iterator[Job]:
    """A worker's job; what goes wrong in it is left for the parent."""
    job = Job(Path(folder))
    try:
        yield job
    except Exception as error:
        words = {"rank": job.rank, "type": type(error).__name__, "message": str(error)}
        words["trace"] = traceback.format_exc()
        (job.folder / f"error-{job.rank}.json").write_text(json.dumps(words))
        raise
