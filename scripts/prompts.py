"""The prompts of a run's traffic as requests to decode, rendered as the server would see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from scripts.settings import generation_settings, plain

if TYPE_CHECKING:
    from eval.decode import Request
    from training.traffic import Conversation


def held_out_requests(cfg: DictConfig) -> list[Request]:
    """The first turn of every held-out conversation, as the server would see it; prompts that are too long, refused by
    the chat template, or with ids outside the vocabulary are counted aloud and left out."""
    from training.traffic import load_traffic

    held_out = load_traffic(cfg.traffic_dir).held_out
    fitting = first_turns(cfg, held_out)
    if len(fitting) < len(held_out):
        longest = generation_settings(cfg).max_prompt_tokens
        why = f"prompts over {longest} tokens, refused by the chat template, or with ids outside the vocabulary"
        print(f"          {len(held_out) - len(fitting)} left out: {why}", flush=True)
    return fitting


def some_requests(cfg: DictConfig, count: int, setting: str, *, least: int = 1) -> list[Request]:
    """So many held-out requests, evenly taken. Raises UserError, naming the setting, when there are not as many."""
    from heads.artifact import UserError

    there = held_out_requests(cfg)
    if not least <= count <= len(there):
        raise UserError(
            f"{setting}={count} must be between {least} and the {len(there)} held-out prompts of {cfg.traffic_dir}; "
            f"set it so, or collect more traffic."
        )
    return [there[index * len(there) // count] for index in range(count)]


def train_requests(cfg: DictConfig, count: int) -> list[Request]:
    """The first turns of at most so many train conversations, evenly taken: for what must not see the held-out ones."""
    from training.traffic import load_traffic

    there = load_traffic(cfg.traffic_dir).train
    count = min(count, len(there))
    return first_turns(cfg, [there[index * len(there) // count] for index in range(count)])


def tokenizer_of(cfg: DictConfig) -> Any:
    """The target's tokenizer, without its weights."""
    from heads.target_files import load_tokenizer

    return load_tokenizer(
        cfg.target.path, gguf_file=cfg.target.gguf_file, trust_remote_code=cfg.target.trust_remote_code
    )


def first_turns(cfg: DictConfig, conversations: Sequence[Conversation]) -> list[Request]:
    """The first turns of conversations as requests, without those that are too long, that the chat template refuses, or
    whose ids the tokenizer does not know.

    Raises UserError when it refuses them all.
    """
    from eval.decode import Request
    from heads.artifact import UserError
    from heads.target import render

    tokenizer, template = tokenizer_of(cfg), plain(cfg.target)["template"]
    requests: list[Request] = []
    refusal: UserError | None = None
    known = len(tokenizer)
    for item in conversations:
        if item.ids:
            if max(item.prompt_ids()) < known:
                requests.append(Request(item.id, item.slice, item.prompt_ids()))
            continue
        try:
            prompt = render(tokenizer, item.messages(), tools=item.tools, template=template)
        except UserError as error:
            refusal = error
        else:
            requests.append(Request(item.id, item.slice, tuple(prompt)))
    if refusal is not None and not requests:
        raise refusal
    longest = generation_settings(cfg).max_prompt_tokens
    return [request for request in requests if len(request.prompt) <= longest]
