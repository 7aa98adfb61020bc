"""Start-up of a process: it joins the other processes of the run and opens the compilation cache."""

from __future__ import annotations

import os
import sys
import threading
import uuid
import warnings
from typing import NamedTuple

import jax
from jax._src import clusters, lru_cache  # no public function detects a cluster, or sets the cache's files

from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.host.command import quiet_transformers
from jaxrl_llm.host.devices import open_devices
from jaxrl_llm.host.files import cache_folder
from jaxrl_llm.host.processes import show_warnings

COMPILED = "compiled"
"""Name of the `cache_folder` of compiled programs."""
CLUSTER_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
JOIN_TIMEOUT = 300.0  # seconds in which all processes must have started


class Cluster(NamedTuple):
    """Group of processes of one run, as detected by this process."""

    method: str  # jax's name of the cluster ("gcetpu", "slurm", ...), or "JAX_COORDINATOR_ADDRESS"
    num_processes: int
    process_id: int
    address: str = ""  # "host:port" of process 0; "" = jax detects it


def open_compilation_cache() -> None:
    """Share compiled programs with other commands: programs that took 0.1 s or more, in the user's cache
    folder. JAX's variables, if set, name another folder and another minimum time.
    """
    write_programs_by_rename()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder(COMPILED)))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def write_programs_by_rename() -> None:
    """Have JAX write each compiled program by one rename, unless the size of its cache is limited.

    JAX writes in place: other processes could read a partial program, and a kill would leave it there.
    """
    lru_cache.LRUCache.put = _put


def _put(cache: lru_cache.LRUCache, key: str, value: bytes) -> None:
    """Write a program that is not cached yet; replaces `LRUCache.put`."""
    in_bucket = "://" in str(cache.path)  # whose objects are written whole
    if cache.eviction_enabled or in_bucket:  # with eviction a second file belongs to each program
        _jax_put(cache, key, value)
        return
    final = cache.path / f"{key}-cache"
    if final.exists():
        return
    temporary = cache.path / f".{uuid.uuid4().hex}.tmp"
    try:
        temporary.write_bytes(value)
        temporary.replace(final)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


_jax_put = lru_cache.LRUCache.put


def start_host() -> None:
    """Join the other processes of the run, if any, share compiled programs, and open the devices.

    Processes on GCE TPU VMs, GKE, SLURM, Open MPI and in indexed Kubernetes Jobs are detected; elsewhere set
    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.
    JAX_COMPILATION_CACHE_DIR sets the folder of compiled programs ("" = no cache).

    Raises:
        UserError: the variables are incomplete, a cluster does not describe its processes, or JAX_PLATFORMS
            has no devices.
        RunError: jax cannot join the others.
    """
    quiet_transformers()
    show_warnings()
    open_compilation_cache()
    if not jax.distributed.is_initialized() and (cluster := find_cluster()):
        join_cluster(cluster)
    open_devices()


def find_cluster() -> Cluster | None:
    """Return the cluster that the environment describes; None for a run of one process.

    Raises:
        UserError: see `start_host`.
    """
    given = {name: os.environ[name] for name in CLUSTER_VARIABLES if os.environ.get(name)}
    if len(given) == len(CLUSTER_VARIABLES):
        return _from_variables(*given.values())
    mpi = os.environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1"
    for environment in clusters.ClusterEnv._cluster_types:
        chosen = not environment.opt_in_only_method or (mpi and environment.name == "mpi4py")
        if chosen and (cluster := _detect(environment)):
            return cluster if cluster.num_processes > 1 else None
    if mpi:
        raise UserError(
            "Open MPI has started several processes, but jax cannot read the address of the first one: "
            f"install mpi4py, or set {', '.join(CLUSTER_VARIABLES)}"
        )
    if given:
        missing = ", ".join(name for name in CLUSTER_VARIABLES if name not in given)
        raise UserError(
            f"{', '.join(given)} is set but {missing} is not: set all three, or none to run alone"
        )
    return None


def _from_variables(address: str, num_processes: str, process_id: str) -> Cluster | None:
    """Return the cluster of CLUSTER_VARIABLES, None for a single process."""
    try:
        cluster = Cluster(CLUSTER_VARIABLES[0], int(num_processes), int(process_id), address)
    except ValueError:
        cluster = None
    port = address.rpartition(":")[2]
    if cluster is None or not 0 <= cluster.process_id < cluster.num_processes or not port.isdigit():
        raise UserError(
            f"JAX_COORDINATOR_ADDRESS={address} JAX_NUM_PROCESSES={num_processes} "
            f"JAX_PROCESS_ID={process_id}: they must be host:port of process 0, the number of processes, and "
            "this process's number from 0"
        )
    return cluster if cluster.num_processes > 1 else None


def _detect(environment: type[clusters.ClusterEnv]) -> Cluster | None:
    """Return the cluster of one kind, None if this process is in none.

    Raises:
        UserError: the process is in a cluster that does not answer.
    """
    name = environment.name or "k8s"  # the only kind without a name in jax
    if name == "k8s" and "JOB_COMPLETION_INDEX" not in os.environ:
        return None  # a single pod: jax joins the pods of indexed Jobs only
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            present = environment.is_env_present()
        if caught and name == "k8s":  # the package `kubernetes` is missing
            print(f"this process runs alone: {' '.join(str(caught[0].message).split())}", file=sys.stderr)
        if not present:
            return None
        count = environment.get_process_count()
        return Cluster(name, count, environment.get_process_id() if count > 1 else 0)
    except Exception as error:  # of requests, kubernetes, mpi4py, int()
        raise UserError(
            f"this seems to be a process of a {name} cluster, but jax cannot read which one "
            f"({type(error).__name__}: {' '.join(str(error).split())}). Set {', '.join(CLUSTER_VARIABLES)}; "
            "localhost:1234, 1 and 0 run alone."
        ) from error


def join_cluster(cluster: Cluster) -> None:
    """Start `jax.distributed`; end the process with a message if others are missing after JOIN_TIMEOUT.

    Otherwise jax would abort with a stack trace of C++.

    Raises:
        RunError: the address cannot be used.
    """
    jax.config.update("jax_enable_preemption_service", False)  # `host.signals` handles SIGTERM
    timer = threading.Timer(JOIN_TIMEOUT, _end_process, [cluster])
    timer.daemon = True
    timer.start()
    timeout = round(JOIN_TIMEOUT) + 60
    try:
        if cluster.address:
            jax.distributed.initialize(*cluster[3:], *cluster[1:3], initialization_timeout=timeout)
        else:
            method = None if cluster.method == "k8s" else cluster.method
            jax.distributed.initialize(cluster_detection_method=method, initialization_timeout=timeout)
    except RuntimeError as error:
        raise RunError(f"{_describe(cluster)} cannot join the others: {error}") from error
    finally:
        timer.cancel()


def _end_process(cluster: Cluster) -> None:
    """End the process from a thread, while the main thread is inside C++, which no exception reaches."""
    print(
        f"error: {_describe(cluster)} has waited {JOIN_TIMEOUT:g} s, and not all others have joined. Start "
        "the same command for every process, make sure that they reach process 0"
        f"{f' at {cluster.address}' if cluster.address else ''}, or set {', '.join(CLUSTER_VARIABLES)}.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _describe(cluster: Cluster) -> str:
    return f"process {cluster.process_id} of {cluster.num_processes} (detected by {cluster.method})"
