"""A collection by one process, by several, and by ones that are killed: the store is the same byte for byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from heads.artifact import UserError
from scripts import collect
from scripts.common import one_sentence
from tests import e2e
from tests.test_regenerate import traffic
from tests.tiny import save_tiny
from training.processes import Peers

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ("accelerate.commands.launch", "--cpu", "--num_processes", "2")


def contents(folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Every file of a store by its bytes, and the manifest without what it says of the moment it was written."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    manifest = json.loads(files.pop("manifest.json"))
    assert manifest.pop("provenance")
    return files, manifest


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_anywhere_the_same_command_makes_the_same_store(tmp_path: Path, processes: int) -> None:
    """SIGKILL around six renames and at ten random moments, of all processes of a launch or of one; the files are then
    those of one undisturbed process. A random moment may come when the store is finished already."""
    save_tiny(tmp_path / "target")
    rows = [item.to_row() for item in traffic(16)] + [{"id": "long", "turns": ["w1 " * 80]}]
    e2e.write_rows(tmp_path / "a.jsonl", rows)
    places = [str(tmp_path / "target"), str(tmp_path / "a.jsonl"), str(tmp_path), str(processes)]
    command = [sys.executable, "-m", "tests.killed_collect", *places]
    done = subprocess.run(command, cwd=ROOT, env=e2e.environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 6
    calm, again, killed = (contents(tmp_path / name) for name in ("calm", "again", "killed"))
    assert calm == again == killed
    assert calm[1]["quarantined"] == {"longer than max_prompt_tokens=60": 1}


@pytest.mark.slow
def test_two_processes_collect_what_one_does(tmp_path: Path) -> None:
    """`accelerate launch --cpu --num_processes 2 -m scripts.collect`: the same store, and one of them speaks."""
    one = e2e.new_place(tmp_path / "one")
    two = one.at(tmp_path / "two")
    outputs = [e2e.call(one, "collect"), e2e.call(two, "collect", launcher=LAUNCH)]
    for output in outputs:
        assert output.returncode == 0, output.stderr
    assert outputs[0].stdout == outputs[1].stdout
    assert outputs[1].stderr.count("regenerate ") == 1, outputs[1].stderr
    assert contents(one.run / "features") == contents(two.run / "features")
    assert not list(two.run.rglob("*.tmp"))
    quiet = (LAUNCH[0], "--quiet", *LAUNCH[1:])  # else a traceback of the launcher's own follows
    wrong = e2e.call(two, "collect", "generation.max_new_tokens=7", launcher=quiet)
    assert wrong.returncode == 1, "which is accelerate's code, whatever its processes end with"
    assert "max_new_tokens=24, but" in e2e.only_sentence(wrong.stderr)


def test_verify_names_a_flipped_byte_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = e2e.new_place(tmp_path)
    cfg = e2e.config(*place.overrides, f"run_dir={place.run}")
    one_sentence(collect.run)(cfg)
    collect.check(cfg)
    assert "are as they were written" in capsys.readouterr().out
    shard = place.run / "features" / "shard-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    with pytest.raises(SystemExit) as stop:
        collect.check(cfg)
    assert stop.value.code == 1 and "damaged: shard-00002.safetensors changed" in capsys.readouterr().err
    one_sentence(collect.run)(cfg)
    assert shard.read_bytes() == whole
    collect.check(cfg)


def test_of_several_failures_one_speaks() -> None:
    """Alone a step is no more than its work."""
    alone = Peers()
    with pytest.raises(UserError, match="mine"), alone.step():
        raise UserError("mine")
    assert alone.main and alone.first(3) == 3
