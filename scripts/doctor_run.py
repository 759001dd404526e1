"""The doctor on a run that has a head: does the decoder accept what it was right on in training, and if not, why?

Reads the manifest of the head and the report of its evaluation; measures nothing. The order is that of the README's
section on high training accuracy and low acceptance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

if TYPE_CHECKING:
    from heads.target import FrozenTarget
    from training.diagnosis import Finding, Section

Facts = Mapping[str, Any]
_MUCH = 0.1  # by which one acceptance lies below another when it is no chance where there is no interval
_ENOUGH = 0.95  # share of the text's tokens that a draft vocabulary should cover


def look_at_run(cfg: DictConfig, target: FrozenTarget) -> Section | None:
    """What the head of the run came to; None where there is none yet."""
    from heads.artifact import MANIFEST, read_json, read_manifest
    from training.diagnosis import Finding, Section

    head_dir, file = Path(cfg.head_dir), Path(cfg.run_dir) / "report/report.json"
    if not (head_dir / MANIFEST).is_file():
        return None
    head = read_manifest(head_dir, "head")
    rows = [("head", f"{head['name']} of {head_dir}, {head.get('steps', 0):,} steps")]
    changed = sorted(key for key, value in target.fingerprint.items() if head["target"].get(key) != value)
    if changed:
        sentence = (
            f"{head_dir} was trained on the target {head['target']['name']}, which differs from {cfg.target.path} in "
            f"its {', '.join(changed)}, and no acceptance carries over; give target.path= and target.template= as then."
        )
        return Section("run", tuple(rows), findings=(Finding(True, sentence),))
    report = None
    if file.is_file():
        report = read_json(file, "a report", "evaluate again", needed=("results", "headline", "teacher_forced", "head"))
    if report is None or (report["head"] or {}).get("sha256") != head["sha256"] or not report["teacher_forced"]:
        rows.append(("report", f"none of this head with its greedy chain in {file.parent}; scripts.evaluate makes it"))
        return Section("run", tuple(rows))
    rows.append(("acceptance", "of drafts whose forerunners were right: on true tokens twice, then as it is decoded"))
    return Section("run", tuple(rows), table=_by_depth(head, report), findings=tuple(causes(head, report, cfg)))


def _by_depth(head: Facts, report: Facts) -> tuple[tuple[str, ...], ...]:
    from eval.report_table import number, with_interval

    taught, trained = report["teacher_forced"], _trained(head)
    named = ("depth", "training text", "held-out text", "decoder")
    sides = zip(taught["teacher"], taught["decoder"], strict=True)
    return named, *(
        (str(depth), number(trained.get(depth)), with_interval(teacher), with_interval(decoder))
        for depth, (teacher, decoder) in enumerate(sides, 1)
    )


def _trained(head: Facts) -> dict[int, float]:
    """The acceptance by depth that training logged last; none of a head that was not trained here."""
    return dict(enumerate((head.get("teacher_forced") or {}).get("acceptance", ()), 1))


def causes(head: Facts, report: Facts, cfg: DictConfig) -> Iterator[Finding]:
    """Why fewer drafts are accepted than training promised; one sentence that nothing is amiss where nothing is."""
    from eval.report import find_rows
    from training.diagnosis import Finding

    taught, run = report["teacher_forced"], {key: report["headline"][key] for key in ("proposer", "dtype", "gamma")}
    found = [*_by_heart(head, taught), *_falling_behind(taught, cfg), *_unsayable(taught, cfg)]
    greedy = find_rows(report, **run, temperature=0)
    slices = [row for row in greedy if row["slice"] != "all"]
    found += [*_weak_slice(slices), *_other_temperature(find_rows(report, **run, slice="all"), cfg)]
    if not found and taught["teacher"][0]["value"] is not None:
        found.append(
            f"Training, held-out text and decoder agree on what this head is right on ({_two(taught['teacher'][0])} at "
            f"depth 1): more of it takes more traffic (traffic.path=) or longer training (train.epochs=)."
        )
    yield from (Finding(False, sentence) for sentence in found)


def _by_heart(head: Facts, taught: Facts) -> Iterator[str]:
    first, trained = taught["teacher"][0], _trained(head).get(1)
    if trained is None or first["value"] is None or trained - first["value"] < _MUCH:
        return
    if first["high"] is None or trained > first["high"]:
        yield (
            f"At depth 1 the head is right on {trained:.2f} of the text that it was trained on and on {_two(first)} of "
            f"the held-out one, both on true tokens: it knows its text by heart, or is served another kind; give more "
            f"traffic like what is served (traffic.path=), or fewer train.epochs=."
        )


def _falling_behind(taught: Facts, cfg: DictConfig) -> Iterator[str]:
    for depth, gap in enumerate(taught["gap"], 1):
        if gap["value"] is not None and gap["value"] < -_MUCH and (gap["high"] is None or gap["high"] < 0):
            teacher, decoder = (_two(taught[side][depth - 1]) for side in ("teacher", "decoder"))
            yield (
                f"At depth {depth} the decoder accepts {decoder}, where the head on true tokens is right on {teacher} "
                f"of the same texts: it does not stand its own output; train with a larger head.depth= (now "
                f"{cfg.head.depth}), or serve a smaller eval.gamma= (now {cfg.eval.gamma})."
            )
            return


def _unsayable(taught: Facts, cfg: DictConfig) -> Iterator[str]:
    covered = taught["coverage_of_text"]["value"]
    if covered is not None and covered < _ENOUGH:
        yield (
            f"{1 - covered:.0%} of the tokens of the held-out texts are outside the draft vocabulary and can never be "
            f"accepted; set head.draft_vocab_size= higher (now {cfg.head.get('draft_vocab_size')}), or null."
        )


def _weak_slice(rows: Sequence[Facts]) -> Iterator[str]:
    known = [row for row in rows if row["alpha"]["value"] is not None]
    if not known:
        return
    worst, best = (choose(known, key=lambda row: row["alpha"]["value"]) for choose in (min, max))
    if _below(worst["alpha"], best["alpha"]):
        yield (
            f"α is {_two(worst['alpha'])} on {worst['slice']} and {_two(best['alpha'])} on {best['slice']}; give more "
            f"traffic of the kind {worst['slice']} (traffic.path=) if that is what is served."
        )


def _other_temperature(rows: Sequence[Facts], cfg: DictConfig) -> Iterator[str]:
    collected = cfg.generation.temperature
    own = next((row for row in rows if row["temperature"] == collected), None)
    for row in rows if own else ():
        if _below(row["alpha"], own["alpha"]):
            yield (
                f"α is {_two(row['alpha'])} at temperature {row['temperature']:g} and {_two(own['alpha'])} at "
                f"{collected:g}, at which the answers were collected; where the other is served, collect under another "
                f"name= with generation.temperature={row['temperature']:g}."
            )


def _below(low: Facts, high: Facts) -> bool:
    """Whether one estimate lies so far below the other that it is no chance."""
    if low["value"] is None or high["value"] is None or high["value"] - low["value"] < _MUCH:
        return False
    return low["high"] is None or high["low"] is None or low["high"] < high["low"]


def _two(estimate: Facts) -> str:
    return f"{estimate['value']:.2f}"
