"""Prices of kernels from their types."""

from __future__ import annotations

import pytest

from autopar.cost.kernel import bytes_moved, is_causal, kernel_seconds
from autopar.ir.graph import TensorType
from cost_models.compute import Attention, attention_s, matmul_s, op_s
from cost_models.devices import device_named

DEVICE = device_named("H100-80GB")
SECONDS = kernel_seconds(DEVICE)


def kind(*shape: int, dtype: str = "bfloat16") -> TensorType:
    return TensorType(shape, dtype)


def test_a_product_is_priced_by_its_lengths() -> None:
    found = SECONDS("aten.mm.default", (kind(64, 128), kind(128, 256)), (kind(64, 256),), False, 1)
    assert found == matmul_s(DEVICE, m=64, n=256, k=128, dtype="bfloat16")


def test_a_product_with_bias_reads_the_last_two_operands() -> None:
    read = (kind(256), kind(64, 128), kind(128, 256))
    found = SECONDS("aten.addmm.default", read, (kind(64, 256),), False, 1)
    assert found == matmul_s(DEVICE, m=64, n=256, k=128, dtype="bfloat16")


def test_a_batched_product_is_one_kernel() -> None:
    read = (kind(8, 64, 128), kind(8, 128, 256))
    found = SECONDS("aten.bmm.default", read, (kind(8, 64, 256),), False, 1)
    assert found == matmul_s(DEVICE, m=64, n=256, k=128, batch=8, dtype="bfloat16")


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_priced_by_its_shape(causal: bool) -> None:
    q, k = kind(2, 8, 512, 64), kind(2, 4, 512, 64)
    shape = Attention(batch=2, heads=8, queries=512, keys=512, head_dim=64, causal=causal)
    forward = SECONDS("autopar.attention.default", (q, k, k), (q,), causal, 1)
    assert forward == attention_s(DEVICE, shape, dtype="bfloat16")
    read = (q, q, k, k, q, q)
    backward = SECONDS("autopar.attention_backward.default", read, (q, k, k), causal, 1)
    assert backward == attention_s(DEVICE, shape, dtype="bfloat16", backward=True)
    assert backward > forward


def test_causality_is_read_where_the_op_has_it() -> None:
    assert is_causal("autopar.attention.default", (1, 2, 3, None, True, 0.1))
    assert not is_causal("autopar.attention.default", (1, 2, 3, None, False, 0.1))
    assert is_causal("autopar.attention_backward.default", (0, 1, 2, 3, None, 5, 6, True, 0.1))
    assert not is_causal("aten.mm.default", (True,) * 9)


def test_what_is_drawn_is_paid_by_the_element_on_the_cpu_and_as_it_is_written_elsewhere() -> None:
    x, key = kind(4096, 4096), kind(2, dtype="int64")
    core = device_named("cpu-core")
    by_core = kernel_seconds(core)
    plain = by_core("aten.mul.Tensor", (x, key), (x,), False, 0)
    dropped = by_core("autopar.dropout.default", (x, key), (x,), False, 0)
    assert dropped - plain > x.num_elements * 128 / core.memory_bytes_per_s
    plain = SECONDS("aten.mul.Tensor", (x, key), (x,), False, 0)
    assert SECONDS("autopar.dropout.default", (x, key), (x,), False, 0) == plain
    uniform = SECONDS("autopar.random_uniform.default", (x, key), (x,), False, 0)
    assert uniform - plain > x.num_elements * 4 / DEVICE.memory_bytes_per_s


def test_attention_with_dropout_pays_for_its_weights() -> None:
    q, key = kind(2, 8, 512, 64), kind(2, dtype="int64")
    plain = SECONDS("autopar.attention.default", (q, q, q), (q,), False, 1)
    weights = 2 * 8 * 512 * 512
    dropped = SECONDS("autopar.attention_dropout.default", (q, q, q, key), (q,), False, 1)
    assert dropped - plain > weights * 80 / DEVICE.memory_bytes_per_s
    read = (q, q, q, q, q, q, key)
    backward = SECONDS("autopar.attention_dropout_backward.default", read, (q, q, q), False, 1)
    assert backward > dropped
    args = (1, 2, 3, None, True, 0.1, 4, "stream", 0.1)
    assert is_causal("autopar.attention_dropout.default", args)


def test_a_lookup_does_not_read_the_whole_table() -> None:
    table, ids, rows = kind(50_000, 512), kind(8, dtype="int64"), kind(8, 512)
    found = bytes_moved("aten.embedding.default", (table, ids), (rows,))
    assert found == 2 * rows.num_bytes + ids.num_bytes


def test_pointwise_kernels_take_their_bytes() -> None:
    read, made = (kind(1024, 1024), kind(1024, 1024)), (kind(1024, 1024),)
    wanted = op_s(DEVICE, kind="memory", flops=0, bytes_moved=3 * 2**21, dtype="bfloat16")
    assert SECONDS("aten.add.Tensor", read, made, False, 0) == wanted
