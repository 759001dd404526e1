"""The parts of scripts.bench that train in processes which take turns: growth with the sizes, and against a peer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from scripts.common import load_target
from scripts.settings import plain

if TYPE_CHECKING:
    from training.turns import Turn, Worker

EAGLE3 = "heads.eagle3.Eagle3Head"
GB = 1e9


def bench_train_growth(cfg: DictConfig) -> None:
    """Positions/s and memory at every length, draft vocabulary and depth of bench."""
    import torch

    from training.turns import Spread, in_turn

    where = f"{cfg.target.path}, one document, {torch.get_num_threads()} threads"
    print(f"bench     training {cfg.head._target_} for {where}", flush=True)
    vocab_size, _ = _sizes(cfg)
    for wanted in cfg.bench.vocabularies:
        for length in cfg.bench.lengths:
            with ExitStack() as stack:
                vocabulary = range(wanted or vocab_size)
                makers = [partial(_ours, cfg, depth, vocabulary, [length]) for depth in cfg.bench.depths]
                workers, told = _started(stack, makers)
                turns = list(zip(*in_turn(workers, cfg.bench.steps, cfg.bench.repeats), strict=True))
            for depth, facts, mine in zip(cfg.bench.depths, told, turns, strict=True):
                rate, cost = Spread.of([turn.rate for turn in mine]), Spread.of(_ratios(mine, turns[0]))
                trained = mine[-1].memory - facts["loaded"]
                print(
                    f"          vocabulary {_name(wanted, vocab_size)}, length {length:,}, {depth} passes: "
                    f"{rate.median:,.0f} positions/s ({rate.low:,.0f} … {rate.high:,.0f}), "
                    f"{cost.median:.2f}× the time of {cfg.bench.depths[0]} passes; {mine[-1].memory / GB:.2f} GB, "
                    f"{trained / GB:.2f} of them by training",
                    flush=True,
                )


def bench_train_peer(cfg: DictConfig) -> None:
    """Our EAGLE-3 and that of speculators, at every depth and draft vocabulary of bench, a turn each."""
    import torch

    from heads.artifact import UserError
    from training.turns import in_turn

    if cfg.head._target_ != EAGLE3:
        raise UserError(f"bench=train_peer compares EAGLE-3, not {cfg.head._target_}; choose head=eagle3.")
    lengths, (vocab_size, layers) = [int(cfg.bench.length)] * cfg.bench.documents, _sizes(cfg)
    print(
        f"bench     training EAGLE-3 for {cfg.target.path} on {sum(lengths):,} packed positions, all supervised, here "
        f"and in speculators, {torch.get_num_threads()} threads",
        flush=True,
    )
    for wanted in cfg.bench.vocabularies:
        for depth in cfg.bench.depths:
            with ExitStack() as stack:
                vocabulary = range(wanted or vocab_size)
                makers = [
                    partial(_theirs, cfg, depth, vocabulary, lengths, layers),  # first, as it is what may be missing
                    partial(_ours, cfg, depth, vocabulary, lengths),
                ]
                workers, told = _started(stack, makers)
                turns = list(zip(*in_turn(workers, cfg.bench.steps, cfg.bench.repeats), strict=True))
            print(f"          vocabulary {_name(wanted, vocab_size)}, {depth} passes, {cfg.train.mixed_precision}:")
            _print_against(told[::-1], turns[::-1])


def _started(stack: ExitStack, makers: Sequence[Callable[[], Worker]]) -> tuple[list[Worker], list[dict[str, Any]]]:
    """The workers and what they say of themselves; one warms up after the other, not against it."""
    workers, told = [], []
    for make in makers:
        workers.append(stack.enter_context(make()))
        told.append(workers[-1].ready())
    return workers, told


def _print_against(told: Sequence[dict[str, Any]], turns: Sequence[Sequence[Turn]]) -> None:
    """Ours first. The ratio of speeds is that of neighbouring turns."""
    from training.turns import Spread

    names = ("ours", f"speculators {told[1]['version']}")
    for name, facts, mine in zip(names, told, turns, strict=True):
        rate, most = Spread.of([turn.rate for turn in mine]), mine[-1].memory
        print(
            f"            {name}: {rate.median:,.0f} positions/s ({rate.low:,.0f} … {rate.high:,.0f}), "
            f"{most / GB:.2f} GB at most, {(most - facts['loaded']) / GB:.2f} of them by training "
            f"{facts['trained'] / 1e6:.1f} M parameters"
        )
    times, most = Spread.of(_ratios(turns[1], turns[0])), [mine[-1].memory for mine in turns]
    grown = [memory - facts["loaded"] for memory, facts in zip(most, told, strict=True)]
    share = Spread.of([turn.told["share"] for turn in turns[0]])
    print(
        f"            {times.median:.2f}× their speed ({times.low:.2f} … {times.high:.2f}), {most[0] / most[1]:.2f}× "
        f"their memory ({grown[0] / grown[1]:.2f}× of what training adds); {share.median:.0%} of the matmul peak "
        f"({share.low:.0%} … {share.high:.0%})",
        flush=True,
    )


def _ratios(long: Sequence[Turn], short: Sequence[Turn]) -> list[float]:
    """How often the one's time holds the other's, turn by turn."""
    return [a.seconds / b.seconds for a, b in zip(long, short, strict=True)]


def _name(wanted: int | None, vocab_size: int) -> str:
    return f"{vocab_size if wanted is None else wanted:,}"


def _sizes(cfg: DictConfig) -> tuple[int, int]:
    """The target's vocabulary and number of layers. UserError when a draft vocabulary of bench is larger."""
    from heads.artifact import UserError

    target = load_target(cfg)
    for wanted in cfg.bench.vocabularies:
        if wanted is not None and wanted > target.vocab_size:
            raise UserError(
                f"bench.vocabularies={plain(cfg.bench)['vocabularies']} has a draft vocabulary above the target's "
                f"{target.vocab_size}; give smaller ones, or null for all of it."
            )
    return target.vocab_size, target.num_layers


def _ours(cfg: DictConfig, depth: int, vocabulary: range, lengths: Sequence[int]) -> Worker:
    """A process that trains the head of the config with these passes and this draft vocabulary."""
    import torch

    from training.turns import Worker

    config: Any = OmegaConf.to_container(cfg, resolve=True)
    config["head"] |= {"depth": depth, "draft_vocab_size": len(vocabulary)}
    request = {"config": config, "lengths": list(lengths), "threads": torch.get_num_threads()}
    request["vocabulary"] = list(vocabulary)
    root = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "scripts.train_worker"]
    return Worker("The training process", command, request, {**os.environ, "PYTHONPATH": paths})


def _theirs(cfg: DictConfig, depth: int, vocabulary: range, lengths: Sequence[int], layers: int) -> Worker:
    """speculators with the same shapes, for a target of so many layers."""
    import torch

    from heads.eagle3 import default_taps
    from training import peer_driver
    from training.turns import Worker, isolated

    taps = plain(cfg.head)["taps"]
    request = {
        "target": str(Path(cfg.target.path).resolve()) if Path(cfg.target.path).exists() else cfg.target.path,
        "taps": taps if taps is not None else list(default_taps(layers)),
        "passes": depth,
        "vocabulary": list(vocabulary),
        "lengths": list(lengths),
        "precision": "bfloat16" if cfg.train.mixed_precision == "bf16" else "float32",
        "threads": torch.get_num_threads(),
        "seed": cfg.seed,
        **{name: bool(cfg.head[name]) for name in ("norm_before_residual", "fc_norm", "norm_output", "qk_norm")},
    }
    return Worker("speculators", [cfg.peer_python, str(peer_driver.__file__)], request, isolated())
