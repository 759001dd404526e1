"""What Hydra is kept from writing in a sweep. It knows nothing of the jobs."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, read_write


class Unrecorded(Callback):
    """Sends multirun.yaml, which Hydra always writes, to a folder that is gone when the first job begins."""

    folder: TemporaryDirectory[str] | None = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self.folder = TemporaryDirectory(prefix="draftsmith-")
        with read_write(config):
            config.hydra.sweep.dir = self.folder.name

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        if self.folder is not None:
            self.folder.cleanup()
