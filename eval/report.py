"""The report: every number of an evaluation under stable keys, and the sentence that sums it up.

`build_report` turns traces into the dictionary that `report.json` holds; the tables (`eval.report_table`) and
the page (`eval.report_page`) show that dictionary and nothing else. This module computes no number itself
(see `eval.acceptance`) and does not know how the requests were decoded or compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from eval.acceptance import DEFINITIONS, Measurement, is_looping, measure, vllm_counters
from eval.bootstrap import RESAMPLES
from eval.formula import check_formula
from eval.trace import RequestTrace

if TYPE_CHECKING:
    from eval.exactness import Divergence

FORMAT = 1
PLAIN = "none"  # the proposer of plain decoding
WIDEST = ("float64", "float32")
SHORT_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True)
class Run:
    """One proposer at one draft length, number format and temperature, over all requests.

    divergences: the requests whose text differs from the target's own; None: not compared, or not defined
    (temperature > 0). timed: traces of the same requests whose seconds count, where these were decoded apart
    (one at a time, interleaved); None: `traces`. The run of the proposer "none" with the same dtype and
    temperature is the baseline of the speed-up.
    """

    proposer: str
    dtype: str
    temperature: float
    gamma: int
    traces: Sequence[RequestTrace]
    divergences: Sequence[Divergence] | None = None
    timed: Sequence[RequestTrace] | None = None

    @property
    def clock(self) -> Sequence[RequestTrace]:
        return self.traces if self.timed is None else self.timed


def build_report(
    *,
    runs: Sequence[Run],
    target: Mapping[str, Any],
    head: Mapping[str, Any] | None,
    traffic: Mapping[str, Any],
    provenance: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]] = (),
    teacher_forced: Mapping[str, Any] | None = None,
    load: Mapping[str, Any] | None = None,
    key: str | None = None,
    measured_on: Mapping[str, Any] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Any]:
    """The content of `report.json`.

    The first run of the head, by its `name`, at temperature 0 is the headline, of any draft where there is none
    of the head: the caller's order decides. `traffic` may say `held_out` (bool): the head has not seen these
    requests; `target`, `head` and `traffic` may say `name`. The rest of them is shown as it comes. samples: see
    `eval.samples`. teacher_forced: `eval.teacher.TeacherGap.to_json` with its dtype and gamma. load: what the head
    is expected to do on a loaded server (`eval.speedup.Advice.to_json`). key: what identifies the evaluation
    (`eval.suite.Suite.key`). measured_on: device and threads of what was timed.
    """
    if not runs:
        raise ValueError("There is nothing to report: no run was evaluated; evaluate at least one proposer.")
    if len({_key(run) for run in runs}) < len(runs):
        raise ValueError("Two runs have the same proposer, dtype, temperature and gamma; merge or drop one.")
    for run in runs:
        assert len({t.request_id for t in run.traces}) == len(run.traces), f"{run.proposer}: a request twice"
    results = [row for run in runs for row in _rows(run, _baseline(run, runs), resamples=resamples, seed=seed)]
    name = (head or {}).get("name")
    report: dict[str, Any] = {
        "format": FORMAT,
        "verdict": "",
        "key": key,
        "measured_on": dict(measured_on) if measured_on is not None else None,
        "headline": _headline(runs, name),
        "target": dict(target),
        "head": dict(head) if head is not None else None,
        "traffic": dict(traffic),
        "results": results,
        "identity": _identity(runs),
        "samples": list(samples),
        "formula": _formula(headline_run(runs, name), runs, resamples=resamples, seed=seed),
        "teacher_forced": dict(teacher_forced) if teacher_forced is not None else None,
        "load": dict(load) if load is not None else None,
        "definitions": dict(DEFINITIONS),
        "provenance": dict(provenance),
    }
    report["verdict"] = verdict(report)
    if "modified" in report["target"]:
        report["verdict"] = f"{report['verdict'].removesuffix('.')}; {report['target']['modified']}."
    return report


def _formula(chosen: Run, runs: Sequence[Run], *, resamples: int, seed: int) -> dict[str, Any] | None:
    """The formula against the headline's draft, in the number format where most draft lengths were decoded."""
    own = [r for r in runs if (r.proposer, r.temperature) == (chosen.proposer, chosen.temperature)]
    lengths = {
        dtype: {r.gamma: r.traces for r in own if r.dtype == dtype} for dtype in dict.fromkeys(r.dtype for r in own)
    }
    dtype = max(lengths, key=lambda name: len(lengths[name]))
    decoded = [t for traces in lengths[dtype].values() for t in traces]
    if chosen.proposer == PLAIN or not decoded or any(r.tree for t in decoded for r in t.rounds):
        return None
    found = check_formula(lengths[dtype], resamples=resamples, seed=seed).to_json()
    return {"dtype": dtype, **{key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}}


def _key(run: Run) -> tuple[str, str, float, int]:
    return run.proposer, run.dtype, run.temperature, run.gamma


def _baseline(run: Run, runs: Sequence[Run]) -> Sequence[RequestTrace]:
    if run.proposer == PLAIN:
        return ()
    same = [r for r in runs if (r.proposer, r.dtype, r.temperature) == (PLAIN, run.dtype, run.temperature)]
    return same[0].clock if same else ()


def _rows(run: Run, plain: Sequence[RequestTrace], *, resamples: int, seed: int) -> list[dict[str, Any]]:
    """One row over all requests, then one per slice in order of appearance; a slice named "all" is the first."""
    different = None if run.divergences is None else {d.request for d in run.divergences}
    rows = []
    for name in dict.fromkeys(["all", *(t.slice for t in run.traces)]):
        traces = [t for t in run.traces if name in ("all", t.slice)]
        steady = [t for t in traces if not is_looping(t)]

        def numbers(chosen: Sequence[RequestTrace]) -> dict[str, Any]:
            return _numbers(
                measure(chosen, gamma=run.gamma, plain=plain, timed=run.clock, resamples=resamples, seed=seed)
            )

        whole = numbers(traces)
        rows.append(
            {
                "proposer": run.proposer,
                "dtype": run.dtype,
                "temperature": run.temperature,
                "gamma": run.gamma,
                "slice": name,
                **whole,
                "identical_requests": _identical(traces, different),
                "looping_requests": len(traces) - len(steady),
                "vllm_counters": vllm_counters(traces, gamma=run.gamma).to_json(),
                "without_looping": whole if len(steady) == len(traces) else numbers(steady),
            }
        )
    return rows


def _identical(traces: Sequence[RequestTrace], different: set[str] | None) -> int | None:
    return None if different is None else sum(t.request_id not in different for t in traces)


def _numbers(m: Measurement) -> dict[str, Any]:
    """A measurement under the report's keys; per depth a plain list, and beside it one with intervals."""
    value = m.to_json()
    return {
        **value,
        "alpha_by_position": [e.value for e in m.alpha_by_position],
        "alpha_by_position_interval": value["alpha_by_position"],
        "survival": [e.value for e in m.survival],
        "survival_interval": value["survival"],
        "expected_tokens_per_round": m.expected_tokens_per_round.value,
        "expected_tokens_per_round_interval": value["expected_tokens_per_round"],
    }


def _identity(runs: Sequence[Run]) -> dict[str, Any]:
    """Per dtype: the requests whose text equals the target's own in every greedy run, and what differs."""
    proof: dict[str, Any] = {}
    for run in runs:
        if run.divergences is None:
            continue
        entry = proof.setdefault(run.dtype, {"requests": set(), "identical": 0, "divergences": []})
        entry["requests"] |= {t.request_id for t in run.traces}
        entry["divergences"] += [{**asdict(d), "proposer": run.proposer, "gamma": run.gamma} for d in run.divergences]
    for entry in proof.values():
        entry["requests"] = len(entry["requests"])
        entry["identical"] = entry["requests"] - len({d["request"] for d in entry["divergences"]})
    return proof


def headline_run(runs: Sequence[Run], head: str | None) -> Run:
    """The run that the verdict speaks of: the head's, by its name, else a rival's."""
    own, drafts = [r for r in runs if r.proposer == head], [r for r in runs if r.proposer != PLAIN]
    wanted = own or drafts or list(runs)
    return next((r for r in wanted if r.temperature == 0), wanted[0])


def _headline(runs: Sequence[Run], head: str | None) -> dict[str, Any]:
    proposer, dtype, temperature, gamma = _key(headline_run(runs, head))
    return {"proposer": proposer, "dtype": dtype, "temperature": temperature, "gamma": gamma}


def find_rows(report: Mapping[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """The result rows with these values, e.g. `slice="all", temperature=0`."""
    return [row for row in report["results"] if all(row[key] == value for key, value in wanted.items())]


def shown_rows(report: Mapping[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """The rows that a reader is shown: where all traffic is of one slice, its rows would repeat those over all."""
    rows = find_rows(report, **wanted)
    several = len({row["slice"] for row in report["results"]} - {"all"}) > 1
    return rows if several else [row for row in rows if row["slice"] == "all"]


def headline_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The headline's overall row first, then the same run in the other dtypes."""
    chosen = report["headline"]
    rows = find_rows(report, slice="all", **{k: chosen[k] for k in ("proposer", "temperature", "gamma")})
    return sorted(rows, key=lambda row: row["dtype"] != chosen["dtype"])


def proof_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The headline's rows whose texts were compared, widest dtype first: there identity is a proof."""
    rows = [row for row in headline_rows(report) if row["identical_requests"] is not None]
    return sorted(rows, key=lambda row: WIDEST.index(row["dtype"]) if row["dtype"] in WIDEST else len(WIDEST))


def verdict(report: Mapping[str, Any]) -> str:
    """One sentence for somebody who has never heard of α."""
    rows = headline_rows(report)
    first = rows[0]
    where = {True: "held-out traffic", False: "traffic the head was trained on", None: "this traffic"}
    traffic = where[report["traffic"].get("held_out")]
    if first["proposer"] == PLAIN:
        return f"Plain decoding on {traffic}, without a draft: one token per pass of the target."
    who = "the head" if first["proposer"] == (report["head"] or {}).get("name") else first["proposer"]
    amount = first["tokens_per_round"]["value"]
    sentence = f"At γ = {first['gamma']} with {who}, " + (
        f"too few drafts get as deep as that on {traffic} to tell the tokens of a pass (a smaller eval.gamma can)"
        if amount is None
        else f"every pass of the target yields {amount:.2f} tokens on average on {traffic}, instead of 1"
    )
    timed = [row for row in rows if row["speedup"] and row["speedup"]["value"]]
    if timed:
        speeds = [_speed(row, len(rows) > 1, row is timed[0]) for row in timed]
        sentence += "; decoding is " + " and ".join(speeds)
    compared = proof_rows(report)
    if compared:
        sames = [_sameness(row, len(compared) > 1, row is compared[0]) for row in compared]
        sentence += ", and the text was identical on " + " and on ".join(sames)
    return sentence + "."


def _speed(row: Mapping[str, Any], name_dtype: bool, first: bool) -> str:
    speed = row["speedup"]
    text = f"{speed['value']:.2f}×" + (" as fast" if first else "")
    text += f" in {row['dtype']}" if name_dtype else ""
    if speed["low"] is not None and speed["low"] <= 1 <= speed["high"]:
        return text + " (no measurable difference)"
    return text + (" (slower than without a draft)" if speed["value"] < 1 else "")


def _sameness(row: Mapping[str, Any], name_dtype: bool, first: bool) -> str:
    text = f"{row['identical_requests']} of {row['requests']}" + (" requests" if first else "")
    return text + (f" in {row['dtype']}" if name_dtype else "")
