"""What is compared with collecting does the same work; nothing here is timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from heads.artifact import UserError
from heads.base import FeatureNeeds
from heads.target import FrozenTarget
from scripts import bench
from tests import e2e
from tests.tiny import load_tiny
from training import collect_bench
from training.collect_bench import Pair, collect_speed
from training.regenerate import Generation

GIVEN = [[8, 9, 10], [11, 12], [13, 14, 15, 16], [17]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return load_tiny(tmp_path_factory.mktemp("target"))


def measure(target: FrozenTarget, folder: Path) -> collect_bench.CollectSpeed:
    how = Generation(max_new_tokens=6, batch_size=3)
    return collect_speed(target, GIVEN, needs=FeatureNeeds((2,), True), generation=how, folder=folder, repeats=2)


def test_both_sides_do_the_same_work_in_turn(
    target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    whole, bare = collect_bench.known_states, collect_bench.bare_forward

    def states(target: FrozenTarget, documents: Any, **how: Any) -> Any:
        seen.append(("collected", sum(len(one.ids) for one in documents)))
        return whole(target, documents, **how)

    def forward(target: FrozenTarget, documents: Any) -> None:
        seen.append(("bare", sum(len(one.ids) for one in documents)))
        bare(target, documents)

    monkeypatch.setattr(collect_bench, "known_states", states)
    monkeypatch.setattr(collect_bench, "bare_forward", forward)
    found = measure(target, tmp_path / "f")
    warm, counted = seen[:2], seen[2:]
    assert [name for name, _ in warm] == ["collected", "bare"]
    assert [name for name, _ in counted] == ["collected", "bare", "bare", "collected"] * 2
    tokens = {name: sum(count for who, count in counted if who == name) for name in ("collected", "bare")}
    assert tokens == {name: 2 * found.states.tokens[0] for name in tokens}
    assert found.answers.tokens[0] == found.answers.tokens[1], "greedily both write the same"
    assert len(list((tmp_path / "f").glob("*.safetensors"))) == 2


def test_ratios_are_of_rates_and_name_their_extremes() -> None:
    pair = Pair((100, 50), ((2.0, 4.0), (1.0, 1.0)))
    assert pair.rates == pytest.approx((200 / 6, 50.0))
    assert pair.ratio == pytest.approx((2 / 3, 0.5, 1.0))


def test_no_prompts_are_one_sentence(target: FrozenTarget, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no prompts to measure with"):
        collect_speed(
            target, [], needs=FeatureNeeds((2,), True), generation=Generation(), folder=tmp_path / "f", repeats=1
        )


def test_the_command_prints_both_comparisons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from scripts.settings import build
    from tests.tiny import save_tiny
    from training.traffic import write_traffic

    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    traffic = e2e.write_rows(tmp_path / "t.jsonl", e2e.conversations(12))
    given = ["bench=collect", *e2e.uses(save_tiny(tmp_path / "tiny"), traffic), "head.taps=[1,3,6]"]
    given += ["head.draft_vocab_size=64", "traffic.held_out=0.3", "generation.max_new_tokens=4", "name=t"]
    given += ["traffic_dir=runs/t/traffic", "run_dir=runs/new"]
    cfg = e2e.config(*given, "bench.requests=5", "bench.repeats=1", "generation.batch_size=3", name="bench")
    write_traffic(cfg.traffic_dir, build(cfg, "traffic"))
    bench.run(cfg)
    printed = capsys.readouterr().out
    assert "5 prompts in batches of 3, 1 repeats" in printed
    assert "the bare forward" in printed and "generate at batch 1" in printed
    assert list((tmp_path / "runs/new").iterdir()) == [], "nothing stays behind"
