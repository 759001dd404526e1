"""Tiny random targets of four families, and what the tests build from them. Not a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from heads.base import TargetFeatures
from heads.target import FrozenTarget

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SIZES, tie_word_embeddings=False),
    "gemma": lambda: GemmaConfig(**SIZES, tie_word_embeddings=True),
}


def tiny_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Words w0, w1, … and the template's marks, split at white space."""
    marks = ["<pad>", "<bos>", "<|end|>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    others = [f"w{index}" for index in range(VOCABULARY - len(marks))]
    words = {word: index for index, word in enumerate(marks + others)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<|end|>",
        unk_token="<unk>",
        additional_special_tokens=marks[4:],
        chat_template=chat_template,
    )


def save_tiny(folder: Path, family: str = "llama", seed: int = 0, scale: float = 0.3) -> Path:
    """Write a tiny random target; `scale` spreads its weights so that its distributions are not flat."""
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, scale)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def bring_module(folder: Path) -> Path:
    """Give a saved target an MTP module of its own, under the names that Qwen3.5's checkpoints have."""
    weights, width = load_file(folder / "model.safetensors"), SIZES["hidden_size"]
    last = f"model.layers.{SIZES['num_hidden_layers'] - 1}."
    named = {name: f"mtp.layers.0.{name.removeprefix(last)}" for name in weights if name.startswith(last)}
    block = {new: weights[name].clone() for name, new in named.items()}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    module = {f"mtp.{norm}.weight": torch.ones(width) for norm in norms}
    module["mtp.fc.weight"] = torch.randn(width, 2 * width, generator=torch.Generator().manual_seed(0)) * 0.1
    save_file({**weights, **block, **module}, folder / "model.safetensors", {"format": "pt"})
    return folder


def load_tiny(folder: Path, family: str = "llama", dtype: str = "float64", seed: int = 0) -> FrozenTarget:
    """A tiny random target, saved under `folder` and loaded as users' targets are."""
    return FrozenTarget.load(save_tiny(folder / f"{family}{seed}", family, seed), dtype=dtype)


def features_of(
    target: FrozenTarget, documents: list[tuple[list[int], list[bool]]], taps: tuple[int, ...]
) -> TargetFeatures:
    """Packed features of (ids, supervised) documents, each by a plain forward of its own."""
    outputs = [target.forward(torch.tensor([ids]), taps=taps) for ids, _ in documents]
    last_TD = torch.cat([output.last_BTD[0] for output in outputs]).clone()
    return TargetFeatures(
        ids_T=torch.tensor([index for ids, _ in documents for index in ids]),
        supervised_T=torch.tensor([flag for _, flags in documents for flag in flags]),
        lengths=tuple(len(ids) for ids, _ in documents),
        taps_TE=torch.cat([output.taps_BTE[0] for output in outputs]).clone(),
        last_TD=last_TD,
        lse_T=target.logits(last_TD).logsumexp(-1),
    )
