"""A checkpoint that holds a target and its MTP module, in MiMo's layout, to a head: its own block, biases and all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from heads.checkpoint import load_head
from heads.export.folder import check_export
from heads.export.weights import to_files
from heads.pairs import supervised_pairs
from heads.target import FrozenTarget
from scripts import export, import_head
from tests import e2e
from tests.tiny import FAMILIES, features_of, tiny_tokenizer

PLACE = "model.mtp_layers.0."
NORMS = ("token_layernorm", "hidden_layernorm", "final_layernorm")


def checkpoint(folder: Path, *, shards: bool, modules: int = 1) -> dict[str, Tensor]:
    """A tiny random Qwen2, which MiMo's layers are, with modules; returns the weights of the first."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen2"](), dtype=torch.float32)
    width = model.config.hidden_size
    block = Qwen2DecoderLayer(model.config, 0)
    module = {f"{PLACE}{name}": torch.randn_like(one) * 0.2 for name, one in block.state_dict().items()}
    module |= {f"{PLACE}{norm}.weight": torch.rand(width) + 0.5 for norm in NORMS}
    module[f"{PLACE}input_proj.weight"] = torch.randn(width, 2 * width) * 0.2
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": modules}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for number in range(modules):
        weights |= {
            name.replace("layers.0.", f"layers.{number}.") if number else name: one for name, one in module.items()
        }
    weights = {name: one.clone() for name, one in weights.items()}
    (folder / "model.safetensors").unlink()
    for name, data in to_files(weights, "model.safetensors", largest=40_000 if shards else 10**9):
        (folder / name).write_bytes(data)
    assert (folder / "model.safetensors.index.json").is_file() == shards
    return module


def cfg(folder: Path, *more: str, name: str = "import_head"):
    return e2e.config("target=custom", f"target.path={folder}", "target.dtype=float32", *more, name=name)


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_the_module_in_a_checkpoint_becomes_a_head(tmp_path: Path, monkeypatch, shards: bool) -> None:
    """It says what MiMo's module says, built of transformers' Qwen2 layer, and goes back to where it came from."""
    monkeypatch.chdir(tmp_path)
    module = checkpoint(tmp_path / "mimo", shards=shards)
    import_head.run(cfg(tmp_path / "mimo", f"from={tmp_path / 'mimo'}", "run_dir=runs/own"))
    target = FrozenTarget.load(tmp_path / "mimo", dtype="float32")
    head = load_head(tmp_path / "runs/own/head", target=target)
    head.attach(target.weights)
    assert head.arguments["qkv_bias"] and head.layer.self_attn.q_proj.bias.any()

    ids = list(range(9, 20))
    features = features_of(target, [(ids, [True] * len(ids))], ())
    starts, _ = supervised_pairs(features.supervised_T, features.lengths, 1)
    with torch.no_grad():
        ours = head.logits(head.unroll(features, starts, 1))[0]
        torch.testing.assert_close(ours, theirs(target, module, features.ids_T, features.last_TD)[starts])

    export.run(
        cfg(tmp_path / "mimo", "head_dir=runs/own/head", "run_dir=runs/own", "export.dtype=float32", name="config")
    )
    check_export(tmp_path / "runs/own/export/vllm", head=head)
    back = load_file(tmp_path / "runs/own/export/vllm/model.safetensors")
    assert back.keys() == module.keys() and all(torch.equal(back[name], one) for name, one in module.items())


def theirs(target: FrozenTarget, module: dict[str, Tensor], ids_T: Tensor, last_TD: Tensor) -> Tensor:
    """MiMo's own reading: hidden state first in the projection, a Qwen2 layer, the norm, the target's projection."""
    model, length = target.model, len(ids_T) - 1

    def normed(x: Tensor, name: str) -> Tensor:
        norm = Qwen2RMSNorm(x.shape[-1], model.config.rms_norm_eps)
        norm.weight.data.copy_(module[f"{PLACE}{name}.weight"])
        return norm(x)

    block = Qwen2DecoderLayer(model.config, 0)
    own = {name.removeprefix(PLACE): one for name, one in module.items()}
    block.load_state_dict({name: own[name] for name in block.state_dict()})
    embedded = target.weights.embedding_VD[ids_T[1:]].clone()
    embedded[0] = 0
    parts = [normed(last_TD[:length], "hidden_layernorm"), normed(embedded, "token_layernorm")]
    x = torch.cat(parts, -1) @ module[f"{PLACE}input_proj.weight"].T
    positions = torch.arange(length)[None]
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    rope = model.base_model.rotary_emb(x[None], positions)
    out = block(x[None], attention_mask=mask, position_embeddings=rope, position_ids=positions)[0]
    return target.logits(normed(out, "final_layernorm"))


def test_several_modules_are_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "mimo", shards=False, modules=2)
    asked = cfg(tmp_path / "mimo", f"from={tmp_path / 'mimo'}", "run_dir=runs/own")
    assert "mtp_layers.1" in e2e.sentence(import_head.run, asked, capsys)
