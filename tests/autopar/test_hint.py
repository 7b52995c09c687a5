"""The text of a hint is the call that makes it, and gives it back."""

from __future__ import annotations

from typing import Any

import pytest

from autopar import hint
from autopar.errors import HintError
from autopar.inputs import parse_hints

TEXTS = {
    "hint.degrees(dp=2, tp=(4, 2), pp=2)": hint.degrees(dp=2, tp=(4, 2), pp=2),
    "hint.shard('*.q', dim=0, axis='tp')": hint.shard("*.q", 0, "tp"),
    "hint.replicate('*.norm*')": hint.replicate("*.norm*"),
    "hint.memory_limit('60GiB')": hint.memory_limit("60GiB"),
    "hint.memory_limit('1500MB')": hint.memory_limit("1.5GB"),
    "hint.memory_limit(12345)": hint.memory_limit(12345),
    "hint.microbatches(8)": hint.microbatches(8),
    "hint.schedule('1f1b')": hint.schedule("1f1b"),
    "hint.schedule('interleaved', chunks=3)": hint.schedule("interleaved", 3),
    "hint.shares(5, 2, 0)": hint.shares(5, 2, 0),
    "hint.ranks(4)": hint.ranks(4),
    "hint.ranks(4, first=8)": hint.ranks(4, 8),
    "hint.recompute('a.b')": hint.recompute("a.b"),
    "hint.keep('*')": hint.keep("*"),
    "hint.offload('optimizer')": hint.offload("optimizer"),
    "hint.offload('h.*')": hint.offload("h.*"),
    "hint.offload('h.*', what='parameters')": hint.offload("h.*", "parameters"),
    "hint.cut_before('h.1')": hint.cut_before("h.1"),
    "hint.stage('head', number=3)": hint.stage("head", 3),
    "hint.per_microbatch('*.bn*')": hint.per_microbatch("*.bn*"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_hint_is_the_call_that_makes_it(text: str) -> None:
    assert str(TEXTS[text]) == text
    assert hint.hint_of(text) == TEXTS[text]
    assert hint.hint_of(repr(TEXTS[text])) == TEXTS[text]


@pytest.mark.parametrize(
    "text",
    ["", "x", "hint.degrees(dp=-1)", "hint.degrees(zz=2)", "print(1)", "hint.keep(open('f'))"],
)
def test_other_texts_are_no_hints(text: str) -> None:
    assert hint.hint_of(text) is None


MAKERS = (hint.recompute, hint.keep, hint.offload, hint.replicate, hint.cut_before)


@pytest.mark.parametrize("make", [*MAKERS, hint.per_microbatch])
def test_a_pattern_is_a_text(make: Any) -> None:
    for pattern in (None, 3, ""):
        with pytest.raises(HintError, match="as the pattern of a hint"):
            make(pattern)


@pytest.mark.parametrize("limit", [0, -5, 1e9, float("nan"), ".GiB", "0.1B", "1GB2", "16", None])
def test_a_limit_is_a_size(limit: Any) -> None:
    with pytest.raises(HintError, match="it is not a size"):
        hint.memory_limit(limit)


def test_a_hint_without_a_value_is_told_so() -> None:
    for text in ("memory_limit", "memory_limit="):
        with pytest.raises(HintError, match="it has no value; write memory_limit=VALUE"):
            parse_hints([text])
    with pytest.raises(HintError, match="did you mean 'memory_limit'"):
        parse_hints(["memory_limt=3GiB"])
