"""What only a GPU shows: every fast path against its plain reference there, and what each of them gains in training.

On CPU the same program runs with small sizes, where FlexAttention has no gradient, so its values alone are compared.
The module does not know how the figures are shown.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from heads.artifact import UserError
from heads.base import DraftHead, Learner, Projection, TargetFeatures, TargetWeights, wide
from heads.compiled import start_compiling
from heads.eagle3 import Eagle3Head
from heads.kernels import KINDS, reference_loss
from heads.layers import BlockSizes
from heads.losses import Objective, TargetRows, unrolled_loss
from heads.unrolled import Columns, dense_attention, fused_attention, unrolled_attention
from heads.vocab import DraftVocabulary
from training.bench import StepBench, made_up_features
from training.optim import OptimSettings
from training.step import Trainee
from training.tracking import peak_memory

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of ‖fast - plain‖ / ‖plain‖. Sums run in another order, which in fp32 costs 1e-6 or so; bf16 keeps 8 bits and is
rounded at other places, which costs a hundredth."""
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_DECAY = 0.8


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """Sizes of the made head, which are those of an 8B Llama, and of what it is trained on: documents of `length`
    positions in one batch; depth: passes; steps of one turn; repeats: turns. Raises UserError on values below 1."""

    hidden_size: int = 4096
    heads: int = 32
    kv_heads: int = 8
    intermediate_size: int = 14336
    vocab_size: int = 128256
    draft_vocab_size: int = 32000
    depth: int = 4
    documents: int = 8
    length: int = 1024
    steps: int = 4
    repeats: int = 3

    def __post_init__(self) -> None:
        for one in fields(self):
            if vars(self)[one.name] < 1:
                raise UserError(f"check.{one.name}={vars(self)[one.name]} must be at least 1.")
        if self.hidden_size % self.heads or self.heads % self.kv_heads or self.draft_vocab_size > self.vocab_size:
            raise UserError(
                f"check.heads={self.heads} must divide check.hidden_size={self.hidden_size}, check.kv_heads="
                f"{self.kv_heads} the heads, and check.draft_vocab_size={self.draft_vocab_size} is at most "
                f"check.vocab_size={self.vocab_size}."
            )


@dataclass(frozen=True)
class Check:
    """error: the largest ‖fast - plain‖ / ‖plain‖ of values and gradients, None where it ended with the failure."""

    name: str
    error: float | None
    tolerance: float
    failure: str | None = None

    @property
    def passed(self) -> bool:
        """A NaN does not."""
        return self.error is not None and self.error <= self.tolerance


@dataclass(frozen=True)
class Speed:
    """One way to train one head. tokens_per_second: median of the turns; share: of the matmul peak, with the FLOPs of
    the plain program; memory: bytes at most; first_seconds: the first two steps, compiling included."""

    head: str
    compiled: bool
    flex: bool
    tokens_per_second: float | None = None
    share: float | None = None
    peak: float | None = None
    memory: int | None = None
    first_seconds: float | None = None
    failure: str | None = None


def ways(device: torch.device) -> list[tuple[bool, bool]]:
    """(compiled, flex) of every way to train there, the plain one first."""
    return list(product((False, True), (False, True) if device.type == "cuda" else (False,)))


def made_head(settings: CheckSettings, device: torch.device) -> Eagle3Head:
    """An EAGLE-3 head of these sizes with random weights, attached to random weights of a target in bf16."""
    width = settings.hidden_size
    sizes = BlockSizes(
        hidden_size=width,
        intermediate_size=settings.intermediate_size,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=width // settings.heads,
        vocab_size=settings.vocab_size,
        num_target_layers=32,
        max_position_embeddings=max(4096, settings.length),
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    vocab = DraftVocabulary.choose(torch.arange(settings.vocab_size, 0, -1), settings.draft_vocab_size)
    with device:
        head = Eagle3Head(sizes=sizes, vocab=vocab, depth=settings.depth)
        shape = (settings.vocab_size, width)
        tables = [torch.randn(shape, dtype=torch.bfloat16).mul_(width**-0.5) for _ in range(2)]
    head.attach(TargetWeights(*tables))
    return head


def checks(settings: CheckSettings, device: torch.device) -> Iterator[Check]:
    """Losses, attention, and whole heads."""
    torch.manual_seed(0)
    start_compiling()
    yield from _loss_checks(settings, device)
    yield from _attention_checks(settings, device)
    head = made_head(settings, device)
    lengths = [max(3, settings.length // 4)] * 2
    features = made_up_features(head, hidden_size=settings.hidden_size, lengths=lengths).to(device)
    yield from head_checks(head, features)


def speeds(name: str, head: DraftHead, features: TargetFeatures, settings: CheckSettings) -> Iterator[Speed]:
    """Every way to train a head in bf16 on one batch."""
    device = features.ids_T.device
    start_compiling()
    bench = StepBench(head, features, OptimSettings(), bf16=True)  # counts the plain program's operations
    for compiled, flex in ways(device):
        _set(head, compiled, flex)
        try:
            began = time.perf_counter()
            bench.turn(2)
            first = time.perf_counter() - began
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            turns = [bench.turn(settings.steps) for _ in range(settings.repeats)]
        except RuntimeError as error:  # one way that fails must not hide the others
            yield Speed(name, compiled, flex, failure=_told(error))
            continue
        positions = len(features.ids_T) * settings.steps
        yield Speed(
            name,
            compiled,
            flex,
            tokens_per_second=statistics.median(positions / seconds for seconds, _ in turns),
            share=statistics.median(share for _, share in turns),
            peak=bench.peak,
            memory=peak_memory(device),
            first_seconds=first,
        )


def head_checks(head: DraftHead, features: TargetFeatures) -> Iterator[Check]:
    """Loss and gradients of every way to compute them against the plain one, in fp32 and in bf16."""
    plain, *others = ways(features.ids_T.device)
    for dtype in TOLERANCES:
        trainee = Trainee(head, bf16=dtype is torch.bfloat16, distributed=False)
        reference = _learned(trainee, features, plain)
        for way in others:
            title = ", ".join(name for name, on in zip(("compiled", "flex"), way, strict=True) if on)
            fast = partial(_learned, trainee, features, way)
            yield _compared(f"head, {title}, {_NAMES[dtype]}", dtype, fast, reference)
    _set(head, *plain)


def _learned(trainee: Trainee, features: TargetFeatures, way: tuple[bool, bool]) -> list[Tensor]:
    """The loss of a head and its gradients."""
    _set(trainee.head, *way)
    sums = trainee(features)
    return [sums.loss.detach(), *torch.autograd.grad(sums.loss, trainee.trainable)]


def _set(head: Learner, compiled: bool, flex: bool) -> None:
    head.compiled, head.flex = compiled, flex


def _loss_checks(settings: CheckSettings, device: torch.device) -> Iterator[Check]:
    """Every kind of loss, as it is and compiled, against autograd over the reference."""
    depth, places, width, outside = 2, 64, 128, 16
    for dtype in TOLERANCES:
        states = torch.randn(depth + 1, places, width, device=device, dtype=dtype)
        tables = [torch.randn(settings.draft_vocab_size + outside, width, device=device, dtype=dtype) for _ in "pq"]
        table, weight = (2 * one * width**-0.5 for one in tables)
        full = TargetWeights(table, table)
        weights = full.over(torch.arange(settings.draft_vocab_size, device=device))
        lse_N = wide(full.logits(states[-1])).logsumexp(-1)
        token_N = torch.randint(-1, settings.draft_vocab_size, (places,), device=device)
        rows = TargetRows(states[-1], weights, lse_N, token_N)
        inputs = [states[:-1].clone().requires_grad_(), weight[: settings.draft_vocab_size].clone().requires_grad_()]
        last_K1 = places - torch.arange(depth, device=device)[:, None]
        valid_KN = torch.arange(places, device=device) < last_K1
        for kind in KINDS:
            plain = _with_gradients(_plain_loss(kind, *inputs, rows), inputs)
            for compiled in (False, True):
                fast = partial(_fast_loss, inputs, rows, valid_KN, Objective(kind, _DECAY), compiled)
                name = f"loss {kind}{', compiled' if compiled else ''}, {_NAMES[dtype]}"
                yield _compared(name, dtype, fast, plain)


def _fast_loss(
    inputs: Sequence[Tensor], rows: TargetRows, valid_KN: Tensor, objective: Objective, compiled: bool
) -> list[Tensor]:
    sums = unrolled_loss(inputs[0], Projection(inputs[1]), rows, valid_KN, objective, compiled=compiled)
    return _with_gradients(sums.total, inputs)


def _plain_loss(kind: str, hidden_KND: Tensor, weight_WD: Tensor, rows: TargetRows) -> Tensor:
    """The sum over all passes by operations that autograd knows. The logits are as rounded as those of the fast path:
    whether q is above or below p decides the gradient of some kinds."""
    places = hidden_KND.shape[1]
    p_NW = rows.said(rows.logits(slice(0, places)), 0).p_CW
    passes = []
    for k, hidden_ND in enumerate(hidden_KND):
        logits_NW = wide(hidden_ND[: places - k] @ weight_WD.T)
        passes.append(_DECAY**k * reference_loss(kind, logits_NW, p_NW[k:], rows.token_N[k:]).sum())
    return torch.stack(passes).sum()


def _attention_checks(settings: CheckSettings, device: torch.device) -> Iterator[Check]:
    """Blocks of queries and FlexAttention against every score written out, in fp32."""
    lengths = (settings.length, 3, settings.length // 2 + 1, settings.length // 3 + 1)
    starts_N = torch.arange(sum(lengths), device=device)
    columns = Columns(lengths, starts_N[starts_N % 3 > 0])
    queries, heads, groups = len(columns.starts_N), settings.heads, settings.kv_heads
    for dtype, passes in product(TOLERANCES, (0, 1, 3)):
        counts = [(queries, heads), *[(sum(lengths), groups)] * 2, *[(queries, groups)] * (2 * passes)]
        drawn = [torch.randn(*count, settings.hidden_size // heads, device=device, dtype=dtype) for count in counts]
        forms = {"in blocks": unrolled_attention, "by FlexAttention": fused_attention}
        for name, form in forms.items():
            learns = form is unrolled_attention or device.type == "cuda"
            inputs = [one.requires_grad_(learns) for one in drawn]
            title = f"attention {name}, {passes} passes, {_NAMES[dtype]}{'' if learns else ', value only'}"
            fast, plain = (partial(_attended, one, inputs, columns) for one in (form, dense_attention))
            yield _compared(title, dtype, fast, plain(widen=True))


def _attended(
    form: Callable[..., Tensor], inputs: Sequence[Tensor], columns: Columns, widen: bool = False
) -> list[Tensor]:
    """The output of a form of attention, in at least fp32 with `widen`, and its gradients where they are wanted."""
    q, k, v, *own = map(wide, inputs) if widen else inputs
    out = form(q, (k, v), list(zip(own[::2], own[1::2], strict=True)), columns)
    return _with_gradients(out, inputs) if out.requires_grad else [out]


def _with_gradients(out: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """A value, and the gradients of its cosine-weighted sum."""
    weight = torch.arange(out.numel(), device=out.device).cos().reshape(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


def _compared(name: str, dtype: torch.dtype, fast: Callable[[], Sequence[Tensor]], plain: Sequence[Tensor]) -> Check:
    try:
        pairs = list(zip(fast(), plain, strict=True))
    except RuntimeError as error:  # what does not compile is a finding, and the other checks go on
        return Check(name, None, TOLERANCES[dtype], _told(error))
    errors = [float((wide(a) - wide(b)).norm() / wide(b).norm().clamp_min(1e-30)) for a, b in pairs]
    return Check(name, max(errors) if all(error == error for error in errors) else None, TOLERANCES[dtype])


def _told(error: RuntimeError) -> str:
    return "".join(traceback.format_exception(error))


def as_json(found: Sequence[Check], rates: Sequence[Speed]) -> dict[str, Any]:
    """The figures as plain values."""
    return {
        "checks": [{**asdict(one), "passed": one.passed} for one in found],
        "speeds": [asdict(one) for one in rates],
    }
