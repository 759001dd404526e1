"""How the doctor's findings look: in colour on a terminal, without an escape code in a log, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from training.diagnosis import Finding, Sample, Section

_LABEL = 15
_SHOWN = 500  # characters of a piece of text; the middle of longer ones is left out
_BAR = 40


def show(console: Console, section: Section) -> None:
    """One section: facts, histogram, table, samples."""
    console.print(Text(section.title, style="bold"))
    for name, fact in section.rows:
        console.print(_row(f"  {name}", Text(visible(fact))))
    most = max((count for _, count in section.bars), default=0)
    for name, count in section.bars:
        console.print(_row(f"  {name:>9}", Text("█" * round(_BAR * count / most), style="cyan").append(f" {count:,}")))
    if section.table:
        console.print(_table(section.table))
    for sample in section.samples:
        _show_sample(console, sample)
    console.print()


def show_findings(console: Console, findings: Iterable[Finding]) -> bool:
    """What is wrong and what would be changed; returns whether nothing is wrong."""
    found = sorted(findings, key=lambda finding: not finding.wrong)
    for finding in found:
        style, word = ("bold red", "wrong") if finding.wrong else ("yellow", "advice")
        console.print(_row(Text(f"  {word}", style=style), Text(visible(finding.sentence))))
    good = not any(finding.wrong for finding in found)
    console.print(Text("  nothing is wrong", style="green") if good else Text("  not ready", style="bold red"))
    return good


def visible(text: str) -> str:
    """Text whose control characters cannot act on a terminal; line ends stay."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _row(name: str | Text, fact: Text) -> Table:
    """A fact beside its name, wrapped under itself."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=_LABEL, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(name, fact)
    return grid


def _table(rows: tuple[tuple[str, ...], ...]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 1), header_style="dim")
    for index, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table


def _show_sample(console: Console, sample: Sample) -> None:
    """A document, what is supervised in it between ⟦ and ⟧, line ends shown as ↵."""
    text = Text()
    for piece, supervised in sample.pieces:
        if len(piece) > _SHOWN:
            left_out = len(piece) - _SHOWN
            piece = f"{piece[: _SHOWN // 2]} … {left_out:,} characters … {piece[-_SHOWN // 2 :]}"
        piece = visible(piece).replace("\n", "↵\n")
        text.append(f"⟦{piece}⟧" if supervised else piece, style="green" if supervised else "dim")
    console.print(Text(f"  {visible(sample.title)}", style="bold"))
    console.print(text)
