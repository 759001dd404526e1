"""Does a real vLLM serve the exported head as our decoder measured it? Exit code 0 if it does, 1 if it does not.

    make serve-check
    python -m scripts.serve_check experiment=demo serve_python=.venv-serve/bin/python
    python -m scripts.serve_check --multirun experiment=servers head=eagle,eagle3,medusa,mtp
    python -m scripts.serve_check experiment=demo damage=taps      # a wrong export: must end with exit code 1

In float32 the text must be the same with and without the head, and every counter the same as ours; in bfloat16 the
server's acceptance length must lie inside our interval. A copy of the export that is broken on purpose must be noticed.
Where there is no export yet, the stages of the config come first. At the end stands a table of all runs checked so far.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from scripts.common import load_target, script, servable_head
from scripts.serving import served_target
from scripts.settings import check_value, plain

if TYPE_CHECKING:
    from eval.decode import Request
    from eval.server import Limits, Server
    from eval.trace import RequestTrace

LEAST = 20
_SETTINGS = {
    **dict.fromkeys(("gamma", "requests", "max_new_tokens", "rows", "batch"), int),
    **dict.fromkeys(("damage", "control"), str | None),
    **{"serve_python": str, "timeout": float, "dtypes": list[str]},
}


def run(cfg: DictConfig) -> bool:
    """Whether the server does what we measured; everything found is kept in runs/<name>/serve_check."""
    from rich.console import Console

    from eval.damage import CONTROLS, damage
    from eval.server_check import check, overview, to_lines
    from heads.artifact import MANIFEST, UserError, write_manifest
    from heads.export.folder import check_export
    from heads.foreign import check_interpreter
    from scripts import pipeline
    from scripts.prompts import some_requests

    values, started = plain(cfg), time.monotonic()
    for name, hint in _SETTINGS.items():
        check_value(name, values[name], hint)
    folder, export = Path(cfg.run_dir) / "serve_check", Path(cfg.run_dir) / "export"
    if not (export / MANIFEST).is_file():
        check_interpreter(cfg.serve_python)  # before the stages take their minutes
        pipeline.run(cfg)
    head = servable_head(cfg)
    head.check_depth(cfg.gamma, "gamma")
    manifest = check_export(export, head=head)
    check_interpreter(cfg.serve_python)
    if manifest["server"] != "vllm":
        raise UserError(f"{export} was exported for {manifest['server']}, not for vLLM; export it with export=vllm.")
    requests = some_requests(cfg, cfg.requests, "requests", least=LEAST)
    print(f"serve     {export} in vLLM: {len(requests)} held-out prompts, γ = {cfg.gamma}", flush=True)
    drafts = {"head": damage(export, cfg.damage, folder / "damaged") if cfg.damage else export}
    if cfg.control and not cfg.damage:
        kind = CONTROLS[manifest["method"]] if cfg.control == "auto" else cfg.control
        drafts["control"] = damage(export, kind, folder / "control")
    found: dict[str, dict[str, Any]] = {}
    good = True
    for dtype in cfg.dtypes:
        ours, limits = our_traces(cfg, dtype, requests, manifest["dtype"])
        options = {"gamma": cfg.gamma, "folder": folder, "say": lambda text: print(f"{'':10}{text}", flush=True)}
        comparisons = check(server(cfg, dtype, manifest), drafts, requests, ours, limits, **options)
        for name, comparison in comparisons.items():
            print("\n".join([f"{dtype}, {name}:", *(f"{'':10}{line}" for line in to_lines(comparison))]), flush=True)
            good &= bool(comparison.complaints) == (name == "control")
        found[dtype] = {name: comparison.to_json() for name, comparison in comparisons.items()}
        drafts.pop("control", None)  # once, in the first number format
    body = {
        "passed": good,
        "damage": cfg.damage,
        "control": cfg.control,
        "target": manifest["target"],
        "method": manifest["method"],
        "seconds": round(time.monotonic() - started),
        "found": found,
    }
    write_manifest(folder, "serve_check", body, plain(cfg))
    print(f"{'PASSED' if good else 'FAILED'}    requests, answers and logs are in {folder}", flush=True)
    Console().print(overview(checked_beside(Path(cfg.run_dir))))
    return good


def checked_beside(run_dir: Path) -> dict[str, Any]:
    """What was found about this run and those beside it, by name; what another version wrote is left out, and said."""
    from eval.server_check import overview
    from heads.artifact import MANIFEST, UserError, read_manifest

    found = {}
    for folder in sorted(path.parent for path in run_dir.parent.glob(f"*/serve_check/{MANIFEST}")):
        try:
            manifest = read_manifest(folder, "serve_check")
            overview({"": manifest})  # whether it has all that is looked up
        except (UserError, LookupError, TypeError, AttributeError, ValueError):
            print(f"          {folder} was written by another version and is left out; check it again", flush=True)
        else:
            found[folder.parent.name] = manifest
    return found


def our_traces(
    cfg: DictConfig, dtype: str, requests: Sequence[Request], stored: str
) -> tuple[list[RequestTrace], Limits]:
    """What our decoder does with the trained head, its weights rounded as they were exported."""
    from eval.decode import DecodeSettings, decode
    from eval.server import Limits
    from heads.checkpoint import load_head
    from heads.target import DTYPES

    target = load_target(cfg, dtype)
    head: Any = load_head(cfg.head_dir, target=target)
    head.to(DTYPES[stored]).to(device=target.device, dtype=target.dtype)
    head.attach(target.weights)
    settings = DecodeSettings(gamma=cfg.gamma, max_new_tokens=cfg.max_new_tokens, rows=cfg.rows)
    return decode(target, requests, head, settings), Limits(cfg.max_new_tokens, target.eos_token_ids)


def server(cfg: DictConfig, dtype: str, manifest: Mapping[str, Any]) -> Server:
    """vLLM over the target of the config, which must be a folder that vLLM can load too."""
    from eval.server import Server

    told = {"method": manifest["method"], "overrides": manifest["target_overrides"]}
    return Server(cfg.serve_python, served_target(cfg), dtype, **told, batch=cfg.batch, timeout=cfg.timeout)


@script("serve_check")
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.serve_check`."""
    if not run(cfg):
        sys.exit(1)


if __name__ == "__main__":
    main()
