"""Speed, measured in one run against what it is compared with. Never a pass or fail; the ratios are the result.

python -m scripts.bench bench=train head=eagle3
python -m scripts.bench bench=train_growth head=eagle3
python -m scripts.bench bench=train_peer peer_python=.venv-peer/bin/python
python -m scripts.bench bench=decode name=demo
python -m scripts.bench bench=peers name=demo
python -m scripts.bench bench=collect name=demo
python -m scripts.bench bench=features name=demo serve_python=.venv-serve/bin/python
python -m scripts.bench bench=cost name=demo
python -m scripts.bench bench=prediction name=demo
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from scripts.common import build_head, load_target, script
from scripts.costs import bench_cost, bench_prediction
from scripts.settings import build, check_value, generation_settings, plain
from scripts.train_turns import bench_train_growth, bench_train_peer

# Every setting of conf/bench/*.yaml: its type, and the least that it, or each value of a list, may be.
SETTINGS: dict[str, tuple[Any, int | None]] = {
    "kind": (str, None),
    "dtype": (str | None, None),
    "documents": (int, 1),
    "length": (int, 3),
    "repeats": (int, 1),
    "requests": (int, 1),
    "max_ngram": (int, 1),
    "draft_layers": (int, 1),
    "batches": (list[int], 1),
    "steps": (int, 1),
    "depths": (list[int], 1),
    "lengths": (list[int], 3),
    "vocabularies": (list[int | None], 1),
    "contexts": (list[int], 1),
    "gammas": (list[int], 1),
    "dtypes": (list[str], None),
    "least": (float, 0),
}
_FROM_ZERO = {"prediction": ("gammas",)}  # γ 0, plain decoding, is among what is predicted


def run(cfg: DictConfig) -> None:
    """The measurement that bench= names."""
    kinds = {"train": bench_train, "decode": bench_decode, "peers": bench_peers}
    kinds |= {"collect": bench_collect, "features": bench_features}
    kinds |= {"cost": bench_cost, "prediction": bench_prediction}
    kinds |= {"train_growth": bench_train_growth, "train_peer": bench_train_peer}
    check_settings(cfg, list(kinds))
    kinds[cfg.bench.kind](cfg)


def check_settings(cfg: DictConfig, kinds: Sequence[str]) -> None:
    """Raises UserError on a setting of bench that is unknown, of the wrong type or too small."""
    from heads.artifact import UserError
    from heads.target import DTYPES

    check_value("peer_python", cfg.peer_python, str)
    check_value("bench.kind", cfg.bench.kind, str)  # decides what the others may be
    if (kind := cfg.bench.kind) not in kinds:
        raise UserError(f"bench.kind={kind} is unknown; choose one of {', '.join(kinds)}.")
    for name, value in plain(cfg.bench).items():
        if name not in SETTINGS:
            raise UserError(f"There is no setting bench.{name}; there are {', '.join(sorted(SETTINGS))}.")
        hint, least = SETTINGS[name]
        check_value(f"bench.{name}", value, hint)
        if name in _FROM_ZERO.get(cfg.bench.kind, ()):
            least = 0
        values = value if isinstance(value, list) else [value]
        if least is not None and (not values or min(one for one in (*values, least) if one is not None) < least):
            what = "some whole numbers, each" if isinstance(value, list) else "a whole number"
            raise UserError(f"bench.{name}={value} is not possible; give bench.{name} {what} ≥ {least}.")
    if unknown := [one for one in cfg.bench.get("dtypes", ()) if one not in DTYPES]:
        raise UserError(f"bench.dtypes has {unknown[0]}, which is unknown; choose from {', '.join(DTYPES)}.")
    if (dtype := cfg.bench.get("dtype")) not in (*DTYPES, None):
        raise UserError(f"bench.dtype={dtype} is unknown; choose one of {', '.join(DTYPES)}, null.")


def bench_train(cfg: DictConfig) -> None:
    """Tokens/s, memory and share of the matmul peak of training the config's head on the config's target."""
    import torch

    from heads.vocab import DraftVocabulary
    from training.bench import made_up_features, train_speed

    print(
        f"bench     training {cfg.head._target_} for {cfg.target.path}, {torch.get_num_threads()} threads", flush=True
    )
    target = load_target(cfg)
    size = cfg.head.draft_vocab_size or target.vocab_size
    vocab = DraftVocabulary.choose(torch.arange(target.vocab_size, 0, -1), min(size, target.vocab_size))
    head = build_head(cfg, target, vocab)
    target.drop_layers()  # only what the head borrows is needed; the memory is the training's own
    head.attach(target.weights)
    lengths = [cfg.bench.length] * cfg.bench.documents
    features = made_up_features(head, hidden_size=target.hidden_size, lengths=lengths).to(target.device)
    speed = train_speed(head, features, bf16=cfg.train.mixed_precision == "bf16", repeats=cfg.bench.repeats)
    low, high = speed.spread
    print(
        f"          {speed.tokens_per_second:,.0f} positions/s ({low:,.0f} … {high:,.0f}), "
        f"{speed.supervised:.0%} supervised"
    )
    print(
        f"          {speed.flops / 1e9:,.0f} GFLOP a step of {len(features.ids_T):,} positions, "
        f"optimizer included in the time"
    )
    print(f"          {speed.share:.0%} of the matmul peak measured in turn ({speed.peak / 1e9:,.0f} GFLOP/s at best)")
    print(f"          {speed.memory / 1e9:.2f} GB of memory at most")


def _scratch(cfg: DictConfig) -> tempfile.TemporaryDirectory[str]:
    """A folder on the disk of the run's artifacts, whose speed is measured too."""
    Path(cfg.run_dir).mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=cfg.run_dir, prefix=".bench-")


def bench_collect(cfg: DictConfig) -> None:
    """Collecting against bare forwards, and answers in batches against one prompt at a time."""
    from scripts.collect import collected_needs
    from scripts.prompts import train_requests
    from training.collect_bench import Pair, collect_speed

    print(f"bench     collecting from {cfg.target.path} in {cfg.target.dtype}, each side in turn", flush=True)
    prompts = [request.prompt for request in train_requests(cfg, cfg.bench.requests)]
    target, generation = load_target(cfg), generation_settings(cfg)
    with _scratch(cfg) as folder:
        found = collect_speed(
            target,
            prompts,
            needs=collected_needs(cfg, target),
            generation=generation,
            folder=folder,
            repeats=cfg.bench.repeats,
        )

    def line(pair: Pair, own: str, other: str) -> None:
        (rate, peer), (ratio, low, high) = pair.rates, pair.ratio
        print(f"          {own}: {rate:,.0f} tokens/s, {other} {peer:,.0f} = {ratio:.2f}× ({low:.2f} … {high:.2f})")

    print(f"          {len(prompts)} prompts in batches of {generation.batch_size}, {cfg.bench.repeats} repeats")
    line(found.states, f"collected, with the store ({found.states.tokens[0]:,} positions)", "the bare forward")
    line(found.answers, f"answers with their states ({found.answers.tokens[0]:,} tokens)", "generate at batch 1")


def bench_features(cfg: DictConfig) -> None:
    """The states of stored documents by vLLM against those by the target in this process."""
    from scripts.serving import extraction_settings
    from training.extracted import ExtractedStates
    from training.features_bench import compare, reference, stored_documents
    from training.store import FeatureStore

    store, bench = FeatureStore.open(cfg.features_dir), cfg.bench
    documents, taps, batch = stored_documents(store, bench.documents), store.needs.taps, cfg.generation.batch_size
    print(f"bench     states of {len(documents)} documents of {store.folder}, by vLLM and here in turn", flush=True)
    logged = OmegaConf.merge(cfg, {"collect": {"features": "vllm", "answers": "logged", "states": "stored"}})
    truth = reference(load_target(cfg, "float32"), documents, taps, batch)
    for dtype in bench.dtypes:
        target = load_target(cfg, dtype)
        with (
            _scratch(cfg) as folder,
            ExtractedStates(extraction_settings(logged), folder=folder) as reader,
        ):
            exact = None if dtype == "float32" else truth
            how = {"taps": taps, "batch": batch, "repeats": bench.repeats, "least": bench.least, "truth": exact}
            found = compare(target, reader, documents, **how)
        (theirs, ours), (ratio, low, high) = found.speed.rates, found.speed.ratio
        print(
            f"          {dtype}: vLLM {reader.version} {theirs:,.0f} tokens/s, here {ours:,.0f} = {ratio:.2f}× "
            f"({low:.2f} … {high:.2f}), after {reader.load_seconds:.0f} s of loading; tokens equal in "
            f"{found.same_tokens}/{len(documents)} documents; log-sum-exps differ by at most {found.lse:.4f}",
            flush=True,
        )
        pairs = {"vLLM, here": found.likeness, "vLLM, float32": found.vllm, "here, float32": found.here}
        for title, sides in pairs.items():
            for name, one in sides.items():
                (document, position, token), below = one.place, f"{one.below}/{one.count:,} below {bench.least},"
                print(
                    f"            {title}, boundary {name}: cosine ≥ {one.lowest:.5f}, median {one.median:.6f}, "
                    f"{below} lowest: document {document}, position {position}, token {token}"
                )


def bench_decode(cfg: DictConfig) -> None:
    """Plain decoding against the head at some γ, one request at a time and in turn."""
    from dataclasses import replace

    from eval.acceptance import measure
    from eval.bench import interleaved
    from eval.decode import Clock, DecodeSettings, decode
    from eval.suite import spread
    from heads.checkpoint import load_head
    from scripts.drafters import plan_tree, proposers
    from scripts.prompts import held_out_requests

    head_dir = Path(cfg.head_dir)
    print(f"bench     decoding with {head_dir} at batch 1, in turn with plain decoding", flush=True)
    load_head(head_dir).check_depth(max(cfg.bench.gammas, default=0), "bench.gammas")
    requests = spread(held_out_requests(cfg), cfg.bench.requests)
    plan = build(cfg, "eval")
    tree = plan_tree(cfg, plan.tree, "eval.tree", max(cfg.bench.gammas, default=1))
    for dtype in plan.dtypes:
        target = load_target(cfg, dtype)
        *_, head = proposers("head", head_dir, target, tree).values()  # its tree, where there is one
        for gamma in cfg.bench.gammas:
            settings = DecodeSettings(gamma=gamma, max_new_tokens=plan.max_new_tokens, seed=cfg.seed)
            traces = interleaved(target, requests, {"head": head, "none": None}, replace(settings, rows=1))
            decode(target, requests, head, replace(settings, rows=1), clock=(clock := Clock()))
            found = measure(traces["head"], gamma=gamma, plain=traces["none"])
            rates = {
                name: sum(t.decoded_tokens for t in ts) / sum(t.decoding_seconds for t in ts)
                for name, ts in traces.items()
            }
            speedup = found.speedup
            interval = "" if speedup is None or speedup.low is None else f" [{speedup.low:.2f}, {speedup.high:.2f}]"
            print(
                f"          {dtype}, γ {gamma}: {rates['head']:.1f} against {rates['none']:.1f} tokens/s = "
                f"{rates['head'] / rates['none']:.2f}×{interval}, {found.tokens_per_round.value:.2f} tokens a round; "
                f"{clock.loop_share:.1%} of the time is the loop's own",
                flush=True,
            )


def bench_peers(cfg: DictConfig) -> None:
    """Our loop against transformers' assisted generation with the same drafts, one request at a time and in turn."""
    from eval.decode import DecodeSettings
    from eval.peers import compare, drafts, first_layers
    from eval.suite import spread
    from heads.artifact import UserError
    from scripts.prompts import held_out_requests

    print("bench     the same drafts in our loop and in transformers' assisted generation, batch 1", flush=True)
    requests, plan = spread(held_out_requests(cfg), cfg.bench.requests), build(cfg, "eval")
    if not requests:
        raise UserError("bench.requests and the held-out traffic leave nothing to decode; raise traffic.held_out.")
    settings = DecodeSettings(gamma=plan.gamma, max_new_tokens=plan.max_new_tokens)
    for dtype in plan.dtypes:
        target = load_target(cfg, dtype)
        draft = first_layers(target, cfg.bench.draft_layers)
        for name, (proposer, options) in drafts(draft, target, plan.gamma, cfg.bench.max_ngram).items():
            found = compare(target, requests, proposer, options, settings)
            (ours, theirs), (ratio, low, high) = found.tokens_per_round, found.speed
            interval = "" if low is None else f" [{low:.2f}, {high:.2f}]"
            equal = len(requests) - len(found.different_rounds)
            print(
                f"          {dtype}, {name}, γ {plan.gamma}: {ours:.3f} tokens a round, theirs {theirs:.3f}; rounds "
                f"equal on {equal}/{len(requests)}, texts on {found.same_texts}; {ratio:.2f}× their speed{interval}",
                flush=True,
            )
            for one in found.different_rounds:
                why = "same text" if one.tokens == one.peer_tokens else "another text"
                print(f"            {one.request}: {one.rounds} rounds, theirs {one.peer_rounds} ({why})", flush=True)


@script("bench")
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.bench`."""
    run(cfg)


if __name__ == "__main__":
    main()
