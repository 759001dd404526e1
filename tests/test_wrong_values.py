"""Every setting of conf/, given something it cannot be, is one sentence and exit code 2 before the target is loaded."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from heads.target import FrozenTarget
from scripts import pipeline
from tests import e2e

WRONG: tuple[Any, ...] = ("nonsense", -7, ["x", {"y": 1}])
# What takes any text; what it says is known only where it is used, and is refused there (tests/test_bad_input.py).
TEXT = {
    *("name", "run_dir", "head_dir", "traffic_dir", "features_dir", "features_cache", "push"),
    *("serve_python", "server.url", "server.model"),
    *("target.path", "target.gguf_file", "target.adapter", "target.attention", "target.device"),
    *(
        "traffic.hub_config",
        "traffic.hub_split",
        "traffic.slice_field",
        "traffic.default_slice",
        "traffic.phone_region",
    ),
    *(f"tracking.{name}" for name in ("project", "name", "entity", "group")),
}
VARIANTS = {
    "eagle3": ["head=eagle3"],
    "eagle": ["head=eagle"],
    "hydra_mlp": ["head=hydra_mlp", "stages=[collect,train,evaluate]"],
    "medusa": ["head=medusa"],
    "mtp": ["head=mtp"],
    "mtp_native": ["head=mtp_native", "stages=[collect,train,evaluate]"],
    "wandb and rivals": ["tracking=wandb", "rival=[prompt_lookup,early_exit,lookahead]", "export=sglang"],
}


class Reached(BaseException):
    """The target would be loaded now."""


def leaves(values: dict[str, Any], before: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{before}{name}.")
        elif not name.startswith("_"):
            yield f"{before}{name}"


def stop_at_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a target raises Reached; its signature stays, as the config is held against it."""

    @functools.wraps(FrozenTarget.load)
    def reached(*_: Any, **__: Any) -> None:
        raise Reached

    monkeypatch.setattr(FrozenTarget, "load", reached)


@pytest.fixture
def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`outcome(cfg)`: refused, or what else a pipeline came to."""
    monkeypatch.chdir(tmp_path)
    stop_at_the_target(monkeypatch)

    def call(cfg: DictConfig) -> str:
        try:
            e2e.sentence(pipeline.run, cfg, capsys)
        except Reached:
            return "the target would be loaded"
        except (AssertionError, pytest.fail.Exception) as error:
            return f"no sentence: {str(error)[:80]}"
        except Exception as error:  # noqa: BLE001  (the complaint is what is looked for)
            return f"{type(error).__name__}: {error}"
        return "refused"

    return call


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_wrong_value_is_refused_in_time(variant: str, tmp_path: Path, outcome: Any) -> None:
    traffic = e2e.write_rows(tmp_path / "t.jsonl", e2e.conversations(16))
    (tmp_path / "x").mkdir()
    base = e2e.config("name=t", *e2e.uses(tmp_path / "x", traffic), *VARIANTS[variant])
    assert outcome(base) == "the target would be loaded", "the control: nothing is wrong with the config itself"
    names = list(leaves(OmegaConf.to_container(base, resolve=False)))
    if variant != "eagle3":  # the other settings are the same
        names = [name for name in names if name.startswith(("head.", "tracking.", "rivals.", "export."))]
    found = {}
    for name in names:
        for value in WRONG:
            if (name in TEXT and value == "nonsense") or (name, value) == ("name", -7):  # runs/-7
                continue
            cfg = copy.deepcopy(base)
            OmegaConf.update(cfg, name, value, merge=False)
            if (came := outcome(cfg)) != "refused":
                found[f"{name}={value}"] = came
    assert found == {}
