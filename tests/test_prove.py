"""The certificate: a sound head passes, every damage fails, and what is written says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from eval.certificate import Certificate, ProofSettings, to_markdown
from eval.exactness import Divergence, Identity
from eval.law import CONTROLS, DAMAGES, Fit
from heads.artifact import UserError
from scripts import prove
from tests import e2e

SMALL = (
    *("prove.requests=4", "prove.max_new_tokens=8", "prove.rows=2", "prove.samples=3000", "prove.prefixes=1"),
    *("prove.copies=400", "prove.prefix_tokens=5", "prove.dtypes=[float32,bfloat16]"),
)


@pytest.fixture
def place(finished: e2e.Finished, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[bool, dict, str]]:
    """`place(*overrides)`: (passed, certificate.json, certificate.md) on the finished run, here in this process."""
    monkeypatch.chdir(finished.place.cwd)

    def run(*more: str) -> tuple[bool, dict, str]:
        passed = prove.run(e2e.config(*finished.place.overrides, *SMALL, *more, name="prove"))
        damages = [one.removeprefix("damage=") for one in more if one.startswith("damage=")]
        folder = finished.place.run / "-".join(["certificate", *damages])
        assert (folder / "manifest.json").is_file()
        return passed, json.loads((folder / "certificate.json").read_text()), (folder / "certificate.md").read_text()

    return run


@pytest.mark.slow
def test_a_sound_head_passes(place) -> None:
    passed, found, page = place()
    assert passed and found["passed"] and found["complaints"] == []
    names = {(one["proposer"], one["dtype"]) for one in found["identity"]}
    assert names == {
        (name, dtype) for name in ("head", "head, tree", "prompt_lookup") for dtype in ("float32", "bfloat16")
    }
    assert len(found["tiny"]) >= 40 and set(found["controls"]) == set(CONTROLS) == set(DAMAGES)
    assert {name.split(", after")[0] for name in (fit["name"] for fit in found["real"])} == {
        *("head, rejection", "head, block", "head, tree, rejection", "prompt_lookup, rejection"),
    }
    assert "**PASS" in page and "FAIL" not in page and len(page.splitlines()) < 80


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_fails(place, damage: str) -> None:
    """The proof itself is damaged, the controls beside it stay what they are."""
    passed, found, page = place(f"damage={damage}")
    assert not passed and found["verdict"].startswith("FAIL")
    assert any(complaint.startswith("law of") for complaint in found["complaints"])
    assert not any("was not seen" in complaint for complaint in found["complaints"])
    assert DAMAGES[damage] in page


def test_the_exit_code_says_whether_it_passed(finished: e2e.Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "run", lambda cfg: cfg.damage is None)
    monkeypatch.setattr("sys.argv", ["prove", *finished.place.overrides])
    prove.main()
    monkeypatch.setattr("sys.argv", ["prove", *finished.place.overrides, "damage=stop"])
    with pytest.raises(SystemExit) as stop:
        prove.main()
    assert stop.value.code == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("damage=nonsense", "choose one of stop, soft, siblings, wrong_q"),
        ("prove.requests=9999", "collect more traffic"),
        ("prove.dtypes=[bfloat16]", "float32 among them"),
        ("prove.dtypes=[float32,int8]", "int8 is unknown; choose some of target, bfloat16"),
        ("prove.dtypes=[float32,float32]", "says something twice"),
        ("target.dtype=bf16", "target.dtype='bf16' is unknown; choose one of auto, bfloat16"),
        ("prove.samples=10", "at least 1000"),
        ("prove.gamma=four", "prove.gamma"),
        ("prove.tree={top_k:0,nodes:4}", "at least 1"),
        ("head_dir=nowhere", "nowhere"),
    ],
)
def test_bad_input(finished: e2e.Finished, monkeypatch, capsys, overrides: str, words: str) -> None:
    monkeypatch.chdir(finished.place.cwd)
    cfg = e2e.config(*finished.place.overrides, overrides, name="prove")
    assert words in e2e.sentence(prove.run, cfg, capsys)


# ---- the judgement ----------------------------------------------------------------------------------------------

GOOD = Fit("rejection, T=1, fork, drawn", 1000, 0.4, 64, 0.01, 0)
SAME = Identity("head", "float32", 4, 40, [])


def sound() -> Certificate:
    return Certificate(
        identity=[SAME, Identity("head", "bfloat16", 4, 40, [Divergence("r", 3, 1, 2, 0.1)])],
        tiny=[GOOD],
        real=[GOOD],
        controls={"stop": replace(GOOD, p_value=1e-40)},
    )


def test_half_precision_is_listed_and_not_judged() -> None:
    assert sound().passed and sound().verdict.startswith("PASS: 4 greedy texts (40 tokens)")
    page = to_markdown(
        sound(),
        {"name": "h", "sha256": "0" * 64},
        dict.fromkeys(("weights", "tokenizer", "template", "name"), "f" * 64),
    )
    assert (
        "| head | bfloat16 | 4 | 40 | 1 | 0.1 | listed |" in page
        and "| head | float32 | 4 | 40 | 0 | none | pass |" in page
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tiny": [replace(GOOD, p_value=1e-7)]}, "law of"),
        ({"real": [replace(GOOD, p_value=0.0, impossible=3)]}, "3 impossible"),
        ({"controls": {"stop": replace(GOOD, p_value=1e-3)}}, "control stop was not seen"),
        ({"controls": {}}, "not complete"),
        ({"identity": []}, "not complete"),
        ({"identity": [SAME, replace(SAME, divergences=[Divergence("r", 3, 1, 2, 0.01)])]}, "1 of 4 texts differ"),
        ({"identity": [SAME, replace(SAME, divergences=[Divergence("r", 3, 1, None, None)])]}, "another length"),
        ({"identity": [SAME, replace(SAME, dtype="float64", divergences=[Divergence("r", 3, 1, 2, 1e-9)])]}, "float64"),
    ],
)
def test_what_fails_a_proof(wrong: dict, words: str) -> None:
    proof = replace(sound(), **wrong)
    assert not proof.passed and any(words in complaint for complaint in proof.complaints)
    assert proof.verdict.startswith("FAIL")


def test_a_float32_tie_is_no_difference() -> None:
    tie = replace(SAME, divergences=[Divergence("r", 3, 1, 2, 2e-5)])
    assert replace(sound(), identity=[tie]).passed and tie.gaps == "2e-05"


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong in ({"gamma": 0}, {"copies": 1}, {"requests": 1, "prefixes": 2}):
        with pytest.raises(UserError, match="at least"):
            ProofSettings(**wrong)
