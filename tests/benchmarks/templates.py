"""Steps of transformers of any size, from one capture of each kind.

A small model is captured with sizes that are distinct primes, so every number in its graph says
which sizes it comes from; another size is put in by arithmetic alone. Dropout is stood in for by
another pointwise op that saves as much; fused kernels of Megatron and others by one op that reads
and writes as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.capture import capture_step
from autopar.ir.graph import Arg, Const, Graph, Node, TensorType

BATCH, SEQ, GROUPS, PER_GROUP, HALF, FFN, VOCAB = 13, 17, 19, 23, 29, 31, 37
SCALE = 0.125
PRIMES = (BATCH, SEQ, GROUPS, PER_GROUP, HALF, FFN, VOCAB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a framework writes a layer.

    Attributes:
        family: ``gpt`` (layer norm, GELU) or ``llama`` (RMS norm, rotary, SwiGLU, grouped heads).
        flash: Attention is one fused kernel; else products, softmax and dropout.
        fused: Norms, rotary and gated activations are single kernels.
        dropout: Dropout of attention weights, and behind both parts of a layer where not fused.
        scaled: Where attention is not one kernel, scaling its scores is a kernel, too.
        causal: A fused attention skips what is masked.
        joined: One product makes queries, keys and values, of as many heads each.
        loss: ``torch``, of fp32 logits; or ``fused``, which reads the logits once and turns them
            into their gradients.
    """

    family: str
    flash: bool
    fused: bool
    dropout: bool = False
    scaled: bool = False
    causal: bool = True
    joined: bool = False
    loss: str = "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of one model and batch.

    Attributes:
        batch: Sequences; ``seq`` their length.
        heads: Query heads; ``kv_heads`` key heads; ``head_dim`` of each.
        ffn: Inner size of the feed-forward part; ``vocab`` of the vocabulary.
    """

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int

    def table(self) -> Mapping[int, int]:
        """The size that each prime stands for."""
        return {
            BATCH: self.batch,
            SEQ: self.seq,
            GROUPS: self.kv_heads,
            PER_GROUP: self.heads // self.kv_heads,
            HALF: self.head_dim // 2,
            FFN: self.ffn,
            VOCAB: self.vocab,
        }


class Rotary(nn.Module):
    """Rotary positions: one kernel a tensor where fused."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.fused:
            return x * cos
        first, second = x[..., :HALF], x[..., HALF:]
        return x * cos + torch.cat((-second, first), -1) * sin


class RMSNorm(nn.Module):
    """As Llama writes it, or one kernel."""

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return functional.layer_norm(x, x.shape[-1:], self.weight)
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * scaled.to(x.dtype)


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, style: Style) -> None:
        super().__init__()
        self.style = style
        llama = style.family == "llama"
        self.per_group = PER_GROUP if llama else 1
        heads, width = GROUPS * self.per_group, 2 * HALF
        hidden = heads * width
        self.norm1 = RMSNorm(hidden, style.fused) if llama else nn.LayerNorm(hidden)
        self.norm2 = RMSNorm(hidden, style.fused) if llama else nn.LayerNorm(hidden)
        if style.joined:
            self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        else:
            self.q = nn.Linear(hidden, hidden, bias=False)
            self.k = nn.Linear(hidden, GROUPS * width, bias=False)
            self.v = nn.Linear(hidden, GROUPS * width, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, FFN, bias=False)
        self.gate = nn.Linear(hidden, FFN, bias=False) if llama else None
        self.down = nn.Linear(FFN, hidden, bias=False)
        self.rotary = Rotary(style.fused) if llama else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self._drop(self.o(self._attention(self.norm1(x), cos, sin)))
        y = self.norm2(x)
        if self.gate is None:
            inner = functional.gelu(self.up(y))
        elif self.style.fused:
            inner = self.gate(y) * self.up(y)
        else:
            inner = functional.silu(self.gate(y)) * self.up(y)
        return x + self._drop(self.down(inner))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.relu(x) if self.style.dropout and not self.style.fused else x

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        if self.style.joined:
            parts = self.qkv(x).view(b, s, GROUPS, 3, 2 * HALF).unbind(3)
            q, k, v = (part.transpose(1, 2) for part in parts)
        else:
            q = self.q(x).view(b, s, GROUPS * self.per_group, 2 * HALF).transpose(1, 2)
            k = self.k(x).view(b, s, GROUPS, 2 * HALF).transpose(1, 2)
            v = self.v(x).view(b, s, GROUPS, 2 * HALF).transpose(1, 2)
        if self.rotary is not None:
            q, k = self.rotary(q, cos, sin), self.rotary(k, cos, sin)
        if self.style.flash:
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=self.style.causal, enable_gqa=self.per_group > 1
            )
        else:
            scores = torch.matmul(q, k.transpose(-1, -2))
            scores = scores * SCALE if self.style.scaled else scores
            weights = torch.softmax(scores, -1)
            weights = functional.relu(weights) if self.style.dropout else weights
            out = torch.matmul(weights, v)
        return out.transpose(1, 2).reshape(b, s, -1)


class Model(nn.Module):
    """Embedding, layers, head, loss."""

    def __init__(self, style: Style, layers: int) -> None:
        super().__init__()
        hidden = GROUPS * (PER_GROUP if style.family == "llama" else 1) * 2 * HALF
        self.embedding = nn.Embedding(VOCAB, hidden)
        self.is_fused_loss = style.loss == "fused"
        self.position = None if style.family == "llama" else nn.Embedding(SEQ, hidden)
        self.layers = nn.ModuleList([Layer(style) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCAB, bias=False)
        self.register_buffer("cos", torch.empty(SEQ, 2 * HALF))
        self.register_buffer("sin", torch.empty(SEQ, 2 * HALF))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.position is not None:
            x = x + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        if self.is_fused_loss:
            return (logits.mean(-1) * labels).mean()
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@cache
def template(style: Style, layers: int) -> Graph:
    """The captured step of a model of this style with its sizes as primes."""
    with torch.device("meta"):
        model = Model(style, layers).to(torch.bfloat16)
        ids = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    return capture_step(model, {"ids": ids, "labels": ids.clone()}, None, grad=True).graph


def step_graph(style: Style, layers: int, sizes: Sizes, dtype: str = "bfloat16") -> Graph:
    """The step of a model of these sizes."""
    table = sizes.table()
    graph = template(style, layers)
    nodes = tuple(_resized(node, table, dtype) for node in graph.nodes)
    return replace(graph, nodes=nodes)


def _resized(node: Node, table: Mapping[int, int], dtype: str) -> Node:
    return replace(
        node,
        args=tuple(_argument(arg, table, dtype) for arg in node.args),
        kwargs=tuple((name, _argument(arg, table, dtype)) for name, arg in node.kwargs),
        outputs=tuple(
            TensorType(tuple(_size(n, table) for n in kind.shape), _dtype(kind.dtype, dtype))
            for kind in node.outputs
        ),
    )


def _argument(arg: Arg, table: Mapping[int, int], dtype: str) -> Arg:
    if isinstance(arg, tuple):
        return tuple(_argument(item, table, dtype) for item in arg)
    if isinstance(arg, Const):
        return replace(arg, value=_dtype(arg.value, dtype))
    if isinstance(arg, int) and not isinstance(arg, bool):
        return _size(arg, table)
    return arg


def _dtype(name: str, wanted: str) -> str:
    return wanted if name == "bfloat16" else name


@cache
def _factors(number: int) -> tuple[tuple[int, ...], int]:
    found = []
    for prime in PRIMES:
        while number % prime == 0:
            found.append(prime)
            number //= prime
    return tuple(found), number


def _size(number: int, table: Mapping[int, int]) -> int:
    if number < min(PRIMES) or number > 1 << 60:
        return number
    primes, rest = _factors(number)
    for prime in primes:
        rest *= table[prime]
    return rest
