"""Everything that an error tells whoever logs it."""

import traceback


def told(error: BaseException) -> str:
    """Return all that may be printed of an error, and of those that have led to it.

    Also of those that Python hides (``raise ... from None``), since not every reporter does.
    """
    texts = ["".join(traceback.format_exception(error))]
    while True:
        texts += [str(error), repr(error), repr(error.args), repr(vars(error))]
        cause = error.__cause__ or error.__context__
        if cause is None:
            return "\n".join(texts)
        error = cause
