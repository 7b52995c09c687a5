"""Programs written by hand: a linear layer with a squared loss, under several shardings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.ir.graph import Phase, Ref, TensorType
from autopar.ir.sharding import SUM, WHOLE, Mesh, Sharding, Split, local_shape
from autopar.lower.builder import Builder
from autopar.lower.program import Program, ProgramInput
from autopar.options import ADAMW
from autopar.plan.records import Memory, ParameterPlan, Plan, Prediction, SearchReport, StagePlan
from autopar.runtime.executor import ParallelModule, StepRequest
from autopar.runtime.groups import open_session
from autopar.runtime.params import shard_model
from autopar.runtime.step import StepSource

ROWS, WIDTH, OUT = 6, 5, 7


class Linear(nn.Module):
    """``sum((x @ weight + gate * x.mean()) ** 2)`` without the gate: one matrix, tied twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(WIDTH, OUT))
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("calls", torch.zeros(()))
        self.tied = nn.Module()
        self.tied.weight = self.weight

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x @ self.weight).square().sum()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {"x": torch.randn(ROWS, WIDTH, generator=generator)}


def split(dim: int, size: int, ranks: int) -> Split:
    return Split(dim, 1, -(-size // ranks))


def rows_of(mesh: Mesh) -> Sharding:
    """Rows of the batch split over the last axis."""
    last = split(0, ROWS, mesh.sizes[-1])
    return (*(WHOLE,) * (len(mesh.sizes) - 1), last)


def data_parallel(
    mesh: Mesh, coordinates: tuple[int, ...], stored: Sharding, grad: bool
) -> Program:
    """Rows of the batch split over the last axis, weight stored whole or split by its rows."""
    axis = len(mesh.sizes) - 1
    ranks = mesh.sizes[axis]
    rows = rows_of(mesh)
    x_type, w_type = TensorType((ROWS, WIDTH), "float32"), TensorType((WIDTH, OUT), "float32")
    scalar = TensorType((), "float32")
    everything = (WHOLE,) * len(mesh.sizes)

    def source(
        build: Builder, name: str, kind: str, of: TensorType, sharding: Sharding
    ) -> ProgramInput:
        local = TensorType(local_shape(of.shape, sharding, coordinates), of.dtype)
        build.add_input(name, local)
        return ProgramInput(
            name=name,
            kind=kind,
            target=name,
            global_type=of,
            sharding=sharding,
            local_type=local,
        )

    build = Builder(mesh, coordinates)
    build.origin = "made"
    inputs = (
        source(build, "weight", "parameter", w_type, stored),
        source(build, "x", "input", x_type, rows),
        source(build, "calls", "buffer", scalar, everything),
    )
    x, w = Ref("x"), Ref("weight")
    local_rows = build.types[x].shape[0]
    chunk = -(-WIDTH // ranks)
    if isinstance(stored[axis], Split):
        w = build.narrow(build.all_gather(build.pad(w, 0, chunk), axis), 0, 0, WIDTH)
    y_type = TensorType((local_rows, OUT), "float32")
    y = build.call("aten.mm.default", (x, w), y_type)
    squares = build.call("aten.mul.Tensor", (y, y), y_type)
    loss = build.all_reduce(build.call("aten.sum.default", (squares,), scalar), (axis,))
    calls = build.call("aten.add.Tensor", (Ref("calls"), 1.0), scalar)
    gradients = {}
    if grad:
        build.phase = Phase.BACKWARD
        dy = build.call("aten.mul.Tensor", (y, 2.0), y_type)
        xt = build.permute(x, (1, 0))
        dw = build.call("aten.mm.default", (xt, dy), w_type)
        if isinstance(stored[axis], Split):
            dw = build.reduce_scatter(build.pad(dw, 0, ranks * chunk), axis)
            own = local_shape(w_type.shape, stored, coordinates)[0]
            gradients["weight"] = build.narrow(dw, 0, 0, own)
        else:
            gradients["weight"] = build.all_reduce(dw, (axis,))
    return Program(
        mesh=mesh,
        coordinates=coordinates,
        inputs=inputs,
        instructions=build.instructions,
        loss=loss,
        aux=(("y_sum", build_aux(loss)),),
        gradients=gradients,
        mutations={"calls": calls},
    )


def build_aux(loss: Ref) -> Ref:
    """The loss once more: a result that shares storage with another."""
    return loss


def plan_of(mesh: Mesh, stored: Sharding) -> Plan:
    w_type = TensorType((WIDTH, OUT), "float32")
    stage = StagePlan(
        mesh=mesh,
        inputs={"x": rows_of(mesh)},
        parameters=(ParameterPlan(name="weight", type=w_type, stored=stored),),
        nodes=(),
        kept={},
    )
    return Plan(
        model="Linear",
        fingerprint="",
        cluster="local",
        cluster_ranks=mesh.num_ranks,
        batch={"x": TensorType((ROWS, WIDTH), "float32")},
        stages=(stage,),
        memory_limit_bytes=1,
        prediction=Prediction(
            step_s=1.0,
            compute_s=1.0,
            communication_s=0.0,
            exposed_s=0.0,
            optimizer_s=0.0,
            memory=Memory(),
        ),
        search=SearchReport(status="optimal", objective_s=1.0, bound_s=1.0, gap=0.0, seconds=0.0),
    )


def parallel_linear(
    sizes: tuple[int, ...],
    *,
    zero: bool = False,
    model: nn.Module | None = None,
    returns_dict: bool = False,
    prepare: bool = True,
    device_type: str = "cpu",
) -> ParallelModule:
    """The model on this pool's ranks, run by the handmade programs."""
    mesh = Mesh(tuple("abc"[: len(sizes)]), sizes)
    session = open_session(device_type, mesh.num_ranks)
    axis = len(sizes) - 1
    weight = split(0, WIDTH, sizes[-1]) if zero else WHOLE
    stored = tuple(weight if a == axis else WHOLE for a in range(len(sizes)))
    model = model or Linear()
    coordinates = mesh.coordinates(session.rank)

    def compile_step(parallel: ParallelModule, request: StepRequest) -> StepSource:
        groups = session.groups(mesh)
        plan = plan_of(mesh, stored)
        if not request.trainable:
            state = shard_model(
                model,
                stored={"weight": stored},
                aliases={"tied.weight": "weight"},
                groups=groups,
                coordinates=coordinates,
                device=session.device,
            )
            parallel.adopt(plan, groups, state, optimizer=ADAMW, seed=0)
        return StepSource(
            program=data_parallel(mesh, coordinates, stored, request.grad),
            plan=plan,
            constants={},
            returns_dict=returns_dict,
            batch_dims={"x": 0},
        )

    parallel = ParallelModule(model, session, compile_step)
    if prepare:
        parallel.prepare(batch())
    return parallel


__all__ = ["SUM", "Linear", "batch", "data_parallel", "parallel_linear", "plan_of"]
