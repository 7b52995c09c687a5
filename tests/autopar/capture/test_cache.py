"""Stored captures: equal to those that were made, whatever happens to the files."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.capture import Captured, cache, capture_step
from autopar.capture.cache import RememberedCaptures, cache_folder, decode, encode, stored_capture
from autopar.capture.step import fingerprint


class Net(nn.Module):
    """Tied, with a buffer that is written, a constant, a mask and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.tensor([1.0, float("inf"), -0.5, 2.0])[:2].nan_to_num(posinf=3.0)
        hidden = self.norm(self.embed(x).flatten(0, 1)) * self.scale
        return self.head(hidden).float().logsumexp(-1).mean() + steps.sum()


def _capture() -> Captured:
    torch.manual_seed(0)
    return capture_step(Net(), torch.zeros(6, 4, dtype=torch.int64), grad=True)


def _never() -> Captured:
    raise AssertionError("the stored capture was not found")


def _same(found: Captured, made: Captured) -> bool:
    equal = (found.graph, found.inputs) == (made.graph, made.inputs)
    values = all(torch.equal(found.constants[n], v) for n, v in made.constants.items())
    kept = found.fingerprint == made.fingerprint == fingerprint(found.graph, found.constants)
    return equal and values and kept and found.constants.keys() == made.constants.keys()


def test_a_capture_comes_back_as_it_was() -> None:
    made = _capture()
    assert made.graph.mutations and made.graph.aliases
    assert _same(decode(encode(made)), made)


def test_constants_of_every_dtype_come_back() -> None:
    made = _capture()
    values = {
        str(dtype): torch.tensor([[0, 1, 1]]).to(dtype)
        for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64)
    }
    values |= {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3)}
    made = Captured(
        graph=made.graph, constants=values, inputs=made.inputs, fingerprint=made.fingerprint
    )
    found = decode(encode(made)).constants
    for name, value in values.items():
        assert torch.equal(found[name], value) and found[name].dtype == value.dtype


def test_the_second_of_a_recipe_is_not_captured(tmp_path: Path) -> None:
    made = stored_capture("a", _capture, tmp_path / "new")
    assert _same(stored_capture("a", _never, tmp_path / "new"), made)
    with pytest.raises(AssertionError, match="not found"):
        stored_capture("b", _never, tmp_path / "new")
    assert len(list((tmp_path / "new").iterdir())) == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other", "binary", "folder"])
def test_a_damaged_file_is_ignored_and_written_again(tmp_path: Path, damage: str) -> None:
    stored_capture("a", _capture, tmp_path)
    (path,) = tmp_path.glob("*.capture")
    content = path.read_bytes()
    middle = len(content) // 2
    damaged = {
        "flip": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "cut": content[:middle],
        "empty": b"",
        "other": b"autopar capture 0\n" + content,
        "binary": os.urandom(5000),
    }
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(damaged[damage])
    calls: list[int] = []

    def make() -> Captured:
        calls.append(1)
        return _capture()

    stored_capture("a", make, tmp_path)
    stored_capture("a", make, tmp_path)
    # A folder in its place cannot be replaced: captured every time, and no error.
    assert len(calls) == (2 if damage == "folder" else 1)
    assert not list(tmp_path.glob("*.new"))


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert _same(stored_capture("a", _capture, tmp_path / "file" / "in"), _capture())


def test_what_was_not_used_for_longest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _capture()
    for number, recipe in enumerate("abc"):
        stored_capture(recipe, lambda: made, tmp_path)
        for path in tmp_path.iterdir():
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100 * (3 - number)))
    stored_capture("a", _never, tmp_path)
    size = next(tmp_path.iterdir()).stat().st_size
    monkeypatch.setattr(cache, "MOST_BYTES", int(2.5 * size))
    stored_capture("d", lambda: made, tmp_path)
    stored_capture("a", _never, tmp_path)
    stored_capture("d", _never, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def _write(folder: str, times: int) -> None:
    made = _capture()
    path = Path(folder) / f"{cache._key('a')}.capture"
    for _ in range(times):
        cache._store(made, path)


@pytest.mark.slow
def test_readers_see_whole_files_while_two_processes_write(tmp_path: Path) -> None:
    made = stored_capture("a", _capture, tmp_path)
    path = tmp_path / f"{cache._key('a')}.capture"
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_write, args=(str(tmp_path), 100)) for _ in range(2)]
    for writer in writers:
        writer.start()
    reads = 0
    while any(writer.is_alive() for writer in writers) or reads < 10:
        found = cache._load(path)
        assert found is not None and _same(found, made)
        reads += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/autopar")
    assert cache_folder({}) == Path.home() / ".cache" / "autopar"
    assert cache_folder({"AUTOPAR_CACHE": "/own", "XDG_CACHE_HOME": "/x"}) == Path("/own")
    assert cache_folder({"AUTOPAR_CACHE": "off"}) is None
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_folder({}) == Path.home() / "Library" / "Caches" / "autopar"


# In memory.


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x)
    return found


CHANGES: dict[str, Callable[[Net], object]] = {
    "a frozen parameter": lambda net: net.embed.weight.requires_grad_(False),
    "evaluation": lambda net: net.norm.eval(),
    "a plain attribute": lambda net: setattr(net, "scale", 3.0),
    "another module": lambda net: setattr(net, "norm", nn.BatchNorm1d(8)),
    "another parameter": lambda net: setattr(net.head, "weight", nn.Parameter(torch.ones(11, 8))),
    "a hook": lambda net: net.head.register_forward_hook(lambda m, i, o: o * 2),
    "another dtype": lambda net: net.double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_captured_again(change: str) -> None:
    net, batch = Net(), torch.zeros(6, 4, dtype=torch.int64)
    captures = RememberedCaptures()

    def make() -> Captured:
        return capture_step(net, batch, _loss, grad=True)

    first = captures.get(net, batch, _loss, make)
    assert captures.get(net, batch, _loss, _never) is first
    assert captures.get(net, batch.clone(), _loss, _never) is first
    CHANGES[change](net)
    second = captures.get(net, batch, _loss, make)
    assert second is not first
    assert captures.get(net, batch, _loss, _never) is second


def test_other_batches_losses_and_models_are_captured() -> None:
    net, batch = Net(), torch.zeros(6, 4, dtype=torch.int64)
    captures, made = RememberedCaptures(), _capture()
    calls: list[int] = []

    def make() -> Captured:
        calls.append(1)
        return made

    factor = 2.0
    captures.get(net, batch, None, make)
    captures.get(net, batch[:3], None, make)
    captures.get(net, batch, _loss, make)
    captures.get(Net(), batch, None, make)
    for _ in range(2):
        captures.get(net, batch, lambda m, x: m(x) * factor, make)
    assert len(calls) == 6


def test_few_captures_are_remembered() -> None:
    captures, made = RememberedCaptures(most=2), _capture()
    batch = torch.zeros(6, 4, dtype=torch.int64)
    nets = [Net() for _ in range(3)]
    for net in nets:
        captures.get(net, batch, None, lambda: made)
    captures.get(nets[2], batch, None, _never)
    with pytest.raises(AssertionError, match="not found"):
        captures.get(nets[0], batch, None, _never)
    del nets[2], net
    captures.get(nets[1], batch, None, _never)
    assert len(captures._kept) == 1
