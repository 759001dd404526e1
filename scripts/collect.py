"""Traffic to features: split the prompts, let the target answer those for training, keep its states.

python -m scripts.collect experiment=quick
python -m scripts.collect name=mine traffic=files traffic.path=logs/ generation.temperature=0.7
python -m scripts.collect target=custom target.path=my/model traffic=jsonl traffic.path=prompts.jsonl name=mine
python -m scripts.collect name=mine traffic=files traffic.path=logs/ collect.answers=logged
python -m scripts.collect name=mine verify=true
python -m scripts.collect name=mine collect.engine=openai collect.url=http://localhost:8000/v1
python -m scripts.collect name=mine traffic=files traffic.path=logs/ collect.answers=logged collect.features=vllm
accelerate launch --num_processes 8 -m scripts.collect name=mine
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from scripts.common import CRASHED, find_target, head_needs, is_main, launched_peers, load_target, script
from scripts.ranges import check_head, check_target
from scripts.serving import extraction_settings, states_reader
from scripts.settings import (
    build,
    check_node,
    generation_settings,
    plain,
    server_settings,
    storage_settings,
    train_settings,
)

if TYPE_CHECKING:
    from heads.base import FeatureNeeds
    from heads.target import FrozenTarget
    from training.processes import Peers
    from training.served import AnswerServer

HOW = {
    "openai": "{url} answers; the states come from one pass of {reader} over its answers, in {dtype}",
    "regenerate": "the target answers in {dtype}",
    "logged": "the answers are those of the logs, off-policy unless this target wrote them; its states by {reader} in "
    "{dtype}",
}
READERS = {"transformers": "the target", "vllm": "vLLM"}
KEPT = {"stored": "", "online": "; the states are not kept, training computes them"}


def run(cfg: DictConfig) -> None:
    """Fill traffic_dir and features_dir, as one of the processes of a launch or alone; what is finished is used as it
    is."""
    if is_main():
        print(f"collect   into {cfg.features_dir}", flush=True)
    from heads.artifact import MANIFEST, UserError
    from heads.foreign import check_interpreter
    from training.remote import is_remote
    from training.traffic import write_traffic

    if is_remote(cfg.features_dir):
        raise UserError(
            f"features_dir={cfg.features_dir} cannot be filled in place; collect into a folder, then "
            f"`python -m scripts.store upload={cfg.features_dir}`."
        )
    server_settings(cfg)  # refuses what would fail after the prompts have been read
    storage_settings(cfg)
    generation_settings(cfg)
    train_settings(cfg)
    check_node(cfg, "traffic")
    find_target(cfg)
    reads = extraction_settings(cfg)
    if reads is not None and not (Path(cfg.features_dir) / MANIFEST).is_file():
        check_interpreter(reads.python)
    check_head(cfg, build(cfg, "head", _partial_=True))
    peers = launched_peers(cfg)
    if peers.main:
        print(f"traffic   reading the prompts into {cfg.traffic_dir}", flush=True)
    with peers.step():
        if peers.main:
            show_account(write_traffic(cfg.traffic_dir, build(cfg, "traffic"), config=plain(cfg)), cfg.traffic_dir)
    fill_features(cfg, peers)


def fill_features(cfg: DictConfig, peers: Peers) -> None:
    """Fill features_dir out of traffic_dir."""
    from heads.artifact import locked
    from training.collect import collect
    from training.traffic import load_traffic

    features, storage, generation = Path(cfg.features_dir), storage_settings(cfg), generation_settings(cfg)
    say = partial(print, flush=True) if peers.main else (lambda text: None)
    with ExitStack() as stack:
        with peers.step():
            traffic = load_traffic(cfg.traffic_dir)
            say(f"          {len(traffic.train)} conversations to train on, {len(traffic.held_out)} held out")
            say(f"target    loading {cfg.target.path}")
            target = load_target(cfg)
            check_target(cfg, target)
            needs = collected_needs(cfg, target)
            if peers.main:  # for all: together they are one collector
                stack.enter_context(locked(features, "collects into"))
        server = answer_server(cfg, target, peers.rank)
        reader = states_reader(cfg, peers.rank)
        how = HOW["openai" if server else cfg.collect.answers].format(
            dtype=cfg.target.dtype, url=cfg.collect.url, reader=READERS[cfg.collect.features]
        )
        say(f"features  {how}{KEPT[storage.states]}")
        manifest = collect(
            target=target,
            conversations=traffic.train,
            folder=features,
            needs=needs,
            generation=generation,
            answers=cfg.collect.answers,
            storage=storage,
            verified=cfg.collect.verify,
            peers=peers,
            server=server,
            reader=reader,
            config=plain(cfg),
        )
    if server is not None and server.counts:  # of this process
        say(f"          {', '.join(f'{what}: {count:,}' for what, count in server.counts.most_common())}")
    if manifest.get("cut_off"):
        say(cut_off(cfg, manifest))
    say(
        f"          {manifest['documents']} answers, {manifest['supervised_tokens']:,} tokens to learn from "
        f"({manifest['tokens']:,} with prompts)\n{'':10}in {features}"
    )


def cut_off(cfg: DictConfig, manifest: Mapping[str, Any]) -> str:
    """What becomes of the answers that do not end with an end token of the target, and what to do about them."""
    count = f"{manifest['cut_off']} of {manifest['documents']}"
    told = f"{'':10}{count} answers were cut off: the head learns from them as they are,\n{'':10}without an end"
    if cfg.collect.answers == "logged":
        return f"{told}; if the logs cut them off, that is how they were served"
    longer = 2 * cfg.generation.max_new_tokens
    return (
        f"{told}; more of them end with generation.max_new_tokens={longer} (now {cfg.generation.max_new_tokens}),\n"
        f"{'':10}under another name="
    )


def answer_server(cfg: DictConfig, target: FrozenTarget, rank: int) -> AnswerServer | None:
    """What answers in place of the target here, where the config says so; each process has a journal of its own."""
    from training.served import AnswerServer

    settings = server_settings(cfg)
    if settings is None:
        return None
    journal = Path(cfg.features_dir) / f"replies-{rank:03d}.jsonl"
    return AnswerServer(settings, target=target, generation=generation_settings(cfg), journal=journal)


def check(cfg: DictConfig) -> None:
    """Compare the features with their checksums; where they are damaged say so and exit with 1."""
    from training.store import DamagedStore, verify

    try:
        manifest = verify(cfg.features_dir, lambda size: print(f"          reading {size / 1e9:.1f} GB", flush=True))
    except DamagedStore as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(CRASHED)
    print(f"features  all {len(manifest['shards'])} shards of {cfg.features_dir} are as they were written", flush=True)


def show_account(manifest: Mapping[str, Any], folder: str) -> None:
    """What became of the rows: a line for the formats that were chosen, and a table where not all were kept."""
    from rich.console import Console
    from rich.table import Column, Table

    rows, formats = manifest["rows"], manifest["reader"].get("formats", {})
    for name, files in formats.items():
        print(f"          {files} {'file' if files == 1 else 'files'} read as {name}", flush=True)
    if rows["kept"] == rows["read"]:
        return
    table = Table(Column(), Column(justify="right"), box=None, padding=(0, 0, 0, 10), show_header=False)
    table.add_row("read", f"{rows['read']:,}")
    table.add_row("kept", f"{rows['kept']:,}")
    for reason, count in manifest["quarantined"].items():
        table.add_row(f"set aside: {reason}", f"{count:,}")
    if rows["over_limit"]:
        table.add_row("over the limit of their slice", f"{rows['over_limit']:,}")
    Console().print(table)
    if rows["quarantined"]:
        print(f"          what was set aside is in {Path(folder) / 'quarantine.jsonl'}", flush=True)


def collected_needs(cfg: DictConfig, target: FrozenTarget) -> FeatureNeeds:
    """What the head of the config needs, and the further taps of collect.taps."""
    from dataclasses import replace

    needs: FeatureNeeds = head_needs(cfg, target)
    return replace(needs, taps=tuple(sorted({*needs.taps, *cfg.collect.taps})))


@script(launched=True)
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.collect`."""
    from training.processes import start_missing_processes

    if cfg.verify:
        if is_main():
            check(cfg)
        return
    start_missing_processes()
    run(cfg)


if __name__ == "__main__":
    main()
