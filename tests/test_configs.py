"""Every YAML under conf/ composes and builds; every documented setting changes something that can be seen."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint

from eval.suite import tasks
from heads.target import FrozenTarget
from heads.vocab import DraftVocabulary
from scripts import collect, evaluate, train
from scripts.common import build_head, head_needs, load_target
from scripts.settings import build, check_all
from tests import e2e
from tests.tiny import features_of
from training.step import GradientStep
from training.store import FeatureStore

CONF = e2e.ROOT / "conf"
FILES = sorted(path.relative_to(CONF).as_posix() for path in CONF.rglob("*.yaml") if path.parent.name != "accelerate")
COUNT = 61
OPTIONS = [(file.partition("/")[0], Path(file).stem) for file in FILES if "/" in file]
GROUPS = sorted({group for group, _ in OPTIONS} - {"experiment"})
ROOTS = {"bench": "bench"}  # groups that another file than config.yaml brings in
HEADS = [name for group, name in OPTIONS if group == "head"]


def test_all_files_are_found() -> None:
    """A file that is added or lost changes this number, and must be looked at here."""
    assert len(FILES) == COUNT == len(OPTIONS) + len([file for file in FILES if "/" not in file])


@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_every_option_composes_and_its_values_are_right(
    group: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and types are those of what it builds."""
    monkeypatch.chdir(tmp_path)
    Path("predictions.jsonl").write_text('{"id": "a", "prediction": "b"}\n')
    needed = {
        **{"custom": ["target.path=some/folder"], "draft_model": ["rivals.draft_model.path=some/folder"]},
        "given_prediction": ["rivals.given_prediction.path=predictions.jsonl"],
        **dict.fromkeys([name for kind, name in OPTIONS if kind == "experiment"], ["target.path=some/folder"]),
        **dict.fromkeys(("hydra_mlp", "mtp_blocks", "mtp_native"), ["stages=[collect,train,evaluate]"]),  # no server
    }.get(name, [])
    chosen = f"{group}=[{name}]" if group == "rival" else f"{group}={name}"
    cfg = e2e.config(chosen, *needed, name=ROOTS.get(group, "config"))
    if group != "experiment":
        node = cfg.rivals[name] if group == "rival" else cfg[group]
        assert set(OmegaConf.load(CONF / group / f"{name}.yaml")) <= set(node) | {"defaults"}
    check_all(cfg)


def test_the_other_roots_compose() -> None:
    for name in (Path(file).stem for file in FILES if "/" not in file):
        assert set(e2e.config(name=name)) >= {"target", "traffic", "head", "train", "eval"}


@pytest.mark.parametrize("name", [name for group, name in OPTIONS if group == "experiment"])
def test_an_experiment_opens_with_its_command(name: str) -> None:
    """The first line is Hydra's, the second the command; it composes and the run bears its name."""
    lines = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    words = shlex.split(lines[1].removeprefix("# "))
    assert words[:2] == ["python", "-m"] and find_spec(words[2]) is not None and words[2].startswith("scripts.")
    assert f"experiment={name}" in words[3:]
    for job in e2e.jobs(words[3:]):
        cfg = e2e.config(*job)
        assert cfg.name == name
        check_all(cfg)


def test_the_comparison_names_every_head() -> None:
    """But the one that continues a module of the target's own, and the one that is `mtp` several times over."""
    words = shlex.split((CONF / "experiment/compare.yaml").read_text().splitlines()[1].removeprefix("# "))
    left_out = {"head=mtp_blocks", "head=mtp_native"}
    assert {job[-1] for job in e2e.jobs(words[3:])} == {f"head={name}" for name in HEADS} - left_out


@pytest.mark.parametrize("file", FILES)
def test_comments_name_only_commands_that_compose(file: str) -> None:
    """Every `python -m scripts.…` and every `Use:` in a config file is a command line that Hydra takes."""
    text = (CONF / file).read_text()
    found = re.findall(r"^# +(?:python -m scripts\.(\w+)|Use:) (.*?)(?: {2,}#.*)?$", text, re.MULTILINE)
    if file.startswith(("traffic/", "experiment/", "bench/", "rival/")):
        assert found, "no command shows how to use it"
    for module, line in found:
        own = [Path(root).stem for root in FILES if "/" not in root]
        name = module if module in own else "config"
        for job in e2e.jobs(shlex.split(line)):
            e2e.config(*job, name=name)


@pytest.mark.parametrize("group", GROUPS)
def test_unknown_keys_are_refused(group: str) -> None:
    with pytest.raises(ConfigCompositionException, match="nonsense"):
        e2e.config(f"{group}.nonsense=1", name=ROOTS.get(group, "config"))


def test_unknown_keys_are_refused_at_the_top_and_in_sections() -> None:
    for key in ("nonsense", "train.nonsense", "generation.nonsense", "rivals.prompt_lookup.nonsense"):
        with pytest.raises(ConfigCompositionException, match="nonsense"):
            e2e.config(f"{key}=1")


# ---- every head -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(finished: e2e.Finished, tmp_path_factory: pytest.TempPathFactory) -> e2e.Place:
    """The tiny target with a dozen conversations, for runs in this process."""
    folder = tmp_path_factory.mktemp("small")
    return e2e.Place(finished.place.target, e2e.write_rows(folder / "t.jsonl", e2e.conversations(24)), folder)


def overrides(place: e2e.Place, *more: str) -> list[str]:
    """Short answers and a few steps, otherwise what the files say."""
    quick = (
        *("name=t", "traffic.held_out=0.2", "target.dtype=float32", "head.draft_vocab_size=64"),
        *("generation.max_new_tokens=10", "generation.batch_size=8", "train.global_batch_tokens=128"),
        *("train.max_steps=4", "train.log_every=1", "train.save_every=2", "train.mixed_precision=no"),
    )
    return [*e2e.uses(place.target, place.traffic), *quick, *more]


@pytest.mark.parametrize("name", HEADS)
def test_every_head_trains_two_steps(small: e2e.Place, name: str, tmp_path: Path, in_folder: Callable) -> None:
    place = in_folder(small, tmp_path)
    cfg = e2e.config(*overrides(small, f"head={name}", "train.max_steps=2"))
    collect.run(cfg)
    train.run(cfg)
    assert [step for step, _ in e2e.losses(place)] == [1, 2]
    assert all(0 < loss < 100 for _, loss in e2e.losses(place))
    assert e2e.manifest(place, "head")["name"] == name


@pytest.fixture
def in_folder(monkeypatch: pytest.MonkeyPatch) -> Callable[[e2e.Place, Path], e2e.Place]:
    """The same target and traffic in another working directory, which becomes this process's."""

    def go(place: e2e.Place, folder: Path) -> e2e.Place:
        monkeypatch.chdir(folder)
        return place.at(folder)

    return go


# ---- every documented setting -----------------------------------------------------------------------------------

Seen = dict[str, Any]


def documented(file: str, section: str) -> set[str]:
    """The settings of one section of a file, or of the whole file."""
    values = OmegaConf.to_container(OmegaConf.load(CONF / file))
    return set(values[section] if section else values) - {"_target_", "_convert_", "_partial_"}


@pytest.fixture(scope="module")
def done(small: e2e.Place, tmp_path_factory: pytest.TempPathFactory) -> e2e.Place:
    """A run with features, a head and a report, in this process."""
    place = small.at(tmp_path_factory.mktemp("done"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place.cwd)
        cfg = e2e.config(*overrides(place))
        collect.run(cfg)
        train.run(cfg)
    return place


def collected(place: e2e.Place) -> Seen:
    """What collecting has made."""
    folder = place.run / "features"
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    return {
        "texts": [row["text"] for row in answers],
        "longest": max(row["tokens"] for row in answers),
        "shards": len(e2e.manifest(place, "features")["shards"]),
        "refused": len((folder / "quarantine.jsonl").read_text().splitlines()),
    }


GENERATION: dict[str, tuple[list[str], list[str], str]] = {
    # setting: (of the one run, of the other, what differs)
    "temperature": ([], ["generation.temperature=1.0"], "texts"),
    "top_p": (["generation.temperature=1.0"], ["generation.temperature=1.0", "generation.top_p=0.1"], "texts"),
    "max_new_tokens": ([], ["generation.max_new_tokens=4"], "longest"),
    "max_prompt_tokens": ([], ["generation.max_prompt_tokens=9"], "refused"),
    "batch_size": ([], ["generation.batch_size=3"], "shards"),
}


@pytest.mark.parametrize("setting", GENERATION)
def test_generation(small: e2e.Place, tmp_path: Path, in_folder: Callable, setting: str) -> None:
    first, second, what = GENERATION[setting]
    seen = []
    for name, more in (("one", first), ("two", second)):
        place = in_folder(small, small.at(tmp_path / name).cwd)
        collect.run(e2e.config(*overrides(small, *more)))
        seen.append(collected(place))
    assert seen[0][what] != seen[1][what]


def trained(done: e2e.Place, folder: Path, in_folder: Callable, *more: str) -> Seen:
    """What a short training leaves."""
    place = in_folder(done, folder)
    for stage in ("traffic", "features"):
        shutil.copytree(done.run / stage, place.run / stage)
    train.run(e2e.config(*overrides(place, *(word.replace("HEAD", str(done.run / "head")) for word in more))))
    states = sorted((place.run / "head/checkpoints").glob("step-*/state.json"))
    result = json.loads(states[-1].read_text())["record"]["result"]
    weights = load_file(place.run / "head/head.safetensors")
    return {
        "weights": torch.cat([tensor.double().flatten() for tensor in weights.values()]).tolist(),
        "lines": len(e2e.metrics(place)),
        "checkpoints": [path.parent.name for path in states],
        "rates": [row["lr"] for row in e2e.metrics(place) if "lr" in row],
        "losses": e2e.losses(place),
        "evaluations": [row["eval/tokens_per_round"] for row in e2e.metrics(place) if "eval/tokens_per_round" in row],
        **{name: result[name] for name in ("steps", "tokens", "truncated_documents", "chosen")},
    }


TRAIN = {
    "init_from": (["train.init_from=HEAD"], "losses"),
    "epochs": (["train.max_steps=null", "train.epochs=2"], "steps"),
    "max_steps": (["train.max_steps=3"], "steps"),
    "global_batch_tokens": (["train.global_batch_tokens=64"], "tokens"),
    "max_length": (["train.max_length=12"], "truncated_documents"),
    "accumulation": (["train.accumulation=2"], "micro_batches"),
    "mean": (["train.mean=sequence"], "weights"),
    "gradient_checkpointing": (["train.gradient_checkpointing=true"], "recomputed"),
    "mixed_precision": (["train.mixed_precision=bf16"], "weights"),
    "save_every": (["train.save_every=1", "train.keep=9"], "checkpoints"),
    "keep": (["train.save_every=1", "train.keep=3"], "checkpoints"),
    "log_every": (["train.log_every=2"], "lines"),
    "eval_every": (["train.eval_every=2"], "evaluations"),
    "keep_best": (["train.eval_every=1", "train.keep_best=true"], "chosen"),
    "patience": (["train.eval_every=1", "train.patience=1"], "steps"),
    "verify": (["train.verify=false"], "verified"),
}
OPTIM = {
    "name": (["optim=muon"], "weights"),
    "lr": (["optim.lr=3e-3"], "weights"),
    "betas": (["optim.betas=[0.5,0.9]"], "weights"),
    "eps": (["optim.eps=1e-3"], "weights"),
    "weight_decay": (["optim.weight_decay=0.5"], "weights"),
    "lr_multipliers": (["+optim.lr_multipliers.lm_head=0.5"], "weights"),
    "schedule": (["optim.schedule=constant"], "rates"),
    "warmup_share": (["optim.warmup_share=0.5"], "rates"),
    "clip_norm": (["optim.clip_norm=0.01", "optim.eps=1e-2"], "weights"),
    "clip_value": (["optim.clip_norm=null", "optim.clip_value=1e-4", "optim.eps=1e-2"], "weights"),
}
MUON = {"momentum": (["optim=muon", "optim.momentum=0.5"], "weights")}
BASE = {
    **dict.fromkeys(("clip_norm", "clip_value"), ["optim.eps=1e-2"]),  # where Adam's own scale would hide it
    **dict.fromkeys(("keep_best", "patience"), ["train.eval_every=1"]),
    "momentum": ["optim=muon"],
}


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, ...], Seen]:
    """What the runs to compare with have left, each made once."""
    return {}


@pytest.mark.parametrize("setting", [*TRAIN, *OPTIM, *MUON])
def test_training(
    done: e2e.Place,
    known: dict[tuple[str, ...], Seen],
    tmp_path: Path,
    in_folder: Callable,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
) -> None:
    more, what = {**TRAIN, **OPTIM, **MUON}[setting]
    calls: list[int] = []
    verified: list[Path] = []
    recomputed: list[Any] = []
    backward = GradientStep._backward

    def counted(self: GradientStep, step: int, index: int, features: Any) -> Any:
        calls.append(index)
        return backward(self, step, index, features)

    def again(function: Callable, *inputs: Any, **how: Any) -> Any:
        recomputed.append(function)
        return checkpoint(function, *inputs, **how)

    monkeypatch.setattr(GradientStep, "_backward", counted)
    monkeypatch.setattr("heads.recurrent.checkpoint", again)
    monkeypatch.setattr(FeatureStore, "verify", lambda self, large: verified.append(self.folder))
    base = BASE.get(setting, [])
    for added in (base, more):
        if tuple(added) not in known:
            calls.clear()
            verified.clear()
            recomputed.clear()
            known[tuple(added)] = trained(done, done.at(tmp_path / str(len(known))).cwd, in_folder, *added)
            known[tuple(added)] |= {
                "micro_batches": len(calls),
                "verified": len(verified),
                "recomputed": len(recomputed),
            }
    assert known[tuple(base)][what] != known[tuple(more)][what]


@pytest.mark.parametrize(("more", "gone"), [((), True), (("train.eval_every=2",), False)])
def test_the_layers_of_the_target_go_before_training(
    done: e2e.Place,
    tmp_path: Path,
    in_folder: Callable,
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
    gone: bool,
) -> None:
    """They are a burden on every device; only what decodes in between needs them."""
    place, layers = in_folder(done, done.at(tmp_path / "new").cwd), []

    def loaded(cfg: DictConfig) -> FrozenTarget:
        target = load_target(cfg)
        layers.append(weakref.ref(target.model.base_model.layers[0]))
        return target

    def looked_at(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"gone: {layers[0]() is None}")

    for stage in ("traffic", "features"):
        shutil.copytree(done.run / stage, place.run / stage)
    monkeypatch.setattr(train, "load_target", loaded)
    monkeypatch.setattr("training.loop.train", looked_at)
    with pytest.raises(RuntimeError, match=f"gone: {gone}"):
        train.run(e2e.config(*overrides(place, *more)))


EVERY_HEAD = {
    "depth": ["head.depth=2"],
    "decay": ["head.decay=0.5"],
    "loss": ["head.loss=tv"],
    "eta": ["head.loss=lk_lambda", "head.eta=1"],
    "draft_vocab_size": ["head.draft_vocab_size=32"],
    "from_target": ["head.from_target=false"],
}
STACKED = EVERY_HEAD | {
    "from_target": ["head.projection=own", "head.from_target=false"],
    "blocks": ["head.blocks=2"],
    "projection": ["head.projection=own"],
}
HEAD = {
    "eagle": EVERY_HEAD
    | {
        "feature_weight": ["head.feature_weight=0.5"],
        "token_weight": ["head.token_weight=1"],
        "noise": ["head.noise=0.2"],
    },
    "eagle3": EVERY_HEAD
    | {
        "taps": ["head.taps=[1,2,3]"],
        "norm_before_residual": ["head.norm_before_residual=true"],
        "fc_norm": ["head.fc_norm=true"],
        "norm_output": ["head.norm_output=true"],
        "qk_norm": ["head.qk_norm=true"],
    },
    "hydra_mlp": STACKED | {"prefix_attention": ["head.prefix_attention=true"]},
    "medusa": STACKED,
    "mtp": EVERY_HEAD | {"final_norm": ["head.final_norm=false"], "qkv_bias": ["head.qkv_bias=true"]},
    "mtp_blocks": EVERY_HEAD,
    "mtp_native": EVERY_HEAD | {"norm_output": ["head.norm_output=false"], "zero_first": ["head.zero_first=true"]},
}
HEAD_BASE = {"eta": ["head.loss=lk_lambda"]}
STACKED_BASE = HEAD_BASE | {"from_target": ["head.projection=own"]}


@pytest.fixture(scope="module")
def target(small: e2e.Place) -> FrozenTarget:
    return load_target(e2e.config(*overrides(small)))


@pytest.mark.parametrize(("name", "setting"), [(name, setting) for name in HEAD for setting in HEAD[name]])
def test_head(small: e2e.Place, target: FrozenTarget, name: str, setting: str) -> None:
    """The loss on the same documents, and with them all it depends on, and how many parameters there are: blocks that
    start as the identity show only there."""

    def seen(cfg: DictConfig) -> tuple[float, int]:
        taps = head_needs(cfg, target).taps
        documents = [([5, 9, 12, 6, 30, 31, 32, 33, 34, 35], [False] * 4 + [True] * 6)]
        vocab = DraftVocabulary.choose(torch.ones(target.vocab_size), cfg.head.draft_vocab_size)
        head = build_head(cfg, target, vocab)
        return head.loss(features_of(target, documents, taps)).loss.item(), sum(p.numel() for p in head.parameters())

    base = [f"head={name}", *(STACKED_BASE if name in ("medusa", "hydra_mlp") else HEAD_BASE).get(setting, [])]
    first = seen(e2e.config(*overrides(small, *base)))
    assert seen(e2e.config(*overrides(small, *base))) == first
    assert seen(e2e.config(*overrides(small, f"head={name}", *HEAD[name][setting]))) != first


EVAL = {
    "gamma": ["eval.gamma=3"],
    "gammas": ["eval.gammas=[1,2]"],
    "temperatures": ["eval.temperatures=[0.0]"],
    "dtypes": ["eval.dtypes=[float32]"],
}


@pytest.mark.parametrize("setting", EVAL)
def test_which_parts_an_evaluation_has(setting: str) -> None:
    plans = [build(e2e.config(*more), "eval") for more in ([], EVAL[setting])]
    assert tasks(plans[0], ["head"]) != tasks(plans[1], ["head"])


DECODING = {
    "max_new_tokens": (["eval.max_new_tokens=6"], "tokens"),
    "top_p": (["eval.top_p=0.05"], "tokens"),
    "rows": (["eval.rows=2"], "tokens"),  # draws are made for the rows of a batch together
    "timed_requests": (["eval.timed_requests=1"], "timed"),
    "tree": (["eval.tree={top_k:2,nodes:4}"], "files"),
}


def decoded(done: e2e.Place, folder: Path, in_folder: Callable, *more: str) -> Seen:
    """What a small evaluation leaves."""
    few = ("eval.dtypes=[float32]", "eval.gammas=[]", "eval.max_new_tokens=8", "eval.timed_requests=2")
    place = in_folder(done, folder)
    for stage in ("traffic", "head"):
        shutil.copytree(done.run / stage, place.run / stage)
    evaluate.run(e2e.config(*overrides(place, *few, *more)))
    files = {path.name: path.read_text().splitlines() for path in (place.run / "report/traces").iterdir()}
    sampled = [json.loads(line)["tokens"] for line in files["eagle3-float32-T1-g4.jsonl"][1:]]
    timed = len(json.loads(files["eagle3-float32-T0-g4.jsonl"][0])["timed"])
    return {"tokens": sampled, "timed": timed, "files": sorted(files)}


@pytest.mark.parametrize("setting", DECODING)
def test_how_an_evaluation_decodes(
    done: e2e.Place, known: dict[tuple[str, ...], Seen], tmp_path: Path, in_folder: Callable, setting: str
) -> None:
    more, what = DECODING[setting]
    if ("decoded",) not in known:
        known["decoded",] = decoded(done, done.at(tmp_path / "one").cwd, in_folder)
    assert known["decoded",][what] != decoded(done, done.at(tmp_path / "two").cwd, in_folder, *more)[what]


def test_top_level(done: e2e.Place, tmp_path: Path, in_folder: Callable) -> None:
    """name and run_dir say where, head_dir which head, seed how things are drawn."""
    assert e2e.config("name=x").run_dir == "runs/x" and e2e.config("name=x").head_dir == "runs/x/head"
    place = in_folder(done, tmp_path)
    collect.run(e2e.config(*overrides(place, "run_dir=elsewhere")))
    assert (tmp_path / "elsewhere/features/manifest.json").is_file() and not (tmp_path / "runs").exists()
    evaluate.run(
        e2e.config(
            *overrides(place, "run_dir=elsewhere", f"head_dir={done.run / 'head'}", "eval.dtypes=[float32]"),
            *("eval.gammas=[]", "eval.temperatures=[0.0]", "eval.max_new_tokens=6", "eval.timed_requests=0"),
        )
    )
    report = json.loads((tmp_path / "elsewhere/report/report.json").read_text())
    assert report["head"]["sha256"] == e2e.manifest(done, "head")["sha256"]
    seeds = [trained(done, done.at(tmp_path / seed).cwd, in_folder, f"seed={seed}") for seed in ("0", "1")]
    assert seeds[0]["losses"] != seeds[1]["losses"]


def test_every_documented_setting_has_its_test() -> None:
    """A setting that is added to one of these files must be shown to do something here."""
    assert documented("config.yaml", "generation") == {*GENERATION, "answers"}  # in test_several_answers
    assert documented("config.yaml", "train") == {*TRAIN, "lora", "compile"}  # in test_lora, test_compile
    assert documented("optim/adamw.yaml", "") == set(OPTIM)
    assert documented("optim/muon.yaml", "") == {"defaults", "name", *MUON}
    for name in HEADS:
        assert documented(f"head/{name}.yaml", "") == set(HEAD[name])
    assert documented("eval/default.yaml", "") == {*EVAL, *DECODING}
    # What rivals holds is tested in test_proposers, push in test_hub.
    top = {"name", "run_dir", "head_dir", "seed", "rivals", "push"}
    top |= {"features_cache", "verify", "server", "serve_python"}  # in test_{store_tools,logged,api,extracted}
    shared = {"traffic_dir", "features_dir", "stages", "collect"}  # in test_compare
    assert documented("config.yaml", "") == top | shared | {"defaults", "hydra", "generation", "train"}
    assert OmegaConf.is_config(e2e.config())
