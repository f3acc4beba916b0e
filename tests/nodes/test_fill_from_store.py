"""Fill a node's log from an object store: it resumes anywhere, and sets aside what isn't the store's history."""

from __future__ import annotations

import itertools
import shutil
from contextlib import closing

import pytest
from tests.app.homes import make_home
from tests.replication.test_object_branches import NEW, STREAM, Scene, group_of, promoted, same_segments, scene, write

from millstream.home.home import Home
from millstream.leadership.node_roles import Roles
from millstream.model.replication import Document, NodeName
from millstream.nodes.fill_from_store import fill
from millstream.nodes.follower_state import FollowerState
from millstream.nodes.object_stores import store_of
from millstream.protocol.replication.node_promises import SESSIONS, Role, RoleFact
from millstream.wal.files import RealFiles
from millstream.wal.layout import SESSIONS_NAME
from millstream.wal.reader import StreamReader
from millstream.wal.writing.session_file import write_copy

__all__ = ["scene"]


@pytest.fixture
def home(scene: Scene) -> Home:
    """A node that follows, and has nothing so far."""
    text = (
        "[streams.web]\n[streams.web.ingest]\n"
        f'[replication]\nnode = "c"\nobject_store = "{scene.store.as_uri()}"\n'
        '[replication.nodes]\na = "grpc://127.0.0.1:1"\nb = "grpc://127.0.0.1:2"\nc = "grpc://127.0.0.1:3"\n'
    )
    home = Home(make_home(scene.folder / "home", text), needs_source=False)
    home.prepare()
    with Roles(home).changing("web") as changing:
        changing.put(RoleFact(Role.FOLLOWS, leader=NodeName("a")))
    return home


def test_what_was_broken_off_goes_on_where_it_was(scene: Scene, home: Home) -> None:
    ends = []
    with closing(store_of(home, "web")) as store:
        while True:
            calls = itertools.count()
            found = fill(home, "web", store, stop=lambda calls=calls: next(calls) > 1)
            if found is None:
                break
            ends.append(found.size_bytes)
    assert len([size for size in ends if size]) > 2, "it was broken off, and took the rest"
    folder = home.wal_folder("web")
    assert sum(ends) <= sum(path.stat().st_size for path in scene.old.rglob("*.wal")), "nothing came twice"
    assert StreamReader(str(folder)).token() == StreamReader(str(scene.old)).token()
    same_segments(scene.old, folder)


def test_what_the_stores_history_hasnt_is_set_aside(scene: Scene, home: Home) -> None:
    fact = promoted(scene)
    scene.archive(scene.new, fact)
    folder = home.wal_folder("web")
    shutil.copytree(scene.old, folder)
    write_copy(RealFiles(), str(home.data), STREAM, StreamReader(str(folder)).persisted_upto(), [b"what they are"])
    notes = FollowerState(home, "web")
    notes.documents((Document(SESSIONS, 1, (home.data / SESSIONS_NAME).read_bytes()),))
    with closing(store_of(home, "web")) as store:
        assert fill(home, "web", store) is not None
        same_segments(scene.new, folder)
        assert (notes.document(SESSIONS), notes.versions().get(SESSIONS)) == (None, None), "they know what isn't there"
        assert StreamReader(str(folder)).token() == StreamReader(str(scene.new)).token()
        (aside,) = (home.data / "replication" / "web").glob("aside-behind-*[0-9]")
        assert StreamReader(str(aside)).persisted_upto() == StreamReader(str(scene.old)).persisted_upto()
        now = Roles(home).of("web")
        assert (now.lineage, now.promise, now.leader, now.role) == (fact.lineage, NEW, "b", Role.FOLLOWS)
        assert fill(home, "web", store) is None


def test_who_has_more_than_the_store_keeps_it(scene: Scene, home: Home) -> None:
    folder = home.wal_folder("web")
    write(scene.old, 3, 10, "a", first=105)
    shutil.copytree(scene.old, folder)
    with closing(store_of(home, "web")) as store:
        assert fill(home, "web", store) is None
    assert group_of(folder) == group_of(scene.old)
