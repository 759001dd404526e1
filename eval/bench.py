"""Wall clock of decoding: every request plainly and with each draft, in turn, in one run.

Interleaving lets the machine's drift fall on all sides alike; the ratio of summed seconds at equal tokens is the
speed-up. This module does not know which draft it times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from eval.decode import DecodeSettings, Proposer, Request, decode
from eval.trace import RequestTrace
from heads.target import FrozenTarget


def interleaved(
    target: FrozenTarget,
    requests: Sequence[Request],
    proposers: Mapping[str, Proposer | None],
    settings: DecodeSettings,
    on_done: Callable[[RequestTrace], None] | None = None,
) -> dict[str, list[RequestTrace]]:
    """Traces of every request under every proposer, one request at a time and in turn.

    proposers: by name; None decodes plainly. The order rotates with each request. A first, uncounted request warms up.
    """
    alone = replace(settings, rows=1)
    for proposer in proposers.values():
        decode(target, requests[:1], proposer, replace(alone, max_new_tokens=min(8, alone.max_new_tokens)))
    traces: dict[str, list[RequestTrace]] = {name: [] for name in proposers}
    order = list(proposers)
    for request in requests:
        for name in order:
            traces[name] += decode(target, [request], proposers[name], alone, on_done)
        order = order[1:] + order[:1]
    return traces
