"""The doctor: a healthy target passes, broken ones are named with what mends them, and its figures are right."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from heads.artifact import UserError
from heads.mtp_native import NativeMTPHead
from heads.target import FrozenTarget
from heads.vocab import DraftVocabulary
from scripts import collect, doctor, doctor_page
from scripts.common import build_head, load_target
from scripts.prompts import first_turns
from tests import e2e
from tests.test_mtp_native import FAMILIES
from tests.tiny import TEMPLATE, save_tiny, tiny_tokenizer
from training import doctor_answers
from training.bench import made_up_features
from training.diagnosis import DoctorSettings, Finding, Sample, Section
from training.estimate import HeadSizes, Machine, TargetSizes, Workload, estimate, train_flops
from training.states import Answer
from training.store import estimate_bytes
from training.traffic import Conversation

HEADS = sorted(path.stem for path in (e2e.ROOT / "conf" / "head").glob("*.yaml"))
MORE = (
    "target.dtype=float32",
    "traffic.held_out=0.3",
    "head.taps=[1,3,6]",
    "head.draft_vocab_size=64",
    "generation.max_new_tokens=8",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> e2e.Place:
    """A tiny target and sixty conversations."""
    return e2e.new_place(tmp_path_factory.mktemp("doctor"))


def examine(place: e2e.Place, *more: str, last: str = "cost") -> dict[str, Section]:
    """The sections by their titles, up to the one that is wanted."""
    cfg = e2e.config(*e2e.uses(place.target, place.traffic), *MORE, *more, name="doctor")
    sections: dict[str, Section] = {}
    for section in doctor.examine(cfg):
        sections[section.title] = section
        if section.title == last:
            break
    return sections


def wrong(sections: dict[str, Section]) -> list[str]:
    return [finding.sentence for section in sections.values() for finding in section.findings if finding.wrong]


def told(section: Section) -> str:
    return "\n".join(" ".join(row) for row in (*section.rows, *section.table))


def other_target(folder: Path, change: Callable[[Path], None]) -> Path:
    target = save_tiny(folder / "tiny")
    change(target)
    return target


# ---- end to end -------------------------------------------------------------------------------------------------


def test_a_healthy_target_passes(place: e2e.Place) -> None:
    before = e2e.stamps(place.cwd)
    output = e2e.call(place, "doctor", "generation.max_new_tokens=8", "target.dtype=float32")
    assert output.returncode == 0, output.stdout + output.stderr
    lines = output.stdout.splitlines()
    assert lines[0] == "doctor    looking at the settings" and "\x1b" not in output.stdout
    before_each = [f"traffic   reading {place.traffic}", f"target    loading {place.target}", "prompts   rendering"]
    before_each += ["answers   the target writes", "vocabulary counting", "cost      measuring"]
    told = [next(at for at, line in enumerate(lines) if line.startswith(words)) for words in before_each]
    assert told == sorted(told) and all(lines[at + 1] == lines[at].split()[0] for at in told), "before the section"
    for fact in (
        "1 file as messages (found out: traffic.format=auto)",
        "60 read, 60 kept",
        "ends with <|end|> (2)",
        "100.0%",
        "⟦w",
        "≤ 16",
        "nothing is wrong",
        *HEADS,
    ):
        assert fact in output.stdout
    assert e2e.stamps(place.cwd) == before, "it writes nothing"


def test_a_broken_one_ends_with_exit_code_1(
    place: e2e.Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = [*e2e.uses(place.target, place.traffic), *MORE, "generation.max_prompt_tokens=9", "doctor.answer_tokens=4"]
    monkeypatch.setattr("sys.argv", ["doctor", *line])
    with pytest.raises(SystemExit) as stop:
        doctor.main()
    printed = capsys.readouterr().out
    assert stop.value.code == 1 and "not ready" in printed and "\x1b" not in printed
    assert "longer than generation.max_prompt_tokens=9" in " ".join(printed.split("  wrong")[1].split())


def no_template(target: Path) -> None:
    (target / "chat_template.jinja").unlink(missing_ok=True)
    tiny_tokenizer(None).save_pretrained(target)


def refusing_template(target: Path) -> None:
    tiny_tokenizer("{{ raise_exception('never') }}").save_pretrained(target)


def refusing_later_turns(target: Path) -> None:
    refusal = "{% if messages | length > 1 %}{{ raise_exception('one question only') }}{% endif %}"
    tiny_tokenizer(refusal + TEMPLATE).save_pretrained(target)


def doubled_bos(target: Path) -> None:
    tiny_tokenizer("<bos> <bos> " + TEMPLATE).save_pretrained(target)


def another_end(target: Path) -> None:
    path = target / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 5}))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (no_template, "has no chat template; add a chat_template.jinja"),
        (refusing_template, "refuses a conversation with the roles user (never)"),
        (refusing_later_turns, "of the prompts are refused"),
        (doubled_bos, "begins with <bos> twice"),
        (another_end, "ends a turn with <|end|> (2), which is not among the target's end tokens"),
    ],
)
def test_a_broken_target_is_named(
    place: e2e.Place, tmp_path: Path, change: Callable[[Path], None], sentence: str
) -> None:
    target = other_target(tmp_path, change)
    found = wrong(examine(e2e.Place(target, place.traffic, tmp_path), last="prompts"))
    assert any(sentence in one for one in found), found


@pytest.mark.parametrize(
    ("change", "last", "sentence"),
    [
        ("traffic.held_out=0", "traffic", "The held-out side is empty"),
        ("generation.max_new_tokens=300", "prompts", "Nothing would be supervised"),
        ("generation.max_prompt_tokens=9", "prompts", "set generation.max_prompt_tokens=32"),
        ("head.draft_vocab_size=500", "vocabulary", "head.draft_vocab_size=500 is beyond the 96 tokens"),
    ],
)
def test_a_broken_setting_is_named_with_its_override(place: e2e.Place, change: str, last: str, sentence: str) -> None:
    found = wrong(examine(place, "doctor.answer_tokens=2", change, last=last))
    assert any(sentence in one and one.endswith(".") for one in found), found


def test_too_few_held_out_are_told(place: e2e.Place) -> None:
    """Advice, not a fault: the numbers are there, without an interval. The share it names is enough."""
    (found,) = examine(place, "traffic.held_out=0.05", last="traffic")["traffic"].findings
    assert not found.wrong and "held-out conversations give no interval" in found.sentence
    share = found.sentence.rpartition("=")[2].removesuffix(".")
    assert not examine(place, f"traffic.held_out={share}", last="traffic")["traffic"].findings


def test_what_is_supervised_is_what_the_target_wrote(place: e2e.Place, target: FrozenTarget) -> None:
    """The marked text of a sample is generate's answer to the rendered prompt."""
    sections = examine(place, last="answers")
    for sample in sections["answers"].samples:
        (prompt, asked), (answer, written) = sample.pieces
        ids = torch.tensor([target.tokenizer.encode(prompt)])
        output = target.model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert not asked and written and answer == target.tokenizer.decode(output)
        assert prompt.startswith("<|user|>") and prompt.endswith("<|assistant|>")


def test_duplicates_and_rows_that_cannot_be_used_are_counted(place: e2e.Place, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [*e2e.conversations(20), e2e.conversations(1)[0], {"turns": [""]}, {"turns": 3}]
    rows.append({"turns": [e2e.conversations(1)[0]["turns"][0], "w1"]})
    path = e2e.write_rows(tmp_path / "t.jsonl", rows)
    section = examine(e2e.Place(place.target, path, tmp_path), last="traffic")["traffic"]
    assert "24 read, 21 kept, 3 set aside" in told(section)
    assert "copies of rows: 1; 1 more begin with a question asked before" in told(section)
    (finding,) = section.findings
    assert not finding.wrong and finding.sentence.startswith("8% of the rows cannot be used")


def test_offered_tools_are_part_of_the_prompts(place: e2e.Place, tmp_path: Path) -> None:
    """Counted, answered and rendered as they are when collecting."""
    shown = "{% for tool in tools or [] %}w9 {% endfor %}" + TEMPLATE
    path = other_target(tmp_path, lambda folder: tiny_tokenizer(shown).save_pretrained(folder) and None)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    rows = [{"messages": [{"role": "user", "content": f"w{index}"}], "tools": [tool] * 2} for index in range(20)]
    traffic = e2e.write_rows(tmp_path / "t.jsonl", rows)
    sections = examine(e2e.Place(path, traffic, tmp_path), last="answers")
    assert all(sample.pieces[0][0].startswith("w9 w9 <|user|>") for sample in sections["answers"].samples)
    assert "half up to 6" in told(sections["prompts"])


def test_turns_are_not_called_conversations(place: e2e.Place) -> None:
    """Sixty conversations, of which every third has two turns."""
    assert "80, the turns of 60 conversations; 80 can be asked" in told(examine(place, last="prompts")["prompts"])


def test_a_target_that_cannot_be_is_refused_before_the_traffic_is_read(
    place: e2e.Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not named, not there, or with a config.json that is none."""
    broken = other_target(tmp_path, lambda folder: (folder / "config.json").write_text("[]") and None)
    traffic = ["traffic=jsonl", "traffic.path=/no/such/file.jsonl"]
    for more, words in (
        ([], "target=custom needs target.path="),
        (["target.path=/no/model"], "/no/model is neither a folder nor a model on the Hub"),
        ([f"target.path={broken}"], "could not be loaded (its config.json holds no JSON object)"),
    ):
        assert words in e2e.sentence(doctor.run, e2e.config("target=custom", *more, *traffic, name="doctor"), capsys)


def test_a_module_that_the_target_lacks_does_not_fit(
    place: e2e.Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = e2e.Place(save_tiny(tmp_path / "bare"), place.traffic, tmp_path)
    for here, said in ((place, "fits"), (bare, "not for this target")):
        (row,) = [row for row in examine(here)["cost"].table if row[0] == "mtp_native"]
        assert said in row
    line = [*e2e.uses(bare.target, bare.traffic), f"run_dir={tmp_path}/run", "traffic.held_out=0.3", "head=mtp_native"]
    native = e2e.config(*line)
    with pytest.raises(UserError, match="has no MTP module that can be read .*; set head=mtp"):
        doctor.sizes_of(native, "the head", load_target(native))
    assert "has no MTP module" in e2e.sentence(collect.run, native, capsys)
    native.head.from_target = False
    assert doctor.sizes_of(native, "the head", load_target(native)).trained > 0


# ---- figures ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(place: e2e.Place) -> FrozenTarget:
    return FrozenTarget.load(place.target, dtype="float32")


@pytest.mark.parametrize("name", HEADS)
def test_training_costs_what_torch_counts(place: e2e.Place, target: FrozenTarget, name: str) -> None:
    """The formula against the operations of a real step; attention, which it leaves out, is a small part here."""
    cfg = e2e.config(*e2e.uses(place.target, place.traffic), f"head={name}", "head.from_target=false")
    vocab = DraftVocabulary.identity(target.vocab_size)
    head = build_head(cfg, target, vocab)
    made = made_up_features(head, hidden_size=target.hidden_size, lengths=[48] * 4)
    features = replace(made, taps_TE=made.taps_TE.float(), last_TD=made.last_TD.float())
    with FlopCounterMode(display=False) as counter:
        head.loss(features).loss.backward()
    sizes = HeadSizes.of(name, head)
    supervised = int(features.supervised_T.sum())
    formula = train_flops(TargetSizes.of(target), sizes, len(features.ids_T), supervised)
    assert formula == pytest.approx(counter.get_total_flops(), rel=0.3)
    assert sizes.trained == sum(parameter.numel() for parameter in head.parameters())


def test_a_projection_is_known_by_its_name(place: e2e.Place, target: FrozenTarget) -> None:
    """A draft vocabulary as large as the block is wide inside makes its matrices look like one."""
    inner = target.config.intermediate_size
    seen = []
    for size in (inner, inner + 8):
        words = (f"head.draft_vocab_size={size}", "head.taps=null")
        for name in ("mtp", "eagle3", "medusa"):
            more = words if name == "eagle3" else words[:1]
            cfg = e2e.config(*e2e.uses(place.target, place.traffic), f"head={name}", *more)
            sizes = doctor.sizes_of(cfg, name, target)
            assert (sizes.vocab, sizes.own_projection) == (size, name == "eagle3")
            seen.append(sizes.passed)
    assert seen[:3] == seen[3:]


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_of_experts_those_count_that_a_token_is_sent_to(family: str) -> None:
    config = FAMILIES[family]()
    with torch.device("meta"):
        head = NativeMTPHead(sizes=config.to_dict(), vocab=DraftVocabulary.identity(config.vocab_size), depth=3)
    experts = [one.numel() for path, one in head.named_parameters() if ".experts." in path]
    others = [one.numel() for path, one in head.named_parameters() if ".experts." not in path and one.dim() > 1]
    assert sum(experts) == 4 * 3 * config.hidden_size * config.moe_intermediate_size, "four experts of three matrices"
    sizes = HeadSizes.of("mtp_native", head)
    assert sizes.passed == 3 * (sum(others) + sum(experts) * config.num_experts_per_tok // 4)
    assert sizes.trained == sum(one.numel() for one in head.parameters())


def test_a_target_too_large_for_one_gpu_is_told(
    place: e2e.Place, target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number of GPUs and no time are made up for it."""
    monkeypatch.setattr(doctor_answers, "forward_rate", lambda target: 1000.0)
    cfg = e2e.config(*e2e.uses(place.target, place.traffic), *MORE)
    head, work = doctor.sizes_of(cfg, "eagle3", target), Workload(**dict.fromkeys(Workload.__dataclass_fields__, 1000))
    ids_T, state = torch.arange(9), torch.zeros(9)
    answered = doctor_answers.Answered((Answer(ids_T, 4, "stop", state, state, state),), 1.0)
    for memory, words in ((80, ("fits", "0 s")), (1e-6, ("too small", "–"))):
        settings = DoctorSettings(gpu_memory=memory)
        section = doctor_answers.look_at_cost(
            target, work, "", answered, {"eagle3": head}, settings, features=None, chosen=head
        )
        assert section.table[1][5:] == words
        said = [finding.sentence for finding in section.findings if not finding.wrong]
        assert len(said) == (memory < 1) and all("not supported yet; plan for a larger" in one for one in said)


def test_the_estimate_by_hand(target: FrozenTarget) -> None:
    sizes = TargetSizes(
        parameters=8_000_000_000, body=7_500_000_000, hidden=4096, inner=14336, vocab=128256, keys=65536, itemsize=2
    )
    cfg = e2e.config("target=custom", "target.path=x", "head.draft_vocab_size=64", "head.taps=[1,3,6]")
    head = doctor.sizes_of(cfg, "eagle3", target)
    work = Workload(
        prompt_tokens=5_000_000, answer_tokens=3_000_000, epochs=2, batch_positions=1000, step_positions=2048
    )
    found = estimate(sizes, head, work, Machine(flops=4e14, generated=10, memory=80e9))
    assert found.disk == estimate_bytes(head.needs, 8_000_000, hidden_size=4096, dtype=torch.bfloat16)
    assert found.disk == 8_000_000 * (4 * 4096 * 2 + 9)
    assert found.collect_seconds == pytest.approx(2 * 7.5e9 * 35_000_000 / 4e14)
    assert found.collect_memory == 16_000_000_000 + 1000 * 65536 * 2
    assert found.fits
    large = TargetSizes(**{**vars(sizes), "parameters": 70_000_000_000})
    assert not estimate(large, head, work, Machine(flops=4e14, generated=10, memory=80e9)).fits
    assert estimate(large, head, work, Machine(flops=4e14, generated=10, memory=180e9)).fits
    twice = estimate(sizes, head, work.times(2), Machine(flops=4e14, generated=10))
    assert twice.disk == 2 * found.disk and twice.train_seconds == pytest.approx(2 * found.train_seconds)
    assert twice.fits


def test_features_that_are_there_are_counted(finished: e2e.Finished) -> None:
    """Answer lengths and the draft vocabulary come from the store as soon as there is one."""
    run = finished.place.run
    manifest = e2e.manifest(finished.place, "features")
    sections = examine(finished.place, f"features_dir={run / 'features'}", f"target.dtype={manifest['dtype']}")
    share = manifest["supervised_tokens"] / manifest["tokens"]
    assert f"{manifest['documents']} collected answers, {share:.0%} supervised" in told(sections["answers"])
    assert "tokens of the collected answers" in told(sections["vocabulary"])
    assert "as collected" in told(sections["cost"])


def test_features_of_another_number_format_are_said(finished: e2e.Finished) -> None:
    """As `auto` leaves them on another machine; training on them is refused."""
    began = e2e.manifest(finished.place, "features")["dtype"]
    other = "float32" if began == "bfloat16" else "bfloat16"
    place = (f"features_dir={finished.place.run / 'features'}", f"target.dtype={other}")
    findings = examine(finished.place, *place)["features"].findings
    assert [finding.wrong for finding in findings] == [True] and f"set target.dtype={began}." in findings[0].sentence


# ---- every setting ----------------------------------------------------------------------------------------------

SEEN = {
    "show": (1, ""),
    "answer_tokens": (2, "answers of up to 2 tokens"),
    "sample": (7, "of 7 conversations"),
    "conversations": (1000, "1,000 conversations"),
}
GPU = {"gpu_memory": 0.001, "gpu_tflops": 1e-8, "gpu_generation": 1000}


def test_every_setting_changes_what_is_told(
    place: e2e.Place, target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    documented = OmegaConf.load(e2e.ROOT / "conf/doctor.yaml")["doctor"]
    assert set(documented) - {"_target_"} == {*SEEN, *GPU}
    before, after = examine(place), examine(place, *(f"doctor.{name}={value}" for name, (value, _) in SEEN.items()))
    for name, (_, fact) in SEEN.items():
        assert not fact or (fact not in spoken(before) and fact in spoken(after)), name
    assert [len(sections["answers"].samples) for sections in (before, after)] == [3, 1]

    monkeypatch.setattr(doctor_answers, "forward_rate", lambda target: 1000.0)
    cfg = e2e.config(*e2e.uses(place.target, place.traffic), *MORE)
    head, work = doctor.sizes_of(cfg, "eagle3", target), Workload(**dict.fromkeys(Workload.__dataclass_fields__, 1000))
    ids_T, state = torch.arange(9), torch.zeros(9)
    answered = doctor_answers.Answered((Answer(ids_T, 4, "stop", state, state, state),), 1.0)

    def planned(**changed: float) -> tuple[str, ...]:
        settings = DoctorSettings(**{"gpu_tflops": 1e-9, **changed})
        section = doctor_answers.look_at_cost(
            target, work, "", answered, {"eagle3": head}, settings, features=None, chosen=head
        )
        return section.table[1][5:]

    for name, value in GPU.items():
        assert planned(**{name: value}) != planned(), name
    with pytest.raises(UserError, match="doctor.show=0"):
        DoctorSettings(show=0)


def spoken(sections: dict[str, Section]) -> str:
    return "\n".join(told(section) for section in sections.values())


def test_the_template_is_given_its_setting_wherever_prompts_are_rendered(place: e2e.Place, tmp_path: Path) -> None:
    path = other_target(
        tmp_path, lambda folder: tiny_tokenizer(TEMPLATE + "{{ 'w7' if loud }}").save_pretrained(folder) and None
    )
    cfg = e2e.config(*e2e.uses(path, place.traffic), "target.template={loud:true}")
    target, chat = load_target(cfg), Conversation("c", "s", (({"role": "user", "content": "w1"},),))
    assert target.tokenizer.decode(target.render(chat.messages())).endswith("w7")
    assert first_turns(cfg, [chat])[0].prompt == tuple(target.render(chat.messages()))


# ---- how it looks -----------------------------------------------------------------------------------------------


def test_escape_codes_only_on_a_terminal() -> None:
    """Those in the traffic never; supervised text is marked in both."""
    section = Section(
        "title",
        (("name", "fact \x1b[31m"),),
        bars=(("≤ 8", 3),),
        samples=(Sample("s", (("a\x1b[0m", False), ("b\n", True))),),
    )
    shown = []
    for terminal in (True, False):
        system = "truecolor" if terminal else "auto"
        console = Console(file=io.StringIO(), force_terminal=terminal, width=80, color_system=system)
        doctor_page.show(console, section)
        good = doctor_page.show_findings(console, [Finding(False, "advice " * 30), Finding(True, "bad \x1b[2J.")])
        assert not good
        shown.append(console.file.getvalue())
    assert "\x1b" in shown[0] and "\x1b[2J" not in shown[0]
    assert "\x1b" not in shown[1] and "⟦b↵\n⟧" in shown[1]
    assert max(map(len, shown[1].splitlines())) <= 80
    assert shown[1].index("wrong") < shown[1].index("advice")
