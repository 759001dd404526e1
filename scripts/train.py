"""Features to a head; the same program for one process and for many.

python -m scripts.train name=mine head=eagle3 train.epochs=4
python -m scripts.train name=mine train.init_from=runs/theirs/head
python -m scripts.train name=code train.init_from=runs/mine/head 'train.lora={rank: 8, alpha: 16}'
accelerate launch --config_file conf/accelerate/multi_gpu.yaml -m scripts.train name=mine head=eagle3

SIGTERM and SIGINT, of which one process of a launch need be sent it, end the run after the step that is under way and
save its state; the exit code is then 143 or 130 (under a launcher its own, which is not 0), and the same command goes
on from there, with the same or another number of processes. A mistake of the user's is 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from scripts.common import build_head, is_main, load_target, open_tracker, script
from scripts.prompts import held_out_requests
from scripts.ranges import check_head
from scripts.settings import build, lora_settings, plain, train_settings

if TYPE_CHECKING:
    from torch import Tensor

    from heads.base import DraftHead
    from heads.checkpoint import AdapterOf
    from heads.target import FrozenTarget
    from heads.vocab import DraftVocabulary
    from training.loop import OnEval
    from training.settings import TrainResult, TrainSettings
    from training.store import FeatureStore

EVALUATED = 8  # held-out requests that train.eval_every decodes


def run(cfg: DictConfig) -> None:
    """Train into runs/<name>/head, continuing from its last checkpoint; a finished run is used as it is."""
    from heads.artifact import locked

    if is_main():
        print(f"train     {cfg.head._target_.rpartition('.')[2]} on {cfg.features_dir}", flush=True)
    settings, store = train_settings(cfg), open_features(cfg)
    # All processes of a launch are one trainer.
    with locked(Path(cfg.run_dir) / "head", "trains into") if is_main() else nullcontext():
        _train_on(cfg, store, settings)


def _train_on(cfg: DictConfig, store: FeatureStore, settings: TrainSettings) -> None:
    from training.live import feature_source
    from training.loop import train

    folder, main = Path(cfg.run_dir), is_main()
    say = print if main else (lambda *text, **options: None)
    check_head(cfg, build(cfg, "head", _partial_=True))
    say(f"          loading the target {cfg.target.path}", flush=True)
    target = load_target(cfg)
    check_origin(cfg, store, target)
    donor = donor_of(cfg, target)
    vocab = choose_vocab(cfg, store, target) if donor is None else donor.vocab
    head = build_head(cfg, target, vocab, donor)
    parameters = sum(parameter.numel() for parameter in head.parameters())
    adapter = put_adapter(cfg, head)
    check_something_is_left(store, settings.max_length)
    on_eval = None if settings.eval_every is None else evaluation(cfg, head, target, main)
    # Without its layers the target's memory is the training's own.
    source = feature_source(store, head.needs, target, keep_layers=on_eval is not None and main)
    head.attach(target.weights)  # where the layers are given back, what it borrows has moved
    learning = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
    more = f" and an adapter of {learning / 1e6:.2f} M, which learns alone" if adapter else ""
    covered = vocab.coverage(store.token_counts().supervised_V)
    say(f"          {parameters / 1e6:.1f} M parameters{more}", flush=True)
    say(f"          the draft vocabulary covers {covered:.1%} of the answers that it was chosen from", flush=True)
    result = train(
        head,
        source,
        settings,
        folder=folder / "head",
        tracker=open_tracker(cfg, folder / "head"),
        on_eval=on_eval,
        identity={"features": source.identity, "target": target.fingerprint, **origin_of(cfg)},
        stream=sys.stderr,
    )
    if main:
        facts = {
            "draft_vocabulary": {"size": len(vocab.ids_W), "coverage_of_train_answers": covered},
            "parameters": parameters,
            **({"adapter_parameters": learning} if adapter else {}),
            **origin_of(cfg),
        }
        keep_head(cfg, head, target.fingerprint, result, facts, adapter)
        for line in outcome(result):
            say(f"          {line}")
        say(f"          {result.steps} steps, {result.tokens_per_second:,.0f} tokens/s; it is in {folder / 'head'}")


def outcome(result: TrainResult) -> list[str]:
    """What the evaluations of a run decided and cost, in lines to print."""
    lines = []
    if result.chosen is not None:
        chosen = result.chosen
        last = "nothing" if chosen["last"] is None else f"{chosen['last']:.3f}"
        lines.append(
            f"the best of {chosen['evaluations']} evaluations is kept: {chosen['value']:.3f} tokens per round after "
            f"step {chosen['step']} (the last one: {last})"
        )
    if result.stopped_early:
        lines.append(f"train.patience ended the run after step {result.steps}")
    if result.evaluation_seconds:
        share = result.evaluation_seconds / (result.evaluation_seconds + result.seconds)
        lines.append(f"evaluations took {result.evaluation_seconds:,.0f} s, {share:.0%} of the time with the steps")
    return lines


def evaluation(cfg: DictConfig, head: DraftHead, target: FrozenTarget, main: bool) -> OnEval:
    """A short greedy decoding of some held-out requests with the head as it is, and by depth the decoder's acceptance,
    the teacher-forced one on the same texts, and their gap (eval.teacher); main: whether this process does it.

    Raises UserError when there is nothing to decode, or the head cannot draft as much.
    """
    from eval.acceptance import measure
    from eval.decode import DecodeSettings, decode
    from eval.suite import spread
    from eval.teacher import count_teacher_forced, teacher_gap
    from heads.artifact import UserError
    from heads.checkpoint import build_head, class_path, fill
    from heads.lora import merged_state

    plan = build(cfg, "eval")
    head.check_depth(plan.gamma)
    target.check_decodes()
    longest = target.max_length - plan.max_new_tokens
    fitting = [request for request in held_out_requests(cfg) if len(request.prompt) <= longest] if main else []
    requests = spread(fitting, EVALUATED)
    if main and not requests:
        raise UserError("There is no held-out request that train.eval_every could decode; set train.eval_every=null.")
    settings = DecodeSettings(gamma=plan.gamma, max_new_tokens=plan.max_new_tokens, rows=EVALUATED, seed=cfg.seed)

    def on_eval(step: int, state: Mapping[str, Tensor]) -> dict[str, float]:
        draft = build_head(class_path(head), head.arguments, head.vocab, source="the head in training")
        fill(draft, merged_state(head, state), source="the head in training")
        draft.to(device=target.device, dtype=target.dtype).eval()  # as it is served; the one in training stays as it is
        draft.attach(target.weights)
        traces = decode(target, requests, draft, settings)
        tau = measure(traces, gamma=plan.gamma, resamples=0).tokens_per_round.value
        taught = count_teacher_forced(target, draft, requests, traces)
        gap = teacher_gap(taught, traces, gamma=plan.gamma, resamples=0)
        sides = {"acceptance": gap.decoder, "teacher_forced": gap.teacher, "gap": gap.gap}
        numbers = {"tokens_per_round": tau}
        for name, by_depth in sides.items():
            numbers |= {f"{name}/{depth}": one.value for depth, one in enumerate(by_depth, 1)}
        return {name: value for name, value in numbers.items() if value is not None}

    return on_eval


def open_features(cfg: DictConfig) -> FeatureStore:
    """The store of the config, its files compared with their checksums where train.verify says so."""
    from training.remote import open_store

    def tell(size: int) -> None:
        print(f"          checking {size / 1e9:.1f} GB of features; train.verify=false skips that", flush=True)

    store = open_store(cfg.features_dir, cfg.features_cache)
    if cfg.train.verify and is_main():  # the others wait for it where they first meet
        store.verify(tell)
    return store


def donor_of(cfg: DictConfig, target: FrozenTarget) -> DraftHead | None:
    """The head of train.init_from, which must be of this target."""
    from heads.checkpoint import load_head

    return load_head(cfg.train.init_from, target=target) if cfg.train.init_from else None


def put_adapter(cfg: DictConfig, head: DraftHead) -> AdapterOf | None:
    """Put the adapter of train.lora on the head of train.init_from, which then learns alone; None without one."""
    from heads.checkpoint import AdapterOf, read_facts
    from heads.lora import add_adapter

    if (lora := lora_settings(cfg)) is None:
        return None
    add_adapter(head, lora)
    return AdapterOf(Path(cfg.train.init_from), str(read_facts(cfg.train.init_from)["sha256"]), lora)


def origin_of(cfg: DictConfig) -> dict[str, Any]:
    """What identifies the head of train.init_from, if there is one, and the adapter on it."""
    from heads.checkpoint import read_facts

    if not cfg.train.init_from:
        return {}
    lora = lora_settings(cfg)
    own = {"init_from": str(read_facts(cfg.train.init_from)["sha256"])}
    return own if lora is None else {**own, "lora": asdict(lora)}


def check_origin(cfg: DictConfig, store: FeatureStore, target: FrozenTarget) -> None:
    """Raises UserError when the features are those of another target."""
    from heads.artifact import UserError

    if store.manifest["target"] != target.fingerprint:
        raise UserError(
            f"{store.folder} was collected from the target {store.manifest['target']['name']}, not from "
            f"{cfg.target.path}; collect again under another name=."
        )


def check_something_is_left(store: FeatureStore, max_length: int | None) -> None:
    """Raises UserError when train.max_length cuts every document before there is anything to learn."""
    from heads.artifact import UserError

    # The first position that a head predicts is 2: it reads a state and the token after it.
    needed = min((max(ref.answer_start, 2) + 1 for ref in store.documents), default=0)
    if max_length is not None and max_length < needed:
        raise UserError(
            f"train.max_length={max_length} cuts every document before its answer, so nothing is left to learn; give "
            f"at least train.max_length={needed}, or null to cut nothing."
        )


def keep_head(
    cfg: DictConfig,
    head: DraftHead,
    fingerprint: Mapping[str, str],
    result: TrainResult,
    more: Mapping[str, Any],
    adapter: AdapterOf | None = None,
) -> None:
    """Write the trained head with the numbers of its training into runs/<name>/head, unless it is there already; of one
    with an adapter the adapter alone."""
    from heads.artifact import write_manifest
    from heads.checkpoint import save_head

    folder = Path(cfg.run_dir) / "head"
    numbers: dict[str, Any] = {
        "steps": result.steps,
        "epochs": result.epochs,
        "tokens": result.tokens,
        "loss": result.loss,
        "seconds": round(result.seconds, 1),
        "tokens_per_second": round(result.tokens_per_second, 1),
        "teacher_forced": result.metrics,
        "chosen": result.chosen,
        "stopped_early": result.stopped_early,
        "evaluation_seconds": round(result.evaluation_seconds, 1),
        **more,
    }
    if not is_saved(folder, numbers):
        saved = save_head(head, folder, target_fingerprint=fingerprint, adapter=adapter, extra=numbers)
        write_manifest(folder, "head", {**saved, "target": dict(fingerprint), **numbers}, config=plain(cfg))


def is_saved(folder: Path, numbers: Mapping[str, Any]) -> bool:
    """Whether the head of these numbers is in the folder, so that a repeated command leaves it alone."""
    from heads.artifact import MANIFEST, read_manifest, sha256_file
    from heads.checkpoint import FACTS, TENSORS

    if not all((folder / name).is_file() for name in (MANIFEST, FACTS, TENSORS)):
        return False
    manifest = read_manifest(folder, "head")
    same = all(json.dumps(manifest.get(name)) == json.dumps(value) for name, value in numbers.items())
    return same and sha256_file(folder / TENSORS) == manifest["sha256"]


def choose_vocab(cfg: DictConfig, store: FeatureStore, target: Any) -> DraftVocabulary:
    """The most frequent tokens of the answers, then of the prompts, the end tokens always among them."""
    from heads.vocab import DraftVocabulary

    size = cfg.head.draft_vocab_size
    if size is None or size == target.vocab_size:
        return DraftVocabulary.identity(target.vocab_size)
    return DraftVocabulary.choose(store.token_counts().ranks(), size, special_ids=target.eos_token_ids)


@script(launched=True, one_folder=True)
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.train`."""
    from training.processes import start_missing_processes

    start_missing_processes()
    run(cfg)


if __name__ == "__main__":
    main()
