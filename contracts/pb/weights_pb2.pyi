from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorEntry(_message.Message):
    __slots__ = ("name", "dtype", "shape", "file", "start", "end", "checksum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    file: str
    start: int
    end: int
    checksum: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., file: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., checksum: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("version", "base_version", "format", "recipe", "files", "tensors")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    version: int
    base_version: int
    format: str
    recipe: str
    files: _containers.RepeatedCompositeFieldContainer[FileEntry]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorEntry]
    def __init__(self, version: _Optional[int] = ..., base_version: _Optional[int] = ..., format: _Optional[str] = ..., recipe: _Optional[str] = ..., files: _Optional[_Iterable[_Union[FileEntry, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[TensorEntry, _Mapping]]] = ...) -> None: ...

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

class WatchRequest(_message.Message):
    __slots__ = ("format", "after")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    format: str
    after: int
    def __init__(self, format: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("version", "format", "file", "offset")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    version: int
    format: str
    file: str
    offset: int
    def __init__(self, version: _Optional[int] = ..., format: _Optional[str] = ..., file: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("latest_version", "versions", "latest_by_format", "bytes_published", "bytes_fetched")
    class LatestByFormatEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    LATEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    LATEST_BY_FORMAT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FETCHED_FIELD_NUMBER: _ClassVar[int]
    latest_version: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    latest_by_format: _containers.ScalarMap[str, int]
    bytes_published: int
    bytes_fetched: int
    def __init__(self, latest_version: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ..., latest_by_format: _Optional[_Mapping[str, int]] = ..., bytes_published: _Optional[int] = ..., bytes_fetched: _Optional[int] = ...) -> None: ...
