"""Medusa-2 (arXiv 2401.10774, section 2.2.2): a trained head and its target learn together.

The target learns by a LoRA adapter. It is drawn to states that the head predicts better from, and held to its own law:

    loss = head_weight · (the head's loss on the adapted states) + KL(original target ‖ adapted target),

the KL over all tokens that the original target wrote (its self-distillation, section 2.3.2). Both parts are sums over
one batch, divided by the number of these tokens. What the original says there is what the feature store holds, so it
is not run again. Of the paper's two stages the first is ordinary training
of the head; this is the second. Afterwards the target is another one, and everything made with it says so.

The module does not know the loop that drives it, or where documents come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from heads.artifact import UserError, sha256_file, write_atomic, write_json, write_manifest
from heads.base import Learner, LossSums, TargetFeatures, TargetWeights, wide
from heads.losses import Objective, TargetRows, UnrolledSums, unrolled_loss
from heads.medusa import MedusaHead
from heads.target import FrozenTarget

MODIFIED = "target modified: not exact with respect to the original"
_WEIGHTS, _CONFIG, _CARD = "adapter_model.safetensors", "adapter_config.json", "README.md"
_LOGITS_CHUNK = 1024  # positions whose logits over the whole vocabulary exist at the same time


def check_strength(rank: int, alpha: float, head_weight: float) -> None:
    """Raises UserError on settings of `JointTraining` that cannot be for any head and target."""
    if rank < 1 or not 0 < alpha < math.inf or not 0 <= head_weight < math.inf:
        raise UserError(
            f"medusa2.rank={rank} medusa2.alpha={alpha} medusa2.head_weight={head_weight}: the rank is at least 1, "
            f"alpha above 0 and head_weight at least 0, both finite."
        )


class JointTraining(Learner):
    """A head and an adapter of its target as one learner; parameters are called `head.…` and `adapter.…`.

    target: the original, which carries the adapter from here on; rank, alpha: of LoRA, whose product is scaled by
    alpha / rank; modules: names of the layers that get an adapter, None for every linear layer but the vocabulary
    projection, which heads share; head_weight: λ0 of the paper. Raises UserError on values that cannot be.
    """

    def __init__(
        self,
        *,
        head: MedusaHead,
        target: FrozenTarget,
        rank: int = 32,
        alpha: float = 16.0,
        modules: list[str] | None = None,
        head_weight: float = 0.2,
    ) -> None:
        from peft import LoraConfig, PeftModel  # slow to import, and seldom needed

        super().__init__()
        check_strength(rank, alpha, head_weight)
        self.head = head
        self.vocab = head.vocab
        self.head_weight = head_weight
        self.weights = target.weights
        chosen = _adaptable(target, modules)
        self.arguments = {"head": head.arguments, "head_weight": head_weight}
        self.arguments |= {"rank": rank, "alpha": alpha, "modules": chosen}
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, task_type="CAUSAL_LM")
        self.adapter = PeftModel(target.model, config)
        head.to(target.device)
        head.attach(self.weights)

    def train(self, mode: bool = True) -> JointTraining:
        """The head learns; the target computes as it is served, without dropout."""
        super().train(mode)
        self.adapter.eval()
        return self

    def loss(self, features: TargetFeatures) -> LossSums:
        """The combined loss over one packed batch, whose states and log-sum-exp are those of the original target.

        count: the supervised tokens, so that the KL is a mean per token also where an answer of one token leaves the
        head without a start. metrics: the head's own, and over the supervised positions `kl`, and `agreement`: how
        often the adapted target's likeliest token is the one that the original wrote.
        """
        # In the target's own number format whatever the head computes in: so it is served.
        with torch.autocast(features.ids_T.device.type, enabled=False):
            states_TD = self.states(features)
            kept = divergence(states_TD, features, self.weights)
        sums: LossSums = self.head(self._as_adapted(features, states_TD))
        count = torch.full((1,), kept.match_KN.shape[1], dtype=torch.float32, device=states_TD.device)
        metrics = sums.metrics | {"kl": (kept.loss_K, count), "agreement": (kept.match_KN.sum(1), count)}
        return replace(sums, loss=self.head_weight * sums.loss + kept.total, count=count[0], metrics=metrics)

    def states(self, features: TargetFeatures) -> Tensor:
        """The states [T, D] of the adapted target after the final norm, with gradient."""
        rows = features.ids_T.split(list(features.lengths))
        # Padded on the right, where no token before it looks.
        output = self.adapter.get_base_model().base_model(input_ids=pad_sequence(rows, True), use_cache=False)
        states_BTD: Tensor = output.last_hidden_state
        return torch.cat([states_BTD[row, :length] for row, length in enumerate(features.lengths)])

    @torch.no_grad()
    def _as_adapted(self, features: TargetFeatures, states_TD: Tensor) -> TargetFeatures:
        """The batch as the adapted target would have made it: the head is to guess what that one will say."""
        places_N = _places(features)
        lse_T = torch.zeros_like(features.lse_T)
        for chunk_C in places_N.split(_LOGITS_CHUNK):
            lse_T[chunk_C] = wide(self.weights.logits(states_TD[chunk_C])).logsumexp(-1).to(lse_T.dtype)
        with torch.enable_grad():
            last_TD = states_TD.to(next(self.head.parameters()).dtype)
        return replace(features, last_TD=last_TD, lse_T=lse_T)


def divergence(states_TD: Tensor, features: TargetFeatures, weights: TargetWeights) -> UnrolledSums:
    """KL of an adapted target, given by its states, from the original that made the features, one pass over all
    supervised tokens."""
    places_N = _places(features)
    original = TargetRows(
        features.last_TD[places_N], weights, features.lse_T[places_N], token_N=features.ids_T[places_N + 1]
    )
    valid_1N = torch.ones(1, len(places_N), dtype=torch.bool, device=places_N.device)
    return unrolled_loss(states_TD[places_N][None], weights.projection, original, valid_1N, Objective("kl", 1.0))


def drift(adapted: FrozenTarget, documents: Sequence[TargetFeatures]) -> dict[str, Any]:
    """How far an adapted target, as it is served, is from the original that wrote the documents greedily: the mean KL
    per supervised position, and the share of these where both choose the same token."""
    total, same, count = 0.0, 0, 0
    with torch.inference_mode():
        for features in (document.to(adapted.device) for document in documents):
            kept = divergence(adapted.forward(features.ids_T[None]).last_BTD[0], features, adapted.weights)
            total, same = total + float(kept.total), same + int(kept.match_KN.sum())
            count += kept.match_KN.shape[1]
    return {"documents": len(documents), "positions": count, "mean_kl": total / count, "greedy_agreement": same / count}


def save_adapter(
    joint: JointTraining,
    folder: str | Path,
    *,
    base: str,
    original: Mapping[str, str],
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write the adapter as PEFT, and so `target.adapter=`, reads it, with a card and a manifest that say what it does.

    base: the path or Hub id of the target; original: its fingerprint; config: the resolved config.
    """
    from peft import get_peft_model_state_dict

    folder = Path(folder)
    tensors = get_peft_model_state_dict(joint.adapter, save_embedding_layers=False)
    write_atomic(folder / _WEIGHTS, save({name: one.cpu().contiguous() for name, one in sorted(tensors.items())}))
    # As PEFT's own save_pretrained, but atomically, and with the names in an order.
    settings = joint.adapter.peft_config["default"].to_dict()
    more = {"base_model_name_or_path": base, "inference_mode": True, "target_modules": joint.arguments["modules"]}
    write_json(folder / _CONFIG, settings | more)
    write_atomic(folder / _CARD, _card(base, original))
    body = {"modified": MODIFIED, "original": dict(original), "sha256": sha256_file(folder / _WEIGHTS)}
    write_manifest(folder, "adapter", body, config)


def _card(base: str, original: Mapping[str, str]) -> str:
    return (
        f"# Adapter of {original['name']}, trained together with a draft head\n\n**{MODIFIED.capitalize()}.**\n\n"
        f"A LoRA adapter of PEFT for {base} (weights `{original['weights']}`). What is served is that target with the "
        f"adapter merged into it; its texts are its own, no longer the original's. The head that was trained with it "
        f"drafts for nothing else.\n"
    )


def _places(features: TargetFeatures) -> Tensor:
    """The positions whose states predict a supervised token; no document begins with one."""
    return features.supervised_T.nonzero()[:, 0] - 1


def _adaptable(target: FrozenTarget, modules: list[str] | None) -> list[str]:
    """The names of the layers to adapt. Raises UserError on one that there is not."""
    shared = target.model.get_output_embeddings()
    linear = [name for name, one in target.model.named_modules() if isinstance(one, nn.Linear) and one is not shared]
    known = sorted({name.rpartition(".")[2] for name in linear})
    if modules is None:
        return known
    if not modules or (unknown := sorted(set(modules) - set(known))):
        what = f"names {unknown[0]!r}" if modules else "is empty"
        raise UserError(
            f"medusa2.modules {what}; choose among {', '.join(known)}, or null for all of them (the vocabulary "
            f"projection stays the original's, because heads share it)."
        )
    return sorted(set(modules))
