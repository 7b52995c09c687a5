"""Building rules from shapes, for the ops whose factors a text cannot say.

`Factors` collects the sizes of the factors of one node while its table entry names the dims; the
functions below read constant arguments and rewrite them for one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autopar.ir.graph import Arg, Node, TensorType
from autopar.rules.local import LocalOp
from autopar.rules.notation import Dims, Rule, RuleMaker

LocalArgs = tuple[tuple[Arg, ...], dict[str, Arg]]
Linear = tuple[frozenset[int], ...]


class Factors:
    """Names and sizes of the factors of a rule under construction."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.whole: set[str] = set()

    def dim(self, name: str, size: int, *, whole: bool = False) -> tuple[str, ...]:
        """One dim that is the factor ``name`` alone."""
        assert self.sizes.get(name, size) == size, (name, size, self.sizes)
        self.sizes[name] = size
        if whole:
            self.whole.add(name)
        return (name,)

    def dims(self, prefix: str, shape: Sequence[int], *, whole: bool = False) -> Dims:
        """A dim ``<prefix><position>`` for each entry of a shape."""
        return tuple(self.dim(f"{prefix}{i}", s, whole=whole) for i, s in enumerate(shape))

    def rule(self, operands: Sequence[Dims], outputs: Sequence[Dims], **fields: object) -> Rule:
        """The rule of these dims."""
        return Rule(
            operands=tuple(operands),
            outputs=tuple(outputs),
            sizes=self.sizes,
            whole=frozenset(self.whole),
            **fields,  # type: ignore[arg-type]
        )


def drop_outputs(made: Rule, given: Sequence[bool]) -> Rule:
    """The rule where some outputs are not asked for: their values are empty tensors."""
    absent = {i for i, there in enumerate(given) if not there}
    if not absent:
        return made
    outputs = tuple((("absent",),) if i in absent else d for i, d in enumerate(made.outputs))
    unrelated = frozenset((factor, i) for factor in made.factors() for i in absent)
    return replace(
        made,
        outputs=outputs,
        sizes={**made.sizes, "absent": 0},
        unrelated=made.unrelated | unrelated,
    )


def linear_sets(text: str) -> Linear:
    """Sets of operand positions from ``"0 1 | 2"``."""
    parts = (part.split() for part in text.split("|"))
    return tuple(frozenset(int(i) for i in part) for part in parts if part)


def all_whole(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """The rule of an op that every rank computes whole."""
    factors = Factors()
    inputs = [factors.dims(f"i{n}_", t.shape, whole=True) for n, t in enumerate(operands)]
    outputs = [factors.dims(f"o{n}_", t.shape, whole=True) for n, t in enumerate(node.outputs)]
    return factors.rule(inputs, outputs)


def argument(node: Node, position: int, name: str, default: Arg = None) -> Arg:
    """A constant argument given by position or by name."""
    return node.args[position] if position < len(node.args) else node.kwarg(name, default)


def integer(arg: Arg) -> int:
    """An argument that must be an integer."""
    assert isinstance(arg, int), arg
    return arg


def integers(arg: Arg) -> tuple[int, ...]:
    """An argument that must be an integer or a tuple of them."""
    if isinstance(arg, tuple):
        return tuple(integer(item) for item in arg)
    return (integer(arg),)


def dim_argument(arg: Arg, rank: int) -> int:
    """A dim argument counted from the front."""
    dim = integer(arg)
    return dim + max(rank, 1) if dim < 0 else dim


def dims_argument(arg: Arg, rank: int) -> tuple[int, ...]:
    """Dims an op reduces: all of them for None or an empty tuple."""
    if arg is None or arg == ():
        return tuple(range(rank))
    return tuple(dim_argument(dim, rank) for dim in integers(arg) if rank)


def replaced(op: LocalOp, changes: Mapping[int, Arg], **named: Arg) -> LocalArgs:
    """The rank's arguments with some positions and keywords changed.

    Positions the node leaves at their defaults stay so.
    """
    args = list(op.args())
    for position, value in changes.items():
        if position < len(args):
            args[position] = value
    kwargs = op.kwargs()
    return tuple(args), kwargs | {k: v for k, v in named.items() if k in kwargs}


def local_sizes(position: int) -> Callable[[LocalOp], LocalArgs]:
    """Local arguments where argument ``position`` is the shape of output 0."""

    def local_args(op: LocalOp) -> LocalArgs:
        return replaced(op, {position: op.output_shape()}, size=op.output_shape())

    return local_args


def table(names: str, maker: RuleMaker) -> dict[str, RuleMaker]:
    """The same entry for several ATen ops, ``"add.Tensor neg"``; the overload may be left out."""
    return {op_name(name): maker for name in names.split()}


def op_name(name: str) -> str:
    """``neg`` is ``aten.neg.default``; ``ns::op`` is ``ns.op.default``."""
    name = name.replace("::", ".") if "::" in name else f"aten.{name}"
    return name if name.count(".") >= 2 else f"{name}.default"
