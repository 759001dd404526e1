"""On a GPU: every fast path is its plain reference, drafts change no text, and what torch.compile and FlexAttention
gain. Without a CUDA device it says so and ends with exit code 0; a check that does not pass is exit code 1.

python -m scripts.gpu_check
python -m scripts.gpu_check name=h200 check.length=2048 check.documents=4
python -m scripts.gpu_check target.device=cpu check.hidden_size=64 check.heads=4 check.kv_heads=2 check.length=24
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from scripts.common import build_head, load_target, script
from scripts.settings import build, plain

if TYPE_CHECKING:
    import torch

    from eval.exactness import Identity
    from training.gpu_check import CheckSettings, Speed


def run(cfg: DictConfig) -> bool:
    """Whether everything holds; the figures are in runs/<name>/gpu_check.json."""
    import torch

    from heads.artifact import provenance, write_json
    from heads.compiled import check_compiler
    from training.gpu_check import as_json, checks

    settings: CheckSettings = build(cfg, "check")
    if cfg.target.device != "cpu" and not torch.cuda.is_available():
        print("gpu_check no CUDA device is here, so nothing was checked; target.device=cpu tries the program itself.")
        return True
    check_compiler()
    device = torch.device("cuda" if cfg.target.device == "auto" else cfg.target.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    print(f"gpu_check {name}, torch {torch.__version__}", flush=True)
    found = []
    for check in checks(settings, device):
        found.append(check)
        _say(f"{'ok' if check.passed else 'FAILED':7}{check.name}: {_error(check.error)} (at most {check.tolerance:g})")
        print(check.failure or "", end="", flush=True)
    texts = list(_identities(device))
    for text in texts:
        _say(f"{'ok' if text.passed else 'FAILED':7}{text.tokens} tokens by {text.proposer} are those of generate")
    rates = list(_speeds(cfg, settings, device))
    passed = all(one.passed for one in (*found, *texts)) and not any(rate.failure for rate in rates)
    body = as_json(found, rates) | {"device": name, "torch": torch.__version__, "passed": passed}
    body["texts"] = [{"by": text.proposer, "tokens": text.tokens, "passed": text.passed} for text in texts]
    path = Path(cfg.run_dir) / "gpu_check.json"
    write_json(path, {**body, "provenance": provenance(plain(cfg))})
    print(f"{'Everything holds' if passed else 'Something does not hold'}. The figures: {path}", flush=True)
    return passed


def _identities(device: torch.device) -> Iterator[Identity]:
    """Greedy texts of a tiny target in fp32, with two drafts and with none, against its own `generate`."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerBase

    from eval.decode import DecodeSettings, Request
    from eval.exactness import identities
    from eval.proposers.prompt_lookup import PromptLookup
    from heads.eagle3 import Eagle3Head
    from heads.target import FrozenTarget
    from heads.target_files import quiet_transformers
    from heads.vocab import DraftVocabulary

    quiet_transformers()
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)  # so that its distributions are not flat
    tokenizer = PreTrainedTokenizerBase()
    target = FrozenTarget(model=model, tokenizer=tokenizer, path="a made target", fingerprint={})
    head = Eagle3Head.for_target(target, DraftVocabulary.identity(512), depth=4).eval()
    requests = [Request(str(n), "all", tuple(torch.randint(512, (5 + 3 * n,)).tolist())) for n in range(8)]
    how = DecodeSettings(gamma=4, max_new_tokens=48, rows=4)
    yield from identities(target, requests, {"eagle3": head, "prompt_lookup": PromptLookup(), "no draft": None}, how)


def _speeds(cfg: DictConfig, settings: CheckSettings, device: torch.device) -> Iterator[Speed]:
    """The made head, then that of the config on its target, each line printed when it is known."""
    import torch

    from heads.vocab import DraftVocabulary
    from training.bench import made_up_features
    from training.gpu_check import made_head, speeds

    lengths = [settings.length] * settings.documents
    print(f"\n{'head':12}{'compile':9}{'attention':11}{'tokens/s':>10}{'GB':>8}{'of peak':>9}{'first steps':>13}")
    head = made_head(settings, device)
    features = made_up_features(head, hidden_size=settings.hidden_size, lengths=lengths).to(device)
    for speed in speeds("made", head, features, settings):
        _row(speed)
        yield speed
    del head, features
    if not Path(cfg.target.path).exists():
        print(f"(There is no target at {cfg.target.path}, so the made head is the only one.)")
        return
    target = load_target(cfg)
    size = min(cfg.head.draft_vocab_size or target.vocab_size, target.vocab_size)
    own = build_head(cfg, target, DraftVocabulary.choose(torch.arange(target.vocab_size, 0, -1), size))
    target.drop_layers()
    own.attach(target.weights)
    features = made_up_features(own, hidden_size=target.hidden_size, lengths=lengths).to(device)
    for speed in speeds(Path(cfg.target.path).name[:11], own, features, settings):
        _row(speed)
        yield speed


def _row(speed: Speed) -> None:
    named = f"{speed.head:12}{'on' if speed.compiled else 'off':9}{'flex' if speed.flex else 'blocks':11}"
    if speed.tokens_per_second is None:
        print(f"{named}FAILED\n{speed.failure}", flush=True)
        return
    assert speed.memory is not None and speed.share is not None and speed.first_seconds is not None
    print(
        f"{named}{speed.tokens_per_second:>10,.0f}{speed.memory / 1e9:>8.2f}{speed.share:>9.1%}"
        f"{speed.first_seconds:>11.1f} s",
        flush=True,
    )


def _error(error: float | None) -> str:
    return "no number" if error is None else f"{error:.1e}"


def _say(text: str) -> None:
    print(f"{'':10}{text}", flush=True)


@script("gpu_check")
def main(cfg: DictConfig) -> None:
    """Entry point of `python -m scripts.gpu_check`."""
    if not run(cfg):
        sys.exit(1)


if __name__ == "__main__":
    main()
