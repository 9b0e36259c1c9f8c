"""What of kpolicy raised while SGLang serves: counted, said once a place, and left to SGLang's own rule."""

from __future__ import annotations

import logging
from collections import Counter

__all__ = ["Failures"]

logger = logging.getLogger(__name__)


class Failures:
    """How often something of kpolicy raised, by what it was."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, what: str, error: Exception, then: str = "SGLang's own rule decides there") -> None:
        """Count it; the first of its kind is logged, with what happens instead.

        Args:
            what: what raised, for example ``the policy of decode``.
            error: what it raised.
            then: what happens instead.
        """
        self.counts[what] += 1
        if self.counts[what] == 1:
            logger.warning(
                "kpolicy: %s raised, and %s: %s: %s", what, then, type(error).__name__, error, exc_info=error
            )

    @property
    def total(self) -> int:
        """All of them."""
        return self.counts.total()
