"""Medusa-2: the combined loss is what it says, the original stays whole, and every artifact says what changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from safetensors.torch import load_file
from torch import Tensor

from eval.comparison_table import to_markdown
from eval.decode import DecodeSettings, Request, decode
from heads.artifact import UserError
from heads.base import TargetFeatures
from heads.layers import BlockSizes
from heads.medusa import MedusaHead
from heads.target import FrozenTarget
from heads.vocab import DraftVocabulary
from scripts import collect, compare, evaluate, export, medusa2, prove, train
from scripts.common import build_head, load_target
from scripts.drafters import ready_head
from scripts.settings import build
from tests import e2e
from tests.drafting_cases import PROMPTS
from tests.recurrent_cases import documents
from tests.tiny import VOCABULARY, features_of, save_tiny
from training.joint import MODIFIED, JointTraining, divergence, drift, save_adapter

# ---- the learner ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"), "qwen2")


Made = tuple[JointTraining, TargetFeatures]


@pytest.fixture
def made(base: Path) -> Callable[..., Made]:
    """`made(scatter, …)`: a learner on a fresh copy of the target and what the target made of some documents. The
    adapter begins as nothing; `scatter` moves its weights by so much."""

    def make(scatter: float = 0.0, **settings: Any) -> Made:
        target = FrozenTarget.load(base, dtype="float64")
        features = features_of(target, documents(), ())
        torch.manual_seed(2)
        sizes, vocab = BlockSizes.of(target.config, VOCABULARY), DraftVocabulary.identity(VOCABULARY)
        head = MedusaHead(sizes=sizes, vocab=vocab, depth=3).double()
        joint = JointTraining(head=head, target=target, rank=4, **settings).train()
        with torch.no_grad():
            for name, parameter in learning(joint).items():
                parameter.add_(torch.randn_like(parameter), alpha=0.2 if name.startswith("head") else scatter)
        return joint, features

    return make


def learning(joint: JointTraining) -> dict[str, Tensor]:
    return {name: one for name, one in joint.named_parameters() if one.requires_grad}


def frozen(joint: JointTraining) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in joint.named_parameters() if not one.requires_grad}


def descend(optimizer: torch.optim.Optimizer, joint: JointTraining, features: TargetFeatures) -> list[float]:
    """The loss of each of 16 steps on one batch."""
    losses = []
    for _ in range(16):
        loss = joint(features).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def plain_losses(joint: JointTraining, adapted: FrozenTarget, original: FrozenTarget) -> tuple[float, float]:
    """The head's cross-entropy on the states of a target that was loaded with the adapter, and the KL between the two
    targets' whole logits, pair by pair."""
    total = kept = 0.0
    for ids, written in documents():
        text = torch.tensor([ids])
        log_p, log_q = (one.model(input_ids=text).logits[0].log_softmax(-1) for one in (original, adapted))
        last_ND = adapted.forward(text).last_BTD[0]
        for t in range(len(ids) - 1):
            if written[t + 1]:
                kept += float(F.kl_div(log_q[t], log_p[t], log_target=True, reduction="sum"))
            for k in range(3):
                if t + 2 + k < len(ids) and all(written[t + 1 : t + 3 + k]):
                    layer = joint.head.blocks[k].layers[0]
                    state = last_ND[t] + F.silu(layer.weight @ last_ND[t] + layer.bias)
                    logits = adapted.weights.lm_head_VD @ state
                    total += 0.8**k * float(F.cross_entropy(logits, torch.tensor(ids[t + 2 + k])))
    return total, kept


def test_the_loss_is_that_of_the_served_target(base: Path, tmp_path: Path, made) -> None:
    """Equal to a plain loop over the target with the saved adapter merged into it, and drift is its second part."""
    joint, features = made(0.05, head_weight=0.3)
    original = FrozenTarget.load(base, dtype="float64")
    save_adapter(joint, tmp_path, base=str(base), original=original.fingerprint)
    adapted = FrozenTarget.load(base, adapter=str(tmp_path), dtype="float64")
    with torch.no_grad():
        total, kept = plain_losses(joint, adapted, original)
        found = joint(features)
    assert kept > 0.5, "the adapter changes too little to tell"
    assert float(found.loss) == pytest.approx(0.3 * total + kept, rel=1e-9)
    assert float(found.metrics["kl"][0]) == pytest.approx(kept, rel=1e-9) and float(found.count) == 19
    away = drift(adapted, [features_of(original, [document], ()) for document in documents()])
    assert away["positions"] == 19 and away["mean_kl"] == pytest.approx(kept / 19, rel=1e-9)
    assert 0 < away["greedy_agreement"] < 1 and away["documents"] == 3


def test_an_answer_of_one_token_holds_the_target_too(base: Path, made) -> None:
    """The head has no start there; the KL counts all the same."""
    joint, _ = made(0.05)
    original = FrozenTarget.load(base, dtype="float64")
    features = features_of(original, [([5, 9, 2, 7], [False, False, False, True])], ())
    found = joint(features)
    found.loss.backward()
    assert float(found.count) == 1 and float(found.loss) == float(found.metrics["kl"][0]) > 0
    assert any(one.grad is not None and bool(one.grad.any()) for name, one in learning(joint).items() if "lora" in name)


def test_the_head_is_told_what_the_adapted_target_says(made) -> None:
    """Its law over the vocabulary sums to one where the head asks for it; with the original's numbers it does not."""
    joint, features = made(0.05)
    states_TD, places = joint.states(features), features.supervised_T.nonzero()[:, 0] - 1
    logits = joint.weights.logits(states_TD[places])
    for batch, right in ((joint._as_adapted(features, states_TD), True), (features, False)):
        sums = (logits - batch.lse_T[places][:, None]).exp().sum(-1)
        assert torch.allclose(sums, torch.ones_like(sums)) == right


def test_the_gradient_is_that_of_the_loss(made) -> None:
    """Along one direction through all parameters that learn, by differences; every one of them has a part in it."""
    joint, features = made(0.05)
    gradients = dict(
        zip(learning(joint), torch.autograd.grad(joint(features).loss, learning(joint).values()), strict=True)
    )
    assert all(bool(one.abs().max() > 0) for one in gradients.values())
    for part in ("head.", "adapter."):
        direction = {name: torch.randn_like(one) for name, one in learning(joint).items() if name.startswith(part)}
        sides = []
        for step in (1e-4, -2e-4):
            with torch.no_grad():
                for name, one in direction.items():
                    learning(joint)[name].add_(one, alpha=step)
                sides.append(float(joint(features).loss))
        with torch.no_grad():
            for name, one in direction.items():
                learning(joint)[name].add_(one, alpha=1e-4)
        expected = sum(float((gradients[name] * one).sum()) for name, one in direction.items())
        assert (sides[0] - sides[1]) / 2e-4 == pytest.approx(expected, rel=1e-3)  # norms round to fp32


def test_the_combined_loss_falls_and_the_original_stays_whole(base: Path, made) -> None:
    joint, features = made()
    before, ids = frozen(joint), torch.tensor([documents()[0][0]])
    losses = descend(torch.optim.Adam(learning(joint).values(), lr=0.01), joint, features)
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(one, before[name]) for name, one in frozen(joint).items())
    original, model = FrozenTarget.load(base, dtype="float64"), joint.adapter.get_base_model().base_model
    with torch.inference_mode():
        with joint.adapter.disable_adapter():
            assert torch.equal(model(input_ids=ids).last_hidden_state, original.forward(ids).last_BTD)
        assert not torch.allclose(model(input_ids=ids).last_hidden_state, original.forward(ids).last_BTD)


def test_what_the_original_says_is_no_way_for_the_gradient(made) -> None:
    joint, features = made(0.05)
    features.last_TD.requires_grad_()
    features.lse_T.requires_grad_()
    states_TD = joint.states(features)
    divergence(states_TD, features, joint.weights).total.backward()
    assert features.last_TD.grad is None and features.lse_T.grad is None
    assert all((one.grad is not None) == name.startswith("adapter") for name, one in learning(joint).items())
    assert all(one.grad is None for name, one in joint.named_parameters() if name not in learning(joint))


@pytest.mark.parametrize(("scatter", "weight", "near"), [(0.0, 0.0, True), (0.02, 0.0, True), (0.0, 2.0, False)])
def test_without_the_head_the_target_stays_the_original(made, scatter: float, weight: float, near: bool) -> None:
    """Also where it was moved away before; the control is a head that weighs much."""
    joint, features = made(scatter, head_weight=weight)
    first = float(joint(features).metrics["kl"][0])
    assert (first < 1e-9) == (scatter == 0)
    # Plain descent: Adam would make steps out of gradients that are rounding.
    descend(torch.optim.SGD(learning(joint).values(), lr=2e-4), joint, features)
    last = float(joint(features).metrics["kl"][0])
    assert (last <= max(1e-9, first / 3)) if near else last > 1e-2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rank": 0}, "medusa2.rank=0"),
        ({"alpha": 0.0}, "alpha above 0"),
        ({"head_weight": -0.1}, "head_weight at least 0"),
        ({"modules": ["q_proj", "qkv"]}, "names 'qkv'; choose among down_proj, gate_proj"),
        ({"modules": ["lm_head"]}, "because heads share it"),
        ({"modules": []}, "is empty"),
    ],
)
def test_settings_that_cannot_be(base: Path, wrong: dict[str, Any], words: str) -> None:
    target = FrozenTarget.load(base, dtype="float32")
    sizes, vocab = BlockSizes.of(target.config, VOCABULARY), DraftVocabulary.identity(VOCABULARY)
    with pytest.raises(UserError, match=words):
        JointTraining(head=MedusaHead(sizes=sizes, vocab=vocab), target=target, **wrong)


# ---- the command and what it leaves -----------------------------------------------------------------------------

QUICK = (
    *("head=medusa", "head.depth=3", "traffic.held_out=0.3", "target.dtype=float32", "train.mixed_precision=no"),
    *("generation.max_new_tokens=12", "generation.batch_size=8", "train.global_batch_tokens=256", "train.max_steps=6"),
    *("train.log_every=1", "train.save_every=3", "eval.gamma=3", "eval.gammas=[]", "eval.dtypes=[float32]"),
    *("eval.temperatures=[0.0]", "eval.max_new_tokens=10", "eval.timed_requests=0", "rival=[]"),
)
HEAVY = ("medusa2.head_weight=5", "optim.lr=0.02")  # so that the text is another one afterwards
CHANGING = ("name=changed", "stage1=runs/mine", "medusa2.rank=4", "medusa2.held_out=4", *HEAVY)


@pytest.fixture(scope="module")
def place(base: Path, tmp_path_factory: pytest.TempPathFactory) -> e2e.Place:
    """A first stage, runs/mine, and a second one, runs/changed, with all artifacts of the latter."""
    folder = tmp_path_factory.mktemp("runs")
    place = e2e.Place(base, e2e.write_rows(folder / "t.jsonl", e2e.conversations(24)), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for stage in (collect, train):
            stage.run(config(place, "name=mine"))
        medusa2.run(config(place, *CHANGING, root="medusa2"))
        for name in ("exact_cases", "typical_cases"):  # about verifiers, not about this head
            patch.setattr(f"eval.law.{name}", lambda: [])
        patch.setattr("eval.law.CONTROLS", {})
        served = ("name=changed", "traffic_dir=runs/mine/traffic", "target.adapter=runs/changed/adapter")
        for stage in (evaluate, export):
            stage.run(config(place, *served))
        compare.run(config(place, *served, "runs=[runs/changed]", "comparison_dir=runs/both", root="compare"))
        few = ("prove.requests=3", "prove.gamma=3", "prove.max_new_tokens=6", "prove.tree=null", "prove.copies=20")
        prove.run(config(place, *served, *few, "prove.prefixes=1", "prove.dtypes=[float32]", root="prove"))
    return place


def config(place: e2e.Place, *more: str, root: str = "config") -> DictConfig:
    return e2e.config(*e2e.uses(place.target, place.traffic), *QUICK, *more, name=root)


@pytest.fixture(scope="module")
def targets(place: e2e.Place) -> dict[str, FrozenTarget]:
    chosen = {"own": str(place.cwd / "runs/changed/adapter"), "first": None}
    return {name: FrozenTarget.load(place.target, adapter=one, dtype="float64") for name, one in chosen.items()}


ARTIFACTS = (
    *("adapter/manifest.json", "adapter/README.md", "head/head.json", "head/manifest.json"),
    *("report/report.json", "report/report.html", "report/manifest.json"),
    *("certificate/certificate.json", "certificate/certificate.md", "certificate/manifest.json"),
    *("export/vllm/manifest.json", "export/vllm/README.md", "../both/comparison.json", "../both/comparison.md"),
)


SETTINGS = {
    "rank": ["medusa2.rank=2"],
    "alpha": ["medusa2.alpha=8"],
    "modules": ["medusa2.modules=[q_proj]"],
    "head_weight": ["medusa2.head_weight=1"],
}  # held_out in the report below


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_changes_the_loss(place: e2e.Place, setting: str) -> None:
    """Where the adapter already says something."""

    def seen(*more: str) -> float:
        cfg = config(place, "stage1=runs/mine", *more, root="medusa2")
        target = load_target(cfg)
        head = build_head(cfg, target, DraftVocabulary.identity(VOCABULARY))
        joint = build(cfg, "medusa2", _partial_=True)(head=head, target=target)
        for parameter in (one for name, one in learning(joint).items() if "lora_B" in name):
            torch.nn.init.constant_(parameter, 0.1)
        return joint(features_of(target, documents(), ())).loss.item()

    assert seen(*SETTINGS[setting]) != seen() == seen()
    assert {*SETTINGS, "held_out", "_target_"} == set(e2e.config("stage1=x", name="medusa2").medusa2)


@pytest.mark.parametrize("file", ARTIFACTS)
def test_every_artifact_says_that_the_target_is_changed(place: e2e.Place, file: str) -> None:
    assert MODIFIED in (place.cwd / "runs/changed" / file).read_text().replace("Target mod", "target mod")
    for first in (place.cwd / "runs/mine").rglob("*.json"):
        assert "modified" not in first.read_text(), "the control: nothing of the first stage says so"


def test_a_table_of_the_original_does_not_say_so(place: e2e.Place) -> None:
    comparison = json.loads((place.cwd / "runs/both/comparison.json").read_text())
    assert MODIFIED.capitalize() in to_markdown(comparison)
    del comparison["target"]["modified"]
    assert "odified" not in to_markdown(comparison)


def test_features_of_the_changed_target_say_so_too(place: e2e.Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.cwd)
    collect.run(config(place, "name=again", "target.adapter=runs/changed/adapter", "generation.max_new_tokens=2"))
    assert json.loads(Path("runs/again/features/manifest.json").read_text())["target"]["modified"] == MODIFIED


def test_greedy_text_is_the_adapted_targets_and_not_the_originals(place: e2e.Place, targets) -> None:
    adapted, original = targets["own"], targets["first"]
    requests = [Request(str(n), "all", tuple(prompt)) for n, prompt in enumerate(PROMPTS)]
    head = ready_head(place.cwd / "runs/changed/head", adapted)
    traces = decode(adapted, requests, head, DecodeSettings(gamma=3, max_new_tokens=20, rows=3))

    def own(target: FrozenTarget) -> list[list[int]]:
        options = {"max_new_tokens": 20, "do_sample": False}
        return [target.model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS]

    assert [list(trace.tokens) for trace in traces] == own(adapted) != own(original)
    with pytest.raises(UserError, match="they differ in weights"):
        ready_head(place.cwd / "runs/changed/head", original)


def test_the_report_measures_against_the_adapted_target(place: e2e.Place) -> None:
    report = json.loads((place.cwd / "runs/changed/report/report.json").read_text())
    proof = report["identity"]["float32"]
    assert proof["identical"] == proof["requests"] > 3
    assert report["verdict"].endswith(f"; {MODIFIED}.")
    found = json.loads((place.cwd / "runs/changed/head/manifest.json").read_text())["drift"]
    assert found["of_rounding_alone"]["mean_kl"] < 1e-6 and found["of_rounding_alone"]["greedy_agreement"] == 1
    assert (
        found["documents"] == 4
        and found["mean_kl"] > 0.01
        and 0 < found["greedy_agreement"] < 1
        and found["positions"] > 20
    )


def test_a_finished_run_is_used_as_it_is_and_a_cut_one_goes_on(place: e2e.Place, tmp_path, monkeypatch) -> None:
    shutil.copytree(place.cwd / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/changed"
    weights = {
        file: load_file(folder / file) for file in ("head/head.safetensors", "adapter/adapter_model.safetensors")
    }
    stamps = e2e.stamps(folder / "head")
    medusa2.run(config(place, *CHANGING, root="medusa2"))
    assert e2e.stamps(folder / "head") == stamps
    *_, earlier, last = sorted((folder / "head/checkpoints").iterdir())
    shutil.rmtree(last)
    shutil.rmtree(folder / "adapter")
    medusa2.run(config(place, *CHANGING, root="medusa2"))
    assert earlier.is_dir() and last.is_dir()
    for file, tensors in weights.items():
        again = load_file(folder / file)
        assert again.keys() == tensors.keys() and all(torch.equal(again[name], one) for name, one in tensors.items())


def test_another_factor_is_another_target(place: e2e.Place, tmp_path: Path, targets) -> None:
    """The adapter's weights alone do not say what is added to the target."""
    shutil.copytree(place.cwd / "runs/changed/adapter", tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 99}))
    other = FrozenTarget.load(place.target, adapter=str(tmp_path / "adapter"), dtype="float64")
    assert other.fingerprint["weights"] != targets["own"].fingerprint["weights"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("stage1=runs/nothing",), "holds no finished head artifact"),
        (("name=mine",), "would overwrite the head of runs/mine"),
        (("target.adapter=some/adapter",), "Medusa-2 makes an adapter itself"),
        (("train.eval_every=5",), "set train.eval_every=null"),
        (("target.path=some/model.gguf",), "A GGUF file cannot be adapted"),
        (("target.gguf_file=model.gguf",), "A GGUF file cannot be adapted"),
        (("medusa2.held_out=0",), "give at least 1"),
        (("generation.max_prompt_tokens=1",), "holds no held-out prompt that fits"),
        (("medusa2.rank=many",), "medusa2.rank='many' is of the wrong type; give a whole number"),
        (("medusa2.modules=[qkv]",), "medusa2.modules names 'qkv'"),
        (("optim.lr_multipliers.adaptor=1",), "There is no setting optim.lr_multipliers.adaptor"),
    ],
)
def test_what_cannot_be_is_one_sentence(place: e2e.Place, monkeypatch, capsys, overrides, words: str) -> None:
    monkeypatch.chdir(place.cwd)
    base = () if any(one.startswith("optim") for one in overrides) else CHANGING
    if not base:
        monkeypatch.setattr("sys.argv", ["medusa2", *overrides])
        with pytest.raises(SystemExit):
            medusa2.main()
        assert words in e2e.only_sentence(capsys.readouterr().err)
        return
    assert words in e2e.sentence(medusa2.run, config(place, *base, *overrides, root="medusa2"), capsys)


def test_a_first_stage_is_asked_for(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["medusa2", "name=changed"])
    with pytest.raises(SystemExit):
        medusa2.main()
    assert "stage1= has no value; give it on the command line." in e2e.only_sentence(capsys.readouterr().err)


def test_only_medusa(place: e2e.Place, tmp_path: Path, monkeypatch, capsys) -> None:
    shutil.copytree(place.cwd / "runs/mine", tmp_path / "runs/mine")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs/mine/head/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"name": "eagle3"}))
    words = e2e.sentence(medusa2.run, config(place, *CHANGING, root="medusa2"), capsys)
    assert "is of the kind eagle3, and only medusa is trained with its target" in words
