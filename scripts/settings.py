"""From config nodes to calls and settings: an unknown name or a value of the wrong type is one sentence, not a crash.

The annotations of whatever a node's `_target_` names are its schema; there is no other. What the values mean, and
which of them are allowed, is known where they are used.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf

from scripts.ranges import check_config, check_head, check_layout, check_rival

if TYPE_CHECKING:
    from heads.lora import LoraSettings
    from training.regenerate import Generation
    from training.served import ServerSettings
    from training.settings import TrainSettings
    from training.store import Storage

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    types.NoneType: "null",
    Any: "a value",
}
_ENGINES = ("transformers", "openai")
ANSWERS = ("regenerate", "logged")
_FEATURES = ("transformers", "vllm")
_COLLECT: dict[str, Any] = {
    **dict.fromkeys(("answers", "states", "dtype", "engine", "features"), str),
    **dict.fromkeys(("url", "model"), str | None),
    **dict.fromkeys(("concurrency", "tries", "tensor_parallel"), int),
    **{"taps": list[int], "verify": bool, "timeout": float},
}
_ALWAYS = (
    *("target", "traffic", "head", "optim", "tracking", "eval", "export", "rivals"),
    *("generation", "collect", "train", "server"),
)
_ABOUT_CALLS = ("_target_", "_convert_", "_partial_", "_recursive_")
_OF_BUILDING = {
    "head": {"draft_vocab_size": int | None, "from_target": bool},
    "medusa2": {"held_out": int},
}


def plain(cfg: DictConfig) -> dict[str, Any]:
    """A config node as plain values."""
    values = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _node(cfg: DictConfig, key: str) -> DictConfig:
    """The node at a key, which may be dotted."""
    node = OmegaConf.select(cfg, key)
    assert isinstance(node, DictConfig), f"{key} is no node"
    return node


def check_sections(cfg: DictConfig, config: str) -> None:
    """That what holds settings in conf/config.yaml and conf/<config>.yaml still does. Raises UserError."""
    from heads.artifact import UserError

    for name in _ALWAYS:
        if name not in cfg:
            raise UserError(f"~{name} takes away what every script needs; leave it out.")
    for root in dict.fromkeys(("config", config)):
        stored = OmegaConf.to_container(OmegaConf.create((files("conf") / f"{root}.yaml").read_text()), resolve=False)
        assert isinstance(stored, dict)
        for name, settings in stored.items():
            if name in cfg and isinstance(settings, dict) and not OmegaConf.is_dict(cfg._get_node(name)):
                given = "null" if cfg[name] is None else cfg[name]
                first = next((key for key in settings if not key.startswith("_")), None)
                one = f"such as {name}.{first}=…" if first else f"{name}.<name>.<setting>=…"
                raise UserError(f"{name}={given} is not possible: {name} holds settings; give one of them, {one}.")


def check_start(cfg: DictConfig, launched: bool) -> None:
    """What every script asks first: how it was started, where its artifacts go, and the seed. Raises UserError."""
    from heads.artifact import UserError

    processes = os.environ.get("WORLD_SIZE", "1")
    if not processes.isdecimal() or int(processes) < 1:
        raise UserError(f"WORLD_SIZE={processes} in the environment must be a whole number ≥ 1; `unset WORLD_SIZE`.")
    if not launched and int(processes) > 1:
        name = Path(sys.argv[0]).stem
        raise UserError(
            f"scripts.{name} was started as one of {processes} processes, but it runs as one; start it with "
            f"`python -m scripts.{name}`: `accelerate launch` is for scripts.collect, scripts.train and "
            f"scripts.pipeline only."
        )
    check_value("seed", cfg.seed, int)
    if not 0 <= cfg.seed < 2**32:
        raise UserError(f"seed={cfg.seed} must be at least 0 and below 2^32; set seed=0.")
    parts = str(cfg.name).split("/")
    named = isinstance(cfg.name, (str, int, float)) and not isinstance(cfg.name, bool)
    if not named or any(part.strip() in ("", ".", "..") for part in parts):
        raise UserError(
            f"name={'null' if cfg.name is None else cfg.name} cannot name a run under runs/; give a word such as "
            f"name=mine (parts between / may not be empty, . or ..), or run_dir=<folder> for another place."
        )
    for name in ("run_dir", "head_dir", "traffic_dir", "features_dir", "features_cache"):
        check_value(name, cfg[name], str)
        if not cfg[name].strip():
            raise UserError(f"{name}= is empty; give a folder such as {name}=runs/mine, or leave it out.")
    check_value("verify", cfg.verify, bool)
    check_value("serve_python", cfg.serve_python, str)
    _check_server(plain(cfg.server))
    check_value("serve_python", cfg.serve_python, str)
    for key, value in plain(cfg.collect).items():
        if key not in _COLLECT:
            raise UserError(f"There is no setting collect.{key}; there are {', '.join(sorted(_COLLECT))}.")
        check_value(f"collect.{key}", value, _COLLECT[key])
    if cfg.collect.answers not in ANSWERS:
        raise UserError(f"collect.answers={cfg.collect.answers} is unknown; choose {' or '.join(ANSWERS)}.")
    if cfg.collect.features not in _FEATURES:
        raise UserError(f"collect.features={cfg.collect.features} is unknown; choose {' or '.join(_FEATURES)}.")


def _check_server(values: dict[str, Any]) -> None:
    """The running server that scripts.evaluate asks. Raises UserError."""
    from heads.artifact import UserError

    hints = {"url": str | None, "model": str | None, "at_once": int | None, "timeout": float}
    for name, hint in hints.items():
        check_value(f"server.{name}", values[name], hint)
    if (values["at_once"] is not None and values["at_once"] < 1) or not values["timeout"] > 0:
        raise UserError(
            f"server.at_once={values['at_once']} must be at least 1 or null, and server.timeout={values['timeout']} "
            f"above 0."
        )


def build(cfg: DictConfig, key: str, **more: Any) -> Any:
    """What the node `key` makes of its values and `more`. Raises UserError on names and types that cannot be."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    from heads.artifact import UserError

    check_node(cfg, key)
    node = {name: value for name, value in plain(_node(cfg, key)).items() if name not in _OF_BUILDING.get(key, {})}
    try:
        return instantiate({"_convert_": "all", **node}, **more)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from error
        raise


def train_settings(cfg: DictConfig) -> TrainSettings:
    """How to train, out of train, optim and seed."""
    from training.settings import TrainSettings

    values = plain(cfg.train)
    check_value("train.init_from", values.pop("init_from"), str | None)
    check_value("train.verify", values.pop("verify"), bool)
    lora_settings(cfg)
    del values["lora"]
    check_call(TrainSettings, "train", values, elsewhere=("seed", "optim"))
    return TrainSettings(seed=cfg.seed, optim=build(cfg, "optim"), **values)


def lora_settings(cfg: DictConfig) -> LoraSettings | None:
    """The adapter of train.lora, or None. Raises UserError when there is no head that it could be put on."""
    from heads.artifact import UserError
    from heads.lora import LoraSettings

    values = plain(cfg.train)["lora"]
    check_value("train.lora", values, dict[str, Any] | None)
    if values is None:
        return None
    check_call(LoraSettings, "train.lora", values)
    if not cfg.train.init_from:
        raise UserError("train.lora adapts a head that has learned already; set train.init_from=runs/<name>/head too.")
    return LoraSettings(**values)


def generation_settings(cfg: DictConfig) -> Generation:
    """How the target answers, out of generation and seed."""
    from heads.artifact import UserError
    from training.regenerate import Generation

    values = plain(cfg.generation)
    check_call(Generation, "generation", values, elsewhere=("seed",))
    if values["answers"] > 1 and cfg.collect.answers != "regenerate":
        raise UserError(
            f"generation.answers={values['answers']} has the target write several, but collect.answers="
            f"{cfg.collect.answers} has it write none; leave one of them out."
        )
    return Generation(seed=cfg.seed, **values)


def storage_settings(cfg: DictConfig) -> Storage:
    """What the feature store keeps, out of collect."""
    from training.store import Storage

    values = {name: plain(cfg.collect)[name] for name in ("states", "dtype")}
    check_call(Storage, "collect", values)
    return Storage(**values)


def server_settings(cfg: DictConfig) -> ServerSettings | None:
    """The server that answers, out of collect; None where the target answers in this process."""
    from heads.artifact import UserError
    from training.served import ServerSettings

    engine = cfg.collect.engine
    if engine not in _ENGINES:
        raise UserError(f"collect.engine={engine} is unknown; choose {' or '.join(_ENGINES)}.")
    values = {name: plain(cfg.collect)[name] for name in ("url", "model", "concurrency", "tries", "timeout")}
    if engine == "transformers":
        if values["url"] is not None:
            raise UserError("collect.url= names a server, but collect.engine=transformers asks none; set it to openai.")
        for name, usual in ServerSettings.defaults().items():
            if values.get(name, usual) != usual and not (name == "timeout" and cfg.collect.features == "vllm"):
                raise UserError(
                    f"collect.{name}={values[name]} is about a server, but collect.engine=transformers asks none; "
                    f"leave it out, or set collect.engine=openai."
                )
        return None
    if cfg.collect.answers != "regenerate":
        raise UserError(
            f"collect.engine=openai has a server answer, but collect.answers={cfg.collect.answers} needs none; leave "
            f"one of them out."
        )
    if values["url"] is None:
        raise UserError("collect.engine=openai needs collect.url=<of the server>, such as http://localhost:8000/v1.")
    check_call(ServerSettings, "collect", values)
    return ServerSettings(**values)


def check_target_path(cfg: DictConfig) -> None:
    """Raises UserError when no target is named."""
    from heads.artifact import UserError

    if OmegaConf.is_missing(cfg.target, "path"):
        raise UserError("target=custom needs target.path=<folder, Hub id or .gguf file>.")


def check_all(cfg: DictConfig) -> None:
    """Refuse whatever can be refused before the first of several long stages begins."""
    from heads.artifact import UserError
    from heads.checkpoint import read_facts
    from heads.target import FrozenTarget
    from scripts.serving import extraction_settings

    check_target_path(cfg)
    train_settings(cfg)
    generation_settings(cfg)
    storage_settings(cfg)
    server_settings(cfg)
    extraction_settings(cfg)
    build(cfg, "eval", seed=cfg.seed)
    check_call(FrozenTarget.load, "target", plain(cfg.target))
    for key in ("traffic", "head", "tracking"):
        check_node(cfg, key)
    check_export(cfg)
    check_rivals(cfg)
    check_config(cfg)
    check_value("push", cfg.push, str | None)
    check_head(cfg, build(cfg, "head", _partial_=True))
    if cfg.train.init_from is not None:
        read_facts(cfg.train.init_from)
    if cfg.traffic.get("held_out") == 0:
        raise UserError("traffic.held_out=0 leaves nothing to measure the head on; give a share such as 0.1.")
    _check_later_stages(cfg)


def check_export(cfg: DictConfig) -> None:
    """What is exported how. Raises UserError."""
    check_node(cfg, "export")
    check_layout(cfg)


def check_rivals(cfg: DictConfig) -> None:
    """The rivals, and the files that they name. Raises UserError."""
    for name in cfg.rivals:
        check_node(cfg, f"rivals.{name}")
        check_rival(f"rivals.{name}", plain(cfg.rivals[name]))


def _check_later_stages(cfg: DictConfig) -> None:
    """Whether the head that is to be trained can then be measured and exported; without training it is another one."""
    from heads.artifact import UserError
    from heads.export.folder import format_of
    from heads.mtp_blocks import MTPBlocksHead
    from heads.stacked import StackedHead

    stages, kind = list(cfg.stages), _target_of(cfg, "head")
    if "train" not in stages:
        return
    depth = cfg.head.get("depth")
    deepest = depth if inspect.isclass(kind) and issubclass(kind, (StackedHead, MTPBlocksHead)) else None
    if "evaluate" in stages and deepest is not None and cfg.eval.gamma > deepest:
        raise UserError(
            f"eval.gamma={cfg.eval.gamma} is beyond head.depth={depth}, the longest draft of this kind of head; set "
            f"eval.gamma={depth} or less, or head.depth={cfg.eval.gamma}."
        )
    if "export" not in stages:
        return
    how, path = format_of(str(cfg.export.layout)), f"{kind.__module__}.{kind.__qualname__}"
    layout = next((one for one in how.layouts if one.head == path), None)
    if layout is None:
        left = ",".join(stage for stage in stages if stage != "export")
        raise UserError(
            f"export={how.name} has no layout for a head of the kind {path}; leave the stage out with "
            f"'stages=[{left}]', or choose the head= or export= of another kind."
        )
    wanted = cfg.head.get("draft_vocab_size")
    if layout.whole_vocabulary and wanted is not None and cfg.train.init_from is None:
        raise UserError(
            f"head.draft_vocab_size={wanted} could not be exported, as {layout.reader}'s {layout.title} drafts from "
            f"the whole vocabulary; set head.draft_vocab_size=null, or leave export out of stages=."
        )


def check_node(cfg: DictConfig, key: str) -> None:
    """Check the values of a node against the annotations of its `_target_`."""
    from heads.artifact import UserError

    if missing := sorted(OmegaConf.missing_keys(_node(cfg, key))):
        raise UserError(f"{key} needs {missing[0]}=<a value>; its file under conf/ says which.")
    values, function = plain(_node(cfg, key)), _target_of(cfg, key)
    extra = _OF_BUILDING.get(key, {})
    for name in extra.keys() & values.keys():
        check_value(f"{key}.{name}", values[name], extra[name])
    own = {name: value for name, value in values.items() if name not in (*extra, *_ABOUT_CALLS)}
    check_call(function, key, own, besides=tuple(extra))


def _target_of(cfg: DictConfig, key: str) -> Callable[..., Any]:
    """The class or function that a node names. Raises UserError when there is none."""
    from heads.artifact import UserError

    path = str(_node(cfg, key)["_target_"])
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = vars(importlib.import_module(module))[name]
    except (ImportError, ValueError, KeyError) as error:
        raise UserError(f"{key}._target_={path} cannot be imported; name a class or function.") from error
    return found


def check_call(
    function: Callable[..., Any],
    key: str,
    values: Mapping[str, Any],
    *,
    besides: Sequence[str] = (),
    elsewhere: Sequence[str] = (),
) -> None:
    """Check values by name against what a class or function takes. Raises UserError.

    besides: names that are settings too; elsewhere: names that are none here, because their values come from outside.
    """
    from heads.artifact import UserError

    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function)
    known = [name for name in inspect.signature(function).parameters if name not in elsewhere]
    for name, value in values.items():
        if name not in known:
            raise UserError(f"There is no setting {key}.{name}; there are {', '.join(sorted([*known, *besides]))}.")
        check_value(f"{key}.{name}", value, hints.get(name, Any))


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raises UserError when a value is not of an annotated type."""
    from heads.artifact import UserError

    if not _fits(value, hint):
        raise UserError(f"{name}={value!r} is of the wrong type; give {_phrase(hint)}.")


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin in (tuple, list, Sequence):
        if not isinstance(value, (list, tuple)):
            return False
        if origin is tuple and arguments[-1] is not Ellipsis:
            return len(value) == len(arguments) and all(map(_fits, value, arguments))
        return all(_fits(one, arguments[0]) for one in value)
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(_fits(one, arguments[1]) for one in value.values())
    if hint is Any:
        return True
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def _phrase(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_phrase(one) for one in arguments))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"[{', '.join(map(_phrase, arguments))}]"
    if origin in (tuple, list, Sequence):
        return f"a list [{_phrase(arguments[0])}, …]"
    if origin in (dict, Mapping):
        return f"a mapping {{name: {_phrase(arguments[1])}, …}}"
    return _WORDS.get(hint) or inspect.formatannotation(hint)
