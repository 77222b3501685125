"""gRPC plumbing shared by every server and client: channels, servers, TLS, errors.

Owns the one table between exception types and status codes, where tokens and certificates enter a
channel or a server, message size and keepalive settings. Must not know any particular service.

Wherever it takes credentials, a plain token stands for itself without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from contracts.credentials import Credentials, Tls, Token
from contracts.errors import (
    AuthError,
    BadInputError,
    ConflictError,
    DirtyProcessError,
    RetryError,
)
from contracts.roles import may_call

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CHUNK_BYTES = 1024 * 1024  # of a streamed file
DEADLINE_S = 30.0  # of a unary call

_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    # a restarted peer should be found within a second or two, not after an exponential minute
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.so_reuseport", 0),
]

# Both directions of the wire use this one table. Order matters: the first matching type wins.
_STATUS = (
    (AuthError, grpc.StatusCode.UNAUTHENTICATED),
    (AuthError, grpc.StatusCode.PERMISSION_DENIED),
    (BadInputError, grpc.StatusCode.INVALID_ARGUMENT),
    (DecodeError, grpc.StatusCode.INVALID_ARGUMENT),
    (ConflictError, grpc.StatusCode.ABORTED),
    (RetryError, grpc.StatusCode.UNAVAILABLE),
    (DirtyProcessError, grpc.StatusCode.DATA_LOSS),
    (FileNotFoundError, grpc.StatusCode.NOT_FOUND),
)


class RemoteInputError(BadInputError):
    """A peer refused what it was given; its sentence is kept as it was."""

    def __init__(self, sentence: str) -> None:
        ValueError.__init__(self, sentence)


def status_of(error: BaseException) -> grpc.StatusCode:
    """The status code that carries this exception over the wire."""
    for kind, code in _STATUS:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def error_of(error: grpc.RpcError) -> Exception:
    """The exception a status code stands for on the caller's side.

    A deadline, a cancellation or a lost connection is a RetryError.
    """
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = (error.details() if hasattr(error, "details") else str(error)) or code.name
    if code == grpc.StatusCode.INVALID_ARGUMENT:
        return RemoteInputError(details)
    if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return RetryError(f"no answer in time ({details})")
    for kind, status in _STATUS:
        if code == status:
            return kind(details)  # pyright: ignore[reportCallIssue]  BadInputError was above
    return RuntimeError(f"{code.name}: {details}")


@contextlib.contextmanager
def calling(address: str) -> Iterator[None]:
    """Turns RpcError into the project's exceptions, naming the peer."""
    try:
        yield
    except grpc.RpcError as error:
        raised = error_of(error)
        if isinstance(raised, RetryError | AuthError):
            raised = type(raised)(f"{address}: {raised}")
        raise raised from None


def token_metadata(credentials: Credentials | str) -> tuple[tuple[str, str], ...]:
    """For a call that brings the token itself, on a channel that doesn't add it."""
    token = Credentials.of(credentials).token.current()
    return (("authorization", f"Bearer {token}"),) if token else ()


class _AddToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def _details(self, details: Any) -> Any:
        extra = token_metadata(self._credentials)
        return details._replace(metadata=(*(details.metadata or ()), *extra))

    def intercept_unary_unary(self, continuation, client_call_details, request):
        return continuation(self._details(client_call_details), request)

    def intercept_unary_stream(self, continuation, client_call_details, request):
        return continuation(self._details(client_call_details), request)

    def intercept_stream_unary(self, continuation, client_call_details, request_iterator):
        return continuation(self._details(client_call_details), request_iterator)

    def intercept_stream_stream(self, continuation, client_call_details, request_iterator):
        return continuation(self._details(client_call_details), request_iterator)


def sync_channel(address: str, credentials: Credentials | str = "") -> grpc.Channel:
    """A blocking channel that carries the token on every call, encrypted if there is TLS.

    Raises BadInputError: TLS without a CA.
    """
    credentials = Credentials.of(credentials)
    _warn_of_plain_token(address, credentials)
    if credentials.tls:
        secure = _channel_credentials(credentials.tls)
        channel = grpc.secure_channel(address, secure, options=_OPTIONS)
    else:
        channel = grpc.insecure_channel(address, options=_OPTIONS)
    return grpc.intercept_channel(channel, _AddToken(credentials)) if credentials.token else channel


# grpc.aio files an interceptor under the first of its base classes, so each arity needs its own.
class _AioUnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, add: Callable[[Any], Any]) -> None:
        self._add = add

    async def intercept_unary_unary(self, continuation, client_call_details, request):
        return await continuation(self._add(client_call_details), request)


class _AioUnaryStream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, add: Callable[[Any], Any]) -> None:
        self._add = add

    async def intercept_unary_stream(self, continuation, client_call_details, request):
        return await continuation(self._add(client_call_details), request)


class _AioStreamUnary(grpc.aio.StreamUnaryClientInterceptor):
    def __init__(self, add: Callable[[Any], Any]) -> None:
        self._add = add

    async def intercept_stream_unary(self, continuation, client_call_details, request_iterator):
        return await continuation(self._add(client_call_details), request_iterator)


class _AioStreamStream(grpc.aio.StreamStreamClientInterceptor):
    def __init__(self, add: Callable[[Any], Any]) -> None:
        self._add = add

    async def intercept_stream_stream(self, continuation, client_call_details, request_iterator):
        return await continuation(self._add(client_call_details), request_iterator)


def aio_channel(
    address: str, credentials: Credentials | str = "", *, add_token: bool = True
) -> grpc.aio.Channel:
    """An asyncio channel that carries the token on every call, encrypted if there is TLS.

    Interceptors make an asyncio call copy its written messages through a generator; a stream that
    lives long and writes much does without: `add_token=False`, and `token_metadata` on the call.

    Raises BadInputError: TLS without a CA.
    """
    credentials = Credentials.of(credentials)
    _warn_of_plain_token(address, credentials)

    def add(details: Any) -> Any:
        extra = token_metadata(credentials)
        return details._replace(metadata=(*(details.metadata or ()), *extra))

    kinds = (_AioUnaryUnary, _AioUnaryStream, _AioStreamUnary, _AioStreamStream)
    interceptors = [kind(add) for kind in kinds] if add_token and credentials.token else []
    if credentials.tls:
        secure = _channel_credentials(credentials.tls)
        return grpc.aio.secure_channel(address, secure, options=_OPTIONS, interceptors=interceptors)
    return grpc.aio.insecure_channel(address, options=_OPTIONS, interceptors=interceptors)


def _channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    tls = tls.current()
    if tls.ca is None:  # gRPC would then trust every public CA
        raise BadInputError(
            "TLS of a client", expected="the CA that the server is verified by", found="none"
        )
    return grpc.ssl_channel_credentials(
        root_certificates=tls.ca, private_key=tls.key, certificate_chain=tls.certificate
    )


def _server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Each handshake is made with what the files hold then; streams that are open stay."""
    in_force = tls.current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal in_force
        if (now := tls.current()) is in_force:
            return None
        in_force = now
        return _server_configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(in_force),
        renewed,  # pyright: ignore[reportArgumentType]  None is what gRPC documents for no change
        require_client_authentication=in_force.ca is not None,
    )


def _server_configuration(tls: Tls) -> grpc.ServerCertificateConfiguration:
    if tls.certificate is None or tls.key is None:
        raise BadInputError("TLS of a server", expected="a certificate and its key", found="none")
    return grpc.ssl_server_certificate_configuration(
        [(tls.key, tls.certificate)], root_certificates=tls.ca
    )


def _warn_of_plain_token(address: str, credentials: Credentials) -> None:
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if credentials.tls is None and credentials.token and not _is_loopback(host):
        _warn_once(address)


@functools.cache  # channels are made again and again
def _warn_once(address: str) -> None:
    log.warning("the bearer token goes to %s in plain text: nothing encrypts it", address)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _CheckToken(grpc.aio.ServerInterceptor):
    """Refuses a call without a bearer token that may make it, before any message is read."""

    def __init__(self, token: Token) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        given = str(dict(handler_call_details.invocation_metadata or ()).get("authorization", ""))
        scheme, _, shown = given.partition(" ")
        role = self._token.role_of(shown) if scheme == "Bearer" else None
        method = handler_call_details.method
        if role is None:
            code = grpc.StatusCode.UNAUTHENTICATED
            found = "a different token" if given else "no token"
            details = f"bearer token: expected this server's, found {found}"
        elif not may_call(role, method):
            code = grpc.StatusCode.PERMISSION_DENIED
            details = f"bearer token: expected one that may call {method}, found a {role}'s"
            log.warning("refused: %s", details)
        else:
            return handler

        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
            await context.abort(code, details)
            yield None

        # of this arity for calls of all: the others would take in a whole message first
        return grpc.stream_stream_rpc_method_handler(refuse)


@contextlib.asynccontextmanager
async def answering(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Wraps the body of a servicer method: project exceptions become status codes.

    An exception outside the table is a bug: it is logged with its traceback and sent as INTERNAL.
    """
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        code = status_of(error)
        if code == grpc.StatusCode.INTERNAL:
            log.exception("unexpected error while answering a call")
        await context.abort(code, str(error))


async def start_server(
    address: str, credentials: Credentials | str, add: Callable[[grpc.aio.Server], None]
) -> tuple[grpc.aio.Server, int]:
    """Starts an asyncio server at host:port (port 0 picks one) and returns it with its port.

    `add` registers the servicers.

    Raises:
        BadInputError: not host:port, a port in use on any of the host's addresses, none of them
            an address of this machine, or TLS without a certificate.
    """
    credentials = Credentials.of(credentials)
    secure = _server_credentials(credentials.tls) if credentials.tls else None
    await check_listen(address)
    interceptors = [_CheckToken(credentials.token)] if credentials.token else []
    server = grpc.aio.server(options=_OPTIONS, interceptors=interceptors)
    add(server)
    try:
        port = (
            server.add_secure_port(address, secure) if secure else server.add_insecure_port(address)
        )
    except RuntimeError:
        port = 0
    if not port:  # somebody was faster
        raise BadInputError(f"listen address {address}", expected="a free port", found="it in use")
    await server.start()
    return server, port


async def check_listen(address: str) -> None:
    """Refuses what gRPC would let pass: it wraps port numbers, and one address of many is enough.

    Raises BadInputError as `start_server` does.
    """
    subject = f"listen address {address}"
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or (":" in bare) != (host == f"[{bare}]"):
        raise BadInputError(subject, expected="HOST:PORT or [IPV6]:PORT", found="something else")
    if not (port.isascii() and port.isdecimal() and len(port) < 6 and int(port) < 1 << 16):
        raise BadInputError(subject, expected="a port from 0 to 65535", found=port or "none")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            bare, int(port), type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError):
        raise BadInputError(
            subject, expected="a host name or address", found=f"no address of {bare!r}"
        ) from None
    refused = {_refusal(family, place) for family, *_, place in found}
    if errno.EADDRINUSE in refused:
        raise BadInputError(subject, expected="a free port", found="it in use")
    if 0 in refused:  # a machine without IPv6 still has 127.0.0.1 of localhost
        return
    if refused <= {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
        raise BadInputError(
            subject, expected="a host of this machine", found="not an address of this machine"
        )
    raise BadInputError(
        subject, expected="one that may be listened at", found=os.strerror(max(refused))
    )


def _refusal(family: int, place: Any) -> int:
    """The errno of binding there, 0 if it can be done."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            trial.bind(place)
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0
