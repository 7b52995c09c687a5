"""Pooling, resampling and padding of planes: places stay whole, batch and channels are free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import Node, TensorType
from autopar.rules.factors import (
    Factors,
    LocalArgs,
    drop_outputs,
    integers,
    linear_sets,
    replaced,
    table,
)
from autopar.rules.local import LocalOp
from autopar.rules.notation import Dims, Rule, RuleMaker, rule
from autopar.rules.pointwise import with_linear


def _planes(places: int, linear: str = "") -> RuleMaker:
    """An entry whose tensors share all dims but the last ``places``."""

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        factors = Factors()

        def dims(kind: TensorType, name: str) -> Dims:
            lead = factors.dims("d", kind.shape[: len(kind.shape) - places])
            plane = factors.dims(name, kind.shape[len(kind.shape) - places :], whole=True)
            return (*lead, *plane)

        given = [dims(kind, f"i{n}_") for n, kind in enumerate(operands)]
        wanted = [dims(kind, f"o{n}_") for n, kind in enumerate(node.outputs)]
        made = factors.rule(given, wanted)
        return with_linear(made, node, operands, linear_sets(linear))

    return make


def _resample_backward(places: int) -> RuleMaker:
    """A backward that has the shape of the input, batch and channels included, as argument 2."""
    plain = _planes(places, "0")

    def local_args(op: LocalOp) -> LocalArgs:
        return replaced(op, {2: op.output_shape()})

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        return replace(plain(node, operands), local_args=local_args)

    return make


def _columns(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Im2col and col2im: windows of a plane as columns ``(c k)``."""
    into = node.op == "aten.im2col.default"
    image, columns = (operands[0], node.outputs[0]) if into else (node.outputs[0], operands[0])
    factors = Factors()
    lead = factors.dims("d", image.shape[:-3])
    channel = factors.dim("c", image.shape[-3])
    window = factors.dim("k", columns.shape[-2] // image.shape[-3], whole=True)
    plane: Dims = (*lead, channel, *factors.dims("p", image.shape[-2:], whole=True))
    packed: Dims = (*lead, channel + window, factors.dim("l", columns.shape[-1], whole=True))
    given, wanted = (plane, packed) if into else (packed, plane)
    return with_linear(factors.rule((given,), (wanted,)), node, operands, linear_sets("0"))


_GRIDS = {
    2: ("n c h w, n p q t", "n c p q", "h w p q t"),
    3: ("n c h w s, n p q r t", "n c p q r", "h w s p q r t"),
}
"""An image and the places to read it at, what is read, and the factors of places."""


def _grid(places: int) -> RuleMaker:
    given, read, whole = _GRIDS[places]
    return rule(f"{given} -> {read}", linear="0", whole=whole)


def _grid_backward(places: int) -> RuleMaker:
    """The gradient of the grid sums over channels."""
    given, read, whole = _GRIDS[places]
    full = rule(f"{read}, {given} -> {given}", linear="0", whole=whole)

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        mask = node.args[6]
        assert isinstance(mask, tuple)
        if mask[0]:
            return full(node, operands)
        kinds = (operands[1], node.outputs[1])
        filled = Node(name=node.name, op=node.op, args=node.args, outputs=kinds)
        return drop_outputs(full(filled, operands), [False, True])

    return make


def _affine_grid(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """The places that matrices map a plane to, and its backward; argument 1 counts samples."""
    factors = Factors()

    def dims(kind: TensorType, name: str) -> Dims:
        return (factors.dim("n", kind.shape[0]), *factors.dims(name, kind.shape[1:], whole=True))

    def local_args(op: LocalOp) -> LocalArgs:
        return replaced(op, {1: (op.output_shape()[0], *integers(node.args[1])[1:])})

    made = factors.rule((dims(operands[0], "i"),), (dims(node.outputs[0], "o"),))
    made = replace(made, local_args=local_args)
    return with_linear(made, node, operands, linear_sets("0"))


def _fractional_pool(places: int) -> RuleMaker:
    """Pools whose windows are drawn for every plane, ``[samples, channels, places]``."""
    plain = _planes(places)

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        made = plain(node, (operands[0],))
        lead = made.operands[0][:-places]
        one = (("one",),) if len(lead) == 1 else ()
        sizes = {**made.sizes, "one": 1, "place": places}
        drawn = (*one, *lead, ("place",))
        return replace(
            made,
            operands=(*made.operands, drawn),
            sizes=sizes,
            whole=made.whole | {"one", "place"},
        )

    return make


RULES: Mapping[str, RuleMaker] = {
    **table("max_pool2d_with_indices adaptive_max_pool2d", _planes(2)),
    **table("max_pool3d_with_indices adaptive_max_pool3d", _planes(3)),
    **table("max_pool2d_with_indices_backward adaptive_max_pool2d_backward", _planes(2, "0")),
    **table("max_pool3d_with_indices_backward adaptive_max_pool3d_backward", _planes(3, "0")),
    **table("fractional_max_pool2d", _fractional_pool(2)),
    **table("fractional_max_pool3d", _fractional_pool(3)),
    **table("fractional_max_pool2d_backward max_unpool2d", _planes(2, "0")),
    **table("fractional_max_pool3d_backward max_unpool3d", _planes(3, "0")),
    **table("avg_pool1d adaptive_avg_pool1d", _planes(1, "0")),
    **table("avg_pool2d avg_pool2d_backward", _planes(2, "0")),
    **table("avg_pool3d avg_pool3d_backward", _planes(3, "0")),
    **table("_adaptive_avg_pool2d _adaptive_avg_pool2d_backward", _planes(2, "0")),
    **table("_adaptive_avg_pool3d _adaptive_avg_pool3d_backward", _planes(3, "0")),
    **table("upsample_nearest1d upsample_linear1d _upsample_nearest_exact1d", _planes(1, "0")),
    **table("upsample_nearest2d upsample_bilinear2d upsample_bicubic2d", _planes(2, "0")),
    **table("_upsample_nearest_exact2d _upsample_bilinear2d_aa", _planes(2, "0")),
    **table("_upsample_bicubic2d_aa", _planes(2, "0")),
    **table(
        "upsample_nearest2d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec", _planes(2, "0")
    ),
    **table("upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d", _planes(3, "0")),
    **table(
        "upsample_nearest1d_backward upsample_linear1d_backward _upsample_nearest_exact1d_backward",
        _resample_backward(1),
    ),
    **table(
        "upsample_nearest2d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward "
        "_upsample_nearest_exact2d_backward _upsample_bilinear2d_aa_backward "
        "_upsample_bicubic2d_aa_backward",
        _resample_backward(2),
    ),
    **table(
        "upsample_nearest3d_backward upsample_trilinear3d_backward "
        "_upsample_nearest_exact3d_backward",
        _resample_backward(3),
    ),
    **table("reflection_pad1d reflection_pad1d_backward", _planes(1, "0")),
    **table("replication_pad1d replication_pad1d_backward", _planes(1, "0")),
    **table("reflection_pad2d reflection_pad2d_backward", _planes(2, "0")),
    **table("replication_pad2d replication_pad2d_backward", _planes(2, "0")),
    **table("reflection_pad3d reflection_pad3d_backward", _planes(3, "0")),
    **table("replication_pad3d replication_pad3d_backward", _planes(3, "0")),
    **table("im2col col2im", _columns),
    **table("grid_sampler_2d", _grid(2)),
    **table("grid_sampler_3d", _grid(3)),
    **table("grid_sampler_2d_backward", _grid_backward(2)),
    **table("grid_sampler_3d_backward", _grid_backward(3)),
    **table("affine_grid_generator affine_grid_generator_backward", _affine_grid),
}
