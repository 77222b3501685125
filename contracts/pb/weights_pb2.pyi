from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FileEntry(_message.Message):
    __slots__ = ("name", "num_bytes", "checksum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_bytes: int
    checksum: str
    def __init__(self, name: _Optional[str] = ..., num_bytes: _Optional[int] = ..., checksum: _Optional[str] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("content",)
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    def __init__(self, content: _Optional[bytes] = ...) -> None: ...

class PublishHeader(_message.Message):
    __slots__ = ("version", "files")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    version: int
    files: _containers.RepeatedCompositeFieldContainer[FileEntry]
    def __init__(self, version: _Optional[int] = ..., files: _Optional[_Iterable[_Union[FileEntry, _Mapping]]] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: PublishHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[PublishHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PublishReply(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class WithdrawRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class WithdrawReply(_message.Message):
    __slots__ = ("latest_version",)
    LATEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    latest_version: int
    def __init__(self, latest_version: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("format", "after")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    format: str
    after: int
    def __init__(self, format: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("version", "format", "file", "offset", "base_version")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    format: str
    file: str
    offset: int
    base_version: int
    def __init__(self, version: _Optional[int] = ..., format: _Optional[str] = ..., file: _Optional[str] = ..., offset: _Optional[int] = ..., base_version: _Optional[int] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ChainRequest(_message.Message):
    __slots__ = ("format", "have", "want")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    format: str
    have: int
    want: int
    def __init__(self, format: _Optional[str] = ..., have: _Optional[int] = ..., want: _Optional[int] = ...) -> None: ...

class ChainReply(_message.Message):
    __slots__ = ("deltas",)
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[Manifest]
    def __init__(self, deltas: _Optional[_Iterable[_Union[Manifest, _Mapping]]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FormatStatus(_message.Message):
    __slots__ = ("format", "latest_version", "num_watchers", "snapshot_bytes", "convert_seconds", "delta_seconds", "bytes_fetched", "delta_bytes_fetched", "deltas")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    LATEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_WATCHERS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONVERT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DELTA_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FETCHED_FIELD_NUMBER: _ClassVar[int]
    DELTA_BYTES_FETCHED_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    format: str
    latest_version: int
    num_watchers: int
    snapshot_bytes: int
    convert_seconds: float
    delta_seconds: float
    bytes_fetched: int
    delta_bytes_fetched: int
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    def __init__(self, format: _Optional[str] = ..., latest_version: _Optional[int] = ..., num_watchers: _Optional[int] = ..., snapshot_bytes: _Optional[int] = ..., convert_seconds: _Optional[float] = ..., delta_seconds: _Optional[float] = ..., bytes_fetched: _Optional[int] = ..., delta_bytes_fetched: _Optional[int] = ..., deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("base_version", "version", "num_bytes")
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    base_version: int
    version: int
    num_bytes: int
    def __init__(self, base_version: _Optional[int] = ..., version: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("latest_version", "versions", "formats", "bytes_published", "bytes_fetched", "num_fetching", "bytes_per_second")
    LATEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FETCHED_FIELD_NUMBER: _ClassVar[int]
    NUM_FETCHING_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    latest_version: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    formats: _containers.RepeatedCompositeFieldContainer[FormatStatus]
    bytes_published: int
    bytes_fetched: int
    num_fetching: int
    bytes_per_second: float
    def __init__(self, latest_version: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ..., formats: _Optional[_Iterable[_Union[FormatStatus, _Mapping]]] = ..., bytes_published: _Optional[int] = ..., bytes_fetched: _Optional[int] = ..., num_fetching: _Optional[int] = ..., bytes_per_second: _Optional[float] = ...) -> None: ...
