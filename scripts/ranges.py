"""What values of a config are allowed where only a late stage, hours later, would refuse them itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from heads.target import FrozenTarget

_FROM_ONE = ("max_ngram", "window", "candidates", "exit_layer")  # settings of rivals
_LAYERS = 10**6  # of the made-up target: whatever is wrong there is wrong everywhere


def check_config(cfg: DictConfig) -> None:
    """Whatever the config alone can tell of tracking. Raises UserError."""
    from heads.artifact import UserError
    from training.wandb_tracker import MODES

    if cfg.tracking.get("mode") not in (None, *MODES):
        raise UserError(f"tracking.mode={cfg.tracking.mode} is unknown; choose {', '.join(MODES)}, or null.")


def check_layout(cfg: DictConfig) -> None:
    """The layout and the number format of what is exported. Raises UserError."""
    from heads.artifact import UserError
    from heads.export.folder import format_of
    from heads.target import DTYPES

    format_of(str(cfg.export.layout))
    if cfg.export.get("dtype") not in (None, *DTYPES):
        raise UserError(f"export.dtype={cfg.export.dtype!r} is unknown; choose one of {', '.join(DTYPES)}.")


def check_rival(key: str, values: dict[str, Any]) -> None:
    """The settings of a rival, and the file that it names. Raises UserError."""
    from eval.proposers.given_prediction import read_predictions
    from heads.artifact import UserError

    for name in _FROM_ONE:
        if values.get(name) is not None and values[name] < 1:
            raise UserError(f"{key}.{name}={values[name]} must be at least 1; set {key}.{name}=1 or more.")
    path, kind = values.get("path"), str(values["_target_"]).rpartition(".")[2]
    if path is None:
        return
    if kind == "GivenPrediction":
        read_predictions(path)
    elif _is_local(path) and not Path(path).exists():
        raise UserError(
            f"{key}.path={path} is not there; set {key}.path= to a folder, a Hub id such as org/model, or a .gguf file."
        )


def _is_local(path: str) -> bool:
    """Whether this cannot be an id on the Hub."""
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or path.endswith(".gguf")


def check_head(cfg: DictConfig, made: Any) -> None:
    """Values of the head that cannot be for any target, before one is loaded. Raises UserError.

    made: the head's class with the arguments of its config, which is built here for a made-up target, without memory.
    """
    import torch

    from heads.artifact import UserError
    from heads.base import DraftHead
    from heads.layers import BlockSizes
    from heads.losses import Objective
    from heads.pairs import check_passes
    from heads.vocab import DraftVocabulary

    wanted = cfg.head.get("draft_vocab_size")
    if wanted is not None and wanted < 1:
        raise UserError(
            f"A draft vocabulary of {wanted} is not between 1 and the target's; set head.draft_vocab_size=8192, or "
            f"null for all of it."
        )
    _check_taps(cfg, made.keywords.get("taps") or ())
    if made.func.sizes_of.__func__ is not DraftHead.sizes_of.__func__:  # made of its target's own config
        told = made.keywords
        check_passes(told["depth"])
        Objective(kind=told["loss"], decay=told["decay"], eta=told["eta"])
        return
    sizes = BlockSizes(8, 8, 1, 1, 8, 8, _LAYERS, 8, 1e-6, {"rope_type": "default", "rope_theta": 1e4})
    with torch.device("meta"):
        made(sizes=sizes, vocab=DraftVocabulary.identity(1))


def _check_taps(cfg: DictConfig, of_head: Sequence[int]) -> None:
    """Taps of the config by themselves, and against the layers that the target's config tells of. Raises UserError."""
    from heads.artifact import MANIFEST, UserError
    from heads.base import FeatureNeeds
    from heads.target_files import layers_told

    for name, taps in {"head.taps": list(of_head), "collect.taps": list(cfg.collect.taps)}.items():
        if taps != sorted(set(taps)) or any(tap < 0 for tap in taps):
            raise UserError(f"{name}={taps} must be ascending, distinct and ≥ 0; set {name}=[…].")
    collected = (Path(str(cfg.features_dir)) / MANIFEST).is_file()  # then collect.taps says nothing more
    asked = sorted({*of_head, *(() if collected else cfg.collect.taps)})
    if not asked or OmegaConf.is_missing(cfg.target, "path") or cfg.target.gguf_file:
        return
    layers = layers_told(str(cfg.target.path), trust_remote_code=cfg.target.trust_remote_code)
    if layers is not None:
        FeatureNeeds(tuple(asked)).check(layers)


def check_target(cfg: DictConfig, target: FrozenTarget) -> None:
    """What the later stages of the config ask of this target. Raises UserError."""
    from heads.artifact import UserError

    if "evaluate" not in cfg.stages:
        return
    target.check_decodes()
    if cfg.eval.max_new_tokens >= target.max_length:
        raise UserError(
            f"eval.max_new_tokens={cfg.eval.max_new_tokens} leaves no room for a prompt in the target's context of "
            f"{target.max_length} tokens; set eval.max_new_tokens={target.max_length // 2} or so."
        )
    for name, node in cfg.rivals.items():
        layer = node.get("exit_layer")
        if layer is not None and layer >= target.num_layers:
            raise UserError(
                f"rivals.{name}.exit_layer={layer} must be below the {target.num_layers} layers of the target; set "
                f"rivals.{name}.exit_layer={target.num_layers // 2}, or null for half of them."
            )
