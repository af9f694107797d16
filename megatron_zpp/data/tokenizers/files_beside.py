"""Reads the files beside a tokenizer.json: tokenizer_config.json, special_tokens_map.json and added_tokens.json."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.system.outside import Members, OutsideFile, is_encodable
from megatron_zpp.system.user_error import UserError

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("extra_special_tokens", "additional_special_tokens")  # the first one that a file has counts
NUMBERED = "added_tokens_decoder"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
ID = re.compile(r"[0-9]{1,9}")


class FilesBeside:
    """The tokens that the files name, with the ids that transformers gives them.

    Ids are in `added_tokens_decoder` of tokenizer_config.json, or else in added_tokens.json. The other tokens, such as `pad_token` and
    `extra_special_tokens`, get the next ids if tokenizer.json lacks them. Raises UserError for a file that is not like this.
    """

    def __init__(self, path: Path) -> None:
        """path: of the tokenizer.json."""
        self._path = path
        self._config = self._read("tokenizer_config.json")
        self._map = self._read("special_tokens_map.json")
        self._ids = self._read("added_tokens.json")

    @property
    def config(self) -> Mapping[str, Any]:
        """The members of tokenizer_config.json, with the text of chat_template.jinja as its `chat_template`."""
        template = self._file("chat_template.jinja")
        return self._config.values if template.is_missing() else {**self._config.values, "chat_template": template.text()}

    @property
    def splits_special_tokens(self) -> bool:
        """Whether special tokens in a text are plain text. Raises UserError if the file says neither."""
        name = "split_special_tokens"
        return self._config.values.get(name) is not None and self._config.switch(name)

    def spelling(self, name: str) -> str | None:
        """The token of a name such as `eos_token`, None if no file says it."""
        return next((_content(members, name) for members in (self._config, self._map) if members.values.get(name) is not None), None)

    def file_naming(self, name: str) -> Path:
        """The file that says the token of a name."""
        return self._path.with_name("tokenizer_config.json" if self._config.values.get(name) is not None else "special_tokens_map.json")

    def add_numbered_tokens(self, tokenizer: Any) -> None:
        """Adds the tokens that a file gives an id. Raises UserError if the tokenizer has another id for one of them."""
        for token_id, token, place in sorted(self._numbered_tokens(), key=lambda entry: entry[0]):
            tokenizer.add_tokens([token])
            found = tokenizer.token_to_id(token.content)
            if found != token_id:
                raise UserError(
                    f"{self._path.with_name(place)} gives {token.content!r} the id {token_id}, but with {self._path} it gets {found}; "
                    "give files of one tokenizer."
                )

    def add_named_tokens(self, tokenizer: Any) -> None:
        """Adds the other tokens that the files name. Those that the tokenizer lacks get the next ids, in the order of transformers.

        All that are named become special. Those that the tokenizer has keep their other rules.
        """
        known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        tokenizer.add_special_tokens([known.get(token.content, token) for token in self._named_tokens()])

    def _numbered_tokens(self) -> Iterator[tuple[int, Any, str]]:
        """Id and token, and the file that says so."""
        if self._config.values.get(NUMBERED) is not None:
            entries = self._config.members(NUMBERED)
            for token_id in entries.values:
                if not ID.fullmatch(token_id):
                    entries.refuse(token_id, "a member whose key is an id")
                yield int(token_id), _token(entries.members(token_id)), "tokenizer_config.json"
            return
        special = {token.content for token in self._named_tokens()}
        for spelling in self._ids.values:
            if not is_encodable(spelling):
                self._file("added_tokens.json").refuse(f"has {spelling!r}, which is not a string of Unicode characters")
            token = _added_token(spelling, special=spelling in special, normalized=spelling not in special)
            yield self._ids.count(spelling), token, "added_tokens.json"

    def _named_tokens(self) -> Iterator[Any]:
        # As in transformers, special_tokens_map.json does not count beside added_tokens_decoder.
        files = [self._config] if self._config.values.get(NUMBERED) is not None else [self._config, self._map]
        for name in NAMES:
            named = [members for members in files if members.values.get(name) is not None]
            if named:
                yield _special_token(named[0], name)
        for members in files:
            # Of other names, such as image_token.
            for name, value in members.values.items():
                if name.endswith("_token") and name not in NAMES and isinstance(value, str | dict):
                    yield _special_token(members, name)
        for members in files:
            # Beside a list of tokenizer_config.json, the second one of special_tokens_map.json does not count.
            counted = LISTS[:1] if members is self._map and not self._config.values.keys().isdisjoint(LISTS) else LISTS
            listed = next((name for name in counted if members.values.get(name)), None)
            if listed is not None:
                entries = members.members(listed) if isinstance(members.values[listed], dict) else members.by_place(listed)
                yield from (_special_token(entries, key) for key in entries.values)

    def _read(self, name: str) -> Members:
        file = self._file(name)
        # Such files hold "model_max_length": 10^30 for no limit.
        return Members({}, file) if file.is_missing() else file.members(has_any_numbers=True)

    def _file(self, name: str) -> OutsideFile:
        path = self._path.with_name(name)
        return OutsideFile(path, str(path), "copy it again.")


def _content(members: Members, name: str) -> str:
    """The spelling of a token, which is a string or an object with `content`."""
    value = members.values[name]
    if isinstance(value, dict):
        return members.members(name).text("content")
    if not isinstance(value, str):
        members.refuse(name, 'a string, or an object with "content"')
    return members.text(name)


def _special_token(members: Members, name: str) -> Any:
    flags = _flags(members.members(name)) if isinstance(members.values[name], dict) else {}
    return _added_token(_content(members, name), **{**flags, "special": True})


def _token(members: Members) -> Any:
    return _added_token(members.text("content"), **_flags(members))


def _flags(members: Members) -> dict[str, bool]:
    return {flag: members.switch(flag) for flag in FLAGS if flag in members}


def _added_token(content: str, **flags: bool) -> Any:
    from tokenizers import AddedToken

    return AddedToken(content, **flags)
