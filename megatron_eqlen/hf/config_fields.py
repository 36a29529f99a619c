"""Checked access to the fields of a config.json, without default values."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """config.json that cannot be built here; the message names the file and the field."""


@dataclass(frozen=True)
class Fields:
    """Fields of a config.json. Errors name the file; unread fields are remembered."""

    raw: Mapping[str, Any]
    where: str
    read: set[str] = field(default_factory=set)

    def get(self, name: str, kind: type) -> Any:
        """Return a required field; numbers must be positive."""
        if name not in self.raw:
            raise ConfigError(f"{self.where}: missing field {name!r}")
        return self._checked(name, kind)

    def get_or_null(self, name: str, kind: type, null: Any) -> Any:
        """Return a required field that may be null, which means ``null``."""
        self.read.add(name)
        return null if name in self.raw and self.raw[name] is None else self.get(name, kind)

    def optional(self, name: str, kind: type, default: Any) -> Any:
        """Return a field, or ``default`` if it is missing or null."""
        return default if self.raw.get(name) is None else self._checked(name, kind)

    def _checked(self, name: str, kind: type) -> Any:
        self.read.add(name)
        value = self.raw[name]
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ConfigError(f"{self.where}: {name}: expected {kind.__name__}, found {value!r}")
        if kind is int and not 0 < value < 1 << 63:
            raise ConfigError(f"{self.where}: {name}: expected a positive number, found {value}")
        if kind is float and not 0 <= value <= sys.float_info.max:
            raise ConfigError(f"{self.where}: {name}: expected a finite number from 0, found {value}")
        return kind(value)

    def one_of(self, name: str, other: str, kind: type) -> Any:
        """Return a field with two names, of which at least one must be present."""
        found = [self.get(key, kind) for key in (name, other) if key in self.raw]
        if not found:
            raise ConfigError(f"{self.where}: missing field {name!r} (or {other!r})")
        if found[0] != found[-1]:
            raise ConfigError(f"{self.where}: {name} is {found[0]} but {other} is {found[-1]}")
        return found[0]

    def warn_of_unread(self, harmless: Collection[str]) -> None:
        """Warn of fields that were not read and are not known to be ``harmless``."""
        unread = sorted(self.raw.keys() - self.read - set(harmless))
        if unread:
            warnings.warn(f"{self.where}: unknown fields are ignored: {', '.join(unread)}", stacklevel=3)
