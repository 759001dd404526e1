"""Two drafts over the same requests: the difference of each number, with the interval of the difference.

Requests differ more from one another than drafts do, so two separate intervals overlap long before the question is
open; here every resample draws the same requests for both sides. Definitions are those of `eval.acceptance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eval.bootstrap import RESAMPLES, FloatArray
from eval.tally import Estimate, Tally, estimates, numbers, tally, weigh
from eval.trace import RequestTrace
from heads.artifact import UserError


@dataclass(frozen=True)
class PairedComparison:
    """First minus second, over `requests` requests; speed_ratio: tokens per second of decoding, first over second.

    requests_to_tell: how many requests a difference of this size in tokens per round would take to be told from none
    (the interval then ends at 0), if requests vary as these; None without an interval.
    """

    requests: int
    alpha: Estimate
    tokens_per_round: Estimate
    speed_ratio: Estimate | None
    requests_to_tell: int | None

    @property
    def better(self) -> bool | None:
        """Whether the first yields more tokens per round (True) or fewer (False); None: these requests cannot tell."""
        low, high = self.tokens_per_round.low, self.tokens_per_round.high
        if low is None or high is None or low <= 0 <= high:
            return None
        return low > 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"better": self.better}


def compare_paired(
    first: Sequence[RequestTrace],
    second: Sequence[RequestTrace],
    *,
    gamma: int,
    timed: tuple[Sequence[RequestTrace], Sequence[RequestTrace]] = ((), ()),
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> PairedComparison:
    """Compare two drafts; both must have decoded the same requests, matched by id.

    gamma: at least the longest proposal of either; timed: traces of both out of one timed run, for the speeds. Raises
    UserError where the requests are not the same.
    """
    ones, twos = ({trace.request_id: trace for trace in traces} for traces in (first, second))
    if set(ones) != set(twos) or not ones:
        only = sorted(set(ones) ^ set(twos))
        which = f"{only[0]} was decoded by one only" if only else "there are none"
        raise UserError(f"Two drafts are compared over the same requests, and {which}; evaluate both on the same.")
    sides = [tally([side[name] for name in ones], {}, gamma) for side in (ones, twos)]
    found = estimates(
        lambda weights_BR: _differences(sides, weights_BR), clusters=len(ones), resamples=resamples, seed=seed
    )
    tau = found["tokens_per_round"][0]
    return PairedComparison(
        requests=len(ones),
        alpha=found["alpha"][0],
        tokens_per_round=tau,
        speed_ratio=_speeds(*timed, resamples=resamples, seed=seed),
        requests_to_tell=_to_tell(tau, len(ones)),
    )


def _differences(sides: Sequence[Tally], weights_BR: FloatArray) -> dict[str, FloatArray]:
    one, two = (numbers(weigh(side, weights_BR)) for side in sides)
    return {name: one[name] - two[name] for name in ("alpha", "tokens_per_round")}


def _speeds(
    first: Sequence[RequestTrace], second: Sequence[RequestTrace], *, resamples: int, seed: int
) -> Estimate | None:
    twos = {trace.request_id: trace for trace in second}
    pairs = [(trace, twos[trace.request_id]) for trace in first if trace.request_id in twos]
    if not pairs:
        return None
    clock_R4 = np.array([[n for t in pair for n in (t.decoded_tokens, t.decoding_seconds)] for pair in pairs], float)

    def ratio(weights_BR: FloatArray) -> dict[str, FloatArray]:
        sums_B4 = weights_BR @ clock_R4
        with np.errstate(invalid="ignore", divide="ignore"):
            return {"ratio": (sums_B4[:, 0] / sums_B4[:, 1] / (sums_B4[:, 2] / sums_B4[:, 3]))[:, None]}

    return estimates(ratio, clusters=len(pairs), resamples=resamples, seed=seed)["ratio"][0]


def _to_tell(difference: Estimate, requests: int) -> int | None:
    """Half the width of an interval falls with the root of the requests; it must come down to the difference."""
    if difference.value is None or difference.low is None or difference.high is None or not difference.value:
        return None
    half = (difference.high - difference.low) / 2
    return int(np.ceil(requests * (half / difference.value) ** 2))
