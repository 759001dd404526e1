"""The rivals of the config (group rival): built for a target, and what identifies them.

A rival is whatever its `_target_` makes of its settings; if that takes `target` or `requests`, it is given them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from scripts.settings import build, plain

if TYPE_CHECKING:
    from eval.decode import Proposer, Request
    from heads.target import FrozenTarget


def build_rivals(cfg: DictConfig, target: FrozenTarget, requests: Sequence[Request]) -> dict[str, Proposer]:
    """The proposers by name, in the order of the config. Raises UserError on settings that cannot be."""
    offered = {"target": target, "requests": requests}
    rivals: dict[str, Proposer] = {}
    for name in map(str, cfg.rivals):
        make = build(cfg, f"rivals.{name}", _partial_=True)
        wanted = inspect.signature(make.func).parameters
        rivals[name] = make(**{key: value for key, value in offered.items() if key in wanted})
    return rivals


def check_predictions(cfg: DictConfig, requests: Sequence[Request]) -> None:
    """That given predictions are those of some of the requests, before a target is loaded. Raises UserError."""
    from eval.proposers.given_prediction import GivenPrediction, predictions_for

    kind = f"{GivenPrediction.__module__}.{GivenPrediction.__name__}"
    for settings in plain(cfg.rivals).values():
        if settings["_target_"] == kind:
            predictions_for(requests, settings["path"])


def rivals_identity(cfg: DictConfig) -> str:
    """Changes with every setting of a rival and with the files that one names: then it is measured anew."""
    from heads.artifact import digest

    found = []
    for settings in plain(cfg.rivals).values():
        paths = [Path(value) for value in settings.values() if isinstance(value, str)]
        named = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
        found += [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(named)]
    return digest([plain(cfg.rivals), found])
