"""Every setting of a script's own, given something it cannot be, is one sentence that names it, before any reading.

Nothing is there that a script could read: of right values it says that, so of a wrong one it must speak of the value.
"""

from __future__ import annotations

import copy
import importlib
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from scripts.common import one_sentence
from tests import e2e
from tests.test_wrong_values import WRONG, Reached, leaves, stop_at_the_target

CONF = e2e.ROOT / "conf"
BENCHES = sorted(path.stem for path in (CONF / "bench").glob("*.yaml"))
# What a script needs to be told at least. Of the keys of config.yaml those are looked at that its own file sets anew.
NEEDED: dict[str, list[str]] = {
    **dict.fromkeys(("advise", "compare", "gpu_check", "prove"), []),
    "doctor": ["traffic=jsonl", "traffic.path=t.jsonl"],
    **{f"bench {kind}": [f"bench={kind}"] for kind in BENCHES},
    "advise for a gpu": ["gpu=h100", "target_size.parameters=1e9", "draft_size.parameters=1e7"],
    "advise for a gpu in figures": [
        "gpu={bandwidth_TBs: 3.35, tflops: 989}",
        "target_size.parameters=1e9",
        "draft_size.parameters=1e7",
    ],
    "import_head": ["name=theirs", "from=/no/folder"],
    "medusa2": ["name=changed", "stage1=runs/mine", "head=medusa"],
    "prove static": ["prove.tree={top_k: null, nodes: 24}"],
    "refresh": ["name=week2", "from=runs/mine"],
    "serve_check": ["run_dir=runs/t", "serve_python=/no/python", "law.texts=1500"],
    "store merge": ["merge=[runs/a/features]"],
    "store subset": ["subset=runs/a/features"],
    "store upload": ["upload=memory://x"],
    "store download": ["download=memory://x"],
}
# Any text can be one: an address or a name, which is looked up when its turn comes.
TEXT = {
    *("report", "costs", "proposer", "comparison_dir", "peer_python", "from", "stage1", "subset", "upload", "download"),
    *("head_dir", "traffic_dir", "features_dir", "train.init_from"),
}

WHOLE = ("prove.tree.", "gpu.", "optim.lr_multipliers.")  # mappings that are told as a whole


def names_it(name: str, said: str) -> bool:
    return (name.rpartition(".")[2] if name.startswith(WHOLE) else name) in said


def own(script: str, base: DictConfig) -> list[str]:
    """The settings of conf/<script>.yaml, and of its choices."""
    told = OmegaConf.to_container(OmegaConf.load(CONF / f"{script}.yaml"))
    assert isinstance(told, dict)
    set_here = {str(name) for name in told if name != "defaults"} | {"bench"} & set(base)
    values = OmegaConf.to_container(base, resolve=False)
    return [name for name in leaves(values) if name.partition(".")[0] in set_here]


@pytest.mark.parametrize("variant", NEEDED)
def test_a_wrong_value_is_named_before_anything_is_read(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    e2e.write_rows(tmp_path / "t.jsonl", e2e.conversations(3))
    script = variant.partition(" ")[0]
    run = importlib.import_module(f"scripts.{script}").run
    base = e2e.config(*NEEDED[variant], name=script)

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # gpu_check is done then
    stop_at_the_target(monkeypatch)

    def outcome(cfg: DictConfig) -> str:
        try:
            return e2e.sentence(run, cfg, capsys)
        except Reached:
            return "the target would be loaded"
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  (the complaint is what is looked for)
            return f"no sentence: {type(error).__name__}: {str(error)[:300]}"

    usual, found = outcome(base), {}
    assert not usual.startswith("no sentence") or variant in ("compare", "gpu_check"), usual
    names = own(script, base)
    assert names
    for name in names:
        for value in WRONG:
            if name in TEXT and value == "nonsense":
                continue
            cfg = copy.deepcopy(base)
            OmegaConf.update(cfg, name, value, merge=False)
            said = outcome(cfg)
            if said == usual or said.startswith("no sentence") or not names_it(name, said):
                found[f"{name}={value}"] = said
    assert found == {}


@pytest.mark.parametrize("config", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_what_holds_settings_takes_no_value(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """train=5 and the like, which Hydra lets pass."""

    def never(cfg: DictConfig) -> None:
        raise Reached

    base = e2e.config(name=config)
    told = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"))
    mine = OmegaConf.to_container(OmegaConf.load(CONF / f"{config}.yaml"))
    assert isinstance(told, dict) and isinstance(mine, dict)
    sections = {str(name) for name, value in {**told, **mine}.items() if isinstance(value, dict) and name != "hydra"}
    assert {"generation", "train", "collect", "server"} <= sections
    for section in sections:
        for value in ("words", 5, None, [1]):
            cfg = copy.deepcopy(base)
            OmegaConf.update(cfg, section, value, merge=False)
            with pytest.raises(SystemExit) as stop:
                one_sentence(never, config)(cfg)
            said = e2e.only_sentence(capsys.readouterr().err)
            assert stop.value.code == 2
            assert f"{section}={'null' if value is None else value} is not possible" in said
            assert f"{section}." in said
