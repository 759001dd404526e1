"""Every documented setting of `traffic=files` changes what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from scripts.settings import build
from tests import e2e

Seen = dict[str, Any]


def heard(folder: Path, *more: str) -> Seen:
    """What a reader makes of a small file that gives every setting something to do."""
    secret = "call +44 20 7946 0958 or (650) 253-0000"
    rows: list[Seen] = [{"id": f"c{index}", "turns": [f"w{index} w2 w3 w4"]} for index in range(6)]
    rows += [{"turns": ["w1"], "tag": "x"}, {"turns": [secret]}, {"turns": [f"{secret.upper()} "]}]
    rows += [{"prompt": "w8 w8"}]
    rows += [{"messages": [{"role": "user", "content": "w9 w9"}, {"role": "assistant", "content": ""}]}]
    path = e2e.write_rows(folder / "t.jsonl", rows)
    reading = build(e2e.config("traffic=files", f"traffic.path={path}", *more), "traffic")
    return {
        "texts": [item.first_text() for item in reading.conversations],
        "logged": [bool(item.logged) for item in reading.conversations],
        "slices": [item.slice for item in reading.conversations],
        "reasons": [item.reason for item in reading.rejected],
        "held_out": reading.held_out,
    }


TRAFFIC = {
    # setting: (of the one reading, of the other, what differs)
    "path": ([], ["traffic.path={other}"], "texts"),
    "format": ([], ["traffic.format=prompts"], "texts"),
    "rows": ([], ["traffic.rows=3"], "texts"),
    "answers": ([], ["traffic.answers=logged"], "logged"),
    "held_out": ([], ["traffic.held_out=0.5"], "held_out"),
    "limit": ([], ["traffic.limit=2"], "texts"),
    "slice_field": ([], ["traffic.slice_field=tag"], "slices"),
    "default_slice": ([], ["traffic.default_slice=mine"], "slices"),
    "shortest": ([], ["traffic.shortest=5"], "reasons"),
    "longest": ([], ["traffic.longest=20"], "reasons"),
    "empty_answers": ([], ["traffic.empty_answers=false"], "reasons"),
    "near_duplicates": ([], ["traffic.near_duplicates=0.9"], "reasons"),
    "redact": ([], ["traffic.redact=[phones]"], "texts"),
    "phone_region": (["traffic.redact=[phones]"], ["traffic.redact=[phones]", "traffic.phone_region=US"], "texts"),
}


@pytest.mark.parametrize("setting", TRAFFIC)
def test_traffic(tmp_path: Path, setting: str) -> None:
    first, second, what = TRAFFIC[setting]
    other = e2e.write_rows(tmp_path / "other.jsonl", [{"turns": ["another"]}])
    second = [more.replace("{other}", str(other)) for more in second]
    assert heard(tmp_path, *first)[what] != heard(tmp_path, *second)[what]


def test_a_data_set_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """hub_config and hub_split reach the library that reads it."""
    asked: list[Any] = []

    def load(name: str, config: str | None, **how: Any) -> list[Seen]:
        asked.append((name, config, how["split"]))
        return [{"prompt": "w1"}]

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setattr("datasets.load_dataset", load)
    for more in ([], ["traffic.hub_config=small", "traffic.hub_split=test"]):
        build(e2e.config("traffic=files", "traffic.path=hf://datasets/a/b", *more), "traffic")
    assert asked == [("a/b", None, "train"), ("a/b", "small", "test")]


def test_every_documented_setting_has_its_test() -> None:
    documented = set(OmegaConf.load(e2e.ROOT / "conf/traffic/files.yaml")) - {"_target_"}
    assert documented == {*TRAFFIC, "hub_config", "hub_split"}
