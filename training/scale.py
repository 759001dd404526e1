"""The README's table for planning: what a million conversations cost, by the formula of `training.estimate`.

It is made of sizes alone; a test holds the README to it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import LlamaConfig

from heads.base import DraftHead
from heads.eagle3 import Eagle3Head
from heads.layers import BlockSizes
from heads.mtp import MTPHead
from heads.vocab import DraftVocabulary
from training.estimate import USABLE, HeadSizes, Machine, TargetSizes, Workload, estimate
from training.store import STORED, Storage

_LLAMA: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
TARGETS = {  # Llama 3.1's sizes
    "8B": LlamaConfig(
        **_LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32
    ),
    "70B": LlamaConfig(
        **_LLAMA, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
    ),
}
HEADS: dict[str, tuple[type[DraftHead], int]] = {"EAGLE-3": (Eagle3Head, 8192), "MTP": (MTPHead, 128256)}
STORAGES = {
    "stored, bf16": STORED,
    "stored, taps fp8": Storage(dtype="fp8"),
    "online": Storage(states="online"),
}
WORK = Workload(
    prompt_tokens=500_000_000,
    answer_tokens=300_000_000,
    epochs=1,
    batch_positions=64 * 800,
    step_positions=8192,
)
GPU = Machine(flops=400e12, generated=12, memory=80e9)


def scale_table() -> str:
    """Markdown: disk, GPU hours and GPUs of each target, head and way to keep states."""
    lines = [
        "| target | head | states | disk | collecting | an epoch of training | GPUs that hold it |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    assert GPU.memory is not None
    for size, config in TARGETS.items():
        target = _target_sizes(config)
        for name in HEADS:
            head = _head_sizes(name, config)
            for states, storage in STORAGES.items():
                if storage.dtype == "fp8" and not head.needs.taps:
                    continue  # FP8 is for taps alone
                found = estimate(target, head, WORK, GPU, storage)
                gpus = math.ceil(found.memory / (USABLE * GPU.memory))
                hours = [f"{seconds / 3600:,.1f} h" for seconds in (found.collect_seconds, found.train_seconds)]
                disk = f"{found.disk / 1e12:.2f} TB" if found.disk >= 1e12 else f"{found.disk / 1e9:.1f} GB"
                lines.append(f"| {size} | {name} | {states} | {disk} | {hours[0]} | {hours[1]} | {gpus} |")
    return "\n".join(lines) + "\n"


def _target_sizes(config: LlamaConfig) -> TargetSizes:
    """A Llama's own count: embedding and projection apart, attention and MLP in each layer; norms are left out."""
    width, inner = config.hidden_size, config.intermediate_size
    head_dim = width // config.num_attention_heads
    keys = config.num_key_value_heads * head_dim
    layer = 2 * width * width + 2 * width * keys + 3 * width * inner
    body = config.num_hidden_layers * layer + width * config.vocab_size
    return TargetSizes(
        parameters=body + width * config.vocab_size,
        body=body,
        hidden=width,
        inner=inner,
        vocab=config.vocab_size,
        keys=2 * config.num_hidden_layers * keys,
        itemsize=2,
    )


def _head_sizes(name: str, config: LlamaConfig) -> HeadSizes:
    made, width = HEADS[name]
    sizes = BlockSizes.of(config, config.vocab_size)
    with torch.device("meta"):
        head = made(sizes=sizes, vocab=DraftVocabulary(torch.arange(width), config.vocab_size), depth=4)
    return HeadSizes.of(name, head)
