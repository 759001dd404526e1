"""The doctor on answers: a few of them, and what collecting and training will cost.

What is measured is measured on this target here; the formula is that of `training.estimate`. Nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from heads.artifact import UserError
from heads.target import FrozenTarget
from training.chat import ChatEncoder, MaskError
from training.diagnosis import DoctorSettings, Finding, Sample, Section
from training.doctor import Prompts
from training.estimate import HeadSizes, Machine, TargetSizes, Workload, estimate, forward_rate
from training.regenerate import Generation, answer_batch
from training.settings import TrainSettings
from training.states import Answer
from training.store import STORED, FeatureStore, Storage, check_disk
from training.traffic import Conversation

_BATCH = 8  # prompts that are answered together, or more where more are shown
_DISK = {
    STORED: "positions · ((taps + last) · width · bytes + 9)",
    Storage(dtype="fp8"): "positions · (taps · (width + 4) + last · width · bytes + 9): taps in FP8 (collect.dtype)",
    Storage(states="online"): "positions · 5: states are computed in training (collect.states=online)",
}


@dataclass(frozen=True)
class Answered:
    """What the target wrote for a few prompts: token ids of whole documents, and how fast it was."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def generated(self) -> int:
        """Tokens written."""
        return sum(len(answer.ids_T) - answer.answer_start for answer in self.answers)

    @property
    def supervised(self) -> float:
        """Share of all positions that was written."""
        return self.generated / max(1, sum(len(answer.ids_T) for answer in self.answers))


def look_at_answers(
    target: FrozenTarget,
    prompts: Prompts,
    encoder: ChatEncoder | None,
    generation: Generation,
    settings: DoctorSettings,
    store: FeatureStore | None,
) -> tuple[Section, Answered]:
    """A few first turns, answered and shown; the mask comes from the generation, as it does when collecting."""
    first = [prompt for prompt in prompts.fitting if prompt[1] == 0]
    count = min(len(first), max(settings.show, _BATCH))
    chosen = [first[index * len(first) // count] for index in range(count)]
    few = replace(generation, max_new_tokens=min(settings.answer_tokens, generation.max_new_tokens))
    began = time.perf_counter()
    answers = answer_batch(target, [ids for *_, ids in chosen], taps=(), generation=few, seed=generation.seed)
    answered = Answered(tuple(answers), time.perf_counter() - began)
    ended = [answer.finish_reason == "stop" for answer in answers]
    samples = [
        Sample(f"{conversation.id[:40]} ({conversation.slice})", _pieces(target, answer))
        for (conversation, *_), answer in zip(chosen[: settings.show], answers, strict=False)
    ]
    rows = [
        (
            "sample",
            f"{len(answers)} answers of up to {few.max_new_tokens} tokens, {sum(ended)} of them ended themselves",
        ),
        ("supervised", f"{answered.supervised:.0%} of the positions: the answer and the token that ends it"),
    ]
    found: list[Finding] = []
    if encoder is not None and not all(conversation.ids for conversation, *_ in chosen):
        same = [
            _as_rendered(target, encoder, conversation, answer)
            for (conversation, *_), answer in zip(chosen, answers, strict=True)
            if not conversation.ids
        ]
        rows.append(("template", f"renders {sum(same)} of these {len(same)} answers as the tokens the target wrote"))
    if all(len(answer.ids_T) - answer.answer_start <= done for answer, done in zip(answers, ended, strict=True)):
        found.append(
            Finding(
                True,
                f"Nothing is supervised but end tokens: the target {target.path} ends every answer at "
                f"once; check target.template= and the model behind target.path=.",
            )
        )
    if store is not None:
        rows.append(("features", _of_store(store, generation, found)))
    return Section("answers", tuple(rows), samples=tuple(samples), findings=tuple(found)), answered


def _of_store(store: FeatureStore, generation: Generation, found: list[Finding]) -> str:
    counts = store.token_counts()
    written, asked = int(counts.supervised_V.sum()), int(counts.prompt_V.sum())
    cut = sum(ref.finish_reason == "length" for ref in store.documents) / len(store.documents)
    if not written:
        found.append(Finding(True, f"Nothing is supervised in {store.folder}; delete it and collect again."))
    if cut > 0.2:
        found.append(
            Finding(
                False,
                f"{cut:.0%} of the collected answers were cut off; where they are served longer, set "
                f"generation.max_new_tokens={2 * generation.max_new_tokens}.",
            )
        )
    share = written / max(1, written + asked)
    return f"{len(store.documents):,} collected answers, {share:.0%} supervised, {cut:.0%} cut off"


def _as_rendered(target: FrozenTarget, encoder: ChatEncoder, conversation: Conversation, answer: Answer) -> bool:
    """Whether the template, given the answer as text, gives the tokens that the target wrote."""
    text = target.tokenizer.decode(answer.ids_T[answer.answer_start :], skip_special_tokens=True)
    logged = {"role": "assistant", "content": text, "finish_reason": answer.finish_reason}
    messages = [*conversation.messages(), logged]
    try:
        return list(encoder.turns(messages, tools=conversation.tools)[-1].ids) == answer.ids_T.tolist()
    except MaskError:
        return False


def _pieces(target: FrozenTarget, answer: Answer) -> tuple[tuple[str, bool], ...]:
    ids, start = answer.ids_T.tolist(), answer.answer_start
    return (target.tokenizer.decode(ids[:start]), False), (target.tokenizer.decode(ids[start:]), True)


def workload(
    prompts: Prompts, generation: Generation, training: TrainSettings, store: FeatureStore | None, conversations: int
) -> tuple[Workload, str]:
    """What so many conversations like those looked at come to, and what that was taken from, in words."""
    answer, how = float(generation.max_new_tokens), f"answers at their longest, {generation.max_new_tokens} tokens"
    if store is not None:
        written = int(store.token_counts().supervised_V.sum())
        answer = written / len(store.documents)
        how = f"answers of {answer:.0f} tokens, as collected"
    asked = sum(min(len(ids) + turn * answer, generation.max_prompt_tokens) for _, turn, ids in prompts.fitting)
    factor = conversations / max(1, prompts.conversations)
    work = Workload(
        prompt_tokens=round(asked * factor * generation.answers),
        answer_tokens=round(len(prompts.fitting) * answer * factor * generation.answers),
        epochs=training.epochs,
        batch_positions=generation.batch_size * (generation.max_prompt_tokens + generation.max_new_tokens),
        step_positions=-(-training.global_batch_tokens // training.accumulation),
        recomputed=training.gradient_checkpointing,
    )
    several = f", {generation.answers} to each turn" if generation.answers > 1 else ""
    return work, f"{conversations:,} conversations, {how}{several}"


def look_at_cost(
    target: FrozenTarget,
    work: Workload,
    how: str,
    answered: Answered,
    heads: Mapping[str, HeadSizes | None],
    settings: DoctorSettings,
    *,
    features: Path | None,
    chosen: HeadSizes,
    storage: Storage = STORED,
) -> Section:
    """Disk, memory and time, here and on one GPU, for each kind of head (None: not for this target).

    how: what the work was taken from, in words; features: where the chosen head's states will lie, None where
    that is not to be checked."""
    sizes, rate = TargetSizes.of(target), forward_rate(target)
    here = Machine(flops=2 * sizes.body * rate, generated=answered.seconds / answered.generated * rate)
    gpu = Machine(flops=settings.gpu_tflops * 1e12, generated=settings.gpu_generation, memory=settings.gpu_memory * 1e9)
    table = [("head", "disk", "memory", "collect here", "train here", "one GPU", "GPU time")]
    for name, head in heads.items():
        if head is None:
            table.append((name, "not for this target", *[""] * 5))
            continue
        local, planned = (estimate(sizes, head, work, machine, storage) for machine in (here, gpu))
        table.append(
            (
                name,
                size_of(local.disk),
                size_of(local.memory),
                time_of(local.collect_seconds),
                time_of(local.train_seconds),
                "fits" if planned.fits else "too small",
                time_of(planned.collect_seconds + planned.train_seconds) if planned.fits else "–",
            )
        )
    rows = (
        (
            "work",
            f"{work.prompt_tokens:,} tokens to read, {work.answer_tokens:,} to write ({how}), {work.epochs} epochs",
        ),
        (
            "here",
            f"{rate:,.0f} positions/s forward ({here.flops / 1e9:,.1f} GFLOP/s); a written token costs "
            f"{here.generated:.1f} read ones with {len(answered.answers)} prompts at once",
        ),
        (
            "GPU",
            f"{settings.gpu_memory:g} GB, {settings.gpu_tflops:g} TFLOP/s, a written token costs "
            f"{settings.gpu_generation:g} read ones: assumed, see doctor.gpu_…; the whole target lies on each GPU",
        ),
        ("disk", _DISK[storage]),
        ("collect", "2 · parameters · (read + cost · written) / FLOP/s"),
        (
            "train",
            "epochs · written · (6 · M + (6 or 4) · K · W · D + 2 · W · D) / FLOP/s, M: the head's "
            "matrices in all K passes, W · D: the projection (training/estimate.py)"
            + (
                "; and epochs · 2 · parameters · positions / FLOP/s for the states"
                if storage.states == "online"
                else ""
            ),
        ),
    )
    found: list[Finding] = []
    try:
        storage.check(chosen.needs)
    except UserError as error:
        found.append(Finding(True, str(error)))
    if not (planned := estimate(sizes, chosen, work, gpu, storage)).fits:
        found.append(
            Finding(
                False,
                f"The target {target.path} with this head needs {size_of(planned.memory)} and does not fit one GPU of "
                f"{settings.gpu_memory:g} GB, and dividing a target among GPUs is not supported yet; plan for a larger "
                f"one with doctor.gpu_memory=, or set generation.batch_size= and train.global_batch_tokens= lower.",
            )
        )
    if features is not None:
        try:
            check_disk(features, estimate(sizes, chosen, work, here, storage).disk)
        except UserError as error:
            found.append(
                Finding(
                    True, f"{str(error).removesuffix('.')}: features_dir=, traffic.limit=, generation.max_new_tokens=."
                )
            )
    return Section("cost", rows, table=tuple(table), findings=tuple(found))


def size_of(count: float) -> str:
    """Bytes in a unit that leaves few digits."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 100 * scale else f"{count / scale:.0f} {unit}"
    return f"{count / 1e3:.0f} kB"


def time_of(seconds: float) -> str:
    """A time in a unit that leaves few digits."""
    for unit, scale in (("days", 86400 * 3), ("h", 3600), ("min", 60)):
        if seconds >= scale:
            return f"{seconds / (86400 if unit == 'days' else scale):,.1f} {unit}"
    return f"{seconds:.0f} s"
