"""A shop as Python objects: the policy reads and changes orders, and the grade is that of the final orders.

python -m recipes.examples.shop.shop        writes runs/shop/data/train.parquet and test.parquet
"""

import json
import random
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megatron_eqlen.environments.tool_calls import ToolEnvironment, ToolError, tool
from tools.make_search import write_rows
from tools.tokenizer_maker import END_OF_TURN, START_OF_TURN


@dataclass
class Order:
    number: int
    customer: int
    status: Literal["open", "sent", "cancelled"] = "open"


class Shop(ToolEnvironment):
    """The prompt's gold is JSON of all orders, and of those that shall be cancelled in the end."""

    def __init__(self, prompt, seed):
        gold = json.loads(prompt.gold)
        self.orders = {order["number"]: Order(**order) for order in gold["orders"]}
        self.expected = deepcopy(self.orders)
        for number in gold["cancelled"]:
            self.expected[number].status = "cancelled"

    def _order(self, number):
        if number not in self.orders:
            raise ToolError(f"there is no order {number}")
        return self.orders[number]

    @tool
    def find(self, customer: int) -> list[int]:
        """Return the numbers of a customer's orders."""
        return [order.number for order in self.orders.values() if order.customer == customer]

    @tool
    def read(self, number: int) -> Order:
        """Return an order."""
        return self._order(number)

    @tool
    def cancel(self, number: int) -> str:
        """Cancel an order that is open."""
        order = self._order(number)
        if order.status != "open":
            raise ToolError(f"order {number} is {order.status}")
        order.status = "cancelled"
        return "cancelled"

    def grade(self):
        return float(self.orders == self.expected)


# ---- tasks, with demonstrations for a tiny model ---------------------------------------------------------


def demonstrate(customer: int, number: int, rng: random.Random) -> str:
    """Return turns that find and cancel the order, often with a slip; some give up."""
    if rng.random() < 0.3:
        return "Done."
    find = json.dumps({"name": "find", "arguments": {"customer": customer}})
    slip = rng.randrange(10, 100) if rng.random() < 0.3 else number
    cancel = json.dumps({"name": "cancel", "arguments": {"number": slip}})
    said = "cancelled" if slip == number else f"error: there is no order {slip}"
    tool, policy = (f"{END_OF_TURN}\n{START_OF_TURN}{role}\n" for role in ("tool", "assistant"))
    found = f"<tool_call>{find}</tool_call>{tool}[{number}]{policy}"
    return f"{found}<tool_call>{cancel}</tool_call>{tool}{said}{policy}Done."


def make_rows(count: int, rng: random.Random) -> list[dict]:
    rows = []
    for customer in rng.sample(range(100, 1000), count):
        numbers = rng.sample(range(10, 100), 3)
        orders = [Order(number, customer + n) for n, number in enumerate(numbers)]
        gold = {"orders": [*map(asdict, orders)], "cancelled": numbers[:1]}
        rows.append(
            {
                "question": f"Cancel the order of customer {customer}.",
                "final_answer": json.dumps(gold),
                "difficulty": 1.0,
                "topic": "shop",
                **{f"r1_solution_{n + 1}": demonstrate(customer, numbers[0], rng) for n in range(3)},
            }
        )
    return rows


if __name__ == "__main__":
    rows = make_rows(896, random.Random(0))
    write_rows(Path("runs/shop/data/test.parquet"), rows[:128])
    write_rows(Path("runs/shop/data/train.parquet"), rows[128:])
