"""Files that are cut off, damaged or mutated: what is whole is read, the rest is accounted for, memory stays small."""

from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from heads.artifact import UserError
from tests import e2e
from tests.traffic_rows import CALL, CONTAINERS, ITEMS, RESULT, ROWS, assistant, human, prompts_of, user
from training import json_stream
from training.formats import FORMATS
from training.json_stream import split_values
from training.readers import read_files
from training.traffic import load_traffic, write_traffic


@pytest.mark.parametrize("indent", [None, 2])
def test_a_dump_that_is_cut_off_gives_its_whole_conversations(tmp_path: Path, caplog: Any, indent: int | None) -> None:
    whole = json.dumps(ITEMS, indent=indent).encode()
    begins = whole.index(b"{", whole.index(b"c19"))
    path = tmp_path / "dump.json"
    path.write_bytes(whole[: begins - 10])
    reading = read_files(str(path))
    kept, (cut,) = len(reading.conversations), reading.rejected
    assert [item.id for item in reading.conversations] == [f"c{index}" for index in range(kept)] and kept >= 19
    assert (cut.line, cut.reason) == (kept + 1, "the file is cut off")
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert f"cut off at byte {begins - 10}, in row {kept + 1}, which begins at byte" in warning


def test_a_broken_row_costs_itself_and_a_lost_bracket_the_rest(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"turns": ["a"]}, {"turns": nothing}, {"turns": ["b"]}] stray {"turns": ["c"]}')
    reading = read_files(str(path))
    assert prompts_of(reading) == [["a"], ["b"], ["c"]]
    assert [(item.line, item.reason, item.row) for item in reading.rejected] == [
        (2, "not JSON", '{"turns": nothing}'),
        (4, "not JSON", "stray"),
    ]
    path.write_text('[{"turns": ["a"]}, {"turns": ["b"}, {"turns": ["c"]}]')
    reading = read_files(str(path))
    assert prompts_of(reading) == [["a"]]
    assert [(item.line, item.reason) for item in reading.rejected] == [(2, "not JSON from here on")]
    assert "byte 33" in caplog.text


@pytest.mark.parametrize("name", [name for name in CONTAINERS if name.lower().endswith((".gz", ".zst"))])
def test_damaged_packings_say_so(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(CONTAINERS[name][:-7])
    try:
        reading = read_files(str(tmp_path / name))
    except UserError as error:  # so short a file may give no row at all
        assert "the compressed file is damaged from here on: 1" in str(error)
    else:
        assert "the compressed file is damaged from here on" in {item.reason for item in reading.rejected}


def test_values_do_not_depend_on_where_the_chunks_end() -> None:
    """Byte by byte, strings and escapes are cut anywhere; the reference is Python's own decoder."""
    values = [{"a": 'x"\\ [é', "b": [[], {}]}, [1, "]"], "plain, text", 5, None]
    raw = json.dumps(values, ensure_ascii=False, indent=1).encode()
    for size in (1, 3, len(raw)):
        left = [raw[begin : begin + size] for begin in range(0, len(raw), size)][::-1]
        pieces = list(split_values(lambda _, left=left: left.pop() if left else b""))  # type: ignore[misc]
        assert [json.loads(piece.raw) for piece in pieces] == values
        assert all(raw[piece.start : piece.start + len(piece.raw)] == piece.raw for piece in pieces)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A dump of 60 MB, cut off, with long answers; the peak is that of the process that reads it."""
    row = {"conversations": [human("question"), {"from": "gpt", "value": "word " * 20_000}]}
    text = json.dumps(row)
    with open(tmp_path / "dump.json", "w") as file:
        file.write("[")
        for index in range(600):
            file.write(text.replace("question", f"question {index}") + ",")
        file.write(text[:5000])
    code = (
        "import resource, sys; from training.readers import read_files; before = resource.getrusage("
        "resource.RUSAGE_SELF).ru_maxrss; read = read_files(sys.argv[1]); print(len(read.conversations), "
        "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    line = [sys.executable, "-c", code, str(tmp_path / "dump.json")]
    answer = subprocess.run(line, env=e2e.environment(), capture_output=True, text=True, check=True)
    kept, kilobytes = map(int, answer.stdout.split())
    assert kept == 600 and kilobytes < 30_000


def test_a_value_without_an_end_does_not_pull_the_file_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_stream, "LONGEST", 2_000_000)
    path = tmp_path / "a.json"
    path.write_text('[{"turns": ["a"]}, {"turns": ["' + "b" * 9_000_000)
    reading = read_files(str(path))
    assert prompts_of(reading) == [["a"]] and len(reading.rejected[0].row) == json_stream.SHOWN
    assert [item.reason for item in reading.rejected] == ["not JSON from here on"]


# Fuzz

SEEDS = [json.dumps(row) for _, row in ROWS.values()] + [
    *(
        '{"prompt": "hi"}',
        '"text"',
        '{"turns": ["a"], "tools": [{"name": "f"}]}',
        '{"input_ids": [1]}',
        "{}",
        "[]",
        "7",
    ),
    json.dumps({"messages": [user("a"), assistant(None, tool_calls=[CALL]), RESULT], "id": 3, "slice": "s"}),
    *('{"messages": [{"role": "user", "content": "\\ud83d"}]}', '{"id": [], "turns": ["x"]}', "[" * 3000, "9" * 5000),
]
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data, 1),
    ".zst": zstandard.compress,
}


def mutated(data: bytes, draw: Callable[..., Any], most: int) -> bytes:
    content = bytearray(data)
    for _ in range(draw(st.integers(0, most))):
        place = draw(st.integers(0, len(content)))
        content[place : place + draw(st.integers(0, 6))] = draw(
            st.one_of(st.binary(max_size=6), st.sampled_from([b'"', b"\\", b"{", b"]", b",", b"\n", b"null"]))
        )
    cut = draw(st.integers(0, 5)) == 5
    return bytes(content[: draw(st.integers(0, len(content)))] if cut else content)


def rows_within(name: str, content: bytes) -> int | None:
    """How many rows a file that is not packed has, counted another way; None where that is not known.

    Lines are easy. A JSON list is taken apart by Python's decoder; where that stops, only what it has seen is known.
    """
    if not name.endswith(".json"):
        return sum(1 for line in content.split(b"\n") if line.strip())
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError):
        return None
    return len(value) if isinstance(value, list) else None


def test_mutated_files_lose_no_row(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is broken: rows in = rows kept + rows in quarantine, or one sentence. What cannot be read any further,
    because the file is cut off or damaged there, counts as one row."""
    monkeypatch.setattr("os.fsync", lambda handle: None)  # half of the time otherwise
    read: list[bool] = []

    @settings(max_examples=320, deadline=None, derandomize=True, database=None)
    @given(data=st.data())
    def try_one(data: st.DataObject) -> None:
        read.append(survives(tmp_path_factory.mktemp("fuzz"), data.draw))

    try_one()
    assert len(read) >= 320 and sum(read) >= 160, "too few files gave anything to count"


def survives(folder: Path, draw: Callable[..., Any]) -> bool:
    """Read one mutated file and check that its rows are accounted for; says whether it gave conversations at all."""
    one = draw(st.sampled_from(sorted(ROWS)))
    chosen = [SEEDS[index] for index in draw(st.lists(st.integers(0, len(SEEDS) - 1), max_size=6))]
    chosen[len(chosen) // 2 : 0] = [json.dumps(ROWS[one][1] | {"id": f"{one} {index}"}) for index in range(3)]
    as_list = draw(st.booleans())
    plain = ("[" + ",".join(chosen) + "]" if as_list else "\n".join(chosen)).encode()
    content = mutated(plain, draw, 4)
    packing = draw(st.sampled_from(sorted(PACKINGS)))
    name = ("a.json" if as_list else draw(st.sampled_from(["a.jsonl", "a.txt"]))) + packing
    packed = PACKINGS[packing](content)
    damaged = mutated(packed, draw, 1) if packing and draw(st.integers(0, 3)) == 3 else packed
    (folder / name).write_bytes(damaged)
    form = draw(st.sampled_from([*["auto"] * 18, *FORMATS]))
    cleaning = draw(st.sampled_from([{}, {"empty_answers": False, "shortest": 2}, {"near_duplicates": 1.0}]))
    try:
        reading = read_files(str(folder / name), format=form, held_out=0.0, **cleaning)
    except UserError:
        return False
    rows = rows_within(name.removesuffix(packing), content) if damaged == packed else None
    found = len(reading.conversations) + len(reading.rejected)
    assert rows is None or found == rows
    assert [item.line for item in reading.rejected] == sorted({item.line for item in reading.rejected})
    manifest = write_traffic(folder / "traffic", reading)
    assert manifest["rows"] == {
        "read": found,
        "kept": len(reading.conversations),
        "quarantined": len(reading.rejected),
        "over_limit": 0,
    }
    assert len((folder / "traffic/quarantine.jsonl").read_bytes().splitlines()) == len(reading.rejected)
    assert load_traffic(folder / "traffic").train == reading.conversations
    return True
