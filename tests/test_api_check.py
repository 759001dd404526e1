"""The server as a process, behind its API: what a sound one must show, and that every finding can fail.

A stand-in package is started by the very command that starts vLLM (`tests.stand_in_server`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import eval.api_process as api_process
from eval.acceptance import VllmCounters
from eval.api_check import Finding, check_api, ended
from eval.api_process import Ending, api_command, port_is_free, running
from eval.decode import Request
from eval.exactness import Divergence
from eval.server import Limits, Server
from eval.trace import RequestTrace, Round
from heads.artifact import UserError
from tests import stand_in_server
from tests.simulated_traces import trace_of

GAMMA = 3
REQUESTS = [Request(f"r{n}", "a", (5, 6, n)) for n in range(10)]
ROUNDS = [[n % 4, (n + 1) % 3] for n in range(10)]
LIMITS = Limits(16, (2,))


def ours() -> list[RequestTrace]:
    return [
        trace_of([Round(GAMMA, n) for n in rounds], request_id=request.request_id, seed=index)
        for index, (request, rounds) in enumerate(zip(REQUESTS, ROUNDS, strict=True))
    ]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function from how the stand-in behaves to a `Server` that starts it."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    source = Path(stand_in_server.__file__).read_text()
    (package / "api_server.py").write_text(source)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH={tmp_path / "site"}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("FAKE_API", str(tmp_path / "script.json"))

    def prepare(**script: Any) -> Server:
        answers = [
            {"prompt": request.prompt, "ids": trace.tokens, "accepted": rounds}
            for request, trace, rounds in zip(REQUESTS, ours(), ROUNDS, strict=True)
        ]
        (tmp_path / "script.json").write_text(json.dumps({"answers": answers, "options": {}, **script}))
        return Server(str(python), "/target", "float32", draft="/export", gamma=GAMMA, batch=4, timeout=60)

    return prepare


def tie(gap: float) -> Any:
    """What looks closer at texts and finds this gap wherever one leaves its truth."""

    def look(requests: Any, texts: Any, truths: Any) -> list[Divergence]:
        pairs = zip(requests, texts, truths, strict=True)
        return [Divergence(r.request_id, 0, a[0], b[0], gap) for r, a, b in pairs if a != b]

    return look


def check(server: Server, folder: Path, gap: float = 1.0) -> dict[str, Finding]:
    said: list[str] = []
    found = check_api(server, REQUESTS, ours(), LIMITS, at_once=4, folder=folder, look_closer=tie(gap), say=said.append)
    assert [one.line for one in found] == [line for line in said if not line.startswith("the model card")]
    return {one.name: one for one in found}


NAMES = [
    *("one at a time, text", "one at a time, counters", "4 at once, text", "4 at once, counters"),
    *("stopped", "started again", "stopped again"),
]


def test_a_sound_server_passes_and_is_started_as_the_card_says(tmp_path: Path, server: Any) -> None:
    found = check(server(), tmp_path / "out")
    assert list(found) == NAMES and all(one.passed for one in found.values())
    assert "10 of 10 requests are counted as ours" in found["one at a time, counters"].found
    assert "counters at zero, 4 of 4 requests as before" in found["started again"].found
    assert "0 of its processes left, its port is free" in found["stopped"].found
    starts = [json.loads(line) for line in Path(f"{tmp_path}/script.json.started").read_text().splitlines()]
    speculation = {"method": "eagle3", "model": "/export", "num_speculative_tokens": GAMMA}
    assert [told for told, _ in starts] == [speculation, speculation]
    assert starts[0][1][:4] == ["--model", "/target", "--dtype", "float32"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["api-1.log", "api-2.log"]


@pytest.mark.parametrize(
    ("script", "failing"),
    [
        ({"options": {"lies": 1}}, {"one at a time, counters"}),
        ({"options": {"alone": 10}, "together": {"ids": [9, 9, 9]}}, {"4 at once, text"}),
        ({"options": {"alone": 10}, "together": {"accepted": [0, 0]}}, {"4 at once, counters"}),
        ({"options": {}, "second": {"start": 5}}, {"started again"}),
        ({"options": {}, "second": {"lies": 2}}, {"started again"}),
        ({"options": {}, "ignores_sigterm": True}, {"stopped", "stopped again"}),
        ({"options": {}, "leaves_child": True}, {"stopped", "stopped again"}),
        ({"options": {}, "code": 3}, {"stopped", "stopped again"}),
    ],
)
def test_every_finding_can_fail(
    tmp_path: Path, server: Any, script: dict[str, Any], failing: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_process, "STOPPING", 1.0)
    monkeypatch.setattr(api_process, "LINGERING", 0.5)
    before = set(psutil.Process().children(recursive=True))
    found = check(server(**script), tmp_path / "out")
    assert {name for name, one in found.items() if not one.passed} >= failing
    assert {name for name, one in found.items() if one.passed} >= {"one at a time, text"}
    for name in failing:
        assert "MISMATCH" in found[name].line
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]


def test_a_text_that_leaves_ours_at_a_tie_passes_and_is_listed(tmp_path: Path, server: Any) -> None:
    script = {"options": {"alone": 10}, "together": {"ids": [9, 9, 9]}}
    found = check(server(**script), tmp_path / "out", gap=1e-6)["4 at once, text"]
    assert found.passed and "leave it at a tie; r" in found.found and "gap 1e-06" in found.found


def test_a_server_that_does_not_come_up_shows_its_log(tmp_path: Path, server: Any) -> None:
    with pytest.raises(UserError, match=r"(?s)ended with code 1; its log is .*api-1.log and .*no such layout"):
        check(server(fails=True), tmp_path / "out")


def test_nothing_of_the_server_survives_a_failure_in_the_middle(tmp_path: Path, server: Any) -> None:
    with pytest.raises(ZeroDivisionError), running(server(), max_model_len=64, log=tmp_path / "log") as one:
        assert not port_is_free(one.port)
        raise ZeroDivisionError
    assert port_is_free(one.port) and one.process.poll() is not None


def test_an_ending_is_clean_only_as_a_whole() -> None:
    assert ended(Ending(0, 1.0, 0, True), "stopped").passed and ended(Ending(-15, 1.0, 0, True), "stopped").passed
    for bad in (Ending(None, 1.0, 0, True), Ending(1, 1.0, 0, True), Ending(0, 1.0, 1, True), Ending(0, 1.0, 0, False)):
        assert not ended(bad, "stopped").passed


def test_the_command_is_that_of_the_model_card() -> None:
    one = Server("py", "/t", "float32", draft="/e", gamma=2, method="mtp", overrides={"n": 1}, batch=8)
    assert api_command(one, 99, 8123)[:9] == [
        *("py", "-m", "vllm.entrypoints.openai.api_server", "--model", "/t"),
        *("--speculative-config", '{"method": "mtp", "model": "/e", "num_speculative_tokens": 2}'),
        *("--hf-overrides", '{"n": 1}'),
    ]
    assert VllmCounters(3, 6, 2, (2, 0)).since(VllmCounters(1, 2, 1, (1, 0))) == VllmCounters(2, 4, 1, (1, 0))
