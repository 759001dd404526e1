"""Evaluated heads and their rivals to one ranking, with differences in pairs, as a table and as a page.

python -m scripts.compare                                       # all runs under runs/compare
python -m scripts.compare comparison_dir=runs/sweep
python -m scripts.compare 'runs=[runs/compare/eagle3,runs/compare/medusa]' comparison_dir=runs/both
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from scripts.common import script
from scripts.costs import read_report
from scripts.settings import check_value, plain

REPORT = Path("report") / "report.json"


def run(cfg: DictConfig) -> None:
    """Compare the runs of the config, or all finished ones under comparison_dir."""
    from heads.artifact import UserError

    check_value("runs", plain(cfg)["runs"], list[str])
    check_value("comparison_dir", cfg.comparison_dir, str)
    if len({Path(one).resolve() for one in cfg.runs}) < len(cfg.runs):
        raise UserError(f"runs={list(cfg.runs)} names a run twice; give each once.")
    folder = Path(cfg.comparison_dir)
    write_comparison([Path(one) for one in cfg.runs] or finished(folder), folder)


def beside(cfg: DictConfig) -> None:
    """A stage of scripts.pipeline: compare this run with all finished ones beside it."""
    folder = Path(cfg.run_dir).parent
    write_comparison(finished(folder), folder)


def finished(folder: Path) -> list[Path]:
    """The runs in a folder that have been evaluated."""
    return sorted(report.parent.parent for report in folder.glob(f"*/{REPORT}"))


def write_comparison(runs: Sequence[Path], folder: Path) -> None:
    """Print the table and write comparison.json, comparison.md and the page comparison.html."""
    from rich.console import Console

    from eval.comparison import compare
    from eval.comparison_page import render_page
    from eval.comparison_table import render_table, to_markdown
    from eval.kept import kept_runs
    from heads.artifact import UserError, provenance, write_atomic, write_json

    if missing := [run for run in runs if not (run / REPORT).is_file()]:
        raise UserError(f"{missing[0]} holds no {REPORT}; evaluate it first, or leave it out of runs=.")
    print(f"compare   {', '.join(map(str, runs)) or folder}", flush=True)
    short = len({run.name for run in runs}) == len(runs)
    folders = {run.name if short else str(run): (run / REPORT).parent for run in runs}
    reports = {name: read_report(at / REPORT.name) for name, at in folders.items()}
    behind = {name: kept_runs(at, reports[name]) for name, at in folders.items()}
    comparison = {**compare(reports, behind), "provenance": provenance()}
    write_json(folder / "comparison.json", comparison)
    write_atomic(folder / "comparison.md", to_markdown(comparison))
    write_atomic(folder / "comparison.html", render_page(comparison))
    Console().print(render_table(comparison))
    print(f"\nThe comparison to look at: {folder / 'comparison.html'}", flush=True)


@script("compare")
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.compare`."""
    run(cfg)


if __name__ == "__main__":
    main()
