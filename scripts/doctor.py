"""Are target and traffic fit, what will they take, and what would be changed? Exit code 1 when something is wrong.

python -m scripts.doctor experiment=demo
python -m scripts.doctor traffic=files traffic.path=logs/ doctor.conversations=100000
python -m scripts.doctor target=custom target.path=my/model traffic=jsonl traffic.path=prompts.jsonl
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf, open_dict

from scripts.common import find_target, load_target, script
from scripts.settings import build, check_node, generation_settings, storage_settings, train_settings

if TYPE_CHECKING:
    from heads.target import FrozenTarget
    from training.diagnosis import Section
    from training.estimate import HeadSizes
    from training.store import FeatureStore
    from training.traffic import Reading


def run(cfg: DictConfig) -> bool:
    """Print what is found; whether nothing is wrong. Nothing is written."""
    print("doctor    looking at the settings", flush=True)
    from rich.console import Console

    from scripts.doctor_page import show, show_findings

    console = Console(highlight=False)
    findings = []
    for section in examine(cfg, lambda part, doing: print(f"{part:<9} {doing}", flush=True)):
        show(console, section)
        findings += section.findings
    return show_findings(console, findings)


def examine(cfg: DictConfig, say: Callable[[str, str], None] = lambda part, doing: None) -> Iterator[Section]:
    """One section after the other, as far as the ones before it allow. say: told (part, what is done) before each that
    takes long."""
    from heads.artifact import UserError
    from scripts.doctor_run import look_at_run
    from training.diagnosis import Finding, Section
    from training.doctor import look_at_prompts, look_at_target, look_at_traffic
    from training.doctor_answers import look_at_answers, look_at_cost, workload
    from training.doctor_vocabulary import TokenUse, look_at_vocabulary
    from training.traffic import split

    settings, generation, training = build(cfg, "doctor"), generation_settings(cfg), train_settings(cfg)
    check_node(cfg, "traffic")
    find_target(cfg)
    say("traffic", f"reading {cfg.traffic.get('path') or 'the prompts'}")
    reading: Reading = build(cfg, "traffic")
    yield look_at_traffic(reading)
    say("target", f"loading {cfg.target.path}")
    target = load_target(cfg)
    section, encoder = look_at_target(target)
    yield section
    say("prompts", f"rendering those of up to {settings.sample:,} conversations")
    section, prompts = look_at_prompts(target, reading.conversations, generation, settings)
    yield section
    if not prompts.fitting:
        return
    store, section = collected(cfg, target)
    if section is not None:
        yield section
    say("answers", f"the target writes some, of up to {settings.answer_tokens} tokens")
    section, answered = look_at_answers(target, prompts, encoder, generation, settings, store)
    yield section
    say("vocabulary", "counting tokens")
    train, held_out = split(reading.conversations, reading.held_out)
    use = TokenUse.of(target, prompts, {item.id for item in held_out}, store)
    yield look_at_vocabulary(target, use, cfg.head.get("draft_vocab_size"))
    if (section := look_at_run(cfg, target)) is not None:
        yield section
    try:
        chosen = sizes_of(cfg, "the head", target)
    except UserError as error:
        yield Section("head", findings=(Finding(True, str(error)),))
        return
    say("cost", "measuring how fast the target is here")
    work, how = workload(prompts, generation, training, store, settings.conversations or len(train))
    heads = dict(every_head(cfg, target))
    yield look_at_cost(
        target,
        work,
        how,
        answered,
        heads,
        settings,
        features=None if store is not None or settings.conversations else Path(cfg.features_dir),
        chosen=chosen,
        storage=storage_settings(cfg),
    )


def collected(cfg: DictConfig, target: FrozenTarget) -> tuple[FeatureStore | None, Section | None]:
    """The features of the run, if there are any of this target; a section where they are of another one or
    in another number format."""
    from heads.artifact import MANIFEST
    from training.diagnosis import Finding, Section
    from training.store import FeatureStore

    if not (Path(cfg.features_dir) / MANIFEST).is_file():
        return None, None
    store = FeatureStore.open(cfg.features_dir)
    if store.manifest["target"] == target.fingerprint:
        began, now = store.manifest["dtype"], str(cfg.target.dtype)
        if began == now:
            return store, None
        sentence = (
            f"{cfg.features_dir} was collected in {began}, which goes on in {now} only under another name=; set "
            f"target.dtype={began}."
        )
        return store, Section("features", findings=(Finding(True, sentence),))
    told, now = store.manifest["target"], target.fingerprint
    other = ", ".join(sorted(key for key in now.keys() | told.keys() if told.get(key) != now.get(key)))
    sentence = (
        f"{cfg.features_dir} was collected from the target {told['name']}, which differs from {cfg.target.path} in its "
        f"{other}, so it is left out here and a training on it is refused; give that target, or another name=."
    )
    return None, Section("features", findings=(Finding(True, sentence),))


def every_head(cfg: DictConfig, target: FrozenTarget) -> Iterator[tuple[str, HeadSizes | None]]:
    """The sizes of each kind of head under conf/head, as its file has it; None where it is not for this target."""
    from heads.artifact import UserError

    for file in sorted(files("conf").joinpath("head").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            name, other = file.name.removesuffix(".yaml"), copy.deepcopy(cfg)
            with open_dict(other):
                other.head = OmegaConf.create(file.read_text())
            try:
                yield name, sizes_of(other, name, target)
            except UserError:
                yield name, None


def sizes_of(cfg: DictConfig, name: str, target: FrozenTarget) -> HeadSizes:
    """The sizes of the head of a config, built without memory; its vocabulary at most the target's. Raises UserError
    where this target has no such head."""
    import torch

    from heads.vocab import DraftVocabulary
    from training.estimate import HeadSizes

    width = min(cfg.head.get("draft_vocab_size") or target.vocab_size, target.vocab_size)
    vocab = DraftVocabulary(torch.arange(width), target.vocab_size)
    make = build(cfg, "head", _partial_=True)
    if cfg.head.from_target and not cfg.train.init_from:
        make.func.check_donor(target)
    with torch.device("meta"):
        head = make(sizes=make.func.sizes_of(target), vocab=vocab)
    return HeadSizes.of(name, head)


@script("doctor")
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.doctor`."""
    if not run(cfg):
        sys.exit(1)


if __name__ == "__main__":
    main()
