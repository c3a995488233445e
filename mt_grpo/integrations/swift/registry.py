"""Schedulers, environments and rewards by name; `external_plugins` add to them by assignment."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mt_grpo.errors import ConfigError
from mt_grpo.imports import check_name
from mt_grpo.integrations.swift.orm import ORM, Accuracy, register_orm
from mt_grpo.integrations.swift.reward_models import DefaultRMPlugin, register_plugin
from mt_grpo.integrations.swift.scheduler import MultiTurnScheduler
from mt_grpo.integrations.swift.types import Env


class Names(dict[str, Any]):
    """
    Classes by name: `multi_turns["mine"] = Mine`.

    Args:
        what (`str`): What one of them is, for errors.
        base (`type`): What each is a subclass of.
        added (`Callable`, *optional*): Called with the name and the class of each.
    """

    def __init__(self, what: str, base: type, added: Callable[[str, type], None] | None = None) -> None:
        super().__init__()
        self._what, self._base, self._added = what, base, added

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name, self._what)
        if not (inspect.isclass(value) and issubclass(value, self._base)):
            raise ConfigError(
                f"The {self._what} {name!r} is {value!r}, which is no subclass of {self._base.__name__}: subclass it, "
                "and import that from `mt_grpo.integrations.swift`."
            )
        if self._added is not None:
            self._added(name, value)
        super().__setitem__(name, value)


multi_turns = Names("scheduler", MultiTurnScheduler)
envs = Names("environment of the gym scheduler", Env)
orms = Names("reward", ORM, register_orm)
orms["accuracy"] = Accuracy
rm_plugins = Names("plugin of reward models", object, register_plugin)
rm_plugins["default"] = DefaultRMPlugin
