"""What all scripts share: the entry point, the one-sentence error, and the parts that need the target.

Joins training to eval. Values of the config are checked in `scripts.settings`.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import sys
import traceback
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from scripts.help import answer, choices, nearest
from scripts.precision import check_formats, settle
from scripts.settings import build, check_call, check_sections, check_start, check_target_path, check_value, plain
from training.processes import PeerFailed, Peers

if TYPE_CHECKING:  # torch and transformers take seconds; a first line of output must not wait for them
    from heads.base import DraftHead
    from heads.target import FrozenTarget
    from heads.vocab import DraftVocabulary

CRASHED = 1
USER_ERROR = 2
_DISK = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
)
INTERRUPTED = 130
_FOLDERS = ("run_dir", "comparison_dir", "head_dir", "traffic_dir", "features_dir", "features_cache")
_SAME = (
    "Another job of this sweep has written to {}; name the folder after what is swept, such as "
    "'run_dir=runs/sweep/${{head.loss}}'."
)
_SLOW_BF16 = "note      bfloat16 is slow on this CPU, which has no instructions for it"
# Arguments of a head that say how it is trained, not what it is.
_OF_TRAINING = ("depth", "loss", "decay", "eta", "feature_weight", "token_weight", "noise")


def script(
    config: str = "config", *, launched: bool = False, one_folder: bool = False
) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Make an entry point of a function of the config: Hydra composes it, and every mistake is one line on stderr.

    launched: `accelerate launch` may start it several times over; any other command would do its work several times.
    one_folder: each job of a multirun needs a run_dir of its own.
    """

    def decorate(main: Callable[[DictConfig], None]) -> Callable[[], None]:
        failed: list[tuple[str, int]] = []
        folders: set[str] = set()
        composed = hydra.main(version_base="1.3", config_path="pkg://conf", config_name=config)(
            one_sentence(main, config, launched=launched, failed=failed, folders=folders if one_folder else None)
        )

        @functools.wraps(main)
        def entry() -> None:
            os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra hands its errors on instead of printing them
            failed.clear()
            folders.clear()
            if answer(main, config):
                return
            if (sentence := _dashes(sys.argv[1:])) is not None:
                sys.exit(_fail(sentence))
            try:
                composed()
            except JobFailed:  # Hydra raises the first one when all jobs are through
                jobs = "; ".join(f"{job} ({'refused' if code == USER_ERROR else 'crashed'})" for job, code in failed)
                _fail(f"{len(failed)} of the jobs did not finish, the others did: {jobs}.")
                sys.exit(min(code for _, code in failed))
            except ValueError as error:  # Hydra's own, of a group that is given something else than names
                if "Config group override must be" not in str(error):
                    raise
                sys.exit(_fail("A group takes the name of a file in conf/, or names: rival=[…], rival=[] for none."))
            except InstantiationException:  # a fault of ours, which deserves its traceback
                raise
            except (HydraException, OmegaConfBaseException) as error:
                sys.exit(_fail(_phrase(error, config)))

        return entry

    return decorate


def _dashes(words: Sequence[str]) -> str | None:
    """What is wrong with a command line that has options which Hydra does not know; None where all is well."""
    known = get_args_parser()
    known.exit_on_error = False  # its own way is to print every option that Hydra has
    try:
        _, unknown = known.parse_known_args(list(words))
    except ArgumentError as error:
        return f"{str(error)[0].upper()}{str(error)[1:]}; `--help` names the options that there are."
    if not unknown:
        return None
    option = next((word for word in unknown if word.startswith("-")), None)
    if option is None:
        return f"An option stands between overrides, before {unknown[0]}; put all options, such as --multirun, first."
    name, given, value = option.lstrip("-").partition("=")
    after = words[words.index(option) + 1 :]
    if not given:  # as in `--name mine`
        value = after[0] if after and not after[0].startswith("-") and "=" not in after[0] else "…"
    return f"There is no option {option}; overrides take no dashes: {name.replace('-', '_')}={value}."


class JobFailed(Exception):
    """A job of a multirun that failed and has already said why; the jobs after it still run."""


def one_sentence(
    main: Callable[[DictConfig], None],
    config: str = "config",
    *,
    launched: bool = False,
    failed: list[tuple[str, int]] | None = None,
    folders: set[str] | None = None,
) -> Callable[[DictConfig], None]:
    """Turn mistakes of the user and a full disk into one line on stderr and exit code 2.

    Within a multirun it raises JobFailed instead and adds the job's overrides and exit code to `failed`; a job whose
    run_dir is among the `folders` of those before it is refused.
    """

    @functools.wraps(main)
    def guarded(cfg: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        several = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
        try:
            if several and folders is not None and cfg.run_dir in folders:
                code = _fail(_SAME.format(cfg.run_dir))
            else:
                code = _attempt(main, config, cfg, launched)
        except Exception:
            if not several:
                raise
            traceback.print_exc()  # Hydra would show that of the first failed job only
            code = CRASHED
        if several and folders is not None:
            folders.add(cfg.run_dir)
        if several and code in (USER_ERROR, CRASHED):
            if failed is not None:
                failed.append((" ".join(HydraConfig.get().overrides.task), code))
            raise JobFailed
        if code:
            sys.exit(code)

    return guarded


def _attempt(main: Callable[[DictConfig], None], config: str, cfg: DictConfig, launched: bool) -> int:
    """The exit code of a script, once what went wrong has been said."""
    from heads.artifact import UserError

    try:
        check_sections(cfg, config)
        check_formats(cfg)
        settle(cfg)
        check_start(cfg, launched)
        main(cfg)
    except PeerFailed:  # the process that failed says why
        return USER_ERROR
    except UserError as error:
        return _fail(str(error))
    except OmegaConfBaseException as error:
        return _fail(_phrase(error))
    except KeyboardInterrupt:
        print("\nStopped; the same command goes on from here.", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        setting = _setting_of(error, cfg)
        missing = error.errno == errno.ENOENT and setting is not None and not Path(cfg[setting]).exists()
        if error.errno not in _DISK and not missing:
            raise
        where, setting = error.filename or cfg.run_dir, setting or "run_dir"
        return _fail(f"Cannot use {where}: {error.strerror}; mend that or choose another {setting}=.")
    return 0


def _setting_of(error: OSError, cfg: DictConfig) -> str | None:
    """The setting whose folder an error is about; None where it is about another place."""
    if error.filename is None:
        return None
    failed = Path(os.path.abspath(str(error.filename)))
    folders = {name: Path(os.path.abspath(str(cfg[name]))) for name in _FOLDERS if cfg.get(name) is not None}
    within = [name for name, folder in folders.items() if failed.is_relative_to(folder)]
    above = [name for name, folder in folders.items() if failed in folder.parents]
    return next(iter([*within, *above]), None)


def _fail(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return USER_ERROR


def _phrase(error: Exception, config: str = "config") -> str:
    """What Hydra and OmegaConf have to say, as one sentence."""
    if isinstance(error, OverrideParseException):
        return f"The override {error.override} cannot be read; write group.key=value, quoted against the shell."
    if missing := re.search(r"(?:Could not find|Could not load) '([a-z]+)/([^']+?)(?:\.yaml)?'", str(error)):
        group, name = missing[1], missing[2]
        there = choices(group)
        alike = get_close_matches(name.lower(), there, n=1)
        hint = f"do you mean {group}={alike[0]}? Of {group} " if alike else ""
        if group == "target" and not alike:
            hint = f"for a model of your own type target=custom target.path={name}; of target "
        return f"{group}={name} is unknown; {hint}there are {', '.join(there)}."
    lines = [line.strip() for line in str(error).splitlines()]
    name = lines[0].removeprefix("Could not override '").removesuffix("'.")
    if name != lines[0]:
        alike = " or ".join(nearest(name, config))
        hint = f"do you mean {alike}? " if alike else ""
        return f"There is no setting {name}; {hint}--help shows all, and a name of your own takes a + before it."
    if ambiguous := re.match(r"Ambiguous value for argument '(([^=]+)=([^']*))'", lines[0]):
        given, key, values = ambiguous.groups()
        return f"{given} is several values, which takes --multirun; write a list as {key}=[{values}]."
    if missing := re.search(r"Missing mandatory value: ([\w.]+)", str(error)):  # read itself, or by way of another
        return f"{missing[1]}= has no value; give it on the command line."
    told = [line for line in lines if line and not line.startswith(("full_key:", "object_type="))]
    return f"{' '.join(told).removesuffix('.')}."


def is_main() -> bool:
    """Whether this is the process of a launch that speaks for all."""
    return int(os.environ.get("RANK", "0")) == 0


def launched_peers(cfg: DictConfig) -> Peers:
    """The processes that `accelerate launch` started, or this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Peers()
    import torch

    return Peers.of_launch(cpu=not torch.cuda.is_available() or str(cfg.target.device) == "cpu")


@functools.cache
def _tell_of_slow_bf16() -> None:
    """Once, however often the stages of a pipeline load the target."""
    if is_main():
        print(_SLOW_BF16, flush=True)


def find_target(cfg: DictConfig) -> None:
    """Raises UserError where the target of the config is not there, before anything that takes long; of one on the Hub
    no more than its configuration is fetched."""
    from heads.artifact import UserError
    from heads.target_files import check_is_there

    check_target_path(cfg)
    if str(cfg.target.path).startswith("runs/targets/") and not Path(cfg.target.path).is_dir():
        raise UserError(
            f"The embedded target {cfg.target.path} has not been made yet; run `make setup`, in the folder of the "
            f"repository, or name a model of your own: target=custom target.path=my-org/my-model."
        )
    check_value("target.path", cfg.target.path, str)
    check_value("target.gguf_file", cfg.target.gguf_file, str | None)
    check_is_there(cfg.target.path, gguf_file=cfg.target.gguf_file)


def load_target(cfg: DictConfig, dtype: str | None = None) -> FrozenTarget:
    """The target of the config, in its own number format or in `dtype`."""
    import torch

    from heads.artifact import UserError
    from heads.target import FrozenTarget
    from heads.target_files import quiet_transformers
    from training.devices import computes_bf16

    quiet_transformers()
    find_target(cfg)
    options = plain(cfg.target)
    check_call(FrozenTarget.load, "target", options)
    if options["device"] == "auto":
        options["device"] = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=options["device"])
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"target.device={options['device']} is not there; choose auto, cpu or cuda.") from error
    if dtype is None and options["dtype"] == "bfloat16" and not computes_bf16(torch.device(options["device"])):
        _tell_of_slow_bf16()
    return FrozenTarget.load(options.pop("path"), **(options | ({"dtype": dtype} if dtype else {})))


def build_head(
    cfg: DictConfig, target: FrozenTarget, vocab: DraftVocabulary, donor: DraftHead | None = None
) -> DraftHead:
    """The head of the config, sized for the target, attached to it and with its starting weights: those of `donor`,
    whose draft vocabulary is then `vocab`, or what head.from_target says."""
    import torch

    torch.manual_seed(cfg.seed)
    made = _head_class(cfg)
    if donor is None:
        return made.func.for_target(target, vocab, from_target=cfg.head.from_target, **made.keywords)
    head = made(sizes=donor.arguments["sizes"], vocab=vocab).to(target.device)
    _continue_from(head, donor)
    head.attach(target.weights)
    return head


def _continue_from(head: DraftHead, donor: DraftHead) -> None:
    """Take over the weights of another head. UserError unless it is of the same kind and shape."""
    from heads.artifact import UserError
    from heads.checkpoint import class_path, fill

    if class_path(head) != class_path(donor):
        raise UserError(
            f"train.init_from is a head of the kind {class_path(donor)}, but head={class_path(head)} was asked for; "
            f"choose the head= of its kind."
        )
    for name, value in head.arguments.items():
        if name not in _OF_TRAINING and donor.arguments[name] != value:
            raise UserError(
                f"train.init_from is a head with {name}={donor.arguments[name]}, but head.{name}={value} was asked "
                f"for; set head.{name}={donor.arguments[name]}."
            )
    own = head.state_dict()
    fill(head, {name: tensor.to(own[name]) for name, tensor in donor.state_dict().items()}, source="train.init_from")


def open_tracker(cfg: DictConfig, folder: Path) -> Any:
    """The tracker of the config for the numbers in a folder, told what makes them."""
    from heads.artifact import provenance

    # Handed over after Hydra, which would build what the config inside names.
    return build(cfg, "tracking", folder=str(folder), _partial_=True)(about=provenance(plain(cfg)))


def export_dir(cfg: DictConfig) -> Path:
    """Where this run's export in the layout of the config is: each layout has a folder of its own."""
    return Path(cfg.run_dir) / "export" / str(cfg.export.layout)


def servable_head(cfg: DictConfig) -> DraftHead:
    """The trained head, attached to its target where the server's folder holds weights of the target too."""
    from heads.checkpoint import class_path, load_head
    from heads.export.folder import format_of

    head = load_head(cfg.head_dir)
    if format_of(str(cfg.export.layout)).layout_of(class_path(head)).lends:
        head = load_head(cfg.head_dir, target=(target := load_target(cfg)))
        head.attach(target.weights)
    return head


def head_needs(cfg: DictConfig, target: FrozenTarget) -> Any:
    """Which features the head of the config wants of this target; builds it without memory to ask it."""
    import torch

    from heads.vocab import DraftVocabulary
    from training.optim import parameter_groups

    wanted, every = cfg.head.get("draft_vocab_size"), torch.zeros(target.vocab_size)
    if wanted is not None:
        DraftVocabulary.choose(every, wanted, target.eos_token_ids)  # refuses what would fail after hours of answers
    made = _head_class(cfg)
    if cfg.head.from_target and not cfg.train.init_from:
        made.func.check_donor(target)
    with torch.device("meta"):
        head = made(sizes=made.func.sizes_of(target), vocab=DraftVocabulary.identity(1))
    parameter_groups(head, build(cfg, "optim"))  # refuses names of parameters that there are not
    return head.needs


def _head_class(cfg: DictConfig) -> Any:
    """The head's class (`func`) with the constructor arguments of its config; the rest of it is decided outside."""
    return build(cfg, "head", _partial_=True)
