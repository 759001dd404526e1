"""Collect: the states of every answer to the traffic, in a store, by one process or by all of a launch.

Requests come in waves from a source (`training.requests`): the target answers every turn anew, here or as a server that
serves it, turn w of all conversations being wave w; or the answers are those of the logs. Within a wave requests are
sorted by length, longest first, and cut into batches; one batch is one shard, made by one process. The plan follows
from the conversations and the settings alone, so a killed run, started again, with as many processes or others, skips
every shard that is whole and makes the rest as they would have been: the finished store is the same byte for byte (on
one machine, with one number of threads). Between two waves the processes wait for each other and read all answers from
the shards' indexes.

A request that is too long, that the template refuses or that the model fails on goes to the quarantine with its reason;
nothing else stops.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from heads.artifact import UserError
from heads.base import FeatureNeeds
from heads.target import FrozenTarget
from training.extracted import ExtractedStates
from training.logged import Logged
from training.processes import Peers
from training.progress import Progress
from training.regenerate import Generation, seed_of
from training.requests import Request, RequestSource, Written
from training.served import AnswerServer
from training.served_answers import Served
from training.states import Answer, StatesReader, known_states
from training.store import STORED, Storage, check_disk, estimate_bytes
from training.store_writer import Document, StoreWriter, wider_needs
from training.traffic import LOGGED, REGENERATE, Conversation, fingerprint

logger = logging.getLogger(__name__)


def collect(
    *,
    target: FrozenTarget,
    conversations: Sequence[Conversation],
    folder: str | Path,
    needs: FeatureNeeds,
    generation: Generation,
    answers: str = REGENERATE,
    storage: Storage = STORED,
    verified: bool = True,
    peers: Peers | None = None,
    server: AnswerServer | None = None,
    reader: ExtractedStates | None = None,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Fill the features folder, or go on filling it, and return its manifest; a finished one is returned at
    once. A folder that was begun for more taps than `needs` keeps them: it serves several heads. One whose states are
    computed online serves every head.

    answers: REGENERATE, or LOGGED for those that the conversations bring. verified: whether a finished folder's files
    are compared with their checksums, and what is damaged made again. peers: the processes that share the work, all of
    which call this. server: what writes the answers in the target's place; reader: what computes their states in its
    place, which answers that the target writes here do not need.
    Raises UserError when the folder belongs to other settings, target or traffic, when the disk is too small,
    and when no conversation could be used.
    """
    peers = peers or Peers()
    with peers.step():
        needs.check(target.num_layers)
        needs = FeatureNeeds(last=False) if storage.states == "online" else wider_needs(folder, needs)
        storage.check(needs)
        if any(conversation.ids for conversation in conversations) and answers != LOGGED:
            raise UserError(
                "Some of the traffic is token ids, which the target cannot answer anew; set collect.answers=logged."
            )
        if not all(conversation.ids for conversation in conversations):
            target.render([{"role": "user", "content": "?"}])  # without a chat template nothing can be asked
        source: RequestSource
        states: StatesReader = known_states if reader is None else reader
        if answers == LOGGED:
            source = Logged(target, conversations, generation=generation, taps=needs.taps, states=states)
            how: dict[str, Any] = {"answers": LOGGED, "generation": source.settings}
        elif server is not None:
            source = Served(target, conversations, generation=generation, taps=needs.taps, server=server, states=states)
            how = {"engine": "openai", "generation": asdict(generation)}
        else:
            assert reader is None, "answers that are written here have their states"
            source = Written(target, conversations, generation=generation, taps=needs.taps)
            how = {"generation": asdict(generation)}
        if reader is not None:
            how["features"] = "vllm"
        settings = {
            "needs": {"taps": list(needs.taps), "last": needs.last},
            "collect": asdict(storage),
            "target": target.fingerprint,
            "dtype": str(target.dtype).removeprefix("torch."),
            "hidden_size": target.hidden_size,
            **how,
            "traffic": {"fingerprint": fingerprint(conversations), "conversations": len(conversations)},
        }
        writer = StoreWriter(folder, settings)
        manifest = writer.finished(verified=verified and peers.main)
        run = _Run(target=target, needs=needs, source=source, storage=storage, writer=writer, peers=peers)
        if manifest is None and peers.main:
            run.check_disk()
    # The first process alone has compared checksums, and what it says holds for all.
    if peers.first(manifest is not None):
        assert manifest is not None
        logger.info("%s is complete: %d documents are used as they are", folder, manifest["documents"])
        return manifest
    with server or contextlib.nullcontext(), reader or contextlib.nullcontext():
        run.run(conversations, generation, on_policy=answers != LOGGED, config=config)
    manifest = writer.finished()
    assert manifest is not None, "a run that ends has finished the store"
    return manifest


class _Run:
    """One pass over the traffic."""

    def __init__(
        self,
        *,
        target: FrozenTarget,
        needs: FeatureNeeds,
        source: RequestSource,
        storage: Storage,
        writer: StoreWriter,
        peers: Peers,
    ) -> None:
        self.target, self.needs, self.source, self.writer, self.peers = target, needs, source, writer, peers
        self.storage = storage
        self.answers: dict[str, list[str]] = {}  # with which each conversation goes on
        self.documents = 0
        self.refused: list[dict[str, Any]] = []
        self.shards: list[str] = []

    def check_disk(self) -> None:
        """Refuse to begin what cannot fit."""
        tokens, target = self.source.most_tokens(), self.target
        needed = estimate_bytes(
            self.needs, tokens, hidden_size=target.hidden_size, dtype=target.dtype, storage=self.storage
        )
        there = sum(path.stat().st_size for path in self.writer.folder.glob("*.safetensors"))
        check_disk(self.writer.folder, needed - there)
        logger.info("the features of up to %d tokens take at most %.2f GB", tokens, needed / 1e9)

    def run(
        self,
        conversations: Sequence[Conversation],
        generation: Generation,
        *,
        on_policy: bool,
        config: Mapping[str, Any] | None,
    ) -> None:
        """Answer all waves and finish the store."""
        self.answers = {conversation.id: [] for conversation in conversations}
        assert len(self.answers) == len(conversations), "the ids of conversations are distinct"
        turns, each = self.source.turns, self.source.answers
        with Progress(total=sum(turns) * each, label=self.source.label, shown=self.peers.main) as progress:
            for number in range(self.source.waves):
                self._wave(number, generation, progress)
                last = number + 1 == self.source.waves
                progress.advance_to(each * (sum(turns) if last else sum(min(count, number + 1) for count in turns)))
        with self.peers.step():
            reasons = Counter(row["reason"] for row in self.refused)
            if not self.documents:
                why = "; ".join(f"{reason}: {count}" for reason, count in reasons.most_common()) or "there are none"
                raise UserError(
                    f"None of the {len(conversations)} conversations gave an answer to learn from ({why}); "
                    f"{self.source.remedy}."
                )
            if self.peers.main:
                self._finish(reasons, on_policy, config)

    def _finish(self, reasons: Counter[str], on_policy: bool, config: Mapping[str, Any] | None) -> None:
        if reasons:
            told = ", ".join(f"{reason}: {count}" for reason, count in reasons.items())
            logger.warning("prompts set aside in %s: %d (%s)", self.writer.folder, len(self.refused), told)
        self.writer.finish(
            self.shards,
            refused=self.refused,
            vocab_size=self.target.vocab_size,
            body={"on_policy": on_policy, "quarantined": dict(reasons.most_common())},
            config=config,
        )

    def _wave(self, number: int, generation: Generation, progress: Progress) -> None:
        """Make this process's shards of a wave, and take the answers of all of them."""
        shards: list[tuple[str, list[Request]]] = []
        with self.peers.step():
            requests, refused = self.source.wave(number, self.answers)
            self.refused += [refusal.to_row() for refusal in refused]
            requests.sort(key=lambda request: (-request.length, request.id))
            size = generation.batch_size
            batches = [requests[begin : begin + size] for begin in range(0, len(requests), size)]
            shards += [(f"shard-{len(self.shards) + place:05d}", batch) for place, batch in enumerate(batches)]
            others = [shard for place, shard in enumerate(shards) if place % self.peers.count != self.peers.rank]
            own = shards[self.peers.rank :: self.peers.count]
            self.source.expect([request for name, batch in own if not self.writer.has(name) for request in batch])
            for name, batch in own:
                self._make(name, batch, generation.seed, progress)
                while self.peers.main and others and self.writer.has(others[0][0]):
                    progress.advance(len(others.pop(0)[1]), tokens=0, seconds=0.0)
        for name, batch in shards:
            index = self.writer.index(name)
            failed = [request for request in batch if request.id in index["failed"]]
            self.refused += [self.source.failed(one, index["failed"][one.id]).to_row() for one in failed]
            first = {request.id for request in batch if not request.answer}
            self.documents += len(index["documents"])
            for row in index["documents"]:
                if row["id"] in first:
                    self.answers[row["conversation"]].append(row["text"])
        self.shards += [name for name, _ in shards]

    def _make(self, name: str, batch: Sequence[Request], seed: int, progress: Progress) -> None:
        """Make one shard, unless it is there."""
        key = [request.id for request in batch]
        began = time.monotonic()
        made = 0
        if self.writer.shard(name, key) is None:
            results = list(zip(batch, self._answer(batch, seed_of(seed, key)), strict=True))
            documents = [self._document(request, result) for request, result in results if isinstance(result, Answer)]
            failed = {request.id: result for request, result in results if isinstance(result, str)}
            index = self.writer.add(name, key, documents, failed)
            made = sum(row["tokens"] for row in index["documents"])
        progress.advance(len(batch), tokens=made, seconds=time.monotonic() - began)

    def _answer(self, batch: Sequence[Request], seed: int) -> list[Answer | str]:
        """Answers in the batch's order; a string, the reason, where the model fails even on the request
        alone."""
        try:
            return list(self.source.answer(batch, seed))
        except UserError:
            raise
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"The device has too little memory for generation.batch_size={len(batch)} prompts of up to "
                f"{max(request.length for request in batch)} tokens; choose a smaller generation.batch_size."
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
            answer=request.answer,
            ids_T=answer.ids_T,
            answer_start=answer.answer_start,
            finish_reason=answer.finish_reason,
            text=text,
            taps_TE=answer.taps_TE if self.needs.taps else None,
            last_TD=answer.last_TD if self.needs.last else None,
            lse_T=answer.lse_T if self.storage.states == "stored" else None,
        )
