"""Which of the evaluated heads comes out of a run, and when to stop looking for a better one.

It does not know what an evaluation is, nor where the chosen weights are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BY = "tokens_per_round"  # the number of an evaluation that decides; the higher the better


@dataclass
class Selection:
    """The evaluations so far, as JSON values: part of a checkpoint, so a resumed run decides as the whole one.

    step, value: of the best one (the first of equals), None before there is any; last: the newest value; waited:
    evaluations since the best; evaluated: the step of the newest; seconds: what all of them took.
    """

    count: int = 0
    step: int | None = None
    value: float | None = None
    last: float | None = None
    waited: int = 0
    evaluated: int = 0
    seconds: float = 0.0

    def take(self, step: int, value: float | None, seconds: float) -> bool:
        """Note an evaluation, of which nothing may have come out; returns whether it is the best so far."""
        self.count, self.evaluated, self.last = self.count + 1, step, value
        self.seconds += seconds
        better = value is not None and (self.value is None or value > self.value)
        self.waited = 0 if better else self.waited + 1
        if better:
            self.step, self.value = step, value
        return better

    def is_over(self, patience: int | None) -> bool:
        """Whether as many evaluations as that were not better than one before them."""
        return patience is not None and self.waited >= patience

    def facts(self) -> dict[str, Any] | None:
        """What was chosen and against what, for a manifest; None where nothing could be."""
        if self.step is None:
            return None
        return {"by": BY, "step": self.step, "value": self.value, "last": self.last, "evaluations": self.count}
