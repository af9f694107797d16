"""The error for what a user can mend: flags, files, the environment, arguments of a function."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake of the user. Its text names what is wrong, the rule and the remedy, and stands alone: no traceback is needed.

    Any other ValueError is a bug of this program.
    """
