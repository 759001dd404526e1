"""Regenerate and collect: the target answers every turn of the traffic, and the store keeps its states.

Turn w of all conversations is wave w: a wave needs the answers of the wave before. Within a wave the prompts
are sorted by length, longest first, and cut into batches; one batch is one shard. The plan follows from the
conversations and the settings alone, so a killed run, started again, skips every shard that is whole and
makes the others as they would have been: the finished store is the same byte for byte (on one machine, with
one number of threads).

Answers and states fall out of one pass of the target in this process. Or a server answers (`training.served`): then all
prompts of a wave are under way at once, and the states come from one forward over what was answered; or another engine
gives the states of known ids.

A prompt that is too long, that the template refuses or that the model fails on goes to the quarantine with
its reason, and the later turns of its conversation are left out; nothing else stops.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from heads.artifact import UserError
from heads.base import FeatureNeeds
from heads.target import FrozenTarget
from training.chat import Encoded
from training.journal import Reply
from training.progress import Progress
from training.regenerate import Generation, answer_batch, seed_of
from training.replies import check_same_target
from training.served import AnswerServer
from training.states import Answer, StatesEngine, known_states
from training.store import check_disk, estimate_bytes
from training.store_writer import Document, StoreWriter, wider_needs
from training.traffic import Conversation, fingerprint

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


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
    config: Mapping[str, Any] | None = None,
    server: AnswerServer | None = None,
    states: StatesEngine | None = None,
) -> dict[str, Any]:
    """Fill the features folder, or go on filling it, and return its manifest; a finished one is returned at
    once. A folder that was begun for more taps than `needs` keeps them: it serves several heads.

    server: what answers in place of the target in this process; states: what computes the states in its place.
    Raises UserError when the folder belongs to other settings, target or traffic, when the disk is too small,
    when no conversation could be used, and when a server has died or does not serve the target.
    """
    needs.check(target.num_layers)
    needs = wider_needs(folder, needs)
    target.render([{"role": "user", "content": "?"}])  # without a chat template nothing can be asked
    settings = {
        "needs": {"taps": list(needs.taps), "last": needs.last},
        "target": target.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "hidden_size": target.hidden_size,
        "generation": asdict(generation),
        "traffic": {"fingerprint": fingerprint(conversations), "conversations": len(conversations)},
        **({"engine": "openai"} if server is not None else {}),
        **({"features": states.name} if states is not None else {}),
    }
    writer = StoreWriter(folder, settings)
    if (manifest := writer.finished()) is not None:
        logger.info("%s is complete: %d documents are used as they are", folder, manifest["documents"])
        return manifest
    run = _Run(target=target, needs=needs, generation=generation, writer=writer, server=server, states=states)
    run.check_disk(conversations)
    with server or contextlib.nullcontext(), states or contextlib.nullcontext():
        return run.run(conversations, config)


class _Run:
    """One pass over the traffic."""

    def __init__(
        self,
        *,
        target: FrozenTarget,
        needs: FeatureNeeds,
        generation: Generation,
        writer: StoreWriter,
        server: AnswerServer | None,
        states: StatesEngine | None,
    ) -> None:
        self.target, self.needs, self.generation, self.writer = target, needs, generation, writer
        self.server, self.states = server, states
        self.asked: dict[str, Future[Reply | str]] = {}
        self.checked = False
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
        needed = estimate_bytes(self.needs, tokens, hidden_size=target.hidden_size, dtype=target.dtype)
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
                self._wave(conversations, turn, progress)
                progress.advance_to(sum(min(count, turn + 1) for count in turns))
        reasons = Counter(row["reason"] for row in self.refused)
        if not any(self.answers.values()):
            why = "; ".join(f"{reason}: {count}" for reason, count in reasons.most_common()) or "there are none"
            raise UserError(
                f"None of the {len(conversations)} conversations gave an answer to learn from ({why}); raise "
                f"generation.max_prompt_tokens, lower generation.max_new_tokens, or choose another traffic=."
            )
        if reasons:
            logger.warning("%d prompts set aside in %s (%s)", len(self.refused), self.writer.folder, dict(reasons))
        return self.writer.finish(
            self.shards,
            refused=self.refused,
            vocab_size=self.target.vocab_size,
            body={"quarantined": dict(reasons.most_common())},
            config=config,
        )

    def _wave(self, conversations: Sequence[Conversation], turn: int, progress: Progress) -> None:
        """One turn of all conversations, batch by batch; a server is given all of it at once."""
        requests = self._requests(conversations, turn)
        size, first = self.generation.batch_size, len(self.shards)
        batches = [requests[begin : begin + size] for begin in range(0, len(requests), size)]
        names = [f"shard-{first + number:05d}" for number in range(len(batches))]
        there = [
            self.writer.shard(name, [request.id for request in batch])
            for name, batch in zip(names, batches, strict=True)
        ]
        if self.server is not None:
            missing = [batch for batch, index in zip(batches, there, strict=True) if index is None]
            self.asked = self.server.ask({request.id: request.ids for batch in missing for request in batch})
        for name, batch, index in zip(names, batches, there, strict=True):
            self._batch(name, batch, index, progress)

    def _requests(self, conversations: Sequence[Conversation], turn: int) -> list[Request]:
        """What is asked in this turn, the longest prompt first; what cannot be asked is set aside."""
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
        return sorted(requests, key=lambda request: (-len(request.ids), request.id))

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

    def _batch(self, name: str, batch: Sequence[Request], index: dict[str, Any] | None, progress: Progress) -> None:
        """Make one shard, or take over the one that is there, whose index is given."""
        key = [request.id for request in batch]
        began = time.monotonic()
        reused = index is not None
        if index is None:
            results = self._answer(batch, seed_of(self.generation.seed, key))
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
        """Answers with their states in the batch's order; a string, the reason, where there is none."""
        taps = () if self.states else self.needs.taps

        def here(part: Sequence[Request]) -> list[Answer]:
            prompts = [request.ids for request in part]
            return answer_batch(self.target, prompts, taps=taps, generation=self.generation, seed=seed)

        if self.server is None:
            answers = _each(here, batch)
            if self.states is None:
                return answers
            replies: list[Reply | str] = [
                one if isinstance(one, str) else Reply(tuple(one.ids_T[one.answer_start :].tolist()), one.finish_reason)
                for one in answers
            ]
        else:
            replies = [self.asked.pop(request.id).result() for request in batch]
        return self._with_states(batch, replies)

    def _with_states(self, batch: Sequence[Request], replies: Sequence[Reply | str]) -> list[Answer | str]:
        """What was answered elsewhere, with the states of its ids."""
        known = [
            Encoded(request.ids + reply.ids, (False,) * len(request.ids) + (True,) * len(reply.ids))
            for request, reply in zip(batch, replies, strict=True)
            if isinstance(reply, Reply)
        ]
        states = self.states or known_states
        found = iter(_each(lambda part: states(self.target, part, taps=self.needs.taps), known))
        results = [next(found) if isinstance(reply, Reply) else reply for reply in replies]
        if self.server is not None and not self.checked:
            answers = [result for result in results if isinstance(result, Answer)]
            self.checked = check_same_target(self.target, answers, self.generation, self.server.settings.url)
        return results

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
            lse_T=answer.lse_T,
        )


def _each(work: Callable[[Sequence[Item]], list[Answer]], batch: Sequence[Item]) -> list[Answer | str]:
    """What `work` makes of the batch; if the model fails on it, of each alone, with the reason where it fails again."""
    try:
        return list(work(batch)) if batch else []
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"The device has too little memory for generation.batch_size={len(batch)}; choose a smaller "
            f"generation.batch_size."
        ) from error
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        if len(batch) == 1:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            return [f"the model fails on it: {reason[:200]}"]
    return [result for item in batch for result in _each(work, [item])]
