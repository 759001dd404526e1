"""What all scripts share: the one-sentence error, and the parts they build from the config. Joins training to eval."""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:  # torch and transformers take seconds; a first line of output must not wait for them
    from heads.base import DraftHead
    from heads.target import FrozenTarget
    from heads.vocab import DraftVocabulary

USER_ERROR = 2


def one_sentence(main: Callable[[DictConfig], None]) -> Callable[[DictConfig], None]:
    """Turn mistakes of the user and a full disk into one line on stderr and exit code 2."""

    @functools.wraps(main)
    def guarded(cfg: DictConfig) -> None:
        from heads.artifact import UserError

        try:
            main(cfg)
        except UserError as error:
            sys.exit(_fail(str(error)))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            sys.exit(_fail(f"The disk is full ({error.filename or cfg.run_dir}); free some space and run this again."))

    return guarded


def _fail(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return USER_ERROR


def plain(cfg: DictConfig) -> dict[str, Any]:
    """A config node as plain values."""
    values = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def load_target(cfg: DictConfig, dtype: str | None = None) -> FrozenTarget:
    """The target of the config, in its own number format or in `dtype`."""
    import torch

    from heads.artifact import UserError
    from heads.target import FrozenTarget, quiet_transformers

    quiet_transformers()
    if OmegaConf.is_missing(cfg.target, "path"):
        raise UserError("target=custom needs target.path=<folder, Hub id or .gguf file>.")
    options = plain(cfg.target)
    if options["device"] == "auto":
        options["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    return FrozenTarget.load(options.pop("path"), **(options | ({"dtype": dtype} if dtype else {})))


def build_head(cfg: DictConfig, target: FrozenTarget, vocab: DraftVocabulary) -> DraftHead:
    """The head of the config, sized for the target, attached to it and with its starting weights."""
    import torch

    from heads.layers import BlockSizes

    torch.manual_seed(cfg.seed)
    head = _head_class(cfg)(sizes=BlockSizes.of(target.config, target.vocab_size), vocab=vocab)
    head.to(target.device)
    if cfg.head.from_target:
        head.initialise(target)
    head.attach(target.weights)
    return head


def head_needs(cfg: DictConfig, target: FrozenTarget) -> Any:
    """Which features the head of the config wants of this target; builds it without memory to ask it."""
    import torch

    from heads.layers import BlockSizes
    from heads.vocab import DraftVocabulary

    sizes, vocab = BlockSizes.of(target.config, target.vocab_size), DraftVocabulary.identity(1)
    with torch.device("meta"):
        return _head_class(cfg)(sizes=sizes, vocab=vocab).needs


def _head_class(cfg: DictConfig) -> Callable[..., DraftHead]:
    """The head's class with the constructor arguments of its config; the rest of that config is decided outside."""
    from hydra.utils import instantiate

    options = {key: value for key, value in plain(cfg.head).items() if key not in ("draft_vocab_size", "from_target")}
    head_class: Callable[..., DraftHead] = instantiate(options, _partial_=True, _convert_="all")
    return head_class
