"""Regenerate and collect: the target answers every turn of the traffic, and the store keeps its states.

Turn w of all conversations is wave w: a wave needs the answers of the wave before. Within a wave the prompts
are sorted by length, longest first, and cut into batches; one batch is one shard. The plan follows from the
conversations and the settings alone, so a killed run, started again, skips every shard that is whole and
makes the others as they would have been: the finished store is the same byte for byte (on one machine, with
one number of threads).

A prompt that is too long, that the template refuses or that the model fails on goes to the quarantine with
its reason, and the later turns of its conversation are left out; nothing else stops.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from heads.artifact import UserError
from heads.base import FeatureNeeds
from heads.target import FrozenTarget
from training.progress import Progress
from training.regenerate import Generation, answer_batch
from training.states import Answer
from training.store import STORED, Storage, check_disk, estimate_bytes
from training.store_writer import Document, StoreWriter, wider_needs
from training.traffic import Conversation, fingerprint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """One turn waiting for its answer; ids is the rendered prompt."""

    conversation: Conversation
    turn: int
    ids: tuple[int, ...]

    @property
    def id(self) -> str:
        """The id its document will have."""
        return f"{self.conversation.id}#{self.turn}"


def collect(
    *,
    target: FrozenTarget,
    conversations: Sequence[Conversation],
    folder: str | Path,
    needs: FeatureNeeds,
    generation: Generation,
    storage: Storage = STORED,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Fill the features folder, or go on filling it, and return its manifest; a finished one is returned at
    once. A folder that was begun for more taps than `needs` keeps them: it serves several heads. One whose states are
    computed online serves every head.

    Raises UserError when the folder belongs to other settings, target or traffic, when the disk is too small,
    and when no conversation could be used.
    """
    needs.check(target.num_layers)
    needs = FeatureNeeds(last=False) if storage.states == "online" else wider_needs(folder, needs)
    target.render([{"role": "user", "content": "?"}])  # without a chat template nothing can be asked
    settings = {
        "needs": {"taps": list(needs.taps), "last": needs.last},
        "collect": asdict(storage),
        "target": target.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "hidden_size": target.hidden_size,
        "generation": asdict(generation),
        "traffic": {"fingerprint": fingerprint(conversations), "conversations": len(conversations)},
    }
    writer = StoreWriter(folder, settings)
    if (manifest := writer.finished()) is not None:
        logger.info("%s is complete: %d documents are used as they are", folder, manifest["documents"])
        return manifest
    run = _Run(target=target, needs=needs, generation=generation, storage=storage, writer=writer)
    run.check_disk(conversations)
    return run.run(conversations, config)


class _Run:
    """One pass over the traffic."""

    def __init__(
        self,
        *,
        target: FrozenTarget,
        needs: FeatureNeeds,
        generation: Generation,
        storage: Storage,
        writer: StoreWriter,
    ) -> None:
        self.target, self.needs, self.generation, self.writer = target, needs, generation, writer
        self.storage = storage
        self.answers: dict[str, list[str]] = {}
        self.refused: list[dict[str, Any]] = []
        self.shards: list[str] = []

    def check_disk(self, conversations: Sequence[Conversation]) -> None:
        """Refuse to begin what cannot fit, taking every answer at its longest."""
        tokens = 0
        for conversation in conversations:
            for turn in range(len(conversation.turns)):
                prompt = self._render(conversation, [""] * turn)
                if isinstance(prompt, str) or len(prompt) > self.generation.max_prompt_tokens:
                    break
                longest = len(prompt) + turn * self.generation.max_new_tokens
                tokens += min(longest, self.generation.max_prompt_tokens) + self.generation.max_new_tokens
        target = self.target
        needed = estimate_bytes(
            self.needs, tokens, hidden_size=target.hidden_size, dtype=target.dtype, storage=self.storage
        )
        there = sum(path.stat().st_size for path in self.writer.folder.glob("*.safetensors"))
        check_disk(self.writer.folder, needed - there)
        logger.info("the features of up to %d tokens take at most %.2f GB", tokens, needed / 1e9)

    def run(self, conversations: Sequence[Conversation], config: Mapping[str, Any] | None) -> dict[str, Any]:
        """Answer all waves and finish the store."""
        self.answers = {conversation.id: [] for conversation in conversations}
        assert len(self.answers) == len(conversations), "the ids of conversations are distinct"
        turns = [len(conversation.turns) for conversation in conversations]
        with Progress(total=sum(turns), label="regenerate") as progress:
            for turn in range(max(turns, default=0)):
                for batch in self._wave(conversations, turn):
                    self._batch(batch, progress)
                progress.advance_to(sum(min(count, turn + 1) for count in turns))
        reasons = Counter(row["reason"] for row in self.refused)
        if not any(self.answers.values()):
            why = "; ".join(f"{reason}: {count}" for reason, count in reasons.most_common()) or "there are none"
            raise UserError(
                f"None of the {len(conversations)} conversations gave an answer to learn from ({why}); raise "
                f"generation.max_prompt_tokens, lower generation.max_new_tokens, or choose another traffic=."
            )
        if reasons:
            told = ", ".join(f"{reason}: {count}" for reason, count in reasons.items())
            logger.warning("prompts set aside in %s: %d (%s)", self.writer.folder, len(self.refused), told)
        return self.writer.finish(
            self.shards,
            refused=self.refused,
            vocab_size=self.target.vocab_size,
            body={"quarantined": dict(reasons.most_common())},
            config=config,
        )

    def _wave(self, conversations: Sequence[Conversation], turn: int) -> Iterator[list[Request]]:
        """The batches of one wave."""
        requests: list[Request] = []
        for conversation in conversations:
            answers = self.answers[conversation.id]
            if len(conversation.turns) <= turn or len(answers) < turn:
                continue
            prompt = self._render(conversation, answers)
            reason = prompt if isinstance(prompt, str) else self._unfit(prompt)
            request = Request(conversation, turn, () if isinstance(prompt, str) else tuple(prompt))
            if reason is None:
                requests.append(request)
            else:
                self._refuse(request, reason)
        requests.sort(key=lambda request: (-len(request.ids), request.id))
        size = self.generation.batch_size
        yield from (requests[begin : begin + size] for begin in range(0, len(requests), size))

    def _render(self, conversation: Conversation, answers: Sequence[str]) -> list[int] | str:
        """The prompt's token ids, or why there are none."""
        try:
            return self.target.render(conversation.messages(answers), tools=conversation.tools)
        except UserError as error:
            return str(error)

    def _unfit(self, ids: Sequence[int]) -> str | None:
        """Why the target cannot be asked this, if it cannot."""
        length = len(ids)
        if not 0 <= min(ids, default=-1) <= max(ids, default=-1) < self.target.vocab_size:
            return "no tokens, or tokens outside the target's vocabulary"
        if length > self.generation.max_prompt_tokens:
            return f"longer than max_prompt_tokens={self.generation.max_prompt_tokens}"
        if length + self.generation.max_new_tokens > self.target.max_length:
            return f"no room for max_new_tokens in the context of {self.target.max_length} tokens"
        return None

    def _refuse(self, request: Request, reason: str) -> None:
        lost = len(request.conversation.turns) - request.turn
        row = {
            "id": request.id,
            "conversation": request.conversation.id,
            "turn": request.turn,
            "reason": reason,
        }
        self.refused.append({**row, "prompt_tokens": len(request.ids), "turns_lost": lost})

    def _batch(self, batch: Sequence[Request], progress: Progress) -> None:
        """Make one shard, or take over the one that is there."""
        name = f"shard-{len(self.shards):05d}"
        key = [request.id for request in batch]
        began = time.monotonic()
        index = self.writer.shard(name, key)
        reused = index is not None
        if index is None:
            results = self._answer(batch, _seed(self.generation.seed, key))
            documents = [
                self._document(request, result)
                for request, result in zip(batch, results, strict=True)
                if isinstance(result, Answer)
            ]
            failed = {
                request.id: result for request, result in zip(batch, results, strict=True) if isinstance(result, str)
            }
            index = self.writer.add(name, key, documents, failed)
        self.shards.append(name)
        for request in batch:
            if request.id in index["failed"]:
                self._refuse(request, index["failed"][request.id])
        for row in index["documents"]:
            self.answers[row["conversation"]].append(row["text"])
        tokens = sum(row["tokens"] for row in index["documents"])
        progress.advance(len(batch), tokens=0 if reused else tokens, seconds=time.monotonic() - began)

    def _answer(self, batch: Sequence[Request], seed: int) -> list[Answer | str]:
        """Answers in the batch's order; a string, the reason, where the model fails even on the prompt
        alone."""
        prompts = [request.ids for request in batch]
        try:
            answers = answer_batch(self.target, prompts, taps=self.needs.taps, generation=self.generation, seed=seed)
            return list(answers)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"The device has too little memory for generation.batch_size={len(batch)} prompts of up to "
                f"{max(map(len, prompts))} tokens; choose a smaller generation.batch_size."
            ) from error
        except (RuntimeError, IndexError, ValueError) as error:
            if len(batch) == 1:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                return [f"the model fails on it: {reason[:200]}"]
        return [result for request in batch for result in self._answer([request], seed)]

    def _document(self, request: Request, answer: Answer) -> Document:
        text = self.target.tokenizer.decode(answer.ids_T[answer.answer_start :], skip_special_tokens=True)
        return Document(
            conversation=request.conversation.id,
            slice=request.conversation.slice,
            turn=request.turn,
            ids_T=answer.ids_T,
            answer_start=answer.answer_start,
            finish_reason=answer.finish_reason,
            text=text,
            taps_TE=answer.taps_TE if self.needs.taps else None,
            last_TD=answer.last_TD if self.needs.last else None,
            lse_T=answer.lse_T if self.storage.states == "stored" else None,
        )


def _seed(seed: int, key: Sequence[str]) -> int:
    """A seed of its own for each batch, so that a batch made again draws the same."""
    return int(hashlib.sha256("\n".join([str(seed), *key]).encode()).hexdigest()[:12], 16)
