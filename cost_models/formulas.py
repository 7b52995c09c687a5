"""Closed forms that a person would want to read, as sympy expressions.

Each is what a function of this package computes for the plain case, written with the letters of the
literature; tests hold the two equal. `explain --formula` prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import sympy

from cost_models.errors import ClusterSpecError, near_misses


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """One closed form.

    Attributes:
        name: What it gives.
        expression: In the letters of `letters`.
        unit: Of the result.
        letters: Meaning of each letter, with its unit.
        source: Where it comes from.
    """

    name: str
    expression: sympy.Expr = field(hash=False)
    unit: str
    letters: Mapping[str, str] = field(hash=False)
    source: str

    def value(self, **letters: float) -> float:
        """The result for given letters.

        Raises:
            ClusterSpecError: A letter is missing or unknown.
        """
        for letter in letters:
            if letter not in self.letters:
                raise ClusterSpecError(
                    f"cannot evaluate formula '{self.name}': it has no letter '{letter}'; "
                    f"its letters are {', '.join(self.letters)}"
                )
        missing = [letter for letter in self.letters if letter not in letters]
        if missing:
            raise ClusterSpecError(
                f"cannot evaluate formula '{self.name}': '{missing[0]}' is missing "
                f"({self.letters[missing[0]]}); give every one of {', '.join(self.letters)}"
            )
        values = {sympy.Symbol(letter, positive=True): value for letter, value in letters.items()}
        return float(self.expression.subs(values))

    def text(self) -> str:
        """The formula and its letters as lines of text."""
        lines = [f"{self.name} [{self.unit}] = {self.expression}"]
        lines += [f"    {letter}: {meaning}" for letter, meaning in self.letters.items()]
        return "\n".join([*lines, f"    source: {self.source}"])


_MEANINGS = {
    "a": "attention heads",
    "alpha": "latency of one message, s",
    "b": "sequences of a microbatch",
    "B": "bytes of the full tensor",
    "c": "one message between neighbouring stages, s",
    "d": "data-parallel ranks",
    "e": "best fraction of the peak",
    "f": "forward of a stage for one microbatch, s",
    "F": "FLOPs of the call",
    "F_h": "FLOPs at which half of the best is reached",
    "g": "backward of a stage for one microbatch, s",
    "G": "microbatches",
    "h": "hidden size",
    "i": "stage, from 0",
    "k": "contracted length",
    "k_h": "contracted length at which half of the best is reached",
    "K": "bytes of gradients, master copy and moments a parameter",
    "L": "layers of the model",
    "n": "ranks of the axis",
    "p": "pipeline stages",
    "P": "peak rate, FLOP/s",
    "Psi": "parameters",
    "s": "sequence length",
    "t": "tensor-parallel ranks",
    "v": "chunks of a rank",
    "V": "words of the vocabulary",
    "w": "bandwidth of one rank, one way, bytes/s",
    "w_g": "weight gradient of a stage for one microbatch, s",
}


def _letters(*names: str) -> tuple[sympy.Symbol, ...]:
    """Positive symbols, so that printed forms are simple."""
    return tuple(sympy.Symbol(name, positive=True) for name in names)


def _formula(name: str, unit: str, expression: sympy.Expr, source: str) -> Formula:
    used = sorted((str(symbol) for symbol in expression.free_symbols), key=str.lower)
    letters = MappingProxyType({letter: _MEANINGS[letter] for letter in used})
    return Formula(name=name, expression=expression, unit=unit, letters=letters, source=source)


def _memory() -> tuple[Formula, ...]:
    a, b, d, h, i, K, L, p, Psi, s, t, v, V, G = _letters(  # noqa: N806
        "a", "b", "d", "h", "i", "K", "L", "p", "Psi", "s", "t", "v", "V", "G"
    )
    korthikanti = "Korthikanti et al., arXiv 2205.05198, 2022"
    zero = "Rajbhandari et al., ZeRO, arXiv 1910.02054, 2019"
    unit = s * b * h
    per_layer = unit * (34 / t + 5 * a * s / (h * t))
    return (
        _formula(
            "GPT parameters",
            "parameters",
            12 * L * h**2 * (1 + sympy.Rational(13, 12) / h) + (V + s) * h,
            "Narayanan et al., SC 2021, equation 2",
        ),
        _formula("model states, ZeRO 0", "bytes", (2 + 2 + K) * Psi, zero),
        _formula("model states, ZeRO 1", "bytes", 4 * Psi + K * Psi / d, zero),
        _formula("model states, ZeRO 2", "bytes", 2 * Psi + (2 + K) * Psi / d, zero),
        _formula("model states, ZeRO 3", "bytes", (4 + K) * Psi / d, zero),
        _formula("saved by a layer", "bytes", unit * (34 + 5 * a * s / h), korthikanti),
        _formula(
            "saved by a layer, tensor",
            "bytes",
            unit * (10 + 24 / t + 5 * a * s / (h * t)),
            korthikanti,
        ),
        _formula("saved by a layer, tensor+sequence", "bytes", per_layer, korthikanti),
        _formula(
            "saved by a layer, tensor+sequence+selective", "bytes", 34 * unit / t, korthikanti
        ),
        _formula("saved by a layer, full recomputation", "bytes", 2 * unit, korthikanti),
        _formula(
            "saved by a 1F1B stage",
            "bytes",
            sympy.Min(p - i, G) * L / p * 34 * unit / t,
            f"{korthikanti}; flash attention, tensor+sequence",
        ),
        _formula(
            "live chunks, interleaved", "chunks", _interleaved_live(G, v, p, i), "Megatron-LM"
        ),
    )


def _interleaved_live(
    microbatches: sympy.Symbol, chunks: sympy.Symbol, stages: sympy.Symbol, stage: sympy.Symbol
) -> sympy.Expr:
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
    return sympy.Min(microbatches * chunks, warm_up + 1)


def _time() -> tuple[Formula, ...]:
    alpha, B, c, f, g, G, n, p, v, w, w_g = _letters(  # noqa: N806
        "alpha", "B", "c", "f", "g", "G", "n", "p", "v", "w", "w_g"
    )
    b, e, F, F_h, h, k, k_h, L, P, s, V = _letters(  # noqa: N806
        "b", "e", "F", "F_h", "h", "k", "k_h", "L", "P", "s", "V"
    )
    ring = "Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009"
    zero_bubble = "Qi et al., arXiv 2401.10241, 2023"
    return (
        _formula(
            "matmul",
            "s",
            (F + F_h) / (P * e) * (k + k_h) / k,
            "roofline with a ramp, see cost_models.compute",
        ),
        _formula(
            "GPT step FLOPs",
            "FLOP",
            72 * b * s * L * h**2 * (1 + s / (6 * h) + V / (12 * h * L)),
            "Narayanan et al., SC 2021, without recomputation",
        ),
        _formula("ring all-reduce", "s", 2 * (n - 1) / n * B / w + 2 * (n - 1) * alpha, ring),
        _formula(
            "tree all-reduce",
            "s",
            2 * B / w + 2 * alpha * sympy.ceiling(sympy.log(n, 2)),
            "Sanders, Speck and Traeff, Parallel Computing 35(12), 2009",
        ),
        _formula("ring all-gather", "s", (n - 1) / n * B / w + (n - 1) * alpha, ring),
        _formula(
            "1F1B step, equal stages",
            "s",
            (G + p - 1) * (f + g) + 2 * (G + p - 2 - sympy.ceiling((G - 1) / p)) * c,
            "cost_models.pipeline.one_f_one_b_ends_s for G >= p: up to p microbatches are on their "
            "way and back at a time",
        ),
        _formula("interleaved step", "s", (G + (p - 1) / v) * (f + g), "Narayanan et al., SC 2021"),
        _formula(
            "bubble fraction, interleaved", "1", (p - 1) / (v * G), "Narayanan et al., SC 2021"
        ),
        _formula("bubble, ZB-H1", "s", (p - 1) * (f + g - w_g), zero_bubble),
        _formula("bubble, ZB-H2", "s", (p - 1) * (f + g - 2 * w_g), zero_bubble),
    )


FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {formula.name: formula for formula in (*_memory(), *_time())}
)


def formula_named(name: str) -> Formula:
    """The formula of this name.

    Raises:
        ClusterSpecError: There is none; the message names near misses.
    """
    formula = FORMULAS.get(name)
    if formula is None:
        raise ClusterSpecError(f"cannot find formula '{name}': {near_misses(name, FORMULAS)}")
    return formula
