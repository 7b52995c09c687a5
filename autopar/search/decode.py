"""From a solution of the intra-op program back to the plan of a stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir.alias import through
from autopar.ir.graph import (
    INPUT,
    PARAMETER,
    SOURCE_OPS,
    Ref,
)
from autopar.ir.sharding import (
    Sharding,
    text,
)
from autopar.plan.records import NodePlan, ParameterPlan, StagePlan
from autopar.rules.strategies import Strategy
from autopar.search.analysis import Analysis
from autopar.search.build import Built
from autopar.search.layouts import Home
from autopar.search.problem import (
    Shares,
    Solution,
)


def decode(built: Built, analysis: Analysis, solution: Solution) -> StagePlan:
    """The stage that a solution stands for."""
    picked, states = _picked(built, analysis, solution)
    recomputed = {
        name
        for names, share in zip(built.reruns, solution.rerun_shares, strict=True)
        for name in names[: math.ceil(share * len(names) - 1e-6)]
    }
    kept: dict[str, tuple[Sharding, ...]] = {}
    offloaded: set[str] = set()
    for index, (group, layouts) in enumerate(zip(built.roots, built.layouts, strict=True)):
        layout = solution.kept[index]
        if layout is None:
            continue
        shares = solution.kept_shares.get(index, ((layout, 1.0),))
        leanest = built.problem.values[index].kept_bytes
        left = [ref for ref in group if ref.node not in recomputed]
        if built.problem.values[index].homes:
            first = built.space.home_order([ref.node for ref in left])
            rank = {name: (not picked[name].on_host, at) for at, name in enumerate(first)}
            left.sort(key=lambda ref: rank[ref.node])
        for ref, chosen in zip(left, dealt(shares, leanest, len(left)), strict=True):
            kept[str(ref)] = _held(layouts[chosen], picked[ref.node])
        order = [ref for ref in built.space.leave_order(group) if ref in left]
        for chosen, share in solution.away_shares.get(index, ()):
            own = [str(ref) for ref in order if kept[str(ref)] == (layouts[chosen],)]
            offloaded.update(own[: math.ceil(share * len(group) - 1e-6)])
    added_up = _added_up(built, analysis, solution, picked)
    graph = analysis.graph
    for cast, owner in analysis.casts.items() if built.mesh.time_axis is not None else ():
        value, strategy = str(Ref(cast)), picked[cast]
        if picked[owner].on_host:
            kept.setdefault(value, () if strategy.on_host else strategy.outputs)
            if strategy.on_host and not strategy.again and not kept[value]:
                offloaded.add(value)
    used = _used(built, analysis, picked)
    parameters, inputs, nodes = [], {}, []
    for node in graph.nodes:
        if node.op == PARAMETER:
            parameters.append(
                ParameterPlan(
                    name=node.target,
                    type=node.outputs[0],
                    stored=picked[node.name].outputs[0],
                    used=used.get(node.name, ()),
                    trainable=node.target in graph.gradients,
                    state_on_host=node.target in graph.gradients
                    and (node.name in states or picked[node.name].on_host),
                    on_host=picked[node.name].on_host,
                )
            )
        elif node.op == INPUT:
            inputs[node.target] = picked[node.name].outputs[0]
        elif node.name in picked and node.op not in SOURCE_OPS:
            strategy = picked[node.name]
            nodes.append(
                NodePlan(name=node.name, operands=strategy.operands, outputs=strategy.outputs)
            )
    homes = built.space.restrictions.homes
    if homes is not None:
        parameters = [_at(p, homes.get(p.name)) for p in parameters]
        names = {node.target: node.name for node in graph.sources(PARAMETER)}
        at_home = {names[p.name] for p in parameters if p.on_host}
        if built.mesh.time_axis is not None:
            at_home |= {cast for cast, owner in analysis.casts.items() if owner in at_home}
        kept |= dict.fromkeys(at_home & kept.keys(), ())
    return StagePlan(
        mesh=built.mesh,
        inputs=inputs,
        parameters=tuple(parameters),
        nodes=tuple(nodes),
        kept=kept,
        recomputed=tuple(node.name for node in graph.nodes if node.name in recomputed),
        forgotten=built.space.recompute.forgotten(recomputed),
        offloaded=tuple(value for value in kept if value in offloaded),
        added_up=added_up,
    )


def solved_seconds(built: Built, analysis: Analysis, solution: Solution) -> Mapping[str, float]:
    """Seconds of every node that is not a source, under what most of its class choose."""
    found: dict[str, float] = {}
    for entry, choice in zip(built.entries, solution.choice, strict=True):
        for number, own in zip(entry.classes, entry.choices[choice], strict=True):
            made = built.classes[number]
            if made.node.op in SOURCE_OPS:
                continue
            strategy, types = made.strategies[own], analysis.operand_types(made.node)
            rule = analysis.rules[made.node.name]
            each_s = built.cost.seconds(made.node, rule, types, strategy.operands, strategy.outputs)
            found.update(dict.fromkeys(made.members, each_s))
    return found


def _at(parameter: ParameterPlan, there: ParameterPlan | None) -> ParameterPlan:
    """A parameter that exists, where it is: at home in host memory, its state, or neither."""
    return replace(
        parameter,
        on_host=there is not None and there.on_host,
        state_on_host=parameter.trainable and there is not None and there.state_on_host,
    )


def _picked(
    built: Built, analysis: Analysis, solution: Solution
) -> tuple[dict[str, Strategy], set[str]]:
    """Strategy of every node, and the parameters whose state alone is in host memory."""
    picked: dict[str, Strategy] = {}
    states: set[str] = set()
    # Casts wait in host memory as far as what they cast is at home there.
    order = sorted(
        range(len(built.entries)),
        key=lambda index: built.problem.nodes[index].name in analysis.casts,
    )
    for index in order:
        entry, choice = built.entries[index], solution.choice[index]
        shares = solution.choice_shares.get(index, ((choice, 1.0),))
        first = built.classes[entry.classes[0]].strategies
        leanest = [
            -1.0 if first[own[0]].on_host else size
            for own, size in zip(
                entry.choices, built.problem.nodes[index].resident_bytes, strict=True
            )
        ]
        for place, number in enumerate(entry.classes):
            members = built.classes[number].members
            if built.problem.nodes[index].host_bytes:
                members = built.space.home_order(members)
            stay = {
                name
                for name in members
                if name in analysis.casts and not picked[analysis.casts[name]].on_host
            }
            members = tuple(sorted(members, key=stay.__contains__))
            chosen_by = dealt(shares, leanest, len(members))
            for name, chosen in zip(members, chosen_by, strict=True):
                own = built.classes[number].strategies[entry.choices[chosen][place]]
                picked[name] = replace(own, on_host=False, again=False) if name in stay else own
            for chosen, share in solution.state_shares.get(index, ()):
                moved = [n for n, c in zip(members, chosen_by, strict=True) if c == chosen]
                states.update(moved[: math.ceil(share * len(members) - 1e-6)])
    return picked, states


def _held(layout: Sharding | Home, maker: Strategy) -> tuple[Sharding, ...]:
    """Where a value is kept on the device; nowhere if it comes from its home again."""
    if isinstance(layout, Home):
        return () if maker.on_host else (layout.sharding,)
    return (layout,)


def _added_up(
    built: Built, analysis: Analysis, solution: Solution, picked: Mapping[str, Strategy]
) -> dict[str, Sharding]:
    """Where the terms of microbatches are added up: in host memory for parameters at home there."""
    graph, found = analysis.graph, {}
    nodes = {node.target: node.name for node in graph.sources(PARAMETER)}
    home = {
        analysis.root(ref).root
        for name, ref in graph.gradients.items()
        if picked[nodes[name]].on_host
    }
    for index, shares in solution.added_shares.items():
        layouts = built.layouts[index]
        leanest = built.problem.values[index].kept_bytes
        group = sorted(built.roots[index], key=lambda ref: ref not in home)
        for ref, chosen in zip(group, dealt(shares, leanest, len(group)), strict=True):
            layout = layouts[chosen]
            found[str(ref)] = layout.sharding if isinstance(layout, Home) else layout
    return found


def dealt(shares: Shares, size: Sequence[float], count: int) -> list[int]:
    """What each of ``count`` members chooses, in order: the leanest first, rounded up.

    Args:
        shares: Choices and their shares.
        size: Bytes of every choice.
        count: Number of members.
    """
    found: list[int] = []
    for choice, share in sorted(shares, key=lambda item: size[item[0]]):
        found += [choice] * math.ceil(share * count - 1e-6)
    return found[:count] + found[-1:] * (count - len(found))


def _used(
    built: Built, analysis: Analysis, picked: Mapping[str, Strategy]
) -> Mapping[str, tuple[Sharding, ...]]:
    """Shardings in which nodes read each parameter."""
    found: dict[str, dict[Sharding, None]] = {}
    rules, sizes = analysis.rules, built.mesh.sizes
    for node in analysis.graph.nodes:
        if node.op in SOURCE_OPS or node.name not in picked or node.name in analysis.casts:
            continue
        for ref, sharding in zip(node.operands, picked[node.name].operands, strict=True):
            alias = analysis.root(ref)
            owner = analysis.owner(alias.root)
            if owner.op != PARAMETER:
                continue
            at_root = through(
                sharding,
                tuple(reversed(alias.chain)),
                lambda name, s: rules[name].carry_back(s, sizes),
            )
            assert at_root is not None, text(sharding)
            found.setdefault(owner.name, {})[at_root] = None
    return {name: tuple(shardings) for name, shardings in found.items()}
