"""Ops that compute every element from the elements at the same place, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autopar.ir.graph import Node, TensorType
from autopar.rules.factors import Linear, linear_sets, table
from autopar.rules.notation import Dims, Rule, RuleMaker

LinearOf = Callable[[Node, tuple[TensorType, ...]], Linear]


def broadcast(operands: Sequence[TensorType], outputs: Sequence[TensorType]) -> Rule:
    """All tensors aligned from the right; dims of size one are stretched."""
    rank = max((len(t.shape) for t in (*operands, *outputs)), default=0)
    sizes: dict[str, int] = {}
    for kind in (*outputs, *operands):
        for at, size in enumerate(kind.shape, start=rank - len(kind.shape)):
            if sizes.get(f"d{at}", 1) == 1:
                sizes[f"d{at}"] = size

    def dims(kind: TensorType) -> Dims:
        first = rank - len(kind.shape)
        return tuple(
            (f"d{first + i}",) if sizes[f"d{first + i}"] == size else ()
            for i, size in enumerate(kind.shape)
        )

    return Rule(
        operands=tuple(dims(t) for t in operands),
        outputs=tuple(dims(t) for t in outputs),
        sizes=sizes,
    )


def pointwise(linear: str | LinearOf = "") -> RuleMaker:
    """Entry of a pointwise op; ``linear`` as in `rule`, or computed from the node."""

    def make(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        found = linear_sets(linear) if isinstance(linear, str) else linear(node, operands)
        made = broadcast(operands, node.outputs)
        return with_linear(made, node, operands, found)

    return make


def with_linear(made: Rule, node: Node, operands: tuple[TensorType, ...], linear: Linear) -> Rule:
    """The rule with the linear sets that can hold sums: no booleans among them."""
    if any(out.dtype == "bool" for out in node.outputs):
        return made
    fits = tuple(s for s in linear if all(operands[i].dtype != "bool" for i in s))
    return replace(made, linear=fits) if fits else made


def _sum(node: Node, operands: tuple[TensorType, ...]) -> Linear:
    """A number added is added once a rank: only tensors may be partial together."""
    return linear_sets("0 1") if len(operands) == 2 else ()


def _product(node: Node, operands: tuple[TensorType, ...]) -> Linear:
    return linear_sets("0 | 1") if len(operands) == 2 else linear_sets("0")


def _quotient(node: Node, operands: tuple[TensorType, ...]) -> Linear:
    exact = node.kwarg("rounding_mode") is None and node.outputs[0].is_floating
    numerator = bool(node.args) and not isinstance(node.args[0], int | float)
    return linear_sets("0") if exact and numerator else ()


def _cast(node: Node, operands: tuple[TensorType, ...]) -> Linear:
    """Casts to another dtype are linear unless they drop a fraction."""
    exact = node.outputs[0].is_floating or not operands[0].is_floating
    return linear_sets("0") if exact else ()


def _zero_fill(node: Node, operands: tuple[TensorType, ...]) -> Linear:
    return linear_sets("0") if node.args[2] == 0 else ()


def _where_scalar(node: Node, operands: tuple[TensorType, ...]) -> Linear:
    """One branch is a number: linear only where it is zero."""
    numbers = [arg for arg in node.args[1:] if isinstance(arg, int | float)]
    return linear_sets("1") if numbers == [0] else ()


_UNARY = """
abs acos acosh angle asin asinh atan atanh bitwise_not ceil cos cosh digamma elu erf erfc erfinv
exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf
isnan isneginf isposinf leaky_relu lgamma log log10 log1p log2 log_sigmoid_forward logical_not
logit mish mvlgamma nan_to_num polygamma reciprocal relu relu6 round round.decimals rsqrt rrelu
selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square tan tanh
threshold trunc special_entr special_erfcx special_i0 special_i0e special_i1 special_i1e
special_log_ndtr special_ndtri i0 celu special_airy_ai special_bessel_j0 special_bessel_j1
clip clip.Tensor
clamp clamp.Tensor clamp_min clamp_min.Tensor clamp_max clamp_max.Tensor
pow.Tensor_Scalar pow.Scalar float_power.Tensor_Scalar rsub.Scalar ones_like full_like
add.Scalar sub.Scalar
"""
_BINARY = """
atan2 bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor
bitwise_xor.Scalar bitwise_left_shift.Tensor bitwise_right_shift.Tensor
bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar __lshift__.Scalar
__rshift__.Scalar copysign.Tensor copysign.Scalar eq.Tensor eq.Scalar floor_divide
floor_divide.Scalar fmax fmin fmod.Tensor fmod.Scalar ge.Tensor ge.Scalar gt.Tensor gt.Scalar
heaviside hypot le.Tensor le.Scalar logaddexp logaddexp2 logical_and logical_or logical_xor
lt.Tensor lt.Scalar maximum minimum ne.Tensor ne.Scalar nextafter pow.Tensor_Tensor
remainder.Tensor remainder.Scalar xlogy.Tensor xlogy.Scalar_Other special_xlog1py special_zeta
igamma igammac gcd lcm _prelu_kernel polar isclose isin.Tensor_Scalar max.other min.other
ldexp.Tensor bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor
bitwise_left_shift.Scalar_Tensor bitwise_right_shift.Scalar_Tensor remainder.Scalar_Tensor
float_power.Tensor_Tensor float_power.Scalar xlogy.Scalar_Self special_xlog1py.other_scalar
special_xlog1py.self_scalar special_zeta.other_scalar special_zeta.self_scalar
"""
_GRADIENT = """
gelu_backward silu_backward threshold_backward tanh_backward sigmoid_backward elu_backward
leaky_relu_backward hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward
softshrink_backward hardshrink_backward mish_backward logit_backward log_sigmoid_backward
native_dropout_backward _prelu_kernel_backward rrelu_with_noise_backward
"""

RULES: Mapping[str, RuleMaker] = {
    **table(_UNARY, pointwise()),
    **table(_BINARY, pointwise()),
    **table(_GRADIENT, pointwise("0")),
    **table(
        "neg clone conj _conj conj_physical _conj_physical real imag zeros_like positive",
        pointwise("0"),
    ),
    **table("add.Tensor sub.Tensor", pointwise(_sum)),
    **table("rsub.Tensor", pointwise(_sum)),
    **table("mul.Tensor mul.Scalar", pointwise(_product)),
    **table(
        "div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode true_divide.Tensor",
        pointwise(_quotient),
    ),
    **table("_to_copy to.dtype", pointwise(_cast)),
    **table("copy", pointwise("1")),
    **table("complex", pointwise("0 1")),
    **table("where.self", pointwise("1 2")),
    **table("where.ScalarOther where.ScalarSelf", pointwise(_where_scalar)),
    **table("masked_fill.Scalar", pointwise(_zero_fill)),
    **table("masked_fill.Tensor", pointwise("0 2")),
    **table("addcmul", pointwise("0 1 | 0 2")),
    **table("addcdiv", pointwise("0 1")),
    **table("lerp.Scalar lerp.Tensor", pointwise("0 1")),
}
