"""What a setting is where nothing is said: the same from Python as on the command line."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any

from omegaconf import OmegaConf

from eval.certificate import ProofSettings
from eval.suite import Plan
from heads.target import FrozenTarget
from scripts.settings import plain
from tests import e2e
from tests.test_configs import CONF, OPTIONS
from training.demo import read_demo
from training.extracted import ExtractionSettings
from training.optim import OptimSettings
from training.readers import read_files
from training.regenerate import Generation
from training.served import ServerSettings
from training.settings import TrainSettings
from training.store import Storage

# What a Python call takes from elsewhere than its own default, and why.
OF_THE_SCRIPTS = {
    "target.device": "auto is a device of the process that a launch started, which only scripts know",
    "target.dtype": "auto is what the device is quick in, which only scripts know",
    "train.mixed_precision": "auto, too",
    "eval.dtypes": "target is target.dtype",
    "prove.dtypes": "target is target.dtype",
    "traffic.redact": "a list, of which Python's default is none",
}
SECTIONS: dict[str, list[Any]] = {
    "generation": [Generation],
    "train": [TrainSettings],
    "collect": [ServerSettings, Storage, ExtractionSettings],
    "target": [FrozenTarget.load],
}
ROOTS_WITH_SETTINGS = {"doctor": "doctor", "gpu_check": "check", "medusa2": "medusa2", "prove": "prove"}


def settings_and_calls() -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Every section and every choice by its name, with its values and the class or function that they go to. Of several
    choices for one call the usual one counts: the others are there to be something else."""
    cfg = e2e.composed()
    for name, calls in SECTIONS.items():
        yield from ((name, plain(cfg[name]), call) for call in calls)
    nodes = [(root, OmegaConf.load(CONF / f"{root}.yaml")[name]) for root, name in ROOTS_WITH_SETTINGS.items()]
    nodes += [(group, OmegaConf.load(CONF / f"{group}/{choice}.yaml")) for group, choice in OPTIONS]
    for name, node in nodes:
        values = OmegaConf.to_container(node)
        if "_target_" not in values:
            continue
        usual = plain(cfg[name]) if name in cfg else {}
        if usual.get("_target_") != values["_target_"] or usual == {**usual, **values}:
            yield name, values, named(values["_target_"])


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return vars(import_module(module))[name]


def default_of(parameter: inspect.Parameter, call: Any) -> Any:
    """Of a signature; of a dataclass also what its factory makes."""
    if is_dataclass(call):
        (one,) = [one for one in fields(call) if one.name == parameter.name]
        return one.default if one.default_factory is MISSING else one.default_factory()
    return parameter.default


def test_python_and_the_configs_have_the_same_defaults() -> None:
    """So that a notebook and the command line do the same where nothing is said."""
    found, compared = [], set()
    for name, values, call in settings_and_calls():
        for key, parameter in inspect.signature(call).parameters.items():
            if key not in values or parameter.default is inspect.Parameter.empty or f"{name}.{key}" in OF_THE_SCRIPTS:
                continue
            if str(values[key]).startswith("${"):  # follows another setting
                continue
            compared.add(call)
            default = default_of(parameter, call)
            if (list(default) if isinstance(default, tuple) else default) != values[key]:
                found.append(f"{name}.{key}: {default} in Python, {values[key]} in conf/")
    assert found == []
    assert {Generation, TrainSettings, OptimSettings, Plan, ProofSettings, read_demo, read_files} <= compared
    assert len(compared) >= 20
