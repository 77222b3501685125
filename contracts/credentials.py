"""What a process shows its peers and asks of them: a bearer token, and certificates for TLS.

Owns reading both from files, following files that change, and whose token it is. Must not know
channels or servers. A secret of it is in no log line, no error and no repr.
"""

from __future__ import annotations

import enum
import hmac
import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from contracts.errors import BadInputError

log = logging.getLogger(__name__)

GRACE_S = 60.0  # a token that was replaced still passes that long

_Path = str | Path | None


class Role(enum.StrEnum):
    """Whose token it is. What each may call stands in `contracts.roles`."""

    ALL = "all"
    SAMPLER = "sampler"
    TRAINER = "trainer"
    AGENT = "agent"
    HARNESS = "harness"


def read_tokens(path: _Path) -> dict[str, Role]:
    """The bearer tokens in a file (none without one), never logged.

    A line is a token of every right, or begins with its role, as in `sampler TOKEN`.

    Raises:
        BadInputError: what no header can carry, a token below 16 characters, one that stands there
            twice, two of every right.
    """
    if not path:
        return {}
    rule = f"token file {path}"
    try:
        lines = Path(path).read_bytes().decode("ascii").strip().split("\n")
    except UnicodeDecodeError:
        lines = ["\0"]
    tokens: dict[str, Role] = {}
    for line in lines:
        role, _, token = line.strip().rpartition(" ")
        known = role in set(Role) - {Role.ALL}
        unreadable = not token.isprintable() or (role and not known)
        if unreadable or (not role and Role.ALL in tokens.values()):
            raise BadInputError(
                rule,
                expected="one line of ASCII text, or several that begin with sampler, trainer, "
                "agent or harness",
                found="something else",
            )
        if len(token) < 16:
            raise BadInputError(rule, expected="at least 16 characters", found=f"{len(token)}")
        if token in tokens:
            raise BadInputError(rule, expected="tokens that differ", found="one twice")
        tokens[token] = Role(role) if known else Role.ALL
    return tokens


class Token:
    """A process's bearer tokens, false without one. Those from a file follow it. Thread-safe.

    A change that leaves no usable token in the file is logged, and the tokens stay.
    """

    def __init__(
        self, text: str = "", *, file: _Path = None, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` gives seconds since the epoch, as the file's times do. As `read_tokens` raises.

        A `text` is a token of every right.
        """
        self._file = Path(file) if file else None
        self._clock = clock
        self._seen = _state(self._file)
        self._roles = read_tokens(file) if file else {text: Role.ALL} if text else {}
        self._previous: dict[str, Role] = {}
        self._previous_until = 0.0
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._roles)  # a file never changes that

    def current(self) -> str:
        """The token to show now, the first in the file; "" for none."""
        with self._lock:
            self._follow()
            return next(iter(self._roles), "")

    def role_of(self, shown: str) -> Role | None:
        """Whose token it is; None if nobody's.

        One that was replaced keeps its role until GRACE_S after the change.
        """
        with self._lock:
            self._follow()
            valid = dict(self._roles)
            if self._clock() < self._previous_until:
                valid = self._previous | valid
        found = None
        for text, role in valid.items():
            if hmac.compare_digest(shown.encode(), text.encode()):
                found = role
        return found

    def accepts(self, shown: str) -> bool:
        """Whether it is a token of every right."""
        return self.role_of(shown) == Role.ALL

    def _follow(self) -> None:
        if self._file is None or (state := _state(self._file)) == self._seen:
            return
        self._seen = state
        try:
            roles = read_tokens(self._file)
        except (BadInputError, OSError) as error:
            log.warning("the token stays as it was: %s", error)
            return
        if roles == self._roles:
            return
        now = self._clock()
        changed = min(state[0] / 1e9, now) if state else now
        self._previous, self._previous_until = self._roles, changed + GRACE_S
        self._roles = roles
        log.info("token file %s: a new token", self._file)


def _state(file: _Path) -> tuple[int, int, int] | None:
    """What differs when a file was written or replaced; None when it is not there."""
    try:
        # not mtime: a file that is moved here keeps that of its writing
        found = Path(file).stat() if file else None
    except OSError:
        return None
    return (found.st_ctime_ns, found.st_ino, found.st_size) if found else None


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Certificates as PEM text.

    A server needs certificate and key; with `ca` it asks its clients for certificates of that CA.
    A client needs `ca`, by which it verifies the server and its host name; with certificate and
    key it presents itself.
    """

    ca: bytes | None = field(default=None, repr=False)
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    files: _TlsFiles | None = field(default=None, repr=False)

    def current(self) -> Tls:
        """What its files hold by now; the same object until they change."""
        return self.files.current() if self.files else self


class _TlsFiles:
    """Certificate files, followed. Thread-safe: a handshake has a thread of its own.

    A change that leaves nothing usable is logged, and what was stays: a certificate is in place
    before its key is, or the other way round.
    """

    def __init__(self, *, ca: _Path, certificate: _Path, key: _Path) -> None:
        """Raises as `read_tls`."""
        self._ca, self._certificate, self._key = ca, certificate, key
        self._lock = threading.Lock()
        self._seen = self._states()
        self._tls = self._read()

    def current(self) -> Tls:
        with self._lock:
            if (states := self._states()) != self._seen:
                self._seen = states
                try:
                    self._tls = self._read()
                    log.info("certificate file %s: taken over", self._certificate or self._ca)
                except (BadInputError, OSError) as error:
                    log.warning("the certificates stay as they were: %s", error)
            return self._tls

    def _states(self) -> list[tuple[int, int, int] | None]:
        return [_state(file) for file in (self._ca, self._certificate, self._key)]

    def _read(self) -> Tls:
        return _read_pems(ca=self._ca, certificate=self._certificate, key=self._key, files=self)


def read_tls(*, ca: _Path = None, certificate: _Path = None, key: _Path = None) -> Tls | None:
    """The PEM files given, None for none.

    Raises:
        BadInputError: a file that can't be read, is not what it should be, or a certificate and a
            key that don't belong together.
    """
    if not (ca or certificate or key):
        return None
    return _TlsFiles(ca=ca, certificate=certificate, key=key).current()


def _read_pems(*, ca: _Path, certificate: _Path, key: _Path, files: _TlsFiles) -> Tls:
    if bool(certificate) != bool(key):
        raise BadInputError(
            "TLS files",
            expected="a certificate and its key, or neither",
            found=f"only {certificate or key}",
        )
    tls = Tls(
        ca=_read_pem(ca, "CA file", "CERTIFICATE"),
        certificate=_read_pem(certificate, "certificate file", "CERTIFICATE"),
        key=_read_pem(key, "key file", "PRIVATE KEY"),
        files=files,
    )
    if b"ENCRYPTED" in (tls.key or b""):
        raise BadInputError(f"key file {key}", expected="a key without a password", found="one")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if ca:
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError as error:
            raise BadInputError(
                f"CA file {ca}", expected="certificates in PEM", found=_reason(error)
            ) from None
    if certificate and key:
        try:
            context.load_cert_chain(certificate, key, password="")
        except ssl.SSLError as error:
            raise BadInputError(
                f"key file {key}",
                expected=f"the private key of certificate {certificate}",
                found=_reason(error),
            ) from None
    return tls


def _read_pem(path: _Path, what: str, label: str) -> bytes | None:
    if not path:
        return None
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise BadInputError(
            f"{what} {path}", expected="a readable file", found=error.strerror or "none"
        ) from None
    if f"{label}-----".encode() not in data:
        raise BadInputError(
            f"{what} {path}", expected=f"a PEM block {label}", found=f"none in {len(data)} bytes"
        )
    return data


def _reason(error: ssl.SSLError) -> str:
    """OpenSSL's words for it, without a place in its sources or a byte of the file."""
    if error.reason == "KEY_VALUES_MISMATCH":
        return "another one"
    return (error.reason or "damaged text").lower().replace("_", " ")


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """How a process and its peers know each other; without anything, they don't."""

    token: Token = field(default_factory=Token, repr=False)
    tls: Tls | None = None

    @classmethod
    def of(cls, given: Credentials | str) -> Credentials:
        """Credentials as they are; a plain token as credentials without TLS."""
        return cls(token=Token(given)) if isinstance(given, str) else given


def read_credentials(
    token_file: _Path = None,
    *,
    tls_ca: _Path = None,
    tls_cert: _Path = None,
    tls_key: _Path = None,
) -> Credentials:
    """Credentials from the files that a command line or a run file names. Raises BadInputError."""
    return Credentials(
        token=Token(file=token_file), tls=read_tls(ca=tls_ca, certificate=tls_cert, key=tls_key)
    )
