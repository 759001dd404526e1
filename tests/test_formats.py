"""Every layout that heads are written in: which kinds, there and back, and an independent reader of each."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from heads.artifact import UserError, read_manifest
from heads.base import DraftHead
from heads.checkpoint import class_path
from heads.export.folder import FORMATS, check_export, export_head
from heads.export.imported import import_head
from heads.export.layout import OfTarget
from heads.export.weights import INDEX, MEDUSA, PICKLED, TENSORS, read_tensors, to_files
from heads.vocab import DraftVocabulary
from tests import plain_readers
from tests.servable import SERVABLE, servable
from tests.test_head_checkpoint import FINGERPRINT

LOADS = {
    "vllm": set(SERVABLE),
    "speculators": {"eagle3"},
    "sglang": {"eagle3", "eagle", "mtp"},
    "original": {"eagle3", "eagle", "medusa"},
    "tensorrt_llm": {"eagle3", "medusa", "medusa-own"},
    "llama_cpp": {"eagle3"},
}
FEW = DraftVocabulary(torch.arange(3, 83, 2), 96)


def exported(folder: Path, head: DraftHead, layout: str, **options) -> Path:
    export_head(head, folder, target_fingerprint=FINGERPRINT, target_path="some/target", layout=layout, **options)
    return folder


def of(head: DraftHead) -> OfTarget:
    return OfTarget(head.arguments["sizes"], head.target)


def same(one: DraftHead, other: DraftHead) -> bool:
    states = one.state_dict(), other.state_dict()
    equal = all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    return equal and states[0].keys() == states[1].keys() and torch.equal(one.vocab.ids_W, other.vocab.ids_W)


def test_the_table_names_every_layout() -> None:
    assert LOADS.keys() == FORMATS.keys()


@pytest.mark.parametrize("kind", SERVABLE)
@pytest.mark.parametrize("layout", LOADS)
def test_there_and_back_and_there_or_refused(tmp_path, layout: str, kind: str) -> None:
    """Byte-identical files; and the head is found again without our manifest, as somebody else's is."""
    head = servable(kind)
    if kind not in LOADS[layout]:
        with pytest.raises(UserError, match=r"There is no layout of|head\.\w+=\w+, or export it|has no|only"):
            exported(tmp_path / "a", head, layout)
        assert not (tmp_path / "a").exists()
        return
    first = exported(tmp_path / "a", head, layout, dtype="float32")
    again = import_head(first, of_target=of(head))
    assert again.arguments == head.arguments and same(head, again)
    again.attach(head.target)
    second = exported(tmp_path / "b", again, layout, dtype="float32")
    files = read_manifest(first, "export")["files"]
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files if name != "README.md")
    check_export(first, head=again)
    (first / "manifest.json").unlink()
    assert same(head, import_head(first, of_target=of(head)))
    assert class_path(head) == class_path(import_head(first, layout=layout, of_target=of(head)))


@pytest.mark.parametrize("layout", [layout for layout in LOADS if "eagle3" in LOADS[layout]])
def test_a_small_draft_vocabulary_goes_there_and_back(tmp_path, layout: str) -> None:
    head = servable("eagle3", vocab=FEW)
    first = exported(tmp_path / "a", head, layout)
    again = import_head(first, of_target=of(head))
    again.attach(head.target)
    second = exported(tmp_path / "b", again, layout)
    assert torch.equal(again.vocab.ids_W, FEW.ids_W)
    assert read_tensors(first).keys() >= {"d2t", "t2d"}
    for name in read_manifest(first, "export")["files"].keys() - {"README.md"}:
        assert (first / name).read_bytes() == (second / name).read_bytes()


# ---- a reader of its own for each ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "kind", "block"),
    [
        ("vllm", "eagle3", "layers.0."),
        ("speculators", "eagle3", "layers.0."),
        *((layout, "eagle3", "midlayer.") for layout in ("sglang", "original", "tensorrt_llm", "llama_cpp")),
        ("vllm", "eagle", None),
        ("sglang", "eagle", None),
        ("original", "eagle", None),
        ("sglang", "mtp", None),
        ("original", "medusa", None),
        ("tensorrt_llm", "medusa", None),
        ("tensorrt_llm", "medusa-own", None),
    ],
)
def test_an_independent_reader_gets_the_heads_own_logits(tmp_path, layout: str, kind: str, block: str | None) -> None:
    head = servable(kind, vocab=FEW if kind == "eagle3" else None)
    folder = exported(tmp_path / "a", head, layout, dtype="float32")
    path = next(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt"))
    tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    torch.manual_seed(3)
    next_ids = [17, 4, 60] if kind == "mtp" else [17]
    taps, last = torch.randn(len(next_ids), 96), torch.randn(len(next_ids), 32)
    embedded = head.target.embedding_VD[next_ids]
    if kind == "eagle3":
        theirs = plain_readers.eagle3(tensors, str(block), taps[0], embedded[0])
    elif kind == "eagle":
        theirs = plain_readers.eagle(tensors, last[0], embedded[0], head.target.lm_head_VD)
    elif kind == "mtp":
        theirs = plain_readers.mtp(tensors, last, embedded, head.target.lm_head_VD)
    else:
        theirs = plain_readers.medusa(tensors, last[0], head.arguments["blocks"])
    mine = plain_readers.ours(head, taps, last, next_ids)
    assert torch.isfinite(mine).sum() == len(head.vocab.ids_W)
    torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-3)


def settings(layout: str, head: DraftHead) -> dict:
    return FORMATS[layout].layout_of(class_path(head)).write(head, "float32", "some/target")[0]


def tapped(taps: list[int], **flags) -> DraftHead:
    """An EAGLE-3 head with other taps or flags than the usual."""
    plain = servable("eagle3")
    head = type(plain)(**{**plain.arguments, "taps": taps, **flags}, vocab=plain.vocab)
    head.attach(plain.target)
    return head.eval()


def test_taps_in_the_words_of_each_reader() -> None:
    """The usual ones are left out where the reader knows them; others are outputs of layers from 0, or refused."""
    usual, other = tapped([2, 4, 5]), tapped([1, 3, 6])
    key = "eagle_aux_hidden_state_layer_ids"
    assert settings("speculators", usual)[key] == [2, 4, 5] and settings("speculators", other)[key] == [1, 3, 6]
    for layout in ("sglang", "original", "tensorrt_llm", "llama_cpp"):
        assert key not in json.dumps(settings(layout, usual))
    assert settings("sglang", other)["eagle_config"] == {key: [0, 2, 5], "use_aux_hidden_state": True}
    assert FORMATS["tensorrt_llm"].layouts[0].target_overrides(other.arguments) == {
        "eagle3_layers_to_capture": [0, 2, 5]
    }
    for layout in ("original", "llama_cpp"):
        with pytest.raises(UserError, match=r"always taps \[2, 4, 5\] of this target, but the head was trained on"):
            settings(layout, other)
    for layout in ("sglang", "tensorrt_llm"):
        with pytest.raises(UserError, match="taps outputs of layers"):
            settings(layout, tapped([0, 3, 6]))


@pytest.mark.parametrize("flag", ["norm_before_residual", "fc_norm", "norm_output", "qk_norm"])
def test_flags_reach_those_who_know_them_and_nobody_else(flag: str) -> None:
    head = tapped([2, 4, 5], **{flag: True})
    known = {
        "norm_before_residual": {"vllm", "speculators", "llama_cpp"},
        "fc_norm": {"vllm", "speculators", "tensorrt_llm"},
        "norm_output": {"vllm", "speculators", "tensorrt_llm"},
        "qk_norm": {"vllm"},
    }[flag]
    for layout in LOADS:
        if layout in known:
            assert settings(layout, head).get(flag, True) is True
        else:
            with pytest.raises(UserError, match=rf"{flag}=false|{flag} and would leave it out"):
                settings(layout, head)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_rotary_embeddings_survive_the_older_spelling(tmp_path, rope: dict) -> None:
    """transformers itself reads ours out of it; the authors' code has fewer kinds."""
    head = tapped([2, 4, 5], sizes={**servable("eagle3").arguments["sizes"], "rope_parameters": rope})
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    written = settings("sglang", head)
    assert "rope_parameters" not in written
    read = LlamaConfig(**{key: value for key, value in written.items() if key not in ("torch_dtype", "architectures")})
    assert read.rope_parameters.items() >= rope.items()
    folder = exported(tmp_path / "a", head, "sglang", dtype="float32")
    assert import_head(folder, of_target=of(head)).arguments["sizes"]["rope_parameters"] == rope
    if rope["rope_type"] == "llama3":
        with pytest.raises(UserError, match="no rotary embeddings of the kind llama3"):
            settings("original", head)


def test_what_else_each_reader_wants(tmp_path) -> None:
    eagle3, eagle, medusa = (servable(kind) for kind in ("eagle3", "eagle", "medusa"))
    outer = settings("speculators", eagle3)
    assert outer["architectures"] == ["Eagle3Speculator"] and outer["norm_before_residual"] is False
    assert outer["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 10000.0
    assert outer["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert read_tensors(exported(tmp_path / "s", eagle3, "speculators")).keys() >= {
        "embed_tokens.weight",
        "norm.weight",
    }
    # A fc with a bias that is not in the file would keep its random start; a strict loader wants the embeddings.
    sglang = read_tensors(exported(tmp_path / "g", eagle, "sglang"))
    assert not sglang["fc.bias"].any() and "embed_tokens.weight" not in sglang
    assert settings("sglang", eagle)["architectures"] == ["LlamaForCausalLMEagle"]
    original = exported(tmp_path / "o", eagle, "original", dtype="float32")
    assert settings("original", eagle)["bias"] is False and (original / PICKLED).is_file()
    assert torch.equal(read_tensors(original)["embed_tokens.weight"], eagle.target.embedding_VD)
    told = settings("original", medusa)
    assert (told["medusa_num_heads"], told["medusa_num_layers"], told["medusa_fc_bias"]) == (4, 1, True)
    assert told["base_model_name_or_path"] == "some/target"
    names = {f"{i}.{name}" for i in range(4) for name in ("0.linear.weight", "0.linear.bias", "1.weight")}
    assert read_tensors(exported(tmp_path / "m", medusa, "original")).keys() == names


def test_an_mtp_module_as_a_draft_of_its_own(tmp_path) -> None:
    """One layer of cache, nothing tied, every bias; transformers reads ours out of it, and so does vLLM's layout."""
    head = servable("mtp")
    folder = exported(tmp_path / "a", head, "sglang", dtype="float32")
    told = json.loads((folder / "config.json").read_text())
    assert told["architectures"] == ["MiMoForCausalLM"] and told["num_nextn_predict_layers"] == 1
    read = AutoConfig.from_pretrained(folder)
    assert type(read).__name__ == "Qwen2Config" and read.rope_parameters["rope_theta"] == 10000.0
    assert read.tie_word_embeddings is False and read.max_position_embeddings == 256
    tensors = read_tensors(folder)
    assert not any(tensors[f"model.mtp_layers.0.self_attn.{name}_proj.bias"].any() for name in "qkv")
    command = shlex.split(read_manifest(folder, "export")["serve"])
    assert command[command.index("--speculative-algorithm") + 1] == "NEXTN"
    (folder / "manifest.json").unlink()
    assert same(head, import_head(folder, layout="vllm", of_target=of(head)))


@pytest.mark.parametrize("name", ["self_attn.q_proj.weight", "input_proj.weight", "self_attn.k_proj.weight"])
def test_another_order_of_halves_is_another_head(name: str) -> None:
    """The control of the reader above: the inputs of the projection, and what is rotated with what."""
    head = servable("mtp")
    tensors = FORMATS["sglang"].layout_of(class_path(head)).write(head, "float32")[1]
    last, embedded = torch.randn(3, 32), head.target.embedding_VD[[17, 4, 60]]
    right = plain_readers.mtp(tensors, last, embedded, head.target.lm_head_VD)
    weight = tensors[f"model.mtp_layers.0.{name}"]
    turned = (
        weight.roll(32, 1) if name == "input_proj.weight" else weight.view(-1, 2, 4, 32).transpose(1, 2).flatten(0, 2)
    )
    wrong = plain_readers.mtp({**tensors, f"model.mtp_layers.0.{name}": turned}, last, embedded, head.target.lm_head_VD)
    assert (wrong - right).abs().max() > 1


def test_heads_wider_than_their_share_are_for_sglang_alone(tmp_path) -> None:
    """Its class reads head_dim, vLLM's divides."""
    plain = servable("mtp")
    wide = type(plain)(**{**plain.arguments, "sizes": {**plain.arguments["sizes"], "head_dim": 16}}, vocab=plain.vocab)
    wide.load_state_dict({name: torch.randn_like(tensor) for name, tensor in wide.state_dict().items()})
    wide.attach(plain.target)
    assert import_head(exported(tmp_path / "a", wide, "sglang")).arguments["sizes"]["head_dim"] == 16
    with pytest.raises(UserError, match="needs heads of width D / heads, not 16"):
        settings("vllm", wide)


def test_tensorrt_llm_is_told_how_many_heads_there_are_in_every_way(tmp_path) -> None:
    """Its converter looks at its own command first, its Python interface for another key than the authors'."""
    head = servable("medusa-own")
    folder = exported(tmp_path / "a", head, "tensorrt_llm", dtype="float16")
    told = json.loads((folder / "config.json").read_text())
    assert (told["medusa_num_heads"], told["num_medusa_heads"], told["medusa_num_layers"]) == (4, 4, 2)
    names = {f"{i}.{j}.linear.{part}" for i in range(4) for j in range(2) for part in ("weight", "bias")}
    assert torch.load(folder / MEDUSA, weights_only=True).keys() == names | {f"{i}.2.weight" for i in range(4)}
    convert, build, ask = map(shlex.split, read_manifest(folder, "export")["serve"].splitlines())
    given = dict(zip(convert[2::2], convert[3::2], strict=True))
    assert given["--num_medusa_heads"] == "4" and given["--num_medusa_layers"] == "2" and given["--dtype"] == "float16"
    assert given["--medusa_model_dir"] == str(folder) and given["--output_dir"] in build
    assert json.loads(ask[ask.index("--medusa_choices") + 1]) == [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]
    (folder / "manifest.json").unlink()
    (folder / "config.json").write_text(json.dumps({**told, "num_medusa_heads": 3}))
    with pytest.raises(UserError, match="medusa_num_heads=4 and num_medusa_heads=3; make them the same"):
        import_head(folder, of_target=of(head))


@pytest.mark.parametrize(
    ("layout", "kind", "words"),
    [
        ("speculators", "eagle3", ["vllm", "serve", "some/target", "--speculative-config"]),
        ("sglang", "eagle3", ["python", "-m", "sglang.launch_server", "--model-path", "some/target"]),
        ("original", "eagle3", ["python", "-c"]),
        ("original", "medusa", ["python", "-c"]),
        ("sglang", "mtp", ["python", "-m", "sglang.launch_server", "--model-path", "some/target"]),
        ("tensorrt_llm", "eagle3", ["trtllm-serve", "some/target", "--extra_llm_api_options"]),
        ("tensorrt_llm", "medusa", ["python", "convert_checkpoint.py", "--model_dir", "some/target"]),
        ("llama_cpp", "eagle3", ["python", "convert_hf_to_gguf.py"]),
    ],
)
def test_the_card_shows_the_command_and_says_what_did_not_run(tmp_path, layout, kind, words) -> None:
    folder = exported(tmp_path / "a", servable(kind), layout)
    card, manifest = (folder / "README.md").read_text(), read_manifest(folder, "export")
    assert f"```sh\n{manifest['serve']}\n```" in card and manifest["layout"] == layout
    assert shlex.split(manifest["serve"])[: len(words)] == words and str(folder) in manifest["serve"]
    assert ("it was not run there" in card) == (layout != "speculators")


def test_another_layout_in_the_same_folder_leaves_nothing_of_the_first(tmp_path) -> None:
    folder = exported(tmp_path / "a", servable("eagle"), "vllm")
    exported(folder, servable("eagle"), "original")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "manifest.json", PICKLED]
    check_export(folder, head=servable("eagle"))


# ---- weights in parts ---------------------------------------------------------------------------------------------


def in_parts(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {f"w{i}": torch.full((50,), float(i)) for i in range(5)}
    folder.mkdir(exist_ok=True)
    for name, data in to_files(tensors, TENSORS, largest=500):
        (folder / name).write_bytes(data)
    return tensors


def test_large_weights_are_written_in_parts_with_an_index(tmp_path) -> None:
    tensors = in_parts(tmp_path)
    parts = [f"model-0000{part}-of-00003.safetensors" for part in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*parts, INDEX]
    assert json.loads((tmp_path / INDEX).read_text())["weight_map"].keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_tensors(tmp_path).items())
    (tmp_path / parts[1]).unlink()
    with pytest.raises(UserError, match="does not exist though its index names it"):
        read_tensors(tmp_path)
    save_file({"other": torch.ones(1)}, tmp_path / parts[1])
    with pytest.raises(UserError, match="and their index differ in other"):
        read_tensors(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(UserError, match="holds no weights"):
        read_tensors(tmp_path)


def test_a_pickle_with_more_than_tensors_is_refused(tmp_path) -> None:
    torch.save({"fc.weight": Path("anything")}, tmp_path / PICKLED)
    with pytest.raises(UserError, match="is not a whole file of weights"):
        read_tensors(tmp_path)
    torch.save({"fc.weight": 3}, tmp_path / PICKLED)
    with pytest.raises(UserError, match="something else than named weights"):
        read_tensors(tmp_path)
