"""Messages of grpc.health.v1.Health/List (gRFC A90), which grpcio-health-checking does not carry yet.

They are built in a descriptor pool of their own, so that a release which does carry them does not clash with these.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2

_PACKAGE, _LIST_FILE = "grpc.health.v1", "grpc/health/v1/list.proto"


def _messages() -> dict[str, Any]:
    check = descriptor_pb2.FileDescriptorProto()
    health_pb2.DESCRIPTOR.CopyToProto(check)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(check)
    if "HealthListRequest" not in health_pb2.DESCRIPTOR.message_types_by_name:
        pool.Add(_list_file(check.name))
    names = (f"{_PACKAGE}.HealthListRequest", f"{_PACKAGE}.HealthListResponse")
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names}


def _list_file(check_file: str) -> descriptor_pb2.FileDescriptorProto:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name=_LIST_FILE, package=_PACKAGE, syntax="proto3", dependency=[check_file]
    )
    file.message_type.add(name="HealthListRequest")
    response = file.message_type.add(name="HealthListResponse")
    field = response.field.add(name="statuses", number=1, type=kinds.TYPE_MESSAGE, label=kinds.LABEL_REPEATED)
    field.type_name = f".{_PACKAGE}.HealthListResponse.StatusesEntry"
    entry = response.nested_type.add(name="StatusesEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    value = entry.field.add(name="value", number=2, type=kinds.TYPE_MESSAGE, label=kinds.LABEL_OPTIONAL)
    value.type_name = f".{_PACKAGE}.HealthCheckResponse"
    return file


_CLASSES = _messages()
Request = _CLASSES[f"{_PACKAGE}.HealthListRequest"]
Response = _CLASSES[f"{_PACKAGE}.HealthListResponse"]
