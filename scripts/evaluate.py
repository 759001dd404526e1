"""A head to numbers: the exact decoder over the held-out requests, the report as JSON and as a page.

python -m scripts.evaluate name=mine
python -m scripts.evaluate name=mine head_dir=runs/other/head eval.gamma=3
python -m scripts.evaluate name=mine 'eval.tree={top_k: 4, nodes: 12}'
python -m scripts.evaluate name=mine 'eval.tree={nodes: 24}'
python -m scripts.evaluate name=mine 'rival=[prompt_lookup,early_exit,lookahead]'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from scripts.common import load_target, script
from scripts.rivals import build_rivals, rivals_identity
from scripts.settings import build, generation_settings, plain

if TYPE_CHECKING:
    from eval.decode import Proposer, Request
    from eval.static_tree import Measuring
    from eval.suite import Plan
    from heads.base import DraftHead
    from heads.target import FrozenTarget
    from heads.tree_draft import DynamicTree
    from training.traffic import Conversation

HEAD_FACTS = ("name", "sha256", "parameters", "steps", "seconds", "tokens", "draft_vocabulary")  # in the report


def run(cfg: DictConfig) -> None:
    """Write runs/<name>/report; parts of an evaluation that are already there are not repeated."""
    from dataclasses import asdict

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
    plan = within_reach(build(cfg, "eval", seed=cfg.seed), head_dir)
    tree = plan_tree(cfg, plan.tree, "eval.tree", plan.deepest)
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
                "tree": digest(None if tree is None else asdict(tree)),
                "run_as": digest([plain(cfg.target), torch.cuda.is_available()]),
            },
            load_target=lambda dtype: load_target(cfg, dtype),
            make_proposers=lambda target: {
                **proposers(name, head_dir, target, tree, steps.begin, steps.advance),
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


def within_reach(plan: Plan, head_dir: Path) -> Plan:
    """The plan without draft lengths that this head cannot reach, said aloud. Raises UserError when the main one is."""
    from heads.checkpoint import load_head

    head = load_head(head_dir)
    head.check_depth(plan.gamma)
    reached = plan.within(head.longest)
    if beyond := [gamma for gamma in plan.gammas if gamma not in reached.gammas]:
        print(f"          γ {beyond} left out: this head drafts at most {head.longest} tokens in a round", flush=True)
    return reached


def held_out_requests(cfg: DictConfig) -> list[Request]:
    """The first turn of every held-out conversation, as the server would see it; prompts that are too long are
    counted aloud and left out."""
    from training.traffic import load_traffic

    held_out = load_traffic(cfg.traffic_dir).held_out
    fitting = first_turns(cfg, held_out)
    if len(fitting) < len(held_out):
        longest = generation_settings(cfg).max_prompt_tokens
        print(f"          {len(held_out) - len(fitting)} left out: prompts over {longest} tokens", flush=True)
    return fitting


def first_turns(cfg: DictConfig, conversations: Sequence[Conversation]) -> list[Request]:
    """The first turns of conversations as requests, without those that are too long."""
    from eval.decode import Request
    from heads.target import load_tokenizer, render

    tokenizer = load_tokenizer(
        cfg.target.path, gguf_file=cfg.target.gguf_file, trust_remote_code=cfg.target.trust_remote_code
    )
    requests = [
        Request(item.id, item.slice, tuple(render(tokenizer, item.messages(), tools=item.tools)))
        for item in conversations
    ]
    longest = generation_settings(cfg).max_prompt_tokens
    return [request for request in requests if len(request.prompt) <= longest]


def plan_tree(
    cfg: DictConfig, values: Mapping[str, int] | None, setting: str, depth: int
) -> DynamicTree | Measuring | None:
    """The tree that a setting asks for, a static one with the train prompts, evenly taken, that it is measured on."""
    from eval.static_tree import Measuring, TreeSearch, tree_setting
    from training.traffic import load_traffic

    asked = None if values is None else tree_setting(values, setting)
    if not isinstance(asked, TreeSearch):
        return asked
    there = load_traffic(cfg.traffic_dir).train
    count = min(asked.prompts, len(there))
    chosen = [there[index * len(there) // count] for index in range(count)]
    return Measuring(asked.nodes, tuple(first_turns(cfg, chosen)), depth)


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
    name: str,
    head_dir: Path,
    target: FrozenTarget,
    tree: DynamicTree | Measuring | None = None,
    announce: Callable[[str, int], None] = lambda text, requests: None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Mapping[str, Proposer]:
    """The head by its name, ready for this target, and beside it the head drafting a tree if one is given."""
    from eval.static_tree import tree_drafter
    from eval.suite import tree_name

    head = ready_head(head_dir, target)
    chain = {name: head}
    if tree is None:
        return chain
    return chain | {tree_name(name): tree_drafter(tree, head, head_dir, target, announce, progress)}


def ready_head(head_dir: Path, target: FrozenTarget) -> DraftHead:
    """A trained head in the target's number format, attached and packed for inference."""
    from heads.checkpoint import load_head
    from heads.packed import pack_linears

    head: Any = load_head(head_dir, target=target).to(device=target.device, dtype=target.dtype)
    head.attach(target.weights)
    pack_linears(head)
    return head


@script()
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.evaluate`."""
    run(cfg)


if __name__ == "__main__":
    main()
