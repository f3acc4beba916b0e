-- Every type that the project's types page names. One statement a line; a line of its own is one transaction,
-- lines between BEGIN and COMMIT are one. Lines that begin with -- are comments.
CREATE TABLE numbers (id integer PRIMARY KEY, i2 smallint, i4 integer, i8 bigint, b boolean, f4 real, f8 double precision, n numeric, n52 numeric(5,2), n38 numeric(38,9), n40 numeric(40,3), n3m numeric(3,-2), n24 numeric(2,4), cash money, o oid, x xid, x8 xid8)
CREATE TABLE times (id integer PRIMARY KEY, d date, t time, t0 time(0), t3 time(3), tz timetz, ts timestamp, ts0 timestamp(0), ts3 timestamp(3), tstz timestamptz, tstz3 timestamptz(3), iv interval)
CREATE TABLE texts (id integer PRIMARY KEY, t text, v varchar, v9 varchar(9), c char, c5 character(5), nm name, u uuid, j json, jb jsonb, by bytea, b1 bit, b5 bit(5), b70 bit(70), vb bit varying, vb9 bit varying(9), ch "char")
CREATE TABLE others (id integer PRIMARY KEY, ip inet, ci cidr, m macaddr, m8 macaddr8, r4 int4range, r8 int8range, rn numrange, rts tsrange, rtz tstzrange, rd daterange, mr int4multirange, p point, ln line, ls lseg, bx box, pa path, pg polygon, ce circle, tv tsvector, tq tsquery, jp jsonpath, td tid, cd cid, lsn pg_lsn, rc regclass, rt regtype, iv2 int2vector, ov oidvector, sn txid_snapshot, psn pg_snapshot, rf refcursor)
CREATE TYPE mood AS ENUM ('sad', 'ok', 'it''s "fine"')
CREATE DOMAIN positive AS integer CHECK (VALUE > 0)
CREATE DOMAIN label AS text
CREATE TYPE pair AS (a integer, b text)
CREATE TABLE users (id integer PRIMARY KEY, m mood, po positive, la label, pr pair, ma mood[])
CREATE TABLE arrays (id integer PRIMARY KEY, i2 smallint[], i4 integer[], i8 bigint[], b boolean[], f4 real[], f8 double precision[], n52 numeric(5,2)[], n numeric[], d date[], ts timestamp[], tstz timestamptz[], t text[], v varchar[], v9 varchar(9)[], c5 character(5)[], u uuid[], j json[], jb jsonb[], by bytea[], ip inet[], t1 time[], ir int4range[], ci cidr[], o oid[])
CREATE TABLE keyed (a integer, b text, v text, PRIMARY KEY (b, a))
CREATE TABLE keyless (a integer, b text)
CREATE TABLE whole (id bigint PRIMARY KEY, v text, n numeric(10,2), ts timestamptz, by bytea)
CREATE TABLE toast (id integer PRIMARY KEY, big text, bytes bytea, js jsonb, ta text[], n integer)
CREATE TABLE required (id integer PRIMARY KEY, n integer NOT NULL DEFAULT 7, t text NOT NULL DEFAULT 'x', d date DEFAULT '2020-01-02', m numeric(5,2) DEFAULT 1.50)
CREATE TABLE "odd name.é" ("ID x" integer PRIMARY KEY, "a-b" text)
CREATE TABLE "1numbers" (id uuid PRIMARY KEY, "9lives" integer)
CREATE TABLE stamped (ts timestamptz, n numeric(6,3), d date, v text, PRIMARY KEY (ts, n, d))
CREATE TABLE more (id integer PRIMARY KEY, nm name[], ch "char"[], tm time(3)[], tz timetz[], iv interval[], cash money[], m macaddr[], m8 macaddr8[], b5 bit(5)[], vb bit varying[], p point[], r8 int8range[], rn numrange[], rts tsrange[], rtz tstzrange[], rd daterange[], tv tsvector[], n40 numeric(40,3)[], n3m numeric(3,-2)[], ts3 timestamp(3)[], xs xid[], vb1 bit varying(1), tz3 timetz(3), tstz0 timestamptz(0), e text[], i8 bigint[])
CREATE TABLE toasts (id integer PRIMARY KEY, n numeric, v varchar, i2 smallint[], i4 integer[], i8 bigint[], f4 real[], f8 double precision[], b boolean[], u uuid[], n52 numeric(5,2)[], d date[], ts timestamp[], tstz timestamptz[], by bytea[], vb bit varying, tv tsvector, j json, r numrange, x integer)
ALTER TABLE toasts ALTER n SET STORAGE EXTERNAL, ALTER v SET STORAGE EXTERNAL, ALTER i2 SET STORAGE EXTERNAL, ALTER i4 SET STORAGE EXTERNAL, ALTER i8 SET STORAGE EXTERNAL, ALTER f4 SET STORAGE EXTERNAL, ALTER f8 SET STORAGE EXTERNAL, ALTER b SET STORAGE EXTERNAL, ALTER u SET STORAGE EXTERNAL, ALTER n52 SET STORAGE EXTERNAL, ALTER d SET STORAGE EXTERNAL, ALTER ts SET STORAGE EXTERNAL, ALTER tstz SET STORAGE EXTERNAL, ALTER by SET STORAGE EXTERNAL, ALTER vb SET STORAGE EXTERNAL, ALTER tv SET STORAGE EXTERNAL, ALTER j SET STORAGE EXTERNAL
ALTER TABLE whole REPLICA IDENTITY FULL
ALTER TABLE keyless REPLICA IDENTITY FULL
ALTER TABLE toast ALTER big SET STORAGE EXTERNAL, ALTER bytes SET STORAGE EXTERNAL, ALTER js SET STORAGE EXTERNAL, ALTER ta SET STORAGE EXTERNAL
-- from here
INSERT INTO numbers VALUES (1, 12, -34, 9007199254740993, true, 1.1, 2.2250738585072014e-308, 123.4500, 1.50, 12345678901234567890123456789.123456789, 1234567890123456789012345678901234567.125, 12345, 0.0099, 1234.56, 4294967295, '77', '18446744073709551615')
INSERT INTO numbers VALUES (2, -32768, -2147483648, -9223372036854775808, false, 3.4028235e38, 1e300, -0.000001, -999.99, -0.000000001, -0.001, -99900, -0.0001, -0.01, 0, '0', '0')
INSERT INTO numbers VALUES (3, 32767, 2147483647, 9223372036854775807, true, 1e-45, 0.1, 100000000000000000000000000000000000000000, 0.00, 0, 0, 0, 0, 0, 1, '1', '1')
INSERT INTO numbers VALUES (4, 1, 1, 1, false, 16777216, 1e16, 1e3, 10, 1, 1, 1, 0, '12.3', 1, '1', '1')
INSERT INTO numbers VALUES (5, 0, 0, 0, false, 100, 1e7, 0, 127, 128, 255, 25500, 0.0001, 1.28, 2, '2', '2')
INSERT INTO numbers (id, f4, f8) VALUES (6, -0.0, 123456789.125)
INSERT INTO numbers (id, f4, f8) VALUES (7, 0.001, 0.0001)
INSERT INTO numbers (id) VALUES (8)
INSERT INTO times VALUES (1, '2024-02-29', '12:34:56.789012', '12:34:56', '12:34:56.789', '12:34:56.789012+05:30', '2024-02-29 12:34:56.789012', '2024-02-29 12:34:56', '2024-02-29 12:34:56.789', '2024-02-29 12:34:56.789012+02', '2024-02-29 12:34:56.789+02', '1 year 2 mons 3 days 04:05:06.789')
INSERT INTO times VALUES (2, '1969-12-31', '00:00:00', '00:00:00', '00:00:00', '00:00:00+00', '1969-12-31 23:59:59.999999', '1900-01-01 00:00:00', '1969-12-31 23:59:59.999', '1969-12-31 23:59:59.999999+00', '1969-12-31 23:59:59.999+00', '-1 year -2 mons +3 days -04:05:06.789')
INSERT INTO times VALUES (3, '0001-01-01', '23:59:59.999999', '24:00:00', '23:59:59.999', '23:59:59-12', '0001-01-01 00:00:00', '9999-12-31 23:59:59', '9999-12-31 23:59:59.999', '9999-12-31 23:59:59.999999+00', '0001-01-01 00:00:00+00', '00:00:00')
INSERT INTO times VALUES (4, '1500-03-01', '01:02:03.5', '01:02:03', '01:02:03.5', '01:02:03.5-03', '1500-03-01 01:02:03.5', '1582-10-10 00:00:00', '1582-10-15 00:00:00', '1582-10-10 00:00:00+00', '1970-01-01 00:00:00+00', '100 days')
INSERT INTO times VALUES (5, '1970-01-01', '12:00:00.1', '12:00:00', '12:00:00.12', '12:00:00.10+00', '2000-01-01 00:00:00.1', '2000-01-01 00:00:00', '2000-01-01 00:00:00.12', '2000-01-01 00:00:00.1+00', '2000-01-01 00:00:00.12+00', '0.000001 second')
INSERT INTO times VALUES (6, '2262-04-11', '12:00:00', '12:00:00', '12:00:00', '12:00:00+00', '2262-04-11 23:47:16.854775', '2000-01-01 00:01:00', '2000-01-01 00:00:01', '2262-04-11 23:47:16.854775+00', '2000-01-01 00:00:00+00', '-0.5 second')
INSERT INTO times (id) VALUES (7)
INSERT INTO times (id, iv) VALUES (8, '1 mon')
INSERT INTO times (id, iv) VALUES (9, '2 days 03:00:00'), (10, '-00:00:01.25'), (11, '1 year'), (12, '-3 days'), (13, '13 mons 1 day')
INSERT INTO texts VALUES (1, 'héllo "q" \ / 😀', 'v', 'v9', 'c', 'c5', 'nm', 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11', '{"a" :  1.0}', '{"b": [1, 2.50, null]}', '\xdeadbeef00ff', B'1', B'10110', repeat('10', 35)::bit(70), B'1011', B'101', 'z')
INSERT INTO texts VALUES (2, E'tab\tnl\n\x01\x7f<&>''', '', '', '', '', '', '00000000-0000-0000-0000-000000000000', 'null', '"x"', '', B'0', B'00001', repeat('0', 70)::bit(70), B'', B'', '')
INSERT INTO texts (id, by, b5, b70, vb, vb9) VALUES (3, '\xfbff', B'10000', (repeat('0', 62) || '10000001')::bit(70), B'000000001', B'100000000')
INSERT INTO texts (id) VALUES (4)
INSERT INTO others VALUES (1, '192.168.0.1/24', '10.0.0.0/8', '08:00:2b:01:02:03', '08:00:2b:01:02:03:04:05', '[1,5)', '(,9]', '[1.5,2.50]', '["2020-01-01 00:00:00","2020-01-02 01:02:03.5")', '["2020-01-01 00:00:00+00","2020-01-02 00:00:00+02")', '[2020-01-01,2020-02-01)', '{[1,3),[5,7)}', '(1.5,-2)', '{1,2,3}', '[(0,0),(1,1)]', '(2,2),(1,1)', '((0,0),(1,1))', '((0,0),(1,1),(1,0))', '<(1,2),3>', 'a:1 b:2', 'a & b', '$.a[*] ? (@ > 1)', '(1,2)', '3', '16/B374D848', 'pg_class', 'integer', '1 2', '3 4', '10:20:10,14,15', '10:20:10,14,15', 'cur')
INSERT INTO others (id, ip, r4, rd) VALUES (2, '::1', 'empty', '(,)')
INSERT INTO others (id) VALUES (3)
INSERT INTO users VALUES (1, 'sad', 5, 'lab', '(1,x)', '{sad,ok}'), (2, 'it''s "fine"', NULL, NULL, NULL, NULL)
INSERT INTO arrays VALUES (1, '{1,NULL,-3}', '{1,2}', '{9007199254740993}', '{t,f,NULL}', '{1.5,NULL}', '{0.1,1e300}', '{1.50,NULL}', '{1.50,2}', '{2020-01-01,NULL}', '{"2020-01-01 01:02:03.5"}', '{"2020-01-01 01:02:03.5+00"}', '{a,NULL,"b c","d\"e",""}', '{x}', '{y}', '{z}', '{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}', '{"{\"a\": 1}"}', '{"{\"a\": 1}"}', '{"\\xdead",NULL}', '{192.168.0.1}', '{01:02:03.5}', '{"[1,5)"}', '{10.0.0.0/8}', '{1,4294967295}')
INSERT INTO arrays VALUES (2, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}')
INSERT INTO arrays (id) VALUES (3)
BEGIN
INSERT INTO keyed VALUES (1, 'x', 'one'), (2, 'y', 'two')
UPDATE keyed SET v = 'uno' WHERE a = 1
UPDATE keyed SET a = 11, v = 'eleven' WHERE a = 1
UPDATE keyed SET b = 'yy' WHERE a = 2
DELETE FROM keyed WHERE a = 11
COMMIT
INSERT INTO keyless VALUES (1, 'a'), (2, NULL)
UPDATE keyless SET b = 'z' WHERE a = 1
DELETE FROM keyless WHERE a = 2
INSERT INTO whole VALUES (1, 'a', 1.50, '2020-01-01 00:00:00+00', '\x0102'), (2, NULL, NULL, NULL, NULL)
UPDATE whole SET v = 'b', n = 2.25 WHERE id = 1
UPDATE whole SET id = 3 WHERE id = 2
DELETE FROM whole WHERE id = 1
INSERT INTO toast VALUES (1, repeat('abcdefgh', 1000), decode(repeat('00ff', 4000), 'hex'), to_jsonb(repeat('js', 4000)), array_fill(repeat('t', 100), ARRAY[100]), 1)
UPDATE toast SET n = 2 WHERE id = 1
UPDATE toast SET id = 2 WHERE id = 1
DELETE FROM toast WHERE id = 2
INSERT INTO required VALUES (1)
INSERT INTO required VALUES (2, 8, 'y', NULL, NULL)
INSERT INTO "odd name.é" VALUES (1, 'x')
INSERT INTO "1numbers" VALUES ('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 9)
INSERT INTO stamped VALUES ('2020-01-01 01:02:03.5+00', 1.125, '2020-02-03', 'x')
UPDATE stamped SET n = 2.5
DELETE FROM stamped
INSERT INTO more VALUES (1, '{a}', '{z}', '{01:02:03.5}', '{01:02:03.5+02}', '{1 day 01:00:00}', '{1.50}', '{08:00:2b:01:02:03}', '{08:00:2b:01:02:03:04:05}', '{10110}', '{1011}', '{"(1,2)"}', '{"[1,5)"}', '{"[1,5)"}', '{"[2020-01-01,2020-01-02)"}', '{"[2020-01-01 00:00:00+00,2020-01-02 00:00:00+00)"}', '{"[2020-01-01,2020-01-02)"}', '{a:1}', '{1.125}', '{12300}', '{2020-01-01 01:02:03.5}', '{7}', B'1', '12:34:56.7+00', '2024-02-29 12:34:56+00', '{"a,b",NULL,"NULL"," x "}', '{1,NULL}')
-- the next is large: its line isn't compared
INSERT INTO toasts VALUES (1, (repeat('123456789', 1200))::numeric, repeat('v', 9000), array_fill(1::smallint, ARRAY[3000]), array_fill(1, ARRAY[3000]), array_fill(1::bigint, ARRAY[3000]), array_fill(1::real, ARRAY[3000]), array_fill(1::float8, ARRAY[3000]), array_fill(true, ARRAY[9000]), array_fill('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid, ARRAY[600]), array_fill(1.5::numeric(5,2), ARRAY[3000]), array_fill('2020-01-01'::date, ARRAY[3000]), array_fill('2020-01-01'::timestamp, ARRAY[3000]), array_fill('2020-01-01'::timestamptz, ARRAY[3000]), array_fill('\x01'::bytea, ARRAY[3000]), repeat('10', 40000)::varbit, array_to_tsvector((SELECT array_agg('word' || i) FROM generate_series(1, 2000) i)), to_json(repeat('j', 9000)), NULL, 1)
UPDATE toasts SET x = 2
TRUNCATE keyed
TRUNCATE keyless, keyed
SELECT pg_logical_emit_message(true, 'pre', 'in a transaction')
SELECT pg_logical_emit_message(false, 'pre fix', 'outside of one')
SELECT pg_logical_emit_message(true, 'bin', '\x00ff'::bytea)
ALTER TABLE keyed ADD COLUMN extra integer
INSERT INTO keyed VALUES (5, 'e', 'five', 55)
