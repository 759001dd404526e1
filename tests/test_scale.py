"""The README's table for planning is what the formula says, and the formula's new terms are right."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from heads.eagle3 import Eagle3Head
from heads.layers import BlockSizes
from heads.vocab import DraftVocabulary
from scripts.settings import storage_settings, train_settings
from tests import e2e
from training.estimate import Estimate, HeadSizes, estimate
from training.scale import GPU, STORAGES, TARGETS, WORK, _head_sizes, _target_sizes, scale_table

BEGIN, END = "<!-- scale: training/scale.py -->\n", "<!-- /scale -->"


def test_the_readme_has_the_table() -> None:
    found = re.search(f"{re.escape(BEGIN)}(.*?){re.escape(END)}", (e2e.ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None, f"README.md lacks {BEGIN.strip()} … {END}"
    assert found[1] == scale_table()


def test_the_sizes_are_those_of_the_model() -> None:
    """Up to the norms, against transformers' own class without memory."""
    config = TARGETS["8B"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    sizes = _target_sizes(config)
    assert sizes.parameters == pytest.approx(sum(one.numel() for one in model.parameters()), rel=1e-4)
    assert sizes.body == sizes.parameters - model.get_input_embeddings().weight.numel()


@pytest.mark.parametrize("size", TARGETS)
def test_what_online_and_fp8_change(size: str) -> None:
    target, head = _target_sizes(TARGETS[size]), _head_sizes("EAGLE-3", TARGETS[size])
    plain, fp8, online = (estimate(target, head, WORK, GPU, storage) for storage in STORAGES.values())
    assert plain.disk == 800_000_000 * (4 * target.hidden * 2 + 9)
    assert fp8.disk == 800_000_000 * (3 * (target.hidden + 4) + 2 * target.hidden + 9)
    assert online.disk == 800_000_000 * 5
    assert plain.collect_seconds == fp8.collect_seconds == online.collect_seconds
    assert plain.train_seconds == fp8.train_seconds
    forward = 2 * target.body * 800_000_000 / 400e12
    assert online.train_seconds == pytest.approx(plain.train_seconds + forward)


def experiment(name: str, *more: str) -> tuple[Estimate, Any]:
    """What an experiment for 8B takes on one GPU of 80 GB, and its config; 100,000 conversations as in the table."""
    cfg = e2e.config(f"experiment={name}", "target.path=x", "traffic.path=x", *more)
    config, training = TARGETS["8B"], train_settings(cfg)
    with torch.device("meta"):
        vocab = DraftVocabulary(torch.arange(cfg.head.draft_vocab_size), config.vocab_size)
        head = Eagle3Head(
            sizes=BlockSizes.of(config, config.vocab_size), vocab=vocab, depth=cfg.head.depth, taps=[2, 16, 29]
        )
    work = replace(
        WORK.times(0.1),
        epochs=training.epochs,
        batch_positions=cfg.generation.batch_size * (cfg.generation.max_prompt_tokens + cfg.generation.max_new_tokens),
        step_positions=training.global_batch_tokens // training.accumulation,
        recomputed=training.gradient_checkpointing,
    )
    return estimate(_target_sizes(config), HeadSizes.of("eagle3", head), work, GPU, storage_settings(cfg)), cfg


@pytest.mark.parametrize(
    ("name", "undone"),
    [
        ("chat_8b", "train.accumulation=1"),
        ("long_context", "train.accumulation=1"),
        ("long_context", "train.gradient_checkpointing=false"),
    ],
)
def test_an_experiment_for_one_gpu_of_80_gb_fits_it_and_would_not_without(name: str, undone: str) -> None:
    assert experiment(name)[0].fits and not experiment(name, undone)[0].fits


def test_what_the_experiments_say_of_disk_and_time() -> None:
    """The figures in their comments."""
    text = {name: (e2e.ROOT / f"conf/experiment/{name}.yaml").read_text() for name in ("chat_8b", "chat_70b")}
    online, stored = experiment("chat_8b")[0], experiment("chat_8b", "collect.states=stored")[0]
    assert f"they are {stored.disk / 1e12:.1f} TB" in text["chat_8b"]
    hours = [one.train_seconds / 3600 for one in (online, stored)]
    assert "4.8 hours instead of 1.5" in text["chat_8b"] and hours == pytest.approx([4.8, 1.5], abs=0.05)
    table = scale_table()
    for figure in ("52.44 TB", "32.78 TB"):
        assert f"| {figure} |" in table and f"{float(figure[:5]):.0f}" in text["chat_70b"]
