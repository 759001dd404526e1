"""What a number format stands for where a config leaves it open: `auto` and, in lists, `target`."""

from __future__ import annotations

from omegaconf import DictConfig, ListConfig


def settle(cfg: DictConfig) -> None:
    """Name the formats in the config, so that every artifact says what it was computed in.

    auto: bfloat16 where the device has instructions for it, float32 elsewhere. target: the format of target.dtype,
    once. Whatever else stands there is left to those who read it.
    """
    auto = {"target.dtype": ("bfloat16", "float32"), "train.mixed_precision": ("bf16", "no")}
    for key, (quick, slow) in auto.items():
        section, _, name = key.partition(".")
        if isinstance(node := cfg[section], DictConfig) and node.get(name) == "auto":
            node[name] = quick if _computes_bf16(str(cfg.target.get("device"))) else slow
    for node in (cfg, cfg.get("eval"), cfg.get("prove")):
        if isinstance(node, DictConfig) and isinstance(dtypes := node.get("dtypes"), ListConfig) and "target" in dtypes:
            # what is given twice by hand stays, to be refused
            others = [one for one in dtypes if one != "target"]
            node.dtypes = [*others, *({str(cfg.target.dtype)} - set(others))]


def _computes_bf16(device: str) -> bool:
    import torch

    from training.devices import computes_bf16

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return computes_bf16(torch.device(device if device.startswith("cuda") and torch.cuda.is_available() else "cpu"))
