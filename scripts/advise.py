"""Which draft length to serve at a load: out of the report's acceptance and measured costs, or those of a GPU to buy.

python -m scripts.advise name=demo load.batch=8 load.context=512
python -m scripts.advise report=runs/demo/report/report.json load.batch=32 max_gamma=8
python -m scripts.advise name=demo gpu=h100 target_size.parameters=7.5e9 draft_size.parameters=4e8
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from scripts.common import script
from scripts.costs import costs_identity, read_costs, read_report
from scripts.settings import check_call, check_value, plain
from scripts.twins import write_report

if TYPE_CHECKING:
    from eval.cost_table import Costs
    from eval.speedup import Advice

GPU_GAMMA, GPU_BATCHES, GPU_CONTEXTS = 8, (1, 2, 4, 8, 16, 32, 64, 128), (512, 2048, 8192)
TOO_FEW = "too few requests, or some depth that no resample reached"
LOAD = {"batch": int, "context": int, "temperature": float}


def run(cfg: DictConfig) -> None:
    """Print the advice, write advice.json beside the report and show it there."""
    from eval.advice import acceptance, check_same_head, weaknesses
    from eval.speedup import advise
    from heads.artifact import provenance, write_json

    check_settings(cfg)
    costs, dtype, longest, batches, contexts = _costs(cfg)
    path = Path(cfg.report)
    report = read_report(path)
    if cfg.gpu is None:
        check_same_head(report, costs_head=read_costs(Path(cfg.costs)).facts["head"], proposer=cfg.proposer)
    measured = acceptance(
        report,
        path.parent,
        dtype=dtype,
        temperature=cfg.load.temperature,
        proposer=cfg.proposer,
        max_gamma=cfg.max_gamma,
        longest=longest,
    )
    found = advise(
        costs,
        measured.taus,
        batch=cfg.load.batch,
        context=cfg.load.context,
        batches=batches,
        contexts=contexts,
        dtype=measured.dtype,
        temperature=measured.temperature,
    )
    weak = weaknesses(report, measured, proposer=cfg.proposer)
    found = replace(found, notes=(*found.notes, *weak))
    _show(found)
    content = {**found.to_json(), "costs": costs_identity(Path(cfg.costs)) if cfg.gpu is None else None}
    write_json(path.parent / "advice.json", {**content, "provenance": provenance(plain(cfg))})
    print(f"\nThe same as JSON: {path.parent / 'advice.json'}", flush=True)
    if cfg.gpu is None:  # what was measured belongs into the report, what a GPU would do does not
        write_report(path.parent, {**report, "load": content})
        print(f"The report shows it: {path.parent / 'report.html'}", flush=True)


def check_settings(cfg: DictConfig) -> None:
    """The values of conf/advise.yaml, before anything is read. Raises UserError."""
    from eval.roofline import DraftReader, Gpu, Reader
    from heads.artifact import UserError

    values = plain(cfg)
    for name, hint in {"report": str, "costs": str, "proposer": str | None, "max_gamma": int | None}.items():
        check_value(name, values[name], hint)
    if not isinstance(cfg.load, DictConfig):
        raise UserError(f"load={cfg.load} is no load; give load.batch=8, load.context=512 or load.temperature=0.")
    for name, kind in LOAD.items():
        check_value(f"load.{name}", cfg.load[name], kind)
    if min(cfg.load.batch, cfg.load.context) < 1:
        raise UserError(f"load.batch={cfg.load.batch} and load.context={cfg.load.context} must be 1 or more.")
    if not 0 <= cfg.load.temperature < math.inf:
        raise UserError(f"load.temperature={cfg.load.temperature} must be 0 or more, one that the report has.")
    if cfg.max_gamma is not None and cfg.max_gamma < 1:
        raise UserError(f"max_gamma={cfg.max_gamma} must be 1 or more, or null.")
    for name in ("batches", "contexts"):
        check_value(name, some := values[name], list[int] | None)
        if some is not None and (not some or min(some) < 1):
            raise UserError(f"{name}={some} must name some whole numbers ≥ 1, or be null for those of the costs.")
        if some is not None and len(set(some)) < len(some):
            raise UserError(f"{name}={some} says something twice; give each value once.")
    if cfg.gpu is not None:
        Gpu.of(values["gpu"])
    sizes = {"target_size": Reader, "draft_size": DraftReader}
    for name, reader in sizes.items():
        _check_size(name, values[name], reader, needed=cfg.gpu is not None)


def _costs(cfg: DictConfig) -> tuple[Costs, str | None, int, list[int], list[int]]:
    """The costs, the number format they hold for, the longest γ they reach, and batches and contexts of the table."""
    batches, contexts = (plain(cfg)[name] for name in ("batches", "contexts"))
    if cfg.gpu is not None:
        return _roofline(cfg), None, GPU_GAMMA, batches or list(GPU_BATCHES), contexts or list(GPU_CONTEXTS)
    table = read_costs(Path(cfg.costs))
    return table, table.facts["dtype"], table.gammas[-1], batches or table.batches, contexts or table.contexts


def _roofline(cfg: DictConfig) -> Costs:
    from eval.roofline import DraftReader, Gpu, Reader, Roofline

    gpu, target, draft = (plain(cfg)[name] for name in ("gpu", "target_size", "draft_size"))
    return Roofline(Gpu.of(gpu), Reader(**target), DraftReader(**draft))


def _check_size(name: str, values: Any, reader: Callable[..., Any], *, needed: bool) -> None:
    """Raises UserError on the sizes of a model that cannot be; needed: whether its parameters must be given."""
    from heads.artifact import UserError

    if not isinstance(values, dict):
        raise UserError(f"{name}={values} is no size; give {name}.parameters=7.5e9.")
    if needed and values["parameters"] is None:
        raise UserError(f"gpu= needs {name}.parameters=<how many are read for a pass>, such as 7.5e9.")
    given = {key: value for key, value in values.items() if key != "parameters" or value is not None}
    check_call(reader, name, given)
    for one in ("parameters", "bytes_per_parameter", "kv_bytes_per_token", "window"):
        value = values.get(one)
        may_be_nothing = one == "kv_bytes_per_token"
        if value is not None and not (math.isfinite(value) and (value > 0 or (may_be_nothing and value == 0))):
            rule = "0 or more" if may_be_nothing else "more than 0"
            raise UserError(f"{name}.{one}={value} is not possible; set {name}.{one} to a finite number, {rule}.")
    reader(**{"parameters": 1.0, **given})  # what it refuses itself


def _show(found: Advice) -> None:
    """The advice in words, what it rests on, and the best γ elsewhere."""
    from eval.advice import headline, times

    print(f"advise    {headline(found)}\n")
    print("          γ  tokens a round  round costs   speed-up            tokens/s")
    for row in found.rows:
        mark = "  <" if row.gamma == found.gamma else ""
        tau, rate = _two(row.tokens_per_round.value), _one(row.tokens_per_second.value)
        print(f"         {row.gamma:2d} {tau:>15} {row.round_cost:12.2f}   {times(row.speedup):18} {rate:>9}{mark}")
    contexts = sorted({cell.context for cell in found.table})
    print("\n          best γ and its speed-up; contexts across, batches down")
    print("                " + " ".join(f"{context:>12d}" for context in contexts))
    for batch in sorted({cell.batch for cell in found.table}):
        cells = [f"γ {cell.gamma} {_two(cell.speedup.value)}×" for cell in found.table if cell.batch == batch]
        print(f"          {batch:5d} " + " ".join(f"{cell:>12}" for cell in cells))
    known = any(row.speedup.low is not None for row in found.rows[1:])
    spans = f"Intervals: 95 %, of the acceptance ({found.intervals_from})" if known else f"No intervals: {TOO_FEW}"
    print(f"\n          {spans}; costs at their medians. Chains only.")
    for note in found.notes:
        print(f"          Note: {note}.")


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _one(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


@script("advise")
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.advise`."""
    run(cfg)


if __name__ == "__main__":
    main()
