"""Encrypting and decrypting a body: a nonce of 12 random bytes, then the ciphertext with its tag."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

from ..errors import QueueError, UndecodableMessage
from ..messages.body_filters import Step, innermost, register_wrapping
from ..messages.headers import CONTENT_TYPE, ENCRYPT_FOR, ENCRYPTION_KEY
from . import keyring, subject_keys

NONCE = 12


class Encrypted:
    """AES-256-GCM. The tag covers the message's id, the id of the key and what the body was before."""

    name, suffix, secret = "encrypted", "+aes256gcm", True

    def sealer(self, headers: dict[str, str], using: str) -> Step:
        subject, held = headers.get(ENCRYPT_FOR), headers.get(ENCRYPTION_KEY, "")
        if subject is not None:
            name, key = subject_keys.key_for(subject, using)
        elif held.startswith(subject_keys.PREFIX):  # the copy of a message of a subject is that subject's
            name, key = held, subject_keys.key_of(held, using)
        else:
            name, key = keyring.current()
        headers[ENCRYPTION_KEY] = name
        about, cipher = _about(headers), aes(key)

        def seal(body: bytes, identity: uuid.UUID) -> bytes:
            nonce = os.urandom(NONCE)
            sealed: bytes = nonce + cipher.encrypt(nonce, body, identity.bytes + about)
            return sealed

        return seal

    def opener(self, headers: Mapping[str, str], using: str) -> Step:
        name = headers.get(ENCRYPTION_KEY)
        if not name:
            raise UndecodableMessage(f"The body is encrypted, and no header {ENCRYPTION_KEY!r} says with which key.")
        key = subject_keys.key_of(name, using) if name.startswith(subject_keys.PREFIX) else keyring.key_of(name)
        about, cipher = _about(headers), aes(key)

        def unseal(body: bytes, identity: uuid.UUID) -> bytes:
            try:
                plain: bytes = cipher.decrypt(body[:NONCE], body[NONCE:], identity.bytes + about)
            except Exception as error:  # InvalidTag, or a body that is too short
                raise UndecodableMessage(
                    "The encrypted body does not open: it, its id or its headers are not what was sent."
                ) from error
            return plain

        return unseal


def _about(headers: Mapping[str, str]) -> bytes:
    """What the tag covers beside the id. (When a body is sealed its content type has no suffix yet, when it is opened
    it has.)"""
    return f"|{headers[ENCRYPTION_KEY]}|{innermost(headers.get(CONTENT_TYPE, ''))}".encode()


def aes(key: bytes) -> Any:
    """The cipher of a key. Raises QueueError without the extra."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise QueueError("Encrypted bodies need the extra: pip install 'queueapp[encryption]'.") from error
    return AESGCM(key)


def register() -> None:
    """Called at start: from now on messages may be encrypted."""
    subject_keys.cipher = aes
    register_wrapping(Encrypted())
