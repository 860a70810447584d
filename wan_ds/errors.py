"""What a person can fix: every error that a user's typing or files can cause is one of these."""


class ConfigError(ValueError):
    """A setting is unknown, wrong or contradicts another one; the message names the key and what would
    work."""


class DataError(ValueError):
    """A clip, caption or dataset cannot be used; the message names the file and the rule."""


class CheckpointError(RuntimeError):
    """A checkpoint or a weights file is missing, incomplete or does not fit; the message names it."""


class TrainingError(RuntimeError):
    """Training cannot go on: it diverged, or a parameter does not train; the message names the expert."""
