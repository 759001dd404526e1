"""Does a real vLLM serve the exported head as our decoder measured it? Exit code 0 if it does, 1 if it does not.

    make serve-check
    python -m scripts.serve_check experiment=demo serve_python=.venv-serve/bin/python
    python -m scripts.serve_check --multirun experiment=servers head=eagle,eagle3,medusa,mtp
    python -m scripts.serve_check experiment=demo damage=taps      # a wrong export: must end with exit code 1
    python -m scripts.serve_check experiment=servers head=eagle3 export=speculators run_dir=runs/servers/speculators
    python -m scripts.serve_check experiment=demo 'gammas=[1,3,5]' law.texts=1500

In float32 the text must be the same with and without the head, and every counter the same as ours; in bfloat16 the
server's acceptance length must lie inside our interval. A copy of the export that is broken on purpose must be noticed.
Then the server is started with the model card's command and asked over HTTP: one request at a time, many at once, once
more after a restart, and it must end cleanly. `gammas` and `law` hold it against our decoder above T = 0 too.
Where there is no export yet, the stages of the config come first. At the end stands a table of all runs checked so far.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from scripts.common import export_dir, script, servable_head
from scripts.serve_parts import LEAST, check_settings, our_traces, over_http, sampled, server
from scripts.settings import plain

if TYPE_CHECKING:
    from eval.decode import Request


def run(cfg: DictConfig) -> bool:
    """Whether the server does what we measured; everything found is kept in runs/<name>/serve_check."""
    from rich.console import Console

    from eval.damage import damage
    from eval.server_check import overview
    from heads.artifact import MANIFEST, write_manifest
    from heads.export.folder import check_export
    from heads.foreign import check_interpreter
    from scripts import pipeline
    from scripts.prompts import some_requests

    started, law = time.monotonic(), check_settings(cfg)
    folder, export = Path(cfg.run_dir) / "serve_check", export_dir(cfg)
    if not (export / MANIFEST).is_file():
        check_interpreter(cfg.serve_python)  # before the stages take their minutes
        pipeline.run(cfg)
    head = servable_head(cfg)
    for name, depth in (("gamma", cfg.gamma), *(("gammas", gamma) for gamma in cfg.gammas)):
        head.check_depth(depth, name)
    manifest = check_export(export, head=head)
    check_interpreter(cfg.serve_python)
    requests = some_requests(cfg, cfg.requests, "requests", least=LEAST)
    print(f"serve     {export} in vLLM: {len(requests)} held-out prompts, γ = {cfg.gamma}", flush=True)
    served = damage(export, cfg.damage, folder / "damaged") if cfg.damage else export
    good, found = in_process(cfg, manifest, served, requests, folder)
    findings = over_http(cfg, manifest, served, requests, folder, _say) if cfg.api.requests else []
    more, gammas = sampled(cfg, manifest, served, requests, law, folder, _say)
    good &= all(finding.passed for finding in [*findings, *more])
    body = {
        "passed": good,
        "damage": cfg.damage,
        "control": cfg.control,
        "target": manifest["target"],
        "method": manifest["method"],
        "layout": manifest["layout"],
        "seconds": round(time.monotonic() - started),
        "found": found,
        "api": [finding.to_json() for finding in findings],
        "sampled": [finding.to_json() for finding in more],
        "gammas": gammas,
    }
    write_manifest(folder, "serve_check", body, plain(cfg))
    print(f"{'PASSED' if good else 'FAILED'}    requests, answers and logs are in {folder}", flush=True)
    if (table := overview(checked_beside(Path(cfg.run_dir)))).row_count:
        Console().print(table)
    return good


def in_process(
    cfg: DictConfig, manifest: Mapping[str, Any], served: Path, requests: Sequence[Request], folder: Path
) -> tuple[bool, dict[str, Any]]:
    """vLLM's engine without its API, in each number format, with the export and with its broken copy."""
    from eval.damage import CONTROLS, damage
    from eval.server_check import check, to_lines

    drafts = {"head": served}
    if cfg.control and not cfg.damage and cfg.dtypes:
        kind = CONTROLS[manifest["method"]] if cfg.control == "auto" else cfg.control
        drafts["control"] = damage(served, kind, folder / "control")
    good, found = True, {}
    for dtype in cfg.dtypes:
        ours, limits = our_traces(cfg, dtype, requests, manifest["dtype"])
        options = {"gamma": cfg.gamma, "folder": folder, "say": _say}
        comparisons = check(server(cfg, dtype, manifest), drafts, requests, ours, limits, **options)
        for name, comparison in comparisons.items():
            print("\n".join([f"{dtype}, {name}:", *(f"{'':10}{line}" for line in to_lines(comparison))]), flush=True)
            good &= bool(comparison.complaints) == (name == "control")
        found[dtype] = {name: comparison.to_json() for name, comparison in comparisons.items()}
        drafts.pop("control", None)  # once, in the first number format
    return good, found


def _say(text: str) -> None:
    print(f"{'':10}{text}", flush=True)


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


@script("serve_check")
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.serve_check`."""
    if not run(cfg):
        sys.exit(1)


if __name__ == "__main__":
    main()
