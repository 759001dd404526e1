"""What a later stage would refuse is refused before the first one, as far as the config alone can tell."""

from __future__ import annotations

import pytest
import torch

from heads.artifact import UserError
from heads.checkpoint import class_path
from heads.export.folder import FORMATS
from heads.vocab import DraftVocabulary
from scripts.settings import check_all
from tests import e2e
from tests.servable import SERVABLE, servable
from tests.test_head_checkpoint import tiny_head

NO_LAYOUT = (
    r"has no layout for a head of the kind heads\.\S+; leave the stage out with 'stages=\[collect,train,evaluate\]'"
)


@pytest.mark.parametrize(
    ("wrong", "right", "words"),
    [
        (["head=hydra_mlp"], ["stages=[collect,train,evaluate]"], f"export=vllm {NO_LAYOUT}"),
        (["head=mtp_native"], ["stages=[train,evaluate]"], "export=vllm has no layout"),
        (["head=mtp_blocks"], ["stages=[collect,train,evaluate]"], f"export=vllm {NO_LAYOUT}"),
        (["head=medusa", "export=sglang"], ["export=original"], f"export=sglang {NO_LAYOUT}"),
        (
            ["experiment=demo", "head=medusa"],
            ["head.draft_vocab_size=null"],
            r"head\.draft_vocab_size=4096 could not be",
        ),
        (["head=mtp", "head.draft_vocab_size=64"], ["stages=[train,evaluate]"], "set head.draft_vocab_size=null"),
        (["head=medusa", "eval.gamma=5"], ["head.depth=5"], r"eval\.gamma=5 is beyond head\.depth=4"),
        (["experiment=compare", "head=mtp_blocks", "head.depth=3"], ["eval.gamma=3"], r"set eval\.gamma=3 or less"),
        (["experiment=compare", "head=hydra_mlp", "head.depth=2"], ["eval.gamma=2"], r"set eval\.gamma=2 or less"),
    ],
)
def test_what_a_later_stage_would_refuse_is_refused_at_once(wrong: list[str], right: list[str], words: str) -> None:
    """Without a target, and before hours of collecting and training."""
    with pytest.raises(UserError, match=words):
        check_all(e2e.config(*wrong))
    check_all(e2e.config(*wrong, *right))


def test_a_later_stage_alone_decides_by_itself() -> None:
    """Its head may be of another kind than the config's. EAGLE-3 has a layout and no longest draft."""
    check_all(e2e.config("head=hydra_mlp", "eval.gamma=9", "stages=[evaluate,export]"))
    check_all(e2e.config("eval.gamma=9"))


def test_which_layouts_want_the_whole_vocabulary() -> None:
    """What is asked before training is what the layouts themselves refuse after it."""
    vocab = DraftVocabulary(torch.arange(8), tiny_head().vocab.size)
    for layout in {layout for how in FORMATS.values() for layout in how.layouts}:
        kind = next(kind for kind in SERVABLE if class_path(servable(kind)) == layout.head)
        if layout.whole_vocabulary:
            with pytest.raises(UserError, match="head.draft_vocab_size=null"):
                layout.check(servable(kind, vocab=vocab))
        else:
            layout.check(servable(kind, vocab=vocab))
