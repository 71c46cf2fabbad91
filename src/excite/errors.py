"""Everything a user can do wrong ends in an `ExciteError` that says what was expected, what came and what to do."""


class ExciteError(Exception):
    """Base of all errors that Excite raises on purpose. The command line prints it as one line."""


class InputError(ExciteError, ValueError):
    """An argument, an input tensor, a label or a setting is not what the function takes."""


class ModelError(ExciteError):
    """The model cannot be traced, excited or attacked: no affine layer, no gradient path, an operation out of reach."""


class RunError(ExciteError):
    """A run folder, checkpoint or metrics database is missing, foreign, corrupt or not writable."""


class DataError(ExciteError):
    """A dataset is missing, could not be fetched, or does not have the expected hash or layout."""


class TrainingStopped(ExciteError):
    """Training met a non-finite loss or could not write; the last good checkpoint is kept."""


def one_line(error: BaseException) -> str:
    """An error as one line: its message, or its kind if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
