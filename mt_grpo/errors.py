"""Errors that users can mend."""


class UserError(Exception):
    """Ends a command with one sentence: what is wrong, where, and how to mend it. Every other error is a bug."""


class UnsupportedModelError(UserError, ValueError):
    """The model cannot run over packed trees."""


class ConfigError(UserError, ValueError):
    """An option is wrong. The message is one sentence fit for the user."""
