"""Scripts of launch/: the restart loop, ssh and SLURM with two processes here, Cloud TPUs, Kubernetes."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from distributed import free_port

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted(
    [*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch"), *ROOT.glob("scripts/**/*.sh"), ROOT / ".ci/run"]
)
PROBE = """
import os, signal, sys, time
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
from jaxrl_llm.host.start import start_host
start_host()
import jax, numpy
from jax.experimental.multihost_utils import process_allgather
total = int(process_allgather(numpy.int32(jax.process_index() + 1)).sum())
devices = os.environ.get("JAX_LOCAL_DEVICE_IDS", "")
with open(f"joined.{jax.process_index()}", "a") as file:
    file.write(f"{jax.process_index()} of {jax.process_count()}, sum {total} {devices} {sys.argv[1]}\\n")
if sys.argv[1] == "wait":
    end = time.time() + 60
    while not stopped and time.time() < end:
        time.sleep(0.05)
sys.stdout.flush()
os._exit(75 if stopped else 0)
"""
"""A process of a run that joins the others, adds their numbers, and perhaps waits for SIGTERM."""


def program(folder, name, text):
    """Write an executable file."""
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def environment(folder, **variables):
    """Return an environment in which the fake programs of a folder come first."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    pythonpath = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    settings = {"PATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": pythonpath}
    return {**os.environ, **settings, **variables}


def run(folder, *words, **variables):
    """Return exit code, stdout and stderr of a command that ends by itself."""
    done = subprocess.run(
        [*map(str, words)], cwd=folder, env=environment(folder, **variables), capture_output=True, text=True,
        timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def wait_for(file, seconds=60):
    end = time.monotonic() + seconds
    while not (file.is_file() and file.read_text()):
        assert time.monotonic() < end, f"no {file}"
        time.sleep(0.05)


@pytest.mark.skipif(
    not (
        shellcheck := shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    ),
    reason="shellcheck is not installed",
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script):
    done = subprocess.run([shellcheck, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# -- the restart loop

ATTEMPTS = """
echo start >>starts
read -r code <codes; sed -i 1d codes
exit "$code"
"""


def restarted(folder, codes, **variables):
    """Return (exit code, number of starts) of a command that ends with these codes, one after the other."""
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    (folder / "starts").write_text("")
    settings = {"RESTART_DELAY": "0", "RESTART_PAUSE": "0", **variables}
    code, _, _ = run(folder, LAUNCH / "restart.sh", "bash", "-c", ATTEMPTS, **settings)
    return code, (folder / "starts").read_text().count("start")


@pytest.mark.parametrize(
    "codes, end",
    [
        ([0], (0, 1)),
        ([75, 75, 0], (0, 3)),
        ([2, 0], (2, 1)),
        ([143, 0], (143, 1)),
        ([130, 0], (130, 1)),
        ([1, 137, 0], (0, 3)),
        ([1, 1, 1, 1, 0], (1, 3)),  # two restarts are allowed in succession
        ([1, 1, 75, 1, 1, 0], (0, 6)),  # saving is progress
    ],
    ids=str,
)
def test_what_is_started_again(codes, end, tmp_path):
    assert restarted(tmp_path, codes, RESTART_MAX="2") == end


def test_a_crash_after_a_long_run_counts_anew(tmp_path):
    assert restarted(tmp_path, [1] * 4 + [0], RESTART_MAX="1", RESTART_RESET="0") == (0, 5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once_and_ends_the_loop(number, tmp_path):
    """The command saves and exits with 75, which is then the end."""
    text = "trap 'echo $sig >>got; exit 75' $sig; echo start >>starts; while :; do sleep 0.05; done"
    name = number.name.removeprefix("SIG")
    inherited = signal.signal(number, signal.SIG_DFL)  # background jobs ignore SIGINT
    loop = subprocess.Popen(
        [LAUNCH / "restart.sh", "bash", "-c", f"sig={name}; {text.replace('$sig;', name + ';')}"],
        cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    signal.signal(number, inherited)
    wait_for(tmp_path / "starts", 10)
    loop.send_signal(number)
    assert loop.wait(10) == 75
    assert (tmp_path / "got").read_text() == f"{name}\n" and (tmp_path / "starts").read_text() == "start\n"


# -- two processes

SSH = """#!/usr/bin/env bash
echo "$*" | head -c 60 >>ssh.log
while [ "$1" = -o ]; do shift 2; done
[ "$1" != gone ] || exit 255
shift
cd / && exec bash -c "$*"
"""
"""A fake ssh: another shell parses the command, in another folder, on this machine."""


def start_hosts(folder, *words, hosts="localhost user@localhost"):
    program(folder, "bin/ssh", SSH)
    (folder / "probe.py").write_text(PROBE)
    env = environment(folder, COORDINATOR_PORT=str(free_port()), SETUP="export FROM_SETUP='a b'")
    with (folder / "out").open("w") as out:
        return subprocess.Popen(
            [LAUNCH / "hosts.sh", hosts, *words], cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT
        )


def test_hosts_have_one_exit_code_and_words_as_they_are(tmp_path):
    """Of two hosts; quotes and spaces reach the command. Bad input and a lost process come before 75."""
    text = 'echo "$JAX_PROCESS_ID/$JAX_NUM_PROCESSES $FROM_SETUP $1"; exit $((JAX_PROCESS_ID ? $2 : $3))'
    for codes, expected in (((0, 0), 0), ((75, 75), 75), ((1, 75), 1), ((75, 0), 75)):
        words = ["bash", "-c", text, "x", 'it\'s $HOME "q"', *map(str, codes)]
        assert start_hosts(tmp_path, *words).wait(20) == expected
    lines = sorted((tmp_path / "out").read_text().splitlines())
    assert lines[:2] == ['0 localhost: 0/2 a b it\'s $HOME "q"', '1 user@localhost: 1/2 a b it\'s $HOME "q"']
    assert start_hosts(tmp_path, "true", hosts="gone localhost").wait(20) == 255


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_two_hosts_by_ssh_join_and_stop_together(ending, tmp_path):
    """Also where the script itself is killed, as where the connection is lost."""
    launcher = start_hosts(tmp_path, sys.executable, "probe.py", "wait")
    for i in range(2):
        wait_for(tmp_path / f"joined.{i}")
        assert (tmp_path / f"joined.{i}").read_text() == f"{i} of 2, sum 3  wait\n"
    launcher.send_signal(ending)
    assert launcher.wait(30) == (-9 if ending == signal.SIGKILL else 75)
    text = (tmp_path / "out").read_text()
    assert ending == signal.SIGKILL or text.count("ended with exit code 75") == 2


SRUN = """#!/usr/bin/env bash
[ "$1" = --kill-on-bad-exit=0 ] && shift
export SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_GPUS_ON_NODE=4
for SLURM_PROCID in 0 1; do
  export SLURM_PROCID
  "$@" &
  echo $! >>step
done
result=0
for pid in $(cat step); do wait "$pid" || result=$?; done
exit $result
"""
SCANCEL = """#!/usr/bin/env bash
echo "scancel $*" >>slurm.log
kill -s TERM $(cat step)
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>slurm.log
"""


def start_job(folder, *words, **variables):
    """Run the batch script as SLURM does, with fake commands."""
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        program(folder, f"bin/{name}", text)
    (folder / "probe.py").write_text(PROBE)
    (folder / "step").unlink(missing_ok=True)
    env = environment(folder, SLURM_JOB_ID=str(free_port() % 4096), **variables)
    return subprocess.Popen([LAUNCH / "slurm.sbatch", *words], cwd=folder, env=env)


def processes_of_step(folder):
    """Return the two processes of a job, once the fake srun has written both."""
    while (text := (folder / "step").read_text()).count("\n") < 2:
        time.sleep(0.05)
    return [int(word) for word in text.split()]


@pytest.mark.slow
def test_two_processes_of_slurm_save_before_their_time_is_over(tmp_path):
    job = start_job(tmp_path, sys.executable, "probe.py", "wait")
    for i in range(2):
        wait_for(tmp_path / f"joined.{i}")
        assert (tmp_path / f"joined.{i}").read_text() == f"{i} of 2, sum 3 0,1,2,3 wait\n"
    processes_of_step(tmp_path)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 75
    log = (tmp_path / "slurm.log").read_text().splitlines()
    assert [line.split()[:2] for line in log] == [["scancel", "--signal=TERM"], ["scontrol", "requeue"]]


@pytest.mark.parametrize(
    "code, restarts, requeued", [(0, 0, 0), (2, 0, 0), (1, 19, 1), (1, 20, 0), (75, 3, 1), (137, 0, 1)]
)
def test_which_jobs_are_put_back_in_the_queue(code, restarts, requeued, tmp_path):
    job = start_job(tmp_path, "bash", "-c", f"exit {code}", SLURM_RESTART_COUNT=str(restarts))
    assert job.wait(20) == code
    assert (tmp_path / "slurm.log").is_file() == bool(requeued)


def test_a_cancelled_job_is_not_put_back(tmp_path):
    """SLURM sends SIGTERM to the processes and to the script."""
    job = start_job(
        tmp_path, "bash", "-c", "trap 'exit 75' TERM; touch up.$SLURM_PROCID; while :; do sleep 0.05; done"
    )
    while not all((tmp_path / f"up.{i}").is_file() for i in range(2)):
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    for pid in processes_of_step(tmp_path):
        os.kill(pid, signal.SIGTERM)
    assert job.wait(20) == 75 and not (tmp_path / "slurm.log").is_file()


# -- Cloud TPUs

GCLOUD = """#!/usr/bin/env bash
echo "$*" >>gcloud.log
shift 2
case "$1 $2" in
  "queued-resources describe") cat state 2>/dev/null ;;
  "queued-resources create") echo ACTIVE >state ;;
  "queued-resources delete") rm -f state ;;
  "tpu-vm ssh") for word in "$@"; do last=$word; done; bash -c "${last#--command=}" ;;
esac
"""
TPU = {"TPU": "t", "ZONE": "z", "TYPE": "v5litepod-16", "VERSION": "v", "SPOT": "1", "POLL": "0"}


def test_a_preempted_tpu_is_created_again(tmp_path):
    """A spot TPU that is gone while the command runs; the second time the command ends well."""
    program(tmp_path, "bin/gcloud", GCLOUD)
    text = 'echo "$1" >>ran; if [ -f before ]; then exit 0; fi; touch before; echo SUSPENDED >state; exit 1'
    words = ["forever", "echo setup >>ran", "bash", "-c", text, "x", "a b"]
    code, _, errors = run(tmp_path, LAUNCH / "tpu.sh", *words, **TPU)
    assert code == 0 and "exit code 1, the TPU is SUSPENDED; beginning anew" in errors
    assert (tmp_path / "ran").read_text().splitlines() == ["setup", "a b"] * 2
    calls = (tmp_path / "gcloud.log").read_text().splitlines()
    changes = [line.split()[3] for line in calls if "describe" not in line and "tpu-vm" not in line]
    assert changes == ["create", "delete", "create"]
    create = next(line for line in calls if "create" in line)
    assert create == (
        "compute tpus queued-resources create t --node-id=t --zone=z --accelerator-type=v5litepod-16 "
        "--runtime-version=v --spot"
    )
    assert all("--zone=z --worker=all --command=" in line for line in calls if "tpu-vm" in line)


def test_a_command_that_fails_at_once_on_a_tpu_that_is_there_is_given_up(tmp_path):
    """gcloud need not tell bad input from a lost process."""
    program(tmp_path, "bin/gcloud", GCLOUD)
    words = ["forever", "true", "bash", "-c", "echo x >>ran; exit 1"]
    assert run(tmp_path, LAUNCH / "tpu.sh", *words, **TPU, RESTART_MAX="2")[0] == 1
    assert (tmp_path / "ran").read_text().count("x") == 3


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["setup"], ["setup", "pip", "install"], ["run"], ["forever", "true"]], ids=str
)
def test_words_that_are_missing_end_before_any_call(words, tmp_path):
    """Also where TPU is not set yet. An empty command would end at once, again and again."""
    program(tmp_path, "bin/gcloud", GCLOUD)
    for variables in ({}, TPU):
        code, _, errors = run(tmp_path, LAUNCH / "tpu.sh", *words, **variables)
        assert code == 2 and errors.startswith("usage: launch/tpu.sh create | setup COMMAND")
    assert not (tmp_path / "gcloud.log").exists()


def test_no_host_is_bad_input(tmp_path):
    code, _, errors = run(tmp_path, LAUNCH / "hosts.sh", "", "true")
    assert code == 2 and errors == 'hosts.sh: no host is named; give them in one word: "gpu0 gpu1"\n'


def test_stopping_a_pod_signals_the_command_alone(tmp_path):
    program(tmp_path, "bin/gcloud", GCLOUD.replace("/tmp/", f"{tmp_path}/"))
    text = "trap 'exit 75' TERM; touch up; while :; do sleep 0.05; done"
    env = environment(tmp_path, **TPU, PID_FILE=str(tmp_path / "pid"))
    pod = subprocess.Popen([LAUNCH / "tpu.sh", "run", "bash", "-c", text], cwd=tmp_path, env=env)
    while not (tmp_path / "up").is_file():
        time.sleep(0.05)
    assert run(tmp_path, LAUNCH / "tpu.sh", "stop", **TPU, PID_FILE=str(tmp_path / "pid"))[0] == 0
    assert pod.wait(10) == 75


def test_a_request_that_fails_ends_the_waiting(tmp_path):
    program(tmp_path, "bin/gcloud", GCLOUD.replace("echo ACTIVE", "echo FAILED"))
    code, _, errors = run(tmp_path, LAUNCH / "tpu.sh", "create", **TPU)
    assert code == 1 and "the request for t is FAILED" in errors


# -- Kubernetes


@pytest.mark.parametrize("name, hosts", [("jobset_tpu.yaml", 4), ("jobset_gpu.yaml", 2)])
def test_jobsets_have_one_process_on_each_host(name, hosts):
    """Any pod that fails ends the job, so that all start again; only bad input ends the JobSet."""
    jobset = yaml.safe_load((LAUNCH / name).read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["completionMode"], job["backoffLimit"]) == ("Indexed", 0)
    assert job["completions"] == job["parallelism"] == hosts
    (policy,) = job["podFailurePolicy"]["rules"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    exit_codes = {"containerName": container["name"], "operator": "In", "values": [2]}
    assert policy == {"action": "FailJob", "onExitCodes": exit_codes} and pod["restartPolicy"] == "Never"
    assert container["command"] == ["python", "-m", "jaxrl_llm.train"]
    (chips,) = container["resources"]["limits"].values()
    if name == "jobset_tpu.yaml":
        rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
        assert rows * columns == chips * hosts
    else:
        values = {entry["name"]: entry.get("value") for entry in container["env"]}
        service = jobset["metadata"]["name"]
        assert values["JAX_COORDINATOR_ADDRESS"].startswith(f"{service}-{replicated['name']}-0-0.{service}:")
        assert values["JAX_NUM_PROCESSES"] == str(hosts) and "job-completion-index" in json.dumps(container)
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
