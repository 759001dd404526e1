"""What a vLLM in an environment of its own is told of the config: interpreter, target, how much at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from scripts.settings import generation_settings

if TYPE_CHECKING:
    from training.extracted import ExtractedStates, ExtractionSettings


def served_target(cfg: DictConfig) -> str:
    """The target as vLLM finds it: the whole path of a folder, or a Hub id. Raises UserError where it is neither."""
    from heads.artifact import UserError

    target = str(cfg.target.path)
    if cfg.target.gguf_file or cfg.target.adapter or target.endswith(".gguf"):
        raise UserError(
            f"The target {target} is a GGUF file or has an adapter, which is not served here; save it as one folder."
        )
    return str(Path(target).resolve()) if Path(target).is_dir() else target


def extraction_settings(cfg: DictConfig) -> ExtractionSettings | None:
    """How vLLM computes the states, out of collect; None where the target does in this process. Raises UserError where
    there is nothing for it to do."""
    from heads.artifact import UserError
    from training.extracted import ExtractionSettings

    how = cfg.collect
    if how.features == "transformers":
        if how.tensor_parallel != 1:
            raise UserError(
                f"collect.tensor_parallel={how.tensor_parallel} is about vLLM, but collect.features=transformers "
                f"starts none; leave it out, or set collect.features=vllm."
            )
        return None
    if how.answers == "regenerate" and how.engine == "transformers":
        raise UserError(
            "collect.features=vllm computes the states of answers that are there, but here the target writes them and "
            "has their states already; set collect.engine=openai or collect.answers=logged too, or leave it out."
        )
    if how.states == "online":
        raise UserError(
            "collect.features=vllm computes states to be stored, but collect.states=online stores none; leave one of "
            "them out."
        )
    if cfg.target.dtype == "float64":
        raise UserError("collect.features=vllm knows no target.dtype=float64; set float32, bfloat16 or float16.")
    if how.tensor_parallel > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"collect.tensor_parallel={how.tensor_parallel} gives all GPUs to one vLLM, so collect with one process: "
            f"`python -m`, not `accelerate launch`."
        )
    if not how.timeout > 0:
        raise UserError(f"collect.timeout={how.timeout} is not possible; give seconds above 0.")
    generation = generation_settings(cfg)
    return ExtractionSettings(
        python=cfg.serve_python,
        target=served_target(cfg),
        batch=generation.batch_size,
        length=generation.max_prompt_tokens + generation.max_new_tokens,
        timeout=how.timeout,
        tensor_parallel=how.tensor_parallel,
        trust_remote_code=cfg.target.trust_remote_code,
    )


def states_reader(cfg: DictConfig, rank: int) -> ExtractedStates | None:
    """What computes the states in place of the target here, where the config says so; each process has its own."""
    from training.extracted import ExtractedStates

    settings = extraction_settings(cfg)
    if settings is None:
        return None
    return ExtractedStates(settings, folder=cfg.features_dir, name=f"vllm-{rank:03d}")
