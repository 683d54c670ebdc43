"""The primitives behind masked sums, all of them of the packages cryptography and pycryptodome.

X25519 agrees on keys, HKDF-SHA256 derives them, AES-256 in counter mode makes masks of them,
AES-256-GCM seals what clients send each other through the server, SHA-256 commits to a seed, and
Shamir's scheme over GF(2^128) splits one. Every secret is 16 or 32 bytes of the operating system's
generator and serves in one sum only. This is the only module that imports cryptography.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from random import SystemRandom
from typing import Any, Final

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256, Hash
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedipw.private.quantise import Words

SEED: Final = 16  # bytes of a seed that is split into shares
KEY: Final = 32  # bytes of a key, public ones included
SHARE: Final = 16  # bytes of a share of a seed
_NONCE: Final = 12  # of AES-GCM
_SUBSETS: Final = 40  # of shares that are tried at random where single ones left out do not help


def new_seed() -> bytes:
    """Return a fresh secret of 16 bytes."""
    return os.urandom(SEED)


def derived(secret: bytes, about: bytes) -> bytes:
    """Return a key of 32 bytes for one use, which ``about`` names (HKDF-SHA256)."""
    return HKDF(algorithm=SHA256(), length=KEY, salt=None, info=b"fedipw/1/" + about).derive(secret)


def public_key(seed: bytes) -> bytes:
    """Return the X25519 public key of a seed.

    >>> len(public_key(new_seed())), public_key(bytes(16)) == public_key(bytes(16))
    (32, True)
    """
    return _private(seed).public_key().public_bytes_raw()


def agreed_key(seed: bytes, other: bytes, about: bytes) -> bytes:
    """Return the key that two clients share, from one's seed and the other's public key.

    ValueError for a public key that is none.

    >>> a, b = new_seed(), new_seed()
    >>> agreed_key(a, public_key(b), b"x") == agreed_key(b, public_key(a), b"x")
    True
    """
    shared = _private(seed).exchange(X25519PublicKey.from_public_bytes(other))
    return derived(shared, about)


def is_public_key(key: bytes) -> bool:
    """Return whether keys can be agreed on with a public key.

    >>> is_public_key(bytes(32)), is_public_key(b"short"), is_public_key(public_key(new_seed()))
    (False, False, True)
    """
    try:
        agreed_key(new_seed(), key, b"check")
    except ValueError:
        return False
    return True


def _private(seed: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derived(seed, b"x25519"))


def mask(key: bytes, length: int, dtype: np.dtype[Any]) -> Words:
    """Return words that nobody without the key can tell from uniform ones (AES-256-CTR).

    A key makes one mask: the counter starts at zero.

    >>> mask(bytes(32), 2, np.dtype("<u4"))
    array([2025887196, 2307473570], dtype=uint32)
    """
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(length * dtype.itemsize)), dtype=dtype)


def sealed(key: bytes, text: bytes, about: bytes) -> bytes:
    """Return a text that only a holder of the key can read or make (AES-256-GCM)."""
    nonce = os.urandom(_NONCE)
    return nonce + AESGCM(key).encrypt(nonce, text, about)


def unsealed(key: bytes, box: bytes, about: bytes) -> bytes | None:
    """Return the text of a box, none if it was not made with this key for this use.

    >>> unsealed(bytes(32), sealed(bytes(32), b"text", b"a"), b"a")
    b'text'
    >>> unsealed(bytes(32), sealed(bytes(32), b"text", b"a"), b"another use")
    """
    try:
        return AESGCM(key).decrypt(box[:_NONCE], box[_NONCE:], about)
    except (InvalidTag, ValueError):
        return None


def commitment(seed: bytes, about: bytes) -> bytes:
    """Return what binds a client to a seed without telling it (SHA-256 of a random seed)."""
    digest = Hash(SHA256())
    digest.update(b"fedipw/1/commitment/" + about + seed)
    return digest.finalize()


def same(one: bytes, other: bytes) -> bool:
    """Return whether two secrets are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(one, other)


def shares_of(seed: bytes, threshold: int, holders: int) -> list[bytes]:
    """Return one share for each holder; any ``threshold`` of them give the seed, fewer nothing."""
    if threshold == 1:  # a line through one point
        return [seed] * holders
    return [bytes(share) for _, share in Shamir.split(threshold, holders, seed, ssss=False)]


def seed_of(shares: Mapping[int, bytes]) -> bytes:
    """Return the seed of exactly ``threshold`` shares by the place of their holders, from 0.

    >>> seed = new_seed()
    >>> shares = shares_of(seed, 2, 3)
    >>> seed_of({0: shares[0], 2: shares[2]}) == seed
    True
    """
    if len(shares) == 1:
        return next(iter(shares.values()))
    points = [(place + 1, share) for place, share in shares.items()]
    return bytes(Shamir.combine(points, ssss=False))


def checked_seed(
    shares: Mapping[int, bytes],
    threshold: int,
    fits: Callable[[bytes], bool],
    suspects: set[int],
) -> bytes | None:
    """Return the seed that fits, though some shares may be garbage; none if it is not found.

    ``shares`` are by the place of the holder. The first ``threshold`` of them are tried, then each
    left out in turn, then subsets at random. Holders left out of the set that fits, where another
    did not, become ``suspects`` and are tried last from then on.
    """
    if len(shares) < threshold:
        return None
    places = sorted(shares, key=lambda place: (place in suspects, place))
    for count, chosen in enumerate(_subsets(places, threshold)):
        seed = seed_of({place: shares[place] for place in chosen})
        if fits(seed):
            if count:
                suspects.update(set(places[:threshold]) - set(chosen))
            return seed
    return None


def _subsets(places: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    """Return sets of places to try, the likeliest first."""
    yield places[:size]
    if len(places) == size:
        return
    without = ([p for p in places if p != out][:size] for out in places[:size])
    rng = SystemRandom()
    yield from chain(without, (rng.sample(places, size) for _ in range(_SUBSETS)))
