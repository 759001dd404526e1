"""What the doctor finds, as plain values: sections of facts, and findings with the override that mends them.

A finding that is `wrong` means that the run would fail or learn the wrong thing; the others are advice. Nothing here
prints, measures or writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from heads.artifact import UserError


@dataclass(frozen=True)
class Finding:
    """wrong: the run would fail or learn the wrong thing; else advice. A sentence with the override to type."""

    wrong: bool
    sentence: str


@dataclass(frozen=True)
class Sample:
    """A document to be shown: pieces of text and whether they are supervised."""

    title: str
    pieces: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Section:
    """rows: facts by name; bars: a histogram; table: a heading and rows of equal length; samples: documents."""

    title: str
    rows: tuple[tuple[str, str], ...] = ()
    bars: tuple[tuple[str, int], ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    samples: tuple[Sample, ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """show: conversations that are answered and shown; answer_tokens: of each answer; sample: conversations whose
    prompts are counted; conversations: for how many to plan (None: those of the traffic); gpu_memory in GB, gpu_tflops
    sustained in forwards and gpu_generation (what a generated token costs in prompt tokens): the GPU to plan for."""

    show: int = 3
    answer_tokens: int = 48
    sample: int = 2000
    conversations: int | None = None
    gpu_memory: float = 80
    gpu_tflops: float = 400
    gpu_generation: float = 12

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise UserError(f"doctor.{name}={value} is not possible; give a number above 0.")
