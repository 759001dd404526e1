"""What is written for whom: a reader of heads with its layouts and the command that serves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from heads.artifact import UserError
from heads.export.card import ServeFacts, Serving
from heads.export.layout import Layout


@dataclass(frozen=True)
class Format:
    """name: of its file in conf/export; server: whose command it is; title: as sentences name it; layouts: one for
    each kind of head that it has; serving: how a folder of it is served."""

    name: str
    server: str
    title: str
    layouts: tuple[Layout, ...]
    serving: Callable[[ServeFacts], Serving]

    def layout_of(self, head: str) -> Layout:
        """The layout for heads of this class path. Raises UserError when there is none."""
        for layout in self.layouts:
            if layout.head == head:
                return layout
        kinds = ", ".join(layout.head for layout in self.layouts)
        raise UserError(
            f"There is no layout of {self.title} for a head of the kind {head}; export one of {kinds}, choose another "
            f"export=, or leave export out of stages=[…]."
        )
