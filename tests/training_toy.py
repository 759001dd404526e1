"""A small head and documents in memory, for the tests of the training loop; also a program that trains them.

Not a test by itself: `python -m tests.training_toy FOLDER key=value …` is what the tests start as a process
of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from heads.artifact import UserError
from heads.base import Committed, DraftHead, FeatureNeeds, LossSums, Proposal, TargetFeatures
from heads.vocab import DraftVocabulary
from training.features import truncate
from training.loop import TrainResult, TrainSettings, train
from training.optim import OptimSettings
from training.processes import start_missing_processes
from training.tracking import JsonlTracker, Tracker

WIDTH, VOCABULARY, DEPTH = 16, 24, 2


class ToyHead(DraftHead):
    """Predicts x_{t+1} and x_{t+2} from the target's state at t, with noise on it, never over a document's
    end.
    """

    def __init__(self, *, width: int = WIDTH, noise: float = 0.1) -> None:
        super().__init__(
            needs=FeatureNeeds(last=True),
            vocab=DraftVocabulary.identity(VOCABULARY),
            arguments={"width": width, "noise": noise},
        )
        self.noise = noise
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.out = nn.ModuleList(nn.Linear(width, VOCABULARY) for _ in range(DEPTH))
        self.register_buffer("known", torch.zeros(VOCABULARY, dtype=torch.bool))

    def loss(self, features: TargetFeatures) -> LossSums:
        state_TD = features.last_TD
        if self.noise:
            state_TD = state_TD + self.noise * torch.randn_like(state_TD)
        hidden_TD = functional.silu(self.mix(self.norm(state_TD)))
        document_T = torch.repeat_interleave(torch.tensor(features.lengths))
        losses, hits, counts = [], [], []
        for depth, out in enumerate(self.out, 1):
            inside_T = (document_T[depth:] == document_T[:-depth]) & features.supervised_T[depth:]
            here_N = inside_T.nonzero().squeeze(1)
            labels_N = features.ids_T[here_N + depth]
            logits_NV = out(hidden_TD[here_N]).float()
            losses.append(functional.cross_entropy(logits_NV, labels_N, reduction="sum"))
            hits.append((logits_NV.argmax(-1) == labels_N).sum().float())
            counts.append(torch.tensor(float(len(here_N))))
        sums = (torch.stack(hits).detach(), torch.stack(counts))
        return LossSums(torch.stack(losses).sum(), torch.stack(counts).sum(), {"acceptance": sums})

    def initialise(self, target: Any) -> None:
        raise NotImplementedError

    def start(self, prompts: Any) -> Any:
        raise NotImplementedError

    def commit(self, state: Any, committed: Committed) -> None:
        raise NotImplementedError

    def propose(self, state: Any, depth: int, draw: Callable[..., Any]) -> Proposal:
        raise NotImplementedError


@dataclass(frozen=True)
class ToyRef:
    id: str
    length: int


class ToySource:
    """Documents drawn from a seed: a state per token, and a prompt that is not supervised."""

    def __init__(self, count: int = 40, seed: int = 0, pause: float = 0.0) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 40, (count,), generator=draw).tolist()
        self.documents = [ToyRef(f"doc-{index}", length) for index, length in enumerate(lengths)]
        self.states_VD = torch.randn(VOCABULARY, WIDTH, generator=draw)
        self.step_V = torch.randperm(VOCABULARY, generator=draw)
        self.pause = pause
        self.unsupervised: set[str] = set()
        self.poisoned: set[str] = set()

    def read_batch(self, refs: Sequence[ToyRef], max_length: int | None) -> list[TargetFeatures]:
        return [truncate(self.read(ref), max_length) for ref in refs]

    def read(self, ref: ToyRef) -> TargetFeatures:
        time.sleep(self.pause)
        ids = [len(ref.id) * 7 % VOCABULARY]
        for _ in range(ref.length - 1):
            ids.append(int(self.step_V[ids[-1]]))
        ids_T = torch.tensor(ids)
        supervised_T = torch.arange(ref.length) >= 2
        last_TD = self.states_VD[ids_T]
        if ref.id in self.poisoned:
            last_TD = last_TD * torch.inf
        return TargetFeatures(
            ids_T=ids_T,
            supervised_T=supervised_T & (ref.id not in self.unsupervised),
            lengths=(ref.length,),
            taps_TE=torch.zeros(ref.length, 0),
            last_TD=last_TD.to(torch.bfloat16),
            lse_T=torch.zeros(ref.length),
        )


class StopsItself(JsonlTracker):
    """Sends the process that has it, which is the first one, SIGTERM after a step."""

    def __init__(self, folder: str, after: int | None) -> None:
        super().__init__(folder)
        self.after = after

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        super().log(step, numbers)
        if step == self.after:
            os.kill(os.getpid(), signal.SIGTERM)


def toy_head(seed: int = 0, **arguments: Any) -> ToyHead:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ToyHead(**arguments)


def toy_settings(**values: Any) -> TrainSettings:
    defaults: dict[str, Any] = {
        "epochs": 3,
        "global_batch_tokens": 128,
        "max_length": 32,
        "mixed_precision": "no",  # so that sums can be compared to the last digits
        "log_every": 1,
        "save_every": 5,
        "optim": OptimSettings(lr=1e-2, weight_decay=0.01),
    }
    return TrainSettings(**(defaults | values))


def toy_train(folder: Path, head: ToyHead | None = None, tracker: Tracker | None = None, **values: Any) -> TrainResult:
    """Train a toy head on toy documents; `values` are settings."""
    source = values.pop("source", None) or ToySource()
    extra = {name: values.pop(name) for name in ("on_eval", "identity", "stream") if name in values}
    return train(
        head or toy_head(),
        source,
        toy_settings(**values),
        folder=folder,
        tracker=tracker or JsonlTracker(folder),
        **extra,
    )


def metrics_of(folder: Path, *names: str) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, without what depends on the clock or the machine."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = {"seconds", "tokens_per_second", "eval/seconds", "memory_gb"}
    return [{k: v for k, v in line.items() if k not in clock and (not names or k in names)} for line in lines]


def weights_of(head: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in head.state_dict().items()}


def main(folder: str, *pairs: str) -> None:
    values = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in pairs)}
    torch.set_num_threads(1)
    start_missing_processes()
    head = toy_head(noise=values.pop("noise", 0.1))
    tracker = StopsItself(folder, values.pop("stop", None))
    if "optimizer" in values:
        values["optim"] = OptimSettings(name=values.pop("optimizer"), lr=1e-2, weight_decay=0.01)
    try:
        result = toy_train(Path(folder), head, tracker, source=ToySource(pause=values.pop("pause", 0.0)), **values)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    rank = PartialState().process_index
    save_file(weights_of(head), Path(folder) / f"weights-{rank}.safetensors")
    sys.stdout.write(f"finished {result.steps}, resumed from {result.resumed_from}\n")


if __name__ == "__main__":
    # The head's class is part of a run's identity, so it must not be called `__main__.ToyHead`.
    importlib.import_module("tests.training_toy").main(*sys.argv[1:])
