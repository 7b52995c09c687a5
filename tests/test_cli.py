"""The command line, as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from autopar import cli, hint
from autopar.demo import Demo, run_demo, sparkline
from autopar.errors import (
    AutoparError,
    ClusterError,
    HintError,
    InfeasibleError,
    PlanError,
    RuntimeFailure,
    UnsupportedError,
)
from autopar.inputs import load_cluster, load_subject, parse_hints
from autopar.ir.graph import TensorType
from autopar.plan.records import Plan
from autopar.plan.text import render
from autopar.spawn import run_workers
from autopar.verify import Comparison, Report, difference, report_view
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
    for command in ("demo", "plan", "verify", "explain", "diff", "profile"):
        assert f" {command} " in found.stdout


def test_the_documents_name_every_command_and_error() -> None:
    commands = (ROOT / "docs/cli.md").read_text()
    for command in cli.app.registered_commands:
        assert command.callback is not None
        assert f"`autopar {command.callback.__name__}" in commands
    said = (ROOT / "docs/errors.md").read_text()
    for error in AutoparError.__subclasses__():
        assert f"| `{error.__name__}` |" in said


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


def test_explain_prints_the_closed_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = llama(4)
    plan.save(tmp_path / "plan.json")
    cli.explain(tmp_path / "plan.json", formula=True)
    found = capsys.readouterr().out
    kinds = {use.kind for use in plan.prediction.collectives}
    assert kinds
    assert ("ring all-reduce [s] =" in found) == ("all_reduce" in kinds)
    assert ("ring all-gather [s] =" in found) == bool(kinds & {"all_gather", "reduce_scatter"})
    use = plan.prediction.collectives[0]
    size = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))[use.axis]
    assert f"here: n = {size}, B = {use.tensor_bytes / use.count:.4g} on average" in found
    assert "model states, ZeRO 3 [bytes] = " in found
    assert "1F1B" not in found


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
    assert parse_hints(["offload=layers.*:parameters", "offload=parameters"]) == (
        hint.Offload("layers.*", "parameters"),
        hint.Offload("*", "parameters"),
    )
    assert parse_hints(["recompute=*.mlp", "keep=h.0", "per_microbatch=*.bn*"]) == (
        hint.recompute("*.mlp"),
        hint.keep("h.0"),
        hint.per_microbatch("*.bn*"),
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
        ("dp", "write dp=VALUE"),
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
    assert load_cluster("h100", 4).num_devices == 32
    for name in ("local:x", "local:0", "h1000", "none.yaml"):
        with pytest.raises(ClusterError):
            load_cluster(name)


@pytest.mark.parametrize(
    ("name", "nodes", "what"),
    [
        ("h100:0", None, "'0' is no number of nodes; give one of at least 1"),
        ("h100:", None, "'' is no number of nodes"),
        ("h100", 0, "the node count is 0"),
        ("h100", -2, "the node count is -2"),
        ("h10", None, "'h100'"),
        ("h100:2", 4, "with 4 nodes: write h100:4"),
        ("local", 4, "write local:4"),
        ("cluster.yaml", 2, "the file says how many devices there are"),
    ],
)
def test_a_cluster_that_cannot_be_is_named(name: str, nodes: int | None, what: str) -> None:
    with pytest.raises(ClusterError) as raised:
        load_cluster(name, nodes)
    assert what in str(raised.value)


@pytest.mark.parametrize(("batch", "seq"), [(0, 8), (-1, 8), (8, 0)])
def test_sizes_that_cannot_be_are_refused(batch: int, seq: int) -> None:
    with pytest.raises(AutoparError, match=r"cannot use --(batch|seq) (0|-1) for 'x.json'"):
        load_subject("x.json", batch=batch, seq=seq)


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


def test_a_plan_is_no_picture(model: str, tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match="add --pareto for a plot"):
        cli.plan(model, "local:2", output=tmp_path / "plan.svg")


def test_a_size_that_the_function_does_not_take_is_named(model: str) -> None:
    with pytest.raises(AutoparError, match="build takes no argument 'seq'"):
        load_subject(model, seq=4)


def test_a_transformers_config_becomes_a_model_on_meta(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = json.loads((ROOT / "examples/configs/llama-3-8b.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"num_hidden_layers": 2}))
    subject = load_subject(str(path), batch=8, seq=128)
    assert type(subject.model).__name__ == "LlamaForCausalLM"
    assert {p.device.type for p in subject.model.parameters()} == {"meta"}
    assert subject.batch["input_ids"].shape == (8, 128)
    assert subject.notes == ("in bf16, as the config says; --dtype fp32 plans full precision",)
    with pytest.raises(AutoparError, match="give --batch"):
        load_subject(str(path))
    path.write_text('{"model_type": "no such"}')
    with pytest.raises(AutoparError, match="cannot read transformers config"):
        load_subject(str(path), batch=8, seq=128)


SMALL_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


@pytest.mark.slow
def test_a_config_is_planned_and_its_capture_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from autopar import api

    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    config, first, second = (tmp_path / f"{name}.json" for name in ("config", "a", "b"))
    config.write_text(json.dumps(SMALL_LLAMA))
    cli.plan(str(config), "local:2", batch=8, seq=32, hint=["dp=2"], output=first)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    monkeypatch.setattr(api, "capture_step", None)
    cli.plan(str(config), "h100", nodes=1, batch=8, seq=32, hint=["dp=8"], output=second)
    a, b = Plan.load(first), Plan.load(second)
    assert a.fingerprint == b.fingerprint
    assert (a.cluster_ranks, b.cluster_ranks) == (2, 8)
    assert "LlamaForCausalLM on h100 x1, 8 ranks" in capsys.readouterr().out
    with pytest.raises(TypeError):
        cli.plan(str(config), "h100", nodes=1, batch=16, seq=32)


@pytest.mark.slow
def test_a_cluster_too_small_says_the_least_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("AUTOPAR_CACHE", "off")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL_LLAMA))
    with pytest.raises(InfeasibleError, match=r"cannot fit .* needs \d+ kB in the "):
        cli.plan(str(config), "local:2", batch=8, seq=32, hint=["memory_limit=100KiB"])


def test_help_waits_for_no_torch() -> None:
    code = (
        "import sys; import autopar.cli; import autopar; autopar.hint; "
        "assert 'torch' not in sys.modules; from autopar import plan; import autopar.plan.text; "
        "assert autopar.plan is plan and callable(autopar.compile)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr


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


# Whole commands on real processes.


def test_plan_prints_and_saves(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    cli.plan(model, "local:4", batch=8, hint=["dp=4"], output=path)
    printed = capsys.readouterr().out
    assert "Sequential on local:4, 4 ranks: predicted step" in printed
    assert "mesh   dp=4" in printed
    assert f"saved to {path}" in printed
    assert Plan.load(path).batch == {"0": TensorType((8, 16), "float32")}


@pytest.mark.slow
def test_verify_compares_with_one_process(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    cli.plan(model, "local:2", hint=["tp=2"], output=path)
    capsys.readouterr()
    cli.verify(model, "local:2", plan=path, steps=2)
    printed = capsys.readouterr().out
    for kind in ("loss", "gradient", "gradient norm", "parameter"):
        assert any(line.startswith(kind) and "equal" in line for line in printed.splitlines())
    assert "2 processes and one, 2 steps: the same" in printed


@pytest.mark.large
def test_verify_joins_what_stages_hold_and_idle_ranks_do_not(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.verify(model, "local:3", hint=["pp=2", "ranks=2:1"], steps=2)
    printed = capsys.readouterr().out
    assert "3 processes and one, 2 steps: the same" in printed
    assert any(line.split()[:3] == ["parameter", "equal", "4"] for line in printed.splitlines())


def test_plan_takes_a_precision(model: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    cli.plan(model, "local:2", precision="bf16", hint=["dp=2"], output=path)
    found = Plan.load(path).prediction.collectives
    assert {one.purpose for one in found} >= {"gradients"}
    with pytest.raises(UnsupportedError, match="did you mean 'bf16'"):
        cli.plan(model, "local:2", precision="bf61")


@pytest.mark.large
def test_verify_compares_in_a_precision(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.verify(model, "local:2", precision="bf16", steps=2)
    assert "2 processes and one, 2 steps: the same" in capsys.readouterr().out


@pytest.mark.large
def test_verify_raises_what_the_ranks_raised(model: str) -> None:
    with pytest.raises(HintError, match="cannot lay degrees tp=3"):
        cli.verify(model, "local:2", hint=["tp=3"], steps=1)


@pytest.mark.slow
def test_the_demonstration_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_demo(Demo(steps=4), Console(width=100))
    assert outcome.passed
    assert outcome.many.parameters.keys() == outcome.one.parameters.keys()
    assert len(outcome.one.losses) == 4
    assert outcome.one.losses[-1] < outcome.one.losses[0]
    printed = capsys.readouterr().out
    assert "equal up to floating-point order" in printed
    assert "2 processes" in printed


@pytest.mark.slow
def test_the_training_example_runs() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    found = subprocess.run(
        [*launch, "--nproc-per-node=2", "examples/train_gpt2.py", "--steps", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr
    assert "GPT2LMHeadModel on local:2" in found.stdout
    assert "step    0  loss 5." in found.stdout


@pytest.mark.large
def test_the_planning_example_runs(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = subprocess.run(
        [sys.executable, "examples/plan_llama.py", "-o", str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert found.returncode == 0, found.stderr
    plan = Plan.load(path)
    assert plan.cluster_ranks == 64
    assert plan.prediction.memory.total_bytes <= plan.memory_limit_bytes


# Pieces of what is printed.


def test_a_report_names_what_differs() -> None:
    one = Comparison(kind="loss", name="step 1", difference=0.0, allowed=1e-5)
    bad = [
        Comparison(kind="gradient", name=f"layers.{i}.w", difference=1.0, allowed=1e-5)
        for i in range(8)
    ]
    report = Report(comparisons=(one, *bad), num_processes=2, steps=1)
    assert not report.passed
    text = render(report_view(report))
    assert "DIFFERENT" in text
    assert "different: gradient layers.0-7.w" in text
    assert "NOT the same" in text


def test_an_absent_gradient_equals_zero_only() -> None:
    assert difference(None, torch.zeros(3)) == 0.0
    assert difference(None, torch.ones(3)) == float("inf")
    assert difference(torch.ones(3), torch.ones(4)) == float("inf")
    assert difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) == 0.5
    nan = torch.tensor([float("nan")])
    compared = Comparison(kind="loss", name="", difference=difference(nan, nan), allowed=1.0)
    assert not compared.passed


def test_a_curve_fits_a_line() -> None:
    assert sparkline((3.0, 2.0, 1.0)) == "█▅▁"
    assert len(sparkline(tuple(map(float, range(1000))), width=40)) == 40
    assert sparkline((1.0, 1.0)) == "▁▁"
