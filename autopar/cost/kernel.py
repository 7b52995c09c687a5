"""Seconds of one local kernel, from its op and the types of what it reads and writes.

The search prices a node under a strategy and the simulator an instruction with this one function,
so they agree wherever they mean the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from autopar.ir.graph import Arg, TensorType
from cost_models.cluster import Device
from cost_models.compute import Attention, Kind, attention_s, matmul_s, op_s

_PRODUCTS = frozenset({"aten.mm.default", "aten.bmm.default", "aten.addmm.default"})
_LOOKUPS = frozenset(
    {
        "aten.embedding.default",
        "aten.gather.default",
        "aten.index.Tensor",
        "aten.index_select.default",
        "aten.slice_backward.default",
        "aten.select_backward.default",
    }
)
"""Ops that touch as much of their first operand as they return, or return more than they touch."""

_DRAWN_WORDS = {
    "autopar.dropout.default": 1,
    "autopar.random_uniform.default": 1,
    "autopar.random_normal.default": 2,
    "autopar.random_integers.default": 2,
}
"""Random words of an element of what these ops make."""

_WORD_BYTES: Mapping[str, int] = {"cpu-core": 128}
"""Bytes that drawing a word moves, by device: sixteen int32 ops, which read and write it."""

_WRITTEN_BYTES = 4
"""The same on all other devices, where one kernel draws in registers and writes the word."""

_DROPPED_WHERE_DRAWN = frozenset({"autopar.dropout.default"})
"""Ops that on such devices use their words where they draw them, and write none."""

_ROUTED = frozenset({"autopar.routed_linear.default", "autopar.routed_outer.default"})
"""Ops that sort rows by expert before their product, and back behind it."""

_WEIGHT_BYTES = 80
"""Bytes that an attention weight moves where it is made: ten fp32 ops of a read and a write."""

_ATTENTION = "autopar.attention"
_ATTENTION_DROPOUT = "autopar.attention_dropout"
_FORWARD = frozenset({"autopar.attention.default", "autopar.attention_dropout.default"})
_FORWARD_FLAG_AT = 4
_BACKWARD_FLAG_AT = 7

QUERIES = 2
"""Dim of the first result of an attention, and of its gradient, that counts queries."""

KernelSeconds = Callable[[str, tuple[TensorType, ...], tuple[TensorType, ...], bool, int], float]
"""Seconds of a kernel: (op, types it reads, types it writes, causal, FLOPs)."""


def is_causal(op: str, args: Sequence[Arg]) -> bool:
    """Whether an attention's queries see the keys up to their own position only."""
    if not op.startswith(_ATTENTION):
        return False
    at = _FORWARD_FLAG_AT if op in _FORWARD else _BACKWARD_FLAG_AT
    return at < len(args) and args[at] is True


def late_kernels(
    op: str, operands: Sequence[TensorType], rows: int
) -> tuple[tuple[tuple[TensorType, ...], bool], ...]:
    """What the rank with the last queries runs of a causal attention: (operands, causal) of each.

    All keys before its own, and the causal square of these; or, with a mask of what it may see, all
    of them at once.

    Args:
        op: The attention, or its gradient.
        operands: Types of its operands, of the rank's queries.
        rows: Queries of all ranks.
    """
    own = tuple(operands)
    first = 0 if op in _FORWARD else 1
    query, key = own[first : first + 2]
    bare = len(own) == (3 if op in _FORWARD else 6) and not op.startswith(_ATTENTION_DROPOUT)
    if not bare or key.shape[QUERIES] != rows:
        return ((own, False),)
    mine = query.shape[QUERIES]

    def of_keys(count: int) -> tuple[TensorType, ...]:
        cut = (_with_rows(kind, count) for kind in own[first + 1 : first + 3])
        return (*own[: first + 1], *cut, *own[first + 3 :])

    return ((of_keys(rows - mine), False), (of_keys(mine), True))


def _with_rows(kind: TensorType, rows: int) -> TensorType:
    """The type with so many queries or keys."""
    return TensorType((*kind.shape[:QUERIES], rows, *kind.shape[QUERIES + 1 :]), kind.dtype)


def counts_flops(op: str) -> bool:
    """Whether an op is priced by the FLOPs that are told, not by the shapes of its operands."""
    return op not in _PRODUCTS and not op.startswith(_ATTENTION)


def kernel_seconds(device: Device) -> KernelSeconds:
    """Prices kernels on a device, remembering what it priced."""

    @lru_cache(maxsize=1 << 17)
    def seconds(
        op: str,
        operands: tuple[TensorType, ...],
        outputs: tuple[TensorType, ...],
        causal: bool,
        flops: int,
    ) -> float:
        if op.startswith(_ATTENTION) and len(operands) >= 3:
            return _attention_s(device, op, operands, causal)
        if op in _PRODUCTS:
            return _product_s(device, operands)
        moved = bytes_moved(op, operands, outputs)
        moved += _word_bytes(device, op) * sum(kind.num_elements for kind in outputs[:1])
        kind = Kind.MATMUL if flops else Kind.MEMORY
        return op_s(device, kind=kind, flops=flops, bytes_moved=moved, dtype=_dtype(operands))

    return seconds


def bytes_moved(op: str, operands: Sequence[TensorType], outputs: Sequence[TensorType]) -> int:
    """Bytes that a kernel reads and writes at least, apart from random words."""
    written = sum(kind.num_bytes for kind in outputs)
    read = sum(kind.num_bytes for kind in operands)
    if op in _ROUTED:
        sorted_bytes = sum(k.num_bytes for k in (*operands, *outputs) if len(k.shape) == 2)
        return read + written + 2 * sorted_bytes
    if op not in _LOOKUPS or not operands:
        return read + written
    rest = read - operands[0].num_bytes
    return min(operands[0].num_bytes, written) + rest + written


def _word_bytes(device: Device, op: str) -> int:
    """Bytes that the random words of an element move."""
    each = _WORD_BYTES.get(device.kind, _WRITTEN_BYTES)
    if op.startswith(_ATTENTION_DROPOUT):
        return each
    in_registers = op in _DROPPED_WHERE_DRAWN and device.kind not in _WORD_BYTES
    return 0 if in_registers else each * _DRAWN_WORDS.get(op, 0)


def _product_s(device: Device, operands: Sequence[TensorType]) -> float:
    left, right = operands[-2:]
    *batch, m, k = left.shape
    n = right.shape[-1]
    return matmul_s(device, m=m, n=n, k=k, batch=batch[0] if batch else 1, dtype=left.dtype)


def _attention_s(device: Device, op: str, operands: Sequence[TensorType], causal: bool) -> float:
    backward = op not in _FORWARD
    query, key = operands[1:3] if backward else operands[:2]
    batch, heads, queries, width = query.shape
    shape = Attention(
        batch=batch,
        heads=heads,
        queries=queries,
        keys=key.shape[2],
        head_dim=width,
        causal=causal,
    )
    fused_s = attention_s(device, shape, dtype=query.dtype, backward=backward)
    if not op.startswith(_ATTENTION_DROPOUT):
        return fused_s
    each_bytes = _word_bytes(device, op) + _WEIGHT_BYTES
    moved = batch * heads * queries * key.shape[2] * each_bytes
    kind, dtype = Kind.MEMORY, query.dtype
    return fused_s + op_s(device, kind=kind, flops=0, bytes_moved=moved, dtype=dtype)


def _dtype(operands: Sequence[TensorType]) -> str:
    """What it computes in; without floating-point operands, only bytes count."""
    return next((kind.dtype for kind in operands if kind.is_floating), "float32")
