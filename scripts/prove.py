"""A head to a certificate: greedy texts are the target's own, sampled ones follow its law, and mistakes are seen.

python -m scripts.prove experiment=demo
python -m scripts.prove name=mine 'prove.dtypes=[float32,bfloat16]'
python -m scripts.prove experiment=demo damage=wrong_q      # must end with exit code 1
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from scripts.common import load_target, script
from scripts.settings import build, check_rivals, plain

if TYPE_CHECKING:
    from eval.certificate import ProofSettings
    from eval.decode import Proposer, Request
    from eval.static_tree import Measuring
    from heads.target import FrozenTarget
    from heads.tree_draft import DynamicTree


def run(cfg: DictConfig) -> bool:
    """Whether everything holds; the certificate is in runs/<name>/certificate."""
    from eval.certificate import Certificate, prove_on, to_markdown
    from eval.law import CONTROLS, check, check_damage, exact_cases, typical_cases
    from heads.artifact import read_manifest, write_atomic, write_json, write_manifest
    from heads.checkpoint import load_head
    from scripts.drafters import plan_tree
    from scripts.prompts import some_requests
    from scripts.rivals import check_predictions

    how: ProofSettings = build(cfg, "prove")
    check_damage(cfg.damage)
    check_rivals(cfg)
    # A proof that is broken on purpose must not replace the real one.
    folder = Path(cfg.run_dir) / ("certificate" if cfg.damage is None else f"certificate-{cfg.damage}")
    head_dir = Path(cfg.head_dir)
    head = read_manifest(head_dir, "head")
    load_head(head_dir).check_depth(how.gamma, "prove.gamma")
    requests = some_requests(cfg, how.requests, "prove.requests")
    check_predictions(cfg, requests)
    tree = plan_tree(cfg, how.tree, "prove.tree", how.gamma)
    print(f"prove     {head['name']} of {head_dir}: {len(requests)} held-out prompts", flush=True)
    proof = Certificate(damage=cfg.damage)
    for dtype in how.dtypes:
        _say(f"loading the target in {dtype}")
        target = load_target(cfg, dtype)
        prove_on(proof, how, target, requests, _proposers(cfg, tree, target, requests), _say)
        del target  # before the next one is loaded
    proof.tiny = [check(case, damage=cfg.damage, samples=how.samples) for case in exact_cases()]
    proof.controls = {name: check(case, damage=name, samples=how.samples) for name, case in CONTROLS.items()}
    proof.typical = [check(case, samples=how.samples) for case in typical_cases()]
    _say(f"the law of {len(proof.tiny)} cases over a tiny vocabulary, {len(proof.controls)} controls")
    facts = {"name": head["name"], "sha256": head["sha256"]}
    write_json(folder / "certificate.json", {"head": facts, "target": head["target"], **proof.to_json()})
    write_atomic(folder / "certificate.md", to_markdown(proof, facts, head["target"]))
    body = {"files": ["certificate.json", "certificate.md"], "passed": proof.passed, "verdict": proof.verdict}
    body |= {"damage": cfg.damage, "target": head["target"]}
    write_manifest(folder, "certificate", body, plain(cfg))
    for complaint in proof.complaints[:10]:
        _say(complaint)
    print(f"{proof.verdict}\nThe certificate: {folder / 'certificate.md'}", flush=True)
    return proof.passed


def _proposers(
    cfg: DictConfig, tree: DynamicTree | Measuring | None, target: FrozenTarget, requests: Sequence[Request]
) -> Mapping[str, Proposer]:
    """The head as a chain and as a tree, and the rivals of the config; damaged if that is asked for."""
    from eval.certificate import HEAD
    from eval.exactness import DamagedDraft
    from eval.static_tree import tree_drafter
    from scripts.drafters import ready_head
    from scripts.rivals import build_rivals

    head = ready_head(Path(cfg.head_dir), target)
    found: dict[str, Proposer] = {HEAD: head}
    if tree is not None:
        found[f"{HEAD}, tree"] = tree_drafter(tree, head, cfg.head_dir, target, lambda text, count: _say(text))
    found |= build_rivals(cfg, target, requests)
    if cfg.damage is not None:
        # A damage changes what is verified, which a proposer that reads the verdict on every node would notice.
        honest = {name: one for name, one in found.items() if not one.needs.judged}
        return {name: DamagedDraft(one, cfg.damage, target.vocab_size) for name, one in honest.items()}
    return found


def _say(text: str) -> None:
    print(f"{'':10}{text}", flush=True)


@script("prove")
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.prove`."""
    if not run(cfg):
        sys.exit(1)


if __name__ == "__main__":
    main()
