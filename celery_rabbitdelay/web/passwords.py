"""Hashes of passwords, by scrypt."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from typing import Final

#: The cost of scrypt: 32 MiB and about a tenth of a second, as OWASP's Password Storage Cheat Sheet
#: recommends for r = 8 and p = 3.
N, R, P = 2**15, 8, 3

#: Bytes of memory that OpenSSL may use; its own bound is what N = 2**14 takes.
MEMORY: Final = 2**26

_HASH: Final = re.compile(
    r"scrypt:(\d{1,7}):(\d{1,2}):(\d{1,2}):([\w-]{22}==):([\w-]{43}=)", re.ASCII
)


def hash_password(password: str) -> str:
    """Return the hash of a password, with its salt and its cost."""
    salt = secrets.token_bytes(16)
    return ":".join(("scrypt", str(N), str(R), str(P), _text(salt), _text(_hash(password, salt))))


def is_hash(value: object) -> bool:
    """Return whether a value is what :func:`hash_password` returns, perhaps at another cost."""
    found = _HASH.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return False
    n, r, p = map(int, found.groups()[:3])
    return n.bit_count() == 1 < n and min(r, p) > 0 and 128 * r * (n + p + 2) <= MEMORY


def is_password(password: str, hashed: str) -> bool:
    """Return whether a password has a hash; it takes as long for a wrong one."""
    found = _HASH.fullmatch(hashed)
    if found is None:
        return False
    *cost, salted, hashed_as = found.groups()
    salt, wanted = base64.urlsafe_b64decode(salted), base64.urlsafe_b64decode(hashed_as)
    return hmac.compare_digest(_hash(password, salt, *map(int, cost)), wanted)


def _hash(password: str, salt: bytes, n: int = N, r: int = R, p: int = P) -> bytes:
    encoded = password.encode("utf-8", "surrogatepass")
    return hashlib.scrypt(encoded, salt=salt, n=n, r=r, p=p, maxmem=MEMORY, dklen=32)


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode()


#: The hash of a password that nobody has: an unknown name takes as long as a wrong password.
NOBODY: Final = (
    "scrypt:32768:8:3:AAAAAAAAAAAAAAAAAAAAAA==:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
)
