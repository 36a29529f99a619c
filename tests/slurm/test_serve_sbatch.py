"""``slurm/serve.sbatch`` on a real SLURM, with servers that only report that they are up."""

import re
import shutil
from pathlib import Path

import yaml

from tests.kit.processes import command_line, running, within

SCRIPT = Path(__file__).parents[2] / "slurm/serve.sbatch"
SERVER = Path(__file__).with_name("server.py")


def test_replicas_on_two_nodes_are_listed_started_again_and_ended_together(bed, tmp_path):
    options = ("--nodes=2", "--ntasks-per-node=2", "--overcommit")
    environ = {"EQLEN_PYTHON": str(SERVER), "RESTART_PAUSE": "1", "VLLM_API_KEY": ""}
    script = shutil.copytree(SCRIPT.parent, tmp_path / "a checkout/slurm") / SCRIPT.name
    job = bed.submit(*options, script, tmp_path, folder=tmp_path, **environ)
    urls = tmp_path / f"servers-{job}.yaml"
    bed.wait(urls.exists, "the list of servers")
    listed = [re.fullmatch(r"http://(n\d):(\d+)", url).groups() for url in yaml.safe_load(urls.read_text())]
    assert len({node for node, _ in listed}) == 2
    assert len(listed) == len(set(listed)) == 4

    key = tmp_path / f"servers-{job}.key"
    assert key.stat().st_mode & 0o777 == 0o600
    lines = {pid: command_line(pid) for pid in running()}
    servers = [pid for pid, line in lines.items() if f"{SERVER} -m" in line and str(tmp_path) in line]
    assert {lines[pid].partition("--host ")[2].split()[0] for pid in servers} == {
        f"10.77.0.{node.removeprefix('n')}" for node, _ in listed
    }
    for pid in servers:
        assert f"\0VLLM_API_KEY={key.read_text().strip()}\0" in Path(f"/proc/{pid}/environ").read_text()

    def starts() -> list[list[str]]:
        return [line.split() for line in (tmp_path / "starts").read_text().splitlines()]

    assert sorted(starts()) == sorted([port, node] for node, port in listed)

    node, port = listed[0]
    (tmp_path / f"crash-{node}-{port}").touch()
    bed.wait(lambda: len(starts()) == 5, "the replica is started again")
    assert starts()[-1] == [port, node]

    bed.run("scancel", job)
    assert within(60, lambda: not any(str(SERVER) in command_line(pid) for pid in running()))
