"""The batch side: features, the yield of exploring, and estimates of other policies, by Spark from the log to lake tables.

`run_batch` reads the log with `format("millstream")` and writes Delta tables. If the home follows other regions, their logs
are read too, and what is hidden is merged from all of them.

| table | a row is |
| --- | --- |
| `item_features` | an item: impressions, signals of each kind, mean reward, users who hide it |
| `user_features` | a user: feeds, impressions, signals, mean reward, the category that earned most |
| `exploring_by_day` | a day, exploring or not: impressions, trials, mean reward of a trial |
| `policy_values` | a policy: the reward of a slot that it would have earned, with standard errors |

Signals count as in the feed: of an impression one of a kind, of its dwells the longest; a signal that two regions got under
one key counts once. A trial is an impression with signals, or a signal without impression.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

import millstream
from millstream import OpenHome, StreamToken
from millstream_forage.folded_log import ends_of, log_of, whole_table
from millstream_forage.homes import CONFIG_FILE
from millstream_forage.tables import KINDS, SCHEMAS, STREAM, arm_name, other_regions
from millstream_forage.usable_records import usable

LAKE_FOLDER: Final = Path("lake", "forage-batch")
"""Where the tables of a home are, in its folder."""
DAY_NS: Final = 86_400_000_000_000
TOKEN_KEY: Final = f"{STREAM}.token"
"""Key of the log's position in the metadata of each commit. The position in the log of region 2 is under `forage@2.token`."""
READ: Final = ("items", "impressions", "signals", "hides")

COUNTED: Final = """
SELECT * FROM (
  SELECT *, row_number() OVER (
    PARTITION BY kind, coalesce(
      CAST(impression AS string),
      concat('key ', user, ' ', item, ' ', coalesce(duration_ms, 0), ' ', idempotency_key),
      concat('signal ', id)
    ) ORDER BY coalesce(duration_ms, 0) DESC, __seq
  ) AS place FROM signals
) WHERE place = 1
"""
REWARDED: Final = """
SELECT i.*, r.reward FROM impressions i
LEFT JOIN (SELECT impression, max(weight) AS reward FROM counted GROUP BY impression) r ON r.impression = i.id
"""
TRIALS: Final = """
SELECT user, item, reward FROM rewarded WHERE reward IS NOT NULL
UNION ALL SELECT user, item, weight FROM counted WHERE impression IS NULL
"""
HIDDEN: Final = """
SELECT user, target, value FROM (
  SELECT *, row_number() OVER (PARTITION BY user, target, value ORDER BY __seq DESC) AS place FROM hides
) WHERE place = 1 AND hidden
"""
VIEWS: Final = {"counted": COUNTED, "rewarded": REWARDED, "trials": TRIALS, "hidden": HIDDEN}

_KIND_COUNTS: Final = ", ".join(f"count_if(kind = '{kind}') AS {kind}s" for kind in KINDS)
_KIND_COLUMNS: Final = ", ".join(f"coalesce({kind}s, 0) AS {kind}s" for kind in KINDS)
ITEM_FEATURES: Final = f"""
SELECT i.id AS item, i.category, i.source, coalesce(shown.impressions, 0) AS impressions, {_KIND_COLUMNS},
  coalesce(tried.trials, 0) AS trials, tried.mean_reward, coalesce(h.hidden_by, 0) AS hidden_by
FROM items i
LEFT JOIN (SELECT item, count(*) AS impressions FROM impressions GROUP BY item) shown ON shown.item = i.id
LEFT JOIN (SELECT item, {_KIND_COUNTS} FROM counted GROUP BY item) kinds ON kinds.item = i.id
LEFT JOIN (SELECT item, count(*) AS trials, avg(reward) AS mean_reward FROM trials GROUP BY item) tried
  ON tried.item = i.id
LEFT JOIN (SELECT value, count(*) AS hidden_by FROM hidden WHERE target = 'item' GROUP BY value) h
  ON h.value = CAST(i.id AS string)
"""
USER_FEATURES: Final = f"""
SELECT u.user, coalesce(shown.feeds, 0) AS feeds, coalesce(shown.impressions, 0) AS impressions, shown.exploring_share,
  {_KIND_COLUMNS}, coalesce(tried.trials, 0) AS trials, tried.mean_reward, best.category AS best_category
FROM (SELECT user FROM impressions UNION SELECT user FROM counted UNION SELECT user FROM hides) u
LEFT JOIN (
  SELECT user, count(DISTINCT feed) AS feeds, count(*) AS impressions,
    avg(CAST(explore AS int)) AS exploring_share FROM impressions GROUP BY user
) shown ON shown.user = u.user
LEFT JOIN (SELECT user, {_KIND_COUNTS} FROM counted GROUP BY user) kinds ON kinds.user = u.user
LEFT JOIN (SELECT user, count(*) AS trials, avg(reward) AS mean_reward FROM trials GROUP BY user) tried
  ON tried.user = u.user
LEFT JOIN (
  SELECT user, max_by(category, struct(reward, category)) AS category FROM (
    SELECT t.user, i.category, sum(t.reward) AS reward FROM trials t JOIN items i ON i.id = t.item
    GROUP BY t.user, i.category
  ) WHERE reward > 0 GROUP BY user
) best ON best.user = u.user
"""
EXPLORING_BY_DAY: Final = f"""
SELECT date_add(DATE'1970-01-01', CAST(floor(now / {DAY_NS}) AS int)) AS day, explore, count(*) AS impressions,
  count(reward) AS trials, avg(reward) AS hit_rate
FROM rewarded GROUP BY 1, 2
"""
POLICY_VALUES: Final = """
WITH arms AS (
  SELECT t.policy, t.arm, t.probability, (coalesce(sum(r.reward), 0) + 1) / (count(r.id) + 2) AS model
  FROM targets t LEFT JOIN rewarded r ON r.arm = t.arm GROUP BY t.policy, t.arm, t.probability
), slots AS (
  SELECT a.policy, a.probability / r.propensity AS ratio, coalesce(r.reward, 0) AS reward, a.model
  FROM rewarded r JOIN arms a ON a.arm = r.arm
), direct AS (SELECT policy, sum(probability * model) AS value FROM arms GROUP BY policy)
SELECT s.policy, count(*) AS slots, avg(ratio * reward) AS ips, stddev(ratio * reward) / sqrt(count(*)) AS ips_error,
  avg(ratio) AS support, try_divide(sum(ratio * reward), sum(ratio)) AS self_normalized_ips,
  first(d.value) + avg(ratio * (reward - model)) AS doubly_robust,
  stddev(ratio * (reward - model)) / sqrt(count(*)) AS doubly_robust_error
FROM slots s JOIN direct d ON d.policy = s.policy GROUP BY s.policy
"""
RESULTS: Final = {
    "item_features": ITEM_FEATURES,
    "user_features": USER_FEATURES,
    "exploring_by_day": EXPLORING_BY_DAY,
    "policy_values": POLICY_VALUES,
}
UNIFORM: Final = "uniform"


@dataclass(frozen=True, slots=True)
class Landed:
    """A table that was written."""

    name: str
    folder: Path
    rows: int


def run_batch(
    spark: SparkSession, home: Path, *, policies: Mapping[str, Mapping[str, float]] | None = None
) -> list[Landed]:
    """Compute every table from the log as it is now, and replace the lake's tables by them.

    All tables are as of one token of each log, which each commit records; what other regions hide is as of now. An estimate is unbiased if each arm of its policy might have
    got each slot. Then `support`, the mean ratio of the chances, is about 1. Far below 1 the log can't answer for the policy:
    slots had to explore, or the policy's arms were hardly ever shown.

    Args:
        spark: a session whose Python has Millstream. `PYSPARK_PYTHON` names that Python.
        home: Forage's home, in use or not.
        policies: other policies to estimate: for each its probability of each arm (`tables.arm_name`), from 0 to 1. The
            uniform policy is always among them. An arm that a policy doesn't name has probability 0. Estimates hold for
            policies that choose arms like this in every slot, as long as the arms have items.

    Returns:
        The tables, in the order of `RESULTS`.

    Raises:
        UnknownStream: the home has no log of Forage.
        PySparkException: Spark couldn't read the log.
    """
    with millstream.open(home) as opened:
        others = other_regions((opened.path / CONFIG_FILE).read_text())
        logs = {STREAM: opened.token(STREAM)} | ends_of(opened, map(log_of, others))
        known = {
            (log, table) for table in READ for log, token in logs.items() if has_records(opened, log, table, token)
        }
        merged = opened.merged(STREAM, "hides") if len(logs) > 1 and {(log, "hides") for log in logs} & known else None
    for table in READ:
        columns = [*SCHEMAS[table].names, "__seq"]
        found = spark.createDataFrame([], from_arrow_schema(SCHEMAS[table].append(pa.field("__seq", pa.int64()))))
        for log, token in logs.items():
            if (log, table) in known and not (table == "hides" and merged is not None):
                read = spark.read.format("millstream").options(path=str(home), stream=log, table=f"public.{table}")
                rows = read.option("ending", str(token)).load()
                found = found.union(rows.mapInArrow(partial(foldable, table, columns), found.schema))
        if table == "hides" and merged is not None:
            rows = merged.select(SCHEMAS[table].names).replace_schema_metadata()
            found = spark.createDataFrame(rows).withColumn("__seq", f.lit(0).cast("long"))
        found.createOrReplaceTempView(table)
    for name, statement in VIEWS.items():
        spark.sql(statement).createOrReplaceTempView(name)
    targets(spark, policies or {}).createOrReplaceTempView("targets")
    landed = []
    for name, statement in RESULTS.items():
        rows = spark.sql(statement).toArrow()
        folder = home / LAKE_FOLDER / name
        properties = CommitProperties(custom_metadata={f"{log}.token": str(token) for log, token in logs.items()})
        write_deltalake(folder, rows, mode="overwrite", schema_mode="overwrite", commit_properties=properties)
        landed.append(Landed(name, folder, rows.num_rows))
    return landed


def foldable(table: str, columns: Sequence[str], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the columns of those records that the engine folds, too."""
    for batch in batches:
        yield usable(table, batch).select(columns)


def has_records(home: OpenHome, log: str, table: str, token: StreamToken) -> bool:
    """Return whether a table has a record in a log up to a token."""
    return any(batch.num_rows for batch in whole_table(home, log, table, token))


def targets(spark: SparkSession, policies: Mapping[str, Mapping[str, float]]) -> DataFrame:
    """Return each policy's probability of each arm that has items."""
    arms = [arm_name(*row) for row in spark.sql("SELECT DISTINCT category, source FROM items").collect()]
    rows = [(UNIFORM, arm, 1 / len(arms)) for arm in arms]
    rows += [(name, arm, float(chances.get(arm, 0))) for name, chances in policies.items() for arm in arms]
    return spark.createDataFrame(rows, "policy string, arm string, probability double")
