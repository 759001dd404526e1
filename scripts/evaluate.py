"""A head to numbers: the exact decoder over the held-out requests, the report as JSON and as a page.

python -m scripts.evaluate name=mine
python -m scripts.evaluate name=mine head_dir=runs/other/head eval.gamma=3
python -m scripts.evaluate name=mine 'eval.tree={top_k: 4, nodes: 12}'
python -m scripts.evaluate name=mine 'eval.tree={nodes: 24}'
python -m scripts.evaluate name=mine 'rival=[prompt_lookup,early_exit,lookahead]'
python -m scripts.evaluate name=mine server.url=http://127.0.0.1:8000
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from scripts.common import load_target, open_tracker, script
from scripts.costs import kept_load, machine
from scripts.drafters import plan_tree, proposers, within_reach
from scripts.prompts import held_out_requests, tokenizer_of
from scripts.rivals import build_rivals, check_predictions, rivals_identity
from scripts.settings import build, check_rivals, plain
from scripts.teacher import teacher_forced
from scripts.twins import FILES, write_report

if TYPE_CHECKING:
    from eval.decode import Request
    from eval.report import Run
    from eval.static_tree import Measuring
    from heads.target import FrozenTarget
    from heads.tree_draft import DynamicTree

HEAD_FACTS = ("name", "sha256", "parameters", "steps", "seconds", "tokens", "draft_vocabulary")  # in the report


def run(cfg: DictConfig) -> None:
    """Write runs/<name>/report; parts of an evaluation that are already there are not repeated."""
    from heads.artifact import provenance, read_manifest, write_manifest

    folder, head_dir = Path(cfg.run_dir) / "report", Path(cfg.head_dir)
    plan = build(cfg, "eval", seed=cfg.seed)
    check_rivals(cfg)
    head_facts = read_manifest(head_dir, "head")
    name = head_facts["name"]
    print(f"evaluate  {name} of {head_dir} on the held-out requests", flush=True)
    from rich.console import Console

    from eval.report import build_report
    from eval.report_table import render_table
    from eval.suite import Suite
    from scripts.show import Steps

    plan = within_reach(plan, head_dir)
    tree = plan_tree(cfg, plan.tree, "eval.tree", plan.gamma)
    requests = held_out_requests(cfg)
    check_predictions(cfg, requests)
    traffic = read_manifest(cfg.traffic_dir, "traffic")
    with Steps() as steps:
        suite = Suite(
            requests=requests,
            plan=plan,
            folder=folder / "traces",
            identity=_identity(cfg, head_facts, tree),
            load_target=lambda dtype: _loaded(cfg, dtype),
            make_proposers=lambda target: {
                **proposers(name, head_dir, target, tree, steps.begin, steps.advance),
                **build_rivals(cfg, target, requests),
            },
            announce=steps.begin,
            progress=steps.advance,
        )
        runs = suite.run([name, *map(str, cfg.rivals)])
        taught = teacher_forced(cfg, runs, requests, folder / "teacher.json", suite.key, steps)
    load, dropped = kept_load(folder / FILES[0], head_facts["sha256"], suite.key)
    report = build_report(
        runs=runs,
        target={"path": cfg.target.path, **head_facts["target"]},
        head={key: head_facts.get(key) for key in HEAD_FACTS},
        traffic={"name": traffic["reader"]["reader"], "held_out": True, "fingerprints": traffic["fingerprints"]},
        provenance=provenance(plain(cfg)),
        samples=_samples(cfg, runs, requests, name),
        teacher_forced=taught,
        load=load,
        key=suite.key,
        measured_on=machine(cfg),
    )
    write_report(folder, report)
    write_manifest(folder, "report", {"files": list(FILES), "verdict": report["verdict"]}, plain(cfg))
    track(cfg, folder, report)
    Console().print(render_table(report))
    print(f"\nThe report to look at: {folder / 'report.html'}", flush=True)
    if dropped:
        print(dropped, flush=True)


def _loaded(cfg: DictConfig, dtype: str) -> FrozenTarget:
    """The target in a number format; the line says what is waited for."""
    print(f"          loading the target in {dtype}", flush=True)
    return load_target(cfg, dtype)


def _identity(cfg: DictConfig, head: dict[str, Any], tree: DynamicTree | Measuring | None) -> dict[str, str]:
    """Whatever else decides what is decoded: traces that were kept under another identity are made anew."""
    from dataclasses import asdict

    import torch

    from heads.artifact import digest

    return {
        "head": head["sha256"],
        "target": head["target"]["weights"],
        "rivals": rivals_identity(cfg),
        "tree": digest(None if tree is None else asdict(tree)),
        "run_as": digest([plain(cfg.target), torch.cuda.is_available()]),
    }


def _samples(cfg: DictConfig, runs: Sequence[Run], requests: Sequence[Request], head: str) -> list[dict[str, Any]]:
    """Some texts of the run that the verdict speaks of, in the target's own words."""
    from eval.report import headline_run
    from eval.samples import sample_texts

    tokenizer = tokenizer_of(cfg)
    prompts = {request.request_id: request.prompt for request in requests}
    return sample_texts(
        headline_run(runs, head), prompts, lambda ids: tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
    )


def track(cfg: DictConfig, folder: Path, report: Mapping[str, Any]) -> None:
    """The numbers, the table, the pages and the head to the tracker, into the head's own run where that is known."""
    from eval.report_samples import samples_page
    from eval.report_table import flat_rows, headline_numbers
    from heads.artifact import MANIFEST
    from heads.checkpoint import FACTS, TENSORS
    from training.checkpoint import CheckpointFolder
    from training.tracking import Evaluation

    head_dir = Path(cfg.head_dir)
    facts = {"head": report["head"], "target": report["target"], "traffic": report["traffic"]}
    open_tracker(cfg, folder).publish(
        Evaluation(
            numbers={**headline_numbers(report), **taught_numbers(report)},
            rows=flat_rows(report),
            page=(folder / "report.html").read_text(),
            samples=samples_page(report),
            head=str(report["head"]["name"]),
            files=[path for name in (FACTS, TENSORS, MANIFEST) if (path := head_dir / name).is_file()],
            facts=facts,
        ),
        run_id=CheckpointFolder.tracker_run(head_dir / "checkpoints"),
        config=plain(cfg),
    )


def taught_numbers(report: Mapping[str, Any]) -> dict[str, float]:
    """By depth the decoder's acceptance, the teacher-forced one and their gap, as far as they are known."""
    taught = report["teacher_forced"] or {}
    names = {"acceptance": "decoder", "teacher_forced": "teacher", "gap": "gap"}
    found = {f"{n}/{k}": one["value"] for n, key in names.items() for k, one in enumerate(taught.get(key, ()), 1)}
    return {name: value for name, value in found.items() if value is not None}


@script(one_folder=True)
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.evaluate`."""
    if cfg.server.url is None:
        run(cfg)
    else:
        from scripts import served

        served.run(cfg)


if __name__ == "__main__":
    main()
