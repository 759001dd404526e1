"""Everything that an evaluation runs, in a fixed order, each part kept on disk as soon as it is there.

A *task* is one proposer at one number format, temperature and γ over all requests. Its traces go to a file of their
own, so an evaluation that was stopped goes on where it was. This module computes no number (see `eval.acceptance`)
and does not know where the head and the requests come from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from eval.bench import interleaved
from eval.decode import DecodeSettings, Proposer, Request, decode
from eval.exactness import Divergence, divergences, generate_texts
from eval.report import PLAIN, Run
from eval.static_tree import tree_setting
from eval.trace import RequestTrace, dump_traces, read_traces
from eval.verify import Sampling
from heads.artifact import UserError, digest, write_atomic
from heads.target import DTYPES, FrozenTarget

MakeProposers = Callable[[FrozenTarget], Mapping[str, Proposer]]
"""The proposers to compare, by name, ready for a target of this number format."""


@dataclass(frozen=True)
class Plan:
    """What to evaluate.

    gamma: the draft length of the main comparison; gammas: further ones for the first proposer alone; temperatures:
    0 is greedy, others use top_p too; dtypes: number formats, the first is the headline; rows: requests decoded
    together where nothing is timed; timed_requests: how many are also decoded alone, interleaved with plain decoding;
    tree: of the head, whose depth is γ, as eval.static_tree.tree_setting takes it; it is decoded greedily beside the
    head's chain, as the proposer `tree_name` (None: chains only).
    """

    gamma: int = 4
    gammas: tuple[int, ...] = (1, 2, 3, 6)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    top_p: float = 1.0
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    max_new_tokens: int = 64
    rows: int = 16
    timed_requests: int = 12
    seed: int = 0
    tree: Mapping[str, int | None] | None = None

    def __post_init__(self) -> None:
        unknown = [dtype for dtype in self.dtypes if dtype not in DTYPES]
        if unknown or not self.dtypes:
            raise UserError(f"eval.dtypes={list(self.dtypes)} must name some of {', '.join(DTYPES)}.")
        if self.max_new_tokens < 2 or self.rows < 1 or self.timed_requests < 0:
            raise UserError(
                f"eval.max_new_tokens={self.max_new_tokens} must be ≥ 2, eval.rows={self.rows} ≥ 1 and "
                f"eval.timed_requests={self.timed_requests} ≥ 0."
            )
        if not all(1 <= gamma < self.max_new_tokens for gamma in (self.gamma, *self.gammas)):
            raise UserError(
                f"eval.gamma={self.gamma} and eval.gammas={list(self.gammas)} must be at least 1 and below "
                f"eval.max_new_tokens={self.max_new_tokens}."
            )
        heats = all(0 <= heat < math.inf for heat in self.temperatures)
        if not self.temperatures or not heats or not 0 < self.top_p <= 1:
            raise UserError(
                f"eval.temperatures={list(self.temperatures)} must be some finite values ≥ 0, eval.top_p={self.top_p} "
                f"above 0 and at most 1."
            )
        if self.tree is not None:
            tree_setting(self.tree, "eval.tree")
        lists = {"gammas": self.gammas, "temperatures": self.temperatures, "dtypes": self.dtypes}
        for name, values in lists.items():
            if len(set(values)) < len(values):
                raise UserError(f"eval.{name}={list(values)} says something twice; give each value once.")

    def within(self, longest: int | None) -> Plan:
        """The same without the further draft lengths that a head cannot reach (None: it has no limit)."""
        return self if longest is None else replace(self, gammas=tuple(g for g in self.gammas if g <= longest))


def tree_name(head: str) -> str:
    """The name under which the tree of a head is evaluated beside its chain."""
    return f"{head}_tree"


@dataclass(frozen=True)
class Task:
    """One line of the evaluation."""

    proposer: str
    dtype: str
    temperature: float
    gamma: int

    @property
    def name(self) -> str:
        """As a file name and in progress lines."""
        return f"{self.proposer}-{self.dtype}-T{self.temperature:g}-g{self.gamma}"


def tasks(plan: Plan, proposers: Sequence[str]) -> list[Task]:
    """All tasks in the order they run; the first of `proposers` is the head under evaluation.

    Sampled decoding and the sweep over γ are run in the last number format, the one that is served; greedy decoding
    in all of them, with the head's tree too.
    """
    result = []
    served = plan.dtypes[-1]
    greedy = [*proposers[:1], *([tree_name(proposers[0])] if plan.tree is not None else []), *proposers[1:]]
    for dtype in plan.dtypes:
        for temperature in plan.temperatures:
            if temperature == 0 or dtype == served:
                drafts = greedy if temperature == 0 else proposers
                result += [Task(name, dtype, temperature, plan.gamma) for name in drafts]
            if temperature == 0:  # sampled plain decoding has nothing to be compared with
                result.append(Task(PLAIN, dtype, temperature, 0))
    swept = [gamma for gamma in plan.gammas if gamma != plan.gamma]
    if 0.0 in plan.temperatures:
        result += [Task(proposers[0], served, 0.0, gamma) for gamma in swept]
    return result


class Suite:
    """Runs the tasks over the requests, keeping traces under `folder`.

    identity: whatever else decides the outcome (fingerprints of head and target); traces made under another identity
    are made anew. load_target(dtype) and make_proposers(target) are called only for what is still to be done.
    announce is told what begins, and progress is called with each decoded request's tokens.
    """

    def __init__(
        self,
        *,
        requests: Sequence[Request],
        plan: Plan,
        folder: Path,
        identity: Mapping[str, str],
        load_target: Callable[[str], FrozenTarget],
        make_proposers: MakeProposers,
        announce: Callable[[str, int], None] = lambda text, requests: None,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        if not requests:
            raise UserError("There is no held-out request to evaluate; give more traffic or raise traffic.held_out.")
        self.requests, self.plan, self.folder = requests, plan, folder
        what_is_kept = [field.name for field in fields(RequestTrace)]
        self.key = digest([[asdict(request) for request in requests], asdict(plan), dict(identity), what_is_kept])
        self.load_target, self.make_proposers = load_target, make_proposers
        self.announce, self.progress = announce, progress

    def run(self, proposers: Sequence[str]) -> list[Run]:
        """All runs, in the order of `tasks`."""
        todo = tasks(self.plan, proposers)
        done: dict[Task, Run] = {}
        for dtype in self.plan.dtypes:
            wanted = [task for task in todo if task.dtype == dtype]
            kept = {task: run for task in wanted if (run := self._read(task)) is not None}
            if missing := [task for task in wanted if task not in kept]:
                target = self.load_target(dtype)
                for task, run in self._run_dtype(target, missing):
                    self._write(task, run)
                    kept[task] = run
            done |= kept
        return [done[task] for task in todo]

    def _run_dtype(self, target: FrozenTarget, missing: Sequence[Task]) -> Iterator[tuple[Task, Run]]:
        """The missing tasks of one number format: what is timed together first, then the rest in batches."""
        proposers: dict[str, Proposer | None] = {**self.make_proposers(target), PLAIN: None}
        truths: list[list[int]] | None = None
        timed: dict[str, list[RequestTrace]] = {}
        for task in missing:
            if self._is_main(task) and not timed:
                timed = self._timed(target, proposers, task)
            traces = {trace.request_id: trace for trace in timed.get(task.proposer, [])} if self._is_main(task) else {}
            ids = list(traces)
            rest = [request for request in self.requests if request.request_id not in traces]
            self.announce(_words(task), len(rest))
            settings = self._settings(task)
            for trace in decode(target, rest, proposers[task.proposer], settings, self._count):
                traces[trace.request_id] = trace
            ordered = [traces[request.request_id] for request in self.requests]
            found = None
            if task.temperature == 0:
                if truths is None:
                    self.announce(f"{task.dtype}: what generate() itself writes", len(self.requests))
                    truths = generate_texts(
                        target, self.requests, self.plan.max_new_tokens, self.plan.rows, self.progress
                    )
                texts = [trace.tokens for trace in ordered]
                found = divergences(target, self.requests, texts, truths)
            yield task, _run(task, ordered, found, ids)

    def _is_main(self, task: Task) -> bool:
        """Whether the task belongs to the main comparison, which is timed."""
        return task.temperature == 0 and task.gamma in (0, self.plan.gamma)

    def _timed(
        self, target: FrozenTarget, proposers: Mapping[str, Proposer | None], task: Task
    ) -> dict[str, list[RequestTrace]]:
        """Some requests one at a time, with every proposer in turn: the only traces whose seconds count.

        All of them come from one session: a ratio of seconds from before and after a crash would mean nothing.
        """
        chosen = spread(self.requests, self.plan.timed_requests)
        if not chosen:
            return {}
        name = f"timed-{task.dtype}"
        names = list(proposers)
        wanted = [request.request_id for request in chosen] * len(names)
        if (kept := self._kept(name, wanted)) is not None and kept[0]["proposers"] == names:
            traces = kept[1]
            return {key: list(traces[n * len(chosen) :][: len(chosen)]) for n, key in enumerate(names)}
        self.announce(f"{task.dtype}: {' · '.join(proposers)} in turn, timed", len(chosen) * len(proposers))
        settings = self._settings(Task("", task.dtype, 0.0, self.plan.gamma))
        found = interleaved(target, chosen, proposers, settings, self._count)
        self._keep(name, {"proposers": names}, [trace for key in names for trace in found[key]])
        return found

    def _settings(self, task: Task) -> DecodeSettings:
        top_p = self.plan.top_p if task.temperature > 0 else 1.0
        return DecodeSettings(
            gamma=task.gamma,
            sampling=Sampling(task.temperature, top_p=top_p),
            max_new_tokens=self.plan.max_new_tokens,
            rows=self.plan.rows,
            seed=self.plan.seed,
        )

    def _count(self, trace: RequestTrace) -> None:
        self.progress(len(trace.tokens))

    def _write(self, task: Task, run: Run) -> None:
        found = None if run.divergences is None else [asdict(divergence) for divergence in run.divergences]
        timed = [trace.request_id for trace in run.clock]
        self._keep(task.name, {**asdict(task), "divergences": found, "timed": timed}, run.traces)

    def _read(self, task: Task) -> Run | None:
        if (kept := self._kept(task.name, [request.request_id for request in self.requests])) is None:
            return None
        head, traces = kept
        found = head["divergences"]
        differing = None if found is None else [Divergence(**value) for value in found]
        return _run(task, traces, differing, head["timed"])

    def _keep(self, name: str, facts: Mapping[str, Any], traces: Sequence[RequestTrace]) -> None:
        head = {"key": self.key, **facts}
        write_atomic(self.folder / f"{name}.jsonl", json.dumps(head) + "\n" + dump_traces(traces))

    def _kept(self, name: str, wanted: Sequence[str]) -> tuple[dict[str, Any], Sequence[RequestTrace]] | None:
        """What an earlier session kept under this name, if it was the same evaluation and all of it is there.

        wanted: the requests of its traces in their order; what is cut off or damaged is simply made again.
        """
        path = self.folder / f"{name}.jsonl"
        if not path.is_file() or (kept := read_traces(path)) is None or kept[0].get("key") != self.key:
            return None
        return kept if [trace.request_id for trace in kept[1]] == list(wanted) else None


def _run(task: Task, traces: Sequence[RequestTrace], found: Sequence[Divergence] | None, timed: Sequence[str]) -> Run:
    clock = [trace for trace in traces if trace.request_id in timed]
    return Run(task.proposer, task.dtype, task.temperature, task.gamma, traces, found, clock)


def spread(requests: Sequence[Request], count: int) -> list[Request]:
    """`count` requests, taken in turn from every slice."""
    slices: dict[str, list[Request]] = {}
    for request in requests:
        slices.setdefault(request.slice, []).append(request)
    result: list[Request] = []
    while len(result) < min(count, len(requests)):
        for waiting in slices.values():
            if waiting and len(result) < count:
                result.append(waiting.pop(0))
    return result


def _words(task: Task) -> str:
    how = "greedy" if task.temperature == 0 else f"T = {task.temperature:g}"
    what = "plain decoding" if task.proposer == PLAIN else f"{task.proposer}, γ {task.gamma}"
    return f"{task.dtype}, {how}: {what}"
