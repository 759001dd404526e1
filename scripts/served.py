"""A running server in the decoder's stead: `python -m scripts.evaluate server.url=…` comes here.

The held-out prompts go to the server as token ids, greedily and at the temperatures of eval; acceptance is what its
`/metrics` count meanwhile. Neither the head nor the target's weights are needed here, only traffic and tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from scripts.prompts import held_out_requests, tokenizer_of
from scripts.settings import build, check_target_path, plain
from scripts.show import Steps

if TYPE_CHECKING:
    from eval.api import ServerApi
    from eval.decode import Request

KIND, FILE = "served", "server.json"
LOOKED_AT = 4  # prompts whose ids the server must agree with


def run(cfg: DictConfig) -> None:
    """Write runs/<name>/server/server.json: the numbers of the report, as far as a server's counters give them."""
    from rich.console import Console

    from eval.api import ServerApi
    from eval.sampling import Sampling
    from eval.served import SOURCES, counts_itself, no_interval, rows_of, serve, speculating, to_table
    from heads.artifact import provenance, read_manifest, write_json, write_manifest

    values = plain(cfg.server)
    check_target_path(cfg)
    plan, folder = build(cfg, "eval", seed=cfg.seed), Path(cfg.run_dir) / "server"
    together = values["at_once"] or plan.rows
    with ServerApi(values["url"], model=values["model"], timeout=values["timeout"], at_once=together) as api:
        speculating(api)
        version = api.version()
        print(f"evaluate  {api.root}, served at {api.url} by {version or 'an unknown version'}", flush=True)
        check_model(cfg, api)
        requests = fitting(held_out_requests(cfg), api, plan.max_new_tokens)
        check_vocabulary(tokenizer_of(cfg), api, requests)
        at_once = values["at_once"] or (together if counts_itself(api, requests[0]) else 1)
        rows: list[dict[str, Any]] = []
        with Steps() as steps:
            for heat in plan.temperatures:
                sampling = Sampling(heat, top_p=plan.top_p if heat else 1.0)
                steps.begin(f"{'greedy' if heat == 0 else f'T = {heat:g}'}, {at_once} at once", len(requests))
                done = serve(
                    api,
                    requests,
                    sampling,
                    plan.max_new_tokens,
                    at_once=at_once,
                    seed=cfg.seed,
                    on_done=steps.advance,
                )
                rows += rows_of(done)
    traffic = read_manifest(cfg.traffic_dir, "traffic")
    body = {
        "server": {"url": api.url, "model": api.model, "root": api.root, "version": version},
        "counted": SOURCES[rows[0]["counted"]],
        "results": rows,
        "traffic": {"held_out": True, "fingerprints": traffic["fingerprints"]},
    }
    write_json(folder / FILE, {**body, "definitions": definitions(), "provenance": provenance(plain(cfg))})
    write_manifest(folder, KIND, {"files": [FILE], **body["server"]}, plain(cfg))
    Console().print(to_table(rows))
    print(f"{no_interval(rows) or SOURCES[rows[0]['counted']]}\n\nThe numbers: {folder / FILE}", flush=True)


def definitions() -> dict[str, str]:
    """What the numbers mean, and what is different of a server's."""
    from eval.acceptance import DEFINITIONS
    from eval.served import NUMBERS

    own = {name: DEFINITIONS[name] for name in NUMBERS if name in DEFINITIONS}
    return {
        **own,
        "tokens_per_second": "Written tokens / wall clock of all requests, prompts included, `at_once` at a time.",
        "rounds": "Rounds with a proposal, counted before the text is cut: no round is censored, and the drafts behind "
        "the end of a text count as well.",
    }


def check_model(cfg: DictConfig, api: ServerApi) -> None:
    """Raises UserError when what is served has another name than the target, unless server.model says it is right."""
    from heads.artifact import UserError

    names = {Path(one).name.lower() for one in (api.root, api.model)}
    if cfg.server.model is None and Path(str(cfg.target.path)).name.lower() not in names:
        raise UserError(
            f"The server at {api.url} serves {api.root}, but target.path is {cfg.target.path}; start it with that "
            f"target, set target.path=, or say server.model={api.model} if they are the same."
        )


def check_vocabulary(tokenizer: Any, api: ServerApi, requests: Sequence[Request]) -> None:
    """Raises UserError when the server splits text into other ids than the target's tokenizer; a server that does not
    show its tokenizer is taken at its word, which is said."""
    from heads.artifact import UserError

    for request in requests[:LOOKED_AT]:
        text = tokenizer.decode(list(request.prompt), clean_up_tokenization_spaces=False)
        theirs = api.tokenize(text)
        if theirs is None:
            print("          the server does not show its tokenizer; its vocabulary is taken to be ours", flush=True)
            return
        if theirs != tokenizer.encode(text, add_special_tokens=False):
            raise UserError(
                f"The server at {api.url} has another vocabulary than {tokenizer.name_or_path}: the prompt of "
                f"{request.request_id} has other token ids there; serve the target that the traffic was made for."
            )


def fitting(requests: Sequence[Request], api: ServerApi, max_new_tokens: int) -> list[Request]:
    """The requests that fit into the server's context; the others are counted aloud. Raises UserError when none do."""
    from heads.artifact import UserError

    if api.max_length is None:
        return list(requests)
    found = [request for request in requests if len(request.prompt) + max_new_tokens <= api.max_length]
    if not found:
        raise UserError(
            f"No held-out prompt fits into the {api.max_length} positions of the server at {api.url} with "
            f"eval.max_new_tokens={max_new_tokens}; start it with a larger --max-model-len, or lower that."
        )
    if len(found) < len(requests):
        print(f"          {len(requests) - len(found)} left out: over {api.max_length} positions there", flush=True)
    return found
