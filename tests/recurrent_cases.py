"""What the tests of all recurrent heads ask: is the trained graph the served one, and does nothing leak? Not a test."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from heads.base import Committed, DraftHead, TargetFeatures
from heads.pairs import supervised_pairs
from heads.recurrent import RecurrentHead, SelfFedHead
from heads.target import FrozenTarget
from tests.tiny import features_of

Documents = list[tuple[list[int], list[bool]]]


def documents(seed: int = 3) -> Documents:
    """Three prompts with their answers."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for prompt, answer in ((5, 9), (3, 6), (7, 4)):
        ids = torch.randint(8, 48, (prompt + answer,), generator=generator).tolist()
        result.append((ids, [False] * prompt + [True] * answer))
    return result


def randomised(head: DraftHead, target: FrozenTarget) -> DraftHead:
    """The head in the target's dtype, attached, with weights that let nothing hide: no zero, no identity."""
    head.to(target.dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    head.attach(target.weights)
    return head


def first_slot(features: TargetFeatures, slot: int) -> int:
    """Where the document of this slot begins."""
    offsets = [0, *torch.tensor(features.lengths).cumsum(0).tolist()]
    return max(offset for offset in offsets if offset <= slot)


def check_trained_is_served(head: SelfFedHead, features: TargetFeatures, depth: int, close: float = 1e-9) -> None:
    """Pass k of the unrolled training equals draft step k of the decoder that is fed the same tokens, this closely."""
    starts, valid = supervised_pairs(features.supervised_T, features.lengths, depth)
    trained = head.logits(head.unroll(features, starts, depth))
    compared = 0
    for n, start in enumerate(starts.tolist()):
        # A token outside the draft vocabulary could not have been drafted, so the comparison ends before it.
        drafted = features.ids_T[start + 2 : start + 1 + int(valid[:, n].sum())]
        reached = 1 + int(torch.isin(drafted, head.vocab.ids_W).long().cumprod(0).sum())
        served: list[torch.Tensor] = []

        def forced(logits, start=start, served=served, **_):
            served.append(logits[0])
            following = features.ids_T[start + 1 + len(served)]
            index = (head.vocab.ids_W == following).nonzero()[:, 0]
            return (index if len(index) else torch.zeros(1).long()), None

        slots = slice(first_slot(features, start), start + 1)
        state = head.start([[0]])
        head.commit(
            state,
            Committed(
                features.ids_T[slots.start + 1 : start + 2][None],
                features.taps_TE[slots][None],
                features.last_TD[slots][None],
                torch.tensor([start + 1 - slots.start]),
            ),
        )
        head.propose(state, reached, forced)
        for k in range(reached):
            torch.testing.assert_close(served[k], trained[k, n], rtol=close, atol=close)
        compared += reached
    assert compared > len(starts), "only first passes were compared"


def check_packed_is_alone(head: DraftHead, target: FrozenTarget) -> None:
    """The loss of packed documents is the sum of their losses, and so is everything that is reported."""
    taps = head.needs.taps
    together = head(features_of(target, documents(), taps))
    alone = [head(features_of(target, [document], taps)) for document in documents()]
    torch.testing.assert_close(together.loss, sum(sums.loss for sums in alone))
    assert together.count == sum(sums.count for sums in alone)
    for name, (total, count) in together.metrics.items():
        torch.testing.assert_close(total, sum(sums.metrics[name][0] for sums in alone))
        torch.testing.assert_close(count, sum(sums.metrics[name][1] for sums in alone))


def check_causal(head: SelfFedHead, target: FrozenTarget, depth: int, still: float = 1e-12) -> None:
    """Pass k of slot t sees states of the target up to t and tokens up to t + 1 + k, and nothing later.

    still: moves that are rounding.
    """
    features = features_of(target, documents()[:1], head.needs.taps)
    starts, _ = supervised_pairs(features.supervised_T, features.lengths, depth)
    before = head.unroll(features, starts, depth)

    def moved(changed: TargetFeatures) -> list[list[int]]:
        return ((head.unroll(changed, starts, depth) - before).abs().amax(-1) > still).nonzero().tolist()

    for position in range(1, len(features.ids_T)):
        ids, taps, last = features.ids_T.clone(), features.taps_TE.clone(), features.last_TD.clone()
        ids[position] = 90
        taps[position:] += 1
        last[position:] += 1
        for k, n in moved(replace(features, ids_T=ids)):
            assert position <= starts[n] + 1 + k, f"pass {k} of slot {int(starts[n])} saw token {position}"
        for k, n in moved(replace(features, taps_TE=taps, last_TD=last)):
            assert position <= starts[n], f"pass {k} of slot {int(starts[n])} saw the state of {position}"
    assert moved(replace(features, ids_T=features.ids_T.flip(0))), "nothing was seen at all"


def check_recomputed_is_kept(head: RecurrentHead, features: TargetFeatures) -> None:
    """Recomputing the passes keeps fewer bytes for the backward and changes neither value nor gradient, in no bit."""
    seen = []
    for head.recompute in (False, True):
        kept: dict[int, int] = {}

        def pack(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        head.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = head.loss(features).loss
        forward = sum(kept.values())
        loss.backward()
        seen.append((loss.detach(), [parameter.grad for parameter in head.parameters()], forward))
    (value, gradients, whole), (again, recomputed, less) = seen
    assert torch.equal(value, again) and less < whole
    for one, other in zip(gradients, recomputed, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
