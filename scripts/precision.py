"""What a number format stands for where a config leaves it open: `auto` and, in lists, `target`.

Found when it is first read, as PyTorch has to be asked, whose import a first line of output must not wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig, ListConfig, OmegaConf

_AUTO = {"target": ("dtype", "bfloat16", "float32"), "train": ("mixed_precision", "bf16", "no")}


def settle(cfg: DictConfig) -> None:
    """Let the config name the formats, so that every artifact says what it was computed in.

    auto: bfloat16 where the device has instructions for it, float32 elsewhere. target: the format of target.dtype,
    once. Whatever else stands there is left to those who read it.
    """
    for section, (name, quick, slow) in _AUTO.items():
        if isinstance(node := cfg[section], DictConfig) and node.get(name) == "auto":
            node[name] = f"${{as_quick:{quick},{slow},${{target.device}}}}"
    for node in (cfg, cfg.get("eval"), cfg.get("prove")):
        if isinstance(node, DictConfig) and isinstance(dtypes := node.get("dtypes"), ListConfig) and "target" in dtypes:
            node.dtypes = f"${{with_target:{list(dtypes)},${{target.dtype}}}}"


def _as_quick(quick: str, slow: str, device: object) -> str:
    import torch

    from training.devices import computes_bf16

    cuda = torch.cuda.is_available() and str(device).startswith(("auto", "cuda"))
    return quick if computes_bf16(torch.device("cuda" if cuda else "cpu")) else slow


def _with_target(dtypes: Sequence[str], dtype: str) -> list[str]:
    others = [one for one in dtypes if one != "target"]  # what is given twice by hand stays, to be refused
    return [*others, *({dtype} - set(others))]


OmegaConf.register_new_resolver("as_quick", _as_quick, replace=True)
OmegaConf.register_new_resolver("with_target", _with_target, replace=True)
