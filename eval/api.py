"""A running server seen through its HTTP API: completions of token-id prompts, and what it counts on `/metrics`.

It speaks the OpenAI protocol with vLLM's additions (`return_token_ids`, `/tokenize`, the `metrics` of an answer, as of
0.32). Whatever is not as expected is a UserError of one sentence. This module computes no number (see `eval.served`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from eval.acceptance import VllmCounters
from eval.decode import Request
from eval.sampling import Sampling
from heads.artifact import UserError

_SAMPLE = re.compile(r"^vllm:(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_GENERATED = "generation_tokens"
_SUMS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
SETTLING = 5.0  # seconds that the counters may lag behind an answer
SHOWN = 200  # characters of a server's own words


@dataclass(frozen=True)
class Answer:
    """One request, answered. tokens: how many were written, end token included; ids: which, None where the server does
    not tell; counted: what the answer itself says of its drafts, None where it does not."""

    request: Request
    text: str
    tokens: int
    ids: tuple[int, ...] | None
    finish: str
    counted: VllmCounters | None


@dataclass(frozen=True)
class Reading:
    """`/metrics` at one moment, since the server's start. counters: None where it does not speculate; generated: tokens
    it has written, for whomever."""

    counters: VllmCounters | None
    generated: int


class ServerApi:
    """One model of a server. Close it, or use it as a context.

    url: with or without `/v1`; model: the name it is served under (None: the only one there is); timeout: seconds for
    one answer. Raises UserError when nothing, or something else, answers there.
    """

    def __init__(self, url: str, *, model: str | None = None, timeout: float = 600.0, at_once: int = 1) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not re.match(r"https?://[^/\s]+", self.url):
            raise UserError(f"server.url={url} is no address; give one such as server.url=http://127.0.0.1:8000.")
        limits = httpx.Limits(max_connections=at_once + 1)
        self.client = httpx.Client(
            base_url=self.url, timeout=timeout, limits=limits, trust_env=False, follow_redirects=True
        )
        self.timeout = timeout
        try:
            facts = self._chosen(model)
        except UserError:
            self.client.close()
            raise
        self.model: str = facts["id"]
        self.root: str = str(facts.get("root") or self.model)
        self.max_length: int | None = facts.get("max_model_len")

    def __enter__(self) -> ServerApi:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    def complete(self, request: Request, sampling: Sampling, max_new_tokens: int, *, seed: int | None = None) -> Answer:
        """What the server writes after a prompt. Every transform is named, as a server has defaults of its own."""
        body = {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": seed,
            "return_token_ids": True,
        }
        told = self._json(self._call("POST", "/v1/completions", json=body), f"the answer to {request.request_id}")
        try:
            (choice,) = told["choices"]
            ids = choice.get("token_ids")
            return Answer(
                request=request,
                text=choice["text"],
                tokens=int(told["usage"]["completion_tokens"]),
                ids=None if ids is None else tuple(ids),
                finish=choice["finish_reason"],
                counted=_own_counters(told.get("metrics")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"The server at {self.url} answered {request.request_id} in another way than vLLM 0.32 does "
                f"({type(error).__name__}: {error}); ask one of that kind."
            ) from error

    def tokenize(self, text: str) -> list[int] | None:
        """The ids of a text by the server's tokenizer; None where it has no such endpoint."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        answer = self._call("POST", "/tokenize", json=body, missing_is_fine=True)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return [int(one) for one in self._json(answer, "/tokenize").get("tokens", [])]

    def version(self) -> str | None:
        """The server's own version; None where it does not tell."""
        answer = self._call("GET", "/version", missing_is_fine=True)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return str(self._json(answer, "/version").get("version"))

    def reading(self) -> Reading:
        """What the server has counted so far. Raises UserError where it does not show it."""
        answer = self._call("GET", "/metrics", missing_is_fine=True)
        reading = None if answer.status_code == httpx.codes.NOT_FOUND else parse_metrics(answer.text)
        if reading is None:
            raise UserError(
                f"The server at {self.url} has no /metrics with vLLM's counters, which are what acceptance is read "
                f"from; ask a vLLM that was started without --disable-log-stats."
            )
        return reading

    def settled(self, before: Reading, tokens: int) -> Reading:
        """The counters once they hold the `tokens` that were written since `before`.

        Raises UserError when others were written too, or the server was started anew meanwhile.
        """
        deadline = time.monotonic() + SETTLING
        while (now := self.reading()).generated - before.generated < tokens and time.monotonic() < deadline:
            time.sleep(0.02)
        if (found := now.generated - before.generated) != tokens:
            why = "it was started anew meanwhile" if found < 0 else "it answered others meanwhile, or counts otherwise"
            raise UserError(
                f"The server at {self.url} counts {found} written tokens where these requests got {tokens}: {why}; "
                f"repeat it while nobody else asks."
            )
        return now

    def _chosen(self, model: str | None) -> dict[str, Any]:
        answer = self._call("GET", "/v1/models", missing_is_fine=True)
        try:
            served = [one for one in answer.json()["data"] if isinstance(one["id"], str)]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"What answers at {self.url} is no OpenAI-compatible server (GET /v1/models: {answer.status_code}); "
                f"server.url= takes the address in front of /v1."
            ) from error
        # Adapters are listed beside the model that they belong to.
        found = [one for one in served if (one["id"] == model if model is not None else not one.get("parent"))]
        if len(found) != 1:
            names = ", ".join(one["id"] for one in served) or "nothing"
            raise UserError(f"The server at {self.url} serves {names}; say which with server.model=.")
        return dict(found[0])

    def _call(
        self, method: str, path: str, *, json: Mapping[str, Any] | None = None, missing_is_fine: bool = False
    ) -> httpx.Response:
        try:
            answer = self.client.request(method, path, json=json)
        except httpx.TimeoutException as error:
            raise UserError(
                f"The server at {self.url} did not answer {path} within {self.timeout:g} seconds; raise "
                f"server.timeout, or ask for less."
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(
                f"No server answers at {self.url} ({error}); start one as the model card says, or mend server.url=."
            ) from error
        if answer.is_error and not (missing_is_fine and answer.status_code == httpx.codes.NOT_FOUND):
            raise UserError(f"The server at {self.url} refused {path} ({answer.status_code}): {_reason(answer)}")
        return answer

    def _json(self, answer: httpx.Response, what: str) -> dict[str, Any]:
        try:
            value = answer.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise UserError(f"The server at {self.url} sent no JSON object as {what}; ask a vLLM.")
        return value


def parse_metrics(text: str) -> Reading | None:
    """Prometheus' text as a reading, engines summed; None where there are no counters of vLLM's."""
    sums: dict[str, int] = {}
    positions: dict[int, int] = {}
    for name, labels, value in _SAMPLE.findall(text):
        if name == _PER_POSITION and (position := _POSITION.search(labels)):
            place = int(position[1])
            positions[place] = positions.get(place, 0) + round(float(value))
        elif name == _GENERATED or name.removeprefix("spec_decode_") in _SUMS:
            sums[name] = sums.get(name, 0) + round(float(value))
    if _GENERATED not in sums:
        return None
    drafts = [sums.get(f"spec_decode_{name}") for name in _SUMS]
    counters = None
    if all(count is not None for count in drafts) and positions:
        per_position = tuple(positions.get(place, 0) for place in range(max(positions) + 1))
        counters = VllmCounters(*(count or 0 for count in drafts), per_position)
    return Reading(counters, sums[_GENERATED])


def _own_counters(metrics: Any) -> VllmCounters | None:
    """What an answer says of its own drafts (vLLM's --per-request-spec-decode-metrics)."""
    told = (metrics or {}).get("speculative_decoding")
    if told is None:
        return None
    histogram: Sequence[int] = told["acceptance_histogram"]  # rounds by how many drafts were accepted
    return VllmCounters(
        num_drafts=sum(histogram),
        num_draft_tokens=told["num_draft_tokens"],
        num_accepted_tokens=told["num_accepted_draft_tokens"],
        accepted_per_pos=tuple(sum(histogram[place + 1 :]) for place in range(len(histogram) - 1)),
    )


def _reason(answer: httpx.Response) -> str:
    """The server's own words, on one line."""
    try:
        value = answer.json()
        error = value.get("error", value)
        words = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        words = answer.text
    words = " ".join(words.split())
    return words if len(words) <= SHOWN else words[:SHOWN] + "…"
