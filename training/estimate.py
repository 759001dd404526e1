"""What features and training will take: disk, memory and time, by a formula that is stated with its numbers.

With n positions (prompts p, answers a), D the target's width, P its parameters in b bytes each, F sustained FLOP/s:
    disk      n · ((taps + last) · D · b + 9)                       states, ids, mask and log-sum-exp
              n · (taps · (D + 4) + last · D · b + 9)               the taps in FP8, with their scales
              n · 5                                                 states computed online: ids and mask
    collect   2 · P · (p + g · a) / F                               g: a generated token in prompt tokens
    train     epochs · (6 · M · (a or n) + a · ((6 or 4) · K · W · D + 2 · W · D)) / F
              + epochs · 2 · P · n / F                              states computed online
    memory    collecting: P · b + keys and values of one batch
              training:   P · b + 16 · trained + positions of a step · (activations of K passes, or, where they are
              computed again in the backward, of one and what goes into each)
n where a head runs all positions, prompts too (MTP modules in a row), a where it runs those it learns from.
M are the matrix elements a start goes through in all K passes of the head (of experts those that a token is sent to), W
its vocabulary; 6 where the projection is trained, 4 where it is the target's; 16 bytes are an fp32 weight, its gradient
and two moments. Every process holds the whole target, so more GPUs add speed and no room.

It knows neither files nor models, only their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from heads.base import DraftHead, FeatureNeeds
from heads.mtp_blocks import MTPBlocksHead
from heads.recurrent import SelfFedHead
from heads.target import FrozenTarget
from training.store import STORED, Storage

USABLE = 0.9  # of a GPU's memory; the rest is the allocator's and the runtime's
_STATES = 18  # widths D of activations that a decoder block keeps per position and pass, besides 3 of its MLP
_INPUTS = 4  # widths D that go into a pass or come out of it: two states, a key and a value, at most
_PROJECTIONS = ("lm_head", "lm_heads")  # what heads call a vocabulary projection of their own
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")  # as families call it


@dataclass(frozen=True, kw_only=True)
class TargetSizes:
    """parameters: of the whole model; body: without the embedding; keys: elements a position adds to the cache."""

    parameters: int
    body: int
    hidden: int
    inner: int
    vocab: int
    keys: int
    itemsize: int

    @classmethod
    def of(cls, target: FrozenTarget) -> TargetSizes:
        """The sizes of a loaded target."""
        config = target.config
        parameters = sum(parameter.numel() for parameter in target.model.parameters())
        head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
        kv_heads = config.to_dict().get("num_key_value_heads") or config.num_attention_heads
        return cls(
            parameters=parameters,
            body=parameters - target.model.get_input_embeddings().weight.numel(),
            hidden=target.hidden_size,
            inner=config.intermediate_size,
            vocab=target.vocab_size,
            keys=2 * config.num_hidden_layers * kv_heads * head_dim,
            itemsize=target.dtype.itemsize,
        )


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """needs: the states it is trained on; depth: passes K; passed: matrix elements of all passes together, the
    vocabulary projection left out; everywhere: whether they run over prompts too; trained: parameters; own_projection:
    whether the projection is among them."""

    name: str
    needs: FeatureNeeds
    depth: int
    passed: int
    everywhere: bool = False
    trained: int
    vocab: int
    own_projection: bool

    @classmethod
    def of(cls, name: str, head: DraftHead) -> HeadSizes:
        """The sizes of a head, which may have been built without memory."""
        depth, sizes = int(head.arguments["depth"]), head.arguments.get("sizes", {})
        trained = {path: one for path, one in head.named_parameters() if one.requires_grad}
        projection = [path for path in trained if path.split(".")[0] in _PROJECTIONS]
        matrices = sum(_passed(path, one, sizes) for path, one in trained.items() if path not in projection)
        return cls(
            name=name,
            needs=head.needs,
            depth=depth,
            # One block is used in every pass; stacked heads have blocks of each pass's own.
            passed=matrices * (depth if isinstance(head, SelfFedHead) else 1),
            everywhere=isinstance(head, MTPBlocksHead),
            trained=sum(one.numel() for one in trained.values()),
            vocab=len(head.vocab.ids_W),
            own_projection=bool(projection),
        )


def _passed(path: str, parameter: nn.Parameter, sizes: Mapping[str, Any]) -> int:
    """Matrix elements of one weight that a token goes through. Of experts, which lie side by side in [E, …], it goes
    through as many as the family's configuration says."""
    if parameter.dim() < 2:
        return 0
    experts = parameter.dim() == 3 and "experts" in path.split(".")
    taken = next((int(sizes[key]) for key in _PER_TOKEN if sizes.get(key)), None) if experts else None
    return parameter.numel() if taken is None else parameter.numel() // len(parameter) * min(taken, len(parameter))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How much there is to do: positions of all documents, of one batch of generation, and of one training step;
    recomputed: whether the backward of that computes the head's passes again."""

    prompt_tokens: int
    answer_tokens: int
    epochs: int
    batch_positions: int
    step_positions: int
    recomputed: bool = False

    def times(self, factor: float) -> Workload:
        """The same for more or fewer conversations."""
        return Workload(
            prompt_tokens=round(self.prompt_tokens * factor),
            answer_tokens=round(self.answer_tokens * factor),
            epochs=self.epochs,
            batch_positions=self.batch_positions,
            step_positions=self.step_positions,
            recomputed=self.recomputed,
        )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """flops: sustained, per second; generated: what a generated token costs in prompt tokens; memory: bytes of one
    GPU, None where there is no such limit."""

    flops: float
    generated: float
    memory: float | None = None


@dataclass(frozen=True)
class Estimate:
    """disk and memory in bytes, times in seconds on one such machine or GPU; fits: whether its memory holds the larger
    need, which no number of them can share (true without a limit)."""

    disk: int
    collect_memory: int
    train_memory: int
    collect_seconds: float
    train_seconds: float
    fits: bool

    @property
    def memory(self) -> int:
        """The larger need."""
        return max(self.collect_memory, self.train_memory)


def estimate(
    target: TargetSizes, head: HeadSizes, work: Workload, machine: Machine, storage: Storage = STORED
) -> Estimate:
    """The module's formula."""
    states, positions = len(head.needs.taps) + head.needs.last, work.prompt_tokens + work.answer_tokens
    disk = positions * storage.position_bytes(head.needs, target.hidden, target.itemsize)
    weights = target.parameters * target.itemsize
    collect_memory = weights + work.batch_positions * target.keys * target.itemsize
    one_pass = _STATES * target.hidden + 3 * target.inner
    passes = one_pass + head.depth * _INPUTS * target.hidden if work.recomputed else head.depth * one_pass
    per_position = (passes + states * target.hidden) * 4
    train_memory = weights + 16 * head.trained + work.step_positions * per_position
    collect = 2 * target.body * (work.prompt_tokens + machine.generated * work.answer_tokens) / machine.flops
    train = work.epochs * train_flops(target, head, positions, work.answer_tokens) / machine.flops
    if storage.states == "online":
        train += work.epochs * 2 * target.body * positions / machine.flops
    fits = machine.memory is None or max(collect_memory, train_memory) <= USABLE * machine.memory
    return Estimate(disk, collect_memory, train_memory, collect, train, fits)


def train_flops(target: TargetSizes, head: HeadSizes, positions: int, supervised: int) -> int:
    """Floating-point operations of training once on positions, of which some are supervised, forward and backward."""
    projection = head.vocab * target.hidden
    judged = ((6 if head.own_projection else 4) * head.depth + 2) * projection
    return 6 * head.passed * (positions if head.everywhere else supervised) + supervised * judged


@torch.inference_mode()
def forward_rate(target: FrozenTarget, *, rows: int = 4, length: int = 128, tries: int = 3) -> float:
    """Positions per second of a bare forward of this target here, the best of some tries after a warm-up."""
    from time import perf_counter

    length = min(length, target.max_length)
    ids = torch.randint(target.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    ids = ids.to(target.device)
    seconds = []
    for _ in range(tries + 1):
        began = perf_counter()
        target.logits(target.forward(ids).last_BTD[:, -1])
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        seconds.append(perf_counter() - began)
    return rows * length / min(seconds[1:])
