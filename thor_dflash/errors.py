"""Every error thor-dflash raises on purpose.

Message form: `<what> must be <rule> (got <value>)`, naming the field, file or tensor. The command
line prints one line and exits 2; nothing else leaves a floor.
"""


class ThorError(Exception):
    """Root of the tree."""


class ConfigError(ThorError):
    """An option, a TOML file or a --set does not describe a configuration."""


class CheckpointError(ThorError):
    """A checkpoint directory is not what its config says, or is not understood."""


class PackageError(ThorError):
    """A package directory is damaged, of another version, or does not fit this machine."""


class EngineError(ThorError):
    """A graph, a binding or the device refused."""


class TransactionError(ThorError):
    """A step used out of order. Always a bug in the caller."""


class RequestError(ThorError):
    """A request this session cannot serve. Nothing was decoded."""


class ModelFault(ThorError):
    """The model produced no usable token (NaN, infinity, or nothing left to choose)."""
