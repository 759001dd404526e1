"""Answers that were logged: the target's own give the features that writing them gave, and nothing is lost unsaid."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.artifact import UserError
from heads.target import FrozenTarget
from tests.test_regenerate import answers_of, gather, quarantine_of, traffic
from tests.tiny import load_tiny
from training.chat import ChatEncoder
from training.logged import Logged
from training.readers import parse_row, read_files
from training.regenerate import Generation
from training.store import FeatureStore, verify
from training.traffic import LOGGED, Conversation


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return load_tiny(tmp_path_factory.mktemp("target"))


def log_of(conversations: list[Conversation], folder: Path) -> list[dict[str, Any]]:
    """The conversations of a regenerated store as a server would have logged them."""
    answers, rows = answers_of(folder), []
    for conversation in conversations:
        messages: list[dict[str, Any]] = []
        for turn, asked in enumerate(conversation.turns):
            answer = answers[f"{conversation.id}#{turn}"]
            said = {"content": answer["text"], "finish_reason": answer["finish_reason"]}
            messages += [*asked, {"role": "assistant", **said}]
        rows.append({"id": conversation.id, "slice": conversation.slice, "messages": messages})
    return rows


def read_log(path: Path, rows: list[dict[str, Any]]) -> list[Conversation]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_files(str(path), answers=LOGGED).conversations)


def plain_answers(target: FrozenTarget, folder: Path) -> set[str]:
    """Conversations whose answers are their own tokens again when their text is read: no special token in them."""
    bad = set()
    for ref in FeatureStore.open(folder).documents:
        ids = FeatureStore.open(folder).read(ref).ids_T[ref.answer_start :].tolist()
        inner = ids[:-1] if ref.finish_reason == "stop" else ids
        if not inner or any(index in target.tokenizer.all_special_ids for index in inner):
            bad.add(ref.conversation)
    return bad


def test_logs_of_the_target_give_what_writing_them_gave(target: FrozenTarget, tmp_path: Path) -> None:
    """The same ids and mask in a store of the same layout, and the same states to rounding."""
    conversations = traffic(40)
    gather(target, conversations, tmp_path / "written", max_new_tokens=4)
    bad = plain_answers(target, tmp_path / "written")
    kept = [one for one in conversations if one.id not in bad]
    assert len(kept) >= 8 and any(len(one.turns) > 1 for one in kept), "too few answers without special tokens"
    logged = read_log(tmp_path / "log.jsonl", log_of(kept, tmp_path / "written"))
    manifest = gather(target, logged, tmp_path / "logged", answers=LOGGED)
    assert manifest["answers"] == LOGGED and manifest["on_policy"] is False and not manifest["quarantined"]
    stores = [FeatureStore.open(tmp_path / name) for name in ("written", "logged")]
    stores[1].verify()
    refs = [{ref.id: ref for ref in store.documents if ref.conversation not in bad} for store in stores]
    assert refs[0].keys() == refs[1].keys() and len(refs[1]) == manifest["documents"]
    for name in refs[0]:
        written, known = (store.read(found[name]) for store, found in zip(stores, refs, strict=True))
        assert torch.equal(written.ids_T, known.ids_T) and torch.equal(written.supervised_T, known.supervised_T)
        assert refs[0][name].finish_reason == refs[1][name].finish_reason
        torch.testing.assert_close(known.taps_TE, written.taps_TE, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(known.last_TD, written.last_TD, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(known.lse_T, written.lse_T, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_masked_is_set_aside_and_costs_no_other_turn(target: FrozenTarget, tmp_path: Path) -> None:
    def row(name: str, *answers: str | None, **more: Any) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for answer in answers:
            messages += [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": answer, **more}]
        return {"id": name, "messages": messages}

    rows = [
        row("good", "w3 w4", "w5"),
        row("ends inside", "w3 <|end|> w4", "w5"),
        row("empty", " ", "w5"),
        row("missing", "w3", None, "w5"),
        row("long", "w3", "w4 " * 250),
        {"id": "twice", "messages": [*row("", "w3")["messages"], {"role": "assistant", "content": "w4"}]},
        {"id": "asked only", "messages": [{"role": "user", "content": "w1"}]},
        row("cut", "w3 w4", finish_reason="length"),
    ]
    manifest = gather(target, read_log(tmp_path / "a.jsonl", rows), tmp_path / "f", answers=LOGGED)
    reasons = {row["id"]: (row["reason"], row["turns_lost"]) for row in quarantine_of(tmp_path / "f")}
    other = "the template writes something else than the answer between the prompt and the end token"
    assert reasons == {
        "ends inside#0": (other, 1),
        "empty#0": ("the answer is empty", 1),
        "missing#1": ("no answer in the log", 2),
        "long#1": ("longer than the context of 256 tokens", 1),
        "twice#1": ("two messages of the assistant in a row", 1),
        "asked only#0": ("no answer in the log", 1),
    }
    answers = answers_of(tmp_path / "f")
    assert set(answers) == {
        *("good#0", "good#1", "ends inside#1", "empty#1", "missing#0", "long#0", "twice#0", "cut#0")
    }
    assert answers["good#0"]["finish_reason"] == "stop" and answers["cut#0"]["finish_reason"] == "length"
    assert sum(manifest["quarantined"].values()) == len(reasons)
    with pytest.raises(UserError, match=r"None of the 1 conversations .*no answer in the log: 1.* collect\.answers="):
        gather(target, read_log(tmp_path / "b.jsonl", rows[6:7]), tmp_path / "g", answers=LOGGED)
    with pytest.raises(UserError, match="choose another name= or delete"):
        gather(target, read_log(tmp_path / "a.jsonl", rows), tmp_path / "f")


def test_answers_are_kept_only_where_they_are_wanted() -> None:
    """So that the fingerprints of traffic that the target answers anew stay what they were."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"mail": "a@b.org"}}}
    row = {
        "messages": [
            {"role": "user", "content": "w1"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "ask a@b.org"},
            {"role": "tool", "content": "w2"},
            {"role": "assistant", "content": "w3", "finish_reason": "stop"},
        ]
    }
    plain, kept = parse_row(row), parse_row(row, keep_answers=True)
    assert plain.turns == kept.turns and not plain.logged and plain.id != kept.id
    assert "messages" not in plain.to_row()
    assert Conversation.from_row(kept.to_row()) == kept == parse_row(kept.to_row(), keep_answers=True)
    assert [message["content"] for message in kept.logged] == ["w1", "", "w2", "w3"]
    hidden = parse_row(row, keep_answers=True, redact=lambda text: text.replace("a@b.org", "[email]"))
    assert "a@b.org" not in json.dumps(hidden.to_row())


def test_a_flipped_byte_is_named_and_only_its_shard_is_made_again(target: FrozenTarget, tmp_path: Path) -> None:
    """By the same command; whatever else is there stays the file that it was."""
    conversations, folder = traffic(9), tmp_path / "f"
    gather(target, conversations, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    stamps = {name: (folder / name).stat().st_mtime_ns for name in before if name.startswith("shard")}
    assert len([name for name in stamps if name.endswith(".safetensors")]) >= 3
    for victim in ("shard-00001.safetensors", "shard-00001.json", "documents.jsonl"):
        data = bytearray(before[victim])
        data[len(data) // 2] ^= 1
        (folder / victim).write_bytes(data)
        if not victim.endswith("00001.json"):  # the index has a seal of its own, and is read by collecting only
            with pytest.raises(UserError, match=rf"{victim} changed after it was written; repeat the command"):
                verify(folder)
            assert gather(target, conversations, folder, verified=False)["documents"] == 18, "sizes are all it looks at"
        else:
            (folder / "manifest.json").unlink()
        gather(target, conversations, folder)
        verify(folder)
        assert {name: (folder / name).read_bytes() for name in before} == before
        now = {name: (folder / name).stat().st_mtime_ns for name in stamps}
        assert all(now[name] == stamps[name] for name in stamps if "00001" not in name)
        stamps = now


def test_what_waits_costs_a_few_bytes_a_token(target: FrozenTarget, tmp_path: Path) -> None:
    """Tuples of Python's whole numbers would cost fifty; a document comes out of it as it went in."""
    words = " ".join(f"w{number % 80}" for number in range(110))
    said = [{"role": "user", "content": words}, {"role": "assistant", "content": words}]
    given = read_log(tmp_path / "log.jsonl", [{"id": str(number), "messages": said} for number in range(60)])
    generation = Generation(max_prompt_tokens=200, max_new_tokens=1)
    tracemalloc.start()
    try:
        source = Logged(target, given, generation=generation, taps=())
        cost = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert source.most_tokens() == 60 * 224
    assert cost < 10 * source.most_tokens()
    requests, refused = source.wave(0, {})
    encoded = ChatEncoder.of(target).turns(given[0].logged)[0]
    assert not refused and requests[0].known is not None and requests[0].known.encoded() == encoded
    assert requests[0].prompt_tokens == encoded.answer_start and requests[0].length == len(encoded.ids)
