"""The gradient of one global batch: micro-batches through the head, sums over ranks, one division by the
count.

It does not know the optimizer, how many steps there are, or what becomes of the numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from heads.base import Learner, LossSums, TargetFeatures
from training.devices import without_exchange
from training.features import unpack

DepthSums = tuple[list[float], list[float]]


class Trainee(nn.Module):
    """What is wrapped for several processes: the head in its precision, and a loss that reaches every parameter.

    mean: what one unit of the loss is, a "token" or a "sequence". A distributed wrapper waits for the gradient of each
    parameter on every rank, also where a rank has no document.
    """

    def __init__(self, head: Learner, *, bf16: bool, distributed: bool, mean: str = "token") -> None:
        super().__init__()
        self.head = head
        self.bf16 = bf16
        self.distributed = distributed
        self.mean = mean

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that learn; sharded ones where the head is sharded."""
        return [parameter for parameter in self.head.parameters() if parameter.requires_grad]

    def forward(self, features: TargetFeatures | None) -> LossSums:
        sums = self._sums(features)
        if not self.distributed:
            return sums
        nothing = torch.stack([parameter.reshape(-1)[0] for parameter in self.trainable]).sum() * 0
        return replace(sums, loss=sums.loss + nothing)

    def _sums(self, features: TargetFeatures | None) -> LossSums:
        first = self.trainable[0]
        if features is None:
            return LossSums(first.new_zeros(()), first.new_zeros(()))
        features = features.to(first.device)
        if self.bf16:
            with torch.autocast(first.device.type, dtype=torch.bfloat16):
                return self._counted(features)
        taps_TE, last_TD = features.taps_TE.to(first.dtype), features.last_TD.to(first.dtype)
        return self._counted(replace(features, taps_TE=taps_TE, last_TD=last_TD))

    def _counted(self, features: TargetFeatures) -> LossSums:
        """The head's sums; with mean="sequence" each document's own mean counts once, so they are read one by one."""
        if self.mean == "token":
            packed: LossSums = self.head(features)
            return packed
        each = [self.head(document) for document in unpack(features) if bool(document.supervised_T.any())]
        counted = [sums.loss / sums.count for sums in each if sums.count > 0]
        zero = self.trainable[0].new_zeros(())
        return LossSums(
            torch.stack(counted).sum() if counted else zero,
            zero + len(counted),
            {name: _summed([sums.metrics[name] for sums in each]) for name in each[0].metrics},
        )


def _summed(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Sums and counts of several documents as those of all."""
    return torch.stack([total for total, _ in pairs]).sum(0), torch.stack([count for _, count in pairs]).sum(0)


@dataclass
class MetricSums:
    """Per-depth sums and counts under their names."""

    sums: dict[str, DepthSums] = field(default_factory=dict)

    def add(self, more: Mapping[str, DepthSums]) -> None:
        for name, (totals, counts) in more.items():
            old_totals, old_counts = self.sums.get(name, ([0.0] * len(totals), [0.0] * len(counts)))
            self.sums[name] = (
                [a + b for a, b in zip(old_totals, totals, strict=True)],
                [a + b for a, b in zip(old_counts, counts, strict=True)],
            )

    def gather(self, *, keep: bool) -> dict[str, DepthSums]:
        """The sums over all ranks; afterwards only a rank that is to `keep` them holds them."""
        everyone = MetricSums()
        for sums in gather_object([self.sums]):
            everyone.add(sums)
        self.sums = dict(everyone.sums) if keep else {}
        return everyone.sums


def means(sums: Mapping[str, DepthSums]) -> dict[str, list[float]]:
    """Sum over count at each depth; nan where nothing was counted."""
    return {
        name: [total / count if count else math.nan for total, count in zip(totals, counts, strict=True)]
        for name, (totals, counts) in sums.items()
    }


@dataclass(frozen=True)
class StepSums:
    """Loss, count and positions of one global batch over all ranks; stop: any rank was asked to."""

    loss: float
    count: float
    tokens: int
    stop: bool


class GradientStep:
    """Leaves in the parameters' `.grad` the gradient of the mean loss over one global batch.

    model: the trainee as it was wrapped; trainable: its parameters; accumulation: micro-batches of a
    rank.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        trainable: Sequence[nn.Parameter],
        *,
        accumulation: int,
        seed: int,
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.trainable = trainable
        self.accumulation = accumulation
        self.seed = seed

    def __call__(
        self,
        step: int,
        micro_batches: Iterator[TargetFeatures | None],
        metrics: MetricSums,
        stop: Callable[[], bool],
    ) -> StepSums:
        """Take this rank's micro-batches, add what they report to `metrics`, reduce the rest over the ranks.

        stop: asked at the end, so that a signal during the step counts. Where nothing at all was supervised
        the gradient is left undefined.
        """
        outputs = [self._backward(step, index, next(micro_batches)) for index in range(self.accumulation)]
        for sums, _ in outputs:
            metrics.add({name: (a.tolist(), b.tolist()) for name, (a, b) in sums.metrics.items()})
        reduced = self._reduce(
            StepSums(
                loss=sum(float(sums.loss) for sums, _ in outputs),
                count=sum(float(sums.count) for sums, _ in outputs),
                tokens=sum(tokens for _, tokens in outputs),
                stop=stop(),
            )
        )
        if reduced.count:
            self._divide(reduced.count)
        return reduced

    def _backward(self, step: int, index: int, features: TargetFeatures | None) -> tuple[LossSums, int]:
        """Add one micro-batch's gradient, with the last one exchange them; returns sums and positions."""
        part = index * self.accelerator.num_processes + self.accelerator.process_index
        torch.manual_seed(seed_of(self.seed, step, part))
        last = index == self.accumulation - 1
        with contextlib.nullcontext() if last else without_exchange(self.model):
            sums: LossSums = self.model(features)
            if sums.loss.requires_grad:
                sums.loss.backward()
        tokens = len(features.ids_T) if features is not None else 0
        return replace(sums, loss=sums.loss.detach()), tokens

    def _reduce(self, sums: StepSums) -> StepSums:
        if self.accelerator.num_processes == 1:
            return sums
        values = torch.tensor(
            [sums.loss, sums.count, sums.tokens, sums.stop],
            dtype=torch.float64,
            device=self.accelerator.device,
        )
        loss, count, tokens, stop = self.accelerator.reduce(values, reduction="sum").tolist()
        return StepSums(loss, count, int(tokens), stop > 0)

    def _divide(self, count: float) -> None:
        """Turn raw sums into the mean; a distributed wrapper has already divided by the number of ranks."""
        for parameter in self.trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self.trainable if parameter.grad is not None]
        torch._foreach_mul_(gradients, self.accelerator.num_processes / count)


def seed_of(seed: int, step: int, part: int) -> int:
    """The seed of one micro-batch: the same however micro-batches are spread over processes."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{part}".encode()).digest()[:7], "big")
