"""The shape of the repository: who may import whom, how long a file may grow, what may lie at the top.

Every rule is a function from sources to a list of complaints, so that each has a control: a made-up source
that breaks it. Nothing here imports the project; sources are read by `ast`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("heads", "training", "eval", "conf", "scripts", "tests")
MAY_IMPORT = {
    "heads": {"heads"},
    "training": {"training", "heads"},
    "eval": {"eval", "heads"},
    "conf": set(),
    "scripts": {"scripts", "training", "eval", "heads", "conf"},
}
HYDRA = {"hydra", "omegaconf"}
ELSEWHERE = {
    "vllm": "runs in the server's own environment",
    "omegaconf": "comes with hydra-core",
    "httpx": "comes with huggingface-hub",
    "psutil": "comes with accelerate",
}
STOP = 500
TOP = {
    *OURS,
    *("pyproject.toml", "README.md", "Makefile", "constraints.txt", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"),
    *(".ci", ".github", ".gitignore", ".gitattributes", ".editorconfig"),
}
RESERVED = {*OURS, "hydra"}

Import = tuple[str, bool]
"""(dotted module, whether the statement binds its first part as a name, as `import a.b` does for `a`)."""


def imports(path: str, source: str) -> Iterator[Import]:
    """Every import of a file, static or by `import_module("…")`, relative ones resolved against its place."""
    package = path.split("/")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.asname is None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            tails = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((".".join([*base, tail]), False) for tail in tails)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = ast.unparse(node.func).split(".")[-1]
            if name in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.args[0].value, False


def wrong_direction(path: str, source: str) -> list[str]:
    """Imports against the one direction: scripts -> training, eval -> heads."""
    folder = path.split("/")[0]
    tops = {name.split(".")[0] for name, _ in imports(path, source)}
    return [f"{path} imports {top}" for top in sorted(tops & set(OURS) - MAY_IMPORT.get(folder, set(OURS)))]


def stray_hydra(path: str, source: str) -> list[str]:
    """Hydra anywhere but under scripts/ (and in tests, which compose every config)."""
    if path.split("/")[0] in {"scripts", "tests"}:
        return []
    tops = {name.split(".")[0] for name, _ in imports(path, source)}
    return [f"{path} imports {top}, which only scripts/ may" for top in sorted(tops & HYDRA)]


def bare_eval(path: str, source: str) -> list[str]:
    """`import eval` in any form: it hides the builtin. `from eval.verify import …` is the way."""
    found = [n for n, binds in imports(path, source) if n == "eval" or (binds and n.startswith("eval."))]
    return [f"{path} imports {name} bare" for name in found]


def too_long(path: str, source: str) -> list[str]:
    """Files beyond the stop."""
    lines = len(source.splitlines())
    return [f"{path} has {lines} lines, {STOP} is the stop"] if lines > STOP else []


def shadowing(paths: list[str]) -> list[str]:
    """Modules that would hide one of our packages, or Hydra, for files run by path: `scripts/eval.py`."""
    modules = [path for path in paths if path.endswith(".py") and "/" in path]
    return [path for path in modules if Path(path).stem in RESERVED]


def shadowing_test_folders(paths: list[str]) -> list[str]:
    """Folders inside tests/ that bear a package's name."""
    inside = {part for path in paths if path.startswith("tests/") for part in path.split("/")[1:-1]}
    return sorted(inside & RESERVED)


def strangers(paths: list[str]) -> list[str]:
    """Top-level entries that the layout does not know."""
    return sorted({path.split("/")[0] for path in paths} - TOP)


def undeclared(path: str, source: str, declared: set[str], owners: dict[str, list[str]]) -> list[str]:
    """Third-party imports whose distribution pyproject.toml does not name: they work only by accident."""
    tops = {name.split(".")[0] for name, _ in imports(path, source)} - set(OURS) - set(ELSEWHERE)
    foreign = {top: owners[top] for top in tops if top in owners}
    return [f"{path} imports {top}" for top in sorted(foreign) if not declared & set(map(plain, foreign[top]))]


def plain(name: str) -> str:
    """A distribution's name as the registry compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared_distributions() -> set[str]:
    """What pyproject.toml asks for, the development tools included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    return {plain(re.split(r"[<>=!~\[; ]", requirement)[0]) for requirement in wanted}


def sources() -> dict[str, str]:
    """Every Python file of ours by its path from the root."""
    files = sorted(file for folder in OURS for file in (ROOT / folder).rglob("*.py"))
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


def tracked() -> list[str]:
    """The files git tracks; the test is skipped where there is no repository (an unpacked archive)."""
    answer = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        pytest.skip("not inside a git repository")
    return answer.stdout.splitlines()


@pytest.mark.parametrize("rule", [wrong_direction, stray_hydra, bare_eval, too_long])
def test_every_file_keeps_the_rule(rule) -> None:
    files = sources()
    assert len(files) >= 10, "the walk found too little to mean anything"
    assert [complaint for path, source in files.items() for complaint in rule(path, source)] == []


def test_every_config_is_short_enough() -> None:
    configs = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "conf").rglob("*.yaml")}
    assert [complaint for path, text in configs.items() for complaint in too_long(path, text)] == []


def test_every_third_party_import_is_declared() -> None:
    declared, owners = declared_distributions(), dict(packages_distributions())
    found = [line for path, source in sources().items() for line in undeclared(path, source, declared, owners)]
    assert found == []


def test_nothing_shadows_a_package() -> None:
    paths = list(sources())
    assert shadowing(paths) == []
    assert shadowing_test_folders(paths) == []


def test_only_known_entries_at_the_top() -> None:
    assert strangers(tracked()) == []


@pytest.mark.parametrize(
    ("rule", "path", "source", "guilty"),
    [
        (wrong_direction, "heads/x.py", "from training.store import FeatureStore", "training"),
        (wrong_direction, "heads/x.py", "import eval.tree as tree", "eval"),
        (wrong_direction, "heads/export/x.py", "from ...eval import tree", "eval"),
        (
            wrong_direction,
            "heads/x.py",
            "import importlib\nimportlib.import_module('scripts.train')",
            "scripts",
        ),
        (wrong_direction, "heads/x.py", "def f():\n    from conf import x", "conf"),
        (wrong_direction, "training/x.py", "if TYPE_CHECKING:\n    import eval.decode", "eval"),
        (wrong_direction, "training/x.py", "from tests.tiny import target", "tests"),
        (wrong_direction, "eval/x.py", "from training import loop", "training"),
        (stray_hydra, "heads/x.py", "import hydra", "hydra"),
        (stray_hydra, "training/x.py", "from omegaconf import DictConfig", "omegaconf"),
        (stray_hydra, "eval/x.py", "from hydra.utils import instantiate", "hydra"),
        (bare_eval, "scripts/x.py", "import eval", "eval"),
        (bare_eval, "scripts/x.py", "import eval as e", "eval"),
        (bare_eval, "tests/x.py", "import eval.verify", "eval.verify"),
        (bare_eval, "tests/x.py", "from eval import verify", "eval"),
        (too_long, "heads/x.py", "x = 1\n" * (STOP + 1), f"{STOP + 1} lines"),
    ],
)
def test_control_the_checker_catches(rule, path: str, source: str, guilty: str) -> None:
    complaints = rule(path, source)
    assert len(complaints) == 1, complaints
    assert guilty in complaints[0]


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (
            wrong_direction,
            "heads/x.py",
            "from heads.base import DraftHead\nfrom . import layers\nimport torch",
        ),
        (wrong_direction, "heads/export/x.py", "from ..base import DraftHead"),
        (wrong_direction, "training/x.py", "from heads.base import DraftHead\nfrom training.store import x"),
        (wrong_direction, "scripts/x.py", "from training.loop import train\nfrom eval.decode import decode"),
        (wrong_direction, "tests/x.py", "from training.loop import train\nfrom eval.decode import decode"),
        (stray_hydra, "scripts/x.py", "import hydra"),
        (stray_hydra, "heads/x.py", "from heads.hydra_mlp import HydraHead"),
        (bare_eval, "eval/x.py", "from eval.tree import mask\nmodel.eval()\nfrom . import tree"),
        (bare_eval, "eval/x.py", "import evaluate"),
        (too_long, "heads/x.py", "x = 1\n" * STOP),
    ],
)
def test_control_the_checker_lets_pass(rule, path: str, source: str) -> None:
    assert rule(path, source) == []


def test_control_shadowing_folders_and_strangers() -> None:
    assert shadowing(["scripts/eval.py", "heads/hydra.py", "scripts/train.py"]) == [
        "scripts/eval.py",
        "heads/hydra.py",
    ]
    assert shadowing_test_folders(["tests/heads/test_x.py", "tests/data/x.json"]) == ["heads"]
    assert strangers(["heads/base.py", "notes.txt", "docs/x.md", ".ci/run"]) == ["docs", "notes.txt"]


def test_control_undeclared_imports() -> None:
    owners = {"torch": ["torch"], "yaml": ["PyYAML"], "gguf": ["gguf"]}
    source = "import torch\nimport yaml\nimport json\nfrom heads.base import DraftHead\nimport vllm"
    assert undeclared("heads/x.py", source, {"torch", "gguf"}, owners) == ["heads/x.py imports yaml"]
