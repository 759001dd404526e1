"""A server that answers /v1/completions out of a tiny target, and can be told to fail. Not a test."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from heads.target import FrozenTarget
from training.regenerate import Generation, answer_batch
from training.states import Answer

_SAID: dict[tuple[object, ...], Answer] = {}  # what targets have answered: tests should not wait for it again
Fault = Callable[[int, list[int]], "int | str | None"]
"""Of the number of an attempt at a prompt (from 1) and the prompt: a status, "hang", "drop", "garble", or None."""


class Answering(ThreadingHTTPServer):
    """asked: attempts per prompt; at_once: most requests at the same time; bodies: every request for a completion."""

    daemon_threads = True

    def __init__(self, target: FrozenTarget, *, fault: Fault, ids: bool = True, change: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.fault, self.ids, self.change = target, fault, ids, change
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.finished: Counter[tuple[int, ...]] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.model = threading.Lock()
        self.now = self.at_once = 0
        self.tried_again = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is none of the test's business."""


class _Handler(BaseHTTPRequestHandler):
    server: Answering

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server, prompt = self.server, tuple(body["prompt"])
        with server.lock:
            server.asked[prompt] += 1
            server.bodies.append(body)
            server.now += 1
            server.at_once = max(server.at_once, server.now)
            if server.asked[prompt] > 1:
                server.tried_again.set()
            attempt = server.asked[prompt]
        try:
            self._answer(body, server.fault(attempt, list(prompt)))
        finally:
            with server.lock:
                server.now -= 1

    def _answer(self, body: dict[str, Any], fault: int | str | None) -> None:
        if fault == "hang":
            self.server.tried_again.wait(30)  # longer than the client waits
            self.connection.close()
        elif fault == "drop":
            self.connection.close()
        elif fault == "garble":
            self._send(200, None)
        elif isinstance(fault, int):
            self._send(fault, {"error": {"message": "told to fail"}})
        else:
            self._send(200, self._completion(body))
            self.server.finished[tuple(body["prompt"])] += 1

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        server, target = self.server, self.server.target
        how = Generation(temperature=body["temperature"], top_p=body["top_p"], max_new_tokens=body["max_tokens"])
        with server.model:  # hooks and seeds are one thread's at a time
            (answer,) = learn(target, [body["prompt"]], how, body["seed"])
        ids = answer.ids_T[answer.answer_start :].tolist()
        choice = {"text": target.tokenizer.decode(ids, skip_special_tokens=True), "finish_reason": answer.finish_reason}
        if server.ids:
            choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"], "stop_reason": None}
        return {"choices": [choice | server.change], "usage": {"completion_tokens": len(ids)}}

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode() if value is not None else b"<html>"
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        if status == 429:
            self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(data)


def learn(target: FrozenTarget, prompts: Sequence[Sequence[int]], how: Generation, seed: int = 0) -> list[Answer]:
    """What the target answers; what it has answered before is remembered."""
    settings = (target.fingerprint["weights"], how.temperature, how.top_p, how.max_new_tokens)
    keys = [(*settings, seed if how.temperature else 0, tuple(prompt)) for prompt in prompts]
    if new := [prompt for key, prompt in zip(keys, prompts, strict=True) if key not in _SAID]:
        answers = answer_batch(target, new, taps=(), generation=how, seed=seed)
        _SAID.update({(*keys[0][:-1], tuple(prompt)): one for prompt, one in zip(new, answers, strict=True)})
    return [_SAID[key] for key in keys]


@contextlib.contextmanager
def answering(
    target: FrozenTarget, fault: Fault = lambda attempt, prompt: None, *, ids: bool = True, **change: Any
) -> Iterator[Answering]:
    """The server while it runs. ids: whether it returns token ids; change: what each completion says instead."""
    server = Answering(target, fault=fault, ids=ids, change=change)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
