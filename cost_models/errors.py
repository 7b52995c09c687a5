"""What a caller of this package can handle, and the near misses its messages name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ClusterSpecError(ValueError):
    """A description of a device, a level or a cluster is incomplete or contradicts itself."""


class MissingRateError(ClusterSpecError):
    """A device has no rate for the dtype that an op computes in."""


def near_misses(name: str, known: Iterable[str], most: int = 3) -> str:
    """A clause that names the known names closest to `name`, or all of them where none is close."""
    names = sorted(known)
    folded = {candidate.lower(): candidate for candidate in names}
    close = [key for key in folded if name and key.startswith(name.lower())][:most]
    close = close or difflib.get_close_matches(name.lower(), list(folded), n=most, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(f"'{folded[key]}'" for key in close) + "?"
    return "known are " + ", ".join(f"'{candidate}'" for candidate in names)
