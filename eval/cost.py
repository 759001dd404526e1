"""What a round costs, measured: a draft step c and the slope of verification s, in units of one plain target step.

For each batch and context the pieces of a round are timed in turn, so that the machine's drift falls on all alike: a
plain step, steps over 1 + γ positions, and the head's chain of γ. Each is what the decoding loop does for it: forward,
logits, verdict and the upkeep of the cache; for the head, taking in what was accepted and drafting. Texts are random,
as times do not depend on them. What is done with the numbers is known by `eval.cost_table`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eval.cost_table import CostCell, RoundCost, Spread
from eval.decode import Proposer
from eval.sampling import Sampling
from eval.verify import verify
from heads.artifact import UserError
from heads.base import Committed, FeatureNeeds, Proposal
from heads.cache import BlockCache
from heads.target import FrozenTarget

_CHUNK = 512
_ACCEPTED = 2  # slots that a round brings the head, about what rounds bring it


@dataclass(frozen=True)
class CostPlan:
    """Where to measure: batches, contexts (positions in the cache) and draft lengths; repeats of each piece, of which
    median and quartiles are kept. Raises UserError on values that cannot be."""

    batches: tuple[int, ...] = (1, 2, 4, 8)
    contexts: tuple[int, ...] = (128, 512)
    gammas: tuple[int, ...] = (1, 3, 7)
    repeats: int = 7

    def __post_init__(self) -> None:
        places = {"batches": self.batches, "contexts": self.contexts, "gammas": self.gammas}
        for name, values in places.items():
            if not values or min(values) < 1 or list(values) != sorted(set(values)):
                raise UserError(f"bench.{name}={list(values)} must be ascending whole numbers from 1 on, each once.")
        if self.repeats < 3:
            raise UserError(f"bench.repeats={self.repeats} is too few for a median; give 3 or more.")


def measure_costs(
    target: FrozenTarget,
    proposer: Proposer,
    plan: CostPlan,
    on_cell: Callable[[CostCell], None] = lambda cell: None,
) -> list[CostCell]:
    """Every batch at every context. Raises UserError where a context does not fit into the target's."""
    if plan.contexts[-1] + _room(plan) > target.max_length:
        raise UserError(
            f"bench.contexts={list(plan.contexts)} ends beyond the {target.max_length} positions of the target, of "
            f"which {_room(plan)} are needed on top; leave out what is larger."
        )
    cells = []
    for batch in plan.batches:
        for context in plan.contexts:
            cells.append(_Place(target, proposer, batch, context).measure(plan))
            on_cell(cells[-1])
    return cells


def _room(plan: CostPlan) -> int:
    """Positions that the measurement itself takes."""
    return _ACCEPTED * (plan.repeats + 1) * len(plan.gammas) + 2 * plan.gammas[-1] + _ACCEPTED


class _Place:
    """A batch of rows of nearly one length, known to the target's cache and to the head."""

    def __init__(self, target: FrozenTarget, proposer: Proposer, batch: int, context: int) -> None:
        self.target, self.proposer, self.batch, self.context = target, proposer, batch, context
        # Rows of a server end at different columns, which changes the mask and the upkeep of the cache.
        self.lengths = [max(1, context - row % 4) for row in range(batch)]
        self.generator = torch.Generator().manual_seed(0)
        self.cache = BlockCache(batch, target.device)
        self.sampling = Sampling()
        self.state: Any = None

    @torch.inference_mode()
    def measure(self, plan: CostPlan) -> CostCell:
        known = self._begin()
        units: dict[tuple[str, int], Callable[[], float]] = {("verify", 0): lambda: self._verified(0)}
        for gamma in plan.gammas:
            units["verify", gamma] = lambda gamma=gamma: self._verified(gamma)  # type: ignore[misc]
            units["draft", gamma] = lambda gamma=gamma: self._drafted(gamma, known)  # type: ignore[misc]
        seconds: dict[tuple[str, int], list[float]] = {unit: [] for unit in units}
        order = list(units)
        for _ in range(1 + plan.repeats):
            for unit in order:
                seconds[unit].append(units[unit]())
            order = order[1:] + order[:1]
        plain = seconds["verify", 0][1:]  # the first turn warms up

        def ratio(kind: str, gamma: int) -> Spread:
            return _spread([one / base for one, base in zip(seconds[kind, gamma][1:], plain, strict=True)])

        rounds = tuple(RoundCost(gamma, ratio("verify", gamma), ratio("draft", gamma)) for gamma in plan.gammas)
        return CostCell(self.batch, self.context, _spread(plain), rounds)

    def _begin(self) -> Committed:
        """Run random prompts through target and head; returns slots that the head can be given after a round."""
        needs, longest = self.proposer.needs, max(self.lengths)
        ids_BN = self._tokens(longest)
        parts = []
        for first in range(0, longest, _CHUNK):
            taken = [min(max(length - first, 0), _CHUNK) for length in self.lengths]
            block_BN = ids_BN[:, first : first + max(taken)]
            parts.append(self.target.forward(block_BN, cache=self.cache, counts=taken, taps=needs.taps))
            self.cache.keep(taken)
        last_BND, taps_BNE = (
            torch.cat(part, 1) for part in zip(*((p.last_BTD, p.taps_BTE) for p in parts), strict=True)
        )
        rows = zip(ids_BN.tolist(), self.lengths, strict=True)
        self.state = self.proposer.start([row[:length] for row, length in rows])
        count_B = torch.tensor(self.lengths, device=ids_BN.device)
        self.proposer.commit(self.state, Committed(ids_BN.roll(-1, 1), taps_BNE, last_BND, count_B))
        self.proposer.propose(self.state, 1, _greedy)
        few = min(_ACCEPTED, longest)
        each_B = torch.full((self.batch,), few, device=ids_BN.device)
        return Committed(ids_BN[:, :few], taps_BNE[:, :few].clone(), last_BND[:, :few].clone(), each_B)

    def _tokens(self, count: int) -> Tensor:
        size = (self.batch, count)
        return torch.randint(0, self.target.vocab_size, size, generator=self.generator).to(self.target.device)

    def _verified(self, gamma: int) -> float:
        """Seconds of a target step over the root and γ drafts, with its verdict; nothing of it stays."""
        block_BN = self._tokens(1 + gamma)
        needs = self.proposer.needs if gamma else FeatureNeeds()
        before, started = list(self.cache.lengths), self._now()
        output = self.target.forward(block_BN, cache=self.cache, counts=[1 + gamma] * self.batch, taps=needs.taps)
        logits_BNV = self.target.logits(output.last_BTD)
        assert torch.isfinite(logits_BNV.amax())  # as the loop asks
        verdict = verify(logits_BNV, Proposal.chain(block_BN[:, 1:]), self.sampling, self.generator)
        verdict.accepted_B.tolist()
        self.cache.keep([1 + min(gamma, row % 3) for row in range(self.batch)])
        seconds = self._now() - started
        self.cache.forget(before)
        return seconds

    def _drafted(self, gamma: int, settled: Committed) -> float:
        """Seconds of the head for a round: what the last one settled, and a chain of γ."""
        started = self._now()
        self.proposer.commit(self.state, settled)
        self.proposer.propose(self.state, gamma, _greedy)
        return self._now() - started

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


def _greedy(logits_BW: Tensor, **unused: Any) -> tuple[Tensor, None]:
    return logits_BW.max(-1).indices, None


def _spread(values: Sequence[float]) -> Spread:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.median(values), low, high)
