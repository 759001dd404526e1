"""What is computed in where a CPU has no instructions for bfloat16: float32, unless asked otherwise."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from heads.target import DTYPES
from scripts import common
from scripts.precision import FORMATS
from tests import e2e
from tests.tiny import save_tiny
from training.devices import computes_bf16

CPUS = [
    ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, False),
    ({"avx512_f": True, "avx512_bf16": True}, True),
    ({"amx_bf16": True}, True),
    ({"neon": True, "bf16": True}, True),
    ({"neon": True}, False),
]


def has(monkeypatch: pytest.MonkeyPatch, can: dict[str, bool]) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: MappingProxyType(can))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(("can", "quick"), CPUS)
def test_bfloat16_is_taken_where_it_is_quick(
    can: dict[str, bool], quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, can)
    assert computes_bf16(torch.device("cpu")) is quick
    cfg = e2e.config()
    assert cfg.target.dtype == ("bfloat16" if quick else "float32")
    assert cfg.train.mixed_precision == ("bf16" if quick else "no")
    assert list(cfg.eval.dtypes) == (["float32", "bfloat16"] if quick else ["float32"])
    assert list(e2e.config(name="prove").prove.dtypes) == ["float64", *cfg.eval.dtypes]
    assert e2e.config(name="serve_check").dtypes == cfg.eval.dtypes


def test_the_formats_are_those_that_a_target_can_be_loaded_in() -> None:
    assert set(FORMATS) == set(DTYPES)


def test_what_is_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, {})
    cfg = e2e.config("target.dtype=float16", "train.mixed_precision=bf16")
    assert (cfg.target.dtype, cfg.train.mixed_precision) == ("float16", "bf16")
    assert list(cfg.eval.dtypes) == ["float32", "float16"]
    assert list(e2e.config("eval.dtypes=[bfloat16]").eval.dtypes) == ["bfloat16"]
    assert list(e2e.config("eval.dtypes=[float32,float32]").eval.dtypes) == ["float32"] * 2, "to be refused"


@pytest.mark.parametrize(("can", "quick"), CPUS[:2])
def test_said_once_and_only_where_it_is_so(
    can: dict[str, bool],
    quick: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_tiny(tmp_path / "target")
    has(monkeypatch, can)
    common._tell_of_slow_bf16.cache_clear()
    place = ["target=custom", f"target.path={tmp_path / 'target'}", "target.device=cpu"]
    for dtype in ("auto", "float32", "bfloat16", "bfloat16"):
        common.load_target(e2e.config(*place, f"target.dtype={dtype}"))
    assert capsys.readouterr().out.count("bfloat16 is slow on this CPU") == (not quick)
