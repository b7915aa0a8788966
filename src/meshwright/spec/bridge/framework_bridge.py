"""What a bridge gives back, in both directions, and the shape every bridge has."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, cast

import msgspec

from meshwright.errors import Problem
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model import Model


class ExportedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A layout, and a model where one was given, in another framework's words."""

    text: str
    """What the user pastes or saves; comments in it repeat the two lists below where the format
    has comments."""
    data: dict[str, Any]
    """The same as plain data."""
    unexpressed: tuple[Problem, ...] = ()
    """Every field whose value the target cannot hold, with what it does instead and a fix."""
    assumed: tuple[Problem, ...] = ()
    """What the target wants to be told and the layout does not say, with the value written."""


class ImportedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What another framework's settings mean here."""

    layout: Layout
    """The layout; fields that the target leaves open keep their defaults."""
    model: Model | None = None
    """The model, where the settings describe one in full."""
    sequence_length: int | None = None
    """Tokens per training sequence, where the settings say so."""
    ignored: tuple[str, ...] = ()
    """Settings that were understood and have no bearing on layout or model, such as `--lr`."""
    unknown: tuple[Problem, ...] = ()
    """Settings that bear on layout or model and that a `Layout` or `Model` cannot hold, and
    settings that this bridge does not know."""


class BridgeModule(Protocol):
    """What the package of a target offers."""

    def export_config(
        self,
        layout: Layout,
        model: Model | None = None,
        *,
        sequence_length: int | None = None,
        global_batch: int | None = None,
    ) -> ExportedConfig:
        """Write values in the target's words."""

    def import_config(
        self,
        given: str | Mapping[str, Any],
        *,
        gpus: int | None = None,
        name: str = "imported",
        vocab: int | None = None,
    ) -> ImportedConfig:
        """Read the target's words."""


class FrameworkBridge(msgspec.Struct, frozen=True, kw_only=True):
    """One target: how to write its settings and how to read them.

    The target's own package is loaded when it is first used: a command that only lists the
    targets stays quick.
    """

    name: str
    """What the command line calls it, and the package it lives in."""
    title: str
    """What people call its settings."""
    ending: str
    """Ending of a file that holds them."""

    def export_config(
        self,
        layout: Layout,
        model: Model | None = None,
        *,
        sequence_length: int | None = None,
        global_batch: int | None = None,
    ) -> ExportedConfig:
        """Return the values as text in the target's words, and everything it fails to say.

        `global_batch` is the batch of the workload; it is written where the layout has none.
        """
        return self._target().export_config(
            layout, model, sequence_length=sequence_length, global_batch=global_batch
        )

    def import_config(
        self,
        given: str | Mapping[str, Any],
        *,
        gpus: int | None = None,
        name: str = "imported",
        vocab: int | None = None,
    ) -> ImportedConfig:
        """Return the values that the text or data means.

        `gpus` is the number of processes the launcher starts, which most targets leave out of
        their settings; without it the data-parallel degree is read where the settings give it
        and is the least that fits otherwise. `name` becomes the name of the model. `vocab` is the
        size of the tokenizer's vocabulary, for settings that describe a model and leave it out;
        a target without a model has no use for it.
        """
        return self._target().import_config(given, gpus=gpus, name=name, vocab=vocab)

    def _target(self) -> BridgeModule:
        module = import_module(f"meshwright.spec.bridge.{self.name}")
        return cast(BridgeModule, module)
