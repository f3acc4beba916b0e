"""A user of Kafka with few rights: each missing one is named, topics with rights go on, and a granted right is enough."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from tests.app.homes import wait_for
from tests.delivery.kafka_topics import received
from tests.delivery.test_kafka_sink import KafkaStage
from tests.serving.serving_process import served, web_home

from millstream.buffers.kafka_errors import SILENT
from millstream.delivery.sinks import ACCEPTED, PushSink, Verdict
from millstream.testing.kafka import EmbeddedKafka
from millstream.testing.push_sink import push_message

pytestmark = pytest.mark.siege
LEDGER = "_millstream_consumers"


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(tmp_path_factory.mktemp("limited"), users={"app": "right", "web": "right"}) as server:
        yield server


def client(user: str, password: str = "right") -> dict[str, str]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": user,
        "sasl.password": password,
    }


def stage_of(server: EmbeddedKafka, *, transactions: bool, password: str = "right") -> KafkaStage:
    stage = KafkaStage(server, format="json", transactions=transactions, client=client("app", password))
    stage.settings["location"] = server.user_servers
    return stage


def grant(server: EmbeddedKafka, kind: ResourceType, name: str, *operations: AclOperation, user: str = "app") -> None:
    """Grant rights on a name, or on all names with a prefix that ends in `*`."""
    pattern = ResourcePatternType.PREFIXED if name.endswith("*") else ResourcePatternType.LITERAL
    rights = [
        AclBinding(kind, name.removesuffix("*"), pattern, f"User:{user}", "*", operation, AclPermissionType.ALLOW)
        for operation in operations
    ]
    admin = AdminClient({"bootstrap.servers": server.servers, "logger": SILENT})  # type: ignore[dict-item]
    for future in admin.create_acls(rights).values():
        future.result(30)


def wait_refused(sink: PushSink, number: int, *parts: str) -> None:
    """Deliver a message until the reason of its refusal has these parts: rights hold after a moment."""
    reasons: list[str] = []

    def is_refused() -> bool:
        outcome = sink.deliver([push_message(number)])
        assert outcome.verdict is Verdict.REFUSED
        reasons.append(outcome.reason)
        return all(part in outcome.reason for part in parts)

    wait_for(is_refused, what=lambda: reasons[-3:])


@pytest.mark.parametrize("transactions", [True, False])
def test_a_wrong_password_is_named(limited: EmbeddedKafka, transactions: bool) -> None:
    stage = stage_of(limited, transactions=transactions, password="wrong")
    outcome = stage.open(stage.place).deliver([push_message(0)])
    assert (outcome.verdict, "Invalid username or password" in outcome.reason) == (Verdict.REFUSED, True)
    stage.close()


def test_each_missing_right_is_named_until_it_is_granted(limited: EmbeddedKafka) -> None:
    stage = stage_of(limited, transactions=True)
    sink = stage.open(stage.place)
    topic = f"{stage.stream}.public.orders"
    wait_refused(sink, 0, "Transactional Id authorization failed")
    grant(limited, ResourceType.TRANSACTIONAL_ID, f"millstream-{stage.stream}*", AclOperation.ALL)
    wait_refused(sink, 0, LEDGER, "authorization failed")
    grant(limited, ResourceType.TOPIC, LEDGER, AclOperation.CREATE, AclOperation.READ)
    wait_refused(sink, 0, "may not write", LEDGER)
    grant(limited, ResourceType.TOPIC, LEDGER, AclOperation.WRITE)
    wait_refused(sink, 0, topic, "authorization failed")
    grant(limited, ResourceType.TOPIC, topic, AclOperation.CREATE, AclOperation.DESCRIBE)
    wait_refused(sink, 0, "may not write", topic)
    grant(limited, ResourceType.TOPIC, topic, AclOperation.WRITE)
    wait_for(lambda: sink.deliver([push_message(0)]) == ACCEPTED)
    assert [message.id for message in stage.messages()] == ["shop-0-1-0"]
    stage.close()


@pytest.mark.parametrize("transactions", [True, False])
def test_topics_without_a_right_stop_no_others(limited: EmbeddedKafka, transactions: bool) -> None:
    stage = stage_of(limited, transactions=transactions)
    grant(limited, ResourceType.TRANSACTIONAL_ID, "millstream-*", AclOperation.ALL)
    grant(limited, ResourceType.TOPIC, LEDGER, AclOperation.CREATE, AclOperation.READ, AclOperation.WRITE)
    grant(limited, ResourceType.TOPIC, f"{stage.stream}.public.orders", AclOperation.ALL)
    stage.make("public.shown")
    stage.make("public.hidden")
    grant(limited, ResourceType.TOPIC, f"{stage.stream}.public.shown", AclOperation.DESCRIBE)
    sink = stage.open(stage.place)
    wait_for(lambda: sink.deliver([push_message(0)]) == ACCEPTED)
    batch = [push_message(3), *(push_message(n, table=f"public.{t}") for n, t in ((4, "shown"), (5, "hidden")))]
    outcome = sink.deliver(batch)
    verdicts = {message.id: part.verdict for messages, part in outcome.parts for message in messages}
    refused, accepted = Verdict.REFUSED, Verdict.ACCEPTED
    assert verdicts == {"shop-0-1-3": accepted, "shop-0-1-4": refused, "shop-0-1-5": refused}
    reasons = {part.reason for _, part in outcome.parts if part.verdict is refused}
    assert {name for name in ("shown", "hidden") if any(name in reason for reason in reasons)} == {"shown", "hidden"}
    assert [message.id for message in stage.messages()] == ["shop-0-1-0", "shop-0-1-3"]
    stage.close()


def test_a_server_shows_the_topic_and_delivers_to_the_others(limited: EmbeddedKafka, tmp_path: Path) -> None:
    grant(limited, ResourceType.TRANSACTIONAL_ID, "millstream-web*", AclOperation.ALL, user="web")
    grant(limited, ResourceType.TOPIC, LEDGER, AclOperation.ALL, user="web")
    grant(limited, ResourceType.TOPIC, "web.public.clicks", AclOperation.ALL, user="web")
    with served(web_home(tmp_path / "home")) as server, server.client() as http:
        path = "/v1/streams/web/consumers"
        sink = {"location": limited.user_servers, "client": client("web"), "schemas_enable": False}
        made = http.post(path, json={"name": "search", "start": "earliest", "kafka": sink})
        assert made.status_code == 201
        server.post("secrets", [{"id": 1}])
        server.post("clicks", [{"id": n} for n in range(5)])
        wait_for(lambda: http.get(f"{path}/search").json()["acked"] == 5, what=lambda: http.get(f"{path}/search").text)
        wait_for(lambda: "web.public.secrets" in str(http.get(f"{path}/search").json()["error"]))
        assert http.get(f"{path}/search").json()["dead"] == 0
        grant(limited, ResourceType.TOPIC, "web.public.secrets", AclOperation.ALL, user="web")
        wait_for(lambda: http.get(f"{path}/search").json()["acked"] == 6, what=lambda: http.get(f"{path}/search").text)
    (secret,) = received(limited.servers, "web.public.secrets")
    assert json.loads(secret.value or b"")["after"] == {"id": 1}
