"""A mixed-integer program as growing arrays, and HiGHS through MathOpt."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt import model_pb2, result_pb2, solution_pb2
from ortools.math_opt.core.python import solver
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2
from pybind11_abseil.status import StatusNotOk

from autopar.search.mute import muted


@dataclass(slots=True)
class IntegerProgram:
    """Columns and rows as growing arrays."""

    cost: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    cols: list[int] = field(default_factory=list)
    coefs: list[float] = field(default_factory=list)

    def columns(self, costs: list[float], *, integer: bool = False, upper: float = 1.0) -> range:
        start = len(self.cost)
        self.cost += costs
        self.integer += [integer] * len(costs)
        self.upper += [upper] * len(costs)
        self.lower += [0.0] * len(costs)
        return range(start, len(self.cost))

    def row(self, low: float, high: float, terms: list[tuple[int, float]]) -> int:
        index = len(self.low)
        self.low.append(low)
        self.high.append(high)
        for column, coefficient in terms:
            self.rows.append(index)
            self.cols.append(column)
            self.coefs.append(coefficient)
        return index


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found.

    Attributes:
        status: As of `Solution`.
        values: Of every column; empty if nothing was found.
        objective: As the costs add up; ``bound`` the proven least.
    """

    status: str
    values: NDArray[np.float64]
    objective: float = float("inf")
    bound: float = 0.0


NOTHING = np.zeros(0)
NOTHING_FOUND = Outcome("time_limited", NOTHING)


_WANTED = mathopt.ModelSolveParameters(
    variable_values_filter=mathopt.VariableFilter(skip_zero_values=True),
    dual_values_filter=mathopt.LinearConstraintFilter(filtered_items=[]),
    reduced_costs_filter=mathopt.VariableFilter(filtered_items=[]),
).to_proto()
"""Of a result only the values that are not zero are read; the rest would be copied for nothing."""

_BRANCHING = {"parallel": "off"}
_ALONE = {"parallel": "off", "presolve": "off"}
"""Options of the solver. A relaxation of few columns is solved faster than it is presolved."""

MANY_COLUMNS = 100_000
"""From here on presolving pays: of a relaxation of 198,121 columns, that of DeBERTa-v3 large on a
mesh of 4 x 2, it leaves 7 of 24 seconds."""

_PROVEN = (
    result_pb2.TERMINATION_REASON_INFEASIBLE,
    result_pb2.TERMINATION_REASON_INFEASIBLE_OR_UNBOUNDED,
)


def run(
    program: IntegerProgram,
    deadline: float,
    gap: float,
    *,
    relaxed: bool,
    num_nodes: int | None = None,
) -> Outcome:
    """Hand a program, or its relaxation, to the solver.

    Args:
        program: The program.
        deadline: Of `time.perf_counter`.
        gap: Relative gap at which the solver may stop.
        relaxed: Whether columns need not be whole.
        num_nodes: Nodes of the branching at which it stops, so that it stops at the same one on
            every machine; None for no limit.

    Without presolve the solver now and then gives up, or calls a program infeasible that is not:
    only what it finds is believed then.
    """
    found = NOTHING_FOUND
    alone = relaxed and len(program.cost) < MANY_COLUMNS
    for options in (_ALONE, _BRANCHING) if alone else (_BRANCHING,):
        found = _run_with(options, program, deadline, gap, relaxed, num_nodes)
        if len(found.values):
            break
    return found


def _run_with(
    options: Mapping[str, str],
    program: IntegerProgram,
    deadline: float,
    gap: float,
    relaxed: bool,
    num_nodes: int | None,
) -> Outcome:
    """Run the solver once.

    The records of MathOpt go in and out as they are: its objects would be made of every column and
    of a basis that nobody reads.
    """
    parameters = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=max(deadline - time.perf_counter(), 1.0)),
        relative_gap_tolerance=gap,
        node_limit=num_nodes,
        highs=highs_pb2.HighsOptionsProto(string_options=options),
    )
    try:
        with muted():
            result = solver.solve(
                _proto(program, relaxed=relaxed),
                mathopt.SolverType.HIGHS.value,
                mathopt.StreamableSolverInitArguments().to_proto(),
                parameters.to_proto(),
                _WANTED,
                None,
                mathopt.CallbackRegistration().to_proto(),
                None,
                None,
            )
    except StatusNotOk:
        # The solver gave up without saying why.
        return NOTHING_FOUND
    reason = result.termination.reason
    found = result.solutions[0].primal_solution if result.solutions else None
    if found is None or found.feasibility_status != solution_pb2.SOLUTION_STATUS_FEASIBLE:
        return Outcome("infeasible" if reason in _PROVEN else "time_limited", NOTHING)
    scale = _scale(program.cost)
    values = np.zeros(len(program.cost))
    values[np.asarray(found.variable_values.ids, dtype=np.int64)] = found.variable_values.values
    status = "optimal" if reason == result_pb2.TERMINATION_REASON_OPTIMAL else "feasible"
    if result.termination.limit == result_pb2.LIMIT_TIME:
        status = "time_limited"
    return Outcome(
        status,
        values,
        found.objective_value / scale,
        result.termination.objective_bounds.dual_bound / scale,
    )


SMALL = 1e2
"""What small costs are for the solver, whose tolerances are 1e-7."""


def _scale(costs: Sequence[float]) -> float:
    """Power of ten that makes costs `SMALL` or more, but for the least of a hundred.

    Where most costs are nearly equal and what tells choices apart falls under its tolerances, the
    simplex method wanders for minutes and gives up.
    """
    found = np.asarray(costs)
    found = np.abs(found[np.nonzero(found)])
    if not len(found):
        return 1.0
    return float(10.0 ** round(float(np.log10(SMALL / np.percentile(found, 1)))))


def _proto(program: IntegerProgram, *, relaxed: bool) -> model_pb2.ModelProto:
    proto = model_pb2.ModelProto()
    num = len(program.cost)
    proto.variables.ids.extend(range(num))
    proto.variables.lower_bounds.extend(program.lower)
    proto.variables.upper_bounds.extend(program.upper)
    proto.variables.integers.extend([False] * num if relaxed else program.integer)
    costs = np.asarray(program.cost)
    (nonzero,) = np.nonzero(costs)
    proto.objective.linear_coefficients.ids.extend(nonzero.tolist())
    scaled = costs[nonzero] * _scale(program.cost)
    proto.objective.linear_coefficients.values.extend(scaled.tolist())
    proto.linear_constraints.ids.extend(range(len(program.low)))
    proto.linear_constraints.lower_bounds.extend(program.low)
    proto.linear_constraints.upper_bounds.extend(program.high)
    rows, cols = np.asarray(program.rows), np.asarray(program.cols)
    order = np.lexsort((cols, rows))
    proto.linear_constraint_matrix.row_ids.extend(rows[order].tolist())
    proto.linear_constraint_matrix.column_ids.extend(cols[order].tolist())
    coefficients = np.asarray(program.coefs)[order]
    proto.linear_constraint_matrix.coefficients.extend(coefficients.tolist())
    return proto
