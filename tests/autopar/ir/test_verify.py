"""Every broken invariant of a graph is found."""

from __future__ import annotations

import pytest

from autopar.ir.text import parse_graph
from autopar.ir.verify import verify

SOUND = """\
fwd %w = parameter w : float32[4]
fwd %b = buffer b : float32[4]
fwd %x = input x : float32[2, 4]
fwd %mul = aten.mul.Tensor(%x, %w) : float32[2, 4]
fwd %sum = aten.sum.default(%mul) : float32[]
fwd %new = aten.add.Tensor(%b, 1) : float32[4]
bwd %grad = aten.sum.dim_IntList(%x, [0]) : float32[4]
loss %sum
aux logits %mul
gradient w %grad
mutation b %new
alias v w
batch_dim x 0
"""


def test_a_sound_graph_passes() -> None:
    verify(parse_graph(SOUND))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("%new =", "%mul =", "two nodes are called 'mul'"),
        ("(%mul)", "(%later)", "'sum' reads later, which is not made before it"),
        ("(%mul)", "(%mul:1)", "'sum' reads mul:1, which has no type"),
        ("fwd %sum = aten.sum.default(%mul)", "bwd %sum = aten.sum.default(%sum)", "reads sum"),
        ("float32[2, 4]", "float31[2, 4]", "'x' has unknown dtype 'float31'"),
        ("float32[2, 4]", "float32[-2, 4]", "'x' has negative size -2"),
        ("loss %sum", "loss %mul", "loss mul is float32[2, 4], not 0-d"),
        ("loss %sum", "loss %none", "result none is not made"),
        ("gradient w %grad", "gradient w %mul", "gradient of 'w' is float32[2, 4]"),
        ("gradient w", "gradient u", "gradient of 'u', which is no source"),
        ("mutation b", "mutation w", "mutation of 'w', which is no source"),
        ("alias v w", "alias v u", "'v' is tied to unknown 'u'"),
        ("alias v w", "alias w w", "alias 'w' is a parameter of its own"),
        ("batch_dim x 0", "batch_dim x 2", "'x' has no dim 2"),
        ("batch_dim x 0", "batch_dim y 0", "batch dim of 'y', which is no input"),
        ("aux logits %mul", "aux a %mul\naux a %x", "two further results share a name"),
        ("buffer b", "parameter w", "parameter 'w' enters twice"),
        ("(%b, 1)", "(%b, dtype=1, alpha=2)", "keyword arguments of 'new' are not sorted"),
    ],
)
def test_a_broken_graph_is_named(old: str, new: str, what: str) -> None:
    assert old in SOUND
    with pytest.raises(AssertionError) as raised:
        verify(parse_graph(SOUND.replace(old, new, 1)))
    assert what in str(raised.value)


def test_a_forward_node_reads_no_backward_value() -> None:
    text = "fwd %x = input x : float32[]\n"
    text += "bwd %a = aten.neg.default(%x) : float32[]\nfwd %b = aten.neg.default(%a) : float32[]\n"
    with pytest.raises(AssertionError, match="forward node 'b' reads the backward value a"):
        verify(parse_graph(text))
