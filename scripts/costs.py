"""The parts of scripts.bench that measure what a round costs, and hold predicted against measured speed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from scripts.common import load_target
from scripts.settings import build, plain

if TYPE_CHECKING:
    from eval.cost_table import CostTable
    from eval.prediction import Comparison


REDO = "delete it and evaluate again: python -m scripts.evaluate name=…"
REPORT_KEYS = ("headline", "head", "target", "traffic", "results")  # what every reader of a report goes by


def bench_cost(cfg: DictConfig) -> None:
    """Write run_dir/costs.json: target steps and drafts at every batch and context, timed in turn."""
    import torch

    from eval.cost import CostPlan, measure_costs
    from eval.cost_table import CostCell, CostTable
    from heads.artifact import provenance, read_manifest, write_json
    from heads.checkpoint import load_head
    from scripts.drafters import ready_head

    places = {name: tuple(plain(cfg.bench)[name]) for name in ("batches", "contexts", "gammas")}
    plan, head_dir = CostPlan(**places, repeats=cfg.bench.repeats), Path(cfg.head_dir)
    load_head(head_dir).check_depth(plan.gammas[-1], "bench.gammas")
    dtype = cfg.bench.dtype or build(cfg, "eval").dtypes[-1]
    print(f"bench     costs of {head_dir} in {dtype}, {torch.get_num_threads()} threads", flush=True)
    target = load_target(cfg, dtype)
    head = ready_head(head_dir, target)

    def tell(cell: CostCell) -> None:
        slope, step, overhead = cell.fit
        print(
            f"          batch {cell.batch}, context {cell.context}: a plain step {cell.step.median * 1e3:.1f} ms "
            f"({cell.step.low * 1e3:.1f} … {cell.step.high * 1e3:.1f}); "
            f"a round = 1 + {slope:.3f}·γ + {step:.3f}·γ {overhead:+.3f}",
            flush=True,
        )

    facts = read_manifest(head_dir, "head")
    where = {**machine(cfg), "dtype": dtype, "repeats": plan.repeats}
    what = {"head": facts["sha256"], "target": facts["target"]["weights"]}
    table = CostTable(measure_costs(target, head, plan, tell), {**what, **where, "provenance": provenance(plain(cfg))})
    write_json(Path(cfg.run_dir) / "costs.json", table.to_json())
    print(f"\nThe costs: {Path(cfg.run_dir) / 'costs.json'}", flush=True)


def machine(cfg: DictConfig) -> dict[str, Any]:
    """On what this config measures."""
    import torch

    device = torch.cuda.get_device_name() if cfg.target.device != "cpu" and torch.cuda.is_available() else "cpu"
    return {"device": device, "threads": torch.get_num_threads()}


def read_costs(path: Path) -> CostTable:
    """The costs of a run. Raises UserError when they were not measured, or are damaged."""
    from eval.cost_table import CostTable
    from heads.artifact import UserError, read_json

    if not path.is_file():
        raise UserError(
            f"{path} is not there; measure the costs first: python -m scripts.bench bench=cost run_dir={path.parent}."
        )
    again = "measure them again: python -m scripts.bench bench=cost name=…"
    value = read_json(path, "measured costs", again, needed=("format",))
    try:
        table = CostTable.from_json(value)
        missing = [name for name in ("head", "dtype", "device", "threads") if name not in table.facts]
        if missing or not table.cells:
            raise KeyError(", ".join(missing) or "cells")
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); {again}.") from error
    return table


def costs_identity(path: Path) -> dict[str, Any]:
    """Where costs lie and what identifies their content, and on what they were measured."""
    from heads.artifact import sha256_file

    facts = read_costs(path).facts
    return {"path": str(path), "sha256": sha256_file(path), "device": facts["device"], "threads": facts["threads"]}


def kept_load(report: Path, head: str, key: str) -> tuple[dict[str, Any] | None, str]:
    """The advice in an earlier report, for an evaluation that replaces it, and what there is to say of it.

    It is kept where head, traces (by the key of the evaluation) and costs are those that it rests on.
    """
    from heads.artifact import UserError, read_json, sha256_file

    if not report.is_file():
        return None, ""
    try:
        before = read_json(report, "the earlier report", REDO, needed=("head",))
    except UserError:
        return None, "The earlier report was damaged and is replaced; if it held advice, run scripts.advise again."
    if not (load := before.get("load")):
        return None, ""
    costs = load.get("costs") or {"path": "", "sha256": None}  # an older version did not say
    file = Path(costs["path"])
    holds = {
        "head": before["head"]["sha256"] == head,
        "evaluation": before.get("key") == key,
        "costs": file.is_file() and sha256_file(file) == costs["sha256"],
    }
    if all(holds.values()):
        return dict(load), ""
    changed = ", ".join(what for what, same in holds.items() if not same)
    return (
        None,
        f"The earlier report's advice is dropped, it rests on another {changed}; run scripts.advise again.",
    )


def read_report(path: Path) -> dict[str, Any]:
    """An evaluation's report. Raises UserError when there is none, or it is damaged."""
    from heads.artifact import UserError, read_json

    if not path.is_file():
        raise UserError(f"{path} is not there; evaluate the head first: python -m scripts.evaluate name=….")
    report = read_json(path, "an evaluation's report", REDO, needed=REPORT_KEYS)
    if not report["results"]:
        raise UserError(f"{path}, an evaluation's report, is empty: its results hold no row; {REDO}.")
    return report


def bench_prediction(cfg: DictConfig) -> None:
    """Decode at every γ and batch, hold the rates against the prediction, write run_dir/prediction.json."""
    from eval.advice import acceptance
    from eval.decode import DecodeSettings
    from eval.prediction import compare_rates, measure_rates
    from heads.artifact import provenance, write_json
    from heads.checkpoint import load_head
    from scripts.drafters import ready_head
    from scripts.prompts import some_requests

    batches, gammas = (plain(cfg.bench)[name] for name in ("batches", "gammas"))
    run_dir, head_dir = Path(cfg.run_dir), Path(cfg.head_dir)
    costs = read_costs(run_dir / "costs.json")
    dtype = costs.facts["dtype"]
    report = read_report(run_dir / "report" / "report.json")
    taus = acceptance(report, run_dir / "report", dtype=dtype, temperature=0.0, max_gamma=max(gammas)).taus
    load_head(head_dir).check_depth(max(gammas), "bench.gammas")
    requests = some_requests(cfg, cfg.bench.requests, "bench.requests", least=max(batches))
    print(f"bench     predicted against measured tokens/s of {head_dir} in {dtype}", flush=True)
    target = load_target(cfg, dtype)
    head = ready_head(head_dir, target)
    settings = DecodeSettings(max_new_tokens=build(cfg, "eval").max_new_tokens, seed=cfg.seed)
    measured = []
    for batch in batches:
        print(f"          batch {batch}: {len(requests)} requests at {len(gammas)} draft lengths, in turn", flush=True)
        measured += measure_rates(target, requests, head, settings, batch=batch, gammas=gammas)
    found = compare_rates(measured, costs, taus)
    _show(found)
    write_json(run_dir / "prediction.json", {**found.to_json(), "provenance": provenance(plain(cfg))})


def _show(found: Comparison) -> None:
    print("          batch  γ  tokens a round  tokens/s measured  predicted   error  costs alone  speed-up")
    for row in found.rows:
        one = row.measured
        print(
            f"          {one.batch:5d} {one.gamma:2d} {one.tokens_per_round:15.2f} {one.tokens_per_second:18.1f} "
            f"{row.predicted:10.1f} {row.error:+7.1%} {row.cost_error:+12.1%} "
            f"{'–' if row.speedup_error is None else f'{row.speedup_error:+.1%}':>9}"
        )
    of_speedup = "" if found.median_speedup_error is None else f", of the speed-up {found.median_speedup_error:.1%}"
    print(f"          median error {found.median_error:.1%}, costs alone {found.median_cost_error:.1%}{of_speedup}")
    for choice in found.choices:
        verdict = "within 5 %" if choice.share >= 0.95 else "not within 5 %"
        print(
            f"          batch {choice.batch}: γ {choice.advised} advised, γ {choice.best} measured best; "
            f"{choice.share:.1%} of its tokens/s, {verdict}"
        )
