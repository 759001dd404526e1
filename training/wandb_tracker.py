"""Weights & Biases as a tracker, with the JSONL twin beside it.

It never stops a run: whatever W&B does, training goes on and the JSONL file has the same numbers.
"""

from __future__ import annotations

import logging
import netrc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from heads.artifact import UserError
from training.tracking import Evaluation, JsonlTracker

_SECONDS = 30.0  # how long W&B may take to begin; ten times that to finish sending

logger = logging.getLogger(__name__)

MODES = ("online", "offline", "disabled")


class WandbTracker:
    """Weights & Biases, with the JSONL twin.

    mode: online, offline or disabled; None asks WANDB_MODE, and without it records online when there is a
    login and offline otherwise. It never asks for one. The first failure of W&B is warned about and ends its
    part. about: as for the twin; upload_head: whether an evaluated head goes along as an artifact, with its numbers.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        about: Mapping[str, Any] | None = None,
        project: str = "draftsmith",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
        upload_head: bool = True,
    ) -> None:
        if mode not in (None, *MODES):
            raise UserError(f"tracking.mode={mode} is unknown; choose {', '.join(MODES)}, or null.")
        self.folder = Path(folder)
        self.twin = JsonlTracker(folder, about=about)
        self.about, self.upload_head = about, upload_head
        self._kept = self.twin.path  # where the numbers are in any case
        self.options: dict[str, Any] = {
            "project": project,
            "name": name,
            "entity": entity,
            "group": group,
            "tags": list(tags),
        }
        self.mode = mode
        self.run_id: str | None = None
        self._run: Any = None
        self._first_step = 0

    def open(self, *, step: int, run_id: str | None, config: Mapping[str, Any]) -> None:
        self.twin.open(step=step, run_id=run_id, config=config)
        self._start(run_id, config)

    def _start(self, run_id: str | None, config: Mapping[str, Any]) -> None:
        mode = self.mode or os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")
        if mode == "online" and self._begin("online", run_id, config):
            return
        self._begin("offline" if mode == "online" else mode, run_id, config)

    def _begin(self, mode: str, run_id: str | None, config: Mapping[str, Any]) -> bool:
        """Start or continue the W&B run; says whether that went well."""

        settings = {
            "silent": True,
            "console": "off",
            "mode": mode,
            "reinit": "create_new",
            "init_timeout": _SECONDS,
            "finish_timeout": 10 * _SECONDS,
        }

        def begin() -> None:
            import wandb  # slow, and optional at run time

            self._run = wandb.init(
                **self.options,
                dir=self.folder,
                id=run_id or os.environ.get("WANDB_RUN_ID"),  # which the agent of a sweep sets
                resume="allow",
                config={**dict(config), **({} if self.about is None else {"about": dict(self.about)})},
                settings=settings,
            )
            self.run_id = self._run.id
            # A continued online run already has the steps between the checkpoint and the crash.
            self._first_step = self._run.step

        if not self._try(begin, "could not begin" if mode != "online" else "could not begin online, trying offline"):
            return False
        where = self._run.url if mode == "online" else f"{self._run.dir}; `wandb sync` sends it later"
        logger.info("W&B records %s: %s", mode, where)
        return True

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.twin.log(step, numbers)
        if self._run is not None and step >= self._first_step:
            self._try(lambda: self._run.log(dict(numbers), step=step), "failed")

    def sync(self) -> None:
        self.twin.sync()

    def close(self, *, finished: bool) -> None:
        self.twin.close(finished=finished)
        if self._run is not None:
            self._try(lambda: self._run.finish(exit_code=0 if finished else 1), "could not finish")
            self._run = None

    def publish(self, evaluation: Evaluation, *, run_id: str | None, config: Mapping[str, Any]) -> None:
        self._kept = self.folder
        self._start(run_id, config)
        if self._run is not None and self._try(lambda: self._send(evaluation), "failed"):
            self._try(lambda: self._run.finish(exit_code=0), "could not finish")
            self._run = None

    def _send(self, evaluation: Evaluation) -> None:
        import wandb

        rows = evaluation.rows
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        pages = {"report/page": evaluation.page, "report/samples": evaluation.samples}
        shown = {name: wandb.Html(page, inject=False) for name, page in pages.items() if page}
        self._run.log({"report/results": table, **shown})
        self._run.summary.update({f"report/{name}": value for name, value in evaluation.numbers.items()})
        if self.upload_head and evaluation.files:
            facts = {**evaluation.facts, **evaluation.numbers}
            artifact = wandb.Artifact(f"{evaluation.head}-{self._run.id}", type="model", metadata=facts)
            for path in evaluation.files:  # the file itself is sent, so that no copy fills the disk of an offline run
                artifact.add_file(str(path), policy="immutable")
            self._run.log_artifact(artifact)

    def _try(self, action: Callable[[], object], what: str) -> bool:
        """Do something with W&B; a failure is warned about and drops the run."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever an optional service raises must not stop a run
            logger.warning("W&B %s (%s: %s); the numbers are in %s.", what, type(error).__name__, error, self._kept)
            self._run = None
            return False
        return True


def _logged_in() -> bool:
    """Whether W&B will find credentials without asking: an environment variable or a line in the netrc
    file.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    candidates = [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]
    for path in (Path(name).expanduser() for name in candidates if name):
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
