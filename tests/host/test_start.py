"""The cluster of a process, from the environment alone, and messages when it cannot be joined."""

import os
import re
import sys
import types

import jax
import pytest
from distributed import Running, free_port
from jax._src.clusters import cloud_tpu_cluster
from jax._src.lru_cache import LRUCache
from slow_cases import with_slow

from jaxrl_llm.errors import UserError
from jaxrl_llm.host import start
from jaxrl_llm.host.files import cache_folder
from jaxrl_llm.host.start import CLUSTER_VARIABLES, COMPILED, Cluster, find_cluster, start_host

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[01-04]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
GKE = {"TPU_WORKER_HOSTNAMES": "host-0,host-1", "TPU_WORKER_ID": "1"}
METADATA = {
    "agent-worker-number": "1",
    "worker-network-endpoints": "a:0:10.0.0.1,b:1:10.0.0.2,c:2:10.0.0.3,d:3:10.0.0.4",
    "tpu-env": "ACCELERATOR_TYPE: 'v5litepod-16'\nWORKER_ID: '1'",
}
K8S = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}
SLICES = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}


@pytest.fixture
def environment(monkeypatch):
    """`environment(**variables)`: those, and none of another cluster."""

    def set_to(**variables):
        for name in (*CLUSTER_VARIABLES, *SLURM, *OPEN_MPI, *GKE, *SLICES, *K8S):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    set_to()
    return set_to


@pytest.fixture
def tpu_vm(monkeypatch):
    """A machine with TPU chips; `tpu_vm(metadata)` answers for its metadata server, None = 404."""
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)

    def answer(metadata):
        get = lambda key: (metadata[key], 200) if metadata.get(key) is not None else ("not found", 404)
        monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", get)

    answer({})
    return answer


def test_a_laptop_is_no_cluster(environment):
    assert find_cluster() is None


@pytest.mark.parametrize(
    ("variables", "cluster"),
    [
        (SLURM, Cluster("slurm", 4, 2)),
        (OPEN_MPI, Cluster("ompi", 4, 3)),
        (
            dict(zip(CLUSTER_VARIABLES, ("host0:1234", "2", "1"), strict=True)),
            Cluster("JAX_COORDINATOR_ADDRESS", 2, 1, "host0:1234"),
        ),
        ({**SLURM, **dict(zip(CLUSTER_VARIABLES, ("h:1", "1", "0"), strict=True))}, None),  # ours come first
        ({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a pod of its own
        (GKE, None),  # such variables on a machine without TPU chips
    ],
)
def test_variables_that_launchers_set(environment, variables, cluster):
    environment(**variables)
    assert find_cluster() == cluster


def test_gke(environment, tpu_vm):
    environment(**GKE)
    assert find_cluster() == Cluster("gketpu", 2, 1)
    environment(**GKE, **SLICES)
    assert find_cluster() == Cluster("gketpu", 4, 3)
    environment(TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0")
    assert find_cluster() is None


@pytest.mark.filterwarnings("ignore:'maxsplit' is passed:DeprecationWarning")  # jax's own, on Python 3.13
def test_gce_tpu_vms_ask_their_metadata_server(environment, tpu_vm, monkeypatch):
    assert find_cluster() is None  # TPU chips, and no such metadata
    tpu_vm(METADATA)
    assert find_cluster() == Cluster("gcetpu", 4, 1)
    environment(**SLICES)
    assert find_cluster() == Cluster("gcetpu", 8, 5)
    environment(TPU_SKIP_MDS_QUERY="1")
    assert find_cluster() is None
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY")
    tpu_vm({**METADATA, "worker-network-endpoints": "10.0.0.1"})  # a single host
    environment()
    assert find_cluster() is None
    tpu_vm({**METADATA, "worker-network-endpoints": "a:b"})
    with pytest.raises(
        UserError, match=r"process of a gcetpu cluster, .*unsupported worker-network-endpoints"
    ):
        find_cluster()


def test_an_indexed_kubernetes_job(environment, monkeypatch, capsys):
    cluster = start.clusters.K8sCluster
    environment(**K8S)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    assert find_cluster() is None
    assert re.match(r"this process runs alone: .*`kubernetes`\s+package", capsys.readouterr().err)
    fake = types.ModuleType("kubernetes")
    fake.config = types.SimpleNamespace(load_incluster_config=lambda: None)
    fake.client = types.SimpleNamespace(
        CoreV1Api=object, BatchV1Api=object, exceptions=types.SimpleNamespace(ApiException=KeyError)
    )
    monkeypatch.setitem(sys.modules, "kubernetes", fake)
    monkeypatch.setattr(cluster, "get_process_count", lambda: 4)
    assert find_cluster() == Cluster("k8s", 4, 2)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"JAX_PROCESS_ID": "0"},
            "JAX_PROCESS_ID is set but JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES is not",
        ),
        (dict(zip(CLUSTER_VARIABLES, ("h:1", "two", "0"), strict=True)), "JAX_NUM_PROCESSES=two"),
        (dict(zip(CLUSTER_VARIABLES, ("h:1", "2", "2"), strict=True)), "this process's number from 0"),
        (dict(zip(CLUSTER_VARIABLES, ("h", "2", "1"), strict=True)), "host:port of process 0"),
        (
            {**SLURM, "SLURM_NTASKS": "4(x2)"},
            r"a slurm cluster, .*invalid literal.* Set JAX_COORDINATOR_ADDRESS",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "install mpi4py, or set JAX_COORDINATOR_ADDRESS"),
    ],
)
def test_variables_that_make_no_sense(environment, variables, message):
    environment(**variables)
    with pytest.raises(UserError, match=message):
        find_cluster()


def test_a_cluster_is_joined_by_the_method_that_found_it(environment, monkeypatch):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **named: calls.append((args, named)))
    monkeypatch.setattr(jax.config, "update", lambda *a: None)
    environment(**SLURM)
    start_host()
    environment(**dict(zip(CLUSTER_VARIABLES, ("host0:1234", "2", "1"), strict=True)))
    start_host()
    environment()
    start_host()
    assert calls == [
        ((), {"cluster_detection_method": "slurm", "initialization_timeout": 360}),
        (("host0:1234", 2, 1), {"initialization_timeout": 360}),
    ]


WAITS = """
from jaxrl_llm.host import start
start.JOIN_TIMEOUT = 0.5
start.start_host()
"""


@pytest.mark.parametrize("process", with_slow([0, 1], {0}))
def test_a_process_whose_others_do_not_come_says_so(process):
    """One of two processes is started."""
    address = f"localhost:{free_port()}"
    values = zip(CLUSTER_VARIABLES, (address, "2", str(process)), strict=True)
    code, _, err = Running(["-c", WAITS], {**os.environ, **dict(values)}).end(60)
    assert code == 1
    assert err.splitlines()[-1].startswith(
        f"error: process {process} of 2 (detected by JAX_COORDINATOR_ADDRESS) has waited 0.5 s, and not all "
        "others have joined. Start the same command for every process, make sure that they reach process 0 "
        f"at {address}, or set "
    )
    assert "Terminating process" not in err


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_no_part_of_a_compiled_program_is_ever_read(tmp_path, monkeypatch, error):
    """Neither by another process while it is written, nor after a kill or on a full disk."""
    start.write_programs_by_rename()
    cache = LRUCache(str(tmp_path), max_size=-1)
    kind = type(cache.path)
    write, read = kind.write_bytes, []

    def in_two_parts(path, data):
        write(path, data[:3])
        read.append(cache.get("program"))
        if len(read) == 1:
            raise error("killed")
        return write(path, data)

    monkeypatch.setattr(kind, "write_bytes", in_two_parts)
    with pytest.raises(error):
        cache.put("program", b"abcdef")
    cache.put("program", b"abcdef")
    assert read == [None, None] and cache.get("program") == b"abcdef"
    cache.put("program", b"another")
    assert cache.get("program") == b"abcdef" and len(read) == 2
    left = [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"]
    assert len(left) == (error is KeyboardInterrupt)  # as of a kill


def test_compiled_programs_are_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(COMPILED) == tmp_path / "jaxrl_llm" / "compiled"
    settings = {}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setattr(start.jax.config, "update", settings.__setitem__)
    start.open_compilation_cache()
    assert settings["jax_compilation_cache_dir"] == str(tmp_path / "jaxrl_llm" / "compiled")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(COMPILED) == tmp_path / ".cache" / "jaxrl_llm" / "compiled"
