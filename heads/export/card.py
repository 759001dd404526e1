"""The model card of an exported head: the command that serves it, what was measured, what the words mean.

It turns values into Markdown and knows no layout and no file. The table of numbers comes in ready-made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOT_RAN = (
    "This layout is written to the letter of its reader's code; it was not run there. Compare the acceptance that the "
    "server counts with the numbers below before you rely on it."
)
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
        f"base_model: {json.dumps(target)}",
        "tags: [speculative-decoding, draftsmith]",
        "---",
        "",
        f"# {name} draft head for {target}",
        "",
        f"A speculative-decoding head: it drafts {facts.gamma} tokens a round, the target checks them, and greedy text "
        "is what the target alone would write.",
        *_modified(facts.fingerprint),
        "",
        "## Serve",
        "",
        "```sh",
        serving.command,
        "```",
        "",
        f"The paths are relative to where it was exported. {serving.note}",
        *([] if serving.ran else [NOT_RAN]),
        "",
        "## Made for",
        "",
        "| | |",
        "|---|---|",
        f"| target | {_cell(target)} |",
        *(f"| its {part} (SHA-256) | `{facts.fingerprint[part]}` |" for part in ("weights", "tokenizer", "template")),
        *(f"| {_cell(what)} | {_cell(value)} |" for what, value in rows.items()),
        f"| stored as | {facts.dtype} |",
        "",
        "Another target, tokenizer or chat template than this one means few accepted drafts.",
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
    definitions = [f"- **{_cell(name)}**: {_cell(text)}" for name, text in evidence.report["definitions"].items()]
    return [evidence.table.strip(), "", "What the words mean:", "", *definitions]


def _cell(text: str) -> str:
    """Text that cannot break out of a table's cell or a list entry."""
    return " ".join(str(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").split())
