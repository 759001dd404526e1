"""States out of vLLM, seen from our side: a stand-in for vllm gives those of the target, and both ways fill one store.

The real vLLM is the business of `bench=features`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.artifact import UserError
from heads.base import FeatureNeeds
from heads.final_norm import final_norm
from heads.target import FrozenTarget
from scripts import collect as script
from scripts.settings import check_all
from tests import e2e
from tests.test_states import assert_close
from tests.test_states import known as as_known
from tests.test_states import written as answers_of
from tests.tiny import FAMILIES, load_tiny, save_tiny
from training.chat import Encoded
from training.collect import collect
from training.extracted import DRIVER, ExtractedStates, ExtractionSettings
from training.readers import read_files
from training.regenerate import Generation
from training.states import known_states
from training.store import FeatureStore
from training.traffic import LOGGED

TAPS = (0, 2, 5)
FAKE_VLLM = """
    import json, os, sys
    from types import SimpleNamespace as N
    from safetensors.torch import load_file, save_file
    __version__ = "0.0-fake"
    script = json.load(open(os.environ["FAKE_SCRIPT"]))

    class SamplingParams:
        def __init__(self, **options):
            self.options = options

    class LLM:
        def __init__(self, **options):
            self.folder = options["kv_transfer_config"]["kv_connector_extra_config"]["shared_storage_path"]
            self.calls = 0
            json.dump([options, sys.path, dict(os.environ)], open(os.environ["FAKE_SEEN"], "w"))
            print("fake: loading")
            exec(script["load"])

        def generate(self, prompts, sampling, use_tqdm):
            self.calls += 1
            exec(script["generate"])
            states, outputs = load_file(script["states"]), []
            for number, prompt in enumerate(prompts):
                ids = prompt["prompt_token_ids"]
                found = next(name for name in states if json.loads(name)[:len(ids)] == ids)
                tensors = {"hidden_states": states[found][:len(ids)].clone(),
                           "token_ids": load_file(script["tokens"])[found][:len(ids)].clone()}
                path = f"{self.folder}/{self.calls}-{number}.safetensors"
                save_file(tensors, path)
                outputs.append(N(kv_transfer_params={"hidden_states_path": path}))
            return outputs
"""


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return load_tiny(tmp_path_factory.mktemp("target"), dtype="float32")


def states_before_norm(target: FrozenTarget, ids: torch.Tensor, taps: tuple[int, ...]) -> torch.Tensor:
    """States [T, taps + 1, D] of a plain forward, the last of them as they enter the final norm."""
    seen: list[torch.Tensor] = []
    hook = final_norm(target).register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    output = target.forward(ids[None], taps=taps)
    hook.remove()
    tapped = output.taps_BTE[0].unflatten(-1, (len(taps), target.hidden_size))
    return torch.cat([tapped, seen[0][0][:, None]], dim=1).clone()


class Fake:
    """An interpreter that has the stand-in, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, str(folder / "python")
        package = folder / "site" / "vllm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(textwrap.dedent(FAKE_VLLM))
        (package / "platforms.py").write_text("class current_platform:\n    is_cpu = staticmethod(lambda: True)\n")
        # The stand-in is found by the interpreter's own doing, behind what the driver is given.
        line = f'#!/bin/sh\nexport PYTHONPATH=$PYTHONPATH:{package.parent}\nexec {sys.executable} "$@"\n'
        Path(self.python).write_text(line)
        Path(self.python).chmod(0o755)

    def prepare(
        self,
        target: FrozenTarget,
        documents: list[tuple[int, ...]],
        *,
        taps: tuple[int, ...] = TAPS,
        load: str = "",
        generate: str = "",
        other_tokens: int = 0,
    ) -> None:
        ids = {json.dumps(one): torch.tensor(one) for one in dict.fromkeys(documents)}
        states = {name: states_before_norm(target, ids_T, taps) for name, ids_T in ids.items()}
        save_file(states, self.folder / "states.safetensors")
        save_file({name: ids_T + other_tokens for name, ids_T in ids.items()}, self.folder / "tokens.safetensors")
        told = {name: str(self.folder / f"{name}.safetensors") for name in ("states", "tokens")}
        (self.folder / "script.json").write_text(json.dumps({"load": load, "generate": generate, **told}))

    def seen(self) -> Any:
        return json.loads((self.folder / "seen.json").read_text())

    def settings(self, **how: Any) -> ExtractionSettings:
        given = ExtractionSettings(python=self.python, target="/target", batch=4, length=40, timeout=120)
        return replace(given, **how)


def make_fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setenv("FAKE_SCRIPT", str(tmp_path / "fake/script.json"))
    monkeypatch.setenv("FAKE_SEEN", str(tmp_path / "fake/seen.json"))
    return Fake(tmp_path / "fake")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return make_fake(tmp_path, monkeypatch)


def known_documents(target: FrozenTarget) -> list[Encoded]:
    return [as_known(one) for one in answers_of(target)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_final_norm_is_found_in_every_family(tmp_path: Path, family: str) -> None:
    target = load_tiny(tmp_path, family, "float32")
    ids = torch.arange(8, 20)
    before = states_before_norm(target, ids, ())[:, 0]
    whole = target.model(input_ids=ids[None]).logits[0]
    assert torch.allclose(target.logits(final_norm(target)(before)), whole, atol=1e-4)
    assert not torch.allclose(target.logits(before), whole, atol=0.1), "the control: without it they are others"


def test_states_are_those_of_a_forward_here(target: FrozenTarget, fake: Fake, tmp_path: Path) -> None:
    """By one process for several batches; with what vLLM is told, and nothing left behind."""
    documents = known_documents(target)
    fake.prepare(target, [one.ids for one in documents])
    with ExtractedStates(fake.settings(), folder=tmp_path / "f") as reader:
        got = [*reader(target, documents[:3], taps=TAPS), *reader(target, documents[3:], taps=TAPS)]
        calls = (tmp_path / "f/vllm.log").read_text().count("fake: loading")
        process = reader._process
    for one, other in zip(got, known_states(target, documents, taps=TAPS), strict=True):
        assert_close(one, other, 1e-4)
    assert calls == 1 and process.returncode == 0 and reader.version == "0.0-fake"
    options, path, environment = fake.seen()
    assert options["speculative_config"]["draft_model_config"]["hf_config"] == {
        "eagle_aux_hidden_state_layer_ids": [*TAPS, target.num_layers]
    }
    assert options["kv_transfer_config"] | {"kv_connector_extra_config": None} == {
        "kv_connector": "PlainHiddenStatesConnector",
        "kv_connector_module_path": "draftsmith_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": None,
    }
    assert (options["model"], options["dtype"], options["max_model_len"]) == ("/target", "float32", 40)
    assert options["max_num_seqs"] == 4 and options["enable_prefix_caching"] is False
    assert options["tensor_parallel_size"] == 1 and "gpu_memory_utilization" not in options
    assert str(DRIVER.parent) in path and environment["HF_HUB_OFFLINE"] == "1"
    assert str(DRIVER.parent.parent) not in path, "our modules shadow the server's"
    assert [one.name for one in (tmp_path / "f").iterdir()] == ["vllm.log"]


def test_a_longer_document_or_other_taps_start_it_anew(target: FrozenTarget, fake: Fake, tmp_path: Path) -> None:
    documents = sorted(known_documents(target), key=lambda one: len(one.ids))
    shortest, longest = documents[0], documents[-1]
    fake.prepare(target, [shortest.ids, longest.ids])
    with ExtractedStates(fake.settings(length=2), folder=tmp_path / "f") as reader:
        for document in (shortest, longest, shortest):
            (got,) = reader(target, [document], taps=TAPS)
            assert_close(got, known_states(target, [document], taps=TAPS)[0], 1e-4)
        assert fake.seen()[0]["max_model_len"] == len(longest.ids)
        fake.prepare(target, [shortest.ids], taps=(2,))
        (got,) = reader(target, [shortest], taps=(2,))
        assert_close(got, known_states(target, [shortest], taps=(2,))[0], 1e-4)


@pytest.mark.parametrize(
    ("parallel", "visible", "memory"),
    [(1, "5", 0.45), (4, "0,1,2,5,6", 0.18)],  # its own GPU alone; the first four, of which the third is fullest
)
def test_which_gpus_and_how_much_of_them_vllm_gets(
    target: FrozenTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parallel: int, visible: str, memory: float
) -> None:
    """For a target on the fourth visible GPU, half of which is free."""
    seen: list[Any] = []
    reader = ExtractedStates(
        ExtractionSettings(python="p", target="/t", batch=4, length=40, tensor_parallel=parallel), folder=tmp_path
    )
    free = {0: 1.0, 1: 1.0, 2: 0.2, 3: 0.5}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,5,6")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (free[place] * 80e9, 80e9))
    monkeypatch.setattr("training.extracted.start", lambda command, **how: seen.append(how["env"]))
    monkeypatch.setattr(reader, "_ask", lambda how: seen.append(how) or {"vllm": "0", "load_seconds": 0.0})
    there: Any = types.SimpleNamespace(device=torch.device("cuda:3"), dtype=torch.bfloat16)
    reader._start(there, [2])
    environment, how = seen
    assert (environment["CUDA_VISIBLE_DEVICES"], how["memory"]) == (visible, memory)
    assert how["tensor_parallel"] == parallel


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (
            {"load": "raise RuntimeError('no memory')"},
            r"(?s)ended with code 1, and the same command goes on .*no m",
        ),
        (
            {"generate": "if self.calls == 2: os._exit(3)"},
            "vLLM ended with code 3, and the same command goes on from here",
        ),
        ({"load": "import time; time.sleep(90)"}, "vLLM did not answer within 4 seconds"),
        ({"other_tokens": 1}, "gives states for other tokens than it was asked for; set collect.features=transformers"),
        (
            {"taps": (0, 2, 6)},
            r"at boundary 5 are not the target's \(cosine .* set collect.features=",
        ),
    ],
)
def test_what_fails_or_gives_other_states_is_told(
    target: FrozenTarget, fake: Fake, tmp_path: Path, how: dict[str, Any], sentence: str
) -> None:
    documents = known_documents(target)[:2]
    fake.prepare(target, [one.ids for one in documents], **how)
    timeout = 4 if "sleep" in how.get("load", "") else 120
    with pytest.raises(UserError, match=sentence):
        with ExtractedStates(fake.settings(timeout=timeout), folder=tmp_path / "f") as reader:
            reader(target, documents, taps=TAPS)
    assert not list((tmp_path / "f").glob(".*")), "no states are left behind"


def test_the_driver_refuses_a_bad_beginning() -> None:
    for line, sentence in (("{", "Cannot read the first request"), ('{"target": 1}', "must have exactly the keys")):
        done = subprocess.run([sys.executable, "-P", DRIVER], input=line, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr


def log_of(folder: Path) -> Path:
    """Logged conversations of one or two turns."""
    rows = []
    for n in range(9):
        asked = [{"role": "user", "content": f"w{n} w{7 * n % 60}"}, {"role": "assistant", "content": f"w{n + 20} w3"}]
        rows.append({"id": f"c{n}", "messages": asked * (1 + n % 2)})
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def gather(target: FrozenTarget, log: Path, folder: Path, reader: ExtractedStates | None = None) -> dict[str, Any]:
    conversations = read_files(str(log), answers=LOGGED).conversations
    needs, generation = FeatureNeeds(TAPS, True), Generation(batch_size=4, max_new_tokens=4)
    how: dict[str, Any] = {"answers": LOGGED, "reader": reader}
    return collect(target=target, conversations=conversations, folder=folder, needs=needs, generation=generation, **how)


def stored_ids(folder: Path) -> list[tuple[int, ...]]:
    store = FeatureStore.open(folder)
    return [tuple(store.read(ref).ids_T.tolist()) for ref in store.documents]


def test_both_fill_the_same_store_and_a_death_midway_costs_nothing(
    target: FrozenTarget, fake: Fake, tmp_path: Path
) -> None:
    log = log_of(tmp_path)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    gather(target, log, ours)
    fake.prepare(target, stored_ids(ours), generate="if self.calls == 4: os._exit(3)")
    with pytest.raises(UserError, match="vLLM ended with code 3, and the same command goes on from here"):
        gather(target, log, theirs, ExtractedStates(fake.settings(), folder=theirs))
    before = {path.name: path.stat().st_mtime_ns for path in theirs.glob("shard-*.safetensors")}
    assert len(before) == 2, "the probe and two batches came before"
    fake.prepare(target, stored_ids(ours))
    manifest = gather(target, log, theirs, ExtractedStates(fake.settings(), folder=theirs))
    assert before.items() <= {path.name: path.stat().st_mtime_ns for path in theirs.glob("shard-*.safetensors")}.items()
    assert manifest["features"] == "vllm" and manifest["documents"] == 13
    first, second = FeatureStore.open(ours), FeatureStore.open(theirs)
    second.verify()
    assert first.documents == second.documents
    for name in ("documents.jsonl", "answers.jsonl", "quarantine.jsonl", "token_counts.safetensors"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    for ref in first.documents:
        a, b = first.read(ref), second.read(ref)
        assert torch.equal(a.ids_T, b.ids_T) and torch.equal(a.supervised_T, b.supervised_T)
        for x, y in ((a.taps_TE, b.taps_TE), (a.last_TD, b.last_TD), (a.lse_T, b.lse_T)):
            assert x.dtype == y.dtype and torch.allclose(x, y, atol=1e-3) and not y[-1].any()
    with pytest.raises(UserError, match="with features=vllm, but features=None is asked for now; choose another name="):
        gather(target, log, theirs)
    # Finished, it needs no vLLM any more.
    assert gather(target, log, theirs, ExtractedStates(fake.settings(python="gone"), folder=theirs)) == manifest


ASKER = """
import json, pathlib, sys, time
from heads.foreign import environment, start
python, driver, how = sys.argv[1:]
process = start([python, driver], log=open("log", "wb"), env=environment(pathlib.Path(driver).parent), piped=True)
process.stdin.write(how.encode() + b"\\n")
process.stdin.flush()
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_vllm_that_loads_ends_with_whoever_asked(
    target: FrozenTarget, fake: Fake, tmp_path: Path, number: signal.Signals
) -> None:
    """And so does what it has started: nothing of it is left for the minutes that loading takes."""
    loads = """
        import subprocess, time
        worker = subprocess.Popen(["sleep", "600"])
        open("pids.new", "w").write(f"{os.getpid()} {worker.pid}")
        os.replace("pids.new", "pids")
        time.sleep(600)
    """
    fake.prepare(target, [(5, 6)], load=textwrap.dedent(loads))
    how: dict[str, Any] = dict.fromkeys(
        ("target", "dtype", "boundaries", "max_model_len", "batch", "memory", "tensor_parallel")
    )
    how |= {"folder": str(tmp_path), "trust_remote_code": False}
    line = [sys.executable, "-c", ASKER, fake.python, str(DRIVER), json.dumps(how)]
    asker = subprocess.Popen(line, cwd=tmp_path, env=e2e.environment())
    try:
        wait_until(lambda: (tmp_path / "pids").exists() or asker.poll() is not None)
        family = [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
        asker.send_signal(number)
        _, alive = psutil.wait_procs(family, timeout=20)
    finally:
        asker.kill()
        asker.wait()
    for one in alive:
        one.kill()
    assert not alive


def wait_until(there: Callable[[], bool], patience: float = 120.0) -> None:
    until = time.monotonic() + patience
    while not there():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_the_config_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = e2e.write_rows(tmp_path / "t.jsonl", e2e.conversations(3))
    uses = [*e2e.uses(save_tiny(tmp_path / "tiny"), traffic), f"run_dir={tmp_path}/r", "collect.features=vllm"]

    def refuse(*more: str, run: Any = script.run) -> str:
        return e2e.sentence(run, e2e.config(*uses, *more), capsys)

    assert "collect.features=x is unknown; choose transformers or vllm" in refuse("collect.features=x")
    written = "set collect.engine=openai or collect.answers=logged too, or leave it out"
    assert written in refuse() and written in refuse(run=check_all)
    logged = "collect.answers=logged"
    assert "collect.states=online stores none; leave one of them out" in refuse(logged, "collect.states=online")
    assert "collect.timeout=0 is not possible; give seconds above 0" in refuse(logged, "collect.timeout=0")
    assert "knows no target.dtype=float64" in refuse(logged, "target.dtype=float64")
    assert "is a GGUF file or has an adapter" in refuse(logged, "target.adapter=a")
    assert "nowhere cannot be run" in refuse(logged, "serve_python=nowhere")
    assert "has no vllm; set serve_python=" in refuse(logged, f"serve_python={sys.executable}")
    assert "collect.tensor_parallel=0 is not possible; give at least 1" in refuse(logged, "collect.tensor_parallel=0")
    several = "collect.tensor_parallel=4"
    assert "is about vLLM, but collect.features=transformers" in refuse(several, "collect.features=transformers")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="gives all GPUs to one vLLM, so collect with one process"):
        check_all(e2e.config(*uses, logged, several))
    assert not (tmp_path / "r").exists(), "refused before the prompts were read"


def test_the_command_collects_by_vllm(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny, log = save_tiny(tmp_path / "tiny"), log_of(tmp_path)
    more = [*e2e.uses(tiny, log), "head.taps=[0,2,5]", "head.draft_vocab_size=64", "traffic.held_out=0.3"]
    more += ["collect.answers=logged", "generation.batch_size=4", "target.dtype=float32"]
    script.run(e2e.config(*more, "name=ours"))
    fake.prepare(FrozenTarget.load(tiny, dtype="float32"), stored_ids(tmp_path / "runs/ours/features"))
    script.run(
        e2e.config(*more, "name=theirs", "collect.features=vllm", f"serve_python={fake.python}", "collect.timeout=90")
    )
    assert "its states by vLLM in float32" in " ".join(capsys.readouterr().out.split())
    assert stored_ids(tmp_path / "runs/ours/features") == stored_ids(tmp_path / "runs/theirs/features")
    assert fake.seen()[0]["model"] == str(tiny.resolve()) and fake.seen()[0]["max_model_len"] == 256


def test_the_connector_writes_what_has_finished_and_reports_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a stand-in for the connector that it changes: the blocks of a cache of two boundaries."""

    class Example:
        def __init__(self, cache: torch.Tensor) -> None:
            self._kv_cache, self._block_size, self.metadata = cache, cache.shape[2], None
            self._accumulated_finished_req_ids: set[str] = set()

        def has_connector_metadata(self) -> bool:
            return self.metadata is not None

        def _get_connector_metadata(self) -> Any:
            return self.metadata

    def extract(cache: torch.Tensor, slots: torch.Tensor, count: int) -> torch.Tensor:
        size = cache.shape[2]
        return cache[slots // size, :, slots % size][:count]

    name = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
    stand_in = types.ModuleType(name)
    vars(stand_in).update(ExampleHiddenStatesConnector=Example, PendingSave=object, extract_from_kv_cache=extract)
    monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.syspath_prepend(str(DRIVER.parent))
    from draftsmith_connector import PlainHiddenStatesConnector

    cache_PKSD = torch.randn(5, 2, 4, 3)  # blocks, boundaries, slots of a block, width
    connector = PlainHiddenStatesConnector(cache_PKSD)
    connector.wait_for_save()
    path = tmp_path / "deep" / "a.safetensors"
    pending = types.SimpleNamespace(req_id="a", filename=str(path), token_ids=torch.arange(6), block_ids=[3, 1])
    assert connector.get_finished({"a"}) == (None, None), "not reported before it is written"
    connector.metadata = types.SimpleNamespace(pending_saves=[pending])
    assert connector.get_finished(set()) == ({"a"}, None)
    connector.metadata = types.SimpleNamespace(pending_saves=[])
    assert connector.get_finished(set()) == (None, None)
    found = load_file(path)
    want_TKD = torch.cat([cache_PKSD[3].transpose(0, 1), cache_PKSD[1].transpose(0, 1)])[:6]
    assert torch.equal(found["hidden_states"], want_TKD) and found["token_ids"].tolist() == list(range(6))
    assert [one.name for one in path.parent.iterdir()] == ["a.safetensors"]
