"""A trained head as a proposer: what it can reach, its chain and its tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from scripts.prompts import train_requests

if TYPE_CHECKING:
    from eval.decode import Proposer
    from eval.static_tree import Measuring
    from eval.suite import Plan
    from heads.base import DraftHead
    from heads.target import FrozenTarget
    from heads.tree_draft import DynamicTree


def within_reach(plan: Plan, head_dir: Path) -> Plan:
    """The plan without draft lengths that this head cannot reach, said aloud. Raises UserError when the main one is."""
    from heads.checkpoint import load_head

    head = load_head(head_dir)
    head.check_depth(plan.gamma)
    reached = plan.within(head.longest)
    if beyond := [gamma for gamma in plan.gammas if gamma not in reached.gammas]:
        print(f"          γ {beyond} left out: this head drafts at most {head.longest} tokens in a round", flush=True)
    return reached


def plan_tree(
    cfg: DictConfig, values: Mapping[str, int | None] | None, setting: str, depth: int
) -> DynamicTree | Measuring | None:
    """The tree that a setting asks for, a static one with the train prompts that it is measured on."""
    from eval.static_tree import Measuring, TreeSearch, tree_setting

    asked = None if values is None else tree_setting(values, setting)
    if not isinstance(asked, TreeSearch):
        return asked
    return Measuring(asked.nodes, tuple(train_requests(cfg, asked.prompts)), depth)


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
    chain: dict[str, Proposer] = {name: head}
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
