"""``eqlen submit``: requests and calls of the batch script, refusals before submission, and how the batch
scripts start containers. ``tests/slurm`` submits for real."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_eqlen.cli import __main__ as cli
from megatron_eqlen.job import Job, load
from megatron_eqlen.plan.host import host_parts
from megatron_eqlen.plan.memory import memory
from megatron_eqlen.plan.workload import workload
from megatron_eqlen.processes.events import FILE
from megatron_eqlen.processes.run_state import read_state
from megatron_eqlen.recipe.load import load_run
from tests.kit import ROOT

LARGE = str(ROOT / "recipes/qwen3_32b.yaml")
SBATCH = """#!/bin/bash
cat "${@: -1}" >submitted
echo "42;bed"
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """Return the working directory, with none of the batch scripts' variables set."""
    monkeypatch.chdir(tmp_path)
    for name in ("CONTAINER_IMAGE", "CONTAINER_MOUNTS", "EQLEN_PYTHON", "MAX_RESTARTS", "EQLEN_CHECK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def recipe(here) -> str:
    """Return a recipe for a CPU whose inputs exist."""
    shutil.copy(ROOT / "megatron_eqlen/hf/configs/qwen3-0.6b.json", write(here / "base/config.json", ""))
    data = f"[{{name: sums, path: {here}, reader: jsonl}}]"
    text = f"name: small\nsteps: 1\nmodel: {{path: {here}/base}}\ndata: {{sources: {data}}}\n"
    (here / "small.yaml").write_text(text + "cluster: {nodes: 2, device: cpu, cpus_per_process: 3}\n")
    return "small.yaml"


def script(capsys, *arguments: str) -> str:
    assert cli.main(["submit", *arguments, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert ("WARNING: model.path: " in printed.err) == (arguments[0] == LARGE), "what is not there"
    return printed.out


def directives(text: str) -> list[dict[str, str]]:
    """Return the effective ``#SBATCH`` lines, the last of each name, for each component of the job."""
    parts = re.split("^#SBATCH hetjob\n", text, flags=re.MULTILINE)
    lines = [re.findall(r"^#SBATCH (.*)", part, flags=re.MULTILINE) for part in parts]
    return [dict(word.partition("=")[::2] for line in part for word in shlex.split(line)) for part in lines]


def called(text: str) -> list[str]:
    return shlex.split(text.splitlines()[-1])


def test_the_script_asks_for_what_the_plan_counts_and_calls_train_sbatch(capsys, here):
    text = script(capsys, LARGE, "seed=1")
    (asked,) = directives(text)
    recipe = load(LARGE)
    job = Job(recipe)
    host = sum(host_parts(job, memory(job).stages, workload(recipe)).values())
    assert host <= int(asked.pop("--mem").rstrip("G")) * 2**30 < 1.01 * host
    folder = here / "runs/qwen3_32b/eqlen-grpo-seed1"
    expected = {"--nodes": "1", "--ntasks-per-node": "1", "--gpus-per-node": "8", "--cpus-per-task": "64"}
    expected |= {"--time": "24:00:00", "--job-name": "qwen3_32b", "--signal": "B:USR1@600"}
    assert asked.items() >= (expected | {"--output": f"{folder}/slurm-%j.out", "--requeue": ""}).items()
    arguments = [LARGE, "seed=1"]
    assert called(text) == ["exec", "bash", str(ROOT / "slurm/train.sbatch"), *arguments]
    assert not folder.exists()


def test_options_after_two_dashes_have_the_last_word(capsys):
    assert cli.main(["submit", LARGE, "--dry-run", "--", "--time=1:00:00", "--comment", "two words"]) == 0
    text = capsys.readouterr().out
    assert directives(text)[0]["--time"] == "1:00:00"
    assert "#SBATCH --time=1:00:00 --comment 'two words'\n" in text


def test_an_option_with_a_line_break_is_refused(capsys):
    assert cli.main(["submit", LARGE, "--dry-run", "--", "--comment=a\nrm -r b"]) == 2
    said = "sbatch options: expected each in one line, found ['--comment=a\\nrm -r b']"
    assert said in capsys.readouterr().err


def test_servers_are_a_component_of_their_own(capsys):
    more = ["rollout.staleness=1", "loss.rollout_is=token", "rollout.tensor_parallel=4"]
    text = script(capsys, LARGE, "--servers", "2", *more)
    trainer, servers = directives(text)
    assert (trainer["--nodes"], trainer["--gpus-per-node"]) == ("1", "8")
    expected = {"--nodes": "2", "--ntasks-per-node": "2", "--gpus-per-task": "4", "--cpus-per-task": "32"}
    assert servers.items() >= expected.items()
    assert called(text) == ["exec", "bash", str(ROOT / "slurm/het.sbatch"), LARGE, *more]
    assert "rollout.engine=server" in trainer["--output"], "the folder of the run, which has that override"
    assert cli.main(["plan", LARGE, "--servers", "2", *more]) == 0
    assert "eqlen submit RECIPE [KEY=VALUE ...] --servers 2\n" in capsys.readouterr().out


def test_the_script_is_kept_with_its_environment_and_the_job_is_named(recipe, here, monkeypatch, capsys):
    monkeypatch.setenv("PATH", f"{write(here / 'bin/sbatch', SBATCH).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("MAX_RESTARTS", "3")
    assert cli.main(["submit", recipe, "cluster.processes_per_node=2"]) == 0
    kept = here / "runs/small/eqlen-grpo-seed0/submit.sbatch"
    assert (here / "submitted").read_text() == kept.read_text()
    exported = set(re.findall("^export (.*)", kept.read_text(), flags=re.MULTILINE))
    assert exported >= {"MAX_RESTARTS=3", "PROCESSES_PER_NODE=2"}
    (asked,) = directives(kept.read_text())
    assert asked.items() >= {"--nodes": "2", "--cpus-per-task": "6", "--chdir": str(here)}.items()
    assert not asked.keys() & {"--gpus-per-node", "--mem"}
    said = capsys.readouterr().out
    assert cli.main(["plan", recipe, "cluster.processes_per_node=2"]) == 0
    by_hand = "as PROCESSES_PER_NODE=2 sbatch --job-name=small --nodes=2 "
    assert by_hand in capsys.readouterr().out, "without it train.sbatch would start one"
    assert "job 42: " in said
    run = kept.parent.relative_to(here)
    assert f"its output   {run}/slurm-42.out" in said
    assert f"eqlen report {run}\n" in said
    assert load_run(run) == load(recipe, ["cluster.processes_per_node=2"])
    assert cli.main(["status", str(run)]) == 0
    waits = "state       not started\n  job         SLURM job 42 has not started: squeue --job 42, later "
    assert waits in capsys.readouterr().out
    (run / "STOP").touch()
    assert cli.main(["submit", recipe, "cluster.processes_per_node=2"]) == 0
    assert f"removed {run}/STOP, which asked an earlier try to stop" in capsys.readouterr().out
    assert not (run / "STOP").exists()
    assert cli.main(["submit", recipe, "run_dir=my runs/x"]) == 0
    said = capsys.readouterr().out
    assert "eqlen report 'my runs/x'\n" in said, "as a shell reads it"
    assert "touch 'my runs/x/STOP' (" in said


@pytest.mark.parametrize(("more", "message"), [
    (["parallel.tensor=3"], "parallel: tensor 3 x .* = 3 does not divide the 2 processes"),
    (["rollout.tensor_parallel=3", "--servers=1"], "tensor_parallel: 3 is more than .*processes_per_node 1"),
    (["data.sources.0.path=/nowhere"], "data.sources.0.path: /nowhere does not exist"),
    (["strange"], "override 'strange': expected key.sub=value"),
    ([], "sbatch: not found on the PATH; .*small/eqlen-grpo-seed0/submit.sbatch"),
])  # fmt: skip
def test_a_recipe_that_cannot_start_is_refused_before_it_is_submitted(
    recipe, here, monkeypatch, capsys, more, message
):
    sbatch = f"{write(here / 'bin/sbatch', SBATCH).parent}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", sbatch if more else str(here))
    assert cli.main(["submit", recipe, *more]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (here / "submitted").exists()


@pytest.mark.parametrize(("error", "said"), [
    ("invalid partition", "sbatch: error: invalid partition"),
    ("Invalid generic resource (gres) specification", "cluster.device=cpu asks for no GPUs"),
])  # fmt: skip
def test_a_refusal_of_sbatch_is_said(recipe, here, monkeypatch, capsys, error, said):
    refuses = write(here / "bin/sbatch", f"#!/bin/bash\necho 'sbatch: error: {error}' >&2; exit 1\n")
    monkeypatch.setenv("PATH", f"{refuses.parent}:{os.environ['PATH']}")
    assert cli.main(["submit", recipe]) == 2
    assert said in capsys.readouterr().err


# ---- containers ----------------------------------------------------------------------------------------

SRUN = """#!/bin/bash
printf '%s\\n' "$*" >>{folder}/srun
while [[ $1 == --* ]]; do shift; done
for SLURMD_NODENAME in ${{NODES:-n1}}; do
    export SLURMD_NODENAME
    PATH=${{INSIDE:-{folder}/image}} "$@"
    status=$?
done
exit $status
"""
SINFO = """#!/bin/bash
[[ $* == *--partition=gpu* ]] && echo "$UP"
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
    "show hostnames") tr , '\\n' <<<"$3" ;;
    "show job")
        printf '  %s\\n' " Restarts=0 " "Partition=gpu X=1" "ReqNodeList= ExcNodeList=${{LISTED:-(null)}}" ;;
    *) echo "scontrol $*" ;;
esac
"""
PYTHON = """#!/bin/bash
case "$*" in
    *"cli plan"*) echo "run folder  {folder}/run" ;;
    *"cli check"*) exit 1 ;;
    *"cli train"*)
        line='{{"time": 1, "kind": "try", "job": "7", "restart": '"${{LATER:-}}"'}}'
        [ -z "${{LATER:-}}" ] || echo "$line" >>{folder}/run/events.jsonl
        [ -z "${{ERRORS:-}}" ] || echo "$ERRORS" >>{folder}/run/events.jsonl
        exit "${{STATUS:-17}}"
        ;;
esac
"""


def batch(here: Path, name: str, **environ: str) -> tuple[int, list[str], str]:
    """Run a batch script with an srun that runs commands where there is no scontrol, as in an image; returns
    its status, srun's arguments, and what it printed."""
    (here / "image").mkdir(exist_ok=True)
    for tool in {"bash", "cat", "sed", "echo"} - {path.name for path in (here / "image").iterdir()}:
        (here / "image" / tool).symlink_to(shutil.which(tool) or "")
    write(here / "bin/srun", SRUN.format(folder=here))
    write(here / "bin/scontrol", SCONTROL.format())
    write(here / "bin/sinfo", SINFO)
    python = write(here / "python", PYTHON.format(folder=here))
    slurm = {"EQLEN_CHECK": "0", "SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1"}
    path = f"{here}/bin:/usr/bin:/bin"
    ended = subprocess.run(
        ["bash", ROOT / "slurm" / name, "recipe.yaml"],
        env={"PATH": path, "EQLEN_PYTHON": str(python)} | slurm | environ,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return ended.returncode, (here / "srun").read_text().splitlines(), ended.stdout


def test_without_an_image_srun_starts_the_ranks_and_nothing_else(here):
    status, (ranks,), said = batch(here, "train.sbatch")
    assert (status, said.splitlines()[-1]) == (17, "scontrol requeue 7")
    assert ranks.startswith("--kill-on-bad-exit=1 --wait=60 bash -c ")
    assert "container" not in ranks
    command = "-m megatron_eqlen.cli train recipe.yaml cluster.nodes=1 cluster.processes_per_node=1"
    assert ranks.endswith(command)


def test_ranks_of_several_nodes_meet_at_a_store_that_unpickles_nothing(here):
    _, (ranks,), _ = batch(here, "train.sbatch", SLURM_NNODES="2", SLURM_JOB_NODELIST="n[1-2]")
    assert " --rdzv-backend=static " in ranks
    assert "c10d" not in ranks
    assert f" --log-dir={here}/run/.torchrun/7.0 " in ranks, "torchrun leaves its own under TMPDIR"


def test_in_a_container_every_python_runs_in_one_that_the_job_names(here):
    image = {"CONTAINER_IMAGE": "/images/eqlen.sqsh", "CONTAINER_MOUNTS": "/data:/data"}
    status, (plan, ranks), _ = batch(here, "train.sbatch", SLURM_CPUS_PER_TASK="64", **image)
    assert status == 17
    options = (
        f"--container-image=/images/eqlen.sqsh --container-name=eqlen-7 "
        f"--container-mounts={here}:{here},/data:/data --container-workdir={here}"
    )
    assert plan.startswith(f"{options} --nodes=1 --ntasks=1 {here}/python -m megatron_eqlen.cli plan rec")
    assert ranks.startswith(f"{options} --kill-on-bad-exit=1 --wait=60 bash -c ")


def test_an_old_try_in_a_container_hides_its_end_from_the_new_one(here):
    """An image has no scontrol: the run folder says that a later try has begun."""
    assert batch(here, "train.sbatch", CONTAINER_IMAGE="/images/eqlen.sqsh", LATER="1")[0] == 0


def test_the_first_error_of_a_try_is_printed_with_its_traceback(here):
    texts = ['ValueError: "é"\n  File "a\\b.py"\nend', "a later one"]
    lines = [json.dumps({"time": 2.5, "kind": "error", "rank": 3, "text": text}) for text in texts]
    (here / "run").mkdir()
    before = '{"time": 1, "kind": "error", "text": "of a try before"}\n{"time": 1, "ki'
    (here / "run" / FILE).write_text(before)
    *_, said = batch(here, "train.sbatch", ERRORS="\n".join(lines), LC_ALL="C.UTF-8")
    assert f"{texts[0]}\nnot finished (status 17): requeue 1 of 20\n" in said
    state = read_state(here / "run")
    assert (state.first_error, state.stalled_tries, state.waits) == (texts[0], 1, "try")


@pytest.mark.parametrize(("nodes", "up", "listed", "left_out"), [
    ("n1", "n1 alloc\nn2 idle", "", "n1"),
    ("n1", "n1 alloc\nn2 mixed", "n4", "n1,n4"),
    ("n1", "n1 alloc\nn2 drained", "", None),
    ("n1 n2", "n1 alloc\nn2 alloc\nn3 idle\nn4 idle", "", None),
])  # fmt: skip
def test_a_node_that_is_not_ready_ends_the_try_and_is_left_out_where_another_is_up(
    here, nodes, up, listed, left_out
):
    """A node is not left out if none of several is ready: that is not the nodes' fault."""
    environ = {"NODES": nodes, "SLURM_NNODES": str(len(nodes.split())), "UP": up, "LISTED": listed}
    status, (checked,), said = batch(here, "train.sbatch", EQLEN_CHECK="1", **environ)
    assert status == 1
    assert f" {here}/python -m megatron_eqlen.cli check --short recipe.yaml " in checked
    assert "scontrol requeue 7" in said
    updated = [line for line in said.splitlines() if line.startswith("scontrol update")]
    assert updated == [f"scontrol update job=7 ExcNodeList={left_out}"] * (left_out is not None)


def test_a_job_without_gpus_is_checked_as_one(here):
    _, (checked, *_), _ = batch(here, "train.sbatch", EQLEN_CHECK="1", PROCESSES_PER_NODE="2")
    assert checked.endswith("cluster.processes_per_node=2 cluster.device=cpu")
    (here / "srun").unlink()
    on_gpus = {"PROCESSES_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "8"}
    _, (checked, *_), _ = batch(here, "train.sbatch", EQLEN_CHECK="1", **on_gpus)
    assert checked.endswith("cluster.processes_per_node=8")


APPTAINER = """#!/bin/bash
[ "$1" = exec ] || exit 64
while [[ $2 == --* ]]; do [ "$2" = --nv ] || shift; shift; done
echo "$2 $3" >>{folder}/apptainer
exec {folder}/python "${{@:4}}"
"""


def test_the_documented_command_runs_every_python_in_apptainers_image(here):
    """A stand-in for apptainer reads the command's options."""
    text = (ROOT / "docs/cluster.md").read_text()
    lines = text.split("apptainer build ")[1].split("```")[0].splitlines()[1:-1]
    subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=here, check=True)
    write(here / "bin/apptainer", APPTAINER.format(folder=here))
    environ = {"EQLEN_PYTHON": str(here / "eqlen-python"), "INSIDE": f"{here}/bin:/usr/bin:/bin"}
    status, _, said = batch(here, "train.sbatch", **environ)
    assert (status, said.splitlines()[-1]) == (17, "scontrol requeue 7")
    started = (here / "apptainer").read_text().splitlines()
    assert started == ["/images/eqlen.sif /opt/megatron_eqlen/.venv/bin/python"] * 2, "the plan and the ranks"


def test_a_run_that_was_asked_to_stop_is_not_started_again(here):
    """The script ends with success, without an export, and the time limit is far."""
    status, _, said = batch(here, "train.sbatch", STATUS="0")
    assert status == 0
    assert "STOP asked: submit it again to go on" in said
    assert "requeue" not in said


def test_servers_run_in_the_image_too(here):
    write(here / "bin/curl", "#!/bin/bash\nexit 0\n")
    _, (servers, *_), _ = batch(here, "serve.sbatch", CONTAINER_IMAGE="/images/eqlen.sqsh", MAX_RESTARTS="0")
    assert servers.startswith("--container-image=/images/eqlen.sqsh --container-name=eqlen-7 ")
