"""``autopar::attention`` is ``scaled_dot_product_attention``, whatever kernel runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import attention_kernels as kernels
from autopar.capture import capture_step
from tests.autopar.capture.eager import capture_equals_eager

ATTENTION = torch.ops.autopar.attention


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def draw(
    *,
    heads: int = 4,
    groups: int = 4,
    rows: int = 5,
    columns: int = 7,
    width: int = 8,
    out: int = 8,
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(2, heads, rows, width, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, groups, columns, width, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, groups, columns, out, dtype=torch.float64, requires_grad=True)
    return q, k, v


def hiding_rows() -> Tensor:
    """A padding mask that leaves nothing to one row of the first sample."""
    mask = torch.rand(2, 1, 5, 7) > 0.4
    mask[0, 0, 2] = False
    return mask


MASKS: dict[str, Any] = {
    "none": lambda: None,
    "bool": hiding_rows,
    "of keys": lambda: torch.rand(2, 1, 1, 7) > 0.3,
    "added": lambda: torch.randn(1, 4, 5, 7, dtype=torch.float64),
    "infinite": lambda: torch.zeros(2, 1, 5, 7).double().masked_fill(~hiding_rows(), -torch.inf),
}
SHAPES: dict[str, dict[str, int]] = {
    "plain": {},
    "grouped": {"groups": 2},
    "one group": {"groups": 1},
    "square": {"rows": 7},
    "narrow values": {"out": 4, "groups": 2},
    "long queries": {"rows": 9, "columns": 3},
}


@pytest.fixture(params=["fused", "by definition"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by definition":
        monkeypatch.setattr(kernels, "_cpu_flash", lambda *args: False)
    return


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_equal_torch(shape: str, mask_name: str, causal: bool) -> None:
    sizes = SHAPES[shape]
    q, k, v = draw(**sizes)
    mask = MASKS[mask_name]()
    if mask is not None and (q.shape[2], k.shape[2]) != (5, 7):
        mask = None
    shown = kernels.causal_mask(q.shape[2], k.shape[2], q.device) if causal else None
    both = mask
    if shown is not None and mask is not None:
        both = mask & shown if mask.dtype == torch.bool else mask.masked_fill(~shown, -torch.inf)
    elif shown is not None:
        both = shown
    wanted = F.scaled_dot_product_attention(q, k, v, both, scale=0.3, enable_gqa=True)
    found, lse = ATTENTION(q, k, v, mask, causal, 0.3)
    torch.testing.assert_close(found, wanted)
    assert lse.shape == q.shape[:3] and not lse.requires_grad
    grad = torch.randn_like(wanted)
    for mine, theirs in zip(
        torch.autograd.grad(found, (q, k, v), grad),
        torch.autograd.grad(wanted, (q, k, v), grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_log_sum_exp_is_that_of_the_scores() -> None:
    q, k, v = draw()
    _, lse = ATTENTION(q, k, v, None, False, 0.3)
    torch.testing.assert_close(lse, (q @ k.transpose(-1, -2) * 0.3).logsumexp(-1))


def test_rows_that_see_nothing_are_zero_in_every_kernel() -> None:
    q, k, v = (t.detach() for t in draw())
    mask = torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    for forward in (kernels.cpu_forward, kernels.math_forward):
        out, lse = forward(q, k, v, mask, False, 0.3)
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.zeros_like(lse))


@pytest.mark.parametrize("shape", [(1, 4, 5, 7), (2, 1, 1, 7), (1, 1, 5, 7)])
def test_the_gradient_of_a_mask_equals_torch(shape: tuple[int, ...]) -> None:
    q, k, v = draw(groups=2)
    mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    wanted = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    found, _ = ATTENTION(q, k, v, mask, False, 8**-0.5)
    grad = torch.randn_like(wanted)
    for mine, theirs in zip(
        torch.autograd.grad(found, (q, k, v, mask), grad),
        torch.autograd.grad(wanted, (q, k, v, mask), grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_log_sum_exp_is_in_single_precision(dtype: torch.dtype) -> None:
    q, k, v = (t.detach().to(dtype) for t in draw())
    out, lse = ATTENTION(q, k, v, None, False, 0.3)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)


def test_the_op_passes_torchs_own_checks() -> None:
    q, k, v = draw(groups=2, rows=7)
    # not test_faketensor: kernels differ in strides, which graphs do not have
    tests = ("test_schema", "test_autograd_registration")
    torch.library.opcheck(ATTENTION.default, (q, k, v, None, True, 0.3), test_utils=tests)
    torch.library.opcheck(
        torch.ops.autopar.onehot_scatter.default,
        (torch.randn(3, 1), torch.tensor([[1], [0], [4]]), 1, 5),
        test_utils=("test_schema", "test_faketensor"),
    )


CALLS: dict[str, Any] = {
    "plain": lambda h: F.scaled_dot_product_attention(h, h, h),
    "by keyword": lambda h: F.scaled_dot_product_attention(query=h, key=h, value=h, scale=2.0),
    "by another name": lambda h: _ANOTHER_NAME(h, h, h, is_causal=True),
    "three dims": lambda h: F.scaled_dot_product_attention(h[0], h[0], h[0], is_causal=True),
    "three dims, mask": lambda h: F.scaled_dot_product_attention(
        h[0], h[0], h[0], torch.eye(6, dtype=torch.bool)
    ),
    "two dims": lambda h: F.scaled_dot_product_attention(h[0, 0], h[0, 0], h[0, 0]),
    "five dims": lambda h: F.scaled_dot_product_attention(
        h.unflatten(0, (2, 2)), h.unflatten(0, (2, 2)), h.unflatten(0, (2, 2)), h[0, 0, :, :1] > 0
    ),
    "keys of one sample": lambda h: F.scaled_dot_product_attention(h, h[:1], h[:1]),
    "one key head": lambda h: F.scaled_dot_product_attention(h, h[:, :1], h[:, :1]),
    "grouped": lambda h: F.scaled_dot_product_attention(h, h[:, ::2], h[:, ::2], enable_gqa=True),
    "repeated": lambda h: F.scaled_dot_product_attention(h, _repeated(h), _repeated(h)),
    "keys repeated": lambda h: F.scaled_dot_product_attention(h, _repeated(h), h),
    "float mask": lambda h: F.scaled_dot_product_attention(
        h, h, h, torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    ),
    "mask of one row": lambda h: F.scaled_dot_product_attention(h, h, h, h[:, :1, :1, :6] > -1),
}
_ANOTHER_NAME = F.scaled_dot_product_attention


def _repeated(h: Tensor) -> Tensor:
    b, _, s, d = h.shape
    return h[:, ::2, None].expand(b, 2, 2, s, d).reshape(b, 4, s, d)


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_one_op(name: str) -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return CALLS[name](self.linear(x))

    batch = torch.randn(4, 4, 6, 8)
    captured = capture_equals_eager(Attend(), batch, lambda m, x: m(x).square().sum())
    ops = [node.op for node in captured.graph.nodes]
    assert ops.count("autopar.attention.default") == 1
    assert ops.count("autopar.attention_backward.default") == 1
    assert not [op for op in ops if "softmax" in op]
    attention = captured.graph.by_name["attention"]
    if name in ("grouped", "repeated"):
        assert captured.graph.type_of(attention.operands[1]).shape == (4, 2, 6, 8)
    if name == "float mask":
        assert attention.args[3:5] == (None, True)


MASK_KINDS: dict[str, tuple[Any, str]] = {
    "causal": (lambda i, j: j <= i, "FUTURE"),
    "all": (lambda i, j: j >= -i, "NOTHING"),
    "of one row": (lambda i, j: j <= i[:1], "OTHER"),
    "future only": (lambda i, j: j >= i, "OTHER"),
    "strictly causal": (lambda i, j: j < i, "OTHER"),
    "window": (lambda i, j: (j <= i) & (j > i - 3), "OTHER"),
}


@pytest.mark.parametrize("name", MASK_KINDS)
def test_constant_masks_are_what_they_hide(name: str) -> None:
    rule, kind = MASK_KINDS[name]

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            h, i = self.linear(x), torch.arange(6)
            mask = rule(i[:, None], i) & keep[:, None, None, :]
            return F.scaled_dot_product_attention(h, h, h, mask).square().sum()

    batch = (torch.randn(3, 2, 6, 8), torch.rand(3, 6) > 0.2)
    captured = capture_equals_eager(Attend(), batch)
    attention = captured.graph.by_name["attention"]
    shape = captured.graph.type_of(attention.operands[3]).shape
    assert attention.args[4] is (kind == "FUTURE")
    rows = 6 if kind == "OTHER" and name != "of one row" else 1
    assert shape == (3, 1, rows, 6)


def test_masks_of_parameters_and_buffers_stay() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("shown", torch.ones(6, 6, dtype=torch.bool).tril())

        def forward(self, h: Tensor) -> Tensor:
            h = self.linear(h)
            return F.scaled_dot_product_attention(h, h, h, self.shown).square().sum()

    graph = capture_step(Attend(), torch.randn(3, 2, 6, 8), grad=True).graph
    assert graph.by_name["attention"].args[4] is False
    assert len(graph.by_name["attention"].operands) == 4


def test_a_causal_mask_of_any_size_is_recognised_without_being_made() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, h: Tensor) -> Tensor:
            h, i = self.linear(h), torch.arange(h.shape[2])
            mask = (i[None, :] <= i[:, None]).expand(h.shape[0], 1, -1, -1)
            return F.scaled_dot_product_attention(h, h, h, mask).square().sum()

    batch = torch.empty(2, 2, 2**20, 8, device="meta")
    graph = capture_step(Attend(), batch, grad=True).graph
    assert graph.by_name["attention"].args[3:5] == (None, True)
