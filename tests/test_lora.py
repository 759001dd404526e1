"""A LoRA adapter on a head: it reaches what the forward uses, is kept alone, and loads as a head like any other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file

from heads.artifact import UserError, sealed
from heads.base import DraftHead, TargetFeatures
from heads.checkpoint import FACTS, TENSORS, AdapterOf, copy_head, load_head, read_facts, save_head
from heads.lora import LoraSettings, adaptable, adapter_state, add_adapter, merge, merged_state
from heads.target import FrozenTarget
from heads.vocab import DraftVocabulary
from scripts import collect, evaluate, export, train
from scripts.common import build_head
from tests import e2e
from tests.test_head_checkpoint import FINGERPRINT, tiny_head
from tests.tiny import bring_module, features_of, save_tiny

HEADS = sorted(path.stem for path in (e2e.ROOT / "conf" / "head").glob("*.yaml"))
LORA = LoraSettings(rank=2, alpha=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return FrozenTarget.load(bring_module(save_tiny(tmp_path_factory.mktemp("lora"))), dtype="float64")


@pytest.fixture(scope="module")
def features(target: FrozenTarget) -> TargetFeatures:
    ids = torch.randint(8, 90, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    return features_of(target, [(ids, [False] * 6 + [True] * 18)], (1, 3, 6))


def made(name: str, target: FrozenTarget, *more: str) -> DraftHead:
    """A head of the config in double precision, none of whose weights is zero."""
    taps = ["head.taps=[1,3,6]"] if name == "eagle3" else []
    cfg = e2e.config(f"head={name}", *taps, "head.draft_vocab_size=64", *more)
    head = build_head(cfg, target, DraftVocabulary(torch.arange(2, 66), target.vocab_size)).double()
    if "noise" in head.arguments:
        head.noise = 0.0
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return head


def stir(head: DraftHead, seed: int = 0) -> None:
    """Give the adapter weights as training might."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            assert ".lora_" in name, f"{name} is not the adapter's"
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.3)


def told(head: DraftHead, features: TargetFeatures) -> torch.Tensor:
    torch.manual_seed(0)
    return head.loss(features).loss.detach()


@pytest.mark.parametrize("name", HEADS)
def test_an_adapter_reaches_every_layer_that_the_forward_uses(
    name: str, target: FrozenTarget, features: TargetFeatures
) -> None:
    """Zero it changes nothing; stirred it says what the merged head says; every matrix has a gradient. A layer that is
    read past its module would show as a difference between the two, or as no gradient."""
    head = made(name, target)
    if name == "eagle3":
        assert "lm_head" not in adaptable(head) and "layer.self_attn.q_proj" in adaptable(head)
    before = told(head, features)
    chosen = add_adapter(head, LORA)
    assert torch.equal(told(head, features), before), "zero in the beginning"
    stir(head)
    torch.manual_seed(0)
    loss = head.loss(features).loss
    loss.backward()
    silent = [n for n, p in head.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.abs().sum())]
    assert not silent and not any(p.grad is not None for n, p in head.named_parameters() if not p.requires_grad)
    state = merged_state(head, head.state_dict())
    merge(head)
    assert not adapter_state(head) and {type(head.get_submodule(one)) for one in chosen} == {torch.nn.Linear}
    assert same(head, state)
    assert abs(loss - before) > 1e-3 and torch.allclose(told(head, features), loss, rtol=1e-10)


def test_an_adapter_on_a_layer_that_is_read_as_a_matrix_would_be_lost(
    target: FrozenTarget, features: TargetFeatures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without the head's own word, the loss passes by what is put around its projection."""
    head = made("eagle3", target)
    monkeypatch.setattr(type(head), "projections", ())
    before = told(head, features)
    assert add_adapter(head, LoraSettings(modules=["lm_head"])) == ["lm_head"]
    stir(head)
    assert torch.equal(told(head, features), before)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"alpha": 0.0}, "a number above 0"),
        ({"modules": ["q_prj"]}, "names 'q_prj'; choose among fc, layer.self_attn.q_proj"),
        ({"modules": ["lm_head"]}, "stays as it is"),
        ({"modules": []}, "is empty"),
    ],
)
def test_what_cannot_be_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        add_adapter(tiny_head(), LoraSettings(**values))


def test_modules_are_named_by_their_beginnings_or_ends() -> None:
    head = tiny_head()
    assert adaptable(head, ["q_proj", "fc"]) == ["fc", "layer.self_attn.q_proj"]
    assert adaptable(head, ["layer.mlp"]) == [f"layer.mlp.{part}_proj" for part in ("gate", "up", "down")]


# ---- on the disk ------------------------------------------------------------------------------------------------


def keep_adapter(base: Path, folder: Path, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Adapt the head in `base`, keep the adapter in `folder`; returns what the merged head is."""
    head = load_head(base).to(dtype)
    add_adapter(head, LORA)
    stir(head, seed)
    adapter = AdapterOf(base, read_facts(base)["sha256"], LORA)
    save_head(head, folder, target_fingerprint=FINGERPRINT, adapter=adapter)
    return merged_state(head, head.state_dict())


def same(head: DraftHead, state: dict[str, torch.Tensor]) -> bool:
    own = head.state_dict()
    return own.keys() == state.keys() and all(torch.equal(own[name], tensor) for name, tensor in state.items())


def test_two_adapters_change_places_on_one_base(tmp_path: Path) -> None:
    base = tmp_path / "runs/base"
    save_head(tiny_head(), base, target_fingerprint=FINGERPRINT)
    one, two = (keep_adapter(base, tmp_path / f"runs/{name}", seed) for seed, name in enumerate(("one", "two")))
    for name, merged in (("one", one), ("two", two), ("one", one)):
        head = load_head(tmp_path / "runs" / name)
        assert same(head, merged) and not same(head, two if merged is one else one) and not head.training
        assert all(parameter.requires_grad for parameter in head.parameters())
    kept = load_file(tmp_path / "runs/one" / TENSORS)
    assert kept and all(".lora_" in name for name in kept)
    assert (tmp_path / "runs/one" / TENSORS).stat().st_size < (base / TENSORS).stat().st_size / 2
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert same(load_head(tmp_path / "moved/two"), two), "runs/ can be moved as a whole"
    copy_head(tmp_path / "moved/two", tmp_path / "deep/er/copy")
    assert same(load_head(tmp_path / "deep/er/copy"), two)


def test_an_adapter_of_an_adapted_head(tmp_path: Path) -> None:
    save_head(tiny_head(torch.bfloat16), tmp_path / "base", target_fingerprint=FINGERPRINT)
    keep_adapter(tmp_path / "base", tmp_path / "one", 1)
    again = keep_adapter(tmp_path / "one", tmp_path / "two", 2)
    head = load_head(tmp_path / "two")
    assert same(head, again) and next(head.parameters()).dtype == torch.float32, "as it was trained"


def other_base(base: Path, folder: Path) -> None:
    head = load_head(base)
    with torch.no_grad():
        head.fc.weight.add_(1)
    save_head(head, base, target_fingerprint=FINGERPRINT)


def other_rank(base: Path, folder: Path) -> None:
    facts = {key: value for key, value in json.loads((folder / FACTS).read_text()).items() if key != "digest"}
    facts["adapter"]["lora"]["rank"] = 3
    (folder / FACTS).write_text(json.dumps(sealed(facts)))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (other_base, r"holds an adapter of the head \w{12}, but \S+ holds the head \w{12}; put the former back"),
        (lambda base, folder: shutil.rmtree(base), "which is not there; copy that head there again"),
        (other_rank, r"has \S+\.lora_\w\.weight \[\d+, \d+\] where the head has \[\d+, \d+\]"),
        (lambda base, folder: (folder / TENSORS).write_bytes(b"x"), "is not the file that head.json describes"),
    ],
)
def test_an_adapter_without_its_head_is_one_sentence(tmp_path: Path, spoil: Callable, sentence: str) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapted"
    save_head(tiny_head(), base, target_fingerprint=FINGERPRINT)
    keep_adapter(base, folder, 0)
    spoil(base, folder)
    with pytest.raises(UserError, match=sentence):
        load_head(folder)


# ---- through the scripts ----------------------------------------------------------------------------------------

QUICK = (
    *("name=t", "target.dtype=float32", "traffic.held_out=0.3", "generation.max_new_tokens=10", "rival=[]"),
    *("head.taps=[1,3,6]", "head.draft_vocab_size=64", "train.max_steps=6", "train.global_batch_tokens=64"),
    *("train.log_every=1", "train.save_every=2", "train.mixed_precision=no", "optim.lr=0.01"),
    *("eval.dtypes=[float32]", "eval.gammas=[]", "eval.temperatures=[0.0]", "eval.max_new_tokens=8"),
    "eval.timed_requests=0",
)
ADAPT = (
    *("train.init_from=runs/t/head", "train.lora={rank: 2, alpha: 4}"),
    *("traffic_dir=runs/t/traffic", "features_dir=runs/t/features"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> e2e.Place:
    """A tiny target with its traffic, features and a head."""
    folder = tmp_path_factory.mktemp("adapted")
    rows = e2e.write_rows(folder / "t.jsonl", e2e.conversations(24))
    place = e2e.Place(save_tiny(folder / "tiny"), rows, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for stage in (collect, train):
            stage.run(cfg(place))
    return place


def cfg(place: e2e.Place, *more: str) -> DictConfig:
    return e2e.config(*e2e.uses(place.target, place.traffic), *QUICK, *more)


def test_a_head_is_adapted_measured_and_exported(
    place: e2e.Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command goes on where it was stopped, bit for bit; what comes out is a head for every other command; its
    export is, byte for byte, that of the same weights kept as a head of their own."""
    monkeypatch.chdir(place.cwd)
    base = (place.run / "head" / TENSORS).read_bytes()
    train.run(cfg(place, *ADAPT, "run_dir=runs/code", "train.eval_every=3"))
    said = capsys.readouterr().out
    assert "M parameters and an adapter of" in said
    adapted = place.cwd / "runs/code/head"
    manifest = json.loads((adapted / "manifest.json").read_text())
    assert manifest["lora"] == {"rank": 2, "alpha": 4, "modules": None}
    assert manifest["init_from"] == read_facts(place.run / "head")["sha256"]
    assert (place.run / "head" / TENSORS).read_bytes() == base
    stored = load_file(adapted / "checkpoints/step-00000004/weights.safetensors")
    assert stored and all(".lora_" in name for name in stored), "checkpoints hold the adapter alone"

    shutil.copytree(place.cwd / "runs/code", place.cwd / "runs/again")
    shutil.rmtree(place.cwd / "runs/again/head/checkpoints/step-00000006")
    for name in (TENSORS, FACTS, "manifest.json"):
        (place.cwd / "runs/again/head" / name).unlink()
    train.run(cfg(place, *ADAPT, "run_dir=runs/again"))
    assert json.loads((place.cwd / "runs/again/head/manifest.json").read_text())["steps"] == 6
    assert (place.cwd / "runs/again/head" / TENSORS).read_bytes() == (adapted / TENSORS).read_bytes()

    evaluate.run(cfg(place, "run_dir=runs/code", "traffic_dir=runs/t/traffic"))
    report = json.loads((place.cwd / "runs/code/report/report.json").read_text())
    assert report["head"]["sha256"] == read_facts(adapted)["sha256"]
    assert all(row["identical_requests"] == row["requests"] for row in report["results"])

    facts = read_facts(adapted)
    whole = place.cwd / "runs/whole/head"
    save_head(load_head(adapted), whole, target_fingerprint=facts["target"], extra=facts["extra"])
    files = []
    for head in (adapted, whole):
        export.run(cfg(place, f"head_dir={head}", "run_dir=runs/out"))  # where it lies is part of its card
        folder = place.cwd / "runs/out/export/vllm"
        files.append({path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"})
    assert files[0] == files[1] and "model.safetensors" in files[0]


def test_another_adapter_is_another_run_and_needs_a_head(
    place: e2e.Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place.cwd)
    train.run(cfg(place, *ADAPT, "run_dir=runs/alpha"))
    other = [one.replace("alpha: 4", "alpha: 8") for one in ADAPT]
    assert "lora.alpha was 4" in e2e.sentence(train.run, cfg(place, *other, "run_dir=runs/alpha"), capsys)
    alone = cfg(place, "train.lora={rank: 2}", "run_dir=runs/no")
    assert "set train.init_from=runs/<name>/head too" in e2e.sentence(train.run, alone, capsys)
    wrong = cfg(place, *ADAPT[:1], "train.lora={rnk: 2}", "run_dir=runs/no")
    assert "There is no setting train.lora.rnk; there are alpha, modules, rank" in e2e.sentence(
        train.run, wrong, capsys
    )
