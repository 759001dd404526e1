"""Answers of an OpenAI-compatible server (vLLM, SGLang, …), asked by token ids, many at a time.

Prompts go to `/v1/completions` as the token ids that the target's own template gives, so that no server renders
anything. A server that can (vLLM) returns the generated ids; from others the text is tokenised again, and the answer is
set aside where that does not give as many tokens as the server counted. Finished answers go to a journal at once.

Busy servers, broken connections, timeouts and faults of the server are tried again with growing pauses. When the tries
of a prompt are used up, a short question tells a bad prompt, which is set aside, from a dead server, which ends the run
with one sentence; the same command then goes on.

The module does not know conversations, states or the store.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from heads.artifact import UserError
from heads.target import FrozenTarget
from training.journal import Journal, Reply
from training.regenerate import Generation, seed_of
from training.replies import read_reply

KEY = "OPENAI_API_KEY"
_BUSY = (408, 409, 425, 429)  # besides 5xx: statuses that another try may mend
_WRONG = (401, 403, 404, 405)  # statuses that no prompt is to blame for
_LONGEST_PAUSE = 60.0


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Which server to ask and how. model: its name there, None for the first that is served; concurrency: requests at a
    time; tries: of one request; timeout: seconds for one try; pause: seconds before the second try, doubled with each
    further one."""

    url: str
    model: str | None = None
    concurrency: int = 64
    tries: int = 6
    timeout: float = 600.0
    pause: float = 0.5

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """What may be left out, with its usual value."""
        return {one.name: one.default for one in fields(cls) if one.default is not MISSING}

    def __post_init__(self) -> None:
        for name in ("concurrency", "tries"):
            if self.__dict__[name] < 1:
                raise UserError(f"collect.{name}={self.__dict__[name]} is not possible; give at least 1.")
        if not self.timeout > 0:
            raise UserError(f"collect.timeout={self.timeout} is not possible; give seconds above 0.")
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise UserError(f"collect.url={self.url!r} cannot be read ({error}); {_URL}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise UserError(f"collect.url={self.url!r} is no address of a server; {_URL}")


class Trouble(Exception):
    """What another try may mend: `kind` for counting, and how many seconds the server asked to wait."""

    def __init__(self, kind: str, wait: float = 0.0) -> None:
        super().__init__(kind)
        self.kind, self.wait = kind, wait


class Refused(Exception):
    """The server does not take this prompt; the message says why."""


class AnswerServer:
    """A server while it is asked; a context manager. `counts` holds what was asked, tried again and taken over."""

    def __init__(
        self, settings: ServerSettings, *, target: FrozenTarget, generation: Generation, journal: str | Path
    ) -> None:
        """journal: the file of what was answered so far, and of what will be."""
        self.settings, self.target, self.generation = settings, target, generation
        self._path = journal
        self.counts: Counter[str] = Counter()
        self.model = settings.model
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="answers", daemon=True)
        self._tasks: list[Future[None]] = []

    def __enter__(self) -> AnswerServer:
        """Raises UserError when the server is not there or does not serve the model."""
        self.journal = Journal(self._path)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._connect(), self._loop).result()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def ask(self, prompts: Mapping[str, Sequence[int]]) -> dict[str, Future[Reply | str]]:
        """Have prompts answered, in their order, in the background. By id: a reply, or why there is none. A future
        raises UserError when the server has died."""
        futures: dict[str, Future[Reply | str]] = {name: Future() for name in prompts}
        self._tasks.append(asyncio.run_coroutine_threadsafe(self._work(prompts, dict(futures)), self._loop))
        return futures  # the caller's own, to add to

    async def _connect(self) -> None:
        key = os.environ.get(KEY)
        self._client = httpx.AsyncClient(
            base_url=self.settings.url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=self.settings.timeout,
            limits=httpx.Limits(max_connections=self.settings.concurrency + 1),
        )
        try:
            listed = await self._patiently("GET", "models")
            served = [str(one["id"]) for one in listed["data"]]
        except (Refused, KeyError, TypeError) as error:
            raise UserError(f"{self.settings.url} does not list its models ({error}); {_URL}") from error
        except Trouble as error:
            raise UserError(self._dead(error)) from error
        if not served or self.settings.model not in (None, *served):
            raise UserError(
                f"collect.model={self.settings.model} is not served at {self.settings.url}, which serves "
                f"{', '.join(served) or 'nothing'}; set collect.model= to what is the target."
            )
        self.model = self.settings.model or served[0]

    async def _work(self, prompts: Mapping[str, Sequence[int]], futures: Mapping[str, Future[Reply | str]]) -> None:
        """Answer with as many workers as requests may be under way; the first death ends all of them."""
        queue = iter(prompts.items())

        async def worker() -> None:
            for name, ids in queue:
                futures[name].set_result(await self._reply(name, ids))

        error: BaseException = asyncio.CancelledError()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.settings.concurrency, len(prompts))):
                    group.create_task(worker())
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
        finally:
            for future in futures.values():
                if not future.done():
                    future.set_exception(error)

    async def _reply(self, name: str, ids: Sequence[int]) -> Reply | str:
        if (known := self.journal.find(name, ids)) is not None:
            self.counts["taken over"] += 1
            return known
        try:
            payload = await self._patiently("POST", "completions", self._body(name, ids))
        except Refused as error:
            return f"the server refuses it: {error}"
        except Trouble as error:
            await self._probe(error)
            return f"the server fails on it: {error.kind}"
        reply = read_reply(payload, ids, self.target, self.generation)
        if isinstance(reply, Reply):
            self.journal.add(name, ids, reply)
            self.counts["answered"] += 1
        return reply

    def _body(self, name: str, ids: Sequence[int]) -> dict[str, Any]:
        """The request. What vLLM and SGLang would take from the model's own generation settings is switched off."""
        own = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": self.generation.max_new_tokens,
            "temperature": self.generation.temperature,
            "top_p": self.generation.top_p,
            "seed": seed_of(self.generation.seed, [name]),
            "stop_token_ids": list(self.target.eos_token_ids),
            "return_token_ids": True,
            **own,
        }

    async def _probe(self, trouble: Trouble) -> None:
        """Raises UserError unless the server still answers a short question."""
        ids = self.target.render([{"role": "user", "content": "?"}])
        try:
            await self._once("POST", "completions", {**self._body("probe", ids), "max_tokens": 1})
        except Refused:
            pass  # it speaks
        except Trouble as error:
            raise UserError(self._dead(trouble)) from error

    def _dead(self, trouble: Trouble) -> str:
        return (
            f"The server at {self.settings.url} does not answer ({trouble.kind}, {self.settings.tries} tries); start "
            f"it again, or lower collect.concurrency={self.settings.concurrency} if it is too busy, and repeat the "
            f"command, which goes on with the {len(self.journal)} answers that are there."
        )

    async def _patiently(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Raises Trouble when all tries are used up, Refused at once, UserError when the server wants no one."""

        def count(state: RetryCallState) -> None:
            assert state.outcome is not None
            self.counts[f"tried again after {state.outcome.exception()}"] += 1

        grow = wait_exponential_jitter(multiplier=self.settings.pause, max=_LONGEST_PAUSE, jitter=self.settings.pause)

        def pause(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            return max(grow(state), min(error.wait, _LONGEST_PAUSE) if isinstance(error, Trouble) else 0.0)

        retrying = AsyncRetrying(
            stop=stop_after_attempt(self.settings.tries),
            wait=pause,
            retry=retry_if_exception_type(Trouble),
            before_sleep=count,
            reraise=True,
        )
        return await retrying(self._once, method, path, body)

    async def _once(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            response = await self._client.request(method, path, json=body)
        except httpx.TimeoutException as error:
            raise Trouble("timeout") from error
        except httpx.RequestError as error:
            raise Trouble("no connection") from error
        status = response.status_code
        if status in _BUSY or status >= 500:
            wait = response.headers.get("retry-after", "")
            raise Trouble(f"status {status}", float(wait) if wait.isdecimal() else 0.0)
        if status in _WRONG:
            raise UserError(
                f"The server at {self.settings.url} answers /{path} with status {status}; correct collect.url= or "
                f"collect.model=, or set {KEY} in the environment to its key."
            )
        try:
            payload = response.json()
        except ValueError as error:
            raise Trouble("an answer that is no JSON") from error
        if status != 200:
            raise Refused(f"status {status}, {_message(payload)}")
        return payload

    def _end(self) -> None:
        """Stop asking; what is under way is dropped."""
        for task in self._tasks:
            task.cancel()
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.journal.close()

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()


def _message(payload: Any) -> str:
    """The first line of what the server says is wrong."""
    error = payload.get("error", payload) if isinstance(payload, dict) else payload
    said = error.get("message", error) if isinstance(error, dict) else error
    return (str(said).strip().splitlines() or ["no reason given"])[0][:200]


_URL = "set collect.url= to that of an OpenAI-compatible server, such as http://localhost:8000/v1."
