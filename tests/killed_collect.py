"""Collects in children that are killed at chosen and at random moments, then lets one finish. Not a test.

python -m tests.killed_collect <target> <traffic.jsonl> <folder> [<processes>]: writes <folder>/calm by one undisturbed
process and <folder>/killed with interruptions, and prints how many children were killed.

With several processes either all of a launch are killed, or one of them, whereupon the others have to end.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import accelerate  # noqa: F401  before the children, which all need it
import torch

from heads import artifact
from heads.artifact import UserError
from heads.base import FeatureNeeds
from heads.target import FrozenTarget
from training.collect import collect
from training.processes import Peers
from training.readers import read_files
from training.regenerate import Generation

RANDOM_KILLS = 10
DESERTED = 3  # the exit code of a child that another one has left alone


def main(target_path: str, traffic_path: str, folder: Path, processes: int = 1) -> None:
    torch.set_num_threads(1)
    target = FrozenTarget.load(target_path, dtype="float32")
    conversations = read_files(traffic_path).conversations
    generation = Generation(temperature=0.8, batch_size=4, max_new_tokens=16, max_prompt_tokens=60)

    def work(place: Path) -> None:
        peers = Peers.of_launch(cpu=True)
        (folder / f"met-{os.getpid()}").touch()
        collect(
            target=target,
            conversations=conversations,
            folder=place,
            needs=FeatureNeeds((2, 4), True),
            generation=generation,
            peers=peers,
        )

    assert wait(launch(lambda: work(folder / "calm"), 1)) == [0]
    began = time.monotonic()
    assert wait(launch(lambda: work(folder / "again"), processes)) == [0] * processes
    seconds = time.monotonic() - began
    killed = 0
    dice = random.Random(0)
    for write in range(3):  # just before and just after the rename of this many files
        for after in (False, True):
            moment = partial(dying, lambda: work(folder / "killed"), write, after)
            killed += any(wait(launch(moment, processes)))
    for _ in range(RANDOM_KILLS):
        children = launch(lambda: work(folder / "killed"), processes)
        time.sleep(dice.uniform(0, seconds / (5 if processes == 1 else 3)))  # several take their time to meet
        # A launcher ends those that have not met when one of them is gone; those that have do so by themselves.
        met = all((folder / f"met-{process}").exists() for process in children)
        for process in dice.choice((children, children[:1], children[-1:])) if met else children:
            os.kill(process, signal.SIGKILL)
        killed += any(wait(children))
    assert wait(launch(lambda: work(folder / "killed"), processes)) == [0] * processes
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


def launch(work: Callable[[], None], processes: int) -> list[int]:
    """Start so many processes that do the work together."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        child(work, {"RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true", **common})
        for rank in range(processes)
    ]


def child(work: Callable[[], None], environment: dict[str, str]) -> int:
    """Start a process that does the work and ends without tidying up."""
    process = os.fork()
    if process == 0:
        os.environ.update(environment)
        try:
            work()
        except UserError as error:
            deserted = "has ended before its work was done" in str(error)
            sys.stderr.write("" if deserted else f"{type(error).__name__}: {error}\n")
            os._exit(DESERTED if deserted else 1)
        except BaseException as error:  # noqa: BLE001  a child must never return into the parent's code
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(1)
        os._exit(0)
    return process


def wait(processes: Sequence[int]) -> list[int]:
    found = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    allowed = (0, -signal.SIGKILL, *([DESERTED] if -signal.SIGKILL in found else []))
    assert all(status in allowed for status in found), f"a child failed by itself: {found}"
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
