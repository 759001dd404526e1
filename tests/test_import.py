"""A head in the layout of public repositories, from its download to measuring it, training it on and exporting it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.checkpoint import load_head, read_facts, save_head
from heads.eagle3 import Eagle3Head
from heads.export.folder import check_export
from heads.layers import BlockSizes
from heads.medusa import MedusaHead
from heads.target import FrozenTarget
from heads.vocab import DraftVocabulary
from scripts import collect, evaluate, export, import_head, train
from tests import e2e
from tests.tiny import save_tiny

IDS = torch.arange(2, 66)
QUICK = (
    *("name=t", "target.dtype=float32", "traffic.held_out=0.25", "generation.max_new_tokens=10"),
    "head.draft_vocab_size=64",
    *("train.max_steps=3", "train.global_batch_tokens=128", "train.log_every=1", "train.mixed_precision=no"),
    *("eval.dtypes=[float32]", "eval.gammas=[]", "eval.temperatures=[0.0]", "eval.max_new_tokens=8"),
    *("eval.timed_requests=0", "rival=[]"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> e2e.Place:
    """A tiny target with a dozen conversations, answered and with features."""
    folder = tmp_path_factory.mktemp("import")
    place = e2e.Place(
        save_tiny(folder / "tiny"), e2e.write_rows(folder / "t.jsonl", e2e.conversations(16)), folder / "cwd"
    ).at(folder / "cwd")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place.cwd)
        collect.run(cfg(place))
    return place


@pytest.fixture(autouse=True)
def there(place: e2e.Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.cwd)


def cfg(place: e2e.Place, *more: str, name: str = "config") -> Any:
    return e2e.config(*e2e.uses(place.target, place.traffic), *QUICK, *more, name=name)


def bring(place: e2e.Place, folder: Path, name: str, *more: str) -> Any:
    return cfg(place, f"from={folder}", f"run_dir=runs/{name}", *more, name="import_head")


def published(place: e2e.Place, folder: Path, change: Callable[[dict, dict], object] = lambda c, t: None) -> Path:
    """What a public EAGLE-3 repository holds: a pickle with the authors' names, offsets, and a copy of the target's
    embeddings; a configuration of older times that says nothing of taps."""
    target = FrozenTarget.load(place.target, dtype="float32")
    torch.manual_seed(0)
    sizes = BlockSizes.of(target.config, target.vocab_size)
    head = Eagle3Head(sizes=sizes, vocab=DraftVocabulary(IDS, target.vocab_size))
    head.initialise(target)
    tensors: dict[str, Tensor] = {
        name.replace("layer.", "midlayer.", 1) if name.startswith("layer.") else name: tensor
        for name, tensor in head.state_dict().items()
    }
    for name in ("input_layernorm.weight", "hidden_norm.weight"):
        tensors[f"midlayer.{name}"] = tensors.pop(name)
    tensors |= {"d2t": head.vocab.d2t, "t2d": head.vocab.t2d, "embed_tokens.weight": target.weights.embedding_VD}
    said = asdict(sizes)
    config = {
        **{key: said[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")},
        **{key: said[key] for key in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act")},
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": len(IDS),
        "rope_theta": said["rope_parameters"]["rope_theta"],
        "torch_dtype": "float32",
    }
    change(config, tensors)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def test_a_public_head_is_measured_trained_on_and_exported(
    place: e2e.Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_head.run(bring(place, published(place, tmp_path / "theirs"), "theirs"))
    said = capsys.readouterr().out
    assert "does not say which boundaries it taps; servers then take [2, 4, 5]" in said
    theirs = place.cwd / "runs/theirs/head"
    head = load_head(theirs)
    assert head.arguments["taps"] == [2, 4, 5] and torch.equal(head.vocab.ids_W, IDS)
    assert read_facts(theirs)["extra"]["imported"] == {"from": str(tmp_path / "theirs"), "layout": None}

    evaluate.run(cfg(place, f"head_dir={theirs}"))
    report = e2e.report(place)
    assert report["head"]["sha256"] == read_facts(theirs)["sha256"]
    assert all(row["identical_requests"] == row["requests"] for row in report["results"])

    train.run(cfg(place, f"train.init_from={theirs}", "head.draft_vocab_size=8", "run_dir=runs/on", *SHARED))
    trained = load_head(place.cwd / "runs/on/head")
    assert torch.equal(trained.vocab.ids_W, IDS), "the draft vocabulary is the head's own"
    assert e2e_manifest(place, "on")["init_from"] == read_facts(theirs)["sha256"]
    near = [(trained.state_dict()[name] - tensor).abs().max() for name, tensor in head.state_dict().items()]
    assert 0 < max(near) < 0.1

    out = place.cwd / "runs/out/export"
    for layout in ("vllm", "sglang", "tensorrt_llm"):
        export.run(cfg(place, f"head_dir={theirs}", "run_dir=runs/out", f"export={layout}"))
    for layout in ("vllm", "sglang", "tensorrt_llm"):  # none replaces another
        check_export(out / layout, head=head)
        import_head.run(bring(place, out / layout, "unused", "check=true"))
    assert f"give a folder in a server's layout, such as {out}/sglang" in e2e.sentence(
        import_head.run, bring(place, out, "unused", "check=true"), capsys
    )
    assert not (place.cwd / "runs/unused").exists()


def test_a_folder_that_is_no_head_is_refused_before_the_target_is_loaded(
    place: e2e.Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_head, "load_target", None)
    theirs = published(place, tmp_path / "theirs", lambda config, tensors: config.update(num_hidden_layers=2))
    asked = bring(place, theirs, "no")
    assert "config.json is of the architecture ['LlamaForCausalLM']; give a head in" in e2e.sentence(
        import_head.run, asked, capsys
    )
    (theirs / "pytorch_model.bin").unlink()
    assert "holds no weights" in e2e.sentence(import_head.run, asked, capsys)
    (theirs / "config.json").write_text("[1]")
    assert "config.json holds no JSON object" in e2e.sentence(import_head.run, asked, capsys)


def test_a_medusa_folder_and_a_head_of_ones_own_are_trained_on_with_their_vocabulary(
    place: e2e.Place, tmp_path: Path
) -> None:
    """A start from somewhere keeps what it drafts from, whatever head.draft_vocab_size says."""
    target = FrozenTarget.load(place.target, dtype="float32")
    torch.manual_seed(0)
    whole = DraftVocabulary.identity(target.vocab_size)
    head = MedusaHead(sizes=BlockSizes.of(target.config, target.vocab_size), vocab=whole, depth=2, projection="own")
    head.initialise(target)
    for parameter in head.parameters():  # as if trained: zeros, and the target's projections, would be refused
        parameter.data += 0.02 * torch.randn_like(parameter)
    save_head(head, tmp_path / "made", target_fingerprint=target.fingerprint)
    medusa = ("head=medusa", "head.depth=2", "head.projection=own", "head.draft_vocab_size=8", "eval.gamma=2")
    export.run(cfg(place, *medusa, f"head_dir={tmp_path / 'made'}", "run_dir=runs/public", "export=original"))
    import_head.run(bring(place, place.cwd / "runs/public/export/original", "medusa"))
    train.run(cfg(place, *medusa, "train.init_from=runs/medusa/head", "run_dir=runs/first", *SHARED))
    train.run(cfg(place, *medusa, "train.init_from=runs/first/head", "run_dir=runs/second", *SHARED))
    before = head.state_dict()
    for name in ("first", "second"):
        trained = load_head(place.cwd / f"runs/{name}/head")
        assert torch.equal(trained.vocab.ids_W, whole.ids_W)
        after = trained.state_dict()
        moved = max(float((after[key] - before[key]).abs().max()) for key in before)
        assert 0 < moved < 0.1
        before = after


SHARED = ("traffic_dir=runs/t/traffic", "features_dir=runs/t/features")


def e2e_manifest(place: e2e.Place, name: str) -> dict[str, Any]:
    return dict(json.loads((place.cwd / f"runs/{name}/head/manifest.json").read_text()))


def other_embeddings(config: dict, tensors: dict) -> None:
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"] + 1


def odd_taps(config: dict, tensors: dict) -> None:
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}


def biased(config: dict, tensors: dict) -> None:
    tensors["fc.bias"] = torch.ones(32)


def wider(config: dict, tensors: dict) -> None:
    config["vocab_size"] = 128


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (other_embeddings, "embed_tokens.weight is not the target's own embedding"),
        (odd_taps, "say what the head was trained for: layout=vllm or layout=sglang"),
        (biased, "fc.bias has no place"),
        (wider, "The head's vocab_size is 128, the target's is 96"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    place: e2e.Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, sentence: str
) -> None:
    folder = published(place, tmp_path / "theirs", change)
    assert sentence in e2e.sentence(import_head.run, bring(place, folder, "refused"), capsys)
    assert not (place.cwd / "runs/refused").exists()


@pytest.mark.parametrize(
    ("taps", "layout", "boundaries"),
    [([2, 4, 5], "null", [2, 4, 5]), ([1, 3, 4], "null", [2, 4, 5]), ([0, 2, 6], "sglang", [1, 3, 7])],
)
def test_taps_are_read_as_whoever_wrote_them_counts(
    place: e2e.Place, tmp_path: Path, taps: list[int], layout: str, boundaries: list[int]
) -> None:
    """The usual ones tell by themselves which way they are counted."""
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": taps}}
    folder = published(place, tmp_path / "theirs", lambda config, tensors: config.update(nested))
    name = f"taps{taps[0]}"
    import_head.run(bring(place, folder, name, f"layout={layout}"))
    assert load_head(place.cwd / f"runs/{name}/head").arguments["taps"] == boundaries


def test_another_target_is_refused_by_its_fingerprint(
    place: e2e.Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our own exports know it; so does a head that training is to go on from."""
    import_head.run(bring(place, published(place, tmp_path / "theirs"), "own"))
    export.run(cfg(place, "head_dir=runs/own/head", "run_dir=runs/own"))
    again = e2e.Place(save_tiny(tmp_path / "other", seed=1), place.traffic, place.cwd)
    told = e2e.sentence(import_head.run, bring(again, place.cwd / "runs/own/export/vllm", "x", "check=true"), capsys)
    assert "belongs to the target 'tiny'" in told and "they differ in weights" in told
    import_head.run(bring(place, place.cwd / "runs/own/export/vllm", "x", "check=true"))
    assert "sound, and of the target tiny" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["head=eagle"], "choose the head= of its kind"),
        (["head.norm_output=true"], "train.init_from is a head with norm_output=False"),
        (["head.taps=[1,2,3]"], r"set head.taps=[2, 4, 5]"),
    ],
)
def test_a_head_of_another_kind_is_not_trained_on(
    place: e2e.Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], sentence: str
) -> None:
    if not (place.cwd / "runs/kind").is_dir():
        import_head.run(bring(place, published(place, tmp_path / "theirs"), "kind"))
    asked = cfg(place, "train.init_from=runs/kind/head", "run_dir=runs/no", *SHARED, *more)
    assert sentence in e2e.sentence(train.run, asked, capsys)


def test_taps_that_only_the_command_says_are_the_heads_own(place: e2e.Place, tmp_path: Path) -> None:
    """TensorRT-LLM takes them from its command; our own export remembers them."""
    told = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    folder = published(place, tmp_path / "theirs", lambda config, tensors: config.update(told))
    import_head.run(bring(place, folder, "odd"))
    export.run(cfg(place, f"head_dir={place.cwd / 'runs/odd/head'}", "run_dir=runs/odd", "export=tensorrt_llm"))
    out = place.cwd / "runs/odd/export/tensorrt_llm"
    assert "layer_ids" not in (out / "config.json").read_text()
    import_head.run(bring(place, out, "odd_again"))
    assert load_head(place.cwd / "runs/odd_again/head").arguments["taps"] == [1, 3, 6]


def test_a_second_import_uses_the_first(place: e2e.Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = published(place, tmp_path / "theirs")
    import_head.run(bring(place, folder, "again"))
    before = e2e.stamps(place.cwd / "runs/again/head")
    import_head.run(bring(place, folder, "again"))
    assert "was imported from there before and is used as it is" in capsys.readouterr().out
    assert e2e.stamps(place.cwd / "runs/again/head") == before


def test_a_head_that_is_there_is_not_overwritten(
    place: e2e.Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine/head").mkdir(parents=True)
    (tmp_path / "mine/head/head.json").write_text("mine")
    asked = cfg(place, f"from={tmp_path}", f"run_dir={tmp_path / 'mine'}", name="import_head")
    assert "holds another head already; import under another name=" in e2e.sentence(import_head.run, asked, capsys)
    nothing = cfg(place, name="import_head")
    assert "needs from=<folder or Hub id>" in e2e.sentence(import_head.run, nothing, capsys)
    nowhere = cfg(place, "from=./nowhere", name="import_head")
    assert "neither a folder nor a repository" in e2e.sentence(import_head.run, nowhere, capsys)
