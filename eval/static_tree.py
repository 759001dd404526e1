"""Static trees as users get them: measured on prompts that the head learned from, kept beside the head as `tree.json`.

A tree that is chosen on the prompts it is judged by flatters itself, so the held-out ones are never used here. The
module knows what a tree setting may say, how to measure and what to keep; `eval.tree` has the counting and the choice
itself. It does not know where the prompts come from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.decode import DecodeSettings, Request, decode
from eval.trace import RequestTrace
from eval.tree import RankCounter, best_static_tree, comb
from heads.artifact import UserError, digest, write_json
from heads.base import DraftHead, Draw, Proposal
from heads.checkpoint import read_facts
from heads.target import FrozenTarget
from heads.tree_draft import DynamicTree, StaticTree, TreeDrafter

FILE, FORMAT = "tree.json", 1
RANKS = 10  # of the draft's best tokens that are measured at each depth
TOKENS, ROWS = 64, 16  # decoded after each prompt, and prompts decoded together


@dataclass(frozen=True)
class TreeSearch:
    """A static tree that is to be found. nodes: how many the target judges; prompts: at most so many are measured on.
    UserError."""

    nodes: int
    prompts: int = 32

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.prompts < 1:
            raise UserError(f"A tree of nodes={self.nodes} prompts={self.prompts} cannot be; both must be at least 1.")


def tree_setting(values: Mapping[str, int | None], setting: str) -> DynamicTree | TreeSearch:
    """What a config node asks for; a null is as good as nothing, for a command line cannot take a key away. UserError
    names the setting."""
    given = {name: value for name, value in values.items() if value is not None}
    if set(given) == {"top_k", "nodes"}:
        return DynamicTree(**given)
    if "nodes" in given and set(given) <= {"nodes", "prompts"}:
        return TreeSearch(**given)
    raise UserError(
        f"{setting}={dict(values)} must give nodes, with top_k for a dynamic tree or without for a static one, such as "
        f"'{setting}={{top_k: 4, nodes: 12}}' or '{setting}={{top_k: null, nodes: 24}}', or be null."
    )


@dataclass(frozen=True)
class Measuring:
    """A static tree of `nodes` nodes, measured on these prompts of *train* conversations, for depths up to `depth`.
    UserError when there is no prompt."""

    nodes: int
    requests: Sequence[Request]
    depth: int

    def __post_init__(self) -> None:
        if not self.requests:
            raise UserError("There is no train prompt that a static tree could be measured on; collect more traffic.")

    def facts(self, head_sha256: str) -> dict[str, Any]:
        """What a kept tree must agree with. Its depth may be greater: a measurement holds all lesser ones."""
        prompts = digest([asdict(request) for request in self.requests])
        return {"format": FORMAT, "head": head_sha256, "nodes": self.nodes, "prompts": prompts, "tokens": TOKENS}


class MeasuredDrafter(TreeDrafter):
    """A head as a proposer of static trees, one for each depth."""

    def __init__(self, head: DraftHead, trees: Sequence[StaticTree]) -> None:
        super().__init__(head, trees[-1])
        self.trees = trees

    def propose(self, state: Any, depth: int, draw: Draw) -> Proposal:
        """The best tree of this depth; nothing is drawn."""
        return self.head.propose_tree(state, depth, self.trees[depth - 1])


def tree_drafter(
    tree: DynamicTree | Measuring,
    head: DraftHead,
    folder: str | Path,
    target: FrozenTarget,
    announce: Callable[[str, int], None] = lambda text, requests: None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> TreeDrafter:
    """The head in `folder` as a proposer of trees; a static one is taken from there if it was measured for the same,
    else measured now and kept there.

    announce is told what begins, and progress is called with each decoded request's tokens. Raises UserError when the
    head was right nowhere.
    """
    if isinstance(tree, DynamicTree):
        return TreeDrafter(head, tree)
    path, facts = Path(folder) / FILE, tree.facts(read_facts(folder)["sha256"])
    kept = _kept(path, facts)
    if kept is None or len(kept) < tree.depth:
        announce("the head on train prompts, for its static tree", len(tree.requests))
        counter = _measured(tree, target, head, lambda trace: progress(len(trace.tokens)))
        kept = [_best(counter.acceptance[:depth], tree.nodes) for depth in range(1, tree.depth + 1)]
        found = {
            "trees": [{"depth": depth, **asdict(one)} for depth, one in enumerate(kept, 1)],
            **{"acceptance": counter.acceptance, "reached": counter.reached_D, "counts": counter.counts_DR},
            "request_ids": [request.request_id for request in tree.requests],
        }
        write_json(path, facts | found)
    return MeasuredDrafter(head, kept[: tree.depth])


def _measured(
    tree: Measuring, target: FrozenTarget, head: DraftHead, on_done: Callable[[RequestTrace], None]
) -> RankCounter:
    """Greedy decoding with the widest comb, which shows the ranks of the target's own tokens."""
    ranks = min(RANKS, len(head.vocab.ids_W))
    counter = RankCounter(TreeDrafter(head, comb(tree.depth, ranks)), tree.depth, ranks)
    settings = DecodeSettings(gamma=tree.depth, max_new_tokens=TOKENS, rows=ROWS)
    decode(target, tree.requests, counter, settings, on_done)
    return counter


def _best(acceptance: Sequence[Sequence[float]], nodes: int) -> StaticTree:
    """A shallow tree may have fewer nodes than are asked for."""
    whole = sum(len(acceptance[0]) ** depth for depth in range(1, len(acceptance) + 1))
    return best_static_tree(acceptance, min(nodes, whole))


def _kept(path: Path, facts: Mapping[str, Any]) -> list[StaticTree] | None:
    """What an earlier command kept, if it agrees with these facts."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
        same = all(found[name] == value for name, value in facts.items())
        return [StaticTree(tuple(one["parents"]), tuple(one["ranks"])) for one in found["trees"]] if same else None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not what was written there ({error}); delete it, and it is made anew.") from error
