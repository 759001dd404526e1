"""A head to the folder that a server loads, with a model card that carries the measured numbers.

python -m scripts.export name=mine export=vllm
python -m scripts.export name=mine head_dir=runs/other/head export.dtype=float32
python -m scripts.export name=mine export=speculators push=org/name
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig

from scripts.common import export_dir, script, servable_head
from scripts.costs import read_report
from scripts.settings import build, check_export, check_value, plain


def run(cfg: DictConfig) -> None:
    """Write runs/<name>/export/<layout> from the head and, when there is one, its report."""
    from eval.report_table import to_markdown
    from heads.artifact import UserError
    from heads.checkpoint import read_facts
    from heads.export.card import Evidence
    from heads.export.folder import format_of
    from heads.export.hub import push

    check_value("push", cfg.push, str | None)
    if cfg.push is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", cfg.push):
        raise UserError(f"push={cfg.push} names no repository of the Hub; give it as push=org/name.")
    check_export(cfg)
    folder, report_path = export_dir(cfg), Path(cfg.run_dir) / "report" / "report.json"
    evidence = None
    facts = read_facts(cfg.head_dir)
    check_named(cfg, facts["target"])
    if report_path.is_file():
        report = read_report(report_path)
        if report["head"]["sha256"] == facts["sha256"]:
            evidence = Evidence(report, to_markdown(report))
        else:
            print(f"export    {report_path} is about another head; the model card gets no numbers", flush=True)
    manifest = build(cfg, "export")(
        servable_head(cfg),
        folder,
        target_fingerprint=facts["target"],
        target_path=cfg.target.path,
        evidence=evidence,
        config=plain(cfg),
    )
    reader = format_of(manifest["layout"]).title
    print(f"export    {folder} is ready for {reader}:\n\n    {manifest['serve']}", flush=True)
    if cfg.push is not None:
        print(f"          it is at {push(folder, cfg.push, manifest)}", flush=True)


def check_named(cfg: DictConfig, trained: Mapping[str, str]) -> None:
    """That the target which the model card will name is the head's own, where its weights lie here; it is not loaded.

    Raises UserError on another one.
    """
    from heads.artifact import UserError
    from heads.target import weights_digest

    path, gguf = Path(cfg.target.path), cfg.target.gguf_file
    if path.suffix == ".gguf":
        path, gguf = path.parent, path.name
    there = (path / gguf).is_file() if gguf else any(path.glob("*.safetensors"))
    if there and weights_digest(str(path), gguf, cfg.target.adapter) != trained["weights"]:
        raise UserError(
            f"{cfg.head_dir} belongs to the target {trained['name']!r}, but target.path={cfg.target.path} has other "
            f"weights, and a server would be told to load those; name the target that the head was trained for."
        )


@script()
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.export`."""
    run(cfg)


if __name__ == "__main__":
    main()
