"""A head to numbers: the exact decoder over the held-out requests, the report as JSON and as a page.

python -m scripts.evaluate name=mine
python -m scripts.evaluate name=mine head_dir=runs/other/head eval.gamma=3
python -m scripts.evaluate name=mine 'eval.tree={top_k: 4, nodes: 12}'
python -m scripts.evaluate name=mine 'rival=[prompt_lookup,early_exit,lookahead]'
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from scripts.common import load_target, script
from scripts.rivals import build_rivals, rivals_identity
from scripts.settings import build, generation_settings, plain

if TYPE_CHECKING:
    from eval.decode import Proposer, Request
    from heads.target import FrozenTarget

HEAD_FACTS = ("name", "sha256", "parameters", "steps", "seconds", "tokens", "draft_vocabulary")  # in the report


def run(cfg: DictConfig) -> None:
    """Write runs/<name>/report; parts of an evaluation that are already there are not repeated."""
    import torch
    from rich.console import Console

    from eval.report import build_report
    from eval.report_page import render_page
    from eval.report_table import render_table
    from eval.suite import Suite
    from heads.artifact import digest, provenance, read_manifest, write_atomic, write_json, write_manifest
    from scripts.show import Steps

    folder, head_dir = Path(cfg.run_dir) / "report", Path(cfg.head_dir)
    head_facts = read_manifest(head_dir, "head")
    name = head_facts["name"]
    plan = build(cfg, "eval", seed=cfg.seed)
    print(f"evaluate  {name} of {head_dir} on the held-out requests", flush=True)
    requests = held_out_requests(cfg)
    traffic = read_manifest(cfg.traffic_dir, "traffic")
    with Steps() as steps:
        suite = Suite(
            requests=requests,
            plan=plan,
            folder=folder / "traces",
            identity={
                "head": head_facts["sha256"],
                "target": head_facts["target"]["weights"],
                "rivals": rivals_identity(cfg),
                "run_as": digest([plain(cfg.target), torch.cuda.is_available()]),
            },
            load_target=lambda dtype: load_target(cfg, dtype),
            make_proposers=lambda target: {
                **proposers(name, head_dir, target, plan.tree),
                **build_rivals(cfg, target, requests),
            },
            announce=steps.begin,
            progress=steps.advance,
        )
        runs = suite.run([name, *map(str, cfg.rivals)])
    report = build_report(
        runs=runs,
        target={"path": cfg.target.path, **head_facts["target"]},
        head={key: head_facts.get(key) for key in HEAD_FACTS},
        traffic={"name": traffic["reader"]["reader"], "held_out": True, "fingerprints": traffic["fingerprints"]},
        provenance=provenance(plain(cfg)),
    )
    write_json(folder / "report.json", report)
    write_atomic(folder / "report.html", render_page(report))
    write_manifest(
        folder, "report", {"files": ["report.json", "report.html"], "verdict": report["verdict"]}, plain(cfg)
    )
    Console().print(render_table(report))
    print(f"\n{report['verdict']}\nThe report to look at: {folder / 'report.html'}", flush=True)


def held_out_requests(cfg: DictConfig) -> list[Request]:
    """The first turn of every held-out conversation, as the server would see it; prompts that are too long are
    counted aloud and left out."""
    from eval.decode import Request
    from heads.target import load_tokenizer, render
    from training.traffic import load_traffic

    held_out = load_traffic(cfg.traffic_dir).held_out
    tokenizer = load_tokenizer(
        cfg.target.path, gguf_file=cfg.target.gguf_file, trust_remote_code=cfg.target.trust_remote_code
    )
    requests = [
        Request(conversation.id, conversation.slice, tuple(render(tokenizer, conversation.messages())))
        for conversation in held_out
    ]
    longest = generation_settings(cfg).max_prompt_tokens
    fitting = [request for request in requests if len(request.prompt) <= longest]
    if len(fitting) < len(requests):
        print(f"          {len(requests) - len(fitting)} left out: prompts over {longest} tokens", flush=True)
    return fitting


def some_requests(cfg: DictConfig, count: int, setting: str, *, least: int = 1) -> list[Request]:
    """So many held-out requests, evenly taken. Raises UserError, naming the setting, when there are not as many."""
    from heads.artifact import UserError

    there = held_out_requests(cfg)
    if not least <= count <= len(there):
        raise UserError(
            f"{setting}={count} must be between {least} and the {len(there)} held-out prompts of {cfg.traffic_dir}; "
            f"set it so, or collect more traffic."
        )
    return [there[index * len(there) // count] for index in range(count)]


def proposers(
    name: str, head_dir: Path, target: FrozenTarget, tree: Mapping[str, int] | None = None
) -> Mapping[str, Proposer]:
    """The head by its name, ready for this target, and beside it the head drafting a tree if one is given."""
    from eval.suite import tree_name
    from heads.checkpoint import load_head
    from heads.packed import pack_linears
    from heads.tree_draft import TreeDrafter, dynamic_tree

    head: Any = load_head(head_dir, target=target).to(device=target.device, dtype=target.dtype)
    head.attach(target.weights)
    pack_linears(head)
    chain = {name: head}
    return chain if tree is None else chain | {tree_name(name): TreeDrafter(head, dynamic_tree(tree, "eval.tree"))}


@script()
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.evaluate`."""
    run(cfg)


if __name__ == "__main__":
    main()
