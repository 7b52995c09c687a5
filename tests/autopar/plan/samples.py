"""Plans to test with: random ones, and one of a Llama on 8 x 8 ranks."""

from __future__ import annotations

from hypothesis import strategies as st

from autopar.ir.graph import DTYPE_BYTES, TensorType
from autopar.ir.sharding import SUM, WHOLE, AxisSharding, Mesh, Partial, Sharding, Split
from autopar.plan.records import (
    AllWays,
    CollectivePlan,
    Memory,
    NodePlan,
    ParameterPlan,
    Plan,
    Prediction,
    SearchReport,
    StagePlan,
    Transfer,
)

names = st.text(min_size=1, max_size=8)
counts = st.integers(0, 1 << 50)
seconds = st.floats(allow_nan=False)
types = st.builds(
    TensorType,
    st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple),
    st.sampled_from(sorted(DTYPE_BYTES)),
)
axis_shardings: st.SearchStrategy[AxisSharding] = st.one_of(
    st.just(WHOLE),
    st.sampled_from([Partial("sum"), Partial("max"), Partial("min")]),
    st.builds(
        Split,
        st.integers(0, 4),
        st.integers(1, 99),
        st.integers(1, 1 << 40),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
)


def _shardings(axes: int) -> st.SearchStrategy[Sharding]:
    return st.lists(axis_shardings, min_size=axes, max_size=axes).map(tuple)


def _named(values: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(values, max_size=3, unique_by=lambda v: v.name).map(tuple)  # type: ignore[attr-defined]


@st.composite
def stages(draw: st.DrawFn) -> StagePlan:
    axes = draw(st.integers(0, 3))
    one = _shardings(axes)
    many = st.lists(one, max_size=3).map(tuple)
    parameters = st.builds(
        ParameterPlan, name=names, type=types, stored=one, used=many, trainable=st.booleans()
    )
    return StagePlan(
        mesh=Mesh(
            tuple(f"axis{i}" for i in range(axes)),
            tuple(draw(st.integers(1, 64)) for _ in range(axes)),
            tuple(draw(st.integers(0, 2)) for _ in range(axes)),
            tuple(draw(st.sampled_from(["", "dp", "tp"])) for _ in range(axes)),
        ),
        first_rank=draw(st.integers(0, 99)),
        inputs=draw(st.dictionaries(names, one, max_size=3)),
        parameters=draw(_named(parameters)),
        nodes=draw(_named(st.builds(NodePlan, name=names, operands=many, outputs=many))),
        kept=draw(st.dictionaries(names, many, max_size=3)),
        recomputed=draw(st.lists(names, max_size=3).map(tuple)),
        copy_room_bytes=draw(st.none() | counts),
    )


predictions = st.builds(
    Prediction,
    step_s=seconds,
    compute_s=seconds,
    communication_s=seconds,
    exposed_s=seconds,
    optimizer_s=seconds,
    memory=st.builds(Memory, parameters_bytes=counts, saved_bytes=counts),
    collectives=st.lists(
        st.builds(
            CollectivePlan,
            kind=names,
            axis=names,
            purpose=names,
            count=counts,
            tensor_bytes=counts,
            predicted_s=seconds,
            module=names,
        ),
        max_size=2,
    ).map(tuple),
)
plans = st.builds(
    Plan,
    model=names,
    fingerprint=names,
    cluster=names,
    cluster_ranks=counts,
    batch=st.dictionaries(names, types, max_size=2),
    hints=st.lists(names, max_size=2).map(tuple),
    stages=st.lists(stages(), max_size=2).map(tuple),
    transfers=st.lists(
        st.builds(
            Transfer,
            value=names,
            source=counts,
            target=counts,
            sharding=_shardings(1),
            arrives=st.one_of(st.none(), _shardings(2), _shardings(0)),
        ),
        max_size=2,
    ).map(tuple),
    microbatches=counts,
    notes=st.lists(names, max_size=2).map(tuple),
    memory_limit_bytes=counts,
    prediction=predictions,
    search=st.builds(
        SearchReport,
        status=names,
        objective_s=seconds,
        bound_s=seconds,
        gap=seconds,
        seconds=seconds,
        meshes=st.lists(st.tuples(names, st.one_of(st.none(), seconds)), max_size=3).map(tuple),
    ),
    modules=st.dictionaries(names, names, max_size=4),
)


def _split(dim: int, size: int, ranks: int, outer: int = 1) -> Split:
    return Split(dim, outer, size // outer // ranks)


def llama(layers: int = 32, nodes_per_module: int = 30) -> Plan:
    """A plan like those of Llama-3-8B on 8 hosts of 8: dp with ZeRO-3 by tp with sequence."""
    ffn, hidden, vocab = 14336, 4096, 128256
    batch = _split(0, 16, 8)
    rows = _split(0, 16 * 8192, 8)
    x: Sharding = (rows, Split(0, 16, 1024))
    y: Sharding = (rows, _split(1, ffn, 8))
    partial: Sharding = (rows, SUM)
    parameters: list[ParameterPlan] = []
    nodes: list[NodePlan] = []
    modules: dict[str, str] = {}

    def weight(name: str, shape: tuple[int, int], dim: int) -> None:
        used: Sharding = (WHOLE, _split(dim, shape[dim], 8))
        stored: Sharding = (_split(1 - dim, shape[1 - dim], 8), _split(dim, shape[dim], 8))
        kind = TensorType(shape, "float32")
        parameters.append(ParameterPlan(name=name, type=kind, stored=stored, used=(used,)))

    def norm(name: str) -> None:
        kind = TensorType((hidden,), "float32")
        whole = (WHOLE, WHOLE)
        parameters.append(ParameterPlan(name=name, type=kind, stored=whole, used=(whole,)))

    def node(op: str, module: str, operands: tuple[Sharding, ...], out: Sharding) -> None:
        name = f"{op}_{len(nodes)}"
        nodes.append(NodePlan(name=name, operands=operands, outputs=(out,)))
        modules[name] = module

    def linear(module: str, shape: tuple[int, int], dim: int) -> None:
        weight(f"{module}.weight", shape, dim)
        for _ in range(nodes_per_module):
            node("view", module, (x,), x)
        used = (WHOLE, _split(1 - dim, shape[dim], 8))
        node("mm", module, (x if dim == 0 else y, used), y if dim == 0 else partial)

    weight("model.embed_tokens.weight", (vocab, hidden), 0)
    for i in range(layers):
        at = f"model.layers.{i}"
        norm(f"{at}.input_layernorm.weight")
        for part, out in (("q", 4096), ("k", 1024), ("v", 1024)):
            linear(f"{at}.self_attn.{part}_proj", (out, hidden), 0)
        spread: Sharding = (batch, _split(1, 32, 8))
        node("attention", f"{at}.self_attn", (spread, spread, spread), spread)
        linear(f"{at}.self_attn.o_proj", (hidden, hidden), 1)
        norm(f"{at}.post_attention_layernorm.weight")
        for part in ("gate", "up"):
            linear(f"{at}.mlp.{part}_proj", (ffn, hidden), 0)
        linear(f"{at}.mlp.down_proj", (hidden, ffn), 1)
    norm("model.norm.weight")
    weight("lm_head.weight", (vocab, hidden), 0)
    collectives = []
    for i in range(layers):
        for part, kind, axis, purpose, count, size in (
            ("self_attn.q_proj", "all_gather", "intra0", "activations", 2, 2 * 16 * 8192 * 4096),
            (
                "self_attn.o_proj",
                "reduce_scatter",
                "intra0",
                "activations",
                2,
                2 * 16 * 8192 * 4096,
            ),
            ("mlp.up_proj", "all_gather", "intra0", "activations", 2, 2 * 16 * 8192 * 4096),
            ("mlp.down_proj", "reduce_scatter", "intra0", "activations", 2, 2 * 16 * 8192 * 4096),
            ("mlp.up_proj", "all_gather", "node0", "parameters", 4, 4 * 4096 * 14336),
            ("mlp.up_proj", "reduce_scatter", "node0", "gradients", 2, 2 * 4096 * 14336),
        ):
            collectives.append(
                CollectivePlan(
                    kind=kind,
                    axis=axis,
                    purpose=purpose,
                    count=count,
                    tensor_bytes=size,
                    predicted_s=size / 4e11,
                    module=f"model.layers.{i}.{part}",
                )
            )
    ids: Sharding = (batch, WHOLE)
    return Plan(
        model="LlamaForCausalLM",
        fingerprint="5f0c1e0fa1b2c3d4",
        cluster="h100 x 8",
        cluster_ranks=64,
        batch={
            "input_ids": TensorType((16, 8192), "int64"),
            "labels": TensorType((16, 8192), "int64"),
        },
        hints=("hint.degrees(tp=8)",),
        stages=(
            StagePlan(
                mesh=Mesh(("node0", "intra0"), (8, 8), (1, 0), ("", "tp")),
                inputs={"input_ids": ids, "labels": (batch, _split(1, 8192, 8))},
                parameters=tuple(parameters),
                nodes=tuple(nodes),
                kept={name.name: name.outputs for name in nodes[:: nodes_per_module // 2 + 1]},
            ),
        ),
        notes=(
            "dim 1 of 'expand_3' is kept whole: its size 8 does not follow a factor",
            "no time is hidden yet: every collective is waited for where it is needed",
        ),
        memory_limit_bytes=64 * 10**9,
        prediction=Prediction(
            step_s=1.4321,
            compute_s=1.181,
            communication_s=0.242,
            exposed_s=0.242,
            optimizer_s=0.0091,
            memory=Memory(
                parameters_bytes=502_000_000,
                gradients_bytes=502_000_000,
                optimizer_bytes=1_004_000_000,
                saved_bytes=36_100_000_000,
                transient_bytes=2_690_000_000,
                inputs_bytes=262_144,
                buffers_bytes=256,
            ),
            collectives=tuple(collectives),
        ),
        search=SearchReport(
            status="optimal",
            objective_s=1.4321,
            bound_s=1.4319,
            gap=0.00014,
            seconds=3.21,
            capture_s=8.73,
            meshes=(("node0=8 x intra0=8", 1.4321), ("node0=64", 1.91), ("intra0=8 x 8", None)),
            num_nodes=len(nodes),
            num_classes=93,
            num_strategies=2210,
            num_variables=9127,
            all_ways=AllWays(bound_s=1.02, gap=0.288, tried=3, excluded=40, estimated=12),
        ),
        modules=modules,
    )
