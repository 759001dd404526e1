"""The files under conf/accelerate, which accelerate reads and Hydra does not."""

from __future__ import annotations

import re
import shlex

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from tests import e2e

CONF = e2e.ROOT / "conf"
LAUNCHES = sorted(path.name for path in (CONF / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_is_one_that_accelerate_reads(name: str) -> None:
    """It has no key that accelerate does not know, and shows a command that names it."""
    path = CONF / "accelerate" / name
    how = load_config_from_file(str(path))
    assert how.mixed_precision == "no", "the loop's own is train.mixed_precision"
    assert (how.num_processes > 1) == (name != "one_gpu.yaml") and how.use_cpu == (name == "cpu.yaml")
    shown = re.search(
        rf"^#   accelerate launch --config_file conf/accelerate/{name} .*-m scripts.train (.*)$", path.read_text(), re.M
    )
    assert shown is not None
    e2e.config(*shlex.split(shown[1]))
