"""The formula against simulated decoders: no gap where acceptances are independent, the known signs where not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from simulated_traces import correlated_text, trace_of, walk_text

from eval.formula import FormulaCheck, autocorrelation, check_formula
from eval.trace import Round

GAMMAS = (1, 3, 7)


def checked(draw: Callable[[np.random.Generator], np.ndarray], requests: int = 150) -> FormulaCheck:
    """Each text is decoded at every γ, its right and wrong places drawn once."""
    rng = np.random.default_rng(3)
    texts = [list(draw(rng)) for _ in range(requests)]
    runs = {g: [trace_of(walk_text(t, gamma=g), request_id=f"r{i}") for i, t in enumerate(texts)] for g in GAMMAS}
    return check_formula(runs, resamples=500)


def test_independent_acceptances_leave_no_gap_and_no_reason() -> None:
    found = checked(lambda rng: rng.random(200) < 0.7)
    for row in found.rows:
        if row.gap is not None:
            assert row.gap.low <= 0 <= row.gap.high and abs(row.gap.value) < 0.01
    assert [row.gamma for row in found.rows if row.measured] == [0, *GAMMAS]
    assert sum(lag.correlation.low <= 0 <= lag.correlation.high for lag in found.autocorrelation) >= 7  # of 8 at 95 %
    assert all(abs(lag.correlation.value) < 0.05 for lag in found.autocorrelation)
    assert sum(one.low <= 0 <= one.high for one in found.drift) >= 6
    assert found.rows[16].formula.value == pytest.approx((1 - found.alpha.value**17) / (1 - found.alpha.value))
    for row in found.rows[1:8]:
        assert row.from_survival is not None and row.from_survival.value == pytest.approx(row.formula.value, rel=0.01)
    assert found.rows[8].from_survival is None and found.rows[0].formula.value == found.rows[0].from_survival.value == 1


def test_hard_and_easy_places_give_the_known_signs_and_are_seen() -> None:
    """At the pooled α too much is promised (0 … +5 %), at α_1 too little (-6 … -26 %); nearby outcomes agree."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        return rng.random(200) < correlated_text(rng, length=200, memory=0.8, spread=1.5, level=0.5)

    found = checked(draw)
    for gamma in (3, 7):
        row = found.rows[gamma]
        assert 0 < row.gap.low and row.gap.high < 0.05
        assert -0.26 < row.at_first.value / row.measured.value - 1 < -0.06
    near, far = found.autocorrelation[0].correlation, found.autocorrelation[-1].correlation
    assert near.low > 0.1 and abs(far.value) < 0.05  # memory 0.8 a token: nothing is left after 16 rounds
    assert found.drift[0].high < 0 < found.drift[-1].low  # who came far stands in an easy place


def test_requests_of_their_own_difficulty_correlate_at_every_distance() -> None:
    found = checked(lambda rng: rng.random(200) < rng.beta(3, 2))
    assert all(lag.correlation.low > 0.05 for lag in found.autocorrelation)


def test_drift_with_depth_is_not_taken_for_autocorrelation() -> None:
    """Acceptance falls with depth and is otherwise independent."""
    rng, chances, traces = np.random.default_rng(5), (0.9, 0.6, 0.3), []
    for i in range(200):
        rounds = []
        for _ in range(40):
            wrong = np.flatnonzero(rng.random(3) >= chances)
            rounds.append(Round(3, int(wrong[0]) if len(wrong) else 3))
        traces.append(trace_of(rounds, request_id=f"r{i}"))
    found = check_formula({3: traces}, resamples=500)
    assert all(abs(lag.correlation.value) < 0.04 for lag in found.autocorrelation)
    assert found.drift[0].low > 0 > found.drift[2].high
    assert found.rows[3].gap.low > 0.02 or found.rows[3].gap.high < -0.02


def test_correlation_by_hand() -> None:
    """First drafts 1 1 0 1 and 0 0 of six rounds, half of them right; one round proposed nothing."""
    one = trace_of([Round(2, 2), Round(2, 1), Round(2, 0), Round(0, 0), Round(2, 2)])
    two = trace_of([Round(2, 0), Round(2, 0)], request_id="r1")
    near, far = autocorrelation([one, two], lags=[1, 4])
    assert near.pairs == 3 and near.correlation.value == pytest.approx((0.25 - 0.25 + 0.25) / 0.75)
    assert far.pairs == 1 and far.correlation.value == pytest.approx(1.0)
    (none,) = autocorrelation([two], lags=[1])
    assert none.pairs == 1 and none.correlation.value is None  # it never varies
