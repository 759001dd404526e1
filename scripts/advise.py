"""Which draft length to serve at a load: out of the report's acceptance and measured costs, or those of a GPU to buy.

python -m scripts.advise name=demo load.batch=8 load.context=512
python -m scripts.advise report=runs/demo/report/report.json load.batch=32 max_gamma=8
python -m scripts.advise name=demo gpu=h100 target_size.parameters=7.5e9 draft_size.parameters=4e8
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from scripts.common import script
from scripts.costs import read_costs, read_report
from scripts.settings import check_value, plain
from scripts.twins import write_report

if TYPE_CHECKING:
    from eval.cost_table import Costs
    from eval.speedup import Advice, Yield
    from eval.tally import Estimate

GPU_GAMMA, GPU_BATCHES, GPU_CONTEXTS = 8, (1, 2, 4, 8, 16, 32, 64, 128), (512, 2048, 8192)
LOAD = {"batch": int, "context": int, "temperature": float}


def run(cfg: DictConfig) -> None:
    """Print the advice, write advice.json beside the report and show it there."""
    from eval.speedup import advise
    from heads.artifact import UserError, provenance, write_json

    for name, kind in LOAD.items():
        check_value(f"load.{name}", cfg.load[name], kind)
    if min(cfg.load.batch, cfg.load.context) < 1:
        raise UserError(f"load.batch={cfg.load.batch} and load.context={cfg.load.context} must be 1 or more.")
    check_value("max_gamma", cfg.max_gamma, int | None)
    if cfg.max_gamma is not None and cfg.max_gamma < 1:
        raise UserError(f"max_gamma={cfg.max_gamma} must be 1 or more, or null.")
    costs, dtype, longest, batches, contexts = _costs(cfg)
    path = Path(cfg.report)
    if cfg.gpu is None:
        _same_head(read_report(path), costs_head=read_costs(Path(cfg.costs)).facts["head"], proposer=cfg.proposer)
    taus = acceptance(
        path,
        dtype=dtype,
        temperature=cfg.load.temperature,
        proposer=cfg.proposer,
        max_gamma=cfg.max_gamma,
        longest=longest,
    )
    places = {"batch": cfg.load.batch, "context": cfg.load.context}
    found = advise(costs, taus, **places, batches=batches, contexts=contexts)
    _show(found)
    write_json(path.parent / "advice.json", {**found.to_json(), "provenance": provenance(plain(cfg))})
    print(f"\nThe same as JSON: {path.parent / 'advice.json'}", flush=True)
    if cfg.gpu is None:  # what was measured belongs into the report, what a GPU would do does not
        write_report(path.parent, {**read_report(path), "load": json.loads(json.dumps(found.to_json()))})
        print(f"The report shows it: {path.parent / 'report.html'}", flush=True)


def _same_head(report: dict[str, Any], costs_head: str, proposer: str | None) -> None:
    """Raises UserError when the costs are not those of the draft that is advised on."""
    from heads.artifact import UserError

    head = report["head"] or {}
    if proposer not in (None, head.get("name")):
        raise UserError(f"The costs are those of the head {head.get('name')}, not of proposer={proposer}; give gpu=….")
    if head.get("sha256") != costs_head:
        raise UserError("The costs were measured with another head than the report's; measure again with bench=cost.")


def acceptance(
    report_path: Path,
    *,
    dtype: str | None,
    temperature: float,
    proposer: str | None = None,
    max_gamma: int | None = None,
    longest: int | None = None,
) -> Yield:
    """Tokens per round by γ, from the traces beside the report where they are there, else from the report.

    dtype None: the headline's. max_gamma None: as long as measured, and no longer than `longest`.
    """
    from eval.report import find_rows
    from eval.speedup import Yield
    from eval.suite import Task
    from heads.artifact import UserError

    report = read_report(report_path)
    proposer = proposer or report["headline"]["proposer"]
    wanted: dict[str, Any] = {
        "proposer": proposer,
        "dtype": dtype or report["headline"]["dtype"],
        "temperature": temperature,
    }
    rows = [row for row in find_rows(report, slice="all", **wanted) if row["gamma"] > 0]
    if not rows:
        there = sorted({row["proposer"] for row in report["results"]} - {"none"})
        heats = sorted({row["temperature"] for row in report["results"]})
        raise UserError(
            f"{report_path} has no run of {proposer} in {wanted['dtype']} at temperature {temperature:g}; it has "
            f"proposer={' | '.join(there)} and load.temperature={' | '.join(f'{heat:g}' for heat in heats)}."
        )
    if rows[0]["formula_gap"]["value"] is None and rows[0]["alpha"]["value"] is not None:
        raise UserError(f"{proposer} drafts trees, for which no costs are measured; choose the chain of the head.")
    deepest = max(row["gamma"] for row in rows)
    reach = max_gamma or min(deepest, longest or deepest)
    folder = report_path.parent / "traces"
    files = {row["gamma"]: folder / f"{Task(gamma=row['gamma'], **wanted).name}.jsonl" for row in rows}
    if all(file.is_file() for file in files.values()):
        return Yield.of_traces({gamma: _traces(file) for gamma, file in files.items()}, reach)
    return Yield.of_report(rows, reach)


def _traces(path: Path) -> Any:
    from eval.trace import parse_traces

    return parse_traces(path.read_text().partition("\n")[2])  # the first line says what was evaluated


def _costs(cfg: DictConfig) -> tuple[Costs, str | None, int, list[int], list[int]]:
    """The costs, the number format they hold for, the longest γ they reach, and batches and contexts of the table."""
    for name in ("batches", "contexts"):
        check_value(name, plain(cfg)[name], list[int] | None)
    batches, contexts = (plain(cfg)[name] for name in ("batches", "contexts"))
    if cfg.gpu is not None:
        return _roofline(cfg), None, GPU_GAMMA, batches or list(GPU_BATCHES), contexts or list(GPU_CONTEXTS)
    table = read_costs(Path(cfg.costs))
    return table, table.facts["dtype"], table.gammas[-1], batches or table.batches, contexts or table.contexts


def _roofline(cfg: DictConfig) -> Costs:
    from eval.roofline import Gpu, Reader, Roofline
    from heads.artifact import UserError
    from scripts.settings import check_call

    readers = {}
    for name in ("target_size", "draft_size"):
        values = plain(cfg[name])
        if values["parameters"] is None:
            raise UserError(f"gpu= needs {name}.parameters=<how many are read for a pass>, such as 7.5e9.")
        check_call(Reader, name, values)
        readers[name] = Reader(**values)
    gpu = plain(cfg)["gpu"]
    return Roofline(Gpu.of(gpu), readers["target_size"], readers["draft_size"])


def _show(found: Advice) -> None:
    """The advice in words, what it rests on, and the best γ elsewhere."""
    print(f"advise    {headline(found)}\n")
    print("          γ  tokens a round  round costs   speed-up            tokens/s")
    for row in found.rows:
        mark = "  <" if row.gamma == found.gamma else ""
        tau, rate = _two(row.tokens_per_round.value), _one(row.tokens_per_second.value)
        print(f"         {row.gamma:2d} {tau:>15} {row.round_cost:12.2f}   {_interval(row.speedup):18} {rate:>9}{mark}")
    contexts = sorted({cell.context for cell in found.table})
    print("\n          best γ and its speed-up; contexts across, batches down")
    print("                " + " ".join(f"{context:>12d}" for context in contexts))
    for batch in sorted({cell.batch for cell in found.table}):
        cells = [f"γ {cell.gamma} {_two(cell.speedup.value)}×" for cell in found.table if cell.batch == batch]
        print(f"          {batch:5d} " + " ".join(f"{cell:>12}" for cell in cells))
    print(
        f"\n          Intervals: 95 %, of the acceptance ({found.intervals_from}); costs at their medians. Chains only."
    )
    for note in found.notes:
        print(f"          Note: {note}.")


def headline(found: Advice) -> str:
    """The advice as a sentence."""
    where = f"at batch {found.batch:g} and context {found.context:g}"
    end = (
        f"From batch {found.stops_paying} on speculation does not pay there."
        if found.stops_paying is not None
        else f"It pays at every batch up to {found.largest}."
    )
    if found.gamma == 0:
        return f"Do not speculate {where}: no draft length is faster than plain decoding. {end}"
    return f"γ = {found.gamma} {where}: {_interval(found.speedup)} as fast as plain decoding. {end}"


def _interval(one: Estimate) -> str:
    span = "" if one.low is None else f" [{one.low:.2f}, {one.high:.2f}]"
    return f"{_two(one.value)}×{span}"


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
