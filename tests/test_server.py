"""The server seen from our side: what is asked, how its rounds are read, what a mismatch says, how it fails.

vLLM itself is not needed: a stand-in package answers from a script. The real one is the business of serve-check.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eval.acceptance import VllmCounters, vllm_counters
from eval.damage import CONTROLS, DAMAGE, damage
from eval.decode import DecodeSettings, Request, decode
from eval.server import DRIVER, Limits, Server, ask, read_answer, to_trace
from eval.server_check import acceptance_length, check, compare, to_lines
from eval.trace import RequestTrace, Round, parse_traces
from heads.artifact import UserError, write_manifest
from heads.export.folder import export_head
from heads.foreign import check_interpreter
from scripts.serve_check import checked_beside
from tests.servable import SERVABLE, servable
from tests.simulated_traces import trace_of
from tests.test_head_checkpoint import FINGERPRINT, tiny_head
from tests.tiny import load_tiny

REQUESTS = [Request("a", "chat", (5, 6, 7)), Request("b", "code", (8, 9))]
LIMITS = Limits(8, (2,))

FAKE_VLLM = """
    import json, os, sys
    from types import SimpleNamespace as N
    __version__ = "0.0-fake"
    script = json.load(open(os.environ["FAKE_SCRIPT"]))

    class SamplingParams:
        def __init__(self, **options):
            self.options = options

    class LLM:
        def __init__(self, **options):
            json.dump([options, sys.path, dict(os.environ)], open(os.environ["FAKE_SEEN"], "w"))
            print("fake: loading")
            exec(script["load"])
            self.draft = "speculative_config" in options

        def generate(self, prompts, sampling, use_tqdm):
            json.dump([prompts, [one.options for one in sampling]], open(os.environ["FAKE_SEEN"] + ".asked", "w"))
            return [N(outputs=[N(token_ids=a["ids"], text="t", finish_reason=a["finish"], spec_decode_metrics=
                    N(per_step_drafted=a["proposed"], per_step_accepted=a["accepted"]) if self.draft else None)])
                    for a in script["answers"]]

        def get_metrics(self):
            c = script["counters"]
            names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
            found = [N(name="vllm:spec_decode_" + name, value=value) for name, value in zip(names, c)]
            return found + [N(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=c[3]), N(name="vllm:other")]
"""
ANSWERS = [
    {"ids": [11, 12, 13, 14, 15, 2], "finish": "stop", "proposed": [3, 3], "accepted": [1, 3]},
    {"ids": [21, 22, 23, 24, 25, 26, 27, 28], "finish": "length", "proposed": [3, 3, 3], "accepted": [0, 2, 3]},
]
COUNTERS = [5, 15, 9, [4, 3, 2]]


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """An interpreter that has the stand-in for vllm; returns a function that sets what it does."""
    package = tmp_path / "site"
    package.mkdir()
    (package / "vllm.py").write_text(textwrap.dedent(FAKE_VLLM))
    python = tmp_path / "python"
    # The driver must not depend on PYTHONPATH of ours, so the stand-in is found by the interpreter's own doing.
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH={package}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("FAKE_SCRIPT", str(tmp_path / "script.json"))
    monkeypatch.setenv("FAKE_SEEN", str(tmp_path / "seen.json"))

    def prepare(load: str = "", answers=ANSWERS, counters=COUNTERS) -> str:
        script = {"load": load, "answers": answers, "counters": counters}
        (tmp_path / "script.json").write_text(json.dumps(script))
        return str(python)

    return prepare


def test_what_vllm_is_asked_and_what_comes_back(tmp_path, serve) -> None:
    server = Server(serve(), "/target", "float32", draft="/export", gamma=3, batch=2)
    run = ask(server, REQUESTS, LIMITS, folder=tmp_path / "out", name="x")
    options, path, environment = json.loads((tmp_path / "seen.json").read_text())
    assert options == {
        "model": "/target",
        "dtype": "float32",
        "max_model_len": 3 + 8 + 6 + 16,
        "max_num_seqs": 2,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "speculative_config": {"method": "eagle3", "model": "/export", "num_speculative_tokens": 3},
        "per_request_spec_decode_metrics": "detailed",
    }
    prompts, sampling = json.loads((tmp_path / "seen.json.asked").read_text())
    assert prompts == [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8, 9]}]
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    assert sampling == [{**greedy, "max_tokens": 8, "stop_token_ids": [2], "ignore_eos": False}] * 2
    # Where the tests' own environment has us installed, that is its doing and not the driver's.
    own = subprocess.run(
        [server.python, "-c", "import sys; print(*sys.path, sep='\\n')"], capture_output=True, text=True
    )
    added = set(path) - set(own.stdout.splitlines())
    assert not added & {str(DRIVER.parent), str(DRIVER.parent.parent)}, "our modules shadow the server's"
    assert environment["HF_HUB_OFFLINE"] == environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert run.version == "0.0-fake" and run.texts == ["t", "t"]
    assert run.counters == VllmCounters(5, 15, 9, (4, 3, 2)) == vllm_counters(run.traces, gamma=3)
    assert [trace.tokens for trace in run.traces] == [entry["ids"] for entry in ANSWERS]
    assert run.traces[0].rounds == [Round(3, 1), Round(3, 3, cut=True, verified=3)]
    assert run.traces[1].rounds == [Round(3, 0), Round(3, 2), Round(3, 3, cut=True, verified=3)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["x.answer.json", "x.log", "x.request.json"]


def test_without_a_draft_nothing_is_speculated(tmp_path, serve) -> None:
    answers = [{**entry, "proposed": [], "accepted": []} for entry in ANSWERS]
    run = ask(Server(serve(answers=answers), "t", "float32"), REQUESTS, LIMITS, folder=tmp_path / "out", name="x")
    options = json.loads((tmp_path / "seen.json").read_text())[0]
    assert "speculative_config" not in options and "per_request_spec_decode_metrics" not in options
    assert run.counters is None and run.traces[0].rounds == [Round(0, 0)] * 5


@pytest.mark.parametrize(
    ("load", "timeout", "sentence"),
    [
        ("raise RuntimeError('no such layout')", 60, r"(?s)ended with code 1; its log is .*x.log and .*no such layout"),
        ("os._exit(0)", 60, "ended without an answer"),
        ("os.kill(os.getpid(), 9)", 60, "ended with code -9"),
        ("import time; time.sleep(60)", 2, r"(?s)did not finish within 2 seconds"),
    ],
)
def test_a_failing_server_shows_its_log(tmp_path, serve, load, timeout, sentence) -> None:
    started = time.monotonic()
    with pytest.raises(UserError, match=sentence):
        python = serve(load="import sys; sys.stdout.flush(); " + load)
        ask(Server(python, "t", "float32", timeout=timeout), REQUESTS, LIMITS, folder=tmp_path / "out", name="x")
    assert time.monotonic() - started < 30


def test_nothing_of_the_server_survives(tmp_path, serve) -> None:
    marker = tmp_path / "child"
    load = f"""import subprocess
c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
open({str(marker)!r}, 'w').write(str(c.pid))"""
    ask(Server(serve(load=load), "t", "float32", timeout=20), REQUESTS, LIMITS, folder=tmp_path / "out", name="x")
    status = Path(f"/proc/{marker.read_text()}/stat")
    for _ in range(50):
        if not status.exists() or status.read_text().split()[2] in "ZX":
            return
        time.sleep(0.1)
    pytest.fail("a process that the server had started still runs")


def test_an_interpreter_without_vllm_or_none_at_all(tmp_path, serve) -> None:
    check_interpreter(serve())
    with pytest.raises(
        UserError, match=r"has no vllm; set serve_python= to the python of an environment with vllm-cpu"
    ):
        check_interpreter(sys.executable)
    with pytest.raises(UserError, match="nowhere/python cannot be run .No such file or directory.; set serve_python="):
        check_interpreter("nowhere/python")
    with pytest.raises(UserError, match=r"(?s)cannot import vllm .*; install vllm-cpu for it"):
        ask(Server(sys.executable, "t", "float32"), REQUESTS, LIMITS, folder=tmp_path, name="x")
    with pytest.raises(UserError, match="interpreter nowhere/python cannot be run"):
        ask(Server("nowhere/python", "t", "float32"), REQUESTS, LIMITS, folder=tmp_path, name="x")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "Cannot read the request"),
        ("{", "Cannot read the request"),
        ('{"target": 1}', "must have exactly the keys"),
    ],
)
def test_the_driver_refuses_a_bad_request(tmp_path, content, sentence) -> None:
    request = tmp_path / "request.json"
    if content is not None:
        request.write_text(content)
    done = run_driver(request, tmp_path / "answer.json")
    assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr
    assert run_driver().stderr.startswith("Usage: python vllm_driver.py REQUEST.json ANSWER.json")
    assert not (tmp_path / "answer.json").exists()


def run_driver(*arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(DRIVER), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def entry(tokens: int, accepted: list[int], finish: str = "length") -> dict:
    return {"ids": list(range(tokens)), "finish": finish, "proposed": [4] * len(accepted), "accepted": accepted}


@pytest.mark.parametrize(
    ("tokens", "accepted", "rounds"),
    [
        (1, [], []),  # the prompt's own token was the last
        (2, [0], [Round(4, 0)]),
        (2, [4], [Round(4, 1, True, (), 4)]),  # cut after the first draft: the server still counts four
        (5, [4], [Round(4, 4, True, (), 4)]),  # all drafts in the text, the server's own token not
        (6, [4], [Round(4, 4)]),
        (7, [2, 2], [Round(4, 2), Round(4, 2)]),
        (6, [2, 2], [Round(4, 2), Round(4, 2, True, (), 2)]),
        (5, [2, 3], [Round(4, 2), Round(4, 1, True, (), 3)]),
    ],
)
def test_rounds_are_read_as_our_decoder_writes_them(tokens, accepted, rounds) -> None:
    trace = to_trace(REQUESTS[0], entry(tokens, accepted), 1.0)
    assert trace.rounds == rounds
    assert sum(r.server_accepted for r in trace.rounds) == sum(accepted)


@pytest.mark.parametrize(("tokens", "accepted"), [(9, [1, 1]), (3, [2, 1]), (1, [0])])
def test_rounds_that_do_not_add_up_are_an_error(tokens, accepted) -> None:
    with pytest.raises(UserError, match="do not add up to the . tokens of request a"):
        to_trace(REQUESTS[0], entry(tokens, accepted), 1.0)


def test_two_ways_of_counting_must_agree() -> None:
    answers = [
        {"id": request.request_id, "text": "", **answer} for request, answer in zip(REQUESTS, ANSWERS, strict=True)
    ]
    counted = {
        "num_drafts": 5,
        "num_draft_tokens": 15,
        "num_accepted_tokens": 8,
        "num_accepted_tokens_per_pos": [4, 3, 1],
    }
    answer = {"vllm": "0", "load_seconds": 1, "generate_seconds": 1, "counters": counted, "answers": answers}
    with pytest.raises(UserError, match="are not the sum .* of its per-request ones"):
        read_answer(answer, REQUESTS, 3)


def traces(rounds: list[Round], count: int = 20) -> list[RequestTrace]:
    return [trace_of(rounds, request_id=f"r{i}", seed=i) for i in range(count)]


def test_equal_counters_pass_and_one_draft_more_does_not() -> None:
    ours = traces([Round(4, 2), Round(4, 0), Round(4, 3)])
    good = compare("float32", ours, ours, ours, 4)
    assert good.complaints == [] and good.same_text == good.same_as_ours == 20
    assert good.ours == good.server == VllmCounters(60, 240, 100, (40, 40, 20, 0))
    other = [*ours[:7], trace_of([Round(4, 2), Round(4, 1), Round(4, 2)], request_id="r7", seed=7), *ours[8:]]
    bad = compare("float32", ours, ours, other, 4)
    (complaint,) = bad.complaints
    assert "[40, 40, 20, 0]" in complaint and "[41, 40, 19, 0]" in complaint
    assert "1 of 20 requests differ: r7 from round 1" in complaint
    assert to_lines(bad)[-1].startswith("MISMATCH: we count 100 accepted in 60 drafts")
    json.dumps(bad.to_json())


def test_differences_that_cancel_out_are_found() -> None:
    ours = [trace_of([Round(4, 1), Round(4, 2)], request_id="a"), trace_of([Round(4, 2), Round(4, 1)], request_id="b")]
    theirs = [
        trace_of([Round(4, 2), Round(4, 1)], request_id="a"),
        trace_of([Round(4, 1), Round(4, 2)], request_id="b"),
    ]
    result = compare("float32", ours, ours, theirs, 4)
    assert result.ours == result.server and "2 of 2 requests differ" in result.complaints[0]


def test_a_text_changed_by_speculation_is_named_in_fp32_only() -> None:
    ours = traces([Round(4, 2), Round(4, 0)])
    changed = [RequestTrace(**{**vars(t), "tokens": [*t.tokens[:3], 1, *t.tokens[4:]]}) for t in ours[:1]] + ours[1:]
    result = compare("float32", ours, ours, changed, 4)
    assert result.same_text == 19 and "in 1 requests: r0 from token 3" in result.complaints[0]
    assert compare("bfloat16", ours, ours, changed, 4).complaints == []


def test_half_precision_is_judged_by_the_interval() -> None:
    ours = [trace_of([Round(4, i % 3), Round(4, 2)], request_id=f"r{i}") for i in range(24)]
    interval = acceptance_length(ours)
    assert interval.value == 2.5 and interval.low < 2.5 < interval.high
    near = [trace_of([Round(4, (i + 1) % 3), Round(4, 2)], request_id=f"r{i}") for i in range(24)]
    assert compare("bfloat16", ours, near, near, 4).complaints == []
    far = [trace_of([Round(4, 0), Round(4, 0)], request_id=f"r{i}") for i in range(24)]
    (complaint,) = compare("bfloat16", ours, far, far, 4).complaints
    assert "interval [" in complaint and "acceptance length 1.000" in complaint
    few = compare("bfloat16", ours[:3], near[:3], near[:3], 4)
    assert few.complaints == ["there are too few requests for an interval"]


def test_check_starts_the_server_once_for_each_draft(tmp_path, serve) -> None:
    python = serve(answers=ANSWERS)
    ours = [to_trace(request, answer, 1.0) for request, answer in zip(REQUESTS, ANSWERS, strict=True)]
    said: list[str] = []
    drafts = {"head": tmp_path / "e", "control": tmp_path / "d"}
    server = Server(python, "t", "float32")
    found = check(server, drafts, REQUESTS, ours, LIMITS, gamma=3, folder=tmp_path / "out", say=said.append)
    assert list(found) == ["head", "control"] and all(c.complaints == [] for c in found.values())
    assert [line.split(":")[0] for line in said] == [
        f"vLLM 0.0-fake, float32, {n}" for n in ("plain", "head", "control")
    ]
    assert (tmp_path / "out" / "float32-control.answer.json").is_file()
    assert parse_traces((tmp_path / "out" / "float32-ours.jsonl").read_text()) == ours


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damage_changes_one_thing(tmp_path, kind) -> None:
    export = tmp_path / "export"
    head = {"halves": servable("eagle"), "bias": servable("medusa")}.get(kind, tiny_head())
    export_head(head, export, target_fingerprint=FINGERPRINT, target_path="t", dtype="float32")
    before = (export / "model.safetensors").read_bytes()
    broken = damage(export, kind, tmp_path / "broken")
    assert (export / "model.safetensors").read_bytes() == before
    configs = [json.loads((folder / "config.json").read_text()) for folder in (export, broken)]
    changed = [key for key in configs[0] if configs[0][key] != configs[1][key]]
    good, bad = (load_file(folder / "model.safetensors") for folder in (export, broken))
    changed += [name for name in good if name not in bad or not torch.equal(good[name], bad[name])]
    expected = {
        "taps": "eagle_aux_hidden_state_layer_ids",
        "hidden_norm": "layers.0.hidden_norm.weight",
        "mapping": "d2t",
        "flag": "norm_before_residual",
        "rope": "rope_parameters",
        "halves": "fc.weight",
        "bias": "medusa_fc_bias",
    }
    assert changed == [expected[kind]]
    damage(export, kind, tmp_path / "broken")


def test_a_damage_that_is_unknown_or_of_another_kind_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="damage=none is unknown; choose one of taps"):
        damage(tmp_path, "none", tmp_path / "broken")
    export_head(tiny_head(), tmp_path / "export", target_fingerprint=FINGERPRINT, target_path="t")
    with pytest.raises(UserError, match="damage=bias is of another kind of head"):
        damage(tmp_path / "export", "bias", tmp_path / "broken")


@pytest.mark.parametrize("kind", SERVABLE)
def test_every_method_has_a_control_of_its_own(tmp_path, kind) -> None:
    export = tmp_path / "export"
    manifest = export_head(servable(kind), export, target_fingerprint=FINGERPRINT, target_path="t")
    broken = damage(export, CONTROLS[manifest["method"]], tmp_path / "broken")
    assert any((export / n).read_bytes() != (broken / n).read_bytes() for n in ("config.json", "model.safetensors"))


def test_checks_of_another_version_are_left_out_of_the_overview(tmp_path, capsys) -> None:
    side = {"acceptance_length": 2.0}
    found = {"float32": {"head": {"same_text": 1, "requests": 1, "ours": side, "server": side}}}
    now = {"passed": True, "method": "eagle3", "seconds": 1, "found": found}
    older = {key: value for key, value in now.items() if key != "method"}
    for name, body in (("a", older), ("b", now), ("c", {**now, "found": {"float32": {}}})):
        write_manifest(tmp_path / name / "serve_check", "serve_check", body, {})
    write_manifest(tmp_path / "d" / "serve_check", "serve_check", {**now, "format": -1}, {})
    assert [*checked_beside(tmp_path / "b")] == ["b"]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and all("was written by another version and is left out" in line for line in said)
    assert [str(tmp_path / name) in line for name, line in zip("acd", said, strict=True)] == [True] * 3


def test_our_own_decoder_counts_beyond_the_cut(tmp_path) -> None:
    """What the server counts for the last round is known to our traces, so that they can be compared at all."""
    target = load_tiny(tmp_path)
    head = tiny_head(torch.float64, depth=4)
    head.attach(target.weights)
    requests = [Request(f"r{i}", "s", (5 + i, 9, 11)) for i in range(4)]
    for trace in decode(target, requests, head, DecodeSettings(gamma=4, max_new_tokens=6)):
        answer = {
            "ids": trace.tokens,
            "finish": trace.finish,
            "proposed": [r.proposed for r in trace.rounds],
            "accepted": [r.server_accepted for r in trace.rounds],
        }
        request = next(request for request in requests if request.request_id == trace.request_id)
        # A server tells neither what it dropped nor what its parts took.
        rounds = [replace(one, dropped=()) for one in trace.rounds]
        told = replace(trace, rounds=rounds, prompt_seconds=0.0, draft_seconds=0.0)
        assert to_trace(request, answer, trace.seconds) == told
