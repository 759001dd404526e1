"""What a number format stands for where a config leaves it open: `auto` and, in lists, `target`.

Found when it is first read, as PyTorch has to be asked, whose import a first line of output must not wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omegaconf import DictConfig, ListConfig, OmegaConf

FORMATS = ("bfloat16", "float16", "float32", "float64")  # heads.target.DTYPES, whose import is PyTorch's
# section: its setting, what may stand there, and what `auto` is where bfloat16 is quick and where it is not
_AUTO = {
    "target": ("dtype", FORMATS, "bfloat16", "float32"),
    "train": ("mixed_precision", ("bf16", "no"), "bf16", "no"),
}


def check_formats(cfg: DictConfig) -> None:
    """Raises UserError on a number format that there is not, by the name of the setting that says it."""
    from heads.artifact import UserError

    for section, (name, allowed, *_) in _AUTO.items():
        if isinstance(node := cfg[section], DictConfig) and name in node and node[name] not in (*allowed, "auto"):
            given = "null" if node[name] is None else repr(node[name])
            raise UserError(f"{section}.{name}={given} is unknown; choose one of auto, {', '.join(allowed)}.")
    for prefix, node in _with_lists(cfg):
        if unknown := [one for one in node.dtypes if one not in (*FORMATS, "target")]:
            raise UserError(
                f"{prefix}dtypes={list(node.dtypes)}: {unknown[0]} is unknown; choose some of target, "
                f"{', '.join(FORMATS)}."
            )


def _with_lists(cfg: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    """Each section that has a list of number formats, after what its settings begin with."""
    for prefix, node in {"": cfg, "eval.": cfg.get("eval"), "prove.": cfg.get("prove")}.items():
        if isinstance(node, DictConfig) and isinstance(node.get("dtypes"), ListConfig):
            yield prefix, node


def settle(cfg: DictConfig) -> None:
    """Let the config name the formats, so that every artifact says what it was computed in.

    auto: bfloat16 where the device has instructions for it, float32 elsewhere. target: the format of target.dtype,
    once. Whatever else stands there is left to those who read it.
    """
    for section, (name, _, quick, slow) in _AUTO.items():
        if isinstance(node := cfg[section], DictConfig) and node.get(name) == "auto":
            node[name] = f"${{as_quick:{quick},{slow},${{target.device}}}}"
    for _, node in _with_lists(cfg):
        if "target" in node.dtypes:
            node.dtypes = f"${{with_target:{list(node.dtypes)},${{target.dtype}}}}"


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
