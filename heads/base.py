"""The contract that every draft head fulfils, and the values that cross package borders.

It knows no concrete head, no file format, no sampling rule and no training loop.

Shape legend of the whole project (a suffix of the name, `hidden_BTD`):
`B` rows of a batch, `T` positions (packed: the documents of a batch one after the other, without padding),
`D` target width, `E` = taps · D, `V` target vocabulary, `W` draft vocabulary, `K` unrolled depth, `N` proposed nodes.

Slots: h_t is what the target made of x_t; it predicts x_{t+1}. Slot t of a head joins (h_t, x_{t+1}) at rope
position t and predicts x_{t+2}. This is the convention of the servers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.artifact import UserError
from heads.packed import packed_linear
from heads.vocab import DraftVocabulary

if TYPE_CHECKING:  # heads.target builds on the values of this module
    from heads.target import FrozenTarget
    from heads.tree_draft import Tree


class Draw(Protocol):
    """Draws one token per row; the caller of `propose` owns temperature, truncation, penalties and the generator."""

    def __call__(
        self, logits_BW: Tensor, *, drafted_BK: Tensor | None = None, vocab: DraftVocabulary | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(index_B into W, the distribution drawn from [B, W] or None when the draw is the argmax).

        drafted_BK: target ids that this round has drafted before this token; vocab: what the W columns are (None: the
        target's vocabulary). Rules that look back at the text need both; without them the draft follows them less
        closely, which costs acceptance and nothing else.
        """


@dataclass(frozen=True)
class FeatureNeeds:
    """What a head wants of the target at each position.

    taps: boundary ids, ascending and distinct. Boundary k lies after k layers (k = 0: the embeddings), which is
        `hidden_states[k]` of transformers and the id vLLM uses. The last boundary before the final norm is not
        offered by transformers, so k < num_layers.
    last: whether the state after the final norm is needed.
    judged: whether `Committed.judged` is needed, the target's answer to rejected drafts too.
    """

    taps: tuple[int, ...] = ()
    last: bool = True
    judged: bool = False

    def check(self, num_layers: int) -> None:
        """Raises UserError when the taps are not ascending, distinct and inside the target."""
        if list(self.taps) != sorted(set(self.taps)) or any(not 0 <= tap < num_layers for tap in self.taps):
            raise UserError(
                f"The taps {list(self.taps)} must be ascending, distinct and between 0 and {num_layers - 1} "
                f"for a target of {num_layers} layers; set head.taps=[…] (and collect.taps=[…])."
            )

    def within(self, stored: FeatureNeeds) -> bool:
        """Whether features that were stored for other needs hold all of these."""
        return set(self.taps) <= set(stored.taps) and self.last <= stored.last


@dataclass(frozen=True)
class TargetFeatures:
    """One packed batch of what the target made of some documents.

    ids_T int64; supervised_T bool, true where the token was written by the target; lengths: positions of each
    document, their sum is T; taps_TE the tapped states side by side; last_TD the state after the final norm;
    lse_T float32, the logarithm of the sum of exp over the target's logits at this position, valid at supervised
    positions and at the one before each.
    """

    ids_T: Tensor
    supervised_T: Tensor
    lengths: tuple[int, ...]
    taps_TE: Tensor
    last_TD: Tensor
    lse_T: Tensor

    def to(self, device: torch.device | str) -> TargetFeatures:
        """The same batch on another device."""
        return TargetFeatures(
            self.ids_T.to(device),
            self.supervised_T.to(device),
            self.lengths,
            self.taps_TE.to(device),
            self.last_TD.to(device),
            self.lse_T.to(device),
        )


@dataclass(frozen=True)
class LossSums:
    """A loss as a sum and a count, so that it can be reduced once over micro-batches and ranks.

    loss: scalar with gradient, summed over the supervised positions; count: how many there were (float scalar).
    metrics: name -> (sum_K, count_K), detached, one entry per drafting depth.
    """

    loss: Tensor
    count: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Judged:
    """A whole block as the target has judged it, rejected nodes too.

    tokens_BN int64: the root (the last committed token before the block) at node 0, then the proposal; parents_N [N]
    or [B, N]: -1 for the root; count_B: valid nodes per row, the root included; last_BND: the state after the final
    norm at each node, out of which come the target's logits for what follows it.
    """

    tokens_BN: Tensor
    parents_N: Tensor
    count_B: Tensor
    last_BND: Tensor


@dataclass(frozen=True)
class Committed:
    """Positions that the target has now settled: the input of a head between two rounds.

    next_ids_BM int64: x_{t+1} for each new slot t; taps_BME and last_BMD: h_t; count_B: valid slots per row
    (the rest is padding on the right), 0 for a row whose text has ended while others go on. judged: the block that
    this round judged, given to proposers whose `needs.judged` says so, and None after the prompt.
    """

    next_ids_BM: Tensor
    taps_BME: Tensor
    last_BMD: Tensor
    count_B: Tensor
    judged: Judged | None = None


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens that the target is to check.

    tokens_BN int64; parents_N int64: index of the parent node, -1 for the last committed token (a chain is
    arange(N) - 1), parents before children; one tree for all rows [N], or one each [B, N]; count_B: valid nodes per
    row, the rest is padding.

    probs_BNV float32 decides the rule of verification, and the two are never mixed. None: every token was chosen
    deterministically. Given: siblings were drawn *without replacement*, in the order of their nodes, from the
    distribution over the target's vocabulary in their rows, which are the same for all siblings (what was drawn
    before is not taken out of them).
    """

    tokens_BN: Tensor
    parents_N: Tensor
    count_B: Tensor
    probs_BNV: Tensor | None = None

    @property
    def parents_BN(self) -> Tensor:
        """The tree of each row."""
        return self.parents_N.expand(self.tokens_BN.shape)

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it in every row."""
        steps_N = torch.arange(self.tokens_BN.shape[1], device=self.parents_N.device) - 1
        return torch.equal(self.parents_N, steps_N.expand(self.parents_N.shape))

    def trimmed(self) -> Proposal:
        """The same without the nodes that are padding in every row."""
        longest = int(self.count_B.max())
        if longest == self.tokens_BN.shape[1]:
            return self
        probs_BNV = None if self.probs_BNV is None else self.probs_BNV[:, :longest]
        return Proposal(self.tokens_BN[:, :longest], self.parents_N[..., :longest], self.count_B, probs_BNV)

    def check(self) -> None:
        """Raises UserError when this is no tree, or when what it was drawn from is no distribution."""
        nodes = self.tokens_BN.shape[1]
        if self.parents_N.shape not in ((nodes,), self.tokens_BN.shape):
            raise UserError(
                f"A proposal of {nodes} nodes has parents of shape {list(self.parents_N.shape)}; "
                f"give [{nodes}] for one tree or {list(self.tokens_BN.shape)} for one tree per row."
            )
        if ((self.count_B < 0) | (self.count_B > nodes)).any():
            raise UserError(f"A proposal of {nodes} nodes counts {self.count_B.tolist()}; give 0 to {nodes} per row.")
        order_N = torch.arange(nodes, device=self.parents_N.device)
        wrong = (self.parents_N >= order_N) | (self.parents_N < -1)
        if wrong.any():
            node = int(wrong.nonzero()[0, -1])
            raise UserError(
                f"A proposal is no tree: node {node} has parent {int(self.parents_N[wrong][0])}, where a node "
                f"before it or -1 is allowed (so there is no cycle); order the nodes so that parents come first."
            )
        if self.probs_BNV is not None and nodes:
            valid_BN = order_N.to(self.count_B.device) < self.count_B[:, None]
            off_BN = (self.probs_BNV.sum(-1) - 1).abs().masked_fill(~valid_BN, 0)
            # Written so that a NaN fails too.
            if not off_BN.max() < 1e-3:
                raise UserError(
                    f"A draft distribution sums to 1 ± {float(off_BN.max()):.3g}; give probabilities over the target's "
                    f"vocabulary that sum to 1, or none (probs_BNV=None) for a draft that is not drawn."
                )

    @staticmethod
    def chain(tokens_BN: Tensor, count_B: Tensor | None = None, probs_BNV: Tensor | None = None) -> Proposal:
        """A proposal whose nodes follow one another."""
        rows, nodes = tokens_BN.shape
        if count_B is None:
            count_B = torch.full((rows,), nodes, dtype=torch.long, device=tokens_BN.device)
        return Proposal(tokens_BN, torch.arange(nodes, device=tokens_BN.device) - 1, count_B, probs_BNV)


@dataclass(frozen=True)
class Projection:
    """From output states to the draft's logits: weight [W, D], or [K, W, D] for one projection per pass, with a bias
    [W], or [K, W] beside a weight per pass, and the cap c of logits, c · tanh(logit / c), where there are any."""

    weight: Tensor
    bias_W: Tensor | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class TargetWeights:
    """The frozen parts of the target that heads share: input embeddings [V, D] and vocabulary projection [V, D], with
    its bias [V] and the cap c of logits, c · tanh(logit / c), where the target has them."""

    embedding_VD: Tensor
    lm_head_VD: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None

    def over(self, ids_W: Tensor) -> TargetWeights:
        """The same with the rows of the projection that belong to these tokens, ascending."""
        if len(ids_W) == len(self.lm_head_VD):
            return self
        ids_W = ids_W.to(self.lm_head_VD.device)
        bias_W = None if self.bias_V is None else self.bias_V[ids_W]
        return TargetWeights(self.embedding_VD, self.lm_head_VD[ids_W], bias_W, self.softcap)

    @property
    def projection(self) -> Projection:
        """The vocabulary projection for a head that reads its states by it: frozen, so the loss makes no gradient."""
        return Projection(self.lm_head_VD, self.bias_V, self.softcap)

    def logits(self, last: Tensor) -> Tensor:
        """The target's logits [..., V] in its own dtype from states after the final norm [..., D]."""
        return self._capped(F.linear(last.to(self.lm_head_VD.dtype), self.lm_head_VD, self.bias_V))

    def read(self, output: Tensor) -> Tensor:
        """The same from a draft's states, a few rows at a time: through a copy that is laid out for that."""
        return self._capped(self._linear(output.to(self.lm_head_VD.dtype)))

    @cached_property
    def _linear(self) -> nn.Linear:
        return packed_linear(self.lm_head_VD, self.bias_V)

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Learner(nn.Module, ABC):
    """What a training loop trains: its trainable parameters, on what it calls its loss.

    vocab and arguments: the draft vocabulary and the plain values that, with the class, say which learner this is.
    """

    vocab: DraftVocabulary
    arguments: dict[str, Any]
    recompute: bool | None = None
    """Whether the backward computes again what it could have kept; None where there is nothing to save by it."""
    compiled: bool | None = None
    """Whether what the loss is made of goes through torch.compile; None where none of it can."""
    flex: bool | None = None
    """Whether FlexAttention, on a GPU only, takes the place of blocks of queries; None where there are none."""

    @abstractmethod
    def loss(self, features: TargetFeatures) -> LossSums:
        """Loss over one packed batch, as sums and counts."""

    def forward(self, features: TargetFeatures) -> LossSums:
        """The training loss; `forward` so that distributed wrappers see the call."""
        return self.loss(features)


class DraftHead(Learner):
    """A trainable draft attached to a frozen target.

    A subclass takes sizes and taps by keyword and hands the same keywords to `super().__init__`, which keeps them in
    `arguments` for the checkpoint. It owns its trainable parameters only; the target's weights are lent by `attach`
    and are neither trained nor saved. longest: the deepest chain or tree it can draft, None where there is no limit.
    projections: names of its own linear layers that the loss reads as matrices (`losses.Projection`), so that what is
    put around a layer would not be seen there.
    """

    longest: int | None = None
    projections: tuple[str, ...] = ()

    def __init__(self, *, needs: FeatureNeeds, vocab: DraftVocabulary, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.needs = needs
        self.vocab = vocab
        self.arguments = arguments
        # In a list so that nn.Module neither registers nor moves nor saves the target's weights.
        self._target: list[TargetWeights] = []

    def attach(self, target: TargetWeights) -> None:
        """Lend the head the target's embeddings and vocabulary projection."""
        self._target[:] = [target, target.over(self.vocab.ids_W)]

    @property
    def target(self) -> TargetWeights:
        """The lent weights; asking before `attach` is a programming error."""
        assert len(self._target) > 0, "attach(target) must come before the head is used"
        return self._target[0]

    @property
    def draftable(self) -> TargetWeights:
        """The lent weights over the draft vocabulary: what the target's say is compared on, and read by if a head has
        no projection of its own."""
        assert len(self._target) > 0, "attach(target) must come before the head is used"
        return self._target[1]

    def check_depth(self, depth: int, setting: str = "eval.gamma") -> None:
        """Raises UserError, naming the setting, when the head cannot draft that many tokens in a round."""
        if self.longest is not None and depth > self.longest:
            raise UserError(
                f"{setting}={depth} is beyond the {self.longest} tokens that this head can draft in a round; set "
                f"{setting}={self.longest} or less, or train one with head.depth={depth}."
            )

    @classmethod
    def sizes_of(cls, target: FrozenTarget) -> Any:
        """What the constructor is told of a target as `sizes`: those of its layers."""
        from heads.layers import BlockSizes  # builds on the values of this module

        return BlockSizes.of(target.config, target.vocab_size)

    @classmethod
    def check_donor(cls, target: FrozenTarget) -> None:
        """Raises UserError where the target lacks what `initialise` takes from it; most heads find theirs in any."""

    @classmethod
    def for_target(
        cls, target: FrozenTarget, vocab: DraftVocabulary, *, from_target: bool = True, **arguments: Any
    ) -> Self:
        """A new head of this kind, sized for a target, on its device and attached to it.

        from_target: start from the target's own weights (`initialise`); arguments: those of the constructor.
        """
        kind: Any = cls  # every subclass takes sizes and vocab, the base does not
        head: Self = kind(sizes=cls.sizes_of(target), vocab=vocab, **arguments).to(target.device)
        if from_target:
            head.initialise(target)
        head.attach(target.weights)
        return head

    @abstractmethod
    def initialise(self, target: FrozenTarget) -> None:
        """Set the starting weights, from the target's own where they help."""

    @abstractmethod
    def start(self, prompts: Sequence[Sequence[int]]) -> Any:
        """An empty drafting state for a batch of requests with these prompts (token ids)."""

    @abstractmethod
    def commit(self, state: Any, committed: Committed) -> None:
        """Take in what the target has settled since the last call (the whole prompt at first)."""

    @abstractmethod
    def propose(self, state: Any, depth: int, draw: Draw) -> Proposal:
        """Draft `depth` tokens after the last committed one; leaves the state as if nothing had been drafted."""

    def chain(self, step: Callable[[Sequence[Tensor]], Tensor], depth: int, draw: Draw) -> Proposal:
        """`depth` tokens one after the other; step gives the logits [B, W] after those drafted so far, each [B]."""
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for _ in range(depth):
            logits_BW = step(tokens)
            drafted_BK = torch.stack(tokens, 1) if tokens else None
            index_B, q_BW = draw(logits_BW, drafted_BK=drafted_BK, vocab=self.vocab)
            tokens.append(self.vocab.to_target(index_B))
            if q_BW is not None:
                probs.append(self.vocab.scatter(q_BW))
        return Proposal.chain(torch.stack(tokens, 1), probs_BNV=torch.stack(probs, 1) if probs else None)

    def propose_tree(self, state: Any, depth: int, tree: Tree) -> Proposal:
        """As `propose`, but a tree of this depth, whose nodes are chosen and not drawn (see heads.tree_draft)."""
        raise UserError(f"{type(self).__name__} drafts chains only; set eval.tree=null.")


def wide(states: Tensor) -> Tensor:
    """At least fp32: no sum over a vocabulary or over keys is taken in half precision."""
    return states.float() if states.dtype in (torch.bfloat16, torch.float16) else states
