"""Encryption of bodies: AES-256-GCM, with the keys of the project's keyring or of a subject.

A message names its key in the header ``encryption-key`` and is bound to its id: its body in another message does not
open. A subject (a customer, a patient) has a data key of its own in the table of this app, wrapped by the keyring. To
destroy it is to erase all that was encrypted for that subject, wherever copies of it lie. Needs the extra
``queueapp[encryption]``.
"""

from .cipher import register
from .keyring import from_environment
from .subject_keys import erase_subject, rewrap_subject_keys

__all__ = ["erase_subject", "from_environment", "register", "rewrap_subject_keys"]
