"""Factorizations, solves and functions of matrices, which stay whole; their batch is free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import Node, TensorType
from autopar.rules.factors import Factors, all_whole, argument, dim_argument, linear_sets, table
from autopar.rules.notation import Dims, Rule, RuleMaker
from autopar.rules.pointwise import with_linear


def _batched(linear: str = "", *, rank: int = 2) -> RuleMaker:
    """An entry whose tensors share all dims in front of the last ``rank`` ones of the first."""

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        lead = operands[0].shape[: len(operands[0].shape) - rank]
        asked = [kind.num_elements > 0 for kind in node.outputs]
        there = [kind for kind, given in zip(node.outputs, asked, strict=True) if given]
        if any(kind.shape[: len(lead)] != lead for kind in (*operands, *there)):
            # One of the batches is broadcast.
            return all_whole(node, operands)
        factors = Factors()
        batch = factors.dims("b", lead)

        def dims(kind: TensorType, name: str) -> Dims:
            return (*batch, *factors.dims(name, kind.shape[len(lead) :], whole=True))

        given = [dims(kind, f"i{n}_") for n, kind in enumerate(operands)]
        wanted = [
            dims(kind, f"o{n}_") if asked[n] else factors.dims(f"o{n}_", kind.shape, whole=True)
            for n, kind in enumerate(node.outputs)
        ]
        empty = frozenset(
            (factor, n)
            for n, is_asked in enumerate(asked)
            for factor in factors.sizes
            if not is_asked
        )
        made = replace(factors.rule(given, wanted), unrelated=empty)
        # What is cast on its way is not linear.
        cast = len({kind.dtype for kind in operands}) > 1
        return with_linear(made, node, operands, linear_sets("" if cast else linear))

    return make


def _on_diagonal(linear: str, *, rank: int, first: int, dims: tuple[int, int]) -> RuleMaker:
    """Diagonals that are made or written; free if the matrices lie in the last two dims.

    Args:
        linear: Sets of operands.
        rank: Dims of the first operand that are no batch.
        first: Argument that names the first of the two dims; the second follows.
        dims: Its default, and that of the second.
    """
    of_last = _batched(linear, rank=rank)

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        size = len(node.outputs[0].shape)
        named = [
            dim_argument(argument(node, first + n, f"dim{n + 1}", default), size)
            for n, default in enumerate(dims)
        ]
        last = sorted(named) == [size - 2, size - 1]
        return of_last(node, operands) if last else all_whole(node, operands)

    return make


RULES: Mapping[str, RuleMaker] = {
    **table("_linalg_det _linalg_slogdet linalg_inv_ex linalg_matrix_exp", _batched()),
    **table("linalg_lu linalg_lu_factor_ex linalg_qr linalg_householder_product", _batched()),
    **table("linalg_cholesky_ex cholesky_inverse", _batched()),
    **table("_linalg_eigh linalg_eig _linalg_svd linalg_pinv.atol_rtol_tensor", _batched()),
    **table("_linalg_solve_ex", _batched()),
    **table("linalg_solve_triangular", _batched("1")),
    **table("linalg_lu_solve", _batched()),
    **table("cholesky_solve", _batched("0")),
    **table("diag_embed", _on_diagonal("0", rank=1, first=2, dims=(-2, -1))),
    **table("diagonal_scatter", _on_diagonal("0 1", rank=2, first=3, dims=(0, 1))),
}
