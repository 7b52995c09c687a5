"""Pooling, resampling and padding of planes: places stay whole, batch and channels are free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import Node, TensorType
from autopar.rules.factors import Factors, LocalArgs, drop_outputs, linear_sets, replaced, table
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


def _grid_backward(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """The gradient of the grid sums over channels."""
    make = rule("n c p q, n c h w, n p q t -> n c h w, n p q t", linear="0", whole="h w p q t")
    mask = node.args[6]
    assert isinstance(mask, tuple)
    if mask[0]:
        return make(node, operands)
    kinds = (operands[1], node.outputs[1])
    filled = Node(name=node.name, op=node.op, args=node.args, outputs=kinds)
    return drop_outputs(make(filled, operands), [False, True])


RULES: Mapping[str, RuleMaker] = {
    **table("max_pool2d_with_indices adaptive_max_pool2d", _planes(2)),
    **table("max_pool3d_with_indices", _planes(3)),
    **table("max_pool2d_with_indices_backward adaptive_max_pool2d_backward", _planes(2, "0")),
    **table("max_pool3d_with_indices_backward", _planes(3, "0")),
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
    **table("upsample_nearest3d upsample_trilinear3d", _planes(3, "0")),
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
    **table("upsample_nearest3d_backward upsample_trilinear3d_backward", _resample_backward(3)),
    **table("reflection_pad1d reflection_pad1d_backward", _planes(1, "0")),
    **table("replication_pad1d replication_pad1d_backward", _planes(1, "0")),
    **table("reflection_pad2d reflection_pad2d_backward", _planes(2, "0")),
    **table("replication_pad2d replication_pad2d_backward", _planes(2, "0")),
    **table("reflection_pad3d reflection_pad3d_backward", _planes(3, "0")),
    **table("replication_pad3d replication_pad3d_backward", _planes(3, "0")),
    **table("im2col col2im", _columns),
    **table(
        "grid_sampler_2d",
        rule("n c h w, n p q t -> n c p q", linear="0", whole="h w p q t"),
    ),
    **table("grid_sampler_2d_backward", _grid_backward),
}
