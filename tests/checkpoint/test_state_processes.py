"""Two processes of four devices save one checkpoint together, and restore it on another mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributed import run_processes

from jaxrl_llm.checkpoint.config import CheckpointConfig
from jaxrl_llm.checkpoint.state import Checkpointer

TWO_PROCESSES = """
import sys
import jax.numpy as jnp
import numpy as np
from pathlib import Path
from jax.sharding import NamedSharding, PartitionSpec
from jaxrl_llm.checkpoint.folder import rank_steps
from jaxrl_llm.checkpoint.state import Checkpointer
from jaxrl_llm.checkpoint.config import CheckpointConfig
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

run_dir = Path(sys.argv[1])
state = lambda mesh, spec, n: {
    "w": jax.jit(lambda: jnp.arange(64.0).reshape(8, 8) * n, out_shardings=NamedSharding(mesh, spec))(),
    "count": jax.jit(lambda: jnp.int32(n), out_shardings=NamedSharding(mesh, PartitionSpec()))(),
}
abstract = lambda s: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), s)
saver = Checkpointer(CheckpointConfig(keep=2, best_metric="m"), run_dir)
first = make_mesh(MeshConfig(fsdp=8))
if saver.restore(abstract(state(first, PartitionSpec("fsdp"), 0))) is None:
    for n in range(1, 5):
        saver.save(n, state(first, PartitionSpec("fsdp"), n), {"n": n}, {"m": -abs(n - 2)})
    assert not saver.save(4, state(first, PartitionSpec("fsdp"), 9), {}, {})
else:
    second = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    step, back, meta = saver.restore(abstract(state(second, PartitionSpec("tensor", "fsdp"), 0)))
    want = np.arange(64.0).reshape(8, 8) * step
    assert all((np.asarray(s.data) == want[s.index]).all() for s in back["w"].addressable_shards)
    assert int(back["count"].addressable_data(0)) == step == meta["n"]
    print("restored", step)
saver.close()
print(saver.steps(), rank_steps(saver.folder, "m", "max")[0])
"""


@pytest.mark.slow
def test_two_processes_save_and_restore_together(tmp_path):
    assert run_processes(TWO_PROCESSES, 2, [str(tmp_path)]) == ["[2, 3, 4] 2\n"] * 2
    (tmp_path / "checkpoints/4/meta.json").write_text("{}")
    assert run_processes(TWO_PROCESSES, 2, [str(tmp_path)]) == ["restored 3\n[2, 3] 2\n"] * 2
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {
        "w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=alone),
        "count": jax.ShapeDtypeStruct((), jnp.int32, sharding=alone),
    }
    step, state, _ = Checkpointer(CheckpointConfig(), tmp_path).restore(target)
    assert step == 3
    assert (np.asarray(state["w"]) == np.arange(64.0).reshape(8, 8) * 3).all()
