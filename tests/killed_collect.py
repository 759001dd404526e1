"""Collects in children that are killed at chosen and at random moments, then lets one finish. Not a test.

python -m tests.killed_collect <target> <traffic.jsonl> <folder>: writes <folder>/calm undisturbed and
<folder>/killed with interruptions, and prints how many children were killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from heads import artifact
from heads.base import FeatureNeeds
from heads.target import FrozenTarget
from training.collect import collect
from training.readers import read_files
from training.regenerate import Generation

RANDOM_KILLS = 10


def main(target_path: str, traffic_path: str, folder: Path) -> None:
    torch.set_num_threads(1)
    target = FrozenTarget.load(target_path, dtype="float32")
    conversations = read_files(traffic_path).conversations
    generation = Generation(temperature=0.8, batch_size=4, max_new_tokens=16, max_prompt_tokens=60)

    def work(place: Path) -> None:
        collect(
            target=target,
            conversations=conversations,
            folder=place,
            needs=FeatureNeeds((2, 4), True),
            generation=generation,
        )

    began = time.monotonic()
    assert wait(child(lambda: work(folder / "calm"))) == 0
    seconds = time.monotonic() - began
    killed = 0
    dice = random.Random(0)
    for write in range(3):  # just before and just after the rename of this many files
        for after in (False, True):
            killed += (
                wait(child(lambda write=write, after=after: dying(lambda: work(folder / "killed"), write, after))) != 0
            )
    for _ in range(RANDOM_KILLS):
        process = child(lambda: work(folder / "killed"))
        time.sleep(dice.uniform(0, seconds / 5))
        os.kill(process, signal.SIGKILL)
        killed += wait(process) != 0
    assert wait(child(lambda: work(folder / "killed"))) == 0
    print(killed)


def dying(work: Callable[[], None], writes: int, after: bool) -> None:
    """Do the work and be killed at the rename number `writes`."""
    rename, left = os.replace, [writes]

    def replace(source: str, goal: Path) -> None:
        if left[0] == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, goal)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    artifact.os.replace = replace
    work()


def child(work: Callable[[], None]) -> int:
    """Start a process that does the work and ends without tidying up."""
    process = os.fork()
    if process == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001  a child must never return into the parent's code
            os._exit(1)
        os._exit(0)
    return process


def wait(process: int) -> int:
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status in (0, -signal.SIGKILL), f"a child failed by itself: {status}"
    return status


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
