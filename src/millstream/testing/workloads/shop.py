"""A small shop with customers, products, orders and payments, and its transactions: for demonstrations and examples."""

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from random import Random
from typing import Any

import psycopg

from millstream.testing.workloads.workload import PacedWorkload, StepInfo

__all__ = ["ShopWorkload"]

Connection = psycopg.Connection[Any]

_TABLES = (
    """CREATE TABLE public.customers (
        id bigint PRIMARY KEY, email text NOT NULL UNIQUE, name text NOT NULL, address jsonb, note text,
        created_at timestamptz NOT NULL DEFAULT clock_timestamp())""",
    """CREATE TABLE public.products (
        sku text PRIMARY KEY, name varchar(80) NOT NULL, price numeric(10,2) NOT NULL, stock integer NOT NULL,
        tags text[] NOT NULL, description text, weight_kg real)""",
    """CREATE TABLE public.orders (
        id bigint PRIMARY KEY, customer_id bigint NOT NULL REFERENCES public.customers (id), status text NOT NULL,
        total numeric(12,2) NOT NULL, placed_at timestamptz NOT NULL DEFAULT clock_timestamp(), due date)""",
    """CREATE TABLE public.order_items (
        order_id bigint REFERENCES public.orders (id), line smallint, sku text NOT NULL
        REFERENCES public.products (sku) ON UPDATE CASCADE, quantity integer NOT NULL, price numeric(10,2) NOT NULL,
        PRIMARY KEY (order_id, line))""",
    """CREATE TABLE public.payments (
        id uuid PRIMARY KEY, order_id bigint NOT NULL REFERENCES public.orders (id), amount numeric(12,2) NOT NULL,
        method text NOT NULL, paid_at timestamptz NOT NULL DEFAULT clock_timestamp(), receipt bytea)""",
    "CREATE TABLE public.deals (slot integer PRIMARY KEY, sku text NOT NULL, rebate numeric(3,2) NOT NULL)",
    "CREATE INDEX ON public.order_items (sku)",
)
_KINDS = {
    "order": 30,
    "pay": 22,
    "ship": 14,
    "cancel": 4,
    "customer": 10,
    "move_house": 6,
    "reprice": 4,
    "restock": 2,
    "new_sku": 1,
    "deals": 1,
    "import": 1,
    "forget": 1,
}
_FIRST_NAMES = [
    "Ada",
    "Björn",
    "Chiara",
    "Dmitri",
    "Édith",
    "Fatima",
    "Grace",
    "Håkon",
    "Inès",
    "João",
    "Kenji",
    "Łucja",
    "Mei",
    "Niamh",
    "Olu",
    "Zoë",
]
_LAST_NAMES = [
    "Lovelace",
    "Østergård",
    "Rossi",
    "Ivanov",
    "Curie",
    "Khan",
    "Hopper",
    "Nyström",
    "Núñez",
    "Silva",
    "Tanaka",
    "Wójcik",
    "Li",
    "Byrne",
    "Adé",
]
_THINGS = [
    "lamp",
    "chair",
    "table",
    "kettle",
    "pillow",
    "rug",
    "mirror",
    "clock",
    "vase",
    "basket",
    "candle",
    "blanket",
    "shelf",
    "bowl",
    "mug",
    "teapot",
]
_COLOURS = ["red", "green", "blue", "white", "black", "amber", "teal", "violet"]
_PRODUCTS_MAX = 5_000


class ShopWorkload(PacedWorkload):
    """An open shop: each step is one realistic transaction.

    Orders are placed, paid, shipped and cancelled; customers come, move and are deleted; prices and
    stocks change. A product gets another number (a changed key, with everything that refers to it); the
    deals of the day are truncated and inserted again. After some steps the customers get an additional
    column. Amounts always add up.

    Args:
        seed: decides everything except the moments, which are the server's.
        customers: their number at the start.
        products: their number at the start.
        orders: their number at the start.
        add_column_at: the step that adds a column; None for never.

    Concurrency: steps of one shop come one after the other.
    """

    TABLES = ("customers", "products", "orders", "order_items", "payments", "deals")

    def __init__(
        self,
        seed: int = 1,
        *,
        customers: int = 2_000,
        products: int = 500,
        orders: int = 5_000,
        add_column_at: int | None = 300,
    ) -> None:
        self._rng = Random(seed)
        self._sizes = (customers, products, orders)
        self._add_column_at = add_column_at
        self._number = 0
        self._events: dict[str, Counter[str]] = {}
        self._stale = False
        self._customers: list[int] = []
        self._prices: dict[str, Decimal] = {}
        self._open: list[int] = []
        self._paid: list[int] = []
        self._last = Counter[str]()
        self._has_tier = False

    def setup(self, connection: Connection) -> None:
        """Make the tables and fill them.

        Args:
            connection: in autocommit mode, to a database that has none of them.
        """
        customers, products, orders = self._sizes
        with connection.transaction():
            for statement in _TABLES:
                connection.execute(statement)
            self._add_customers(connection, customers)
            self._add_products(connection, products)
            self._add_orders(connection, orders)
            self._do_deals(connection)
        self._events = {}

    def step(self, connection: Connection) -> StepInfo:
        """Run one transaction. After an error the next step first looks which rows exist."""
        if self._stale:
            self._look(connection)
        self._number += 1
        self._events = {}
        self._stale = True
        kind = self._rng.choices([*_KINDS], [*_KINDS.values()])[0]
        if not self._has_tier and self._add_column_at is not None and self._number >= self._add_column_at:
            kind = "add_column"
        with connection.transaction():
            getattr(self, f"_do_{kind}")(connection)
            row = connection.execute("SELECT pg_current_xact_id_if_assigned()::text").fetchone()
        self._stale = False
        xid = None if row is None or row[0] is None else int(row[0])
        events = {name: dict(ops) for name, ops in self._events.items() if ops.total()}
        return StepInfo(self._number, kind, xid, True, events)

    # Kinds of transactions

    def _do_order(self, connection: Connection) -> None:
        self._add_orders(connection, 1)

    def _do_pay(self, connection: Connection) -> None:
        if not self._open:
            return self._do_order(connection)
        order = self._take(self._open)
        receipt = self._rng.randbytes(16) if self._rng.random() < 0.5 else None
        method = self._rng.choice(("card", "transfer", "voucher"))
        self._run(
            connection,
            ("payments", "c"),
            "INSERT INTO public.payments (id, order_id, amount, method, receipt) "
            "SELECT %s::uuid, id, total, %s, %s FROM public.orders WHERE id = %s",
            [(f"{self._rng.getrandbits(128):032x}", method, receipt, order)],
        )
        self._run(connection, ("orders", "u"), "UPDATE public.orders SET status = 'paid' WHERE id = %s", [(order,)])
        self._paid.append(order)
        return None

    def _do_ship(self, connection: Connection) -> None:
        if not self._paid:
            return self._do_order(connection)
        orders = [(self._take(self._paid),) for _ in range(min(len(self._paid), self._rng.randint(1, 5)))]
        ship = "UPDATE public.orders SET status = 'shipped', due = current_date + 3 WHERE id = %s"
        return self._run(connection, ("orders", "u"), ship, orders)

    def _do_cancel(self, connection: Connection) -> None:
        if not self._open:
            return self._do_order(connection)
        order = self._take(self._open)
        lines = connection.execute(
            "SELECT quantity, sku FROM public.order_items WHERE order_id = %s ORDER BY line", [order]
        ).fetchall()
        self._run(connection, ("products", "u"), "UPDATE public.products SET stock = stock + %s WHERE sku = %s", lines)
        items = "DELETE FROM public.order_items WHERE order_id = %s"
        self._run(connection, ("order_items", "d"), items, [(order,)], each=len(lines))
        return self._run(connection, ("orders", "d"), "DELETE FROM public.orders WHERE id = %s", [(order,)])

    def _do_customer(self, connection: Connection) -> None:
        self._add_customers(connection, 1)

    def _do_move_house(self, connection: Connection) -> None:
        """Change an address; the customer's long note stays as it is."""
        move = "UPDATE public.customers SET address = %s::jsonb WHERE id = %s"
        self._run(connection, ("customers", "u"), move, [(self._address(), self._rng.choice(self._customers))])

    def _do_reprice(self, connection: Connection) -> None:
        skus = self._rng.sample([*self._prices], min(len(self._prices), self._rng.randint(1, 10)))
        for sku in skus:
            self._prices[sku] = self._price()
        rows = [(self._prices[sku], sku) for sku in skus]
        self._run(connection, ("products", "u"), "UPDATE public.products SET price = %s WHERE sku = %s", rows)

    def _do_restock(self, connection: Connection) -> None:
        skus = self._rng.sample([*self._prices], min(len(self._prices), 100))
        rows = [(self._rng.randint(10, 200), sku) for sku in skus]
        self._run(connection, ("products", "u"), "UPDATE public.products SET stock = stock + %s WHERE sku = %s", rows)

    def _do_new_sku(self, connection: Connection) -> None:
        """Give a product another key; the server changes the rows that refer to it, as ordinary changes."""
        old = self._rng.choice([*self._prices])
        new = self._sku()
        row = connection.execute("SELECT count(*) FROM public.order_items WHERE sku = %s", [old]).fetchone()
        assert row is not None
        self._note("order_items", "u", row[0])
        self._run(connection, ("products", "u"), "UPDATE public.products SET sku = %s WHERE sku = %s", [(new, old)])
        self._prices[new] = self._prices.pop(old)

    def _do_deals(self, connection: Connection) -> None:
        connection.execute("TRUNCATE public.deals")
        self._note("deals", "t", 1)
        skus = self._rng.sample([*self._prices], min(len(self._prices), 7))
        rows = [(slot, sku, Decimal(self._rng.randint(5, 50)) / 100) for slot, sku in enumerate(skus, 1)]
        self._run(connection, ("deals", "c"), "INSERT INTO public.deals VALUES (%s, %s, %s)", rows)

    def _do_import(self, connection: Connection) -> None:
        if len(self._prices) > _PRODUCTS_MAX:
            return self._do_restock(connection)
        return self._add_products(connection, self._rng.randint(20, 200))

    def _do_forget(self, connection: Connection) -> None:
        """Delete a customer without orders."""
        query = (
            "SELECT id FROM public.customers c WHERE id >= %s AND NOT EXISTS "
            "(SELECT FROM public.orders WHERE customer_id = c.id) ORDER BY id LIMIT 1"
        )
        row = connection.execute(query, [self._rng.choice(self._customers)]).fetchone()
        if row is None or len(self._customers) < 2:
            return self._do_customer(connection)
        self._customers.remove(row[0])
        return self._run(connection, ("customers", "d"), "DELETE FROM public.customers WHERE id = %s", [row])

    def _do_add_column(self, connection: Connection) -> None:
        connection.execute("ALTER TABLE public.customers ADD COLUMN loyalty_tier text")
        self._has_tier = True
        rows = [(self._rng.choice(("gold", "silver")), c) for c in self._rng.sample(self._customers, 2)]
        self._run(connection, ("customers", "u"), "UPDATE public.customers SET loyalty_tier = %s WHERE id = %s", rows)

    # Rows

    def _add_customers(self, connection: Connection, count: int) -> None:
        rows = []
        for number in self._next("customers", count):
            name = f"{self._rng.choice(_FIRST_NAMES)} {self._rng.choice(_LAST_NAMES)}"
            # Now and then a note is long enough to be stored out of line, so it isn't sent again with
            # every change.
            note = f"{self._rng.getrandbits(20_000):x}" if self._rng.random() < 0.05 else None
            rows.append((number, f"customer{number}@shop.example", name, self._address(), note))
            self._customers.append(number)
        insert = "INSERT INTO public.customers (id, email, name, address, note) VALUES (%s, %s, %s, %s::jsonb, %s)"
        self._run(connection, ("customers", "c"), insert, rows)

    def _add_products(self, connection: Connection, count: int) -> None:
        rows = []
        for _ in range(count):
            sku, price = self._sku(), self._price()
            colour, thing = self._rng.choice(_COLOURS), self._rng.choice(_THINGS)
            text = f"A {colour} {thing}. {self._rng.getrandbits(800):x}"
            weight = round(self._rng.uniform(0.1, 30), 2)
            rows.append((sku, f"{colour} {thing}", price, self._rng.randint(0, 500), [colour, thing], text, weight))
            self._prices[sku] = price
        self._run(connection, ("products", "c"), "INSERT INTO public.products VALUES (%s,%s,%s,%s,%s,%s,%s)", rows)

    def _add_orders(self, connection: Connection, count: int) -> None:
        orders, items, skus = [], [], [*self._prices]
        for number in self._next("orders", count):
            chosen = self._rng.sample(skus, self._rng.randint(1, min(5, len(skus))))
            lines = [(number, n, sku, self._rng.randint(1, 4), self._prices[sku]) for n, sku in enumerate(chosen, 1)]
            total = sum((line[3] * line[4] for line in lines), Decimal(0))
            orders.append((number, self._rng.choice(self._customers), total))
            items += lines
            self._open.append(number)
        insert = "INSERT INTO public.orders (id, customer_id, status, total) VALUES (%s, %s, 'open', %s)"
        self._run(connection, ("orders", "c"), insert, orders)
        self._run(connection, ("order_items", "c"), "INSERT INTO public.order_items VALUES (%s, %s, %s, %s, %s)", items)
        take = "UPDATE public.products SET stock = stock - %s WHERE sku = %s"
        self._run(connection, ("products", "u"), take, [(line[3], line[2]) for line in items])

    def _run(
        self,
        connection: Connection,
        what: tuple[str, str],
        statement: str,
        rows: Sequence[Sequence[Any]],
        *,
        each: int = 1,
    ) -> None:
        if not rows:
            return
        with connection.cursor() as cursor:
            cursor.executemany(statement, rows)
            assert cursor.rowcount == each * len(rows), f"{statement}: {cursor.rowcount}, not {each * len(rows)}"
        self._note(*what, each * len(rows))

    def _note(self, table: str, op: str, count: int) -> None:
        self._events.setdefault(f"public.{table}", Counter())[op] += count

    def _next(self, table: str, count: int) -> range:
        first = self._last[table] + 1
        self._last[table] += count
        return range(first, first + count)

    def _sku(self) -> str:
        (number,) = self._next("products", 1)
        return f"SKU-{number:06d}"

    def _price(self) -> Decimal:
        return Decimal(self._rng.randint(199, 99_999)) / 100

    def _address(self) -> str:
        return f'{{"street": "{self._rng.choice(_LAST_NAMES)} St {self._rng.randint(1, 99)}", "zip": "{self._rng.randint(10_000, 99_999)}"}}'

    def _take(self, ids: list[int]) -> int:
        place = self._rng.randrange(len(ids))
        ids[place], ids[-1] = ids[-1], ids[place]
        return ids.pop()

    def _look(self, connection: Connection) -> None:
        """Ask the server which rows exist: a transaction ended with unknown outcome."""

        def column(query: str) -> list[Any]:
            return [row[0] for row in connection.execute(query).fetchall()]

        self._customers = column("SELECT id FROM public.customers ORDER BY id")
        self._open = column("SELECT id FROM public.orders WHERE status = 'open' ORDER BY id")
        self._paid = column("SELECT id FROM public.orders WHERE status = 'paid' ORDER BY id")
        self._prices = dict(connection.execute("SELECT sku, price FROM public.products ORDER BY sku").fetchall())
        tier = "SELECT 1 FROM pg_attribute WHERE attrelid = 'public.customers'::regclass AND attname = 'loyalty_tier'"
        self._has_tier = bool(column(tier))
        self._stale = False
