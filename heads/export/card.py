"""The model card of an exported head: the command that serves it, what was measured, what the words mean.

It turns values into Markdown and knows no layout and no file. The table of numbers comes in ready-made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOT_RAN = (
    "This layout is written to the letter of its reader's code; it was not run there. Compare the acceptance that the "
    "server counts with the numbers below before you rely on it."
)
_PARTS = {"weights": "weights", "tokenizer": "tokenizer", "template": "chat template"}
# The columns of the table, and the keys of a report's definitions that explain them.
_WORDS = {
    "α": "alpha",
    "tokens/round": "tokens_per_round",
    "formula": "expected_tokens_per_round",
    "gap": "formula_gap",
    "identical": "identical_requests",
    "speed-up": "speedup",
    "[ ]": "interval",
}
# What of a report's row the manifest repeats.
_KEYS = (
    "proposer",
    "dtype",
    "temperature",
    "gamma",
    "requests",
    "rounds",
    "alpha",
    "alpha_by_position",
    "tokens_per_round",
    "identical_requests",
    "vllm_counters",
)


@dataclass(frozen=True)
class Evidence:
    """A report (the content of report.json) and its table in Markdown."""

    report: Mapping[str, Any]
    table: str

    @property
    def gamma(self) -> int:
        """The draft length that the report speaks of."""
        return int(self.report["headline"]["gamma"])

    def summary(self) -> list[dict[str, Any]]:
        """The rows of the headline's draft over all requests, shortened."""
        name = self.report["headline"]["proposer"]
        rows = [row for row in self.report["results"] if row["slice"] == "all" and row["proposer"] == name]
        return [{key: row[key] for key in _KEYS if key in row} for row in rows]


@dataclass(frozen=True)
class ServeFacts:
    """What a server is told: the method, target and draft as paths, γ, the stored dtype, which target it is, and what
    its command must say beside that."""

    method: str
    target: str
    folder: str
    gamma: int
    dtype: str
    fingerprint: dict[str, str]
    overrides: dict[str, Any]


@dataclass(frozen=True)
class Serving:
    """How a folder is served. library: as the Hub names it; command: the line that does it; note: what else to know;
    ran: whether heads that were written so have run there."""

    library: str
    command: str
    note: str
    ran: bool


def render_card(
    name: str, facts: ServeFacts, serving: Serving, rows: Mapping[str, str], evidence: Evidence | None, licence: str
) -> str:
    """README.md of an export; rows: further facts about this kind of head."""
    target = facts.fingerprint["name"]
    lines = [
        "---",
        f"library_name: {serving.library}",
        f"base_model: {json.dumps(_on_hub(facts.target) or target)}",
        "tags: [speculative-decoding, draftsmith]",
        "---",
        "",
        f"# {name} draft head for {target}",
        "",
        f"A speculative-decoding head: it drafts γ = {facts.gamma} tokens a round, and the target checks them in one "
        "pass. Greedy text is what the target alone would write, but for near-ties, which a narrow number format may "
        "round otherwise in a pass of another shape; sampled text follows the target's own distribution.",
        *_modified(facts.fingerprint),
        "",
        "## Serve",
        "",
        "```sh",
        serving.command,
        "```",
        "",
        f"Put the path of this folder, or the repository where you have it from, in the place of `{facts.folder}`, and "
        f"that of your target in the place of `{facts.target}`. {serving.note}",
        *([] if serving.ran else [NOT_RAN]),
        "",
        "## Made for",
        "",
        "| | |",
        "|---|---|",
        f"| target | {_cell(target)} |",
        *(f"| its {words} (SHA-256) | `{facts.fingerprint[part]}` |" for part, words in _PARTS.items()),
        *(f"| {_cell(what)} | {_cell(value)} |" for what, value in rows.items()),
        f"| stored as | {facts.dtype} |",
        "",
        "Another target, tokenizer or chat template than this one means few accepted drafts; no server checks that. "
        "`python -m scripts.import_head from=<this folder> check=true target=custom target.path=<your target>` of "
        "Draftsmith does.",
        "",
        "## Measured",
        "",
        *_measured(evidence),
        "",
        "## Licence",
        "",
        licence,
    ]
    return "\n".join(lines) + "\n"


def _modified(fingerprint: Mapping[str, str]) -> list[str]:
    """What a user must know who still has the target from before the head was trained with it."""
    if "modified" not in fingerprint:
        return []
    return [
        "",
        f"**{fingerprint['modified'].capitalize()}.** The server must be given the target with the adapter merged into "
        f"it, not the original.",
    ]


def _measured(evidence: Evidence | None) -> list[str]:
    if evidence is None:
        return ["This head was exported without an evaluation: nothing is known of its speed."]
    on = evidence.report.get("measured_on")
    where = "" if on is None else f" on {_cell(on['device'])} ({on['threads']} threads)"
    told = evidence.report["definitions"]
    words = [f"- **{word}**: {_cell(told[name])}" for word, name in _WORDS.items() if name in told]
    return [
        f"By Draftsmith's own decoder{where}, not in this server: acceptance should be the same there, speed is not.",
        "",
        evidence.table.strip(),
        "",
        "What the words mean:",
        "",
        "- **γ**: Tokens drafted a round.",
        "- **slice**: A kind of the traffic that it was measured on; all: all of it.",
        *words,
    ]


def _on_hub(target: str) -> str | None:
    """A target as the Hub names it, None where it is a folder or a file here."""
    return target if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", target) and not Path(target).exists() else None


def _cell(text: str) -> str:
    """Text that cannot break out of a table's cell or a list entry."""
    return " ".join(str(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").split())
