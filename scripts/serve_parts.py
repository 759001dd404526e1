"""The parts of `scripts.serve_check`: our side of each comparison, and the server that it is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from scripts.common import load_target
from scripts.serving import served_target
from scripts.settings import plain

if TYPE_CHECKING:
    from eval.api_check import Finding
    from eval.decode import Request
    from eval.server import Limits, Server
    from eval.server_sampling import ServedLaw
    from eval.trace import RequestTrace
    from heads.target import FrozenTarget

Say = Callable[[str], None]
WIDE = "float32"  # the number format in which counters must be equal


def our_traces(
    cfg: DictConfig, dtype: str, requests: Sequence[Request], stored: str
) -> tuple[list[RequestTrace], Limits]:
    """What our decoder does with the trained head, its weights rounded as they were exported."""
    target, head = target_and_head(cfg, dtype, stored)
    return _decoded(cfg, target, head, requests), _limits(cfg, target)


def over_http(
    cfg: DictConfig, manifest: Mapping[str, Any], export: Path, requests: Sequence[Request], folder: Path, say: Say
) -> list[Finding]:
    """The real server, asked over its API: cfg.api.requests of the requests, evenly taken."""
    from dataclasses import replace

    from eval.api_check import check_api
    from eval.exactness import divergences

    chosen = [requests[index * len(requests) // cfg.api.requests] for index in range(cfg.api.requests)]
    target, head = target_and_head(cfg, WIDE, manifest["dtype"])
    ours = _decoded(cfg, target, head, chosen)
    draft = str(export.resolve())
    asked = replace(server(cfg, WIDE, manifest), draft=draft, gamma=cfg.gamma, batch=cfg.api.at_once)
    return check_api(
        asked,
        chosen,
        ours,
        _limits(cfg, target),
        at_once=cfg.api.at_once,
        folder=folder,
        look_closer=lambda requests, texts, truths: divergences(target, requests, texts, truths),
        say=say,
    )


def sampled(
    cfg: DictConfig,
    manifest: Mapping[str, Any],
    export: Path,
    requests: Sequence[Request],
    law: ServedLaw,
    folder: Path,
    say: Say,
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """The law above T = 0, and acceptance at each of cfg.gammas greedily and at cfg.temperature; what is left out of
    the config is left out here."""
    from dataclasses import replace

    from eval.server_sampling import check_gammas, check_law

    gammas = list(cfg.gammas)
    if not law.texts and not gammas:
        return [], []
    target, head = target_and_head(cfg, WIDE, manifest["dtype"])
    findings, rows = [], []
    one = server(cfg, WIDE, manifest)
    if law.texts:
        many = replace(one, batch=LAW_BATCH)
        for finding in check_law(
            many, export, requests[0].prompt, target, law, gamma=cfg.gamma, control=bool(cfg.control), folder=folder
        ):
            say(finding.line)
            findings.append(finding)
    for found in check_gammas(
        one,
        export,
        requests,
        target,
        head,
        gammas=gammas,
        temperatures=[0.0, float(cfg.temperature)],
        limits=_limits(cfg, target),
        rows=cfg.rows,
        folder=folder,
        say=say,
    ):
        say(found.finding.line)
        findings.append(found.finding)
        rows.append(found.to_json())
    return findings, rows


LAW_BATCH = 64  # texts that the server samples together


def target_and_head(cfg: DictConfig, dtype: str, stored: str) -> tuple[FrozenTarget, Any]:
    """The target in a number format, and the head on it with the weights that the export holds."""
    from heads.checkpoint import load_head
    from heads.target import DTYPES

    target = load_target(cfg, dtype)
    head: Any = load_head(cfg.head_dir, target=target)
    head.to(DTYPES[stored]).to(device=target.device, dtype=target.dtype)
    head.attach(target.weights)
    return target, head


def _decoded(cfg: DictConfig, target: FrozenTarget, head: Any, requests: Sequence[Request]) -> list[RequestTrace]:
    from eval.decode import DecodeSettings, decode

    settings = DecodeSettings(gamma=cfg.gamma, max_new_tokens=cfg.max_new_tokens, rows=cfg.rows)
    return decode(target, requests, head, settings)


def _limits(cfg: DictConfig, target: FrozenTarget) -> Limits:
    from eval.server import Limits

    return Limits(cfg.max_new_tokens, target.eos_token_ids)


def server(cfg: DictConfig, dtype: str, manifest: Mapping[str, Any]) -> Server:
    """vLLM over the target of the config, which must be a folder that vLLM can load too."""
    from eval.server import Server

    told = {"method": manifest["method"], "overrides": manifest["target_overrides"]}
    return Server(cfg.serve_python, served_target(cfg), dtype, **told, batch=cfg.batch, timeout=cfg.timeout)


def check_settings(cfg: DictConfig) -> ServedLaw:
    """The values of conf/serve_check.yaml; returns those of the law. Raises UserError."""
    from eval.damage import DAMAGE
    from eval.server_sampling import ServedLaw
    from heads.artifact import UserError
    from heads.export.folder import FORMATS, format_of
    from heads.target import DTYPES
    from scripts.settings import check_call, check_export, check_value

    values = plain(cfg)
    for name, hint in _SETTINGS.items():
        check_value(name, values[name], hint)
    for name in ("gamma", "max_new_tokens", "rows", "batch", "timeout"):
        if values[name] < 1:
            raise UserError(f"{name}={values[name]} is not possible; give at least 1.")
    if values["requests"] < LEAST:
        raise UserError(f"requests={values['requests']} are too few to compare; give at least {LEAST}.")
    for name, more in {"damage": (), "control": ("auto",)}.items():
        if values[name] is not None and values[name] not in (*DAMAGE, *more):
            raise UserError(f"{name}={values[name]} is unknown; choose one of {', '.join((*more, *DAMAGE))}, or null.")
    for name in ("requests", "at_once"):
        check_value(f"api.{name}", values["api"][name], int)
    check_call(ServedLaw, "law", values["law"])
    check_export(cfg)
    if format_of(layout := str(cfg.export.layout)).server != "vllm":
        loaded = " or ".join(f"export={name}" for name, one in FORMATS.items() if one.server == "vllm")
        raise UserError(f"scripts.serve_check asks vLLM, which does not load export={layout}; choose {loaded}.")
    asked, together = values["api"]["requests"], values["api"]["at_once"]
    if asked and not FEWEST <= asked <= values["requests"] or together < 2:
        raise UserError(
            f"api.requests={asked} must be 0 (leave it out) or from {FEWEST} to requests={values['requests']}, and "
            f"api.at_once at least 2, not {together}."
        )
    if unknown := [dtype for dtype in values["dtypes"] if dtype not in DTYPES]:
        raise UserError(f"dtypes={values['dtypes']}: {unknown[0]} is unknown; choose some of {', '.join(DTYPES)}.")
    if any(gamma < 1 for gamma in values["gammas"]) or not values["temperature"] > 0:
        raise UserError(
            f"gammas={values['gammas']} must all be at least 1, and temperature={values['temperature']} above 0."
        )
    return ServedLaw(**values["law"])


FEWEST = 8  # requests below which there is no interval
LEAST = 20  # requests of a check
_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("gamma", "requests", "max_new_tokens", "rows", "batch"), int),
    **dict.fromkeys(("damage", "control"), str | None),
    **{"serve_python": str, "timeout": float, "dtypes": list[str], "gammas": list[int], "temperature": float},
}
