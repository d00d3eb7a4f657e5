"""Numbers as people read them: counts with their nouns, percentages, sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

_WORDS = ((10**6, "million"), (10**9, "billion"), (10**12, "trillion"))


def did_you_mean(
    word: str, known: Iterable[str], otherwise: str, *, most: int = 1, cutoff: float = 0.6, quoted: bool = False
) -> str:
    """Return ``did you mean cpu0 or cpu1?`` for a misspelled word, or ``otherwise`` where no known word is similar."""
    near = get_close_matches(word, list(known), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(map(repr if quoted else str, near))}?" if near else otherwise


def plural(count: int, noun: str) -> str:
    """Return ``1 plan``, ``2 plans``, ``1,234 plans``, ``249 million plans``, ``2 studies``."""
    several = re.sub("([^aeiou])y$", r"\1ie", noun) + "s"
    return f"{many(count)} {noun if count == 1 else several}"


def operator_range(first: int, last: int) -> str:
    """Return ``operator 3``, or ``operators 3 to 7``; the last one is included."""
    return f"operator {first}" if first == last else f"operators {first} to {last}"


def many(count: int) -> str:
    """Return a count: whole below a million, then ``249 million``, and from 10^15 on its order of magnitude."""
    if count < 10**6:
        return f"{count:,}"
    if count >= 10**15:
        return f"about 10^{len(str(count)) - 1}"
    factor, word = next((f, w) for f, w in reversed(_WORDS) if count >= f)
    return f"{count / factor:.3g} {word}" if count < 999.5 * factor else f"{count // factor} {word}"


def percent(share: float, digits: int = 0) -> str:
    """Return ``39 %`` of 0.39."""
    return f"{100.0 * share:.{digits}f} %"


def seconds(duration_s: float) -> str:
    """Return ``0.4 s``, ``27 s``."""
    return f"{duration_s:.0f} s" if duration_s >= 9.5 else f"{duration_s:.1f} s"


def human_bytes(nbytes: int) -> str:
    """Return a size: ``512 B``, ``1.5 MB``."""
    if nbytes < 1000:
        return f"{nbytes} B"
    size, units = nbytes / 1000, ["KB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.1f} {units[0]}"
