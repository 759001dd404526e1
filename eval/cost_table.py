"""Measured costs as a table to ask: what a round with γ drafts takes at a batch and a context, in plain target steps.

Between measured points it is interpolated (batch and context by their logarithms), a little beyond them continued and
said so, far beyond them refused. `costs.json` holds the points. This module times nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from heads.artifact import UserError

FORMAT = 1
_FAR = 2.0  # beyond the outermost points by more than this factor is no measurement any more


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class RoundCost:
    """At one γ, in plain target steps of the same turn: a target step over 1 + γ positions, and the head's work."""

    gamma: int
    verify: Spread
    draft: Spread

    @property
    def total(self) -> float:
        """The whole round."""
        return self.verify.median + self.draft.median


@dataclass(frozen=True)
class CostCell:
    """One batch at one context. step: seconds of a plain target step for the whole batch; rounds: by ascending γ."""

    batch: int
    context: int
    step: Spread
    rounds: tuple[RoundCost, ...]

    @property
    def fit(self) -> tuple[float, float, float]:
        """(s, c, overhead) of round(γ) = 1 + s·γ + c·γ + overhead, by least squares over the measured γ.

        c is what one more draft costs: what drafting costs once a round stands in overhead. The report's `draft_cost`
        is another number: all of drafting, shared out over the drafted tokens.
        """
        gammas = [one.gamma for one in self.rounds]
        if len(gammas) == 1:
            one = self.rounds[0]
            return (one.verify.median - 1) / one.gamma, one.draft.median / one.gamma, 0.0
        slope, base = np.polyfit(gammas, [one.verify.median for one in self.rounds], 1)
        step, first = np.polyfit(gammas, [one.draft.median for one in self.rounds], 1)
        return float(slope), float(step), float(base - 1 + first)

    def round_cost(self, gamma: int) -> float:
        """The cost of a round, from measured points as far as they go, then along the fitted slopes."""
        last = self.rounds[-1]
        if gamma > last.gamma:
            slope, step, _ = self.fit
            return last.total + (slope + step) * (gamma - last.gamma)
        gammas, totals = [0, *(one.gamma for one in self.rounds)], [1.0, *(one.total for one in self.rounds)]
        return float(np.interp(gamma, gammas, totals))

    def to_json(self) -> dict[str, Any]:
        slope, step, overhead = self.fit
        return {**asdict(self), "s": slope, "c": step, "overhead": overhead}


class Costs(Protocol):
    """What advice needs to know of the machine: measured (`CostTable`) or reckoned (`eval.roofline`)."""

    def round_cost(self, batch: float, context: float, gamma: int) -> float: ...

    def step_seconds(self, batch: float, context: float) -> float: ...

    def reach(self, batch: float, context: float, gamma: int) -> list[str]: ...


@dataclass(frozen=True)
class CostTable:
    """The cells of a full grid of batches and contexts; facts: on what they were measured."""

    cells: Sequence[CostCell]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batches(self) -> list[int]:
        return sorted({cell.batch for cell in self.cells})

    @property
    def contexts(self) -> list[int]:
        return sorted({cell.context for cell in self.cells})

    @property
    def gammas(self) -> list[int]:
        return [one.gamma for one in self.cells[0].rounds]

    def round_cost(self, batch: float, context: float, gamma: int) -> float:
        """Plain target steps that a round with γ drafts takes; 1 at γ = 0. Raises UserError far beyond the points."""
        self.reach(batch, context, gamma)
        return self._between(batch, context, lambda cell: cell.round_cost(gamma))

    def step_seconds(self, batch: float, context: float) -> float:
        """Seconds of a plain target step for the whole batch."""
        self.reach(batch, context, 0)
        return math.exp(self._between(batch, context, lambda cell: math.log(cell.step.median)))

    def reach(self, batch: float, context: float, gamma: int) -> list[str]:
        """What lies beyond the measured points, in words; raises UserError where that is too far to say anything."""
        notes = []
        asked = (("batch", batch, self.batches), ("context", context, self.contexts))
        for name, value, points in asked:
            if not points[0] / _FAR <= value <= points[-1] * _FAR:
                plural = {"batch": "batches", "context": "contexts"}[name]
                raise UserError(
                    f"load.{name}={value:g} is far beyond the measured {points[0]}…{points[-1]}; measure it with "
                    f"python -m scripts.bench bench=cost bench.{plural}=[…]."
                )
            if not points[0] <= value <= points[-1]:
                notes.append(f"{name} {value:g} continues the measured {points[0]}…{points[-1]}")
        deepest = self.gammas[-1]
        if gamma > deepest * _FAR:
            raise UserError(
                f"A draft length of {gamma} is far beyond the measured {deepest}; set max_gamma={deepest}, or measure "
                f"it with python -m scripts.bench bench=cost bench.gammas=[…]."
            )
        if gamma > deepest:
            notes.append(f"γ {gamma} continues the measured 1…{deepest}")
        return notes

    def _between(self, batch: float, context: float, value: Callable[[CostCell], float]) -> float:
        by_place = {(cell.batch, cell.context): value(cell) for cell in self.cells}
        batches, contexts = self.batches, self.contexts
        along = [_line(contexts, [by_place[b, c] for c in contexts], context) for b in batches]
        return _line(batches, along, batch)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **self.facts, "cells": [cell.to_json() for cell in self.cells]}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> CostTable:
        """The inverse of `to_json`. Raises UserError on a file of another version."""
        if value.get("format") != FORMAT:
            raise UserError("The costs were written by another version; measure them again with bench=cost.")
        cells = [
            CostCell(
                cell["batch"],
                cell["context"],
                Spread(**cell["step"]),
                tuple(
                    RoundCost(one["gamma"], Spread(**one["verify"]), Spread(**one["draft"])) for one in cell["rounds"]
                ),
            )
            for cell in value["cells"]
        ]
        facts = {name: one for name, one in value.items() if name not in ("format", "cells")}
        return CostTable(cells, facts)


def _line(points: Sequence[int], values: Sequence[float], at: float) -> float:
    """Linear in the logarithm between the points, and on from the last two beyond them."""
    if len(points) == 1:
        return values[0]
    right = min(max(bisect_left(points, at), 1), len(points) - 1)
    low, high = math.log(points[right - 1]), math.log(points[right])
    share = (math.log(at) - low) / (high - low)
    return values[right - 1] + share * (values[right] - values[right - 1])
