"""What somebody probably meant."""

from collections.abc import Iterable
from difflib import SequenceMatcher

from wan_ds.config.foreign_keys import OTHER_NAMES


def suggest(key: str, candidates: Iterable[str]) -> str:
    """`; did you mean a.b?` with the candidate that others call so, or up to three that look most like `key`,
    or nothing."""
    candidates = list(candidates)
    if (ours := OTHER_NAMES.get(key.rpartition(".")[2])) in candidates:
        return f"; did you mean {ours}?"
    scored = sorted(((_likeness(key, candidate), candidate) for candidate in candidates), reverse=True)
    best = [candidate for score, candidate in scored if score > 0.6 and score >= scored[0][0] - 0.02][:3]
    return f"; did you mean {' or '.join(best)}?" if best else ""


def _likeness(typed: str, candidate: str) -> float:
    """From 0 to 1: the same last component, its initials (learning_rate is lr), or letters in common."""
    last, other = typed.rpartition(".")[2], candidate.rpartition(".")[2]
    whole = SequenceMatcher(None, typed, candidate).ratio()
    if last == other:
        return 0.9 + 0.1 * whole
    initials = "".join(word[0] for word in last.split("_") if word)
    if len(initials) > 1 and initials == other:
        return 0.85 + 0.1 * whole
    return 0.8 * SequenceMatcher(None, last, other).ratio() + 0.2 * whole
