"""Regular expressions of LIKE: searched anywhere in a text, case-sensitive, by RE2.

``google-re2`` (Google's own binding; the last release, of November 2025, has wheels for every Python that we support) and
not ``re``, because patterns come from subscribers and bodies from untrusted senders: RE2 takes time in proportion to the text,
whatever the pattern, and a program of bounded size. With ``re`` a dozen characters suffice to hang a process, and refusing
nested quantifiers does not cure that: ``.*.*.*.*x`` has none. What RE2 has not, back-references and look-around, is refused
by it when the expression is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import re2

from .limits import MAX_PATTERN_MEMORY, MAX_PATTERN_STEPS

Found = Callable[[str], bool | None]

#: A pattern without any of these is a plain text, which ``in`` finds ten times as fast.
_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")


def pattern(text: str) -> Found:
    """Whether a text has it somewhere; NULL where the search could take too long. Raises ValueError with the reason."""
    if not _SPECIAL.search(text):
        return lambda searched: text in searched
    options = re2.Options()
    options.max_mem = MAX_PATTERN_MEMORY
    options.never_capture = True
    options.log_errors = False
    try:
        compiled = re2.compile(text, options=options)
    except re2.error as error:
        raise ValueError(_reason(error)) from None
    search, longest = compiled.search, MAX_PATTERN_STEPS // max(compiled.programsize, 1)

    def found(searched: str) -> bool | None:
        # As bytes: the binding would count the characters up to every match. A body may have half a surrogate pair.
        data = searched.encode("utf-8", "surrogatepass")
        return search(data) is not None if len(data) <= longest else None

    return found


def _reason(error: Exception) -> str:
    """What RE2 says, on one line: it quotes the pattern."""
    said = error.args[0] if error.args else ""
    text = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
    return "".join(sign if sign.isprintable() else " " for sign in text[:100])
