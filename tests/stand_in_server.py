"""An HTTP server that counts like vLLM 0.32 and answers from a script; as a thread, or as the process that vLLM is.

Standard library only, as the second way runs it in an interpreter of its own. Every mistake that the client and the
check must notice is an option here. Not a test.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Scripted = Mapping[str, Any]  # ids, accepted (of each round), finish


class StandIn:
    """answer: from a prompt and whether `alone` requests came before to what is written; gamma: 0 does not speculate.

    per_answer: answers carry their own counts; metrics, tokenizer: whether there are these endpoints; counts: False
    counts nothing; lies: rounds that are counted too many in each request; start: counters at the start.
    """

    def __init__(self, answer: Callable[[list[int], bool], Scripted], *, gamma: int, port: int = 0, **options: Any):
        self.answer, self.gamma, self.options = answer, gamma, options
        self.drafts = self.accepted = options.get("start", 0)
        self.per_position = [options.get("start", 0)] * gamma
        self.generated = self.under_way = self.most = 0
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        # Those who say they come together wait for each other, so that they do.
        self.gate = threading.Barrier(options["together"]) if options.get("together") else None
        self.http = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self) -> StandIn:
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def get(self, path: str) -> tuple[int, Any]:
        model = self.options.get("model", "tiny")
        if path == "/health":
            return 200, {}
        if path == "/version":
            return 200, {"version": "0.32.0-stand-in"}
        if path == "/v1/models" and self.options.get("models", True):
            facts = {"root": self.options.get("root", model), "max_model_len": self.options.get("longest", 4096)}
            others = [{"id": name, "parent": model} for name in self.options.get("adapters", ())]
            return 200, {"data": [{"id": model, **facts}, *others]}
        if path == "/metrics" and self.options.get("metrics", True):
            return 200, self.metrics()
        return 404, {"error": {"message": "Not Found"}}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/tokenize" and "tokenize" in self.options:
            return 200, {"tokens": self.options["tokenize"](body["prompt"])}
        if path != "/v1/completions":
            return 404, {"error": {"message": "Not Found"}}
        if body["model"] != self.options.get("model", "tiny"):
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if refusal := self.options.get("refuses"):
            return 400, {"error": {"message": refusal}}
        with self.lock:
            self.bodies.append(body)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        if self.gate is not None and len(self.bodies) > self.options.get("alone", 0):
            self.gate.wait(timeout=10)
        with self.lock:
            told = self.answer(body["prompt"], len(self.bodies) > self.options.get("alone", 10**9))
            self._count(told)
            self.under_way -= 1
        return 200, self._completion(body, told)

    def metrics(self) -> str:
        label = '{engine="0",model_name="m"}'
        lines = ["# HELP vllm:generation_tokens_total Number of tokens.", f"vllm:generation_tokens_total{label} "]
        lines[-1] += str(float(self.generated + self.options.get("others", 0) * len(self.bodies)))
        if self.gamma:
            sums = {"drafts": self.drafts, "draft_tokens": self.drafts * self.gamma, "accepted_tokens": self.accepted}
            lines += [f"vllm:spec_decode_num_{name}_total{label} {float(value)}" for name, value in sums.items()]
            lines += [f"vllm:spec_decode_num_drafts_created{label} 1.7e+09"]
            for place, value in enumerate(self.per_position):
                labels = f'{{engine="0",model_name="m",position="{place}"}}'
                lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{labels} {float(value)}")
        return "\n".join(lines) + "\n"

    def _count(self, told: Scripted) -> None:
        self.generated += len(told["ids"])
        rounds = [*told["accepted"], *[0] * self.options.get("lies", 0)]
        self.drafts += len(rounds)
        self.accepted += sum(rounds)
        for place in range(self.gamma):
            self.per_position[place] += sum(accepted > place for accepted in rounds)

    def _completion(self, body: dict[str, Any], told: Scripted) -> dict[str, Any]:
        choice = {"text": "t", "finish_reason": told.get("finish", "length")}
        choice |= {"token_ids": told["ids"]} if body.get("return_token_ids") else {}
        answer = {"choices": [choice], "usage": {"completion_tokens": len(told["ids"])}}
        if self.options.get("per_answer"):
            rounds = told["accepted"]
            counts = {
                "acceptance_histogram": [rounds.count(n) for n in range(self.gamma + 1)],
                "num_accepted_draft_tokens": sum(rounds),
                "num_draft_tokens": self.gamma * len(rounds),
            }
            answer["metrics"] = {"speculative_decoding": counts}
        return answer

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(*outer.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(*outer.post(self.path, body))

            def _send(self, code: int, value: Any) -> None:
                data = (value if isinstance(value, str) else json.dumps(value)).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


def main(arguments: Sequence[str]) -> None:
    """As the real one is started. What it answers, and how it misbehaves, stands in the file that FAKE_API names; a
    second start (`started` in its folder) may behave otherwise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--port", type=int)
    known, rest = parser.parse_known_args(arguments)
    place = os.environ["FAKE_API"]
    with open(place, encoding="utf-8") as file:
        script = json.load(file)
    with open(place + ".started", "a", encoding="utf-8") as file:
        file.write(json.dumps([known.speculative_config, rest]) + "\n")
    with open(place + ".started", encoding="utf-8") as file:
        second = len(file.readlines()) > 1
    if script.get("fails"):
        sys.exit("fake: no such layout")
    options = {**script["options"], **(script.get("second", {}) if second else {})}
    written = {tuple(entry["prompt"]): entry for entry in script["answers"]}

    def answer(prompt: list[int], together: bool) -> Scripted:
        return {**written[tuple(prompt)], **(script.get("together", {}) if together else {})}

    if script.get("leaves_child"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    stand_in = StandIn(answer, gamma=known.speculative_config["num_speculative_tokens"], port=known.port, **options)
    if script.get("ignores_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(script.get("code", 0)))
    stand_in.http.serve_forever(0.01)


if __name__ == "__main__":
    main(sys.argv[1:])
