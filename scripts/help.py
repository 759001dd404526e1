"""`--help` of every script, out of what is there: its docstring, the comments of conf/, and the exit codes.

Also `--version`, and the settings whose names are nearest to a misspelt one. Composes nothing but for the last.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from omegaconf import OmegaConf

WIDTH = 80
_COLUMN = 21  # where what is said of a choice begins
EXIT_CODES = {
    0: "done; what was finished before is used as it is",
    1: "a check did not pass (doctor, prove, serve_check, gpu_check, collect verify=true), or a fault of ours with its "
    "traceback",
    2: "refused: one sentence on stderr says what was given, what is allowed, what to type",
    130: "stopped by Ctrl-C (143: by SIGTERM); the same command goes on from there",
}
_PROGRAMS = ("python -m", "accelerate launch")
_OTHERS = "Also: --multirun (a,b for each value), --cfg job (all values as they are), --version."
_VALUE = re.compile(r"^(\s*[\w?]+:.*?)(?:\s+#\s*(.*))?$")  # of a line of YAML: what is set, and its comment
_SENTENCE = re.compile(r"(?<=[.:])\s")


def answer(main: Callable[..., Any], config: str) -> bool:
    """Print the help or the version when the command line asks for one; whether it did."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        text = page(main, config)
    elif "--version" in sys.argv[1:]:
        text = version()
    else:
        return False
    try:
        print(text, flush=True)
    except BrokenPipeError:  # of `| head`, which has seen enough; what is left in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def version() -> str:
    """The line that tells two installations apart: what every manifest keeps under `provenance`."""
    from heads.artifact import provenance

    facts = provenance()
    state = {None: "no repository", True: "with changes", False: "clean"}[facts["dirty"]]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return f"draftsmith at {(facts['commit'] or 'unknown')[:12]} ({state}); {versions}"


def page(main: Callable[..., Any], config: str) -> str:
    """The whole help of a script: purpose, examples, its own settings, exit codes, then what all scripts share."""
    module = inspect.getmodule(main)
    assert module is not None and module.__doc__ is not None
    told, _, rest = inspect.cleandoc(module.__doc__).partition("\n\n")
    name = module.__file__.rpartition("/")[2].removesuffix(".py") if module.__file__ else ""
    blocks = [[line.strip() for line in block.splitlines()] for block in f"{told}\n\n{rest}".split("\n\n")[1:]]
    examples = [line for block in blocks for line in block if line.startswith(_PROGRAMS)]
    prose = [" ".join(block) for block in blocks if block and not block[0].startswith((*_PROGRAMS, "make "))]
    codes = [_wrapped(f"{code:<5}{meaning}", 7) for code, meaning in EXIT_CODES.items()]
    own = [] if config == "config" else [f"Settings of {name} alone:\n{_settings(config)}"]
    parts = [
        _wrapped(" ".join(told.split()), 0, first=""),
        f"Usage: python -m scripts.{name} [group=choice …] [group.key=value …]",
        "Examples:\n" + "\n".join(map(_command, examples)),
        *(_wrapped(one, 0, first="") for one in prose),
        *own,
        "Exit codes:\n" + "\n".join(codes),
        "Choices, * the usual one; their settings are in conf/<group>/<choice>.yaml:\n" + "\n".join(_groups(config)),
        f"Settings of all scripts:\n{_settings('config')}",
        _wrapped(_OTHERS, 0, first=""),
    ]
    return "\n\n".join(parts)


def choices(group: str) -> list[str]:
    """The names that a group takes."""
    folder = files("conf") / group
    found = (one.name for one in folder.iterdir()) if folder.is_dir() else ()
    return sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml"))


def _groups(config: str) -> Iterator[str]:
    """Every group with its choices and a sentence of each."""
    usual = set(re.findall(r"^  - (\w+: \[?\w+)", _text("config") + _text(config), re.MULTILINE))
    # accelerate/ holds files for `accelerate launch --config_file`, not choices.
    folders = [one for one in files("conf").iterdir() if one.is_dir() and one.name != "accelerate"]
    for folder in sorted(folders, key=lambda one: one.name):
        there = choices(folder.name)
        if not there or (folder.name == "bench" and config != "bench"):
            continue
        yield f"  {folder.name}"
        for choice in there:
            mark = "*" if {f"{folder.name}: {choice}", f"{folder.name}: [{choice}"} & usual else " "
            yield _wrapped(_about(folder / f"{choice}.yaml"), _COLUMN, first=f"  {mark} {choice:<{_COLUMN - 4}}")


def _about(file: Traversable) -> str:
    """The first sentence of a config file's comment, without its commands."""
    comments = [line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#")]
    words = [line for line in comments if not line.startswith(("@package", "python -m", "accelerate launch", "Use:"))]
    return _SENTENCE.split(" ".join(words).removeprefix("What: "))[0].rstrip(".:; ")


def _command(line: str) -> str:
    """A command in lines of at most WIDTH, which a shell takes as one; what is said of it stands above."""
    command, _, comment = line.partition(" #")
    whole = re.sub(r"-m \S+|'[^']*'", lambda found: found[0].replace(" ", "\0"), command.strip())
    how = {"initial_indent": "  ", "subsequent_indent": "      "}
    lines = textwrap.wrap(whole, WIDTH - 2, break_long_words=False, break_on_hyphens=False, **how)
    return (f"  # {comment.strip()}\n" if comment else "") + " \\\n".join(lines).replace("\0", " ")


def _settings(root: str) -> str:
    """A root config, its comments broken at WIDTH, without its head and what only Hydra reads."""
    kept = re.sub(r"\A(#.*\n|\n)*|^(defaults|hydra):\n( +.*\n|\n)*|^ *_\w+_:.*\n", "", _text(root), flags=re.MULTILINE)
    lines: list[tuple[str, str]] = []  # what is set, and what is said of it
    for line in kept.strip().splitlines():
        before = lines[-1] if lines else ("", "")
        if line.strip().startswith("#"):  # goes on from the line above, or stands alone at the margin
            goes_on = line.startswith(" ") or (before[0] == "" and before[1] != "")
            said = line.strip("# ")
            lines[-1:] = [(before[0], f"{before[1]} {said}")] if goes_on else [*lines[-1:], ("", said)]
        else:
            found = _VALUE.match(line)
            lines.append((found[1], found[2] or "") if found else (line, ""))
    return "\n".join(_set_out(value, said) for value, said in lines) or "  (those of the choices)"


def _set_out(value: str, said: str) -> str:
    """A setting with its comment, or either alone, in lines of at most WIDTH."""
    if not said:
        return f"  {value}".rstrip()
    first = f"  {value:<24} # " if value else "  # "
    room = first if len(first) <= WIDTH // 2 else f"  {'':24} # "  # a long value has a line of its own
    text = textwrap.fill(said, WIDTH, initial_indent=room, subsequent_indent=f"{'':{len(room) - 2}}# ")
    return text if room == first else f"  {value}\n{text}"


def _text(root: str) -> str:
    return (files("conf") / f"{root}.yaml").read_text() + "\n"


def _wrapped(text: str, indent: int, *, first: str = "  ") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * indent)


def nearest(key: str, config: str) -> list[str]:
    """The settings and groups whose names are most like a misspelt one, at most three."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("conf", version_base="1.3"):
        composed = OmegaConf.to_container(compose(config), resolve=False)
    known = [*names(composed), "experiment", "rival"]
    last = {name.rpartition(".")[2]: name for name in reversed(known)}
    found = difflib.get_close_matches(key, known, n=3, cutoff=0.8)
    found += [last[name] for name in difflib.get_close_matches(key.rpartition(".")[2], last, n=2, cutoff=0.8)]
    return list(dict.fromkeys(found))[:3]


def names(values: Any, before: str = "") -> Iterator[str]:
    """Every setting by its dotted name."""
    for name, value in values.items():
        yield f"{before}{name}"
        if isinstance(value, dict):
            yield from names(value, f"{before}{name}.")
