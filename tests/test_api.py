"""A server asked over HTTP: what is sent, how its counters become our numbers, and how each bad case is said.

The server is a stand-in that counts as vLLM does (`tests.stand_in_server`); the real one is what
serve-check asks.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from eval.acceptance import VllmCounters, measure, vllm_counters
from eval.api import ServerApi, parse_metrics
from eval.decode import Request
from eval.sampling import Sampling
from eval.served import added, counts_itself, measured, no_interval, rows_of, serve, speculating, to_table
from eval.tally import Estimate
from eval.trace import Round
from heads.artifact import UserError
from scripts import collect, served
from scripts.prompts import held_out_requests
from tests import e2e
from tests.simulated_traces import trace_of
from tests.stand_in_server import StandIn
from tests.tiny import save_tiny, tiny_tokenizer

GAMMA = 3
REQUESTS = [Request(f"r{n}", "ab"[n % 2], (5, 6, 7 + n)) for n in range(12)]
ROUNDS = [[n % 4, (n * 2 + 1) % 4, 0] for n in range(12)]


def scripted(prompt: list[int], together: bool) -> dict[str, Any]:
    """The rounds of a prompt by its last token, all of them whole."""
    rounds = ROUNDS[prompt[-1] % 12]
    return {"ids": list(range(20, 20 + 1 + sum(rounds) + len(rounds))), "accepted": rounds}


def served_by(**options: Any) -> StandIn:
    return StandIn(scripted, gamma=options.pop("gamma", GAMMA), **options)


def traces() -> list[Any]:
    """Our own traces of the same rounds."""
    rounds = [ROUNDS[request.prompt[-1] % 12] for request in REQUESTS]
    return [
        trace_of([Round(GAMMA, n) for n in own], request_id=request.request_id, slice_name=request.slice)
        for request, own in zip(REQUESTS, rounds, strict=True)
    ]


def test_what_is_asked_names_every_transform_and_its_tokens_come_back() -> None:
    with served_by() as stand_in, ServerApi(stand_in.url + "/v1/") as api:
        answer = api.complete(REQUESTS[0], Sampling(0.7, top_k=5, top_p=0.9), 16, seed=3)
        assert api.version() == "0.32.0-stand-in" and api.max_length == 4096 and api.tokenize("a") is None
    assert stand_in.bodies == [
        {
            **{"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 16, "seed": 3, "return_token_ids": True},
            **{"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.0},
            **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
        }
    ]
    assert answer.ids == tuple(scripted([7], False)["ids"]) and answer.tokens == len(answer.ids)
    assert answer.counted is None


def test_metrics_are_read_engines_summed_and_nothing_else() -> None:
    text = "\n".join(
        [
            "# TYPE vllm:generation_tokens_total counter",
            'vllm:generation_tokens_total{engine="0",model_name="a{b}"} 10.0',
            'vllm:generation_tokens_total{engine="1",model_name="a"} 5.0',
            'vllm:spec_decode_num_drafts_total{engine="0"} 1e+01',
            'vllm:spec_decode_num_drafts_total{engine="1"} 2.0',
            'vllm:spec_decode_num_drafts_created{engine="1"} 1.7e+09',
            'vllm:spec_decode_num_draft_tokens_total{engine="0"} 24.0',
            'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 9.0',
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 3.0',
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 4.0',
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 2.0',
            'other:generation_tokens_total{engine="0"} 7.0',
        ]
    )
    reading = parse_metrics(text)
    assert reading is not None and reading.generated == 15
    assert reading.counters == VllmCounters(12, 24, 9, (6, 3))
    alone = parse_metrics('vllm:generation_tokens_total{a="b"} 1.0')
    assert alone is not None and alone.counters is None
    assert parse_metrics("python_info 1.0") is None


def test_counts_become_the_numbers_of_our_own_traces() -> None:
    """Without cut rounds the server's counters hold all that our traces do: the same values and the same intervals."""
    ours, each = measure(traces(), gamma=GAMMA), [vllm_counters([trace], gamma=GAMMA) for trace in traces()]
    found = measured(each, GAMMA)
    assert found["alpha"] == [ours.alpha] and found["alpha_macro"] == [ours.alpha_macro]
    assert found["alpha_by_position"] == ours.alpha_by_position and found["survival"] == ours.survival
    assert found["tokens_per_round"] == [ours.tokens_per_round]
    assert found["expected_tokens_per_round"] == [ours.expected_tokens_per_round]
    assert found["formula_gap"] == [ours.formula_gap]
    assert found["tokens_per_round"][0].value == pytest.approx(added(each, GAMMA).acceptance_length)


def test_short_proposals_leave_alpha_unknown() -> None:
    found = measured([VllmCounters(4, 10, 5, (3, 2, 0))] * 9, GAMMA)
    assert found["alpha"] == [Estimate(None)] and found["formula_gap"] == [Estimate(None)]
    assert found["survival"][0].value == 0.75 and found["tokens_per_round"][0].value == 2.25
    nothing = measured([VllmCounters(0, 0, 0, (0, 0, 0))] * 9, GAMMA)
    assert all(one.value is None for values in nothing.values() for one in values)


@pytest.mark.parametrize(
    ("at_once", "options", "source"),
    [
        (1, {}, "one at a time"),
        (4, {"together": 4}, "sum"),
        (4, {"together": 4, "per_answer": True}, "answers"),
    ],
)
def test_counts_by_request_or_in_sum(at_once: int, options: dict[str, Any], source: str) -> None:
    with served_by(start=7, **options) as stand_in, ServerApi(stand_in.url, at_once=at_once) as api:
        done = serve(api, REQUESTS, Sampling(), 16, at_once=at_once)
    assert stand_in.most == at_once and done.source == source
    expected = [vllm_counters([trace], gamma=GAMMA) for trace in traces()]
    assert done.total == added(expected, GAMMA)
    assert done.each == (None if source == "sum" else expected)
    rows = rows_of(done)
    ours = measure(traces(), gamma=GAMMA)
    assert rows[0]["alpha"]["value"] == ours.alpha.value and rows[0]["tokens_per_second"] > 0
    if source == "sum":
        assert len(rows) == 1 and rows[0]["alpha"]["low"] is None and rows[0]["alpha_macro"]["value"] is None
        assert (no_interval(rows) or "").startswith("no interval: the server only counts in sum")
    else:
        assert rows[0]["alpha"] == asdict(ours.alpha)
        assert [row["slice"] for row in rows] == ["all", "a", "b"] and no_interval(rows) is None
    assert to_table(rows).row_count == len(rows)


def test_every_request_has_a_seed_of_its_own_above_zero() -> None:
    with served_by() as stand_in, ServerApi(stand_in.url) as api:
        serve(api, REQUESTS[:3], Sampling(1.0), 16, at_once=1, seed=5)
        serve(api, REQUESTS[:2], Sampling(), 16, at_once=1, seed=5)
    assert [body["seed"] for body in stand_in.bodies] == [5, 6, 7, None, None]


def test_whether_the_answers_count_for_themselves_is_asked_once() -> None:
    for says in (True, False):
        with served_by(per_answer=says) as stand_in, ServerApi(stand_in.url) as api:
            assert counts_itself(api, REQUESTS[0]) is says
        assert [body["max_tokens"] for body in stand_in.bodies] == [4]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gamma": 0}, "does not speculate: its /metrics has no vllm:spec_decode_ counters; start it with"),
        ({"metrics": False}, "has no /metrics with vLLM's counters"),
        ({"models": False}, r"no OpenAI-compatible server .GET /v1/models: 404.; server.url= takes the address"),
        ({"refuses": "Token id 99 is out of vocabulary"}, r"refused /v1/completions .400.: Token id 99 is out of"),
        ({"others": 3}, r"counts 13 written tokens where these requests got 10: it answered others meanwhile"),
        ({"per_answer": True, "lies": 1}, "are not the sum of those of its answers"),
    ],
)
def test_a_server_that_cannot_be_measured_is_refused(
    options: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.api.SETTLING", 0.1)
    at_once = 2 if "lies" in options else 1
    with served_by(**options) as stand_in, pytest.raises(UserError, match=sentence):
        with ServerApi(stand_in.url, at_once=at_once) as api:
            speculating(api)
            serve(api, REQUESTS[:4], Sampling(), 16, at_once=at_once)


def test_nobody_there_an_address_that_is_none_and_the_wrong_name() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(UserError, match=r"No server answers at http://127.0.0.1:\d+ .*Connection refused"):
        ServerApi(f"http://127.0.0.1:{port}")
    with pytest.raises(UserError, match="server.url=8000 is no address"):
        ServerApi("8000")
    with served_by(adapters=("lora",)) as stand_in:
        assert ServerApi(stand_in.url).model == "tiny" and ServerApi(stand_in.url, model="lora").model == "lora"
        with pytest.raises(UserError, match=r"serves tiny, lora; say which with server.model=\."):
            ServerApi(stand_in.url, model="other")


# ---- python -m scripts.evaluate server.url=… ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[e2e.Place]:
    """A tiny target with traffic and no head."""
    folder = tmp_path_factory.mktemp("served")
    target = save_tiny(folder / "tiny")
    place = e2e.Place(target, e2e.write_rows(folder / "t.jsonl", e2e.conversations(40)), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        collect.run(e2e.config(*place.overrides, "generation.max_new_tokens=4"))
        yield place


def own_ids(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text, add_special_tokens=False))


def config(place: e2e.Place, stand_in: StandIn, *more: str) -> Any:
    return e2e.config(*place.overrides, f"server.url={stand_in.url}", "eval.temperatures=[0.0,1.0]", *more)


def test_evaluate_writes_the_numbers_of_a_server(place: e2e.Place, capsys: pytest.CaptureFixture[str]) -> None:
    with served_by(tokenize=own_ids) as stand_in:
        served.run(config(place, stand_in))
    written = json.loads((place.run / "server" / "server.json").read_text())
    rows = written["results"]
    assert [(row["temperature"], row["slice"]) for row in rows] == [
        (t, s) for t in (0.0, 1.0) for s in ("all", "a", "b")
    ]
    assert rows[0]["gamma"] == GAMMA and rows[0]["at_once"] == 1 and rows[0]["alpha"]["low"] is not None
    assert rows[0]["requests"] == sum(row["requests"] for row in rows[1:3]) == (len(stand_in.bodies) - 1) / 2
    assert set(rows[0]) >= {"alpha_by_position", "survival", "tokens_per_round", "tokens_per_second", "formula_gap"}
    assert "one at a time" in written["counted"] and written["server"]["root"] == "tiny"
    assert all(body["max_tokens"] == 16 for body in stand_in.bodies[1:])
    assert e2e.manifest(place, "server")["kind"] == "served"
    said = capsys.readouterr().out
    assert "greedy" in said and "T = 1" in said and "server.json" in said


def test_evaluate_asks_together_where_the_answers_count(place: e2e.Place) -> None:
    with served_by(tokenize=own_ids, per_answer=True, together=3, alone=1) as stand_in:
        served.run(config(place, stand_in, "eval.rows=3", "eval.temperatures=[0.0]"))
    assert stand_in.most == 3
    row = json.loads((place.run / "server" / "server.json").read_text())["results"][0]
    assert row["at_once"] == 3 and row["counted"] == "answers" and row["alpha"]["low"] is not None


@pytest.mark.parametrize(
    ("options", "more", "sentence"),
    [
        ({"root": "org/other", "model": "other"}, (), r"serves org/other, but target.path is .*; start it with that"),
        (
            {"tokenize": lambda text: [1, 2]},
            (),
            r"has another vocabulary than .*tiny: the prompt of .* has other",
        ),
        ({"longest": 20}, (), "No held-out prompt fits into the 20 positions"),
        ({}, ("server.at_once=0",), "server.at_once=0 must be at least 1 or null"),
        ({}, ("server.timeout=soon",), "server.timeout='soon' is of the wrong type"),
        ({}, ("server.model=x",), "serves tiny; say which with server.model="),
    ],
)
def test_evaluate_refuses_in_one_sentence(
    place: e2e.Place, options: dict[str, Any], more: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with served_by(**{"tokenize": own_ids, **options}) as stand_in:
        said = e2e.sentence(served.run, config(place, stand_in, *more), capsys)
    assert re.search(sentence, said), said


def test_the_same_model_by_another_name_is_for_the_user_to_say(
    place: e2e.Place, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = max(len(one.prompt) for one in held_out_requests(e2e.config(*place.overrides))) + 8
    with served_by(model="other", longest=longest - 1) as stand_in:
        served.run(config(place, stand_in, "server.model=other", "eval.temperatures=[0.0]", "eval.max_new_tokens=8"))
    said = capsys.readouterr().out
    assert f"left out: over {longest - 1} positions there" in said and "does not show its tokenizer" in said
    assert Path(place.run / "server" / "server.json").is_file()
