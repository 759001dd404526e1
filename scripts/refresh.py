"""New traffic since a run: its head learns on, and the better of the two, on the same held-out requests, is kept.

python -m scripts.refresh name=week2 from=runs/mine traffic=jsonl traffic.path=week2.jsonl
python -m scripts.refresh name=week3 from=runs/week2 traffic=jsonl traffic.path=week3.jsonl   # and so on
python -m scripts.refresh name=week2 from=runs/mine traffic=jsonl traffic.path=week2.jsonl 'train.lora={rank: 8}'

Leaves runs/<name>/refresh.md and .json (the verdict), comparison.html, and the head that is kept in runs/<name>/head
with its report, so that every other command takes the run as any other. `previous` and `candidate` in it hold either
head's own evaluation. Each step is resumable; repeated, the command trains and measures nothing anew.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from scripts import collect, compare, evaluate, train
from scripts.common import script
from scripts.costs import read_report
from scripts.settings import build, check_all, check_value, plain
from training.processes import Peers

if TYPE_CHECKING:
    from eval.report import Run
    from training.new_traffic import NewTraffic

OUTCOME = ("refresh.json", "refresh.md")


def run(cfg: DictConfig) -> None:
    """Write runs/<name>: traffic, features, both evaluations, the comparison, and the head that is kept."""
    from eval.succession import CANDIDATE, PREVIOUS

    last, folder = _check(cfg)
    new = _read_traffic(cfg, last, folder)
    collect.fill_features(cfg, Peers())
    shared = {"traffic_dir": cfg.traffic_dir, "features_dir": cfg.features_dir}
    candidate = OmegaConf.merge(cfg, shared, {"run_dir": str(folder / CANDIDATE)})
    previous = OmegaConf.merge(cfg, shared, {"run_dir": str(folder / PREVIOUS), "head_dir": str(last / "head")})
    # What the last head is worth on other requests is not to stand in its own run at the tracker.
    OmegaConf.update(previous, "tracking", {"_target_": "training.tracking.JsonlTracker"}, merge=False)
    assert isinstance(candidate, DictConfig) and isinstance(previous, DictConfig)
    candidate.head_dir = f"{candidate.run_dir}/head"
    train.run(candidate)
    evaluate.run(previous)
    evaluate.run(candidate)
    compare.write_comparison([folder / PREVIOUS, folder / CANDIDATE], folder)
    outcome = _decide(cfg, folder, new)
    source = last / "head" if outcome["kept"] == PREVIOUS else folder / CANDIDATE / "head"
    _keep(cfg, source, folder, outcome)
    print(f"\n{outcome['verdict']}\nIt is in {folder / 'head'}; the page to look at: {folder / 'comparison.html'}")


def _check(cfg: DictConfig) -> tuple[Path, Path]:
    """The folders of the last run and of this one, where the config can be carried out. Raises UserError."""
    from heads.artifact import UserError, read_manifest

    if OmegaConf.is_missing(cfg, "from"):
        raise UserError("refresh needs from=<folder of the run before>, such as from=runs/mine.")
    check_value("from", cfg["from"], str)
    last, folder = Path(cfg["from"]), Path(cfg.run_dir)
    if last.resolve() == folder.resolve():
        raise UserError(f"name={cfg.name} is the run that is refreshed; give the new one another name=.")
    if cfg.train.init_from != f"{cfg['from']}/head":
        raise UserError(f"train.init_from={cfg.train.init_from} is not the head of from=; leave it out.")
    check_all(cfg)
    for name in ("head", "traffic"):
        read_manifest(last / name, name)
    return last, folder


def _read_traffic(cfg: DictConfig, last: Path, folder: Path) -> NewTraffic:
    """What is new, written as this run's traffic beside the old held-out conversations."""
    from training.new_traffic import keep_seen, since
    from training.traffic import write_traffic

    print(f"traffic   reading what is new since {last} into {cfg.traffic_dir}", flush=True)
    reading = build(cfg, "traffic")
    new = since(last, reading)
    collect.show_account(write_traffic(cfg.traffic_dir, new.reading, config=plain(cfg)), cfg.traffic_dir)
    keep_seen(folder, new.seen)
    print(
        f"          of {len(reading.conversations)} read, {new.learned_before} had been learned from and "
        f"{new.held_out_before} held out before; the {len(new.old_held_out)} old held-out ones stay held out",
        flush=True,
    )
    return new


def _decide(cfg: DictConfig, folder: Path, new: NewTraffic) -> dict[str, Any]:
    """The outcome, written as refresh.json and refresh.md."""
    from eval.succession import CANDIDATE, PREVIOUS, succession, to_markdown
    from heads.artifact import provenance, write_atomic, write_json
    from heads.checkpoint import read_facts
    from training.new_traffic import is_new
    from training.traffic import load_traffic

    runs = {name: _headline_run(folder / name / "report") for name in (PREVIOUS, CANDIDATE)}
    fresh = is_new(load_traffic(cfg.traffic_dir), new.old_held_out)
    outcome = succession(runs[PREVIOUS], runs[CANDIDATE], fresh)
    heads = {PREVIOUS: Path(cfg["from"]) / "head", CANDIDATE: folder / CANDIDATE / "head"}
    outcome |= {"heads": {name: read_facts(head)["sha256"] for name, head in heads.items()}, "from": cfg["from"]}
    write_json(folder / OUTCOME[0], {**outcome, "provenance": provenance(plain(cfg))})
    write_atomic(folder / OUTCOME[1], to_markdown(outcome))
    return outcome


def _headline_run(folder: Path) -> Run:
    """The run that a report's verdict speaks of, with its traces. Raises UserError when they are gone."""
    from eval.kept import kept_runs
    from heads.artifact import UserError

    report = read_report(folder / "report.json")
    found = kept_runs(folder, report, **report["headline"])
    if not found:
        raise UserError(f"The traces of {folder} are gone; delete {folder} and run the same command again.")
    return found[0]


def _keep(cfg: DictConfig, source: Path, folder: Path, outcome: dict[str, Any]) -> None:
    """Put the head that is kept, and its report, where those of a run are, unless they are there already."""
    from heads.artifact import MANIFEST, read_manifest, write_manifest
    from heads.checkpoint import copy_head

    head, kept = folder / "head", read_manifest(source, "head")
    if not (head / MANIFEST).is_file() or read_manifest(head, "head")["sha256"] != kept["sha256"]:
        copy_head(source, head)
        body = {key: value for key, value in kept.items() if key not in ("kind", "format", "provenance")}
        write_manifest(head, "head", {**body, "refreshed": outcome["verdict"]}, plain(cfg))
    shutil.copytree(folder / outcome["kept"] / "report", folder / "report", dirs_exist_ok=True)


@script("refresh")
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.refresh`."""
    run(cfg)


if __name__ == "__main__":
    main()
