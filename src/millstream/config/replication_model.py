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
    """This node among those that have its streams, and the other targets of their logs.

    Followers connect to Flight: `[flight] listen` is the leader's.
    """

    node: str | None = Field(
        default=None,
        description="This node's name among `nodes`. Others know it by that, also when its address changes.",
    )
    nodes: dict[str, str] = Field(
        default={},
        description="Where Arrow Flight of each node listens, by the node's name, this one's too: "
        '`a = "grpc+tls://a.example.com:8788"`; `grpc://` without TLS. The same on all nodes.',
    )
    regions: dict[str, str] = Field(
        default={},
        description='Where Arrow Flight of other regions listens, by the region\'s number: `2 = "grpc+tls://eu.example.com:8788"`. Their logs of the streams that have '
        "a `region` are followed, beside the own ones; over there this home's region is named likewise. See the how-to on several regions.",
    )
    token: str | None = Field(
        default=None,
        min_length=1,
        description="The access token that this node shows to others; it must give `admin` of the streams there. A variable, such as "
        "`${MILLSTREAM_NODE_TOKEN}`, keeps it out of the file.",
    )
    authority: str | None = Field(
        default=None,
        min_length=1,
        description="The authorities of other nodes' certificates: a PEM file, from the home where it isn't absolute. Unset: those of the system.",
    )
    certificate: str | None = Field(
        default=None,
        min_length=1,
        description="The certificate that this node shows to others (mTLS): a PEM file, likewise.",
    )
    key: str | None = Field(default=None, min_length=1, description="Its key, likewise.")
    object_store: str | None = Field(
        default=None,
        description="An object store that has the log too: `s3://bucket/prefix`, `gs://…`, `az://…`, or a folder, `file:///…`. Who it is asked by is told by "
        "the variables that its tools know (AWS_ACCESS_KEY_ID …).",
    )
    max_staleness: Duration | None = Field(
        default=None,
        description="How old what a follower shows may be; older, its reads fail with `replica_too_stale`. Of other regions' logs, too, where `merged` reads them. Unset: of any age.",
    )
    ship_timeout: Duration = Field(
        default="10s", description="How long a server that ends goes on shipping what followers lack."
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
