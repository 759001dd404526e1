"""A CPU without instructions for bfloat16 is told of once, with what to type."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from scripts import common
from tests import e2e
from tests.tiny import save_tiny
from training.devices import computes_bf16


@pytest.mark.parametrize(
    ("can", "quick"),
    [
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"avx512_f": True, "avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({"neon": True, "bf16": True}, True),
        ({"neon": True}, False),
    ],
)
def test_said_once_and_only_where_it_is_so(
    can: dict[str, bool],
    quick: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_tiny(tmp_path / "target")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: MappingProxyType(can))
    assert computes_bf16(torch.device("cpu")) is quick
    common._tell_of_slow_bf16.cache_clear()
    place = ["target=custom", f"target.path={tmp_path / 'target'}", "target.device=cpu"]
    for dtype in ("float32", "bfloat16", "bfloat16"):
        common.load_target(e2e.config(*place, f"target.dtype={dtype}"))
    assert capsys.readouterr().out.count("target.dtype=float32") == (not quick)
