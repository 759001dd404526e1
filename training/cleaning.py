"""Cleaning: which conversations are set aside although they can be read, and what is blacked out in the others.

Near duplicates are conversations that share most of their text: the share of the different runs of five characters
that two have in common (Jaccard). MinHash with locality-sensitive hashing (datasketch; Broder 1997) finds candidates
without comparing all with all, and may miss a pair at the very threshold; the share itself is then counted exactly.

Redaction replaces e-mail addresses, telephone numbers (phonenumbers, which knows the numbering plan of each country)
and keys (the patterns of detect-secrets, and a few it lacks) by a mark. It finds what has the form of such a thing;
names, addresses and the like stay.

The module knows neither rows nor files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from heads.artifact import UserError
from training.messages import THOUGHTS
from training.traffic import Conversation, Message, hash_of

_RUN, _PERMUTATIONS = 5, 128
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,62})\.){1,8}[a-zA-Z]{2,24}\b")
_KEYS = (
    re.compile(r"-----BEGIN ([A-Z ]{0,40})PRIVATE KEY-----.{0,20000}?(?:-----END \1PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"\bsk-(?:ant-|proj-|or-)?[A-Za-z0-9_-]{32,200}"),
    re.compile(r"\bhf_[A-Za-z0-9]{30,60}\b"),
    re.compile(r"\bAIza[A-Za-z0-9_-]{35}"),
    re.compile(r"\bgithub_pat_[A-Za-z0-9_]{30,100}\b"),
)
_DETECTORS = ("AWSKeyDetector", "AzureStorageKeyDetector", "DiscordBotTokenDetector", "GitHubTokenDetector") + (
    *("GitLabTokenDetector", "JwtTokenDetector", "OpenAIDetector", "PypiTokenDetector", "SendGridDetector"),
    *("SlackDetector", "SquareOAuthDetector", "StripeDetector", "TelegramBotTokenDetector", "TwilioKeyDetector"),
)
KINDS = ("emails", "phones", "keys")


@dataclass(frozen=True, kw_only=True)
class Cleaning:
    """What is kept. shortest, longest: characters of all messages together; near_duplicates: the similarity, above 0
    and at most 1, from which a later conversation is set aside; empty_answers: whether a row stays whose logged
    answer is empty; redact: which of KINDS are blacked out; phone_region: the country, such as US, whose telephone
    numbers are found also without a country code. Raises UserError when a value is not allowed."""

    shortest: int | None = None
    longest: int | None = None
    near_duplicates: float | None = None
    empty_answers: bool = True
    redact: Sequence[str] = ()
    phone_region: str | None = None

    def __post_init__(self) -> None:
        for name, bound in (("shortest", self.shortest), ("longest", self.longest)):
            if bound is not None and bound < 1:
                raise UserError(f"traffic.{name}={bound} is not possible; give 1 character or more, or null.")
        if self.near_duplicates is not None and not 0 < self.near_duplicates <= 1:
            raise UserError(
                f"traffic.near_duplicates={self.near_duplicates} is no similarity; choose one above 0 and at most 1, "
                f"such as 0.9, or null."
            )
        if unknown := [kind for kind in self.redact if kind not in KINDS]:
            raise UserError(f"traffic.redact={unknown} is unknown; choose from {', '.join(KINDS)}, or [] for nothing.")
        if self.phone_region is not None:
            from phonenumbers import SUPPORTED_REGIONS

            if self.phone_region not in SUPPORTED_REGIONS:
                raise UserError(
                    f"traffic.phone_region={self.phone_region} is no country; give two letters such as US, or null."
                )

    def in_force(self) -> list[str]:
        """The settings that are not as usual. All work on text."""
        usual, own = vars(Cleaning()), {**vars(self), "redact": tuple(self.redact)}
        return [name for name, value in own.items() if value != usual[name]]

    def length_problem(self, conversation: Conversation) -> str | None:
        """Why a conversation is too short or too long, if it is."""
        characters = conversation.characters()
        if self.shortest is not None and characters < self.shortest:
            return f"shorter than traffic.shortest={self.shortest} characters"
        if self.longest is not None and characters > self.longest:
            return f"longer than traffic.longest={self.longest} characters"
        return None

    def redactor(self) -> Callable[[str], str] | None:
        """What blacks out one text, None where nothing is to be."""
        makers = {"emails": lambda: _black_out_emails, "keys": _key_finder, "phones": self._phone_finder}
        # Keys first: parts of them look like telephone numbers. The order of KINDS decides nothing.
        steps = [makers[kind]() for kind in ("keys", "emails", "phones") if kind in self.redact]
        if not steps:
            return None

        def redact(text: str) -> str:
            for step in steps:
                text = step(text)
            return text

        return redact

    def _phone_finder(self) -> Callable[[str], str]:
        from phonenumbers import PhoneNumberMatcher

        def black_out(text: str) -> str:
            for found in reversed(list(PhoneNumberMatcher(text, self.phone_region))):
                text = f"{text[: found.start]}[phone]{text[found.end :]}"
            return text

        return black_out


class NearDuplicates:
    """Remembers conversations, and says which of them a new one nearly repeats."""

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHashLSH

        self._threshold = threshold
        self._index = MinHashLSH(threshold=threshold, num_perm=_PERMUTATIONS) if threshold < 1 else None
        self._texts: dict[str, str] = {}
        self._exact: dict[str, str] = {}

    def earlier(self, conversation: Conversation) -> tuple[str, float] | None:
        """(id, similarity) of the earlier conversation that is most like this one, if it is that similar; a
        conversation without one is remembered."""
        from datasketch import MinHash

        text = _normalised(conversation)
        if (same := self._exact.get(text)) is not None:
            return same, 1.0
        if self._index is None:
            self._exact[text] = conversation.id
            return None
        runs, hashed = _runs(text), MinHash(num_perm=_PERMUTATIONS, hashfunc=crc32)
        hashed.update_batch([run.encode() for run in runs])
        best = (0.0, "")
        for name in sorted(self._index.query(hashed)):
            other = _runs(self._texts[name])
            best = max(best, (len(runs & other) / len(runs | other), name))
        if best[0] >= self._threshold:
            return best[1], best[0]
        self._index.insert(conversation.id, hashed)
        self._exact[text], self._texts[conversation.id] = conversation.id, text
        return None


def redacted(value: Any, redact: Callable[[str], str]) -> Any:
    """A JSON value with all its texts blacked out; names of fields stay, also where a JSON schema lists them."""
    if isinstance(value, dict):
        names = ("required",) if isinstance(value.get("properties"), dict) else ()
        return {key: item if key in names else redacted(item, redact) for key, item in value.items()}
    if isinstance(value, list):
        return [redacted(item, redact) for item in value]
    return redact(value) if isinstance(value, str) else value


def redacted_message(message: Message, redact: Callable[[str], str]) -> Message:
    """What is said and what is called with; the ids and names that join a call, its result and its tool stay."""
    said = {**message, **{name: redact(message[name]) for name in ("content", *THOUGHTS) if name in message}}
    if "tool_calls" in message:
        said["tool_calls"] = [
            {**call, "function": {**function, "arguments": redacted(function["arguments"], redact)}}
            for call in message["tool_calls"]
            for function in [call["function"]]
        ]
    return said


def redacted_tool(tool: dict[str, Any], redact: Callable[[str], str]) -> dict[str, Any]:
    """A tool's schema with its texts blacked out, but for what calls refer to: its name and those of its parameters."""
    schema: dict[str, Any] = redacted(tool, redact)
    return {**schema, "function": {**schema["function"], "name": tool["function"]["name"]}}


def redacted_id(name: str, redact: Callable[[str], str]) -> str:
    """An id; one that would be blacked out becomes a hash, since several would become one and the same."""
    return name if redact(name) == name else f"redacted-{hash_of('redacted', name)[:24]}"


def _normalised(conversation: Conversation) -> str:
    """All its messages, without the differences that mean nothing: case and white space."""
    said = (message["content"] for turn in conversation.turns for message in turn)
    return "\n".join(" ".join(text.casefold().split()) for text in said)


def _runs(text: str) -> set[str]:
    return {text[begin : begin + _RUN] for begin in range(max(1, len(text) - _RUN + 1))}


def _black_out_emails(text: str) -> str:
    return _EMAIL.sub("[email]", text) if "@" in text else text


def _key_finder() -> Callable[[str], str]:
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    known: Any = get_mapping_from_secret_type_to_class()
    detectors = [detector() for detector in known.values() if detector.__name__ in _DETECTORS]

    def black_out(text: str) -> str:
        for pattern in _KEYS:
            text = pattern.sub("[key]", text)
        found = {secret for detector in detectors for secret in detector.analyze_string(text) if secret}
        for secret in sorted(found, key=len, reverse=True):
            text = text.replace(secret, "[key]")
        return text

    return black_out
