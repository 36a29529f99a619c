"""Where the processes of real runs listen is what docs/cluster.md says."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from megatron_eqlen.types import Prompt
from tests.kit.jobs import start
from tests.kit.listeners import documented, listeners
from tests.kit.processes import descendants, within
from tests.kit.servers import STARTED
from tests.kit.train_runs import NO_EVALUATION, command

AGENT = [
    "environment.name=agent", "environment.max_given_tokens=8",
    f"environment.options={{function: {__name__}:asks}}",
    "sampling=independent", "objective=grpo",
]  # fmt: skip


def asks(base_url: str, prompt: Prompt, seed: int) -> float:
    messages: list[Any] = [{"role": "user", "content": prompt.question}]
    openai.OpenAI(base_url=base_url, api_key="any").chat.completions.create(model="policy", messages=messages)
    return float(seed % 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_and_its_servers_listen_where_the_page_says_and_nowhere_else(home, served, ranks):
    """The page's roles: ``launcher`` is the command that starts ranks, ``engine`` a server's child."""
    processes = f"cluster.processes_per_node={ranks}"
    job = start(*command(home, f"listens-{ranks}", processes, *served, *AGENT, NO_EVALUATION, "steps=2"))
    found: dict[str, set[str]] = {"launcher": set(), "rank": set(), "server": set(), "engine": set()}

    def look() -> bool:
        for first, parent, child in ((job, "launcher", "rank"), (*STARTED.values(), "server", "engine")):
            for pid in (first.pid, *descendants(first.pid)):
                role = "rank" if ranks == 1 and first is job else parent if pid == first.pid else child
                found[role] |= {address for address, _ in listeners(pid)}
        return job.poll() is not None

    assert within(300, look, every=0.5)  # a look takes long
    assert job.wait() == 0, job.stderr
    assert found == documented()
