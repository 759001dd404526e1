"""A given prediction: the user says what the answer will probably be, as when a file is edited or a text is corrected.

The draft proposes what follows in the prediction. Where the target wrote something else, it looks for the last words of
the answer in the prediction and goes on from there. (What services offer as "predicted outputs".)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eval.decode import Request
from eval.proposers.rows import chains, settled
from heads.artifact import UserError
from heads.base import Committed, Draw, FeatureNeeds, Proposal
from heads.target import FrozenTarget


@dataclass
class PredictionRow:
    """A prediction, the answer so far, where in the prediction it goes on, and prompt tokens still to be settled."""

    prediction: list[int]
    answer: list[int]
    place: int
    prompt_left: int


@dataclass
class PredictionState:
    rows: list[PredictionRow]
    device: torch.device | str = "cpu"


class GivenPrediction:
    """Proposes up to γ tokens of the prediction that was given for a request, or none where none was given.

    path: JSON lines {"id": …, "prediction": …}, one for each request of `requests` that has one, in any order; ids
    that are not among them are ignored. max_ngram: tokens of the answer that are looked for after a divergence.
    Raises UserError when the file is missing, cannot be read or speaks of none of the requests.
    """

    needs = FeatureNeeds(taps=(), last=False)

    def __init__(self, *, target: FrozenTarget, requests: Sequence[Request], path: str, max_ngram: int = 4) -> None:
        if max_ngram < 1:
            raise UserError(f"rivals.given_prediction.max_ngram={max_ngram} must be at least 1.")
        self.max_ngram = max_ngram
        texts = predictions_for(requests, path)
        known = [request for request in requests if request.request_id in texts]
        # The decoder knows requests by their prompts only; equal prompts may have one prediction.
        self.predictions: dict[tuple[int, ...], list[int]] = {}
        for request in known:
            tokens = target.tokenizer(texts[request.request_id], add_special_tokens=False)["input_ids"]
            if self.predictions.setdefault(request.prompt, tokens) != tokens:
                raise UserError(
                    f"{path} predicts different answers to the same prompt, one of them for {request.request_id}; "
                    f"keep one."
                )

    def start(self, prompts: Sequence[Sequence[int]]) -> PredictionState:
        return PredictionState(
            [PredictionRow(self.predictions.get(tuple(prompt), []), [], 0, len(prompt) - 1) for prompt in prompts]
        )

    def commit(self, state: PredictionState, committed: Committed) -> None:
        state.device = committed.next_ids_BM.device
        for row, tokens in zip(state.rows, settled(committed), strict=True):
            skipped = min(row.prompt_left, len(tokens))
            row.prompt_left -= skipped
            for token in tokens[skipped:]:
                row.answer.append(token)
                if row.place < len(row.prediction) and row.prediction[row.place] == token:
                    row.place += 1
                else:
                    row.place = self._found(row)

    def propose(self, state: PredictionState, depth: int, draw: Draw) -> Proposal:
        return chains([row.prediction[row.place :][:depth] for row in state.rows], state.device)

    def _found(self, row: PredictionRow) -> int:
        """Where the prediction goes on after the last tokens of the answer: the longest match, ahead before behind."""
        for size in range(min(self.max_ngram, len(row.answer)), 0, -1):
            tail, last = row.answer[-size:], len(row.prediction) - size
            # A single token is too little to go back for.
            behind = range(min(row.place, last + 1)) if size > 1 else range(0)
            for start in (*range(row.place, last + 1), *behind):
                if row.prediction[start : start + size] == tail:
                    return start + size
        return row.place + 1  # as if one token had been replaced by another


def predictions_for(requests: Sequence[Request], path: str) -> dict[str, str]:
    """Predicted text by request id. Raises UserError where the file speaks of none of the requests."""
    texts = read_predictions(path)
    if not any(request.request_id in texts for request in requests):
        example = requests[0].request_id if requests else "…"
        raise UserError(
            f"{path} has no prediction for any of the {len(requests)} requests; its ids must be those of the "
            f"traffic, such as {example}."
        )
    return texts


def read_predictions(path: str) -> dict[str, str]:
    """Predicted text by request id. Raises UserError naming the line that is wrong."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"rivals.given_prediction.path={path} cannot be read as text ({type(error).__name__}); "
            f'name a file of JSON lines {{"id": …, "prediction": …}}.'
        ) from error
    texts: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # no JSON, digits without end, brackets without end
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("prediction"), str) or "id" not in row:
            raise UserError(f'Line {number} of {path} is not {{"id": …, "prediction": "text"}}; correct or delete it.')
        texts[str(row["id"])] = row["prediction"]
    return texts
