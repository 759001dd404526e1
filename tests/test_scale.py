"""The README's table for planning is what the formula says, and the formula's new terms are right."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import LlamaForCausalLM

from tests import e2e
from training.estimate import estimate
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
