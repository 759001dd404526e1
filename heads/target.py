"""The frozen target: any causal language model of transformers, seen as features, logits and a chat template.

It knows how to load one (a folder, a Hub id, a GGUF file, a base with a PEFT adapter), what identifies it, and how to
run a block of tokens over a cache. It does not know what the features are for.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from heads.artifact import MANIFEST, UserError, digest, read_manifest
from heads.base import TargetWeights
from heads.cache import BlockCache, growing_cache
from heads.packed import for_packed_queries, group_attention, pack_linears
from heads.target_files import load_tokenizer, loading, resolve

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
_WEIGHT_FILES = ("*.safetensors", "*.gguf", "*.bin")
# What a template raises, which is a program: its own refusal, or what comes of a value that it did not expect.
TEMPLATE_FAULTS = (
    *(TemplateError, ArithmeticError, AttributeError, LookupError),
    *(RecursionError, TypeError, ValueError),
)
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 18


@dataclass(frozen=True)
class TargetOutput:
    """last_BTD: states after the final norm; taps_BTE: the tapped boundaries side by side (E = 0 without taps)."""

    last_BTD: Tensor
    taps_BTE: Tensor


class FrozenTarget:
    """A causal language model that is never trained here. Make one with `FrozenTarget.load`.

    recurrent: the kinds of its layers that carry a state from token to token (gated delta nets, state spaces); such a
    target answers and is read, but takes no block of drafts.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        path: str,
        fingerprint: dict[str, str],
        template: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.template = dict(template or {})
        self.path = path
        self.fingerprint = fingerprint
        config = model.config.get_text_config()
        self.config = config
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.num_layers: int = config.num_hidden_layers
        self.max_length: int = config.max_position_embeddings
        self.eos_token_ids = _eos_ids(model, tokenizer)
        facts = config.to_dict()
        self._softcap: float | None = facts.get("final_logit_softcapping")
        layer_types = set(facts.get("layer_types") or ["full_attention"])
        self.recurrent = _recurrent_kinds(config)
        self._window: int | None = facts.get("sliding_window") if "sliding_attention" in layer_types else None
        self._check_alignment()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        gguf_file: str | None = None,
        adapter: str | None = None,
        dtype: str = "bfloat16",
        device: str = "cpu",
        attention: str | None = None,
        trust_remote_code: bool = False,
        template: Mapping[str, Any] | None = None,
    ) -> FrozenTarget:
        """Load a target.

        path: a folder, a Hub id, or a .gguf file. gguf_file: the file's name inside `path`. adapter: folder of a PEFT
        adapter, merged into the base as served. dtype: one of DTYPES. attention: transformers' own choice if None.
        template: what the server hands the chat template beside the messages, such as {"enable_thinking": False}.
        Raises UserError when something is missing.
        """
        if dtype not in DTYPES:
            raise UserError(f"target.dtype={dtype!r} is unknown; choose one of {', '.join(DTYPES)}.")
        _check_template(template or {})
        tokenizer = load_tokenizer(path, gguf_file=gguf_file, trust_remote_code=trust_remote_code)
        folder, gguf_file = resolve(str(path), gguf_file)
        with loading(path):
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=DTYPES[dtype],
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **({"gguf_file": gguf_file} if gguf_file else {}),
            )
        if report["missing_keys"]:
            raise UserError(
                f"The target at {path} lacks {len(report['missing_keys'])} weights, among them "
                f"{min(report['missing_keys'])}, which would be made up; give a complete checkpoint."
            )
        fingerprint = fingerprint_target(
            folder, gguf_file=gguf_file, adapter=adapter, tokenizer=tokenizer, template=template
        )
        if adapter is not None:
            model = _merge_adapter(model, adapter)
        model.to(device)
        if dtype == "float64":
            model.set_experts_implementation("eager")  # the grouped products of experts know no doubles
        pack_linears(model)
        group_attention(model)
        return cls(model=model, tokenizer=tokenizer, path=str(path), fingerprint=fingerprint, template=template)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def weights(self) -> TargetWeights:
        """What heads share: the embedding and vocabulary matrices of the loaded model (the same one if tied)."""
        projection = self.model.get_output_embeddings()
        return TargetWeights(
            embedding_VD=self.model.get_input_embeddings().weight.detach(),
            lm_head_VD=projection.weight.detach(),
            bias_V=None if projection.bias is None else projection.bias.detach(),
            softcap=self._softcap,
        )

    def drop_layers(self) -> None:
        """Give back the memory of the decoder layers, for a caller that needs `weights` and what is known of the target
        only: `forward` is at an end. `weights` taken before keep the file in memory that they lie in."""
        for module in list(self.model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.ModuleList) and len(child) == self.num_layers:
                    delattr(module, name)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone()  # out of the mapped file, all of whose pages count as ours
        _give_back()

    @torch.inference_mode()
    def forward(
        self,
        ids_BN: Tensor,
        *,
        cache: BlockCache | None = None,
        counts: Sequence[int] | None = None,
        parents_N: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        """Run the target over a block of tokens, appended to `cache` if one is given.

        counts: valid tokens per row, padding on the right (default: all); parents_N: a tree instead of a chain.
        The caller decides afterwards, with `cache.keep`, what stays. UserError on a cache or a tree where layers are
        recurrent.
        """
        rows, nodes = ids_BN.shape
        if self.recurrent:
            if cache is not None or parents_N is not None:
                self.check_decodes()
            how: dict[str, Any] = {"use_cache": False}
        else:
            cache_or_new = cache if cache is not None else BlockCache(rows, self.device)
            block = cache_or_new.place([nodes] * rows if counts is None else counts, parents_N)
            mask = self._mask(block.allowed_BNC, block.positions_BN, cache_or_new)
            how = {"position_ids": block.positions_BN, "attention_mask": mask, "cache": cache_or_new.kv}
            how["use_cache"] = True
        output = self.model.base_model(input_ids=ids_BN, output_hidden_states=bool(taps), **how)
        last_BTD = output.last_hidden_state
        taps_BTE = (
            torch.cat([output.hidden_states[tap] for tap in taps], dim=-1)
            if taps
            else last_BTD.new_empty(rows, nodes, 0)
        )
        return TargetOutput(last_BTD, taps_BTE)

    def check_decodes(self) -> None:
        """Raises UserError where the exact decoder cannot run this target: a recurrent state holds all tokens that it
        was given, so it cannot go back to where a draft was rejected."""
        if self.recurrent:
            raise UserError(
                f"The target {self.path} has layers of {', '.join(self.recurrent)}, whose state cannot go back to "
                f"where a draft was rejected, so nothing is decoded with drafts here; collect, train and export with "
                f"'stages=[collect,train,export]' and train.eval_every=null, and measure the head in its server."
            )

    def new_cache(self) -> Cache:
        """An empty cache for answering a batch without drafts."""
        return DynamicCache(config=self.config) if self.recurrent else growing_cache()

    def logits(self, last: Tensor) -> Tensor:
        """Logits [..., V] in the target's dtype from states after the final norm [..., D]."""
        logits: Tensor = self.model.get_output_embeddings()(last)
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    @contextmanager
    def settings_aside(self) -> Iterator[None]:
        """`generate` does inside what it is told and nothing else: it fills up what it is given from the model's own
        generation config, whose penalties and limits the exact decoder does not know."""
        own, self.model.generation_config = self.model.generation_config, GenerationConfig()
        try:
            yield
        finally:
            self.model.generation_config = own

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """`render` by this target's tokenizer, with what the template is given beside the messages."""
        return render(self.tokenizer, messages, tools=tools, template=self.template)

    def _mask(self, allowed_BNC: Tensor | None, positions_BN: Tensor, cache: BlockCache) -> Any:
        """What transformers wants as attention_mask: nothing, one additive 4-D mask, or one for each kind of layer."""
        nodes = positions_BN.shape[1]
        if allowed_BNC is None:
            if self._window is None and (nodes == 1 or cache.width == 0):
                return None  # every column, or a causal square, needs no mask
            allowed_BNC = torch.ones(nodes, cache.width + nodes, dtype=torch.bool, device=self.device)
            allowed_BNC = allowed_BNC.tril(cache.width)[None].expand(len(positions_BN), -1, -1)
        if self._window is None:
            return self._additive(allowed_BNC)
        past_BC = torch.arange(cache.width, device=self.device).expand(len(positions_BN), -1)
        columns_BC = torch.cat([past_BC, positions_BN], dim=-1)
        near_BNC = positions_BN[:, :, None] - columns_BC[:, None, :] < self._window
        return {
            "full_attention": self._additive(allowed_BNC),
            "sliding_attention": self._additive(allowed_BNC & near_BNC),
        }

    def _additive(self, allowed_BNC: Tensor) -> Tensor:
        mask = torch.zeros(allowed_BNC.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(~allowed_BNC, torch.finfo(self.dtype).min)
        return for_packed_queries(self.model, mask[:, None])

    @torch.inference_mode()
    def _check_alignment(self) -> None:
        """The features must explain the logits: lm_head(norm(f_t)) is what the whole model says."""
        ids = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        ours = self.logits(self.forward(ids).last_BTD).float()
        whole = self.model(input_ids=ids).logits.float()
        if not torch.allclose(ours, whole, rtol=0.02, atol=0.02 * whole.abs().max().item()):
            raise UserError(
                f"The logits of {type(self.model).__name__} are not lm_head(final norm state): this family "
                f"rescales them in a way that is not supported yet; choose another target."
            )


def _recurrent_kinds(config: PreTrainedConfig) -> tuple[str, ...]:
    """The kinds of layers whose cache is a state, by transformers' own word."""
    kinds = config.to_dict().get("layer_types") or []
    layers = DynamicCache(config=config).layers if kinds else []
    recurrent = [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers]
    return tuple(sorted({kind for kind, state in zip(kinds, recurrent, strict=False) if state}))


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation up to where the assistant's next turn begins, by the tokenizer's own template.

    template: what else the template is given, by name.
    Raises UserError when the tokenizer has no chat template, or the template refuses the conversation or fails on it.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"The tokenizer of {tokenizer.name_or_path} has no chat template; add a chat_template.jinja to its folder."
        )
    try:
        ids = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=True,
            return_dict=False,
            **(template or {}),
        )
    except TEMPLATE_FAULTS as error:
        own = isinstance(error, TemplateError)
        raise UserError(
            f"The chat template of {tokenizer.name_or_path} {'refuses' if own else 'fails on'} a conversation with the "
            f"roles {', '.join(str(message.get('role')) for message in messages)} "
            f"({error if own else f'{type(error).__name__}: {error}'}); leave it out or change the template."
        ) from error
    return [int(index) for index in ids]


def _check_template(template: Mapping[str, Any]) -> None:
    """Refuse names that are not the template's to know but those of the call that renders it."""
    taken = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"} - {"kwargs"}
    if wrong := sorted(taken & set(template)):
        raise UserError(
            f"target.template={dict(template)} cannot set {wrong[0]}; name what the chat template itself asks for, "
            f"such as {{enable_thinking: false}}."
        )


def fingerprint_target(
    folder: str,
    *,
    gguf_file: str | None,
    adapter: str | None,
    tokenizer: PreTrainedTokenizerBase,
    template: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """What identifies a target: weights (sizes and sampled bytes of all weight files), tokenizer, chat template with
    what it is given.

    Where an adapter came out of training a head, `modified` says so; every artifact that names its target says it too.
    """
    modified = {}
    if adapter is not None and (Path(adapter) / MANIFEST).is_file():
        modified = {"modified": read_manifest(adapter, "adapter")["modified"]}
    vocabulary = sorted(tokenizer.get_vocab().items())
    return {
        "name": Path(folder).name if gguf_file is None else gguf_file,
        "weights": weights_digest(folder, gguf_file, adapter),
        "tokenizer": digest(vocabulary),
        "template": digest([tokenizer.chat_template, dict(template)] if template else tokenizer.chat_template),
        **modified,
    }


def weights_digest(folder: str, gguf_file: str | None = None, adapter: str | None = None) -> str:
    """Of sizes and sampled bytes of the files of a folder, or of one in it, and of an adapter's."""
    files = [Path(folder) / gguf_file] if gguf_file else _weight_files(Path(folder))
    if adapter is not None:
        # The configuration holds the factor that the adapter's weights are multiplied by.
        files += [*_weight_files(Path(adapter)), *Path(adapter).glob("adapter_config.json")]
    return digest([[file.name, _sampled_digest(file)] for file in files])


def _weight_files(folder: Path) -> list[Path]:
    """The files that are loaded: safetensors if there are any, else GGUF, else pickled weights."""
    for pattern in _WEIGHT_FILES:
        if files := sorted(folder.glob(pattern)):
            return files
    return []


def _sampled_digest(path: Path) -> str:
    """SHA-256 over a file's size and evenly spaced blocks: seconds for a 70B target, and any retraining shows."""
    size = path.stat().st_size
    result = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for index in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            result.update(file.read(_SAMPLE_BYTES))
    return result.hexdigest()


def _give_back() -> None:
    """Hand freed memory back to the system, which the C library keeps otherwise; only glibc has this call."""
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _merge_adapter(model: PreTrainedModel, adapter: str) -> PreTrainedModel:
    from peft import PeftModel  # slow to import and seldom needed

    try:
        return PeftModel.from_pretrained(model, adapter).merge_and_unload()
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"The adapter {adapter} does not fit the target ({reason}); correct target.adapter=."
        ) from error


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends an answer: the generation config's, else the tokenizer's."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)
