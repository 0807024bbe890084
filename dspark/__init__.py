"""DSpark speculative decoding: a block drafter with Markov and confidence heads, end to end.

Importing the package needs the standard library only; each module imports what it uses.
"""

__version__ = "0.1.0"


class UserError(RuntimeError):
    """One line that names what is wrong and the mend; the command line prints it without a traceback."""
