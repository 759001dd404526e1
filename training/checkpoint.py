"""The state from which training continues: weights, optimizer, schedule, random generators, position.

A checkpoint is one folder `step-00000120` that appears by a rename when it is complete, so a crash at any
moment leaves the previous one. Tensors are safetensors, the rest is JSON; nothing is pickled. Old checkpoints
are removed only when this run wrote them.

It does not know what a step is, nor what the loop's own record means, and it does not write the head that
other programs load.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from heads.artifact import (
    FORMAT,
    UserError,
    read_json,
    seal_holds,
    sealed,
    sha256_file,
    sync_folder,
    write_atomic,
    write_json,
)
from training.devices import is_sharded, like, whole
from training.generators import random_state, restore_random

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8})")
_PARTS = ("run", "step", "finished", "identity", "record", "scheduler", "optimizer")  # of the state
_STATE, _WEIGHTS, _OPTIMIZER = "state.json", "weights.safetensors", "optimizer.safetensors"
_BEST = "best.safetensors"  # the weights of the best evaluation so far, where one decides


class CheckpointFolder:
    """The checkpoints of one run, in `folder`.

    identity: what makes two runs the same (head, settings, data) as JSON values; a checkpoint with another
    one is refused. keep: how many of this run's checkpoints stay.
    """

    def __init__(self, folder: str | Path, *, identity: Mapping[str, Any], keep: int, accelerator: Accelerator) -> None:
        self.folder = Path(folder)
        self.identity = json.loads(json.dumps(identity, default=str))
        self.keep = max(1, keep)
        self.accelerator = accelerator
        self.run = uuid.uuid4().hex
        self._damaged: set[Path] = set()  # passed over by `read`; saving the same step again replaces them

    def latest(self) -> Path | None:
        """The complete checkpoint of the highest step; after `read`, of those that are whole."""
        found = self._complete()
        return found[-1] if found else None

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return self.folder / f"step-{step:08}"

    def _complete(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        paths = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(path for path in paths if path not in self._damaged and (path / _STATE).is_file())

    def read(self) -> dict[str, Any] | None:
        """The state of the latest checkpoint that is whole; from here on this run is the one that wrote it. None
        without any checkpoint.

        A damaged one is warned about and an earlier one taken. Raises UserError when none is whole, and when it belongs
        to another run.
        """
        damage: UserError | None = None
        state = None
        while state is None:
            path = self.latest()
            if path is None:
                if damage is not None:
                    raise damage
                return None
            try:
                state = _whole(path)
            except UserError as error:
                damage = damage or error
                self._damaged.add(path)
        if damage is not None and self.accelerator.is_main_process:
            logger.warning("%s Training goes on from the earlier %s.", damage, path)
        differing = differences(state["identity"], self.identity)
        if differing:
            was = state["identity"].get("settings", {}).get("mixed_precision")  # `auto` of another machine
            of_auto = any(one.startswith("settings.mixed_precision ") for one in differing)
            same = f"set train.mixed_precision={was}, " if of_auto else ""
            raise UserError(
                f"{path} belongs to another run ({'; '.join(differing[:4])}); "
                f"{same}choose another folder, or remove {self.folder} to start anew."
            )
        self.run = state["run"]
        return dict(state)

    @staticmethod
    def tracker_run(folder: str | Path) -> str | None:
        """Under which name the tracker knows the run whose checkpoints these are; None: not known."""
        states = sorted(path for path in Path(folder).glob(f"*/{_STATE}") if _NAME.fullmatch(path.parent.name))
        try:
            name = _state(states[-1].parent)["record"]["tracker_run"] if states else None
        except (UserError, KeyError, TypeError):  # damaged: an evaluation is then a run of its own
            return None
        return name if isinstance(name, str) else None

    def load_weights(self, module: nn.Module) -> None:
        """Put the latest checkpoint's weights into the module."""
        put(load_file(self._latest() / _WEIGHTS), module)

    def best(self) -> dict[str, Tensor] | None:
        """The weights of the best evaluation up to the latest checkpoint, where there are any."""
        path = self._latest() / _BEST
        return load_file(path) if path.is_file() else None

    def _latest(self) -> Path:
        path = self.latest()
        assert path is not None, "read() told whether there is a checkpoint"
        return path

    def load_rest(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer, scheduler: LRScheduler) -> None:
        """Restore optimizer, schedule and this rank's random generators from the latest checkpoint."""
        path = self._latest()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.load_state_dict(_join(state["optimizer"], load_file(path / _OPTIMIZER), parameters))
        scheduler.load_state_dict(state["scheduler"])
        random_file = path / _random_name(self.accelerator.process_index)
        if random_file.is_file():  # otherwise the run had fewer processes
            restore_random(load_file(random_file))

    def save(
        self,
        step: int,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler,
        record: Mapping[str, Any],
        *,
        best: Mapping[str, Tensor] | None = None,
        finished: bool = False,
    ) -> Path:
        """Write the checkpoint of `step` unless it is there; every rank calls it.

        record: the loop's own part, as JSON values; best: the weights that the best evaluation so far was of.
        """
        final = self.path(step)
        if (final / _STATE).is_file() and final not in self._damaged:
            return final
        partial = self.folder / f".writing-{final.name}"
        if self.accelerator.is_main_process:
            self._sweep()
            partial.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        write_atomic(partial / _random_name(self.accelerator.process_index), save(random_state()))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process or is_sharded(module):  # shards are brought together by all ranks
            scalars, tensors = _separate(optimizer.state_dict())
            weights = {name: plain(tensor) for name, tensor in owned(module).items()}
        if self.accelerator.is_main_process:
            write_atomic(partial / _WEIGHTS, save(weights))
            write_atomic(partial / _OPTIMIZER, save(tensors))
            if best is not None:
                write_atomic(partial / _BEST, save(dict(best)))
            state = {
                "format": FORMAT,
                "run": self.run,
                "step": step,
                "finished": finished,
                "identity": self.identity,
                "record": dict(record),
                "scheduler": scheduler.state_dict(),
                "optimizer": scalars,
                "files": {path.name: sha256_file(path) for path in sorted(partial.iterdir())},
            }
            write_json(partial / _STATE, sealed(state))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            if final in self._damaged:
                _remove(final)
            partial.rename(final)
            sync_folder(self.folder)
            for path in self._written_here()[: -self.keep]:
                _remove(path)
        self._damaged.discard(final)
        self.accelerator.wait_for_everyone()
        return final

    def _written_here(self) -> list[Path]:
        return [path for path in self._complete() if _run_of(path) == self.run]

    def _sweep(self) -> None:
        """Remove what a crash left half written or half removed."""
        for pattern in (".writing-step-*", ".removing-step-*"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path)


def _state(path: Path) -> dict[str, Any]:
    """The state of a checkpoint. Raises UserError when it is not as it was written."""
    remedy = f"remove {path}, to go on from the one before it or to start anew"
    state = read_json(path / _STATE, "a checkpoint's state", remedy)
    if state.get("format") != FORMAT:
        raise UserError(f"{path} has format {state.get('format')}, not {FORMAT}; choose another folder.")
    if missing := [name for name in _PARTS if name not in state]:
        raise UserError(f"{path / _STATE} is damaged: it lacks {', '.join(missing)}; {remedy}.")
    if not seal_holds(state):
        raise UserError(f"{path / _STATE} is damaged: it changed after it was written; {remedy}.")
    return state


def _whole(path: Path) -> dict[str, Any]:
    """The same, when the files beside it are as they were written too; older states do not tell."""
    state = _state(path)
    sums = state.get("files", {})
    if bad := [name for name, sha256 in sums.items() if not _is(path / name, sha256)]:
        raise UserError(
            f"{path} is damaged: {', '.join(bad)} changed after it was written; remove {path}, to go on from the one "
            f"before it or to start anew."
        )
    return state


def _is(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_file(path) == sha256


def _run_of(path: Path) -> str | None:
    """Which run wrote a checkpoint; None where that cannot be read, so that it is left alone."""
    try:
        return str(_state(path)["run"])
    except UserError:
        return None


def _remove(path: Path) -> None:
    """Remove a checkpoint such that a crash in between leaves no half of it under its name."""
    doomed = path.rename(path.parent / f".removing-{path.name}")
    shutil.rmtree(doomed)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Sentences naming the leaves in which two nested mappings of JSON values differ."""
    found = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key} was {_short(before)} and is {_short(after)}")
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def owned(module: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds: trained parameters and persistent buffers; frozen ones can be had again."""
    parameters = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in frozen}


def put(stored: Mapping[str, Tensor], module: nn.Module) -> None:
    """Put weights as a checkpoint holds them into a module of the same identity."""
    tensors = owned(module)
    assert stored.keys() == tensors.keys(), "the identity includes names and shapes"
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(stored[name])


def plain(tensor: Tensor) -> Tensor:
    """A whole copy on the CPU that shares no memory with another tensor; of a shard every rank makes it."""
    return whole(tensor.detach()).to("cpu", copy=True).contiguous()


def _separate(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An optimizer's state as JSON values and, under "index/name", tensors."""
    scalars: dict[str, Any] = {"state": {}, "param_groups": state["param_groups"]}
    tensors: dict[str, Tensor] = {}
    for index, entries in state["state"].items():
        scalars["state"][str(index)] = {k: v for k, v in entries.items() if not isinstance(v, Tensor)}
        tensors.update({f"{index}/{k}": plain(v) for k, v in entries.items() if isinstance(v, Tensor)})
    return scalars, tensors


def _join(scalars: Mapping[str, Any], tensors: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """The inverse of `_separate`, each tensor on as many devices as its parameter."""
    state: dict[int, dict[str, Any]] = {int(index): dict(rest) for index, rest in scalars["state"].items()}
    for name, tensor in tensors.items():
        index, _, key = name.partition("/")
        state[int(index)][key] = like(tensor, parameters[int(index)])
    return {"state": state, "param_groups": scalars["param_groups"]}


def _random_name(rank: int) -> str:
    return f"random-{rank:05}.safetensors"
