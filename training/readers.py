"""Readers: traffic out of files and data sets, row by row. A row that cannot be used is set aside with its reason.

`read_files` is the reader behind `traffic=files` and `traffic=jsonl`. Where rows come from is the matter of
`training.sources`, what they look like of `training.formats`, which messages are allowed of `training.messages`, and
what is set aside or blacked out although it can be read of `training.cleaning`. Here these are put together, and every
row is accounted for: rows read = conversations + rows set aside + conversations over the limit.

* A format is chosen for each file by its first rows; a row of another format is set aside.
* Token ids are read only where the logged answers are wanted: the target cannot answer anew after them.
* A row without an id gets one from its content, so a second, equal row is a duplicate.

The module does not know the split, tokenizers or models. The demonstration prompts are read in `training.demo`.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from heads.artifact import UserError
from training.cleaning import Cleaning, NearDuplicates, redacted_id, redacted_message, redacted_tool
from training.formats import FORMATS, NEEDED, NOT_RECOGNISED, TOKENS, chat_of, choose_format, fields_of, tokens_of
from training.messages import RowError, has_empty_answer, logged_of, text_of, tools_of, turns_of
from training.sources import HUB, RawRow, find_files, read_file, read_hub
from training.traffic import LOGGED, REGENERATE, Conversation, Reading, Rejected, hash_of, summary

logger = logging.getLogger(__name__)

_BY_CONTENT = "sha256-"  # how ids begin that stand for the content
_SHOWN = 80  # characters of a row that an error shows
_LOOKED_AT = 64  # rows of a file that decide on its format


def read_files(
    path: str | None,
    *,
    format: str = "auto",  # noqa: A002  (the setting's name)
    hub_config: str | None = None,
    hub_split: str = "train",
    rows: int | None = None,
    answers: str = REGENERATE,
    held_out: float = 0.1,
    limit: int | None = None,
    slice_field: str = "slice",
    default_slice: str = "traffic",
    shortest: int | None = None,
    longest: int | None = None,
    empty_answers: bool = True,
    near_duplicates: float | None = None,
    redact: list[str] | None = None,
    phone_region: str | None = None,
) -> Reading:
    """Read conversations from a file, a folder, a glob, or a data set on the Hub.

    path: also hf://datasets/<name>, read with hub_config and hub_split as it streams. format: one of
    `training.formats`, or auto. rows: how many to read at most. answers: LOGGED keeps the logged ones. limit: how many
    conversations to keep per slice, chosen by a hash of their ids. slice_field: the row's field that names its slice;
    rows without it go to `default_slice`. The others are those of `training.cleaning.Cleaning`. Raises UserError when
    no row can be used.
    """
    if path is None:
        raise UserError("traffic.path is not set; give a file, a folder, a glob or hf://datasets/<name>.")
    if format not in ("auto", *FORMATS, TOKENS):
        known = ", ".join((*FORMATS, TOKENS))
        raise UserError(f"traffic.format={format} is unknown; choose auto or one of {known}.")
    if answers not in (REGENERATE, LOGGED):
        raise UserError(f"collect.answers={answers} is unknown; choose {REGENERATE} or {LOGGED}.")
    for name, most in (("rows", rows), ("limit", limit)):
        if most is not None and most < 1:
            raise UserError(f"traffic.{name}={most} is not possible; give at least 1, or null for all.")
    cleaning = Cleaning(
        shortest=shortest,
        longest=longest,
        empty_answers=empty_answers,
        near_duplicates=near_duplicates,
        redact=redact or [],
        phone_region=phone_region,
    )
    read = Rows(slice_field=slice_field, default_slice=default_slice, cleaning=cleaning, keep_answers=answers == LOGGED)
    for name, source in _sources(path, format, hub_config, hub_split):
        left = None if rows is None else rows - read.count
        if left == 0:
            break
        read.add_source(name, itertools.islice(source, left), format)
    arguments = {
        "reader": "files",
        **{"path": path, "format": format, "formats": dict(read.formats), "rows": rows, "limit": limit},
        **({"hub_config": hub_config, "hub_split": hub_split} if path.startswith(HUB) else {}),
        **{"slice_field": slice_field, "default_slice": default_slice, **asdict(cleaning)},
        **({"answers": answers} if answers == LOGGED else {}),
    }
    return read.finish(held_out=held_out, limits=limit, arguments=arguments)


def _sources(path: str, form: str, config: str | None, split: str) -> Iterator[tuple[str, Iterator[RawRow]]]:
    """Every file or data set by its name, with its rows."""
    if path.startswith(HUB):
        yield path, read_hub(path, config=config, split=split)
        return
    for file in find_files(path, text=form == "prompts"):
        yield str(file), read_file(file)


class Rows:
    """Takes rows in, one by one, and sorts them into conversations and rejected rows."""

    def __init__(
        self,
        *,
        slice_field: str = "slice",
        default_slice: str = "traffic",
        cleaning: Cleaning | None = None,
        keep_answers: bool = False,
    ) -> None:
        self._keep_answers = keep_answers
        self._slice_field, self._default_slice, self._cleaning = slice_field, default_slice, cleaning or Cleaning()
        threshold = self._cleaning.near_duplicates
        self._near = None if threshold is None else NearDuplicates(threshold)
        self._redact = self._cleaning.redactor()
        self._kept: dict[str, Conversation] = {}
        self._rejected: list[Rejected] = []
        self._sources: list[str] = []
        self.formats: Counter[str] = Counter()
        self.count = 0

    def add_source(self, name: str, rows: Iterator[RawRow], form: str = "auto") -> None:
        """All rows of a file or data set, in the given format or in the one that most of the first have."""
        self._sources.append(name)
        first = list(itertools.islice(rows, _LOOKED_AT))
        if not first:
            return
        chosen = choose_format(row.value for row in first) if form == "auto" else form
        self.formats[chosen] += 1
        if chosen == TOKENS:
            self._check_tokens(name)
        logger.info("%s is read as %s (traffic.format=%s)", name, chosen, form)
        for row in itertools.chain(first, rows):
            if row.warning is not None:
                logger.warning("%s", row.warning)
            self.add(row, chosen)

    def _check_tokens(self, name: str) -> None:
        """Raises UserError where something is asked for that only text allows."""
        if not self._keep_answers:
            raise UserError(
                f"{name} holds token ids, which the target cannot answer anew; set collect.answers=logged to learn "
                f"from the answers in them, or give the messages that they were made of."
            )
        if of_text := self._cleaning.in_force():
            setting = f"traffic.{of_text[0]}={vars(self._cleaning)[of_text[0]]}"
            raise UserError(
                f"{setting} works on text, but {name} holds token ids; leave it out, or give the messages that they "
                f"were made of."
            )

    def add(self, row: RawRow, form: str) -> None:
        """One row: a conversation more, or a rejected row more."""
        self.count += 1
        of = None
        try:
            conversation = self._conversation(row, form)
            if conversation.id in self._kept:
                raise RowError(
                    "duplicate of an earlier row" if conversation.id.startswith(_BY_CONTENT) else "duplicate id"
                )
            if problem := self._cleaning.length_problem(conversation):
                raise RowError(problem)
            if self._near is not None and (found := self._near.earlier(conversation)) is not None:
                of = f"{found[0]} ({found[1]:.3f})"
                raise RowError("near duplicate of an earlier row")
        except RowError as error:
            text = row.text if self._redact is None else self._redact(row.text)
            self._rejected.append(Rejected(row.source, row.line, str(error), text, of))
        else:
            self._kept[conversation.id] = conversation

    def _conversation(self, row: RawRow, form: str) -> Conversation:
        if row.problem is not None:
            raise RowError(row.problem)
        return parse_row(
            row.value,
            form=form,
            slice_field=self._slice_field,
            default_slice=self._default_slice,
            empty_answers=self._cleaning.empty_answers,
            redact=self._redact,
            keep_answers=self._keep_answers,
        )

    def finish(
        self,
        *,
        held_out: float,
        limits: int | Mapping[str, int | None] | None = None,
        arguments: dict[str, Any],
    ) -> Reading:
        """The reading, with at most `limits` conversations per slice.

        Raises UserError when there is no usable row at all.
        """
        if not 0 <= held_out < 1:
            raise UserError(f"traffic.held_out={held_out} is not a share; choose 0 ≤ held_out < 1.")
        where = " and ".join([*self._sources[:3], *(["others"] if len(self._sources) > 3 else [])]) or "the traffic"
        if not self._kept and not self._rejected:
            raise UserError(f"{where} is empty; give a file with one conversation per line.")
        if not self._kept:
            raise UserError(
                f"None of the rows of {where} can be used, {len(self._rejected):,} in all "
                f"({summary(self._rejected)}); {_remedy(self._rejected)}."
            )
        chosen = _choose(self._kept.values(), limits)
        return Reading(tuple(chosen), tuple(self._rejected), len(self._kept) - len(chosen), held_out, arguments)


def _remedy(rejected: Sequence[Rejected]) -> str:
    """What to do where no row could be used, by the commonest reason."""
    ((reason, _),) = Counter(item.reason for item in rejected).most_common(1)
    if "traffic." in reason:
        return "give other rows, or loosen the setting that is named there"
    row = next(item.row for item in rejected if item.reason == reason)
    if reason.startswith(NOT_RECOGNISED):
        fields = fields_of(row)
        seen = f"the first of these has the fields {', '.join(fields)}, and a" if fields else "a"
        return f"{seen} row needs {NEEDED}: rename its fields, or set traffic.format=auto, which finds the format out"
    shown = " ".join(row.split())
    return f"mend them (the first is {shown[:_SHOWN]!r}{'…' if len(shown) > _SHOWN else ''}), or give other rows"


def parse_row(
    row: Any,
    *,
    form: str | None = None,
    slice_field: str = "slice",
    default_slice: str = "traffic",
    empty_answers: bool = True,
    redact: Callable[[str], str] | None = None,
    keep_answers: bool = False,
) -> Conversation:
    """One row as a conversation; raises RowError with the reason when it is malformed.

    form: one of `training.formats`, by the row itself where it is None. empty_answers: whether a logged answer may be
    empty. redact: what blacks out a text, before the row gets an id from its content; an id that holds such a
    text becomes a hash. keep_answers: whether the conversation keeps the logged answers.
    """
    form = form or choose_format([row])
    if form == TOKENS:
        if not keep_answers:
            raise RowError("token ids, which only collect.answers=logged can use")
        ids, answers = tokens_of(row)
        name, label = _names(row, [ids, answers], slice_field, default_slice, None)
        return Conversation(name, label, (), ids=ids, answers=answers)
    messages, offered = chat_of(row, form)
    turns, tools = turns_of(messages), tools_of(offered)
    logged = logged_of(messages) if keep_answers else []
    if not empty_answers and has_empty_answer(messages):
        raise RowError("an answer is empty")
    if redact is not None:
        turns = [[redacted_message(message, redact) for message in turn] for turn in turns]
        logged = [redacted_message(message, redact) for message in logged]
        tools = tuple(redacted_tool(tool, redact) for tool in tools)
    content = [turns, tools, logged] if logged else [turns, tools] if tools else turns
    name, label = _names(row, content, slice_field, default_slice, redact)
    return Conversation(name, label, tuple(tuple(turn) for turn in turns), tools, tuple(logged))


def _names(
    row: Any, content: Any, slice_field: str, default_slice: str, redact: Callable[[str], str] | None
) -> tuple[str, str]:
    """(id, slice) of a row; an id out of its content where it has none."""
    fields = row if isinstance(row, dict) else {}
    label, name = fields.get(slice_field), fields.get("id", fields.get("custom_id"))
    if name is None:
        name = _BY_CONTENT + hash_of("id", json.dumps(content))[:24]
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if not isinstance(name, str) or not name:
        raise RowError("id is neither text nor a whole number")
    label = default_slice if label is None else label
    if not isinstance(label, str) or not label:
        raise RowError("slice is not text")
    name, label = text_of(name), text_of(label)
    if redact is not None:
        name, label = redacted_id(name, redact), redact(label)
    return name, label


def _choose(conversations: Iterable[Conversation], limits: int | Mapping[str, int | None] | None) -> list[Conversation]:
    """The `limits` conversations of each slice whose ids hash lowest, in the order they came; a larger limit
    only adds."""
    kept = list(conversations)
    chosen: set[str] = set()
    for name in {conversation.slice for conversation in kept}:
        limit = limits.get(name) if isinstance(limits, Mapping) else limits
        if limit is not None and limit < 0:
            raise UserError(f"The limit of {limit} conversations for slice {name} is below 0; give a count or null.")
        ids = sorted((c.id for c in kept if c.slice == name), key=lambda key: (hash_of("limit", key), key))
        chosen.update(ids[:limit])
    return [conversation for conversation in kept if conversation.id in chosen]
