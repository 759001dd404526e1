"""States of known documents out of vLLM's hidden-state extraction, in place of a forward of ours.

One vLLM process, in the interpreter of a serving environment, takes batch after batch (`vllm_states/draftsmith_driver`
is executed there by path). It gives the states at any boundary between layers, and at the last of them the state before
the final norm: the norm and the log-sum-exp over the vocabulary are the target's own, here.

The first document is also run by the target in this process, so that a vLLM that counts boundaries in another way, or
runs another model, ends the collection instead of filling a store.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from heads.artifact import UserError
from heads.final_norm import final_norm
from heads.foreign import check_interpreter, end, environment, failure, start
from heads.target import FrozenTarget
from training.chat import Encoded
from training.states import Answer, forward_states, with_states

DRIVER = Path(__file__).parent / "vllm_states" / "draftsmith_driver.py"
_ALIKE = 0.97  # cosine at every position of the first document; rounding in bf16 stays above, a wrong layer below
_PROBED = 64  # positions of it
_GOODBYE = 20.0  # seconds for an orderly end
_SHARE = 0.9  # of the free memory of a GPU, which the target in this process has a part of already
_GO_ON = ", and the same command goes on from here"


@dataclass(frozen=True, kw_only=True)
class ExtractionSettings:
    """How vLLM is to run: the interpreter it is installed for, the target's folder or Hub id, documents at a time,
    the least positions that a document may have, seconds for its start and for one batch, and over how many of the
    visible GPUs, from the first on, it divides the target. Raises UserError when that is below 1."""

    python: str
    target: str
    batch: int
    length: int
    timeout: float = 600.0
    tensor_parallel: int = 1
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise UserError(f"collect.tensor_parallel={self.tensor_parallel} is not possible; give at least 1.")


class ExtractedStates:
    """vLLM, to be called in place of `known_states`; a context manager. The process starts with the first documents.

    folder and name: the log is `<folder>/<name>.log`, states pass through `<folder>/.<name>`.
    """

    def __init__(self, settings: ExtractionSettings, *, folder: str | Path, name: str = "vllm") -> None:
        self.settings = settings
        self.version: str | None = None
        self.load_seconds = 0.0
        self._scratch, self._log = Path(folder).resolve() / f".{name}", Path(folder).resolve() / f"{name}.log"
        self._process: Any = None
        self._runs_for: tuple[FrozenTarget, tuple[int, ...]] | None = None
        self._capacity = 0

    def __enter__(self) -> ExtractedStates:
        """Raises UserError when the interpreter is not there or has no vllm."""
        check_interpreter(self.settings.python)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(orderly=error is None)

    @torch.inference_mode()
    def __call__(self, target: FrozenTarget, documents: Sequence[Encoded], *, taps: Sequence[int]) -> list[Answer]:
        """As `known_states`. Raises UserError when vLLM fails, dies, or has other states than the target."""
        # Nothing is predicted from the last position, and without it vLLM has room for the token it must add.
        asked = [document.ids[: max(1, len(document.ids) - 1)] for document in documents]
        self._be_ready(target, tuple(taps), max(map(len, asked)), asked[0][:_PROBED])
        states = self._states(asked)
        return with_states(target, documents, [self._completed(one.to(target.device)) for one in states])

    def _completed(self, states_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Tapped [T, E] and last states [T, D]."""
        return states_TKD[:, :-1].flatten(1), self._norm(states_TKD[:, -1])

    def _be_ready(self, target: FrozenTarget, taps: tuple[int, ...], length: int, first: Sequence[int]) -> None:
        """Start vLLM unless it runs for documents of this length; first: ids to compare it with the target on."""
        same = self._runs_for is not None and self._runs_for[0] is target and self._runs_for[1] == taps
        if same and length < self._capacity:
            return
        self._stop(orderly=True)
        self._capacity = min(max(length + 1, self.settings.length), target.max_length)
        self._norm = final_norm(target)
        self._start(target, [*taps, target.num_layers])
        self._runs_for = target, taps
        self._probe(target, taps, first)

    def _start(self, target: FrozenTarget, boundaries: list[int]) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        env, memory, several = environment(DRIVER.parent), None, self.settings.tensor_parallel
        if target.device.type == "cuda":
            place = target.device.index or 0
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            if several == 1:  # the target's own GPU; several are the first ones, wherever the target is
                env["CUDA_VISIBLE_DEVICES"] = visible.split(",")[place] if visible else str(place)
            used = [place] if several == 1 else list(range(several))
            memory = round(min(_SHARE * free / total for free, total in map(torch.cuda.mem_get_info, used)), 3)
        with open(self._log, "wb") as log:
            self._process = start([self.settings.python, str(DRIVER)], log=log, env=env, piped=True)
        how = {
            "target": self.settings.target,
            "dtype": str(target.dtype).removeprefix("torch."),
            "boundaries": boundaries,
            "max_model_len": self._capacity,
            "batch": self.settings.batch,
            "folder": str(self._scratch),
            "memory": memory,
            "tensor_parallel": several,
            "trust_remote_code": self.settings.trust_remote_code,
        }
        ready = self._ask(how)
        self.version, self.load_seconds = ready["vllm"], ready["load_seconds"]

    def _probe(self, target: FrozenTarget, taps: tuple[int, ...], ids: Sequence[int]) -> None:
        """Compare vLLM with the target in this process, at every boundary that is asked for."""
        ((taps_TE, last_TD),) = forward_states(target, [torch.tensor(ids)], taps=taps)
        (states,) = self._states([ids])
        got_TE, got_TD = self._completed(states.to(target.device))
        for boundary, own, theirs in zip(
            [*taps, "last"],
            [*taps_TE.split(target.hidden_size, -1), last_TD],
            [*got_TE.split(target.hidden_size, -1), got_TD],
            strict=True,
        ):
            alike = torch.cosine_similarity(own.double(), theirs.double(), dim=-1).min().item()
            if not alike >= _ALIKE:
                raise UserError(
                    f"The states that vLLM {self.version} gives at boundary {boundary} are not the target's (cosine "
                    f"{alike:.3f} with a forward here, less than {_ALIKE}); set collect.features=transformers."
                )

    def _states(self, documents: Sequence[Sequence[int]]) -> list[Tensor]:
        """States [T, boundaries, D] of each, without the files they came in."""
        files = self._ask({"documents": [list(ids) for ids in documents]})["files"]
        states = []
        for path, ids in zip(files, documents, strict=True):
            found = load_file(path)
            os.remove(path)
            if found["token_ids"].tolist() != list(ids):
                raise UserError(
                    f"vLLM {self.version} gives states for other tokens than it was asked for; set "
                    f"collect.features=transformers."
                )
            states.append(found["hidden_states"])
        return states

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to one request. Raises UserError, with the end of the log, when there is none."""
        process, until = self._process, time.monotonic() + self.settings.timeout
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; said below
        while not select.select([process.stdout], [], [], 0.5)[0]:
            if process.poll() is not None:
                break
            if time.monotonic() > until:
                raise UserError(failure(f"did not answer within {self.settings.timeout:.0f} seconds", self._log))
        else:
            if line := process.stdout.readline():
                return json.loads(line)
        raise UserError(failure(f"ended with code {process.wait()}", self._log, _GO_ON))

    def _stop(self, *, orderly: bool) -> None:
        """End the process, with nothing of it left."""
        if self._process is not None:
            try:
                self._process.stdin.close()
                if orderly:
                    self._process.wait(_GOODBYE)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                pass
            finally:
                end(self._process)
                self._process.stdout.close()
        self._process = self._runs_for = None
        shutil.rmtree(self._scratch, ignore_errors=True)
