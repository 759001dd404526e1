"""The folder that vLLM loads: names, exceptions, refusals, the way back, and the model card."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eval.acceptance import measure
from eval.report import Run, build_report
from eval.report_table import to_markdown
from eval.trace import RequestTrace
from heads.artifact import UserError, read_manifest, sha256_file
from heads.base import DraftHead
from heads.checkpoint import class_path
from heads.eagle3 import Eagle3Head
from heads.export.card import Evidence
from heads.export.folder import FORMATS, check_export, export_head
from heads.export.imported import import_head
from heads.export.layout import OfTarget
from heads.vocab import DraftVocabulary
from tests.servable import SERVABLE, servable
from tests.simulated_traces import iid_rounds, trace_of
from tests.test_head_checkpoint import FINGERPRINT, FLAGS, tiny_head

FILES = ["README.md", "config.json", "manifest.json", "model.safetensors"]
TINY = OfTarget(sizes=tiny_head().arguments["sizes"])


def to_vllm(head: DraftHead, dtype: str):
    return FORMATS["vllm"].layout_of(class_path(head)).write(head, dtype)


def of(head: DraftHead) -> OfTarget:
    """The target that a head is attached to."""
    return OfTarget(weights=head.target)


def exported(folder: Path, head: Eagle3Head | None = None, **options) -> Path:
    export_head(head or tiny_head(), folder, target_fingerprint=FINGERPRINT, target_path="some/target", **options)
    return folder


def traces_of() -> list[RequestTrace]:
    rng = np.random.default_rng(0)
    return [trace_of(iid_rounds(rng, alpha=0.6, gamma=3, count=20), request_id=f"r{i}") for i in range(20)]


def evidence() -> Evidence:
    traces = traces_of()
    run = Run("eagle3", "float32", 0.0, 3, traces, [])
    report = build_report(
        runs=[run], target={"name": "tiny"}, head={"name": "eagle3"}, traffic={"held_out": True}, provenance={}
    )
    return Evidence(report, to_markdown(report))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_names_shapes_and_configuration(tmp_path, dtype) -> None:
    head = tiny_head()
    folder = exported(tmp_path / "export", head, dtype=dtype)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    tensors = load_file(folder / "model.safetensors")
    block = "layers.0."
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": [32, 96],
        f"{block}input_layernorm.weight": [32],
        f"{block}hidden_norm.weight": [32],
        f"{block}self_attn.q_proj.weight": [32, 64],
        f"{block}self_attn.k_proj.weight": [16, 64],
        f"{block}self_attn.v_proj.weight": [16, 64],
        f"{block}self_attn.o_proj.weight": [32, 32],
        f"{block}post_attention_layernorm.weight": [32],
        f"{block}mlp.gate_proj.weight": [48, 32],
        f"{block}mlp.up_proj.weight": [48, 32],
        f"{block}mlp.down_proj.weight": [32, 48],
        "norm.weight": [32],
        "lm_head.weight": [40, 32],
        "d2t": [40],
        "t2d": [96],
    }
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    assert kinds.pop("d2t") == torch.int64 and kinds.pop("t2d") == torch.bool
    assert set(kinds.values()) == {getattr(torch, dtype)}
    assert torch.equal(torch.arange(40) + tensors["d2t"], head.vocab.ids_W)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], head.vocab.ids_W)
    for ours, theirs in (("hidden_norm", "hidden_norm"), ("layer.mlp.up_proj", "mlp.up_proj")):
        expected = head.state_dict()[f"{ours}.weight"].to(getattr(torch, dtype))
        assert torch.equal(tensors[f"{block}{theirs}.weight"], expected)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and "num_aux_hidden_states" not in config
    assert (config["draft_vocab_size"], config["vocab_size"], config["num_hidden_layers"]) == (40, 96, 1)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["norm_before_residual"] is config["fc_norm"] is config["norm_output"] is False
    assert config["tie_word_embeddings"] is False and config["dtype"] == dtype


def test_the_flags_and_a_fourth_tap_reach_the_configuration() -> None:
    head = tiny_head(norm_before_residual=True, fc_norm=True, norm_output=True, taps=[0, 1, 3, 7])
    config, tensors = to_vllm(head, "float32")
    assert config["norm_before_residual"] is config["fc_norm"] is config["norm_output"] is True
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3, 7] and config["num_aux_hidden_states"] == 4
    assert [name for name in tensors if name.startswith("fc_norm")] == [f"fc_norm.{i}.weight" for i in range(4)]


def test_five_taps_come_back_too(tmp_path) -> None:
    head = tiny_head(taps=[0, 1, 3, 5, 7], fc_norm=True)
    folder = exported(tmp_path / "export", head, dtype="float32")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3, 5, 7] and config["num_aux_hidden_states"] == 5
    assert list(tensors["fc.weight"].shape) == [32, 5 * 32] and "fc_norm.4.weight" in tensors
    assert import_head(folder).arguments == head.arguments


def test_norms_on_queries_and_keys_make_it_a_qwen3_block(tmp_path) -> None:
    plain, head = tiny_head(), tiny_head(qk_norm=True)
    (bare, without), (config, tensors) = to_vllm(plain, "float32"), to_vllm(head, "float32")
    assert {**config, "architectures": 0, "model_type": 0} == {**bare, "architectures": 0, "model_type": 0}
    assert config["architectures"] == ["Eagle3Qwen3ForCausalLM"] and config["model_type"] == "qwen3"
    norms = {f"layers.0.self_attn.{part}_norm.weight": (8,) for part in "qk"}
    assert {name: tuple(tensors[name].shape) for name in tensors.keys() - without.keys()} == norms
    for part in "qk":
        ours = head.layer.self_attn.get_parameter(f"{part}_norm.weight")
        assert torch.equal(tensors[f"layers.0.self_attn.{part}_norm.weight"], ours)
    # A block that says it is one and lacks them would be loaded with norms of one.
    folder = exported(tmp_path / "export", head)
    path = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if "k_norm" not in name}, path)
    with pytest.raises(UserError, match="k_norm.weight is missing"):
        import_head(folder)


def test_a_full_vocabulary_needs_no_mapping() -> None:
    config, tensors = to_vllm(tiny_head(draft_size=96), "float32")
    assert config["draft_vocab_size"] == config["vocab_size"] and not {"d2t", "t2d"} & set(tensors)


@pytest.mark.parametrize("arguments", [*FLAGS, {"draft_size": 96}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_there_and_back_and_there_is_byte_identical(tmp_path, arguments, dtype) -> None:
    head = tiny_head(**arguments)
    folder = exported(tmp_path / "a", head, dtype=dtype)
    again = import_head(folder)
    assert type(again) is Eagle3Head and again.arguments == head.arguments
    assert torch.equal(again.vocab.ids_W, head.vocab.ids_W) and again.vocab.size == head.vocab.size
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.to(getattr(torch, dtype)))
    second = exported(tmp_path / "b", again, dtype=dtype)
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (second / name).read_bytes()


def test_a_foreign_folder_comes_in_too(tmp_path) -> None:
    folder = exported(tmp_path / "export")
    (folder / "manifest.json").unlink()
    path = folder / "model.safetensors"
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in load_file(path).items()}
    renamed["d2t"] = renamed["d2t"].to(torch.int32)
    save_file(renamed, path)
    with pytest.raises(UserError, match="how many layers its target has; give the target"):
        import_head(folder)
    assert torch.equal(import_head(folder, of_target=TINY).fc.weight, tiny_head().fc.weight.bfloat16())


def test_the_manifest_tells_what_it_was_made_for(tmp_path) -> None:
    folder = exported(tmp_path / "export", evidence=evidence(), config={"name": "x"})
    manifest = read_manifest(folder, "export")
    assert manifest["target"] == FINGERPRINT and manifest["method"] == "eagle3" and manifest["server"] == "vllm"
    assert manifest["files"] == {name: sha256_file(folder / name) for name in FILES if name != "manifest.json"}
    assert manifest["provenance"]["config"] == {"name": "x"}
    (row,) = manifest["numbers"]
    measured = measure(traces_of(), gamma=3)
    assert row["tokens_per_round"]["value"] == measured.tokens_per_round.value and row["gamma"] == 3
    assert check_export(folder) == check_export(folder, head=tiny_head()) == manifest
    with pytest.raises(UserError, match="was not exported from the head as it is now"):
        check_export(folder, head=tiny_head(norm_output=True))
    other = tiny_head()
    other.norm.weight.data[0] += 0.5
    with pytest.raises(UserError, match="was not exported from the head as it is now"):
        check_export(folder, head=other)
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config.json is not the file that the manifest describes"):
        check_export(folder)


def test_the_model_card_serves_defines_and_measures(tmp_path) -> None:
    folder = tmp_path / "an export"
    export_head(
        tiny_head(),
        folder,
        target_fingerprint=FINGERPRINT,
        target_path="a target",
        evidence=evidence(),
        licence="Mine.",
    )
    card = (folder / "README.md").read_text()
    (line,) = [line for line in card.splitlines() if line.startswith("vllm serve ")]
    words = shlex.split(line)
    assert words[:4] == ["vllm", "serve", "a target", "--speculative-config"]
    assert json.loads(words[4]) == {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}
    assert line == read_manifest(folder, "export")["serve"]
    assert evidence().table.splitlines()[0] in card and "**tokens/round**: Measured: 1 + S(1)" in card
    assert f"in the place of `{folder}`" in card and "By Draftsmith's own decoder" in card
    assert card.startswith("---\n") and "\n## Licence\n\nMine.\n" in card
    assert FINGERPRINT["template"] in card and "[2, 4, 5]" in card


def test_the_card_says_when_nothing_was_measured(tmp_path) -> None:
    card = (exported(tmp_path / "export") / "README.md").read_text()
    assert "exported without an evaluation" in card and '"num_speculative_tokens": 4' in card
    assert "the target's licence" in card


def spoil_norm(head: Eagle3Head) -> None:
    del head.hidden_norm.weight


def spoil_unknown(head: Eagle3Head) -> None:
    head.register_buffer("extra", torch.ones(1))


def spoil_bias(head: Eagle3Head) -> None:
    head.fc.bias = torch.nn.Parameter(torch.ones(32))


def spoil_finite(head: Eagle3Head) -> None:
    head.lm_head.weight.data[0, 0] = torch.inf


def spoil_zero(head: Eagle3Head) -> None:
    head.norm.weight.data.zero_()


def spoil_taps(head: Eagle3Head) -> None:
    head.arguments["taps"] = [3, 5, 6]


def spoil_vocab_order(head: Eagle3Head) -> None:
    head.vocab = DraftVocabulary(head.vocab.ids_W.flip(0), 96)


def spoil_vocab_range(head: Eagle3Head) -> None:
    head.vocab = DraftVocabulary(head.vocab.ids_W + 60, 96)


def spoil_vocab_length(head: Eagle3Head) -> None:
    head.vocab = DraftVocabulary(head.vocab.ids_W[:-1], 96)


def spoil_act(head: Eagle3Head) -> None:
    head.arguments["sizes"]["hidden_act"] = "gelu"


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (spoil_norm, "hidden_norm.weight is missing"),
        (spoil_unknown, "extra has no place in vLLM's EAGLE-3 layout"),
        (spoil_bias, "fc.bias has no place in vLLM's EAGLE-3 layout"),
        (spoil_finite, "lm_head.weight is not finite"),
        (spoil_zero, "norm.weight is zero throughout"),
        (spoil_taps, r"reads the taps \[2, 4, 5\] but says \[3, 5, 6\]"),
        (spoil_vocab_order, "must be ascending, distinct ids below 96"),
        (spoil_vocab_range, "must be ascending, distinct ids below 96"),
        (spoil_vocab_length, "has 39 tokens but lm_head has 40 rows"),
        (spoil_act, "has silu only, not gelu"),
    ],
)
def test_what_the_server_would_misread_is_refused(tmp_path, spoil, sentence) -> None:
    head = tiny_head()
    spoil(head)
    with pytest.raises(UserError, match=sentence):
        exported(tmp_path / "export", head)
    assert not (tmp_path / "export").exists()


def test_a_range_too_narrow_for_the_weights_is_refused() -> None:
    head = tiny_head()
    head.lm_head.weight.data[0, 0] = 1e6
    with pytest.raises(UserError, match="lm_head.weight is not finite"):
        to_vllm(head, "float16")
    with pytest.raises(UserError, match="export.dtype='int8' is unknown; choose one of bfloat16"):
        to_vllm(head, "int8")


def test_other_peoples_files_are_left_alone(tmp_path) -> None:
    folder = exported(tmp_path / "export")
    exported(folder, tiny_head(fc_norm=True))
    (folder / "tokenizer.json").write_text("mine")
    with pytest.raises(UserError, match=r"holds tokenizer.json, which is not part of an export"):
        exported(folder)


def without(name: str):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without("d2t"), "d2t is missing"),
        (without("layers.0.hidden_norm.weight"), "layers.0.hidden_norm.weight is missing"),
        (
            lambda tensors: {**tensors, "embed_tokens.weight": torch.ones(96, 32)},
            "embed_tokens.weight should be the target's own embedding; give the target",
        ),
        (lambda tensors: {**tensors, "d2t": tensors["d2t"] + torch.arange(40)}, "d2t"),
        (lambda tensors: {**tensors, "d2t": tensors["d2t"][:-1]}, "does not hold 40 offsets"),
        (lambda tensors: {**tensors, "t2d": ~tensors["t2d"]}, "contradict each other"),
    ],
)
def test_a_folder_that_does_not_add_up_is_not_imported(tmp_path, change, sentence) -> None:
    path = exported(tmp_path / "export") / "model.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(UserError, match=sentence):
        import_head(tmp_path / "export")


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("config.json", None, "holds no config.json"),
        ("config.json", "{", "is not valid JSON"),
        ("config.json", '{"architectures": ["LlamaForCausalLM"]}', "of the architecture"),
        ("config.json", '{"architectures": ["LlamaForCausalLMEagle3"]}', "lacks hidden_size"),
        ("model.safetensors", None, "holds no weights"),
        ("model.safetensors", "short", "is not a whole file of weights"),
    ],
)
def test_a_bad_folder_is_one_sentence(tmp_path, name, text, sentence) -> None:
    folder = exported(tmp_path / "export")
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(UserError, match=sentence):
        import_head(folder)


@pytest.mark.parametrize("kind", SERVABLE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_kind_goes_there_and_back_and_there(tmp_path, kind, dtype) -> None:
    head = servable(kind)
    manifest = export_head(head, tmp_path / "a", target_fingerprint=FINGERPRINT, target_path="some/target", dtype=dtype)
    again = import_head(tmp_path / "a", of_target=of(head))
    assert type(again) is type(head) and again.arguments == head.arguments and again.vocab.full
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.to(getattr(torch, dtype)))
    again.attach(head.target)
    export_head(again, tmp_path / "b", target_fingerprint=FINGERPRINT, target_path="some/target", dtype=dtype)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert check_export(tmp_path / "a", head=head)["method"] == manifest["method"]


# As the server's own classes name them, for a block of one residual layer and two heads of attention.
LLAMA = [f"self_attn.{name}_proj.weight" for name in "qkvo"] + [
    f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")
]
WANTED = {
    "eagle": ["fc.weight", *(f"layers.0.{name}" for name in [*LLAMA, "post_attention_layernorm.weight"])],
    "medusa": ["lm_head.weight", *(f"blocks.{i}.layers.0.{part}" for i in range(4) for part in ("weight", "bias"))],
    "medusa-own": [
        *(f"lm_heads.{i}.weight" for i in range(4)),
        *(f"blocks.{i}.layers.{j}.{part}" for i in range(4) for j in range(2) for part in ("weight", "bias")),
    ],
    "mtp-ernie": [
        *(f"model.mtp_{name}.0.weight" for name in ("emb_norm", "hidden_norm", "linear_proj")),
        *(f"model.mtp_block.0.{name}" for name in LLAMA),
        *(f"model.mtp_block.0.{name}_layernorm.weight" for name in ("input", "post_attention")),
    ],
    "mtp": [
        *(f"model.mtp_layers.0.{name}" for name in [*LLAMA, "input_proj.weight"]),
        *(f"model.mtp_layers.0.self_attn.{name}_proj.bias" for name in "qkv"),
        *(
            f"model.mtp_layers.0.{name}_layernorm.weight"
            for name in ("token", "hidden", "input", "post_attention", "final")
        ),
    ],
}


@pytest.mark.parametrize("kind", WANTED)
def test_the_server_finds_its_names(kind) -> None:
    assert sorted(to_vllm(servable(kind), "float32")[1]) == sorted(WANTED[kind])


def test_what_each_kind_must_say() -> None:
    """Settings that the server reads in silence, and the order of what an MTP module joins."""
    settings, tensors = to_vllm(servable("medusa"), "float32")
    assert settings["medusa_fc_bias"] is settings["original_lm_head"] is True
    assert [key for key in settings if "num" in key and ("heads" in key or "layers" in key)] == [
        "num_heads",
        "num_hidden_layers",
    ]
    assert torch.equal(tensors["lm_head.weight"], servable("medusa").target.lm_head_VD)
    assert "original_lm_head" not in to_vllm(servable("medusa-own"), "float32")[0]
    ernie, mimo = servable("mtp-ernie"), servable("mtp")
    joined = to_vllm(ernie, "float32")[1]["model.mtp_linear_proj.0.weight"]
    assert torch.equal(joined, ernie.state_dict()["proj.weight"])
    first, second = to_vllm(mimo, "float32")[1]["model.mtp_layers.0.input_proj.weight"].chunk(2, 1)
    assert torch.equal(torch.cat([second, first], 1), mimo.state_dict()["proj.weight"])
    assert (
        to_vllm(ernie, "float32")[0]["num_hidden_layers"] == 8
        and not to_vllm(mimo, "float32")[1]["model.mtp_layers.0.self_attn.q_proj.bias"].any()
    )


def test_an_mtp_module_needs_a_word_about_the_target(tmp_path) -> None:
    manifest = export_head(servable("mtp-ernie"), tmp_path / "a", target_fingerprint=FINGERPRINT, target_path="t")
    words = shlex.split(manifest["serve"])
    assert words[5] == "--hf-overrides"
    assert json.loads(words[6]) == {"num_nextn_predict_layers": 1, "target_layer_count": 8}


@pytest.mark.parametrize("kind", ["eagle", "medusa", "mtp"])
def test_kinds_that_the_server_drafts_with_from_the_whole_vocabulary(kind) -> None:
    few = DraftVocabulary(torch.arange(40), 96)
    with pytest.raises(UserError, match=r"40 of 96 tokens; train it with head.draft_vocab_size=null"):
        to_vllm(servable(kind, vocab=few), "float32")


def test_a_medusa_that_the_server_would_read_otherwise_is_refused() -> None:
    with pytest.raises(UserError, match=r"has a bias or a cap; train the head with head.projection=own"):
        to_vllm(servable("medusa", softcap=30.0), "float32")
    to_vllm(servable("medusa-own", softcap=30.0), "float32")


def test_a_kind_that_no_server_loads_is_refused() -> None:
    with pytest.raises(UserError, match=r"no layout of vLLM for a head of the kind heads.hydra_mlp.HydraHead"):
        FORMATS["vllm"].layout_of("heads.hydra_mlp.HydraHead")
