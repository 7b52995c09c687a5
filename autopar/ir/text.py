"""Text form of a graph, one line a node, and its parser.

.. code-block:: text

    fwd %w = parameter mlp.up.weight : float32[64, 16]
    fwd %x = input x : float32[8, 16]
    fwd %t = aten.t.default(%w) : float32[16, 64] @ mlp.up model.py:12
    fwd %mm = aten.mm.default(%x, %t) : float32[8, 64] @ mlp.up model.py:12
    bwd %split = aten.split.Tensor(%mm, 4, dim=0) : (float32[4, 64], float32[4, 64])
    gradient mlp.up.weight %mm_1
    batch_dim x 0

A value is ``%node`` or ``%node:index``; ``[...]`` is a tuple, ``#dtype.float32`` a named constant.
Names with characters of their own meaning are quoted as in JSON. The text is the same for equal
graphs and tells unequal ones apart, so it serves golden files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.errors import AutoparError
from autopar.ir.graph import SOURCE_OPS, Arg, Const, Graph, Node, Phase, Ref, Source, TensorType

_PHASES = {Phase.FORWARD: "fwd", Phase.BACKWARD: "bwd"}
_PHASE_OF = {text: phase for phase, text in _PHASES.items()}
_BARE = re.compile(r"[A-Za-z0-9_.$/<>+*-][^\s\"(),\[\]{}#%=]*")


def graph_text(graph: Graph, *, lines: bool = True) -> str:
    """The graph as text; ``parse_graph`` reads it back.

    Args:
        graph: Any well-formed graph.
        lines: Whether to write the source line of every node.
    """
    return "".join(f"{line}\n" for line in _graph_lines(graph, lines))


def _graph_lines(graph: Graph, lines: bool) -> Iterator[str]:
    for node in graph.nodes:
        yield node_text(node, lines=lines)
    if graph.loss is not None:
        yield f"loss {_value(graph.loss)}"
    for name, ref in graph.aux:
        yield f"aux {_word(name)} {_value(ref)}"
    for name, ref in graph.gradients.items():
        yield f"gradient {_word(name)} {_value(ref)}"
    for name, ref in graph.mutations.items():
        yield f"mutation {_word(name)} {_value(ref)}"
    for name, owner in graph.aliases.items():
        yield f"alias {_word(name)} {_word(owner)}"
    for path, dim in graph.batch_dims.items():
        yield f"batch_dim {_word(path)} {dim}"
    for name, dtype in graph.summed.items():
        yield f"summed {_word(name)} {dtype}"


def node_text(node: Node, *, lines: bool = True) -> str:
    """One node on one line."""
    if node.op in SOURCE_OPS:
        call = f"{node.op} {_word(node.target)}"
    else:
        given = [_arg(arg) for arg in node.args]
        given += [f"{key}={_arg(arg)}" for key, arg in node.kwargs]
        call = f"{node.op}({', '.join(given)})"
    kinds = [str(kind) for kind in node.outputs]
    kind = kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"
    return f"{_PHASES[node.phase]} %{node.name} = {call} : {kind}{_source(node.source, lines)}"


def _source(source: Source, lines: bool) -> str:
    line = source.line if lines else ""
    if not source.module and not line:
        return ""
    module = _word(source.module) if source.module else '""'
    return f" @ {module} {_word(line)}" if line else f" @ {module}"


def _word(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name)


def _value(ref: Ref) -> str:
    return f"%{ref}"


def _arg(arg: Arg) -> str:
    if isinstance(arg, Ref):
        return _value(arg)
    if isinstance(arg, Const):
        return f"#{arg.kind}.{_word(arg.value)}"
    if isinstance(arg, tuple):
        return f"[{', '.join(_arg(item) for item in arg)}]"
    return json.dumps(arg) if isinstance(arg, str) else repr(arg)


_TOKEN = re.compile(
    r"""\s*(?:
        (?P<value>%[A-Za-z_]\w*(?::\d+)?)
      | (?P<const>\#[a-z_]+\.)
      | (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<number>-?(?:inf|nan|\d+(?:\.\d*)?(?:e[+-]?\d+)?)(?![^\s"(),\[\]{}\#%=]))
      | (?P<word>[A-Za-z0-9_.$/<>+*-][^\s"(),\[\]{}\#%=]*)
      | (?P<mark>[=()\[\],:@])
    )""",
    re.VERBOSE,
)
_NAMED: dict[str, Arg] = {"True": True, "False": False, "None": None}
_NUMBER = re.compile(r"-?\d+")


@dataclass
class _Line:
    """Tokens of one line, read from the left."""

    text: str
    number: int
    at: int = 0
    tokens: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        end = 0
        while end < len(self.text):
            found = _TOKEN.match(self.text, end)
            if found is None:
                raise self.error(f"{self.text[end : end + 20]!r} is no token")
            self.tokens.append((found.lastgroup or "", found[0].strip()))
            end = found.end()

    def error(self, what: str) -> AutoparError:
        return AutoparError(f"cannot read graph text at line {self.number}: {what}")

    @property
    def done(self) -> bool:
        return self.at >= len(self.tokens)

    def peek(self) -> tuple[str, str]:
        return ("", "end of line") if self.done else self.tokens[self.at]

    def next(self, *kinds: str) -> str:
        kind, text = self.peek()
        if kind not in kinds:
            raise self.error(f"found {text!r} where a {' or '.join(kinds)} belongs")
        self.at += 1
        return text

    def skip(self, mark: str) -> bool:
        """Whether this mark comes next; if so it is passed."""
        if self.peek() == ("mark", mark):
            self.at += 1
            return True
        return False

    def expect(self, mark: str) -> None:
        if not self.skip(mark):
            raise self.error(f"found {self.peek()[1]!r} where {mark!r} belongs")


def parse_graph(text: str) -> Graph:
    """The graph that ``graph_text`` wrote.

    Raises:
        AutoparError: A line is not of that form.
    """
    nodes: list[Node] = []
    loss: Ref | None = None
    aux: list[tuple[str, Ref]] = []
    values: dict[str, dict[str, Ref]] = {"gradient": {}, "mutation": {}}
    aliases: dict[str, str] = {}
    batch_dims: dict[str, int] = {}
    summed: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        if not raw.strip():
            continue
        line = _Line(raw, number)
        head = line.next("word")
        if head in _PHASE_OF:
            nodes.append(_parse_node(line, _PHASE_OF[head]))
        elif head == "loss":
            loss = _parse_value(line)
        elif head == "aux":
            aux.append((_parse_word(line), _parse_value(line)))
        elif head in values:
            name = _parse_word(line)
            values[head][name] = _parse_value(line)
        elif head == "alias":
            name = _parse_word(line)
            aliases[name] = _parse_word(line)
        elif head == "batch_dim":
            name = _parse_word(line)
            batch_dims[name] = int(line.next("number"))
        elif head == "summed":
            name = _parse_word(line)
            summed[name] = _parse_word(line)
        else:
            raise line.error(f"{head!r} begins no line of a graph")
        if not line.done:
            raise line.error(f"{line.peek()[1]!r} follows its end")
    return Graph(
        nodes=tuple(nodes),
        loss=loss,
        aux=tuple(aux),
        gradients=values["gradient"],
        mutations=values["mutation"],
        aliases=aliases,
        batch_dims=batch_dims,
        summed=summed,
    )


def _parse_node(line: _Line, phase: Phase) -> Node:
    name = line.next("value")[1:]
    line.expect("=")
    op = line.next("word")
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    target = ""
    if op in SOURCE_OPS:
        target = _parse_word(line)
    else:
        line.expect("(")
        args, kwargs = _parse_call(line)
    line.expect(":")
    outputs = _parse_types(line)
    source = Source()
    if line.skip("@"):
        module = _parse_word(line)
        source = Source(module, "" if line.done else _parse_word(line))
    return Node(
        name=name,
        op=op,
        args=args,
        kwargs=kwargs,
        outputs=outputs,
        phase=phase,
        source=source,
        target=target,
    )


def _parse_call(line: _Line) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    args: list[Arg] = []
    kwargs: list[tuple[str, Arg]] = []
    while not line.skip(")"):
        following = line.tokens[line.at + 1 : line.at + 2]
        if line.peek()[0] == "word" and following == [("mark", "=")]:
            key = line.next("word")
            line.expect("=")
            kwargs.append((key, _parse_arg(line)))
        else:
            args.append(_parse_arg(line))
        if not line.skip(",") and line.peek() != ("mark", ")"):
            raise line.error(f"found {line.peek()[1]!r} where ',' or ')' belongs")
    return tuple(args), tuple(kwargs)


def _parse_arg(line: _Line) -> Arg:
    if line.skip("["):
        items: list[Arg] = []
        while not line.skip("]"):
            items.append(_parse_arg(line))
            if not line.skip(",") and line.peek() != ("mark", "]"):
                raise line.error(f"found {line.peek()[1]!r} where ',' or ']' belongs")
        return tuple(items)
    kind, text = line.peek()
    if kind == "value":
        return _parse_value(line)
    line.next("const", "string", "number", "word")
    if kind == "const":
        return Const(text[1:-1], _parse_word(line))
    if kind == "string":
        return str(json.loads(text))
    if kind == "number":
        return int(text) if _NUMBER.fullmatch(text) else float(text)
    if text not in _NAMED:
        raise line.error(f"{text!r} is no argument")
    return _NAMED[text]


def _parse_value(line: _Line) -> Ref:
    node, _, index = line.next("value")[1:].partition(":")
    return Ref(node, int(index or 0))


def _parse_word(line: _Line) -> str:
    kind, _ = line.peek()
    text = line.next("word", "string", "number")
    return str(json.loads(text)) if kind == "string" else text


def _parse_types(line: _Line) -> tuple[TensorType, ...]:
    if not line.skip("("):
        return (_parse_type(line),)
    found: list[TensorType] = []
    while not line.skip(")"):
        found.append(_parse_type(line))
        line.skip(",")
    return tuple(found)


def _parse_type(line: _Line) -> TensorType:
    dtype = line.next("word")
    line.expect("[")
    shape: list[int] = []
    while not line.skip("]"):
        shape.append(int(line.next("number")))
        line.skip(",")
    return TensorType(tuple(shape), dtype)
