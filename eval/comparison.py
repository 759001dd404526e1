"""Several evaluated drafts side by side, ranked: heads and rivals, over the same requests, differences in pairs.

Numbers are taken as they stand in the reports (see `eval.acceptance` for the definitions); differences come from the
traces (`eval.paired`). What must be equal for a comparison to mean anything is checked, and refused where it differs.
This module knows no file: it is given the content of each run's `report.json`, and its runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from eval.bootstrap import RESAMPLES
from eval.paired import compare_paired
from eval.report import PLAIN, Run, find_rows
from eval.report_table import with_interval
from eval.suite import tree_name
from heads.artifact import UserError

FORMAT = 2
DEFINED = ("alpha", "tokens_per_round", "draft_cost", "speedup", "interval")
ESTIMATES = ("alpha", "tokens_per_round", "draft_cost", "speedup")
MEASURES = {
    "predicted": "predicted speed at the load",
    "speedup": "measured speed",
    "tokens_per_round": "tokens per round",
}
"""What drafts are ranked by: the first that every draft of a table has; rivals have no prediction, and then no rank."""
Row = Mapping[str, Any]
Key = tuple[str, str, str, float]  # run, proposer, dtype, temperature


def compare(
    reports: Mapping[str, Mapping[str, Any]],
    runs: Mapping[str, Sequence[Run]] | None = None,
    *,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """The content of `comparison.json` out of `report.json` of each run by its name, and the runs behind it.

    rows[] has for each number format and temperature one row per head and rival, best first: rank, run, proposer,
    dtype, temperature, gamma, alpha, tokens_per_round, draft_cost, speedup, predicted (each {value, low, high} or
    null); tree: tokens_per_round and speedup of its tree, or null; slices[] with the same estimates; worst_slice, by
    tokens per round; difference: this draft minus the first of its table over the same requests
    (`eval.paired.PairedComparison`), null for the first itself and where traces are gone; parameters, seconds and
    tokens of a head's training. A rival is taken from the first run that measured it. rankings[] says of each table
    what it is ranked by; machines[] says of runs whose speed was measured on different ones which, and is empty where
    all are the same. Raises UserError when there is no report or two of them cannot be compared.
    """
    if not reports:
        raise UserError("There is no evaluated run to compare; name folders that hold a report: 'runs=[runs/mine]'.")
    _check(reports)
    first = next(iter(reports.values()))
    behind = {_key(name, run): run for name, own in (runs or {}).items() for run in own if _is_main(run, first)}
    tables = dict.fromkeys((row["dtype"], row["temperature"]) for report in reports.values() for row in _main(report))
    rows, rankings = [], []
    for dtype, temperature in sorted(tables, key=lambda one: one[1]):  # greedy first
        block = _block(reports, dtype, temperature)
        measure = _measure(block)
        ranked = sorted(block, key=lambda row: -(_value(row, measure) or 0.0))
        rows += [
            {
                "rank": None if _value(row, measure) is None else place,
                **_beside_best(row, ranked[0], behind, resamples),
            }
            for place, row in enumerate(ranked, start=1)
        ]
        load = _load(reports, dtype, temperature)
        rankings.append({"dtype": dtype, "temperature": temperature, "by": measure, "load": load})
    made = {
        "format": FORMAT,
        "verdict": "",
        "requests": max(row["requests"] for row in _main(first)),
        "gamma": first["headline"]["gamma"],
        "target": first["target"],
        "machines": _machines(reports, {ranking["by"] for ranking in rankings}),
        "rankings": rankings,
        "rows": rows,
        "definitions": {name: first["definitions"][name] for name in DEFINED if name in first["definitions"]},
    }
    made["verdict"] = verdict(made)
    return made


def _check(reports: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises UserError naming the first run that differs from the first in what must be equal."""
    (base_name, base), *others = ((name, _basis(report)) for name, report in reports.items())
    for name, basis in others:
        for what, value in basis.items():
            if value != base[what] and None not in (value, base[what]):
                raise UserError(
                    f"{name} and {base_name} cannot be compared: they differ in {what} ({_short(value)} against "
                    f"{_short(base[what])}); evaluate both on the same, or leave one out of runs=."
                )


def _basis(report: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in all runs; None where a run knows nothing of it, or where it does not matter there."""
    settings = report["provenance"]["config"]["eval"]
    sampled = any(row["temperature"] > 0 for row in _main(report))
    return {
        "the held-out requests": report["traffic"]["fingerprints"]["held_out"],
        "the number of requests": max(row["requests"] for row in _main(report)),
        "the target": report["target"]["weights"],
        "the target's tokenizer": report["target"].get("tokenizer"),
        "the target's chat template": report["target"].get("template"),
        "eval.gamma": report["headline"]["gamma"],
        "eval.max_new_tokens": settings["max_new_tokens"],
        "eval.top_p": settings.get("top_p") if sampled else None,
    }


def _short(value: object) -> str:
    return str(value)[:12]


def _main(report: Mapping[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """The rows of the main comparison over all requests, at every temperature."""
    rows = find_rows(report, slice="all", **wanted)
    return [row for row in rows if row["gamma"] in (0, report["headline"]["gamma"])]


def _is_main(run: Run, report: Mapping[str, Any]) -> bool:
    return run.gamma == report["headline"]["gamma"]


def _key(name: str, run: Run) -> Key:
    return name, run.proposer, run.dtype, run.temperature


def _load(reports: Mapping[str, Mapping[str, Any]], dtype: str, temperature: float) -> dict[str, Any] | None:
    """The load that all runs were asked about in this number format at this temperature, if it is the same."""
    served = (dtype, temperature)
    loads = [load for report in reports.values() if (load := report.get("load"))]
    asked = [
        {name: load[name] for name in ("batch", "context")}
        for load in loads
        if (load.get("dtype"), load.get("temperature")) == served  # an older advice does not say: no prediction
    ]
    return asked[0] if len(asked) == len(reports) and all(one == asked[0] for one in asked) else None


def _machines(reports: Mapping[str, Mapping[str, Any]], measures: Set[str]) -> list[str]:
    """What each run's speed was measured on, in words, where that differs and speed is what is compared."""
    on = {"The speed of {} was": {name: report.get("measured_on") for name, report in reports.items()}}
    if "predicted" in measures:
        on["The costs of {} were"] = {name: (one.get("load") or {}).get("costs") for name, one in reports.items()}
    found = []
    for words, machines in on.items():
        known = {name: _machine(machine) for name, machine in machines.items()}
        if len(set(known.values())) > 1:
            found += [f"{words.format(name)} measured on {machine}." for name, machine in known.items()]
    return found


def _machine(one: Mapping[str, Any] | None) -> str:
    return "a machine that is not recorded" if one is None else f"{one['device']} with {one['threads']} threads"


def _block(reports: Mapping[str, Mapping[str, Any]], dtype: str, temperature: float) -> list[dict[str, Any]]:
    """The heads in one number format at one temperature, then the rivals."""
    heads, rivals, asked = [], {}, _load(reports, dtype, temperature) is not None
    nothing = {"tree": None, "predicted": None, "parameters": None, "seconds": None, "tokens": None}
    for run, report in reports.items():
        head = report["head"]
        own = {row["proposer"]: row for row in _main(report, dtype=dtype, temperature=temperature)}
        tree = own.pop(tree_name(head["name"]), None)
        if (chain := own.pop(head["name"], None)) is not None:
            training = {key: head[key] for key in ("sha256", "parameters", "seconds", "tokens")}
            predicted = report["load"]["speedup"] if asked else None
            tree_only = tree and {name: tree[name] for name in ("tokens_per_round", "speedup")}
            heads.append({**_numbers(report, chain, run), "tree": tree_only, "predicted": predicted, **training})
        for name, row in own.items():
            if name != PLAIN and name not in rivals:
                rivals[name] = {**_numbers(report, row, run), **nothing}
    return [*heads, *rivals.values()]


def _numbers(report: Mapping[str, Any], row: Row, run: str) -> dict[str, Any]:
    facts = {key: row[key] for key in ("proposer", "dtype", "temperature", "gamma")}
    parts = [one for one in find_rows(report, **facts) if one["slice"] != "all"]
    slices = [{key: one[key] for key in ("slice", "requests", *ESTIMATES)} for one in parts]
    known = [one for one in slices if one["tokens_per_round"]["value"] is not None]
    worst = min(known, key=lambda one: one["tokens_per_round"]["value"], default=None)
    estimates = {name: row[name] for name in ESTIMATES}
    return {"run": run, **facts, **estimates, "slices": slices, "worst_slice": worst and worst["slice"]}


def _measure(block: Sequence[Row]) -> str:
    """What to rank by: the first measure that all have; a prediction is made for heads alone."""
    heads = [row for row in block if row["tokens"] is not None]
    if heads and all(_value(row, "predicted") is not None for row in heads):
        return "predicted"
    return "speedup" if all(_value(row, "speedup") is not None for row in block) else "tokens_per_round"


def _value(row: Row, measure: str) -> float | None:
    return None if row[measure] is None else row[measure]["value"]


def _beside_best(row: Row, best: Row, behind: Mapping[Key, Run], resamples: int) -> dict[str, Any]:
    """A row with its difference from the best, in all and by slice."""
    one, other = (
        behind.get((r["run"], r["proposer"], r["dtype"], r["temperature"])) for r in (row, best)
    )  # fmt: skip
    pair = None if row is best or one is None or other is None else (one, other)
    slices = [{**part, "difference": pair and _difference(*pair, resamples, part["slice"])} for part in row["slices"]]
    same_session = row["run"] == best["run"]  # seconds of two sessions are no pair
    found = pair and _difference(*pair, resamples, timed=same_session)
    return {**row, "slices": slices, "difference": found}


def _difference(one: Run, other: Run, resamples: int, part: str | None = None, timed: bool = False) -> dict[str, Any]:
    first, second = ([t for t in run.traces if part in (None, t.slice)] for run in (one, other))
    found = compare_paired(
        first,
        second,
        gamma=max(one.gamma, other.gamma),
        timed=(one.clock, other.clock) if timed else ((), ()),
        resamples=resamples,
    )
    return found.to_json()


def label(row: Row) -> str:
    """The head or rival, with its run where that is called otherwise."""
    rival = row["tokens"] is None
    return row["proposer"] if rival or row["proposer"] == row["run"] else f"{row['proposer']} ({row['run']})"


def tables(comparison: Mapping[str, Any]) -> list[tuple[Row, list[Row]]]:
    """Each ranking and its rows, best first."""
    same = ("dtype", "temperature")
    return [
        (ranking, [row for row in comparison["rows"] if all(row[key] == ranking[key] for key in same)])
        for ranking in comparison["rankings"]
    ]


def verdict(comparison: Mapping[str, Any]) -> str:
    """The first table in one sentence."""
    ranking, rows = tables(comparison)[0]
    best, measure = rows[0], MEASURES[ranking["by"]]
    start = f"{label(best)} comes first by {measure}, {_amount(best, ranking['by'])}"
    if len(rows) == 1:
        return f"{start}; it is the only draft that was evaluated."
    second = rows[1]
    if second["rank"] is None:
        return f"{start}; there is no such prediction for {label(second)}."
    start += f", before {label(second)}, {_amount(second, ranking['by'])}"
    found = second["difference"]
    if found is None:
        return f"{start}, over the same {comparison['requests']} requests."
    if found["better"] is None:
        return f"{start}; in tokens per round these {found['requests']} requests cannot tell the two apart."
    more = "more" if found["better"] else "fewer"
    gap = {key: value and abs(value) for key, value in found["tokens_per_round"].items()}
    low, high = sorted([gap["low"], gap["high"]])
    size = with_interval({"value": gap["value"], "low": low, "high": high})
    return f"{start}; the second yields {size} {more} tokens per round on the same {found['requests']} requests."


def _amount(row: Row, measure: str) -> str:
    """What a draft is ranked by, in words that admit when it slows down."""
    text = with_interval(row[measure])
    if measure == "tokens_per_round":
        return text
    value = _value(row, measure)
    slower = ", slower than without a draft" if value is not None and value < 1 else ""
    return f"{text} times that of plain decoding{slower}"
