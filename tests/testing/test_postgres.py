def test_a_fresh_database(postgres):
    with postgres.connect() as c:
        assert c.execute("show wal_level").fetchone() == ("logical",)
        c.execute("select pg_create_logical_replication_slot('s','pgoutput')")
