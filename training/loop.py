"""The training loop: read, step, log, evaluate, save; the same program for one process and for many.

It does not know which head it trains, where features come from, what an evaluation is, or how the finished
head is stored.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from heads.artifact import UserError, digest
from heads.base import Learner, TargetFeatures
from heads.compiled import start_compiling
from training.checkpoint import CheckpointFolder, owned, plain, put
from training.devices import deterministic, make_whole, open_accelerator, whole_state, wrap
from training.features import Batch, BatchPlan, FeatureSource, read_ahead
from training.interrupt import Interrupted, StopRequest
from training.optim import build_optimizer, build_scheduler, clip_gradients
from training.processes import processes_missing, raise_missing
from training.selection import BY, Selection
from training.settings import TrainResult, TrainSettings
from training.step import GradientStep, MetricSums, StepSums, Trainee, means
from training.tracking import Display, NullDisplay, NullTracker, Tracker, open_display, peak_memory

OnEval = Callable[[int, Mapping[str, Tensor]], Mapping[str, float] | None]
"""(step, the head's whole state) -> numbers."""


def train(
    head: Learner,
    source: FeatureSource,
    settings: TrainSettings,
    *,
    folder: str | Path,
    tracker: Tracker | None = None,
    on_eval: OnEval | None = None,
    identity: Mapping[str, Any] | None = None,
    stream: TextIO = sys.stderr,
) -> TrainResult:
    """Train `head` in place on the documents of `source`, continuing from the latest of `folder/checkpoints`.

    on_eval(step, state): called on the main process every eval_every steps, its numbers are logged as `eval/…`, and
    its `tokens_per_round` decides with keep_best which head comes out and with patience when the run ends;
    identity: what else makes two runs the same (target fingerprint, config); stream: where progress is shown.
    It trains where the head is, which is where what it borrows of the target must lie.
    Raises UserError for a checkpoint of another run and for a loss that is not finite, Interrupted (a
    SystemExit) after SIGTERM or SIGINT; the state is saved in both of the latter cases.
    """
    if processes_missing():
        raise_missing()
    run = _Run(head, source, settings, Path(folder), identity or {})
    state = run.checkpoints.read()
    if state is not None:
        run.checkpoints.load_weights(head)
        if state["finished"]:
            if (best := run.checkpoints.best()) is not None:
                put(best, head)
            return TrainResult(**state["record"]["result"])
    run.prepare(state)
    if run.main:
        run.tracker = tracker or NullTracker()
        run.display = open_display(stream, run.total, run.at.step, settings.log_every)
    result = None
    try:
        run.tracker.open(step=run.at.step, run_id=run.at.tracker_run, config=run.checkpoints.identity)
        with deterministic(run.accelerator.device), StopRequest() as request:
            result = run.go(request, on_eval)
    finally:
        run.display.close()
        run.tracker.close(finished=result is not None)
    if result is None or request.noted():
        number = request.signal or signal.SIGTERM  # another rank may be the one that was asked
        if run.main:
            stream.write(
                f"Stopped by {signal.Signals(number).name} after step {run.at.step} of {run.total}; "
                f"run the same command again to continue from {run.checkpoints.latest()}.\n"
            )
        raise Interrupted(128 + number)
    return result


def describe_head(head: Learner) -> dict[str, Any]:
    """What makes two heads the same before training: class, arguments, vocabulary, names and shapes."""
    return {
        "class": f"{type(head).__module__}.{type(head).__qualname__}",
        "arguments": head.arguments,
        "vocabulary": digest(head.vocab.ids_W.tolist()),
        "tensors": {name: list(tensor.shape) for name, tensor in owned(head).items()},
    }


@dataclass
class _Position:
    """How far the run is, as JSON values: the loop's own part of a checkpoint."""

    step: int = 0  # steps behind it
    epoch: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    window: dict[str, float] = field(default_factory=dict)  # global sums since the last log line
    metrics: dict[str, Any] = field(default_factory=dict)  # per-depth sums since then
    norm: float = 0.0  # of the last gradient, before clipping
    latest: dict[str, float] = field(default_factory=dict)  # the last log line
    selection: dict[str, Any] = field(default_factory=dict)
    tracker_run: str | None = None
    result: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Step:
    """One global batch and where it lies."""

    number: int
    epoch: float  # position after it
    batch: Batch


class _Run:
    """Everything that one call of `train` holds."""

    def __init__(
        self,
        head: Learner,
        source: FeatureSource,
        settings: TrainSettings,
        folder: Path,
        identity: Mapping[str, Any],
    ) -> None:
        self.head, self.source, self.settings = head, source, settings
        self.accelerator = open_accelerator(next(head.parameters()).device)
        self.main: bool = self.accelerator.is_main_process
        self.plan = BatchPlan(source.documents, settings.global_batch_tokens, settings.seed, settings.max_length)
        self.sizes = self.plan.sizes(settings.epochs, settings.max_steps)
        self.total = sum(self.sizes)
        head.to(self.accelerator.device).train()
        for parameter in head.parameters():
            if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()
        data = {"documents": len(self.plan.documents), "fingerprint": self.plan.fingerprint}
        self.checkpoints = CheckpointFolder(
            folder / "checkpoints",
            identity={"head": describe_head(head), "settings": settings.identity(), "data": data, **identity},
            keep=settings.keep,
            accelerator=self.accelerator,
        )
        self.tracker: Tracker = NullTracker()
        self.display: Display = NullDisplay()
        self.at = _Position()
        self.metrics = MetricSums()
        self.selection = Selection()
        self.best: dict[str, Tensor] | None = None  # its weights, on the main process
        self.resumed_from: int | None = None

    def prepare(self, state: dict[str, Any] | None) -> None:
        """Optimizer, schedule and wrapper, then the stored state where there is one."""
        settings = self.settings
        if settings.gradient_checkpointing:
            if self.head.recompute is None:
                raise UserError(
                    f"train.gradient_checkpointing=true: a {type(self.head).__name__} keeps nothing for its backward "
                    f"that it could compute again; set it to false."
                )
            self.head.recompute = True
        if settings.compile:
            if self.head.compiled is None:
                raise UserError(
                    f"train.compile=true: a {type(self.head).__name__} has nothing that is compiled; set it to false."
                )
            start_compiling()
            self.head.compiled = True
            if self.head.flex is not None:
                self.head.flex = self.accelerator.device.type == "cuda"
        several = self.accelerator.num_processes > 1
        trainee = Trainee(self.head, bf16=settings.mixed_precision == "bf16", distributed=several, mean=settings.mean)
        with warnings.catch_warnings():  # torch has a new name for the option, accelerate not yet
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            model = wrap(self.accelerator, trainee)
        self.optimizer = build_optimizer(self.head, settings.optim)
        self.scheduler = build_scheduler(self.optimizer, settings.optim, self.total)
        self.gradient = GradientStep(
            self.accelerator,
            model,
            trainee.trainable,
            accumulation=settings.accumulation,
            seed=settings.seed,
        )
        if state is not None:
            self.checkpoints.load_rest(state, self.optimizer, self.scheduler)
            self.at = _Position(**state["record"])
            self.metrics.add(self.at.metrics if self.main else {})
            self.selection = Selection(**self.at.selection)
            self.best = self.checkpoints.best() if self.main else None
            self.resumed_from = self.at.step

    def go(self, request: StopRequest, on_eval: OnEval | None) -> TrainResult | None:
        """All steps that are left; None when a signal ended them before the last one."""
        at, every = self.at, self.settings.save_every
        over = self._evaluate_if_due(on_eval)  # a signal may have come before it
        micro_batches = read_ahead(self._parts(), partial(self.plan.load, self.source), self.settings.read_ahead)
        with contextlib.closing(micro_batches):
            for step in () if over else self._steps(at.step):
                sums = self._take(step, micro_batches, request)
                if sums.stop and at.step < self.total:
                    self.save()
                    return None
                over = self._evaluate_if_due(on_eval)
                if over:
                    break
                if at.step < self.total and every and at.step % every == 0:
                    self.save()
        if at.window:
            self._log()
        return self._finish(over)

    def _take(self, step: _Step, micro_batches: Iterator[TargetFeatures | None], request: StopRequest) -> StepSums:
        """One step, and what is shown of it."""
        at, began = self.at, time.monotonic()
        sums = self.gradient(step.number, micro_batches, self.metrics, request.noted)
        self._apply(step, sums)
        self._count(step, sums, time.monotonic() - began)
        if at.step == self.total or at.step % self.settings.log_every == 0:
            self._log()
            self.display.update(at.step, at.latest)
        elif sums.count:
            self.display.update(at.step, {**at.latest, "loss": sums.loss / sums.count})
        return sums

    def _finish(self, stopped_early: bool) -> TrainResult:
        """Save the last state, and leave in the head the weights that come out."""
        result = replace(self._result(), stopped_early=stopped_early)
        self.at.result = asdict(result)
        self.save(finished=True)
        make_whole(self.head)
        if (best := self.checkpoints.best()) is not None:  # read back, so that all ranks have them
            put(best, self.head)
        return result

    def _steps(self, start: int) -> Iterator[_Step]:
        """The global batches from step `start` on."""
        first = 0
        for epoch, size in enumerate(self.sizes):
            if first + size > start:
                batches = self.plan.epoch(epoch)
                for index in range(max(0, start - first), size):
                    yield _Step(first + index, epoch + (index + 1) / len(batches), batches[index])
            first += size

    def _parts(self) -> Iterator[Batch]:
        """This rank's micro-batches in their order."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        for step in self._steps(self.at.step):
            yield from self.plan.split(step.batch, world * self.settings.accumulation)[rank::world]

    def _apply(self, step: _Step, sums: StepSums) -> None:
        """Let the gradient move the weights.

        A step without a supervised position moves the schedule only.
        """
        self.at.norm = 0.0
        if not math.isfinite(sums.loss):
            self._stop(step, f"the loss is {sums.loss}")
        if sums.count:
            norm = clip_gradients(self.gradient.trainable, self.settings.optim)
            if not math.isfinite(norm):
                self._stop(step, f"the norm of the gradient is {norm}")
            self.at.norm = norm
            self.optimizer.step()
        with warnings.catch_warnings():  # torch expects the optimizer's step first, also where it is skipped
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _stop(self, step: _Step, what: str) -> NoReturn:
        """End the run before the weights take harm."""
        path = self.save()
        ids = [ref.id for ref in step.batch]
        more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
        raise UserError(
            f"Step {step.number + 1}: {what} on the documents {', '.join(ids[:8])}{more}; the state from "
            f"before it is in {path}; lower optim.lr (now {self.settings.optim.lr}) or leave these documents "
            f"out, and train into another folder."
        )

    def _count(self, step: _Step, sums: StepSums, seconds: float) -> None:
        at = self.at
        at.step, at.epoch = step.number + 1, step.epoch
        at.tokens += sums.tokens
        at.seconds += seconds
        at.skipped += not sums.count
        more = {"loss": sums.loss, "count": sums.count, "tokens": sums.tokens, "seconds": seconds}
        at.window = {name: at.window.get(name, 0.0) + value for name, value in more.items()}

    def _log(self) -> None:
        """Write the means since the last line, and begin anew."""
        at, window = self.at, self.at.window
        numbers: dict[str, float] = {"epoch": at.epoch}
        if window["count"]:
            numbers["loss"] = window["loss"] / window["count"]
        for name, values in means(self.metrics.gather(keep=False)).items():
            numbers.update({f"{name}/{depth}": value for depth, value in enumerate(values, 1)})
        numbers |= {
            "lr": float(self.scheduler.get_last_lr()[0]),
            "grad_norm": at.norm,
            "tokens": at.tokens,
            "skipped_steps": at.skipped,
            "seconds": at.seconds,
            "tokens_per_second": window["tokens"] / max(window["seconds"], 1e-9),
            "memory_gb": peak_memory(self.accelerator.device) / 1e9,
        }
        at.latest, at.window = numbers, {}
        self.tracker.log(at.step, numbers)

    def _evaluate_if_due(self, on_eval: OnEval | None) -> bool:
        """Evaluate the head as it is after this step unless that was done; returns whether the run is over by it.

        Where the best head is kept, the last one is a candidate too.
        """
        settings, at = self.settings, self.at
        if on_eval is None or not settings.eval_every or at.step in (0, self.selection.evaluated):
            return False
        last = settings.keep_best and at.step == self.total
        if at.step % settings.eval_every and not last:
            return False
        self._evaluate(on_eval)
        over = [self.selection.is_over(settings.patience)]
        broadcast_object_list(over)
        return bool(over[0]) and at.step < self.total

    def _evaluate(self, on_eval: OnEval) -> None:
        """Call `on_eval` on the main process while the others wait."""
        state = whole_state(self.head)
        self.selection.evaluated = self.at.step
        if not self.main:
            return
        began = time.monotonic()
        self.head.eval()
        with torch.no_grad():
            numbers = on_eval(self.at.step, state) or {}
        self.head.train()
        seconds = time.monotonic() - began
        if self.selection.take(self.at.step, numbers.get(BY), seconds) and self.settings.keep_best:
            self.best = {name: plain(state[name]) for name in owned(self.head)}
        self.tracker.log(
            self.at.step, {f"eval/{name}": value for name, value in numbers.items()} | {"eval/seconds": seconds}
        )

    def save(self, *, finished: bool = False) -> Path:
        """Write a checkpoint of the state between two steps."""
        self.tracker.sync()
        self.metrics.gather(keep=self.main)
        self.at.metrics, self.at.tracker_run = self.metrics.sums, self.tracker.run_id
        self.at.selection = asdict(self.selection)
        record = asdict(self.at)
        return self.checkpoints.save(
            self.at.step, self.head, self.optimizer, self.scheduler, record, best=self.best, finished=finished
        )

    def _result(self) -> TrainResult:
        at = self.at
        metrics: dict[str, list[float | None]] = {}
        for name, value in at.latest.items():
            metric, slash, _ = name.partition("/")
            if slash:
                metrics.setdefault(metric, []).append(None if math.isnan(value) else value)
        return TrainResult(
            steps=at.step,
            epochs=at.epoch,
            loss=at.latest.get("loss", math.nan),
            metrics=metrics,
            seconds=at.seconds,
            tokens=at.tokens,
            tokens_per_second=at.tokens / max(at.seconds, 1e-9),
            skipped_steps=at.skipped,
            truncated_documents=self.plan.truncated,
            checkpoint=str(self.checkpoints.path(at.step)),
            resumed_from=self.resumed_from,
            evaluation_seconds=self.selection.seconds,
            chosen=self.selection.facts() if self.settings.keep_best else None,
        )
