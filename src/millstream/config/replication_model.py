"""`[replication]`: this node among those that have its streams, and the other targets of their logs."""

from __future__ import annotations

import re
from typing import Final

from pydantic import Field, field_validator, model_validator

from millstream.config.section import Duration, Section
from millstream.errors import UsageError
from millstream.model.addresses import mask_address
from millstream.model.ids import RegionId
from millstream.model.replication import check_node_name

_ADDRESS: Final = re.compile(r"(?:grpc|grpc\+tcp|grpc\+tls)://(?:\[[0-9a-fA-F:.]+\]|[^:/\s\[\]]+):\d{1,5}\Z")
_REGION: Final = re.compile(r"[1-9]\d{0,9}\Z")
_STORES: Final = ("s3://", "gs://", "az://", "file:///")


class ReplicationConfig(Section):
    """This node, the other nodes that have its streams, and the other targets of their logs.

    Followers connect to Flight: `[flight] listen` is the leader's.
    """

    node: str | None = Field(
        default=None,
        description="This node's name among `nodes`. It stays the same when the node's address changes.",
    )
    nodes: dict[str, str] = Field(
        default={},
        description="Arrow Flight address of each node, by the node's name, this node included: `a = "
        '"grpc+tls://a.example.com:8788"`, or `grpc://` without TLS. It must be the same on all nodes.',
    )
    regions: dict[str, str] = Field(
        default={},
        description="Arrow Flight addresses of other regions, by the region's number: `2 = "
        '"grpc+tls://eu.example.com:8788"`. This home follows their logs of all streams with a `region`, next to '
        "its own logs. The other regions name this home's region in the same way. See the how-to on several "
        "regions.",
    )
    token: str | None = Field(
        default=None,
        min_length=1,
        description="Access token that this node sends to other nodes. It must give `admin` of the streams there. A "
        "variable, such as `${MILLSTREAM_NODE_TOKEN}`, keeps it out of the file.",
    )
    authority: str | None = Field(
        default=None,
        min_length=1,
        description="Authorities of the other nodes' certificates: a PEM file; a relative path starts at the home. Unset: "
        "the system's authorities.",
    )
    certificate: str | None = Field(
        default=None,
        min_length=1,
        description="Client certificate of this node (mTLS): a PEM file; a relative path starts at the home.",
    )
    key: str | None = Field(
        default=None,
        min_length=1,
        description="Key of the client certificate: a PEM file; a relative path starts at the home.",
    )
    object_store: str | None = Field(
        default=None,
        description="An object store that receives the log too: `s3://bucket/prefix`, `gs://…`, `az://…`, or a folder, "
        "`file:///…`. Its credentials come from the environment variables that the store's tools use "
        "(AWS_ACCESS_KEY_ID …).",
    )
    max_staleness: Duration | None = Field(
        default=None,
        description="Maximum staleness of a follower's data; if it is older, reads fail with `replica_too_stale`. It also "
        "applies to other regions' logs when `merged` reads them. Unset: no limit.",
    )
    ship_timeout: Duration = Field(
        default="10s",
        description="Time that a server continues to ship records that followers lack while it shuts down.",
    )

    @field_validator("node")
    @classmethod
    def _check_node(cls, node: str | None) -> str | None:
        if node is not None:
            _named(node)
        return node

    @field_validator("nodes")
    @classmethod
    def _check_nodes(cls, nodes: dict[str, str]) -> dict[str, str]:
        for name, address in nodes.items():
            _named(name)
            if _ADDRESS.match(address) is None and not address.startswith("${"):
                raise ValueError(
                    f"{name}: {mask_address(address)!r} must be an address of Flight such as grpc+tls://host:8788 or grpc://host:8788"
                )
        return nodes

    @field_validator("regions")
    @classmethod
    def _check_regions(cls, regions: dict[str, str]) -> dict[str, str]:
        for region, address in regions.items():
            if _REGION.match(region) is None or int(region) >= 1 << 32:
                raise ValueError(f"{region} is no region's number: they are 1, 2 …")
            if _ADDRESS.match(address) is None and not address.startswith("${"):
                raise ValueError(
                    f"{region}: {mask_address(address)!r} must be an address of Flight such as grpc+tls://host:8788"
                )
        return regions

    @property
    def region_addresses(self) -> dict[RegionId, str]:
        """Return `regions`, by number."""
        return {RegionId(int(region)): address for region, address in self.regions.items()}

    @field_validator("object_store")
    @classmethod
    def _check_store(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith((*_STORES, "${")):
            raise ValueError(f"{mask_address(url)!r} must begin with one of {', '.join(_STORES)}")
        return url

    @model_validator(mode="after")
    def _check_together(self) -> ReplicationConfig:
        if self.nodes and self.node is None:
            raise ValueError("names nodes, and not which of them this is: set node")
        if self.regions and self.node is None:
            raise ValueError("names regions, and not which node this is: set node")
        if self.node is not None and self.nodes and self.node not in self.nodes:
            raise ValueError(f"node {self.node} isn't among nodes ({', '.join(sorted(self.nodes))})")
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together")
        return self


def _named(name: str) -> None:
    try:
        check_node_name(name)
    except UsageError as error:
        raise ValueError(error.message) from error
