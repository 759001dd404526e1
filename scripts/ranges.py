"""What values of a config are allowed where only a late stage, hours later, would refuse them itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from heads.target import FrozenTarget

_FROM_ONE = ("max_ngram", "window", "candidates", "exit_layer")  # settings of rivals


def check_config(cfg: DictConfig) -> None:
    """Whatever the config alone can tell of export, tracking and rivals. Raises UserError."""
    from heads.artifact import UserError
    from heads.target import DTYPES
    from training.wandb_tracker import MODES

    if cfg.export.get("dtype") not in (None, *DTYPES):
        raise UserError(f"export.dtype={cfg.export.dtype!r} is unknown; choose one of {', '.join(DTYPES)}.")
    if cfg.tracking.get("mode") not in (None, *MODES):
        raise UserError(f"tracking.mode={cfg.tracking.mode} is unknown; choose {', '.join(MODES)}, or null.")
    for name, node in cfg.rivals.items():
        values = OmegaConf.to_container(node, resolve=True)
        assert isinstance(values, dict)
        _check_rival(f"rivals.{name}", {str(key): value for key, value in values.items()})


def _check_rival(key: str, values: dict[str, Any]) -> None:
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


def check_target(cfg: DictConfig, target: FrozenTarget) -> None:
    """What the later stages of the config ask of this target. Raises UserError."""
    from heads.artifact import UserError

    if "evaluate" not in cfg.stages:
        return
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
