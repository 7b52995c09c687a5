"""The command line, as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autopar import cli, hint
from autopar.errors import AutoparError, ClusterError, HintError, PlanError, RuntimeFailure
from autopar.inputs import load_cluster, load_subject, parse_hints
from autopar.spawn import run_workers
from tests.autopar.plan.samples import llama

ROOT = Path(__file__).parents[1]

MODEL = """\
import torch
from torch import nn


def build(batch=8):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    return model, torch.randn(batch, 16), lambda model, x: model(x).square().mean()
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autopar.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "small.py"
    path.write_text(MODEL)
    return f"{path}:build"


def test_help_names_every_command() -> None:
    found = run("--help")
    assert found.returncode == 0
    for command in ("demo", "plan", "verify", "explain", "diff"):
        assert f" {command} " in found.stdout


def test_an_error_is_one_line_and_code_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["autopar", "explain", str(tmp_path / "none.json")])
    monkeypatch.delenv("AUTOPAR_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("error: cannot read plan '")
    assert found.err.count("\n") == 1
    monkeypatch.setenv("AUTOPAR_TRACEBACK", "1")
    with pytest.raises(PlanError):
        cli.main()


def test_explain_prints_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama(4).save(tmp_path / "plan.json")
    cli.explain(tmp_path / "plan.json", "layers.3.mlp")
    assert "model.layers.3.mlp of LlamaForCausalLM" in capsys.readouterr().out


def test_diff_tells_plans_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = llama(1)
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    plan.save(a)
    replace(plan, model="Other").save(b)
    cli.diff(a, a)
    assert "the plans are the same" in capsys.readouterr().out
    with pytest.raises(cli.typer.Exit) as raised:
        cli.diff(a, b)
    assert raised.value.exit_code == 1
    assert "Other" in capsys.readouterr().out


# What people name.


def test_hints_are_read() -> None:
    assert parse_hints([]) == ()
    assert parse_hints(["dp=2", "zero=3", "memory_limit=2GiB"]) == (
        hint.degrees(dp=2, zero=3),
        hint.memory_limit("2GiB"),
    )
    assert parse_hints(["shard=*.q:0:tp", "replicate=*.norm*", "microbatches=2"]) == (
        hint.shard("*.q", 0, "tp"),
        hint.replicate("*.norm*"),
        hint.microbatches(2),
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("dq=2", "did you mean 'dp'?"),
        ("dp", "write name=value"),
        ("dp=two", "'two' is no number"),
        ("shard=w", "write shard=PATTERN:DIM:AXIS"),
        ("xxxxx=1", "there are dp, tp,"),
    ],
)
def test_a_hint_that_is_none_is_named(text: str, what: str) -> None:
    with pytest.raises(HintError) as raised:
        parse_hints([text])
    assert f"cannot read hint '{text}'" in str(raised.value)
    assert what in str(raised.value)


def test_clusters_are_read() -> None:
    assert load_cluster("local:3").num_devices == 3
    assert load_cluster("h100:2").num_devices == 16
    assert load_cluster("h100").num_devices == 8
    for name in ("local:x", "local:0", "h1000", "none.yaml"):
        with pytest.raises(ClusterError):
            load_cluster(name)


def test_a_model_is_built_by_its_function(model: str) -> None:
    subject = load_subject(model, batch=4)
    assert subject.batch.shape == (4, 16)
    assert subject.loss is not None
    assert subject.loss(subject.model, subject.batch).shape == ()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model", "it is neither pkg.module:build nor a transformers config.json"),
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("nothing.py:build", "no file 'nothing.py'"),
        ("json:nothing", "'json' has no function 'nothing'"),
        ("platform:system", "it returned str; return (model, batch)"),
    ],
)
def test_a_model_that_is_none_is_named(name: str, what: str) -> None:
    with pytest.raises(AutoparError) as raised:
        load_subject(name)
    assert what in str(raised.value)


def test_a_size_that_the_function_does_not_take_is_named(model: str) -> None:
    with pytest.raises(AutoparError, match="build takes no argument 'seq'"):
        load_subject(model, seq=4)


def test_a_transformers_config_becomes_a_model_on_meta(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = json.loads((ROOT / "examples/configs/llama-3-8b.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"num_hidden_layers": 2, "attention_dropout": 0.1}))
    subject = load_subject(str(path), batch=8, seq=128)
    assert type(subject.model).__name__ == "LlamaForCausalLM"
    assert {p.device.type for p in subject.model.parameters()} == {"meta"}
    assert subject.batch["input_ids"].shape == (8, 128)
    assert subject.notes == (
        "dropout is not supported yet and was set to 0 (the config has attention_dropout=0.1)",
    )
    with pytest.raises(AutoparError, match="give --batch"):
        load_subject(str(path))
    path.write_text('{"model_type": "no such"}')
    with pytest.raises(AutoparError, match="cannot read transformers config"):
        load_subject(str(path), batch=8, seq=128)


# Workers.

WORKER = """\
import sys
from autopar.errors import HintError
from autopar.spawn import work
with work(sys.argv[1]) as job:
    job.tell(step=1)
    what = job.spec["what"]
    if what == "ours":
        raise HintError("cannot do it")
    if what == "theirs":
        raise ZeroDivisionError("by zero")
    if what == "slow":
        import time
        time.sleep(60)
    if what == "die":
        import os
        os._exit(3)
"""


def _work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, count: int = 1) -> list[int]:
    (tmp_path / "a_worker.py").write_text(WORKER)
    (tmp_path / "job.json").write_text(json.dumps({"what": what}))
    monkeypatch.syspath_prepend(str(tmp_path))
    told: list[int] = []
    timeout_s = 8.0 if what == "slow" else 120.0
    run_workers(
        "a_worker", tmp_path, count, on_event=lambda e: told.append(e["step"]), timeout_s=timeout_s
    )
    return told


@pytest.mark.parametrize("count", [1, 2])
def test_workers_tell_their_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    assert _work(tmp_path, monkeypatch, "end", count) == [1]


def test_an_error_of_a_worker_is_the_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HintError, match=r"^cannot do it$"):
        _work(tmp_path, monkeypatch, "ours", 2)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("theirs", "rank 0 failed with ZeroDivisionError: by zero"),
        ("die", "they ended with code 3"),
        ("slow", "longer than 8 s"),
    ],
)
def test_a_failed_worker_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, says: str
) -> None:
    with pytest.raises(RuntimeFailure, match=says):
        _work(tmp_path, monkeypatch, what)
