"""A stand-in for Modal's API on loopback: the calls that deploying, resizing and a container make.

Owns what it was asked, and the least that Modal's own client takes for an answer. It runs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import threading
from collections import defaultdict
from typing import Any

import grpclib.server
from google.protobuf import empty_pb2
from grpclib import GRPCError, Status
from modal_proto import api_grpc, api_pb2


def object_id(kind: str, content: bytes) -> str:
    """An id as Modal's client expects them, the same for the same content."""
    return f"{kind}-{hashlib.sha256(content).hexdigest()[:16]}"


class ModalStandIn:
    """Serves in a thread of its own, from `start` to `stop`."""

    def __init__(self) -> None:
        self.requests: dict[str, list[Any]] = defaultdict(list)
        self.files: dict[str, bytes] = {}  # by SHA-256
        self.mounts: dict[str, list[Any]] = {}  # by id
        self.secrets: dict[str, dict[str, str]] = {}  # by id
        self.deployed: dict[str, api_pb2.Function] = {}
        self.containers: dict[str, int] = {}
        self.secret_keys = {"SAMPLER_TOKEN", "SAMPLER_TLS_CA"}
        self.failure: tuple[Status, str] | None = None  # of every call
        self.address = ""

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def stop(self) -> None:
        async def close() -> None:
            self._server.close()
            await self._server.wait_closed()

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self._server = grpclib.server.Server([self._servicer()])
        sock = socket.create_server(("127.0.0.1", 0))
        await self._server.start(sock=sock)
        self.address = f"http://127.0.0.1:{sock.getsockname()[1]}"

    def _servicer(self) -> Any:
        """A handler per RPC of the API: ours, or a refusal."""
        stand_in = self

        def handler(name: str) -> Any:
            async def handle(_: Any, stream: Any) -> None:
                request = await stream.recv_message()
                stand_in.requests[name].append(request)
                if stand_in.failure:
                    raise GRPCError(*stand_in.failure)
                answer = getattr(stand_in, name, None)
                if answer is None:
                    raise GRPCError(Status.UNIMPLEMENTED, name)
                await stream.send_message(answer(request))

            return handle

        names = [name for name in dir(api_grpc.ModalClientBase) if name[0].isupper()]
        return type("Servicer", (api_grpc.ModalClientBase,), {n: handler(n) for n in names})()

    # What Modal answers. The names are those of its RPCs.

    def ClientHello(self, _: Any) -> Any:
        return api_pb2.ClientHelloResponse()

    def AuthTokenGet(self, _: Any) -> Any:
        return api_pb2.AuthTokenGetResponse(token="e30.eyJleHAiOiA0MTAyNDQ0ODAwfQ.x")

    def EnvironmentGetOrCreate(self, _: Any) -> Any:
        metadata = api_pb2.EnvironmentMetadata(
            name="main",
            settings=api_pb2.EnvironmentSettings(image_builder_version="2025.06"),
        )
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    def AppGetByDeploymentName(self, _: Any) -> Any:
        return api_pb2.AppGetByDeploymentNameResponse()  # none of that name yet

    def AppCreate(self, _: Any) -> Any:
        return api_pb2.AppCreateResponse(app_id="ap-1")

    def AppGetOrCreate(self, request: Any) -> Any:
        return api_pb2.AppGetOrCreateResponse(app_id=object_id("ap", request.app_name.encode()))

    def AppGetLayout(self, _: Any) -> Any:
        return api_pb2.AppGetLayoutResponse()

    def AppGetObjects(self, _: Any) -> Any:
        return api_pb2.AppGetObjectsResponse()

    def AppHeartbeat(self, _: Any) -> Any:
        return empty_pb2.Empty()

    def AppClientDisconnect(self, _: Any) -> Any:
        return empty_pb2.Empty()

    def AppPublish(self, _: Any) -> Any:
        return api_pb2.AppPublishResponse(url="https://modal.example/app", deployed_at=1.0)

    def AppStop(self, _: Any) -> Any:
        return empty_pb2.Empty()

    def SecretGetOrCreate(self, request: Any) -> Any:
        missing = set(request.required_keys) - self.secret_keys
        if missing:
            raise GRPCError(Status.NOT_FOUND, f"Secret lacks {sorted(missing)}")
        secret_id = object_id("st", request.SerializeToString())
        self.secrets[secret_id] = dict(request.env_dict)
        return api_pb2.SecretGetOrCreateResponse(secret_id=secret_id)

    def VolumeGetOrCreate(self, request: Any) -> Any:
        return api_pb2.VolumeGetOrCreateResponse(
            volume_id=object_id("vo", request.deployment_name.encode())
        )

    def VolumeCommit(self, _: Any) -> Any:
        return api_pb2.VolumeCommitResponse()

    def MountBatchedCheckExistence(self, request: Any) -> Any:
        missing = [name for name in request.sha256_hex_hashes if name not in self.files]
        return api_pb2.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing)

    def MountPutFile(self, request: Any) -> Any:
        if request.WhichOneof("data_oneof") == "data":
            self.files[request.sha256_hex] = request.data
        return api_pb2.MountPutFileResponse(exists=request.sha256_hex in self.files)

    def MountGetOrCreate(self, request: Any) -> Any:
        mount_id = object_id("mo", request.SerializeToString())
        self.mounts[mount_id] = list(request.files)
        return api_pb2.MountGetOrCreateResponse(mount_id=mount_id)

    def ImageGetOrCreate(self, request: Any) -> Any:
        return api_pb2.ImageGetOrCreateResponse(
            image_id=object_id("im", request.image.SerializeToString()),
            result=api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS),
        )

    def FunctionPrecreate(self, request: Any) -> Any:
        return api_pb2.FunctionPrecreateResponse(
            function_id=self.function_id(request.function_name),
            handle_metadata=self._metadata(request.function_name),
        )

    def FunctionCreate(self, request: Any) -> Any:
        name = request.function.function_name
        self.deployed[name] = request.function
        answer = api_pb2.FunctionCreateResponse(
            function_id=self.function_id(name), handle_metadata=self._metadata(name)
        )
        answer.function_data.ranked_functions.add(function=request.function)
        return answer

    def FunctionGet(self, request: Any) -> Any:
        if request.object_tag not in self.containers:
            raise GRPCError(Status.NOT_FOUND, f"no {request.app_name}/{request.object_tag}")
        answer = api_pb2.FunctionGetResponse(
            function_id=self.function_id(request.object_tag),
            handle_metadata=self._metadata(request.object_tag),
        )
        answer.function.ranked_functions.add(function=api_pb2.Function(is_server=True))
        return answer

    def FunctionUpdateSchedulingParams(self, request: Any) -> Any:
        return api_pb2.FunctionUpdateSchedulingParamsResponse(current_settings=request.settings)

    def FunctionGetCurrentStats(self, request: Any) -> Any:
        nums = {self.function_id(name): num for name, num in self.containers.items()}
        return api_pb2.FunctionStats(num_total_tasks=nums[request.function_id])

    def ContainerServerLifecycleReady(self, _: Any) -> Any:
        return empty_pb2.Empty()

    @staticmethod
    def function_id(name: str) -> str:
        return object_id("fu", name.encode())

    def _metadata(self, name: str) -> Any:
        return api_pb2.FunctionHandleMetadata(
            function_name=name, function_type=api_pb2.Function.FUNCTION_TYPE_FUNCTION
        )


@contextlib.contextmanager
def modal_stand_in():
    stand_in = ModalStandIn()
    stand_in.start()
    try:
        yield stand_in
    finally:
        stand_in.stop()
