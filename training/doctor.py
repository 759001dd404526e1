"""The doctor on traffic, target and prompts: what they will come to, looked at before hours are spent on them.

Each function looks at one side and returns a `Section`. `training.doctor_answers` goes on with what the target answers
and what all of it will cost. Nothing is written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from heads.artifact import UserError
from heads.target import FrozenTarget
from training.chat import ChatEncoder
from training.diagnosis import DoctorSettings, Finding, Section
from training.regenerate import Generation
from training.traffic import Conversation, Reading, split, summary

FEW_HELD_OUT = 8  # requests from which on eval.bootstrap gives an interval
_MUCH = 0.05  # share from which on what is lost is more than chance
_QUESTION = [{"role": "user", "content": "?"}]


@dataclass(frozen=True)
class Prompts:
    """Rendered prompts: (conversation, turn, ids) of what can be asked, and how much of the traffic was looked at."""

    fitting: tuple[tuple[Conversation, int, tuple[int, ...]], ...]
    conversations: int


def look_at_traffic(reading: Reading) -> Section:
    """Rows, what was set aside, repeated questions, and both sides of the split."""
    kept = len(reading.conversations)
    train, held = split(reading.conversations, reading.held_out)
    questions = Counter(item.first_text() for item in reading.conversations)
    repeated = kept - len(questions)
    duplicates = sum("duplicate" in item.reason for item in reading.rejected)
    slices = Counter(item.slice for item in reading.conversations)
    read = kept + len(reading.rejected) + reading.over_limit
    rows = [
        (
            "rows",
            f"{read:,} read, {kept:,} kept, {len(reading.rejected):,} set aside, {reading.over_limit:,} over limit",
        ),
        ("turns", f"{sum(item.count for item in reading.conversations):,}"),
        ("split", f"{len(train):,} conversations to train on, {len(held):,} held out"),
        ("slices", ", ".join(f"{name} {count:,}" for name, count in slices.most_common(6))),
        ("duplicates", f"copies of rows: {duplicates:,}; {repeated:,} more begin with a question asked before"),
    ]
    found: list[Finding] = []
    if formats := reading.arguments.get("formats"):
        named = ", ".join(f"{files:,} {'file' if files == 1 else 'files'} as {name}" for name, files in formats.items())
        how = reading.arguments["format"]
        rows.insert(0, ("format", f"{named} ({'found out' if how == 'auto' else 'as asked'}: traffic.format={how})"))
    if reading.rejected:
        rows.append(("set aside", summary(reading.rejected)))
    if not held or not train:
        better = min(0.5, 3 * reading.held_out) if train and reading.held_out else 0.1
        found.append(
            Finding(
                True,
                f"The {'held-out' if train else 'train'} side is empty with {kept} conversations and "
                f"traffic.held_out={reading.held_out}; give more traffic or traffic.held_out={better:g}.",
            )
        )
    elif len(held) < FEW_HELD_OUT:
        better = min(0.5, math.ceil(100 * FEW_HELD_OUT * 1.5 / kept) / 100)
        found.append(
            Finding(
                False,
                f"{len(held)} held-out conversations give no interval to the numbers, which takes {FEW_HELD_OUT}; give "
                f"more traffic or traffic.held_out={better:g}.",
            )
        )
    wanted = sum("duplicate" in item.reason or "traffic." in item.reason for item in reading.rejected)  # by settings
    if len(reading.rejected) - wanted > _MUCH * read:
        share = (len(reading.rejected) - wanted) / read
        found.append(
            Finding(
                False, f"{share:.0%} of the rows cannot be used; mend them, the reasons stand above (traffic.path=)."
            )
        )
    if repeated > 0.2 * kept:
        found.append(
            Finding(
                False,
                f"{repeated / kept:.0%} of the conversations repeat a question; keep fewer with traffic.limit=, as "
                f"copies teach little.",
            )
        )
    return Section("traffic", tuple(rows), findings=tuple(found))


def look_at_target(target: FrozenTarget) -> tuple[Section, ChatEncoder | None]:
    """Template and tokenizer facts, and the encoder where the template can be masked."""
    tokenizer, ends = target.tokenizer, target.eos_token_ids
    rows = [
        ("target", f"{target.path}, {target.dtype}".replace("torch.", "")),
        (
            "sizes",
            f"{target.num_layers} layers of width {target.hidden_size}, vocabulary {target.vocab_size:,}, "
            f"context {target.max_length:,}",
        ),
        ("tokenizer", f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens"),
        (
            "special",
            ", ".join(
                f"{name} {token}" for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
            )
            or "none",
        ),
        ("end tokens", ", ".join(_named(target, index) for index in ends) or "none"),
        (
            "template",
            f"given {target.template}" if target.template else "given nothing but messages (target.template=)",
        ),
    ]
    found: list[Finding] = []
    if not ends:
        found.append(
            Finding(
                True,
                f"The target {target.path} has no end token, so no answer would end; set eos_token_id in its "
                f"generation_config.json, or give another target.path=.",
            )
        )
    try:
        ids = target.render(_QUESTION)
    except UserError as error:
        return Section("target", tuple(rows), findings=(*found, Finding(True, str(error)))), None
    doubled = tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2
    rows.append(("bos", "twice" if doubled else "once" if tokenizer.bos_token_id in ids[:1] else "none at the start"))
    if doubled:
        found.append(
            Finding(
                True,
                f"Every prompt begins with {tokenizer.bos_token} twice; take one of them out of the chat "
                f"template of target.path={target.path}.",
            )
        )
    encoder, facts, mask = _look_at_mask(target)
    return Section("target", (*rows, *facts), findings=(*found, *mask)), encoder


def _look_at_mask(
    target: FrozenTarget,
) -> tuple[ChatEncoder | None, tuple[tuple[str, str], ...], tuple[Finding, ...]]:
    """Whether logged answers could be masked, and whether a turn ends as the target ends it."""
    tokenizer = target.tokenizer
    try:
        encoder = ChatEncoder.of(target)
    except UserError as error:
        refusal = str(error)
    else:
        how = "its {% generation %} marks" if encoder.marked else "the difference of two renderings"
        facts = (
            ("turn", f"ends with {_named(target, encoder.end_id)}; the answer is proven by {how}"),
            (
                "earlier turns",
                "stay as they were" if encoder.keeps_turns else "are rewritten: a document for each turn",
            ),
        )
        return encoder, facts, ()
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()} - {tokenizer.unk_token_id}
    try:
        end = ChatEncoder(tokenizer, end_ids=sorted(special), template=target.template).end_id
    except UserError:
        return None, (("turn", "cannot be told from the template"),), (Finding(False, refusal),)
    if end in target.eos_token_ids:
        return None, (("turn", "cannot be told from the template"),), (Finding(False, refusal),)
    sentence = (
        f"The chat template ends a turn with {_named(target, end)}, which is not among the target's end tokens, so "
        f"answers would run on; add {end} to eos_token_id in the generation_config.json of target.path={target.path}."
    )
    return None, (("turn", f"ends with {_named(target, end)}"),), (Finding(True, sentence),)


def _named(target: FrozenTarget, index: int) -> str:
    return f"{target.tokenizer.convert_ids_to_tokens(index)} ({index})"


def look_at_prompts(
    target: FrozenTarget, conversations: Sequence[Conversation], generation: Generation, settings: DoctorSettings
) -> tuple[Section, Prompts]:
    """Lengths in tokens of every prompt, earlier answers left empty, and what cannot be asked."""
    count = min(settings.sample, len(conversations))
    chosen = [conversations[index * len(conversations) // count] for index in range(count)]
    fitting: list[tuple[Conversation, int, tuple[int, ...]]] = []
    lengths: list[int] = []
    refused: Counter[str] = Counter()
    for conversation in chosen:
        reached = True  # as in collecting, where a turn is lost with the one before it
        for turn in range(conversation.count):
            try:
                ids = _prompt(target, conversation, turn)
            except UserError as error:
                refused[str(error)] += 1
                reached = False
                continue
            lengths.append(len(ids))
            room = min(generation.max_prompt_tokens, target.max_length - generation.max_new_tokens)
            reached = reached and 0 < len(ids) <= room and max(ids) < target.vocab_size
            if reached:
                fitting.append((conversation, turn, tuple(ids)))
    asked = len(lengths) + sum(refused.values())
    lengths.sort()
    quantile = (
        [lengths[min(len(lengths) - 1, int(q * len(lengths)))] for q in (0.5, 0.95, 0.99)] if lengths else [0] * 3
    )
    rows = (
        ("prompts", f"{asked:,}, the turns of {count:,} conversations; {len(fitting):,} can be asked"),
        ("tokens", "half up to {}, 95 % up to {}, 99 % up to {}".format(*quantile)),
    )
    found = _prompt_findings(target, generation, lengths, refused, fitting=len(fitting), good=quantile[2])
    section = Section("prompts", rows, bars=_histogram(lengths), findings=tuple(found))
    return section, Prompts(tuple(fitting), count)


def _prompt(target: FrozenTarget, conversation: Conversation, turn: int) -> list[int]:
    if conversation.ids:
        return list(conversation.prompt_ids(turn))
    return target.render(conversation.messages([""] * turn), tools=conversation.tools)


def _prompt_findings(
    target: FrozenTarget,
    generation: Generation,
    lengths: Sequence[int],
    refused: Counter[str],
    *,
    fitting: int,
    good: int,
) -> list[Finding]:
    asked = len(lengths) + sum(refused.values())
    found: list[Finding] = []
    if refused and sum(refused.values()) > _MUCH * asked:
        (reason, count), *_ = refused.most_common(1)
        share = sum(refused.values()) / asked
        found.append(Finding(True, f"{share:.0%} of the prompts are refused, {count} of them so: {reason}"))
    limit = generation.max_prompt_tokens
    if (long := sum(length > limit for length in lengths)) > _MUCH * asked:
        enough = min(-(-good // 32) * 32, target.max_length - generation.max_new_tokens)
        remedy = f"set generation.max_prompt_tokens={enough}"
        if enough <= limit:
            remedy = f"the context of {target.max_length} has no room for more, so leave them out of traffic.path="
        found.append(
            Finding(
                True,
                f"{long / asked:.0%} of the prompts are longer than generation.max_prompt_tokens={limit} and would be "
                f"set aside; {remedy}.",
            )
        )
    if limit + generation.max_new_tokens > target.max_length:
        found.append(
            Finding(
                False,
                f"generation.max_prompt_tokens and max_new_tokens exceed the context of {target.max_length}; set "
                f"generation.max_prompt_tokens={max(1, target.max_length - generation.max_new_tokens)}.",
            )
        )
    if not fitting:
        found.append(
            Finding(
                True,
                f"Nothing would be supervised: none of the {asked} prompts can be asked; mend traffic.path= or set "
                f"generation.max_prompt_tokens= and generation.max_new_tokens= for the context of {target.max_length}.",
            )
        )
    return found


def _histogram(lengths: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """Counts between powers of two, from the shortest to the longest."""
    if not lengths:
        return ()
    counts = Counter((length - 1).bit_length() if length else 0 for length in lengths)
    return tuple((f"≤ {2**power:,}", counts[power]) for power in range(min(counts), max(counts) + 1))
